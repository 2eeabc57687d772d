"""The clock lets activations take a hop, and gradients none.

fails: test_clock_by_hand, test_clock_on_any_plan
"""

from solution import *  # noqa: F403
from solution import _queue


def clock(plan, forward, backward, weight=None, hop=0.0):
    _queue(plan, weight)
    stages = len(plan)
    took = {"F": forward, "B": backward, "W": weight}
    end, place, free = {}, [0] * stages, [0.0] * stages
    starts = [[] for _ in plan]
    moved = True
    while moved:
        moved = False
        for s in range(stages):
            while place[s] < len(plan[s]):
                kind, mb = plan[s][place[s]]
                needs = {"F": [("F", s - 1, mb)] * (s > 0), "B": [("F", s, mb)], "W": [("B", s, mb)]}[kind]
                if kind == "B" and s + 1 < stages:
                    needs.append(("B", s + 1, mb))
                if any(key not in end for key in needs):
                    break
                start = max([free[s], *(end[key] + hop * (kind == "F") for key in needs)])
                free[s] = end[kind, s, mb] = start + took[kind][s]
                starts[s].append(start)
                place[s] += 1
                moved = True
    for s in range(stages):
        if place[s] < len(plan[s]):
            raise ValueError(f"stage {s} is stuck")
    last, in_flight = "B" if weight is None else "W", []
    for passes in plan:
        held = most = 0
        for kind, _ in passes:
            held += (kind == "F") - (kind == last)
            most = max(most, held)
        in_flight.append(most)
    return {"makespan": max(free), "starts": starts, "in_flight": in_flight}
