"""Query head i reads key-value head i % c, not the head of its group.

fails: test_forward_equals_dense, test_forward_with_large_scores, test_gradient_of_the_queries,
  test_gradients_of_keys_and_values, test_forward_with_empty_shards, test_backward_with_empty_shards
"""

import numpy as np
from solution import *  # noqa: F403
from solution import _mask, _ring, needed_rows


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
    q = q.reshape(tokens, heads // kv_heads, kv_heads, d).swapaxes(1, 2) / np.sqrt(d)
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
    return {
        "out": out.swapaxes(1, 2).reshape(tokens, heads, d),
        "lse": lse.swapaxes(1, 2).reshape(tokens, heads),
    }


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
    turned = (tokens, heads // kv_heads, kv_heads, d)
    q, dout, out = (x.reshape(turned).swapaxes(1, 2) for x in (q, dout, out))
    lse, delta = lse.reshape(turned[:3]).swapaxes(1, 2), (dout * out).sum(axis=-1)
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
    return {"dq": dq.swapaxes(1, 2).reshape(tokens, heads, d), "dk": shares[0][0], "dv": shares[0][1]}
