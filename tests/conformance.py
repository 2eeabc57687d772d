"""What every collective must give, for both worlds: rank programs, and the same result from plain NumPy.

A case is a plain dict, so that a list of them can travel to real ranks. `run_cases` is the rank program; `expected`
computes, from all ranks' inputs, what each member of the group must get. Data are small whole numbers, different on
each rank, so that results are equal and not only close. No pytest here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from manyranks.runtime.comm import ALGORITHMS, CLOSED_FORMS

DTYPES = ("float32", "float64", "int64")
# 0-d, empty, fewer elements than ranks, remainders, two and three dimensions
SHAPES = ((), (0,), (1,), (3,), (7,), (8,), (13,), (2, 3), (5, 2), (0, 4), (3, 0), (4, 1, 3))
OPS = ("sum", "max", "min", "prod", "mean")


def data(rank: int, shape: tuple[int, ...], dtype: str, salt: int = 0) -> np.ndarray:
    """The array of a rank: whole numbers from 1 to 3, other ones on each rank."""
    size = int(np.prod(shape, dtype=np.int64))
    values = (np.arange(size) * (rank + 2) + 7 * rank + salt) % 3 + 1
    return values.astype(dtype).reshape(shape)


def rows_of(case: dict, rank: int) -> tuple[int, ...]:
    """The shape that a rank gives: where lengths may differ, they do."""
    shape = tuple(case["shape"])
    if case.get("uneven") and shape:
        return ((shape[0] + 2 * rank) % 5, *shape[1:])
    return shape


def call(comm: Any, case: dict) -> Any:
    """Make the collective call of `case` on this rank of a group."""
    r, dtype, name = comm.rank, case["dtype"], case["name"]
    if "root" in case:
        case = {**case, "root": case["root"] % comm.size}
    options = {"algorithm": case["algorithm"]} if name != "barrier" else {}
    if case.get("async"):
        options["async_op"] = True
    x = comm.xp.asarray(data(r, rows_of(case, r), dtype))
    if name in ("all_reduce", "reduce_scatter"):
        out = getattr(comm, name)(x, op=case["op"], **options)
    elif name == "reduce":
        out = comm.reduce(x, case["root"], op=case["op"], **options)
    elif name == "all_gather":
        out = comm.all_gather(x, **options)
    elif name == "gather":
        out = comm.gather(x, case["root"], **options)
    elif name in ("broadcast", "scatter"):
        out = getattr(comm, name)(x if r == case["root"] else None, case["root"], **options)
    elif name == "all_to_all":
        out = comm.all_to_all([comm.xp.asarray(part) for part in parts(case, r, comm.size)], **options)
    else:
        out = comm.barrier(**options)
    return out.wait() if case.get("async") else out


def parts(case: dict, rank: int, size: int) -> list[np.ndarray]:
    """What a rank sends to each other rank in all_to_all: no two of one shape."""
    shape = tuple(case["shape"])
    return [data(rank, (*shape, (rank + 2 * to) % 4), case["dtype"], salt=to) for to in range(size)]


def combine(xs: list[np.ndarray], op: str) -> np.ndarray:
    """Element-wise reduction in plain NumPy."""
    stack = np.stack(xs)
    if op == "mean":
        return (stack.sum(axis=0) / len(xs)).astype(stack.dtype)
    return getattr(stack, op)(axis=0).astype(stack.dtype)


def expected(case: dict, size: int) -> list[Any]:
    """What each of `size` members must get."""
    name, dtype, root = case["name"], case["dtype"], case.get("root", 0)
    xs = [data(r, rows_of(case, r), dtype) for r in range(size)]
    if name == "barrier":
        return [None] * size
    if name == "all_to_all":
        sent = [parts(case, r, size) for r in range(size)]
        return [[sent[src][r] for src in range(size)] for r in range(size)]
    if name in ("all_gather", "gather"):
        whole = np.concatenate([np.atleast_1d(x) for x in xs])
        return [whole if name == "all_gather" or r == root else None for r in range(size)]
    if name == "broadcast":
        return [xs[root]] * size
    if name == "scatter":
        return np.array_split(xs[root], size)
    total = combine(xs, case["op"])
    if name == "reduce_scatter":
        return np.array_split(total, size)
    return [total if name == "all_reduce" or r == root else None for r in range(size)]


def allowed(case: dict) -> bool:
    """Whether the case is one that `Comm` takes."""
    if case["name"] in ("reduce_scatter", "scatter") and case["shape"] == ():
        return False
    return not (case.get("op") == "mean" and not case["dtype"].startswith("float"))


def variants(name: str, sizes: int) -> Iterator[dict]:
    """The arguments of a collective other than its array."""
    for algorithm in ("auto", *ALGORITHMS[name]):
        if algorithm in CLOSED_FORMS:
            continue
        if name in ("all_reduce", "reduce_scatter"):
            yield from ({"algorithm": algorithm, "op": op} for op in OPS)
        elif name == "reduce":
            yield from (
                {"algorithm": algorithm, "op": op, "root": (i + 1) % sizes} for i, op in enumerate(OPS)
            )
        elif name in ("broadcast", "scatter", "gather"):
            yield from ({"algorithm": algorithm, "root": root} for root in sorted({0, sizes - 1}))
        else:
            yield {"algorithm": algorithm}


def all_cases(size: int, thin: int = 1) -> list[dict]:
    """Every collective, algorithm, op, dtype and shape for so many ranks; with `thin`, every so many-th of them.

    `thin` should share no factor with the number of dtypes and shapes, so that all of them stay represented.
    """
    out = []
    for name in ALGORITHMS:
        for variant, shape, dtype in itertools.product(variants(name, size), SHAPES, DTYPES):
            for uneven in (False, True) if name in ("all_gather", "gather") else (False,):
                case = {"name": name, "shape": shape, "dtype": dtype, "uneven": uneven, **variant}
                if allowed(case):
                    out.append(case)
    out = out[::thin]
    for i, case in enumerate(out):
        case["async"] = i % 5 == 3
    return out


def groups_of(size: int) -> list[tuple[int, ...]]:
    """Groups of a run: strided, reversed, mixed up, a single rank, all."""
    found = [
        tuple(range(0, size, 2)),
        tuple(reversed(range(size))),
        tuple(sorted(range(size), key=lambda r: (r * 5 + 3) % size)),
        (size - 1,),
        tuple(range(1, size)),
    ]
    return [g for g in dict.fromkeys(found) if g]


def run_cases(comm: Any, cases: list[dict], groups: list | None = None) -> list[Any]:
    """Rank program: all cases in one run. With groups, each case in each of them; None where the rank isn't in it."""
    if groups is None:
        return [call(comm, case) for case in cases]
    made = [comm.group(list(members)) for members in groups]
    return [[call(g, case) for case in cases] if g is not None else None for g in made]


def run_nested(comm: Any, cases: list[dict]) -> list[Any]:
    """Rank program: a reversed group of the even ranks of a reversed group, beside the same of the odd ones."""
    backwards = comm.group(list(reversed(range(comm.size))))
    inner = backwards.group([r for r in reversed(range(comm.size)) if r % 2 == backwards.rank % 2])
    return [inner.ranks, [call(inner, case) for case in cases]]


def differences(got: Any, wanted: Any) -> str:
    """What is wrong with a result; "" if nothing is."""
    if wanted is None or got is None:
        return "" if got is wanted else f"got {got!r}, expected {wanted!r}"
    if isinstance(wanted, list):
        if not isinstance(got, list) or len(got) != len(wanted):
            return f"got {got!r}, expected {wanted!r}"
        return next((text for text in map(differences, got, wanted) if text), "")
    if not isinstance(got, np.ndarray):
        return f"got a {type(got).__name__}"
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"got {got.dtype} {got.shape}, expected {wanted.dtype} {wanted.shape}"
    return "" if np.array_equal(got, wanted) else f"got {got.tolist()}, expected {wanted.tolist()}"


def check_cases(results: list[Any], cases: list[dict], members: tuple[int, ...] | None = None) -> list[str]:
    """What is wrong with the results of `run_cases`, one list of results for each member."""
    size = len(results)
    wrong = []
    for i, case in enumerate(cases):
        for r, wanted in enumerate(expected(case, size)):
            text = differences(results[r][i], wanted)
            if text:
                wrong.append(f"{case} on rank {r} of {members or size}: {text}")
    return wrong
