"""A token goes to each rank that it visits straight away: across the network once for each of them.

fails: test_forward_sends_each_token_once, test_backward_sends_no_more
"""

from solution import *  # noqa: F403
from solution import moe_layer as in_two_hops


def moe_layer(comm, part, placement, node):
    """The layer's output for this rank's tokens; with part["dy"] also the gradients."""
    return in_two_hops(comm, part, placement, 1)
