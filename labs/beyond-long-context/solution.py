"""Attention with a sliding window over packed documents, on a ring that moves only what is read."""

from __future__ import annotations

import numpy as np


def _starts(documents):
    """Where the document of each token begins."""
    lengths = np.asarray(documents, dtype=np.int64)
    return np.repeat(np.cumsum(lengths) - lengths, lengths)


def balanced_split(documents, ranks, window=None, most=None):
    """Offsets of contiguous shards whose largest work is as small as it can be."""
    begins = _starts(documents)
    tokens = len(begins)
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    most = tokens if most is None else most
    if most * ranks < tokens:
        raise ValueError(f"most: {ranks} ranks of at most {most} tokens have no room for {tokens}")
    keys = np.arange(tokens) - begins + 1
    if window is not None:
        keys = np.minimum(keys, window)
    before = np.concatenate([[0], np.cumsum(keys)])  # work of all tokens before this one

    def cut(limit):
        bounds = [0]
        for _ in range(ranks):
            at = bounds[-1]
            stop = int(np.searchsorted(before, before[at] + limit, side="right")) - 1
            bounds.append(min(stop, at + most, tokens))
        return bounds

    low, high = 0, int(before[-1])  # the smallest limit with which a greedy cut reaches the end
    while low < high:
        middle = (low + high) // 2
        if cut(middle)[-1] == tokens:
            high = middle
        else:
            low = middle + 1
    return cut(low)


def needed_rows(bounds, documents, window=None):
    """Which keys each rank reads: (source, start, stop), its own first, then back along the ring."""
    begins, needs = _starts(documents), []
    for rank in range(len(bounds) - 1):
        first, mine = bounds[rank], []
        if bounds[rank + 1] > first:
            low = int(begins[first])  # later queries read nothing that is further back
            if window is not None:
                low = max(low, first - window + 1)
            for source in range(rank, -1, -1):
                start, stop = max(low, bounds[source]), bounds[source + 1]
                if start < stop:
                    mine.append((source, start, stop))
        needs.append(mine)
    return needs


def _ring(rank, bounds, needs):
    """The neighbours that have tokens, and what the next one reads of others, block by block."""
    full = [r for r in range(len(bounds) - 1) if bounds[r] < bounds[r + 1]]
    at = full.index(rank)
    following = full[at + 1] if at + 1 < len(full) else None
    return (full[at - 1] if at else None), following, (needs[following][1:] if following is not None else [])


def _mask(bounds, rank, start, stop, documents, window):
    i = np.arange(bounds[rank], bounds[rank + 1])[:, None]
    j = np.arange(start, stop)[None, :]
    seen = (j <= i) & (j >= _starts(documents)[i])
    return seen if window is None else seen & (i - j < window)


def ring_attention(comm, part, bounds, documents, window=None):
    """Output and log-sum-exp of this rank's queries."""
    q, kv = part["q"], np.stack([part["k"], part["v"]])
    tokens, heads, d = q.shape
    if not tokens:
        return {"out": np.zeros((0, heads, d)), "lse": np.zeros((0, heads))}
    needs = needed_rows(bounds, documents, window)
    previous, following, theirs = _ring(comm.rank, bounds, needs)
    mine = needs[comm.rank]
    kv_heads = kv.shape[2]
    q = q.reshape(tokens, kv_heads, heads // kv_heads, d) / np.sqrt(d)
    top = np.full(q.shape[:3], -np.inf)
    total, out = np.zeros(q.shape[:3]), np.zeros(q.shape)
    for i, (_, start, stop) in enumerate(mine):
        going = comm.isend(kv[:, theirs[i][1] - start :], following) if i < len(theirs) else None
        coming = comm.irecv(previous) if i + 1 < len(mine) else None
        seen = _mask(bounds, comm.rank, start, stop, documents, window)
        comm.compute(flops=4 * int(seen.sum()) * heads * d)
        scores = np.einsum("ikgd,jkd->ikgj", q, kv[0])
        scores = np.where(seen[:, None, None, :], scores, -np.inf)
        higher = np.maximum(top, scores.max(axis=-1))
        safe = np.where(np.isfinite(higher), higher, 0.0)  # a query that has seen no key yet
        shrink, p = np.exp(top - safe), np.exp(scores - safe[..., None])
        total = total * shrink + p.sum(axis=-1)
        out = out * shrink[..., None] + np.einsum("ikgj,jkd->ikgd", p, kv[1])
        top = higher
        if going is not None:
            going.wait()
        if coming is not None:
            kv = coming.wait()
    out, lse = out / total[..., None], top + np.log(total)
    return {"out": out.reshape(tokens, heads, d), "lse": lse.reshape(tokens, heads)}


def ring_attention_backward(comm, part, out, lse, dout, bounds, documents, window=None):
    """Gradients of this rank's queries, keys and values; those of keys and values come home along the ring."""
    q, kv = part["q"], np.stack([part["k"], part["v"]])
    tokens, heads, d = q.shape
    if not tokens:
        return {"dq": np.zeros_like(q), "dk": np.zeros_like(part["k"]), "dv": np.zeros_like(part["v"])}
    needs = needed_rows(bounds, documents, window)
    previous, following, theirs = _ring(comm.rank, bounds, needs)
    mine = needs[comm.rank]
    kv_heads = kv.shape[2]
    shape = (tokens, kv_heads, heads // kv_heads, d)
    q, dout, out = q.reshape(shape), dout.reshape(shape), out.reshape(shape)
    lse, delta = lse.reshape(shape[:3]), (dout * out).sum(axis=-1)
    dq, shares = np.zeros(shape), []
    for i, (_, start, stop) in enumerate(mine):
        going = comm.isend(kv[:, theirs[i][1] - start :], following) if i < len(theirs) else None
        coming = comm.irecv(previous) if i + 1 < len(mine) else None
        seen = _mask(bounds, comm.rank, start, stop, documents, window)
        scores = np.einsum("ikgd,jkd->ikgj", q, kv[0]) / np.sqrt(d)
        p = np.exp(np.where(seen[:, None, None, :], scores - lse[..., None], -np.inf))
        ds = p * (np.einsum("ikgd,jkd->ikgj", dout, kv[1]) - delta[..., None]) / np.sqrt(d)
        dq += np.einsum("ikgj,jkd->ikgd", ds, kv[0])
        shares.append(np.stack([np.einsum("ikgj,ikgd->jkd", w, x) for w, x in ((ds, q), (p, dout))]))
        if going is not None:
            going.wait()
        if coming is not None:
            kv = coming.wait()
    sending = []
    for i, (_, start, _) in enumerate(mine):  # the next rank adds first, then this one
        if i < len(theirs):
            shares[i][:, theirs[i][1] - start :] += comm.recv(following)
        if i:
            sending.append(comm.isend(shares[i], previous))
    for work in sending:
        work.wait()
    return {"dq": dq.reshape(tokens, heads, d), "dk": shares[0][0], "dv": shares[0][1]}


def ring_bytes(bounds, documents, kv_heads, head_size, window=None, itemsize=2, backward=False):
    """What each rank sends, in bytes: in the forward program, or in the backward one."""
    needs = needed_rows(bounds, documents, window)
    rows = [0] * len(needs)
    for rank, mine in enumerate(needs):
        if not mine:
            continue
        _, _, theirs = _ring(rank, bounds, needs)
        rows[rank] += sum(stop - start for _, start, stop in theirs)
        if backward:
            rows[rank] += sum(stop - start for _, start, stop in mine[1:])
    return [2 * n * kv_heads * head_size * itemsize for n in rows]


def smallest_hidden_shard(window, heads, kv_heads, head_size, flops, bandwidth, latency=0.0, itemsize=2):
    """The fewest tokens a rank can have so that each transfer ends before the work that goes on meanwhile."""

    def hidden(tokens):
        # Of all blocks the rank's own has the least work, and the one that travels meanwhile the most rows.
        inside = min(tokens, window)
        pairs = inside * (inside + 1) // 2 + (tokens - inside) * window
        rows = min(tokens, window - 1)
        if not rows:
            return True
        seconds = latency + 2 * rows * kv_heads * head_size * itemsize / bandwidth
        return seconds <= 4 * heads * head_size * pairs / flops

    high = 1
    while not hidden(high):
        high *= 2
    low = high // 2  # too few, or none
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if hidden(middle) else (middle, high)
    return high


if __name__ == "__main__":
    from manyranks import simulate

    documents, window = [9, 1, 20, 6], 8
    for what, bounds in (
        ("equal shards", [0, 9, 18, 27, 36]),
        ("equal work", balanced_split(documents, 4, window)),
        ("equal work, at most 10 tokens", balanced_split(documents, 4, window, most=10)),
    ):
        keys = np.minimum(np.arange(36) - _starts(documents) + 1, window)
        work = [int(keys[a:b].sum()) for a, b in zip(bounds, bounds[1:])]
        print(f"{what}: {bounds}, pairs {work}")
    needs = needed_rows(bounds, documents, window)
    print("read:", needs)
    rng = np.random.default_rng(0)
    parts = [
        {
            "q": rng.normal(size=(b - a, 4, 8)),
            "k": rng.normal(size=(b - a, 2, 8)),
            "v": rng.normal(size=(b - a, 2, 8)),
        }
        for a, b in zip(bounds, bounds[1:])
    ]
    run = simulate(ring_attention, inputs=parts, bounds=bounds, documents=documents, window=window)
    print(len(run.traffic), "messages,", run.bytes_sent.tolist(), "bytes sent")
    print("predicted:", ring_bytes(bounds, documents, 2, 8, window, itemsize=8))
    for kv_heads in (32, 8, 1):
        tokens = smallest_hidden_shard(4096, 32, kv_heads, 128, 989e12 * 0.5, 50e9, 10e-6)
        print(f"window 4096, {kv_heads} of 32 heads have keys: hidden from {tokens} tokens a rank")
