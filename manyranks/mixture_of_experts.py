# Generated from chapters/beyond_2_mixture_of_experts.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""Mixture of experts: routing, capacity, balancing, expert parallelism, and node-limited routing."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace, device

from manyranks.runtime import Array, Comm
from manyranks.runtime.hardware import check_count
from manyranks.tensor_parallel import Params, mlp_backward, mlp_forward

__all__ = [
    "EXPERT_ARRAYS",
    "Exchange",
    "Routing",
    "TINY",
    "Traffic",
    "capacity",
    "combine",
    "dispatch",
    "exchange_counts",
    "expected_nodes",
    "expert_flops",
    "expert_load",
    "expert_parallel_backward",
    "expert_parallel_forward",
    "expert_parallel_traffic",
    "experts_backward",
    "experts_forward",
    "imbalance",
    "load_balancing_loss",
    "moe_backward",
    "moe_forward",
    "moe_shapes",
    "node_limited_choice",
    "places_before",
    "positions",
    "reduce_moe_gradients",
    "route",
    "route_backward",
    "shard_experts",
    "steered_tokens",
    "time_experts",
    "top_k",
    "two_hop_forward",
    "update_bias",
]


def _check_choice(experts: int, k: int) -> None:
    if not 1 <= k <= experts:
        raise ValueError(f"k must be from 1 to the {experts} experts, got {k}")


def _numbers(x: Array, n: int) -> Array:
    """0 to n - 1, where x is."""
    return array_namespace(x).arange(n, device=device(x))


def top_k(scores: Array, k: int) -> Array:
    """The numbers of the k largest entries of each row, the largest first.

    Equal entries come in the order of their numbers, so that every rank and every library
    chooses alike.

    Args:
        scores: shape (n, E).
        k: from 1 to E.

    Returns: whole numbers of shape (n, k).

    >>> top_k(np.array([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]), 2)
    array([[1, 2],
           [0, 2]])
    """
    _check_choice(scores.shape[1], k)
    xp = array_namespace(scores)
    return xp.argsort(scores, axis=1, descending=True, stable=True)[:, :k]


TINY = 1e-20  # added to sums of scores, which may all be 0 for a sigmoid


class Routing(NamedTuple):
    """Where the tokens go, and how much each answer counts.

    Attributes:
        chosen: shape (n, k), whole numbers: each token's experts, the best first.
        weights: shape (n, k): what each expert's answer is multiplied by.
        scores: shape (n, E), the gate's values, before any choice.
        gate, renormalise: as `route` was told.
    """

    chosen: Array
    weights: Array
    scores: Array
    gate: str
    renormalise: bool


def route(
    logits: Array,
    k: int,
    gate: str = "softmax",
    bias: Array | None = None,
    renormalise: bool = True,
    groups: int = 1,
    limit: int | None = None,
) -> Routing:
    """Choose k of E experts for every token.

    Args:
        logits: shape (n, E): the router's product, ``x @ params["router"]``.
        k: how many experts a token goes to.
        gate: "softmax" over the experts, or "sigmoid" for each by itself.
        bias: shape (E,), added to the scores for the choice only; the weights don't see
            it.
        renormalise: divide the chosen scores by their sum, so that weights sum to 1.
        groups, limit: the experts' nodes, and how many of them a token may go to; see
            `node_limited_choice`. No limit by default.

    Raises: ValueError for k outside 1 to E, an unknown gate, a bias of another shape.

    >>> r = route(np.array([[0.0, 2.0, 1.0]]), k=2)
    >>> r.chosen, r.weights.round(3)
    (array([[1, 2]]), array([[0.731, 0.269]]))
    """
    xp, experts = array_namespace(logits), logits.shape[1]
    _check_choice(experts, k)
    if gate == "softmax":
        scores = xp.exp(logits - xp.max(logits, axis=1, keepdims=True))
        scores = scores / xp.sum(scores, axis=1, keepdims=True)
    elif gate == "sigmoid":
        scores = xp.exp(-xp.logaddexp(0 * logits, -logits))  # 1 / (1 + exp(-logits))
    else:
        raise ValueError(f"gate must be 'softmax' or 'sigmoid', got {gate!r}")
    if bias is not None and tuple(bias.shape) != (experts,):
        raise ValueError(f"bias must have shape ({experts},), got {tuple(bias.shape)}")
    ranking = scores if bias is None else scores + bias
    chosen = top_k(ranking, k) if limit is None else node_limited_choice(ranking, k, groups, limit)
    weights = scores[_numbers(logits, len(logits))[:, None], chosen]
    if renormalise:
        weights = weights / (xp.sum(weights, axis=1, keepdims=True) + TINY)
    return Routing(chosen, weights, scores, gate, renormalise)


def route_backward(routing: Routing, dweights: Array, dscores: Array | None = None) -> Array:
    """The gradient with respect to the router's logits. The choice itself has none.

    Args:
        routing: what `route` returned.
        dweights: gradient of the weights, shape (n, k).
        dscores: gradient that reaches all scores by another way, shape (n, E): the
            auxiliary loss's.
    """
    xp, (chosen, weights, scores, gate, renormalise) = (
        array_namespace(dweights),
        routing,
    )
    rows = _numbers(scores, len(scores))[:, None]
    if renormalise:
        total = xp.sum(scores[rows, chosen], axis=1, keepdims=True) + TINY
        dweights = (dweights - xp.sum(dweights * weights, axis=1, keepdims=True)) / total
    ds = scores * 0
    ds[rows, chosen] = dweights
    if dscores is not None:
        ds = ds + dscores
    if gate == "sigmoid":
        return ds * scores * (1 - scores)
    return scores * (ds - xp.sum(ds * scores, axis=1, keepdims=True))


def moe_shapes(hidden: int, ffn: int, experts: int) -> dict[str, tuple[int, ...]]:
    """The arrays of a layer: "router" (h, E), "w1" (E, h, f), "w2" (E, f, h)."""
    return {
        "router": (hidden, experts),
        "w1": (experts, hidden, ffn),
        "w2": (experts, ffn, hidden),
    }


#: The arrays that have an axis of experts: what `shard_experts` cuts.
EXPERT_ARRAYS = ("w1", "w2")


def _pieces(rows: Array, counts: Sequence[int]) -> list[Array]:
    """The first counts[0] rows, the next counts[1], and so on."""
    ends = np.cumsum([0, *counts]).tolist()
    if ends[-1] != len(rows):
        raise ValueError(f"the counts sum to {ends[-1]}, got {len(rows)} rows")
    return [rows[a:b] for a, b in zip(ends, ends[1:])]


def experts_forward(params: Params, rows: Array, counts: Sequence[int]) -> tuple[Array, list[dict]]:
    """Every expert on its own rows: a grouped matrix product, written as a loop.

    Args:
        params: "w1" (L, h, f) and "w2" (L, f, h) of L experts.
        rows: shape (m, h), expert 0's rows first.
        counts: rows of each of the L experts; zero is allowed.

    Returns: shape (m, h), and what `experts_backward` needs.
    """
    if len(counts) != len(params["w1"]):
        raise ValueError(
            f"params must hold {len(counts)} experts, got {len(params['w1'])}; "
            "`shard_experts` gives a rank its own"
        )
    outs, saved = [], []
    for e, mine in enumerate(_pieces(rows, counts)):
        y, kept = mlp_forward({n: params[n][e] for n in EXPERT_ARRAYS}, mine)
        outs.append(y)
        saved.append(kept)
    return array_namespace(rows).concat(outs), saved


def experts_backward(params: Params, saved: list[dict], dy: Array) -> tuple[Array, dict[str, Array]]:
    """The gradients of the rows, shape (m, h), and of the experts' arrays."""
    xp, dx, grads = array_namespace(dy), [], []
    pieces = _pieces(dy, [len(kept["x"]) for kept in saved])
    for e, (kept, d) in enumerate(zip(saved, pieces)):
        d, g = mlp_backward({n: params[n][e] for n in EXPERT_ARRAYS}, kept, d)
        dx.append(d)
        grads.append(g)
    return xp.concat(dx), {n: xp.stack([g[n] for g in grads]) for n in EXPERT_ARRAYS}


def expert_load(chosen: Array, experts: int, kept: Array | None = None) -> Array:
    """How many (token, choice) pairs go to each expert: whole numbers of shape (E,).

    Args:
        chosen: shape (n, k).
        experts: E.
        kept: shape (n, k), true where a pair counts; all do by default.

    >>> expert_load(np.array([[0, 2], [2, 1]]), 4)
    array([1, 1, 2, 0])
    """
    xp = array_namespace(chosen)
    hits = chosen[:, :, None] == _numbers(chosen, experts)
    if kept is not None:
        hits = hits & kept[:, :, None]
    return xp.sum(hits, axis=(0, 1))


def _sorted_pairs(chosen: Array, kept: Array | None) -> Array:
    """The kept pairs' places in the flat (n·k,) list, sorted by expert, stably."""
    xp = array_namespace(chosen)
    flat = chosen.reshape((-1,))
    order = xp.argsort(flat, stable=True)
    return order if kept is None else order[kept.reshape((-1,))[order]]


def _spread(rows: Array, order: Array, shape: tuple[int, ...]) -> Array:
    """Rows back at their pairs' places, (n, k, h); zeros for the pairs that were dropped."""
    n, k, hidden = shape
    pairs = array_namespace(rows).zeros((n * k, hidden), dtype=rows.dtype, device=device(rows))
    pairs[order] = rows
    return pairs.reshape(shape)


def expert_flops(params: Params, rows: int) -> int:
    """FLOPs of the two products of `rows` rows, forward; the backward costs twice that."""
    return 4 * rows * math.prod(params["w1"].shape[1:])


def _mix_forward(
    comm: Comm | None,
    params: Params,
    x: Array,
    chosen: Array,
    weights: Array,
    kept: Array | None,
    experts: int,
) -> tuple[Array, dict]:
    """The layer once it is known who goes where; on one rank without `comm`."""
    xp, shape = array_namespace(x), (*chosen.shape, x.shape[1])
    order = _sorted_pairs(chosen, kept)
    load = expert_load(chosen, experts, kept)
    rows, plan, counts = x[order // shape[1]], None, load.tolist()
    if comm is not None:
        plan = exchange_counts(comm, load)
        rows, counts = dispatch(comm, rows, plan), plan.counts
    y, saved = experts_forward(params, rows, counts)
    if comm is not None:
        comm.compute(flops=expert_flops(params, len(rows)), label="experts")
        y = combine(comm, y, plan)
    pairs = _spread(y, order, shape)
    out = xp.sum(pairs * weights[:, :, None], axis=1)
    return out, {"pairs": pairs, "order": order, "plan": plan, "experts": saved}


def _mix_backward(
    comm: Comm | None, params: Params, saved: dict, weights: Array, dy: Array
) -> tuple[Array, Array, dict[str, Array]]:
    """Gradients of x, of the weights, and of the experts' arrays."""
    xp, pairs, order = array_namespace(dy), saved["pairs"], saved["order"]
    dweights = xp.sum(pairs * dy[:, None, :], axis=2)
    d = (dy[:, None, :] * weights[:, :, None]).reshape((-1, dy.shape[1]))[order]
    if comm is not None:
        d = dispatch(comm, d, saved["plan"])
        comm.compute(flops=2 * expert_flops(params, len(d)), label="experts backward")
    d, grads = experts_backward(params, saved["experts"], d)
    if comm is not None:
        d = combine(comm, d, saved["plan"])
    return xp.sum(_spread(d, order, tuple(pairs.shape)), axis=1), dweights, grads


def moe_forward(
    params: Params,
    x: Array,
    k: int,
    capacity_factor: float | None = None,
    comm: Comm | None = None,
    **how: Any,
) -> tuple[Array, dict]:
    """A mixture-of-experts layer on one rank: what every parallel run of it has to equal.

    Args:
        params: of `moe_shapes`.
        x: tokens, shape (n, h).
        k: experts a token.
        capacity_factor: pairs beyond `capacity` are dropped, in the order of `positions`.
            None drops none.
        comm: None here; see `expert_parallel_forward`.
        **how: gate, bias, renormalise, groups, limit of `route`.

    Returns: shape (n, h), without the residual: zeros for a token that lost all its
    places. And what `moe_backward` needs; "routing" and "kept" are in it.
    """
    experts = params["router"].shape[1]
    routing, kept = route(x @ params["router"], k, **how), None
    if capacity_factor is not None:
        taken, tokens = None, len(x)
        if comm is not None:
            taken, tokens = places_before(comm, routing.chosen, experts)
        places = capacity(tokens, experts, k, capacity_factor)
        kept = positions(routing.chosen, experts, taken) < places
    y, saved = _mix_forward(comm, params, x, routing.chosen, routing.weights, kept, experts)
    return y, {**saved, "x": x, "routing": routing, "kept": kept}


def moe_backward(
    params: Params,
    saved: dict,
    dy: Array,
    dscores: Array | None = None,
    comm: Comm | None = None,
) -> tuple[Array, dict[str, Array]]:
    """The gradients of `moe_forward`: of x, and of the arrays.

    Args:
        params, saved, comm: as in the forward pass.
        dy: gradient of the result, shape (n, h).
        dscores: the auxiliary loss's gradient, shape (n, E), if there is one.
    """
    routing = saved["routing"]
    dx, dweights, grads = _mix_backward(comm, params, saved, routing.weights, dy)
    dlogits = route_backward(routing, dweights, dscores)
    grads["router"] = saved["x"].swapaxes(0, 1) @ dlogits
    return dx + dlogits @ params["router"].swapaxes(0, 1), grads


def capacity(tokens: int, experts: int, k: int, factor: float) -> int:
    """Places that every expert has: factor x the balanced share, rounded up.

    >>> capacity(tokens=100, experts=8, k=2, factor=1.25)
    32
    """
    _check_choice(experts, k)
    check_count("tokens", tokens, 0)
    if not factor > 0 or not math.isfinite(factor):
        raise ValueError(f"factor must be a finite number above 0, got {factor}")
    return math.ceil(round(factor * tokens * k / experts, 9))


def positions(chosen: Array, experts: int, taken: Array | None = None) -> Array:
    """Each pair's place in its expert's queue, from 0; a place beyond the capacity is none.

    First choices queue before second ones, and so on; within a choice, tokens queue in
    their order.

    Args:
        chosen: shape (n, k).
        experts: E.
        taken: shape (k, E): how many places are taken before this array's first token, in
            each choice. On several ranks: see `places_before`.

    Returns: whole numbers of shape (n, k).

    >>> positions(np.array([[0, 1], [1, 0], [0, 1]]), 2)
    array([[0, 1],
           [0, 2],
           [1, 2]])
    """
    xp = array_namespace(chosen)
    hits = xp.astype(chosen[:, :, None] == _numbers(chosen, experts), xp.int64)
    earlier = xp.cumulative_sum(hits, axis=0) - hits  # tokens before, same choice
    if taken is None:
        per_choice = xp.sum(hits, axis=0)  # (k, E)
        taken = xp.cumulative_sum(per_choice, axis=0) - per_choice
    return xp.sum(hits * (earlier + taken), axis=2)


def imbalance(load: Sequence[float] | Array) -> float:
    """The largest load over the mean one: 1 when balanced, E when one expert has all.

    >>> imbalance([4, 0, 2, 2])
    2.0
    """
    load = np.asarray(load, dtype=float)
    return float(load.max() / load.mean()) if load.sum() else 1.0


def load_balancing_loss(
    scores: Array,
    chosen: Array,
    load: Array | None = None,
    tokens: int | None = None,
) -> tuple[Array, Array]:
    """The auxiliary loss E·sum(f_i P_i), and its gradient with respect to the scores.

    f_i is expert i's share of the n·k pairs, P_i the mean over tokens of its normalised
    score. Both sum to 1, so the loss is 1 when f or P is uniform. No gradient goes
    through f: it counts.

    Args:
        scores: shape (n, E), of `route`.
        chosen: shape (n, k).
        load, tokens: of the whole batch, where these are one rank's rows: (E,) and the
            number of tokens. The loss returned is then this rank's term; the terms' sum
            is the batch's loss.

    Returns: a scalar, and an array of the shape of `scores`.

    >>> even = np.full((4, 2), 0.5)
    >>> float(load_balancing_loss(even, np.array([[0], [1], [0], [1]]))[0])
    1.0
    """
    xp, experts = array_namespace(scores), scores.shape[1]
    tokens = len(scores) if tokens is None else tokens
    load = expert_load(chosen, experts) if load is None else load
    pull = xp.astype(load, scores.dtype) * (experts / max(tokens * chosen.shape[1], 1))
    total = xp.sum(scores, axis=1, keepdims=True) + TINY
    p = scores / total  # a softmax's rows sum to 1 already, a sigmoid's don't
    dp = pull / max(tokens, 1) + p * 0
    loss = xp.sum(p * dp)
    return loss, (dp - xp.sum(dp * p, axis=1, keepdims=True)) / total


def update_bias(bias: Array, load: Array, speed: float) -> Array:
    """A step of balancing without a loss: busy experts' biases down, idle ones' up.

    Args:
        bias, load: shape (E,); load is the whole batch's.
        speed: the step; DeepSeek-V3 took 0.001.

    >>> update_bias(np.zeros(3), np.array([5, 1, 3]), 0.25)
    array([-0.25,  0.25,  0.  ])
    """
    xp = array_namespace(bias)
    load = xp.astype(load, bias.dtype)
    return bias + speed * xp.sign(xp.mean(load) - load)


def _experts_each(experts: int, parts: int, name: str = "ranks") -> int:
    if check_count(name, parts) and experts % parts:
        raise ValueError(f"{name} must divide the {experts} experts, got {parts}")
    return experts // parts


def shard_experts(params: Params, rank: int, ranks: int) -> dict[str, Array]:
    """A rank's part: its E / ranks experts, and everything else whole.

    Raises: ValueError if the ranks don't divide the experts.

    >>> layer = {name: np.ones(s) for name, s in moe_shapes(4, 8, 6).items()}
    >>> {name: p.shape for name, p in shard_experts(layer, 1, 3).items()}
    {'router': (4, 6), 'w1': (2, 4, 8), 'w2': (2, 8, 4)}
    """
    each = _experts_each(params["router"].shape[1], ranks)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be from 0 to {ranks - 1}, got {rank}")
    mine = slice(rank * each, (rank + 1) * each)
    return {n: p[mine] if n in EXPERT_ARRAYS else p for n, p in params.items()}


class Exchange(NamedTuple):
    """Who gets how many rows of whom.

    Attributes:
        sent: ``sent[r][e]`` rows go to rank r's expert e.
        received: ``received[r][e]`` rows come from rank r for this rank's expert e.
    """

    sent: list[list[int]]
    received: list[list[int]]

    @property
    def counts(self) -> list[int]:
        """Rows of each of this rank's experts, from all ranks."""
        return [sum(column) for column in zip(*self.received)]


def exchange_counts(comm: Comm, load: Array) -> Exchange:
    """Tell every rank how many rows it will get for each of its experts.

    Args:
        comm: the expert-parallel ranks.
        load: shape (E,), this rank's rows for each expert.
    """
    each = _experts_each(len(load), comm.size)
    load = comm.xp.astype(load, comm.xp.int64)
    parts = [load[r * each : (r + 1) * each] for r in range(comm.size)]
    received = comm.all_to_all(parts)
    return Exchange([p.tolist() for p in parts], [p.tolist() for p in received])


def dispatch(comm: Comm, rows: Array, plan: Exchange) -> Array:
    """Send each row to its expert's rank. Also the backward of `combine`.

    Args:
        comm: the expert-parallel ranks.
        rows: shape (m, h), sorted by expert.
        plan: of `exchange_counts`.

    Returns: this rank's experts' rows, sorted by expert, then by sender.
    """
    got = comm.all_to_all(_pieces(rows, [sum(counts) for counts in plan.sent]))
    by_sender = [_pieces(x, counts) for x, counts in zip(got, plan.received)]
    return comm.xp.concat([x for column in zip(*by_sender) for x in column])


def combine(comm: Comm, rows: Array, plan: Exchange) -> Array:
    """Send each row back where it came from: undoes `dispatch`, and is its backward."""
    by_expert = _pieces(rows, [n for column in zip(*plan.received) for n in column])
    ranks = range(comm.size)
    back = [comm.xp.concat(by_expert[r :: comm.size]) for r in ranks]
    return comm.xp.concat(comm.all_to_all(back))


def places_before(comm: Comm, chosen: Array, experts: int) -> tuple[Array, int]:
    """What `positions` needs to queue the tokens of all ranks, rank 0's first.

    Every rank tells every other how many pairs of each choice it has for each expert.

    Returns: places taken before this rank's tokens, shape (k, E), and all ranks' tokens.
    """
    xp = comm.xp
    mine = xp.stack([expert_load(chosen[:, j : j + 1], experts) for j in range(chosen.shape[1])])
    table = comm.all_gather(xp.astype(mine, xp.int64)[None])  # (ranks, k, E)
    per_choice = xp.sum(table, axis=0)
    earlier_choices = xp.cumulative_sum(per_choice, axis=0) - per_choice
    return earlier_choices + xp.sum(table[: comm.rank], axis=0), int(xp.sum(per_choice[0]))


def expert_parallel_forward(
    comm: Comm,
    params: Params,
    x: Array,
    k: int,
    capacity_factor: float | None = None,
    **how: Any,
) -> tuple[Array, dict]:
    """`moe_forward` with the experts spread over `comm`'s ranks: two all-to-alls.

    Args:
        comm: the expert-parallel ranks.
        params: this rank's part, by `shard_experts`.
        x: this rank's tokens, shape (n, h); n may differ from rank to rank, and be 0.
        k, capacity_factor, **how: as for `moe_forward`. The capacity is that of all ranks'
            tokens, which queue in the order of their ranks.

    Returns: this rank's rows, shape (n, h), and what `expert_parallel_backward` needs.
    """
    return moe_forward(params, x, k, capacity_factor, comm, **how)


def expert_parallel_backward(
    comm: Comm, params: Params, saved: dict, dy: Array, dscores: Array | None = None
) -> tuple[Array, dict[str, Array]]:
    """The gradients of `expert_parallel_forward`: two all-to-alls more.

    Returns: the gradient of this rank's x; and of the arrays: this rank's experts' are
    complete, summed over all ranks' tokens; the router's is this rank's tokens' term.
    """
    return moe_backward(params, saved, dy, dscores, comm)


class Traffic(NamedTuple):
    """Bytes that one rank sends in one layer, forward and backward."""

    dispatch: float
    combine: float
    backward: float
    counts: int

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


def expert_parallel_traffic(
    tokens: int, k: int, hidden: int, itemsize: int, ranks: int, experts: int
) -> Traffic:
    """What expert parallelism sends when the routing is balanced, for one rank.

    Args:
        tokens: of one rank.
        k: experts a token.
        hidden, itemsize: elements of a row, and bytes of an element.
        ranks: expert-parallel ranks; a share of 1/ranks of the pairs stays at home.
        experts: their counts go ahead, 8 bytes each.

    >>> expert_parallel_traffic(4096, 8, 7168, 2, ranks=64, experts=256).dispatch / 1e6
    462.422016
    """
    _check_choice(experts, k)
    each = _experts_each(experts, ranks)
    pairs = check_count("tokens", tokens, 0) * k
    one_way = pairs * hidden * itemsize * (ranks - 1) / ranks
    return Traffic(one_way, one_way, 2 * one_way, 8 * each * (ranks - 1))


def reduce_moe_gradients(grads: Params, dp: Comm, expert_dp: Comm) -> dict[str, Array]:
    """The gradients of the mean loss, from each rank's gradients of its own mean loss.

    Args:
        grads: one rank's; experts' arrays are those of `expert_parallel_backward`.
        dp: all ranks that hold different tokens. What every rank has whole is averaged
            over them.
        expert_dp: those of them that hold the same experts. Their gradients are summed
            over it, and still divided by `dp.size`: they hold the tokens of all of `dp`.
    """
    return {
        name: (expert_dp if name in EXPERT_ARRAYS else dp).all_reduce(g) / dp.size
        for name, g in grads.items()
    }


def expected_nodes(experts: int, k: int, nodes: int) -> float:
    """Nodes that a token needs if it chooses k of the E experts at random.

    >>> round(expected_nodes(256, 8, 8), 3)
    5.295
    """
    _check_choice(experts, k)
    each = _experts_each(experts, nodes, "nodes")
    return nodes * (1 - math.comb(experts - each, k) / math.comb(experts, k))


def node_limited_choice(scores: Array, k: int, groups: int, limit: int) -> Array:
    """The k best experts of each token on at most `limit` of the nodes.

    A node's score is the sum of its best ceil(k / limit) experts' scores. The `limit` best
    nodes stay; the k best experts are chosen among theirs.

    Args:
        scores: shape (n, E), bias included.
        k: experts a token.
        groups: nodes; each has E / groups experts, in order.
        limit: nodes a token may go to.

    Raises: ValueError if groups doesn't divide E, or the nodes left have fewer than k.
    Source: DeepSeek-V3 technical report, section 2.1.2.

    >>> scores = np.array([[0.9, 0.1, 0.6, 0.5]])
    >>> top_k(scores, 2), node_limited_choice(scores, 2, groups=2, limit=1)
    (array([[0, 2]]), array([[2, 3]]))
    """
    xp, (n, experts) = array_namespace(scores), scores.shape
    each = _experts_each(experts, groups, "groups")
    if not 1 <= limit <= groups:
        raise ValueError(f"limit must be from 1 to the {groups} groups, got {limit}")
    if limit * each < k:
        raise ValueError(f"k = {k} experts don't fit on limit = {limit} nodes of {each} experts")
    best = min(math.ceil(k / limit), each)
    table = scores.reshape((n, groups, each))
    strength = xp.sum(xp.sort(table, axis=2, descending=True)[:, :, :best], axis=2)
    allowed = xp.any(top_k(strength, limit)[:, :, None] == _numbers(scores, groups), axis=1)
    barred = xp.where(allowed[:, :, None], table, -math.inf)
    return top_k(barred.reshape((n, experts)), k)


def two_hop_forward(comm: Comm, params: Params, x: Array, k: int, per_node: int, **how: Any) -> Array:
    """`expert_parallel_forward` on nodes: a token crosses the network once for each node.

    The row goes to the rank with its sender's place on each node that it needs, with its
    choices and weights. That rank serves it to the experts of its node, adds up the
    weighted answers, and sends back one row. Dropless, and forward only.

    Args:
        comm: the expert-parallel ranks, node by node.
        params: this rank's part, by `shard_experts`.
        x: this rank's tokens, shape (n, h).
        k, **how: as for `moe_forward`.
        per_node: ranks of a node; divides the ranks.
    """
    if per_node < 1 or comm.size % per_node:
        raise ValueError(f"per_node must divide the {comm.size} ranks, got {per_node}")
    xp, experts = comm.xp, params["router"].shape[1]
    first = comm.rank - comm.rank % per_node
    inside = comm.group(range(first, first + per_node))
    across = comm.group(range(comm.rank % per_node, comm.size, per_node))
    here = _experts_each(experts, across.size)
    routing = route(x @ params["router"], k, **how)
    going = [routing.chosen // here == node for node in range(across.size)]
    wanted = [xp.nonzero(xp.any(to, axis=1))[0] for to in going]
    rows = across.all_to_all([x[i] for i in wanted])
    # choices as numbers within the node; `here` for "not on this node", which sorts last
    tickets = across.all_to_all(
        [xp.where(to, routing.chosen % here, here)[i] for to, i in zip(going, wanted)]
    )
    weights = xp.concat(across.all_to_all([routing.weights[i] for i in wanted]))
    chosen = xp.concat(tickets)
    y, _ = _mix_forward(inside, params, xp.concat(rows), chosen, weights, chosen < here, here)
    out = x * 0
    for i, part in zip(wanted, across.all_to_all(_pieces(y, [len(r) for r in rows]))):
        out[i] = out[i] + part
    return out


def steered_tokens(
    tokens: int, hidden: int, experts: int, k: int, hot: float = 0.0, seed: int = 0
) -> np.ndarray:
    """Tokens with their choices written into them, for the router ``np.eye(hidden, experts)``.

    Args:
        tokens, hidden, experts, k: n, h, E and k; h is at least E. If E divides n·k, the
            choices are balanced exactly.
        hot: the share of the tokens, from the first on, that go to expert 0 first,
            whatever else they choose.
        seed: of the components that the router doesn't read.

    Returns: shape (n, h), 32-bit numbers.

    >>> for hot in (0.0, 1.0):
    ...     x = steered_tokens(8, 6, 4, 2, hot)
    ...     expert_load(route(x @ np.eye(6, 4), 2).chosen, 4).tolist()
    [4, 4, 4, 4]
    [8, 4, 0, 4]
    """
    _check_choice(experts, k)
    if hidden < experts:
        raise ValueError(f"hidden must be at least the {experts} experts, got {hidden}")
    row = np.arange(tokens)
    wanted = (k * row[:, None] + np.arange(k)) % experts
    to_hot = row < round(hot * tokens)
    swapped = np.where(wanted == 0, wanted[:, :1], wanted)  # none is chosen twice
    swapped[:, 0] = 0
    wanted = np.where(to_hot[:, None], swapped, wanted)
    x = np.random.default_rng(seed).normal(size=(tokens, hidden)).astype(np.float32)
    x[:, :experts] = 0
    x[row[:, None], wanted] = np.arange(k, 0, -1)
    return x


def time_experts(
    comm: Comm,
    params: Params,
    batches: Sequence[Array],
    k: int,
    repeats: int = 5,
    dtype: str = "float32",
) -> dict[str, list]:
    """Time an expert-parallel layer, forward and backward; a rank program.

    The batches are timed in turn, so that all meet the same other work.

    Args:
        comm: the expert-parallel ranks.
        params: this rank's part, by `shard_experts`.
        batches: this rank's tokens, several times, each of shape (n, h); such as of
            `steered_tokens`.
        k: experts a token.
        repeats: timed repetitions; one more warms up.
        dtype: the type to compute in, by the array module's name for it.

    Returns: for each batch "seconds", a list of `repeats` (for
    `manyranks.collectives.quickest`); "rows", how many this rank's experts worked on; and
    "bytes", what this rank sent in the all-to-alls of both passes.
    """
    kind = getattr(comm.xp, dtype)
    params = {name: comm.xp.astype(p, kind) for name, p in params.items()}
    batches = [comm.xp.astype(x, kind) for x in batches]
    out: dict[str, list] = {"seconds": [[] for _ in batches], "rows": [], "bytes": []}
    for repeat in range(repeats + 1):
        for times, x in zip(out["seconds"], batches):
            comm.barrier()
            began = comm.time()
            y, saved = expert_parallel_forward(comm, params, x, k)
            expert_parallel_backward(comm, params, saved, y)
            if repeat:
                times.append(comm.time() - began)
                continue
            plan = saved["plan"]
            out["rows"].append(sum(plan.counts))
            abroad = sum(  # each way forward, and again backward
                sum(counts)
                for table in (plan.sent, plan.received)
                for rank, counts in enumerate(table)
                if rank != comm.rank
            )
            row = x.shape[1] * x.itemsize
            out["bytes"].append(2 * abroad * row + 8 * len(plan.counts) * (comm.size - 1))
    return out
