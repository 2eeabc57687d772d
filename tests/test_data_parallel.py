"""Chapter 3's module: gradients against autograd, N ranks against one, buckets, accumulation, costs, real processes."""

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks import Cluster, data_parallel, simulate
from manyranks.collectives import split
from manyranks.data_parallel import (
    GradientBuckets,
    accumulate,
    adam_init,
    adam_step,
    average_gradients,
    backward,
    batch_order,
    broadcast_params,
    checksum,
    distance,
    flatten,
    forward,
    init_mlp,
    loss_and_gradient,
    replicas_agree,
    sgd_step,
    softmax_cross_entropy,
    train,
    tree_map,
    unflatten,
)
from manyranks.runtime import RankError, phantom

SIZES = (7, 6, 5, 4)


def batch(examples, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(examples, SIZES[0])), np.eye(SIZES[-1])[rng.integers(0, SIZES[-1], examples)]


def test_worked_examples():
    result = doctest.testmod(data_parallel)
    assert result.attempted > 15 and result.failed == 0


# ------------------------------------------------------------------------------------------------ the model


def test_gradient_is_autograds():
    torch = pytest.importorskip("torch")
    params = init_mlp(SIZES, seed=3)
    x, targets = batch(11)
    loss, grads = loss_and_gradient(params, x, targets)
    theirs = tree_map(lambda a: torch.tensor(a, requires_grad=True), params)
    their_loss = torch.nn.functional.cross_entropy(
        forward(theirs, torch.tensor(x))[-1], torch.tensor(targets)
    )
    their_loss.backward()
    assert float(loss) == pytest.approx(their_loss.item(), abs=1e-14)
    assert distance(grads, tree_map(lambda a: a.grad.numpy(), theirs)) < 1e-14


def test_runs_on_tensors_and_on_phantoms():
    torch = pytest.importorskip("torch")
    params = init_mlp(SIZES)
    x, targets = batch(5)
    loss, grads = loss_and_gradient(params, x, targets)
    their_loss, theirs = loss_and_gradient(
        tree_map(torch.tensor, params), torch.tensor(x), torch.tensor(targets)
    )
    assert float(their_loss) == pytest.approx(float(loss), abs=1e-14)
    assert distance(tree_map(lambda a: a.numpy(), theirs), grads) < 1e-14
    assert checksum(tree_map(torch.tensor, params)) == checksum(params)
    ghosts = tree_map(lambda a: phantom(a.shape, a.dtype), params)
    _, shapes = loss_and_gradient(ghosts, phantom(x.shape, x.dtype), phantom(targets.shape, targets.dtype))
    assert [layer["w"].shape for layer in shapes] == [layer["w"].shape for layer in params]
    assert flatten(shapes).nbytes == flatten(params).nbytes


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_two_stages_are_one_model(cut):
    params = init_mlp(SIZES)
    x, targets = batch(9)
    whole = loss_and_gradient(params, x, targets)[1]
    first = forward(params[:cut], x, head=False)
    second = forward(params[cut:], first[-1])
    logits = second[-1]
    if cut == 3:  # the second stage is empty: the first must then be the model's end
        first = forward(params, x)
        logits = first[-1]
    dlogits = softmax_cross_entropy(logits, targets)[1]
    dy, late = backward(params[cut:], second, dlogits)
    _, early = backward(params[:cut], first, dy, head=cut == 3)
    assert distance(early + late, whole) < 1e-14


def test_layers_get_ready_last_first():
    params = init_mlp(SIZES)
    x, targets = batch(3)
    activations = forward(params, x)
    seen = []
    _, grads = backward(
        params,
        activations,
        softmax_cross_entropy(activations[-1], targets)[1],
        ready=lambda i, g: seen.append((i, g)),
    )
    assert [i for i, _ in seen] == [2, 1, 0]
    assert all(g is grads[i] for i, g in seen)


def test_large_logits_do_not_overflow():
    loss, gradient = softmax_cross_entropy(np.array([[1e4, 0.0], [0.0, 1e4]]), np.eye(2))
    assert loss == 0 and np.isfinite(gradient).all()


@settings(max_examples=30, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5))
def test_unflatten_undoes_flatten(shapes):
    rng = np.random.default_rng(0)
    tree = [{"a": rng.normal(size=shape), "b": [rng.normal(size=shape)]} for shape in shapes]
    back = unflatten(flatten(tree), tree)
    assert checksum(back) == checksum(tree)
    assert [x["b"][0].shape for x in back] == shapes
    with pytest.raises(ValueError, match="flat must have shape"):
        unflatten(np.append(flatten(tree), 0.0), tree)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_torchs(weight_decay):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    params = [{"w": rng.normal(size=(3, 2))}, {"w": rng.normal(size=4)}]
    theirs = [torch.tensor(layer["w"].copy(), requires_grad=True) for layer in params]
    optimizer = torch.optim.AdamW(theirs, lr=0.03, weight_decay=weight_decay)
    flat, state, flat_state = flatten(params), adam_init(params), adam_init(flatten(params))
    for _ in range(6):
        grads = tree_map(lambda p: rng.normal(size=p.shape), params)
        params, state = adam_step(params, grads, state, lr=0.03, weight_decay=weight_decay)
        flat, flat_state = adam_step(flat, flatten(grads), flat_state, lr=0.03, weight_decay=weight_decay)
        for p, g in zip(theirs, grads):
            p.grad = torch.tensor(g["w"])
        optimizer.step()
    for ours, p in zip(params, theirs):
        np.testing.assert_allclose(ours["w"], p.detach().numpy(), rtol=1e-12)
    np.testing.assert_array_equal(flat, flatten(params))  # a slice of all parameters steps alike
    assert state["t"] == 6


# ------------------------------------------------------------------------------------------------ many ranks


@settings(max_examples=30, deadline=None)
@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(sum), seed=st.integers(0, 99))
def test_weighted_mean_is_the_big_batch_for_any_shards(counts, seed):
    params = init_mlp(SIZES, seed=seed)
    x, targets = batch(sum(counts), seed)
    big = loss_and_gradient(params, x, targets)[1]
    ends = np.cumsum(counts)

    def program(comm):
        part = slice(ends[comm.rank] - counts[comm.rank], ends[comm.rank])
        if counts[comm.rank]:
            grads = loss_and_gradient(params, x[part], targets[part])[1]
        else:
            grads = tree_map(lambda p: p * 0, params)
        return average_gradients(comm, grads, weight=counts[comm.rank])

    results = simulate(program, ranks=len(counts)).results
    assert max(distance(r, big) for r in results) < 1e-12
    assert len({checksum(r) for r in results}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_many_ranks_train_like_one(ranks):
    job = dict(params=init_mlp(SIZES), data=batch(60), order=batch_order(60, 15, 12), lr=0.1)
    one = simulate(train, ranks=1, **job).results[0]
    many = simulate(train, ranks=ranks, weighted=True, **job).results  # 15 does not divide by 2
    for h in many:
        np.testing.assert_allclose(h.losses, one.losses, rtol=0, atol=1e-12)
        assert distance(h.params, one.params) < 1e-12
        assert h.checksums == many[0].checksums


def test_plain_mean_is_wrong_for_unequal_shards():
    job = dict(params=init_mlp(SIZES), data=batch(60), order=batch_order(60, 15, 5), lr=0.1)
    one = simulate(train, ranks=1, **job).results[0]
    assert distance(simulate(train, ranks=2, **job).results[0].params, one.params) > 1e-6


def test_replicas_agree_sees_the_last_bit_and_nan():
    same = [init_mlp(SIZES) for _ in range(4)]
    assert simulate(replicas_agree, inputs=same).results == [True] * 4
    same[2][0]["w"][0, 0] = np.nextafter(same[2][0]["w"][0, 0], 9)
    assert simulate(replicas_agree, inputs=same).results == [False] * 4
    same[2][0]["w"][0, 0] = np.nan
    assert simulate(replicas_agree, inputs=same).results == [False] * 4
    assert simulate(replicas_agree, inputs=same).bytes_sent.max() <= 32


def test_broadcast_params():
    inputs = [init_mlp(SIZES, seed=r) for r in range(3)]
    for result in simulate(broadcast_params, inputs=inputs, src=2).results:
        assert checksum(result) == checksum(inputs[2])


def test_batch_order_visits_every_example_once_an_epoch():
    order = batch_order(20, 6, steps=7, seed=4)
    assert order.shape == (7, 6)
    for epoch in (order[:3], order[3:6]):
        assert len(set(epoch.ravel().tolist())) == 18
    np.testing.assert_array_equal(order, batch_order(20, 6, steps=7, seed=4))
    assert batch_order(20, 6, steps=0).shape == (0, 6)


@settings(max_examples=20, deadline=None)
@given(examples=st.integers(1, 20), data=st.data())
def test_accumulation_is_the_whole_batch(examples, data):
    micro_steps = data.draw(st.integers(1, examples))
    params = init_mlp(SIZES)
    x, targets = batch(examples)
    loss, grads = accumulate(params, x, targets, micro_steps)
    whole_loss, whole = loss_and_gradient(params, x, targets)
    assert float(loss) == pytest.approx(float(whole_loss), abs=1e-13)
    assert distance(grads, whole) < 1e-12


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    limit=st.sampled_from([0, 1, 24, 40, 100, float("inf")]),
    ranks=st.integers(1, 4),
)
def test_buckets_change_no_value_and_close_when_full(lengths, limit, ranks):
    inputs = [
        [np.random.default_rng(100 * r + i).normal(size=n) for i, n in enumerate(lengths)]
        for r in range(ranks)
    ]

    def program(comm, parts):
        buckets = GradientBuckets(comm, limit)
        for part in parts:
            buckets.add([part])
        return buckets.finish(), [sum(a.nbytes for [a] in trees) for trees, _ in buckets.going]

    for averaged, sizes in simulate(program, inputs=inputs).results:
        for i, [mean] in enumerate(averaged):
            np.testing.assert_allclose(mean, np.mean([parts[i] for parts in inputs], axis=0), atol=1e-14)
        assert sum(sizes) == 8 * sum(lengths)
        assert all(size >= limit for size in sizes[:-1])


# ------------------------------------------------------------------------------------------------ costs


def test_the_communication_wall():
    case = dict(params=7e9, tokens=8192, flops=300e12)
    assert round(data_parallel.compute_seconds(**case), 3) == 1.147
    moved = 2 * 14e9 * 63 / 64
    assert round(moved / 600e9, 3) == 0.046 and round(moved / 12.5e9, 3) == 2.205
    wall = data_parallel.wall_bandwidth(**case, ranks=64)
    assert moved / wall == pytest.approx(1.14688)
    assert data_parallel.wall_bandwidth(**case, ranks=64, accumulation=4) == pytest.approx(wall / 4)
    assert data_parallel.wall_bandwidth(**case, ranks=1) == 0


@pytest.mark.parametrize("overlap, limit", [(False, np.inf), (True, np.inf), (True, 0), (True, 3000)])
def test_timed_step_between_its_bounds(overlap, limit):
    sizes, forward_seconds = [100, 400, 48, 1000], 1e-4
    cluster = Cluster.flat(4, latency=1e-6, bandwidth=1e9)
    job = dict(sizes=sizes, forward_seconds=forward_seconds, limit=limit, overlap=overlap)
    run = simulate(data_parallel.timed_step, cluster=cluster, **job)
    by_formula = simulate(data_parallel.timed_step, cluster=cluster, algorithm="closed_form", **job)
    assert run.seconds == pytest.approx(by_formula.seconds)
    assert run.bytes_sent.sum() == 2 * 3 * 4 * sum(sizes)
    assert 3 * forward_seconds < run.seconds < 3 * forward_seconds + 4 * 6 * (1e-6 + 4 * sum(sizes) / 4 / 1e9)
    assert run.busy("compute")[0] == pytest.approx(3 * forward_seconds)


def test_step_seconds_and_scaled_lr():
    assert data_parallel.step_seconds(8.0, 1e9, ranks=1, alpha=1e-6, beta=1e9) == (8.0, 0)
    rates = [data_parallel.scaled_lr(0.1, 64, 32, step, warmup=4) for step in range(6)]
    assert rates == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2, 0.2])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: init_mlp((3,)), "sizes must hold two widths"),
        (lambda: batch_order(5, 6, 1), "batch must be from 1 to the 5 examples, got 6"),
        (
            lambda: accumulate(init_mlp(SIZES), *batch(3), 4),
            "micro_steps must be from 1 to the batch of 3, got 4",
        ),
        (lambda: data_parallel.effective_batch(1, 0, 1), "accumulation must be 1 or more, got 0"),
        (lambda: data_parallel.compute_seconds(1, 1, 0), "flops must be positive, got 0"),
        (lambda: data_parallel.wall_bandwidth(1, 1, 1, 0), "ranks must be 1 or more, got 0"),
        (lambda: GradientBuckets(None, -1), "limit must be 0 bytes or more, got -1"),
        (lambda: GradientBuckets(None, float("nan")), "limit must be 0 bytes or more, got nan"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_negative_weight_is_refused():
    with pytest.raises(RankError, match="weight must be 0 or more, got -1"):
        simulate(average_gradients, inputs=[[np.ones(2)]] * 2, weight=-1)


# ------------------------------------------------------------------------------------------------ real processes


def everything(comm, params, data, order, lr):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ours = train(comm, params, data, order, lr, weighted=True)
    x, targets = data
    mine = split(order[0], comm.size)[comm.rank]
    activations = forward(params, x[mine])
    buckets = GradientBuckets(comm, limit=400)
    dlogits = softmax_cross_entropy(activations[-1], targets[mine])[1]
    backward(params, activations, dlogits, ready=lambda i, grads: buckets.add(grads))
    bucketed = buckets.finish()[::-1]

    modules = []
    for layer in params:
        linear = torch.nn.Linear(*layer["w"].shape).to(layer["w"])
        linear.load_state_dict({"weight": layer["w"].T, "bias": layer["b"]})
        modules += [linear, torch.nn.ReLU()]
    ddp = DistributedDataParallel(torch.nn.Sequential(*modules[:-1]))
    torch.nn.functional.cross_entropy(ddp(x[mine]), targets[mine]).backward()
    theirs = [{"w": m.weight.grad.T.clone(), "b": m.bias.grad.clone()} for m in modules[:-1:2]]
    timed = data_parallel.time_steps(comm, params, (x[mine], targets[mine]), repeats=2)
    return ours, bucketed, theirs, replicas_agree(comm, ours.params), timed


def test_real_processes_and_ddp():
    pytest.importorskip("torch")
    from manyranks import launch

    job = dict(params=init_mlp(SIZES), data=batch(48), order=batch_order(48, 16, 6), lr=0.1)
    one = simulate(train, ranks=1, **job).results[0]
    big = loss_and_gradient(job["params"], *(a[job["order"][0]] for a in job["data"]))[1]
    real = launch(everything, ranks=2, timeout=120, **job)
    for ours, bucketed, theirs, agree, timed in real.results:
        np.testing.assert_allclose(ours.losses, one.losses, rtol=0, atol=1e-12)
        assert distance(ours.params, one.params) < 1e-12
        assert ours.checksums == real.results[0][0].checksums
        assert distance(bucketed, big) < 1e-12 and distance(theirs, big) < 1e-12
        assert agree is True
        assert np.shape(timed) == (2, 2) and np.min(timed) > 0


def test_sgd_step_leaves_its_arguments_alone():
    params, grads = [np.ones(3)], [np.ones(3)]
    np.testing.assert_array_equal(sgd_step(params, grads, 0.5)[0], [0.5] * 3)
    np.testing.assert_array_equal(params[0], np.ones(3))
