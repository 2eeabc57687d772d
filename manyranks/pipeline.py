# Generated from chapters/05_pipeline_parallelism.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""Pipeline parallelism: schedules as generators of instructions, one executor for all of them, and a checker."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from manyranks.runtime import Array, Cluster, Comm, Run, chunk_bounds, phantom
from manyranks.runtime.hardware import check_count

__all__ = [
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Checked",
    "Forward",
    "Instruction",
    "LayerFunctions",
    "LayerWorker",
    "NO_TIME",
    "ONE_MS",
    "RESIDUAL",
    "RecvActivation",
    "RecvGradient",
    "SCHEDULES",
    "ScheduleError",
    "SendActivation",
    "SendGradient",
    "Times",
    "Worker",
    "bubble_fraction",
    "bubble_overhead",
    "bubble_sweep",
    "check_schedule",
    "clocked_step",
    "execute",
    "gpipe",
    "ideal_network",
    "idle_fraction",
    "interleaved",
    "interleaved_warmup",
    "join_layers",
    "makespan_bound",
    "mean_squared_error",
    "measured_bubble",
    "naive",
    "one_f_one_b",
    "overhead",
    "pipeline_step",
    "plan",
    "residual_backward",
    "residual_backward_input",
    "residual_backward_weight",
    "residual_forward",
    "residual_params",
    "split_layers",
    "timed_pipeline",
    "with_messages",
    "zb_h1",
]


class LayerFunctions(NamedTuple):
    """How a layer computes.

    `params`, `saved`, `grads` and `rest` may be made of arrays, lists, tuples and
    dicts.

    forward: ``y, saved = forward(params, x)``.
    backward: ``dx, grads = backward(params, saved, dy)``.
    backward_input, backward_weight: the same in two halves, for schedules that split
    it: ``dx, rest = backward_input(params, saved, dy)``, ``grads =
    backward_weight(params, rest)``.
    """

    forward: Callable[[Any, Array], tuple[Array, Any]]
    backward: Callable[[Any, Any, Array], tuple[Array, Any]]
    backward_input: Callable[[Any, Any, Array], tuple[Array, Any]] | None = None
    backward_weight: Callable[[Any, Any], Any] | None = None


def residual_forward(params: tuple[Array, Array], x: Array) -> tuple[Array, Any]:
    """y = x + relu(x @ w + b), and what the backward pass needs. x: (rows, width)."""
    w, b = params
    z = x @ w + b
    active = z > 0
    return x + z * active, (x, active)


def residual_backward_input(params: tuple[Array, Array], saved: Any, dy: Array) -> tuple[Array, Any]:
    """The gradient of the input, and what is left for `residual_backward_weight`."""
    x, active = saved
    dz = dy * active
    return dy + dz @ params[0].T, (x, dz)


def residual_backward_weight(params: tuple[Array, Array], rest: Any) -> tuple[Array, Array]:
    """The gradients of w and b."""
    x, dz = rest
    return x.T @ dz, dz.sum(0)


def residual_backward(params: tuple[Array, Array], saved: Any, dy: Array) -> tuple[Array, Any]:
    """The gradients of the input and of (w, b)."""
    dx, rest = residual_backward_input(params, saved, dy)
    return dx, residual_backward_weight(params, rest)


RESIDUAL = LayerFunctions(
    residual_forward,
    residual_backward,
    residual_backward_input,
    residual_backward_weight,
)


def residual_params(layers: int, width: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Parameters (w, b) of `layers` equal layers, float64, drawn at random."""
    rng = np.random.default_rng(seed)
    scale = 0.5 / width**0.5
    return [(rng.normal(0, scale, (width, width)), rng.normal(0, 0.1, width)) for _ in range(layers)]


def mean_squared_error(y: Array, target: Array) -> tuple[Array, Array]:
    """The mean of (y - target)² over all elements, and its gradient by y."""
    error = y - target
    return (error * error).mean(), error * (2 / (y.shape[0] * y.shape[1]))


@dataclass(frozen=True)
class Instruction:
    """What a stage does for micro-batch `mb`, with its piece `chunk` of the model."""

    mb: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        return f"{type(self).__name__}({self.mb}{chunk})"


class Forward(Instruction):
    """Compute the output from the input."""


class Backward(Instruction):
    """Compute the gradients of the input and of the parameters."""


class BackwardInput(Instruction):
    """Only the gradient of the input: the neighbour waits for it."""


class BackwardWeight(Instruction):
    """Only the gradients of the parameters: nobody waits for them before the step's end."""


class RecvActivation(Instruction):
    """Receive the input from the stage before."""


class SendActivation(Instruction):
    """Send the output to the stage after."""


class RecvGradient(Instruction):
    """Receive the output's gradient from the stage after."""


class SendGradient(Instruction):
    """Send the input's gradient to the stage before."""


def with_messages(
    work: Iterable[Instruction], stage: int, stages: int, chunks: int = 1
) -> Iterator[Instruction]:
    """Put the receives before and the sends after the computations of one stage.

    Args:
        work: the stage's Forward, Backward, BackwardInput and BackwardWeight
            instructions, in order.
        stage: its number, 0 to ``stages - 1``.
        stages: P. A single stage sends nothing.
        chunks: pieces of the model on each stage. Piece c of stage s is number c·P + s
            of the whole model.

    >>> print(*with_messages([Forward(0), Backward(0)], stage=0, stages=2))
    Forward(0) SendActivation(0) RecvGradient(0) Backward(0)
    """
    last = stages * chunks - 1
    for step in work:
        position = step.chunk * stages + stage
        forward = isinstance(step, Forward)
        alone = stages == 1 or isinstance(step, BackwardWeight)
        if not alone and position != (0 if forward else last):
            yield (RecvActivation if forward else RecvGradient)(step.mb, step.chunk)
        yield step
        if not alone and position != (last if forward else 0):
            yield (SendActivation if forward else SendGradient)(step.mb, step.chunk)


def _check(stage: int, stages: int, micro_batches: int) -> None:
    check_count("stages", stages)
    check_count("micro_batches", micro_batches)
    if check_count("stage", stage, 0) >= stages:
        raise ValueError(f"stage must be from 0 to {stages - 1}, got {stage}")


def naive(stage: int, stages: int, micro_batches: int) -> Iterator[Instruction]:
    """One micro-batch at a time, forward all the way and backward all the way.

    >>> print(*naive(1, stages=2, micro_batches=1))
    RecvActivation(0) Forward(0) Backward(0) SendGradient(0)
    """
    _check(stage, stages, micro_batches)
    return with_messages(
        (do(mb) for mb in range(micro_batches) for do in (Forward, Backward)),
        stage,
        stages,
    )


def execute(comm: Comm, instructions: Iterable[Instruction], worker: Any, blocking: bool = False) -> None:
    """Run one stage's instructions; the part of a rank program that every schedule shares.

    Args:
        comm: the communicator of the pipeline's stages, in order. It may be a group of
            a larger run.
        instructions: this stage's schedule.
        worker: does the computing: ``forward(mb, chunk, x)`` returns the output,
            ``backward(mb, chunk, dy)`` and ``backward_input(mb, chunk, dy)`` the
            input's gradient, ``backward_weight(mb, chunk)`` nothing. The first stage
            gets None for x, and the last one None for dy.
        blocking: wait for each send at once, as plain `send` does. This deadlocks; see
            the chapter.
    """
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    # Gradients have a communicator of their own: with two stages of two chunks, both
    # kinds go from 0 to 1, and messages
    # between two ranks are received in the order in which they were sent.
    back = comm.group(range(comm.size))
    received: dict[Any, Array] = {}
    computed: dict[Any, Array] = {}
    sends = []

    def send(lane: Comm, result: Array, neighbour: int) -> None:
        sends.append(lane.isend(result, neighbour))
        if blocking:
            sends[-1].wait()

    for step in instructions:
        kind, key = type(step), (step.mb, step.chunk)
        if kind is RecvActivation:
            received["x", key] = comm.recv(left)
        elif kind is RecvGradient:
            received["dy", key] = back.recv(right)
        elif kind is SendActivation:
            send(comm, computed.pop(("y", key)), right)
        elif kind is SendGradient:
            send(back, computed.pop(("dx", key)), left)
        elif kind is Forward:
            y = worker.forward(*key, received.pop(("x", key), None))
            if comm.size > 1:
                computed["y", key] = y
            else:
                received["x", (step.mb, step.chunk + 1)] = (
                    y  # the next piece of the model is on this rank too
                )
        elif kind is Backward or kind is BackwardInput:
            do = worker.backward if kind is Backward else worker.backward_input
            dx = do(*key, received.pop(("dy", key), None))
            if comm.size > 1:
                computed["dx", key] = dx
            else:
                received["dy", (step.mb, step.chunk - 1)] = dx
        elif kind is BackwardWeight:
            worker.backward_weight(*key)
        else:
            raise TypeError(f"instructions must be Forward, Backward, ..., got {step!r}")
    for sent in sends:
        sent.wait()


class Times(NamedTuple):
    """Seconds that a stage takes for one micro-batch.

    A whole backward pass takes `backward_input` + `backward_weight`.
    """

    forward: float
    backward_input: float
    backward_weight: float


ONE_MS = Times(1e-3, 1e-3, 1e-3)
NO_TIME = Times(0.0, 0.0, 0.0)


class Worker:
    """Declares what computing takes, and computes nothing; what it returns is `activation`.

    Args:
        comm: the communicator whose clock runs.
        times: seconds for the whole stage; each of its `chunks` pieces takes an equal
            part.
        chunks: pieces of the model on this stage.
        activation: what goes from stage to stage; an array or a phantom. Without it:
            zero bytes.
    """

    def __init__(
        self,
        comm: Comm,
        times: Times = ONE_MS,
        chunks: int = 1,
        activation: Array | None = None,
    ) -> None:
        self.comm, self.times, self.chunks = comm, Times(*times), chunks
        self.activation = phantom(0) if activation is None else activation
        self.held: set[tuple[int, int]] = set()

    def spend(self, kind: str, mb: int, chunk: int, seconds: float) -> None:
        """Let the clock run; the label is "F 3", or "F' 3" for the second chunk."""
        label = kind + "'" * chunk + f" {mb}"
        self.comm.compute(seconds=seconds / self.chunks, label=label)

    def note(self, key: tuple[int, int], holds: bool) -> None:
        """Record how many micro-batches are in flight; a chunk of one counts 1/chunks."""
        (self.held.add if holds else self.held.discard)(key)
        self.comm.record("in flight", len(self.held) / self.chunks)

    def forward(self, mb: int, chunk: int, x: Array | None) -> Array:
        """The output of one chunk."""
        self.spend("F", mb, chunk, self.times.forward)
        self.note((mb, chunk), True)
        return self.activation

    def backward(self, mb: int, chunk: int, dy: Array | None) -> Array:
        """The gradient of a chunk's input; the parameters' is kept."""
        self.spend("B", mb, chunk, self.times.backward_input + self.times.backward_weight)
        self.note((mb, chunk), False)
        return self.activation

    def backward_input(self, mb: int, chunk: int, dy: Array | None) -> Array:
        """The gradient of a chunk's input, and nothing else."""
        self.spend("B", mb, chunk, self.times.backward_input)
        return self.activation

    def backward_weight(self, mb: int, chunk: int) -> None:
        """The rest of the backward pass."""
        self.spend("W", mb, chunk, self.times.backward_weight)
        self.note((mb, chunk), False)


def _chunks(instructions: Sequence[Instruction]) -> int:
    return 1 + max((step.chunk for step in instructions), default=0)


def timed_pipeline(
    comm: Comm,
    schedule: Callable[..., Iterator[Instruction]],
    micro_batches: int,
    times: Times | Sequence[Times] = ONE_MS,
    activation: Array | None = None,
    blocking: bool = False,
    **options: Any,
) -> None:
    """One training step of a pipeline whose computing is declared; a rank program.

    Args:
        comm: the communicator; each rank is a stage.
        schedule: such as `one_f_one_b`, called with (stage, stages, micro_batches,
            **options).
        micro_batches: M.
        times: what a stage takes for one micro-batch; one `Times` for all stages, or a
            list with one for each.
        activation: what is sent for one micro-batch, forward and backward; a phantom
            will do.
        blocking: see `execute`.
        **options: for the schedule, such as ``chunks=2``.

    >>> from manyranks import simulate
    >>> network = ideal_network(4)
    >>> run = simulate(timed_pipeline, cluster=network, schedule=naive, micro_batches=2)
    >>> round(run.seconds * 1e3, 6)        # 2 micro-batches through 4 stages, 3 ms on each
    24.0
    """
    instructions = list(schedule(comm.rank, comm.size, micro_batches, **options))
    mine = times if isinstance(times, Times) else times[comm.rank]
    execute(
        comm,
        instructions,
        Worker(comm, mine, _chunks(instructions), activation),
        blocking,
    )


def ideal_network(stages: int, latency: float = 0.0, bandwidth: float = 1e18) -> Cluster:
    """A network of `stages` ranks on which a message takes `latency` seconds."""
    return Cluster.flat(stages, latency=latency, bandwidth=bandwidth)


def gpipe(stage: int, stages: int, micro_batches: int) -> Iterator[Instruction]:
    """All forward passes, then all backward passes in reverse (Huang et al., 2019).

    >>> print(*gpipe(0, stages=1, micro_batches=3))
    Forward(0) Forward(1) Forward(2) Backward(2) Backward(1) Backward(0)
    """
    _check(stage, stages, micro_batches)

    def work() -> Iterator[Instruction]:
        for mb in range(micro_batches):
            yield Forward(mb)
        for mb in reversed(range(micro_batches)):
            yield Backward(mb)

    return with_messages(work(), stage, stages)


def bubble_fraction(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Predicted idle part of the makespan: (P - 1)/(v·M + P - 1).

    Of GPipe, 1F1B (both v = 1) and interleaved 1F1B, with equal stages and messages
    that take no time. See `idle_fraction` for the measured one.

    >>> bubble_fraction(4, 4), round(bubble_fraction(4, 64), 3)
    (0.42857142857142855, 0.045)
    """
    stages, micro_batches = (
        check_count("stages", stages),
        check_count("micro_batches", micro_batches),
    )
    return (stages - 1) / (check_count("chunks", chunks) * micro_batches + stages - 1)


def bubble_overhead(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Predicted idle time over the ideal time: (P - 1)/(v·M).

    >>> bubble_overhead(4, 4), bubble_overhead(4, 1)
    (0.75, 3.0)
    """
    stages, micro_batches = (
        check_count("stages", stages),
        check_count("micro_batches", micro_batches),
    )
    return (stages - 1) / (check_count("chunks", chunks) * micro_batches)


def idle_fraction(run: Run) -> float:
    """The bubble of a run, measured: the idle part of all ranks' time."""
    return 1 - float(run.busy("compute").sum()) / (run.ranks * run.seconds)


def overhead(run: Run) -> float:
    """The bubble of a run, measured, over the ideal: makespan / mean computing time - 1."""
    return run.seconds / float(run.busy("compute").mean()) - 1


class ScheduleError(ValueError):
    """A schedule that can't work, and why."""


class Checked(NamedTuple):
    """What `check_schedule` found.

    makespan, bound: seconds, and seconds that no schedule can beat.
    in_flight: for each stage the most micro-batches in flight.
    """

    makespan: float
    bound: float
    in_flight: list[float]


def plan(
    schedule: Callable[..., Iterator[Instruction]],
    stages: int,
    micro_batches: int,
    **options: Any,
) -> list:
    """The instructions of all stages: a list for each."""
    return [list(schedule(stage, stages, micro_batches, **options)) for stage in range(stages)]


def makespan_bound(
    stages: int,
    micro_batches: int,
    times: Times | Sequence[Times] = ONE_MS,
    chunks: int = 1,
    split: bool = False,
) -> float:
    """Seconds that no schedule with these stages can beat, on a network that takes no time.

    Args:
        stages, micro_batches, chunks: P, M, v.
        times: one `Times` for all stages, or a list.
        split: whether backward passes are split, so that a stage may end with work that
            nobody waits for.

    >>> round(makespan_bound(4, 4, Times(1.0, 0.5, 0.5)), 6)      # 2M + 2(P - 1) slots
    14.0
    """
    each = [times] * stages if isinstance(times, Times) else list(times)
    best = sum(t.forward + t.backward_input for t in each) + (
        each[0].backward_weight if split else sum(t.backward_weight for t in each)
    )
    fill = drain = 0.0
    for t in each:
        best = max(best, fill + micro_batches * sum(t) + (0.0 if split else drain))
        fill += t.forward / chunks
        drain += (t.backward_input + t.backward_weight) / chunks
    return best


def check_schedule(
    instructions: Sequence[Sequence[Instruction]],
    times: Times | Sequence[Times] = ONE_MS,
) -> Checked:
    """Prove that a schedule is sound, or say what is wrong with it.

    Args:
        instructions: a list for each stage, as `plan` makes it.
        times: what a stage takes for one micro-batch, for the makespan; messages take
            no time here.

    Returns: a `Checked`.

    Raises: ScheduleError, which names the stage, the instruction and what it lacks;
    ValueError if `instructions` is empty, or `times` a list of another length.

    >>> check_schedule(plan(gpipe, 4, 4), Times(1.0, 0.5, 0.5))
    Checked(makespan=14.0, bound=14.0, in_flight=[4.0, 4.0, 4.0, 4.0])
    """
    steps = [list(stage) for stage in instructions]
    if not steps or not all(steps):
        raise ValueError("instructions must have a list for each stage, none of them empty")
    stages, chunks = len(steps), max(map(_chunks, steps))
    micro_batches = 1 + max(step.mb for stage in steps for step in stage)
    each = [times] * stages if isinstance(times, Times) else list(times)
    if len(each) != stages:
        raise ValueError(f"times must be one Times, or {stages} of them, got {len(each)}")
    last = stages * chunks - 1
    split = any(isinstance(step, BackwardInput) for stage in steps for step in stage)
    clock, place, held, peak = (
        [0.0] * stages,
        [0] * stages,
        [0] * stages,
        [0.0] * stages,
    )
    have: list[set] = [
        set() for _ in steps
    ]  # what a stage received ("x", "dy"), computed ("y", "dx", "grads") and sent
    mail: dict[tuple[str, int], deque] = {(what, s): deque() for what in ("x", "dy") for s in range(stages)}

    def need(stage: int, step: Instruction, what: str, words: str, chunk: int | None = None) -> None:
        if (what, step.mb, step.chunk if chunk is None else chunk) not in have[stage]:
            raise ScheduleError(f"stage {stage}: {step} comes before {words}")

    def once(stage: int, step: Instruction, what: str) -> None:
        if (what, step.mb, step.chunk) in have[stage]:
            raise ScheduleError(f"stage {stage}: {step} a second time")
        have[stage].add((what, step.mb, step.chunk))

    def compute(stage: int, step: Instruction, makes: str, seconds: float) -> None:
        once(stage, step, makes)
        clock[stage] += seconds / chunks
        held[stage] += {"y": 1, "grads": -1}.get(makes, 0)
        peak[stage] = max(peak[stage], held[stage] / chunks)

    def take(stage: int, step: Instruction) -> bool:
        """Do one instruction; False if it has to wait for a message."""
        t, position = each[stage], step.chunk * stages + stage
        if isinstance(step, (RecvActivation, RecvGradient)):
            what = "x" if isinstance(step, RecvActivation) else "dy"
            if not mail[what, stage]:
                return False
            mb, chunk, sent = mail[what, stage].popleft()
            if (mb, chunk) != (step.mb, step.chunk):
                raise ScheduleError(f"stage {stage}: {step} would get micro-batch {mb}, chunk {chunk}")
            have[stage].add((what, mb, chunk))
            clock[stage] = max(clock[stage], sent)
        elif isinstance(step, (SendActivation, SendGradient)):
            down = isinstance(step, SendActivation)
            need(stage, step, "y" if down else "dx", "its result is computed")
            once(stage, step, "y sent" if down else "dx sent")
            to = position + 1 if down else position - 1
            mail["x" if down else "dy", to % stages].append((step.mb, to // stages, clock[stage]))
        elif isinstance(step, Forward):
            if position and stages > 1:
                need(stage, step, "x", "its input is received")
            elif position:  # a single stage has all chunks, and receives nothing
                need(stage, step, "y", "the chunk before it", step.chunk - 1)
            compute(stage, step, "y", t.forward)
        elif isinstance(step, BackwardWeight):
            need(stage, step, "dx", "its BackwardInput")
            compute(stage, step, "grads", t.backward_weight)
        else:
            need(stage, step, "y", "its Forward")
            if position < last and stages > 1:
                need(stage, step, "dy", "its gradient is received")
            elif position < last:
                need(
                    stage,
                    step,
                    "dx",
                    "the backward pass of the chunk after it",
                    step.chunk + 1,
                )
            whole = isinstance(step, Backward)
            compute(
                stage,
                step,
                "dx",
                t.backward_input + (t.backward_weight if whole else 0),
            )
            if whole:
                compute(stage, step, "grads", 0)
        return True

    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while place[stage] < len(steps[stage]) and take(stage, steps[stage][place[stage]]):
                place[stage] += 1
                moved = True
    stuck = [f"stage {s} waits in {steps[s][place[s]]}" for s in range(stages) if place[s] < len(steps[s])]
    if stuck:
        raise ScheduleError("nobody can go on: " + "; ".join(stuck))
    for (what, stage), left in mail.items():
        if left:
            kind = "activation" if what == "x" else "gradient"
            raise ScheduleError(f"stage {stage} never receives the {kind} of micro-batch {left[0][0]}")
    for stage in range(stages):
        for what, words in (("y", "Forward"), ("grads", "backward pass")):
            wanted = {(what, mb, chunk) for mb in range(micro_batches) for chunk in range(chunks)}
            if wanted - have[stage]:
                _, mb, chunk = min(wanted - have[stage])
                raise ScheduleError(f"stage {stage}: no {words} of micro-batch {mb}, chunk {chunk}")
    found = Checked(max(clock), makespan_bound(stages, micro_batches, each, chunks, split), peak)
    if found.makespan < found.bound * (1 - 1e-9):
        raise ScheduleError(f"impossible: {found.makespan} s is below the bound, {found.bound} s")
    return found


def _add(total: Any, more: Any) -> Any:
    """Add two equal structures of arrays; `total` may be None."""
    if total is None or more is None:
        return more if total is None else total
    if isinstance(more, dict):
        return {key: _add(total[key], value) for key, value in more.items()}
    if isinstance(more, (list, tuple)):
        added = [_add(a, b) for a, b in zip(total, more)]
        return type(more)(*added) if hasattr(more, "_fields") else type(more)(added)
    return total + more


class LayerWorker(Worker):
    """Computes with real layers. Further arguments than `Worker`'s:

    params: this stage's parameters, ``params[chunk][i]`` for the i-th layer of a chunk.
    layers: one `LayerFunctions` for all, or ``layers[chunk][i]``.
    loss: ``value, dy = loss(y, target)``; used by the last stage.
    inputs, targets: the micro-batches, lists of M arrays; used by the first and the
    last stage.
    weights: each micro-batch's share of the batch; they add up to 1.

    Afterwards ``grads`` has the structure of `params`, and ``value`` is the loss (None
    but on the last stage).
    """

    def __init__(
        self,
        comm: Comm,
        params: Any,
        layers: Any,
        loss: Any,
        inputs: Any,
        targets: Any,
        weights: Any,
        times: Times,
    ) -> None:
        super().__init__(comm, times, len(params))
        self.params, self.layers, self.loss = params, layers, loss
        self.inputs, self.targets, self.weights = inputs, targets, weights
        self.saved: dict[tuple[int, int], list] = {}
        self.start: dict[int, Array] = {}  # the loss's gradient by the last stage's output
        self.grads: list[list] = [[None] * len(chunk) for chunk in params]
        self.value: Any = None

    def layer(self, chunk: int, i: int) -> LayerFunctions:
        """How the i-th layer of a chunk computes."""
        return self.layers if isinstance(self.layers, LayerFunctions) else self.layers[chunk][i]

    def forward(self, mb: int, chunk: int, x: Array | None) -> Array:
        """See `Worker.forward`; on the last stage also the loss."""
        super().forward(mb, chunk, x)
        if self.comm.rank == 0 and chunk == 0:
            x = self.inputs[mb]
        elif x is None:
            raise ScheduleError(f"stage {self.comm.rank}: no input received for micro-batch {mb}")
        saved = []
        for i, params in enumerate(self.params[chunk]):
            x, kept = self.layer(chunk, i).forward(params, x)
            saved.append(kept)
        self.saved[mb, chunk] = saved
        if self._ends(chunk):
            value, dy = self.loss(x, self.targets[mb])
            self.value = _add(self.value, value * self.weights[mb])
            self.start[mb] = dy * self.weights[mb]
        return x

    def _ends(self, chunk: int) -> bool:
        return self.comm.rank == self.comm.size - 1 and chunk == self.chunks - 1

    def _upstream(self, mb: int, chunk: int, dy: Array | None) -> Array:
        if self._ends(chunk):
            return self.start.pop(mb)
        if dy is None:
            raise ScheduleError(f"stage {self.comm.rank}: no gradient received for micro-batch {mb}")
        return dy

    def backward(self, mb: int, chunk: int, dy: Array | None) -> Array:
        """See `Worker.backward`."""
        super().backward(mb, chunk, dy)
        dy, saved = self._upstream(mb, chunk, dy), self.saved.pop((mb, chunk))
        for i in reversed(range(len(saved))):
            dy, grads = self.layer(chunk, i).backward(self.params[chunk][i], saved[i], dy)
            self.grads[chunk][i] = _add(self.grads[chunk][i], grads)
        return dy

    def backward_input(self, mb: int, chunk: int, dy: Array | None) -> Array:
        """See `Worker.backward_input`."""
        super().backward_input(mb, chunk, dy)
        dy, saved = self._upstream(mb, chunk, dy), self.saved[mb, chunk]
        for i in reversed(range(len(saved))):
            half = self.layer(chunk, i).backward_input
            if half is None:
                raise ValueError("layers must have backward_input and backward_weight for this schedule")
            dy, saved[i] = half(self.params[chunk][i], saved[i], dy)
        return dy

    def backward_weight(self, mb: int, chunk: int) -> None:
        """See `Worker.backward_weight`."""
        super().backward_weight(mb, chunk)
        for i, rest in enumerate(self.saved.pop((mb, chunk))):
            grads = self.layer(chunk, i).backward_weight(self.params[chunk][i], rest)
            self.grads[chunk][i] = _add(self.grads[chunk][i], grads)


def split_layers(layers: Sequence[Any], stages: int, chunks: int = 1) -> list[list[list[Any]]]:
    """Deal a model's layers to the stages: ``result[stage][chunk]`` is a list of layers.

    Args:
        layers: one entry for each layer, in order: its parameters, its cost, its name.
        stages, chunks: P and v. Piece c of stage s is number c·P + s of the P·v equal
            pieces of the model.

    Raises: ValueError if the layers don't divide into P·v equal pieces.

    >>> split_layers(range(8), stages=2, chunks=2)
    [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    """
    pieces = check_count("stages", stages) * check_count("chunks", chunks)
    each, rest = divmod(len(layers), pieces)
    if rest or not each:
        raise ValueError(f"layers must divide into stages x chunks = {pieces} equal parts, got {len(layers)}")
    return [[list(layers[(c * stages + s) * each :][:each]) for c in range(chunks)] for s in range(stages)]


def join_layers(parts: Sequence[Sequence[Sequence[Any]]]) -> list[Any]:
    """What `split_layers` dealt, in the model's order again.

    >>> join_layers(split_layers(range(8), stages=2, chunks=2))
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return [layer for chunk in zip(*parts) for piece in chunk for layer in piece]


def pipeline_step(
    comm: Comm,
    params: Any,
    x: Array | None,
    target: Array | None,
    schedule: Callable[..., Iterator[Instruction]],
    micro_batches: int,
    layers: Any = RESIDUAL,
    loss: Callable[[Array, Array], tuple[Array, Array]] = mean_squared_error,
    times: Times = NO_TIME,
    **options: Any,
) -> tuple[Array | None, list[list[Any]]]:
    """Loss and gradients of one batch, through a pipeline; a rank program.

    Args:
        comm: the communicator of the stages, in order.
        params: this stage's parameters, ``params[chunk][i]``: an entry of
            `split_layers`.
        x, target: the whole batch, cut along axis 0; looked at on the first and on the
            last stage only.
        schedule: such as `one_f_one_b`, called with (stage, stages, micro_batches,
            **options).
        micro_batches: M, at most the batch's rows.
        layers, loss: see `LayerWorker`.
        times: computing to declare beside the real one, for a simulation's clock.
        **options: for the schedule.

    Returns: (loss of the batch on the last stage, None elsewhere; gradients, in the
    structure of `params`).

    >>> from manyranks import simulate
    >>> params, x = residual_params(2, width=3), np.ones((4, 3))
    >>> step = dict(x=x, target=0 * x, schedule=gpipe, micro_batches=2)
    >>> two = simulate(pipeline_step, inputs=split_layers(params, 2), **step)
    >>> one = simulate(pipeline_step, inputs=split_layers(params, 1), **step)
    >>> bool(abs(two.results[1][0] - one.results[0][0]) < 1e-12)
    True
    """
    instructions = list(schedule(comm.rank, comm.size, micro_batches, **options))
    if _chunks(instructions) != len(params):
        raise ValueError(f"params must have {_chunks(instructions)} chunks, got {len(params)}")
    batch = x if comm.rank == 0 else target if comm.rank == comm.size - 1 else None
    inputs, targets, weights = [], [], []
    if batch is not None:
        rows = len(batch)
        if rows < micro_batches:
            raise ValueError(f"micro_batches must be at most the {rows} rows, got {micro_batches}")
        bounds = chunk_bounds(rows, micro_batches)
        weights = [(stop - start) / rows for start, stop in zip(bounds, bounds[1:])]
        if comm.rank == 0:
            inputs = [x[start:stop] for start, stop in zip(bounds, bounds[1:])]
        if comm.rank == comm.size - 1:
            targets = [target[start:stop] for start, stop in zip(bounds, bounds[1:])]
    worker = LayerWorker(comm, params, layers, loss, inputs, targets, weights, times)
    execute(comm, instructions, worker)
    return worker.value, worker.grads


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> Iterator[Instruction]:
    """1F1B: warm up with P - 1 - s forward passes, then one forward, one backward.

    >>> print(*(i for i in one_f_one_b(1, 3, 3) if isinstance(i, (Forward, Backward))))
    Forward(0) Forward(1) Backward(0) Forward(2) Backward(1) Backward(2)
    """
    _check(stage, stages, micro_batches)
    ahead = min(stages - 1 - stage, micro_batches)

    def work() -> Iterator[Instruction]:
        for mb in range(ahead):
            yield Forward(mb)
        for mb in range(micro_batches):
            if mb + ahead < micro_batches:
                yield Forward(mb + ahead)
            yield Backward(mb)

    return with_messages(work(), stage, stages)


def interleaved_warmup(stage: int, stages: int, micro_batches: int, chunks: int) -> int:
    """Forward passes before a stage alternates: 2(P - 1 - s) + (v - 1)·P, at most v·M.

    >>> [interleaved_warmup(s, stages=4, micro_batches=8, chunks=2) for s in range(4)]
    [10, 8, 6, 4]
    """
    return min(2 * (stages - 1 - stage) + (chunks - 1) * stages, micro_batches * chunks)


def interleaved(
    stage: int,
    stages: int,
    micro_batches: int,
    chunks: int = 2,
    warmup: int | None = None,
) -> Iterator[Instruction]:
    """Interleaved 1F1B (Narayanan et al., 2021): `chunks` pieces of the model per stage.

    Args:
        stage, stages: s and P.
        micro_batches: M, a multiple of P.
        chunks: v, 2 or more.
        warmup: forward passes before it alternates; without it `interleaved_warmup`.

    Raises: ValueError if P doesn't divide M, or for a single chunk (that is
    `one_f_one_b`).

    >>> steps = [i for i in interleaved(1, 2, 2) if isinstance(i, (Forward, Backward))]
    >>> print(*steps[:4])
    Forward(0) Forward(1) Forward(0, chunk 1) Backward(0, chunk 1)
    """
    _check(stage, stages, micro_batches)
    if check_count("chunks", chunks) < 2:
        raise ValueError("chunks must be 2 or more; with one chunk take one_f_one_b")
    if micro_batches % stages:
        raise ValueError(f"micro_batches must be a multiple of the {stages} stages, got {micro_batches}")
    total = micro_batches * chunks
    if warmup is None:
        warmup = interleaved_warmup(stage, stages, micro_batches, chunks)
    ahead = min(check_count("warmup", warmup, 0), total)

    def turn(i: int) -> tuple[int, int]:
        group, within = divmod(i, stages * chunks)
        chunk, k = divmod(within, stages)
        return group * stages + k, chunk

    def work() -> Iterator[Instruction]:
        for i in range(ahead):
            yield Forward(*turn(i))
        for i in range(total):
            if i + ahead < total:
                yield Forward(*turn(i + ahead))
            mb, chunk = turn(i)
            yield Backward(mb, chunks - 1 - chunk)

    return with_messages(work(), stage, stages, chunks)


def zb_h1(stage: int, stages: int, micro_batches: int) -> Iterator[Instruction]:
    """ZB-H1 (Qi et al., 2024): 1F1B with split backward passes, weights' half late.

    Stage s does the weight half of a micro-batch s micro-batches after the input half.

    >>> print(*list(zb_h1(0, 1, 2))[:4])
    Forward(0) BackwardInput(0) BackwardWeight(0) Forward(1)
    """
    _check(stage, stages, micro_batches)
    ahead = min(stages - 1 - stage, micro_batches)

    def work() -> Iterator[Instruction]:
        for mb in range(ahead):
            yield Forward(mb)
        for mb in range(micro_batches):
            if mb + ahead < micro_batches:
                yield Forward(mb + ahead)
            yield BackwardInput(mb)
            if mb >= stage:
                yield BackwardWeight(mb - stage)
        for mb in range(max(micro_batches - stage, 0), micro_batches):
            yield BackwardWeight(mb)

    return with_messages(work(), stage, stages)


#: The schedules of this chapter, by name.
SCHEDULES: dict[str, Callable[..., Iterator[Instruction]]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
}


def clocked_step(
    comm: Comm,
    params: Any,
    x: Array,
    target: Array,
    schedule: Callable[..., Iterator[Instruction]],
    micro_batches: int,
    layers: LayerFunctions = RESIDUAL,
    repeats: int = 3,
    **options: Any,
) -> list[tuple[float, float]]:
    """Time `pipeline_step`, and what its layer functions take of it; a rank program.

    Args:
        comm, params, x, target, schedule, micro_batches, layers, **options: as
            `pipeline_step` takes them.
        repeats: timed repetitions; one more warms up.

    Returns: (seconds from the common start until this rank is done, seconds in layer
    functions), for each repetition. See `measured_bubble`.
    """
    spent = [0.0]

    def clocked(function: Callable[..., Any] | None) -> Any:
        def call(*arguments: Any) -> Any:
            began = comm.time()
            result = function(*arguments)
            spent[0] += comm.time() - began
            return result

        return function and call

    timed, seconds = LayerFunctions(*map(clocked, layers)), []
    for _ in range(repeats + 1):
        comm.barrier()
        began, spent[0] = comm.time(), 0.0
        pipeline_step(comm, params, x, target, schedule, micro_batches, timed, **options)
        seconds.append((comm.time() - began, spent[0]))
    return seconds[1:]


def bubble_sweep(
    comm: Comm,
    params: Any,
    x: Array,
    target: Array,
    micro_batches: Sequence[int],
    schedule: Callable[..., Iterator[Instruction]] = one_f_one_b,
    repeats: int = 3,
) -> list[list[tuple[float, float]]]:
    """`clocked_step` for several numbers of micro-batches; a rank program.

    Returns: for each of `micro_batches` what `clocked_step` returns.
    """
    return [clocked_step(comm, params, x, target, schedule, m, repeats=repeats) for m in micro_batches]


def measured_bubble(
    results: Sequence[Sequence[tuple[float, float]]],
) -> tuple[float, float]:
    """Makespan and idle fraction of the quickest repetition of `clocked_step`.

    Args:
        results: what each rank returned.

    Returns: (seconds, idle part of the ranks' time).

    >>> measured_bubble([[(4.0, 2.0), (9.0, 2.0)], [(4.0, 3.0), (5.0, 2.0)]])
    (4.0, 0.375)
    """
    each = np.array(results)  # (ranks, repeats, 2)
    makespans = each[:, :, 0].max(0)
    best = int(makespans.argmin())
    return float(makespans[best]), float(1 - each[:, best, 1].mean() / makespans[best])
