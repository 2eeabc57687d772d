"""Lab of chapter 3, a bucketed DDP that accumulates: a solution. `python solution.py` prints worked numbers."""

import math

import numpy as np

from manyranks import Cluster, simulate
from manyranks.data_parallel import backward, forward, init_mlp, leaves, softmax_cross_entropy, unflatten


def bucket_plan(tensors, first, limit):
    """Which tensors are sent together, as a list of buckets in the order in which they are closed."""
    if first <= 0 or limit <= 0:
        raise ValueError(f"first and limit must be positive, got {first} and {limit}")
    plan, opened = [], {}  # dtype -> (tensors, bytes); dicts keep the order of opening
    for i in reversed(range(len(tensors))):
        elements, dtype, trained = tensors[i]
        if not trained:
            continue
        members, held = opened.get(dtype, ([], 0))
        members, held = [*members, i], held + elements * np.dtype(dtype).itemsize
        if held >= (limit if plan else first):
            plan.append(members)
            opened.pop(dtype, None)
        else:
            opened[dtype] = (members, held)
    return plan + [members for members, _ in opened.values()]


def ddp_gradient(comm, micro_batches, shapes, dtypes, seconds, plan):
    """The mean gradient over all examples of all ranks, and how many there are; a rank program."""
    sums = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
    examples = sum(n for n, _ in micro_batches)
    missing = [set(bucket) for bucket in plan]
    works = []

    def send_finished():
        """Start what is complete, in the plan's order: all ranks have to make the same calls in the same order."""
        while len(works) < len(plan) and not missing[len(works)]:
            parts = [sums[i].reshape(-1) for i in plan[len(works)]]
            if not works:
                parts.append(np.array([examples], parts[0].dtype))
            works.append(comm.all_reduce(np.concatenate(parts), async_op=True))

    for number, (n, grads) in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        for i in reversed(range(len(shapes))):
            comm.compute(seconds=seconds[i], label="backward")
            sums[i] = sums[i] + (n * np.asarray(grads[i])).astype(dtypes[i])
            if last:
                for waiting in missing:
                    waiting.discard(i)
                send_finished()
    for waiting in missing:  # a rank without data has nothing to wait for
        waiting.clear()
    send_finished()

    results, total = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes)], 0
    for number, (bucket, work) in enumerate(zip(plan, works)):
        flat = work.wait()
        if number == 0:
            total = int(round(float(flat[-1])))
        start = 0
        for i in bucket:
            size = math.prod(shapes[i])
            results[i] = (flat[start : start + size] / max(total, 1)).reshape(shapes[i]).astype(dtypes[i])
            start += size
    return results, total


def step_timeline(nbytes, seconds, plan, micro_batches, ranks, alpha, beta):
    """Predicted (seconds of the step, seconds of it in which no rank computes any more)."""
    computing = micro_batches * sum(seconds)
    ready, clock = {}, (micro_batches - 1) * sum(seconds)
    for i in reversed(range(len(nbytes))):
        clock += seconds[i]
        ready[i] = clock
    free = 0.0
    for bucket in plan:
        size = sum(nbytes[i] for i in bucket)
        began = max(free, *(ready[i] for i in bucket))
        free = began + 2 * (ranks - 1) * (alpha + size / ranks / beta)
    total = max(computing, free)
    return total, total - computing


def best_limit(tensors, seconds, micro_batches, ranks, alpha, beta, candidates):
    """The candidate with the shortest predicted step; the largest of several."""
    nbytes = [n * np.dtype(dtype).itemsize for n, dtype, _ in tensors]

    def cost(limit):
        plan = bucket_plan(tensors, limit, limit)
        return step_timeline(nbytes, seconds, plan, micro_batches, ranks, alpha, beta)[0], -limit

    return min(candidates, key=cost)


def train_step(comm, shard, layers, micro_batch, lr, limit, clip=None):
    """One step of plain gradient descent on the batch that all ranks' shards make up; a rank program."""
    x, targets = shard
    shapes = [a.shape for a in leaves(layers)]
    sums = [np.zeros(shape) for shape in shapes]
    loss_sum, examples = 0.0, len(x)
    plan = bucket_plan([(math.prod(shape), "float64", True) for shape in shapes], limit, limit)
    missing = [set(bucket) for bucket in plan]
    works = []

    def send_finished():
        while len(works) < len(plan) and not missing[len(works)]:
            parts = [sums[i].reshape(-1) for i in plan[len(works)]]
            if not works:
                parts.append(np.array([examples, loss_sum]))
            works.append(comm.all_reduce(np.concatenate(parts), async_op=True))

    starts = range(0, examples, micro_batch)
    for start in starts:
        rows = slice(start, start + micro_batch)
        activations = forward(layers, x[rows])
        loss, dlogits = softmax_cross_entropy(activations[-1], targets[rows])
        count = len(x[rows])
        loss_sum += float(loss) * count

        def ready(layer, grads, count=count, last=start == starts[-1]):
            for i, g in reversed(list(enumerate(leaves(grads), 2 * layer))):
                sums[i] += count * g
                if last:
                    for waiting in missing:
                        waiting.discard(i)
            if last:
                send_finished()

        backward(layers, activations, dlogits, ready=ready)
    for waiting in missing:
        waiting.clear()
    send_finished()

    mean, total = [None] * len(shapes), None
    for number, (bucket, work) in enumerate(zip(plan, works)):
        flat = work.wait()
        if number == 0:
            total, loss_sum = float(flat[-2]), float(flat[-1])
        for i in bucket:
            size = math.prod(shapes[i])
            mean[i], flat = flat[:size] / total, flat[size:]
    scale = 1.0
    if clip is not None:
        norm = math.sqrt(sum(float((g**2).sum()) for g in mean))
        scale = min(1.0, clip / norm) if norm else 1.0
    flat = np.concatenate([p.reshape(-1) for p in leaves(layers)]) - lr * scale * np.concatenate(mean)
    return loss_sum / total, unflatten(flat, layers)


def main():
    """Worked numbers."""
    tensors = [(n, "float32", True) for n in (3000, 100, 2000, 100, 1000)]
    tensors[1] = (100, "float64", True)
    plan = bucket_plan(tensors, 4000, 10_000)
    print("plan of five tensors, the second in 64 bits:", plan)

    rng = np.random.default_rng(0)
    shapes, dtypes = [(n,) for n, *_ in tensors], [dtype for _, dtype, _ in tensors]
    seconds = [3e-6, 1e-6, 2e-6, 1e-6, 1e-6]
    inputs = [
        [(int(rng.integers(1, 9)), [rng.normal(size=s) for s in shapes]) for _ in range(m)]
        for m in (3, 2, 3, 0)
    ]
    network = Cluster.flat(4, latency=0.1e-6, bandwidth=25e9)
    run = simulate(
        ddp_gradient, inputs=inputs, cluster=network, shapes=shapes, dtypes=dtypes, seconds=seconds, plan=plan
    )
    grads, total = run.results[0]
    serial = [sum(n * g[i] for batches in inputs for n, g in batches) / total for i in range(5)]
    print(f"4 ranks with 3, 2, 3 and 0 micro-batches, {total} examples in all")
    print(
        f"  largest difference to the serial mean: {max(abs(a - b).max() for a, b in zip(grads, serial)):.1e}"
    )
    calls = run.traffic.where(source=0).count // 6
    print(
        f"  {calls} all-reduces; simulated {run.seconds * 1e6:.2f} us, of which computing {run.busy().max() * 1e6:.2f} us"
    )
    nbytes = [n * np.dtype(dtype).itemsize for n, dtype, _ in tensors]
    total, exposed = step_timeline(nbytes, seconds, plan, 3, 4, 0.1e-6, 25e9)
    print(f"  predicted {total * 1e6:.2f} us, exposed {exposed * 1e6:.2f} us")
    print(
        "  best limit:", best_limit(tensors, seconds, 3, 4, 0.1e-6, 25e9, [1, 4000, 10_000, 100_000]), "bytes"
    )

    layers, x = init_mlp((8, 16, 4)), rng.normal(size=(23, 8))
    targets = np.eye(4)[rng.integers(0, 4, 23)]
    cuts = np.split(np.arange(23), [10, 10, 17])
    for step in range(3):
        run = simulate(
            train_step,
            inputs=[(x[c], targets[c]) for c in cuts],
            layers=layers,
            micro_batch=4,
            lr=0.5,
            limit=600,
        )
        loss, layers = run.results[0]
        print(f"step {step}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
