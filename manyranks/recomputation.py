# Generated from chapters/08_overlap_and_frameworks.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""Activation checkpointing: gradients of a stack of layers under any policy, with live bytes and FLOPs counted and predicted."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from manyranks.pipeline import LayerFunctions
from manyranks.runtime import Array, phantom
from manyranks.tensor_parallel import (
    Params,
    attention_cost,
    block_backward,
    block_forward,
    block_shapes,
    mlp_cost,
    take,
)

__all__ = [
    "BLOCK",
    "CountingArray",
    "Gradients",
    "LiveBytes",
    "RECOMPUTED",
    "SELECTIVE",
    "attention_weights",
    "best_segment",
    "block_flops",
    "checkpoint_peak",
    "counting",
    "recompute_flops",
    "selective_backward",
    "selective_forward",
    "stack_gradients",
]


class LiveBytes:
    """Bytes of the saved arrays that are alive, now and at most.

    An array is counted, once and whole, from when `watch` sees it until Python frees
    it: nobody has to say that it was dropped. A view counts as the array that it looks
    into. NumPy arrays only.

    >>> live = LiveBytes()
    >>> saved = live.watch({"x": np.zeros(4), "y": [np.zeros(2)]})
    >>> del saved["x"]
    >>> live.now, live.peak
    (16, 48)
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._known: set[int] = set()

    def watch(self, saved: Any) -> Any:
        """Count all arrays in nested dicts, lists and tuples; returns its argument."""
        if isinstance(saved, dict):
            saved_values = list(saved.values())
        elif isinstance(saved, (list, tuple)):
            saved_values = list(saved)
        else:
            if isinstance(saved, np.ndarray):
                self._add(saved)
            return saved
        for value in saved_values:
            self.watch(value)
        return saved

    def _add(self, x: np.ndarray) -> None:
        while isinstance(x.base, np.ndarray):
            x = x.base
        if id(x) not in self._known:
            self._known.add(id(x))
            self.now += x.nbytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(x, self._gone, id(x), x.nbytes)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class CountingArray(np.ndarray):
    """A NumPy array that counts the FLOPs of the matrix products it takes part in.

    Make one with `counting`. Whatever is computed from it counts into the same list.
    """

    flops: list[int] | None

    def __array_finalize__(self, source: Any) -> None:
        self.flops = getattr(source, "flops", None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        def bare(x: Any) -> Any:
            return x.view(np.ndarray) if isinstance(x, CountingArray) else x

        counters = [x for x in (*inputs, *(out or ())) if isinstance(x, CountingArray)]
        plain = [bare(x) for x in inputs]
        if out is not None:
            options["out"] = tuple(bare(x) for x in out)
        result = getattr(ufunc, method)(*plain, **options)
        flops = counters[0].flops
        if ufunc is np.matmul and flops is not None:
            flops.append(2 * math.prod(result.shape) * plain[0].shape[-1])
        if isinstance(result, np.ndarray):
            result = result.view(CountingArray)
            result.flops = flops
        return result


def counting(x: np.ndarray, flops: list[int]) -> np.ndarray:
    """`x` as an array that appends to `flops` what each matrix product costs.

    Args:
        x: any NumPy array. The result shares its memory.
        flops: a list; two FLOPs for each multiplication and addition.

    >>> flops = []
    >>> y = counting(np.ones((2, 3)), flops) @ np.ones((3, 4))
    >>> sum(flops)
    48
    """
    view = x.view(CountingArray)
    view.flops = flops
    return view


def attention_weights(q: Array, k: Array) -> Array:
    """Causal attention's softmax, from the queries and keys that a forward pass saves.

    Args:
        q: shape (b, groups, heads of a group, s, d).
        k: shape (b, groups, 1, s, d).

    Returns: shape (b, groups, heads of a group, s, s), to the bit what the forward pass
    had.
    """
    xp = array_namespace(q)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    seen = xp.tril(xp.ones_like(scores[0, 0, 0])) > 0
    scores = xp.where(seen, scores, -math.inf)
    weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    return weights / xp.sum(weights, axis=-1, keepdims=True)


def selective_forward(params: Params, x: Array) -> tuple[Array, dict]:
    """`block_forward` that doesn't keep attention's (s, s) matrices."""
    y, saved = block_forward(params, x)
    del saved["attention"]["weights"]
    return y, saved


def selective_backward(params: Params, saved: dict, dy: Array) -> tuple[Array, dict]:
    """`block_backward` that computes attention's (s, s) matrices again."""
    attention = saved["attention"]
    weights = attention_weights(attention["q"], attention["k"])
    whole = {**saved, "attention": {**attention, "weights": weights}}
    return block_backward(params, whole, dy)


BLOCK = LayerFunctions(block_forward, block_backward)
SELECTIVE = LayerFunctions(selective_forward, selective_backward)


class Gradients(NamedTuple):
    """What `stack_gradients` returns.

    Attributes:
        y: the last layer's result.
        dx: gradient of the input.
        layers: gradients of each layer's parameters, first layer first.
        held: bytes of saved arrays alive between forward and backward pass.
        peak: bytes of saved arrays alive at most.
    """

    y: Array
    dx: Array
    layers: list[Any]
    held: int
    peak: int


def stack_gradients(
    layers: Sequence[Any],
    x: Array,
    slope: Callable[[Array], Array],
    functions: LayerFunctions = BLOCK,
    segment: int | None = None,
) -> Gradients:
    """Forward and backward pass of a stack of layers, with or without recomputation.

    Args:
        layers: each layer's parameters, first layer first.
        x: the input.
        slope: from the result, the gradient of the loss with respect to it.
        functions: how a layer computes: `BLOCK`, `SELECTIVE`, or another pair such as
            `manyranks.pipeline.RESIDUAL`.
        segment: k; keep the input of every k-th layer only and recompute k layers at a
            time. None keeps what every layer saves.

    Returns: `Gradients`. The same gradients, to the bit, whatever is recomputed.
    """
    if segment is not None and segment < 1:
        raise ValueError(f"segment must be 1 layer or more, or None, got {segment}")
    live, grads = LiveBytes(), [None] * len(layers)
    step = len(layers) if segment is None else segment
    inputs: list[Array] = []
    saved: list[Any] = []
    for i, params in enumerate(layers):
        if segment is not None and i % step == 0:
            inputs.append(live.watch(x))
        x, of_layer = functions.forward(params, x)
        if segment is None:
            saved.append(live.watch(of_layer))
        del of_layer
    y, held, dy = x, live.now, slope(x)
    for first in reversed(range(0, len(layers), max(step, 1))):
        if segment is not None:  # once more, and this time keep what it saves
            x = inputs[-1]
            for params in layers[first : first + step]:
                x, of_layer = functions.forward(params, x)
                saved.append(live.watch(of_layer))
                del of_layer
        for i in reversed(range(first, min(first + step, len(layers)))):
            dy, grads[i] = functions.backward(layers[i], saved.pop(), dy)
        if inputs:  # held until its segment is done, as in PyTorch
            inputs.pop()
    return Gradients(y, dy, grads, held, live.peak)


def block_flops(batch: int, sequence: int, hidden: int) -> int:
    """FLOPs of one block's matrix products, forward and backward, nothing recomputed.

    72·b·s·h² + 12·b·s²·h, three times the forward pass; an MLP 4h wide, all s² scores.

    >>> block_flops(1, 2, 4)
    2496
    """
    x = phantom((batch, sequence, hidden))
    shapes = {n: phantom(shape) for n, shape in block_shapes(hidden, 1).items()}
    forward = attention_cost(take(shapes, "attention"), x)[0]
    return int(3 * (forward + mlp_cost(take(shapes, "mlp"), x)[0]))


RECOMPUTED = ("none", "selective", "core", "full", "published")


def recompute_flops(batch: int, sequence: int, hidden: int, what: str) -> int:
    """FLOPs that recomputation adds to a block.

    Args:
        batch, sequence, hidden: b, s and h.
        what: "none"; "selective", the scores QKᵀ only, which is all that is missing if
            the core's result was kept; "core", the whole attention core (QKᵀ and the
            product with V) once; "full", the whole forward pass; "published", what
            Korthikanti et al. (2022) count for selective recomputation: the core's
            forward and backward FLOPs once more.

    >>> [recompute_flops(1, 2, 4, what) for what in RECOMPUTED]
    [0, 32, 64, 832, 192]
    """
    if what not in RECOMPUTED:
        raise ValueError(f"what must be one of {', '.join(RECOMPUTED)}, got {what!r}")
    scores = 2 * batch * sequence**2 * hidden
    return {
        "none": 0,
        "selective": scores,
        "core": 2 * scores,
        "full": block_flops(batch, sequence, hidden) // 3,
        "published": 6 * scores,
    }[what]


def checkpoint_peak(layers: int, segment: int, layer: float, entry: float) -> float:
    """Predicted bytes held at most, if the input of every `segment`-th layer is kept.

    Args:
        layers: L.
        segment: k, from 1 to L.
        layer: A, bytes that one layer saves.
        entry: i, bytes of a layer's input.

    An input that its layer saves as well is counted twice.

    >>> checkpoint_peak(16, 4, layer=10.0, entry=1.0)
    44.0
    """
    if not 1 <= segment <= layers:
        raise ValueError(f"segment must be from 1 to the {layers} layers, got {segment}")
    return math.ceil(layers / segment) * entry + segment * layer


def best_segment(layers: int, layer: float, entry: float) -> int:
    """The number of layers in a segment that holds least: near √(L·i/A).

    Args:
        layers, layer, entry: as in `checkpoint_peak`.

    >>> best_segment(64, layer=1.0, entry=1.0), best_segment(64, layer=17.0, entry=1.0)
    (8, 2)
    """
    if layers < 1 or layer <= 0 or entry <= 0:
        raise ValueError(f"layers, layer and entry must be positive, got {layers}, {layer} and {entry}")
    return min(range(1, layers + 1), key=lambda k: checkpoint_peak(layers, k, layer, entry))
