# Generated from chapters/08_overlap_and_frameworks.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""Number formats of training: range and spacing, loss scaling, sums in short formats, 8-bit tensors with a scale."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from manyranks.collectives import ring_all_gather, split
from manyranks.runtime import Array, Comm

__all__ = [
    "FORMATS",
    "Format",
    "LossScaler",
    "Quantized",
    "number_format",
    "quantize",
    "ring_error_bound",
    "rounded",
    "spacing",
    "sum_in_fp32",
]

FORMATS: dict[str, np.dtype] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
"""The formats of training by the names they are called, as NumPy types."""


class Format(NamedTuple):
    """What a floating-point format can hold.

    Attributes:
        name: a key of `FORMATS`.
        bits: of a number.
        exponent, fraction: how many of them are exponent and fraction.
        largest: the largest finite number.
        normal: the smallest number with full precision.
        smallest: the smallest number above zero.
        epsilon: the step from 1 to the next number.
    """

    name: str
    bits: int
    exponent: int
    fraction: int
    largest: float
    normal: float
    smallest: float
    epsilon: float


def number_format(name: str) -> Format:
    """The properties of a format, read from its type.

    Args:
        name: a key of `FORMATS`.

    >>> number_format("bf16")[:4]
    ('bf16', 16, 8, 7)
    >>> number_format("e4m3").largest
    448.0
    """
    if name not in FORMATS:
        raise ValueError(f"name must be one of {', '.join(FORMATS)}, got {name!r}")
    info = ml_dtypes.finfo(FORMATS[name])
    return Format(
        *(name, info.bits, info.bits - 1 - info.nmant, info.nmant),
        *(float(info.max), float(info.smallest_normal)),
        *(float(info.smallest_subnormal), float(info.eps)),
    )


def rounded(x: Any, name: str) -> np.ndarray:
    """`x` rounded to a format and back: what is left of it.

    Args:
        x: numbers.
        name: a key of `FORMATS`.

    Returns: float64, of the shape of `x`. What is too large becomes infinite, or NaN in
    E4M3, which has no infinity.

    >>> rounded([0.1, 300.0, 1e5], "fp16").tolist()
    [0.0999755859375, 300.0, inf]
    """
    if name not in FORMATS:
        raise ValueError(f"name must be one of {', '.join(FORMATS)}, got {name!r}")
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float64).astype(FORMATS[name]).astype(np.float64)


def spacing(x: Any, name: str) -> np.ndarray:
    """The distance between neighbouring numbers of a format at the magnitude of `x`.

    2^(e - f) for 2^e <= abs(x) < 2^(e+1) and f bits of fraction, and no less than the
    smallest number.

    Args:
        x: finite numbers within the format's range.
        name: a key of `FORMATS`.

    >>> spacing([1.0, 1000.0, 0.0], "fp16").tolist()
    [0.0009765625, 0.5, 5.960464477539063e-08]
    """
    has = number_format(name)
    size = np.maximum(np.abs(np.asarray(x, np.float64)), has.normal)
    if not (size <= has.largest).all():
        raise ValueError(f"x must be at most {has.largest:g} in {name}, got {size.max():g}")
    _, exponent = np.frexp(size)  # size = m * 2^exponent with m in [1/2, 1)
    return np.ldexp(1.0, exponent - 1 - has.fraction)


class LossScaler:
    """Dynamic loss scaling: multiply the loss, look for overflow, skip, back off, grow.

    Makes the decisions of ``torch.amp.GradScaler`` (Micikevicius et al., 2018).

    Args:
        scale: at the start; GradScaler's default is 65536.
        growth: factor after `interval` good steps in a row.
        backoff: factor after a step with an infinity or NaN.
        interval: good steps before the scale grows.

    Attributes:
        scale: the present one.
        skipped: how many steps were skipped so far.

    >>> scaler = LossScaler(scale=8.0, interval=2)
    >>> for finite in (True, True, False, True):
    ...     scaler.update(finite)
    ...     print(scaler.scale)
    8.0
    16.0
    8.0
    8.0
    """

    def __init__(
        self,
        scale: float = 65536.0,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ) -> None:
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"scale must be a positive number, got {scale}")
        if growth <= 1:
            raise ValueError(f"growth must be above 1, got {growth}")
        if not 0 < backoff < 1:
            raise ValueError(f"backoff must be between 0 and 1, got {backoff}")
        if interval < 1:
            raise ValueError(f"interval must be 1 step or more, got {interval}")
        self.scale, self.growth, self.backoff = scale, growth, backoff
        self.interval = interval
        self.good = 0
        self.skipped = 0

    def unscale(self, gradients: Sequence[Array]) -> tuple[list[np.ndarray], bool]:
        """The gradients divided by the scale in fp32, and whether all are finite.

        In a parallel job every rank must come to the same verdict: reduce it with
        ``op="min"`` over all ranks before anyone steps.
        """
        longer = [np.asarray(g).astype(np.float32) for g in gradients]
        finite = all(bool(np.isfinite(g).all()) for g in longer)
        return [g / np.float32(self.scale) for g in longer], finite

    def update(self, finite: bool) -> None:
        """Tell how the step went: sets the scale of the next one."""
        if not finite:
            self.scale *= self.backoff
            self.good = 0
            self.skipped += 1
            return
        self.good += 1
        if self.good == self.interval:
            self.scale *= self.growth
            self.good = 0


def ring_error_bound(ranks: int, name: str) -> float:
    """Largest error of a ring's sum in a format, relative to the sum of magnitudes.

    (1 + u)^(N - 1) - 1, about (N - 1) u, with u half of the format's epsilon (Higham,
    2002), as long as nothing leaves the range.

    >>> round(ring_error_bound(9, "bf16"), 4)
    0.0317
    """
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")
    u = number_format(name).epsilon / 2
    return math.expm1((ranks - 1) * math.log1p(u))


def sum_in_fp32(comm: Comm, x: Array) -> Array:
    """An all-reduce that sends a short format and adds up in fp32; a rank program.

    Every rank gets all ranks' parts of its chunk by an all-to-all, adds them in fp32,
    rounds once, and the finished chunks go around in an all-gather. Each half sends
    (N - 1)/N of the array, as the ring does.

    Args:
        comm: the communicator, of N ranks.
        x: shape (length,), of any of the `FORMATS`' types.

    Returns: the sum, of the shape and type of `x`.
    """
    parts = comm.all_to_all(split(x, comm.size))
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    chunks = split(comm.copy(x), comm.size)
    chunks[comm.rank][:] = total.astype(x.dtype)
    ring_all_gather(comm, chunks)
    return comm.xp.concat(chunks)


class Quantized(NamedTuple):
    """A tensor in a short format with one scale: value = stored / scale.

    Attributes:
        stored: array of one of the `FORMATS`' types.
        scale: what the values were multiplied with.
    """

    stored: np.ndarray
    scale: float

    def values(self) -> np.ndarray:
        """The numbers that it stands for, float64."""
        return self.stored.astype(np.float64) / self.scale


def quantize(x: Any, name: str, amax: float | None = None) -> Quantized:
    """A tensor in a short format, scaled so that `amax` becomes the largest number.

    Args:
        x: finite numbers.
        name: a key of `FORMATS`.
        amax: the largest magnitude to make room for; that of `x` by default. With a
            smaller one, from an earlier step, larger numbers saturate.

    Returns: the numbers, with a scale that is a power of two.

    >>> q = quantize([0.001, -0.002], "e4m3")
    >>> q.scale, q.values().tolist()
    (131072.0, [0.0009765625, -0.001953125])
    """
    x = np.asarray(x, np.float64)
    if not np.isfinite(x).all():
        raise ValueError("x must be finite numbers, got infinity or NaN")
    if amax is not None and not (math.isfinite(amax) and amax > 0):
        raise ValueError(f"amax must be a positive number, got {amax}")
    largest = number_format(name).largest
    found = float(np.abs(x).max(initial=0.0)) if amax is None else amax
    scale = 1.0
    if found > 0:  # largest / found is infinite where found is subnormal
        order = math.log2(min(largest / found, 2.0**1023))
        scale = 2.0 ** math.floor(order)
    return Quantized(np.clip(x * scale, -largest, largest).astype(FORMATS[name]), scale)
