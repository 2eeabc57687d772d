# Generated from chapters/08_overlap_and_frameworks.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""A plan written out for PyTorch, torchtitan, DeepSpeed and Megatron-LM, with every knob's meaning and what each can't express."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from manyranks.five_axes import check_experts
from manyranks.models import Decoder, as_decoder
from manyranks.planner import Job, Plan
from manyranks.runtime import Cluster

__all__ = [
    "FRAMEWORKS",
    "KNOBS",
    "Knob",
    "PRECISIONS",
    "SOURCES",
    "Unsupported",
    "deepspeed_json",
    "launch_command",
    "megatron_arguments",
    "omissions",
    "torchrun_script",
    "torchtitan_toml",
    "write",
]

FRAMEWORKS: tuple[str, ...] = ("torchrun", "torchtitan", "deepspeed", "megatron")
PRECISIONS: tuple[str, ...] = ("bf16", "fp16", "fp32")

SOURCES: dict[str, str] = {
    "torchrun": "PyTorch 2.13, documentation and signatures of the named functions",
    "torchtitan": "torchtitan 0.2.2, torchtitan/config/job_config.py",
    "deepspeed": "DeepSpeed 0.19.8, docs/_pages/config-json.md and deepspeed/runtime",
    "megatron": "Megatron-LM at 000c4ac24f61, megatron/training/arguments.py",
}
"""Where each framework documents its names, and the version that was read."""


class Knob(NamedTuple):
    """One name that a framework documents.

    Attributes:
        framework: one of `FRAMEWORKS`.
        name: as the framework spells it; "a.b" is b in section a.
        plan: the field of `Plan` or `Job` that sets it; "" for a setting of its own.
        meaning: in this book's terms.
    """

    framework: str
    name: str
    plan: str
    meaning: str


KNOBS: tuple[Knob, ...] = tuple(
    Knob(framework, *line)
    for framework, lines in {
        "torchrun": [
            ("--nnodes", "gpus", "servers; one agent runs on each"),
            ("--nproc-per-node", "gpus", "ranks of a server, one a GPU"),
            ("--standalone", "gpus", "one server: no rendezvous address needed"),
            ("--rdzv-backend", "", "how the agents meet: c10d, a store on one of them"),
            (
                "--rdzv-endpoint",
                "",
                "where they meet: host and port of the first server",
            ),
            (
                "gradient_as_bucket_view",
                "zero_stage",
                "DDP: gradients are views of the buckets, which saves one copy of them",
            ),
            (
                "bucket_cap_mb",
                "zero_stage",
                "DDP: size of a bucket that is all-reduced at once (MiB); overlap against latency",
            ),
            (
                "no_sync",
                "micro_batches",
                "DDP: no all-reduce in this backward pass; only the last micro-batch has one",
            ),
            (
                "ZeroRedundancyOptimizer",
                "zero_stage",
                "ZeRO-1: each rank keeps and steps its part of the optimizer state",
            ),
            (
                "fully_shard",
                "zero_stage",
                "FSDP2: ZeRO-2 and ZeRO-3, a unit for each layer",
            ),
            (
                "reshard_after_forward",
                "zero_stage",
                "FSDP2: True frees gathered weights after the forward pass (ZeRO-3)",
            ),
            (
                "MixedPrecisionPolicy",
                "convention",
                "FSDP2: the type of weights in compute, and of the gradient's sum",
            ),
            (
                "param_dtype",
                "convention",
                "FSDP2: the type in which weights are gathered and used",
            ),
            (
                "reduce_dtype",
                "convention",
                "FSDP2: the type in which gradients are summed over ranks",
            ),
            (
                "autocast",
                "convention",
                "DDP: 16-bit products on 32-bit weights, which are the master copy",
            ),
            ("GradScaler", "convention", "dynamic loss scaling, for fp16"),
            (
                "checkpoint",
                "recompute",
                "a function whose activations are recomputed in the backward pass",
            ),
        ],
        "torchtitan": [
            (
                "parallelism.data_parallel_replicate_degree",
                "dp",
                "copies of the weights: DDP",
            ),
            (
                "parallelism.data_parallel_shard_degree",
                "dp",
                "ranks that share one copy: FSDP2",
            ),
            (
                "parallelism.fsdp_reshard_after_forward",
                "zero_stage",
                "always is ZeRO-3, never keeps the gathered weights for the backward pass",
            ),
            (
                "parallelism.tensor_parallel_degree",
                "tp",
                "t; the sequence is split with it",
            ),
            (
                "parallelism.pipeline_parallel_degree",
                "pp",
                "p, ranks of a pipeline, not stages",
            ),
            (
                "parallelism.pipeline_parallel_schedule",
                "schedule",
                "GPipe, 1F1B or Interleaved1F1B",
            ),
            (
                "parallelism.pipeline_parallel_layers_per_stage",
                "virtual_stages",
                "layers of one stage: l / (p v)",
            ),
            (
                "parallelism.pipeline_parallel_first_stage_less_layers",
                "ends_as_layers",
                "1: the embedding counts as a layer, 0: it doesn't",
            ),
            (
                "parallelism.pipeline_parallel_last_stage_less_layers",
                "ends_as_layers",
                "the same for the output",
            ),
            (
                "parallelism.pipeline_parallel_microbatch_size",
                "micro_batch",
                "sequences of a micro-batch in the pipeline",
            ),
            (
                "parallelism.context_parallel_degree",
                "cp",
                "ranks that share a sequence",
            ),
            (
                "parallelism.expert_parallel_degree",
                "ep",
                "ranks that share the experts",
            ),
            (
                "parallelism.context_parallel_rotate_method",
                "cp",
                "allgather: keys and values are gathered, not passed around",
            ),
            (
                "parallelism.expert_tensor_parallel_degree",
                "tp",
                "tensor parallel ranks inside an expert: t, or 1",
            ),
            (
                "training.local_batch_size",
                "micro_batch",
                "sequences of a forward call on a replica: a micro-batch, or all of them in a pipeline",
            ),
            (
                "training.global_batch_size",
                "batch",
                "sequences of a step; what is left over is accumulated",
            ),
            ("training.seq_len", "sequence", "s"),
            (
                "training.mixed_precision_param",
                "convention",
                "type of the weights in compute",
            ),
            (
                "training.mixed_precision_reduce",
                "convention",
                "type of the gradient's sum; only float32 is offered",
            ),
            (
                "training.dtype",
                "convention",
                "bfloat16: everything in 16 bits, no master copy",
            ),
            ("activation_checkpoint.mode", "recompute", "none, selective or full"),
            (
                "activation_checkpoint.selective_ac_option",
                "recompute",
                "op keeps what is dear to compute, layer count n recomputes every n-th layer",
            ),
            ("model.name", "model", "a model that the framework has built in"),
            ("model.flavor", "model", "which size of it"),
        ],
        "deepspeed": [
            (
                "train_batch_size",
                "batch",
                "sequences of a step; must be the product of the next two and dp",
            ),
            (
                "train_micro_batch_size_per_gpu",
                "micro_batch",
                "sequences of a forward call on a replica",
            ),
            ("gradient_accumulation_steps", "micro_batches", "m"),
            ("zero_optimization.stage", "zero_stage", "0 to 3, as in chapter 6"),
            (
                "zero_optimization.overlap_comm",
                "overlap",
                "reduce gradients during the backward pass",
            ),
            (
                "zero_optimization.contiguous_gradients",
                "",
                "copy gradients into one buffer as they come: no fragments",
            ),
            (
                "zero_optimization.reduce_scatter",
                "",
                "reduce-scatter rather than all-reduce where a rank needs a part only",
            ),
            (
                "zero_optimization.reduce_bucket_size",
                "",
                "numbers, not bytes, that are reduced at once",
            ),
            (
                "zero_optimization.allgather_bucket_size",
                "",
                "numbers that are gathered at once after the step (stages 1, 2)",
            ),
            (
                "zero_optimization.stage3_prefetch_bucket_size",
                "overlap",
                "numbers that are gathered ahead of their use",
            ),
            (
                "zero_optimization.stage3_param_persistence_threshold",
                "",
                "tensors below this size are never sharded",
            ),
            ("bf16.enabled", "convention", "bf16 weights, fp32 master"),
            ("fp16.enabled", "convention", "fp16 weights, fp32 master"),
            ("fp16.loss_scale", "convention", "0: dynamic"),
            ("fp16.initial_scale_power", "", "the scale begins at 2 to this power"),
            ("fp16.loss_scale_window", "", "good steps before the scale doubles"),
            ("fp16.hysteresis", "", "overflows before the scale is halved"),
            ("fp16.min_loss_scale", "", "below it the scale doesn't go"),
            (
                "data_types.grad_accum_dtype",
                "convention",
                "type in which micro-batches' gradients add up",
            ),
            (
                "communication_data_type",
                "convention",
                "type in which gradients are summed over ranks",
            ),
            (
                "tensor_parallel.autotp_size",
                "tp",
                "t: layers of a known model are split for you",
            ),
            (
                "activation_checkpointing.partition_activations",
                "sequence_parallel",
                "kept activations are divided among the tensor-parallel ranks",
            ),
            (
                "activation_checkpointing.contiguous_memory_optimization",
                "",
                "one buffer for what is kept",
            ),
            (
                "activation_checkpointing.cpu_checkpointing",
                "",
                "what is kept goes to the host's memory",
            ),
        ],
        "megatron": [
            ("--num-layers", "model", "l"),
            ("--hidden-size", "model", "h"),
            ("--ffn-hidden-size", "model", "the MLP's width, 4h for a GPT"),
            ("--num-attention-heads", "model", "a"),
            (
                "--group-query-attention",
                "model",
                "query heads share heads for keys and values",
            ),
            ("--num-query-groups", "model", "heads for keys and values"),
            ("--kv-channels", "model", "entries of a head"),
            ("--swiglu", "model", "a gated MLP"),
            ("--disable-bias-linear", "model", "products have no biases"),
            ("--normalization", "model", "RMSNorm, which has no biases"),
            (
                "--untie-embeddings-and-output-weights",
                "model",
                "the output has a matrix of its own",
            ),
            ("--multi-latent-attention", "model", "DeepSeek's compressed attention"),
            ("--q-lora-rank", "model", "what queries are compressed to"),
            ("--kv-lora-rank", "model", "what keys and values are compressed to"),
            ("--qk-head-dim", "model", "entries of a query without position"),
            ("--qk-pos-emb-head-dim", "model", "those that carry the position"),
            ("--v-head-dim", "model", "entries of a value"),
            ("--qk-layernorm", "model", "norms of the compressed queries and keys"),
            ("--num-experts", "model", "experts of a layer, E"),
            ("--moe-router-topk", "model", "experts that a token goes to, k"),
            ("--moe-ffn-hidden-size", "model", "width of an expert"),
            (
                "--moe-shared-expert-intermediate-size",
                "model",
                "width of all shared experts together",
            ),
            ("--moe-layer-freq", "model", "which layers have experts, one digit each"),
            (
                "--moe-router-enable-expert-bias",
                "model",
                "a bias for each expert, which only chooses",
            ),
            (
                "--moe-router-score-function",
                "model",
                "sigmoid, which the bias needs; softmax otherwise",
            ),
            (
                "--moe-token-dispatcher-type",
                "ep",
                "alltoall: tokens travel to their experts and back",
            ),
            (
                "--moe-grouped-gemm",
                "ep",
                "one product for all experts of a rank",
            ),
            ("--expert-model-parallel-size", "ep", "ranks that share the experts"),
            (
                "--expert-tensor-parallel-size",
                "tp",
                "tensor parallel ranks inside an expert",
            ),
            ("--seq-length", "sequence", "s"),
            ("--max-position-embeddings", "model", "learned positions, at least s"),
            ("--position-embedding-type", "model", "learned_absolute, rope, or none"),
            (
                "--tokenizer-type",
                "",
                "NullTokenizer: no text, a vocabulary of the given size",
            ),
            ("--vocab-size", "model", "V"),
            ("--tensor-model-parallel-size", "tp", "t"),
            (
                "--sequence-parallel",
                "sequence_parallel",
                "norms and dropouts split over the tensor-parallel ranks",
            ),
            ("--pipeline-model-parallel-size", "pp", "p"),
            (
                "--num-virtual-stages-per-pipeline-rank",
                "virtual_stages",
                "v; with it the schedule is the interleaved one",
            ),
            (
                "--no-overlap-p2p-communication",
                "overlap",
                "the interleaved schedule's sends are not hidden",
            ),
            (
                "--account-for-embedding-in-pipeline-split",
                "ends_as_layers",
                "the embedding counts as a layer",
            ),
            (
                "--account-for-loss-in-pipeline-split",
                "ends_as_layers",
                "and so does the output",
            ),
            ("--context-parallel-size", "cp", "ranks that share a sequence"),
            (
                "--cp-comm-type",
                "cp",
                "allgather: keys and values are gathered, not passed around",
            ),
            ("--micro-batch-size", "micro_batch", "b"),
            (
                "--global-batch-size",
                "batch",
                "B; m is B / (b dp). dp isn't given: it is what the GPUs leave",
            ),
            ("--use-distributed-optimizer", "zero_stage", "ZeRO-1"),
            ("--use-megatron-fsdp", "zero_stage", "its own FSDP, for stages 2 and 3"),
            (
                "--data-parallel-sharding-strategy",
                "zero_stage",
                "optim_grads is stage 2, optim_grads_params stage 3",
            ),
            (
                "--ckpt-format",
                "zero_stage",
                "fsdp_dtensor: the checkpoint that its FSDP asks for",
            ),
            (
                "--overlap-grad-reduce",
                "overlap",
                "gradients are reduced during the backward pass",
            ),
            (
                "--overlap-param-gather",
                "overlap",
                "weights are gathered while the next forward pass begins",
            ),
            ("--ddp-bucket-size", "", "numbers, not bytes, of a gradient bucket"),
            ("--bf16", "convention", "bf16 weights, fp32 master"),
            ("--fp16", "convention", "fp16 weights, fp32 master, loss scaling"),
            ("--initial-loss-scale", "convention", "where the dynamic scale begins"),
            ("--loss-scale-window", "convention", "good steps before it doubles"),
            ("--hysteresis", "convention", "overflows before it is halved"),
            ("--min-loss-scale", "convention", "below it the scale doesn't go"),
            (
                "--accumulate-allreduce-grads-in-fp32",
                "convention",
                "gradients add up and are summed in 32 bits",
            ),
            ("--grad-reduce-in-bf16", "convention", "gradients are summed in bf16"),
            (
                "--recompute-granularity",
                "recompute",
                "selective: the attention core; full: whole layers",
            ),
            ("--recompute-method", "recompute", "uniform: the same for all layers"),
            (
                "--recompute-num-layers",
                "recompute",
                "layers that are recomputed together",
            ),
            ("--attention-dropout", "dropout", "probability"),
            ("--hidden-dropout", "dropout", "probability"),
        ],
    }.items()
    for line in lines
)
"""Every name that the writers use, framework by framework."""


class Unsupported(ValueError):
    """A plan that a framework can't express; the message says which field and why."""


def _precision(job: Job, precision: str | None) -> str:
    chosen = ("fp32" if job.convention == "fp32" else "bf16") if precision is None else precision
    if chosen not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    return chosen


def _servers(plan: Plan, cluster: Cluster) -> tuple[int, int]:
    """Servers, and ranks on each, for the plan's GPUs."""
    if plan.gpus > cluster.nodes * cluster.gpus_per_node:
        most = cluster.nodes * cluster.gpus_per_node
        raise ValueError(f"plan must take at most the cluster's {most} GPUs, got {plan.gpus}")
    each = min(plan.gpus, cluster.gpus_per_node)
    if plan.gpus % each:
        raise ValueError(f"plan must fill whole servers of {each} GPUs, got {plan.gpus} GPUs")
    return plan.gpus // each, each


def _check(plan: Plan, job: Job) -> None:
    if plan.batch != job.batch:
        raise ValueError(f"plan must make the job's batch of {job.batch} sequences, got {plan.batch}")
    chunks = plan.pp * plan.virtual_stages
    layers = job.model.layers + 2 * plan.ends_as_layers
    if layers % chunks:
        ends = " and two ends" if plan.ends_as_layers else ""
        raise ValueError(f"plan must divide {job.model.layers} layers{ends} by pp x virtual_stages, {chunks}")
    experts = as_decoder(job.model).experts
    if plan.ep > 1 and experts:
        check_experts(plan.dp, plan.cp, plan.ep)
        if experts % plan.ep:
            raise ValueError(f"plan must divide the {experts} experts by ep, {plan.ep}")


def _no_experts(plan: Plan, job: Job) -> None:
    if plan.ep > 1 and not as_decoder(job.model).experts:
        raise Unsupported(f"ep {plan.ep}: the job's model has no experts")


def launch_command(plan: Plan, cluster: Cluster, *words: str) -> str:
    """The torchrun command that starts a plan's ranks; run it on every server.

    Args:
        plan: whose GPUs.
        cluster: servers and their GPUs.
        *words: the script and its arguments.

    >>> launch_command(Plan(dp=4), Cluster(1, 8), "train.py")
    'torchrun --standalone --nproc-per-node 4 train.py'
    """
    nodes, each = _servers(plan, cluster)
    where = "--standalone"
    if nodes > 1:
        where = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500"
    return f"torchrun {where} --nproc-per-node {each} {' '.join(words)}"


def omissions(framework: str, plan: Plan, job: Job) -> list[str]:
    """What of a plan a framework's file leaves out or does differently, in sentences.

    Args:
        framework: one of `FRAMEWORKS`.
        plan, job: what is to be written.

    >>> from manyranks.memory import Transformer
    >>> job = Job(Transformer(2, 64, 2, 64), sequence=8, batch=2)
    >>> omissions("torchrun", Plan(dp=2), job), len(omissions("deepspeed", Plan(dp=2, recompute="full"), job))
    ([], 1)
    """
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework must be one of {', '.join(FRAMEWORKS)}, got {framework!r}")
    said = []
    if framework == "torchrun":
        if plan.zero_stage == 2:
            said.append(
                "zero_stage: fully_shard without resharding keeps gathered weights from the forward pass "
                "to the backward pass only; between steps they are sharded, so it holds less than stage 2"
            )
        if job.attention == "stored":
            said.append("attention: PyTorch chooses the kernel; on GPUs it is flash attention")
        if job.dropout:
            said.append("dropout: the script's model has none")
    if framework == "torchtitan":
        said.append("model: torchtitan trains the models it has built in; set model.name and model.flavor")
        if plan.zero_stage == 2:
            said.append("zero_stage: weights are sharded between steps, so it holds less than stage 2")
        if plan.tp > 1 and not plan.sequence_parallel:
            said.append("sequence_parallel: its tensor parallelism always splits the sequence too")
        if plan.recompute == "selective":
            said.append(
                "recompute: its selective option keeps some products too, not the attention core only"
            )
        if plan.dp > 1 and "data" not in job.overlap:
            said.append("overlap: FSDP2 and DDP always overlap")
        if job.convention == "mixed16":
            said.append("convention: gradients are summed in float32, mixed18")
    if framework == "deepspeed":
        if plan.pp > 1:
            said.append(
                f"pp: the model's code must be a PipelineModule with num_stages={plan.pp}; its schedule is 1F1B"
            )
        if plan.tp > 1 and plan.sequence_parallel:
            said.append("sequence_parallel: automatic tensor parallelism splits no norms")
        if plan.recompute != "none":
            said.append(
                "recompute: the JSON sets how activations are kept; the model's code must call "
                "deepspeed.checkpointing.checkpoint"
            )
    if framework == "megatron":
        if plan.pp > 1 and (plan.cp > 1 or plan.ep > 1):  # tp-pp-dp mapping takes neither
            said.append(
                "pp: its ranks count tp, cp, ep, dp, pp, so that stages are farthest apart; the "
                "planner's layout has pp inside of the data ranks that share no experts"
            )
        if as_decoder(job.model).node_limit:
            said.append(
                "model: its limit of nodes for a token needs --moe-router-num-groups, the "
                "nodes of an expert group, and --moe-router-group-topk"
            )
        if job.attention == "stored":
            said.append("attention: the attention kernel is the installation's choice")
        if "tensor" in job.overlap and plan.tp > 1:
            said.append(
                "overlap: hiding tensor-parallel traffic takes Transformer Engine and --tp-comm-overlap"
            )
    return said


def torchtitan_toml(plan: Plan, job: Job, precision: str | None = None) -> str:
    """A plan as a torchtitan job file (TOML, for torchtitan 0.2; 0.3 reads Python instead).

    Args:
        plan, job: what is to be written.
        precision: "bf16" or "fp32"; None takes the job's convention.

    Raises: Unsupported for ZeRO-1 and fp16, which it doesn't have, and for experts on
    ranks that hold whole copies.

    >>> from manyranks.memory import Transformer
    >>> print(torchtitan_toml(Plan(dp=2), Job(Transformer(2, 64, 2, 64), 8, 2)).splitlines()[3])
    [parallelism]
    """
    _check(plan, job)
    kind = _precision(job, precision)
    if plan.zero_stage == 1:
        raise Unsupported("zero_stage 1: torchtitan shards nothing (0) or weights too (2, 3)")
    _no_experts(plan, job)
    if plan.ep > 1 and plan.zero_stage == 0 and plan.cp % plan.ep:
        raise Unsupported(
            f"ep {plan.ep} with zero_stage 0: torchtitan shares experts among the ranks that shard weights"
        )
    if kind == "fp16":
        raise Unsupported("precision fp16: torchtitan offers bfloat16 and float32, and no loss scaling")
    sharded = plan.zero_stage > 0
    m, piped = job.model, plan.pp > 1
    parallel: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if sharded else plan.dp,
        "data_parallel_shard_degree": plan.dp if sharded else 1,
        "tensor_parallel_degree": plan.tp,
        "pipeline_parallel_degree": plan.pp,
        "context_parallel_degree": plan.cp,
        "expert_parallel_degree": plan.ep,
    }
    if plan.cp > 1:
        parallel["context_parallel_rotate_method"] = "allgather"
    if plan.ep > 1:  # each expert is split as the other products are
        parallel["expert_tensor_parallel_degree"] = plan.tp
    if sharded:
        parallel["fsdp_reshard_after_forward"] = "always" if plan.zero_stage == 3 else "never"
    if piped:
        names = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
        parallel |= {
            "pipeline_parallel_schedule": names[plan.schedule],
            "pipeline_parallel_layers_per_stage": (m.layers + 2 * plan.ends_as_layers)
            // (plan.pp * plan.virtual_stages),
            "pipeline_parallel_first_stage_less_layers": int(plan.ends_as_layers),
            "pipeline_parallel_last_stage_less_layers": int(plan.ends_as_layers),
            "pipeline_parallel_microbatch_size": plan.micro_batch,
        }
    training: dict[str, Any] = {
        "local_batch_size": plan.micro_batch * (plan.micro_batches if piped else 1),
        "global_batch_size": plan.batch,
        "seq_len": job.sequence,
        "mixed_precision_param": "bfloat16" if kind == "bf16" else "float32",
        "mixed_precision_reduce": "float32",
    }
    if job.convention == "bf16":
        training["dtype"] = "bfloat16"
    recompute: dict[str, Any] = {"mode": plan.recompute}
    if plan.recompute == "selective":
        recompute["selective_ac_option"] = "op"
    sections = {
        "parallelism": parallel,
        "training": training,
        "activation_checkpoint": recompute,
        "model": {
            "name": "deepseek_v3" if as_decoder(m).experts else "llama3",
            "flavor": "debugmodel",
        },
    }
    lines = [
        f"# {plan}",
        f"# The job's model: {m.layers} layers, hidden {m.hidden}, {m.heads} heads. Choose your own below.",
        "",
    ]
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def deepspeed_json(plan: Plan, job: Job, precision: str | None = None) -> str:
    """A plan as a DeepSpeed configuration (JSON).

    Args:
        plan, job: what is to be written.
        precision: one of `PRECISIONS`; None takes the job's convention.

    Raises: Unsupported for pipelines with ZeRO-2 or 3, other schedules than 1F1B,
    context and expert parallelism, and training without a master copy.

    >>> from manyranks.memory import Transformer
    >>> json.loads(deepspeed_json(Plan(dp=2, zero_stage=2), Job(Transformer(2, 64, 2, 64), 8, 2)))["zero_optimization"]["stage"]
    2
    """
    _check(plan, job)
    kind = _precision(job, precision)
    if plan.pp > 1 and plan.zero_stage > 1:
        raise Unsupported(
            f"zero_stage {plan.zero_stage} with pp {plan.pp}: its pipeline takes stages 0 and 1"
        )
    if plan.pp > 1 and plan.schedule != "1f1b":
        raise Unsupported(f"schedule {plan.schedule}: its pipeline engine has 1F1B only")
    if plan.tp > 1 and plan.pp > 1:
        raise Unsupported(
            f"tp {plan.tp} with pp {plan.pp}: nothing documents the two together, so we don't write it"
        )
    if plan.tp > 1 and plan.zero_stage == 3:
        raise Unsupported(f"zero_stage 3 with tp {plan.tp}: automatic tensor parallelism takes stages 0 to 2")
    for name in ("cp", "ep"):
        if getattr(plan, name) > 1:
            raise Unsupported(f"{name} {getattr(plan, name)}: our writer doesn't set it for DeepSpeed")
    if plan.ends_as_layers:
        raise Unsupported("ends_as_layers: the model's PipelineModule decides how stages are cut")
    if job.convention == "bf16":
        raise Unsupported("convention bf16: DeepSpeed's bf16 keeps an fp32 master copy")
    zero: dict[str, Any] = {"stage": plan.zero_stage}
    if plan.zero_stage:
        zero |= {
            "overlap_comm": "data" in job.overlap,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 500_000_000,
        }
    if plan.zero_stage in (1, 2):
        zero["allgather_bucket_size"] = 500_000_000
    if plan.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": 50_000_000 if "data" in job.overlap else 0,
            "stage3_param_persistence_threshold": 100_000,
        }
    wide = job.convention in ("mixed18", "mixed20") or kind == "fp32"
    config: dict[str, Any] = {
        "train_batch_size": plan.batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        "zero_optimization": zero,
    }
    if kind == "bf16":
        config["bf16"] = {"enabled": True}
    if kind == "fp16":
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        }
    if kind != "fp32":
        config["communication_data_type"] = "fp32" if wide else kind
        config["data_types"] = {"grad_accum_dtype": "fp32" if wide else kind}
    if plan.tp > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tp}
    if plan.recompute != "none":
        config["activation_checkpointing"] = {
            "partition_activations": plan.tp > 1,
            "contiguous_memory_optimization": False,
            "cpu_checkpointing": False,
        }
    return json.dumps(config, indent=2) + "\n"


def megatron_arguments(plan: Plan, job: Job, precision: str | None = None) -> list[str]:
    """A plan as Megatron-LM's arguments, for pretrain_gpt.py.

    Args:
        plan, job: what is to be written.
        precision: one of `PRECISIONS`; None takes the job's convention.

    Raises: Unsupported for GPipe, experts, and training without a master copy.

    >>> from manyranks.memory import Transformer
    >>> megatron_arguments(Plan(dp=2, tp=2), Job(Transformer(2, 64, 2, 64), 8, 2))[:2]
    ['--num-layers', '2']
    """
    _check(plan, job)
    kind = _precision(job, precision)
    if plan.pp > 1 and plan.schedule == "gpipe":
        raise Unsupported("schedule gpipe: Megatron-LM runs 1F1B, or the interleaved schedule")
    _no_experts(plan, job)
    if job.convention == "bf16":
        raise Unsupported("convention bf16: Megatron-LM's bf16 keeps an fp32 master copy")
    m, d = job.model, as_decoder(job.model)
    position = "learned_absolute" if m.positions else "none" if d.biases else "rope"
    given: list[tuple[str, Any]] = [
        ("--num-layers", m.layers),
        ("--hidden-size", m.hidden),
        ("--ffn-hidden-size", d.ffn),
        ("--num-attention-heads", m.heads),
        ("--seq-length", job.sequence),
        ("--max-position-embeddings", m.positions or job.sequence),
        ("--position-embedding-type", position),
        ("--tokenizer-type", "NullTokenizer"),
        ("--vocab-size", m.vocabulary),
        ("--attention-dropout", 0.1 if job.dropout else 0.0),
        ("--hidden-dropout", 0.1 if job.dropout else 0.0),
        ("--tensor-model-parallel-size", plan.tp),
        ("--pipeline-model-parallel-size", plan.pp),
        ("--micro-batch-size", plan.micro_batch),
        ("--global-batch-size", plan.batch),
    ]
    more, flags = _megatron_model(d)
    given += more
    if plan.ends_as_layers:
        flags.append("--account-for-embedding-in-pipeline-split")
        flags.append("--account-for-loss-in-pipeline-split")
    if plan.sequence_parallel:
        flags.append("--sequence-parallel")
    if plan.virtual_stages > 1:
        given.append(("--num-virtual-stages-per-pipeline-rank", plan.virtual_stages))
        if "pipeline" not in job.overlap:
            flags.append("--no-overlap-p2p-communication")
    if plan.cp > 1:
        given.append(("--context-parallel-size", plan.cp))
        given.append(("--cp-comm-type", "allgather"))
    if plan.ep > 1:
        given.append(("--expert-model-parallel-size", plan.ep))
        given.append(("--expert-tensor-parallel-size", plan.tp))
    if plan.zero_stage:
        flags.append("--use-distributed-optimizer")
    if plan.zero_stage > 1:
        flags.append("--use-megatron-fsdp")
        kept = "optim_grads" if plan.zero_stage == 2 else "optim_grads_params"
        given += [
            ("--data-parallel-sharding-strategy", kept),
            ("--ckpt-format", "fsdp_dtensor"),
        ]
    if "data" in job.overlap and plan.dp > 1:
        flags.append("--overlap-grad-reduce")
        if plan.zero_stage:
            flags.append("--overlap-param-gather")
        given.append(("--ddp-bucket-size", 40_000_000))
    if kind == "bf16":
        flags += [
            "--bf16",
            "--grad-reduce-in-bf16"
            if job.convention == "mixed16"
            else "--accumulate-allreduce-grads-in-fp32",
        ]
    if kind == "fp16":
        flags.append("--fp16")
        if job.convention != "mixed16":
            flags.append("--accumulate-allreduce-grads-in-fp32")
        given += [
            ("--initial-loss-scale", 2**16),
            ("--loss-scale-window", 1000),
            ("--hysteresis", 2),
            ("--min-loss-scale", 1),
        ]
    if plan.recompute != "none":
        given.append(("--recompute-granularity", plan.recompute))
    if plan.recompute == "full":
        given += [("--recompute-method", "uniform"), ("--recompute-num-layers", 1)]
    return [str(word) for pair in given for word in pair] + flags


def _megatron_model(model: Decoder) -> tuple[list[tuple[str, Any]], list[str]]:
    """What of a model goes beyond a GPT, as arguments and flags."""
    given: list[tuple[str, Any]] = []
    flags: list[str] = []
    if model.kv_heads != model.heads and not model.latent:
        flags.append("--group-query-attention")
        given.append(("--num-query-groups", model.kv_heads))
    if model.head_width * model.heads != model.hidden:
        given.append(("--kv-channels", model.head_width))
    flags += ["--swiglu"] * model.gated
    if not model.biases:
        flags.append("--disable-bias-linear")
        given.append(("--normalization", "RMSNorm"))
    flags += ["--untie-embeddings-and-output-weights"] * (not model.tied)
    if model.latent:
        flags += ["--multi-latent-attention", "--qk-layernorm"]
        given += [
            ("--q-lora-rank", model.latent.query),
            ("--kv-lora-rank", model.latent.key_value),
            ("--qk-head-dim", model.latent.plain),
            ("--qk-pos-emb-head-dim", model.latent.rotary),
            ("--v-head-dim", model.latent.value),
        ]
    if model.experts:
        layers = f"[0]*{model.dense_layers}+[1]*{model.expert_layers}"
        shared = model.shared_experts * model.expert_ffn
        given += [
            ("--num-experts", model.experts),
            ("--moe-router-topk", model.top_k),
            ("--moe-ffn-hidden-size", model.expert_ffn),
            *([("--moe-shared-expert-intermediate-size", shared)] if shared else []),
            *([("--moe-layer-freq", layers)] if model.dense_layers else []),
            ("--moe-token-dispatcher-type", "alltoall"),
        ]
        flags.append("--moe-grouped-gemm")
        if model.router_bias:  # which only goes with sigmoid scores
            flags.append("--moe-router-enable-expert-bias")
            given.append(("--moe-router-score-function", "sigmoid"))
    return given, flags


_SCRIPT = '''"""PLAN_TEXT. Written by manyranks.frameworks; run it with torchrun."""

import argparse
import contextlib
import os
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

LAYERS, HIDDEN, HEADS, VOCABULARY, POSITIONS = MODEL_NUMBERS
SEQUENCE, MICRO_BATCH, MICRO_BATCHES = JOB_NUMBERS
ZERO_STAGE, RECOMPUTE, PRECISION, REDUCE_IN_FP32 = CHOICES


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    @staticmethod
    def core(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        if RECOMPUTE == "selective":
            y = checkpoint(self.core, q, k, v, use_reentrant=False)
        else:
            y = self.core(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(POSITIONS, HIDDEN) if POSITIONS else None
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, ids):
        x = self.embed(ids)
        if POSITIONS:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if RECOMPUTE == "full" else layer(x)
        return F.linear(self.norm(x), self.embed.weight)  # output tied to the embedding


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)

    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= here
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same weights on all ranks
    model = Model()
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    model.to(device)
    parameters = sum(p.numel() for p in model.parameters())
    short = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[PRECISION]
    if ZERO_STAGE >= 2:
        policy = MixedPrecisionPolicy(param_dtype=short, reduce_dtype=torch.float32 if REDUCE_IN_FP32 else short)
        mesh = dist.init_device_mesh(device.type, (size,))
        options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": ZERO_STAGE == 3}
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=25)
    if ZERO_STAGE == 1:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=asked.lr)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=asked.lr)
    scaler = torch.amp.GradScaler(device.type, enabled=PRECISION == "fp16")

    for step in range(asked.steps):
        # Put your data loader here. These tokens depend on the step only, not on the ranks.
        tokens = torch.Generator().manual_seed(step)
        batch = size * MICRO_BATCH * MICRO_BATCHES
        ids = torch.randint(VOCABULARY, (batch, SEQUENCE + 1), generator=tokens)
        mine = ids.chunk(size)[rank].to(device).chunk(MICRO_BATCHES)
        total = torch.zeros((), device=device)
        for i, micro in enumerate(mine):
            last = i == MICRO_BATCHES - 1
            quiet = contextlib.nullcontext() if last or ZERO_STAGE >= 2 else model.no_sync()
            cast = torch.autocast(device.type, short, enabled=ZERO_STAGE < 2 and PRECISION != "fp32")
            with quiet:
                with cast:
                    logits = model(micro[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), micro[:, 1:].flatten())
                scaler.scale(loss / MICRO_BATCHES).backward()
            total += loss.detach() / MICRO_BATCHES
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item() / size:.6f} parameters {parameters}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''


def torchrun_script(plan: Plan, job: Job, precision: str | None = None) -> str:
    """A training script in plain PyTorch for a plan: DDP, ZeRO-1, or FSDP2.

    It trains on random tokens: put your data in. Runs on GPUs, or on CPUs without.

    Args:
        plan, job: what is to be written.
        precision: one of `PRECISIONS`; None takes the job's convention.

    Raises: Unsupported for tensor, pipeline, context and expert parallelism, for fp16
    with sharded gradients, for training without a master copy, and for models other than
    a GPT.

    >>> from manyranks.memory import Transformer
    >>> "fully_shard" in torchrun_script(Plan(dp=2, zero_stage=3), Job(Transformer(2, 64, 2, 64), 8, 2))
    True
    """
    _check(plan, job)
    kind = _precision(job, precision)
    for name in ("tp", "pp", "cp", "ep"):
        if getattr(plan, name) > 1:
            what = f"{name} {getattr(plan, name)}: the script is data parallel; use torchtitan or Megatron-LM"
            raise Unsupported(what)
    if kind == "fp16" and plan.zero_stage > 1:
        raise Unsupported(
            f"precision fp16 with zero_stage {plan.zero_stage}: ranks must agree on a skipped step"
        )
    if job.convention == "bf16":
        raise Unsupported("convention bf16: the script keeps an fp32 master copy")
    m = job.model
    if isinstance(m, Decoder):
        raise Unsupported("model: the script's model is a GPT; use torchtitan or Megatron-LM")
    holes = {
        "PLAN_TEXT": str(plan).capitalize(),
        "MODEL_NUMBERS": f"{m.layers}, {m.hidden}, {m.heads}, {m.vocabulary}, {m.positions}",
        "JOB_NUMBERS": f"{job.sequence}, {plan.micro_batch}, {plan.micro_batches}",
        "CHOICES": f'{plan.zero_stage}, "{plan.recompute}", "{kind}", {job.convention != "mixed16"}',
    }
    script = _SCRIPT
    for hole, text in holes.items():
        script = script.replace(hole, text, 1)
    return script


def write(
    plan: Plan,
    job: Job,
    cluster: Cluster,
    folder: str | Path,
    precision: str | None = None,
) -> dict[str, Path]:
    """Write a plan for all frameworks into a folder.

    What a framework can't express is not written; notes.txt says why, what the written
    files leave out, and which command starts each of them.

    Args:
        plan, job, cluster: of chapter 7.
        folder: made if it doesn't exist. Files of the same names are replaced.
        precision: one of `PRECISIONS`; None takes the job's convention.

    Returns: the paths by framework, and "notes".
    """
    _servers(plan, cluster)
    _precision(job, precision)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    writers = {
        "torchrun": ("train.py", torchrun_script, ("train.py",)),
        "torchtitan": (
            "torchtitan.toml",
            torchtitan_toml,
            ("-m", "torchtitan.train", "--job.config_file", "torchtitan.toml"),
        ),
        "deepspeed": (
            "deepspeed.json",
            deepspeed_json,
            (
                "your_training_script.py",
                "--deepspeed",
                "--deepspeed_config",
                "deepspeed.json",
            ),
        ),
        "megatron": (
            "megatron.args",
            lambda *given: " ".join(megatron_arguments(*given)).replace(" --", "\n--") + "\n",
            ("pretrain_gpt.py", "$(cat megatron.args)"),
        ),
    }
    _check(plan, job)
    paths, notes = {}, [str(plan), f"{plan.gpus} GPUs of {cluster}", ""]
    for framework, (name, writer, words) in writers.items():
        path = folder / name
        notes.append(f"{framework} ({SOURCES[framework]})")
        try:
            text = writer(plan, job, precision)
        except Unsupported as reason:
            path.unlink(missing_ok=True)  # no file of an earlier plan beside the notes of this one
            notes += [f"  not written: {reason}", ""]
            continue
        path.write_text(text, encoding="utf-8")
        paths[framework] = path
        notes.append(f"  {name}: {launch_command(plan, cluster, *words)}")
        notes += [f"  differs. {line}" for line in omissions(framework, plan, job)] + [""]
    paths["notes"] = folder / "notes.txt"
    paths["notes"].write_text("\n".join(notes), encoding="utf-8")
    return paths
