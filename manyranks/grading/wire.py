"""Plain data as bytes. Both ends of the sandbox's wall speak it; nothing that is read can run.

One letter says what follows. Whatever `decode` returns is of exactly one of these types: None, bool, int, float,
complex, str, bytes, list, tuple, dict, set, frozenset, range, slice, NumPy arrays and scalars of numbers, dtypes,
phantoms, and what a `Handles` makes of functions and communicators. No class of the other side ever comes through, so
nothing can claim to equal everything.

>>> decode(encode([1, (2.5, None), {"x": b"y"}]))
[1, (2.5, None), {'x': b'y'}]
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

__all__ = ["Limits", "NotPlain", "WireError", "decode", "encode"]

DTYPES = {
    np.dtype(name).str
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
MAX_ITEMS = 2_000_000  # values in one message
MAX_DEPTH = 60
MAX_BYTES = 64 * 1024 * 1024  # of one message
MAX_INT_BYTES = 1700  # fewer digits than Python refuses to print
MAX_ITERATED = 100_000  # of a generator's values

_Q, _D, _DD = struct.Struct(">Q"), struct.Struct(">d"), struct.Struct(">dd")


class WireError(ValueError):
    """Bytes that are not what `encode` writes, or more of them than is allowed."""


class NotPlain(TypeError):
    """A value that has no plain form."""


class Limits:
    """What the reading side still allows: values, in one message."""

    def __init__(self, items: int = MAX_ITEMS, depth: int = MAX_DEPTH):
        self.items, self.depth = items, depth


# ---------------------------------------------------------------------------------------------------- writing


def encode(value: Any, handle: Callable[[Any], tuple[str, Any] | None] | None = None) -> bytes:
    """`value` as bytes.

    Args:
        value: plain data. Iterators become lists (of `MAX_ITERATED` values at most), subclasses their plain base,
            other objects with ``__array__`` (tensors) arrays.
        handle: what to do with anything else: returns (kind, plain value), which the other side's `resolve` gets; or
            None if it doesn't know the object.

    Raises: NotPlain, naming the type.
    """
    out: list[bytes] = []
    _write(value, out, handle, 0)
    return b"".join(out)


def _sized(tag: bytes, body: bytes) -> bytes:
    return tag + _Q.pack(len(body)) + body


def _write(value: Any, out: list[bytes], handle: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise NotPlain(f"a value nested more than {MAX_DEPTH} deep (does it contain itself?)")
    if value is None:
        out.append(b"N")
    elif value is True or value is False:
        out.append(b"T" if value else b"F")
    elif isinstance(value, np.ndarray):
        array = np.asarray(value)  # no subclass
        if array.dtype.newbyteorder("=").str not in DTYPES:
            raise NotPlain(
                f"an array of dtype {array.dtype}; arrays hold numbers (bool, int, float or complex)"
            )
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        shape = b"".join(_Q.pack(n) for n in array.shape)
        out.append(b"A" + _sized(b"", array.dtype.str.encode()) + bytes([array.ndim]) + shape)
        out.append(_sized(b"", array.tobytes()))
    elif isinstance(value, np.generic):
        if value.dtype.newbyteorder("=").str not in DTYPES:
            raise NotPlain(f"a NumPy scalar of type {value.dtype}")
        value = value.astype(value.dtype.newbyteorder("="))
        out.append(b"G" + _sized(b"", value.dtype.str.encode()) + _sized(b"", value.tobytes()))
    elif isinstance(value, int):
        value = int(value)
        if value.bit_length() // 8 + 1 > MAX_INT_BYTES:
            raise NotPlain(f"a whole number of {value.bit_length()} bits")
        out.append(_sized(b"I", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)))
    elif isinstance(value, float):
        out.append(b"D" + _D.pack(value))
    elif isinstance(value, complex):
        out.append(b"C" + _DD.pack(value.real, value.imag))
    elif isinstance(value, str):
        out.append(_sized(b"S", str.encode(value, "utf-8", "surrogatepass")))
    elif isinstance(value, (bytes, bytearray, memoryview)):
        out.append(_sized(b"B", bytes(value)))
    elif isinstance(value, dict):
        out.append(b"M" + _Q.pack(len(value)))
        for key, held in list(value.items()):
            _write(key, out, handle, depth + 1)
            _write(held, out, handle, depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        kinds = ((b"L", list), (b"U", tuple), (b"E", set), (b"Z", frozenset))
        tag = next(t for t, kind in kinds if isinstance(value, kind))
        held = sorted(value, key=repr) if tag in b"EZ" else list(value)
        out.append(tag + _Q.pack(len(held)))
        for v in held:
            _write(v, out, handle, depth + 1)
    elif isinstance(value, range):
        out.append(b"R")
        _write((value.start, value.stop, value.step), out, handle, depth + 1)
    elif isinstance(value, slice):
        out.append(b"X")
        _write((value.start, value.stop, value.step), out, handle, depth + 1)
    elif isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        dtype = np.dtype(value)
        if dtype.str not in DTYPES:
            raise NotPlain(f"the dtype {dtype}")
        out.append(_sized(b"Y" if isinstance(value, np.dtype) else b"y", dtype.str.encode()))
    elif type(value).__name__ == "Phantom" and hasattr(value, "nbytes"):
        out.append(b"P" + _sized(b"", np.dtype(value.dtype).str.encode()))
        _write(tuple(value.shape), out, None, depth + 1)
    else:
        held = handle(value) if handle else None
        if held is not None:
            kind, plain = held
            out.append(b"H" + _sized(b"", kind.encode()))
            _write(plain, out, None, depth + 1)
        elif isinstance(value, Iterator) or type(value).__name__ in (
            "dict_keys",
            "dict_values",
            "dict_items",
        ):
            values = list(islice(iter(value), MAX_ITERATED + 1))
            if len(values) > MAX_ITERATED:
                raise NotPlain(f"an iterator that gives more than {MAX_ITERATED} values")
            _write(values, out, handle, depth)
        elif hasattr(value, "__array__"):
            _write(np.asarray(value), out, handle, depth)
        else:
            raise NotPlain(f"an object of type {type(value).__name__}")


# ---------------------------------------------------------------------------------------------------- reading


class _Reader:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        if n < 0 or self.at + n > len(self.data):
            raise WireError("a message ends in the middle of a value")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self) -> int:
        return _Q.unpack(self.take(8))[0]

    def sized(self, limit: int = MAX_BYTES) -> bytes:
        n = self.number()
        if n > limit:
            raise WireError(f"a value of {n} bytes, where {limit} are allowed")
        return self.take(n)


def decode(
    data: bytes, resolve: Callable[[str, Any], Any] | None = None, limits: Limits | None = None
) -> Any:
    """The value that `encode` wrote.

    Raises: WireError for anything malformed, too deep or too large; without `resolve` also for handles.
    """
    reader = _Reader(data)
    try:
        value = _read(reader, resolve, limits or Limits(), 0)
    except WireError:
        raise
    except (ValueError, TypeError, OverflowError, MemoryError, struct.error) as error:
        raise WireError(f"a malformed value: {error}") from None
    if reader.at != len(data):
        raise WireError("a message goes on after its value")
    return value


def _dtype(name: bytes) -> np.dtype:
    text = name.decode("ascii", "replace")
    if text not in DTYPES:
        raise WireError(f"an array of dtype {text!r}")
    return np.dtype(text)


def _array(reader: _Reader) -> np.ndarray:
    dtype = _dtype(reader.sized(8))
    shape = tuple(reader.number() for _ in range(reader.take(1)[0]))
    raw = reader.sized()
    size = 1
    for n in shape:
        size *= n
    if len(shape) > 32 or size * dtype.itemsize != len(raw) or max(shape, default=0) > 2**40:
        raise WireError(f"an array of shape {shape} in {len(raw)} bytes")
    return np.frombuffer(raw, dtype).reshape(shape).copy()


def _read(reader: _Reader, resolve: Any, limits: Limits, depth: int) -> Any:
    limits.items -= 1
    if limits.items < 0:
        raise WireError(f"more than {MAX_ITEMS} values in one message")
    if depth > limits.depth + 2:
        raise WireError(f"values nested more than {limits.depth} deep")
    tag = reader.take(1)
    if tag == b"N":
        return None
    if tag in (b"T", b"F"):
        return tag == b"T"
    if tag == b"I":
        return int.from_bytes(reader.sized(MAX_INT_BYTES), "big", signed=True)
    if tag == b"D":
        return _D.unpack(reader.take(8))[0]
    if tag == b"C":
        return complex(*_DD.unpack(reader.take(16)))
    if tag == b"S":
        return reader.sized().decode("utf-8", "replace")
    if tag == b"B":
        return reader.sized()
    if tag == b"A":
        return _array(reader)
    if tag == b"G":
        dtype = _dtype(reader.sized(8))
        raw = reader.sized(16)
        if len(raw) != dtype.itemsize:
            raise WireError("a NumPy scalar of the wrong size")
        return np.frombuffer(raw, dtype)[0]
    if tag in (b"L", b"U", b"E", b"Z"):
        n = reader.number()
        if n > limits.items:
            raise WireError(f"more than {MAX_ITEMS} values in one message")
        values = [_read(reader, resolve, limits, depth + 1) for _ in range(n)]
        return values if tag == b"L" else {b"U": tuple, b"E": set, b"Z": frozenset}[tag](values)
    if tag == b"M":
        n = reader.number()
        if n > limits.items:
            raise WireError(f"more than {MAX_ITEMS} values in one message")
        held = {}
        for _ in range(n):
            key = _read(reader, resolve, limits, depth + 1)
            held[key] = _read(reader, resolve, limits, depth + 1)
        return held
    if tag in (b"R", b"X"):
        parts = _read(reader, None, limits, depth + 1)
        if type(parts) is not tuple or len(parts) != 3:
            raise WireError("a malformed range")
        return (range if tag == b"R" else slice)(*parts)
    if tag in (b"Y", b"y"):
        dtype = _dtype(reader.sized(8))
        return dtype if tag == b"Y" else dtype.type
    if tag == b"P":
        from manyranks.runtime.phantom import Phantom

        dtype = _dtype(reader.sized(8))
        shape = _read(reader, None, limits, depth + 1)
        if (
            type(shape) is not tuple
            or len(shape) > 32
            or not all(type(n) is int and 0 <= n < 2**60 for n in shape)
        ):
            raise WireError("a malformed phantom")
        return Phantom(shape, dtype)
    if tag == b"H" and resolve is not None:
        kind = reader.sized(32).decode("ascii", "replace")
        return resolve(kind, _read(reader, None, limits, depth + 1))
    raise WireError(f"an unknown kind of value, {tag!r}")
