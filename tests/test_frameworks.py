"""Framework files: every name is a documented one, every plan survives the round trip, the packages parse them.

DeepSpeed, torchtitan 0.2 and megatron-core are not among the requirements: `framework_packages` fetches them into a folder
of their own, and their own configuration code reads our files. Where they can't be had, the test is skipped and says so.
"""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import json
import os
import re
import subprocess
import sys
import types
import typing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from manyranks import Cluster, frameworks
from manyranks.frameworks import (
    FRAMEWORKS,
    KNOBS,
    SOURCES,
    Unsupported,
    deepspeed_json,
    launch_command,
    megatron_arguments,
    omissions,
    torchrun_script,
    torchtitan_toml,
    write,
)
from manyranks.memory import Transformer
from manyranks.models import MODELS, Decoder, Latent
from manyranks.planner import Job, Plan

MODEL = Transformer(16, 256, 8, vocabulary=1024, positions=128)
LLAMA = Decoder(16, 256, 8, vocabulary=1024, ffn=896, kv_heads=2, head_width=64)
EXPERTS = Decoder(
    *(14, 256, 8, 1024),
    experts=8,
    top_k=2,
    shared_experts=1,
    expert_ffn=128,
    dense_layers=2,
    router_bias=True,
    latent=Latent(query=64, key_value=32, rotary=16, plain=32, value=32),
)
FIVE = [
    (Plan(dp=2, tp=2, pp=2, cp=2, micro_batches=4, sequence_parallel=True), LLAMA),
    (Plan(dp=4, tp=2, pp=2, cp=2, ep=8, micro_batches=4, zero_stage=2), EXPERTS),
    (Plan(dp=4, pp=4, ep=4, micro_batches=8, zero_stage=1, ends_as_layers=True), EXPERTS),
    (Plan(8, 1, 4, 1, 8, 3, "interleaved", 2, ep=4, ends_as_layers=True), EXPERTS),
    (Plan(dp=2, cp=4, ep=2, micro_batches=2), EXPERTS),
]
CLUSTER = Cluster(nodes=8, gpus_per_node=8, gpu="H100")
NAMES = {framework: {k.name for k in KNOBS if k.framework == framework} for framework in FRAMEWORKS}
WRITERS = {
    "torchrun": torchrun_script,
    "torchtitan": torchtitan_toml,
    "deepspeed": deepspeed_json,
    "megatron": megatron_arguments,
}


def job_for(plan, **options):
    return Job(**({"model": MODEL, "sequence": 64, "batch": plan.batch} | options))


@st.composite
def plans(draw):
    pp = draw(st.sampled_from([1, 2, 4]))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"] if pp > 1 else ["1f1b"]))
    tp = draw(st.sampled_from([1, 2, 8]))
    return Plan(
        dp=draw(st.sampled_from([1, 2, 4])),
        tp=tp,
        pp=pp,
        cp=draw(st.sampled_from([1, 1, 1, 2])) if tp < 8 else 1,
        micro_batch=draw(st.sampled_from([1, 2])),
        micro_batches=draw(st.sampled_from([4, 8])),
        zero_stage=draw(st.integers(0, 3)),
        schedule=schedule,
        virtual_stages=draw(st.sampled_from([2, 4])) if schedule == "interleaved" else 1,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        sequence_parallel=draw(st.booleans()) and tp > 1,
    )


@st.composite
def jobs(draw):
    plan = draw(plans())
    options = {
        "convention": draw(st.sampled_from(["mixed16", "mixed18", "mixed20", "fp32", "bf16"])),
        "dropout": draw(st.booleans()),
        "overlap": draw(st.sampled_from([(), ("data",), ("tensor", "data", "pipeline")])),
    }
    return plan, job_for(plan, **options), draw(st.sampled_from([None, "bf16", "fp16", "fp32"]))


def flat(config, prefix=""):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flat(value, prefix + key + ".")
        else:
            yield prefix + key


def written(writer, plan, job, precision):
    try:
        return writer(plan, job, precision)
    except Unsupported:
        assume(False)


def test_doctests():
    result = doctest.testmod(frameworks)
    assert result.attempted > 5 and result.failed == 0


# ---------------------------------------------------------------------------- names


def test_the_dictionary_is_in_order():
    assert set(SOURCES) == set(FRAMEWORKS) == {k.framework for k in KNOBS}
    assert len({(k.framework, k.name) for k in KNOBS}) == len(KNOBS)
    fields = {f.name for kind in (Plan, Job) for f in dataclasses.fields(kind)} | {"gpus", ""}
    for knob in KNOBS:
        assert knob.plan in fields and knob.meaning, knob


# Many plans can't be said in a framework's words; hypothesis would take that for a mistake.
SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


@SETTINGS
@given(jobs())
def test_toml_uses_documented_names_only(case):
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    plan, job, precision = case
    config = tomllib.loads(written(torchtitan_toml, plan, job, precision))
    assert set(flat(config)) <= NAMES["torchtitan"]
    p, t = config["parallelism"], config["training"]
    assert p["data_parallel_replicate_degree"] * p["data_parallel_shard_degree"] == plan.dp
    assert (p["tensor_parallel_degree"], p["pipeline_parallel_degree"]) == (plan.tp, plan.pp)
    micro = p.get("pipeline_parallel_microbatch_size", t["local_batch_size"])
    accumulated = t["global_batch_size"] // (t["local_batch_size"] * plan.dp)
    assert micro == plan.micro_batch
    assert accumulated * t["local_batch_size"] // micro == plan.micro_batches
    if plan.pp > 1:
        assert t["local_batch_size"] == plan.micro_batch * plan.micro_batches  # one call, cut by the pipeline
        stages = MODEL.layers / p["pipeline_parallel_layers_per_stage"]
        assert stages == plan.pp * plan.virtual_stages


@SETTINGS
@given(jobs())
def test_json_uses_documented_names_only(case):
    plan, job, precision = case
    config = json.loads(written(deepspeed_json, plan, job, precision))
    assert set(flat(config)) <= NAMES["deepspeed"]
    product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * plan.dp
    assert config["train_batch_size"] == product == job.batch
    assert config["zero_optimization"]["stage"] == plan.zero_stage


@SETTINGS
@given(jobs())
def test_arguments_use_documented_names_only(case):
    plan, job, precision = case
    words = written(megatron_arguments, plan, job, precision)
    assert {word for word in words if word.startswith("--")} <= NAMES["megatron"]
    values = dict(zip(words, words[1:]))
    assert int(values["--tensor-model-parallel-size"]) == plan.tp
    assert int(values["--pipeline-model-parallel-size"]) == plan.pp
    assert int(values.get("--num-virtual-stages-per-pipeline-rank", 1)) == plan.virtual_stages
    assert ("--sequence-parallel" in words) == plan.sequence_parallel
    assert int(values["--global-batch-size"]) == plan.batch
    assert values.get("--recompute-granularity", "none") == plan.recompute
    short = (precision or job.convention) != "fp32"
    assert ("--bf16" in words) + ("--fp16" in words) == short
    assert ("--overlap-param-gather" in words) <= ("--overlap-grad-reduce" in words)  # Megatron asserts it


def test_every_documented_name_is_used_somewhere():
    used = {framework: set() for framework in FRAMEWORKS}
    every = [
        Plan(dp=4, micro_batches=4, zero_stage=z, recompute=r)
        for z in range(4)
        for r in ("none", "selective", "full")
    ]
    every += [
        Plan(
            dp=2,
            tp=2,
            pp=2,
            micro_batches=4,
            schedule="interleaved",
            virtual_stages=2,
            sequence_parallel=True,
        ),
        Plan(dp=2, tp=2, micro_batches=2, recompute="full"),
        Plan(dp=2, cp=2, micro_batches=2),
    ]
    for plan, model in [*((plan, MODEL) for plan in every), *FIVE]:
        for convention in ("mixed16", "mixed18", "bf16", "fp32"):
            for precision in (None, "fp16"):
                for overlap in ((), ("data",)):
                    job = job_for(plan, model=model, convention=convention, overlap=overlap)
                    for framework, writer in WRITERS.items():
                        try:
                            text = writer(plan, job, precision)
                        except Unsupported:
                            continue
                        if framework == "megatron":
                            used[framework] |= {word for word in text if word.startswith("--")}
                        elif framework == "deepspeed":
                            used[framework] |= set(flat(json.loads(text)))
                        elif framework == "torchtitan":
                            section = ""
                            for line in text.splitlines():
                                section = line.strip("[]") if line.startswith("[") else section
                                if " = " in line and not line.startswith("#"):
                                    used[framework].add(f"{section}.{line.split(' = ')[0]}")
                        else:
                            used[framework] |= {name for name in NAMES[framework] if name in text}
    for cluster, plan in ((Cluster(1, 8), Plan(dp=8)), (CLUSTER, Plan(dp=16))):
        words = launch_command(plan, cluster, "train.py").split()
        used["torchrun"] |= {word for word in words if word.startswith("--")}
    for framework in FRAMEWORKS:
        assert used[framework] == NAMES[framework], framework


def test_the_script_s_names_are_pytorch_s():
    torch = pytest.importorskip("torch")
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.run import get_args_parser
    from torch.nn.parallel import DistributedDataParallel

    assert {"gradient_as_bucket_view", "bucket_cap_mb"} <= set(
        inspect.signature(DistributedDataParallel).parameters
    )
    assert {"param_dtype", "reduce_dtype"} <= set(inspect.signature(MixedPrecisionPolicy).parameters)
    assert "reshard_after_forward" in inspect.signature(fully_shard).parameters
    assert hasattr(DistributedDataParallel, "no_sync") and hasattr(torch.amp, "GradScaler")
    options = {option for action in get_args_parser()._actions for option in action.option_strings}
    assert {name for name in NAMES["torchrun"] if name.startswith("--")} <= options


# ---------------------------------------------------------------------------- what can't be said


@pytest.mark.parametrize(
    "framework, options, why",
    [
        ("torchrun", {"tp": 2}, "tp 2"),
        ("torchrun", {"pp": 2}, "pp 2"),
        ("torchrun", {"cp": 2}, "cp 2"),
        ("torchtitan", {"zero_stage": 1}, "zero_stage 1"),
        ("deepspeed", {"pp": 2, "zero_stage": 2}, "zero_stage 2 with pp 2"),
        ("deepspeed", {"pp": 2, "schedule": "gpipe"}, "schedule gpipe"),
        ("deepspeed", {"tp": 2, "pp": 2}, "tp 2 with pp 2"),
        ("deepspeed", {"tp": 2, "zero_stage": 3}, "zero_stage 3 with tp 2"),
        ("deepspeed", {"cp": 2}, "cp 2"),
        ("megatron", {"pp": 2, "schedule": "gpipe"}, "schedule gpipe"),
        ("torchrun", {"ep": 2}, "ep 2"),
        ("torchtitan", {"ep": 2, "zero_stage": 2}, "ep 2: the job's model has no experts"),
        ("deepspeed", {"ep": 2}, "ep 2"),
        ("megatron", {"ep": 2}, "ep 2: the job's model has no experts"),
    ],
)
def test_unsupported_plans_name_the_field(framework, options, why):
    plan = Plan(**({"dp": 2, "micro_batches": 4} | options))
    with pytest.raises(Unsupported, match=f"^{why}"):
        WRITERS[framework](plan, job_for(plan))


def test_five_axes_that_cannot_be_said():
    plan = Plan(dp=4, ep=2, micro_batches=4)
    job = job_for(plan, model=EXPERTS)
    with pytest.raises(Unsupported, match="^ep 2 with zero_stage 0"):
        torchtitan_toml(plan, job)
    with pytest.raises(Unsupported, match="^ep 2"):
        deepspeed_json(plan, job)
    with pytest.raises(Unsupported, match="^model"):
        torchrun_script(Plan(dp=2), job_for(Plan(dp=2), model=LLAMA))
    with pytest.raises(Unsupported, match="^ends_as_layers"):
        cut = Plan(dp=2, pp=2, micro_batches=2, ends_as_layers=True)
        deepspeed_json(cut, job_for(cut))
    with pytest.raises(ValueError, match="ep must divide dp x cp"):
        megatron_arguments(Plan(dp=2, ep=8), job_for(Plan(dp=2), model=EXPERTS))
    wide = Plan(dp=16, ep=16)
    with pytest.raises(ValueError, match="plan must divide the 8 experts by ep, 16"):
        megatron_arguments(wide, job_for(wide, model=EXPERTS))
    cut = Plan(pp=4, micro_batches=4, ends_as_layers=True)
    with pytest.raises(ValueError, match="16 layers and two ends by pp x virtual_stages, 4"):
        torchtitan_toml(cut, job_for(cut))


def pairs(words):
    """Megatron's words as a dict; a flag's value is True."""
    given, i = {}, 0
    while i < len(words):
        flag = i + 1 == len(words) or words[i + 1].startswith("--")
        given[words[i]] = True if flag else words[i + 1]
        i += 1 if flag else 2
    return given


def test_five_axes_in_megatron_s_words():
    for plan, model in FIVE:
        given = pairs(megatron_arguments(plan, job_for(plan, model=model)))
        assert int(given.get("--context-parallel-size", 1)) == plan.cp
        assert int(given.get("--expert-model-parallel-size", 1)) == plan.ep
        assert ("--cp-comm-type" in given) == (plan.cp > 1)
        assert ("--account-for-loss-in-pipeline-split" in given) == plan.ends_as_layers
        assert "--use-tp-pp-dp-mapping" not in given  # it refuses context and expert parallelism
        differs = omissions("megatron", plan, job_for(plan, model=model))
        assert any(line.startswith("pp: its ranks count") for line in differs) == (plan.pp > 1)
        assert given["--ffn-hidden-size"] == str(model.ffn) and given["--swiglu"]
        assert given["--position-embedding-type"] == "rope" and given["--normalization"] == "RMSNorm"
    assert given["--num-experts"] == "8" and given["--moe-router-topk"] == "2"
    assert given["--moe-layer-freq"] == "[0]*2+[1]*12"
    v3, plan = MODELS["deepseek-v3"], Plan(dp=64, ep=64)
    given = pairs(megatron_arguments(plan, job_for(plan, model=v3)))
    assert given["--moe-shared-expert-intermediate-size"] == "2048" and given["--q-lora-rank"] == "1536"
    assert "model: its limit of nodes" in omissions("megatron", plan, job_for(plan, model=v3))[0]
    llama = pairs(megatron_arguments(Plan(), job_for(Plan(), model=MODELS["llama3-8b"])))
    assert llama["--num-query-groups"] == "8" and "--kv-channels" not in llama
    gpt = pairs(megatron_arguments(Plan(), job_for(Plan())))
    assert gpt["--ffn-hidden-size"] == "1024" and "--swiglu" not in gpt and "--normalization" not in gpt


def test_unsupported_precisions():
    plan = Plan(dp=2, zero_stage=3)
    with pytest.raises(Unsupported, match="^precision fp16"):
        torchtitan_toml(plan, job_for(plan), "fp16")
    with pytest.raises(Unsupported, match="^precision fp16 with zero_stage 3"):
        torchrun_script(plan, job_for(plan), "fp16")
    for framework in ("torchrun", "deepspeed", "megatron"):
        with pytest.raises(Unsupported, match="^convention bf16"):
            WRITERS[framework](plan, job_for(plan, convention="bf16"))
    assert 'dtype = "bfloat16"' in torchtitan_toml(plan, job_for(plan, convention="bf16"))


def test_bad_input_names_the_argument():
    plan = Plan(dp=2)
    with pytest.raises(ValueError, match="plan must make the job's batch of 3 sequences, got 2"):
        deepspeed_json(plan, replace(job_for(plan), batch=3))
    deep = Plan(pp=3)
    with pytest.raises(ValueError, match="plan must divide 16 layers by pp x virtual_stages, 3"):
        torchtitan_toml(deep, job_for(deep))
    with pytest.raises(ValueError, match="precision must be one of bf16, fp16, fp32, got 'half'"):
        megatron_arguments(plan, job_for(plan), "half")
    with pytest.raises(ValueError, match="framework must be one of"):
        omissions("horovod", plan, job_for(plan))
    with pytest.raises(ValueError, match="plan must take at most the cluster's 64 GPUs, got 128"):
        launch_command(Plan(dp=128), CLUSTER)
    with pytest.raises(ValueError, match="plan must fill whole servers of 8 GPUs, got 12"):
        launch_command(Plan(dp=12), CLUSTER)


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_omissions_begin_with_a_field(case):
    plan, job, _ = case
    fields = {f.name for kind in (Plan, Job) for f in dataclasses.fields(kind)}
    for framework in FRAMEWORKS:
        for sentence in omissions(framework, plan, job):
            assert sentence.split(":")[0] in fields


# ---------------------------------------------------------------------------- files


def test_write(tmp_path):
    plan = Plan(dp=4, tp=4, pp=2, micro_batches=8, zero_stage=1, recompute="full", sequence_parallel=True)
    job = job_for(plan)
    stale = tmp_path / "train.py"
    stale.write_text("of an earlier plan")
    paths = write(plan, job, CLUSTER, tmp_path)
    assert set(paths) == {"megatron", "notes"} and not stale.exists()
    words = paths["megatron"].read_text().split()
    assert words == megatron_arguments(plan, job)
    notes = paths["notes"].read_text()
    assert "not written: tp 4" in notes and "not written: zero_stage 1" in notes
    assert "--nnodes 4" in notes and "--nproc-per-node 8" in notes

    plan = Plan(dp=8, micro_batches=2, zero_stage=3)
    paths = write(plan, job_for(plan), CLUSTER, tmp_path / "new" / "folder")
    assert set(paths) == {*FRAMEWORKS, "notes"}
    assert "--standalone --nproc-per-node 8 train.py" in paths["notes"].read_text()
    assert all(path.exists() for path in paths.values())
    compile(paths["torchrun"].read_text(), "train.py", "exec")


def run_two(script: str, folder: Path) -> list[list[str]]:
    path = folder / "train.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines() if line.startswith("step")]


@pytest.mark.parametrize("stage, precision", [(1, "fp16"), (3, "fp32")])
def test_the_script_runs(tmp_path, stage, precision):
    """The same losses as the script's own model in this process, on the whole batch (fp16: nearly)."""
    torch = pytest.importorskip("torch")
    model = Transformer(2, 16, 2, vocabulary=32)
    job = Job(model, sequence=8, batch=8, convention="mixed18")
    script = torchrun_script(Plan(dp=2, micro_batch=2, micro_batches=2, zero_stage=stage), job, precision)
    lines = run_two(script, tmp_path)
    assert [int(words[5]) for words in lines] == [model.parameters] * 3
    theirs = {"__name__": "imported"}
    exec(script, theirs)
    torch.manual_seed(0)
    dense = theirs["Model"]()
    for p in dense.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.02)
    optimizer = torch.optim.AdamW(dense.parameters(), lr=1e-3)
    for step, words in enumerate(lines):
        ids = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.cross_entropy(dense(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        assert float(words[3]) == pytest.approx(loss.item(), abs=5e-6 if precision == "fp32" else 5e-3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ---------------------------------------------------------------------------- the frameworks' own parsers

EVERY = [
    (Plan(dp=4, micro_batch=2, micro_batches=4, zero_stage=z, recompute=r), precision)
    for z in range(4)
    for r in ("none", "selective", "full")
    for precision in ("bf16", "fp16", "fp32")
] + [
    (Plan(dp=2, tp=2, pp=2, micro_batches=4, recompute="selective", sequence_parallel=True), "bf16"),
    (Plan(dp=2, tp=2, pp=2, micro_batches=4, schedule="interleaved", virtual_stages=4), "bf16"),
    (Plan(dp=2, tp=4, micro_batches=4, recompute="full", zero_stage=1), "bf16"),
    (Plan(dp=4, pp=4, micro_batches=8, zero_stage=1), "fp16"),
    (Plan(dp=2, cp=2, micro_batches=2, zero_stage=3), "bf16"),
]


def supported(framework):
    every = [*((plan, precision, MODEL) for plan, precision in EVERY), *((p, "bf16", m) for p, m in FIVE)]
    for plan, precision, model in every:
        for convention in ("mixed16", "mixed18"):
            job = job_for(plan, model=model, convention=convention)
            try:
                yield plan, job, precision, WRITERS[framework](plan, job, precision)
            except Unsupported:
                continue


def test_deepspeed_reads_its_file(framework_packages, monkeypatch):
    import deepspeed.runtime.config as config_module

    monkeypatch.setattr(config_module.dist, "get_rank", lambda *_: 0)  # else it takes the world to be 1
    count = 0
    for plan, _, precision, text in supported("deepspeed"):
        ranks = types.SimpleNamespace(get_data_parallel_world_size=lambda dp=plan.dp: dp)
        read = config_module.DeepSpeedConfig(json.loads(text), mpu=ranks)
        count += 1
        assert read.train_batch_size == plan.batch
        assert read.gradient_accumulation_steps == plan.micro_batches
        assert read.zero_config.stage == plan.zero_stage
        assert read.bfloat16_config.enabled == (precision == "bf16")
        assert read.float16_config.enabled == (precision == "fp16")
        assert read.tensor_parallel_config.autotp_size == (plan.tp if plan.tp > 1 else 0)
    assert count > 40
    plan = EVERY[0][0]
    wrong = json.loads(deepspeed_json(plan, job_for(plan)))
    wrong["zero_optimization"]["no_such_knob"] = 1
    ranks = types.SimpleNamespace(get_data_parallel_world_size=lambda: 4)
    with pytest.raises(Exception, match="no_such_knob"):  # so an unknown name would not have passed
        config_module.DeepSpeedConfig(wrong, mpu=ranks)


def test_torchtitan_reads_its_file(framework_packages, tmp_path):
    from torchtitan.config import ConfigManager
    from torchtitan.config.job_config import ActivationCheckpoint, Parallelism

    count, path = 0, tmp_path / "job.toml"
    for plan, job, _, text in supported("torchtitan"):
        path.write_text(text)
        read = ConfigManager().parse_args(["--job.config_file", str(path)])
        count += 1
        p = read.parallelism
        assert p.tensor_parallel_degree == plan.tp and p.pipeline_parallel_degree == plan.pp
        assert p.data_parallel_replicate_degree * p.data_parallel_shard_degree == plan.dp
        assert (p.context_parallel_degree, p.expert_parallel_degree) == (plan.cp, plan.ep)
        sharing = p.data_parallel_shard_degree * plan.cp * plan.tp
        assert sharing % (plan.ep * p.expert_tensor_parallel_degree) == 0 or plan.ep == 1
        assert read.training.global_batch_size == plan.batch and read.training.seq_len == job.sequence
        modes = typing.get_args(typing.get_type_hints(ActivationCheckpoint)["mode"])
        assert read.activation_checkpoint.mode == plan.recompute and plan.recompute in modes
        policies = typing.get_args(typing.get_type_hints(Parallelism)["fsdp_reshard_after_forward"])
        assert p.fsdp_reshard_after_forward in policies
    assert count > 20
    path.write_text("[parallelism]\nno_such_knob = 1\n")
    with pytest.raises(ValueError, match="no_such_knob"):
        ConfigManager().parse_args(["--job.config_file", str(path)])


def test_megatron_core_takes_its_arguments(framework_packages):
    """megatron-core has no argument parser; its configuration classes check the values of the same names."""
    import megatron.core.transformer.transformer_config as config_module
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    groups = {
        kind: {f.name for f in dataclasses.fields(kind)}
        for kind in (config_module.TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    }
    other = {  # spelled otherwise in the classes, or for the training script alone
        "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
        "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
        "use_distributed_optimizer": "use_distributed_optimizer",
        "data_parallel_sharding_strategy": "data_parallel_sharding_strategy",
        "ddp_bucket_size": "bucket_size",
        "num_experts": "num_moe_experts",
        "swiglu": "gated_linear_unit",
    }
    latent = {"q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"}
    counts = 0
    for plan, job, precision, words in supported("megatron"):
        given, i = {}, 0
        while i < len(words):
            name = words[i][2:].replace("-", "_")
            if i + 1 < len(words) and not words[i + 1].startswith("--"):
                value = words[i + 1]
                value = int(value) if re.fullmatch(r"\d+", value) else float(value) if "." in value else value
                i += 2
            else:
                value, i = True, i + 1
            given[other.get(name, name)] = value
        if given.pop("disable_bias_linear", False):
            given["add_bias_linear"] = False
        if "moe_layer_freq" in given:
            given["moe_layer_freq"] = eval(given["moe_layer_freq"])  # as its parser does
        made = {}
        for kind, names in groups.items():
            chosen = {name: value for name, value in given.items() if name in names}
            if kind is config_module.TransformerConfig and plan.pp > 1:
                import torch

                chosen["pipeline_dtype"] = torch.bfloat16 if precision == "bf16" else torch.float16
            if kind is config_module.TransformerConfig and "multi_latent_attention" in given:
                chosen |= {name: given[name] for name in latent}
                made[kind] = config_module.MLATransformerConfig(**chosen)
            else:
                made[kind] = kind(**chosen)
        counts += 1
        transformer = made[config_module.TransformerConfig]
        assert (
            transformer.num_layers == job.model.layers and transformer.tensor_model_parallel_size == plan.tp
        )
        assert transformer.sequence_parallel == plan.sequence_parallel
        assert (transformer.recompute_granularity or "none") == plan.recompute
        assert transformer.context_parallel_size == plan.cp
        assert transformer.expert_model_parallel_size == plan.ep
        placed = set().union(*groups.values(), latent) | {
            *("seq_length", "max_position_embeddings", "position_embedding_type", "tokenizer_type"),
            *("vocab_size", "micro_batch_size", "global_batch_size", "ckpt_format", "use_megatron_fsdp"),
            *("no_overlap_p2p_communication", "grad_reduce_in_bf16", "group_query_attention"),
            *("untie_embeddings_and_output_weights",),
        }
        assert set(given) <= placed, set(given) - placed
    assert counts > 40
