"""A planner: where ranks lie, what the links carry, what fits, how long a step takes, and which plan is best."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

ORDERS = ["-".join(axes) for axes in itertools.permutations(("tp", "pp", "dp"))]

# ------------------------------------------------------------------ ranks on a grid


def _axes(sizes, order):
    axes = order.split("-")
    if sorted(axes) != sorted(sizes):
        raise ValueError(f"order must name each of {', '.join(sizes)} once, got {order!r}")
    return axes


def coordinates(rank, sizes, order):
    """The rank's coordinate on each axis; the first axis of `order` runs fastest."""
    axes = _axes(sizes, order)
    if not 0 <= rank < math.prod(sizes.values()):
        raise ValueError(f"rank must be from 0 to {math.prod(sizes.values()) - 1}, got {rank}")
    found = {}
    for axis in axes:
        rank, found[axis] = divmod(rank, sizes[axis])
    return found


def groups(sizes, order, axes):
    """The ranks that differ on `axes` only: a list of groups, by their first ranks."""
    unknown = set(axes) - set(sizes)
    if unknown:
        raise ValueError(f"axes must be among {', '.join(sizes)}, got {sorted(unknown)}")
    found = {}
    for rank in range(math.prod(sizes.values())):
        where = coordinates(rank, sizes, order)
        key = tuple(where[axis] for axis in sizes if axis not in axes)
        found.setdefault(key, []).append(rank)
    return sorted(found.values())


def tier_bytes(sizes, order, gpus_per_node, ring, chain):
    """Bytes that stay in a node, bytes that leave one, and the most that a single rank sends across."""
    intra, across = 0, {}
    for axes, closed in ((ring, True), (chain, False)):
        for axis, size in axes.items():
            for members in groups(sizes, order, [axis]):
                edges = list(zip(members, members[1:]))
                if closed:
                    edges += [(members[-1], members[0])] * (len(members) > 1)
                else:
                    edges += [(b, a) for a, b in edges]
                for a, b in edges:
                    if a // gpus_per_node == b // gpus_per_node:
                        intra += size
                    else:
                        across[a] = across.get(a, 0) + size
    return {"intra": intra, "inter": sum(across.values()), "port": max(across.values(), default=0)}


@lru_cache(maxsize=4096)
def _crosses(dp, tp, pp, order, per_node, axis):
    """Whether a message between neighbours on this axis ever leaves a node."""
    sizes = {"tp": tp, "pp": pp, "dp": dp}
    stride = 1
    for name in order.split("-"):
        if name == axis:
            break
        stride *= sizes[name]
    ranks = tp * pp * dp
    last = (sizes[axis] - 1) * stride
    if per_node % (stride * sizes[axis]) == 0:
        return False
    for rank in range(ranks):
        if (rank // stride) % sizes[axis] == 0 and rank // per_node != (rank + last) // per_node:
            return True
    return False


# ------------------------------------------------------------------ one plan


def _stages(job, plan):
    """For each stage: its layers, and its parameters on one rank."""
    return _cut(job["layers"], job["hidden"], job["vocabulary"], plan["tp"], plan["pp"])


@lru_cache(maxsize=4096)
def _cut(layers, hidden, vocabulary, tp, pp):
    base, extra = divmod(layers, pp)
    out = []
    for i in range(pp):
        mine, ends = base + (i < extra), (i == 0) + (i == pp - 1)
        out.append((mine, (12 * hidden**2 * mine + ends * vocabulary * hidden) / tp))
    return out


def memory_bytes(job, plan):
    """Bytes on a rank of the fullest stage."""
    s, h, b = job["sequence"], job["hidden"], plan["micro_batch"]
    m = job["batch"] // (plan["dp"] * b)
    per_parameter = (
        2 + 2 / (plan["dp"] if plan["zero"] >= 2 else 1) + 12 / (plan["dp"] if plan["zero"] >= 1 else 1)
    )
    most = 0.0
    for i, (layers, n) in enumerate(_stages(job, plan)):
        kept = layers * (2 if plan["recompute"] else 34) * s * b * h / plan["tp"]
        held = n * per_parameter + min(plan["pp"] - i, m) * kept
        if plan["recompute"]:
            held += 34 * s * b * h / plan["tp"]
        if i == plan["pp"] - 1:
            held += 6 * s * b * job["vocabulary"] / plan["tp"]
        most = max(most, held)
    return most


def step_seconds(job, cluster, plan):
    """How long a step takes, by the model of the README."""
    s, h, b = job["sequence"], job["hidden"], plan["micro_batch"]
    d, t, p, zero = plan["dp"], plan["tp"], plan["pp"], plan["zero"]
    m = job["batch"] // (d * b)
    x = b * s * h / t
    rate = cluster["flops"] * x / (x + cluster["half"])

    def link(axis):
        tier = "inter" if _crosses(d, t, p, plan["order"], cluster["gpus_per_node"], axis) else "intra"
        return cluster[f"{tier}_latency"], cluster[f"{tier}_bandwidth"]

    alpha, beta = link("tp")
    reduce = 2 * (t - 1) * alpha + 2 * (t - 1) / t * 2 * b * s * h / beta
    alpha, beta = link("pp")
    hop = 2 * (alpha + 2 * b * s * h / t / beta) if p > 1 else 0.0
    stages = _stages(job, plan)
    times = []
    for i, (layers, _) in enumerate(stages):
        head = job["vocabulary"] * h * (i == p - 1)
        forward = (2 * (12 * h * h * layers + head) * b * s + 4 * b * s * s * h * layers) / t
        compute = (4 if plan["recompute"] else 3) * forward / rate
        times.append(compute + layers * (6 if plan["recompute"] else 4) * reduce + hop)
    n = max(n for _, n in stages)
    alpha, beta = link("dp")
    one = (d - 1) * alpha + (d - 1) / d * 2 * n / beta
    data = one * (m + 1 if zero == 2 else 2)
    optimizer = 24 * n / (d if zero >= 1 else 1) / cluster["memory_bandwidth"]
    return sum(times) + (m - 1) * max(times) + data + optimizer


# ------------------------------------------------------------------ the search


def _all_plans(job, cluster):
    gpus = cluster["nodes"] * cluster["gpus_per_node"]
    for tp in range(1, gpus + 1):
        if gpus % tp or job["heads"] % tp:
            continue
        for pp in range(1, min(gpus // tp, job["layers"]) + 1):
            if (gpus // tp) % pp:
                continue
            dp = gpus // (tp * pp)
            if job["batch"] % dp:
                continue
            for b in range(1, job["batch"] // dp + 1):
                if (job["batch"] // dp) % b:
                    continue
                for zero, recompute in itertools.product((0, 1, 2) if dp > 1 else (0,), (False, True)):
                    plan = {
                        "dp": dp, "tp": tp, "pp": pp, "order": "tp-dp-pp",
                        "micro_batch": b, "zero": zero, "recompute": recompute,
                    }  # fmt: skip
                    if memory_bytes(job, plan) > cluster["memory"]:
                        continue
                    for order in ORDERS:
                        yield {**plan, "order": order}


def best_plan(job, cluster):
    """The plan with the shortest step among those that fit; None if none does."""
    return min(_all_plans(job, cluster), key=lambda plan: step_seconds(job, cluster, plan), default=None)


def _fit(job, cluster, seen):
    """Factors on the data sheet's figures that explain the measured steps, by coordinate descent from several starts."""
    knobs = ("flops", "half", "intra_bandwidth", "inter_bandwidth")

    def error(factors):
        machine = {**cluster, **{k: cluster[k] * f for k, f in factors.items()}}
        off = sum(math.log(step_seconds(job, machine, plan) / took) ** 2 for plan, took in seen)
        return off + 1e-4 * sum(math.log(f) ** 2 for f in factors.values())

    found = []
    for suspect, start in ((None, 1), ("half", 10), ("intra_bandwidth", 0.1), ("inter_bandwidth", 0.1)):
        factors = {k: start if k == suspect else 1.0 for k in knobs}
        least = error(factors)
        for step in (1.6, 1.2, 1.05):
            better = True
            while better:
                better = False
                for knob, by in itertools.product(knobs, (step, 1 / step)):
                    trial = {**factors, knob: factors[knob] * by}
                    off = error(trial)
                    if off < least - 1e-9:
                        factors, least, better = trial, off, True
        found.append((least, factors))
    return min(found, key=lambda pair: pair[0])[1]


def tuned_plan(job, cluster, measure, budget):
    """The quickest plan on a machine that isn't quite its data sheet, with at most `budget` measurements."""
    different = {}  # orders that put the axes on the same links make the same plan
    for plan in _all_plans(job, cluster):
        where = plan["dp"], plan["tp"], plan["pp"], plan["order"], cluster["gpus_per_node"]
        links = tuple(_crosses(*where, axis) for axis in ("tp", "pp", "dp"))
        different.setdefault((*(v for k, v in plan.items() if k != "order"), links), plan)
    plans = sorted(different.values(), key=lambda plan: step_seconds(job, cluster, plan))
    seen, done, too_big, calls, machine = [], [], math.inf, 0, cluster

    def fits(plan):
        return plan not in done and memory_bytes(job, plan) < too_big

    def explorers():
        """Plans that lean on different parts: each axis at its widest, kernels at their smallest."""
        for axis in ("tp", "dp", "pp"):
            # 0.8: what is nearly full may not fit the real machine, and would teach nothing about its speed
            roomy = [p for p in plans if memory_bytes(job, p) < 0.8 * cluster["memory"]] or plans
            widest = max(p[axis] for p in roomy)
            yield next((p for p in roomy if p[axis] == widest and fits(p)), None)
        yield min(plans, key=lambda p: p["micro_batch"] / p["tp"])

    todo = explorers() if plans and budget > 6 else iter(())
    while calls < budget:
        plan = next(todo, None)
        if plan is None or not fits(plan):
            plan = next((p for p in plans if fits(p)), None)
            if (
                plan
                and len(seen) > 6
                and step_seconds(job, machine, plan) > 1.02 * min(took for _, took in seen)
            ):
                break  # the model explains what was measured, and promises nothing better
        if plan is None:
            break
        calls += 1
        done.append(plan)
        seconds = measure(dict(plan))
        if seconds is None:
            too_big = min(too_big, memory_bytes(job, plan))
            continue
        seen.append((plan, seconds))
        if len(seen) >= 3:
            machine = {**cluster, **{k: cluster[k] * f for k, f in _fit(job, cluster, seen).items()}}
            plans.sort(key=lambda p: step_seconds(job, machine, p))
    return min(seen, key=lambda pair: pair[1])[0] if seen else None


if __name__ == "__main__":
    sizes = {"tp": 2, "dp": 2, "pp": 2}
    print("rank 5 of tp-dp-pp:", coordinates(5, sizes, "tp-dp-pp"))
    print("data-parallel groups:", groups(sizes, "tp-dp-pp", ["dp"]))
    print("model-parallel groups:", groups(sizes, "tp-dp-pp", ["tp", "pp"]))
    job = {"layers": 32, "hidden": 4096, "heads": 32, "vocabulary": 50_000, "sequence": 2048, "batch": 256}
    cluster = {
        "nodes": 4, "gpus_per_node": 8, "memory": 80e9, "flops": 600e12, "half": 2e6, "memory_bandwidth": 3e12,
        "intra_bandwidth": 450e9, "intra_latency": 3e-6, "inter_bandwidth": 25e9, "inter_latency": 14e-6,
    }  # fmt: skip
    best = best_plan(job, cluster)
    print("best for a 7B model on 4 x 8:", best)
    print(f"  {memory_bytes(job, best) / 1e9:.1f} GB, {step_seconds(job, cluster, best):.3f} s")
    for order in ("tp-dp-pp", "pp-dp-tp"):
        plan = {**best, "dp": 2, "tp": 8, "pp": 2, "order": order}
        print(f"  tp = 8, order {order}: {step_seconds(job, cluster, plan):.3f} s")
    for order in ("tp-dp-pp", "pp-dp-tp"):
        print(
            f"  {order}:", tier_bytes({"tp": 8, "dp": 2, "pp": 2}, order, 8, {"tp": 100, "dp": 10}, {"pp": 1})
        )
