# Generated from chapters/06_zero_fsdp.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""ZeRO and FSDP: training state sharded over data-parallel ranks by stages, with its memory, traffic and time counted."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from manyranks.collectives import split
from manyranks.data_parallel import (
    Layer,
    adam_init,
    adam_step,
    backward,
    flatten,
    forward,
    leaves,
    loss_and_gradient,
    softmax_cross_entropy,
    tree_map,
    unflatten,
)
from manyranks.runtime import Array, Comm, phantom

__all__ = [
    "Memory",
    "Op",
    "PRECISIONS",
    "Unit",
    "ZeroHistory",
    "ZeroModel",
    "ZeroStep",
    "cast",
    "dense_adam",
    "hybrid_groups",
    "offload_step",
    "row_chunk",
    "time_stages",
    "timed_zero_step",
    "zero_gradient",
    "zero_peak",
    "zero_schedule",
    "zero_step_seconds",
    "zero_traffic",
    "zero_train",
]


class Memory:
    """What one rank holds, in bytes by kind: now, at the peak, and over time.

    >>> memory = Memory()
    >>> bucket = memory.keep("bucket", np.zeros(4))
    >>> memory.free("bucket", bucket)
    >>> memory.total, memory.peak, memory.at_peak
    (0, 32, {'bucket': 32})
    """

    def __init__(self) -> None:
        self.now: dict[str, int] = {}  # bytes by kind
        self.peak = 0  # the most bytes at any time
        self.at_peak: dict[str, int] = {}  # bytes by kind at that time
        self.history: list[tuple[float, int]] = []  # (seconds, bytes) after each change

    @property
    def total(self) -> int:
        """Bytes held now."""
        return sum(self.now.values())

    def keep(self, kind: str, array: Array, at: float = 0.0) -> Array:
        """Enter an array under a kind, at a time in seconds; returns the array."""
        self._change(kind, int(array.nbytes), at)
        return array

    def free(self, kind: str, array: Array, at: float = 0.0) -> None:
        """Strike out an array that was entered under that kind."""
        if int(array.nbytes) > self.now.get(kind, 0):
            raise ValueError(f"kind {kind!r} holds {self.now.get(kind, 0)} bytes, got {array.nbytes} to free")
        self._change(kind, -int(array.nbytes), at)

    def _change(self, kind: str, size: int, at: float) -> None:
        self.now[kind] = self.now.get(kind, 0) + size
        self.history.append((at, self.total))
        if self.total > self.peak:
            self.peak, self.at_peak = (
                self.total,
                {k: v for k, v in self.now.items() if v},
            )


PRECISIONS: dict[str, tuple[str, str]] = {
    "mixed16": ("float16", "float32"),
    "fp32": ("float32", "float32"),
    "fp64": ("float64", "float64"),
}
"""Types of (weights and gradients, optimizer). Where they differ there is a master weight."""


class Unit:
    """A group of layers that is gathered, freed and reduced as a whole: what is held of it.

    Attributes:
        like: the shapes of its parameters, a tree of phantoms.
        size: its parameters.
        weight: the flat weights, padded: all of them, or this rank's chunk in stage 3.
        gradient: None, the whole flat gradient (stages 0 and 1) or this rank's chunk.
        master: the optimizer's own copy of the weights that it steps, if the types
            differ.
        adam: Adam's moments, of all weights in stage 0 and of this rank's chunk
            otherwise.
        whole: in stage 3 the gathered weights, or the work that is gathering them.
    """

    def __init__(self, like: Any, size: int, weight: Array) -> None:
        self.like, self.size, self.weight = like, size, weight
        self.gradient: Array | None = None
        self.master: Array | None = None
        self.adam: dict[str, Any] = {}
        self.whole: Any = None


class ZeroModel:
    """A model whose training state is sharded over the ranks of a communicator, by ZeRO's stages.

    Args:
        comm: the ranks that share the state, N of them.
        units: the parameters in groups: a tree of arrays for each unit, the same values
            on all ranks. Phantoms will do.
        stage: 0 replicates everything, 1 shards the optimizer state, 2 the gradients
            too, 3 the weights too.
        precision: a name in `PRECISIONS`.
        overlap: let gathering and reducing go on beside the computation.
        replicas: for hybrid sharding the ranks that hold the same chunk elsewhere;
            stages 2 and 3 only.

    A unit's parameters lie in one flat array, padded with zeros to a multiple of N.
    Rank r owns its r-th chunk. What is held is entered in ``memory``. The count takes
    reductions of a kept gradient and the optimizer's step to be in place, as NCCL and
    PyTorch do them.

    >>> from manyranks import simulate
    >>> def held(comm, stage):
    ...     return ZeroModel(comm, [[np.ones((3, 5))]], stage, precision="fp64").memory.now
    >>> simulate(held, ranks=4, stage=1).results[0]
    {'weights': 128, 'moments': 64}
    >>> simulate(held, ranks=4, stage=3).results[0]
    {'weights': 32, 'moments': 64}
    """

    def __init__(
        self,
        comm: Comm,
        units: Sequence[Any],
        stage: int,
        precision: str = "mixed16",
        overlap: bool = False,
        replicas: Comm | None = None,
    ) -> None:
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
        if not units:
            raise ValueError("units must hold one tree of arrays or more, got none")
        if replicas is not None and stage < 2:
            raise ValueError(f"replicas go with stages 2 and 3, got stage {stage}")
        self.comm, self.stage, self.overlap, self.replicas = (
            comm,
            stage,
            overlap,
            replicas,
        )
        self.short, self.long = PRECISIONS[precision]
        self.memory = Memory()
        self.ranks = comm.size * (1 if replicas is None else replicas.size)
        self.reducing: list[tuple[Unit, Any, Array]] = []
        self.copying: list[tuple[Unit, Any]] = []
        self.units = [self._unit(tree) for tree in units]

    def _unit(self, tree: Any) -> Unit:
        like = tree_map(lambda a: phantom(tuple(a.shape), self.short), tree)
        flat = self._padded(tree)
        unit = Unit(like, sum(a.size for a in leaves(like)), flat)
        owned = flat if self.stage == 0 else self.comm.copy(self._own(flat))
        unit.weight = self._keep("weights", owned if self.stage == 3 else flat)
        if self.short != self.long:
            unit.master = self._keep("master weights", cast(owned, self.long))
        unit.adam = adam_init([cast(owned, self.long)])
        for moment in ("m", "v"):
            self._keep("moments", unit.adam[moment][0])
        return unit

    def _padded(self, tree: Any) -> Array:
        flat = cast(flatten(tree), self.short)
        pad = -flat.shape[0] % self.comm.size
        return array_namespace(flat).concat([flat, flat[:1].repeat(pad) * 0]) if pad else flat

    def _own(self, flat: Array) -> Array:
        chunk = flat.shape[0] // self.comm.size
        return flat[self.comm.rank * chunk : (self.comm.rank + 1) * chunk]

    def _keep(self, kind: str, array: Array) -> Array:
        return self.memory.keep(kind, array, self.comm.time())

    def _free(self, kind: str, array: Array) -> None:
        self.memory.free(kind, array, self.comm.time())

    def _whole_of(self, unit: Unit) -> Array:
        """Stands for the memory of a unit's gathered weights."""
        return phantom(unit.weight.shape[0] * self.comm.size, self.short)

    def gather(self, i: int) -> None:
        """Start to put unit i's weights together, unless they are; stage 3 only."""
        unit = self.units[i]
        if self.stage == 3 and unit.whole is None:
            self._keep("gathered weights", self._whole_of(unit))
            unit.whole = self.comm.all_gather(unit.weight, async_op=self.overlap)

    def weights(self, i: int) -> Any:
        """Unit i's parameters in their shapes; in stage 3 it waits until they are there."""
        unit = self.units[i]
        if self.stage < 3:
            return unflatten(unit.weight[: unit.size], unit.like)
        self.gather(i)
        if hasattr(unit.whole, "wait"):
            unit.whole = unit.whole.wait()
        return unflatten(unit.whole[: unit.size], unit.like)

    def release(self, i: int) -> None:
        """Stage 3: drop the gathered weights of unit i and keep this rank's chunk."""
        unit = self.units[i]
        if unit.whole is not None:
            if hasattr(unit.whole, "wait"):
                unit.whole.wait()
            unit.whole = None
            self._free("gathered weights", self._whole_of(unit))

    def reduce(self, i: int, grads: Any, last: bool = True) -> None:
        """Take over unit i's gradient from this rank, and form the mean over ranks.

        Args:
            i: the unit.
            grads: a tree of the unit's structure.
            last: False for all but the last micro-batch. Stages 0 and 1 then only add
                it up, and communicate once; stages 2 and 3 have no room for that, and
                communicate each time.
        """
        unit = self.units[i]
        bucket = self._keep("gradient buckets", self._padded(grads))
        if self.stage < 2:
            # the bucket becomes the gradient, or is added to it in place
            self._free("gradient buckets", bucket)
            self._add(unit, bucket)
            if not last:
                return
            call, sending = (
                (self.comm.all_reduce, self.comm.reduce_scatter)[self.stage],
                unit.gradient,
            )
        else:
            call, sending = self.comm.reduce_scatter, bucket
        while self.reducing:  # one under way, one being filled
            self._settle()
        self.reducing.append((unit, call(sending, op="mean", async_op=self.overlap), sending))
        if not self.overlap:
            self._settle()

    def _add(self, unit: Unit, gradient: Array) -> None:
        if unit.gradient is None:
            unit.gradient = self._keep("gradients", gradient)
        else:
            unit.gradient = unit.gradient + gradient

    def _settle(self) -> None:
        unit, mean, sending = self.reducing.pop(0)
        mean = mean.wait() if hasattr(mean, "wait") else mean
        if self.stage == 0:
            unit.gradient[:] = mean
        elif self.stage == 1:
            self._own(unit.gradient)[:] = mean
        else:
            self._add(unit, mean)
            self._free("gradient buckets", sending)
            if self.replicas is not None:
                self.copying.append(
                    (
                        unit,
                        self.replicas.all_reduce(unit.gradient, op="mean", async_op=True),
                    )
                )

    def finish(self) -> None:
        """Wait until every gradient is reduced."""
        while self.reducing:
            self._settle()
        for unit, work in self.copying:
            unit.gradient = work.wait()
        self.copying = []

    def gradient(self, i: int) -> Array:
        """This rank's chunk of unit i's mean gradient, flat; in stage 0 all of it."""
        gradient = self.units[i].gradient
        return self._own(gradient) if self.stage == 1 else gradient

    def step(self, lr: float = 1e-3, **options: Any) -> None:
        """One step of Adam, with `adam_step`'s options, on what this rank owns.

        Stages 1 and 2 then gather the new weights.
        """
        self.finish()
        for i, unit in enumerate(self.units):
            g = self.gradient(i)
            if unit.master is not None:
                g = self._keep("casts", cast(g, self.long))
                old = unit.master
            else:
                old = unit.weight if self.stage in (0, 3) else self._own(unit.weight)
            (new,), unit.adam = adam_step([old], [g], unit.adam, lr, **options)
            if unit.master is not None:
                self._free("casts", g)
                unit.master = new
            new = cast(new, self.short)
            unit.weight = self.comm.all_gather(new) if self.stage in (1, 2) else new
            self._free("gradients", unit.gradient)
            unit.gradient = None

    def parameters(self) -> list[Any]:
        """All units' parameters in their shapes; in stage 3 it gathers them."""
        found = []
        for i in range(len(self.units)):
            found.append(self.weights(i))
            self.release(i)
        return found


def cast(x: Array, dtype: str) -> Array:
    """`x` in the type of that name, whatever kind of array it is.

    >>> cast(np.ones(2), "float16").dtype
    dtype('float16')
    """
    xp = array_namespace(x)
    return xp.astype(x, getattr(xp, dtype), copy=False)


class Op(NamedTuple):
    """An instruction of a schedule.

    Attributes:
        name: "gather", "forward", "backward", "reduce" or "release".
        unit: of which unit.
    """

    name: str
    unit: int


def zero_schedule(units: int, prefetch: int = 0, reshard: bool = True) -> Iterator[Op]:
    """The order in which a training step gathers, computes, reduces and frees.

    Args:
        units: how many, 1 or more.
        prefetch: how many units ahead to start gathering.
        reshard: free a unit's weights after its forward pass (and gather them again for
            its backward pass).

    >>> [f"{op.name} {op.unit}" for op in zero_schedule(1)]
    ['gather 0', 'forward 0', 'release 0', 'gather 0', 'backward 0', 'reduce 0', 'release 0']
    """
    if units < 1:
        raise ValueError(f"units must be 1 or more, got {units}")
    if prefetch < 0:
        raise ValueError(f"prefetch must be 0 or more, got {prefetch}")
    visits = [("forward", i) for i in range(units)] + [("backward", i) for i in reversed(range(units))]
    for k, (phase, i) in enumerate(visits):
        for _, ahead in visits[k : k + 1 + prefetch]:
            yield Op("gather", ahead)
        yield Op(phase, i)
        if phase == "backward":
            yield Op("reduce", i)
        if phase == "backward" or reshard:
            yield Op("release", i)


def zero_gradient(
    model: ZeroModel,
    x: Array,
    targets: Array,
    share: float | None = None,
    schedule: Iterable[Op] | None = None,
    last: bool = True,
) -> Array:
    """Forward and backward pass of chapter 3's perceptron; leaves the gradients in `model`.

    Args:
        model: its units are lists of layers.
        x: this rank's inputs, shape (examples, inputs), at least one.
        targets: one-hot, shape (examples, classes).
        share: this batch's part of all examples that the step sees; 1/ranks without it.
        schedule: what `zero_schedule` gives.
        last: as in `ZeroModel.reduce`.

    Returns: this rank's part of the mean loss. The parts of all ranks add up to it.
    """
    if x.shape[0] < 1:
        raise ValueError("x must hold one example or more, got none")
    share = 1 / model.ranks if share is None else share
    end = len(model.units) - 1
    activations, grads, loss = [[cast(x, model.short)]], None, None
    for op in schedule or zero_schedule(len(model.units)):
        i = op.unit
        if op.name == "gather":
            model.gather(i)
        elif op.name == "release":
            model.release(i)
        elif op.name == "forward":
            activations.append(forward(model.weights(i), activations[-1][-1], head=i == end))
            for a in activations[-1][1:]:
                model.memory.keep("activations", a, model.comm.time())
            if i == end:
                loss, dy = softmax_cross_entropy(activations[-1][-1], cast(targets, model.short))
                dy = dy * (share * model.ranks)
        elif op.name == "backward":
            dy, grads = backward(model.weights(i), activations[-1], dy, head=i == end)
            for a in activations.pop()[1:]:
                model.memory.free("activations", a, model.comm.time())
        elif op.name == "reduce":
            model.reduce(i, grads, last)
            grads = None
    model.finish()
    return loss * share


class ZeroHistory(NamedTuple):
    """What a rank is left with after `zero_train`.

    Attributes:
        losses: its part of each step's mean loss; the parts of all ranks add up to it.
        params: the final parameters, all of them.
        held: bytes by kind at the end of the last backward pass, before the optimizer's
            step.
        memory: the whole account.
    """

    losses: list[float]
    params: list[Layer]
    held: dict[str, int]
    memory: Memory


def hybrid_groups(comm: Comm, shard: int) -> tuple[Comm, Comm]:
    """Hybrid sharding's groups: ranks that share a copy of the state, and those alike in it.

    Args:
        comm: the communicator.
        shard: ranks that share a copy: neighbours, such as those of a node. It has to
            divide ``comm.size``.

    >>> from manyranks import simulate
    >>> simulate(lambda comm: [group.ranks for group in hybrid_groups(comm, 2)], ranks=4).results[1]
    [(0, 1), (1, 3)]
    """
    if shard < 1 or comm.size % shard:
        raise ValueError(f"shard must divide the {comm.size} ranks, got {shard}")
    first = comm.rank // shard * shard
    return comm.group(range(first, first + shard)), comm.group(range(comm.rank % shard, comm.size, shard))


def zero_train(
    comm: Comm,
    params: list[Layer],
    data: tuple[Array, Array],
    order: Array,
    stage: int,
    lr: float = 1e-3,
    precision: str = "fp64",
    per_unit: int = 1,
    micro_steps: int = 1,
    prefetch: int = 0,
    reshard: bool = True,
    overlap: bool = False,
    shard: int | None = None,
) -> ZeroHistory:
    """Train chapter 3's perceptron with Adam, the state sharded by ZeRO; a rank program.

    Args:
        comm: the communicator, of N ranks.
        params: the model at the start, the same on all ranks.
        data: (inputs, one-hot targets).
        order: which examples each step sees, as `manyranks.data_parallel.batch_order`
            gives them. Each rank takes a shard of at least `micro_steps` examples;
            shards may differ in size.
        stage, precision, overlap: as in `ZeroModel`.
        lr: learning rate.
        per_unit: layers in a unit.
        micro_steps: gradient accumulation.
        prefetch, reshard: as in `zero_schedule`.
        shard: hybrid sharding over groups of so many ranks.

    Returns: this rank's `ZeroHistory`.
    """
    inside, across = (comm, None) if shard is None else hybrid_groups(comm, shard)
    units = [params[i : i + per_unit] for i in range(0, len(params), per_unit)]
    model = ZeroModel(inside, units, stage, precision, overlap, across)
    x, targets = data
    losses, held = [], {}
    for indices in order:
        loss = 0.0
        pieces = split(split(indices, comm.size)[comm.rank], micro_steps)
        for k, piece in enumerate(pieces):
            schedule = zero_schedule(len(units), prefetch, reshard)
            part = zero_gradient(
                model,
                x[piece],
                targets[piece],
                len(piece) / len(indices),
                schedule,
                k == micro_steps - 1,
            )
            loss += float(part)
        losses.append(loss)
        held = {kind: size for kind, size in model.memory.now.items() if size}
        model.step(lr)
    return ZeroHistory(
        losses,
        [layer for unit in model.parameters() for layer in unit],
        held,
        model.memory,
    )


def dense_adam(
    params: list[Layer], data: tuple[Array, Array], order: Array, lr: float = 1e-3
) -> tuple[list[Layer], list[float]]:
    """What every stage has to equal: training with Adam on one rank, nothing sharded.

    Args:
        params, data, order, lr: as in `zero_train`.

    Returns: (final parameters, mean loss of each step).
    """
    state, losses = adam_init(params), []
    for indices in order:
        loss, grads = loss_and_gradient(params, data[0][indices], data[1][indices])
        params, state = adam_step(params, grads, state, lr)
        losses.append(float(loss))
    return params, losses


class ZeroStep(NamedTuple):
    """What `timed_zero_step` returns.

    Attributes:
        held: bytes by kind at the end of the backward pass, before the optimizer's
            step.
        memory: the whole account.
    """

    held: dict[str, int]
    memory: Memory


def timed_zero_step(
    comm: Comm,
    sizes: Sequence[int],
    stage: int,
    forward_seconds: float = 0.0,
    prefetch: int = 1,
    overlap: bool = True,
    reshard: bool = True,
    precision: str = "mixed16",
    shard: int | None = None,
    micro_steps: int = 1,
    schedule: Callable[[int], Iterable[Op]] | None = None,
) -> ZeroStep:
    """One training step on phantoms, to be counted and timed; a rank program for `simulate`.

    Args:
        comm: the communicator.
        sizes: parameters of each unit, first unit first.
        stage, precision, overlap: as in `ZeroModel`.
        forward_seconds: of one forward pass; the backward pass takes twice as long.
            Both are spread over the units in proportion to their sizes. The optimizer's
            own time is left out.
        prefetch, reshard: as in `zero_schedule`.
        shard, micro_steps: as in `zero_train`.
        schedule: instead of `zero_schedule`, a function of the number of units.

    Returns: this rank's `ZeroStep`.
    """
    inside, across = (comm, None) if shard is None else hybrid_groups(comm, shard)
    short = PRECISIONS[precision][0]
    model = ZeroModel(
        inside,
        [[phantom(size, short)] for size in sizes],
        stage,
        precision,
        overlap,
        across,
    )
    for k in range(micro_steps):
        ops = zero_schedule(len(sizes), prefetch, reshard) if schedule is None else schedule(len(sizes))
        for name, i in ops:
            share = forward_seconds * sizes[i] / sum(sizes)
            if name == "gather":
                model.gather(i)
            elif name == "release":
                model.release(i)
            elif name == "reduce":
                model.reduce(i, [phantom(sizes[i], short)], last=k == micro_steps - 1)
            else:
                model.weights(i)
                comm.compute(seconds=share * (2 if name == "backward" else 1), label=name)
        model.finish()
    held = {kind: size for kind, size in model.memory.now.items() if size}
    model.step()
    return ZeroStep(held, model.memory)


def _check(ranks: int, stage: int) -> None:
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")


def zero_traffic(
    params: float,
    ranks: int,
    stage: int,
    micro_steps: int = 1,
    reshard: bool = True,
    element: int = 2,
) -> float:
    """Predicted bytes that each rank sends in one step.

    Args:
        params: Ψ, parameters of the model.
        ranks: N, 1 or more.
        stage: 0 to 3.
        micro_steps: gradient accumulation. Stages 2 and 3 reduce in every micro-step.
        reshard: stage 3 gathers twice in a micro-step; without resharding once.
        element: bytes of a weight or of a gradient.

    Padding is left out.

    >>> [zero_traffic(7e9, 8, stage) / 1e9 for stage in (0, 1, 2, 3)]
    [24.5, 24.5, 24.5, 36.75]
    """
    _check(ranks, stage)
    passes = (2, 2, micro_steps + 1, micro_steps * (3 if reshard else 2))[stage]
    return passes * element * params * (ranks - 1) / ranks


def zero_peak(
    sizes: Sequence[int],
    ranks: int,
    stage: int,
    prefetch: int = 1,
    overlap: bool = True,
    reshard: bool = True,
    precision: str = "mixed16",
) -> int:
    """Predicted peak of a rank's training state: the ledger, and buffers that come and go.

    Args:
        sizes: parameters of each unit, first unit first.
        ranks, stage, prefetch, overlap, reshard, precision: as in `timed_zero_step`.

    Returns: bytes, activations aside. `timed_zero_step` counts the same.

    >>> zero_peak([218_750_000] * 32, 8, stage=3) / 1e9
    15.640625
    """
    _check(ranks, stage)
    if not sizes:
        raise ValueError("sizes must hold one unit or more, got none")
    short, long = (np.dtype(name).itemsize for name in PRECISIONS[precision])
    chunks = [-(-size // ranks) for size in sizes]  # padded
    whole, own = [c * ranks for c in chunks], chunks
    master = long if short != long else 0
    held = whole if stage == 0 else own  # what the optimizer steps
    kept = own if stage >= 2 else whole  # gradients
    weights = short * sum(own if stage == 3 else whole)
    at_rest = weights + (2 * long + master) * sum(held) + short * sum(kept)
    # the optimizer casts one unit's gradient after the other, and frees it
    most = max(master * held[i] - short * sum(kept[:i]) for i in range(len(sizes)))
    # when unit i's gradient is reduced, units 0 to i - 1 still lack theirs
    for i in range(len(sizes)):
        first = max(0, i - prefetch) if reshard else 0
        extra = short * sum(whole[first : i + 1]) if stage == 3 else 0
        if stage >= 2:
            extra += short * (whole[i] - sum(own[:i]))
            if overlap:
                # the bucket before is under way, and this one's result is not there yet
                extra += short * (sum(whole[i + 1 : i + 2]) - own[i])
                # at the end the last result stands beside its bucket
                most = max(most, short * whole[0])
        most = max(most, extra)
    return at_rest + most


def zero_step_seconds(
    params: float,
    units: int,
    ranks: int,
    stage: int,
    forward_seconds: float,
    alpha: float,
    beta: float,
    overlap: bool = True,
    element: int = 2,
) -> float:
    """Predicted seconds of a step on links that are all alike, with a prefetch of one unit.

    Args:
        params: of the model, spread evenly over its units.
        units: how many.
        ranks: N.
        stage: 0 to 3.
        forward_seconds: of one forward pass; the backward pass takes twice as long. The
            optimizer is left out.
        alpha, beta: latency in seconds and bandwidth in bytes per second of a link.
        overlap: whether gathers and reductions go on beside the computation.
        element: bytes of a weight or a gradient.

    It takes all units to be alike in what they wait for. The simulation, which follows
    each wait, was up to 2 % away from 16 units on, and up to 15 % with two.

    >>> round(zero_step_seconds(7e9, 32, 8, 3, forward_seconds=0.1, alpha=3.4e-6, beta=450e9), 3)
    0.303
    """
    _check(ranks, stage)
    if units < 1:
        raise ValueError(f"units must be 1 or more, got {units}")
    f = forward_seconds / units
    # a unit's all-gather, or its reduce-scatter
    ring = (ranks - 1) * (alpha + element * params / units / ranks / beta)
    reduce = 2 * ring if stage == 0 else ring
    # the new weights, gathered after the optimizer's step
    share = units * ring if stage in (1, 2) else 0.0
    gather = ring if stage == 3 else 0.0
    if not overlap:
        return units * (3 * f + reduce + 2 * gather) + share
    if stage < 3:
        return units * f + 2 * f + (units - 1) * max(2 * f, reduce) + reduce + share
    forward_pass = gather + (units - 1) * max(f, gather) + f
    return forward_pass + gather + 2 * f + (units - 1) * max(2 * f, gather + reduce) + reduce


def offload_step(
    comm: Comm,
    sizes: Sequence[int],
    forward_seconds: float,
    host_bandwidth: float,
    stream: bool = True,
) -> None:
    """One step with the optimizer outside of the GPU, on phantoms; a rank program for `simulate`.

    Rank 0 is the GPU: it keeps the 16-bit weights, sends each unit's gradient out and
    receives its new weights. Rank 1 is the host: it runs Adam. Rank 2, if there is one,
    is the drive that keeps the optimizer state between steps.

    Args:
        comm: two or three ranks; link them by a cluster of PCIe's and the drives'
            bandwidth.
        sizes: parameters of each unit.
        forward_seconds: of one forward pass; the backward pass takes twice as long.
        host_bandwidth: of the host's memory, bytes per second. Adam reads and writes 28
            bytes for each parameter.
        stream: False sends the gradients only after the backward pass.
    """
    order = list(reversed(sizes))  # gradients come last unit first
    if comm.rank == 0:
        comm.compute(seconds=forward_seconds, label="forward")
        going = []
        for size in order:
            comm.compute(seconds=2 * forward_seconds * size / sum(sizes), label="backward")
            if stream:
                going.append(comm.isend(phantom(size, np.float16), 1))
        if not stream:
            going = [comm.isend(phantom(size, np.float16), 1) for size in order]
        for _ in order:
            comm.recv(1)
    elif comm.rank == 1:
        gradients = [comm.irecv(0) for _ in order]
        states = [comm.irecv(2) for _ in order] if comm.size > 2 else []
        going = []
        for k, size in enumerate(order):
            gradients[k].wait()
            state = states[k].wait() if states else None
            comm.compute(seconds=28 * size / host_bandwidth, label="Adam")
            going.append(comm.isend(phantom(size, np.float16), 0))
            if state is not None:
                going.append(comm.isend(state, 2))
    else:
        # master weight and two moments
        going = [comm.isend(phantom(3 * size, np.float32), 1) for size in order]
        for _ in order:
            comm.recv(1)
    for work in going:
        work.wait()


def row_chunk(rows: int, ranks: int, rank: int) -> int:
    """How many of a tensor's rows FSDP2 leaves a rank.

    Args:
        rows: length of the tensor's first dimension.
        ranks: N, 1 or more.
        rank: which.

    >>> [row_chunk(10, 4, rank) for rank in range(4)]
    [3, 3, 3, 1]
    """
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"rank must be from 0 to ranks - 1, got rank {rank} of {ranks} ranks")
    per_rank = -(-rows // ranks)
    return max(0, min(per_rank, rows - rank * per_rank))


def time_stages(
    comm: Comm,
    params: list[Layer],
    data: tuple[Array, Array],
    repeats: int = 7,
    stages: Sequence[int] = (0, 1, 2, 3),
) -> dict[str, list]:
    """Time a whole training step in each stage; a rank program.

    Args:
        comm: the communicator.
        params: chapter 3's perceptron, 32-bit floats; each layer is a unit.
        data: this rank's own batch, (inputs, one-hot targets).
        repeats: timed repetitions; one more warms up.
        stages: which.

    Returns: for each stage "seconds", a list of `repeats` (for
    `manyranks.collectives.quickest`), "held", the bytes of weights, gradients and
    optimizer state at the end of the backward pass, and "peak", the most bytes at any
    time, activations included.
    """
    out: dict[str, list] = {"seconds": [], "held": [], "peak": []}
    for stage in stages:
        model, times = ZeroModel(comm, [[layer] for layer in params], stage, "fp32"), []
        for _ in range(repeats + 1):
            comm.barrier()
            began = comm.time()
            zero_gradient(model, *data)
            held = model.memory.total
            model.step()
            times.append(comm.time() - began)
        out["seconds"].append(times[1:])
        out["held"].append(held)
        out["peak"].append(model.memory.peak)
    return out
