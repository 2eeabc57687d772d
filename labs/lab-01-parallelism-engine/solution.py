"""Lab 1, the parallelism engine: a solution. `python solution.py` prints the worked numbers."""

import numpy as np


def ring_all_reduce(vectors, send=None):
    """The element-wise sum of all ranks' vectors, on every rank, moved as a ring moves it."""
    if send is None:
        send = carry
    own = [np.array(v) for v in vectors]  # a rank works on a copy
    if not own:
        raise ValueError("vectors must hold at least one rank's vector, got none")
    if any(v.ndim != 1 or v.shape != own[0].shape for v in own):
        raise ValueError(f"vectors must be 1-D and equally long, got shapes {[v.shape for v in own]}")
    ranks, length = len(own), len(own[0])
    bounds = [i * (length // ranks) for i in range(ranks)] + [length]  # the remainder is in the last chunk
    pieces = [slice(bounds[i], bounds[i + 1]) for i in range(ranks)]

    for step in range(2 * (ranks - 1)):
        adding = step < ranks - 1
        arriving = []
        for rank in range(ranks):
            # Reduce-scatter: rank r starts with its own chunk r. All-gather: with r + 1, the one that it has finished.
            chunk = (rank - step) % ranks if adding else (rank + 1 - (step - (ranks - 1))) % ranks
            right = (rank + 1) % ranks
            arriving.append((right, pieces[chunk], send(step, rank, right, own[rank][pieces[chunk]].copy())))
        for rank, piece, values in arriving:
            own[rank][piece] = own[rank][piece] + values if adding else values
    return own


def carry(step, source, destination, values):
    """A wire that delivers what it is given."""
    return values


def all_reduce_cost(tensor_bytes, ranks):
    """Steps, and bytes that each rank sends, in a ring all-reduce."""
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")
    if tensor_bytes < 0:
        raise ValueError(f"tensor_bytes must be 0 or more, got {tensor_bytes}")
    return 2 * (ranks - 1), 2 * tensor_bytes * (ranks - 1) / ranks


def data_parallel_gradient_average(gradients, send=None):
    """The mean of all ranks' gradients, on every rank."""
    arrays = [np.asarray(g, dtype=float) for g in gradients]
    if not arrays or any(a.shape != arrays[0].shape for a in arrays):
        raise ValueError(f"gradients must have one shape, got {[a.shape for a in arrays]}")
    sums = ring_all_reduce([a.reshape(-1) for a in arrays], send)
    return [s.reshape(arrays[0].shape) / len(arrays) for s in sums]


def tensor_parallel_matmul(shards, x, split, send=None):
    """W @ x from the shards of W."""
    shards, x = [np.asarray(s, dtype=float) for s in shards], np.asarray(x, dtype=float)
    if split not in ("column", "row"):
        raise ValueError(f"split must be 'column' or 'row', got {split!r}")
    if not shards or any(s.ndim != 2 for s in shards):
        raise ValueError(f"shards must be matrices, at least one, got shapes {[s.shape for s in shards]}")
    if split == "column":
        if any(s.shape[1] != len(x) for s in shards):
            raise ValueError(f"every column shard needs {len(x)} inputs, got {[s.shape[1] for s in shards]}")
        return np.concatenate([s @ x for s in shards])
    if any(s.shape[0] != shards[0].shape[0] for s in shards):
        raise ValueError(
            f"row shards must have the same number of outputs, got {[s.shape[0] for s in shards]}"
        )
    if sum(s.shape[1] for s in shards) != len(x):
        raise ValueError(
            f"the shards take {[s.shape[1] for s in shards]} inputs, which don't tile the {len(x)} of x"
        )
    partial, start = [], 0
    for shard in shards:
        stop = start + shard.shape[1]
        partial.append(shard @ x[start:stop])
        start = stop
    return ring_all_reduce([p.reshape(-1) for p in partial], send)[0].reshape(partial[0].shape)


def pipeline_bubble_fraction(stages, microbatches):
    """The idle fraction of a pipeline's makespan."""
    if stages < 1 or microbatches < 1:
        raise ValueError(f"stages and microbatches must be 1 or more, got {stages} and {microbatches}")
    return (stages - 1) / (microbatches + stages - 1)


def pipeline_schedule_1f1b(stages, microbatches):
    """The 1F1B schedule, slot by slot, and its steps."""
    if stages < 1 or microbatches < 1:
        raise ValueError(f"stages and microbatches must be 1 or more, got {stages} and {microbatches}")
    orders = []
    for stage in range(stages):
        warm = min(stages - 1 - stage, microbatches)
        order = [("F", m) for m in range(warm)]
        for m in range(warm, microbatches):
            order += [("F", m), ("B", m - warm)]
        order += [("B", m) for m in range(microbatches - warm, microbatches)]
        orders.append(order)
    ended, rows = {}, [[] for _ in range(stages)]  # (kind, stage, microbatch) -> the slot after it
    done = [0] * stages
    slot = 0
    while any(done[s] < len(orders[s]) for s in range(stages)):
        finished = []
        for stage in range(stages):
            doing = "."
            if done[stage] < len(orders[stage]):
                kind, m = orders[stage][done[stage]]
                before = stage - 1 if kind == "F" else stage + 1
                if not 0 <= before < stages or ended.get((kind, before, m), slot + 1) <= slot:
                    doing = f"{kind}{m}"
                    finished.append((kind, stage, m))
                    done[stage] += 1
            rows[stage].append(doing)
        slot += 1
        ended.update({key: slot for key in finished})
    useful = 2 * microbatches
    return {"useful_steps": useful, "bubble_steps": slot - useful, "total_steps": slot, "rows": rows}


def zero_memory_per_gpu(parameters, ranks, stage):
    """Bytes of training state on each GPU: 2 + 2 + 12 a parameter, sharded by ZeRO."""
    if parameters < 1 or ranks < 1:
        raise ValueError(f"parameters and ranks must be 1 or more, got {parameters} and {ranks}")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
    weights, gradients, optimizer = 2 * parameters, 2 * parameters, 12 * parameters
    return (
        weights / (ranks if stage >= 3 else 1)
        + gradients / (ranks if stage >= 2 else 1)
        + optimizer / (ranks if stage >= 1 else 1)
    )


def main():
    """Worked numbers."""
    moved = []

    def wire(step, source, destination, values):
        moved.append((step, source, values.nbytes))
        return values

    vectors = [np.arange(10.0) * 10**rank for rank in range(4)]
    results = ring_all_reduce(vectors, wire)
    steps = 1 + max(step for step, _, _ in moved)
    sent = [sum(b for _, source, b in moved if source == rank) for rank in range(4)]
    print("ring all-reduce of 4 vectors of 10 elements")
    print(f"  rank 0 has {results[0]}")
    print(f"  equal to the plain sum on all ranks: {all(np.array_equal(r, sum(vectors)) for r in results)}")
    print(f"  {steps} steps; bytes sent by rank: {sent}; formula: {all_reduce_cost(80, 4)[1]:g} on average")
    steps, sent = all_reduce_cost(14e9, 8)
    print(f"all-reduce of 14 GB on 8 ranks: {steps} steps, {sent / 1e9:g} GB sent by each rank")

    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=(3, 2)) for _ in range(4)]
    mean = data_parallel_gradient_average(gradients)[0]
    print(
        f"data-parallel mean against serial mean: largest difference {abs(mean - np.mean(gradients, axis=0)).max():.1e}"
    )

    w, x = rng.normal(size=(6, 7)), rng.normal(size=7)
    by_column = tensor_parallel_matmul([w[:4], w[4:]], x, "column")
    by_row = tensor_parallel_matmul([w[:, :3], w[:, 3:]], x, "row")
    print(
        f"tensor parallel against dense: column {abs(by_column - w @ x).max():.1e}, row {abs(by_row - w @ x).max():.1e}"
    )

    for stages, microbatches in ((4, 4), (4, 64)):
        fraction = pipeline_bubble_fraction(stages, microbatches)
        print(
            f"bubble of {stages} stages, {microbatches} microbatches: {stages - 1}/{microbatches + stages - 1} = {fraction:.4f}"
        )
    schedule = pipeline_schedule_1f1b(4, 4)
    for stage, row in enumerate(schedule["rows"]):
        print(f"  stage {stage}: {' '.join(f'{slot:2}' for slot in row)}")
    print(
        f"  {schedule['useful_steps']} useful + {schedule['bubble_steps']} bubble = {schedule['total_steps']} steps"
    )

    ladder = [zero_memory_per_gpu(7e9, 8, stage) / 1e9 for stage in range(4)]
    print(
        "ZeRO, 7B parameters on 8 GPUs, GB a GPU: "
        + ", ".join(f"stage {s} {gb:g}" for s, gb in enumerate(ladder))
    )


if __name__ == "__main__":
    main()
