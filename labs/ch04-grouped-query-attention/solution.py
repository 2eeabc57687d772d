"""Lab of chapter 4, tensor parallelism for grouped queries: a solution. `python solution.py` prints worked numbers."""

import numpy as np

from manyranks import simulate
from manyranks.runtime import chunk_bounds
from manyranks.tensor_parallel import (
    attention_backward,
    attention_forward,
    parallel_attention_backward,
    parallel_attention_forward,
)

QUERY = {"wq": 1, "bq": 0, "wo": 0}  # name -> axis of its query heads
KEY_VALUE = {"wk": 1, "wv": 1, "bk": 0, "bv": 0}  # name -> axis of its key-value heads


def head_layout(heads, kv_heads, ranks):
    """Which query heads each rank has, and the key-value heads that they read."""
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"kv_heads must divide the {heads} heads, got {kv_heads}")
    if not 1 <= ranks <= heads:
        raise ValueError(f"ranks must be from 1 to the {heads} heads, got {ranks}")
    group, bounds = heads // kv_heads, chunk_bounds(heads, ranks)
    return [
        {"q": (start, stop), "kv": (start // group, (stop - 1) // group + 1)}
        for start, stop in zip(bounds, bounds[1:])
    ]


def shard_attention(params, rank, ranks):
    """A rank's part of attention's parameters."""
    mine = head_layout(params["wq"].shape[1], params["wk"].shape[1], ranks)[rank]
    part = {}
    for name, p in params.items():
        if name in QUERY:
            p = np.take(p, range(*mine["q"]), axis=QUERY[name])
        elif name in KEY_VALUE:
            p = np.take(p, range(*mine["kv"]), axis=KEY_VALUE[name])
        part[name] = p
    return part


def attention_step(comm, part, x, dy, heads, kv_heads):
    """Forward and backward pass of an attention layer, of which this rank has a part; a rank program."""
    layout = head_layout(heads, kv_heads, comm.size)
    mine = layout[comm.rank]
    first, group = mine["kv"][0], heads // kv_heads
    reads = [q // group - first for q in range(*mine["q"])]  # of the part's key-value heads
    wide = {k: np.take(p, reads, axis=KEY_VALUE[k]) if k in KEY_VALUE else p for k, p in part.items()}
    y, saved = parallel_attention_forward(comm, wide, x)
    dx, grads = parallel_attention_backward(comm, wide, saved, dy)
    for name, axis in KEY_VALUE.items():
        if name in part:  # all query heads of this rank that read the head
            folded = np.zeros_like(np.moveaxis(part[name], axis, 0))
            np.add.at(folded, reads, np.moveaxis(grads[name], axis, 0))
            grads[name] = np.moveaxis(folded, 0, axis)
    for head in range(*mine["kv"]):  # in rising order on all ranks: nobody waits in a circle
        holders = [r for r, other in enumerate(layout) if other["kv"][0] <= head < other["kv"][1]]
        if len(holders) > 1:
            names = [name for name in KEY_VALUE if name in part]
            pieces = [np.take(grads[name], head - first, axis=KEY_VALUE[name]) for name in names]
            total = comm.group(holders).all_reduce(np.concatenate([p.reshape(-1) for p in pieces]))
            for name, piece in zip(names, pieces):
                at = (slice(None),) * KEY_VALUE[name] + (head - first,)
                grads[name][at] = total[: piece.size].reshape(piece.shape)
                total = total[piece.size :]
    return y, dx, grads


def attention_bytes(batch, sequence, hidden, heads, kv_heads, head_size, ranks, itemsize=2):
    """Bytes that each rank sends in `attention_step` without biases, all rings with equal chunks."""
    layout = head_layout(heads, kv_heads, ranks)
    activations = 2 * 2 * batch * sequence * hidden * (ranks - 1) / ranks
    sent = []
    for mine in layout:
        elements = activations
        for head in range(*mine["kv"]):
            holders = sum(other["kv"][0] <= head < other["kv"][1] for other in layout)
            elements += 2 * 2 * hidden * head_size * (holders - 1) / holders
        sent.append(elements * itemsize)
    return sent


def kv_cache_bytes(batch, sequence, layers, heads, kv_heads, head_size, ranks, itemsize=2):
    """Bytes of keys and values that each rank keeps while it generates text."""
    layout = head_layout(heads, kv_heads, ranks)
    each = 2 * layers * batch * sequence * head_size * itemsize
    return [each * (mine["kv"][1] - mine["kv"][0]) for mine in layout]


def shard_vocabulary(w, rank, ranks, multiple=1):
    """A rank's columns of the output matrix, zeros after the last word, equally many on all ranks."""
    unit = ranks * multiple
    width = -(-w.shape[1] // unit) * multiple
    padded = np.zeros((w.shape[0], width * ranks), w.dtype)
    padded[:, : w.shape[1]] = w
    return padded[:, rank * width : (rank + 1) * width]


def vocab_parallel_loss(comm, part, hidden, targets, words, z=0.0, ignore=-100):
    """Loss and gradients of an output matrix whose columns are spread over the ranks; a rank program."""
    start = comm.rank * part.shape[1]
    real = max(0, min(part.shape[1], words - start))  # columns that are words
    w, x, t = part[:, :real], hidden.reshape(-1, hidden.shape[-1]), np.asarray(targets).reshape(-1)
    valid = t != ignore
    scale = valid / max(int(valid.sum()), 1)  # (tokens,)
    local, tokens = t - start, np.arange(len(t))
    here = np.flatnonzero(valid & (local >= 0) & (local < real))

    logits = x @ w  # (tokens, real)
    top = comm.all_reduce(logits.max(axis=1, initial=-np.inf), op="max")
    exps = np.exp(logits - top[:, None])
    picked = np.zeros(len(tokens))
    picked[here] = logits[here, local[here]] - top[here]
    total, picked = comm.all_reduce(np.stack([exps.sum(axis=1), picked]))
    log_sum = np.log(total)  # of exponentials of what is above `top`
    lse = top + log_sum
    loss = float(np.sum(scale * (log_sum - picked + z * lse**2)))

    dlogits = exps / total[:, None] * (1 + 2 * z * lse)[:, None]
    dlogits[here, local[here]] -= 1
    dlogits *= scale[:, None]
    dw = np.zeros_like(part)
    dw[:, :real] = x.T @ dlogits
    return loss, comm.all_reduce(dlogits @ w.T).reshape(hidden.shape), dw


def main():
    """Worked numbers."""
    for heads, kv_heads, ranks in ((8, 2, 4), (6, 2, 3), (7, 1, 3)):
        print(f"{heads} query heads, {kv_heads} key-value heads, {ranks} ranks")
        for rank, mine in enumerate(head_layout(heads, kv_heads, ranks)):
            print(f"  rank {rank}: query heads {mine['q']}, key-value heads {mine['kv']}")

    rng = np.random.default_rng(0)
    heads, kv_heads, d, h, ranks = 6, 2, 4, 12, 3
    shapes = {"wq": (h, heads, d), "wk": (h, kv_heads, d), "wv": (h, kv_heads, d), "wo": (heads, d, h)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    x, dy = rng.normal(size=(2, 2, 3, h))
    parts = [shard_attention(params, r, ranks) for r in range(ranks)]
    run = simulate(attention_step, inputs=parts, x=x, dy=dy, heads=heads, kv_heads=kv_heads)
    y, saved = attention_forward(params, x)
    dx, grads = attention_backward(params, saved, dy)
    found = run.results[1]
    print(
        "6, 2 and 3 against dense: y",
        f"{abs(found[0] - y).max():.0e}",
        "dx",
        f"{abs(found[1] - dx).max():.0e}",
        end=" ",
    )
    print("wk", f"{abs(found[2]['wk'] - grads['wk']).max():.0e}")
    predicted = attention_bytes(2, 3, h, heads, kv_heads, d, ranks, itemsize=8)
    print("  bytes sent, counted:", run.bytes_sent.tolist(), "predicted:", predicted)

    for ranks in (4, 8, 16):
        sizes = [b / 1e9 for b in kv_cache_bytes(8, 8192, 80, 64, 8, 128, ranks)]
        print(
            f"KV cache, 80 layers, 64/8 heads of 128, 8 x 8,192 tokens, {ranks:2} ranks: {max(sizes):.2f} GB a rank"
        )

    words, w, x = 11, rng.normal(size=(h, 11)), rng.normal(size=(5, h))
    targets = np.array([3, 10, -100, 0, 7])
    for ranks in (1, 3, 4):
        parts = [shard_vocabulary(w, r, ranks, 2) for r in range(ranks)]
        run = simulate(vocab_parallel_loss, inputs=parts, hidden=x, targets=targets, words=words, z=1e-3)
        print(
            f"loss of 4 of 5 tokens, {words} words on {ranks} ranks of {parts[0].shape[1]} columns: {run.results[0][0]:.10f}"
        )


if __name__ == "__main__":
    main()
