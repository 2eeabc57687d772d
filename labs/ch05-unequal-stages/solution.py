"""Pipeline schedules for unequal stages: a clock, a bound, a partition and a search."""

from __future__ import annotations


def _queue(plan, weight):
    """The plan's passes per stage, checked: every micro-batch exactly once of each kind."""
    kinds = ("F", "B") if weight is None else ("F", "B", "W")
    if not plan:
        raise ValueError("plan has no stages")
    micro_batches = sum(kind == "F" for kind, _ in plan[0])
    for stage, passes in enumerate(plan):
        for kind in kinds:
            done = sorted(mb for k, mb in passes if k == kind)
            if done != list(range(micro_batches)):
                raise ValueError(
                    f"stage {stage}: {kind} of micro-batches {done}, wanted each of {micro_batches} exactly once"
                )
        strange = {k for k, _ in passes} - set(kinds)
        if strange:
            raise ValueError(f"stage {stage}: unknown passes {sorted(strange)}")
    return micro_batches


def clock(plan, forward, backward, weight=None, hop=0.0):
    """When every pass starts, the makespan, and what each stage holds at most."""
    _queue(plan, weight)
    stages = len(plan)
    took = {"F": forward, "B": backward, "W": weight}
    end = {}  # (kind, stage, micro-batch) -> seconds
    place, free = [0] * stages, [0.0] * stages
    starts = [[] for _ in plan]
    moved = True
    while moved:
        moved = False
        for s in range(stages):
            while place[s] < len(plan[s]):
                kind, mb = plan[s][place[s]]
                if kind == "F":
                    needs = [(("F", s - 1, mb), hop)] if s else []
                elif kind == "B":
                    needs = [(("F", s, mb), 0.0)]
                    if s + 1 < stages:
                        needs.append((("B", s + 1, mb), hop))
                else:
                    needs = [(("B", s, mb), 0.0)]
                if any(key not in end for key, _ in needs):
                    break
                start = max([free[s], *(end[key] + more for key, more in needs)])
                free[s] = end[kind, s, mb] = start + took[kind][s]
                starts[s].append(start)
                place[s] += 1
                moved = True
    for s in range(stages):
        if place[s] < len(plan[s]):
            kind, mb = plan[s][place[s]]
            raise ValueError(f"stage {s} waits for ever before {kind} of micro-batch {mb}")
    last = "B" if weight is None else "W"
    in_flight = []
    for passes in plan:
        held = most = 0
        for kind, _ in passes:
            held += (kind == "F") - (kind == last)
            most = max(most, held)
        in_flight.append(most)
    return {"makespan": max(free), "starts": starts, "in_flight": in_flight}


def lower_bound(forward, backward, micro_batches, hop=0.0, limits=None):
    """Seconds that no schedule can beat."""
    stages, best, before = len(forward), 0.0, 0.0
    for s in range(stages):
        rest = sum(forward[s:]) + sum(backward[s:]) + 2 * hop * (stages - 1 - s)
        best = max(best, before + micro_batches * (forward[s] + backward[s]))
        if limits is not None:
            best = max(best, before + micro_batches * rest / limits[s])
        before += forward[s] + backward[s] + 2 * hop
    return best


def partition(costs, fixed, saved, stages, micro_batches, memory=None):
    """Layers per stage, so that the slowest stage is as quick as can be and every stage fits."""
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"stages must be from 1 to {layers}, the number of layers, got {stages}")

    def summed(values):
        total = [0]
        for value in values:
            total.append(total[-1] + value)
        return total

    cost, still, live = summed(costs), summed(fixed), summed(saved)
    best = {0: (0, ())}  # layers placed -> (slowest stage so far, sizes)
    for s in range(stages):
        flight = min(stages - s, micro_batches)
        row = {}
        for start, (slowest, sizes) in best.items():
            for end in range(start + 1, layers - (stages - 1 - s) + 1):
                if memory is not None:
                    held = still[end] - still[start] + flight * (live[end] - live[start])
                    if held > memory:
                        break
                found = max(slowest, cost[end] - cost[start])
                if end not in row or found < row[end][0]:
                    row[end] = found, (*sizes, end - start)
        best = row
    if layers not in best:
        raise ValueError(f"memory: no cut into {stages} stages fits {memory}")
    return list(best[layers][1])


def _warmed_up(micro_batches, warmup, weight=None):
    """Warm up, alternate, drain; weight gradients right after their backward pass."""
    plan = []
    for ahead in warmup:
        passes = [("F", mb) for mb in range(ahead)]
        for mb in range(micro_batches):
            if mb + ahead < micro_batches:
                passes.append(("F", mb + ahead))
            passes.append(("B", mb))
            if weight is not None:
                passes.append(("W", mb))
        plan.append(passes)
    return plan


def _listed(forward, backward, micro_batches, limits, weight, hop, patience):
    """List scheduling: the pass that can start first goes first; backward before forward before weight.

    patience: how long a stage rather waits for a backward pass that is on its way than
    start a forward pass.
    """
    stages = len(forward)
    end, plan = {}, [[] for _ in range(stages)]
    free, held = [0.0] * stages, [0] * stages
    nth = {kind: [0] * stages for kind in "FBW"}
    left = stages * micro_batches * (2 if weight is None else 3)
    for _ in range(left):
        best = None
        for s in range(stages):
            options = []
            mb = nth["B"][s]
            if mb < nth["F"][s] and (s == stages - 1 or ("B", s + 1, mb) in end):
                came = end["B", s + 1, mb] + hop if s < stages - 1 else 0.0
                options.append((max(free[s], came, end["F", s, mb]), 0, "B", mb))
            mb = nth["F"][s]
            if mb < micro_batches and held[s] < limits[s] and (s == 0 or ("F", s - 1, mb) in end):
                came = end["F", s - 1, mb] + hop if s else 0.0
                options.append((max(free[s], came), 1, "F", mb))
            mb = nth["W"][s]
            if weight is not None and mb < nth["B"][s]:
                options.append((free[s], 2, "W", mb))
            if not options:
                continue
            start, rank, kind, mb = min(options, key=lambda o: (o[0] + (o[1] > 0) * patience, o[1]))
            if best is None or (start, rank) < best[:2]:
                best = start, rank, kind, mb, s
        start, _, kind, mb, s = best
        free[s] = end[kind, s, mb] = start + {"F": forward, "B": backward, "W": weight}[kind][s]
        nth[kind][s] += 1
        held[s] += (kind == "F") - (kind == ("B" if weight is None else "W"))
        plan[s].append((kind, mb))
    return plan


def schedule(forward, backward, micro_batches, limits, weight=None, hop=0.0):
    """The quickest plan found among several families, none of which exceeds the limits."""
    stages = len(forward)
    if len(limits) != stages or min(limits) < 1:
        raise ValueError(f"limits must be {stages} whole numbers of at least 1, got {limits}")
    plans = []
    for more in (1.0, 1.5, 2.0, 3.0):
        warmup = []
        for s in range(stages):
            ahead = min(int(more * (stages - 1 - s)), limits[s] - 1, micro_batches)
            warmup.append(min(ahead, warmup[-1]) if warmup else ahead)
        plans.append(_warmed_up(micro_batches, warmup, weight))
    slowest = max(f + b for f, b in zip(forward, backward))
    for extra in range(0, 2 * stages):
        capped = [min(limit, stages - s + extra) for s, limit in enumerate(limits)]
        for patience in (0.0, 0.25 * slowest, 0.5 * slowest):
            plans.append(_listed(forward, backward, micro_batches, capped, weight, hop, patience))
        if capped == list(limits):
            break
    return min(plans, key=lambda plan: clock(plan, forward, backward, weight, hop)["makespan"])


if __name__ == "__main__":
    f, b, limits, m = [4.0, 1.0, 2.0, 2.0], [4.0, 6.0, 1.0, 3.0], [3, 5, 1, 1], 13
    plain = _warmed_up(m, [2, 2, 0, 0])  # P - 1 - s, cut to the limits
    for hop in (0.0, 1.0):
        ours = schedule(f, b, m, limits, hop=hop)
        print(
            f"hop {hop:g}: 1F1B {clock(plain, f, b, hop=hop)['makespan']:g},"
            f" ours {clock(ours, f, b, hop=hop)['makespan']:g} seconds,"
            f" bound {lower_bound(f, b, m, hop, limits):g}"
        )
    print("ours, stage 0:", " ".join(f"{kind}{mb}" for kind, mb in ours[0]))
    print("in flight:", clock(ours, f, b, hop=1.0)["in_flight"], "of", limits)
    halves = [2.0, 3.0, 0.5, 1.5]
    cut = schedule(f, halves, m, limits, weight=halves, hop=1.0)
    print(f"backward passes in halves: {clock(cut, f, halves, halves, hop=1.0)['makespan']:g} seconds")
    costs = [1, 1, 1, 1, 1, 1, 1, 5]
    print("cut", costs, "in 3:", partition(costs, [1] * 8, [2] * 8, 3, 8), end="")
    print(", with memory for 18:", partition(costs, [1] * 8, [2] * 8, 3, 8, memory=18))
