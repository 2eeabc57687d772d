"""The planner: its memory and its arithmetic against formulas, schedules and published runs."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from manyranks import published
from manyranks.five_axes import all_to_all_seconds, key_value_bytes
from manyranks.memory import CONVENTIONS, Transformer, activation_bytes, training_ledger
from manyranks.models import MODELS, Decoder, as_decoder
from manyranks.pipeline import Backward, Forward, bubble_overhead, gpipe, interleaved, one_f_one_b
from manyranks.planner import (
    CONSTANTS,
    FURTHER_PARTS,
    MEMORY_PARTS,
    SOURCES,
    TIME_PARTS,
    Constants,
    Job,
    Plan,
    as_table,
    check_plan,
    collective,
    costs,
    hardware_flops,
    in_flight,
    layer_seconds,
    model_flops,
    model_of,
    predict,
    recomputation_runs,
    stage_holdings,
    stage_kinds,
    stage_layers,
    stage_memory,
    stage_parameters,
    weak_scaling_run,
)
from manyranks.runtime import Cluster
from manyranks.runtime.costs import ring_all_reduce_seconds
from manyranks.search import plan_table

GPT3 = Transformer(96, 12288, 96, 51200, 2048)
SMALL = Transformer(8, 1024, 8, 5120)
A100 = Cluster(1, 8, "A100")
EXACT = replace(CONSTANTS, operands=0.0, kernel=0.0, chunk=0.0, hop=1.0, link=1.0, memory=1.0)
PUBLISHED = [run for row in published.RECOMPUTATION for run in recomputation_runs(row)]
SCALED = [weak_scaling_run(row) for row in published.WEAK_SCALING]


def errors(runs, constants=CONSTANTS):
    return np.array([run.error(constants) for run in runs])


# Plans and jobs


def test_plan_products_and_words():
    plan = Plan(2, 4, 8, 3, 16, 1, "interleaved", 2, "full", True)
    assert plan.gpus == 64 and plan.batch == 96
    assert str(plan) == (
        "dp 2, tp 4, pp 8, micro-batch 3 x 16, interleaved v=2, ZeRO-1, sequence parallel, full recomputation"
    )
    assert Plan(cp=2, tp=2).gpus == 4 and "cp 2" in str(Plan(cp=2))
    five = Plan(8, 2, 4, cp=2, ep=16, ends_as_layers=True)
    assert five.gpus == 128 and str(five) == (
        "dp 8, tp 2, pp 4, cp 2, ep 16, micro-batch 1 x 1, 1f1b, ends as layers"
    )


@pytest.mark.parametrize(
    "wrong, names",
    [
        ({"dp": 0}, "dp"),
        ({"tp": 2.5}, "tp"),
        ({"pp": True}, "pp"),
        ({"micro_batch": -1}, "micro_batch"),
        ({"zero_stage": 4}, "zero_stage"),
        ({"schedule": "GPipe"}, "schedule"),
        ({"recompute": "some"}, "recompute"),
        ({"virtual_stages": 2}, "virtual_stages"),
        ({"schedule": "interleaved", "pp": 4}, "virtual_stages"),
        ({"schedule": "interleaved", "virtual_stages": 2}, "pp"),
        ({"schedule": "interleaved", "virtual_stages": 2, "pp": 4, "micro_batches": 6}, "micro_batches"),
        ({"sequence_parallel": True}, "sequence_parallel"),
        ({"sequence_parallel": 1, "tp": 2}, "sequence_parallel"),
        ({"cp": 0}, "cp"),
        ({"ep": 1.5}, "ep"),
        ({"ends_as_layers": True}, "ends_as_layers"),
        ({"ends_as_layers": 1, "pp": 2}, "ends_as_layers"),
    ],
)
def test_a_bad_plan_names_the_field(wrong, names):
    with pytest.raises((ValueError, TypeError), match=names):
        Plan(**wrong)


@pytest.mark.parametrize(
    "wrong, names",
    [
        ({"model": 7e9}, "model"),
        ({"sequence": 0}, "sequence"),
        ({"batch": 1.5}, "batch"),
        ({"convention": "mixed"}, "convention"),
        ({"attention": "ring"}, "attention"),
        ({"overlap": ("all",)}, "overlap"),
        ({"model": GPT3, "sequence": 4096}, "sequence"),
        ({"causal": 1}, "causal"),
        ({"causal": True, "attention": "stored"}, "causal"),
    ],
)
def test_a_bad_job_names_the_field(wrong, names):
    with pytest.raises((ValueError, TypeError), match=names):
        Job(**{"model": SMALL, "sequence": 1024, "batch": 8, **wrong})


@pytest.mark.parametrize(
    "wrong, names",
    [
        ({"dp": 2}, "GPUs"),
        ({"micro_batches": 8}, "batch"),
        ({"tp": 8, "dp": 1}, None),
        ({"pp": 8, "tp": 1}, None),
        ({"cp": 2, "dp": 2}, "cp"),
        ({"ep": 2}, "ep"),
    ],
)
def test_check_plan(wrong, names):
    plan = Plan(**{"dp": 1, "tp": 8, "micro_batches": 16, **wrong})
    job = Job(SMALL, 1024, 16)
    if names is None:
        check_plan(plan, job, A100)
    else:
        with pytest.raises(ValueError, match=names):
            predict(plan, job, A100)


def test_check_plan_knows_what_divides():
    odd = Transformer(9, 1024, 8, 5120)
    job = Job(odd, 1024, 16)
    predict(Plan(pp=8, micro_batches=16), job, A100)  # uneven stages are fine
    with pytest.raises(ValueError, match="heads"):
        check_plan(Plan(tp=16, micro_batches=16), job, Cluster(2, 8))
    with pytest.raises(ValueError, match="layers"):
        check_plan(Plan(pp=2, tp=4, micro_batches=16, schedule="interleaved", virtual_stages=2), job, A100)
    with pytest.raises(ValueError, match="layers"):
        check_plan(Plan(pp=16, micro_batches=16), job, Cluster(2, 8))
    with pytest.raises(ValueError, match="sequence"):
        check_plan(Plan(tp=8, micro_batches=16, sequence_parallel=True), replace(job, sequence=1001), A100)


@pytest.mark.parametrize("billions", [0.125, 0.35, 1, 7, 13, 22, 70, 175, 400, 530, 1000])
def test_model_of_comes_close_and_divides(billions):
    model = model_of(billions * 1e9)
    assert abs(model.parameters / (billions * 1e9) - 1) < 0.12
    assert model.layers % 4 == 0 and model.hidden == 128 * model.heads
    assert 20 < model.hidden / model.layers < 400


@pytest.mark.parametrize("wrong", [0, -1, 1e6, 1e16, float("nan"), "7B"])
def test_model_of_refuses(wrong):
    with pytest.raises((ValueError, TypeError), match="parameters"):
        model_of(wrong)


# Memory


@pytest.mark.parametrize("model", [GPT3, SMALL, Transformer(7, 512, 4, 1001, 128)])
@pytest.mark.parametrize("pp", [1, 2, 3, 7])
def test_the_stages_own_the_model_and_a_copy_of_the_embedding(model, pp):
    table = as_table([Plan(pp=pp)])
    owned, layers = stage_parameters(table, Job(model, 128, 8), np.arange(pp))
    assert layers.sum() == model.layers and layers.max() - layers.min() <= 1
    assert owned.sum() == model.parameters + (pp > 1) * model.vocabulary * model.hidden


def test_tensor_parallel_repeats_norms_and_the_row_products_biases():
    one, eight = (stage_parameters(as_table([Plan(tp=t)]), Job(GPT3, 2048, 8), 0)[0][0] for t in (1, 8))
    h = GPT3.hidden
    repeated = GPT3.layers * 6 * h + 2 * h + 2048 * h
    assert 8 * eight - one == 7 * repeated


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_training_state_is_the_ledger(convention, zero):
    job = Job(SMALL, 1024, 16, convention)
    memory = stage_memory(as_table([Plan(dp=4, zero_stage=zero, micro_batches=4)]), job, 0)
    ledger = training_ledger(SMALL.parameters, convention=convention).sharded(4, zero)
    assert memory["weights"][0] == pytest.approx(ledger.weight)
    assert memory["gradients"][0] == pytest.approx(ledger.gradient)
    assert memory["optimizer"][0] == pytest.approx(ledger.optimizer)


@pytest.mark.parametrize("stages, m, v", [(2, 4, 1), (4, 8, 1), (4, 2, 1), (4, 8, 2), (3, 6, 4), (8, 8, 3)])
def test_in_flight_is_what_the_schedules_hold(stages, m, v):
    kinds = {"gpipe": gpipe, "1f1b": one_f_one_b} if v == 1 else {"interleaved": interleaved}
    for name, schedule in kinds.items():
        plan = Plan(pp=stages, micro_batches=m, schedule=name, virtual_stages=v)
        predicted = np.broadcast_to(in_flight(as_table([plan]), np.arange(stages)), stages)
        for stage in range(stages):
            held = most = 0
            for step in schedule(stage, stages, m, **({"chunks": v} if v > 1 else {})):
                held += isinstance(step, Forward) - isinstance(step, Backward)
                most = max(most, held)
            assert predicted[stage] == pytest.approx(most / v)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("split", [True, False])
def test_first_stage_activations_are_korthikantis(recompute, split):
    s, b, h, a, p, v, t = 2048, 2, 12288, 96, 8, 3, 8
    job = Job(GPT3, s, 64, attention="stored", dropout=True)
    plan = Plan(1, t, p, b, 32, 0, "interleaved", v, recompute, split)
    got = stage_memory(as_table([plan]), job, 0)["activations"][0]
    held = p * (1 + (p - 1) / (p * v))
    options = dict(attention="stored", tensor_parallel=t, sequence_parallel=split)
    layer = activation_bytes(s, b, h, a, recompute=recompute, **options)
    whole = activation_bytes(s, b, h, a, **options)
    mask = s * b * h / (t if split else 1) * held
    assert got == pytest.approx(layer * 12 * held + mask + whole - layer)


def test_published_activation_formulas():
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    job = Job(Transformer(48, h, a, 51200), s, b, attention="stored", dropout=True)
    sbh = s * b * h
    for plan, layer in (
        (Plan(micro_batch=b), sbh * (34 + 5 * a * s / h)),
        (Plan(tp=t, micro_batch=b), sbh * (10 + 24 / t + 5 * a * s / (h * t))),
        (Plan(tp=t, micro_batch=b, sequence_parallel=True), sbh / t * (34 + 5 * a * s / h)),
    ):
        got = stage_memory(as_table([plan]), job, 0)["activations"][0]
        assert got == pytest.approx(48 * layer + sbh / (t if plan.sequence_parallel else 1))


def test_logits_by_hand():
    # 2 sequences of 1,024 tokens, h 1,024, V 5,120, tp 4: 4 bytes x 2,048 x (1,024 + 1,280)
    job = Job(SMALL, 1024, 8)
    plan = Plan(tp=4, pp=2, micro_batch=2, micro_batches=4)
    first, last = (stage_memory(as_table([plan]), job, i)["logits and loss"][0] for i in (0, 1))
    assert first == 0 and last == 4 * 2048 * (1024 + 1280)
    held = stage_memory(as_table([replace(plan, schedule="gpipe")]), job, 1)["logits and loss"][0]
    assert held == 4 * last


def test_the_peak_is_at_an_end_and_vectorised_equals_single():
    job, cluster = Job(SMALL, 1024, 64), Cluster(2, 8, "A100")
    table = plan_table(job, cluster)
    found = costs(table, job, cluster, CONSTANTS)
    rng = np.random.default_rng(0)
    for i in rng.choice(len(table.dp), 60, replace=False):
        one = predict(table.plan(i), job, cluster)
        assert one.peak == pytest.approx(found.peak[i], rel=1e-12)
        assert one.seconds == pytest.approx(found.seconds[i], rel=1e-12)
        assert set(one.parts) == set(TIME_PARTS) and set(one.memory[0]) == set(MEMORY_PARTS)
        assert sum(one.parts.values()) == pytest.approx(one.seconds)
        assert min(one.parts.values()) >= -1e-12


def test_memory_falls_along_every_saving():
    job = Job(GPT3, 2048, 128, attention="stored", dropout=True)
    base = Plan(dp=2, tp=4, pp=8, micro_batch=2, micro_batches=32)

    def peak(**changes):
        return predict(replace(base, **changes), job, Cluster(8, 8, "A100")).peak

    zero = [peak(zero_stage=z) for z in range(4)]
    assert zero == sorted(zero, reverse=True) and zero[3] < zero[0]
    kept = [peak(recompute=r) for r in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True) and kept[2] < 0.5 * kept[0]
    assert peak(sequence_parallel=True) < peak()
    assert peak(schedule="gpipe") > peak(schedule="interleaved", virtual_stages=2) > peak()


# Time


def test_collectives_without_the_fill_are_chapter_2s_rings():
    size = 1e8
    for n in (2, 4, 8):
        got = collective("all_reduce", size, n, 1, A100, EXACT)
        assert got == pytest.approx(
            ring_all_reduce_seconds(size, n, A100.intra.latency, A100.intra.bandwidth)
        )
        assert collective("all_gather", size, n, 1, A100, EXACT) == pytest.approx(got / 2)
    assert collective("all_reduce", size, 1, 1, A100, CONSTANTS) == 0


def test_collectives_across_nodes_take_the_ports_of_the_group():
    cluster, free = Cluster(8, 8, "A100"), replace(EXACT, hop=0.0)
    one_a_node = collective("all_reduce", 1e9, 8, 8, cluster, free)
    assert one_a_node == pytest.approx(2 * 7 / 8 * 1e9 / 25e9)
    all_of_them = collective("all_reduce", 1e9, 64, 1, cluster, free)
    assert all_of_them == pytest.approx(2 * 63 / 64 * 1e9 / 200e9)
    with_latency = collective("all_gather", 0.0, 64, 1, cluster, EXACT)
    assert with_latency == pytest.approx(56 * 3.4e-6 + 7 * 14e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8, 16, 64]),
    st.sampled_from([1, 2, 8]),
    st.floats(1e3, 1e10),
    st.floats(1.01, 10),
)
def test_collectives_grow_with_bytes_and_ranks(n, stride, size, more):
    cluster = Cluster(16, 8, "H100")
    base = collective("all_reduce", size, n, stride, cluster, CONSTANTS)
    assert collective("all_reduce", more * size, n, stride, cluster, CONSTANTS) >= base
    assert collective("all_reduce", size, 2 * n, stride, cluster, CONSTANTS) > base
    assert collective("reduce_scatter", size, n, stride, cluster, CONSTANTS) <= base


def test_products_are_the_published_operations():
    """With free bytes and links the products' seconds are the model FLOPs over the rate."""
    job = Job(GPT3, 2048, 64, attention="stored")
    found = predict(Plan(tp=8, micro_batch=4, micro_batches=16), job, A100, EXACT)
    rate = 8 * A100.gpu.matmul_efficiency * A100.gpu.peak_flops
    assert found.parts["products"] == pytest.approx(model_flops(job) / rate)
    again = predict(Plan(tp=8, micro_batch=4, micro_batches=16, recompute="full"), job, A100, EXACT)
    layer = layer_seconds(as_table([again.plan]), job, A100, EXACT)
    extra = 16 * GPT3.layers * layer.matmul[2][0]
    assert extra == pytest.approx((hardware_flops(job, "full") - model_flops(job)) / rate)
    part = replace(again.plan, recompute="selective")
    layer = layer_seconds(as_table([part]), job, A100, EXACT)
    extra = 16 * GPT3.layers * layer.matmul[2][0]
    assert extra == pytest.approx((hardware_flops(job, "selective") - model_flops(job)) / rate)


def test_flops_are_the_papers_formulas():
    l, h, v, s, batch = 96, 12288, 51200, 2048, 1536
    job = Job(GPT3, s, batch, attention="stored")
    assert model_flops(job) == pytest.approx(
        72 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h)), rel=1e-14
    )
    narayanan = 96 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    assert hardware_flops(job, "full") == pytest.approx(narayanan, rel=1e-14)
    assert hardware_flops(job, "none") == model_flops(job)
    assert hardware_flops(replace(job, attention="flash"), "selective") == model_flops(job)


@pytest.mark.parametrize("row", published.WEAK_SCALING, ids=lambda row: f"{row.parameters_billion}B")
def test_narayanan_parameters_and_percent_of_peak(row):
    run = weak_scaling_run(row)
    l, h, v, s = row.layers, row.hidden, 51200, 2048
    formula = 12 * l * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * l * h))
    assert run.job.model.parameters == pytest.approx(formula + 2 * h, rel=1e-12)  # and the final norm
    assert formula / 1e9 == pytest.approx(row.parameters_billion, abs=0.06)
    assert 100 * row.tflops_per_gpu / 312 == pytest.approx(row.percent_of_peak, abs=0.6)
    found = predict(run.plan, run.job, run.cluster)
    assert found.hfu * found.seconds == pytest.approx(row.tflops_per_gpu / 312 * run.seconds)
    assert found.fits


@pytest.mark.parametrize("row", published.RECOMPUTATION, ids=lambda row: row.model)
def test_korthikanti_mfu_and_the_hfu_as_printed(row):
    _, run = recomputation_runs(row)
    h, l, v, s = row.hidden, row.layers, 51200, 2048
    mfu = 100 * model_flops(run.job) / (run.seconds * row.gpus * 312e12)
    assert mfu == pytest.approx(row.selective_mfu_percent, abs=0.2)
    printed = (1 + s / (3 * h) + v / (12 * l * h)) / (1 + s / (6 * h) + v / (12 * l * h))
    assert mfu * printed == pytest.approx(row.selective_hfu_percent, abs=0.2)
    assert hardware_flops(run.job, "selective") / model_flops(run.job) < printed
    assert predict(run.plan, run.job, run.cluster).fits


def test_the_step_of_equal_stages_is_chapter_5s():
    """Without ends, messages and accumulation: bubble / (m x stage) = (p - 1)/(v m)."""
    model = Transformer(64, 8192, 64, 8)  # hardly any embedding
    fast = Cluster(8, 8, "A100", intra_bandwidth=1e18, inter_bandwidth=1e18, intra_latency=0, inter_latency=0)
    for p, m, v in ((4, 8, 1), (8, 16, 1), (4, 16, 4), (8, 64, 8)):
        name = "interleaved" if v > 1 else "1f1b"
        plan = Plan(tp=64 // p, pp=p, micro_batches=m, schedule=name, virtual_stages=v)
        found = predict(plan, Job(model, 2048, m), fast, EXACT)
        work = found.seconds - found.parts["bubble"] - found.parts["optimizer"] - found.parts["data"]
        assert found.parts["bubble"] / work == pytest.approx(bubble_overhead(p, m, v), rel=0.01)


def test_stage_seconds_make_the_step():
    job = Job(GPT3, 2048, 64)
    found = predict(Plan(tp=8, pp=8, micro_batches=64), job, Cluster(8, 8, "A100"))
    stages = [f + b + 2 * found.send for f, b in found.stages]
    once = found.parts["data"] + found.parts["optimizer"]
    assert 63 * max(stages) + sum(stages) + once == pytest.approx(found.seconds, rel=2e-3)


def test_recomputation_sequence_parallelism_and_overlap_by_layer():
    job = Job(Transformer(48, 6144, 64, 51200), 2048, 4, attention="stored", dropout=True, overlap=())
    plans = [Plan(tp=8, micro_batch=4, recompute=r) for r in ("none", "selective", "full")]
    layer = layer_seconds(as_table(plans), job, A100, CONSTANTS)
    forward, backward = np.broadcast_to(layer.forward, 3), layer.backward
    assert np.ptp(forward) == 0 and backward[0] < backward[1] < backward[2]
    assert backward[2] - backward[0] == pytest.approx(forward[0])
    hidden = layer_seconds(as_table(plans), replace(job, overlap=("tensor",)), A100, CONSTANTS)
    assert np.all(hidden.backward < backward)
    assert np.allclose(hidden.forward, forward)


def test_zero_costs_what_it_moves():
    free = replace(EXACT, hop=0.0)  # no latencies: bytes alone
    job, cluster = Job(model_of(7e9), 2048, 512, overlap=()), Cluster(8, 8, "A100")
    data = [
        predict(Plan(dp=64, micro_batches=8, zero_stage=z), job, cluster, free).parts["data"]
        for z in range(4)
    ]
    assert data[0] == pytest.approx(data[1], rel=1e-9)  # the same passes
    assert data[2] == pytest.approx(data[0] * (8 + 1) / 2, rel=0.01)
    assert data[3] == pytest.approx(data[0] * 3 * 8 / 2, rel=0.01)


def test_overlap_only_hides():
    job, cluster = Job(model_of(7e9), 2048, 512), Cluster(8, 8, "A100")
    for zero in range(4):
        plan = Plan(dp=64, micro_batches=8, zero_stage=zero)
        hidden = predict(plan, job, cluster)
        seen = predict(plan, replace(job, overlap=()), cluster)
        assert 0 <= hidden.parts["data"] < seen.parts["data"]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1024, 2048, 4096, 12288]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.sampled_from(["A100", "H100", "L4"]),
)
def test_better_machines_are_never_slower(hidden, tp, pp, b, split, gpu):
    assume(tp > 1 or not split)
    model = Transformer(8, hidden, hidden // 128, 51200)
    job = Job(model, 2048, 16 * b)
    cluster = Cluster(2, 8, gpu)
    dp = 16 // (tp * pp) if 16 % (tp * pp) == 0 else 1
    assume(16 * b % (dp * b) == 0)
    plan = Plan(dp, tp, pp, b, 16 // dp, sequence_parallel=split)
    assume(plan.gpus == 16)
    base = predict(plan, job, cluster)
    rates = asdict(cluster.intra)["bandwidth"], asdict(cluster.inter)["bandwidth"]
    wide = Cluster(2, 8, gpu, intra_bandwidth=2 * rates[0], inter_bandwidth=2 * rates[1])
    quick = Cluster(2, 8, replace(cluster.gpu, memory_bandwidth=2 * cluster.gpu.memory_bandwidth))
    assert predict(plan, job, wide).seconds <= base.seconds * (1 + 1e-12)
    assert predict(plan, job, quick).seconds < base.seconds
    assert predict(plan, replace(job, dropout=True), cluster).seconds > base.seconds
    assert predict(plan, replace(job, attention="stored"), cluster).peak >= base.peak
    assert 0 < base.mfu < 1


# Calibration and published runs


def test_every_constant_has_a_source():
    assert set(SOURCES) == set(asdict(CONSTANTS)) and all(SOURCES.values())


@pytest.mark.parametrize(
    "wrong", [{"matmul": 0.0}, {"link": 2.5}, {"memory": -1}, {"usable": math.nan}, {"hop": "x"}]
)
def test_bad_constants_are_named(wrong):
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        replace(CONSTANTS, **wrong)


def test_the_links_constants_are_the_best_fit():
    sizes = np.array(published.ALL_REDUCE_SIZES, dtype=float)
    times = 1.75 * sizes / (np.array(list(published.ALL_REDUCE_BUSBW_GBPS["A100"].values())) * 1e9)

    def off(constants):
        return np.mean((collective("all_reduce", sizes, 8, 1, A100, constants) / times - 1) ** 2)

    assert math.sqrt(off(CONSTANTS)) < 0.045
    for name in ("link", "hop", "chunk"):
        for factor in (0.97, 1.03):
            moved = replace(CONSTANTS, **{name: factor * getattr(CONSTANTS, name)})
            assert off(moved) > off(CONSTANTS), name


def test_the_layers_constants_are_the_best_fit():
    job = Job(Transformer(48, 6144, 64, 51200), 2048, 4, "mixed20", "stored", True, ("tensor",))
    base = Plan(tp=8, micro_batch=4)
    plans = [
        base,
        replace(base, sequence_parallel=True),
        replace(base, recompute="full"),
        replace(base, recompute="selective"),
        replace(base, recompute="selective", sequence_parallel=True),
    ]
    times = np.array(list(published.LAYER_TIMES.values())) / 1e3

    def error(constants):
        found = layer_seconds(as_table(plans), job, A100, constants)
        return np.stack([np.broadcast_to(found.forward, 5), found.backward], axis=1) / times - 1

    assert np.abs(error(CONSTANTS)).max() < 0.012
    least = np.mean(error(CONSTANTS) ** 2)
    for name in ("operands", "memory", "tensor_overlap"):
        for factor in (0.97, 1.03):
            moved = replace(CONSTANTS, **{name: factor * getattr(CONSTANTS, name)})
            assert np.mean(error(moved) ** 2) > least, name


def test_published_runs_within_the_goals():
    ours = np.abs(errors(PUBLISHED))
    assert len(ours) == 8 and ours.mean() <= 0.0365 and ours.max() <= 0.089
    ours = np.abs(errors(SCALED))
    assert len(ours) == 5 and ours.mean() <= 0.08 and ours.max() <= 0.15


def test_no_constant_is_tuned_to_a_row():
    """10 % on any fitted constant leaves the goals within reach: the formulas carry the result."""
    for name in ("operands", "memory", "tensor_overlap", "link", "hop", "chunk"):
        for factor in (0.9, 1.1):
            moved = replace(CONSTANTS, **{name: factor * getattr(CONSTANTS, name)})
            assert np.abs(errors(PUBLISHED, moved)).mean() < 0.045
            assert np.abs(errors(SCALED, moved)).mean() < 0.085


def test_megatrons_advice_tensor_up_to_the_node_then_pipeline():
    """Narayanan et al. 2021, figure 13: of (tp, pp) on 64 GPUs, (8, 8) is the best for 162B."""
    model = Transformer(32, 20480, 128, 51200, 2048)
    job = Job(model, 2048, 32, "mixed20", "stored", True, ())
    times = {
        t: predict(
            Plan(tp=t, pp=64 // t, micro_batches=32, recompute="full"), job, Cluster(8, 8, "A100")
        ).seconds
        for t in (2, 4, 8, 16, 32)
    }
    assert min(times, key=times.get) == 8
    assert times[2] > times[4] > times[8] < times[16] < times[32]


def test_constants_object_is_one_for_all():
    slow = Constants(0.5, 0.79, 0.868, 0.375, 0.794, 0.881, 5.95e6)
    job, plan = Job(SMALL, 1024, 16), Plan(tp=8, micro_batches=16)
    assert predict(plan, job, A100, slow).seconds > predict(plan, job, A100).seconds


def test_the_optimizer_and_the_accumulation_by_hand():
    """Adam with mixed16: 6 + 8 + 4 + 8 + 28 + 6 + 2 = 62 bytes; a gradient that is added: 2 + 2 + 2."""
    job, byte = Job(SMALL, 1024, 8), 1 / (CONSTANTS.memory * 2.0e12)
    for zero, shards in ((0, 1), (1, 8), (3, 8)):
        found = predict(Plan(dp=8, zero_stage=zero), job, A100)
        assert found.parts["optimizer"] == pytest.approx(62 * SMALL.parameters / shards * byte)
    once = predict(Plan(dp=8, micro_batches=1), job, A100).parts["memory-bound"]
    twice = predict(Plan(dp=8, micro_batches=2), replace(job, batch=16), A100).parts["memory-bound"]
    assert twice - 2 * once == pytest.approx(6 * SMALL.parameters * byte)


def test_zero_3_pays_latency_for_each_layer():
    slow = Cluster(8, 8, "A100", inter_latency=1e-3)
    job = Job(Transformer(48, 2048, 16, 5120), 1024, 64, overlap=())
    plan = Plan(dp=64, zero_stage=3)
    more = predict(plan, job, slow).parts["data"] - predict(plan, job, Cluster(8, 8, "A100")).parts["data"]
    # 48 layers and the embedding, two gathers and a reduction, 7 hops between nodes
    assert more == pytest.approx(49 * 3 * 7 * CONSTANTS.hop * (1e-3 - 14e-6), rel=1e-6)


def test_a_single_stage_holds_one_micro_batch_whatever_its_schedule():
    for schedule in ("gpipe", "1f1b"):
        table = as_table([Plan(micro_batches=8, schedule=schedule)])
        assert in_flight(table, 0).tolist() == [1]


def test_a_pipeline_that_just_fills_a_node_sends_over_nvlink():
    job = Job(SMALL, 1024, 8)
    inside, outside = (
        predict(Plan(tp=2, pp=4, micro_batches=8, sequence_parallel=True), job, Cluster(nodes, each, "A100"))
        for nodes, each in ((1, 8), (2, 4))
    )
    size = 2 * 1024 * SMALL.hidden / 2
    assert inside.send == pytest.approx(A100.intra.latency + size / (CONSTANTS.link * 300e9))
    assert outside.send == pytest.approx(A100.inter.latency + size / (CONSTANTS.link * 25e9))
    assert inside.links["pipeline"] == "NVLink" and outside.links["pipeline"] == "network"


def test_the_optimizer_waits_for_the_fuller_end():
    """Without position embeddings the last stage owns the final norm more than the first: 2h parameters."""
    job, byte = Job(SMALL, 1024, 8), 1 / (CONSTANTS.memory * 2.0e12)
    first, last = (float(stage_parameters(as_table([Plan(pp=8)]), job, i)[0][0]) for i in (0, 7))
    assert last - first == 2 * SMALL.hidden
    found = predict(Plan(pp=8, micro_batches=8), job, A100)
    assert found.parts["optimizer"] == pytest.approx(62 * last * byte, rel=1e-9)


def test_zero_2_hides_its_collectives_behind_the_right_pass():
    """Scatters behind the backward pass of each micro-batch, the gather behind the next forward pass."""
    cluster, m = Cluster(2, 8, "A100"), 3
    job = Job(SMALL, 1024, 16 * m)
    plan = Plan(dp=16, micro_batches=m, zero_stage=2)
    found = costs(as_table([plan]), job, cluster, CONSTANTS)
    forward, backward = (SMALL.layers * float(found.layer[k][0]) for k in (0, 1))
    size = 2 * float(stage_parameters(as_table([plan]), job, 0)[0][0])
    scatter, gather = (
        float(collective(kind, size, 16, 1, cluster, CONSTANTS)) for kind in ("reduce_scatter", "all_gather")
    )
    hide = CONSTANTS.data_overlap
    each, once = scatter - hide * min(scatter, backward), gather - hide * min(gather, forward)
    assert float(found.parts["data"][0]) == pytest.approx(m * each + once)


def test_the_chunk_fills_a_ring_inside_once_and_along_the_nodes_once():
    cluster, size = Cluster(4, 8, "A100"), 64e6
    share = size / 32
    chunk = CONSTANTS.chunk * share / (share + CONSTANTS.chunk)
    latency = 28 * cluster.intra.latency + 3 * cluster.inter.latency
    wire = CONSTANTS.link * 8 * 25e9
    expected = CONSTANTS.hop * latency + ((7 + 3) * chunk + 31 * share) / wire
    got = float(collective("all_gather", size, 32, 1, cluster, CONSTANTS))
    assert got == pytest.approx(expected) and 8 * 25e9 < 300e9


# Five axes

LLAMA = MODELS["llama3-405b"]
MOE = Decoder(
    *(13, 1024, 8, 5120),
    ffn=3072,
    kv_heads=4,
    experts=8,
    top_k=2,
    shared_experts=1,
    expert_ffn=512,
    dense_layers=3,
)
LONG = Job(MOE, 8192, 64, causal=True)
H100 = Cluster(8, 8, "H100")


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"cp": 16, "dp": 4, "ep": 1}, None),
        ({"tp": 8, "dp": 8, "cp": 1, "ep": 1}, "4 heads of keys and values"),
        ({"cp": 2, "dp": 8}, "dp x tp x pp x cp must be the cluster's 64 GPUs, got 8 x 1 x 1 x 2"),
        ({"ep": 16}, "ep must divide the 8 experts, got 16"),
        ({"ep": 3}, "ep must divide dp x cp, 16 x 4, got 3"),
        ({"pp": 16, "dp": 1, "micro_batches": 64, "ep": 1}, "at most the 13 layers"),
        ({"pp": 2, "dp": 8, "ends_as_layers": True, "ep": 4}, None),
    ],
)
def test_check_plan_with_five_axes(changes, names):
    plan = Plan(**{"dp": 16, "cp": 4, "ep": 4, **changes})
    plan = replace(plan, micro_batches=max(64 // plan.dp, 1))
    if names is None:
        predict(plan, LONG, H100)
    else:
        with pytest.raises(ValueError, match=names):
            predict(plan, LONG, H100)


def test_check_plan_names_what_a_dense_model_and_odd_sequences_cannot_do():
    with pytest.raises(ValueError, match="ep must be 1 for a model without experts"):
        check_plan(Plan(dp=8, ep=2), Job(SMALL, 1024, 8), A100)
    with pytest.raises(ValueError, match="2 x cp must divide the sequence, 1020"):
        check_plan(Plan(dp=1, cp=8), Job(SMALL, 1020, 1), A100)
    with pytest.raises(ValueError, match="ep must divide cp, 4, or be a multiple"):
        odd = Decoder(**{**MOE.__dict__, "experts": 6})
        check_plan(Plan(dp=12, cp=4, ep=6), Job(odd, 8192, 12), Cluster(6, 8))
    with pytest.raises(ValueError, match="pp must leave each stage a layer"):
        check_plan(Plan(pp=8, ends_as_layers=True), Job(replace(SMALL, layers=7), 1024, 1), A100)
    with pytest.raises(ValueError, match="divide the 13 layers and two ends"):
        cut = Plan(4, 1, 2, 1, 16, 0, "interleaved", 2, ends_as_layers=True)
        check_plan(cut, replace(LONG, batch=64), A100)


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("v", [1, 3, 5])
def test_stages_hold_all_layers_of_each_kind(pp, ends, v):
    if (ends and (pp == 1 or 15 < 2 * pp)) or (v > 1 and (pp == 1 or (13 + 2 * ends) % (pp * v))):
        return
    schedule = "interleaved" if v > 1 else "1f1b"
    plan = Plan(1, 1, pp, 1, 4 * pp, 0, schedule, v, ends_as_layers=ends)
    table, places = as_table([plan]), np.arange(pp)
    plain, expert = (np.broadcast_to(n, pp) for n in stage_kinds(table, LONG, places))
    assert plain.sum() == 3 and expert.sum() == 10 and plain.min() >= 0 and expert.min() >= 0
    assert np.array_equal(plain + expert, np.broadcast_to(stage_layers(table, LONG, places), pp))
    # the same, layer by layer
    units = ["end"] * ends + ["plain"] * 3 + ["expert"] * 10 + ["end"] * ends
    each, over = divmod(len(units), pp * v)
    bounds = np.cumsum([0, *(each + (i < over) for i in range(pp * v))])
    for stage in range(pp):
        mine = [u for c in range(v) for u in units[bounds[c * pp + stage] : bounds[c * pp + stage + 1]]]
        assert (mine.count("plain"), mine.count("expert")) == (plain[stage], expert[stage])
    owned = sum(np.broadcast_to(x, pp) for x in stage_holdings(table, LONG, places))
    assert owned.sum() == MOE.parameters


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("convention", ["mixed16", "mixed18"])
def test_state_is_sharded_over_dp_x_cp_and_experts_over_the_rest(zero, convention):
    job = replace(LONG, convention=convention)
    plan = Plan(dp=4, cp=2, ep=8, zero_stage=zero, micro_batches=16)
    memory = stage_memory(as_table([plan]), job, 0)
    routed = MOE.expert_layers * 8 * 3 * 1024 * 512
    rest, ledger = MOE.parameters - routed, training_ledger(10**6, convention=convention)
    for part, name, stage in (
        ("weights", "weight", 3),
        ("gradients", "gradient", 2),
        ("optimizer", "optimizer", 1),
    ):
        width = getattr(ledger, name) / 10**6
        shared = rest / (8 if zero >= stage else 1)
        assert memory[part][0] == pytest.approx(width * (shared + routed / 8))  # one copy of the experts


def test_context_parallelism_divides_what_grows_with_the_sequence():
    one, four = (
        {k: float(np.broadcast_to(x, 1)[0]) for k, x in stage_memory(as_table([plan]), LONG, 1).items()}
        for plan in (Plan(dp=4, pp=2, micro_batches=16), Plan(dp=4, pp=2, cp=4, micro_batches=16))
    )
    assert four["activations"] == pytest.approx(one["activations"] / 4)
    assert four["logits and loss"] == pytest.approx(one["logits and loss"] / 4)
    assert four["weights"] == one["weights"] and one["gathered"] == 0
    # K and V of 4 heads of 128, 8,192 tokens, 2 bytes, and their gradients
    assert four["gathered"] == 2 * 2 * 2 * 8192 * 4 * 128


def test_the_parts_of_the_further_axes_are_their_formulas():
    plan = Plan(dp=8, tp=2, pp=2, cp=2, ep=8, micro_batches=8)
    found = predict(plan, LONG, H100)
    table = as_table([plan])
    kinds = [n[0] for n in stage_kinds(table, LONG, np.array([1]))]
    size = key_value_bytes(MOE, 8192, 1, 2)
    gather = float(collective("all_gather", size, 2, 2, H100, CONSTANTS))
    assert found.parts["context"] == pytest.approx(8 * sum(kinds) * 3 * gather)
    both = float(all_to_all_seconds(MOE, 8192 / 2 / 2, 8, 4, H100, CONSTANTS.link, CONSTANTS.hop))
    assert found.parts["experts"] == pytest.approx(8 * kinds[1] * 4 * both)
    full = predict(replace(plan, recompute="full"), LONG, H100)
    assert full.parts["experts"] == pytest.approx(
        found.parts["experts"]
    )  # what is done again counts elsewhere
    assert found.links["experts"] == "network" and found.links["context"] == "NVLink"
    assert set(found.parts) == {*TIME_PARTS, *FURTHER_PARTS}
    assert not set(FURTHER_PARTS) & set(predict(Plan(dp=64), LONG, H100).parts)


def test_products_of_a_decoder_are_its_operations():
    """With free bytes and links the products' seconds are the model FLOPs over the rate, whatever is split."""
    for causal in (False, True):
        job = replace(LONG, causal=causal)
        exact = replace(EXACT, operands=0.0)
        for changes in ({}, {"cp": 4, "dp": 16}, {"ep": 8}, {"cp": 2, "dp": 16, "tp": 2, "ep": 8}):
            plan = Plan(**{"dp": 64, **changes})
            plan = replace(plan, micro_batches=64 // plan.dp)
            found = predict(plan, job, H100, exact)
            rate = 64 * H100.gpu.matmul_efficiency * H100.gpu.peak_flops
            core = MOE.layers * 4 * 8192**2 * 1024 * (0.5 if causal else 1.0) * 64
            # flash attention reads Q, K, V and writes its result, once forward and twice backward;
            # its backward pass does 2.5 times the forward pass' work, of which 2 count
            moved = 2 * (8192 / plan.cp * 2 * 1024 + 8192 * 2 * 512) / plan.tp
            moved *= 3 * MOE.layers * plan.micro_batches / H100.gpu.memory_bandwidth
            # and the router is computed on every tensor rank
            again = (plan.tp - 1) * MOE.expert_layers * 6 * 8 * 1024 * job.tokens
            flops = model_flops(job) + 0.5 * core + again
            assert found.parts["products"] == pytest.approx(flops / rate + moved, rel=1e-9)
    assert model_flops(replace(LONG, causal=True)) < model_flops(replace(LONG, causal=False))


def test_a_gpt_counts_the_same_as_a_decoder():
    for causal in (False, True):
        gpt = Job(GPT3, 2048, 64, causal=causal)
        same = replace(gpt, model=as_decoder(GPT3))
        assert model_flops(same) == pytest.approx(model_flops(gpt), rel=1e-14)
        for recompute in ("none", "full"):
            assert hardware_flops(same, recompute) == pytest.approx(hardware_flops(gpt, recompute), rel=1e-14)
        plan = Plan(2, 8, 4, 1, 32, 2, "interleaved", 3, "full", True)
        a, b = (predict(plan, job, Cluster(8, 8)) for job in (gpt, same))
        assert b.seconds == pytest.approx(a.seconds, rel=1e-12) and b.peak == pytest.approx(a.peak, rel=1e-12)


@pytest.mark.parametrize(
    "job", [LONG, Job(MODELS["deepseek-v3"], 4096, 1024, causal=True)], ids=["small", "v3"]
)
def test_tables_of_five_axes_equal_single_predictions(job):
    cluster = Cluster(32, 8)
    table = plan_table(job, cluster, cp=(1, 2, 4))
    assert max(table.ep) > 1 and max(table.cp) == 4 and set(table.ends_as_layers) == {0, 1}
    found = costs(table, job, cluster, CONSTANTS)
    rng = np.random.default_rng(1)
    for i in rng.choice(len(table.dp), 80, replace=False):
        one = predict(table.plan(i), job, cluster)
        assert one.seconds == pytest.approx(found.seconds[i], rel=1e-12)
        assert one.peak == pytest.approx(found.peak[i], rel=1e-12)
        assert sum(one.parts.values()) == pytest.approx(one.seconds)
        assert min(one.parts.values()) >= -1e-12


def llama(dp, cp, sequence):
    job = Job(LLAMA, sequence, 2**24 // sequence, "mixed18", causal=True)
    plan = Plan(dp, 8, 16, 1, job.batch // dp, 1, "interleaved", 8, "none", True, cp, ends_as_layers=True)
    found = predict(plan, job, Cluster(plan.gpus // 8, 8, "H100"))
    return found, model_flops(job) / found.seconds / plan.gpus / 1e12


def test_llama_3_405b_the_layouts_against_one_another():
    """Table 4 prints 430, 400 and 380 TFLOP/s. The planner is too fast by a sixth to a fifth, by as much in all three."""
    rows = [llama(64, 1, 8192), llama(128, 1, 8192), llama(8, 16, 131072)]
    ratios = [ours / printed for (_, ours), printed in zip(rows, (430, 400, 380))]
    assert all(1.15 < ratio < 1.22 for ratio in ratios)
    assert max(ratios) / min(ratios) < 1.03
    long = rows[2][0]
    assert long.links["context"] == "network" and long.parts["context"] < 0.15 * long.seconds


def test_deepseek_v3_in_16_bits_with_nothing_hidden_takes_longer_than_printed():
    """180 thousand GPU hours for a trillion tokens were in 8 bits, with the all-to-alls hidden."""
    gpu = replace(H100.gpu, name="H800", link_bandwidth=200e9)
    job = Job(MODELS["deepseek-v3"], 4096, 15360, causal=True)
    found = predict(Plan(128, 1, 16, 1, 120, 1, ep=64), job, Cluster(256, 8, gpu))
    hours = 1e12 / found.tokens_per_second * 2048 / 3600
    assert 250e3 < hours < 350e3
    assert found.parts["experts"] > found.parts["products"] > 0.3 * found.seconds


def test_more_context_ranks_never_make_a_long_sequence_s_layer_slower():
    job = Job(MODELS["llama3-8b"], 131072, 32, causal=True)
    rows = as_table([Plan(dp=32 // c, cp=c) for c in (1, 2, 4, 8, 16, 32)])
    layer = layer_seconds(rows, job, Cluster(4, 8, "H100"), CONSTANTS)
    seconds = layer.forward + layer.backward
    assert np.all(np.diff(seconds) < 0) and np.all(np.diff(seconds * rows.cp) > 0)
