"""Five axes: the groups of a layout, and what its two further axes send, counted in the simulator."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from manyranks import Cluster, simulate
from manyranks.five_axes import (
    Layout,
    all_to_all_seconds,
    dispatched_bytes,
    key_value_bytes,
    neighbours,
)
from manyranks.long_context import gathered_volume
from manyranks.mixture_of_experts import expert_parallel_traffic
from manyranks.models import MODELS, Decoder
from manyranks.runtime import phantom

SMALL = Decoder(2, 64, 4, 100, ffn=96, kv_heads=2, experts=16, top_k=2)
POWERS = [1, 2, 4, 8]


def test_llama_3_405b_as_groups():
    short, long = Layout(dp=128, tp=8, pp=16), Layout(dp=8, tp=8, pp=16, cp=16)
    cluster = Cluster(2048, 8)
    assert short.grid.ranks == long.grid.ranks == 16384
    for layout in (short, long):
        assert layout.group(0, "tensor") == tuple(range(8)) and layout.inside("tensor", cluster) == 8
    assert long.group(0, "context") == tuple(range(0, 128, 8)) and long.inside("context", cluster) == 1
    assert long.group(5, "pipeline") == tuple(range(5, 2048, 128))
    assert short.group(5, "pipeline") == tuple(range(5, 128, 8))
    assert len(long.group(0, "data")) == len(short.group(0, "data")) == 128
    assert long.members("data").shape == (128, 128)
    assert set(long.group(3, "context")) < set(long.group(3, "data"))


def test_deepseek_v3_as_groups():
    layout, cluster = Layout(dp=128, pp=16, ep=64), Cluster(256, 8)
    assert layout.group(70, "expert") == tuple(range(64, 128)) and layout.inside("expert", cluster) == 8
    assert layout.group(0, "pipeline") == tuple(range(0, 1024, 64))
    assert layout.group(0, "expert data") == (0, 1024)
    assert layout.group(0, "data") == (*range(64), *range(1024, 1088))


def layouts():
    return st.builds(
        lambda *sizes: sizes,
        st.sampled_from([*POWERS, 3, 16]),
        st.sampled_from(POWERS),
        st.sampled_from([1, 2, 3]),
        st.sampled_from(POWERS),
        st.sampled_from([*POWERS, 16]),
    )


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_every_rank_is_in_one_group_of_each_kind_and_the_formulas_count_nodes_right(sizes):
    dp, tp, pp, cp, ep = sizes
    assume(dp * cp % ep == 0 and (ep % cp == 0 or cp % ep == 0))
    layout = Layout(*sizes)
    ranks = layout.grid.ranks
    assert ranks == dp * tp * pp * cp
    wanted = {"tensor": tp, "context": cp, "pipeline": pp, "data": dp * cp}
    wanted |= {"expert": ep, "expert data": dp * cp // ep}
    for kind, size in wanted.items():
        groups = layout.members(kind)
        assert groups.shape == (ranks // size, size)
        assert np.array_equal(np.sort(groups.ravel()), np.arange(ranks))
    # a data group is expert groups side by side: together they hold all experts, copied dp x cp / ep times
    data = {frozenset(row) for row in layout.members("data").tolist()}
    for row in layout.members("expert").tolist():
        assert sum(set(row) <= group for group in data) == 1
    if ranks % 8 == 0:
        near, cluster = neighbours(dp, tp, pp, cp, ep, 8), Cluster(ranks // 8, 8)
        if dp != 3 and pp != 3:
            assert layout.inside("expert", cluster) == near.expert
            assert layout.inside("data", cluster) == near.data
            assert layout.inside("expert data", cluster) == near.expert_data
        assert pp == 1 or set(np.diff(layout.members("pipeline"), axis=1).ravel()) == {near.stages}


@pytest.mark.parametrize("wrong", [{"dp": 2, "ep": 4}, {"dp": 12, "cp": 4, "ep": 6}, {"cp": 0}, {"tp": 2.5}])
def test_bad_layouts_are_refused(wrong):
    with pytest.raises((ValueError, TypeError), match=list(wrong)[-1]):
        Layout(**wrong)


def test_unknown_groups_and_ranks_are_refused():
    with pytest.raises(ValueError, match="kind must be one of tensor"):
        Layout(dp=2).members("dp")
    with pytest.raises(ValueError, match="rank"):
        Layout(dp=2).group(2, "data")


@pytest.mark.parametrize("layout", [Layout(2, 2, 1, 4), Layout(4, 2, 1, 2, 8), Layout(2, 1, 2, 4, 2)])
def test_counted_bytes_are_the_formulas(layout):
    """One layer forward and backward on phantoms: every rank sends what the planner says it sends."""
    s, b, tp, cp, ep = 256, 3, layout.tp, layout.cp, layout.ep
    both = key_value_bytes(SMALL, s, b, tp)
    tokens = b * s // (cp * tp)

    def program(comm):
        context = comm.group(layout.group(comm.rank, "context"))
        experts = comm.group(layout.group(comm.rank, "expert"))
        mine, whole = phantom(int(both) // cp, np.uint8), phantom(int(both), np.uint8)
        copies = phantom(2 * tokens * SMALL.top_k * SMALL.hidden // ep, np.uint8)
        for _ in range(2):  # forward, and again backward
            context.all_gather(mine)
        context.reduce_scatter(whole)
        for _ in range(4):  # out and back, forward and backward
            experts.all_to_all([copies] * ep)

    run = simulate(program, ranks=layout.grid.ranks)
    gathered = run.traffic.where(call="all_gather")
    routed = run.traffic.where(call="all_to_all")
    for rank in range(layout.grid.ranks):

        def sent(traffic, rank=rank):
            return sum(m.bytes for m in traffic if m.source == rank)

        assert sent(gathered) == 2 * both * (cp - 1) / cp
        assert sent(routed) == 4 * dispatched_bytes(SMALL, tokens, ep)
        assert run.bytes_sent[rank] == 3 * both * (cp - 1) / cp + 4 * dispatched_bytes(SMALL, tokens, ep)


@pytest.mark.parametrize("ep, nodes", [(8, 1), (16, 2), (32, 4)])
def test_the_seconds_of_an_all_to_all_are_the_simulator_s(ep, nodes):
    model, tokens = MODELS["mixtral-8x7b"], 4096
    cluster = Cluster(nodes, 8, "H100")

    def program(comm):
        comm.all_to_all([phantom(2 * tokens * model.top_k * model.hidden // ep, np.uint8)] * ep)

    predicted = float(all_to_all_seconds(model, tokens, ep, 8, cluster))
    simulated = simulate(program, cluster=cluster).seconds
    assert simulated <= predicted * (1 + 1e-9) and predicted < 1.09 * simulated
    if nodes == 1:
        assert predicted == pytest.approx(simulated)


def test_a_node_limit_saves_the_network():
    v3, cluster = MODELS["deepseek-v3"], Cluster(8, 8)
    free = Decoder(**{**v3.__dict__, "node_limit": 0})
    limited, unlimited = (float(all_to_all_seconds(m, 4096, 64, 8, cluster)) for m in (v3, free))
    # 4 of 8 nodes, 7/8 of them not the own: 3.5 copies cross in place of 8 · 63/64
    assert limited < 0.7 * unlimited
    assert float(all_to_all_seconds(v3, 4096, 8, 8, cluster)) == float(
        all_to_all_seconds(free, 4096, 8, 8, cluster)
    )
    assert float(all_to_all_seconds(v3, 4096, 1, 1, cluster)) == 0


def test_grouped_queries_make_the_gathers_small():
    llama = MODELS["llama3-405b"]
    assert key_value_bytes(llama, 131072, 1, 8) == 2 * 131072 * 2 * 8 * 128 / 8


def test_the_formulas_are_those_of_the_two_chapters():
    llama, v3 = MODELS["llama3-405b"], MODELS["deepseek-v3"]
    once = gathered_volume(131072, 8, 128, 16)
    assert key_value_bytes(llama, 131072, 1, 1) * 15 / 16 == 2 * once
    both = once + gathered_volume(131072, 8, 128, 16, backward=True, again=True)
    assert both == 3 * once  # gathered twice, and scattered
    traffic = expert_parallel_traffic(4096, v3.top_k, v3.hidden, 2, ranks=64, experts=256)
    assert dispatched_bytes(v3, 4096, 64) == traffic.dispatch == traffic.combine == traffic.backward / 2
