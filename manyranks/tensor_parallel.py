# Generated from chapters/04_tensor_parallelism.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""Tensor parallelism: layers cut across ranks, forward and backward, their dense references, and sequence parallelism."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace, device

from manyranks.collectives import ring_all_reduce_seconds
from manyranks.runtime import Array, Comm, Run, chunk_bounds, is_phantom, phantom

__all__ = [
    "Calls",
    "Conjugate",
    "F",
    "G",
    "GATHER",
    "Params",
    "SCATTER",
    "SEQUENCE",
    "SEQUENCE_AGAIN",
    "SPLIT_AXIS",
    "attention_backward",
    "attention_cost",
    "attention_forward",
    "block_backward",
    "block_forward",
    "block_shapes",
    "column_parallel_backward",
    "column_parallel_forward",
    "communication",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "embedding_backward",
    "embedding_forward",
    "f_backward",
    "f_forward",
    "g_backward",
    "g_forward",
    "gather_tokens",
    "gelu",
    "gelu_slope",
    "initial",
    "layer_norm_backward",
    "layer_norm_forward",
    "linear_backward",
    "linear_forward",
    "mlp_backward",
    "mlp_cost",
    "mlp_forward",
    "parallel_attention_backward",
    "parallel_attention_forward",
    "parallel_block_backward",
    "parallel_block_forward",
    "parallel_cross_entropy_forward",
    "parallel_embedding_backward",
    "parallel_embedding_forward",
    "parallel_mlp_backward",
    "parallel_mlp_forward",
    "put",
    "row_parallel_backward",
    "row_parallel_forward",
    "saved_bytes",
    "scatter_tokens",
    "shard",
    "shard_linear",
    "sync_replicated",
    "take",
    "tensor_parallel_seconds",
    "tensor_parallel_volume",
    "time_block",
    "unshard",
    "unshard_linear",
]

Params = Mapping[str, Array]  # a layer's arrays by name; gradients come under the same names


def linear_forward(params: Params, x: Array, w: str = "w", b: str = "b") -> tuple[Array, dict]:
    """Y = X W + b.

    Args:
        params: `w` of shape (in, out), and `b` of shape (out,) unless the layer has no
            bias.
        x: array of shape (..., in).
        w, b: the names of the two in `params`.

    Returns: array of shape (..., out), and what `linear_backward` needs.

    >>> params = {"w": np.array([[1.0, 2.0], [3.0, 4.0]]), "b": np.array([0.0, 1.0])}
    >>> linear_forward(params, np.array([[1.0, 1.0]]))[0]
    array([[4., 7.]])
    """
    y = x @ params[w]
    return (y + params[b] if b in params else y), {"x": x}


def _rows(x: Array) -> Array:
    """All tokens under one another: (..., width) to (tokens, width)."""
    return x.reshape((math.prod(x.shape[:-1]), x.shape[-1]))


def linear_backward(params: Params, saved: dict, dy: Array, w: str = "w", b: str = "b") -> tuple[Array, dict]:
    """The gradients of a linear layer.

    Args:
        params, saved, w, b: as for `linear_forward`.
        dy: gradient of the result, shape (..., out).

    Returns: the gradient of x, shape (..., in), and a dict with those of the
    parameters.
    """
    rows = _rows(dy)
    grads = {w: _rows(saved["x"]).swapaxes(0, 1) @ rows}
    if b in params:
        grads[b] = rows.sum(axis=0)
    return dy @ params[w].swapaxes(0, 1), grads


def _slice(x: Array, axis: int, start: int, stop: int) -> Array:
    return x[(slice(None),) * axis + (slice(start, stop),)]


def _check_split(split: str) -> int:
    if split not in ("column", "row"):
        raise ValueError(f"split must be 'column' or 'row', got {split!r}")
    return 1 if split == "column" else 0


def _check_rank(rank: int, ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be from 0 to {ranks - 1}, got {rank}")


def shard_linear(params: Params, rank: int, ranks: int, split: str) -> dict[str, Array]:
    """A rank's part of a linear layer.

    Args:
        params: the whole layer: "w" of shape (in, out), perhaps "b" of shape (out,).
        rank, ranks: whose part, of how many. Parts differ by one column (or row) at
            most, the larger ones first; with more ranks than columns some are empty.
        split: "column" cuts the columns of w, and b; "row" cuts the rows of w and
            leaves b whole.

    Returns: a dict of the same names.

    >>> part = shard_linear({"w": np.ones((4, 10)), "b": np.ones(10)}, 0, 4, "column")
    >>> part["w"].shape, part["b"].shape
    ((4, 3), (3,))
    """
    axis = _check_split(split)
    _check_rank(rank, ranks)
    bounds = chunk_bounds(params["w"].shape[axis], ranks)
    start, stop = bounds[rank], bounds[rank + 1]
    part = {"w": _slice(params["w"], axis, start, stop)}
    if "b" in params:
        part["b"] = params["b"][start:stop] if split == "column" else params["b"]
    return part


def unshard_linear(parts: Sequence[Params], split: str) -> dict[str, Array]:
    """The whole layer, or its gradients, from all ranks' parts: undoes `shard_linear`."""
    axis, xp = _check_split(split), array_namespace(parts[0]["w"])
    whole = {"w": xp.concat([part["w"] for part in parts], axis=axis)}
    if "b" in parts[0]:
        whole["b"] = xp.concat([part["b"] for part in parts]) if split == "column" else parts[0]["b"]
    return whole


class Conjugate(NamedTuple):
    """What is done to activations on the way forward, and to gradients on the way back.

    Attributes:
        forward, backward: functions of a communicator and an array.
        again: let a layer keep the array as it was before `forward`, and call `forward`
            again in the backward pass.
    """

    forward: Callable[[Comm, Array], Array]
    backward: Callable[[Comm, Array], Array]
    again: bool = False


def f_forward(comm: Comm, x: Array) -> Array:
    """Into the split region: every rank has the whole x already."""
    return x


def f_backward(comm: Comm, dx: Array) -> Array:
    """Each rank's part of the layer has a say in the gradient of the input: add them up."""
    return comm.all_reduce(dx)


def g_forward(comm: Comm, y: Array) -> Array:
    """Out of the split region: each rank has one term of the result, add them up."""
    return comm.all_reduce(y)


def g_backward(comm: Comm, dy: Array) -> Array:
    """The gradient of a sum is the gradient of each of its terms."""
    return dy


F = Conjugate(f_forward, f_backward)
G = Conjugate(g_forward, g_backward)


def _spend(comm: Comm, label: str, flops: float = 0, bytes: float = 0) -> None:
    """Declare matrix products, and then passes over memory: they are different kernels."""
    comm.compute(flops=flops, label=label)
    comm.compute(bytes=bytes, label=label)


def _linear_flops(w: Array, x: Array) -> int:
    return 2 * math.prod(x.shape[:-1]) * math.prod(w.shape)


def column_parallel_forward(comm: Comm, params: Params, x: Array, enter: Conjugate = F) -> tuple[Array, dict]:
    """A linear layer cut by columns: whole input, this rank's columns of the output.

    Args:
        comm: the ranks that share the layer.
        params: this rank's part, by ``shard_linear(..., "column")``.
        x: array of shape (..., in), the same on all ranks.
        enter: how x comes into the split region.

    Returns: array of shape (..., this rank's columns), and what
    `column_parallel_backward` needs.
    """
    whole = enter.forward(comm, x)
    y, saved = linear_forward(params, whole)
    _spend(comm, "linear forward", _linear_flops(params["w"], whole))
    return y, {"x": x if enter.again else whole, "enter": enter}


def column_parallel_backward(comm: Comm, params: Params, saved: dict, dy: Array) -> tuple[Array, dict]:
    """Its gradients: dx, whole on every rank, its parameters'. One all-reduce."""
    enter, x = saved["enter"], saved["x"]
    x = enter.forward(comm, x) if enter.again else x
    dx, grads = linear_backward(params, {"x": x}, dy)
    _spend(comm, "linear backward", 2 * _linear_flops(params["w"], x))
    return enter.backward(comm, dx), grads


def row_parallel_forward(comm: Comm, params: Params, x: Array, leave: Conjugate = G) -> tuple[Array, dict]:
    """A linear layer cut by rows: columns of the input, whole output. One all-reduce.

    Args:
        comm: the ranks that share the layer.
        params: this rank's part, by ``shard_linear(..., "row")``. Its bias is added
            once, after the sum.
        x: array of shape (..., this rank's rows of w): this rank's columns of the
            input.
        leave: how the result leaves the split region.

    Returns: array of shape (..., out), the same on all ranks, and what
    `row_parallel_backward` needs.
    """
    y, saved = linear_forward({"w": params["w"]}, x)
    _spend(comm, "linear forward", _linear_flops(params["w"], x))
    y = leave.forward(comm, y)
    return (y + params["b"] if "b" in params else y), {**saved, "leave": leave}


def row_parallel_backward(comm: Comm, params: Params, saved: dict, dy: Array) -> tuple[Array, dict]:
    """Its gradients: this rank's columns of dx, its parameters'. No communication."""
    grads = {"b": _rows(dy).sum(axis=0)} if "b" in params else {}
    dy = saved["leave"].backward(comm, dy)
    dx, of_w = linear_backward({"w": params["w"]}, saved, dy)
    _spend(comm, "linear backward", 2 * _linear_flops(params["w"], saved["x"]))
    return dx, {**of_w, **grads}


class Calls(NamedTuple):
    """How many calls of one kind a rank made, and the bytes that it sent in them."""

    calls: int
    bytes: int


def communication(run: Run, rank: int = 0) -> dict[str, Calls]:
    """The calls that one rank waited in, counted from a run's timeline and traffic.

    A call that took no time is not among them: with a single rank, or if it was hidden
    behind other work completely.

    Args:
        run: what `simulate` or `launch` returned.
        rank: whose.

    Returns: a dict from the call's name to the number of calls and the bytes that the
    rank sent in them.

    >>> from manyranks import simulate
    >>> run = simulate(lambda comm: [comm.all_reduce(np.ones(4)) for _ in "ab"], ranks=2)
    >>> communication(run)
    {'all_reduce': Calls(calls=2, bytes=64)}
    """
    calls: dict[str, int] = {}
    for interval in run.timeline:
        if interval.rank == rank and interval.lane == 0 and interval.kind == "wait":
            calls[interval.label] = calls.get(interval.label, 0) + 1
    sent: dict[str, int] = {}
    for message in run.traffic:
        if message.source == rank:
            sent[message.call] = sent.get(message.call, 0) + message.bytes
    return {name: Calls(calls[name], sent.get(name, 0)) for name in sorted(calls)}


_GELU = math.sqrt(2 / math.pi)


def gelu(x: Array) -> Array:
    """GELU in its tanh form, element by element: PyTorch's ``gelu(x, approximate="tanh")``.

    >>> gelu(np.array([-1.0, 0.0, 1.0])).round(4)
    array([-0.1588,  0.    ,  0.8412])
    """
    return 0.5 * x * (1 + array_namespace(x).tanh(_GELU * (x + 0.044715 * x * x * x)))


def gelu_slope(x: Array) -> Array:
    """The derivative of `gelu`, element by element."""
    t = array_namespace(x).tanh(_GELU * (x + 0.044715 * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _GELU * (1 + 3 * 0.044715 * x * x)


def mlp_forward(params: Params, x: Array) -> tuple[Array, dict]:
    """GELU(x w1 + b1) w2 + b2.

    Args:
        params: "w1" (h, ffn), "b1" (ffn,), "w2" (ffn, h), "b2" (h,); biases may be
            missing.
        x: array of shape (..., h).

    Returns: array of shape (..., h), and what `mlp_backward` needs.
    """
    wide, _ = linear_forward(params, x, "w1", "b1")
    active = gelu(wide)
    y, _ = linear_forward(params, active, "w2", "b2")
    return y, {"x": x, "wide": wide, "active": active}


def mlp_backward(params: Params, saved: dict, dy: Array) -> tuple[Array, dict]:
    """The gradients of `mlp_forward`: of x, and a dict with those of the parameters."""
    dactive, down = linear_backward(params, {"x": saved["active"]}, dy, "w2", "b2")
    dx, up = linear_backward(params, saved, dactive * gelu_slope(saved["wide"]), "w1", "b1")
    return dx, {**up, **down}


class _Layer(NamedTuple):
    """A dense layer whose part on one rank is a smaller layer of the same kind."""

    name: str
    forward: Callable
    backward: Callable
    cost: Callable[[Params, Array], tuple[float, float]]  # FLOPs, element-wise bytes
    bias: str  # of its last product, which every rank has whole


def _split_forward(
    layer: _Layer,
    comm: Comm,
    params: Params,
    x: Array,
    enter: Conjugate,
    leave: Conjugate,
) -> tuple[Array, dict]:
    whole = enter.forward(comm, x)
    partial, saved = layer.forward({k: v for k, v in params.items() if k != layer.bias}, whole)
    _spend(comm, f"{layer.name} forward", *layer.cost(params, whole))
    y = leave.forward(comm, partial)
    if layer.bias in params:
        y = y + params[layer.bias]
    if enter.again:
        saved = {**saved, "x": x}
    return y, {**saved, "enter": enter, "leave": leave}


def _split_backward(layer: _Layer, comm: Comm, params: Params, saved: dict, dy: Array) -> tuple[Array, dict]:
    enter, leave = saved["enter"], saved["leave"]
    if enter.again:
        saved = {**saved, "x": enter.forward(comm, saved["x"])}
    of_bias = {layer.bias: _rows(dy).sum(axis=0)} if layer.bias in params else {}
    dpartial = leave.backward(comm, dy)
    dx, grads = layer.backward({k: v for k, v in params.items() if k != layer.bias}, saved, dpartial)
    flops, passes = layer.cost(params, saved["x"])
    _spend(comm, f"{layer.name} backward", 2 * flops, 1.5 * passes)
    return enter.backward(comm, dx), {**grads, **of_bias}


def mlp_cost(params: Params, x: Array) -> tuple[float, float]:
    """FLOPs of an MLP's products, forward, and the bytes that its GELU reads and writes.

    The backward costs twice the FLOPs, and 1.5 times the bytes (it reads two arrays and
    writes one).

    >>> mlp_cost({"w1": phantom((4, 16)), "w2": phantom((16, 4))}, phantom((1, 10, 4)))
    (2560, 1280)
    """
    tokens = math.prod(x.shape[:-1])
    return (
        _linear_flops(params["w1"], x) + 2 * tokens * math.prod(params["w2"].shape),
        2 * tokens * params["w1"].shape[1] * x.dtype.itemsize,
    )


_MLP = _Layer("MLP", mlp_forward, mlp_backward, mlp_cost, "b2")


def parallel_mlp_forward(
    comm: Comm, params: Params, x: Array, enter: Conjugate = F, leave: Conjugate = G
) -> tuple[Array, dict]:
    """`mlp_forward` on `comm.size` ranks: w1 cut by columns, w2 by rows. One all-reduce.

    Args:
        comm: the ranks that share the layer.
        params: this rank's part, by `shard`.
        x: array of shape (b, s, h), the same on all ranks (with F and G).
        enter, leave: how activations come into the split region and leave it.

    Returns: array of shape (b, s, h), the same on all ranks, and what
    `parallel_mlp_backward` needs.
    """
    return _split_forward(_MLP, comm, params, x, enter, leave)


def parallel_mlp_backward(comm: Comm, params: Params, saved: dict, dy: Array) -> tuple[Array, dict]:
    """The gradient of x, whole on all ranks, and of this rank's part. One all-reduce."""
    return _split_backward(_MLP, comm, params, saved, dy)


#: The axis along which `shard` cuts an array, by the last part of its name. What is not
#: here, every rank has whole.
SPLIT_AXIS = {
    **{"w1": 1, "b1": 0, "w2": 0},  # MLP: columns, then rows; b2 whole
    **{
        "wq": 1,
        "wk": 1,
        "wv": 1,
        "bq": 0,
        "bk": 0,
        "bv": 0,
        "wo": 0,
    },  # heads; bo whole
    **{"table": 0, "unembed": 1},  # vocabulary
}
_HEADS = ("wq", "bq", "wk", "bk", "wv", "bv", "wo")


def shard(params: Params, rank: int, ranks: int) -> dict[str, Array]:
    """A rank's part of a layer's parameters, of a block's, or of a whole model's.

    Args:
        params: arrays by name; the last part of a name ("mlp.w1": "w1") says how it is
            cut, by `SPLIT_AXIS`.
        rank, ranks: whose part, of how many. Parts need not be equal: they differ by
            one column (or row, word, or group of heads) at most.

    Returns: a dict of the same names. The parts are views of the whole arrays.

    Raises: ValueError if there are more ranks than key-value heads, or than words, and
    if the key-value heads don't divide the query heads.

    >>> mlp = {"w1": np.ones((4, 16)), "w2": np.ones((16, 4)), "b2": np.ones(4)}
    >>> {name: part.shape for name, part in shard(mlp, 0, 2).items()}
    {'w1': (4, 8), 'w2': (8, 4), 'b2': (4,)}
    """
    _check_rank(rank, ranks)
    parts = {}
    for name, x in params.items():
        prefix, dot, key = name.rpartition(".")
        axis = SPLIT_AXIS.get(key)
        if axis is None:
            parts[name] = x
            continue
        length = units = x.shape[axis]
        if key in _HEADS:  # a key-value head stays together with the query heads that read it
            units = params[f"{prefix}{dot}wk"].shape[1]
            if length % max(units, 1):
                raise ValueError(
                    f"the {units} key-value heads of wk must divide the {length} heads of {name}"
                )
        if units < ranks and key not in ("w1", "b1", "w2"):
            what = "key-value heads" if key in _HEADS else "words"
            raise ValueError(f"{name} has {units} {what}, too few to cut for {ranks} ranks")
        bounds = [length // units * n for n in chunk_bounds(units, ranks)] if units else [0] * (ranks + 1)
        parts[name] = _slice(x, axis, bounds[rank], bounds[rank + 1])
    return parts


def unshard(parts: Sequence[Params]) -> dict[str, Array]:
    """The whole parameters, or gradients, from all ranks' parts: undoes `shard`.

    Of what every rank has whole, rank 0's is taken.

    >>> whole = {"w1": np.arange(12.0).reshape(2, 6), "b2": np.ones(2)}
    >>> again = unshard([shard(whole, r, 4) for r in range(4)])
    >>> all(np.array_equal(again[name], whole[name]) for name in whole)
    True
    """
    whole = {}
    for name, first in parts[0].items():
        axis = SPLIT_AXIS.get(name.rpartition(".")[2])
        if axis is None:
            whole[name] = first
        else:
            whole[name] = array_namespace(first).concat([part[name] for part in parts], axis=axis)
    return whole


def _matrices(params: Params) -> dict[str, Array]:
    """Attention's parameters as linear layers take them: heads without an axis."""
    hidden, flat = params["wq"].shape[0], {}
    for name, p in params.items():
        if name in ("wq", "wk", "wv"):
            p = p.reshape((hidden, p.shape[1] * p.shape[2]))
        elif name == "wo":
            p = p.reshape((p.shape[0] * p.shape[1], p.shape[2]))
        elif name != "bo":
            p = p.reshape((p.shape[0] * p.shape[1],))
        flat[name] = p
    return flat


def _heads_first(x: Array, groups: int, per_group: int) -> Array:
    b, s, width = x.shape  # (b, s, groups * per_group * d) to (b, groups, per_group, s, d)
    x = x.reshape((b, s, groups, per_group, width // (groups * per_group)))
    return x.swapaxes(1, 2).swapaxes(2, 3)


def _tokens_first(x: Array) -> Array:
    b, groups, per_group, s, d = x.shape
    return x.swapaxes(2, 3).swapaxes(1, 2).reshape((b, s, groups * per_group * d))


def attention_forward(params: Params, x: Array) -> tuple[Array, dict]:
    """Causal multi-head attention, or grouped-query attention if k < a.

    Args:
        params: "wq" (h, a, d), "wk" and "wv" (h, k, d), "wo" (a, d, h), and perhaps the
            biases "bq" (a, d), "bk" and "bv" (k, d), "bo" (h,). a is the number of
            query heads, k that of key-value heads. k divides a; key-value head i serves
            the query heads i·a/k to (i + 1)·a/k - 1.
        x: array of shape (b, s, h).

    Returns: array of shape (b, s, h), and what `attention_backward` needs.
    """
    xp, flat = array_namespace(x), _matrices(params)
    (_, heads, d), groups = params["wq"].shape, params["wk"].shape[1]
    if heads % groups:
        raise ValueError(f"the {groups} key-value heads of wk must divide the {heads} query heads of wq")
    q = _heads_first(linear_forward(flat, x, "wq", "bq")[0], groups, heads // groups)  # (b, k, a/k, s, d)
    k = _heads_first(linear_forward(flat, x, "wk", "bk")[0], groups, 1)  # (b, k, 1, s, d)
    v = _heads_first(linear_forward(flat, x, "wv", "bv")[0], groups, 1)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(d)  # (b, k, a/k, s, s)
    seen = xp.tril(xp.ones_like(scores[0, 0, 0])) > 0
    scores = xp.where(seen, scores, -math.inf)
    weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    weights = weights / xp.sum(weights, axis=-1, keepdims=True)
    context = _tokens_first(weights @ v)  # (b, s, a d)
    y, _ = linear_forward(flat, context, "wo", "bo")
    return y, {"x": x, "q": q, "k": k, "v": v, "weights": weights, "context": context}


def attention_backward(params: Params, saved: dict, dy: Array) -> tuple[Array, dict]:
    """The gradients of `attention_forward`: of x, and a dict with the parameters'."""
    x, q, k, v, weights = (saved[name] for name in ("x", "q", "k", "v", "weights"))
    xp, flat = array_namespace(x), _matrices(params)
    (_, heads, d), groups = params["wq"].shape, params["wk"].shape[1]
    dcontext, grads = linear_backward(flat, {"x": saved["context"]}, dy, "wo", "bo")
    dcontext = _heads_first(dcontext, groups, heads // groups)
    dweights = dcontext @ v.swapaxes(-1, -2)
    dscores = weights * (dweights - xp.sum(dweights * weights, axis=-1, keepdims=True)) / math.sqrt(d)
    dq = dscores @ k
    dk = xp.sum(dscores.swapaxes(-1, -2) @ q, axis=2, keepdims=True)  # all query heads of the group
    dv = xp.sum(weights.swapaxes(-1, -2) @ dcontext, axis=2, keepdims=True)
    dx = 0
    for key, dz in (("q", dq), ("k", dk), ("v", dv)):
        part, of_one = linear_backward(flat, {"x": x}, _tokens_first(dz), "w" + key, "b" + key)
        dx = dx + part
        grads |= of_one
    return dx, {name: g.reshape(tuple(params[name].shape)) for name, g in grads.items()}


def attention_cost(params: Params, x: Array) -> tuple[float, float]:
    """FLOPs of attention's products, forward, and the bytes that its softmax moves.

    All s·s scores are counted, as this code computes them; a causal kernel could skip
    half. See also `mlp_cost`.
    """
    (b, s, _), (_, heads, d) = x.shape, params["wq"].shape
    flops = (
        sum(_linear_flops(params[name], x) for name in ("wq", "wk", "wv", "wo")) + 4 * b * heads * s * s * d
    )
    return flops, 2 * b * heads * s * s * x.dtype.itemsize


_ATTENTION = _Layer("attention", attention_forward, attention_backward, attention_cost, "bo")


def parallel_attention_forward(
    comm: Comm, params: Params, x: Array, enter: Conjugate = F, leave: Conjugate = G
) -> tuple[Array, dict]:
    """`attention_forward` on `comm.size` ranks, each with some of the heads.

    One all-reduce. Arguments and result as for `parallel_mlp_forward`.
    """
    return _split_forward(_ATTENTION, comm, params, x, enter, leave)


def parallel_attention_backward(comm: Comm, params: Params, saved: dict, dy: Array) -> tuple[Array, dict]:
    """The gradient of x, whole on all ranks, and of this rank's heads. One all-reduce."""
    return _split_backward(_ATTENTION, comm, params, saved, dy)


def layer_norm_forward(params: Params, x: Array, epsilon: float = 1e-5) -> tuple[Array, dict]:
    """Each token's entries, brought to mean 0 and variance 1, times scale plus shift.

    Args:
        params: "scale" and "shift", of shape (h,).
        x: array of shape (..., h).

    Returns: array of the shape of x, and what `layer_norm_backward` needs.
    """
    xp = array_namespace(x)
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    inverse = 1 / xp.sqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + epsilon)
    normal = centred * inverse
    return normal * params["scale"] + params["shift"], {
        "normal": normal,
        "inverse": inverse,
    }


def layer_norm_backward(params: Params, saved: dict, dy: Array) -> tuple[Array, dict]:
    """The gradients of `layer_norm_forward`: of x, and a dict with the parameters'."""
    normal, inverse = saved["normal"], saved["inverse"]
    xp = array_namespace(dy)
    grads = {"scale": _rows(dy * normal).sum(axis=0), "shift": _rows(dy).sum(axis=0)}
    dnormal = dy * params["scale"]
    along = xp.mean(dnormal * normal, axis=-1, keepdims=True)
    return (dnormal - xp.mean(dnormal, axis=-1, keepdims=True) - normal * along) * inverse, grads


def take(params: Params, layer: str) -> dict[str, Array]:
    """The arrays of one layer, without its name: the opposite of `put`.

    >>> take({"mlp.w1": 1, "mlp.b1": 2, "norm1.scale": 3}, "mlp")
    {'w1': 1, 'b1': 2}
    """
    return {name[len(layer) + 1 :]: p for name, p in params.items() if name.startswith(layer + ".")}


def put(layer: str, params: Params) -> dict[str, Array]:
    """The same arrays under names that begin with the layer's.

    >>> put("mlp", {"w1": 1})
    {'mlp.w1': 1}
    """
    return {f"{layer}.{name}": p for name, p in params.items()}


def block_forward(params: Params, x: Array) -> tuple[Array, dict]:
    """A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        params: the arrays that `block_shapes` lists: "norm1.scale", "attention.wq", and
            so on.
        x: array of shape (b, s, h).

    Returns: array of shape (b, s, h), and what `block_backward` needs.
    """
    normal, norm1 = layer_norm_forward(take(params, "norm1"), x)
    change, attention = attention_forward(take(params, "attention"), normal)
    x = x + change
    normal, norm2 = layer_norm_forward(take(params, "norm2"), x)
    change, mlp = mlp_forward(take(params, "mlp"), normal)
    return x + change, {
        "norm1": norm1,
        "attention": attention,
        "norm2": norm2,
        "mlp": mlp,
    }


def block_backward(params: Params, saved: dict, dy: Array) -> tuple[Array, dict]:
    """The gradients of `block_forward`: of x, and a dict with those of the parameters."""
    dx, mlp = mlp_backward(take(params, "mlp"), saved["mlp"], dy)
    dx, norm2 = layer_norm_backward(take(params, "norm2"), saved["norm2"], dx)
    dy = dy + dx
    dx, attention = attention_backward(take(params, "attention"), saved["attention"], dy)
    dx, norm1 = layer_norm_backward(take(params, "norm1"), saved["norm1"], dx)
    return dy + dx, {
        **put("norm1", norm1),
        **put("attention", attention),
        **put("norm2", norm2),
        **put("mlp", mlp),
    }


def block_shapes(
    hidden: int, heads: int, kv_heads: int | None = None, ffn: int | None = None
) -> dict[str, tuple[int, ...]]:
    """The shape of every array of a transformer block, by name.

    Args:
        hidden: h.
        heads: query heads; they divide h.
        kv_heads: key-value heads; they divide `heads`, and are as many without it.
        ffn: width of the MLP, 4h without it.

    >>> shapes = block_shapes(hidden=64, heads=4)
    >>> sum(math.prod(shape) for shape in shapes.values())  # 12 h² + 13 h
    49984
    """
    kv_heads, ffn = kv_heads or heads, ffn or 4 * hidden
    if heads < 1 or hidden % heads:
        raise ValueError(f"heads must divide the hidden size {hidden}, got {heads}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"kv_heads must divide the {heads} heads, got {kv_heads}")
    d, norm = hidden // heads, {"scale": (hidden,), "shift": (hidden,)}
    attention = {
        "wq": (hidden, heads, d),
        "wk": (hidden, kv_heads, d),
        "wv": (hidden, kv_heads, d),
        "wo": (heads, d, hidden),
    }
    biases = {
        "bq": (heads, d),
        "bk": (kv_heads, d),
        "bv": (kv_heads, d),
        "bo": (hidden,),
    }
    mlp = {"w1": (hidden, ffn), "b1": (ffn,), "w2": (ffn, hidden), "b2": (hidden,)}
    return {
        **put("norm1", norm),
        **put("attention", {**attention, **biases}),
        **put("norm2", norm),
        **put("mlp", mlp),
    }


def initial(
    shapes: Mapping[str, tuple[int, ...]], rng: np.random.Generator, std: float = 0.02
) -> dict[str, np.ndarray]:
    """Fresh 64-bit parameters: weights normal, scales 1, shifts and biases 0."""
    made = {}
    for name, shape in shapes.items():
        key = name.rpartition(".")[2]
        made[name] = np.ones(shape) if key == "scale" else np.zeros(shape)
        if key[0] in "wtu":  # w..., table, unembed
            made[name] = rng.normal(scale=std, size=shape)
    return made


def _norm_and_add(comm: Comm, x: Array, backward: bool = False) -> None:
    """Declare a layer norm and a residual addition, by the arrays they touch."""
    arrays = 3 + 3 if backward else 2 + 3
    comm.compute(bytes=arrays * x.nbytes, label="norm, residual")


def parallel_block_forward(
    comm: Comm, params: Params, x: Array, enter: Conjugate = F, leave: Conjugate = G
) -> tuple[Array, dict]:
    """`block_forward` on `comm.size` ranks. Two all-reduces.

    Args:
        comm: the ranks that share the block.
        params: this rank's part, by `shard`.
        x: array of shape (b, s, h), the same on all ranks (with F and G).
        enter, leave: F and G, or for sequence parallelism ``**SEQUENCE`` or
            ``**SEQUENCE_AGAIN``.

    Returns: array of the shape of x, and what `parallel_block_backward` needs.
    """
    normal, norm1 = layer_norm_forward(take(params, "norm1"), x)
    _norm_and_add(comm, x)
    change, attention = parallel_attention_forward(comm, take(params, "attention"), normal, enter, leave)
    x = x + change
    normal, norm2 = layer_norm_forward(take(params, "norm2"), x)
    _norm_and_add(comm, x)
    change, mlp = parallel_mlp_forward(comm, take(params, "mlp"), normal, enter, leave)
    return x + change, {
        "norm1": norm1,
        "attention": attention,
        "norm2": norm2,
        "mlp": mlp,
    }


def parallel_block_backward(comm: Comm, params: Params, saved: dict, dy: Array) -> tuple[Array, dict]:
    """The gradient of x, and those of this rank's parameters. Two all-reduces.

    With sequence parallelism the gradients of what every rank has whole are partial
    sums: see `sync_replicated`.
    """
    dx, mlp = parallel_mlp_backward(comm, take(params, "mlp"), saved["mlp"], dy)
    dx, norm2 = layer_norm_backward(take(params, "norm2"), saved["norm2"], dx)
    _norm_and_add(comm, dx, backward=True)
    dy = dy + dx
    dx, attention = parallel_attention_backward(comm, take(params, "attention"), saved["attention"], dy)
    dx, norm1 = layer_norm_backward(take(params, "norm1"), saved["norm1"], dx)
    _norm_and_add(comm, dx, backward=True)
    return dy + dx, {
        **put("norm1", norm1),
        **put("attention", attention),
        **put("norm2", norm2),
        **put("mlp", mlp),
    }


def tensor_parallel_volume(batch: int, sequence: int, hidden: int, ranks: int) -> float:
    """Elements that each rank sends for a block, forward and backward: 8 b s h (t - 1)/t.

    The same with sequence parallelism, if the inputs of the products are kept; a
    quarter more if they are gathered again.

    Args:
        batch, sequence, hidden: b sequences of s tokens, of h entries each.
        ranks: t, 1 or more.

    >>> tensor_parallel_volume(1, 2048, 12288, 8)
    176160768.0
    """
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")
    return 8 * batch * sequence * hidden * (ranks - 1) / ranks


def tensor_parallel_seconds(
    batch: int,
    sequence: int,
    hidden: int,
    ranks: int,
    alpha: float,
    beta: float,
    itemsize: int = 2,
) -> float:
    """Predicted time of a block's four all-reduces, by rings on links that are all alike.

    Args:
        batch, sequence, hidden, ranks: as for `tensor_parallel_volume`.
        alpha: latency of a message, in seconds.
        beta: bandwidth of a link, in bytes per second, one way.
        itemsize: bytes of an element.

    >>> node = {"alpha": 3.4e-6, "beta": 450e9}  # eight H100
    >>> round(tensor_parallel_seconds(1, 4096, 8192, 8, **node) * 1e3, 3)  # ms
    1.234
    """
    return 4 * ring_all_reduce_seconds(batch * sequence * hidden * itemsize, ranks, alpha, beta)


def _one_hot(ids: Array, words: int, like: Array) -> Array:
    """A row of `words` entries for each id: 1 at the id, 0 elsewhere."""
    if is_phantom(like):
        return phantom((*ids.shape, words), like.dtype)
    xp = array_namespace(like)
    hit = ids.reshape((*ids.shape, 1)) == xp.arange(words, device=device(like))
    return xp.astype(hit, like.dtype)


def _check_ids(name: str, ids: Array, words: int) -> None:
    """Refuse an id that no rank has: it would pass as a row of zeros."""
    if not is_phantom(ids) and bool(((ids < 0) | (ids >= words)).any()):
        found = f"{int(ids.min())} to {int(ids.max())}"
        raise ValueError(f"{name} must be from 0 to {words - 1}, got {found}")


def embedding_forward(params: Params, ids: Array) -> tuple[Array, dict]:
    """Rows of "table" (V, h) for integer ids of shape (b, s): array of shape (b, s, h)."""
    _check_ids("ids", ids, params["table"].shape[0])
    return params["table"][ids], {"ids": ids}


def embedding_backward(params: Params, saved: dict, dy: Array) -> tuple[None, dict]:
    """The gradient of the table. Ids have none."""
    hot = _one_hot(saved["ids"], params["table"].shape[0], dy)
    return None, {"table": _rows(hot).swapaxes(0, 1) @ _rows(dy)}


def parallel_embedding_forward(
    comm: Comm, params: Params, ids: Array, words: int, leave: Conjugate = G
) -> tuple[Array, dict]:
    """`embedding_forward` with the table cut by words. One all-reduce.

    Args:
        comm: the ranks that share the table.
        params: this rank's part, by `shard`.
        ids: integers of shape (b, s), the same on all ranks.
        words: V, the size of the whole vocabulary.
        leave: G, or for sequence parallelism ``SEQUENCE["leave"]``.

    Returns: array of shape (b, s, h), and what `parallel_embedding_backward` needs.
    """
    _check_ids("ids", ids, words)
    local = ids - chunk_bounds(words, comm.size)[comm.rank]  # numbered from this rank's first word
    inside = (local >= 0) & (local < params["table"].shape[0])
    found, _ = embedding_forward(params, local * inside)  # word 0 for those that are elsewhere,
    xp = array_namespace(ids)
    rows = found * (
        xp.astype(inside, found.dtype)[..., None] if not is_phantom(found) else 1
    )  # and nothing of it
    return leave.forward(comm, rows), {"ids": local, "leave": leave}


def parallel_embedding_backward(comm: Comm, params: Params, saved: dict, dy: Array) -> tuple[None, dict]:
    """The gradient of this rank's part of the table. No communication with G."""
    return embedding_backward(params, saved, saved["leave"].backward(comm, dy))


def cross_entropy_forward(logits: Array, targets: Array) -> tuple[Array, dict]:
    """The mean over all tokens of log(sum of exp(logits)) - logit of the target.

    Args:
        logits: array of shape (b, s, V).
        targets: integers of shape (b, s).

    Returns: a scalar, and what `cross_entropy_backward` needs.

    >>> loss, _ = cross_entropy_forward(np.zeros((1, 2, 8)), np.array([[3, 5]]))
    >>> round(float(loss / np.log(8)), 12)
    1.0
    """
    _check_ids("targets", targets, logits.shape[-1])
    xp = array_namespace(logits)
    shifted = logits - xp.max(logits, axis=-1, keepdims=True)
    powers = xp.exp(shifted)
    total = xp.sum(powers, axis=-1, keepdims=True)
    hot = _one_hot(targets, logits.shape[-1], logits)
    loss = xp.mean(xp.log(total[..., 0]) - xp.sum(shifted * hot, axis=-1))
    return loss, {"shares": powers / total, "targets": targets}


def cross_entropy_backward(saved: dict, dloss: float = 1.0) -> Array:
    """The gradient of the logits: (softmax - one-hot) / tokens."""
    shares = saved["shares"]
    hot = _one_hot(saved["targets"], shares.shape[-1], shares)
    return (shares - hot) * (dloss / math.prod(shares.shape[:-1]))


def parallel_cross_entropy_forward(
    comm: Comm, logits: Array, targets: Array, words: int
) -> tuple[Array, dict]:
    """`cross_entropy_forward` with the logits cut by words. Three small all-reduces.

    Args:
        comm: the ranks that share the vocabulary.
        logits: array of shape (b, s, this rank's words).
        targets: integers of shape (b, s), the same on all ranks.
        words: V, the size of the whole vocabulary.

    Returns: a scalar, the same on all ranks, and what `cross_entropy_backward` needs
    for this rank's logits.
    """
    _check_ids("targets", targets, words)
    xp = array_namespace(logits)
    local = targets - chunk_bounds(words, comm.size)[comm.rank]
    top = comm.all_reduce(xp.max(logits, axis=-1), op="max")
    shifted = logits - top[..., None]
    powers = xp.exp(shifted)
    total = comm.all_reduce(xp.sum(powers, axis=-1))
    picked = comm.all_reduce(xp.sum(shifted * _one_hot(local, logits.shape[-1], logits), axis=-1))
    loss = xp.mean(xp.log(total) - picked)
    return loss, {"shares": powers / total[..., None], "targets": local}


def saved_bytes(saved: Any) -> int:
    """Bytes of the arrays that a forward keeps for the backward, each counted once.

    >>> saved_bytes({"x": np.ones(4), "mlp": {"wide": np.ones(8)}})
    96
    """
    seen: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for held in value.values():
                walk(held)
        elif hasattr(value, "nbytes"):
            seen[id(value)] = int(value.nbytes)

    walk(saved)
    return sum(seen.values())


def gather_tokens(comm: Comm, x: Array) -> Array:
    """The whole sequence from all ranks' parts: all-gather along axis 1 of (b, s/t, h)."""
    return comm.all_gather(x.swapaxes(0, 1)).swapaxes(0, 1)


def scatter_tokens(comm: Comm, y: Array) -> Array:
    """This rank's tokens, summed over ranks: reduce-scatter along axis 1 of (b, s, h)."""
    return comm.reduce_scatter(y.swapaxes(0, 1)).swapaxes(0, 1)


GATHER = Conjugate(gather_tokens, scatter_tokens)
SCATTER = Conjugate(scatter_tokens, gather_tokens)
#: What a parallel layer takes for sequence parallelism:
#: ``parallel_block_forward(comm, params, x, **SEQUENCE)``.
SEQUENCE = {"enter": GATHER, "leave": SCATTER}
#: The same, keeping only this rank's tokens of what enters, and gathering the others again
#: in the backward pass.
SEQUENCE_AGAIN = {"enter": GATHER._replace(again=True), "leave": SCATTER}


def sync_replicated(comm: Comm, grads: Params) -> dict[str, Array]:
    """Sum over ranks the gradients of what every rank has whole. One all-reduce for all.

    With sequence parallelism each rank has seen its own tokens only, so that the
    gradients of layer norms and of the biases after the split regions are partial sums.
    Call it once a step. Without sequence parallelism these gradients are complete on
    every rank, and summing them would count them t times.

    Args:
        comm: the ranks that share the model.
        grads: gradients by name; those that `SPLIT_AXIS` doesn't list are summed.
    """
    names = [name for name in grads if name.rpartition(".")[2] not in SPLIT_AXIS]
    if not names or comm.size == 1:
        return dict(grads)
    xp = array_namespace(grads[names[0]])
    flat = comm.all_reduce(xp.concat([grads[name].reshape((-1,)) for name in names]))
    whole, start = dict(grads), 0
    for name in names:
        shape = tuple(grads[name].shape)
        whole[name] = flat[start : start + math.prod(shape)].reshape(shape)
        start += math.prod(shape)
    return whole


def time_block(
    comm: Comm,
    params: Params,
    x: Array,
    repeats: int = 5,
    dtype: str = "float32",
    **options: Any,
) -> list[float]:
    """Seconds of a block's forward and backward, measured `repeats` times; a rank program.

    A single rank that is given the shard of a larger group does that group's arithmetic
    and none of its communication.

    Args:
        comm: the ranks that share the block.
        params: this rank's part, by `shard`.
        x: array of shape (b, s, h).
        repeats: how many times to measure.
        dtype: the type to compute in, by the array module's name for it, such as
            "bfloat16".
        **options: `enter` and `leave`.
    """
    kind = getattr(comm.xp, dtype)
    params = {name: comm.xp.astype(p, kind) for name, p in params.items()}
    x, seconds = comm.xp.astype(x, kind), []
    for _ in range(repeats + 1):
        comm.barrier()
        began = comm.time()
        y, saved = parallel_block_forward(comm, params, x, **options)
        parallel_block_backward(comm, params, saved, y)
        seconds.append(comm.time() - began)
    return seconds[1:]
