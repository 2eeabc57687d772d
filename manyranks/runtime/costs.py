"""Closed-form predictions of collective times in the alpha-beta model, and the fit of alpha and beta.

Every function here **predicts**: alpha seconds of latency a message, `bytes / beta` seconds on a full-duplex
port that carries one message at a time, nothing for the arithmetic of a reduction. `bytes` is the size S of
the whole buffer on each rank (a number or an array), `ranks` is n, `alpha` is in seconds, `beta` in bytes/s,
and the result is in seconds, of the shape of `bytes`. With n = 1 nothing moves and the time is 0.

    >>> S, n, alpha, beta = 1e9, 8, 1e-6, 100e9
    >>> round(1e3 * naive_all_reduce_seconds(S, n, alpha, beta), 3)              # milliseconds
    140.002
    >>> round(1e3 * tree_all_reduce_seconds(S, n, alpha, beta), 3)
    60.006
    >>> round(1e3 * halving_doubling_all_reduce_seconds(S, n, alpha, beta), 3)
    17.506
    >>> round(1e3 * ring_all_reduce_seconds(S, n, alpha, beta), 3)
    17.514

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, IJHPCA
19(1), 2005.
"""

from __future__ import annotations

import numpy as np

from manyranks.runtime.hardware import check_count, check_number


def check_sizes(name: str, sizes) -> np.ndarray:
    """`sizes` (a number or an array of them) as float64, finite and >= 0, or an error that names `name`."""
    array = np.asarray(sizes)
    if array.dtype.kind not in "iuf":
        raise TypeError(
            f"{name} must be a number or an array of numbers, got {sizes!r} ({type(sizes).__name__})"
        )
    array = array.astype(np.float64)
    if not np.all(np.isfinite(array)) or np.any(array < 0):
        raise ValueError(f"{name} must be finite and >= 0, got {sizes!r}")
    return array


def like(value: np.ndarray) -> float | np.ndarray:
    """A plain float for a 0-d array, the array itself otherwise."""
    return float(value) if np.ndim(value) == 0 else value


def _inputs(bytes, ranks, alpha, beta):
    return (
        check_sizes("bytes", bytes),
        check_count("ranks", ranks),
        check_number("alpha", alpha),
        check_number("beta", beta, positive=True),
    )


def naive_all_reduce_seconds(bytes, ranks: int, alpha: float, beta: float):
    """Prediction: all ranks send to rank 0, which sends the sum to all: 2 (alpha + (n - 1) S / beta).

    The n - 1 messages arrive one after another on rank 0's port, and leave it one after another; their
    latencies overlap.
    """
    size, n, alpha, beta = _inputs(bytes, ranks, alpha, beta)
    return like(size * 0 if n == 1 else 2 * (alpha + (n - 1) * size / beta))


def tree_all_reduce_seconds(bytes, ranks: int, alpha: float, beta: float):
    """Prediction: a binomial tree, up to reduce and down to broadcast: 2 ceil(log2 n) (alpha + S / beta).

    Whole buffers, no pipelining. Exact for n a power of two, an upper bound otherwise (some latencies less).
    """
    size, n, alpha, beta = _inputs(bytes, ranks, alpha, beta)
    return like(2 * (n - 1).bit_length() * (alpha + size / beta))


def ring_reduce_scatter_seconds(bytes, ranks: int, alpha: float, beta: float):
    """Prediction: n - 1 steps of S/n around a ring: (n - 1) (alpha + S / (n beta)). S is the whole input."""
    size, n, alpha, beta = _inputs(bytes, ranks, alpha, beta)
    return like((n - 1) * (alpha + size / (n * beta)))


def ring_all_gather_seconds(bytes, ranks: int, alpha: float, beta: float):
    """Prediction: n - 1 steps of S/n around a ring: (n - 1) (alpha + S / (n beta)). S is the whole output."""
    return ring_reduce_scatter_seconds(bytes, ranks, alpha, beta)


def ring_all_reduce_seconds(bytes, ranks: int, alpha: float, beta: float):
    """Prediction: reduce-scatter then all-gather around a ring: 2 (n - 1) (alpha + S / (n beta)).

    Each rank sends 2 S (n - 1) / n bytes, the least any all-reduce can (Patarasu and Yuan, JPDC 2009).

    >>> ring_all_reduce_seconds(8e6, ranks=4, alpha=0, beta=1e9)      # 6 steps of 2 MB at 1 GB/s
    0.012
    """
    return 2 * ring_reduce_scatter_seconds(bytes, ranks, alpha, beta)


def halving_doubling_all_reduce_seconds(bytes, ranks: int, alpha: float, beta: float):
    """Prediction: recursive halving then recursive doubling (Rabenseifner).

    For n a power of two: 2 log2(n) alpha + 2 (n - 1)/n S / beta. Otherwise, with p the power of two below n,
    n - p ranks first hand their whole buffer to a neighbour and get the sum at the end: the same with p for
    n, and 2 (alpha + S / beta) more.
    """
    size, n, alpha, beta = _inputs(bytes, ranks, alpha, beta)
    power = 1 << (n.bit_length() - 1)
    seconds = 2 * (n.bit_length() - 1) * alpha + 2 * (power - 1) / power * size / beta
    return like(seconds if power == n else seconds + 2 * (alpha + size / beta))


def fit_alpha_beta(sizes, seconds) -> tuple[float, float]:
    """The alpha (seconds) and beta (bytes/s) for which alpha + size / beta is closest to measured seconds.

    sizes: bytes, one per measurement, at least two different ones. seconds: the times, > 0.
    Least squares on the *relative* error, ((predicted - measured) / measured)^2, so that 1 KB counts as much
    as 1 GB. alpha is held at 0 if the best one would be negative.
    ValueError if the times don't grow with size, so that no bandwidth explains them.

    >>> sizes = np.array([1e3, 1e6, 1e9])
    >>> alpha, beta = fit_alpha_beta(sizes, 5e-6 + sizes / 10e9)
    >>> round(alpha * 1e6, 6), round(beta / 1e9, 6)
    (5.0, 10.0)
    """
    sizes, seconds = check_sizes("sizes", sizes), check_sizes("seconds", seconds)
    if sizes.ndim != 1 or sizes.shape != seconds.shape:
        raise ValueError(
            f"sizes and seconds must be 1-d and equally long, got shapes {sizes.shape} and {seconds.shape}"
        )
    if len(np.unique(sizes)) < 2:
        raise ValueError(f"sizes must hold at least two different sizes, got {sizes.tolist()}")
    if np.any(seconds <= 0):
        raise ValueError(f"seconds must all be > 0, got {seconds.tolist()}")
    scale = sizes.max()  # keeps the two columns comparable, so that the solve is well conditioned
    constant, slope = 1 / seconds, sizes / scale / seconds
    columns = np.stack([constant, slope], axis=1)
    (alpha, per_scale), *_ = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)
    if per_scale <= 1e-9 * seconds.max():  # equal times leave a slope of rounding errors
        raise ValueError(
            "seconds must grow with sizes for a bandwidth to be fitted; the best slope is "
            f"{per_scale / scale:.3g} s/byte"
        )
    if alpha < 0:
        alpha, per_scale = 0.0, slope.sum() / (slope @ slope)
    return float(alpha), float(scale / per_scale)
