"""A plan's step in the simulator, beside the planner's closed form."""

import pytest

from manyranks import Cluster, simulate
from manyranks.collectives import ring_all_reduce_seconds
from manyranks.iteration import (
    StageEnd,
    collective_seconds,
    iteration,
    reached,
    run_stage,
    simulate_plan,
    step_of,
)
from manyranks.memory import Transformer
from manyranks.models import MODELS
from manyranks.pipeline import (
    SCHEDULES,
    Times,
    check_schedule,
    gpipe,
    ideal_network,
    interleaved,
    one_f_one_b,
    timed_pipeline,
)
from manyranks.planner import CONSTANTS, Job, Plan, predict, weak_scaling_run
from manyranks.published import WEAK_SCALING
from manyranks.runtime import phantom

MODEL = Transformer(32, 4096, 32, 51200)
EIGHT = Cluster(8, 8, "H100")

PLANS = [
    (Plan(dp=8, tp=8, micro_batches=8), EIGHT),
    (Plan(dp=64, micro_batches=2, zero_stage=2), EIGHT),
    (Plan(dp=64, micro_batch=4, micro_batches=2, zero_stage=3), EIGHT),
    (Plan(dp=2, tp=8, pp=4, micro_batches=32, zero_stage=1, sequence_parallel=True), EIGHT),
    (Plan(dp=2, tp=4, pp=8, micro_batches=32), EIGHT),
    (Plan(dp=4, tp=4, pp=4, micro_batches=16, schedule="gpipe"), EIGHT),
    (Plan(dp=2, tp=8, pp=4, micro_batches=32, schedule="interleaved", virtual_stages=4), EIGHT),
    (Plan(dp=1, tp=8, pp=8, micro_batches=16, recompute="full"), Cluster(8, 8, "A100")),
    (Plan(dp=8, tp=1, pp=8, micro_batches=16, zero_stage=1), Cluster(8, 8, "A100")),
    (Plan(dp=16, tp=2, pp=2, micro_batch=2, micro_batches=4), EIGHT),
]


@pytest.mark.parametrize("plan, cluster", PLANS, ids=lambda x: str(x) if isinstance(x, Plan) else "")
def test_planner_and_simulation_agree(plan, cluster):
    found = simulate_plan(plan, Job(MODEL, 2048, plan.batch), cluster)
    assert abs(found.difference) < 0.05
    assert found.predicted == predict(plan, Job(MODEL, 2048, plan.batch), cluster).seconds
    assert found.difference == pytest.approx(found.predicted / found.seconds - 1)
    assert found.run.ranks == plan.pp
    assert found.folded in " ".join(found.run.notes)


FIVE = [
    (
        Plan(8, 8, 16, 1, 16, 1, "interleaved", 8, "none", True, 16, ends_as_layers=True),
        Job(MODELS["llama3-405b"], 131072, 128, "mixed18", causal=True),
        2048,
    ),
    (Plan(128, 1, 16, 1, 120, 1, ep=64), Job(MODELS["deepseek-v3"], 4096, 15360, causal=True), 256),
    (Plan(8, 2, 2, 1, 8, 3, cp=2, ep=8), Job(MODELS["mixtral-8x7b"], 8192, 64, causal=True), 8),
    (Plan(4, 2, 4, 1, 8, 2, cp=2, ep=2), Job(MODELS["mixtral-8x7b"], 8192, 32, causal=True), 8),
]


@pytest.mark.parametrize("plan, job, nodes", FIVE, ids=["llama", "v3", "mixtral-8", "mixtral-2"])
def test_five_axes_agree_too(plan, job, nodes):
    found = simulate_plan(plan, job, Cluster(nodes, 8))
    assert abs(found.difference) < 0.03 and found.run.ranks == plan.pp
    assert (f"of {plan.cp} context" in found.folded) == (plan.cp > 1)
    # one message a micro-batch, each tensor rank its part of each context rank's part
    size = 2 * job.sequence * job.model.hidden // plan.cp // plan.tp
    assert {m.bytes for m in found.run.traffic if m.call == "send"} == {size}
    assert not [m for m in found.run.traffic if m.call == "all_reduce"]  # nothing is tied


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_stage_without_messages_is_chapter_fives(name):
    network = ideal_network(4)
    wanted = simulate(
        timed_pipeline,
        cluster=network,
        schedule=SCHEDULES[name],
        micro_batches=6,
        times=Times(1.0, 1.0, 1.0),
    )

    def program(comm, wait):
        run_stage(comm, SCHEDULES[name](comm.rank, 4, 6), [(1.0, 2.0)], phantom(0), wait)

    for wait in (True, False):
        assert simulate(program, cluster=network, wait=wait).seconds == pytest.approx(wanted.seconds)


def test_an_interleaved_stage_runs_at_the_checked_makespan():
    network = ideal_network(4)
    steps = [list(interleaved(stage, 4, 8, chunks=2)) for stage in range(4)]
    wanted = check_schedule(steps, Times(1.0, 1.0, 1.0)).makespan

    def program(comm):
        run_stage(comm, steps[comm.rank], [(0.5, 1.0)] * 2, phantom(0), early=True)

    assert simulate(program, cluster=network).seconds == pytest.approx(wanted)


def test_waiting_for_a_send_costs_its_time_on_inner_stages():
    """1F1B in the steady state: a stage pays F + B and two sends if it waits, and less if not."""
    network = ideal_network(4, bandwidth=1e9)
    size, m = 100_000_000, 40  # a tenth of a second

    def program(comm, micro_batches, wait):
        run_stage(comm, one_f_one_b(comm.rank, 4, micro_batches), [(1.0, 2.0)], phantom(size, "uint8"), wait)

    def pace(wait):
        long, short = (
            simulate(program, cluster=network, micro_batches=n, wait=wait).seconds for n in (2 * m, m)
        )
        return (long - short) / m

    assert pace(True) == pytest.approx(3.2, rel=1e-6)
    assert 3.0 <= pace(False) < 3.2


def test_the_end_of_a_step():
    ends = [StageEnd(0.25, 0.5, 1_000_000)] * 2
    run = simulate(
        iteration,
        cluster=Cluster.flat(2, latency=0.0, bandwidth=1e6),
        micro_batches=1,
        schedule=gpipe,
        times=[[(1.0, 2.0)]] * 2,
        ends=ends,
        message_bytes=0,
        wait=False,
        early=False,
    )
    # both stages forth and back, the embedding's all-reduce of 1 MB, data, optimizer
    assert run.seconds == pytest.approx(6.0 + 1.0 + 0.75)


def test_collectives_by_hand():
    ideal = CONSTANTS.__class__(1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0)
    cluster = Cluster(4, 8, "A100", intra_latency=0.0, inter_latency=0.0)
    node = collective_seconds("all_reduce", 8e9, 8, 1, cluster, ideal)
    assert node == pytest.approx(ring_all_reduce_seconds(8e9, 8, 0, 300e9))
    across = collective_seconds("all_gather", 8e9, 4, 8, cluster, ideal)
    assert across == pytest.approx(8e9 * 3 / 4 / 25e9)
    # 16 ranks, 4 in each of 4 nodes: four rings, each with its own port of 25 GB/s
    several = collective_seconds("reduce_scatter", 16e9, 16, 2, cluster, ideal)
    assert several == pytest.approx(16e9 / 4 * 15 / 16 / 25e9, rel=0.02)
    assert collective_seconds("all_reduce", 8e9, 1, 1, cluster, ideal) == 0.0


def test_rings_of_a_node_share_its_nvlink():
    """16 ranks on 2 nodes, eight rings; each GPU passes seven of them on over NVLink, here the narrower wire."""
    ideal = CONSTANTS.__class__(1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0)
    slow = Cluster(2, 8, "A100", intra_bandwidth=50e9, intra_latency=0.0, inter_latency=0.0)
    found = collective_seconds("all_gather", 16e9, 16, 1, slow, ideal)
    assert found == pytest.approx(15 * 16e9 / 16 / 8 / (50e9 / 7), rel=1e-6)


def test_an_interleaved_schedule_that_waits_for_its_sends():
    job = Job(MODEL, 2048, 8, overlap=())
    plan = Plan(tp=2, pp=4, micro_batches=8, schedule="interleaved", virtual_stages=2)
    found = simulate_plan(plan, job, Cluster(4, 2, "A100"))
    hidden = simulate_plan(plan, Job(MODEL, 2048, 8, overlap=("pipeline",)), Cluster(4, 2, "A100"))
    assert hidden.seconds < found.seconds and abs(found.difference) < 0.05


def test_replicas_fold():
    """All replicas run, each its own pipeline: the same step."""
    plan = Plan(dp=3, tp=8, pp=4, micro_batches=8)
    job, cluster = Job(MODEL, 2048, plan.batch), Cluster(12, 8, "H100")
    step = step_of(plan, job, cluster)

    def program(comm, **arguments):
        first = comm.rank // 4 * 4
        iteration(comm.group(range(first, first + 4)), **arguments)

    wide = reached(cluster, CONSTANTS, 12, 1)
    assert simulate(program, ranks=12, cluster=wide, **step.arguments).seconds == pytest.approx(
        simulate_plan(plan, job, cluster).seconds, rel=1e-12
    )


def test_stages_of_one_node_use_its_links():
    plan = Plan(tp=2, pp=8, micro_batches=4)
    run = simulate_plan(plan, Job(MODEL, 2048, 4), Cluster(2, 8, "H100")).run
    hops = {(m.source, m.destination): m.tier for m in run.traffic if m.call == "send"}
    assert {pair for pair, tier in hops.items() if tier == 1} == {(3, 4), (4, 3)}
    assert {m.bytes for m in run.traffic if m.call == "send"} == {2 * 2048 * 4096 // 2}


def test_a_trillion_parameters():
    """3,072 GPUs, 64 stages, 512 micro-batches: it runs, and the bubble is there."""
    paper = weak_scaling_run(WEAK_SCALING[-1])
    found = simulate_plan(paper.plan, paper.job, paper.cluster)
    assert paper.plan.gpus == 3072 and found.run.ranks == 64
    assert found.folded == "1 of 8 tensor and of 6 data ranks"
    assert found.run.traffic.where(call="send").count == 2 * 63 * 512
    assert abs(found.difference) < 0.05
    assert abs(found.seconds / paper.seconds - 1) < 0.15


def test_a_plan_that_does_not_multiply_out_is_refused():
    with pytest.raises(ValueError, match="dp x tp x pp"):
        simulate_plan(Plan(dp=2), Job(MODEL, 2048, 2), EIGHT)
