# Generated from chapters/07_3d_parallelism.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""A planner: what a plan of a training job holds on each stage, and how long its step takes, part by part."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from manyranks.five_axes import Neighbours, all_to_all_seconds, check_experts, key_value_bytes, neighbours
from manyranks.memory import CONVENTIONS, Transformer, activation_terms
from manyranks.models import Decoder, as_decoder, decoder_activation_terms
from manyranks.published import (
    MEGATRON_SEQUENCE,
    MEGATRON_VOCABULARY,
    Recomputation,
    WeakScaling,
)
from manyranks.runtime import Cluster
from manyranks.runtime.hardware import check_count, check_number

__all__ = [
    "CONSTANTS",
    "Constants",
    "Costs",
    "FURTHER_PARTS",
    "GRADIENT",
    "Job",
    "LayerSeconds",
    "MEMORY_PARTS",
    "OVERLAPS",
    "Plan",
    "Prediction",
    "PublishedRun",
    "RECOMPUTE",
    "SCHEDULES",
    "SOURCES",
    "STATE",
    "TIME_PARTS",
    "Table",
    "WEIGHTS",
    "as_table",
    "check_plan",
    "collective",
    "costs",
    "expert_parameters",
    "hardware_flops",
    "in_flight",
    "layer_parameters",
    "layer_seconds",
    "model_flops",
    "model_of",
    "predict",
    "recomputation_runs",
    "sharers",
    "stage_holdings",
    "stage_kinds",
    "stage_layers",
    "stage_memory",
    "stage_parameters",
    "weak_scaling_run",
]

SCHEDULES = ("gpipe", "1f1b", "interleaved")
RECOMPUTE = ("none", "selective", "full")
OVERLAPS = ("tensor", "data", "pipeline")


@dataclass(frozen=True)
class Plan:
    """How a job is laid out: degrees of parallelism, micro-batches, what is kept.

    Attributes:
        dp, tp, pp: data, tensor and pipeline parallel ranks.
        micro_batch: sequences of one micro-batch, on each replica.
        micro_batches: m, how many of them a replica works through in a step.
        zero_stage: 0 to 3, over the data-parallel ranks.
        schedule: one of `SCHEDULES`.
        virtual_stages: v, pieces of the model on each rank; above 1 only if
            interleaved.
        recompute: one of `RECOMPUTE`.
        sequence_parallel: whether norms and dropouts are split over the tensor-parallel
            ranks too.
        cp, ep: context and expert parallel ranks. `manyranks.five_axes.Layout` says
            where they stand. ZeRO shards over dp x cp, and experts over dp x cp / ep.
        ends_as_layers: whether embedding and output count as a layer each where the
            stages are cut: the first and the last stage then hold one layer less.

    >>> plan = Plan(dp=2, tp=8, pp=4, micro_batches=16)
    >>> plan.gpus, plan.batch
    (64, 32)
    >>> print(plan)
    dp 2, tp 8, pp 4, micro-batch 1 x 16, 1f1b
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    zero_stage: int = 0
    schedule: str = "1f1b"
    virtual_stages: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    cp: int = 1
    ep: int = 1
    ends_as_layers: bool = False

    def __post_init__(self) -> None:
        for name in (
            *("dp", "tp", "pp", "cp", "ep"),
            *("micro_batch", "micro_batches", "virtual_stages"),
        ):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        if check_count("zero_stage", self.zero_stage, 0) > 3:
            raise ValueError(f"zero_stage must be 0, 1, 2 or 3, got {self.zero_stage}")
        if self.schedule not in SCHEDULES:
            takes = ", ".join(SCHEDULES)
            raise ValueError(f"schedule must be one of {takes}, got {self.schedule!r}")
        if self.recompute not in RECOMPUTE:
            takes = ", ".join(RECOMPUTE)
            raise ValueError(f"recompute must be one of {takes}, got {self.recompute!r}")
        for name in ("sequence_parallel", "ends_as_layers"):
            value = getattr(self, name)
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"{name} must be True or False, got {value!r}")
            object.__setattr__(self, name, bool(value))
        v, interleaved = self.virtual_stages, self.schedule == "interleaved"
        if interleaved and (v < 2 or self.pp < 2):
            what = "virtual_stages" if v < 2 else "pp"
            raise ValueError(
                f"{what} must be 2 or more for the interleaved schedule, got {getattr(self, what)}"
            )
        if interleaved and self.micro_batches % self.pp:
            raise ValueError(
                f"micro_batches must be a multiple of pp, {self.pp}, for the "
                f"interleaved schedule, got {self.micro_batches}"
            )
        if v > 1 and not interleaved:
            raise ValueError(f"virtual_stages must be 1 for the {self.schedule} schedule, got {v}")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "sequence_parallel must be False where tp is 1: there is nothing to split it over"
            )
        if self.ends_as_layers and self.pp == 1:
            raise ValueError("ends_as_layers must be False where pp is 1: there is one stage")

    @property
    def gpus(self) -> int:
        """dp x tp x pp x cp; experts (ep) share the data-parallel ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def batch(self) -> int:
        """Sequences of a step, all replicas together."""
        return self.dp * self.micro_batch * self.micro_batches

    def __str__(self) -> str:
        words = [f"dp {self.dp}", f"tp {self.tp}", f"pp {self.pp}"]
        words += [f"{n} {getattr(self, n)}" for n in ("cp", "ep") if getattr(self, n) > 1]
        words.append(f"micro-batch {self.micro_batch} x {self.micro_batches}")
        v = f" v={self.virtual_stages}" if self.virtual_stages > 1 else ""
        if self.pp > 1:
            words.append(self.schedule + v)
        if self.zero_stage:
            words.append(f"ZeRO-{self.zero_stage}")
        if self.sequence_parallel:
            words.append("sequence parallel")
        if self.ends_as_layers:
            words.append("ends as layers")
        if self.recompute != "none":
            words.append(f"{self.recompute} recomputation")
        return ", ".join(words)


@dataclass(frozen=True)
class Job:
    """What is trained, whatever it is trained on.

    Attributes:
        model: a `manyranks.memory.Transformer`.
        sequence: s, tokens of a sequence.
        batch: sequences of a step, all GPUs together.
        convention: bytes of a parameter, a name in `manyranks.memory.CONVENTIONS`.
        attention: "flash", or "stored" for one that writes the scores to memory.
        dropout: whether the model drops out, which costs masks and memory traffic.
        overlap: what the training code hides behind computing: "tensor" (collectives of
            the backward pass behind the weights' gradients), "data" (ZeRO's and the
            gradients' collectives) and "pipeline" (the sends of the interleaved
            schedule).
        causal: whether attention skips what the causal mask hides, half of its
            operations. The papers of 2021 and 2022 did all of them, and count all.

    >>> Job(Transformer(24, 2304, 24, 51200), sequence=2048, batch=512).tokens
    1048576
    """

    model: Transformer
    sequence: int
    batch: int
    convention: str = "mixed16"
    attention: str = "flash"
    dropout: bool = False
    overlap: tuple[str, ...] = OVERLAPS
    causal: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, Transformer):
            raise TypeError(f"model must be a Transformer, got {self.model!r}")
        object.__setattr__(self, "sequence", check_count("sequence", self.sequence))
        object.__setattr__(self, "batch", check_count("batch", self.batch))
        if self.convention not in CONVENTIONS:
            raise ValueError(f"convention must be one of {', '.join(CONVENTIONS)}, got {self.convention!r}")
        if self.attention not in ("stored", "flash"):
            raise ValueError(f"attention must be 'stored' or 'flash', got {self.attention!r}")
        object.__setattr__(self, "overlap", tuple(self.overlap))
        if set(self.overlap) - set(OVERLAPS):
            raise ValueError(f"overlap must hold some of {', '.join(OVERLAPS)}, got {self.overlap!r}")
        if not isinstance(self.causal, (bool, np.bool_)):
            raise TypeError(f"causal must be True or False, got {self.causal!r}")
        object.__setattr__(self, "causal", bool(self.causal))
        if self.causal and self.attention != "flash":
            raise ValueError("causal must be False unless attention is 'flash', got True")
        if 0 < self.model.positions < self.sequence:
            raise ValueError(
                f"sequence must be at most the model's positions, {self.model.positions}, got {self.sequence}"
            )

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.sequence


def model_of(parameters: float, vocabulary: int = 51200) -> Transformer:
    """A GPT-style model with about so many parameters, in a shape that divides well.

    Heads of 128 entries, layers a multiple of 8 (of 4 below 1B), a width of about 128
    times the depth, as GPT-3 has it.

    >>> m = model_of(175e9)
    >>> m.layers, m.hidden, m.heads, round(m.parameters / 1e9, 1)
    (96, 12288, 96, 174.6)
    """
    target = check_number("parameters", parameters, positive=True)
    if target < 20e6 or target > 1e14:
        raise ValueError(f"parameters must be between 20 million and 100 trillion, got {parameters:g}")
    step, unit = (4, 256) if target < 1e9 else (8, 512) if target < 4e9 else (8, 1024)
    best = None
    for layers in range(step, 520, step):
        inner = vocabulary**2 + 48 * layers * target  # 12·l·h² + V·h = target
        exact = (math.sqrt(inner) - vocabulary) / (24 * layers)
        for hidden in {math.floor(exact / unit) * unit, math.ceil(exact / unit) * unit}:
            if hidden < unit:
                continue
            count = 12 * layers * hidden**2 + vocabulary * hidden
            off = abs(math.log(count / target)) + 0.15 * abs(math.log(hidden / layers / 128))
            if best is None or off < best[0]:
                best = off, layers, hidden
    if best is None:
        raise ValueError(f"parameters must be enough for the embedding, got {parameters:g}")
    _, layers, hidden = best
    return Transformer(layers, hidden, hidden // 128, vocabulary)


class Table(NamedTuple):
    """Many plans as one array a field; `schedule` and `recompute` are places in
    `SCHEDULES` and `RECOMPUTE`."""

    dp: np.ndarray
    tp: np.ndarray
    pp: np.ndarray
    micro_batch: np.ndarray
    micro_batches: np.ndarray
    zero_stage: np.ndarray
    schedule: np.ndarray
    virtual_stages: np.ndarray
    recompute: np.ndarray
    sequence_parallel: np.ndarray
    cp: np.ndarray
    ep: np.ndarray
    ends_as_layers: np.ndarray

    def plan(self, i: int) -> Plan:
        """Row `i` as a `Plan`."""
        row = {name: int(column[i]) for name, column in self._asdict().items()}
        row["schedule"] = SCHEDULES[row["schedule"]]
        row["recompute"] = RECOMPUTE[row["recompute"]]
        for name in ("sequence_parallel", "ends_as_layers"):
            row[name] = bool(row[name])
        return Plan(**row)

    def take(self, rows: np.ndarray) -> "Table":
        """The rows chosen by an index or a mask."""
        return Table(*(column[rows] for column in self))


def as_table(plans: Iterable[Plan]) -> Table:
    """Plans, one a row.

    >>> as_table([Plan(dp=2), Plan(tp=4, recompute="full")]).recompute
    array([0, 2])
    """
    plans = list(plans)

    def column(name: str) -> np.ndarray:
        values = [getattr(plan, name) for plan in plans]
        if name == "schedule":
            values = [SCHEDULES.index(v) for v in values]
        if name == "recompute":
            values = [RECOMPUTE.index(v) for v in values]
        return np.array(values, dtype=np.int64)

    return Table(*(column(name) for name in Table._fields))


GRADIENT, WEIGHTS, STATE = "gradients", "weights", "optimizer"
MEMORY_PARTS = (WEIGHTS, GRADIENT, STATE, "activations", "logits and loss", "gathered")


def layer_parameters(table: Table, job: Job, expert: bool = False) -> Any:
    """Parameters of one layer that a rank holds, routed experts aside.

    The matrices, and the biases of the column-parallel ones, are split over the tp
    ranks; norms and the other biases are on each.
    """
    cut, whole, _ = as_decoder(job.model).layer_counts(expert)
    return cut / table.tp + whole


def expert_parameters(table: Table, job: Job) -> Any:
    """Parameters of the routed experts of one layer that a rank holds."""
    return as_decoder(job.model).layer_counts(True)[2] / (table.tp * table.ep)


def stage_layers(table: Table, job: Job, stage: Any) -> Any:
    """Layers of a stage; where p doesn't divide them, the first stages have one more."""
    each, over = np.divmod(job.model.layers + 2 * table.ends_as_layers, table.pp)
    ends = (stage == 0) * 1 + (stage == table.pp - 1)
    return each + (stage < over) - table.ends_as_layers * ends


def stage_kinds(table: Table, job: Job, stage: Any) -> tuple[Any, ...]:
    """(layers,) of a stage, or (plain layers, layers with experts) if there are experts."""
    layers, model = stage_layers(table, job, stage), as_decoder(job.model)
    if not model.experts:
        return (layers,)
    end, p = table.ends_as_layers, table.pp
    each, over = np.divmod(model.layers + 2 * end, p)
    before = stage * each + np.minimum(stage, over) - end * (stage > 0)
    plain = np.clip(model.dense_layers - before, 0, layers)
    # interleaved: piece c of a stage begins behind c·p + stage pieces
    piece = np.maximum((model.layers + 2 * end) // (p * table.virtual_stages), 1)
    rounds, left = np.divmod(model.dense_layers + end, piece * p)
    dealt = rounds * piece + np.clip(left - stage * piece, 0, piece) - end * (stage == 0)
    plain = np.where(table.schedule == 2, np.clip(dealt, 0, layers), plain)
    return plain, layers - plain


def stage_holdings(table: Table, job: Job, stage: Any) -> tuple[Any, Any]:
    """(parameters, those of routed experts) that a rank of a stage holds.

    The first stage has the embeddings, the last one the final norm and an output: a
    copy of the embedding if the two are tied and there is more than one stage.
    """
    model, t, p = as_decoder(job.model), table.tp, table.pp
    h, kinds = model.hidden, stage_kinds(table, job, stage)
    words = np.ceil(model.vocabulary / t) * h
    first, last = stage == 0, stage == p - 1
    norm, own = (1 + model.biases) * h, (p > 1) | (not model.tied)
    ends = first * (words + model.positions * h) + last * (norm + own * words)
    layers = sum(n * layer_parameters(table, job, i == 1) for i, n in enumerate(kinds))
    routed = kinds[1] * expert_parameters(table, job) if model.experts else 0
    return layers + ends, routed


def stage_parameters(table: Table, job: Job, stage: Any) -> tuple[Any, Any]:
    """(parameters, layers) that a rank of pipeline stage `stage` holds.

    Args:
        table: plans; `stage` broadcasts against its columns.
        job: what is trained.
        stage: 0 to pp - 1.
    """
    shared, routed = stage_holdings(table, job, stage)
    return shared + routed, stage_layers(table, job, stage)


def sharers(table: Table) -> tuple[Any, Any]:
    """Ranks that hold the same parameters, dp x cp, and those that hold the same experts."""
    copies = table.dp * table.cp
    return copies, copies // table.ep


def in_flight(table: Table, stage: Any) -> Any:
    """Micro-batches whose activations a stage holds at most; of a chunk, a part.

    GPipe: m. 1F1B: p - stage. Interleaved: 2(p - 1 - stage) + (v - 1)p + 1 chunks, each
    1/v of the stage.
    """
    p, m, v = table.pp, table.micro_batches, table.virtual_stages
    ahead = np.minimum(m, p - stage)
    chunks = np.minimum(2 * (p - 1 - stage) + (v - 1) * p + 1, v * m)
    held = np.where(table.schedule == 0, m, ahead)
    held = np.where(table.schedule == 2, chunks / v, held)
    return np.where(p == 1, 1, held)  # accumulated one after the other


def _layer_activations(table: Table, job: Job, expert: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that one layer keeps for a micro-batch, and those it has while recomputed.

    Each combination of the options is looked up once in `memory.activation_terms`.
    """
    options = np.stack([table.tp, table.sequence_parallel, table.recompute])
    keys, places = np.unique(options, axis=1, return_inverse=True)
    model = job.model

    def bytes_of(t: int, split: int, recompute: str) -> float:
        given = {
            "attention": job.attention,
            "recompute": recompute,
            "tensor_parallel": int(t),
            "sequence_parallel": bool(split),
            "dropout": job.dropout,
        }
        if isinstance(model, Decoder):
            terms = decoder_activation_terms(model, job.sequence, expert=expert, **given)
        else:
            terms = activation_terms(job.sequence, 1, model.hidden, model.heads, **given)
        return sum(terms.values())

    kept = np.array([bytes_of(t, sp, RECOMPUTE[r]) for t, sp, r in keys.T])
    whole = np.array([bytes_of(t, sp, "none") for t, sp, _ in keys.T])
    places, part = places.reshape(-1), table.micro_batch / table.cp
    return kept[places] * part, whole[places] * part


def stage_memory(table: Table, job: Job, stage: Any) -> dict[str, Any]:
    """Bytes at the peak on a rank of pipeline stage `stage`, by part.

    Weights, gradients and optimizer state by the job's convention, sharded over the
    ranks that hold the same ones as the ZeRO stage says. Activations as in Korthikanti
    et al. 2022, for the micro-batches in flight; with recomputation also the one layer
    that is being recomputed. "logits and loss": 4sb(h + V/t) bytes on the last stage.
    "gathered": two layers for ZeRO-3; with context parallelism one layer's keys and
    values of the whole sequence, and their gradients.
    """
    rule, model, t = CONVENTIONS[job.convention], job.model, table.tp
    shared, routed = stage_holdings(table, job, stage)
    kinds, copies = stage_kinds(table, job, stage), sharers(table)
    held = in_flight(table, stage)
    tokens = table.micro_batch * (job.sequence // table.cp)
    split = np.where(table.sequence_parallel > 0, t, 1)
    first, last = stage == 0, stage == table.pp - 1
    mask = first * job.dropout * tokens * model.hidden / split * held
    activations = again = one_layer = 0.0
    for i, layers in enumerate(kinds):
        kept, whole = _layer_activations(table, job, i == 1)
        activations = activations + kept * layers
        more = (table.recompute > 0) * (layers > 0) * (whole - kept)
        again = np.maximum(again, more)
        one = layer_parameters(table, job, i == 1)
        one = one + expert_parameters(table, job) if i else one
        one_layer = np.maximum(one_layer, rule.weight * one)
    loss_held = np.where((table.schedule == 0) & (table.pp > 1), held, 1)
    loss = last * 4 * tokens * (model.hidden / split + model.vocabulary / t)

    def state(width: int, zero: int) -> Any:
        parts = [
            width * size / np.where(table.zero_stage >= zero, ranks, 1)
            for size, ranks in zip((shared, routed), copies)
        ]
        return sum(parts[: len(kinds)])

    gathered = np.where((table.zero_stage == 3) & (copies[0] > 1), 2 * one_layer, 0.0)
    if np.any(table.cp > 1):
        both = key_value_bytes(as_decoder(model), job.sequence, table.micro_batch, t)
        gathered = gathered + np.where(table.cp > 1, 2 * both, 0.0)
    return {
        WEIGHTS: state(rule.weight, 3),
        GRADIENT: state(sum(rule.gradients), 2),
        STATE: state(rule.master + 2 * rule.state, 1),
        "activations": activations * held + mask + again,
        "logits and loss": loss * loss_held,
        "gathered": gathered,
    }


@dataclass(frozen=True)
class Constants:
    """What the planner takes from measurements: one object for every job and cluster.

    `SOURCES` says where each comes from.

    Attributes:
        matmul: the part of the best measured matrix product (`GPU.matmul_efficiency`)
            that products reach, their memory traffic aside.
        unknown_matmul: `GPU.matmul_efficiency` where nobody has measured it.
        operands: the part of a product's memory traffic that isn't hidden behind it.
        memory: the part of the memory bandwidth that kernels reach.
        kernel: seconds that each kernel takes to start.
        link: the part of a link's bandwidth that collectives reach; above 1 where a
            switch adds the numbers itself.
        hop: latency of a ring's step, over the tier's latency.
        chunk: bytes of the piece that fills the ring before data flows.
        tensor_overlap: the part of a collective hidden by products beside it.
        data_overlap: the same for gradients and ZeRO's gathers.
        usable: the part of the GPU's memory that training can have.
    """

    matmul: float
    operands: float
    memory: float
    tensor_overlap: float
    link: float
    hop: float
    chunk: float
    unknown_matmul: float = 0.8
    kernel: float = 5e-6
    data_overlap: float = 0.8
    usable: float = 0.92

    def __post_init__(self) -> None:
        for field in fields(self):
            value = check_number(field.name, getattr(self, field.name))
            most = {"hop": math.inf, "chunk": math.inf, "kernel": math.inf, "link": 2}
            most = most.get(field.name, 1)
            none = field.name in (
                "matmul",
                "memory",
                "link",
                "unknown_matmul",
                "usable",
            )
            if value > most or (none and value == 0):
                takes = f"{'above 0' if none else '0 or more'} and at most {most}"
                raise ValueError(f"{field.name} must be {takes}, got {value:g}")


def collective(
    kind: str,
    size: Any,
    ranks: Any,
    stride: Any,
    cluster: Cluster,
    constants: Constants,
    near: Any = None,
) -> Any:
    """Predicted seconds of a ring collective.

    Args:
        kind: "all_reduce", or "all_gather" or "reduce_scatter", which take one pass
            instead of two.
        size: bytes of the whole buffer.
        ranks: n. Arrays are taken throughout.
        stride: distance of neighbours in the group, in ranks: 1 for tensor parallelism.
            It says how many of the group share a node.
        cluster, constants: links, and what is reached of them.
        near: how many of the group share a node, where no one stride says it.

    Each pass is n - 1 steps: their latencies, the chunk that fills the ring, and the
    bytes. Between nodes each GPU of the group brings its own network port, and the ring
    is filled once inside a node and once along the nodes. (That is an assumption: the
    curve that the chunk is fitted to is of one node.)
    """
    n = np.asarray(ranks, dtype=float)
    inside = near
    if near is None:
        inside = np.clip(cluster.gpus_per_node // np.asarray(stride), 1, n)
    nodes = np.ceil(n / inside)
    wire = np.where(
        nodes > 1,
        np.minimum(cluster.intra.bandwidth, inside * cluster.inter.bandwidth),
        cluster.intra.bandwidth,
    )
    wire = wire * constants.link
    latency = (n - nodes) * cluster.intra.latency + (nodes - 1) * cluster.inter.latency
    share = size / n
    chunk = constants.chunk * share / (share + constants.chunk) if constants.chunk else 0
    passes = 2 if kind == "all_reduce" else 1
    filled = (inside - 1) + (nodes - 1)
    seconds = constants.hop * latency + (filled * chunk + (n - 1) * share) / wire
    return passes * seconds


def _product(
    rows: Any,
    columns: Any,
    depth: Any,
    rate: float,
    byte: float,
    start: float,
    count: Any = 1,
) -> Any:
    """Seconds of `count` products (rows, depth) x (depth, columns) of 16-bit numbers."""
    traffic = 2 * (rows * depth + depth * columns + rows * columns)
    return count * (2 * rows * columns * depth * rate + traffic * byte) + start


class LayerSeconds(NamedTuple):
    """One layer on one micro-batch, seconds by what they are spent on.

    All are triples: forward, backward, recomputation; of the tensor-parallel collectives
    what isn't hidden. `context` and `experts` are those of the two further axes.
    """

    matmul: tuple[Any, Any, Any]
    memory: tuple[Any, Any, Any]
    tensor: tuple[Any, Any, Any]
    context: tuple[Any, Any, Any] = (0.0, 0.0, 0.0)
    experts: tuple[Any, Any, Any] = (0.0, 0.0, 0.0)

    @property
    def forward(self) -> Any:
        """Seconds of the forward pass."""
        return sum(part[0] for part in self)

    @property
    def backward(self) -> Any:
        """Seconds of the backward pass, with what it recomputes."""
        return sum(part[1] + part[2] for part in self)


def _rates(cluster: Cluster, constants: Constants) -> tuple[float, float]:
    """Seconds a floating-point operation, and seconds a byte."""
    gpu = cluster.gpu
    reached = constants.matmul * (gpu.matmul_efficiency or constants.unknown_matmul)
    byte = 1 / (constants.memory * gpu.memory_bandwidth)
    return 1 / (reached * gpu.peak_flops * cluster.efficiency), byte


def layer_seconds(
    table: Table,
    job: Job,
    cluster: Cluster,
    constants: Constants,
    expert: bool = False,
) -> LayerSeconds:
    """Predicted seconds of one transformer layer on one micro-batch, for each plan.

    Products take their operations and the unhidden part of their traffic. Everything
    else is bound by memory: bytes read and written, counted kernel by kernel. The
    collectives are Megatron's: two all-reduces each way, or with sequence parallelism
    two all-gathers and two reduce-scatters, and two gathers more in the backward pass.

    Args:
        table, job, cluster, constants: what, where, and how fast things are.
        expert: of a layer with experts; see `_expert_mlp`.
    """
    t, b = table.tp.astype(float), table.micro_batch.astype(float)
    model = as_decoder(job.model)
    s, h, a, (q, k, v, o) = job.sequence, model.hidden, model.heads, model.widths
    rows = b * s / table.cp  # tokens of a rank
    rate, byte = _rates(cluster, constants)
    moved, start = constants.operands * byte, constants.kernel

    def product(m: Any, n: Any, k: Any, count: Any = 1) -> Any:
        return _product(m, n, k, rate, moved, start, count)

    # (rows, inputs, outputs, how many) of each rank's part of each product
    mlp = (_expert_mlp if expert else _plain_mlp)(table, model, rows)
    parts = [
        (rows, i / t if cut == "in" else i, o_ / t if cut == "out" else o_, 1)
        for i, o_, cut in model.attention_matrices().values()
    ]
    halves = (0, len(parts))  # where attention and the MLP begin
    parts += mlp.products
    forward = sum(product(m, out, inner, n) for m, inner, out, n in parts)
    by_input = [product(m, inner, out, n) for m, inner, out, n in parts]
    by_weight = [product(inner, out, m, n) for m, inner, out, n in parts]

    heads, width = b * a / t, q / a
    if job.attention == "stored":
        scores = product(s / table.cp, s, width, heads)
        mixed = product(s / table.cp, o / a, s, heads)
        attention, attention_back = scores + mixed, 2 * (scores + mixed)
    else:  # the scores stay in the chip; the backward pass computes them once more
        work = 4 * rows * s * ((q + o) / 2) / t * rate * (0.5 if job.causal else 1.0)
        io = (2 * rows * (q + o) + 2 * b * s * (k + v)) / t
        attention, attention_back = work + io * byte, 2.5 * work + 2 * io * byte

    # bytes of the other kernels, read and written. Split along the sequence, or not:
    whole = rows * h / np.where(table.sequence_parallel > 0, t, 1)
    cut, square = rows * h / t, heads * s * (s / table.cp)
    drop, biased = (1 if job.dropout else 0), int(model.biases)
    norms = 2 * 4 * whole  # read, write
    joins = 2 * (6 + drop) * whole  # bias, dropout's mask, residual: two in, one out
    # the biases of Q, K and V, or the rotation of Q and K by their positions
    bias = 4 * ((q + k + v if biased else q + k) / h) * cut
    softmax = (4 + 5 * drop) * square if job.attention == "stored" else 0.0
    norms_back = 2 * (6 + 6) * whole  # the norm, and the sum with the residual's
    joins_back = 2 * (2 * biased + (5 if drop else 0)) * whole  # biases' gradients, masks
    bias_back = 2 * ((q + k + v) / h) * cut if biased else bias
    softmax_back = (6 + 5 * drop) * square if job.attention == "stored" else 0.0
    kernels = mlp.kernels + 5 + (1 + drop) * (job.attention == "stored")
    core = softmax * byte + (1 + drop) * start * (job.attention == "stored")
    memory = (norms + joins + mlp.bytes + bias + softmax) * byte + kernels * start
    memory_back = norms_back + joins_back + mlp.bytes_back + bias_back + softmax_back
    memory_back = memory_back * byte + (kernels + 4) * start

    hide = constants.tensor_overlap if "tensor" in job.overlap else 0.0
    split = table.sequence_parallel > 0
    tensor, exposed = 0.0, 0.0
    for i in halves:  # their weights' gradients need the input again
        copies = mlp.copies if i else 1
        size = 2 * rows * h * copies
        gather = collective("all_gather", size, t, 1, cluster, constants)
        scatter = collective("reduce_scatter", size, t, 1, cluster, constants)
        reduce = collective("all_reduce", size, t, 1, cluster, constants)
        if i and expert:  # each tensor rank routes a part; they gather what comes back
            one = collective("all_gather", 2 * rows * h, t, 1, cluster, constants)
            reduce = reduce + np.where(table.ep > 1, one, 0.0)
        beside = i + expert if i else i  # the router comes before the experts
        seen = reduce - hide * np.minimum(reduce, by_weight[beside])
        again = gather - hide * np.minimum(gather, by_input[beside])
        down = scatter - hide * np.minimum(scatter, by_weight[beside])
        tensor = tensor + np.where(split, gather + scatter, reduce)
        exposed = exposed + np.where(split, gather + again + down, seen)
    selective, full = table.recompute == 1, table.recompute == 2
    if job.attention == "flash":
        selective = selective & False
    found = LayerSeconds(
        (
            forward + attention,
            sum(by_input) + sum(by_weight) + attention_back,
            np.where(full, forward + attention, np.where(selective, attention, 0.0)),
        ),
        (memory, memory_back, np.where(full, memory, np.where(selective, core, 0.0))),
        (tensor, exposed, np.where(full, tensor, 0.0)),
    )
    return _further_axes(found, table, job, cluster, constants, expert)


class _Mlp(NamedTuple):
    """An MLP's products, its other kernels, and how often tensor ranks exchange a token."""

    products: list[tuple[Any, Any, Any, Any]]
    bytes: Any
    bytes_back: Any
    kernels: Any
    copies: Any


def _plain_mlp(table: Table, model: Decoder, rows: Any) -> _Mlp:
    """Up, activation, down."""
    h, t, width = model.hidden, table.tp.astype(float), model.ffn / model.hidden
    cut, gated = rows * h / t, int(model.gated)
    products = [
        (rows, h, (1 + gated) * model.ffn / t, 1),
        (rows, model.ffn / t, h, 1),
    ]
    forward = 2 * (2 + gated) * width * cut  # one or two in, one out
    backward = (2 * (3 + 2 * gated) * width + 2 * width * model.biases) * cut
    return _Mlp(products, forward, backward, 1, 1)


def _expert_mlp(table: Table, model: Decoder, rows: Any) -> _Mlp:
    """The router, the routed experts at their shape, and those that are shared.

    Every expert gets equally many tokens: tokens·k·ep / E on a rank that holds E / ep of
    them, and one product a kind for all its experts. Tokens are copied into the order
    of their experts and back; between ranks once more on arrival.
    """
    h, t, ep = model.hidden, table.tp.astype(float), table.ep
    k, count, gated = model.top_k, model.experts, int(model.gated)
    each, here, f = rows * k * ep / count, count / ep, model.expert_ffn
    always = model.shared_experts * f
    products = [
        (rows, h, count, 1),
        (each, h, (1 + gated) * f / t, here),
        (each, f / t, h, here),
    ]
    if always:
        products += [(rows, h, (1 + gated) * always / t, 1), (rows, always / t, h, 1)]
    width, cut = (k * f + always) / h, rows * h / t
    order = rows * h * (4 * (1 + k) + np.where(ep > 1, 8 * k, 0))
    chosen = rows * count * (6 + 8)  # scores to 32 bits, softmax
    forward = 2 * (2 + gated) * width * cut + order + chosen
    backward = 2 * (3 + 2 * gated) * width * cut + order + chosen
    copies = np.where(ep > 1, k + (always > 0), 1)
    return _Mlp(products, forward, backward, 4 + np.where(ep > 1, 2, 0), copies)


def _further_axes(
    found: LayerSeconds,
    table: Table,
    job: Job,
    cluster: Cluster,
    constants: Constants,
    expert: bool,
) -> LayerSeconds:
    """A layer's seconds with what context and expert parallelism send, none of it hidden.

    Context: keys and values are gathered forward, gathered again backward, where their
    gradients are scattered. Sequences are cut so that the causal mask leaves all ranks
    the same work. Experts: tokens go out and come back, in the forward pass and in the
    backward pass.
    """
    model, full = as_decoder(job.model), table.recompute == 2
    if np.any(table.cp > 1):
        size = key_value_bytes(model, job.sequence, table.micro_batch, table.tp)
        gather, scatter = (
            collective(kind, size, table.cp, table.tp, cluster, constants)
            for kind in ("all_gather", "reduce_scatter")
        )
        context = (gather, gather + scatter, np.where(full, gather, 0.0))
        found = found._replace(context=context)
    if expert and np.any(table.ep > 1):
        near = neighbours(*_degrees(table), cluster.gpus_per_node).expert
        tokens = table.micro_batch * job.sequence / (table.cp * table.tp)
        both = 2 * all_to_all_seconds(
            *(model, tokens, table.ep, near, cluster),
            *(min(constants.link, 1.0), constants.hop),
        )
        found = found._replace(experts=(both, both, np.where(full, both, 0.0)))
    return found


def _degrees(table: Table) -> tuple[Any, Any, Any, Any, Any]:
    """What `neighbours` takes."""
    return table.dp, table.tp, table.pp, table.cp, table.ep


TIME_PARTS = (
    "products",
    "memory-bound",
    "recomputation",
    "tensor",
    "sends",
    "bubble",
    "data",
    "optimizer",
)
FURTHER_PARTS = ("context", "experts")  # only where there is such an axis


class Costs(NamedTuple):
    """What `costs` returns: one entry a plan, seconds and bytes.

    `parts` adds up to `seconds`. `layer`, `embedding` and `head` are (forward,
    backward) seconds of one layer and of the two ends for one micro-batch, `send` those
    of one message between stages. `expert_layer`: of one with experts, if there are any.
    """

    seconds: np.ndarray
    parts: dict[str, np.ndarray]
    peak: np.ndarray
    layer: tuple[np.ndarray, np.ndarray]
    embedding: tuple[np.ndarray, np.ndarray]
    head: tuple[np.ndarray, np.ndarray]
    send: np.ndarray
    expert_layer: tuple[np.ndarray, np.ndarray] | None = None

    def stage(self, kinds: Sequence[Any], way: int) -> Any:
        """Seconds of a stage's layers for one micro-batch, forward (0) or backward (1).

        Args:
            kinds: how many layers of each kind; see `stage_kinds`.
            way: 0 or 1.
        """
        layers = (self.layer, self.expert_layer)
        return sum(n * layer[way] for n, layer in zip(kinds, layers))


def _optimizer_bytes(convention: str) -> int:
    """Bytes that an Adam step reads and writes for a parameter, kernel by kernel.

    Copy the gradient to 32 bits, undo the loss scale, norm, clip, Adam, copy the
    weight, zero the gradient.
    """
    rule = CONVENTIONS[convention]
    gradient, own = rule.gradients[0], rule.master or rule.weight
    copies = (gradient + own if gradient < own else 0) + (own + rule.weight if rule.master else 0)
    adam = own + 2 * (own + 2 * rule.state)
    return copies + (2 + 1 + 2) * own + adam + gradient


def _accumulation(table: Table, job: Job, cluster: Cluster, constants: Constants, stage: Any) -> np.ndarray:
    """Seconds a micro-batch for adding a stage's gradients to the last ones."""
    rule, m = CONVENTIONS[job.convention], table.micro_batches
    seconds = (rule.weight + 2 * rule.gradients[0]) * _rates(cluster, constants)[1]
    added = [
        seconds * (m - 1) / m / np.where(table.zero_stage >= 2, ranks, 1) * size
        for size, ranks in zip(stage_holdings(table, job, stage), sharers(table))
    ]
    return sum(added) if as_decoder(job.model).experts else added[0]


def _embedding(table: Table, job: Job, cluster: Cluster, constants: Constants) -> tuple[list, list, list]:
    """[forward, backward] seconds by memory, products and collectives: the input side."""
    _, byte = _rates(cluster, constants)
    rows = table.micro_batch * (job.sequence // table.cp)
    h, t = job.model.hidden, table.tp
    drop = 5 if job.dropout else 0
    memory = [(4 + drop) * rows * h * byte + 2 * constants.kernel] * 2
    kind = np.where(table.sequence_parallel > 0, 1, 2)
    one = collective("reduce_scatter", 2 * rows * h, t, 1, cluster, constants)
    gathered = np.where(table.sequence_parallel > 0, one, 0.0)
    return memory, [0.0, 0.0], [kind * one, gathered]


def _head(table: Table, job: Job, cluster: Cluster, constants: Constants) -> tuple[list, list, list]:
    """[forward, backward] seconds of the output side: norm, logits, loss."""
    rate, byte = _rates(cluster, constants)
    rows = table.micro_batch * (job.sequence // table.cp)
    h, t = job.model.hidden, table.tp
    split = table.sequence_parallel > 0
    words = job.model.vocabulary / t
    moved, start = constants.operands * byte, constants.kernel
    whole = rows * h / np.where(split, t, 1)
    # logits to 32 bits, maximum, difference, exponential, sum, quotient; the gradient
    memory = [
        (4 * whole + (6 + 4 + 8 + 8 + 4 + 8) * rows * words) * byte + 6 * start,
        (6 * whole + (8 + 6) * rows * words) * byte + 3 * start,
    ]
    by_weight = _product(h, words, rows, rate, moved, start)
    by_input = _product(rows, h, words, rate, moved, start)
    products = [_product(rows, words, h, rate, moved, start), by_input + by_weight]
    one = collective("reduce_scatter", 2 * rows * h, t, 1, cluster, constants)
    hide = constants.tensor_overlap if "tensor" in job.overlap else 0.0
    both = np.where(split, one, 2 * one)
    both = both - hide * np.minimum(both, by_weight)
    again = np.where(split, one - hide * np.minimum(one, by_input), 0.0)
    return memory, products, [np.where(split, one, 0.0), both + again]


def costs(table: Table, job: Job, cluster: Cluster, constants: Constants) -> Costs:
    """Predicted step and memory of each plan of a table; the planner's arithmetic.

    It checks nothing: `predict` and `plan_table` do.
    """
    model, every = as_decoder(job.model), (table, job, cluster, constants)
    kinds = [layer_seconds(*every)]
    numbers = (job.model.layers,)
    if model.experts:
        kinds.append(layer_seconds(*every, expert=True))
        numbers = (model.plain_layers, model.expert_layers)
    ends = [f(table, job, cluster, constants) for f in (_embedding, _head)]
    (emb_mem, emb_mul, emb_col), (head_mem, head_mul, head_col) = ends
    _, byte = _rates(cluster, constants)
    t, p, m = table.tp, table.pp, table.micro_batches
    v, h = table.virtual_stages, job.model.hidden
    near = neighbours(*_degrees(table), cluster.gpus_per_node)

    # one message between stages: each tensor rank sends its part, then they gather it
    size = 2 * table.micro_batch * (job.sequence // table.cp) * h
    across, reached = near.stages * p > cluster.gpus_per_node, min(constants.link, 1.0)
    one = np.where(
        across,
        cluster.inter.latency + size / t / (reached * cluster.inter.bandwidth),
        cluster.intra.latency + size / t / (reached * cluster.intra.bandwidth),
    )
    whole = collective("all_gather", size, t, 1, cluster, constants)
    send = np.where(p > 1, one + np.where(table.sequence_parallel > 0, 0, whole), 0.0)
    # GPipe sends while it computes the next one; interleaved may; 1F1B has to wait
    hidden = table.schedule == 0
    if "pipeline" in job.overlap:
        hidden = hidden | (table.schedule == 2)
    forward = sum(n / p * kind.forward for n, kind in zip(numbers, kinds))
    backward = sum(n / p * kind.backward for n, kind in zip(numbers, kinds))
    late = np.maximum(send - forward / v, 0) + np.maximum(send - backward / v, 0)
    sends = np.where(p > 1, v * np.where(hidden, late, 2 * send), 0.0)

    # the slowest stage sets the pace: the first, one behind it, or the last
    places = _places(table, job)
    # the first stage ends last, and its gradients are waited for; experts may be elsewhere
    data = [_data_seconds(*every, place, near, forward, backward) for place in places[:1]]
    if model.experts:
        data += [_data_seconds(*every, at, near, forward, backward) for at in places[1:]]
    each, once = (np.maximum.reduce(found) for found in zip(*data))
    if model.tied:
        tied = 2 * job.model.vocabulary * h / t
        stride = near.stages * p
        tied = collective("all_reduce", tied, 2, stride, cluster, constants)
        once = once + np.where(p > 1, tied, 0.0)

    # from the second micro-batch on, gradients are added to those that are there
    added = np.stack([_accumulation(*every, place) for place in places])

    emb = sum(emb_mem) + sum(emb_mul) + sum(emb_col)
    head = sum(head_mem) + sum(head_mul) + sum(head_col)
    per_layer = [kind.forward + kind.backward for kind in kinds]
    held = [np.stack(n) for n in zip(*(stage_kinds(table, job, at) for at in places))]
    has_emb = np.stack([place == 0 for place in places])
    has_head = np.stack([place == p - 1 for place in places])
    stage = sum(n * seconds for n, seconds in zip(held, per_layer))
    stage = stage + has_emb * emb + has_head * head + sends + each
    stage = stage + added
    slow = np.argmax(stage, axis=0)
    rows = np.arange(len(p))
    layers = [n[slow, rows] for n in held]
    with_emb, with_head = has_emb[slow, rows], has_head[slow, rows]
    pace, sums = stage[slow, rows], added[slow, rows]
    total = sum(n * seconds for n, seconds in zip(numbers, per_layer))
    total = total + emb + head + p * (sends + each + sums)
    rest = (total - pace) / v + np.where(hidden, 2 * (p - 1) * send, 0.0)

    def part(of_layer: Callable[[LayerSeconds], Any], of_emb: Any, of_head: Any) -> Any:
        own = sum(n * of_layer(kind) for n, kind in zip(layers, kinds))
        return m * (own + with_emb * of_emb + with_head * of_head)

    def twice(name: str) -> Callable[[LayerSeconds], Any]:
        return lambda kind: sum(getattr(kind, name)[:2])

    optimizer = _optimizer_bytes(job.convention) * byte
    parts = {
        "products": part(twice("matmul"), sum(emb_mul), sum(head_mul)),
        "memory-bound": part(twice("memory"), sum(emb_mem), sum(head_mem)) + m * sums,
        "recomputation": part(lambda kind: sum(x[2] for x in kind), 0, 0),
        "tensor": part(twice("tensor"), sum(emb_col), sum(head_col)),
        "sends": m * sends,
        "bubble": rest,
        "data": m * each + once,
        "optimizer": optimizer * _updated(table, job, places) + 0.0 * m,
    }
    for name, degrees in zip(FURTHER_PARTS, (table.cp, table.ep)):
        if np.any(degrees > 1):
            parts[name] = part(twice(name), 0, 0)
    # the fullest stage is the first or the last, or the second where it has other layers
    other = model.experts or np.any(table.ends_as_layers)
    full = places if other else (0, p - 1)
    memory = [sum(stage_memory(table, job, at).values()) for at in full]
    return Costs(
        sum(parts.values()),
        parts,
        np.maximum.reduce(memory),
        (kinds[0].forward, kinds[0].backward),
        (emb_mem[0] + emb_col[0], emb_mem[1] + emb_col[1]),
        tuple(head_mem[i] + head_mul[i] + head_col[i] for i in (0, 1)),
        send,
        (kinds[1].forward, kinds[1].backward) if model.experts else None,
    )


def _places(table: Table, job: Job) -> tuple[Any, ...]:
    """Stages that may be the slowest or the fullest: all others are like one of them."""
    p, model = table.pp, as_decoder(job.model)
    places = (0 * p, np.minimum(1, p - 1), p - 1)
    if not model.experts:
        return places
    layers, end = model.layers + 2 * table.ends_as_layers, table.ends_as_layers
    piece = -(-layers // (p * table.virtual_stages))
    plain = -(-((model.dense_layers + end) % (piece * p)) // piece)
    return (*places, np.minimum(plain, p - 1))  # the first with nothing but experts


def _data_seconds(
    table: Table,
    job: Job,
    cluster: Cluster,
    constants: Constants,
    place: Any,
    near: Neighbours,
    forward: Any,
    backward: Any,
) -> tuple[Any, Any]:
    """Seconds of a stage's data-parallel collectives: in each micro-batch, and once.

    ZeRO-2 and 3 communicate for every micro-batch, between all other work. Experts'
    gradients are reduced among the ranks that hold the same experts, all others among
    dp x cp.

    Args:
        table, job, cluster, constants: what, where, and how fast things are.
        place: the stage.
        near: how many of each group share a node.
        forward, backward: seconds that collectives can hide behind.
    """
    rule, zero = CONVENTIONS[job.convention], table.zero_stage
    model, kinds = as_decoder(job.model), stage_kinds(table, job, place)
    hide = constants.data_overlap if "data" in job.overlap else 0.0
    sizes = stage_holdings(table, job, place)[: len(kinds)]
    units = [[(n, layer_parameters(table, job, i == 1)) for i, n in enumerate(kinds)]]
    if model.experts:
        units.append([(kinds[1], expert_parameters(table, job))])
    groups = list(zip(sizes, units, sharers(table), (near.data, near.expert_data)))

    def ring(kind: str, width: int) -> Any:
        return sum(
            collective(kind, width * size, ranks, 1, cluster, constants, inside)
            for size, _, ranks, inside in groups
        )

    def by_layer(kind: str, width: int) -> Any:
        """The same, one layer at a time, so that each has its own latencies."""
        seconds = 0
        for size, pieces, ranks, inside in groups:
            rest = width * (size - sum(n * unit for n, unit in pieces))
            for n, unit in pieces:
                one = width * unit
                one = collective(kind, one, ranks, 1, cluster, constants, inside)
                seconds = seconds + n * one
            if ranks is groups[0][2]:  # the ends; experts are in layers, all of them
                ends = collective(kind, rest, ranks, 1, cluster, constants, inside)
                seconds = seconds + ends
        return seconds

    def seen(comm: Any, window: Any) -> Any:
        return comm - hide * np.minimum(comm, window)

    scatter, gather = (
        ring("reduce_scatter", rule.gradients[0]),
        ring("all_gather", rule.weight),
    )
    each = np.where(zero == 2, seen(scatter, backward), 0.0)
    gathers = by_layer("all_gather", rule.weight)
    scatters = by_layer("reduce_scatter", rule.gradients[0])
    each = np.where(zero == 3, seen(gathers, forward) + seen(gathers + scatters, backward), each)
    once = np.where(zero == 2, seen(gather, forward), 0.0)
    once = np.where(zero < 2, seen(scatter, backward) + seen(gather, forward), once)
    reduce = ring("all_reduce", rule.gradients[0])
    return each, np.where(zero == 0, seen(reduce, backward), once)


def _updated(table: Table, job: Job, places: Sequence[Any]) -> Any:
    """The most parameters that a rank of these stages updates."""
    most = 0.0
    for place in places:
        held = [
            size / np.where(table.zero_stage > 0, ranks, 1)
            for size, ranks in zip(stage_holdings(table, job, place), sharers(table))
        ]
        most = np.maximum(most, sum(held))
    return most


CONSTANTS = Constants(
    matmul=1.0,
    operands=0.79,
    memory=0.868,
    tensor_overlap=0.375,
    link=0.794,
    hop=0.881,
    chunk=5.95e6,
    unknown_matmul=0.8,
    kernel=5e-6,
    data_overlap=0.8,
    usable=0.92,
)
_LAYER = "fitted to the ten times of one layer of the 22B model, Korthikanti et al. 2022"
_NCCL = "fitted to NCCL's all-reduce on 8 A100, Azure AI Benchmarking Guide"
SOURCES: dict[str, str] = {
    "matmul": "Bekman, Machine Learning Engineering Open Book: the rate of A100 and H100 "
    "is taken from there, in whole",
    "operands": _LAYER,
    "memory": _LAYER,
    "tensor_overlap": _LAYER,
    "link": _NCCL + "; taken for every link",
    "hop": _NCCL,
    "chunk": _NCCL + "; how it grows beyond a node is assumed",
    "unknown_matmul": "assumed: what an H100 reaches (Bekman)",
    "kernel": "assumed: the order of a kernel's start; matters for small models only",
    "data_overlap": "assumed; no published run here hides these collectives",
    "usable": "assumed: the rest is for the context, NCCL's buffers, fragmentation",
}


@dataclass(frozen=True)
class Prediction:
    """What the planner expects of one plan. Nothing in it is measured.

    Attributes:
        plan, job, cluster: what was asked.
        seconds: of one step.
        parts: the same by what it is spent on, as the slowest stage sees it;
            `TIME_PARTS`, and `FURTHER_PARTS` where there are such axes.
        memory: for each pipeline stage the bytes on its ranks by part; `MEMORY_PARTS`.
        usable: bytes of a GPU's memory that training can have.
        stages: for each pipeline stage (forward, backward) seconds of one micro-batch,
            messages aside.
        send: seconds of one message between stages.
    """

    plan: Plan
    job: Job
    cluster: Cluster
    seconds: float
    parts: dict[str, float]
    memory: tuple[dict[str, float], ...]
    usable: float
    stages: tuple[tuple[float, float], ...]
    send: float

    @property
    def peak(self) -> float:
        """Bytes on the fullest rank."""
        return max(sum(stage.values()) for stage in self.memory)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has room."""
        return self.peak <= self.usable

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, all GPUs together."""
        return self.job.tokens / self.seconds

    @property
    def links(self) -> dict[str, str]:
        """The tier that each axis' messages take; ranks count tp, (cp,) pp, then dp."""
        node, tiers = self.cluster.gpus_per_node, self.cluster.tiers
        t, p, c, e = self.plan.tp, self.plan.pp, self.plan.cp, self.plan.ep
        inner = t * max(c, e)  # experts' data ranks stand inside of the stages
        reach = {"tensor": t, "pipeline": inner * p, "data": self.plan.gpus}
        reach |= {"context": t * c, "experts": t * e}
        sizes = {"tensor": t, "pipeline": p, "data": self.plan.dp * c}
        sizes |= {"context": c, "experts": e}
        return {k: tiers[reach[k] > node].name for k, n in sizes.items() if n > 1}

    def _part_of_peak(self, flops: float) -> float:
        return flops / (self.seconds * self.plan.gpus * self.cluster.gpu.peak_flops)

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the GPUs could do in that time."""
        return self._part_of_peak(model_flops(self.job))

    @property
    def hfu(self) -> float:
        """Hardware FLOPs, recomputation included, over the same."""
        return self._part_of_peak(hardware_flops(self.job, self.plan.recompute))

    def __repr__(self) -> str:
        full = "fits" if self.fits else "does not fit"
        return (
            f"Prediction({self.plan}: {self.seconds:.4g} s, MFU {self.mfu:.1%}, "
            f"{self.peak / 1e9:.1f} of {self.usable / 1e9:.1f} GB, {full})"
        )


def check_plan(plan: Plan, job: Job, cluster: Cluster) -> None:
    """ValueError if the plan can't lay this job out on this cluster, memory aside."""
    model = as_decoder(job.model)
    if plan.gpus != cluster.ranks:
        degrees = ("dp", "tp", "pp", *(["cp"] if plan.cp > 1 else []))
        raise ValueError(
            f"{' x '.join(degrees)} must be the cluster's {cluster.ranks} GPUs, got "
            f"{' x '.join(str(getattr(plan, name)) for name in degrees)} = {plan.gpus}"
        )
    if plan.batch != job.batch:
        raise ValueError(
            f"dp x micro_batch x micro_batches must be the job's batch, {job.batch}, got "
            f"{plan.dp} x {plan.micro_batch} x {plan.micro_batches} = {plan.batch}"
        )
    if model.heads % plan.tp:
        raise ValueError(f"tp must divide the {model.heads} heads, got {plan.tp}")
    if not model.latent and model.kv_heads % plan.tp:
        raise ValueError(f"tp must divide the {model.kv_heads} heads of keys and values, got {plan.tp}")
    if plan.cp > 1 and job.sequence % (2 * plan.cp):
        raise ValueError(
            f"2 x cp must divide the sequence, {job.sequence}: each rank takes a piece "
            f"from either end, got cp {plan.cp}"
        )
    if plan.sequence_parallel and job.sequence // plan.cp % plan.tp:
        raise ValueError(
            f"tp must divide the sequence, {job.sequence // plan.cp}, for sequence parallelism, got {plan.tp}"
        )
    if plan.ep > 1 and not model.experts:
        raise ValueError(f"ep must be 1 for a model without experts, got {plan.ep}")
    check_experts(plan.dp, plan.cp, plan.ep)
    if model.experts % plan.ep:
        raise ValueError(f"ep must divide the {model.experts} experts, got {plan.ep}")
    pieces, layers = plan.pp * plan.virtual_stages, f"the {model.layers} layers"
    count = model.layers + 2 * plan.ends_as_layers
    if plan.ends_as_layers:
        layers += " and two ends"
    if pieces > count:
        raise ValueError(f"pp x virtual_stages must be at most {layers}, got {pieces}")
    if plan.schedule == "interleaved" and count % pieces:
        raise ValueError(f"pp x virtual_stages must divide {layers}, got {pieces}")
    if plan.ends_as_layers and count < 2 * plan.pp:
        raise ValueError(f"pp must leave each stage a layer, {layers} on {plan.pp} stages don't")


def predict(plan: Plan, job: Job, cluster: Cluster, constants: Constants = CONSTANTS) -> Prediction:
    """Predict step time and memory of one plan.

    Raises: ValueError if the plan doesn't multiply out to the cluster's GPUs and the
    job's batch, or cuts the model where it can't be cut. That it doesn't fit into
    memory is no error: see `Prediction.fits`.

    >>> job = Job(model_of(22e9), sequence=2048, batch=32)
    >>> plan = Plan(dp=1, tp=8, micro_batches=32, sequence_parallel=True)
    >>> found = predict(plan, job, Cluster(1, 8, "H100"))
    >>> found.fits, round(sum(found.parts.values()) / found.seconds, 6)
    (True, 1.0)
    """
    check_plan(plan, job, cluster)
    table = as_table([plan])
    found = costs(table, job, cluster, constants)
    places = np.arange(plan.pp)
    memory = stage_memory(table, job, places)
    memory = {k: np.broadcast_to(v, plan.pp) for k, v in memory.items()}
    kinds = stage_kinds(table, job, places)
    added = _accumulation(table, job, cluster, constants, places)
    stages = []
    for i in range(plan.pp):
        mine = [n[i] for n in kinds]
        both = [float(found.stage(mine, k)[0]) for k in (0, 1)]
        for k in (0, 1):
            both[k] += (i == 0) * float(found.embedding[k][0])
            both[k] += (i == plan.pp - 1) * float(found.head[k][0])
        stages.append((both[0], both[1] + float(added[i])))
    return Prediction(
        plan,
        job,
        cluster,
        float(found.seconds[0]),
        {name: float(part[0]) for name, part in found.parts.items()},
        tuple({k: float(v[i]) for k, v in memory.items()} for i in range(plan.pp)),
        constants.usable * cluster.gpu.memory_bytes,
        tuple((float(f), float(b)) for f, b in stages),
        float(found.send[0]),
    )


def model_flops(job: Job) -> float:
    """Operations that a step needs: 72·B·l·s·h²·(1 + s/(6h) + V/(12·l·h)) for a GPT.

    Products only, forward and twice that backward. Source: Korthikanti et al. 2022. For
    a `Decoder` 6 for each token and parameter that it is multiplied with, and attention.
    A causal job counts half of attention.
    """
    m, s, part = job.model, job.sequence, 0.5 if job.causal else 1.0
    if isinstance(m, Decoder):
        attention = m.layers * _core_flops(m, s) * part
        return 3 * job.batch * (2 * s * m.product_parameters + attention)
    h, l, v = m.hidden, m.layers, m.vocabulary
    return 72 * job.batch * l * s * h**2 * (1 + part * s / (6 * h) + v / (12 * l * h))


def _core_flops(model: Decoder, sequence: int) -> float:
    """Operations of attention's two products in one layer, one sequence, forward."""
    q, _, _, o = model.widths
    return 2 * sequence**2 * (q + o)


def hardware_flops(job: Job, recompute: str) -> float:
    """Operations that a step does, what it computes twice included.

    "full" gives 96·B·l·s·h²·(1 + s/(6h) + V/(16·l·h)), as Narayanan et al. 2021 count.
    "selective" adds one forward pass of attention's two products, 4·B·l·s²·h; with
    flash attention nothing.
    """
    m, s, part = job.model, job.sequence, 0.5 if job.causal else 1.0
    if isinstance(m, Decoder):
        core = m.layers * _core_flops(m, s) * part
        products = 2 * s * (m.product_parameters - m.vocabulary * m.hidden)
        again = {"none": 0.0, "full": products + core}
        again["selective"] = core if job.attention == "stored" else 0.0
        return model_flops(job) + job.batch * again[recompute]
    full = 24 * m.hidden**2 * s + part * (4 * s**2 * m.hidden)
    again = {"none": 0.0, "full": full}
    again["selective"] = 4 * s**2 * m.hidden if job.attention == "stored" else 0.0
    return model_flops(job) + job.batch * m.layers * again[recompute]


class PublishedRun(NamedTuple):
    """A published run as the planner takes it, and its measured seconds a step."""

    name: str
    plan: Plan
    job: Job
    cluster: Cluster
    seconds: float

    def error(self, constants: Constants = CONSTANTS) -> float:
        """Predicted over measured seconds, less one."""
        check_plan(self.plan, self.job, self.cluster)
        found = costs(as_table([self.plan]), self.job, self.cluster, constants)
        return float(found.seconds[0]) / self.seconds - 1


def _megatron(row: Any, overlap: tuple[str, ...]) -> tuple[dict[str, Any], Job, Cluster]:
    model = Transformer(row.layers, row.hidden, row.heads, MEGATRON_VOCABULARY, MEGATRON_SEQUENCE)
    job = Job(model, MEGATRON_SEQUENCE, row.batch, "mixed20", "stored", True, overlap)
    dp = row.gpus // (row.tensor_parallel * row.pipeline_parallel)
    degrees = {
        "dp": dp,
        "tp": row.tensor_parallel,
        "pp": row.pipeline_parallel,
        "micro_batch": row.micro_batch,
        "micro_batches": row.batch // (dp * row.micro_batch),
        "virtual_stages": row.virtual_stages,
        "schedule": "interleaved" if row.virtual_stages > 1 else "1f1b",
    }
    return degrees, job, Cluster(row.gpus // 8, 8, "A100")


def weak_scaling_run(row: WeakScaling) -> PublishedRun:
    """A row of Narayanan et al. 2021, Table 1: full recomputation, nothing hidden.

    Megatron then reduced its gradients after the last backward pass, and its
    tensor-parallel collectives in line with the products.
    """
    degrees, job, cluster = _megatron(row, ())
    flops = hardware_flops(job, "full")
    seconds = flops / (row.gpus * row.tflops_per_gpu * 1e12)
    name = f"{row.parameters_billion:g}B"
    return PublishedRun(name, Plan(**degrees, recompute="full"), job, cluster, seconds)


def recomputation_runs(row: Recomputation) -> tuple[PublishedRun, PublishedRun]:
    """The two runs of a row of Korthikanti et al. 2022, Table 5: full, then selective.

    By then Megatron hid the backward pass' collectives behind the weights' gradients.
    """
    degrees, job, cluster = _megatron(row, ("tensor",))
    full = Plan(**degrees, recompute="full")
    part = Plan(**degrees, recompute="selective", sequence_parallel=row.tensor_parallel > 1)
    return (
        PublishedRun(f"{row.model} full", full, job, cluster, row.full_seconds),
        PublishedRun(f"{row.model} selective", part, job, cluster, row.selective_seconds),
    )
