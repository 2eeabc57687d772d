"""Mixture of experts: routing, capacity, balancing, and expert parallelism against the dense layer."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks import Cluster, launch, simulate
from manyranks.grid import Grid
from manyranks.mixture_of_experts import (
    EXPERT_ARRAYS,
    Exchange,
    capacity,
    combine,
    dispatch,
    exchange_counts,
    expected_nodes,
    expert_load,
    expert_parallel_backward,
    expert_parallel_forward,
    expert_parallel_traffic,
    imbalance,
    load_balancing_loss,
    moe_backward,
    moe_forward,
    moe_shapes,
    node_limited_choice,
    positions,
    reduce_moe_gradients,
    route,
    route_backward,
    shard_experts,
    steered_tokens,
    time_experts,
    top_k,
    two_hop_forward,
    update_bias,
)
from manyranks.runtime.errors import RankError
from manyranks.tensor_parallel import mlp_forward

GATES = ("softmax", "sigmoid")


def layer(hidden, ffn, experts, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=s) / np.sqrt(s[-2]) for n, s in moe_shapes(hidden, ffn, experts).items()}


def both_ways(comm, pair, params, k, reduce=True, **how):
    x, dy = pair
    part = shard_experts(params, comm.rank, comm.size)
    y, saved = expert_parallel_forward(comm, part, x, k, **how)
    dx, grads = expert_parallel_backward(comm, part, saved, dy)
    if reduce:
        grads["router"] = comm.all_reduce(grads["router"])
    kept = saved["kept"]
    return y, dx, grads, saved["routing"].chosen if kept is None else kept


def data(sizes, hidden, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, hidden)), rng.normal(size=(n, hidden))) for n in sizes]


def stacked(pairs):
    return tuple(np.concatenate(part) for part in zip(*pairs))


def assert_equals_dense(results, pairs, params, k, factor=None, atol=1e-12, **how):
    """Outputs, input gradients, every array's gradient, and what was dropped."""
    x, dy = stacked(pairs)
    y, saved = moe_forward(params, x, k, factor, **how)
    dx, grads = moe_backward(params, saved, dy)
    close = {"rtol": 1e-10, "atol": atol}
    np.testing.assert_allclose(np.concatenate([r[0] for r in results]), y, **close)
    np.testing.assert_allclose(np.concatenate([r[1] for r in results]), dx, **close)
    for name in EXPERT_ARRAYS:
        np.testing.assert_allclose(np.concatenate([r[2][name] for r in results]), grads[name], **close)
    for r in results:
        np.testing.assert_allclose(r[2]["router"], grads["router"], **close)
    last = saved["routing"].chosen if factor is None else saved["kept"]
    np.testing.assert_array_equal(np.concatenate([r[3] for r in results]), last)


def slope(function, array, step=1e-6):
    """The numeric gradient of a scalar function, at every place of an array."""
    out = np.zeros(array.shape)
    for place in np.ndindex(array.shape):
        value, around = array[place], []
        for nudged in (value + step, value - step):
            array[place] = nudged
            around.append(float(function()))
        array[place] = value
        out[place] = (around[0] - around[1]) / (2 * step)
    return out


# ------------------------------------------------------------------ the router


@given(st.integers(0, 9), st.integers(1, 7), st.data())
@settings(max_examples=60, deadline=None)
def test_top_k_is_the_largest_and_ties_go_to_the_smaller_number(n, experts, draw):
    k = draw.draw(st.integers(1, experts))
    scores = np.array(
        draw.draw(st.lists(st.integers(0, 3), min_size=n * experts, max_size=n * experts)), float
    )
    scores = scores.reshape(n, experts)
    chosen = top_k(scores, k)
    assert chosen.shape == (n, k)
    for row, got in zip(scores, chosen):
        assert got.tolist() == sorted(range(experts), key=lambda e: (-row[e], e))[:k]


@pytest.mark.parametrize("gate", GATES)
def test_weights_are_the_chosen_scores(gate):
    logits = np.random.default_rng(0).normal(size=(11, 5))
    plain = route(logits, 3, gate, renormalise=False)
    np.testing.assert_allclose(plain.weights, np.take_along_axis(plain.scores, plain.chosen, 1))
    assert (np.diff(plain.weights, axis=1) <= 0).all(), "best first"
    np.testing.assert_allclose(route(logits, 3, gate).weights.sum(1), 1)
    if gate == "softmax":
        np.testing.assert_allclose(plain.scores.sum(1), 1)


@pytest.mark.parametrize("gate, want", [("softmax", [1, 0, 0]), ("sigmoid", [1, 0.5, 0])])
@pytest.mark.filterwarnings("error")
def test_gates_survive_large_logits(gate, want):
    scores = route(np.array([[1e4, 0.0, -1e4]], np.float32), 1, gate).scores
    np.testing.assert_allclose(scores, [want])
    assert scores.dtype == np.float32


def test_a_bias_steers_the_choice_and_leaves_the_weights():
    logits = np.array([[2.0, 1.0, 0.0]])
    r = route(logits, 1, bias=np.array([0.0, 0.0, 5.0]), renormalise=False)
    assert r.chosen.tolist() == [[2]]
    np.testing.assert_allclose(r.weights, route(logits, 1).scores[:, 2:])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_router_gradient_is_the_numeric_one(gate, renormalise, k):
    rng = np.random.default_rng(k)
    logits, dweights, dscores = rng.normal(size=(4, 5)), rng.normal(size=(4, k)), rng.normal(size=(4, 5))

    def loss():
        r = route(logits, k, gate, renormalise=renormalise)
        return (r.weights * dweights).sum() + (r.scores * dscores).sum()

    r = route(logits, k, gate, renormalise=renormalise)
    np.testing.assert_allclose(route_backward(r, dweights, dscores), slope(loss, logits), atol=1e-8)
    if k == 1 and renormalise:
        assert np.abs(route_backward(r, dweights)).max() < 1e-12, "its only weight is always 1"


def test_bad_routing():
    logits = np.zeros((2, 4))
    for k in (0, 5):
        with pytest.raises(ValueError, match="k must be from 1 to the 4 experts"):
            route(logits, k)
    with pytest.raises(ValueError, match="gate must be 'softmax' or 'sigmoid', got 'relu'"):
        route(logits, 1, gate="relu")
    with pytest.raises(ValueError, match=r"bias must have shape \(4,\), got \(3,\)"):
        route(logits, 1, bias=np.zeros(3))


# ------------------------------------------------------------------ node-limited choice


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 6), st.data())
@settings(max_examples=60, deadline=None)
def test_node_limited_choice_by_hand(groups, each, n, draw):
    limit = draw.draw(st.integers(1, groups))
    k = draw.draw(st.integers(1, limit * each))
    scores = np.random.default_rng(draw.draw(st.integers(0, 99))).random((n, groups * each))
    chosen = node_limited_choice(scores, k, groups, limit)
    best = min(math.ceil(k / limit), each)
    for row, got in zip(scores, chosen.tolist()):
        strength = [sum(sorted(row[g * each : (g + 1) * each])[-best:]) for g in range(groups)]
        nodes = sorted(range(groups), key=lambda g: -strength[g])[:limit]
        allowed = [e for e in range(groups * each) if e // each in nodes]
        assert got == sorted(allowed, key=lambda e: -row[e])[:k]
        assert len({e // each for e in got}) <= limit
    if limit == groups:
        np.testing.assert_array_equal(chosen, top_k(scores, k))


def test_node_limit_with_scores_below_zero():
    """A bias can make every score negative; barred nodes still lose to the allowed ones."""
    scores = np.array([[-1.0, -2.0, -9.0, -9.5]])
    assert node_limited_choice(scores, 2, groups=2, limit=1).tolist() == [[0, 1]]


def test_bad_node_limits():
    scores = np.zeros((1, 6))
    with pytest.raises(ValueError, match="groups must divide the 6 experts, got 4"):
        node_limited_choice(scores, 1, 4, 1)
    with pytest.raises(ValueError, match="limit must be from 1 to the 3 groups, got 4"):
        node_limited_choice(scores, 1, 3, 4)
    with pytest.raises(ValueError, match="k = 3 experts don't fit on limit = 1 nodes of 2"):
        node_limited_choice(scores, 3, 3, 1)


def test_expected_nodes():
    assert expected_nodes(8, 1, 4) == 1
    assert expected_nodes(8, 8, 4) == 4
    with pytest.raises(ValueError, match="k must be from 1 to the 8 experts, got 9"):
        expected_nodes(8, 9, 4)
    with pytest.raises(ValueError, match="nodes must divide the 8 experts, got 3"):
        expected_nodes(8, 1, 3)
    rng = np.random.default_rng(0)
    found = np.mean([len(set(rng.choice(12, 3, replace=False) // 3)) for _ in range(20_000)])
    assert abs(expected_nodes(12, 3, 4) - found) < 0.01


# ------------------------------------------------------------------ capacity


def test_capacity():
    assert capacity(100, 8, 2, 1.0) == 25
    assert capacity(100, 8, 2, 1.01) == 26
    assert capacity(10, 4, 1, 1.2) == 3  # 1.2 * 10 / 4 is 3, and floats must not make it 4
    assert capacity(0, 8, 2, 1.0) == 0
    for factor in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="factor must be a finite number above 0"):
            capacity(10, 4, 1, factor)
    with pytest.raises(ValueError, match="tokens must be an integer >= 0, got -1"):
        capacity(-1, 4, 1, 1.0)
    with pytest.raises(ValueError, match="k must be from 1 to the 0 experts, got 1"):
        capacity(10, 0, 1, 1.0)


@given(st.integers(0, 12), st.integers(1, 5), st.data())
@settings(max_examples=60, deadline=None)
def test_positions_are_a_queue_first_choices_first(n, experts, draw):
    k = draw.draw(st.integers(1, experts))
    chosen = top_k(np.random.default_rng(draw.draw(st.integers(0, 99))).random((n, experts)), k)
    got, queue = positions(chosen, experts), [0] * experts
    for j in range(k):
        for t in range(n):
            assert got[t, j] == queue[chosen[t, j]]
            queue[chosen[t, j]] += 1
    np.testing.assert_array_equal(expert_load(chosen, experts), queue)


def test_load_counts_what_is_kept():
    chosen = np.array([[0, 1], [0, 2], [3, 0]])
    assert expert_load(chosen, 4).tolist() == [3, 1, 1, 1]
    kept = np.array([[True, False], [False, True], [True, True]])
    assert expert_load(chosen, 4, kept).tolist() == [2, 0, 1, 1]
    assert expert_load(np.zeros((0, 2), int), 3).tolist() == [0, 0, 0]
    assert imbalance([0, 0]) == 1.0


def test_a_dropped_token_gets_nothing_and_no_other_changes():
    params, (x, dy) = layer(6, 5, 3), data((20,), 6)[0]
    y, saved = moe_forward(params, x, 2, 0.4)
    whole, _ = moe_forward(params, x, 2)
    kept = saved["kept"]
    assert 0 < kept.sum() < kept.size
    assert expert_load(saved["routing"].chosen, 3, kept).max() <= capacity(20, 3, 2, 0.4)
    assert not y[~kept.any(1)].any()
    np.testing.assert_allclose(y[kept.all(1)], whole[kept.all(1)])
    _, grads = moe_backward(params, saved, dy)

    def loss():
        return (moe_forward(params, x, 2, 0.4)[0] * dy).sum()

    for name in params:
        np.testing.assert_allclose(grads[name], slope(loss, params[name]), atol=1e-7)


# ------------------------------------------------------------------ balancing


@given(st.integers(1, 6), st.data())
@settings(max_examples=40, deadline=None)
def test_balanced_load_makes_the_loss_one(experts, draw):
    k = draw.draw(st.integers(1, experts))
    gate = draw.draw(st.sampled_from(GATES))
    n = experts * draw.draw(st.integers(1, 4))
    scores = route(np.random.default_rng(n).normal(size=(n, experts)), k, gate).scores
    even = (np.arange(n)[:, None] + np.arange(k)) % experts
    assert math.isclose(load_balancing_loss(scores, even)[0], 1)


@pytest.mark.parametrize("gate", GATES)
def test_balancing_gradient_is_the_numeric_one(gate):
    logits = np.random.default_rng(1).normal(size=(6, 4))
    chosen = route(logits, 2, gate).chosen  # f counts, and has no gradient

    def loss():
        return load_balancing_loss(route(logits, 2, gate).scores, chosen)[0]

    r = route(logits, 2, gate)
    _, ds = load_balancing_loss(r.scores, chosen)
    np.testing.assert_allclose(route_backward(r, 0 * r.weights, ds), slope(loss, logits), atol=1e-8)


def test_the_ranks_terms_add_up_to_the_batchs_loss():
    r = route(np.random.default_rng(1).normal(size=(9, 4)), 2)
    whole, gradient = load_balancing_loss(r.scores, r.chosen)
    load = expert_load(r.chosen, 4)
    terms = [
        load_balancing_loss(r.scores[s], r.chosen[s], load, 9)
        for s in (slice(0, 2), slice(2, 2), slice(2, 9))
    ]
    assert math.isclose(sum(t[0] for t in terms), whole)
    np.testing.assert_allclose(np.concatenate([t[1] for t in terms]), gradient)


def test_bias_moves_by_its_speed_towards_even():
    bias = update_bias(np.array([1.0, 0, 0, 0]), np.array([4, 0, 2, 2]), 0.5)
    assert bias.tolist() == [0.5, 0.5, 0, 0]
    assert update_bias(np.zeros(3), np.zeros(3, int), 0.5).tolist() == [0, 0, 0]


def test_the_bias_balances_a_fixed_skewed_router():
    logits = np.random.default_rng(0).normal(size=(400, 6)) + np.arange(6) / 2
    bias = np.zeros(6)
    for _ in range(1000):
        bias = update_bias(bias, expert_load(route(logits, 2, bias=bias).chosen, 6), 0.001)
    assert imbalance(expert_load(route(logits, 2).chosen, 6)) > 2
    assert imbalance(expert_load(route(logits, 2, bias=bias).chosen, 6)) < 1.1


# ------------------------------------------------------------------ the dense layer


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_dense_layer_equals_every_expert_on_every_token(gate, k):
    params, (x, _) = layer(7, 3, 5), data((13,), 7)[0]
    r, want = route(x @ params["router"], k, gate), 0
    for e in range(5):
        weight = (r.weights * (r.chosen == e)).sum(1)
        want = want + weight[:, None] * mlp_forward({n: params[n][e] for n in EXPERT_ARRAYS}, x)[0]
    np.testing.assert_allclose(moe_forward(params, x, k, gate=gate)[0], want, atol=1e-13)


def test_dense_layer_against_autograd():
    torch = pytest.importorskip("torch")
    params, (x, dy) = layer(6, 4, 5), data((9,), 6)[0]
    leaf = {n: torch.tensor(p, requires_grad=True) for n, p in params.items()}
    xt = torch.tensor(x, requires_grad=True)
    weights, chosen = torch.softmax(xt @ leaf["router"], 1).topk(3)
    weights = weights / weights.sum(1, keepdim=True)
    every = torch.stack(
        [torch.nn.functional.gelu(xt @ leaf["w1"][e], approximate="tanh") @ leaf["w2"][e] for e in range(5)],
        1,
    )
    y = (torch.gather(every, 1, chosen[:, :, None].expand(-1, -1, 6)) * weights[:, :, None]).sum(1)
    y.backward(torch.tensor(dy))
    ours, saved = moe_forward(params, x, 3)
    dx, grads = moe_backward(params, saved, dy)
    np.testing.assert_allclose(ours, y.detach(), atol=1e-13)
    np.testing.assert_allclose(dx, xt.grad, atol=1e-12)
    for name in params:
        np.testing.assert_allclose(grads[name], leaf[name].grad, atol=1e-12)


def test_the_same_code_takes_tensors():
    torch = pytest.importorskip("torch")
    params, (x, dy) = layer(6, 4, 4), data((9,), 6)[0]
    tensors = {n: torch.tensor(p) for n, p in params.items()}
    how = {"gate": "sigmoid", "groups": 2, "limit": 1}
    y, saved = moe_forward(tensors, torch.tensor(x), 2, 0.8, bias=torch.arange(4) * 0.1, **how)
    dx, grads = moe_backward(tensors, saved, torch.tensor(dy))
    want, kept = moe_forward(params, x, 2, 0.8, bias=np.arange(4) * 0.1, **how)
    want_dx, want_grads = moe_backward(params, kept, dy)
    np.testing.assert_allclose(y, want, atol=1e-13)
    np.testing.assert_allclose(dx, want_dx, atol=1e-13)
    for name in params:
        np.testing.assert_allclose(grads[name], want_grads[name], atol=1e-13)
    ours = load_balancing_loss(kept["routing"].scores, kept["routing"].chosen)
    theirs = load_balancing_loss(saved["routing"].scores, saved["routing"].chosen)
    np.testing.assert_allclose(theirs[1], ours[1])
    load = expert_load(saved["routing"].chosen, 4)
    np.testing.assert_allclose(
        update_bias(torch.zeros(4), load, 0.5), update_bias(np.zeros(4), load.numpy(), 0.5)
    )


def test_float32_stays_float32():
    params = {n: p.astype(np.float32) for n, p in layer(6, 4, 4).items()}
    x = np.ones((3, 6), np.float32)
    y, saved = moe_forward(params, x, 2, 1.0)
    dx, grads = moe_backward(params, saved, x)
    assert {a.dtype for a in (y, dx, *grads.values())} == {np.dtype(np.float32)}


def test_no_tokens():
    params = layer(6, 4, 4)
    y, saved = moe_forward(params, np.zeros((0, 6)), 2, 1.0)
    dx, grads = moe_backward(params, saved, np.zeros((0, 6)))
    assert y.shape == dx.shape == (0, 6)
    assert all(grads[n].shape == params[n].shape and not grads[n].any() for n in params)


# ------------------------------------------------------------------ expert parallelism


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_parallel_equals_dense(draw):
    """Odd sizes, ranks without tokens, idle experts, every k, with and without a capacity."""
    ranks = draw.draw(st.integers(1, 4))
    experts = ranks * draw.draw(st.integers(1, 3))
    k = draw.draw(st.integers(1, experts))
    sizes = draw.draw(st.lists(st.integers(0, 7), min_size=ranks, max_size=ranks))
    factor = draw.draw(st.sampled_from([None, 0.3, 1.0, 1.25]))
    gate = draw.draw(st.sampled_from(GATES))
    params, pairs = layer(5, 3, experts, seed=k), data(sizes, 5, seed=sum(sizes))
    run = simulate(both_ways, inputs=pairs, params=params, k=k, capacity_factor=factor, gate=gate)
    assert_equals_dense(run.results, pairs, params, k, factor, gate=gate)


@pytest.mark.parametrize("factor", [None, 0.5])
def test_all_tokens_to_one_expert(factor):
    params, pairs = layer(5, 3, 6), data((4, 4, 4), 5)
    params["router"][:] = 0
    params["router"][:, 4] = 50.0
    pairs = [(np.abs(x), dy) for x, dy in pairs]
    run = simulate(both_ways, inputs=pairs, params=params, k=1, capacity_factor=factor, renormalise=False)
    assert_equals_dense(run.results, pairs, params, 1, factor, renormalise=False)
    idle = np.delete(np.concatenate([r[2]["w1"] for r in run.results]), 4, axis=0)
    assert not idle.any(), "idle experts have no gradient"


def test_capacity_queues_rank_zeros_tokens_first():
    params, pairs = layer(5, 3, 2), data((3, 3), 5)
    params["router"][:] = np.array([50.0, 0.0])
    pairs = [(np.abs(x), dy) for x, dy in pairs]
    run = simulate(both_ways, inputs=pairs, params=params, k=1, capacity_factor=4 / 3)
    assert [r[3].ravel().tolist() for r in run.results] == [[True] * 3, [True, False, False]]


def test_a_shared_bias_and_node_limits_work_in_parallel():
    params, pairs = layer(5, 3, 8), data((6, 2, 0, 5), 5)
    how = {"bias": np.linspace(0.4, 0, 8), "groups": 4, "limit": 2, "gate": "sigmoid"}
    run = simulate(both_ways, inputs=pairs, params=params, k=3, **how)
    assert_equals_dense(run.results, pairs, params, 3, **how)


def test_dispatch_sorts_and_combine_undoes_it():
    def there_and_back(comm, rows, load):
        plan = exchange_counts(comm, np.array(load[comm.rank]))
        got = dispatch(comm, rows, plan)
        return got, combine(comm, got, plan), plan

    loads = [[2, 0, 1, 1], [0, 0, 0, 3]]  # rows of rank 0 and 1 for experts 0 to 3; two on each rank
    rows = [np.arange(4.0)[:, None], 10 + np.arange(3.0)[:, None]]
    run = simulate(there_and_back, inputs=rows, load=loads)
    assert [r[0].ravel().tolist() for r in run.results] == [[0, 1], [2, 3, 10, 11, 12]]
    for sent, (_, back, _) in zip(rows, run.results):
        np.testing.assert_array_equal(back, sent)
    assert run.results[1][2] == Exchange([[0, 0], [0, 3]], [[1, 1], [0, 3]])
    assert run.results[1][2].counts == [1, 4]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_dispatch_and_combine_are_each_others_transpose(ranks, each, seed):
    """<dispatch(a), b> = <a, combine(b)>: what makes one the other's backward."""
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, 4, (ranks, ranks * each))
    mine = [rng.normal(size=(n, 2)) for n in loads.sum(1)]
    theirs = [rng.normal(size=(n, 2)) for n in loads.sum(0).reshape(ranks, each).sum(1)]

    def program(comm, pair):
        a, b = pair
        plan = exchange_counts(comm, loads[comm.rank])
        return (dispatch(comm, a, plan) * b).sum(), (combine(comm, b, plan) * a).sum()

    left, right = np.sum(simulate(program, inputs=list(zip(mine, theirs))).results, axis=0)
    assert math.isclose(left, right, abs_tol=1e-12)


def test_whole_params_and_wrong_counts_are_refused():
    params, x = layer(4, 3, 6), np.ones((2, 4))
    with pytest.raises(RankError, match="params must hold 3 experts, got 6; `shard_experts`"):
        simulate(lambda comm: expert_parallel_forward(comm, params, x, 1), ranks=2)
    with pytest.raises(RankError, match="the counts sum to 2, got 3 rows"):
        simulate(
            lambda comm: dispatch(comm, np.ones((3, 4)), exchange_counts(comm, np.array([1, 1]))), ranks=2
        )


def test_ranks_must_divide_the_experts():
    params = layer(4, 3, 6)
    said = "ranks must divide the 6 experts, got 4"
    with pytest.raises(ValueError, match=said):
        shard_experts(params, 0, 4)
    with pytest.raises(ValueError, match=said):
        expert_parallel_traffic(10, 1, 4, 2, 4, 6)
    with pytest.raises(ValueError, match="rank must be from 0 to 2, got 3"):
        shard_experts(params, 3, 3)
    with pytest.raises((ValueError, RankError), match=said):
        simulate(lambda comm: exchange_counts(comm, np.zeros(6, int)), ranks=4)


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("ranks, each, k", [(2, 1, 2), (4, 3, 2), (3, 2, 5), (8, 2, 1)])
def test_balanced_bytes_are_the_formula_exactly(ranks, each, k):
    experts = ranks * each
    n = 2 * experts
    params = {**layer(experts, 3, experts), "router": np.eye(experts)}
    wanted = (np.arange(n)[:, None] + np.arange(k)) % experts
    x = np.eye(experts)[wanted].sum(1)
    run = simulate(both_ways, inputs=[(x, x)] * ranks, params=params, k=k, reduce=False)
    formula = expert_parallel_traffic(n, k, experts, 8, ranks, experts)
    assert run.bytes_sent.tolist() == [formula.total] * ranks
    assert formula.total == 4 * formula.dispatch + formula.counts


def test_bytes_of_any_routing():
    params, pairs = layer(5, 3, 6), data((4, 0, 9), 5)
    run = simulate(both_ways, inputs=pairs, params=params, k=2, reduce=False)
    chosen = [r[3] // 2 for r in run.results]  # ranks that the pairs go to
    for r, mine in enumerate(chosen):
        away = (mine != r).sum()
        back = sum((c == r).sum() for other, c in enumerate(chosen) if other != r)
        assert run.bytes_sent[r] == 2 * (away + back) * 5 * 8 + 2 * 2 * 8


def test_one_rank_sends_nothing():
    params, pairs = layer(5, 3, 6), data((4,), 5)
    assert simulate(both_ways, inputs=pairs, params=params, k=2).traffic.bytes == 0
    assert expert_parallel_traffic(4, 2, 5, 8, 1, 6).total == 0


def test_two_hops_equal_one_and_cross_once_per_node():
    params, cluster = layer(32, 3, 16), Cluster(nodes=4, gpus_per_node=2)
    xs = [np.random.default_rng(r).normal(size=(n, 32)) for r, n in enumerate((3, 9, 0, 5, 6, 7, 2, 4))]

    def two(comm, x, **how):
        return two_hop_forward(comm, shard_experts(params, comm.rank, 8), x, 5, per_node=2, **how)

    for how in ({}, {"groups": 4, "limit": 2}, {"gate": "sigmoid"}):
        run = simulate(two, cluster=cluster, inputs=xs, **how)
        want, saved = moe_forward(params, np.concatenate(xs), 5, **how)
        np.testing.assert_allclose(np.concatenate(run.results), want, atol=1e-12)
        home = np.repeat(np.arange(8) // 2, [len(x) for x in xs])
        nodes = saved["routing"].chosen // 4
        rows = sum(len(set(row) - {h}) for row, h in zip(nodes.tolist(), home))
        # there: a row, k choices and k weights; back: a row
        assert run.traffic.where(tier=1).bytes == rows * 8 * (32 + 5 + 5 + 32)


def test_two_hops_with_nodes_of_one_and_of_all():
    params = layer(6, 3, 4)
    xs = [np.random.default_rng(r).normal(size=(3, 6)) for r in range(4)]
    want, _ = moe_forward(params, np.concatenate(xs), 2)
    for per_node in (1, 4):
        run = simulate(
            lambda comm, x, per_node=per_node: two_hop_forward(
                comm, shard_experts(params, comm.rank, 4), x, 2, per_node
            ),
            inputs=xs,
        )
        np.testing.assert_allclose(np.concatenate(run.results), want, atol=1e-13)
    with pytest.raises((ValueError, RankError), match="per_node must divide the 4 ranks, got 3"):
        simulate(lambda comm, x: two_hop_forward(comm, params, x, 2, 3), inputs=xs)


# ------------------------------------------------------------------ gradients on a grid


@pytest.mark.parametrize("edp, ep", [(1, 4), (2, 2), (4, 1), (3, 2)])
def test_reduced_gradients_are_the_mean_losss(edp, ep):
    grid, params = Grid(("edp", "ep"), (edp, ep)), layer(5, 3, 4)
    pairs = data((3,) * grid.ranks, 5)

    def program(comm, pair):
        comms = grid.comms(comm)
        _, _, grads, _ = both_ways(comms["ep"], pair, params, 2, reduce=False)
        return reduce_moe_gradients(grads, comm, comms["edp"])

    results = simulate(program, inputs=pairs).results
    x, dy = stacked(pairs)
    _, want = moe_backward(params, moe_forward(params, x, 2)[1], dy / grid.ranks)
    for rank, got in enumerate(results):
        part = shard_experts(want, rank % ep, ep)
        for name in params:
            np.testing.assert_allclose(got[name], part[name], atol=1e-12)


# ------------------------------------------------------------------ timed


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0, 1), st.data())
def test_steered_tokens_go_where_they_are_told(experts, blocks, hot, draw):
    k = draw.draw(st.integers(1, experts))
    tokens = experts * blocks
    x = steered_tokens(tokens, experts + 2, experts, k, hot)
    chosen = route(x @ np.eye(experts + 2, experts), k).chosen
    first = round(hot * tokens)
    assert (chosen[:first, 0] == 0).all()
    assert all(len(set(row)) == k for row in chosen.tolist())
    even = expert_load(
        route(steered_tokens(tokens, experts, experts, k) @ np.eye(experts), k).chosen, experts
    )
    assert set(even.tolist()) == {tokens * k // experts}
    with pytest.raises(ValueError, match="hidden must be at least"):
        steered_tokens(tokens, experts - 1, experts, k)


def test_timed_experts_tell_their_rows_and_bytes():
    params = {n: p.astype(np.float32) for n, p in layer(8, 6, 4).items()}
    params["router"] = np.eye(8, 4, dtype=np.float32)
    batches = [steered_tokens(16, 8, 4, 2, hot) for hot in (0.0, 1.0)]
    for run in (
        simulate(time_experts, ranks=4, params=shard_experts(params, 0, 4), batches=batches, k=2, repeats=2),
        launch(time_experts, ranks=2, params=shard_experts(params, 0, 2), batches=batches, k=2, repeats=2,
               device="cpu", timeout=120),
    ):  # fmt: skip
        ranks, found = len(run.results), run.results
        assert np.shape([r["seconds"] for r in found]) == (ranks, 2, 2)
        balanced, hot = zip(*(r["rows"] for r in found))
        assert set(balanced) == {32} and sum(hot) == 32 * ranks
        assert hot[0] == (64 if ranks == 4 else 48)
        formula = expert_parallel_traffic(16, 2, 8, 4, ranks, 4)
        assert {r["bytes"][0] for r in found} == {formula.total}
        sent = run.traffic.where(call="all_to_all").sent().tolist()
        assert sent == [3 * sum(r["bytes"]) for r in found]


# ------------------------------------------------------------------ real processes


@pytest.mark.parametrize("sizes, factor", [((5, 8), 1.0), ((0, 6), None)])
def test_launched_equals_dense(sizes, factor):
    params, pairs = layer(6, 4, 4), data(sizes, 6)
    run = launch(both_ways, inputs=pairs, params=params, k=3, capacity_factor=factor, timeout=90)
    assert_equals_dense(run.results, pairs, params, 3, factor, atol=1e-11)


def test_launched_two_hops_and_balancing():
    params = layer(6, 4, 4)
    xs = [np.random.default_rng(r).normal(size=(3 + r, 6)) for r in range(2)]

    def program(comm, x, params):
        y = two_hop_forward(comm, shard_experts(params, comm.rank, 2), x, 2, per_node=1, groups=2, limit=1)
        r = route(x @ params["router"], 2)
        load = comm.all_reduce(expert_load(r.chosen, 4))
        loss, _ = load_balancing_loss(r.scores, r.chosen, load, 7)
        bias = update_bias(comm.xp.zeros(4, dtype=x.dtype), load, 0.1)
        return y, comm.all_reduce(loss), bias

    real = launch(program, inputs=xs, params=params, timeout=90).results
    want, _ = moe_forward(params, np.concatenate(xs), 2, groups=2, limit=1)
    np.testing.assert_allclose(np.concatenate([r[0] for r in real]), want, atol=1e-12)
    r = route(np.concatenate(xs) @ params["router"], 2)
    for _, loss, bias in real:
        assert math.isclose(float(loss), load_balancing_loss(r.scores, r.chosen)[0])
        np.testing.assert_allclose(bias, update_bias(np.zeros(4), expert_load(r.chosen, 4), 0.1))


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_scores_that_are_all_zero_give_no_nan(gate):
    routing = route(np.full((3, 4), -300.0, np.float32), 2, gate=gate)
    assert np.isfinite(routing.weights).all()
    assert np.isfinite(route_backward(routing, np.ones((3, 2), np.float32))).all()
    loss, gradient = load_balancing_loss(routing.scores, routing.chosen)
    assert np.isfinite(loss) and np.isfinite(gradient).all()
