# Generated from chapters/07_3d_parallelism.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""A grid of ranks with named axes: its groups, a small GPT trained on it, and a large one's step timed on phantoms."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from manyranks.collectives import ring_all_reduce_seconds
from manyranks.data_parallel import (
    GradientBuckets,
    adam_init,
    adam_step,
    unflatten,
)
from manyranks.memory import Transformer
from manyranks.pipeline import (
    LayerFunctions,
    Worker,
    execute,
    one_f_one_b,
    pipeline_step,
)
from manyranks.runtime import Array, Cluster, Comm, Run, chunk_bounds, phantom, simulate
from manyranks.tensor_parallel import (
    SEQUENCE,
    F,
    G,
    Params,
    block_backward,
    block_forward,
    block_shapes,
    column_parallel_backward,
    column_parallel_forward,
    cross_entropy_backward,
    cross_entropy_forward,
    embedding_backward,
    embedding_forward,
    layer_norm_backward,
    layer_norm_forward,
    linear_backward,
    linear_forward,
    parallel_block_backward,
    parallel_block_forward,
    parallel_cross_entropy_forward,
    parallel_embedding_backward,
    parallel_embedding_forward,
    put,
    shard,
    sync_replicated,
    take,
    unshard,
)
from manyranks.zero import ZeroModel

__all__ = [
    "Carried",
    "ChunkCost",
    "Grid",
    "GridWorker",
    "ORDER",
    "StepShape",
    "Trained",
    "assemble",
    "check_product",
    "gpt_layers",
    "gpt_loss_and_gradient",
    "gpt_shapes",
    "largest_difference",
    "make_grid",
    "simulate_step",
    "stage_parts",
    "step_shape",
    "timed_3d",
    "traffic_by_axis",
    "train_3d",
    "train_serial",
]

#: The layout of this book: axes by name, outermost first. The last one's ranks are neighbours.
ORDER = ("dp", "pp", "tp")


@dataclass(frozen=True)
class Grid:
    """Ranks laid out on named axes.

    Attributes:
        order: the axes' names, outermost first. Ranks count up along the last axis
            first.
        shape: how many ranks along each axis.

    Any number of axes will do: ``Grid(("dp", "cp", "pp", "tp"), (2, 2, 4, 8))``.

    >>> grid = Grid(("dp", "pp", "tp"), (2, 2, 2))
    >>> grid
    Grid(dp 2 x pp 2 x tp 2 = 8 ranks)
    >>> grid.coordinates(5)
    {'dp': 1, 'pp': 0, 'tp': 1}
    >>> grid.groups("pp")
    [(0, 2), (1, 3), (4, 6), (5, 7)]
    """

    order: tuple[str, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", tuple(self.order))
        object.__setattr__(self, "shape", tuple(self.shape))
        if not self.order or len(set(self.order)) != len(self.order):
            raise ValueError(f"order must be different names, one at least, got {self.order}")
        if len(self.order) != len(self.shape):
            raise ValueError(
                f"shape must have {len(self.order)} sizes, one for each of {self.order}, got {self.shape}"
            )
        for name, size in zip(self.order, self.shape):
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
                raise ValueError(f"{name} must be a whole number, 1 or more, got {size!r}")

    def __repr__(self) -> str:
        sizes = " x ".join(f"{name} {size}" for name, size in zip(self.order, self.shape))
        return f"Grid({sizes} = {self.ranks} ranks)"

    @property
    def ranks(self) -> int:
        """The product of the sizes."""
        return math.prod(self.shape)

    def size(self, axis: str) -> int:
        """Ranks along one axis; 1 for an axis that the grid doesn't have."""
        return self.shape[self.order.index(axis)] if axis in self.order else 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands, on each axis."""
        whole = isinstance(rank, (int, np.integer)) and not isinstance(rank, bool)
        if not whole or not 0 <= rank < self.ranks:
            raise ValueError(f"rank must be from 0 to {self.ranks - 1}, got {rank!r}")
        at = {}
        for name, size in zip(reversed(self.order), reversed(self.shape)):
            rank, at[name] = divmod(rank, size)
        return {name: at[name] for name in self.order}

    def rank(self, **coordinates: int) -> int:
        """The rank that stands there; axes that aren't named count as 0.

        >>> Grid(("dp", "pp", "tp"), (2, 4, 8)).rank(dp=1, pp=2, tp=3)
        51
        """
        unknown = set(coordinates) - set(self.order)
        if unknown:
            raise ValueError(
                f"coordinates must be of {', '.join(self.order)}, got {', '.join(sorted(unknown))}"
            )
        rank = 0
        for name, size in zip(self.order, self.shape):
            at = coordinates.get(name, 0)
            if not 0 <= at < size:
                raise ValueError(f"{name} must be from 0 to {size - 1}, got {at}")
            rank = rank * size + at
        return rank

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that one rank reaches by moving along `axes` and no other.

        Args:
            rank: whose group.
            *axes: one or more; the group is ordered as the layout is.

        >>> Grid(("dp", "pp", "tp"), (2, 2, 2)).group(5, "dp", "tp")
        (0, 1, 4, 5)
        """
        unknown = set(axes) - set(self.order)
        if unknown:
            raise ValueError(f"axes must be of {', '.join(self.order)}, got {', '.join(sorted(unknown))}")
        at = self.coordinates(rank)
        along = [name for name in self.order if name in axes]
        moves = itertools.product(*(range(self.size(name)) for name in along))
        return tuple(self.rank(**{**at, **dict(zip(along, move))}) for move in moves)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups along `axes`: every rank is in exactly one."""
        return list(dict.fromkeys(self.group(rank, *axes) for rank in range(self.ranks)))

    def comms(self, comm: Comm) -> dict[str, Comm]:
        """This rank's sub-communicators, one for each axis.

        Args:
            comm: the communicator of all ranks of the grid, each of which calls this.

        Raises: ValueError if `comm` has another number of ranks.
        """
        check_product(comm.size, **dict(zip(self.order, self.shape)))
        return {name: comm.group(self.group(comm.rank, name)) for name in self.order}

    def nodes(self, axis: str, cluster: Cluster) -> int:
        """The most nodes that a group along `axis` is spread over.

        >>> cluster = Cluster(nodes=8, gpus_per_node=8)
        >>> grid = Grid(("dp", "pp", "tp"), (2, 4, 8))
        >>> {axis: grid.nodes(axis, cluster) for axis in grid.order}
        {'dp': 2, 'pp': 4, 'tp': 1}
        """
        return max(len({cluster.node_of(rank) for rank in group}) for group in self.groups(axis))


def check_product(ranks: int, **sizes: int) -> None:
    """Refuse sizes whose product isn't the number of ranks.

    >>> check_product(64, dp=1, pp=8, tp=8)
    >>> check_product(64, dp=2, pp=8, tp=8)
    Traceback (most recent call last):
    ...
    ValueError: dp x pp x tp must be the 64 ranks, got 2 x 8 x 8 = 128
    """
    product = math.prod(sizes.values())
    if product != ranks:
        said = f"{' x '.join(sizes)} must be the {ranks} ranks"
        raise ValueError(f"{said}, got {' x '.join(map(str, sizes.values()))} = {product}")


def make_grid(ranks: int | None = None, order: Sequence[str] = ORDER, **sizes: int) -> Grid:
    """A grid from sizes by name. With `ranks`, the data axis gets what is left.

    Args:
        ranks: how many in all. Without it the product of the sizes.
        order: the layout, outermost first. An axis of `sizes` that it doesn't list is
            an error.
        **sizes: ranks along each axis. If `ranks` is given and "dp" isn't, or another
            axis of `order`, that one gets the rest; what else is left out counts as 1.

    Raises: ValueError if the sizes don't multiply to `ranks`.

    >>> make_grid(64, tp=8, pp=4)
    Grid(dp 2 x pp 4 x tp 8 = 64 ranks)
    >>> make_grid(64, tp=8, pp=3)
    Traceback (most recent call last):
    ...
    ValueError: tp x pp must divide the 64 ranks, got 8 x 3 = 24
    """
    order = tuple(order)
    if ranks is not None:
        Grid(("ranks",), (ranks,))  # refuses what isn't a count
    unknown = set(sizes) - set(order)
    if unknown:
        raise ValueError(f"order must list every axis, got {order} without {', '.join(sorted(unknown))}")
    shape = {name: sizes.get(name, 1) for name in order}
    absent = [name for name in order if name not in sizes]
    Grid(order, tuple(shape.values()))  # refuses sizes that aren't counts
    if ranks is not None and absent:
        rest, over = divmod(ranks, math.prod(sizes.values()))
        if over or not rest:
            said = f"{' x '.join(sizes)} must divide the {ranks} ranks"
            raise ValueError(
                f"{said}, got {' x '.join(map(str, sizes.values()))} = {math.prod(sizes.values())}"
            )
        shape["dp" if "dp" in absent else absent[0]] = rest
    if ranks is not None:
        check_product(ranks, **shape)
    return Grid(order, tuple(shape.values()))


def gpt_shapes(layers: int, hidden: int, heads: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The shape of every array of a small GPT, by name.

    "embed.table" (V, h), "blocks.0.…" and on as `block_shapes` has them, the last norm
    "norm.scale" and "norm.shift" (h,), "head.unembed" (h, V). No position embeddings;
    the two ends aren't tied.
    """
    shapes: dict[str, tuple[int, ...]] = {"embed.table": (vocabulary, hidden)}
    for i in range(layers):
        shapes |= put(f"blocks.{i}", block_shapes(hidden, heads))
    return shapes | {
        "norm.scale": (hidden,),
        "norm.shift": (hidden,),
        "head.unembed": (hidden, vocabulary),
    }


def gpt_layers(params: Params) -> int:
    """How many blocks a model of `gpt_shapes` has."""
    return len({name.split(".")[1] for name in params if name.startswith("blocks.")})


def gpt_loss_and_gradient(params: Params, ids: Array, targets: Array) -> tuple[Array, dict[str, Array]]:
    """The mean cross-entropy of a small GPT and its gradient, on one rank, nothing split.

    What every parallel run of it has to equal.

    Args:
        params: all arrays that `gpt_shapes` lists.
        ids, targets: whole numbers of shape (b, s).

    Returns: a scalar, and a dict of the names of `params`.
    """
    x, embed = embedding_forward(take(params, "embed"), ids)
    saved = []
    for i in range(gpt_layers(params)):
        x, kept = block_forward(take(params, f"blocks.{i}"), x)
        saved.append(kept)
    x, norm = layer_norm_forward(take(params, "norm"), x)
    logits, head = linear_forward(params, x, "head.unembed", "head.bias")
    loss, kept = cross_entropy_forward(logits, targets)
    dy, grads = linear_backward(params, head, cross_entropy_backward(kept), "head.unembed", "head.bias")
    dy, of_norm = layer_norm_backward(take(params, "norm"), norm, dy)
    grads = {**grads, **put("norm", of_norm)}
    for i in reversed(range(len(saved))):
        dy, of_block = block_backward(take(params, f"blocks.{i}"), saved[i], dy)
        grads |= put(f"blocks.{i}", of_block)
    grads |= put("embed", embedding_backward(take(params, "embed"), embed, dy)[1])
    return loss, {name: grads[name] for name in params}


class Trained(NamedTuple):
    """What a rank has after training.

    Attributes:
        losses: the mean loss of each step's batch, before the step.
        grads: the gradient of the last step, averaged over the batch; this rank's part
            of the model, by name.
        params: this rank's part of the model afterwards.
    """

    losses: list[float]
    grads: dict[str, Array]
    params: dict[str, Array]


def train_serial(params: Params, data: tuple[Array, Array], order: Array, lr: float = 1e-3) -> Trained:
    """Train a small GPT with Adam on one rank. Arguments as for `train_3d`."""
    state, losses, grads = adam_init(dict(params)), [], {}
    params = dict(params)
    for indices in order:
        loss, grads = gpt_loss_and_gradient(params, data[0][indices], data[1][indices])
        params, state = adam_step(params, grads, state, lr)
        losses.append(float(loss))
    return Trained(losses, grads, params)


def stage_parts(layers: int, stages: int, chunks: int = 1) -> list[list[list[str]]]:
    """Which parts of a small GPT each stage computes: ``result[stage][chunk]`` names them.

    The blocks are dealt evenly, as `manyranks.pipeline.split_layers` does it; the first
    piece has the embedding as well, the last one norm and head.

    Raises: ValueError if the blocks don't divide into stages·chunks equal pieces.

    >>> stage_parts(4, stages=2)
    [[['embed', 'blocks.0', 'blocks.1']], [['blocks.2', 'blocks.3', 'head']]]
    """
    pieces = stages * chunks
    each, over = divmod(layers, pieces)
    if over or not each:
        raise ValueError(f"layers must divide into stages x chunks = {pieces} equal parts, got {layers}")
    parts = [
        [[f"blocks.{(c * stages + s) * each + i}" for i in range(each)] for c in range(chunks)]
        for s in range(stages)
    ]
    parts[0][0].insert(0, "embed")
    parts[-1][-1].append("head")
    return parts


def _part(params: Params, name: str) -> dict[str, Array]:
    """The arrays of one of `stage_parts`' parts, under their names in the model."""
    if name == "head":
        names = ("norm.scale", "norm.shift", "head.unembed")
        return {key: params[key] for key in names}
    return {key: x for key, x in params.items() if key.startswith(name + ".")}


def _functions(tp: Comm, name: str, words: int, options: dict[str, Any]) -> LayerFunctions:
    """How one part computes on the ranks of a tensor-parallel group."""
    enter, leave = options.get("enter", F), options.get("leave", G)

    def embed_forward(params: Params, ids: Array) -> tuple[Array, dict]:
        return parallel_embedding_forward(tp, take(params, "embed"), ids, words, leave)

    def embed_backward(params: Params, saved: dict, dy: Array) -> tuple[None, dict]:
        _, grads = parallel_embedding_backward(tp, take(params, "embed"), saved, dy)
        return None, put("embed", grads)

    def head_forward(params: Params, x: Array) -> tuple[Array, dict]:
        x, norm = layer_norm_forward(take(params, "norm"), x)
        logits, head = column_parallel_forward(tp, {"w": params["head.unembed"]}, x, enter)
        return logits, {"norm": norm, "head": head}

    def head_backward(params: Params, saved: dict, dy: Array) -> tuple[Array, dict]:
        dy, grads = column_parallel_backward(tp, {"w": params["head.unembed"]}, saved["head"], dy)
        dy, of_norm = layer_norm_backward(take(params, "norm"), saved["norm"], dy)
        return dy, {**put("norm", of_norm), "head.unembed": grads["w"]}

    def one_forward(params: Params, x: Array) -> tuple[Array, dict]:
        return parallel_block_forward(tp, take(params, name), x, enter, leave)

    def one_backward(params: Params, saved: dict, dy: Array) -> tuple[Array, dict]:
        dx, grads = parallel_block_backward(tp, take(params, name), saved, dy)
        return dx, put(name, grads)

    return {
        "embed": LayerFunctions(embed_forward, embed_backward),
        "head": LayerFunctions(head_forward, head_backward),
    }.get(name, LayerFunctions(one_forward, one_backward))


def train_3d(
    comm: Comm,
    grid: Grid,
    params: Params,
    data: tuple[Array, Array],
    order: Array,
    lr: float = 1e-3,
    micro_batches: int = 1,
    schedule: Callable[..., Iterator] = one_f_one_b,
    zero_stage: int = 1,
    sequence_parallel: bool = False,
    **options: Any,
) -> Trained:
    """Train a small GPT on a grid of ranks: tensor, pipeline and data parallel; a rank program.

    Args:
        comm: all ranks of the grid.
        grid: its axes are "dp", "pp" and "tp", in any order; one may be missing.
        params: the whole model at the start, the same on all ranks; see `gpt_shapes`.
            Each rank takes its part.
        data: (ids, targets), whole numbers of shape (examples, s).
        order: which examples each step sees, as `manyranks.data_parallel.batch_order`
            gives them. The batch is dealt to the data-parallel ranks, and cut into
            micro-batches there.
        lr: learning rate of Adam.
        micro_batches: of each replica in a step.
        schedule, **options: the pipeline's, such as ``interleaved, chunks=2``.
        zero_stage: 0 averages gradients in buckets and steps on every replica; 1 and 2
            shard Adam's state over the data axis.
        sequence_parallel: split what lies between the tensor-parallel regions too.

    Returns: this rank's `Trained`. `assemble` puts the parts of all ranks together.
    """
    if zero_stage not in (0, 1, 2):
        raise ValueError(f"zero_stage must be 0, 1 or 2, got {zero_stage!r}")
    comms = grid.comms(comm)
    dp, pp, tp = (comms.get(axis) or comm.group([comm.rank]) for axis in ORDER)
    words, how = params["embed.table"].shape[0], SEQUENCE if sequence_parallel else {}
    chunks = options.get("chunks", 1)
    names = stage_parts(gpt_layers(params), pp.size, chunks)[pp.rank]
    mine = [[shard(_part(params, name), tp.rank, tp.size) for name in chunk] for chunk in names]
    layers = [[_functions(tp, name, words, how) for name in chunk] for chunk in names]

    def loss_of(logits: Array, targets: Array) -> tuple[Array, Array]:
        value, saved = parallel_cross_entropy_forward(tp, logits, targets, words)
        return value, cross_entropy_backward(saved)

    units = [part for chunk in mine for part in chunk]  # first part first, as ZeRO's units
    model = ZeroModel(dp, units, zero_stage, "fp64") if zero_stage else None
    state = adam_init(units) if model is None else None
    losses: list[float] = []
    mean: list[dict[str, Array]] = []
    for step, indices in enumerate(order):
        bounds = chunk_bounds(len(indices), dp.size)
        rows = indices[bounds[dp.rank] : bounds[dp.rank + 1]]
        share = len(rows) / len(indices)
        weights = iter(units if model is None else map(model.weights, range(len(units))))
        value, nested = pipeline_step(
            pp,
            [[next(weights) for _ in chunk] for chunk in names],
            data[0][rows],
            data[1][rows],
            schedule,
            micro_batches,
            layers,
            loss_of,
            **options,
        )
        last = pp.size - 1
        value = pp.broadcast(value if pp.rank == last else None, src=last)
        losses.append(float(dp.all_reduce(value * share)))
        grads = [part for chunk in nested for part in chunk]
        if sequence_parallel:
            grads = [sync_replicated(tp, part) for part in grads]
        weight = share * dp.size  # replicas count by their rows: shards may differ in size
        grads = [{name: weight * part[name] for name in unit} for part, unit in zip(grads, units)]
        if model is None:
            buckets = GradientBuckets(dp)
            for g in reversed(grads):
                buckets.add(g)
            mean = list(reversed(buckets.finish()))
            units, state = adam_step(units, mean, state, lr)
        else:
            for i in reversed(range(len(units))):
                model.reduce(i, grads[i])
            if step == len(order) - 1:  # put together for the caller only
                model.finish()
                for i, unit in enumerate(model.units):
                    flat = dp.all_gather(model.gradient(i))[: unit.size]
                    mean.append(unflatten(flat, unit.like))
            model.step(lr)
    units = units if model is None else model.parameters()
    return Trained(
        losses,
        {name: g for part in mean for name, g in part.items()},
        {name: p for part in units for name, p in part.items()},
    )


def assemble(parts: Sequence[Mapping[str, Array]], grid: Grid, dp: int = 0) -> dict[str, Array]:
    """A whole model, or gradient, from what the ranks of one replica hold.

    Args:
        parts: one dict for each rank, such as the `params` of each `Trained`.
        grid: the layout.
        dp: of which replica.
    """
    whole: dict[str, Array] = {}
    at = {"dp": dp} if "dp" in grid.order else {}
    for stage in range(grid.size("pp")):
        if "pp" in grid.order:
            at["pp"] = stage
        across = range(grid.size("tp"))
        ranks = [grid.rank(**at, **({"tp": t} if "tp" in grid.order else {})) for t in across]
        whole |= unshard([parts[rank] for rank in ranks])
    return whole


def largest_difference(tree: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    """The largest difference of any element of two models, or gradients, by name."""
    if set(tree) != set(other):
        raise ValueError(
            f"tree and other must have the same names, got {sorted(set(tree) ^ set(other))} in one only"
        )
    return max(float(abs(tree[name] - other[name]).max()) for name in tree)


class Carried(NamedTuple):
    """Bytes that went along one axis, by the network that they took."""

    node: int
    network: int


def traffic_by_axis(run: Run, grid: Grid) -> dict[str, Carried]:
    """Bytes that all ranks of a run sent, by the axis of the grid that they went along.

    Args:
        run: a run of a program on the grid's ranks.
        grid: the layout. A message between ranks that differ on several axes is counted
            under "several".

    Returns: `Carried` for each axis, in the grid's order.
    """
    moved = {name: [0, 0] for name in (*grid.order, "several")}
    at = [tuple(grid.coordinates(rank).values()) for rank in range(grid.ranks)]
    axis_of: dict[tuple[int, int], str] = {}
    for message in run.traffic:
        pair = message.source, message.destination
        if pair not in axis_of:
            differ = [name for name, a, b in zip(grid.order, at[pair[0]], at[pair[1]]) if a != b]
            axis_of[pair] = differ[0] if len(differ) == 1 else "several"
        moved[axis_of[pair]][message.tier] += message.bytes
    if not any(moved["several"]):
        del moved["several"]
    return {name: Carried(*sizes) for name, sizes in moved.items()}


class ChunkCost(NamedTuple):
    """What one rank does for one micro-batch in one of its pieces of the model.

    Attributes:
        forward, backward: seconds of computing.
        forward_calls, backward_calls: tensor-parallel all-reduces; the computing is
            spread evenly between them.
        call_bytes: of each.
    """

    forward: float
    backward: float
    forward_calls: int = 0
    backward_calls: int = 0
    call_bytes: int = 0


class GridWorker(Worker):
    """`Worker` whose computing is broken up by tensor-parallel all-reduces of phantoms.

    Args:
        comm: the pipeline's communicator.
        tp: the tensor-parallel group.
        costs: a `ChunkCost` for each chunk.
        activation: what goes from stage to stage.
        algorithm: of the all-reduces.
    """

    def __init__(
        self,
        comm: Comm,
        tp: Comm,
        costs: Sequence[ChunkCost],
        activation: Array,
        algorithm: str,
    ) -> None:
        super().__init__(comm, chunks=len(costs), activation=activation)
        self.tp, self.costs, self.algorithm = tp, costs, algorithm
        self.calls = [phantom(cost.call_bytes, np.uint8) for cost in costs]

    def _go(self, label: str, chunk: int, seconds: float, calls: int) -> None:
        calls = calls if self.tp.size > 1 else 0
        for _ in range(calls):
            self.comm.compute(seconds=seconds / calls, label=label)
            self.tp.all_reduce(self.calls[chunk], algorithm=self.algorithm)
        if not calls:
            self.comm.compute(seconds=seconds, label=label)

    def forward(self, mb: int, chunk: int, x: Array | None) -> Array:
        """See `Worker.forward`."""
        cost = self.costs[chunk]
        self._go(f"F {mb}", chunk, cost.forward, cost.forward_calls)
        return self.activation

    def backward(self, mb: int, chunk: int, dy: Array | None) -> Array:
        """See `Worker.backward`."""
        cost = self.costs[chunk]
        self._go(f"B {mb}", chunk, cost.backward, cost.backward_calls)
        return self.activation


def timed_3d(
    comm: Comm,
    grid: Grid,
    costs: Sequence[Sequence[ChunkCost]],
    micro_batches: int,
    activation_bytes: int,
    gradient_bytes: Sequence[int],
    schedule: Callable[..., Iterator] = one_f_one_b,
    optimizer: float = 0.0,
    zero_stage: int = 0,
    algorithm: str = "ring",
    **options: Any,
) -> None:
    """One training step on a grid whose computing is declared and whose arrays are phantoms.

    A rank program for `simulate`: `train_3d`'s communication, at any size.

    Args:
        comm: all ranks of the grid.
        grid: the layout, of axes "dp", "pp" and "tp".
        costs: for each stage a `ChunkCost` for each of its chunks.
        micro_batches: of each replica.
        activation_bytes: what a rank sends to the next stage for one micro-batch.
        gradient_bytes: of a rank's gradients, for each stage.
        schedule, **options: the pipeline's.
        optimizer: seconds of the optimizer's step.
        zero_stage: 0 all-reduces the gradient; 1 reduce-scatters it and all-gathers the
            weights, as many bytes again.
        algorithm: of the tensor-parallel all-reduces. "closed_form" is quicker to
            simulate, and exact if the hops of a group's ring are all alike.

    The gradients are reduced when the pipeline has run dry: nothing overlaps.
    """
    comms = grid.comms(comm)
    dp, pp, tp = (comms.get(axis) or comm.group([comm.rank]) for axis in ORDER)
    activation = phantom(activation_bytes, np.uint8)
    worker = GridWorker(pp, tp, costs[pp.rank], activation, algorithm)
    execute(pp, schedule(pp.rank, pp.size, micro_batches, **options), worker)
    gradient = phantom(gradient_bytes[pp.rank], np.uint8)
    if dp.size > 1 and zero_stage:
        part = dp.reduce_scatter(gradient)
        comm.compute(seconds=optimizer, label="optimizer")
        dp.all_gather(part)
    else:
        if dp.size > 1:
            dp.all_reduce(gradient)
        comm.compute(seconds=optimizer, label="optimizer")


class StepShape(NamedTuple):
    """What a training step of a transformer computes and sends, stage by stage.

    Attributes:
        costs: for each stage a list of one `ChunkCost`.
        activation_bytes: of one micro-batch between two stages, from each rank.
        gradient_bytes: of a rank's gradients, for each stage.
    """

    costs: list[list[ChunkCost]]
    activation_bytes: int
    gradient_bytes: list[int]


def step_shape(
    model: Transformer,
    grid: Grid,
    sequence: int,
    micro_batch: int = 1,
    flops: float = 400e12,
) -> StepShape:
    """A `StepShape` from FLOPs alone: every GPU achieves `flops`, element-wise work is free.

    Args:
        model: its layers divide into as many equal stages as the grid has. The first
            stage holds the embedding as well, the last one computes the logits.
        grid: only its sizes count here.
        sequence, micro_batch: tokens of a sequence, and sequences.
        flops: FLOP/s that a GPU achieves.

    Arrays are of 16 bits. No recomputation.
    """
    if type(model) is not Transformer:
        raise TypeError(f"model must be a Transformer, no other kind, got {model!r}")
    stages, ranks = grid.size("pp"), grid.size("tp")
    if model.layers % stages:
        raise ValueError(f"pp must divide the {model.layers} layers, got {stages}")
    if model.heads % ranks:
        raise ValueError(f"tp must divide the {model.heads} heads, got {ranks}")
    each, h = model.layers // stages, model.hidden
    tokens = sequence * micro_batch
    layer = (24 * h + 4 * sequence) * h * tokens / ranks / flops  # seconds, forward
    logits = 2 * h * model.vocabulary * tokens / ranks / flops
    costs, gradients = [], []
    for stage in range(stages):
        forward = each * layer + (stage == stages - 1) * logits
        costs.append([ChunkCost(forward, 2 * forward, 2 * each, 2 * each, 2 * tokens * h)])
        ends = ((stage == 0) + (stage == stages - 1)) * h * model.vocabulary
        gradients.append(2 * round((each * model.layer_parameters + ends) / ranks))
    return StepShape(costs, 2 * tokens * h, gradients)


def simulate_step(
    model: Transformer,
    grid: Grid,
    cluster: Cluster,
    micro_batches: int,
    sequence: int = 2048,
    micro_batch: int = 1,
    flops: float = 400e12,
    fold: bool = False,
    **options: Any,
) -> Run:
    """Simulate one training step of a transformer on a grid.

    Args:
        model, grid, sequence, micro_batch, flops: as in `step_shape`.
        cluster: what the grid's ranks are on, in their order.
        micro_batches: of each replica.
        fold: let one rank stand for its tensor-parallel group, whose members all do the
            same at the same time; the group's all-reduces become time that the ring's
            formula gives. Only for "tp" as the last axis and inside a node. The run
            then has 1/tp of the ranks and of the traffic, and says so in its notes.
            Exact unless stages share a node, where messages between them would queue
            on the same ports as the all-reduces.
        **options: of `timed_3d`.
    """
    shape = step_shape(model, grid, sequence, micro_batch, flops)
    costs, tp = shape.costs, grid.size("tp")
    if fold:
        grid, cluster, (alpha, beta) = _folded(grid, cluster)
        costs = [[_with_calls(cost, tp, alpha, beta) for cost in stage] for stage in costs]
    run = simulate(
        timed_3d,
        ranks=grid.ranks,
        cluster=cluster,
        grid=grid,
        costs=costs,
        micro_batches=micro_batches,
        activation_bytes=shape.activation_bytes,
        gradient_bytes=shape.gradient_bytes,
        **options,
    )
    if fold:
        run.notes.append(f"folded: each rank stands for a tensor-parallel group of {tp}")
    return run


def _folded(grid: Grid, cluster: Cluster) -> tuple[Grid, Cluster, tuple[float, float]]:
    """The grid and the cluster with one rank for each tensor-parallel group, and its link."""
    tp = grid.size("tp")
    if grid.order[-1] != "tp" or cluster.gpus_per_node % tp:
        raise ValueError(f"fold takes tp as the last axis, inside a node, got {grid} on {cluster}")
    smaller = Cluster(
        cluster.nodes,
        cluster.gpus_per_node // tp,
        cluster.gpu,
        cluster.intra,
        cluster.inter,
        cluster.efficiency,
    )
    link = cluster.intra.latency, cluster.intra.bandwidth
    return Grid(grid.order[:-1], grid.shape[:-1]), smaller, link


def _with_calls(cost: ChunkCost, ranks: int, alpha: float, beta: float) -> ChunkCost:
    """A cost whose all-reduces are part of the computing."""
    each = ring_all_reduce_seconds(cost.call_bytes, ranks, alpha, beta)
    return ChunkCost(
        cost.forward + cost.forward_calls * each,
        cost.backward + cost.backward_calls * each,
    )
