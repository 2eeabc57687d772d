"""Tests of the lab on checkpointing. Run them in this folder: pytest test_lab.py -v"""

import importlib
import itertools
import math
import os
import random
from functools import cache

import numpy as np
import pytest

from manyranks import simulate

lab = importlib.import_module(os.environ.get("LAB_MODULE", "lab"))
SEED = int(os.environ.get("LAB_SEED", "1"))


def rng_of(salt):
    """Random numbers of their own for each use, others for each LAB_SEED."""
    return random.Random(salt if SEED == 1 else f"{SEED} {salt}")


# --------------------------------------------------------------------- a chain that counts


def segments(keep, layers):
    return list(zip(keep, [*keep[1:], layers]))


def again(keep, costs):
    """What is computed again: all but the last layer of each segment but the last."""
    return sum(sum(costs[a : b - 1]) for a, b in segments(keep, len(costs))[:-1])


def peak(keep, sizes):
    most = kept = 0
    for a, b in segments(keep, len(sizes)):
        kept += sizes[a]
        most = max(most, kept + sum(sizes[a + 1 : b]))
    return most


class Chain:
    """Layers x -> a·x² + b; calls, store and peak are counted here, where the lab can't reach them."""

    def __init__(self, sizes, seed=0):
        rng = rng_of(seed)
        self.sizes, self.layers = sizes, len(sizes)
        self.a, self.b = ([rng.uniform(0.1, 0.9) for _ in sizes] for _ in range(2))
        self.store, self.calls, self.backs, self.most, self.inputs = {}, [0] * len(sizes), [], 0, []

    def right_input(self, i, x, what):
        assert 0 <= i < self.layers, f"{what}: there is no layer {i}"
        assert math.isclose(x, self.inputs[i], rel_tol=1e-12), f"{what}: {x} isn't the input of layer {i}"

    def forward(self, i, x):
        self.right_input(i, x, f"forward({i}, x)")
        self.calls[i] += 1
        return self.a[i] * x * x + self.b[i]

    def backward(self, i, x, dy):
        assert i in self.store, (
            f"backward({i}, x, dy), when the input of layer {i} isn't held (held are {sorted(self.store)}): the store "
            "has all that you keep, until the backward pass is done with it"
        )
        self.backs.append(i)
        return dy * 2 * self.a[i] * x

    def put(self, i, x):
        self.right_input(i, x, f"put({i}, x)")
        self.store[i] = x
        self.most = max(self.most, sum(self.sizes[k] for k in self.store))

    def get(self, i):
        assert i in self.store, (
            f"get({i}): the input of layer {i} isn't held at this moment; held are {sorted(self.store)}. "
            "It has to be computed again from the kept input before it, and put"
        )
        return self.store[i]

    def drop(self, i):
        assert i in self.store, f"drop({i}), which isn't held: {sorted(self.store)}"
        del self.store[i]

    def run(self, keep, x=0.7, dy=1.3):
        self.inputs = [x]
        for a, b in zip(self.a, self.b):
            self.inputs.append(a * self.inputs[-1] * self.inputs[-1] + b)
        got = lab.run_chain(
            self.forward, self.backward, x, dy, list(keep), self.layers, self.put, self.get, self.drop
        )
        assert isinstance(got, (tuple, list)) and len(got) == 2, f"run_chain returns (y, dx), got {got!r}"
        return got

    def truth(self, dy=1.3):
        for a, x in zip(reversed(self.a), reversed(self.inputs[:-1])):
            dy = dy * 2 * a * x
        return self.inputs[-1], dy


def some_keep(rng, layers):
    return [0, *sorted(rng.sample(range(1, layers), rng.randint(0, min(4, layers - 1))))]


@pytest.mark.points(14)
def test_chain_computes_again_what_it_must():
    """Right gradients; every layer once forward, and once more only where its segment is computed again."""
    rng = rng_of(1)
    cases = [(1, [0]), (2, [0, 1]), (6, [0]), (6, [0, 2, 4]), (7, [0, 1, 2, 3, 4, 5, 6]), (9, [0, 4])]
    cases += [(n, some_keep(rng, n)) for n in (3, 5, 8, 12, 13) for _ in range(4)]
    for number, (layers, keep) in enumerate(cases):
        chain = Chain([1] * layers, number)
        y, dx = chain.run(keep)
        right_y, right_dx = chain.truth()
        what = f"{layers} layers, keep {keep}"
        assert math.isclose(y, right_y, rel_tol=1e-12), f"{what}: the output is {right_y}, got {y}"
        assert math.isclose(dx, right_dx, rel_tol=1e-12), f"{what}: the gradient is {right_dx}, got {dx}"
        assert chain.backs == list(reversed(range(layers))), (
            f"{what}: backward goes once through every layer, from the last to the first; it went {chain.backs}"
        )
        wanted = [1] * layers
        for a, b in segments(keep, layers)[:-1]:
            for i in range(a, b - 1):
                wanted[i] += 1
        assert chain.calls == wanted, (
            f"{what}: forward calls of the layers are {wanted} at best, yours {chain.calls}. The last layer of a segment "
            "needn't be computed again (its output is kept), nor the last segment (its inputs are needed at once)"
        )


@pytest.mark.points(8)
def test_chain_holds_no_more_than_it_must():
    """What is put and not yet dropped: the kept inputs, and one segment at a time."""
    rng = rng_of(2)
    for number in range(25):
        layers = rng.choice([1, 2, 5, 8, 13])
        sizes, keep = [rng.randint(1, 50) for _ in range(layers)], some_keep(rng, layers)
        chain = Chain(sizes, number)
        chain.run(keep)
        wanted = peak(keep, sizes)
        assert chain.most == wanted, (
            f"sizes {sizes}, keep {keep}: {wanted} bytes at the peak, yours {chain.most}. Put the kept inputs and the last "
            "segment's on the way forward, another segment's when its backward pass comes, and drop each when it is done"
        )
        assert not chain.store, f"sizes {sizes}, keep {keep}: {sorted(chain.store)} are still held at the end"


@pytest.mark.points(8)
def test_peak_bytes():
    """The worst segment: all inputs kept so far, and its own."""
    got = lab.peak_bytes([5, 1, 1, 7, 2, 2], [0, 3])
    assert got == 16, f"segments 5,1,1 and 7,2,2: 7 bytes in the first, 5 + 11 = 16 in the last; got {got}"
    got = lab.peak_bytes([1, 9, 9, 1], [0, 3])
    assert got == 19, (
        f"the first segment is the worst here, 1 + 9 + 9, when input 3 is dropped already; got {got}"
    )
    rng = rng_of(3)
    for _ in range(60):
        layers = rng.randint(1, 15)
        sizes, keep = [rng.randint(1, 50) for _ in range(layers)], some_keep(rng, layers)
        got = lab.peak_bytes(sizes, keep)
        assert got == peak(keep, sizes), f"sizes {sizes}, keep {keep}: {peak(keep, sizes)}, got {got}"


def checked_keep(sizes, costs, limit):
    keep = lab.best_keep(sizes, costs, limit)
    assert isinstance(keep, (list, tuple)), f"a list of layers whose input is kept, got {type(keep).__name__}"
    keep = [int(k) for k in keep]
    assert keep[:1] == [0] and keep == sorted(set(keep)) and keep[-1] < len(sizes), (
        f"kept are ascending numbers from 0 to {len(sizes) - 1}, and 0 is one of them; got {keep}"
    )
    held = peak(keep, sizes)
    assert held <= limit, f"sizes {sizes}: keeping {keep} needs {held} bytes, the limit is {limit}"
    return keep


@pytest.mark.points(14)
def test_best_keep_of_short_chains():
    """Unequal sizes and costs: no choice within the limit computes less again (all choices tried)."""
    rng = rng_of(4)
    for _ in range(60):
        layers = rng.randint(1, 9)
        sizes, costs = ([rng.randint(1, 20) for _ in range(layers)] for _ in range(2))
        choices = [[0, *more] for n in range(layers) for more in itertools.combinations(range(1, layers), n)]
        least, most = min(peak(c, sizes) for c in choices), sum(sizes)
        with pytest.raises(ValueError, match="limit"):
            lab.best_keep(sizes, costs, least - 1)
        for limit in sorted({least, (2 * least + most) // 3, (least + most) // 2, most}):
            keep = checked_keep(sizes, costs, limit)
            best = min((c for c in choices if peak(c, sizes) <= limit), key=lambda c: again(c, costs))
            assert again(keep, costs) == again(best, costs), (
                f"sizes {sizes}, costs {costs}, limit {limit}: {best} computes {again(best, costs)} again, yours "
                f"{keep} {again(keep, costs)}. A choice is a sequence of segments, and what matters about those before "
                "is how much they keep and how much they cost"
            )


def least_again(sizes, costs, limit):
    """From the back: the least recomputation from a kept input on, given what is kept up to it."""
    layers = len(sizes)

    @cache
    def rest(k, kept):
        best = 0 if kept + sum(sizes[k + 1 :]) <= limit else math.inf
        inside = spent = 0
        for n in range(k + 1, layers):
            if kept + inside > limit:
                break
            if kept + sizes[n] <= limit:
                best = min(best, spent + rest(n, kept + sizes[n]))
            inside += sizes[n]
            spent += costs[n - 1]
        return best

    return rest(0, sizes[0])


@pytest.mark.points(8)
def test_best_keep_of_long_chains():
    """Chains of 24 to 40 layers, where trying all choices would take years."""
    rng = rng_of(5)
    for number in range(10):
        layers = rng.randint(24, 40)
        sizes = [rng.choice([1, 2, 8]) if number % 2 else rng.randint(1, 6) for _ in range(layers)]
        costs = [rng.randint(1, 9) for _ in range(layers)]
        limit = sum(sizes) * rng.choice([35, 50, 80]) // 100
        wanted = least_again(tuple(sizes), costs, limit)
        keep = checked_keep(sizes, costs, limit)
        assert again(keep, costs) == wanted, (
            f"sizes {sizes}, costs {costs}, limit {limit}: {wanted} is possible, {keep} computes {again(keep, costs)} "
            "again. Evenly spaced checkpoints are for equal layers"
        )


@pytest.mark.points(8)
def test_least_limit():
    """The smallest limit that works, and one byte less is refused."""
    got = lab.least_limit([1] * 16)
    wanted = next(n for n in range(1, 17) if least_again((1,) * 16, [1] * 16, n) < math.inf)
    assert got == wanted, f"16 equal layers need {wanted}, about the square root of twice 16; got {got}"
    rng = rng_of(6)
    for _ in range(20):
        sizes = [rng.randint(1, 12) for _ in range(rng.randint(1, 18))]
        got = lab.least_limit(sizes)
        costs = [1] * len(sizes)
        assert least_again(tuple(sizes), costs, got) < math.inf, f"sizes {sizes}: nothing stays within {got}"
        assert least_again(tuple(sizes), costs, got - 1) == math.inf, (
            f"sizes {sizes}: {got - 1} is enough, got {got}"
        )


# --------------------------------------------------------------------- loss scaling


def scaler(state, overflow, growth_interval, hysteresis, minimum, maximum):
    scale, good, left = state["scale"], state["good"], state["left"]
    if not overflow:
        if good + 1 < growth_interval:
            return {"scale": scale, "good": good + 1, "left": left}
        return {"scale": min(scale * 2, maximum), "good": 0, "left": hysteresis}
    left = max(left - 1, 0)
    return {"scale": max(scale / 2, minimum) if left == 0 else scale, "good": 0, "left": left}


@pytest.mark.points(8)
def test_scaler_update():
    """Grow after enough good steps in a row, shrink when patience is used up, stay within bounds."""
    rng = rng_of(7)
    for growth, patience, low, high, often in (
        (3, 1, 1.0, 2.0**24, 0.3), (4, 2, 1.0, 2.0**24, 0.4), (2, 3, 256.0, 4096.0, 0.1), (5, 2, 512.0, 2048.0, 0.7),
    ):  # fmt: skip
        state, trace = {"scale": 1024.0, "good": 0, "left": patience}, []
        for _ in range(80):
            overflow = rng.random() < often
            trace.append("x" if overflow else ".")
            wanted = scaler(state, overflow, growth, patience, low, high)
            got = lab.scaler_update(state, overflow, growth, patience, low, high)
            assert dict(got) == wanted, (
                f"growth_interval {growth}, hysteresis {patience}, from {low:g} to {high:g}, after the steps "
                f"{''.join(trace[-12:])} (x: overflow): {state} becomes {wanted}, got {got}. Good steps count in a row; "
                "patience comes back with growth only"
            )
            state = wanted
    got = lab.scaler_update({"scale": 8.0, "good": 1998, "left": 1}, False)
    assert got == {"scale": 8.0, "good": 1999, "left": 1}, (
        f"2000 good steps by default, this was the 1999th; got {got}"
    )


def train(grads, state, **options):
    run = simulate(lab.scaled_training, inputs=grads, weights=np.zeros(3), lr=1.0, state=state, **options)
    for rank, result in enumerate(run.results):
        assert isinstance(result, dict) and {"weights", "state", "skipped", "scales"} <= set(result), (
            f"rank {rank}: scaled_training returns a dict with weights, state, skipped and scales"
        )
    return run


@pytest.mark.points(8)
def test_one_rank_overflows_and_all_skip():
    """Inf on one rank: no rank steps, all halve the scale, and all go on together."""
    for ranks, culprit in ((1, 0), (3, 2), (4, 1)):
        grads = [[np.array([1.0, 2.0, -1.0]) / 64 for _ in range(5)] for _ in range(ranks)]
        grads[culprit][1] = np.array([0.0, 200.0, 0.0])  # 200 · 1024 is beyond float16
        grads[culprit][3] = np.array([0.0, np.nan, 0.0])
        run = train(grads, {"scale": 1024.0, "good": 0, "left": 1}, growth_interval=100, hysteresis=1)
        for rank, result in enumerate(run.results):
            who = f"rank {rank} of {ranks}, when rank {culprit} overflows in steps 1 and 3"
            assert list(result["skipped"]) == [1, 3], (
                f"{who}: skips {list(result['skipped'])}. The ranks must agree"
            )
            assert list(result["scales"]) == [1024, 1024, 512, 512, 256], (
                f"{who}: scales {list(result['scales'])}"
            )
            assert result["state"]["scale"] == 256.0, (
                f"{who}: the scale ends at {result['state']['scale']}, not 256"
            )
            wanted = -3 * np.array([1.0, 2.0, -1.0]) / 64
            assert np.allclose(result["weights"], wanted, rtol=1e-6, atol=0), (
                f"{who}: three steps of the mean gradient give {wanted}, got {result['weights']}"
            )
            assert result["weights"].dtype == np.float32, (
                f"master weights are float32, got {result['weights'].dtype}"
            )


@pytest.mark.points(6)
def test_gradients_survive_sixteen_bits():
    """Small gradients don't underflow, and the sum over ranks doesn't overflow where no rank did."""
    tiny = [[np.array([3e-8, -2e-8, 1e-8])] * 4 for _ in range(2)]
    run = train(tiny, {"scale": 2.0**16, "good": 0, "left": 2})
    wanted = -4 * tiny[0][0]
    assert np.allclose(run.results[0]["weights"], wanted, rtol=2e-3, atol=0), (
        f"gradients of 1e-8 scaled by 65,536 are fine in float16, whose least number is 6e-8: {wanted}, got "
        f"{run.results[0]['weights']}. Scale before the cast to float16, not after"
    )
    big = [[np.array([50.0, -60.0, 1.0])] for _ in range(8)]
    run = train(big, {"scale": 1024.0, "good": 0, "left": 2})
    assert list(run.results[0]["skipped"]) == [], (
        "60 · 1024 fits float16 on each of 8 ranks, and their sum doesn't: cast to float32 and unscale before adding up"
    )
    for result in run.results:
        assert np.allclose(result["weights"], [-50, 60, -1], rtol=2e-3), (
            f"the mean is wrong: {result['weights']}"
        )
    uneven = [[np.array([float(r), 1.0, 0.0])] for r in range(5)]
    for result in train(uneven, {"scale": 4.0, "good": 0, "left": 2}).results:
        assert np.allclose(result["weights"], [-2, -1, 0], rtol=1e-6), (
            f"mean over 5 ranks: {result['weights']}"
        )


# --------------------------------------------------------------------- losing ranks


def replayed(steps, step, every, save, restart, failures):
    """(seconds, lost, saves, restarts), segment by segment."""
    failures, now, lost, saves, restarts, left = sorted(failures), 0.0, 0.0, 0, 0, steps
    while left:
        length = min(every, left) * step + (save if left > every else 0.0)
        hit = next((t for t in failures if now <= t < now + length), None)
        if hit is None:
            now, left, saves = now + length, left - min(every, left), saves + (left > every)
            continue
        lost, restarts = lost + hit - now, restarts + 1
        again = [t for t in failures if hit < t]
        while again and again[0] < hit + restart:
            hit, restarts = again.pop(0), restarts + 1
        now = hit + restart
    return now, lost, saves, restarts


@pytest.mark.points(6)
def test_replay_by_hand():
    """Failures during work, during a save, during a restart, and between them: by hand, and in random jobs."""
    for failures, wanted, why in (
        ([], (11.5, 0.0, 3, 0), "10 steps and 3 saves; none after the last step"),
        (
            [4.0],
            (14.0, 0.5, 3, 1),
            "half a second since the save at 3.5 is lost, and 2 go by for the restart",
        ),
        ([4.0, 5.0], (15.0, 0.5, 3, 2), "the second failure comes during the restart, which begins again"),
        ([3.25], (16.75, 3.25, 3, 1), "a save that isn't complete saves nothing"),
        ([3.5], (13.5, 0.0, 3, 1), "the save is complete at 3.5: nothing is lost"),
        ([11.25], (14.25, 0.75, 3, 1), "the last step is done again"),
        ([11.5, 50.0], (11.5, 0.0, 3, 0), "the job is done"),
    ):
        got = lab.replay(10, 1.0, 3, 0.5, 2.0, failures)
        found = tuple(got[k] for k in ("seconds", "lost", "saves", "restarts"))
        assert all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(found, wanted)), (
            f"10 steps of 1 s, a save of 0.5 s every 3 steps, restarts of 2 s, failures at {failures}: (seconds, lost, "
            f"saves, restarts) are {wanted}: {why}; got {found}"
        )
    got = lab.replay(4, 2.0, 10, 1.0, 1.0, [7.0])
    assert math.isclose(got["seconds"], 16.0) and got["saves"] == 0, (
        f"never saved: from the beginning, 7 + 1 + 8; got {got}"
    )
    rng = rng_of(8)
    for _ in range(60):
        steps, step, every = rng.randint(1, 40), rng.uniform(0.2, 2.0), rng.randint(1, 45)
        save, restart = rng.uniform(0.0, 3.0), rng.uniform(0.0, 6.0)
        failures = list(itertools.accumulate(rng.expovariate(1 / 15) for _ in range(rng.randint(0, 12))))
        got = lab.replay(steps, step, every, save, restart, failures)
        found = tuple(got[k] for k in ("seconds", "lost", "saves", "restarts"))
        wanted = replayed(steps, step, every, save, restart, failures)
        assert all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(found, wanted)), (
            f"{steps} steps of {step:.3f} s, a save of {save:.3f} s every {every} steps, restarts of {restart:.3f} s, failures "
            f"at {[round(t, 3) for t in failures]}: (seconds, lost, saves, restarts) are {wanted}; got {found}"
        )


def expected(steps, step, every, save, restart, mtbf):
    total, left = 0.0, steps
    while left:
        n = min(every, left)
        left -= n
        length = n * step + (save if left else 0.0)
        total += mtbf * math.exp(restart / mtbf) * (math.exp(length / mtbf) - 1)
    return total


@pytest.mark.points(6)
def test_expected_seconds():
    """The exponential model, with segments that end with a save, and the last one that doesn't."""
    rng = rng_of(9)
    some = [
        (rng.randint(1, 300), rng.uniform(0.1, 3.0), rng.randint(1, 90), rng.uniform(0, 9), rng.uniform(0, 50),
         rng.uniform(60, 3000)) for _ in range(8)
    ]  # fmt: skip
    for job in (
        *some, (100, 2.0, 10, 5.0, 30.0, 500.0), (103, 2.0, 10, 5.0, 30.0, 500.0), (5, 1.0, 10, 3.0, 2.0, 4.0),
        (7, 3.0, 1, 0.5, 0.0, 50.0), (1000, 1.0, 37, 4.0, 10.0, 1e9),
    ):  # fmt: skip
        got, wanted = lab.expected_seconds(*job), expected(*job)
        assert math.isclose(got, wanted, rel_tol=1e-6), (
            f"(steps, step, every, save, restart, mtbf) = {job}: {wanted:.6g} s, got {got:.6g}. How many segments end "
            "with a save, and how long is the last?"
        )


@pytest.mark.points(6)
def test_best_every():
    """No whole number of steps between saves has a shorter mean time."""
    rng = rng_of(10)
    some = [
        (rng.randint(5, 200), rng.uniform(0.5, 3.0), rng.uniform(0.1, 20.0), 30.0, rng.uniform(100, 2000))
        for _ in range(5)
    ]
    for steps, step, save, restart, mtbf in (
        *some, (500, 2.0, 10.0, 60.0, 1000.0), (300, 1.0, 0.01, 5.0, 200.0), (40, 5.0, 30.0, 30.0, 1e7), (1, 1.0, 1.0, 1.0, 1.0),
        (97, 3.0, 4.0, 20.0, 150.0),
    ):  # fmt: skip
        got = lab.best_every(steps, step, save, restart, mtbf)
        times = {n: expected(steps, step, n, save, restart, mtbf) for n in range(1, steps + 1)}
        best = min(times, key=times.get)
        assert got in times, f"a whole number from 1 to {steps} (never saved before the end), got {got}"
        assert times[got] <= times[best] * (1 + 1e-9), (
            f"{steps} steps of {step} s, save {save}, restart {restart}, mtbf {mtbf}: every {best} steps takes "
            f"{times[best]:.6g} s, every {got} {times[got]:.6g}. Young's and Daly's formulas are approximations, and know "
            "nothing of the job's end"
        )
