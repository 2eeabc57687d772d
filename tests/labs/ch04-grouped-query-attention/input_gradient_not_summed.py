"""Returns its own heads' share of dx.

fails: test_gradient_of_the_input_equals_dense, test_attention_sends_no_more_than_needed
"""

import solution
from solution import *  # noqa: F403


def attention_step(comm, part, x, dy, heads, kv_heads, real=solution.attention_step):
    class Once:
        """Sums the first activation only."""

        done = False

        def __getattr__(self, name):
            return getattr(comm, name)

        def all_reduce(self, x):
            self.done, again = True, self.done
            return x if again else comm.all_reduce(x)

    return real(Once(), part, x, dy, heads, kv_heads)
