"""Checks of the book's exercises, inside the notebook: they say at once whether an answer is right, or why not.

A chapter states what is asked for as a function of the answer that asserts; `attempt` runs it and prints one line.
The chapter's own solution goes through the same check, so a wrong solution can't be published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["attempt"]


def attempt(exercise: str, check: Callable[[Any], None], answer: Any = ...) -> None:
    """Print whether `answer` passes `check`, in one line.

    Args:
        exercise: its number, such as "2.1".
        check: called with the answer; an AssertionError's message says what is missing.
        answer: a value or a function. `...`, or a function that raises NotImplementedError, is no answer yet.

    >>> def check(n):
    ...     assert n == 6, "2(N - 1) with N = 4"
    >>> attempt("0.0", check, ...)
    Exercise 0.0: no answer yet.
    >>> attempt("0.0", check, 5)
    Exercise 0.0: not yet. 2(N - 1) with N = 4
    >>> attempt("0.0", check, 6)
    Exercise 0.0: correct.
    """
    if answer is ...:
        verdict = "no answer yet."
    else:
        try:
            check(answer)
            verdict = "correct."
        except AssertionError as error:
            verdict = f"not yet. {error}"
        except NotImplementedError:
            verdict = "no answer yet."
        except TypeError as error:
            if "object is not callable" not in str(error) or callable(answer):
                verdict = f"your code raised TypeError: {error}"
            else:
                verdict = f"a function is asked for; this is a {type(answer).__name__}."
        except Exception as error:  # the reader's code: whatever it raised is what they need to see
            if isinstance(error.__cause__, NotImplementedError):
                verdict = "no answer yet."
            else:
                verdict = f"your code raised {type(error).__name__}: {error}"
    print(f"Exercise {exercise}: {verdict}")
