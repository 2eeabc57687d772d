"""What travels between the launching process and its ranks: programs by value, arrays as tensors and back."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

__all__ = ["dumps", "from_torch", "to_torch"]

# NumPy has no such types; ml_dtypes adds them. name -> the integer type whose bits they share
_BORROWED = {
    "bfloat16": "int16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2fnuz": "uint8",
}


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with its leaves changed, through lists, tuples (named ones too) and dicts."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(v, change) for v in value))
    if type(value) in (list, tuple):
        return type(value)(_map(v, change) for v in value)
    if isinstance(value, dict) and type(value).__name__ in ("dict", "OrderedDict"):
        return type(value)((k, _map(v, change)) for k, v in value.items())
    return change(value)


def to_torch(value: Any, device: Any) -> Any:
    """`value` with the NumPy arrays of numbers in it as tensors on `device`, and its tensors moved there.

    bfloat16 and float8 arrays of ml_dtypes keep their type. What torch has no type for (strings, objects, records)
    stays as it is.
    """
    import torch

    def change(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to(device)
        if not isinstance(x, np.ndarray):
            return x
        borrowed = _BORROWED.get(x.dtype.name)
        try:
            if borrowed:
                return torch.from_numpy(x.copy().view(borrowed)).view(getattr(torch, x.dtype.name)).to(device)
            return torch.from_numpy(x.copy() if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))).to(
                device
            )
        except TypeError:
            return x

    return _map(value, change)


def from_torch(value: Any, copy: bool = False) -> Any:
    """`value` with the tensors in it as NumPy arrays; dtype and shape are kept.

    bfloat16 and float8 need ml_dtypes; without it they become float32. `copy` detaches the arrays from the tensors.
    """
    import torch

    def change(x: Any) -> Any:
        if isinstance(x, np.ndarray) and copy:
            return x.copy()
        if not isinstance(x, torch.Tensor):
            return x
        if hasattr(x, "to_local"):  # a DTensor: this rank's part of it
            x = x.to_local()
        x = x.detach().cpu().resolve_conj().resolve_neg()
        if x.layout != torch.strided:
            x = x.to_dense()
        name = str(x.dtype).removeprefix("torch.")
        if name in _BORROWED:
            try:
                import ml_dtypes
            except ImportError:
                return x.float().numpy()
            return (
                x.contiguous()
                .view(getattr(torch, _BORROWED[name]))
                .numpy()
                .copy()
                .view(getattr(ml_dtypes, name))
            )
        return x.numpy().copy() if copy else x.numpy()

    return _map(value, change)


def _module_of(program: Any) -> str | None:
    while isinstance(program, functools.partial):
        program = program.func
    return getattr(program, "__module__", None)


def _importable(name: str) -> bool:
    """Whether another Python with this one's path would find the same module under this name."""
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return True  # cloudpickle sends what is in __main__ by value anyway
    origin = getattr(getattr(module, "__spec__", None), "origin", None) or getattr(module, "__file__", None)
    spec = path = None
    for end in (i for i, c in enumerate(f"{name}.") if c == "."):
        spec = next(
            (s for s in (_find(name[:end], path, finder) for finder in sys.meta_path) if s is not None), None
        )
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == origin


def _find(name: str, path: Any, finder: Any) -> Any:
    try:
        return finder.find_spec(name, path)
    except Exception:
        return None


@contextlib.contextmanager
def _by_value(name: str | None) -> Iterator[None]:
    import cloudpickle

    module = sys.modules.get(name or "")
    if module is None or _importable(name):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@functools.cache
def _pickler() -> type:
    """cloudpickle's pickler, but code keeps the name of its file: tracebacks of the ranks need it."""
    import cloudpickle

    inherited = cloudpickle.Pickler.dispatch_table

    def code(obj: types.CodeType) -> tuple:
        make, arguments = inherited[types.CodeType](obj)
        kept = (obj.co_filename if type(a) is str and a == "<dynamic-code>" else a for a in arguments)
        return make, tuple(kept)

    class Pickler(cloudpickle.Pickler):
        dispatch_table = ChainMap({types.CodeType: code}, inherited)

    return Pickler


def dumps(value: Any, what: str, like: Any = None) -> bytes:
    """`value` as bytes. Raises TypeError that names `what` if it can't be sent to another process.

    `like` is the program: its module goes by value if another process could not import it.
    """
    try:
        with _by_value(_module_of(like)), io.BytesIO() as file:
            _pickler()(file, protocol=5).dump(value)
            return file.getvalue()
    except Exception as error:
        raise TypeError(
            f"{what} can't be sent to another process: it is, or holds, something that can't be pickled "
            f"({type(error).__name__}: {error})"
        ) from error
