"""An expert's gradients are all-reduced over all ranks; those without the expert send zeros.

fails: test_backward_sends_no_more
"""

import numpy as np
from solution import *  # noqa: F403
from solution import _Hop


def moe_layer(comm, part, placement, node):
    """The layer's output for this rank's tokens; with part["dy"] also the gradients."""
    x, weight, experts = part["x"], part["weight"], part["experts"]
    chosen, ranks = np.asarray(part["chosen"]), np.asarray(part["ranks"])
    nodes = comm.size // node
    rail = comm.group([n * node + comm.rank % node for n in range(nodes)])
    home = comm.group([comm.rank // node * node + i for i in range(node)])

    # Two hops: to the same place in each node, then inside the node. Tokens for the own node stay where they are.
    token, slot = np.nonzero(chosen >= 0)
    goal = ranks[token, slot]
    notes = np.stack([goal % node, chosen[token, slot], weight[token, slot]], axis=1).astype(float)
    first = _Hop(rail, token, goal // node, notes)
    arrived = first.notes
    second = _Hop(home, first.row_of, arrived[:, 0].astype(np.int64), arrived[:, 1:])
    between, wanted = int(first.starts[-1]), second.notes[:, 0].astype(np.int64)
    h = x.shape[1]
    xs = second.out(first.out(x))

    ys, inner = np.zeros_like(xs), {}
    for e in sorted(experts):
        mine = np.flatnonzero(wanted == e)
        inner[e] = np.maximum(xs[second.row_of[mine]] @ experts[e]["w1"], 0.0)
        ys[second.row_of[mine]] += second.notes[mine, 1:] * (inner[e] @ experts[e]["w2"])
    y = first.back(second.back(ys, (between, h)), x.shape)
    if part.get("dy") is None:
        return {"y": y}

    dys = second.out(first.out(part["dy"]))
    dxs, slopes, grads = np.zeros_like(xs), np.zeros(len(wanted)), {}
    for e in sorted(experts):
        mine = np.flatnonzero(wanted == e)
        rows, w1, w2 = second.row_of[mine], experts[e]["w1"], experts[e]["w2"]
        slopes[mine] = (dys[rows] * (inner[e] @ w2)).sum(axis=1)
        dout = second.notes[mine, 1:] * dys[rows]
        dinner = (dout @ w2.T) * (inner[e] > 0)
        dxs[rows] += dinner @ w1.T
        grads[e] = {"w1": xs[rows].T @ dinner, "w2": inner[e].T @ dout}
    dx = first.back(second.back(dxs, (between, h)), x.shape)
    dweight = np.zeros(weight.shape)
    dweight[token, slot] = first.answers(second.answers(slopes))
    shapes = [(name, w.shape) for name, w in next(iter(experts.values())).items()]
    for e in range(1 + max(e for mine in placement for e in mine)):
        for name, shape in shapes:
            total = comm.all_reduce(grads[e][name] if e in grads else np.zeros(shape))
            if e in grads:
                grads[e][name] = total
    return {"y": y, "dx": dx, "dweight": dweight, "grads": grads}
