"""A grid of ranks: its groups, training on it, and its step timed on phantoms."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks import Cluster, launch, simulate
from manyranks.collectives import ring_all_reduce_seconds
from manyranks.data_parallel import batch_order
from manyranks.grid import (
    ORDER,
    ChunkCost,
    Grid,
    assemble,
    check_product,
    gpt_loss_and_gradient,
    gpt_shapes,
    largest_difference,
    make_grid,
    simulate_step,
    stage_parts,
    step_shape,
    timed_3d,
    traffic_by_axis,
    train_3d,
    train_serial,
)
from manyranks.memory import Transformer
from manyranks.pipeline import gpipe, interleaved
from manyranks.tensor_parallel import initial

AXES = ("dp", "cp", "pp", "tp")
grids = st.permutations(AXES).flatmap(
    lambda order: st.tuples(*[st.integers(1, 4)] * 4).map(lambda shape: Grid(tuple(order), shape))
)

# ------------------------------------------------------------------ layout


def test_a_grid_by_hand():
    grid = Grid(("dp", "pp", "tp"), (2, 4, 8))
    assert grid.ranks == 64
    assert grid.coordinates(51) == {"dp": 1, "pp": 2, "tp": 3}  # 51 = (1 * 4 + 2) * 8 + 3
    assert grid.group(51, "tp") == tuple(range(48, 56))
    assert grid.group(51, "pp") == (35, 43, 51, 59)
    assert grid.group(51, "dp") == (19, 51)
    assert grid.group(51, "dp", "pp") == (3, 11, 19, 27, 35, 43, 51, 59)
    assert grid.group(51, "pp", "dp") == grid.group(51, "dp", "pp")  # the layout's order, not the caller's
    assert repr(grid) == "Grid(dp 2 x pp 4 x tp 8 = 64 ranks)"


@given(grids)
@settings(max_examples=60, deadline=None)
def test_ranks_and_coordinates_are_inverse_and_like_an_arrays(grid):
    array = np.arange(grid.ranks).reshape(grid.shape)
    for rank in range(grid.ranks):
        at = grid.coordinates(rank)
        assert grid.rank(**at) == rank == array[tuple(at.values())]


@given(grids, st.sets(st.sampled_from(AXES), min_size=1))
@settings(max_examples=60, deadline=None)
def test_groups_partition_the_ranks(grid, axes):
    groups = grid.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.ranks))
    for group in groups:
        assert len(group) == np.prod([grid.size(axis) for axis in axes])
        for rank in group:
            assert grid.group(rank, *axes) == group
            at, first = grid.coordinates(rank), grid.coordinates(group[0])
            assert all(at[axis] == first[axis] for axis in grid.order if axis not in axes)


def test_nodes_of_each_axis_in_each_layout():
    cluster = Cluster(nodes=8, gpus_per_node=8)
    spread = {
        order: tuple(make_grid(64, order=order, tp=8, pp=4).nodes(axis, cluster) for axis in ORDER)
        for order in itertools.permutations(ORDER)
    }
    assert spread == {
        ("dp", "pp", "tp"): (2, 4, 1),
        ("pp", "dp", "tp"): (2, 4, 1),
        ("dp", "tp", "pp"): (2, 1, 4),
        ("pp", "tp", "dp"): (1, 4, 2),
        ("tp", "dp", "pp"): (1, 1, 8),
        ("tp", "pp", "dp"): (1, 1, 8),
    }


def test_sub_communicators_are_the_groups():
    grid = Grid(("pp", "dp", "tp"), (3, 2, 2))

    def program(comm):
        return {axis: c.ranks for axis, c in grid.comms(comm).items()}

    for rank, found in enumerate(simulate(program, ranks=12).results):
        assert found == {axis: grid.group(rank, axis) for axis in grid.order}


def test_the_product_rule():
    assert make_grid(64, tp=8, pp=4).shape == (2, 4, 8)
    assert make_grid(64, tp=8, dp=4).shape == (4, 2, 8)
    assert make_grid(64, order=("tp", "pp", "dp"), tp=8).shape == (8, 1, 8)  # the data axis gets the rest
    assert make_grid(dp=2, tp=2).shape == (2, 1, 2)
    assert make_grid(12, order=("tp", "cp", "dp"), tp=2, cp=3).shape == (2, 3, 2)
    check_product(6, dp=2, tp=3)
    with pytest.raises(ValueError, match="tp x pp must divide the 64 ranks, got 8 x 3 = 24"):
        make_grid(64, tp=8, pp=3)
    with pytest.raises(ValueError, match="must divide the 64 ranks"):
        make_grid(64, tp=128)
    with pytest.raises(ValueError, match="must be the 64 ranks, got 2 x 8 x 8 = 128"):
        make_grid(64, dp=2, pp=8, tp=8)
    with pytest.raises(Exception, match="must be the 7 ranks"):
        simulate(lambda comm: make_grid(dp=2, pp=2, tp=2).comms(comm), ranks=7)


def test_bad_input_names_the_argument():
    grid = make_grid(dp=2, pp=2, tp=2)
    for size in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="tp must be a whole number"):
            make_grid(tp=size)
    with pytest.raises(ValueError, match="order must be different names"):
        Grid(("dp", "dp"), (2, 2))
    with pytest.raises(ValueError, match="shape must have 2 sizes"):
        Grid(("dp", "tp"), (2, 2, 2))
    with pytest.raises(ValueError, match="order must list every axis.*ep"):
        make_grid(8, ep=2)
    for ranks in (0, -8, "8", 8.0, True):
        with pytest.raises(ValueError, match="ranks must be a whole number"):
            make_grid(ranks, tp=2)
    for rank in (1.5, True, "1", 8):
        with pytest.raises(ValueError, match="rank must be from 0 to 7"):
            make_grid(8, tp=2).coordinates(rank)
    with pytest.raises(ValueError, match="rank must be from 0 to 7"):
        grid.coordinates(8)
    with pytest.raises(ValueError, match="pp must be from 0 to 1"):
        grid.rank(pp=2)
    with pytest.raises(ValueError, match="coordinates must be of"):
        grid.rank(cp=0)
    with pytest.raises(ValueError, match="axes must be of"):
        grid.group(0, "cp")
    with pytest.raises(ValueError, match="zero_stage"):
        train_3d(None, grid, {}, (), [], zero_stage=3)


# ------------------------------------------------------------------ training

WORDS = 24
START = initial(gpt_shapes(4, 16, 4, WORDS), np.random.default_rng(0), std=0.2)
TOKENS = np.random.default_rng(1).integers(0, WORDS, (40, 7))
RECIPE = dict(params=START, data=(TOKENS[:, :-1], TOKENS[:, 1:]), order=batch_order(40, 7, 3), lr=1e-2)


@pytest.fixture(scope="module")
def serial():
    return train_serial(**RECIPE)


def check_equal(results, grid, serial):
    def numpy(tree):
        return {name: np.asarray(x) for name, x in tree.items()}

    for r in results:
        assert np.allclose(r.losses, serial.losses, rtol=0, atol=1e-12)
    for dp in range(grid.size("dp")):
        grads = assemble([numpy(r.grads) for r in results], grid, dp)
        assert largest_difference(grads, serial.grads) < 1e-12
        params = assemble([numpy(r.params) for r in results], grid, dp)
        for name, p in params.items():
            # key biases have no gradient but rounding, which Adam blows up
            assert abs(p - serial.params[name]).max() < (1e-9 if name.endswith(".bk") else 1e-12), name


CASES = [
    ((2, 2, 2), {}),
    ((2, 2, 2), {"zero_stage": 0}),
    ((2, 2, 2), {"zero_stage": 2, "schedule": gpipe}),
    ((2, 2, 2), {"schedule": interleaved, "chunks": 2}),
    ((2, 2, 2), {"sequence_parallel": True}),
    ((1, 2, 2), {}),
    ((3, 1, 2), {"micro_batches": 1}),  # 7 rows over 3 replicas: uneven
    ((2, 4, 1), {"micro_batches": 3}),
    ((1, 1, 4), {"sequence_parallel": True, "zero_stage": 0}),
    ((1, 2, 3), {}),  # 4 heads, 24 words over 3 ranks
    ((1, 1, 1), {}),
]


@pytest.mark.parametrize("shape, options", CASES, ids=str)
def test_training_on_a_grid_equals_serial_training(shape, options, serial):
    grid = Grid(ORDER, shape)
    options = {"micro_batches": 2, **options}
    run = simulate(train_3d, ranks=grid.ranks, grid=grid, **RECIPE, **options)
    check_equal(run.results, grid, serial)


@pytest.mark.parametrize("order", list(itertools.permutations(ORDER))[1:], ids="-".join)
def test_any_layout_is_the_same_training(order, serial):
    grid = make_grid(order=order, dp=1, pp=2, tp=2)
    run = simulate(train_3d, ranks=4, grid=grid, micro_batches=2, **RECIPE)
    check_equal(run.results, grid, serial)


def test_a_grid_without_some_axes(serial):
    grid = Grid(("tp",), (2,))
    run = simulate(train_3d, ranks=2, grid=grid, **RECIPE)
    check_equal(run.results, grid, serial)


def test_real_processes(serial):
    grid = make_grid(dp=2, pp=2)
    run = launch(train_3d, ranks=4, grid=grid, micro_batches=2, timeout=120.0, **RECIPE)
    check_equal(run.results, grid, serial)


def test_zero_keeps_adams_state_in_parts():
    """With two replicas ZeRO-1 sends reduce-scatters and gathers, no all-reduce of gradients."""
    grid = make_grid(dp=2)
    calls = {}
    for stage in (0, 1):
        run = simulate(train_3d, ranks=2, grid=grid, zero_stage=stage, **RECIPE)
        calls[stage] = {m.call for m in run.traffic if m.bytes > 100}
    assert calls == {0: {"all_reduce"}, 1: {"reduce_scatter", "all_gather"}}


def test_the_dense_model_is_pytorchs():
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    p = {name: torch.tensor(x, requires_grad=True) for name, x in START.items()}
    ids, targets = (torch.tensor(t[:3]) for t in RECIPE["data"])
    x = p["embed.table"][ids]
    b, s, h = x.shape

    def norm(x, name):
        return F.layer_norm(x, (h,), p[f"{name}.scale"], p[f"{name}.shift"])

    for i in range(4):

        def w(name, i=i):
            return p[f"blocks.{i}.{name}"]

        y = norm(x, f"blocks.{i}.norm1")
        q, k, v = (
            torch.einsum("bsh,had->basd", y, w(f"attention.w{z}")) + w(f"attention.b{z}")[None, :, None]
            for z in "qkv"
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.einsum("basd,adh->bsh", y, w("attention.wo")) + w("attention.bo")
        y = norm(x, f"blocks.{i}.norm2") @ w("mlp.w1") + w("mlp.b1")
        x = x + F.gelu(y, approximate="tanh") @ w("mlp.w2") + w("mlp.b2")
    logits = norm(x, "norm") @ p["head.unembed"]
    loss = F.cross_entropy(logits.reshape(-1, WORDS), targets.reshape(-1))
    loss.backward()
    ours, grads = gpt_loss_and_gradient(START, ids.numpy(), targets.numpy())
    assert abs(float(ours) - loss.item()) < 1e-12
    assert largest_difference(grads, {name: x.grad.numpy() for name, x in p.items()}) < 1e-12


def test_stages_hold_every_part_once():
    parts = stage_parts(8, stages=2, chunks=2)
    assert parts[1] == [["blocks.2", "blocks.3"], ["blocks.6", "blocks.7", "head"]]
    flat = sorted(name for stage in parts for chunk in stage for name in chunk)
    assert flat == sorted(["embed", "head", *(f"blocks.{i}" for i in range(8))])
    with pytest.raises(ValueError, match="layers must divide into stages x chunks = 3"):
        stage_parts(8, stages=3)


# ------------------------------------------------------------------ timed on phantoms

MODEL = Transformer(8, 1024, 16, vocabulary=2048)


def test_the_parts_of_a_step_by_hand():
    grid, cluster = make_grid(dp=2, pp=2, tp=2), Cluster(2, 4, "A100")
    shape = step_shape(MODEL, grid, sequence=256, flops=100e12)
    layer = (24 * 1024 + 4 * 256) * 1024 * 256 / 2 / 100e12
    logits = 2 * 1024 * 2048 * 256 / 2 / 100e12
    first, last = (stage[0] for stage in shape.costs)
    size = 2 * 256 * 1024
    assert first == ChunkCost(4 * layer, 8 * layer, 8, 8, size)
    assert last.forward == pytest.approx(4 * layer + logits)
    assert shape.activation_bytes == size
    assert shape.gradient_bytes == [2 * (4 * MODEL.layer_parameters + 1024 * 2048) // 2] * 2

    run = simulate_step(MODEL, grid, cluster, 1, sequence=256, flops=100e12)
    link, network = cluster.tiers
    call = ring_all_reduce_seconds(size, 2, link.latency, link.bandwidth)
    both = 12 * layer * 2 + 3 * logits + 32 * call + 2 * link.seconds(size)
    data = ring_all_reduce_seconds(shape.gradient_bytes[0], 2, network.latency, network.bandwidth)
    assert run.seconds == pytest.approx(both + data, rel=1e-9)  # one micro-batch: nothing overlaps


def test_traffic_by_axis_is_what_the_formulas_say():
    grid, cluster = make_grid(dp=2, pp=2, tp=4), Cluster(2, 8, "A100")
    shape = step_shape(MODEL, grid, sequence=256)
    for zero_stage in (0, 1):
        run = simulate_step(MODEL, grid, cluster, 4, sequence=256, zero_stage=zero_stage)
        found = traffic_by_axis(run, grid)
        size = shape.activation_bytes
        # 2 + 2 calls a layer, 8 layers, 4 micro-batches; 2 replicas of groups of 4
        assert found["tp"] == (4 * 8 * 4 * 2 * 2 * size * 3, 0)
        assert found["pp"] == (2 * 4 * 8 * size, 0)
        assert found["dp"] == (0, 8 * 2 * shape.gradient_bytes[0])
        assert "several" not in found
    assert sum(map(sum, found.values())) == run.traffic.bytes


def test_a_layout_moves_bytes_to_other_wires_and_changes_none():
    cluster, totals = Cluster(2, 8, "A100"), set()
    for order in itertools.permutations(ORDER):
        grid = make_grid(16, order=order, dp=2, pp=2, tp=4)
        run = simulate_step(MODEL, grid, cluster, 2, sequence=256, zero_stage=1)
        found = traffic_by_axis(run, grid)
        totals.add(tuple(sorted((axis, sum(carried)) for axis, carried in found.items())))
        for axis in ORDER:
            assert (found[axis].network == 0) == (grid.nodes(axis, cluster) == 1)
    assert len(totals) == 1


def test_tensor_parallelism_across_nodes_is_slow():
    cluster, wide = Cluster(8, 8, "H100"), Transformer(2, 5120, 40, vocabulary=1024)
    good, bad = (
        simulate_step(wide, make_grid(64, order=order, tp=8), cluster, 4, algorithm="closed_form").seconds
        for order in (ORDER, ("tp", "pp", "dp"))
    )
    assert bad > 1.8 * good


def test_messages_between_ranks_apart_on_two_axes_are_told():
    grid = make_grid(dp=2, pp=2)

    def program(comm):
        if comm.rank == 0:
            comm.send(np.zeros(2), 3)
        elif comm.rank == 3:
            comm.recv(0)

    assert traffic_by_axis(simulate(program, ranks=4), grid)["several"] == (16, 0)


@pytest.mark.parametrize("tp, close", [(2, 1e-3), (8, 1e-9)])  # with tp 2 stages share a node, and its ports
def test_folding_tensor_ranks_changes_nothing(tp, close):
    grid, cluster = make_grid(16, tp=tp, pp=2), Cluster(2, 8, "H100")
    how = dict(sequence=256, zero_stage=1)
    whole = simulate_step(MODEL, grid, cluster, 4, **how)
    folded = simulate_step(MODEL, grid, cluster, 4, fold=True, **how)
    assert folded.seconds == pytest.approx(whole.seconds, rel=close)
    assert folded.ranks == 16 // tp
    assert any(note.startswith("folded") for note in folded.notes)


def test_the_closed_form_is_the_rings_time():
    grid, cluster = make_grid(16, tp=4, pp=2), Cluster(4, 4, "H100")
    ring = simulate_step(MODEL, grid, cluster, 2, sequence=256)
    formula = simulate_step(MODEL, grid, cluster, 2, sequence=256, algorithm="closed_form")
    assert formula.seconds == pytest.approx(ring.seconds, rel=1e-6)
    assert traffic_by_axis(formula, grid) == traffic_by_axis(ring, grid)


def test_folding_and_step_shape_refuse_what_they_cannot():
    cluster = Cluster(2, 8, "H100")
    for grid in (make_grid(16, order=("tp", "pp", "dp"), tp=4), make_grid(16, tp=16)):
        with pytest.raises(ValueError, match="fold takes tp as the last axis"):
            simulate_step(MODEL, grid, cluster, 2, fold=True)
    with pytest.raises(ValueError, match="pp must divide the 8 layers, got 3"):
        step_shape(MODEL, make_grid(pp=3), 256)
    with pytest.raises(ValueError, match="tp must divide the 16 heads, got 3"):
        step_shape(MODEL, make_grid(tp=3), 256)


def test_zero_one_and_plain_data_parallelism_send_the_same():
    grid, cluster = make_grid(dp=4), Cluster(1, 4, "H100")
    cost = [[ChunkCost(1e-3, 2e-3)]]
    seconds = [
        simulate(
            timed_3d,
            cluster=cluster,
            grid=grid,
            costs=cost,
            micro_batches=2,
            activation_bytes=0,
            gradient_bytes=[8_000_000],
            zero_stage=stage,
            optimizer=1e-3,
        ).seconds
        for stage in (0, 1)
    ]
    assert seconds[0] == pytest.approx(seconds[1])
    link = cluster.intra
    assert seconds[0] == pytest.approx(7e-3 + ring_all_reduce_seconds(8e6, 4, link.latency, link.bandwidth))


def test_a_step_from_flops_alone_is_a_gpt_s():
    from manyranks.models import MODELS

    with pytest.raises(TypeError, match="model must be a Transformer, no other kind"):
        step_shape(MODELS["llama3-8b"], make_grid(8, tp=8), 2048)
