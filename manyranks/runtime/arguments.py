"""What `simulate` and `launch` ask of their arguments, said in the same words by both."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from manyranks.runtime.hardware import check_count

__all__ = ["check_inputs", "check_program"]


def check_program(program: Any, inputs: Any, shared: dict[str, Any]) -> None:
    """TypeError unless `program` is a plain function that takes (comm, inputs[rank], **shared)."""
    if not callable(program):
        raise TypeError(f"program must be a function of a communicator, got {program!r}")
    for body in (program, type(program).__call__):
        if inspect.isgeneratorfunction(body) or inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
            raise TypeError(f"program must be a plain function, got a generator or async one, {program!r}: no yield, no await")
    try:
        signature = inspect.signature(program)
    except (TypeError, ValueError):  # some built-in functions don't tell
        return
    try:
        signature.bind(*(("comm",) if inputs is None else ("comm", "inputs[rank]")), **shared)
    except TypeError as error:
        called = ", ".join(["comm", *([] if inputs is None else ["inputs[rank]"]), *(f"{name}=..." for name in shared)])
        hint = " Give inputs=[...], one entry for each rank, or keywords." if inputs is None else ""
        name = getattr(program, "__name__", "program")
        raise TypeError(f"program can't be called as {name}({called}), for it is {name}{signature}: {error}.{hint}") from None


def check_inputs(inputs: Any, ranks: Any = None) -> int | None:
    """How many ranks `inputs` and `ranks` ask for (None if neither does); TypeError or ValueError if they don't fit."""
    if ranks is not None:
        ranks = check_count("ranks", ranks)
    if inputs is None:
        return ranks
    rows = len(getattr(inputs, "shape", ())) >= 2  # an array's rows will do; the numbers of a flat one are a slip
    if not (rows or isinstance(inputs, Sequence)) or isinstance(inputs, (str, bytes)):
        flat = "a flat array: its entries would be numbers" if hasattr(inputs, "shape") else type(inputs).__name__
        raise TypeError(f"inputs must be a list or tuple with one entry for each rank, got {flat}")
    if len(inputs) == 0:
        raise ValueError("inputs must have at least one entry, got none")
    if ranks is not None and len(inputs) != ranks:
        raise ValueError(f"inputs must have one entry for each of the {ranks} ranks, got {len(inputs)}")
    return len(inputs)
