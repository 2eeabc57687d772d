"""Tests of the lab of chapter 3. LAB_MODULE=solution tests solution.py instead of lab.py."""

import importlib
import math
import os

import numpy as np
import pytest

from manyranks import Cluster, simulate
from manyranks.data_parallel import flatten, init_mlp, loss_and_gradient, sgd_step, timed_step

lab = importlib.import_module(os.environ.get("LAB_MODULE", "lab"))
SEED = int(os.environ.get("LAB_SEED", "1"))


def rng_of(*salt):
    return np.random.default_rng([SEED, *salt])


def plain(buckets):
    return [[int(i) for i in bucket] for bucket in buckets]


# ---------------------------------------------------------------------------- the plan


@pytest.mark.points(9)
def test_plan_closes_buckets_at_their_limit():
    """Last tensor first; a bucket is closed as soon as it holds its limit, the first one at `first`."""
    rng = rng_of(1)
    cases = [([5, 1, 1, 9, 2], 8, 24), ([3], 100, 100), ([], 4, 4), ([7, 7, 7], 28, 28)]
    cases += [
        (rng.integers(1, 50, 12).tolist(), int(rng.integers(1, 100)), int(rng.integers(50, 300)))
        for _ in range(5)
    ]
    for elements, first, limit in cases:
        plan = plain(lab.bucket_plan([(n, "float32", True) for n in elements], first, limit))
        case = f"elements {elements} in 32 bits, first {first}, limit {limit}: plan {plan}"
        order = [i for bucket in plan for i in bucket]
        assert order == list(range(len(elements)))[::-1], (
            f"{case}: all tensors, each once, from the last to the first"
        )
        for number, bucket in enumerate(plan):
            cap, held = (limit if number else first), [4 * elements[i] for i in bucket]
            assert sum(held[:-1]) < cap, (
                f"{case}: bucket {number} held {cap} bytes before its last tensor came"
            )
            assert sum(held) >= cap or number == len(plan) - 1, (
                f"{case}: bucket {number} is closed with {sum(held)} bytes"
            )


@pytest.mark.points(6)
def test_plan_keeps_dtypes_apart():
    """One open bucket a dtype; what is open at the end is closed in the order of opening."""
    f, d, h = ("float32", True), ("float64", True), ("float16", True)
    for tensors, first, limit, wanted in (
        ([(10, *d), (10, *f), (10, *d), (10, *f)], 1000, 1000, [[3, 1], [2, 0]]),
        ([(10, *f), (10, *d), (10, *f), (10, *f)], 80, 80, [[3, 2], [1], [0]]),
        ([(10, *f), (10, *d), (10, *f), (10, *d)], 1, 120, [[3], [2, 0], [1]]),
        ([(1, *d), (1, *f), (9, *h), (1, *h), (1, *f)], 16, 8, [[3, 2], [4, 1], [0]]),
        ([(4, *f), (4, *d), (4, *f), (9, *d), (4, *f)], 32, 40, [[3], [4, 2, 0], [1]]),
    ):
        plan = plain(lab.bucket_plan(tensors, first, limit))
        assert plan == wanted, (
            f"{[t[:2] for t in tensors]}, first {first}, limit {limit}: {plan}, expected {wanted}. A message holds one "
            "dtype; buckets are listed in the order in which they are closed."
        )


@pytest.mark.points(3)
def test_plan_skips_what_is_not_trained():
    """Untrained tensors have no gradient; limits of 0 bytes are refused."""
    tensors = [(10, "float32", i not in (1, 4)) for i in range(5)]
    assert plain(lab.bucket_plan(tensors, 40, 80)) == [[3], [2, 0]], (
        "tensors 1 and 4 aren't trained: nothing to send"
    )
    for bad in ((0, 10), (10, -1)):
        with pytest.raises(ValueError):
            lab.bucket_plan(tensors, *bad)


# ---------------------------------------------------------------------------- the gradient

SHAPES = [(3, 4), (4,), (2, 2), (5,)]
PLAN = [[3, 2], [1], [0]]
SECONDS = [3e-3, 1e-3, 2e-3, 4e-3]


def batches(counts, salt=0, equal=False, shapes=SHAPES, dtypes=None):
    """For each rank as many micro-batches as `counts` says, of different sizes."""
    rng = rng_of(2, salt)
    dtypes = dtypes or ["float64"] * len(shapes)

    def one():
        examples = 4 if equal else int(rng.integers(1, 9))
        return examples, [rng.normal(size=s).astype(d) for s, d in zip(shapes, dtypes)]

    return [[one() for _ in range(count)] for count in counts]


def serial_mean(inputs):
    total = sum(n for rank in inputs for n, _ in rank)
    return [
        sum(n * g[i].astype(float) for rank in inputs for n, g in rank) / total for i in range(len(SHAPES))
    ], total


def gradient(inputs, plan=PLAN, shapes=SHAPES, dtypes=None, seconds=SECONDS, **options):
    dtypes = dtypes or ["float64"] * len(shapes)
    return simulate(
        lab.ddp_gradient, inputs=inputs, shapes=shapes, dtypes=dtypes, seconds=seconds, plan=plan, **options
    )


def check_mean(inputs, run, case, tolerance=1e-12):
    wanted, total = serial_mean(inputs)
    for r, (grads, examples) in enumerate(run.results):
        assert int(examples) == total, f"{case}: rank {r} counts {examples} examples, there are {total}"
        for i, (found, right) in enumerate(zip(grads, wanted)):
            assert np.shape(found) == right.shape, (
                f"{case}: tensor {i} has shape {np.shape(found)}, not {right.shape}"
            )
            assert np.allclose(found, right, rtol=0, atol=tolerance), (
                f"{case}: rank {r}, tensor {i} is off by {abs(found - right).max():.2g} from the mean over all examples. "
                "Is each micro-batch's mean weighted with its examples, and the sum divided by all ranks' examples?"
            )


@pytest.mark.points(12)
def test_gradient_is_that_of_the_big_batch():
    """With equal micro-batches on all ranks: the mean over all of them, on every rank."""
    for counts in ([1], [3], [1, 1], [2, 2, 2], [3, 3, 3, 3]):
        inputs = batches(counts, equal=True)
        check_mean(inputs, gradient(inputs), f"{counts} micro-batches of 4 examples")


@pytest.mark.points(8)
def test_gradient_weights_unequal_ranks_by_their_examples():
    """Any number of micro-batches of any size on a rank, also none; two dtypes."""
    for counts in ([1, 2], [3, 1, 2], [2, 0], [0, 3, 1], [0, 0, 1]):
        inputs = batches(counts, 3)
        check_mean(inputs, gradient(inputs), f"{counts} micro-batches of different sizes")
    dtypes = ["float64", "float32", "float32", "float64"]
    inputs = batches([2, 1], 4, dtypes=dtypes)
    run = gradient(inputs, plan=[[3], [2, 1], [0]], dtypes=dtypes)
    check_mean(inputs, run, "tensors of two dtypes", 1e-5)
    for grads, _ in run.results:
        kinds = [str(np.asarray(g).dtype) for g in grads]
        assert kinds == dtypes, f"gradients have dtypes {kinds}, the tensors {dtypes}"


@pytest.mark.points(8)
def test_one_all_reduce_a_bucket_and_step():
    """As many calls as buckets, however many micro-batches; one number more than the gradient has is sent."""
    for counts, plan in (
        ([1, 1, 1], PLAN),
        ([4, 4, 4], PLAN),
        ([2, 5, 0], [[3, 2, 1, 0]]),
        ([2, 2], [[3], [2], [1], [0]]),
    ):
        n = len(counts)
        run = gradient(batches(counts, 5), plan=plan)
        calls = [sum(m.source == r for m in run.traffic) / (2 * (n - 1)) for r in range(n)]
        assert calls == [len(plan)] * n, (
            f"{counts} micro-batches, {len(plan)} buckets: all-reduces by rank {calls}, expected one a bucket: accumulate "
            "locally, communicate in the last micro-batch only"
        )
        elements = sum(math.prod(s) for s in SHAPES) + 1
        sent = int(run.bytes_sent.sum())
        assert sent == 2 * (n - 1) * 8 * elements, (
            f"{counts} micro-batches: {sent} bytes in all, expected {2 * (n - 1) * 8 * elements}: the gradient once, and "
            "the number of examples as one more element of the first bucket"
        )


@pytest.mark.points(8)
def test_communication_starts_before_the_backward_ends():
    """Each bucket leaves as soon as it is complete, in the last micro-batch; computing goes on."""
    for counts in ([1, 1, 1], [3, 3], [2, 4, 1]):
        network = Cluster.flat(len(counts), latency=1e-5, bandwidth=1e9)
        run = gradient(batches(counts, 6), cluster=network)
        whole, most = sum(SECONDS), max(counts)
        assert run.busy() == pytest.approx([c * whole for c in counts]), (
            f"{counts} micro-batches: ranks compute {run.busy()} s, expected {[c * whole for c in counts]}: declare each "
            "tensor's seconds in each micro-batch with comm.compute"
        )
        for r, count in enumerate(counts):
            under_way = [i for i in run.timeline if i.rank == r and i.kind == "comm"]
            assert len(under_way) == len(PLAN), (
                f"rank {r}: {len(under_way)} collectives run beside the program, expected {len(PLAN)}: async_op=True"
            )
            first = min(i.start for i in under_way)
            ready = (count - 1) * whole + SECONDS[3] + SECONDS[2]
            assert first == pytest.approx(ready), (
                f"{counts} micro-batches, rank {r}: the first bucket leaves after {first * 1e3:.1f} ms; it is complete "
                f"after {ready * 1e3:.1f} ms, in the last micro-batch"
            )
        limit = most * whole + 1e-3  # only the last bucket's own time is left over
        assert run.seconds < limit, (
            f"{counts} micro-batches: {run.seconds * 1e3:.2f} ms, {limit * 1e3:.2f} are enough"
        )


@pytest.mark.points(5)
def test_buckets_leave_in_the_plans_order():
    """A bucket that is complete early waits for its turn: all ranks have to make the same calls in the same order."""
    for plan in ([[3, 0], [2, 1]], [[2], [3, 1], [0]], [[0], [1], [2], [3]]):
        inputs = batches([2, 0, 1], 7)
        run = gradient(inputs, plan=plan)
        check_mean(inputs, run, f"plan {plan}, 2, 0 and 1 micro-batches")


# ---------------------------------------------------------------------------- the prediction


@pytest.mark.points(4)
def test_timeline_of_a_case_worked_by_hand():
    """Three tensors, two buckets, two micro-batches, by hand."""
    # A micro-batch takes 6 s: tensor 2 until 1 s, 1 until 3 s, 0 until 6 s. A ring of 2 ranks takes 2 s + its bytes.
    for plan, micro, wanted in (
        ([[2], [1, 0]], 1, (12, 6)),  # 4 bytes from 1 s to 7 s; then 3 bytes, complete since 6 s, to 12 s
        ([[2, 1, 0]], 1, (15, 9)),
        ([[2], [1, 0]], 2, (18, 6)),
        ([[2], [1], [0]], 2, (20, 8)),
    ):
        found = lab.step_timeline([1, 2, 4], [3, 2, 1], plan, micro, 2, 1.0, 1.0)
        assert tuple(found) == pytest.approx(wanted), (
            f"plan {plan}, {micro} micro-batches: {found}, expected {wanted}"
        )


@pytest.mark.points(8)
def test_timeline_agrees_with_the_simulated_clock():
    """The prediction is the simulated time of the chapter's bucketed step, on fast and slow networks."""
    rng = rng_of(8)
    for ranks in (1, 2, 4, 7):
        for beta in (1e8, 1e10):
            sizes, forward = [1000] * 6, 1e-4
            shares = rng.uniform(0.1, 1, 6)
            seconds = list(2 * forward * shares / shares.sum())
            for limit, plan in (
                (0, [[5], [4], [3], [2], [1], [0]]),
                (8000, [[5, 4], [3, 2], [1, 0]]),
                (math.inf, [[5, 4, 3, 2, 1, 0]]),
            ):
                network = Cluster.flat(ranks, latency=2e-6, bandwidth=beta)
                step = dict(
                    sizes=sizes,
                    forward_seconds=forward,
                    limit=limit,
                    shares=list(shares),
                    algorithm="closed_form",
                )
                run = simulate(timed_step, cluster=network, **step)
                total, exposed = lab.step_timeline([4000] * 6, seconds, plan, 1, ranks, 2e-6, beta)
                case = f"{ranks} ranks, {beta / 1e9:g} GB/s, {len(plan)} buckets"
                wanted = run.seconds - forward
                assert total == pytest.approx(wanted, rel=1e-6), (
                    f"{case}: {total * 1e6:.2f} us, simulated {wanted * 1e6:.2f}"
                )
                assert exposed == pytest.approx(max(0, wanted - 2 * forward), abs=1e-9), (
                    f"{case}: {exposed * 1e6:.2f} us exposed"
                )


@pytest.mark.points(4)
def test_best_limit():
    """The quickest of the candidates by your own plan and prediction; the largest of equals."""
    rng, chosen = rng_of(9), set()
    candidates = [1, 3000, 10_000, 10**9]
    for ranks, alpha, beta in ((8, 1e-7, 1e8), (8, 5e-5, 1e10), (8, 1e-6, 2e9), (1, 1e-6, 1e9)):
        tensors = [(int(n), "float32", True) for n in rng.integers(100, 900, 10)]
        tensors[3], tensors[6] = (500, "float64", True), (9000, "float32", False)
        seconds = [2e-6] * 10
        nbytes = [n * np.dtype(d).itemsize for n, d, _ in tensors]
        job = (2, ranks, alpha, beta)
        found = lab.best_limit(tensors, seconds, *job, candidates)
        took = {
            c: lab.step_timeline(nbytes, seconds, lab.bucket_plan(tensors, c, c), *job)[0] for c in candidates
        }
        wanted = max(c for c in candidates if took[c] <= min(took.values()) * (1 + 1e-12))
        assert found == wanted, (
            f"{ranks} ranks, {alpha} s, {beta:g} B/s: {found}, expected {wanted} of {took}"
        )
        chosen.add(found)
    assert len(chosen) >= 2, f"a slow network and a slow start want different buckets, not always {chosen}"


# ---------------------------------------------------------------------------- training


def problem(rows, salt=0):
    rng = rng_of(10, salt)
    return init_mlp((5, 7, 3), seed=SEED), rng.normal(size=(rows, 5)), np.eye(3)[rng.integers(0, 3, rows)]


def train(cuts, steps, micro_batch, limit, clip=None, salt=0):
    """Losses and layers of `steps` steps, and the last run; the shards are cut at `cuts`."""
    layers, x, targets = problem(23, salt)
    inputs, losses = list(zip(np.split(x, cuts), np.split(targets, cuts))), []
    for _ in range(steps):
        run = simulate(
            lab.train_step,
            inputs=inputs,
            layers=layers,
            micro_batch=micro_batch,
            lr=0.4,
            limit=limit,
            clip=clip,
        )
        for r, (loss, mine) in enumerate(run.results):
            assert np.array_equal(flatten(mine), flatten(run.results[0][1])), (
                f"rank {r}'s model differs from rank 0's"
            )
            assert float(loss) == float(run.results[0][0]), f"rank {r} reports another loss than rank 0"
        loss, layers = run.results[0]
        losses.append(float(loss))
    return losses, layers, run


def serially(steps, clip=None, salt=0):
    layers, x, targets = problem(23, salt)
    losses = []
    for _ in range(steps):
        loss, grads = loss_and_gradient(layers, x, targets)
        norm = float(np.linalg.norm(flatten(grads)))
        losses.append(float(loss))
        layers = sgd_step(layers, grads, 0.4 * (1 if clip is None else min(1, clip / norm)))
    return losses, layers


def compare(found, wanted, case):
    assert found[0] == pytest.approx(wanted[0], rel=1e-10), (
        f"{case}: losses {found[0]}, on one rank {wanted[0]}"
    )
    off = abs(flatten(found[1]) - flatten(wanted[1])).max()
    assert off < 1e-12, f"{case}: the model is off by {off:.2g} from one rank with the whole batch"


@pytest.mark.points(10)
def test_training_is_that_of_one_rank():
    """Losses and parameters after three steps are those of one rank with the whole batch."""
    for cuts, micro_batch, limit in (([], 23, 1), ([], 4, 200), ([12], 5, 200), ([8, 16], 3, 10**6)):
        case = f"shards cut at {cuts}, micro-batches of {micro_batch}, buckets of {limit} bytes"
        compare(train(cuts, 3, micro_batch, limit)[:2], serially(3), case)


@pytest.mark.points(5)
def test_training_with_any_shards():
    """Shards of very different sizes, and ranks without any rows."""
    for cuts in ([20], [0, 9], [5, 5, 23]):
        case = f"23 rows, cut at {cuts}"
        compare(train(cuts, 2, 4, 200, salt=1)[:2], serially(2, salt=1), case)


@pytest.mark.points(6)
def test_training_communicates_once_a_bucket():
    """One all-reduce a bucket; the examples and the loss travel in the first one."""
    for cuts, limit, buckets in (([12], 1, 4), ([2, 23], 10**6, 1), ([8, 16], 50, 3)):
        _, _, run = train(cuts, 1, 3, limit)
        n = run.ranks
        calls = [sum(m.source == r for m in run.traffic) / (2 * (n - 1)) for r in range(n)]
        assert calls == [buckets] * n, (
            f"cut at {cuts}, buckets of {limit} bytes: all-reduces by rank {calls}, expected {buckets}: one a bucket, none "
            "for the loss"
        )
        wanted = 2 * (n - 1) * 8 * (5 * 7 + 7 + 7 * 3 + 3 + 2)
        assert int(run.bytes_sent.sum()) == wanted, (
            f"{int(run.bytes_sent.sum())} bytes in all, expected {wanted}"
        )


@pytest.mark.points(4)
def test_training_clips_the_averaged_gradient():
    """The norm of the mean over the whole batch is clipped, not each rank's own."""
    for clip in (0.05, 0.3, 100.0):
        case = f"gradients clipped to {clip}"
        compare(train([3, 15], 2, 4, 200, clip=clip, salt=2)[:2], serially(2, clip, salt=2), case)
