# Generated from chapters/03_data_parallelism.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""Data-parallel training: a small model with a hand-written gradient, averaging, accumulation, buckets, and their costs."""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from manyranks.collectives import ring_all_reduce_seconds, split
from manyranks.runtime import Array, Comm, phantom

__all__ = [
    "GradientBuckets",
    "History",
    "Layer",
    "accumulate",
    "adam_init",
    "adam_step",
    "average_gradients",
    "backward",
    "batch_order",
    "broadcast_params",
    "checksum",
    "compute_seconds",
    "data_parallel_gradient",
    "distance",
    "effective_batch",
    "flatten",
    "forward",
    "init_mlp",
    "layer_backward",
    "layer_forward",
    "leaves",
    "loss_and_gradient",
    "replicas_agree",
    "scaled_lr",
    "sgd_step",
    "softmax_cross_entropy",
    "step_seconds",
    "time_steps",
    "timed_step",
    "train",
    "tree_map",
    "unflatten",
    "wall_bandwidth",
]

Layer = dict[str, Array]
"""A layer's parameters, or gradients: "w", (inputs, outputs), and "b", (outputs,)."""


def init_mlp(sizes: Sequence[int], seed: int = 0, dtype: Any = np.float64) -> list[Layer]:
    """Fresh parameters of a multilayer perceptron.

    Weights are normal with variance 2/inputs (He et al., 2015), biases zero.

    Args:
        sizes: widths from the input to the output, two or more.
        seed: equal seeds give equal parameters.
        dtype: of the arrays.

    Returns: one layer for each neighbouring pair of widths, NumPy arrays.

    >>> [layer["w"].shape for layer in init_mlp((64, 48, 10))]
    [(64, 48), (48, 10)]
    """
    if len(sizes) < 2:
        raise ValueError(f"sizes must hold two widths or more, got {tuple(sizes)}")
    rng = np.random.default_rng(seed)
    return [
        {
            "w": (rng.normal(size=(m, n)) * np.sqrt(2 / m)).astype(dtype),
            "b": np.zeros(n, dtype),
        }
        for m, n in zip(sizes, sizes[1:])
    ]


def layer_forward(layer: Layer, x: Array, relu: bool = True) -> Array:
    """One layer: ``x @ w + b``, negative values set to zero if `relu`.

    Args:
        layer: its parameters.
        x: shape (batch, inputs).
        relu: False for the model's last layer.

    Returns: shape (batch, outputs).
    """
    y = x @ layer["w"] + layer["b"]  # (batch, outputs)
    return y * (y > 0) if relu else y


def layer_backward(layer: Layer, x: Array, y: Array, dy: Array, relu: bool = True) -> tuple[Array, Layer]:
    """The gradients of one layer, from the gradient at its output.

    Args:
        layer: its parameters.
        x: what it was given, shape (batch, inputs).
        y: what it returned, shape (batch, outputs).
        dy: gradient of the loss with respect to `y`, the same shape.
        relu: as in `layer_forward`.

    Returns: (gradient with respect to `x`, gradients of the layer's parameters).
    """
    if relu:
        dy = dy * (y > 0)
    return dy @ layer["w"].T, {"w": x.T @ dy, "b": dy.sum(0)}


def forward(layers: Sequence[Layer], x: Array, head: bool = True) -> list[Array]:
    """All activations of a stack of layers.

    Args:
        layers: the parameters, first layer first.
        x: shape (batch, inputs).
        head: whether the last of these layers is the model's last, which has no ReLU. A
            pipeline stage in the middle of the model says False.

    Returns: `x` and then every layer's output; element i is what layer i is given, and
    the last one the logits.
    """
    activations = [x]
    for i, layer in enumerate(layers):
        activations.append(layer_forward(layer, activations[-1], relu=not (head and i == len(layers) - 1)))
    return activations


def backward(
    layers: Sequence[Layer],
    activations: Sequence[Array],
    dy: Array,
    head: bool = True,
    ready: Callable[[int, Layer], None] | None = None,
) -> tuple[Array, list[Layer]]:
    """The gradients of a stack of layers, last layer first.

    Args:
        layers: the parameters.
        activations: what `forward` returned.
        dy: gradient of the loss with respect to the last activation.
        head: as in `forward`.
        ready: called as ``ready(i, gradients)`` as soon as layer i's gradients are
            there, while earlier layers are still to come.

    Returns: (gradient with respect to the input, one dictionary of gradients for each
    layer).
    """
    grads: list[Any] = [None] * len(layers)
    for i in reversed(range(len(layers))):
        relu = not (head and i == len(layers) - 1)
        dy, grads[i] = layer_backward(layers[i], activations[i], activations[i + 1], dy, relu)
        if ready is not None:
            ready(i, grads[i])
    return dy, grads


def softmax_cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """The mean cross-entropy over a batch, and its gradient.

    Args:
        logits: shape (batch, classes).
        targets: shape (batch, classes), rows that sum to 1, such as one-hot labels.

    Returns: (loss, an array of no dimensions; gradient with respect to the logits, of
    their shape).

    >>> loss, _ = softmax_cross_entropy(np.zeros((2, 4)), np.eye(4)[:2])
    >>> bool(abs(loss - np.log(4)) < 1e-12)
    True
    """
    xp = array_namespace(logits)
    shifted = logits - xp.max(logits, axis=1, keepdims=True)  # exp can't overflow
    log_p = shifted - xp.log(xp.sum(xp.exp(shifted), axis=1, keepdims=True))
    batch = logits.shape[0]
    return -xp.sum(targets * log_p) / batch, (xp.exp(log_p) - targets) / batch


def loss_and_gradient(layers: Sequence[Layer], x: Array, targets: Array) -> tuple[Array, list[Layer]]:
    """The mean loss of a batch, and the gradients of all layers' parameters.

    Args:
        layers: the parameters.
        x: shape (batch, inputs).
        targets: shape (batch, classes), one-hot.

    Returns: (loss, gradients of the structure of `layers`).
    """
    activations = forward(layers, x)
    loss, dlogits = softmax_cross_entropy(activations[-1], targets)
    return loss, backward(layers, activations, dlogits)[1]


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `function` to every array of a tree of lists and dictionaries.

    Args:
        function: called with one array of each tree.
        tree: a list, a dictionary or an array; lists and dictionaries may be nested.
        *others: trees of the same structure.

    Returns: a tree of that structure with the results.

    >>> tree_map(lambda a, b: a + b, [{"w": 1, "b": 2}], [{"w": 10, "b": 20}])
    [{'w': 11, 'b': 22}]
    """
    if isinstance(tree, dict):
        return {key: tree_map(function, tree[key], *(other[key] for other in others)) for key in tree}
    if isinstance(tree, (list, tuple)):
        return [tree_map(function, *parts) for parts in zip(tree, *others, strict=True)]
    return function(tree, *others)


def leaves(tree: Any) -> list[Array]:
    """All arrays of a tree, in order."""
    found: list[Array] = []
    tree_map(found.append, tree)
    return found


def flatten(tree: Any) -> Array:
    """All arrays of a tree as one vector, in order. They share a dtype.

    >>> flatten([{"w": np.ones((2, 2)), "b": np.zeros(1)}])
    array([1., 1., 1., 1., 0.])
    """
    arrays = leaves(tree)
    return array_namespace(arrays[0]).concat([a.reshape((-1,)) for a in arrays])


def unflatten(flat: Array, like: Any) -> Any:
    """A vector cut into the shapes of `like`: the inverse of `flatten`.

    Args:
        flat: shape (as many elements as `like` has,).
        like: a tree of arrays; only its structure and shapes count.

    >>> unflatten(np.arange(3.0), [np.zeros((1, 2)), np.zeros(1)])
    [array([[0., 1.]]), array([2.])]
    """
    needed = sum(math.prod(a.shape) for a in leaves(like))
    if flat.shape != (needed,):
        raise ValueError(f"flat must have shape ({needed},), got {tuple(flat.shape)}")
    start = 0

    def cut(a: Array) -> Array:
        nonlocal start
        begin, start = start, start + math.prod(a.shape)
        return flat[begin:start].reshape(tuple(a.shape))

    return tree_map(cut, like)


def checksum(tree: Any) -> int:
    """A number for the bits of all arrays in a tree (CRC-32).

    Equal trees have equal ones, and different trees hardly ever.

    >>> checksum([np.zeros(3)]) == checksum([np.zeros(3)])
    True
    >>> checksum([np.zeros(3)]) == checksum([np.ones(3)])
    False
    """
    crc = 0
    for a in leaves(tree):
        a = a.cpu() if hasattr(a, "cpu") else a  # a tensor on a GPU
        crc = zlib.crc32(np.ascontiguousarray(np.asarray(a)).tobytes(), crc)
    return crc


def distance(tree: Any, other: Any) -> float:
    """The Euclidean distance of two trees, relative to the length of the second."""
    a, b = flatten(tree), flatten(other)
    return float(((a - b) ** 2).sum() ** 0.5 / (b**2).sum() ** 0.5)


def sgd_step(params: Any, grads: Any, lr: float) -> Any:
    """Plain gradient descent: ``p - lr * g`` for every parameter.

    >>> sgd_step([np.ones(2)], [np.ones(2)], lr=0.25)
    [array([0.75, 0.75])]
    """
    return tree_map(lambda p, g: p - lr * g, params, grads)


def adam_init(params: Any) -> dict[str, Any]:
    """Adam's state before the first step: zero moments of every parameter, and the step."""
    return {
        "m": tree_map(lambda p: p * 0, params),
        "v": tree_map(lambda p: p * 0, params),
        "t": 0,
    }


def adam_step(
    params: Any,
    grads: Any,
    state: dict[str, Any],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Any, dict[str, Any]]:
    """One step of Adam (Kingma and Ba, 2015), with AdamW's weight decay if asked for.

    Args:
        params: a tree of parameters. A single vector will do too: every element is
            treated alike, so a rank that owns a slice of all parameters can step that
            slice alone.
        grads: a tree of the same structure.
        state: what `adam_init` or the last step returned; it is not changed.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.

    Returns: (new parameters, new state).
    """
    b1, b2 = betas
    t = state["t"] + 1
    m = tree_map(lambda m, g: b1 * m + (1 - b1) * g, state["m"], grads)
    v = tree_map(lambda v, g: b2 * v + (1 - b2) * g * g, state["v"], grads)

    def move(p: Array, m: Array, v: Array) -> Array:
        return p * (1 - lr * weight_decay) - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)) ** 0.5 + eps)

    return tree_map(move, params, m, v), {"m": m, "v": v, "t": t}


def average_gradients(comm: Comm, grads: Any, weight: float | None = None) -> Any:
    """The mean of all ranks' gradients, on every rank: one all-reduce of one flat vector.

    Args:
        comm: the communicator, of N ranks.
        grads: a tree of arrays, of the same structure on all ranks.
        weight: how many examples (or tokens) this rank's mean was taken over. Without
            it all ranks count alike, which is right for shards of equal size. With it
            the mean is weighted, which is right for any sizes, 0 among them; it costs
            one element more.

    Returns: a tree of the structure of `grads`, the same on all ranks.

    >>> from manyranks import simulate
    >>> inputs = [[np.array([1.0])], [np.array([4.0])]]
    >>> simulate(average_gradients, inputs=inputs).results[0]
    [array([2.5])]
    """
    flat = flatten(grads)
    if weight is None:
        return unflatten(comm.all_reduce(flat, op="mean"), grads)
    if weight < 0:
        raise ValueError(f"weight must be 0 or more, got {weight}")
    sums = comm.all_reduce(array_namespace(flat).concat([flat * weight, flat[:1] * 0 + weight]))
    return unflatten(sums[:-1] / sums[-1], grads)


def data_parallel_gradient(
    comm: Comm,
    params: list[Layer],
    data: tuple[Array, Array],
    indices: Array,
    average: Callable[..., Any] = average_gradients,
    share: Callable[[Array, int], list[Array]] = split,
    weighted: bool = False,
) -> tuple[Array, list[Layer]]:
    """Loss and gradients of a big batch, of which a rank computes a shard; a rank program.

    Args:
        comm: the communicator, of N ranks.
        params: the model.
        data: (inputs, one-hot targets) of the whole data set.
        indices: which examples are in the big batch; the same on all ranks.
        average: called as ``average(comm, gradients, weight)``.
        share: cuts `indices` into N shards; rank r takes the r-th.
        weighted: whether `average` is told the shard's size as its weight.

    Returns: (mean loss of the big batch, averaged gradients).
    """
    x, targets = data
    mine = share(indices, comm.size)[comm.rank]
    loss, grads = loss_and_gradient(params, x[mine], targets[mine])
    grads = average(comm, grads, len(mine) if weighted else None)
    return comm.all_reduce(loss * (len(mine) / len(indices))), grads


def batch_order(examples: int, batch: int, steps: int, seed: int = 0) -> np.ndarray:
    """Which examples are in which step's batch: the data set shuffled anew for every epoch.

    Args:
        examples: size of the data set.
        batch: examples in a step, all ranks together; 1 to `examples`. What an epoch
            has left over is dropped.
        steps: how many.
        seed: the same on all ranks, so that they agree without a message.

    Returns: integers of shape (steps, batch).

    >>> batch_order(6, 2, steps=3, seed=1).shape
    (3, 2)
    """
    if not 1 <= batch <= examples:
        raise ValueError(f"batch must be from 1 to the {examples} examples, got {batch}")
    rng = np.random.default_rng(seed)
    rows = examples // batch
    epochs = [
        rng.permutation(examples)[: rows * batch].reshape(rows, batch) for _ in range(-(-steps // rows))
    ]
    return np.concatenate(epochs or [np.zeros((0, batch), int)])[:steps]


class History(NamedTuple):
    """What a rank is left with after training.

    Attributes:
        params: its final parameters.
        losses: the mean loss of each step's batch, before the step.
        checksums: of its parameters, after each step.
    """

    params: list[Layer]
    losses: list[float]
    checksums: list[int]


def train(
    comm: Comm,
    params: list[Layer],
    data: tuple[Array, Array],
    order: Array,
    lr: float,
    average: Callable[..., Any] = average_gradients,
    share: Callable[[Array, int], list[Array]] = split,
    weighted: bool = False,
) -> History:
    """Data-parallel training with plain SGD; a rank program.

    Args:
        comm: the communicator, of N ranks.
        params: the model at the start; the same on all ranks, if it is to be right.
        data: (inputs, one-hot targets).
        order: what `batch_order` returns.
        lr: learning rate.
        average, share, weighted: as in `data_parallel_gradient`.

    Returns: this rank's `History`.
    """
    losses, checksums = [], []
    for indices in order:
        loss, grads = data_parallel_gradient(comm, params, data, indices, average, share, weighted)
        params = sgd_step(params, grads, lr)
        losses.append(float(loss))
        checksums.append(checksum(params))
    return History(params, losses, checksums)


def replicas_agree(comm: Comm, params: Any) -> bool:
    """Whether all ranks hold the same parameters, bit for bit.

    One all-reduce of two numbers. Every rank gets the same answer. A NaN has bits too,
    so it does not hide.

    >>> from manyranks import simulate
    >>> simulate(replicas_agree, inputs=[[np.zeros(3)], [np.ones(3)]]).results
    [False, False]
    """
    c = float(checksum(params))  # 32 bits fit a double exactly
    highest = comm.all_reduce(np.array([c, -c]), op="max")
    return float(highest[0]) == -float(highest[1])


def broadcast_params(comm: Comm, params: Any, src: int = 0) -> Any:
    """Rank `src`'s parameters on every rank, whatever the others had.

    Call it once, before training.

    Args:
        comm: the communicator.
        params: a tree of arrays of the same structure and shapes on all ranks.
        src: whose values count.

    Returns: the tree with rank `src`'s values.
    """
    return unflatten(comm.broadcast(flatten(params) if comm.rank == src else None, src=src), params)


def effective_batch(micro_batch: int, accumulation: int, ranks: int) -> int:
    """Examples that one optimizer step sees: the product.

    >>> effective_batch(2, accumulation=16, ranks=8)
    256
    """
    for name, value in (
        ("micro_batch", micro_batch),
        ("accumulation", accumulation),
        ("ranks", ranks),
    ):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    return micro_batch * accumulation * ranks


def accumulate(
    layers: Sequence[Layer], x: Array, targets: Array, micro_steps: int
) -> tuple[Array, list[Layer]]:
    """`loss_and_gradient` of a batch, computed in `micro_steps` pieces of any sizes.

    Args:
        layers: the parameters.
        x: shape (batch, inputs).
        targets: shape (batch, classes).
        micro_steps: how many pieces, from 1 to the batch.

    Returns: (mean loss of the batch, its gradients). At any time only one piece's
    activations exist.
    """
    if not 1 <= micro_steps <= len(x):
        raise ValueError(f"micro_steps must be from 1 to the batch of {len(x)}, got {micro_steps}")
    loss, total = 0.0, None
    for piece_x, piece_targets in zip(split(x, micro_steps), split(targets, micro_steps)):
        piece_loss, grads = loss_and_gradient(layers, piece_x, piece_targets)
        part = len(piece_x) / len(x)
        loss = loss + piece_loss * part
        if total is None:
            total = tree_map(lambda g: g * 0, grads)
        total = tree_map(lambda a, g, part=part: a + part * g, total, grads)
    return loss, total


class GradientBuckets:
    """Averages gradients bucket by bucket while the backward pass is running, as DDP does.

    Args:
        comm: the communicator.
        limit: bytes; a bucket is sent once it holds at least as many. 0 sends each
            addition by itself, infinity all at the end.
        algorithm: of the all-reduce.

    >>> from manyranks import simulate
    >>> def program(comm, x):
    ...     buckets = GradientBuckets(comm, limit=16)
    ...     for part in x:
    ...         buckets.add({"w": part})
    ...     return buckets.finish()
    >>> simulate(program, inputs=[np.eye(2), 3 * np.eye(2)]).results[0]
    [{'w': array([2., 0.])}, {'w': array([0., 2.])}]
    """

    def __init__(self, comm: Comm, limit: float = 25e6, algorithm: str = "auto") -> None:
        if not limit >= 0:
            raise ValueError(f"limit must be 0 bytes or more, got {limit}")
        self.comm, self.limit, self.algorithm = comm, limit, algorithm
        self.waiting: list[Any] = []
        self.held = 0  # bytes waiting
        self.going: list[tuple[list[Any], Any]] = []

    def add(self, grads: Any) -> None:
        """Take over a tree of finished gradients; send the bucket if it is full now."""
        self.waiting.append(grads)
        self.held += sum(a.nbytes for a in leaves(grads))
        if self.held >= self.limit:
            self.flush()

    def flush(self) -> None:
        """Send what is waiting, full or not."""
        if self.waiting:
            flat = flatten(self.waiting)
            work = self.comm.all_reduce(flat, op="mean", algorithm=self.algorithm, async_op=True)
            self.going.append((self.waiting, work))
            self.waiting, self.held = [], 0

    def finish(self) -> list[Any]:
        """Send the rest, wait, and return the averaged trees in the order of `add`."""
        self.flush()
        return [tree for like, work in self.going for tree in unflatten(work.wait(), like)]


def timed_step(
    comm: Comm,
    sizes: Sequence[int],
    forward_seconds: float,
    limit: float,
    overlap: bool = True,
    shares: Sequence[float] | None = None,
    dtype: Any = np.float32,
    algorithm: str = "auto",
) -> None:
    """One data-parallel step on phantoms, for its timeline; a rank program for `simulate`.

    Args:
        comm: the communicator.
        sizes: elements of each parameter tensor, first layer first.
        forward_seconds: of the forward pass; the backward pass takes twice as long.
        limit: bucket size in bytes, as in `GradientBuckets`.
        overlap: False makes the first all-reduce wait for the end of the backward pass.
        shares: how the backward pass is spread over the tensors; in proportion to
            `sizes` without it.
        dtype: of the gradients.
        algorithm: of the all-reduce.
    """
    shares = sizes if shares is None else shares
    whole = sum(shares)
    comm.compute(seconds=forward_seconds, label="forward")
    buckets, late = GradientBuckets(comm, limit, algorithm), []
    for size, share in zip(reversed(sizes), reversed(shares)):
        comm.compute(seconds=2 * forward_seconds * share / whole, label="backward")
        if overlap:
            buckets.add(phantom(size, dtype))
        else:
            late.append(phantom(size, dtype))
    for grads in late:
        buckets.add(grads)
    buckets.finish()


def compute_seconds(params: float, tokens: float, flops: float) -> float:
    """Predicted time of one forward and backward pass: 6 FLOPs per parameter and token.

    Args:
        params: parameters of the model.
        tokens: on one GPU.
        flops: FLOP/s that the GPU achieves.

    >>> round(compute_seconds(7e9, tokens=8192, flops=300e12), 3)
    1.147
    """
    if flops <= 0:
        raise ValueError(f"flops must be positive, got {flops}")
    return 6 * params * tokens / flops


def wall_bandwidth(
    params: float,
    tokens: float,
    flops: float,
    ranks: int,
    accumulation: int = 1,
    grad_bytes: float = 2,
) -> float:
    """The bandwidth at which computing and the gradient's all-reduce take equally long.

    A ring, its latency left out. With less, a data-parallel job is bound by its network
    even if all communication overlaps with computing. To hide it behind the backward
    pass alone takes 1.5 times as much.

    Args:
        params: parameters of the model.
        tokens: on one GPU, in one micro-step.
        flops: FLOP/s that the GPU achieves.
        ranks: N.
        accumulation: micro-steps between two all-reduces.
        grad_bytes: bytes for each parameter's gradient.

    Returns: bytes per second, one way, at each rank.

    >>> round(wall_bandwidth(7e9, tokens=8192, flops=300e12, ranks=64) / 1e9, 2)
    24.03
    """
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")
    moved = 2 * grad_bytes * params * (ranks - 1) / ranks
    return moved / (accumulation * compute_seconds(params, tokens, flops))


def step_seconds(work: float, size: float, ranks: int, alpha: float, beta: float) -> tuple[float, float]:
    """Predicted parts of a step whose work is divided over `ranks`; nothing overlaps.

    Args:
        work: seconds that one GPU needs for the whole batch.
        size: bytes of gradient.
        ranks: G, how many GPUs share the batch.
        alpha: latency of a message, seconds.
        beta: bandwidth, bytes per second.

    Returns: (seconds computing, seconds in the ring all-reduce).

    >>> [round(t, 4) for t in step_seconds(0.8, 14e9, ranks=8, alpha=0, beta=300e9)]
    [0.1, 0.0817]
    """
    return work / ranks, ring_all_reduce_seconds(size, ranks, alpha, beta)


def scaled_lr(base: float, batch: int, base_batch: int, step: int = 0, warmup: int = 0) -> float:
    """The linear scaling rule, with linear warm-up from near zero.

    Goyal et al. (2017) start the warm-up from `base`.

    Args:
        base: a learning rate that works for `base_batch`.
        batch: the batch now.
        base_batch: the batch that `base` belongs to.
        step: number of the step, from 0.
        warmup: steps over which the rate rises to its full value; 0 for none.

    >>> scaled_lr(0.1, batch=64, base_batch=16), scaled_lr(0.1, 64, 16, step=0, warmup=4)
    (0.4, 0.1)
    """
    full = base * batch / base_batch
    return full * min(1.0, (step + 1) / warmup) if warmup else full


def time_steps(
    comm: Comm, params: list[Layer], data: tuple[Array, Array], repeats: int = 9
) -> list[list[float]]:
    """Time the parts of a data-parallel step; a rank program.

    Args:
        comm: the communicator.
        params: the model.
        data: this rank's own batch, (inputs, one-hot targets).
        repeats: timed repetitions; one more warms up.

    Returns: two lists of `repeats` seconds, for `manyranks.collectives.quickest`: whole
    steps, and the gradient's all-reduce alone.
    """
    flat = flatten(params)
    steps, reductions = [], []
    for _ in range(repeats + 1):
        comm.barrier()
        began = comm.time()
        _, grads = loss_and_gradient(params, *data)
        params = sgd_step(params, average_gradients(comm, grads), 0.01)
        steps.append(comm.time() - began)
        comm.barrier()
        began = comm.time()
        comm.all_reduce(flat, op="mean")
        reductions.append(comm.time() - began)
    return [steps[1:], reductions[1:]]
