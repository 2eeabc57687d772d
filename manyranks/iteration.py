# Generated from chapters/07_3d_parallelism.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""One training step of a plan, simulated instruction by instruction beside the planner's closed form."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from manyranks.five_axes import (
    neighbours,
)
from manyranks.memory import CONVENTIONS
from manyranks.models import as_decoder
from manyranks.pipeline import (
    Forward,
    Instruction,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    gpipe,
    interleaved,
    one_f_one_b,
)
from manyranks.planner import (
    CONSTANTS,
    Constants,
    Job,
    Plan,
    as_table,
    collective,
    costs,
    predict,
    stage_holdings,
    stage_kinds,
)
from manyranks.runtime import Array, Cluster, Comm, Run, Tier, Work, phantom, simulate

__all__ = [
    "Iteration",
    "StageEnd",
    "Step",
    "collective_seconds",
    "iteration",
    "reached",
    "run_stage",
    "simulate_plan",
    "step_of",
]


def run_stage(
    comm: Comm,
    instructions: Iterable[Instruction],
    times: Sequence[tuple[float, float]],
    message: Array,
    wait: bool = True,
    early: bool = False,
) -> None:
    """One stage of a pipeline on declared times; what `execute` does, with less around it.

    Args:
        comm: the stages, in order.
        instructions: this stage's schedule.
        times: (forward, backward) seconds of each of its chunks.
        message: a phantom, sent for each micro-batch and chunk.
        wait: start no computation before the last message has left. Megatron-LM's 1F1B
            sends and receives in one call, and waits for both.
        early: post all receives at the start. An interleaved schedule that waits needs
            it: a stage of it is not there to receive while it sends.
    """
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    back = comm.group(range(comm.size))
    compute, send, recv = comm.compute, comm.isend, comm.recv
    send_back, recv_back = back.isend, back.recv
    if early:
        instructions = list(instructions)
        kinds = [type(step) for step in instructions]
        forward = deque([comm.irecv(left) for kind in kinds if kind is RecvActivation])
        backward = deque([back.irecv(right) for kind in kinds if kind is RecvGradient])
        recv = lambda src: forward.popleft().wait()  # noqa: E731
        recv_back = lambda src: backward.popleft().wait()  # noqa: E731
    sends: list[Work] = []
    for step in instructions:
        kind = step.__class__
        if kind is RecvActivation:
            recv(left)
        elif kind is RecvGradient:
            recv_back(right)
        elif kind is SendActivation:
            sends.append(send(message, right))
        elif kind is SendGradient:
            sends.append(send_back(message, left))
        else:
            if wait and sends:
                for sent in sends:
                    sent.wait()
                sends.clear()
            if kind is Forward:
                compute(seconds=times[step.chunk][0], label="F")
            else:
                compute(seconds=times[step.chunk][1], label="B")
    for sent in sends:
        sent.wait()


class StageEnd(NamedTuple):
    """What a stage does when the pipeline has run dry: seconds, and bytes that it shares.

    Attributes:
        data: seconds of the data-parallel collectives that are seen.
        optimizer: seconds.
        tied: bytes of the embedding's gradient, which first and last stage add up; 0 if
            the output has a matrix of its own.
    """

    data: float
    optimizer: float
    tied: int


def iteration(
    comm: Comm,
    micro_batches: int,
    schedule: Callable[..., Iterator[Instruction]],
    times: Sequence[Sequence[tuple[float, float]]],
    ends: Sequence[StageEnd],
    message_bytes: int,
    wait: bool,
    early: bool,
    **options: Any,
) -> None:
    """One training step of a plan, one rank a stage; a rank program for `simulate`."""
    stage, stages = comm.rank, comm.size
    instructions = schedule(stage, stages, micro_batches, **options)
    run_stage(comm, instructions, times[stage], phantom(message_bytes, np.uint8), wait, early)
    end = ends[stage]
    if stages > 1 and stage in (0, stages - 1) and end.tied:
        both = comm.group([0, stages - 1])
        both.all_reduce(phantom(end.tied, np.uint8))
    comm.compute(seconds=end.data, label="data")
    comm.compute(seconds=end.optimizer, label="optimizer")


def reached(cluster: Cluster, constants: Constants, nodes: int, per_node: int) -> Cluster:
    """A cluster whose links have the bandwidth that the constants say is reached.

    Args:
        cluster, constants: links, and what is reached of them.
        nodes, per_node: how many nodes and ranks it shall have.
    """
    return Cluster(
        nodes,
        per_node,
        cluster.gpu,
        intra_latency=cluster.intra.latency,
        intra_bandwidth=constants.link * cluster.intra.bandwidth,
        inter_latency=cluster.inter.latency,
        inter_bandwidth=constants.link * cluster.inter.bandwidth,
    )


def collective_seconds(
    kind: str,
    size: float,
    ranks: int,
    stride: int,
    cluster: Cluster,
    constants: Constants,
    near: int | None = None,
) -> float:
    """Simulated seconds of a ring collective of a group whose ranks are `stride` apart.

    Args:
        kind: "all_reduce", "reduce_scatter" or "all_gather".
        size: bytes of the whole buffer.
        ranks: of the group.
        stride: distance of neighbours, in ranks of the cluster.
        cluster, constants: links, and what is reached of them.
        near: how many of the group share a node, where no one stride says it.

    If several of the group share a node there are as many rings, each with an equal part
    of the buffer, and each leaves the node through another GPU's port, as NCCL has it.
    They are alike, so one is run, with its share of NVLink.
    """
    if ranks == 1 or size <= 0:
        return 0.0
    inside = near or min(max(cluster.gpus_per_node // stride, 1), ranks)
    nodes = -(-ranks // inside)
    wires = reached(cluster, constants, nodes, inside)
    rings = inside if nodes > 1 else 1
    if rings > 1:  # each GPU passes all rings but one on to its neighbour in the node
        wires = Cluster(
            nodes,
            inside,
            cluster.gpu,
            Tier("NVLink", wires.intra.latency, wires.intra.bandwidth / (rings - 1)),
            wires.inter,
        )
    bytes_ = -(-int(size) // (rings * ranks))  # of a rank's chunk in one ring

    def program(comm: Comm) -> None:
        if kind == "all_gather":
            comm.all_gather(phantom(bytes_, np.uint8))
        else:
            getattr(comm, kind)(phantom(bytes_ * ranks, np.uint8))

    return simulate(program, ranks=ranks, cluster=wires).seconds


class Iteration(NamedTuple):
    """A simulated training step of a plan.

    Attributes:
        seconds: of the step.
        run: of the pipeline, one rank a stage: its timeline, traffic and idle time.
        folded: which ranks one rank stood for, in words.
        predicted: the planner's seconds, beside it.
    """

    seconds: float
    run: Run
    folded: str
    predicted: float

    @property
    def difference(self) -> float:
        """How far the planner is from the simulation, as a part of the simulation."""
        return self.predicted / self.seconds - 1


class Step(NamedTuple):
    """A plan's step as the simulator runs it: one rank a stage.

    Attributes:
        cluster: what the stages are on.
        arguments: of `iteration`, as a dict.
    """

    cluster: Cluster
    arguments: dict[str, Any]


_PIPELINES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved}


def step_of(plan: Plan, job: Job, cluster: Cluster, constants: Constants = CONSTANTS) -> Step:
    """What `simulate_plan` simulates, made of the planner's own times of a layer.

    Args:
        plan, job, cluster, constants: as `manyranks.planner.predict` takes them.
    """
    prediction = predict(plan, job, cluster, constants)
    table, model = as_table([plan]), as_decoder(job.model)
    found = costs(table, job, cluster, constants)
    stages, v, tp = plan.pp, plan.virtual_stages, plan.tp
    rule, hide = (
        CONVENTIONS[job.convention],
        constants.data_overlap * ("data" in job.overlap),
    )
    places = np.arange(stages)
    near = neighbours(plan.dp, tp, stages, plan.cp, plan.ep, cluster.gpus_per_node)
    kinds = [np.broadcast_to(n, stages) for n in stage_kinds(table, job, places)]
    held = sum(kinds).tolist()
    groups = []  # ranks that hold the same, how many of them in a node, what, for each stage
    for size, ranks, inside in zip(
        stage_holdings(table, job, places)[: len(kinds)],
        (plan.dp * plan.cp, plan.dp * plan.cp // plan.ep),
        (near.data, near.expert_data),
    ):
        groups.append((ranks, int(inside), np.broadcast_to(size, stages).tolist()))
    emb, head = ([float(x[0]) for x in pair] for pair in (found.embedding, found.head))

    @cache
    def ring(kind: str, size: float, ranks: int, inside: int) -> float:
        return collective_seconds(kind, size, ranks, 1, cluster, constants, inside)

    def rings(kind: str, stage: int, width: int, pieces: int = 1) -> float:
        """Of all that a stage holds, in so many equal pieces."""
        return sum(
            pieces * ring(kind, width * size[stage] / pieces, ranks, inside) for ranks, inside, size in groups
        )

    def seen(comm: float, window: float) -> float:  # the planner's rule for what overlaps
        return comm - hide * min(comm, window)

    times, ends = [], []
    size = 2 * plan.micro_batch * (job.sequence // plan.cp) * job.model.hidden
    split = plan.sequence_parallel or tp == 1  # if not, tensor ranks gather what each received
    joined = 0.0 if split else float(collective("all_gather", size, tp, 1, cluster, constants))
    for stage in range(stages):
        whole = list(prediction.stages[stage])  # gradient accumulation is in there too
        mine = [n[stage] for n in kinds]
        forward, backward = (float(found.stage(mine, k)[0]) for k in (0, 1))
        scatter = rings("reduce_scatter", stage, rule.gradients[0])
        gather = rings("all_gather", stage, rule.weight)
        if plan.zero_stage == 0:
            data = seen(rings("all_reduce", stage, rule.gradients[0]), backward)
        elif plan.zero_stage == 1:
            data = seen(scatter, backward) + seen(gather, forward)
        elif plan.zero_stage == 2:
            whole[1] += seen(scatter, backward)
            data = seen(gather, forward)
        else:  # one layer at a time
            gather = rings("all_gather", stage, rule.weight, held[stage])
            scatter = rings("reduce_scatter", stage, rule.gradients[0], held[stage])
            whole[0] += seen(gather, forward)
            whole[1] += seen(gather + scatter, backward)
            data = 0.0
        # the model's two ends belong to its first and to its last piece
        first, last = (stage == 0), (stage == stages - 1)
        piece = [(whole[k] - first * emb[k] - last * head[k]) / v for k in (0, 1)]
        pieces = [list(piece) for _ in range(v)]
        if plan.ends_as_layers and v > 1 and (first or last):
            each = (job.model.layers + 2) // (stages * v)  # layers of a piece
            for c in range(v):
                layers = each - (first and c == 0) - (last and c == v - 1)
                pieces[c] = [x * v * layers / held[stage] for x in piece]
        for k in (0, 1):
            pieces[0][k] += first * emb[k]
            pieces[-1][k] += last * head[k]
        for c, piece in enumerate(pieces):
            piece[0] += joined * (stages > 1 and not (first and c == 0))
            piece[1] += joined * (stages > 1 and not (last and c == v - 1))
        times.append([tuple(piece) for piece in pieces])
        tied = model.tied * (2 * job.model.vocabulary * job.model.hidden // tp)
        ends.append(StageEnd(data, prediction.parts["optimizer"], tied))

    hidden = plan.schedule == "gpipe"
    hidden |= plan.schedule == "interleaved" and "pipeline" in job.overlap
    per_node = max(cluster.gpus_per_node // int(near.stages), 1)
    arguments = {
        "micro_batches": plan.micro_batches,
        "schedule": _PIPELINES[plan.schedule],
        "times": times,
        "ends": ends,
        "message_bytes": -(-size // tp),
        "wait": not hidden,
        "early": plan.schedule == "interleaved",
        **({"chunks": v} if v > 1 else {}),
    }
    return Step(reached(cluster, constants, -(-stages // per_node), per_node), arguments)


def simulate_plan(plan: Plan, job: Job, cluster: Cluster, constants: Constants = CONSTANTS) -> Iteration:
    """Run one training step of a plan in the simulator, instruction by instruction.

    The planner's times of a layer and of the two ends go in. What comes out of the
    simulation is how the stages fit together: every instruction of the schedule in its
    order, every message on the link that it takes, waiting where something isn't there
    yet, the collectives of the data axis ring step by ring step.

    Tensor-parallel ranks of a stage all do the same at the same time, and so do the
    replicas of a pipeline. One rank stands for all of them, and `Iteration.folded` says
    so. Traffic is that of this one rank. Context-parallel ranks and those of an expert
    group are folded too, if sequences are cut and experts chosen evenly: what they send
    is part of a layer's time, by the planner's formulas.

    Args:
        plan, job, cluster, constants: as `manyranks.planner.predict` takes them.

    >>> from manyranks.memory import Transformer
    >>> job = Job(Transformer(32, 4096, 32, 51200), sequence=2048, batch=64)
    >>> plan = Plan(dp=2, tp=4, pp=4, micro_batches=32)
    >>> found = simulate_plan(plan, job, Cluster(4, 8, "A100"))
    >>> found.folded
    '1 of 4 tensor and of 2 data ranks'
    >>> abs(found.difference) < 0.05
    True
    """
    step = step_of(plan, job, cluster, constants)
    run = simulate(iteration, ranks=plan.pp, cluster=step.cluster, **step.arguments)
    context = f", of {plan.cp} context" if plan.cp > 1 else ""
    folded = f"1 of {plan.tp} tensor{context} and of {plan.dp} data ranks"
    run.notes.append(f"folded: each rank stands for {folded}")
    predicted = predict(plan, job, cluster, constants).seconds
    return Iteration(run.seconds, run, folded, predicted)
