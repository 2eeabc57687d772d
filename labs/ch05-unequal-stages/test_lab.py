"""Tests of the lab on unequal stages. Run them in this folder: pytest test_lab.py -v"""

import importlib
import itertools
import os
import random

import pytest

lab = importlib.import_module(os.environ.get("LAB_MODULE", "lab"))
SEED = int(os.environ.get("LAB_SEED", "1"))


def rng_of(salt):
    """Random numbers of their own for each use, others for each LAB_SEED."""
    return random.Random(salt if SEED == 1 else f"{SEED} {salt}")


# --------------------------------------------------------------------- what the tests measure with


def measure(plan, forward, backward, weight=None, hop=0.0):
    """(starts, makespan, in flight) of a plan, by the longest path; fails with a reason if the plan is unsound."""
    plan = [[(str(kind), int(mb)) for kind, mb in passes] for passes in plan]
    stages = len(forward)
    assert len(plan) == stages, f"a plan has one list for each of the {stages} stages; got {len(plan)} lists"
    took = {"F": forward, "B": backward, "W": weight}
    place = {(kind, s, mb): i for s, passes in enumerate(plan) for i, (kind, mb) in enumerate(passes)}
    starts = [[None] * len(passes) for passes in plan]
    for s0 in range(stages):
        stack = [(s0, i) for i in reversed(range(len(plan[s0])))]
        on_the_way = set()
        while stack:
            s, i = stack[-1]
            if starts[s][i] is not None:
                stack.pop()
                continue
            kind, mb = plan[s][i]
            needs = [(s, i - 1, 0.0)] if i else []
            inputs = {
                "F": [("F", s - 1, mb, hop)] if s else [],
                "B": [("F", s, mb, 0.0)] + ([("B", s + 1, mb, hop)] if s + 1 < stages else []),
                "W": [("B", s, mb, 0.0)],
            }[kind]
            for k, t, m, more in inputs:
                assert (k, t, m) in place, (
                    f"stage {s}: {kind}{mb} needs {k}{m} of stage {t}, which is nowhere in the plan"
                )
                needs.append((t, place[k, t, m], more))
            missing = [(t, j) for t, j, _ in needs if starts[t][j] is None]
            if missing:
                assert (s, i) not in on_the_way, (
                    f"deadlock: stage {s} never gets to {kind}{mb}, because what it needs waits for it in turn. "
                    "A later stage may not want more forward passes before its first backward pass than the "
                    "stage before it does"
                )
                on_the_way.add((s, i))
                stack += missing
                continue
            starts[s][i] = max([0.0] + [starts[t][j] + took[plan[t][j][0]][t] + more for t, j, more in needs])
            stack.pop()
    ends = [starts[s][-1] + took[plan[s][-1][0]][s] for s in range(stages) if plan[s]]
    last = "B" if weight is None else "W"
    held = []
    for passes in plan:
        now = [0, *itertools.accumulate((kind == "F") - (kind == last) for kind, _ in passes)]
        held.append(max(now))
    return starts, max(ends), held


def sound(plan, forward, backward, micro_batches, limits, weight=None, hop=0.0):
    """The makespan of a plan that has to be complete, possible and within the limits."""
    kinds = "FB" if weight is None else "FBW"
    assert isinstance(plan, (list, tuple)), f"a plan is a list of lists, got {type(plan).__name__}"
    for s, passes in enumerate(plan):
        for kind in kinds:
            done = sorted(mb for k, mb in passes if k == kind)
            assert done == list(range(micro_batches)), (
                f"stage {s} does {kind} of micro-batches {done}; every one of {micro_batches} is wanted exactly once"
            )
        assert len(passes) == len(kinds) * micro_batches, (
            f"stage {s} has passes that are none of {', '.join(kinds)}"
        )
    _, makespan, held = measure(plan, forward, backward, weight, hop)
    for s, (most, limit) in enumerate(zip(held, limits)):
        assert most <= limit, (
            f"stage {s} holds {most} micro-batches, and there is room for {limit}: a micro-batch is held from its F "
            f"until its {kinds[-1]} is done"
        )
    return makespan


def one_f_one_b(micro_batches, limits, weight=None):
    """1F1B with its warm-up cut to the limits, and no longer than the warm-up of the stage before."""
    plan, before = [], micro_batches
    for s, limit in enumerate(limits):
        before = min(before, len(limits) - 1 - s, limit - 1)
        passes = [("F", mb) for mb in range(before)]
        for mb in range(micro_batches):
            passes += [("F", mb + before)] * (mb + before < micro_batches) + [("B", mb)]
            passes += [("W", mb)] * (weight is not None)
        plan.append(passes)
    return plan


def random_job(rng, tight):
    """forward, backward, micro-batches, limits, hop of a job nobody has seen."""
    stages, micro_batches = rng.choice([2, 3, 4, 5, 6]), rng.choice([1, 3, 7, 12, 16])
    forward = [rng.choice([1, 2, 3, 4]) for _ in range(stages)]
    backward = [rng.choice([1, 2, 3, 4, 6]) for _ in range(stages)]
    limits = [
        rng.randint(1, stages + 1) if tight else rng.randint(stages - s, 2 * stages) for s in range(stages)
    ]
    return forward, backward, micro_batches, limits, rng.choice([0.0, 0.0, 0.5, 2.0])


def random_plan(rng, stages, micro_batches, split):
    """A plan that can be run: passes in a random order that respects what each needs."""
    plan, done = [[] for _ in range(stages)], set()
    todo = [
        (k, s, mb) for k in ("FBW" if split else "FB") for s in range(stages) for mb in range(micro_batches)
    ]
    while todo:
        rng.shuffle(todo)
        for kind, s, mb in list(todo):
            ready = {
                "F": s == 0 or ("F", s - 1, mb) in done,
                "B": ("F", s, mb) in done and (s == stages - 1 or ("B", s + 1, mb) in done),
                "W": ("B", s, mb) in done,
            }[kind]
            if ready:
                plan[s].append((kind, mb))
                done.add((kind, s, mb))
                todo.remove((kind, s, mb))
    return plan


def close(a, b):
    return abs(a - b) <= 1e-9 * max(1.0, abs(a), abs(b))


# --------------------------------------------------------------------- the clock


@pytest.mark.points(8)
def test_clock_by_hand():
    """Two stages and two micro-batches, timed with pencil and paper."""
    plan = [[("F", 0), ("F", 1), ("B", 0), ("B", 1)], [("F", 0), ("B", 0), ("F", 1), ("B", 1)]]
    got = lab.clock(plan, [1.0, 2.0], [2.0, 3.0], hop=0.5)
    assert isinstance(got, dict) and {"makespan", "starts", "in_flight"} <= set(got), (
        f"clock returns a dict with makespan, starts and in_flight; got {got!r}"
    )
    # stage 0: F0 0-1, F1 1-2, B0 at 7 (stage 1 ended it at 6.5, and a hop), B1 at 12
    # stage 1: F0 at 1.5-3.5, B0 3.5-6.5, F1 6.5-8.5, B1 8.5-11.5
    wanted = [[0, 1, 7, 12], [1.5, 3.5, 6.5, 8.5]]
    for s in range(2):
        assert all(map(close, got["starts"][s], wanted[s])), (
            f"stage {s} starts its passes at {got['starts'][s]}, by hand it is {wanted[s]}: a pass waits for its own "
            "stage, and for its neighbour's pass and one hop"
        )
    assert close(got["makespan"], 14), f"the last pass ends at 14, got {got['makespan']}"
    assert list(got["in_flight"]) == [2, 1], (
        f"stage 0 holds 2 micro-batches, stage 1 holds 1; got {got['in_flight']}"
    )


@pytest.mark.points(12)
def test_clock_on_any_plan():
    """Start times of random plans, with unequal stages, hops and split backward passes."""
    rng = rng_of(5)
    for case in range(30):
        stages, micro_batches = rng.choice([1, 2, 3, 5]), rng.choice([1, 2, 4, 7])
        forward, backward, weight = ([rng.randint(1, 9) / 4 for _ in range(stages)] for _ in range(3))
        weight, hop = (weight if case % 2 else None), rng.choice([0.0, 0.25, 3.0])
        plan = random_plan(rng, stages, micro_batches, weight is not None)
        starts, makespan, held = measure(plan, forward, backward, weight, hop)
        got = lab.clock(plan, forward, backward, weight, hop)
        job = f"{stages} stages, {micro_batches} micro-batches, hop {hop}, {'split' if weight else 'whole'} backward"
        for s in range(stages):
            assert len(got["starts"][s]) == len(starts[s]), f"{job}: one start for each pass of stage {s}"
            for (kind, mb), a, b in zip(plan[s], got["starts"][s], starts[s]):
                assert close(a, b), f"{job}: stage {s} can start {kind}{mb} at {b}, got {a}"
        assert close(got["makespan"], makespan), f"{job}: makespan {makespan}, got {got['makespan']}"
        assert list(got["in_flight"]) == held, (
            f"{job}: the stages hold {held} micro-batches at most, got {list(got['in_flight'])}; a micro-batch is held "
            f"from its F until its {'W' if weight else 'B'}"
        )


@pytest.mark.points(8)
def test_clock_refuses():
    """Deadlocks, missing passes and passes done twice are a ValueError that names the stage."""
    good = [[("F", 0), ("F", 1), ("B", 0), ("B", 1)], [("F", 0), ("B", 0), ("F", 1), ("B", 1)]]
    stuck = [[("F", 0), ("B", 0), ("F", 1), ("B", 1)], [("F", 0), ("F", 1), ("B", 0), ("B", 1)]]
    short = [good[0], good[1][:-1]]
    twice = [good[0], [*good[1], ("B", 1)]]
    gradient_first = [good[0], [("F", 0), ("B", 1), ("F", 1), ("B", 0)]]
    for name, plan in (
        ("a deadlock (stage 1 wants F1, stage 0 first wants B0)", stuck),
        ("a missing B1 on stage 1", short),
        ("B1 twice on stage 1", twice),
        ("B1 before F1 on stage 1", gradient_first),
    ):
        try:
            got = lab.clock(plan, [1, 1], [1, 1])
        except ValueError as error:
            assert "stage" in str(error), f"{name}: the message should name the stage, it says {error}"
        else:
            raise AssertionError(
                f"{name}: a ValueError is wanted, got {got!r}; a clock that stops silently hides it"
            )
    with pytest.raises(ValueError, match="stage"):
        lab.clock(good, [1, 1], [1, 1], weight=[1, 1])  # the plan has no W


# --------------------------------------------------------------------- the bound


@pytest.mark.points(10)
def test_lower_bound():
    """Every stage's work, the way to it and the way back, with messages that take time."""
    assert close(lab.lower_bound([1] * 4, [2] * 4, 8), 33), (
        "four equal stages, F = 1, B = 2, 8 micro-batches: 8·3 + 3·3 = 33; got "
        f"{lab.lower_bound([1] * 4, [2] * 4, 8)}"
    )
    for forward, backward, micro_batches, hop, wanted in (
        ([3.0], [5.0], 4, 1.0, 32.0),  # one stage sends nothing
        ([1, 1, 1], [1, 1, 1], 1, 2.0, 14.0),  # one micro-batch there and back
        ([5, 1, 1], [5, 1, 1], 10, 0.0, 100.0 + 0.0),  # the first stage works from the start to the end
        ([1, 1, 5], [1, 1, 5], 10, 0.0, 104.0),  # the last one has to wait for the others
        ([1, 4, 1, 2], [2, 4, 1, 1], 6, 0.5, 3 + 1 + 48),
    ):
        got = lab.lower_bound(forward, backward, micro_batches, hop)
        assert got <= wanted + 1e-9, (
            f"forward {forward}, backward {backward}, M = {micro_batches}, hop {hop}: {got} is more than a schedule "
            f"needs ({wanted}); a bound must never be above a real plan"
        )
        assert close(got, wanted), (
            f"forward {forward}, backward {backward}, M = {micro_batches}, hop {hop}: {wanted} can be proved, got "
            f"{got}. Which stage is the bottleneck, when does its first micro-batch arrive, and how far does its last "
            "gradient travel?"
        )


@pytest.mark.points(8)
def test_lower_bound_with_limits():
    """With few micro-batches in flight a stage waits for round trips."""
    got = lab.lower_bound([1, 1, 1], [2, 2, 2], 6, hop=1.0, limits=[1, 3, 3])
    assert close(got, 6 * 13), (
        f"stage 0 holds one micro-batch for a whole round trip of 13 seconds, so 6 of them take 78; got {got}"
    )
    got = lab.lower_bound([1, 1, 1], [2, 2, 2], 6, hop=1.0, limits=[3, 1, 3])
    assert close(got, 5 + 6 * 8), (
        f"stage 1 holds one micro-batch for 8 seconds at a time, and 5 seconds of way lie before it: 53; got {got}"
    )
    rng = rng_of(11)
    for _ in range(25):
        forward, backward, micro_batches, limits, hop = random_job(rng, tight=True)
        stages = len(forward)
        wanted = 0.0
        for s in range(stages):
            way = sum(forward[:s]) + sum(backward[:s]) + 2 * s * hop
            trip = sum(forward[s:]) + sum(backward[s:]) + 2 * (stages - 1 - s) * hop
            wanted = max(wanted, way + micro_batches * max(forward[s] + backward[s], trip / limits[s]))
        got = lab.lower_bound(forward, backward, micro_batches, hop, limits)
        assert close(got, wanted), (
            f"forward {forward}, backward {backward}, M = {micro_batches}, hop {hop}, limits {limits}: {wanted} can be "
            f"proved, got {got}. Each micro-batch is in flight on stage s for a round trip through the stages behind it"
        )


# --------------------------------------------------------------------- the partition


def parts(values, sizes):
    ends = [0, *itertools.accumulate(sizes)]
    return [values[a:b] for a, b in zip(ends, ends[1:])]


def check_partition(costs, fixed, saved, stages, micro_batches, memory):
    sizes = lab.partition(costs, fixed, saved, stages, micro_batches, memory)
    assert isinstance(sizes, (list, tuple)), f"a list of layers per stage, got {type(sizes).__name__}"
    assert len(sizes) == stages and min(sizes) >= 1 and sum(sizes) == len(costs), (
        f"{len(costs)} layers on {stages} stages, none of them empty; got {sizes}"
    )
    if memory is not None:
        for s, (still, live) in enumerate(zip(parts(fixed, sizes), parts(saved, sizes))):
            held = sum(still) + min(stages - s, micro_batches) * sum(live)
            assert held <= memory, (
                f"{sizes}: stage {s} of {stages} holds {held} with {min(stages - s, micro_batches)} micro-batches in "
                f"flight, and there is room for {memory}"
            )
    return max(map(sum, parts(costs, sizes)))


@pytest.mark.points(10)
def test_partition_of_layers():
    """No cut into contiguous stages has a quicker slowest stage."""
    rng = rng_of(2)
    cases = [([1, 1, 1, 1, 1, 1, 1, 5], 4), ([9, 1, 1], 2), ([7], 1), ([2, 2, 9], 3)]
    cases += [([rng.randint(1, 20) for _ in range(rng.randint(4, 11))], rng.randint(1, 4)) for _ in range(30)]
    for costs, stages in cases:
        layers = len(costs)
        got = check_partition(costs, [1] * layers, [1] * layers, stages, 4, None)
        best = min(
            max(map(sum, parts(costs, [b - a for a, b in zip((0, *cut), (*cut, layers))])))
            for cut in itertools.combinations(range(1, layers), stages - 1)
        )
        assert got == best, f"{costs} on {stages} stages: the slowest can take {best}, yours takes {got}"


def quickest_that_fits(costs, fixed, saved, stages, micro_batches, memory):
    """By trying every possible slowest stage, and filling stages from the front; None if nothing fits."""
    layers = len(costs)
    for limit in sorted({sum(costs[a:b]) for a in range(layers) for b in range(a + 1, layers + 1)}):
        at = 0
        for s in range(stages):
            end, flight = at, min(stages - s, micro_batches)
            while end < layers - (stages - 1 - s):
                piece = slice(at, end + 1)
                if sum(costs[piece]) > limit or sum(fixed[piece]) + flight * sum(saved[piece]) > memory:
                    break
                end += 1
            if end == at:
                break
            at = end
        if at == layers and s == stages - 1:
            return limit
    return None


@pytest.mark.points(12)
def test_partition_within_memory():
    """Early stages hold more micro-batches, so the memory limit moves layers to the back."""
    assert check_partition([1] * 8, [1] * 8, [2] * 8, 2, 8, 24) == 4
    got = lab.partition([1] * 8, [1] * 8, [2] * 8, 2, 8, 19)
    assert list(got) == [3, 5], (
        f"8 equal layers, 2 stages, memory 19: stage 0 holds 2 micro-batches (5 a layer), stage 1 holds one (3 a "
        f"layer), so [3, 5]; got {got}"
    )
    rng, tried = rng_of(7), 0
    for _ in range(60):
        layers, stages, micro_batches = rng.randint(3, 30), rng.randint(2, 6), rng.choice([1, 2, 3, 16])
        stages = min(stages, layers)
        costs, fixed, saved = ([rng.randint(1, 12) for _ in range(layers)] for _ in range(3))
        memory = int((sum(fixed) + sum(saved) * stages / 2) / stages * rng.uniform(1.0, 1.8))
        best = quickest_that_fits(costs, fixed, saved, stages, micro_batches, memory)
        if best is None:
            continue
        tried += 1
        got = check_partition(costs, fixed, saved, stages, micro_batches, memory)
        assert got == best, (
            f"costs {costs}, fixed {fixed}, saved {saved}, {stages} stages, M = {micro_batches}, memory {memory}: the "
            f"slowest stage can take {best}, yours takes {got}"
        )
    assert tried > 20


@pytest.mark.points(4)
def test_partition_refuses():
    """More stages than layers, or no cut that fits, is a ValueError."""
    with pytest.raises(ValueError, match="stages"):
        lab.partition([1, 2], [1, 1], [1, 1], 3, 4)
    with pytest.raises(ValueError, match="memory"):
        lab.partition([1, 1, 1], [5, 5, 5], [1, 1, 1], 2, 4, memory=9)


# --------------------------------------------------------------------- the schedule


@pytest.mark.points(10)
def test_schedule_is_sound():
    """Every pass once, nothing before what it needs, and no stage above its limit."""
    rng = rng_of(1)
    jobs = [random_job(rng, tight=n % 2 == 0) for n in range(30)]
    jobs += [
        ([1], [2], 3, [1], 0.0),
        ([1, 2, 1], [1, 1, 1], 4, [1, 1, 1], 1.0),
        ([1, 1, 1], [2, 2, 2], 5, [1, 3, 3], 0.0),
    ]
    for forward, backward, micro_batches, limits, hop in jobs:
        plan = lab.schedule(forward, backward, micro_batches, limits, hop=hop)
        sound(plan, forward, backward, micro_batches, limits, hop=hop)
    with pytest.raises(ValueError, match="limits"):
        lab.schedule([1, 1], [1, 1], 2, [1, 0])


@pytest.mark.points(6)
def test_schedule_is_no_slower_than_1f1b():
    """On 40 random jobs, 1F1B with its warm-up cut to the limits is never quicker."""
    rng = rng_of(3)
    for n in range(40):
        forward, backward, micro_batches, limits, hop = random_job(rng, tight=n % 2 == 0)
        plan = lab.schedule(forward, backward, micro_batches, limits, hop=hop)
        got = sound(plan, forward, backward, micro_batches, limits, hop=hop)
        base = measure(one_f_one_b(micro_batches, limits), forward, backward, None, hop)[1]
        assert got <= base + 1e-9, (
            f"forward {forward}, backward {backward}, M = {micro_batches}, limits {limits}, hop {hop}: 1F1B takes "
            f"{base}, yours {got}. Try 1F1B too, and return the better plan"
        )


#: forward, backward, micro-batches, limits, hop, and seconds that are enough (1F1B needs a quarter more, or worse).
HARD = [
    ([2, 2, 3, 4, 2, 1], [4, 6, 1, 2, 2, 1], 9, [3, 4, 3, 4, 6, 8], 1.0, 148),
    ([1, 4, 3, 1, 1], [3, 2, 3, 6, 1], 16, [2, 7, 6, 6, 4], 0.5, 257),
    ([4, 1, 2, 2], [4, 6, 1, 3], 13, [3, 5, 1, 1], 0.0, 126),
    ([4, 1, 4, 2, 1], [4, 1, 6, 6, 1], 13, [2, 3, 2, 6, 3], 2.0, 341),
    ([1, 1, 1, 1], [2, 2, 2, 2], 16, [8, 8, 8, 8], 2.0, 75),
]


@pytest.mark.points(6)
def test_schedule_beats_1f1b():
    """Unequal limits and slow messages: quicker than 1F1B by a stated margin, and near the bound on average."""
    for forward, backward, micro_batches, limits, hop, enough in HARD:
        plan = lab.schedule(forward, backward, micro_batches, limits, hop=hop)
        got = sound(plan, forward, backward, micro_batches, limits, hop=hop)
        base = measure(one_f_one_b(micro_batches, limits), forward, backward, None, hop)[1]
        assert got <= enough, (
            f"forward {forward}, backward {backward}, M = {micro_batches}, limits {limits}, hop {hop}: 1F1B takes "
            f"{base:g}, yours {got:g}, and {enough} is possible. Let each stage start whatever it can, a backward pass "
            "rather than a forward pass, as long as its limit allows"
        )
    rng, ratios = rng_of(9), []
    for n in range(40):
        forward, backward, micro_batches, limits, hop = random_job(rng, tight=n % 2 == 0)
        plan = lab.schedule(forward, backward, micro_batches, limits, hop=hop)
        got = sound(plan, forward, backward, micro_batches, limits, hop=hop)
        stages = len(forward)
        bound = 0.0
        for s in range(stages):
            way = sum(forward[:s]) + sum(backward[:s]) + 2 * s * hop
            trip = sum(forward[s:]) + sum(backward[s:]) + 2 * (stages - 1 - s) * hop
            bound = max(bound, way + micro_batches * max(forward[s] + backward[s], trip / limits[s]))
        ratios.append(got / bound)
    assert sum(ratios) / len(ratios) <= 1.05, (
        f"40 random jobs: on average {sum(ratios) / len(ratios):.3f} times the lower bound; 1.05 is asked for"
    )


@pytest.mark.points(6)
def test_schedule_with_split_backward():
    """Weight gradients fill the gaps: sound, held until W, and quicker than W right after B."""
    rng, gains = rng_of(6), []
    for n in range(30):
        if n < 10:  # tight limits, very unequal stages: nothing to gain, much to get wrong
            forward, backward, micro_batches, limits, hop = random_job(rng, tight=True)
            half = weight = [b / 2 for b in backward]
        else:
            stages, micro_batches = rng.choice([3, 4, 6]), rng.choice([4, 6, 8, 12])
            forward, half, weight = ([rng.choice([4, 5, 6]) for _ in range(stages)] for _ in range(3))
            limits, hop = [rng.randint(stages - s, stages + 2) for s in range(stages)], rng.choice([0.0, 1.0])
        plan = lab.schedule(forward, half, micro_batches, limits, weight=weight, hop=hop)
        got = sound(plan, forward, half, micro_batches, limits, weight, hop)
        plain = measure(one_f_one_b(micro_batches, limits, weight), forward, half, weight, hop)[1]
        assert got <= plain + 1e-9, (
            f"forward {forward}, B {half}, W {weight}, M = {micro_batches}, limits {limits}, hop {hop}: 1F1B with W right "
            f"after B takes {plain}, yours {got}"
        )
        gains += [plain / got] * (n >= 10)
    mean = sum(gains) / len(gains)
    assert mean >= 1.03, (
        f"20 random jobs: on average {mean:.3f} times as quick as 1F1B with W right after B; 1.03 is asked for. "
        "A stage should pass the gradient on at once (B) and do W when it has nothing else to do, or no room"
    )
