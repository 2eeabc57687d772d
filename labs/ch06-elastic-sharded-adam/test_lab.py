"""Tests of the lab on an elastic, sharded Adam. Run them in this folder: pytest test_lab.py -v"""

import importlib
import math
import os

import numpy as np
import pytest

from manyranks import simulate

lab = importlib.import_module(os.environ.get("LAB_MODULE", "lab"))
SEED = int(os.environ.get("LAB_SEED", "1"))

SHAPES = [(5, 7), (7,), (3, 4, 2), (), (11,)]  # 78 parameters: no multiple of 4, 5 or 7
NUMEL = 78


def rng_of(salt):
    """Random numbers of their own for each use, others for each LAB_SEED."""
    return np.random.default_rng(salt if SEED == 1 else [SEED, salt])


# --------------------------------------------------------------------- what the tests compare with


def bounds_of(numel, ranks):
    return [r * (numel // ranks) + min(r, numel % ranks) for r in range(ranks + 1)]


def make_params(seed=0, shapes=SHAPES):
    rng = rng_of(seed)
    return [np.array(rng.normal(size=shape)) for shape in shapes]


def make_grads(ranks, steps, micro_batches=1, seed=1, shapes=SHAPES, scale=1.0):
    """grads[rank][step][micro-batch][tensor], different everywhere."""
    rng = rng_of(seed)
    return [
        [
            [[np.array(scale * rng.normal(size=s)) for s in shapes] for _ in range(micro_batches)]
            for _ in range(steps)
        ]
        for _ in range(ranks)
    ]


def dense_adam(params, grads, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, clip=None):
    """Adam on one rank that has everything: (params, m, v, t, norms)."""
    params = [p.copy() for p in params]
    m, v, t, norms = [np.zeros_like(p) for p in params], [np.zeros_like(p) for p in params], 0, []
    for step in range(len(grads[0])):
        every = [micro for rank in grads for micro in rank[step]]
        mean = [sum(micro[i] for micro in every) / len(every) for i in range(len(params))]
        norm = math.sqrt(sum(float((g * g).sum()) for g in mean))
        norms.append(norm)
        if not math.isfinite(norm):
            continue
        scale = clip / norm if clip is not None and norm > clip else 1.0
        t += 1
        for i, g in enumerate(mean):
            g = g * scale
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g**2
            keep = 1 - lr * weight_decay * (params[i].ndim >= 2)
            step_size = lr / (1 - betas[0] ** t)
            params[i] = params[i] * keep - step_size * m[i] / (np.sqrt(v[i] / (1 - betas[1] ** t)) + eps)
    return params, m, v, t, norms


def train(grads, **options):
    run = simulate(lab.sharded_adam, inputs=grads, **options)
    for rank, result in enumerate(run.results):
        assert isinstance(result, dict) and {"params", "state", "norms"} <= set(result), (
            f"rank {rank}: sharded_adam returns a dict with params, state and norms, got {type(result).__name__}"
        )
        assert {"step", "master", "m", "v"} <= set(result["state"]), (
            f"rank {rank}: a state holds step, master, m and v, got {sorted(result['state'])}"
        )
    return run


def same_params(results, wanted, what, tolerance=1e-12):
    for rank, result in enumerate(results):
        assert len(result["params"]) == len(wanted), (
            f"{what}: rank {rank} returns {len(result['params'])} tensors"
        )
        for i, (got, right) in enumerate(zip(result["params"], wanted)):
            assert np.shape(got) == right.shape, (
                f"{what}: tensor {i} of rank {rank} has shape {np.shape(got)}, not {right.shape}"
            )
            off = float(np.max(np.abs(got - right))) if right.size else 0.0
            assert off <= tolerance, (
                f"{what}: tensor {i} of rank {rank} is off by {off:.1e}. Every rank has to end with all of the "
                "weights that one rank with the mean gradient of all would have"
            )


# --------------------------------------------------------------------- shards


@pytest.mark.points(5)
def test_shard_bounds():
    """Sizes differ by one at most, the longer ones first, and some may be empty."""
    for numel, ranks, wanted in (
        (10, 4, [0, 3, 6, 8, 10]),
        (2, 4, [0, 1, 2, 2, 2]),
        (7, 1, [0, 7]),
        (0, 2, [0, 0, 0]),
    ):
        got = list(lab.shard_bounds(numel, ranks))
        assert got == wanted, (
            f"{numel} elements on {ranks} ranks: {wanted}, as comm.reduce_scatter cuts; got {got}"
        )
    rng = rng_of(11)
    for numel in (1, 5, 78, 1000, *map(int, rng.integers(2, 400, 3))):
        for ranks in (1, 3, 8, 13, int(rng.integers(2, 90))):
            got = list(lab.shard_bounds(numel, ranks))
            assert got == bounds_of(numel, ranks), f"{numel} elements on {ranks} ranks: got {got}"


@pytest.mark.points(10)
def test_shard_pieces():
    """A shard can begin in the middle of one tensor and end in another."""
    got = [tuple(p) for p in lab.shard_pieces([(2, 3), (3,), (4,)], 2, 0)]
    assert got == [(0, 0, 6), (1, 0, 1)], (
        f"rank 0 of 2 has all of tensor 0 and the first of tensor 1; got {got}"
    )
    got = [tuple(p) for p in lab.shard_pieces([(2, 3), (3,), (4,)], 2, 1)]
    assert got == [(1, 1, 3), (2, 0, 4)], (
        f"rank 1 of 2 has the other two of tensor 1, and tensor 2; got {got}"
    )
    rng = rng_of(3)
    cases = [(SHAPES, n) for n in (1, 2, 4, 5, 7, 80)] + [([(0, 3), (4,), (), (2, 0)], 3)]
    cases += [
        ([tuple(rng.integers(1, 5, size=rng.integers(0, 4))) for _ in range(6)], int(n)) for n in (2, 3, 9)
    ]
    for shapes, ranks in cases:
        shapes = [tuple(int(n) for n in s) for s in shapes]
        sizes = [math.prod(s) for s in shapes]
        bounds, owner = bounds_of(sum(sizes), ranks), []
        for rank in range(ranks):
            pieces = [tuple(int(n) for n in p) for p in lab.shard_pieces(shapes, ranks, rank)]
            elements = [(i, k) for i, start, stop in pieces for k in range(start, stop)]
            assert all(start < stop for _, start, stop in pieces), f"no empty pieces, please: {pieces}"
            assert len(elements) == bounds[rank + 1] - bounds[rank], (
                f"{shapes} on {ranks} ranks: rank {rank} has {bounds[rank + 1] - bounds[rank]} elements, and {pieces} "
                f"hold {len(elements)}"
            )
            owner += elements
        everything = [(i, k) for i, size in enumerate(sizes) for k in range(size)]
        assert owner == everything, (
            f"{shapes} on {ranks} ranks: the pieces of all ranks, one after the other, have to be the flat vector"
        )


@pytest.mark.points(10)
def test_peak_bytes():
    """What is alive at the worst moment, with and without accumulation."""
    for numel, ranks, rank, stage, micro_batches, gradients, why in (
        (1000, 4, 0, 1, 1, 4 * 1250, "the fresh gradient and the reduced shard"),
        (1000, 4, 0, 2, 1, 4 * 1250, "the fresh gradient and the reduced shard"),
        (1000, 4, 0, 1, 4, 4 * 2000, "the fresh gradient and the running sum, both whole"),
        (1000, 4, 0, 2, 4, 4 * 1500, "the fresh gradient, whole, the running sum and the reduced shard"),
        (10, 4, 0, 2, 2, 4 * 16, "rank 0 has 3 of 10 elements"),
        (10, 4, 3, 2, 2, 4 * 14, "rank 3 has 2 of 10 elements"),
        (2, 4, 3, 2, 2, 4 * 2, "rank 3 has no shard at all"),
        (10, 1, 0, 1, 2, 4 * 20, "one rank"),
    ):
        got = lab.peak_bytes(numel, ranks, rank, stage, micro_batches)
        shard = bounds_of(numel, ranks)[rank + 1] - bounds_of(numel, ranks)[rank]
        wanted = {"weights": 2 * numel, "gradients": gradients, "state": 12 * shard}
        wanted["total"] = sum(wanted.values())
        for name, value in wanted.items():
            assert got[name] == value, (
                f"{numel} parameters, rank {rank} of {ranks}, stage {stage}, {micro_batches} micro-batches: {name} "
                f"are {value} bytes ({why}), got {got[name]}"
            )
    rng = rng_of(12)
    for _ in range(12):
        numel, ranks, micro_batches = (int(rng.integers(1, most)) for most in (500, 12, 4))
        rank, stage = int(rng.integers(ranks)), int(rng.integers(1, 3))
        bounds = bounds_of(numel, ranks)
        shard = bounds[rank + 1] - bounds[rank]
        wanted = numel + (shard if micro_batches == 1 else numel if stage == 1 else 2 * shard)
        got = lab.peak_bytes(numel, ranks, rank, stage, micro_batches)["gradients"]
        assert got == 4 * wanted, (
            f"{numel} parameters, rank {rank} of {ranks}, stage {stage}, {micro_batches} micro-batches: gradients are "
            f"{4 * wanted} bytes, got {got}"
        )
    got = lab.peak_bytes(7, 2, 0, 2, 1, weight_bytes=4, grad_bytes=2, state_bytes=8)
    assert got["total"] == 28 + 22 + 32, f"other sizes: 4·7 + 2·(7 + 4) + 8·4 = 82, got {got['total']}"
    with pytest.raises(ValueError, match="stage"):
        lab.peak_bytes(10, 2, 0, 3, 1)


# --------------------------------------------------------------------- training


@pytest.mark.points(15)
def test_equals_dense_adam():
    """Both stages, with and without accumulation, on 1 to 80 ranks: the weights of Adam on one rank, to 1e-12."""
    params = make_params()
    for ranks, stage, micro_batches, steps in (
        (1, 1, 1, 3), (2, 1, 1, 4), (4, 1, 3, 3), (5, 2, 1, 3), (4, 2, 3, 3), (7, 2, 2, 2), (80, 1, 1, 2),
    ):  # fmt: skip
        grads = make_grads(ranks, steps, micro_batches, seed=ranks)
        run = train(grads, params=params, stage=stage, lr=0.01)
        wanted, m, v, t, _ = dense_adam(params, grads, lr=0.01)
        what = f"{ranks} ranks, stage {stage}, {micro_batches} micro-batches, {steps} steps"
        same_params(run.results, wanted, what)
        bounds = bounds_of(NUMEL, ranks)
        for name, tensors in (("m", m), ("v", v), ("master", wanted)):
            flat = np.concatenate([x.reshape(-1) for x in tensors])
            for rank, result in enumerate(run.results):
                shard, right = result["state"][name], flat[bounds[rank] : bounds[rank + 1]]
                assert np.shape(shard) == right.shape, (
                    f"{what}: {name} of rank {rank} has shape {np.shape(shard)}; its shard has {right.size} elements, "
                    "and holding more is what sharding is to avoid"
                )
                assert np.allclose(shard, right, rtol=0, atol=1e-12), (
                    f"{what}: {name} of rank {rank} is wrong"
                )
        assert all(result["state"]["step"] == t for result in run.results), f"{what}: {t} steps were taken"


@pytest.mark.points(8)
def test_weight_decay_spares_vectors():
    """Decay applies to tensors of two dimensions or more, also where a shard holds parts of both."""
    params = make_params(4)
    for ranks in (1, 3, 7):
        grads = make_grads(ranks, 3, seed=ranks, scale=0.1)
        run = train(grads, params=params, lr=0.05, weight_decay=0.4, betas=(0.8, 0.95), eps=1e-6)
        wanted = dense_adam(params, grads, lr=0.05, weight_decay=0.4, betas=(0.8, 0.95), eps=1e-6)[0]
        same_params(
            run.results,
            wanted,
            f"weight decay of matrices only, decoupled from the gradient, on {ranks} ranks",
        )


@pytest.mark.points(10)
def test_clips_by_the_global_norm():
    """The norm of the whole mean gradient, equal on all ranks; a step below the limit stays as it is."""
    params = make_params(5)
    for ranks, stage, micro_batches in ((1, 1, 1), (3, 1, 2), (4, 2, 3), (5, 2, 1)):
        grads = make_grads(ranks, 4, micro_batches, seed=10 + ranks)
        norms = dense_adam(params, grads)[4]
        clip = (sorted(norms)[1] + sorted(norms)[2]) / 2  # two of four steps are clipped
        wanted = dense_adam(params, grads, lr=0.02, clip=clip)[0]
        run = train(grads, params=params, stage=stage, lr=0.02, clip=clip)
        what = f"{ranks} ranks, stage {stage}, {micro_batches} micro-batches"
        for rank, result in enumerate(run.results):
            assert np.allclose(result["norms"], norms, rtol=1e-12, atol=0), (
                f"{what}: rank {rank} found the norms {list(result['norms'])}, they are {norms}. Squares of shards add "
                "up over ranks, norms don't; and it is the norm of the mean, before clipping"
            )
        same_params(run.results, wanted, f"{what}, clipped to {clip:.3f}")
    # The moments show it better than the weights: Adam hardly feels a gradient's scale.
    grads = make_grads(3, 1, seed=21)
    m = dense_adam(params, grads, clip=0.5)[1]
    flat = np.concatenate([x.reshape(-1) for x in m])
    got = np.concatenate([r["state"]["m"] for r in train(grads, params=params, clip=0.5).results])
    assert np.allclose(got, flat, rtol=0, atol=1e-14), "clipping comes before the moments are updated"


@pytest.mark.points(12)
def test_counted_bytes():
    """A reduce-scatter of gradients and an all-gather of weights; an all-reduce of one number only."""
    params = make_params()
    for ranks, stage, micro_batches, steps, dtype in (
        (4, 1, 1, 2, "float64"), (4, 1, 3, 2, "float64"), (5, 2, 3, 2, "float64"), (3, 2, 1, 2, "float32"),
        (7, 1, 2, 1, "float16"), (1, 1, 1, 1, "float64"),
    ):  # fmt: skip
        run = train(make_grads(ranks, steps, micro_batches), params=params, stage=stage, weight_dtype=dtype)
        what = f"{ranks} ranks, stage {stage}, {steps} steps of {micro_batches} micro-batches, weights in {dtype}"
        for message in run.traffic:
            assert message.call != "all_reduce" or message.bytes <= 64, (
                f"{what}: an all-reduce moved {message.bytes} bytes at once. A rank needs the sum of its own shard "
                "only: reduce-scatter; all-reduce just the square of the norm"
            )
        passes = 1 if stage == 1 else micro_batches
        size = np.dtype(dtype).itemsize
        wanted = steps * (ranks - 1) * NUMEL * (8 * passes + size)
        got, slack = int(run.traffic.bytes), 64 * ranks * steps
        assert wanted <= got <= wanted + slack, (
            f"{what}: all ranks together send {got} bytes; {wanted} are enough, and {slack} more for the norms: "
            f"{passes} reduce-scatter a step of {NUMEL} gradients of 8 bytes, and one all-gather of {NUMEL} weights of "
            f"{size} bytes"
        )


@pytest.mark.points(8)
def test_master_weights_keep_what_half_precision_loses():
    """Weights travel in 16 bits, but small updates add up in the shard's float64 master weights."""
    params = [np.full((3, 3), 1.0), np.full((2,), -2.0)]
    grads = [[[[np.full((3, 3), 1.0), np.full((2,), 1.0)]] for _ in range(40)] for _ in range(4)]
    run = train(grads, params=params, lr=1e-4, weight_dtype="float16")
    for rank, result in enumerate(run.results):
        for i, got in enumerate(result["params"]):
            assert got.dtype == np.float16, f"rank {rank}: tensor {i} should be float16, it is {got.dtype}"
        assert result["state"]["master"].dtype == np.float64, "the master weights are float64"
        moved = 1.0 - float(result["params"][0][0, 0])
        assert abs(moved - 0.004) < 5e-4, (
            f"rank {rank}: 40 steps of 0.0001 moved a weight of 1 by {moved:g}, not 0.004. A 16-bit weight near 1 has a "
            "spacing of 0.0005 below and 0.001 above, so steps applied to it are lost; apply them to the master weights, "
            "and round only what is sent"
        )
    wanted = dense_adam(params, grads, lr=1e-4)[0]
    master = np.concatenate([r["state"]["master"] for r in run.results])
    assert np.allclose(master, np.concatenate([w.reshape(-1) for w in wanted]), rtol=0, atol=1e-12), (
        "the master weights must not depend on the dtype in which weights travel"
    )


@pytest.mark.points(5)
def test_skips_a_step_that_overflowed():
    """Inf or NaN in one rank's gradient: all ranks skip the step, and count none."""
    params = make_params()
    for ranks, bad in ((1, np.inf), (4, np.nan), (5, -np.inf)):
        grads = make_grads(ranks, 3)
        grads[ranks - 1][1][0][4][10] = bad  # last rank, second step, the last parameter
        with np.errstate(all="ignore"):
            run = train(grads, params=params, lr=0.01)
        clean = [[rank[0], rank[2]] for rank in grads]
        wanted, _, _, t, _ = dense_adam(params, clean, lr=0.01)
        for rank, result in enumerate(run.results):
            assert result["state"]["step"] == t, (
                f"{bad} on rank {ranks - 1} of {ranks}: rank {rank} counts {result['state']['step']} steps, not {t}. "
                "Every rank has to come to the same decision, and the norm is the same on all"
            )
            assert len(result["norms"]) == 3 and not math.isfinite(result["norms"][1]), (
                f"the skipped step's norm is reported too, and it isn't finite: {list(result['norms'])}"
            )
        same_params(run.results, wanted, f"{bad} in step 1 of 3 on {ranks} ranks")


# --------------------------------------------------------------------- checkpoints


def plain_states(ranks, seed=0, step=3, shapes=SHAPES):
    rng = rng_of(seed)
    numel = sum(map(math.prod, shapes))
    flat = {name: rng.normal(size=numel) for name in ("master", "m", "v")}
    bounds = bounds_of(numel, ranks)
    return [
        {"step": step, **{name: x[bounds[r] : bounds[r + 1]] for name, x in flat.items()}}
        for r in range(ranks)
    ], flat


@pytest.mark.points(7)
def test_checkpoint_does_not_know_the_ranks():
    """The same training state saved from 1, 4 or 80 ranks is the same checkpoint, tensor by tensor."""
    for ranks in (1, 4, 7, 80):
        states, flat = plain_states(ranks)
        saved = lab.save_checkpoint(states, SHAPES)
        assert set(saved) == {"step", "tensors"} and saved["step"] == 3, (
            f"a checkpoint holds step and tensors, and nothing of the ranks; got {sorted(saved)}"
        )
        assert len(saved["tensors"]) == len(SHAPES), f"{len(SHAPES)} tensors, got {len(saved['tensors'])}"
        at = 0
        for i, (entry, shape) in enumerate(zip(saved["tensors"], SHAPES)):
            size = math.prod(shape)
            assert set(entry) == {"master", "m", "v"}, f"tensor {i}: master, m and v, got {sorted(entry)}"
            for name in ("master", "m", "v"):
                assert np.shape(entry[name]) == shape, (
                    f"tensor {i}: {name} has shape {np.shape(entry[name])}, not {shape}"
                )
                right = flat[name][at : at + size].reshape(shape)
                assert np.array_equal(entry[name], right), (
                    f"from {ranks} ranks: {name} of tensor {i} has other values"
                )
            at += size
        for fewer in (1, 3, 5, 100):
            for rank in range(fewer):
                shard, cut = lab.load_shard(saved, fewer, rank), bounds_of(NUMEL, fewer)
                assert shard["step"] == 3, (
                    f"the step goes with the shard: Adam's bias correction needs it; got {shard['step']}"
                )
                for name in ("master", "m", "v"):
                    right = flat[name][cut[rank] : cut[rank + 1]]
                    assert np.shape(shard[name]) == right.shape, (
                        f"{ranks} ranks to {fewer}: {name} of rank {rank} has shape {np.shape(shard[name])}, not "
                        f"{right.shape}"
                    )
                    assert np.array_equal(shard[name], right), (
                        f"{ranks} ranks to {fewer}: wrong {name} on rank {rank}"
                    )


def exact_grads(ranks, steps, micro_batches, first=0):
    """Gradients whose mean is the same for any number of ranks, to the bit: multiples of 1/4 that sum exactly."""
    out = [[[None] * micro_batches for _ in range(steps)] for _ in range(ranks)]
    for step in range(steps):
        rng = rng_of(100 + first + step)
        mean = [np.array(rng.integers(-8, 9, size=s) / 4) for s in SHAPES]
        noise = rng_of(ranks)
        parts = [
            [np.array(noise.integers(-8, 9, size=s) / 4) for s in SHAPES]
            for _ in range(ranks * micro_batches)
        ]
        for i, s in enumerate(SHAPES):
            parts[-1][i] = -sum((p[i] for p in parts[:-1]), np.zeros(s))
        for k, part in enumerate(parts):
            out[k % ranks][step][k // ranks] = [np.array(g + d) for g, d in zip(mean, part)]
    return out


@pytest.mark.points(8)
def test_resumes_on_another_number_of_ranks():
    """Stopped on 4 ranks and resumed on 3, 1 or 7: weights and state equal to the last bit."""
    params = make_params(9)
    whole = train(exact_grads(4, 5, 2), params=params, lr=0.03, weight_decay=0.1)
    wanted = np.concatenate([np.reshape(p, -1) for p in whole.results[0]["params"]])
    first = train(exact_grads(4, 2, 2), params=params, lr=0.03, weight_decay=0.1)
    saved = lab.save_checkpoint([r["state"] for r in first.results], SHAPES)
    for ranks, stage in ((4, 1), (3, 2), (1, 1), (7, 2)):
        run = train(
            exact_grads(ranks, 3, 2, first=2), checkpoint=saved, stage=stage, lr=0.03, weight_decay=0.1
        )
        for rank, result in enumerate(run.results):
            got = np.concatenate([np.reshape(p, -1) for p in result["params"]])
            differ = int((got != wanted).sum())
            assert differ == 0, (
                f"4 ranks to {ranks}, stage {stage}: {differ} of {NUMEL} weights of rank {rank} differ from the run that "
                f"was never stopped, by {np.abs(got - wanted).max():.1e} at most. Is the step saved? Are sums divided "
                "once, after they are complete? (Here they are exact, in any order.)"
            )
            assert result["state"]["step"] == 5, f"5 steps in all, got {result['state']['step']}"
        for name in ("m", "v", "master"):
            a, b = (np.concatenate([r["state"][name] for r in done.results]) for done in (whole, run))
            assert np.array_equal(a, b), f"4 ranks to {ranks}: {name} differs"
    # Nothing to do: resume, save again, and nothing has changed.
    idle = train([[], []], checkpoint=saved)
    again = lab.save_checkpoint([r["state"] for r in idle.results], SHAPES)
    for a, b in zip(saved["tensors"], again["tensors"]):
        assert all(np.array_equal(a[name], b[name]) for name in a), "resuming for no step must change nothing"
    for p, entry in zip(idle.results[1]["params"], saved["tensors"]):
        assert np.array_equal(p, entry["master"]), "after no step the weights are those of the checkpoint"


@pytest.mark.points(2)
def test_refuses_a_mixed_checkpoint():
    """Shards of different steps, or a missing rank, are a ValueError."""
    states, _ = plain_states(3)
    with pytest.raises(ValueError, match="step"):
        lab.save_checkpoint([states[0], {**states[1], "step": 4}, states[2]], SHAPES)
    with pytest.raises(ValueError):
        lab.save_checkpoint(states[:2], SHAPES)
