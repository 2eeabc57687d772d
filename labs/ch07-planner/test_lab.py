"""Tests of the lab on planning. Run them in this folder: pytest test_lab.py -v"""

import importlib
import itertools
import math
import os
import random
from functools import cache

import numpy as np
import pytest

from manyranks import Cluster, simulate

lab = importlib.import_module(os.environ.get("LAB_MODULE", "lab"))
SEED = int(os.environ.get("LAB_SEED", "1"))


def rng_of(salt):
    """Random numbers of their own for each use, others for each LAB_SEED."""
    return random.Random(salt if SEED == 1 else f"{SEED} {salt}")


KEYS = {"dp", "tp", "pp", "order", "micro_batch", "zero", "recompute"}
ORDERS = ["-".join(axes) for axes in itertools.permutations(("tp", "pp", "dp"))]


# --------------------------------------------------------------------- the tests' own model


def grid(sizes, order):
    """The ranks as an array with one dimension for each axis, in the order of `sizes`."""
    axes = order.split("-")
    ranks = np.arange(math.prod(sizes.values())).reshape([sizes[a] for a in reversed(axes)])
    return ranks.transpose([list(reversed(axes)).index(a) for a in sizes])


def members(sizes, order, axes):
    names = list(sizes)
    moved = np.moveaxis(grid(sizes, order), [names.index(a) for a in axes], range(-len(axes), 0))
    return sorted(sorted(map(int, row)) for row in moved.reshape(-1, math.prod(sizes[a] for a in axes)))


@cache
def tier(tp, pp, dp, order, per_node, axis):
    rows = members({"tp": tp, "pp": pp, "dp": dp}, order, [axis])
    return "inter" if any(len({r // per_node for r in row}) > 1 for row in rows) else "intra"


def stages_of(job, plan):
    base, extra = divmod(job["layers"], plan["pp"])
    layers = [base + 1] * extra + [base] * (plan["pp"] - extra)
    block, table = 12 * job["hidden"] ** 2, job["vocabulary"] * job["hidden"]
    params = [block * n / plan["tp"] for n in layers]
    params[0] += table / plan["tp"]
    params[-1] += table / plan["tp"]
    return layers, params


def true_memory(job, plan):
    layers, params = stages_of(job, plan)
    d, t, p, z = plan["dp"], plan["tp"], plan["pp"], plan["zero"]
    token = job["sequence"] * plan["micro_batch"]
    m = job["batch"] // (d * plan["micro_batch"])
    full = 34 * token * job["hidden"] / t
    found = []
    for i in range(p):
        state = params[i] * (2 + (2 / d if z == 2 else 2) + (12 / d if z else 12))
        kept = 2 * token * job["hidden"] / t if plan["recompute"] else full
        acts = min(m, p - i) * layers[i] * kept + (full if plan["recompute"] else 0)
        logits = 6 * token * job["vocabulary"] / t if i == p - 1 else 0
        found.append(state + acts + logits)
    return max(found)


def true_seconds(job, cluster, plan):
    layers, params = stages_of(job, plan)
    d, t, p, z, b = plan["dp"], plan["tp"], plan["pp"], plan["zero"], plan["micro_batch"]
    s, h, m = job["sequence"], job["hidden"], job["batch"] // (plan["dp"] * plan["micro_batch"])
    per_node = cluster["gpus_per_node"]
    tiers = {axis: tier(t, p, d, plan["order"], per_node, axis) for axis in ("tp", "pp", "dp")}
    lat = {axis: cluster[name + "_latency"] for axis, name in tiers.items()}
    bw = {axis: cluster[name + "_bandwidth"] for axis, name in tiers.items()}
    act = 2 * b * s * h
    rate = cluster["flops"] / (1 + cluster["half"] * t / (b * s * h))
    each = []
    for i in range(p):
        flops = layers[i] * (24 * h * h * b * s + 4 * b * s * s * h) + (
            2 * job["vocabulary"] * h * b * s if i == p - 1 else 0
        )
        passes, reductions = (4, 6) if plan["recompute"] else (3, 4)
        time = passes * flops / t / rate
        time += layers[i] * reductions * (2 * (t - 1) * lat["tp"] + 2 * (t - 1) / t * act / bw["tp"])
        time += 2 * (lat["pp"] + act / t / bw["pp"]) if p > 1 else 0
        each.append(time)
    n = max(params)
    data = (m + 1 if z == 2 else 2) * ((d - 1) * lat["dp"] + (d - 1) / d * 2 * n / bw["dp"])
    return sum(each) + (m - 1) * max(each) + data + 24 * n / (d if z else 1) / cluster["memory_bandwidth"]


def wrong_with(job, cluster, plan):
    """Why a plan isn't one, or None."""
    if not isinstance(plan, dict) or set(plan) != KEYS:
        return f"a plan is a dict with the keys {', '.join(sorted(KEYS))}; got {plan!r}"
    if any(
        not isinstance(plan[k], (int, np.integer)) or plan[k] < 1 for k in ("dp", "tp", "pp", "micro_batch")
    ):
        return f"dp, tp, pp and micro_batch are whole numbers of at least 1: {plan}"
    gpus = cluster["nodes"] * cluster["gpus_per_node"]
    if plan["dp"] * plan["tp"] * plan["pp"] != gpus:
        return f"dp · tp · pp is {plan['dp'] * plan['tp'] * plan['pp']}, and there are {gpus} GPUs: {plan}"
    if job["heads"] % plan["tp"]:
        return f"{job['heads']} heads don't divide by tp = {plan['tp']}"
    if plan["pp"] > job["layers"]:
        return f"{job['layers']} layers on pp = {plan['pp']} stages"
    if job["batch"] % (plan["dp"] * plan["micro_batch"]):
        return f"a batch of {job['batch']} doesn't divide by dp · micro_batch = {plan['dp'] * plan['micro_batch']}"
    if plan["zero"] not in (0, 1, 2) or plan["order"] not in ORDERS or plan["recompute"] not in (True, False):
        return f"zero is 0, 1 or 2, recompute is a bool, and order one of {ORDERS}: {plan}"
    return None


def divisors(n):
    return [k for k in range(1, n + 1) if n % k == 0]


def every_plan(job, cluster, orders=ORDERS):
    gpus = cluster["nodes"] * cluster["gpus_per_node"]
    for tp in divisors(math.gcd(gpus, job["heads"])):
        for pp in divisors(gpus // tp):
            dp = gpus // tp // pp
            if pp > job["layers"] or job["batch"] % dp:
                continue
            for b, zero, recompute in itertools.product(
                divisors(job["batch"] // dp), (0, 1, 2), (False, True)
            ):
                plan = dict(
                    dp=dp, tp=tp, pp=pp, micro_batch=b, zero=zero, recompute=recompute, order=orders[0]
                )
                if true_memory(job, plan) <= cluster["memory"]:
                    for order in orders:
                        yield {**plan, "order": order}


def baseline(job, cluster):
    """The rule of thumb: least pipeline, then least tensor parallelism that fits; micro-batches of one sequence."""
    gpus = cluster["nodes"] * cluster["gpus_per_node"]
    for zero, recompute in ((0, False), (1, False), (1, True), (2, True)):
        for pp in divisors(gpus):
            for tp in divisors(cluster["gpus_per_node"]):
                plan = dict(
                    dp=gpus // (tp * pp),
                    tp=tp,
                    pp=pp,
                    micro_batch=1,
                    zero=zero,
                    recompute=recompute,
                    order="tp-dp-pp",
                )
                if gpus % (tp * pp) == 0 and not wrong_with(job, cluster, plan):
                    if true_memory(job, plan) <= cluster["memory"]:
                        return plan
    return None


def cluster_of(nodes, per_node, memory=80e9, **changed):
    return {
        "nodes": nodes, "gpus_per_node": per_node, "memory": memory, "flops": 600e12, "half": 2e6,
        "memory_bandwidth": 3e12, "intra_bandwidth": 450e9, "intra_latency": 3e-6, "inter_bandwidth": 25e9,
        "inter_latency": 14e-6, **changed,
    }  # fmt: skip


def job_of(layers, hidden, heads, batch, sequence=2048, vocabulary=50_000):
    return dict(
        layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, sequence=sequence, batch=batch
    )


JOBS = [
    (job_of(32, 4096, 32, 256), cluster_of(4, 8)),
    (job_of(40, 5120, 40, 64), cluster_of(4, 8, inter_bandwidth=12.5e9)),
    (job_of(24, 2048, 16, 48), cluster_of(2, 6, memory=24e9)),
    (job_of(80, 8192, 64, 128, sequence=4096), cluster_of(8, 8)),
    (job_of(31, 3072, 24, 96), cluster_of(3, 4, memory=40e9, intra_bandwidth=32e9)),
    (job_of(12, 768, 12, 128, sequence=1024), cluster_of(1, 8, memory=16e9)),
]


def random_setting(rng):
    nodes, per_node = rng.choice([(1, 4), (2, 4), (2, 6), (3, 4), (4, 8), (2, 8)])
    heads = rng.choice([12, 16, 24])
    job = job_of(rng.choice([7, 13, 24, 32]), heads * rng.choice([64, 128]), heads, rng.choice([24, 48, 96]))
    changed = {"inter_bandwidth": rng.choice([5e9, 25e9, 50e9]), "intra_bandwidth": rng.choice([32e9, 300e9])}
    return job, cluster_of(nodes, per_node, rng.choice([16e9, 40e9]), **changed)


def random_plan(rng, job, cluster):
    """Any plan that divides, whether it fits or not."""
    gpus = cluster["nodes"] * cluster["gpus_per_node"]
    while True:
        tp, pp = rng.choice(divisors(math.gcd(gpus, job["heads"]))), rng.choice(divisors(gpus))
        plan = dict(
            tp=tp, pp=pp, dp=max(1, gpus // (tp * pp)), order=rng.choice(ORDERS), zero=rng.choice((0, 1, 2))
        )
        plan |= {"recompute": rng.random() < 0.5, "micro_batch": rng.choice(divisors(job["batch"]))}
        if wrong_with(job, cluster, plan) is None:
            return plan


# --------------------------------------------------------------------- ranks on a grid


@pytest.mark.points(6)
def test_coordinates():
    """The first axis of the order runs fastest, whatever the order of the sizes."""
    sizes = {"dp": 2, "pp": 3, "tp": 4}
    got = lab.coordinates(13, sizes, "tp-dp-pp")
    assert got == {"tp": 1, "dp": 1, "pp": 1}, f"13 = 1 + 4·(1 + 2·1): tp 1, dp 1, pp 1; got {got}"
    rng = rng_of(9)
    mixed = {axis: rng.randint(1, 5) for axis in sizes}
    for sizes, order in itertools.product(({"dp": 2, "pp": 3, "tp": 4}, mixed), ORDERS):
        table = grid(sizes, order)
        for rank in range(table.size):
            got = lab.coordinates(rank, sizes, order)
            d, p, t = (int(k[0]) for k in np.where(table == rank))
            assert got == {"dp": d, "pp": p, "tp": t}, (
                f"rank {rank}, order {order}: {dict(dp=d, pp=p, tp=t)}, got {got}; "
                f"neighbours on {order.split('-')[0]} have neighbouring numbers"
            )
    got = lab.coordinates(11, {"tp": 2, "cp": 3, "ep": 1, "pp": 2}, "tp-cp-ep-pp")
    assert got == {"tp": 1, "cp": 2, "ep": 0, "pp": 1}, f"any number of axes, any names; got {got}"


@pytest.mark.points(8)
def test_groups_of_one_axis():
    """Ranks that differ on one axis only, for each order."""
    got = [list(g) for g in lab.groups({"tp": 2, "dp": 2, "pp": 2}, "tp-dp-pp", ["dp"])]
    assert got == [[0, 2], [1, 3], [4, 6], [5, 7]], f"dp of 2 x 2 x 2 in order tp-dp-pp; got {got}"
    rng = rng_of(10)
    mixed = {a: rng.randint(1, 5) for a in ("pp", "dp", "tp")}
    for sizes in ({"tp": 2, "pp": 3, "dp": 2}, {"dp": 5, "tp": 1, "pp": 4}, mixed):
        for order, axis in itertools.product(ORDERS, sizes):
            got = [list(map(int, g)) for g in lab.groups(sizes, order, [axis])]
            wanted = members(sizes, order, [axis])
            assert got == wanted, f"{sizes}, order {order}, groups of {axis}: {wanted}, got {got}"


@pytest.mark.points(6)
def test_groups_of_several_axes():
    """A model's ranks (tp and pp together), everybody, and nobody else."""
    sizes = {"tp": 2, "cp": 2, "dp": 3, "pp": 2}
    for order in ("tp-cp-dp-pp", "dp-tp-pp-cp", "pp-dp-cp-tp"):
        for axes in (["tp", "pp"], ["dp", "cp"], ["cp", "tp", "pp"], ["tp", "cp", "dp", "pp"]):
            got = [list(map(int, g)) for g in lab.groups(sizes, order, axes)]
            wanted = members(sizes, order, axes)
            assert got == wanted, (
                f"{sizes}, order {order}, groups of {axes}: {wanted}, got {got}. A group holds all ranks that agree on "
                "every other axis, in the order of their numbers"
            )


@pytest.mark.points(4)
def test_grid_refuses():
    """An order that forgets an axis, a rank outside, an unknown axis: ValueError."""
    with pytest.raises(ValueError, match="order"):
        lab.coordinates(0, {"tp": 2, "dp": 2, "pp": 1}, "tp-dp")
    with pytest.raises(ValueError, match="order"):
        lab.coordinates(0, {"tp": 2, "dp": 2}, "tp-dp-dp")
    for rank in (4, -1):
        with pytest.raises(ValueError, match="rank"):
            lab.coordinates(rank, {"tp": 2, "dp": 2}, "tp-dp")
    with pytest.raises(ValueError, match="axes"):
        lab.groups({"tp": 2, "dp": 2}, "tp-dp", ["pp"])


def sends(comm, rings, chains):
    """Every rank sends around its rings, and both ways along its chains; what the simulator counts is the truth."""
    work = []
    for rows, size, closed in [(*r, True) for r in rings] + [(*c, False) for c in chains]:
        row = next(row for row in rows if comm.rank in row)
        k = row.index(comm.rank)
        for other in (k + 1, k - 1):
            inside = 0 <= other < len(row)
            if closed and len(row) > 1 and other == k + 1:
                work.append(comm.isend(np.zeros(size, np.int8), row[other % len(row)]))
                work.append(comm.irecv(row[k - 1]))
            elif not closed and inside:
                work.append(comm.isend(np.zeros(size, np.int8), row[other]))
                work.append(comm.irecv(row[other]))
    for w in work:
        w.wait()


def any_rings(a, b, c):
    return {"tp": a, "dp": b}, {"pp": c}


@pytest.mark.points(10)
def test_bytes_on_each_tier():
    """What a placement puts on the links inside and between nodes, against messages counted in the simulator."""
    rng = rng_of(11)
    any_bytes = [rng.randint(1, 900) for _ in range(3)]
    for sizes, per_node, ring, chain in (
        ({"tp": 2, "dp": 3, "pp": 4}, rng.choice([2, 3, 4, 6]), *any_rings(*any_bytes)),
        ({"tp": 4, "dp": 2, "pp": 2}, 4, {"tp": 1000, "dp": 100}, {"pp": 10}),
        ({"tp": 2, "dp": 3, "pp": 2}, 4, {"tp": 1000, "dp": 100}, {"pp": 10}),  # groups that straddle nodes
        ({"tp": 1, "dp": 6, "pp": 1}, 3, {"tp": 1000, "dp": 100}, {"pp": 10}),
        ({"tp": 2, "dp": 2, "pp": 4}, 8, {"dp": 7}, {"pp": 10}),
        ({"tp": 3, "dp": 2, "pp": 2}, 2, {"tp": 5}, {}),
    ):
        for order in ORDERS:
            rings = [(members(sizes, order, [axis]), size) for axis, size in ring.items()]
            chains = [(members(sizes, order, [axis]), size) for axis, size in chain.items()]
            nodes = math.prod(sizes.values()) // per_node
            run = simulate(
                sends, cluster=Cluster(nodes=nodes, gpus_per_node=per_node), rings=rings, chains=chains
            )
            out = [0] * run.ranks
            for message in run.traffic.where(tier=1):
                out[message.source] += message.bytes
            wanted = {"intra": run.traffic.where(tier=0).bytes, "inter": sum(out), "port": max(out)}
            got = lab.tier_bytes(sizes, order, per_node, ring, chain)
            assert got == wanted, (
                f"{sizes}, order {order}, {per_node} GPUs a node, ring {ring}, chain {chain}: counted {wanted}, got "
                f"{got}. A ring is closed (the last sends to the first), a chain is not, and is used both ways; a "
                "message crosses when the two ranks' nodes differ"
            )


# --------------------------------------------------------------------- one plan


@pytest.mark.points(14)
def test_memory_of_the_fullest_stage():
    """State, activations in flight and logits of each stage; the fullest counts."""
    rng = rng_of(1)
    job, plan = (
        job_of(3, 64, 4, 8, sequence=16, vocabulary=100),
        dict(dp=2, tp=2, pp=2, order="tp-dp-pp", micro_batch=1, zero=1, recompute=False),
    )
    # stage 0: 2 layers and the embedding, (98,304 + 6,400)/2 parameters at 2 + 2 + 6 bytes; 2 in flight of 2 layers
    got = lab.memory_bytes(job, plan)
    wanted = 52_352 * 10 + 2 * 2 * 34 * 16 * 64 / 2
    assert abs(got - wanted) < 1e-6 * wanted, f"by hand, stage 0 of {plan}: {wanted:.0f} bytes, got {got}"
    for _ in range(150):
        job, cluster = random_setting(rng)
        plan = random_plan(rng, job, cluster)
        got, wanted = lab.memory_bytes(job, plan), true_memory(job, plan)
        assert abs(got - wanted) <= 1e-9 * wanted, (
            f"{job}, {plan}: {wanted / 1e9:.4f} GB, got {got / 1e9:.4f}. Which stage is the fullest: the first (most "
            "in flight), or the last (logits)? Are there as many micro-batches as could be in flight?"
        )


@pytest.mark.points(14)
def test_seconds_of_a_step():
    """Compute, tensor, pipeline and data traffic on the tier that each uses, the bubble and the optimizer."""
    rng = rng_of(2)
    for _ in range(150):
        job, cluster = random_setting(rng)
        plan = random_plan(rng, job, cluster)
        got, wanted = lab.step_seconds(job, cluster, plan), true_seconds(job, cluster, plan)
        tiers = {
            a: tier(plan["tp"], plan["pp"], plan["dp"], plan["order"], cluster["gpus_per_node"], a)
            for a in ("tp", "pp", "dp")
        }
        assert abs(got - wanted) <= 1e-9 * wanted, (
            f"{job}, {cluster['gpus_per_node']} GPUs a node, {plan}: {wanted:.6f} s, got {got:.6f}. The slowest link of an "
            f"axis decides: {tiers}"
        )


# --------------------------------------------------------------------- the search


def checked_plan(job, cluster):
    plan = lab.best_plan(job, cluster)
    assert plan is not None, (
        f"there are plans that fit {job} on {cluster['nodes']} x {cluster['gpus_per_node']} GPUs"
    )
    problem = wrong_with(job, cluster, plan)
    assert problem is None, problem
    held = true_memory(job, plan)
    assert held <= cluster["memory"], (
        f"{plan} needs {held / 1e9:.1f} GB, a GPU has {cluster['memory'] / 1e9:g}"
    )
    return plan


@pytest.mark.points(8)
def test_best_plan_is_one_and_fits():
    """Six known jobs and eight random ones: degrees multiply out, everything divides, and memory suffices."""
    rng, tried = rng_of(5), 0
    settings = JOBS + [random_setting(rng) for _ in range(8)]
    for job, cluster in settings:
        if next(every_plan(job, cluster), None) is not None:
            checked_plan(job, cluster)
            tried += 1
    assert tried >= 7


@pytest.mark.points(6)
def test_best_plan_beats_the_rule_of_thumb():
    """Never slower than least-that-fits with micro-batches of one, and on average 1.6 times as quick."""
    ratios = []
    for job, cluster in JOBS:
        thumb, plan = baseline(job, cluster), checked_plan(job, cluster)
        if thumb is None:
            continue
        a, b = true_seconds(job, cluster, thumb), true_seconds(job, cluster, plan)
        assert b <= a * (1 + 1e-9), (
            f"{job}: the rule of thumb's {thumb} takes {a:.3f} s, yours {plan} {b:.3f}"
        )
        ratios.append(a / b)
    assert len(ratios) >= 5
    assert sum(ratios) / len(ratios) >= 1.6, (
        f"{sum(ratios) / len(ratios):.2f} times as quick on average; 1.6 is asked for. What do micro_batch, zero and "
        "recompute cost, and what do they buy?"
    )


@pytest.mark.points(8)
def test_best_plan_is_near_the_optimum():
    """Within 1 % of the best of all plans, placement included."""
    rng = rng_of(8)
    for job, cluster in JOBS + [random_setting(rng) for _ in range(5)]:
        plans = list(every_plan(job, cluster))
        if not plans:
            continue
        best = min(plans, key=lambda p: true_seconds(job, cluster, p))
        quickest, mine = true_seconds(job, cluster, best), checked_plan(job, cluster)
        got = true_seconds(job, cluster, mine)
        assert got <= 1.01 * quickest, (
            f"{job} on {cluster['nodes']} x {cluster['gpus_per_node']}: {best} takes {quickest:.4f} s, yours {mine} "
            f"{got:.4f}. Which of its values did your search not try?"
        )


@pytest.mark.points(4)
def test_nothing_fits():
    """No plan fits: None, rather than one that runs out of memory."""
    got = lab.best_plan(job_of(80, 8192, 64, 64), cluster_of(1, 4, memory=16e9))
    assert got is None, f"70 billion parameters on four GPUs of 16 GB: None, got {got}"
    got = lab.best_plan(
        job_of(4, 256, 4, 3), cluster_of(1, 8, memory=1e12)
    )  # the batch of 3 limits dp, 4 heads tp
    assert got is None or wrong_with(job_of(4, 256, 4, 3), cluster_of(1, 8, memory=1e12), got) is None, (
        f"got {got}"
    )


def machine_of(cluster, seed):
    """The machine as it is: slower than its data sheet, one part much slower, and some memory is taken."""
    rng = rng_of(seed)
    machine = {
        **cluster,
        "flops": cluster["flops"] * rng.uniform(0.45, 0.8),
        "half": cluster["half"] * rng.uniform(0.5, 3.0),
        "intra_bandwidth": cluster["intra_bandwidth"] * rng.uniform(0.5, 0.9),
        "inter_bandwidth": cluster["inter_bandwidth"] * rng.uniform(0.5, 0.9),
        "memory": cluster["memory"] * rng.uniform(0.8, 0.97),
    }
    part, factor = rng.choice([("half", 20), ("intra_bandwidth", 1 / 25), ("inter_bandwidth", 1 / 25)])
    machine[part] *= factor
    return machine


def meter(job, cluster, seed, budget):
    """(machine, measure, calls, seen, problems): steps of a machine, measured and counted here."""
    machine, calls, seen, problems = machine_of(cluster, seed), [], [], []

    def measure(plan):
        calls.append(plan)
        problem = wrong_with(job, cluster, plan)
        if problem:
            problems.append(problem)
        if problem or len(calls) > budget or true_memory(job, plan) > machine["memory"]:
            return None
        seen.append(plan)
        noise = rng_of(f"{seed} {sorted(plan.items())}").uniform(0.99, 1.01)
        return true_seconds(job, machine, plan) * noise

    return machine, measure, calls, seen, problems


def misleading(job, cluster, seed, budget):
    """The first seed from this one on with whose machine the data sheet's best plans are 20 % too slow."""
    plans = sorted(every_plan(job, cluster), key=lambda p: true_seconds(job, cluster, p))
    for trial in range(seed, seed + 30):
        machine = machine_of(cluster, trial)
        took = [
            true_seconds(job, machine, p) if true_memory(job, p) <= machine["memory"] else math.inf
            for p in plans
        ]
        if min(took[:budget]) > 1.2 * min(took):
            return trial
    return seed


@pytest.mark.points(12)
def test_tuned_plan_on_a_machine_that_is_not_its_data_sheet():
    """With 16 measurements: a plan that fits, on average within 5 % of the best, and never 25 % worse."""
    ratios = []
    for seed, number in ((3, 4), (102, 2), (106, 1), (4, 5)):
        job, cluster = JOBS[number]
        if (
            cluster["nodes"] > 1
        ):  # in a single node the data sheet's order is right, and you shouldn't lose it
            seed = misleading(job, cluster, seed, 16)
        machine, measure, calls, seen, problems = meter(job, cluster, seed, 16)
        plan = lab.tuned_plan(job, cluster, measure, 16)
        assert not problems, f"a plan that isn't one was measured: {problems[0]}"
        assert 1 <= len(calls) <= 16, (
            f"{len(calls)} measurements; there are 16, and without any you can't know"
        )
        problem = wrong_with(job, cluster, plan)
        assert problem is None, problem
        assert plan in seen, (
            f"{plan} is none of the {len(seen)} plans that measure gave seconds for. It returns None for a plan that runs "
            "out of memory on the real machine: don't return what you haven't seen run"
        )
        best = min(true_seconds(job, machine, p) for p in every_plan(job, machine))
        ratios.append(true_seconds(job, machine, plan) / best)
    worst, mean = max(ratios), sum(ratios) / len(ratios)
    assert worst <= 1.25, (
        f"on one machine {worst:.2f} times the best step. Which figure of the data sheet do your measurements contradict? "
        "Fit it, rank again, and measure where the model now points"
    )
    assert mean <= 1.05, (
        f"on average {mean:.3f} times the best step; 1.05 is asked for. Measuring only what the data sheet likes best isn't enough"
    )
