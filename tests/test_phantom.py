"""Phantoms against the arrays that they stand for: the same shapes and dtypes, the same refusals, no memory."""

import copy
import doctest
import inspect
import pickle
import sys
import tracemalloc
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyranks.runtime.phantom import Phantom, is_phantom, phantom

FEW = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
DTYPES = [
    np.float16,
    np.float32,
    np.float64,
    np.int8,
    np.int32,
    np.int64,
    np.uint8,
    np.bool_,
    np.complex64,
    ml_dtypes.bfloat16,
]


def test_docstring_examples():
    result = doctest.testmod(sys.modules[Phantom.__module__])
    assert result.attempted > 0 and result.failed == 0


def same(function, *arrays):
    """`function` does to phantoms what it does to arrays, also in refusing."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want = function(*arrays)
    except Exception as error:
        with pytest.raises(Exception) as caught:
            function(*(Phantom(a.shape, a.dtype) for a in arrays))
        assert isinstance(caught.value, (TypeError, ValueError, IndexError, OverflowError)), error
        return
    got = function(*(Phantom(a.shape, a.dtype) for a in arrays))
    if not isinstance(want, (list, tuple)):
        want, got = [want], [got]
    assert len(got) == len(want)
    for g, w in zip(got, want):
        assert is_phantom(g), function
        w = np.asarray(w)
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        assert (g.ndim, g.size, g.nbytes, g.itemsize) == (w.ndim, w.size, w.nbytes, w.itemsize)


UNARY = [
    lambda x: -x,
    lambda x: abs(x),
    lambda x: ~x,
    lambda x: x + 1,
    lambda x: 1 - x,
    lambda x: 2.5 * x,
    lambda x: x / 2,
    lambda x: x // 3,
    lambda x: x % 3,
    lambda x: np.power(x, 2),
    lambda x: x + 1j,
    lambda x: x + np.float64(1),
    lambda x: x + np.float32(1),
    lambda x: x + 1000,
    lambda x: x > 0,
    lambda x: x == x,
    lambda x: x.T,
    lambda x: x.mT,
    lambda x: x.reshape(-1),
    lambda x: x.reshape((1, *x.shape)),
    lambda x: x.reshape(2, -1),
    lambda x: x.reshape([-1, 3]),
    lambda x: x.reshape(x.size // 2, 2),
    lambda x: x.reshape(-1, -1),
    lambda x: x.ravel(),
    lambda x: x.flatten(),
    lambda x: x.transpose(),
    lambda x: x.transpose(1, 0),
    lambda x: x.transpose((0, 2, 1)),
    lambda x: x.transpose(0, 0),
    lambda x: x.swapaxes(0, -1),
    lambda x: x.swapaxes(0, 5),
    lambda x: x.copy(),
    lambda x: x.astype(np.float16),
    lambda x: x.squeeze(),
    lambda x: x.sum(),
    lambda x: x.sum(0),
    lambda x: x.sum(axis=-1, keepdims=True),
    lambda x: x.sum((0, 1)),
    lambda x: x.sum((0, 0)),
    lambda x: x.sum(axis=1, dtype=np.float64),
    lambda x: x.prod(),
    lambda x: x.mean(-1),
    lambda x: x.std(0),
    lambda x: x.var(axis=-1, ddof=1, keepdims=True),
    lambda x: x.any(0),
    lambda x: x.all(),
    lambda x: x.max(0),
    lambda x: x.min(axis=-1, keepdims=True),
    lambda x: x.argmax(0) if x.size else x,
    lambda x: x.cumsum(0),
    lambda x: x.round(1),
    lambda x: x.repeat(3),
    lambda x: x.repeat(2, axis=-1),
    lambda x: x.clip(0, 1),
    lambda x: x.take([0, 0], axis=0),
    lambda x: np.exp(x),
    lambda x: np.sqrt(x),
    lambda x: np.tanh(x),
    lambda x: np.isfinite(x),
    lambda x: np.sign(x),
    lambda x: np.modf(x),
    lambda x: np.maximum(x, 0),
    lambda x: np.add.reduce(x),
    lambda x: np.add.reduce(x, axis=-1, keepdims=True),
    lambda x: np.logical_or.reduce(x, axis=0),
    lambda x: np.sum(x, axis=0),
    lambda x: np.prod(x, axis=-1),
    lambda x: np.mean(x, keepdims=True),
    lambda x: np.max(x, axis=-1),
    lambda x: np.std(x, axis=0, ddof=1),
    lambda x: np.cumsum(x),
    lambda x: np.any(x, axis=0),
    lambda x: np.sort(x, axis=0),
    lambda x: np.argsort(x),
    lambda x: np.split(x, 2),
    lambda x: np.array_split(x, 3),
    lambda x: np.array_split(x, [1, 2], axis=-1),
    lambda x: np.concatenate([x, x]),
    lambda x: np.concatenate([x, x], axis=-1),
    lambda x: np.concatenate([x, np.ones(x.shape)], axis=None),
    lambda x: np.stack([x, x], axis=1),
    lambda x: np.stack([x, x], axis=-1),
    lambda x: np.vstack([x, x]),
    lambda x: np.hstack([x, x]),
    lambda x: np.expand_dims(x, (0, -1)),
    lambda x: np.squeeze(x, 0),
    lambda x: np.moveaxis(x, 0, -1),
    lambda x: np.broadcast_to(x, (4, *x.shape)),
    lambda x: np.broadcast_to(x, (7,)),
    lambda x: np.tile(x, (2, 1, 3)),
    lambda x: np.flip(x, 0),
    lambda x: np.roll(x, 1),
    lambda x: np.zeros_like(x),
    lambda x: np.full_like(x, 3, dtype=np.float32),
    lambda x: np.empty_like(x, shape=(2, 2)),
    lambda x: np.reshape(x, (-1, 1)),
    lambda x: np.transpose(x),
    lambda x: np.atleast_2d(x),
    lambda x: np.where(x > 0, x, 0.0),
    lambda x: np.where(x > 0, 1, x),
    lambda x: np.where(True, x, x.astype(np.float64)),
    lambda x: np.linalg.norm(x),
    lambda x: np.clip(x, 0, None),
    lambda x: x[0],
    lambda x: x[-1],
    lambda x: x[5],
    lambda x: x[1:],
    lambda x: x[::-1],
    lambda x: x[5:1],
    lambda x: x[-2:],
    lambda x: x[...],
    lambda x: x[None],
    lambda x: x[:, 0],
    lambda x: x[..., 1:3],
    lambda x: x[0, ..., None],
    lambda x: x[0, 0],
    lambda x: x[[0, 1, 0]],
    lambda x: x[np.array([[0, 1], [1, 0]])],
    lambda x: x[np.array([9])],
    lambda x: x[:, [0]],
    lambda x: x[[0], :, [0, 0]],
    lambda x: x[0, :, [0, 0]],
    lambda x: x[[0], [[0], [0]]],
    lambda x: x[..., [0, 0]],
    lambda x: x[None, [0, 0]],
    lambda x: x[[]],
    lambda x: x["a"],
    lambda x: x[1.0],
]


@FEW
@given(
    st.lists(st.integers(0, 4), max_size=4).map(tuple)
    | st.sampled_from([(2, 3), (4, 6), (3, 1, 4), (2, 3, 4)]),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, len(UNARY) - 1), min_size=8, max_size=8),
)
def test_one_array(shape, dtype, which):
    if dtype is ml_dtypes.bfloat16 and not shape:
        return  # its scalars have rules of their own
    x = np.ones(shape, dtype)
    for i in which:
        if not x.size and "lambda x: x[" in inspect.getsource(UNARY[i]):
            continue  # NumPy lets an index into nothing be out of bounds, and is about to stop that
        same(UNARY[i], x)


@pytest.mark.parametrize("shape", [(2, 3), (4, 6), (2, 1, 3), (5,), (), (0, 3)])
@pytest.mark.parametrize("dtype", [np.float16, np.int32, np.bool_])
def test_one_array_every_expression(shape, dtype):
    for function in UNARY:
        same(function, np.ones(shape, dtype))


def iadd(x, y):
    x += y
    return x


def imatmul(x, y):
    if y.ndim < 2:
        return x  # NumPy asks for two dimensions here, a phantom doesn't
    x @= y
    return x


def put(x, y):
    x[...] = y
    return x


BINARY = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * y,
    lambda x, y: x / y,
    lambda x, y: x // y,
    lambda x, y: x**y,
    lambda x, y: x < y,
    lambda x, y: x != y,
    lambda x, y: x & y,
    lambda x, y: x @ y,
    lambda x, y: x @ np.swapaxes(y, -1, -2),
    lambda x, y: np.matmul(x, y),
    lambda x, y: np.dot(x, y),
    lambda x, y: np.inner(x, y),
    lambda x, y: np.outer(x, y),
    lambda x, y: np.multiply.outer(x, y),
    lambda x, y: np.tensordot(x, y, axes=1),
    lambda x, y: np.tensordot(x, y, axes=([0], [0])),
    lambda x, y: np.divmod(x, y),
    lambda x, y: np.minimum(x, y),
    lambda x, y: np.logical_and(x, y),
    lambda x, y: np.where(x > y, x, y),
    lambda x, y: np.concatenate([x, y]),
    lambda x, y: np.concatenate([x, y], axis=1),
    lambda x, y: np.stack([x, y]),
    lambda x, y: np.broadcast_arrays(x, y),
    lambda x, y: np.isclose(x, y),
    iadd,
    imatmul,
    put,
]
PAIRS = [
    ((2, 3), (3, 4)), ((2, 3), (2, 3)), ((3,), (3,)), ((3,), (3, 2)), ((2, 3), (3,)), ((5, 2, 3), (3, 4)),
    ((5, 2, 3), (5, 3, 2)), ((5, 1, 2, 3), (4, 3, 2)), ((), (2,)), ((1, 3), (2, 1)), ((2, 3), (4, 5)), ((0, 3), (3, 0)),
    ((2, 2), (2, 2)), ((4, 1, 3), (1, 3)),
]  # fmt: skip


@FEW
@given(
    st.sampled_from(PAIRS),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, len(BINARY) - 1), min_size=6, max_size=6),
)
def test_two_arrays(shapes, a, b, which):
    x, y = np.ones(shapes[0], a), np.ones(shapes[1], b)
    for i in which:
        if ml_dtypes.bfloat16 in (a, b) and BINARY[i] in BINARY[12:18]:
            continue  # NumPy's dot and einsum go through BLAS and know no bfloat16
        same(BINARY[i], x.copy(), y)


def test_arrays_and_phantoms_mix():
    p, a = phantom((2, 3), np.float16), np.ones((2, 3), np.float32)
    for made in (p + a, a + p, a * p, np.add(a, p), np.concatenate([a, p])[:2]):
        assert is_phantom(made) and (made.shape, made.dtype) == ((2, 3), np.float32)
    assert (a.T @ p).shape == (3, 3) and (p @ a.T).dtype == np.float32
    assert np.where(a > 0, p, p).shape == (2, 3)
    with pytest.raises(TypeError, match="no values to put into ndarray"):
        a += p
    with pytest.raises(TypeError, match="no values"):
        a[:] = p


@pytest.mark.parametrize("subscripts, shapes", [
    ("ij,jk->ik", [(2, 3), (3, 4)]), ("bqhd,bkhd->bhqk", [(2, 3, 4, 5), (2, 6, 4, 5)]), ("ij,jk", [(2, 3), (3, 4)]),
    ("ii->i", [(3, 3)]), ("ij->", [(2, 3)]), ("i,j->ij", [(2,), (3,)]), ("ij,jk->ik", [(2, 3), (4, 4)]),
    ("ij->i", [(2, 3, 4)]), ("ij,jk->ik", [(2, 3)]),
])  # fmt: skip
def test_einsum(subscripts, shapes):
    same(lambda *xs: np.einsum(subscripts, *xs), *(np.ones(s, np.float32) for s in shapes))


def test_an_attention_block_has_the_shapes_of_the_real_one():
    def attention(x, w_qkv, w_out, heads):
        b, s, h = x.shape
        q, k, v = (
            np.swapaxes(t.reshape(b, s, heads, h // heads), 1, 2) for t in np.split(x @ w_qkv, 3, axis=-1)
        )
        scores = q @ np.swapaxes(k, -1, -2) / np.float16((h // heads) ** 0.5)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p = p / p.sum(axis=-1, keepdims=True)
        out = np.swapaxes(p @ v, 1, 2).reshape(b, s, h) @ w_out
        return (out - out.mean(-1, keepdims=True)) / out.std(-1, keepdims=True)

    same(
        lambda x, a, b: attention(x, a, b, 4),
        np.ones((2, 5, 8), "f2"),
        np.ones((8, 24), "f2"),
        np.ones((8, 8), "f2"),
    )
    assert attention(phantom((4, 4096, 12288), "f2"), phantom((12288, 36864), "f2"), phantom((12288, 12288), "f2"), 96).shape == (
        4, 4096, 12288,
    )  # fmt: skip


def test_there_are_no_values():
    p = phantom((2, 2))
    for ask in (
        float, int, bool, complex, np.asarray, np.array, lambda p: p.item(), lambda p: p.tolist(), lambda p: np.unique(p),
        lambda p: np.nonzero(p), lambda p: np.allclose(p, p), lambda p: np.array_equal(p, p), lambda p: p[p > 0],
        lambda p: [0, 1][p], lambda p: "yes" if p == p else "no", hash, lambda p: np.linalg.inv(p),
    ):  # fmt: skip
        with pytest.raises(TypeError):
            ask(p)
    with pytest.raises(TypeError, match="len"):
        len(phantom(()))


@pytest.mark.parametrize(
    "shape, dtype, kind",
    [(-1, "f4", ValueError), ((2, -3), "f4", ValueError), (2.0, "f4", TypeError), ((True,), "f4", TypeError), ("ab", "f4", TypeError),
     (None, "f4", TypeError), (3, object, TypeError), (3, "nonsense", TypeError)],
)  # fmt: skip
def test_what_makes_no_phantom(shape, dtype, kind):
    with pytest.raises(kind):
        phantom(shape, dtype)


def test_what_makes_one():
    for shape in (3, np.int64(3), (3,), [3], np.array([3])):
        assert phantom(shape).shape == (3,) and type(phantom(shape).shape[0]) is int
    assert phantom((), "f8").nbytes == 8 and phantom(3).dtype == np.float32
    p = phantom((2, 3), np.float16)
    assert repr(p) == "phantom((2, 3), float16)"
    assert [q.shape for q in p] == [(3,), (3,)] and len(p) == 2
    for q in (copy.copy(p), copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert (q.shape, q.dtype, q.nbytes) == (p.shape, p.dtype, p.nbytes)


def test_setting_checks_shapes():
    p = phantom((4, 3))
    p[1:3] = np.ones((2, 3))
    p[0] = 5
    p[:, 0] = phantom((1, 4))
    p[[0, 1], [1, 1]] = phantom(2)
    for key, value in ((0, np.ones(2)), (slice(None), phantom((3, 3))), (9, 1)):
        with pytest.raises((ValueError, IndexError)):
            p[key] = value


def test_a_phantom_as_an_index():
    embedding, tokens = phantom((50257, 12288), np.float16), phantom((8, 2048), np.int64)
    assert embedding[tokens].shape == (8, 2048, 12288)
    assert embedding.take(tokens, axis=0).shape == (8, 2048, 12288)
    with pytest.raises(TypeError):
        embedding[phantom(3)]


def test_fourteen_gigabytes_cost_nothing():
    tracemalloc.start()
    g = phantom(7_000_000_000, np.float16)
    assert g.nbytes == 14_000_000_000
    h = (g * 2 + g.astype(np.float32)).reshape(70_000, 100_000)
    (
        h @ h.T,
        h[:, ::3],
        h.sum(0),
        np.concatenate([h, h]),
        np.split(h, 4),
        h[np.arange(1000)],
        h[np.arange(1000)[:, None], :],
    )
    h[..., None] + h[:, None, :1], np.exp(h), h.transpose(), np.where(h > 0, h, 0.0), np.stack([h, h])
    h[100:200] = h[:100]
    h += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000
