"""Plain data goes through the sandbox's wall unchanged, and nothing else does."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks.grading import wire
from manyranks.runtime import phantom

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=20,
)


def same(a, b) -> bool:
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(plain)
def test_there_and_back(value):
    assert same(wire.decode(wire.encode(value)), value)


@given(st.sampled_from(sorted(wire.DTYPES)), st.lists(st.integers(0, 3), max_size=3))
def test_arrays_there_and_back(dtype, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    back = wire.decode(wire.encode(array))
    assert back.dtype == array.dtype and back.shape == array.shape and np.array_equal(back, array)
    assert back.flags.writeable or back.size == 0


def test_other_things_with_a_plain_form():
    assert wire.decode(wire.encode(range(3, 9, 2))) == range(3, 9, 2)
    assert wire.decode(wire.encode({1, 2})) == {1, 2}
    assert wire.decode(wire.encode(x * x for x in range(3))) == [0, 1, 4]
    assert wire.decode(wire.encode({"a": 1}.items())) == [("a", 1)]
    assert wire.decode(wire.encode(np.float32)) is np.float32
    assert type(wire.decode(wire.encode(np.float32(2)))) is np.float32
    assert np.array_equal(wire.decode(wire.encode(np.arange(4, dtype=">i4"))), np.arange(4))
    back = wire.decode(wire.encode(phantom((2, 7_000_000_000), np.float16)))
    assert back.nbytes == 28_000_000_000


def test_a_subclass_becomes_its_plain_base():
    class Sly(float):
        def __eq__(self, other):
            return True

        __hash__ = float.__hash__

    back = wire.decode(wire.encode(Sly(3)))
    assert type(back) is float and back != 4


@pytest.mark.parametrize(
    "value",
    [
        object(),
        [lambda: None],
        np.array([object()]),
        np.array(["text"]),
        np.array([1], dtype="M8[s]"),
        np.zeros(1, dtype=[("a", "i4")]),
        pytest.param(7**100_000, id="a huge number"),
    ],
)
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(wire.NotPlain):
        wire.encode(value)


def test_a_list_in_itself_and_an_endless_iterator():
    loop: list = []
    loop.append(loop)
    with pytest.raises(wire.NotPlain, match="nested"):
        wire.encode(loop)
    with pytest.raises(wire.NotPlain, match="iterator"):
        wire.encode(iter(int, 1))


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_a_value_or_an_error(data):
    try:
        wire.decode(data)
    except wire.WireError:
        pass


@given(plain, st.integers(0, 200), st.integers(0, 255))
def test_a_changed_byte_is_a_value_or_an_error(value, at, byte):
    data = bytearray(wire.encode([value]))
    data[at % len(data)] = byte
    try:
        wire.decode(bytes(data))
    except wire.WireError:
        pass


def q(n: int) -> bytes:
    return struct.pack(">Q", n)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"N" + b"N",  # something after the value
        b"L" + q(2**60),  # a list of more than there is
        b"L" + q(10**7) + b"N" * 10**6,
        b"S" + q(2**63) + b"x",
        b"I" + q(10**6) + b"\1" * 10**6,  # a whole number of a million bytes
        b"A" + q(3) + b"|O8" + b"\1" + q(1) + q(8) + b"\0" * 8,  # objects
        b"A" + q(3) + b"<f8" + b"\1" + q(2) + q(8) + b"\0" * 8,  # two numbers in the bytes of one
        b"A" + q(3) + b"<f8" + b"\2" + q(2**62) + q(0) + q(0),
        b"A" + q(3) + b"<f8" + b"\xff" + q(0) * 255 + q(0),
        b"M" + q(1) + b"L" + q(0) + b"N",  # a list as a key
        b"E" + q(1) + b"L" + q(0),
        b"R" + b"U" + q(3) + b"N" * 3,
        b"H" + q(8) + b"callback" + b"N",  # functions come from one side only
        b"P" + q(3) + b"<f4" + b"U" + q(1) + b"T",
        b"(" * 10,
        b"cos\nsystem\n(S'true'\ntR.",  # what pickle would have run
    ],
)
def test_malformed_bytes_are_refused(data):
    with pytest.raises(wire.WireError):
        wire.decode(data)


def test_depth_and_number_are_limited():
    with pytest.raises(wire.WireError, match="deep"):
        wire.decode((b"L" + q(1)) * 100 + b"N")
    with pytest.raises(wire.WireError, match="more than"):
        wire.decode(b"L" + q(5) + b"N" * 5, limits=wire.Limits(items=3))
