"""Phantom arrays: shape and dtype without storage, so that a 14 GB gradient costs nothing to send.

A `Phantom` takes part in arithmetic, slicing, matmul, reshape and the common NumPy functions, and what comes out is
the phantom of the right shape and dtype. It has no values: asking for one is a TypeError.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

__all__ = ["Phantom", "phantom", "is_phantom"]


def phantom(shape: int | tuple[int, ...], dtype: Any = np.float32) -> Phantom:
    """An array of `shape` and `dtype` without storage.

    >>> g = phantom(7_000_000_000, np.float16)
    >>> g.nbytes
    14000000000
    >>> (g[:1_000_000_000] + 1).nbytes
    2000000000
    """
    return Phantom(shape, dtype)


def is_phantom(x: Any) -> bool:
    """Whether `x` is a phantom."""
    return isinstance(x, Phantom)


class Phantom(NDArrayOperatorsMixin):
    """See `phantom`. Immutable: ``p[a:b] = y`` checks shapes and changes nothing, there being nothing to change."""

    __slots__ = ("shape", "dtype", "size", "nbytes")

    def __init__(self, shape: int | tuple[int, ...], dtype: Any = np.float32):
        if type(shape) is not tuple:
            shape = (shape,) if hasattr(shape, "__index__") else tuple(shape)
        for n in shape:
            if isinstance(n, bool) or not hasattr(n, "__index__") or n < 0:
                raise ValueError(f"shape must be whole numbers >= 0, got {shape!r}")
        self.shape = tuple(int(n) for n in shape)
        self.dtype = np.dtype(dtype)
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize

    # -- what an array can say of itself
    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def T(self) -> Phantom:
        return Phantom(self.shape[::-1], self.dtype)

    @property
    def mT(self) -> Phantom:
        return self.swapaxes(-1, -2)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"phantom({self.shape}, {self.dtype})"

    def __eq__(self, other: Any) -> Any:  # element-wise, like an array's
        return np.equal(self, other)

    __hash__ = None

    def __bool__(self) -> bool:
        raise TypeError("a phantom array has no values, so it is neither true nor false")

    __float__ = __int__ = __index__ = __complex__ = __bool__

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("a phantom array has no values; run the program on a real array to see some")

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    # -- indexing
    def __getitem__(self, key: Any) -> Phantom:
        if type(key) is slice and self.shape:  # the common case, quickly
            return Phantom((len(range(*key.indices(self.shape[0]))), *self.shape[1:]), self.dtype)
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(k, (Phantom, list)) or (isinstance(k, np.ndarray) and k.dtype == bool) for k in keys):
            raise TypeError("a phantom array takes whole numbers, slices and integer arrays as an index, got " + repr(key))
        # A view of stride 0 has the index arithmetic of an array of this shape, and one element of memory.
        hull = np.broadcast_to(np.empty((), np.uint8), self.shape)
        return Phantom(hull[key].shape, self.dtype)

    def __setitem__(self, key: Any, value: Any) -> None:
        into, shape = self[key].shape, np.shape(value)
        if shape != into and np.broadcast_shapes(shape, into) != into:
            raise ValueError(f"cannot put shape {shape} into shape {into}")

    # -- methods that programs use
    def copy(self) -> Phantom:
        return self

    def astype(self, dtype: Any, copy: bool = True) -> Phantom:
        return Phantom(self.shape, dtype)

    def reshape(self, *shape: Any) -> Phantom:
        new = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else tuple(shape)
        if new.count(-1) == 1:
            rest = math.prod(n for n in new if n != -1)
            if not rest or self.size % rest:
                raise ValueError(f"cannot reshape array of size {self.size} into shape {new}")
            new = tuple(self.size // rest if n == -1 else n for n in new)
        if math.prod(new) != self.size:
            raise ValueError(f"cannot reshape array of size {self.size} into shape {new}")
        return Phantom(new, self.dtype)

    def ravel(self) -> Phantom:
        return self.reshape(-1)

    flatten = ravel

    def transpose(self, *axes: Any) -> Phantom:
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        order = order or range(self.ndim)[::-1]
        if sorted(a % self.ndim for a in order) != list(range(self.ndim)):
            raise ValueError(f"axes {tuple(order)} don't match array of shape {self.shape}")
        return Phantom(tuple(self.shape[a] for a in order), self.dtype)

    def swapaxes(self, a: int, b: int) -> Phantom:
        order = list(range(self.ndim))
        order[a], order[b] = order[b], order[a]
        return self.transpose(order)

    def _reduced(self, axis: Any = None, keepdims: bool = False, dtype: Any = None) -> Phantom:
        axes = range(self.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        gone = {np.lib.array_utils.normalize_axis_index(a, self.ndim) for a in axes}
        shape = tuple(1 if i in gone else n for i, n in enumerate(self.shape) if keepdims or i not in gone)
        return Phantom(shape, dtype or self.dtype)

    def sum(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Phantom:
        dtype = dtype or (np.sum(np.empty(0, self.dtype)).dtype if self.dtype.kind in "iub" else self.dtype)
        return self._reduced(axis, keepdims, dtype)

    prod = sum

    def mean(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Phantom:
        return self._reduced(axis, keepdims, dtype or (np.float64 if self.dtype.kind in "iub" else self.dtype))

    std = var = mean

    def max(self, axis: Any = None, keepdims: bool = False) -> Phantom:
        return self._reduced(axis, keepdims)

    min = max

    def argmax(self, axis: Any = None, keepdims: bool = False) -> Phantom:
        return self._reduced(axis, keepdims, np.intp)

    argmin = argmax

    # -- NumPy's protocols
    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("where", None)
        if method == "reduce":
            x, dtype = inputs[0], kwargs.get("dtype")
            if dtype is None and ufunc in (np.add, np.multiply):
                return x.sum(kwargs.get("axis", 0), keepdims=kwargs.get("keepdims", False))
            return x._reduced(kwargs.get("axis", 0), kwargs.get("keepdims", False), dtype)
        if method != "__call__":
            return NotImplemented
        if ufunc is np.matmul:
            shape = _matmul_shape(np.shape(inputs[0]), np.shape(inputs[1]))
        elif ufunc.signature is not None:
            return NotImplemented
        else:
            shape = np.broadcast_shapes(*(np.shape(x) for x in inputs))
        # NumPy's own promotion rules, read off an empty run of the same function; Python scalars stay weak.
        stand_ins = [x if isinstance(x, (bool, int, float, complex)) else np.empty((0,), _dtype(x)) for x in inputs]
        if ufunc is np.matmul:
            dtypes = (np.result_type(*stand_ins),)
        else:
            with np.errstate(all="ignore"):
                results = ufunc(*stand_ins, **kwargs)
            dtypes = tuple(r.dtype for r in (results if isinstance(results, tuple) else (results,)))
        if out is not None:
            for o in out:
                if o is not None and (not is_phantom(o) or o.shape != shape):
                    raise ValueError(f"out must be a phantom of shape {shape}, got {o!r}")
            return out[0] if len(out) == 1 else out
        made = tuple(Phantom(shape, d) for d in dtypes)
        return made[0] if len(made) == 1 else made

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        handler = _FUNCTIONS.get(func)
        if handler is None:
            return NotImplemented
        return handler(*args, **kwargs)

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        return np


def _dtype(x: Any) -> np.dtype:
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype


def _matmul_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    if not a or not b:
        raise ValueError("matmul needs arrays of at least one dimension")
    if a[-1] != (b[-2] if len(b) > 1 else b[-1]):
        raise ValueError(f"matmul: the inner sizes of {a} and {b} differ")
    batch = np.broadcast_shapes(a[:-2], b[:-2])
    return batch + (a[-2:-1] if len(a) > 1 else ()) + (b[-1:] if len(b) > 1 else ())


def _concatenate(arrays: Any, axis: int | None = 0, **kwargs: Any) -> Phantom:
    arrays = [a if is_phantom(a) else Phantom(np.shape(a), _dtype(a)) for a in arrays]
    if axis is None:
        arrays, axis = [a.ravel() for a in arrays], 0
    first = arrays[0]
    axis = np.lib.array_utils.normalize_axis_index(axis, first.ndim)
    for a in arrays:
        if a.shape[:axis] + a.shape[axis + 1 :] != first.shape[:axis] + first.shape[axis + 1 :]:
            raise ValueError(f"cannot concatenate shapes {[a.shape for a in arrays]} along axis {axis}")
    shape = (*first.shape[:axis], sum(a.shape[axis] for a in arrays), *first.shape[axis + 1 :])
    return Phantom(shape, np.result_type(*(a.dtype for a in arrays)))


def _stack(arrays: Any, axis: int = 0, **kwargs: Any) -> Phantom:
    return _concatenate([_expand_dims(a, axis) for a in arrays], axis)


def _expand_dims(a: Any, axis: int) -> Phantom:
    a = a if is_phantom(a) else Phantom(np.shape(a), _dtype(a))
    axis = np.lib.array_utils.normalize_axis_index(axis, a.ndim + 1)
    return Phantom((*a.shape[:axis], 1, *a.shape[axis:]), a.dtype)


def _split(a: Phantom, sections: Any, axis: int = 0, even: bool = False) -> list[Phantom]:
    axis = np.lib.array_utils.normalize_axis_index(axis, a.ndim)
    length = a.shape[axis]
    if hasattr(sections, "__index__"):
        if even and length % sections:
            raise ValueError("array split does not result in an equal division")
        base, extra = divmod(length, int(sections))
        sizes = [base + (i < extra) for i in range(int(sections))]
    else:
        cuts = [0, *(min(c, length) for c in sections), length]
        sizes = [max(0, b - a_) for a_, b in zip(cuts, cuts[1:])]
    return [Phantom((*a.shape[:axis], s, *a.shape[axis + 1 :]), a.dtype) for s in sizes]


def _like(a: Phantom, *args: Any, dtype: Any = None, shape: Any = None, **kwargs: Any) -> Phantom:
    return Phantom(a.shape if shape is None else shape, dtype or a.dtype)


def _squeeze(a: Phantom, axis: Any = None) -> Phantom:
    axes = axis if isinstance(axis, tuple) else (axis,)
    gone = {i for i, n in enumerate(a.shape) if n == 1} if axis is None else {x % a.ndim for x in axes}
    return Phantom(tuple(n for i, n in enumerate(a.shape) if i not in gone), a.dtype)


def _where(condition: Any, x: Any, y: Any) -> Phantom:
    return Phantom(np.broadcast_shapes(np.shape(condition), np.shape(x), np.shape(y)), np.add(x, y).dtype)


_FUNCTIONS = {
    np.concatenate: _concatenate,
    np.stack: _stack,
    np.split: lambda a, sections, axis=0: _split(a, sections, axis, even=True),
    np.array_split: _split,
    np.zeros_like: _like,
    np.empty_like: _like,
    np.ones_like: _like,
    np.full_like: lambda a, value, **kw: _like(a, **kw),
    np.sum: lambda a, axis=None, dtype=None, out=None, keepdims=False, **kw: a.sum(axis, dtype, keepdims),
    np.prod: lambda a, axis=None, dtype=None, out=None, keepdims=False, **kw: a.prod(axis, dtype, keepdims),
    np.mean: lambda a, axis=None, dtype=None, out=None, keepdims=False, **kw: a.mean(axis, dtype, keepdims),
    np.var: lambda a, axis=None, dtype=None, out=None, ddof=0, keepdims=False, **kw: a.var(axis, dtype, keepdims),
    np.std: lambda a, axis=None, dtype=None, out=None, ddof=0, keepdims=False, **kw: a.std(axis, dtype, keepdims),
    np.max: lambda a, axis=None, out=None, keepdims=False, **kw: a.max(axis, keepdims),
    np.min: lambda a, axis=None, out=None, keepdims=False, **kw: a.min(axis, keepdims),
    np.argmax: lambda a, axis=None, out=None, keepdims=False: a.argmax(axis, keepdims),
    np.argmin: lambda a, axis=None, out=None, keepdims=False: a.argmin(axis, keepdims),
    np.reshape: lambda a, shape=None, *args, newshape=None, **kw: a.reshape(shape if newshape is None else newshape),
    np.ravel: lambda a, order="C": a.ravel(),
    np.transpose: lambda a, axes=None: a.transpose(*(() if axes is None else (axes,))),
    np.swapaxes: lambda a, x, y: a.swapaxes(x, y),
    np.expand_dims: _expand_dims,
    np.squeeze: _squeeze,
    np.broadcast_to: lambda a, shape, subok=False: Phantom(np.broadcast_shapes(a.shape, shape), a.dtype),
    np.copy: lambda a, order="K", subok=False: a,
    np.where: _where,
    np.dot: lambda a, b, out=None: np.matmul(a, b),
    np.shape: lambda a: a.shape,
    np.ndim: lambda a: a.ndim,
    np.size: lambda a, axis=None: a.size if axis is None else a.shape[axis],
    np.tril: lambda a, k=0: a,
    np.triu: lambda a, k=0: a,
    np.array_equal: lambda a, b, equal_nan=False: a.__bool__(),
    np.result_type: lambda *args: np.result_type(*(_dtype(x) if is_phantom(x) else x for x in args)),
    np.astype: lambda a, dtype, **kw: a.astype(dtype),
}
