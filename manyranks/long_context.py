# Generated from chapters/beyond_1_long_context.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""Attention over a sequence that is cut across ranks: softmax in blocks, ring, Ulysses and gathered, causal and with documents."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from array_api_compat import array_namespace, device

from manyranks.runtime import Array, Comm, chunk_bounds, is_phantom

__all__ = [
    "CONTEXT_PARALLEL",
    "Layout",
    "Tokens",
    "attend",
    "attend_backward",
    "attention_bytes",
    "attention_flops",
    "blockwise_attention",
    "count_visible",
    "cut_tokens",
    "dense_attention_backward",
    "dense_attention_forward",
    "gathered_backward",
    "gathered_forward",
    "gathered_volume",
    "join_tokens",
    "merge",
    "minimal_block",
    "ring_attention_backward",
    "ring_attention_forward",
    "ring_volume",
    "rope",
    "time_attention",
    "to_heads",
    "to_tokens",
    "together",
    "token_layout",
    "ulysses_backward",
    "ulysses_forward",
    "ulysses_volume",
    "visible",
]


class Tokens(NamedTuple):
    """The tokens that one rank has, in the order in which it has them.

    Attributes:
        places: (n,) integers, where each token stands in the whole sequence.
        documents: (n,) integers, the document that it belongs to. Attention stays inside
            a document.
        positions: (n,) integers, the position that the model is told (RoPE, or a learned
            table): the place, or the place within the document.
    """

    places: Array
    documents: Array
    positions: Array


Layout = Sequence[Tokens]  # which tokens each rank has: one part a rank


def token_layout(
    tokens: int,
    ranks: int,
    split: str = "zigzag",
    documents: Sequence[int] | None = None,
    restart: bool = False,
) -> list[Tokens]:
    """Which tokens each rank has.

    Args:
        tokens: s, how many there are.
        ranks: P. Parts differ by two tokens at most, and need not be equal.
        split: "contiguous" (rank r has the r-th stretch), "striped" (every P-th token), or
            "zigzag" (of 2P stretches, the r-th from the front and the r-th from the back).
        documents: the documents' lengths, in order; one document without it.
        restart: number the positions of each document from 0.

    Returns: a list of `Tokens`, one for each rank. Every rank needs all of it.

    >>> [part.places.tolist() for part in token_layout(8, 2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")
    lengths = [tokens] if documents is None else list(documents)
    if sum(lengths) != tokens or min(lengths, default=0) < 0:
        raise ValueError(f"documents must be lengths that add up to {tokens}, got {lengths}")
    owner = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(tokens)
    position = place - np.repeat(np.cumsum([0, *lengths])[:-1], lengths)
    if split == "contiguous":
        mine = np.split(place, chunk_bounds(tokens, ranks)[1:-1])
    elif split == "striped":
        mine = [place[r::ranks] for r in range(ranks)]
    elif split == "zigzag":
        chunks = np.split(place, chunk_bounds(tokens, 2 * ranks)[1:-1])
        mine = [np.concatenate([chunks[r], chunks[-1 - r]]) for r in range(ranks)]
    else:
        raise ValueError(f"split must be 'contiguous', 'zigzag' or 'striped', got {split!r}")
    return [Tokens(p, owner[p], (position if restart else place)[p]) for p in mine]


def cut_tokens(x: Array, layout: Layout, axis: int = 2) -> list[Array]:
    """Each rank's part of `x`, along the axis of its tokens."""
    xp, total = array_namespace(x), sum(len(part.places) for part in layout)
    if x.shape[axis] != total:
        raise ValueError(f"x must have the layout's {total} tokens along axis {axis}, got {x.shape}")
    return [xp.take(x, xp.asarray(part.places, device=device(x)), axis=axis) for part in layout]


def join_tokens(parts: Sequence[Array], layout: Layout, axis: int = 2) -> Array:
    """The whole sequence, in order, from all ranks' parts: undoes `cut_tokens`."""
    xp = array_namespace(parts[0])
    order = np.argsort(np.concatenate([part.places for part in layout]))
    whole = xp.concat(list(parts), axis=axis)
    return xp.take(whole, xp.asarray(order, device=device(whole)), axis=axis)


def together(layout: Layout) -> Tokens:
    """All ranks' tokens as one part, in the order of the ranks."""
    return Tokens(*(np.concatenate(field) for field in zip(*layout)))


def visible(rows: Tokens, columns: Tokens, causal: bool = True) -> Array:
    """Which of the tokens `columns` each of the tokens `rows` may look at.

    Returns: booleans of shape (rows, columns): the same document and, if `causal`, not
    later in the sequence.

    >>> whole = token_layout(4, 1, documents=[3, 1])[0]
    >>> visible(whole, whole).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [0, 0, 0, 1]])
    """
    seen = rows.documents[:, None] == columns.documents[None, :]
    if causal:
        seen &= rows.places[:, None] >= columns.places[None, :]
    return seen


def count_visible(rows: Tokens, columns: Tokens, causal: bool = True) -> int:
    """How many pairs are `visible`, without making the matrix.

    >>> whole = token_layout(1_000_000, 1)[0]
    >>> count_visible(whole, whole)
    500000500000
    """
    if not len(rows.places) or not len(columns.places):
        return 0
    base = 1 + max(int(rows.places.max()), int(columns.places.max()))
    keys = np.sort(columns.documents * base + columns.places)
    last = rows.documents * base + (rows.places + 1 if causal else base)
    counts = np.searchsorted(keys, last) - np.searchsorted(keys, rows.documents * base)
    return int(counts.sum())


def _grouped(q: Array, groups: int) -> Array:
    """(b, a, s, d) to (b, k, a/k, s, d): the query heads under their key-value head."""
    b, a, s, d = q.shape
    return q.reshape((b, groups, a // groups, s, d))


def _scores(q: Array, k: Array, seen: Array | None) -> Array:
    """Scaled scores of shape (b, k, a/k, rows, columns), -inf where not `seen`."""
    xp = array_namespace(q)
    scores = _grouped(q, k.shape[1]) @ k[:, :, None].swapaxes(-1, -2)
    scores = scores * (1 / math.sqrt(q.shape[-1]))
    if seen is None:
        return scores
    return xp.where(xp.asarray(seen, device=device(q)), scores, -math.inf)


def _divided(q: Array, out: Array, total: Array, top: Array) -> tuple[Array, Array]:
    """Result and lse from sums of weighted values and of exponentials relative to top."""
    xp = array_namespace(q)
    full = xp.where(total == 0, 1.0, total)
    lse = xp.where(total == 0, -math.inf, top + xp.log(full))
    return (out / full).reshape(tuple(q.shape)), lse.reshape(tuple(q.shape[:-1]))


def attend(q: Array, k: Array, v: Array, seen: Array | None = None) -> tuple[Array, Array]:
    """Attention over these keys alone, and what it takes to `merge` it with others.

    Args:
        q: queries, shape (b, a, rows, d).
        k, v: keys and values, shape (b, k, columns, d); k divides a.
        seen: booleans of shape (rows, columns); all pairs without it.

    Returns: the result, shape (b, a, rows, d), and the logarithm of the sum of
    exponentials, shape (b, a, rows). A row that sees nothing gives 0 and -inf.

    >>> one = np.ones((1, 1, 1, 4))
    >>> out, lse = attend(one, one, 3 * one)
    >>> out[0, 0, 0].tolist(), lse.tolist()
    ([3.0, 3.0, 3.0, 3.0], [[[2.0]]])
    """
    xp = array_namespace(q)
    if not k.shape[2]:
        return xp.zeros_like(q), xp.zeros_like(q[..., 0]) - math.inf
    scores = _scores(q, k, seen)
    top = xp.max(scores, axis=-1, keepdims=True)
    top = xp.where(top == -math.inf, 0.0, top)  # or -inf - -inf would be no number
    weights = xp.exp(scores - top)
    total = xp.sum(weights, axis=-1, keepdims=True)
    return _divided(q, weights @ v[:, :, None], total, top)


def attend_backward(
    q: Array,
    k: Array,
    v: Array,
    lse: Array,
    delta: Array,
    dout: Array,
    seen: Array | None = None,
) -> tuple[Array, Array, Array]:
    """What these keys contribute to the gradients; the sum over all blocks is the gradient.

    Args:
        q, k, v, seen: as for `attend`.
        lse: of the whole row, all blocks together; shape (b, a, rows).
        delta: the sum of dout · out over d, of the whole row; shape (b, a, rows).
        dout: gradient of the result, shape (b, a, rows, d).

    Returns: gradients in the shapes of q, k and v.
    """
    xp, groups = array_namespace(q), k.shape[1]
    scores = _scores(q, k, seen)
    lse = xp.where(lse == -math.inf, 0.0, lse)  # such a row has only scores of -inf
    weights = xp.exp(scores - _grouped(lse[..., None], groups))
    dout, rows = _grouped(dout, groups), _grouped(q, groups)
    dweights = dout @ v[:, :, None].swapaxes(-1, -2)
    dscores = weights * (dweights - _grouped(delta[..., None], groups))
    dscores = dscores * (1 / math.sqrt(q.shape[-1]))
    dq = (dscores @ k[:, :, None]).reshape(tuple(q.shape))
    dk = xp.sum(dscores.swapaxes(-1, -2) @ rows, axis=2)  # all heads of the group
    dv = xp.sum(weights.swapaxes(-1, -2) @ dout, axis=2)
    return dq, dk, dv


def dense_attention_forward(
    q: Array, k: Array, v: Array, tokens: Tokens | None = None, causal: bool = True
) -> tuple[Array, dict]:
    """Attention on one rank: what all the parallel versions have to equal.

    Args:
        q, k, v: shapes (b, a, s, d), (b, k, s, d) and (b, k, s, d).
        tokens: what the s tokens are; one document, in order, without it.
        causal: whether a token sees only itself and those before it.

    Returns: array of the shape of q, and what `dense_attention_backward` needs.
    """
    tokens = token_layout(q.shape[2], 1)[0] if tokens is None else tokens
    seen = visible(tokens, tokens, causal)
    out, lse = attend(q, k, v, seen)
    return out, {"q": q, "k": k, "v": v, "out": out, "lse": lse, "seen": seen}


def dense_attention_backward(saved: dict, dout: Array) -> tuple[Array, Array, Array]:
    """The gradients of `dense_attention_forward`: of q, k and v."""
    delta = array_namespace(dout).sum(dout * saved["out"], axis=-1)
    q, k, v = saved["q"], saved["k"], saved["v"]
    return attend_backward(q, k, v, saved["lse"], delta, dout, saved["seen"])


def blockwise_attention(
    q: Array, k: Array, v: Array, block: int, seen: Array | None = None
) -> tuple[Array, Array]:
    """What `attend` returns, holding the scores of `block` keys at a time.

    Args:
        q, k, v, seen: as for `attend`.
        block: keys in a block, 1 or more; the last block may have fewer.
    """
    if block < 1:
        raise ValueError(f"block must be 1 or more, got {block}")
    xp = array_namespace(q)
    out = xp.zeros_like(_grouped(q, k.shape[1]))
    total = xp.zeros_like(out[..., :1])
    top = total - math.inf
    for start in range(0, k.shape[2], block):
        part = slice(start, start + block)
        scores = _scores(q, k[:, :, part], None if seen is None else seen[:, part])
        higher = xp.maximum(top, xp.max(scores, axis=-1, keepdims=True))
        safe = xp.where(higher == -math.inf, 0.0, higher)
        rescale, weights = xp.exp(top - safe), xp.exp(scores - safe)
        total = total * rescale + xp.sum(weights, axis=-1, keepdims=True)
        out = out * rescale + weights @ v[:, :, part][:, :, None]
        top = higher
    return _divided(q, out, total, top)


def merge(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Attention over two sets of keys together, from that over each.

    The order doesn't matter, and neither does which are merged first, but for rounding.

    Args:
        one, other: what `attend` or `merge` returned, for the same queries and for keys
            that have none in common.

    Returns: (out, lse), as `attend` does.

    >>> a, b = np.zeros((1, 1, 1, 2)), np.ones((1, 1, 1, 2))
    >>> out, lse = merge((a, np.zeros((1, 1, 1))), (b, np.log(np.full((1, 1, 1), 3.0))))
    >>> out.round(4).tolist(), float(np.exp(lse[0, 0, 0])).__round__(4)
    ([[[[0.75, 0.75]]]], 4.0)
    """
    xp = array_namespace(one[0])
    top = xp.maximum(one[1], other[1])
    safe = xp.where(top == -math.inf, 0.0, top)
    ours, theirs = xp.exp(one[1] - safe), xp.exp(other[1] - safe)
    total = ours + theirs  # not e^(lse - top), which rounding of a large lse spoils
    full = xp.where(total == 0, 1.0, total)
    out = (ours / full)[..., None] * one[0] + (theirs / full)[..., None] * other[0]
    return out, xp.where(total == 0, -math.inf, safe + xp.log(full))


def attention_flops(pairs: int, heads: int, head_dim: int, batch: int = 1, backward: bool = False) -> int:
    """FLOPs of attention's products: 4·d per visible pair and head; backward 10·d.

    The backward computes the scores again, as FlashAttention's does.

    >>> attention_flops(100, heads=2, head_dim=8)
    6400
    """
    return (10 if backward else 4) * batch * heads * head_dim * pairs


def _numpy(x: Array) -> np.ndarray:
    """Of NumPy: a layout that goes through `launch` arrives as tensors."""
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)


def _check(comm: Comm, q: Array, k: Array, v: Array, layout: Layout) -> list[Tokens]:
    if len(layout) != comm.size:
        raise ValueError(f"layout must have a part for each of {comm.size} ranks, got {len(layout)}")
    b, a, c, d = q.shape
    mine, kv = len(layout[comm.rank].places), k.shape[1]
    if c != mine or tuple(k.shape) != (b, kv, c, d) or tuple(v.shape) != (b, kv, c, d):
        raise ValueError(
            f"q, k and v must agree, with the layout's {mine} tokens of rank {comm.rank} "
            f"along axis 2, got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not kv or a % kv:
        raise ValueError(f"the {kv} key-value heads must divide the {a} query heads")
    return [Tokens(*map(_numpy, part)) for part in layout]


def _seen(
    comm: Comm, q: Array, rows: Tokens, columns: Tokens, causal: bool, back: bool
) -> tuple[int, Array | None]:
    """How many pairs are visible, and which (None for all); declares their FLOPs."""
    pairs = count_visible(rows, columns, causal)
    b, heads, _, d = q.shape
    flops = attention_flops(pairs, heads, d, b, back)
    comm.compute(flops=flops, label="attention" + " backward" * back)
    if is_phantom(q) or pairs == len(rows.places) * len(columns.places):
        return pairs, None
    where = [  # so that the mask is made where it is used
        Tokens(*(array_namespace(q).asarray(x, device=device(q)) for x in part)) for part in (rows, columns)
    ]
    return pairs, visible(*where, causal)


def ring_attention_forward(
    comm: Comm, q: Array, k: Array, v: Array, layout: Layout, causal: bool = True
) -> tuple[Array, dict]:
    """Attention over a sequence that is cut across ranks; keys and values go around.

    Liu, Zaharia and Abbeel, 2023. While it computes, each rank sends P - 1 blocks on: all
    but its right neighbour's.

    Args:
        comm: the ranks that share the sequence.
        q, k, v: this rank's tokens, shapes (b, a, c, d), (b, k, c, d) and (b, k, c, d).
        layout: which tokens each rank has, by `token_layout`, the same on all ranks.
        causal: whether a token sees only itself and those before it.

    Returns: array of the shape of q, and what `ring_attention_backward` needs.

    Raises: ValueError if the shapes don't fit the layout or the heads don't divide.
    """
    layout, xp, rank = _check(comm, q, k, v, layout), array_namespace(q), comm.rank
    right, left = (rank + 1) % comm.size, (rank - 1) % comm.size
    block, so_far = xp.concat([k, v], axis=-1), None  # (b, k, c, 2 d)
    for step in range(comm.size):
        last = step == comm.size - 1
        if not last:  # before the arithmetic, so that it can hide the message
            coming, going = comm.irecv(left), comm.isend(block, right)
        columns = layout[(rank - step) % comm.size]
        pairs, seen = _seen(comm, q, layout[rank], columns, causal, False)
        if pairs or so_far is None:
            part = attend(q, block[..., : q.shape[-1]], block[..., q.shape[-1] :], seen)
            so_far = part if so_far is None else merge(so_far, part)
        if not last:
            block = coming.wait()
            going.wait()
    out, lse = so_far
    saved = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    return out, {**saved, "layout": layout, "causal": causal}


def ring_attention_backward(comm: Comm, saved: dict, dout: Array) -> tuple:
    """The gradients of `ring_attention_forward`; dk and dv travel with their blocks.

    Each rank sends twice the bytes of the forward: the blocks once more, and as much of
    their gradients.

    Args:
        comm, saved: as in the forward.
        dout: gradient of this rank's result, shape (b, a, c, d).

    Returns: the gradients of this rank's q, k and v.
    """
    q, k, v, layout = (saved[name] for name in ("q", "k", "v", "layout"))
    xp, rank, d = array_namespace(q), comm.rank, q.shape[-1]
    right, left = (rank + 1) % comm.size, (rank - 1) % comm.size
    delta = xp.sum(dout * saved["out"], axis=-1)
    block, dq, sends = xp.concat([k, v], axis=-1), xp.zeros_like(q), []
    for step in range(comm.size):
        last = step == comm.size - 1
        gradient = comm.irecv(left) if step > 1 else None  # of the block that we hold
        if not last:
            coming = comm.irecv(left)
            sends.append(comm.isend(block, right))
        columns = layout[(rank - step) % comm.size]
        pairs, seen = _seen(comm, q, layout[rank], columns, saved["causal"], True)
        contribution = xp.zeros_like(block)
        if pairs:
            mine, dk, dv = attend_backward(q, block[..., :d], block[..., d:], saved["lse"], delta, dout, seen)
            dq, contribution = dq + mine, xp.concat([dk, dv], axis=-1)
        if step == 0:
            home = contribution  # added when the rest arrives
        else:
            if gradient is not None:
                contribution = contribution + gradient.wait()
            sends.append(comm.isend(contribution, right))
        if not last:
            block = coming.wait()
    if comm.size > 1:
        home = home + comm.recv(left)
    for work in sends:
        work.wait()
    return dq, home[..., :d], home[..., d:]


def to_heads(comm: Comm, x: Array, groups: int) -> Array:
    """(b, heads, this rank's tokens, d) to (b, this rank's heads, all tokens, d).

    An all-to-all. Deals out `groups` key-value heads, with the query heads of each; the
    tokens come in the order of the ranks.
    """
    if groups < comm.size:
        raise ValueError(f"Ulysses deals out key-value heads: {groups} are too few for {comm.size} ranks")
    ends = [n * (x.shape[1] // groups) for n in chunk_bounds(groups, comm.size)]
    parts = [x[:, i:j] for i, j in zip(ends, ends[1:])]
    return array_namespace(x).concat(comm.all_to_all(parts), axis=2)


def to_tokens(comm: Comm, x: Array, layout: Layout) -> Array:
    """(b, this rank's heads, all tokens, d) to (b, heads, this rank's tokens, d)."""
    ends = np.cumsum([0, *(len(part.places) for part in layout)]).tolist()
    parts = [x[:, :, i:j] for i, j in zip(ends, ends[1:])]
    return array_namespace(x).concat(comm.all_to_all(parts), axis=1)


def ulysses_forward(
    comm: Comm, q: Array, k: Array, v: Array, layout: Layout, causal: bool = True
) -> tuple[Array, dict]:
    """Attention over a sequence that is cut across ranks; in between it is cut by heads.

    Jacobs et al., 2023. Four all-to-alls. Arguments and result as for
    `ring_attention_forward`.

    Raises: ValueError also if there are more ranks than key-value heads.
    """
    layout, groups = _check(comm, q, k, v, layout), k.shape[1]
    q, k, v = (to_heads(comm, x, groups) for x in (q, k, v))  # (b, a/P or k/P, s, d)
    tokens = together(layout)
    _, seen = _seen(comm, q, tokens, tokens, causal, False)
    out, lse = attend(q, k, v, seen)
    saved = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "seen": seen}
    saved |= {"layout": layout, "causal": causal, "groups": groups}
    return to_tokens(comm, out, layout), saved


def ulysses_backward(comm: Comm, saved: dict, dout: Array) -> tuple:
    """The gradients of `ulysses_forward`: of q, k and v. Four all-to-alls."""
    dout = to_heads(comm, dout, saved["groups"])
    tokens = together(saved["layout"])
    _seen(comm, saved["q"], tokens, tokens, saved["causal"], True)
    grads = dense_attention_backward(saved, dout)
    return tuple(to_tokens(comm, g, saved["layout"]) for g in grads)


def gathered_forward(
    comm: Comm,
    q: Array,
    k: Array,
    v: Array,
    layout: Layout,
    causal: bool = True,
    again: bool = False,
) -> tuple[Array, dict]:
    """Attention over a sequence that is cut across ranks; every rank gathers all keys.

    One all-gather, of keys and values together.

    Args:
        comm, q, k, v, layout, causal: as for `ring_attention_forward`.
        again: keep only this rank's keys and values, and gather again in the backward.

    Returns: array of the shape of q, and what `gathered_backward` needs.
    """
    layout = _check(comm, q, k, v, layout)
    own = array_namespace(q).concat([k, v], axis=-1).swapaxes(0, 2)  # tokens first
    every = comm.all_gather(own)  # (s, k, b, 2 d), in the order of the ranks
    whole, d = every.swapaxes(0, 2), q.shape[-1]
    _, seen = _seen(comm, q, layout[comm.rank], together(layout), causal, False)
    out, lse = attend(q, whole[..., :d], whole[..., d:], seen)
    saved = {"q": q, "kv": own if again else every, "again": again, "seen": seen}
    return out, {**saved, "out": out, "lse": lse, "layout": layout, "causal": causal}


def gathered_backward(comm: Comm, saved: dict, dout: Array) -> tuple:
    """The gradients of `gathered_forward`: of q, k and v. One reduce-scatter.

    It needs equal parts, so zeros fill up those of ranks with fewer tokens.
    """
    q, layout, d = saved["q"], saved["layout"], saved["q"].shape[-1]
    xp, delta = array_namespace(q), array_namespace(q).sum(dout * saved["out"], axis=-1)
    every = comm.all_gather(saved["kv"]) if saved["again"] else saved["kv"]
    whole = every.swapaxes(0, 2)
    _seen(comm, q, layout[comm.rank], together(layout), saved["causal"], True)
    dq, dk, dv = attend_backward(q, whole[..., :d], whole[..., d:], saved["lse"], delta, dout, saved["seen"])
    gradient = xp.concat([dk, dv], axis=-1).swapaxes(0, 2)
    lengths, parts = [len(part.places) for part in layout], []
    for n, end in zip(lengths, np.cumsum(lengths).tolist()):
        filling = xp.zeros_like(gradient[: max(lengths) - n])
        parts += [gradient[end - n : end], filling]
    mine = comm.reduce_scatter(xp.concat(parts))[: lengths[comm.rank]].swapaxes(0, 2)
    return dq, mine[..., :d], mine[..., d:]


def ring_volume(tokens: int, kv_heads: int, head_dim: int, ranks: int, backward: bool = False) -> float:
    """Elements that each rank sends in one pass of Ring Attention, parts being equal.

    Forward 2·s·k·d·(P - 1)/P; backward twice that.

    >>> ring_volume(131072, kv_heads=8, head_dim=128, ranks=16)
    251658240.0
    """
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")
    passes = 2 if backward else 1
    return passes * 2 * tokens * kv_heads * head_dim * (ranks - 1) / ranks


def gathered_volume(
    tokens: int,
    kv_heads: int,
    head_dim: int,
    ranks: int,
    backward: bool = False,
    again: bool = False,
) -> float:
    """Elements that each rank sends in one pass of gathered attention, parts being equal.

    2·s·k·d·(P - 1)/P each way; the backward twice that with `again`.
    """
    return ring_volume(tokens, kv_heads, head_dim, ranks, backward and again)


def ulysses_volume(tokens: int, heads: int, kv_heads: int, head_dim: int, ranks: int) -> float:
    """Elements that each rank sends in one pass of Ulysses, forward or backward.

    s/P · (2·a·d + 2·k·d) · (P - 1)/P, if P divides the key-value heads.

    >>> ulysses_volume(131072, 64, 64, 128, ranks=8) / (4 * 131072 * 64 * 128 / 8)
    0.875
    """
    if not 1 <= ranks <= kv_heads:
        raise ValueError(f"ranks must be 1 to {kv_heads} (kv_heads), got {ranks}")
    own = tokens / ranks * 2 * (heads + kv_heads) * head_dim
    return own * (ranks - 1) / ranks


def minimal_block(
    flops: float,
    bandwidth: float,
    heads: int = 1,
    kv_heads: int | None = None,
    causal: bool = False,
    backward: bool = False,
) -> float:
    """Tokens that a rank needs so that a ring step takes as long to compute as to send.

    For 16-bit numbers. Liu et al., 2023, section 3, has c = F/B: the default. Latency is
    left out.

    Args:
        flops: F, FLOP/s that attention reaches.
        bandwidth: B, bytes per second of a link, one way.
        heads, kv_heads: query and key-value heads; as many without the latter.
        causal: a balanced causal mask, so that half of the pairs are computed.
        backward: the backward's steps: 10·d FLOPs a pair, and gradients travel too.

    Returns: c, in tokens.

    >>> minimal_block(312e12, 300e9)  # the paper's A100 with NVLink
    1040.0
    """
    kv_heads = heads if kv_heads is None else kv_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"kv_heads must divide the {heads} heads, got {kv_heads}")
    if not (flops > 0 and bandwidth > 0):
        raise ValueError(f"flops and bandwidth must be positive: {flops}, {bandwidth}")
    sent = 2 * kv_heads * (4 if backward else 2)  # bytes per token, times d
    done = attention_flops(1, heads, 1, backward=backward) / (2 if causal else 1)
    return sent / done * flops / bandwidth


def rope(x: Array, positions: Array, base: float = 10_000.0, inverse: bool = False) -> Array:
    """Rotary position embedding (Su et al., 2021), entries i and i + d/2 as a pair.

    Args:
        x: queries or keys, shape (..., tokens, d), d even.
        positions: of these tokens, (tokens,): global ones, not numbers on a rank.
        base: pair i turns by position · base^(-2i/d).
        inverse: turn back: what the backward does to a gradient.

    >>> x = np.array([[1.0, 0.0]])
    >>> rope(x, np.array([1])).round(4).tolist()  # cos 1, sin 1
    [[0.5403, 0.8415]]
    """
    xp, half = array_namespace(x), x.shape[-1] // 2
    if x.shape[-1] % 2:
        raise ValueError(f"the last axis of x must be even, got {x.shape[-1]}")
    speed = base ** (-np.arange(half) / half)
    angle = _numpy(positions)[:, None] * speed * (-1 if inverse else 1)
    cos, sin = (xp.asarray(f(angle), device=device(x), dtype=x.dtype) for f in (np.cos, np.sin))
    one, two = x[..., :half], x[..., half:]
    return xp.concat([one * cos - two * sin, two * cos + one * sin], axis=-1)


#: Name -> forward and backward of each attention over a sequence that is cut across ranks.
CONTEXT_PARALLEL = {
    "ring": (ring_attention_forward, ring_attention_backward),
    "ulysses": (ulysses_forward, ulysses_backward),
    "gather": (gathered_forward, gathered_backward),
}


def attention_bytes(
    name: str,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ranks: int,
    itemsize: int,
) -> float:
    """Bytes that each rank sends in both passes of one of `CONTEXT_PARALLEL`, parts being equal.

    >>> attention_bytes("ring", 16_384, 64, 8, 128, ranks=8, itemsize=2)
    176160768.0
    """
    if name == "ulysses":
        return 2 * itemsize * ulysses_volume(tokens, heads, kv_heads, head_dim, ranks)
    one = {"ring": ring_volume, "gather": gathered_volume}[name]
    return itemsize * sum(one(tokens, kv_heads, head_dim, ranks, b) for b in (False, True))


def time_attention(
    comm: Comm,
    whole: Sequence[Array],
    splits: Sequence[str] = ("contiguous", "zigzag"),
    names: Sequence[str] = tuple(CONTEXT_PARALLEL),
    repeats: int = 5,
    dtype: str = "float32",
) -> dict[str, list]:
    """Time causal attention over a cut sequence, forward and backward; a rank program.

    The ways are timed in turn, so that all meet the same other work.

    Args:
        comm: the ranks that share the sequence.
        whole: q, k, v and a gradient of the result, of all tokens: shapes (b, a, s, d),
            (b, k, s, d), (b, k, s, d) and (b, a, s, d). This rank takes its part.
        splits: cuts, as `token_layout` names them.
        names: of `CONTEXT_PARALLEL`. Ulysses needs as many key-value heads as ranks.
        repeats: timed repetitions; one more warms up.
        dtype: the type to compute in, by the array module's name for it.

    Returns: for each pair of a cut and a way, cuts first: "seconds", a list of `repeats`
    (for `manyranks.collectives.quickest`), and "apart", the largest difference of its
    results from those of the first way, over their largest number. For each cut: "pairs",
    how many this rank's queries see.
    """
    xp, kind, cases, pairs = comm.xp, getattr(comm.xp, dtype), [], []
    for split in splits:
        layout = token_layout(whole[0].shape[2], comm.size, split)
        mine = [xp.astype(cut_tokens(x, layout)[comm.rank], kind) for x in whole]
        pairs.append(count_visible(layout[comm.rank], together(layout)))
        cases += [(CONTEXT_PARALLEL[name], layout, mine, name == names[0]) for name in names]
    seconds, apart, wanted = [[] for _ in cases], [], ()
    for repeat in range(repeats + 1):
        for times, ((forward, backward), layout, (q, k, v, dout), first) in zip(seconds, cases):
            comm.barrier()
            began = comm.time()
            out, saved = forward(comm, q, k, v, layout)
            found = (out, *backward(comm, saved, dout))
            if repeat:
                times.append(comm.time() - began)
                continue
            wanted = found if first else wanted
            apart.append(max(float(xp.max(xp.abs(x - y)) / xp.max(xp.abs(y))) for x, y in zip(found, wanted)))
    return {"seconds": seconds, "apart": apart, "pairs": pairs}
