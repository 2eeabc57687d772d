"""What comes back from the next rank replaces a rank's own share instead of being added to it.

fails: test_gradients_of_keys_and_values, test_backward_with_empty_shards
"""

import numpy as np
from solution import *  # noqa: F403
from solution import _mask, _ring, needed_rows


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
            shares[i][:, theirs[i][1] - start :] = comm.recv(following)
        if i:
            sending.append(comm.isend(shares[i], previous))
    for work in sending:
        work.wait()
    return {"dq": dq.reshape(tokens, heads, d), "dk": shares[0][0], "dv": shares[0][1]}
