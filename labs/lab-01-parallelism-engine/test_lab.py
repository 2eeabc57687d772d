"""Tests of lab 1. `pytest test_lab.py -v` tests lab.py; with LAB_MODULE=solution they test solution.py."""

import importlib
import os

import numpy as np
import pytest

lab = importlib.import_module(os.environ.get("LAB_MODULE", "lab"))
SEED = int(os.environ.get("LAB_SEED", "1"))
SIZES = [(2, 8), (3, 7), (4, 10), (5, 5), (6, 23)]  # ranks, length


def values(*shape, salt=0):
    """Whole numbers as floats: sums of them are exact in any order."""
    return np.random.default_rng([SEED, salt, *shape]).integers(-99, 100, size=shape).astype(float)


def make_wire(spoil=None):
    """A wire that delivers messages, perhaps changed by `spoil`, and the list in which it writes them down."""
    log = []

    def send(step, source, destination, sent):
        sent = np.array(sent)
        log.append((int(step), int(source), int(destination), sent))
        return spoil(step, source, sent) if spoil else sent

    return send, log


def coded(ranks, length):
    """Vectors whose sums tell what is in them: element j of rank r is 2**r + j * 2**ranks."""
    return [2**r + np.arange(length) * 2**ranks for r in range(ranks)]


def decode(values, ranks):
    """Of values that were summed from `coded`: (positions, set of ranks in the sum); fails for a mixture."""
    masks = {int(v) % 2**ranks for v in values}
    assert len(masks) == 1, f"one message holds sums over different ranks: {[bin(m) for m in masks]}"
    mask = masks.pop()
    members = {r for r in range(ranks) if mask >> r & 1}
    positions = [(int(v) >> ranks) / max(len(members), 1) for v in values]
    return positions, members


# ---------------------------------------------------------------------------- the ring


@pytest.mark.points(6)
def test_ring_gives_every_rank_the_sum():
    """Every rank ends with exactly the element-wise sum of all vectors."""
    for ranks, length in SIZES:
        vectors = [values(length, salt=r) for r in range(ranks)]
        results = lab.ring_all_reduce(vectors)
        assert len(results) == ranks, (
            f"{ranks} ranks, but {len(results)} results: one for each rank is expected"
        )
        for r, result in enumerate(results):
            assert np.array_equal(result, sum(vectors)), (
                f"{ranks} ranks, {length} elements: rank {r} has {result}, the plain sum is {sum(vectors)}. "
                "An all-reduce gives the same sum to all ranks, however it moves the data."
            )


@pytest.mark.points(4)
def test_ring_puts_the_remainder_into_the_last_chunk():
    """With L = qN + r, N - 1 chunks have q elements and the last one q + r."""
    for ranks, length in ((3, 7), (4, 10), (6, 23), (2, 9)):
        wire, log = make_wire()
        lab.ring_all_reduce(coded(ranks, length), wire)
        q = length // ranks
        cuts = sorted({tuple(decode(v, ranks)[0]) for *_, v in log if len(v)})
        expected = [tuple(range(i * q, (i + 1) * q)) for i in range(ranks - 1)]
        expected.append(tuple(range((ranks - 1) * q, length)))
        found = [(int(c[0]), int(c[-1]) + 1) for c in cuts]
        assert cuts == expected, (
            f"{length} elements on {ranks} ranks: chunks [start, stop) seen on the wire are {found}, expected "
            f"{[(c[0], c[-1] + 1) for c in expected]}: q = {q} elements each, and what is left over in the last."
        )


@pytest.mark.points(6)
def test_ring_takes_2_n_minus_1_steps_to_the_right():
    """2(N - 1) steps, and in each step every rank sends one message to its right neighbour."""
    for ranks, length in SIZES:
        wire, log = make_wire()
        lab.ring_all_reduce([values(length, salt=r) for r in range(ranks)], wire)
        steps = sorted({step for step, *_ in log})
        assert steps == list(range(2 * (ranks - 1))), (
            f"{ranks} ranks: steps {steps}, expected 0 to {2 * (ranks - 1) - 1}: N-1 to add up and N-1 to pass on. "
            "Is every message given to send(step, source, destination, values)?"
        )
        for step in steps:
            pairs = sorted((s, d) for k, s, d, _ in log if k == step)
            assert pairs == [(r, (r + 1) % ranks) for r in range(ranks)], (
                f"{ranks} ranks, step {step}: messages {pairs}; in a ring each rank sends one, to its right neighbour"
            )


@pytest.mark.points(4)
def test_ring_sums_grow_by_one_rank_a_step():
    """In step k a message holds the sum of k + 1 ranks; from step N - 1 on all are finished."""
    for ranks, length in ((2, 6), (4, 10), (5, 15)):
        wire, log = make_wire()
        lab.ring_all_reduce(coded(ranks, length), wire)
        assert log, "no message was sent"
        for step, source, _, sent in log:
            _, members = decode(sent, ranks)
            wanted = min(step + 1, ranks)
            assert len(members) == wanted, (
                f"{ranks} ranks, step {step}: rank {source} sends a sum over ranks {sorted(members)}, {wanted} of them "
                "are expected. Which chunk has it just added to? That is the one to send on."
            )


@pytest.mark.points(4)
def test_ring_uses_what_arrives():
    """A message that is changed on the wire changes the results as it should."""
    ranks, length = 4, 12
    for step, everywhere in ((0, True), (ranks - 1, False)):
        hit = []

        def spoil(k, source, sent, step=step, hit=hit):
            if k == step and source == 0:
                hit.extend(decode(sent, ranks)[0])
                return sent + 2**40
            return sent

        vectors = coded(ranks, length)
        results = lab.ring_all_reduce(vectors, make_wire(spoil)[0])
        assert hit, f"rank 0 sent nothing in step {step}"
        for r, result in enumerate(results):
            expected = sum(vectors)
            if everywhere or r != 0:
                expected[[int(j) for j in hit]] += 2**40
            assert np.array_equal(result, expected), (
                f"a message of step {step} was changed on the wire; rank {r} should "
                f"{'show it' if everywhere or r else 'not show it'} in its result: add or keep what send returns "
                "(not what was sent, and not a sum from elsewhere)"
            )


@pytest.mark.points(4)
def test_ring_sends_as_many_bytes_as_promised():
    """Each rank sends 2S(N-1)/N bytes for equal chunks, and all together 2S(N-1) always."""
    for ranks, length in ((4, 12), (3, 9), (4, 10), (6, 23)):
        wire, log = make_wire()
        lab.ring_all_reduce([values(length, salt=r) for r in range(ranks)], wire)
        sent = [sum(v.nbytes for _, s, _, v in log if s == r) for r in range(ranks)]
        whole = 2 * 8 * length * (ranks - 1)
        assert sum(sent) == whole, (
            f"{ranks} ranks, {length} elements: {sum(sent)} bytes in all, expected {whole}"
        )
        if length % ranks == 0:
            assert sent == [whole // ranks] * ranks, (
                f"bytes by rank: {sent}, expected {whole // ranks} from each"
            )


@pytest.mark.points(3)
def test_ring_with_few_elements_or_one_rank():
    """Fewer elements than ranks, none at all, and a single rank, which sends nothing."""
    for ranks, length in ((5, 3), (4, 1), (3, 0), (1, 4)):
        vectors, (wire, log) = [values(length, salt=r) for r in range(ranks)], make_wire()
        results = lab.ring_all_reduce(vectors, wire)
        right = len(results) == ranks and all(np.array_equal(r, sum(vectors)) for r in results)
        assert right, f"{ranks} ranks, {length} elements: {results}, expected {sum(vectors)} on each"
        assert ranks > 1 or not log, "a single rank has nobody to send to"


@pytest.mark.points(1)
def test_ring_refuses_bad_vectors():
    """ValueError for no vectors, and for vectors of different lengths."""
    for vectors in ([], [np.ones(3), np.ones(4)], [np.ones((2, 2)), np.ones((2, 2))]):
        with pytest.raises(ValueError):
            lab.ring_all_reduce(vectors)


# ---------------------------------------------------------------------------- its cost


@pytest.mark.points(5)
def test_cost_is_the_rings():
    """2(N-1) steps and 2S(N-1)/N bytes for each rank."""
    cases = [(14e9, 8), (120, 4), (1.0, 3), (0, 5)]
    cases += [(int(s), int(n)) for s, n in zip(abs(values(4)) + 1, abs(values(4, salt=1)) + 2)]
    for size, ranks in cases:
        steps, sent = lab.all_reduce_cost(size, ranks)
        assert steps == 2 * (ranks - 1), f"{ranks} ranks: {steps} steps, expected 2(N-1) = {2 * (ranks - 1)}"
        wanted = 2 * size * (ranks - 1) / ranks
        assert sent == pytest.approx(wanted, rel=1e-12), (
            f"{size:g} bytes on {ranks} ranks: {sent} bytes a rank, expected {wanted}: 2(N-1) chunks of S/N bytes"
        )


@pytest.mark.points(2)
def test_cost_of_one_rank_and_of_none():
    """One rank costs nothing; fewer than one is an error, and so are fewer than 0 bytes."""
    steps, sent = lab.all_reduce_cost(1e9, 1)
    assert (steps, sent) == (0, 0), f"one rank: {steps} steps and {sent} bytes, but it has nobody to send to"
    for bad in ((1e9, 0), (-1, 4)):
        with pytest.raises(ValueError):
            lab.all_reduce_cost(*bad)


# ---------------------------------------------------------------------------- data parallel


@pytest.mark.points(5)
def test_average_is_the_serial_mean():
    """Every rank gets the mean of all gradients, in their shape."""
    for ranks, shape in ((1, (3,)), (2, (4,)), (3, (2, 5)), (4, (3, 1, 2)), (5, (2,))):
        gradients = [values(*shape, salt=r) for r in range(ranks)]
        results = lab.data_parallel_gradient_average(gradients)
        assert len(results) == ranks, f"one result for each of {ranks} ranks, not {len(results)}"
        for r, result in enumerate(results):
            assert np.shape(result) == shape, (
                f"rank {r}: shape {np.shape(result)}, the gradients have {shape}"
            )
            assert np.allclose(result, np.mean(gradients, axis=0), rtol=1e-12), (
                f"{ranks} ranks: rank {r} has {result}, the mean is {np.mean(gradients, axis=0)}. The all-reduce gives "
                "the sum; a mean is the sum divided by the number of ranks."
            )


@pytest.mark.points(4)
def test_average_is_the_gradient_of_one_big_batch():
    """Averaged over equal shards, a linear model's gradients are those of the whole batch."""
    for ranks in (2, 4):
        x, y, w = values(12, 3), values(12, salt=1), values(3, salt=2)

        def gradient(x, y, w=w):
            return 2 * x.T @ (x @ w - y) / len(y)

        shards = [gradient(a, b) for a, b in zip(np.split(x, ranks), np.split(y, ranks))]
        for r, result in enumerate(lab.data_parallel_gradient_average(shards)):
            assert np.allclose(result, gradient(x, y), rtol=1e-9), (
                f"{ranks} ranks: rank {r} has {result}, the big batch's gradient is {gradient(x, y)}"
            )


@pytest.mark.points(3)
def test_average_goes_over_the_ring():
    """It takes the ring's steps, and a changed message changes the mean."""
    wire, log = make_wire(lambda step, source, v: v + 60.0 if (step, source) == (0, 1) else v)
    results = lab.data_parallel_gradient_average([values(2, 3, salt=r) for r in range(3)], wire)
    assert len(log) == 4 * 3, f"3 ranks: {len(log)} messages, a ring sends 2(N-1) from each, 12"
    mean = np.mean([values(2, 3, salt=r) for r in range(3)], axis=0)
    for r, result in enumerate(results):
        off = np.asarray(result).reshape(-1) - mean.reshape(-1)
        assert sorted(off.round(9)) == [0, 0, 0, 0, 20, 20], (
            f"a message of two elements was changed by 60 on the wire; the mean of 3 should be off by 20 there, "
            f"rank {r} is off by {off}: all-reduce with the given send, then divide"
        )


# ---------------------------------------------------------------------------- tensor parallel


def cut(w, sizes, axis):
    """Shards of the given sizes along an axis."""
    return np.split(w, np.cumsum(sizes)[:-1], axis=axis)


@pytest.mark.points(5)
def test_column_split_equals_dense():
    """Shards of the outputs, of any sizes, give W @ x."""
    for sizes, shape in (([2, 2], (3,)), ([3, 1, 2], (5,)), ([4], (2, 3)), ([1, 5, 1, 1], (7, 2))):
        w, x = values(sum(sizes), shape[0]), values(*shape, salt=1)
        y = lab.tensor_parallel_matmul(cut(w, sizes, 0), x, "column")
        assert np.shape(y) == np.shape(w @ x), f"shape {np.shape(y)}, W @ x has {np.shape(w @ x)}"
        assert np.array_equal(y, w @ x), (
            f"column shards of {sizes} outputs: {y}, dense {w @ x}. Concatenate the slices."
        )


@pytest.mark.points(5)
def test_row_split_equals_dense():
    """Shards of the inputs, of any sizes, give W @ x."""
    for sizes, shape in (([2, 2], (4,)), ([3, 1, 2], (6,)), ([4], (4, 3)), ([1, 5, 1, 1], (8, 2))):
        w, x = values(3, sum(sizes)), values(*shape, salt=1)
        y = lab.tensor_parallel_matmul(cut(w, sizes, 1), x, "row")
        assert np.shape(y) == np.shape(w @ x), f"shape {np.shape(y)}, W @ x has {np.shape(w @ x)}"
        assert np.array_equal(y, w @ x), (
            f"row shards of {sizes} inputs: {y}, dense {w @ x}. Each rank's product with its own slice of x is one "
            "term of the sum."
        )


@pytest.mark.points(4)
def test_only_the_row_split_communicates():
    """Column shards send nothing; row shards all-reduce their partial results over the ring."""
    w, x, (wire, log) = values(6, 9), values(9, salt=1), make_wire()
    lab.tensor_parallel_matmul(cut(w, [2, 3, 1], 0), x, "column", wire)
    assert not log, f"column shards: {len(log)} messages, but their results only have to be put together"
    lab.tensor_parallel_matmul(cut(w, [4, 3, 2], 1), x, "row", wire)
    sent = sum(len(v) for *_, v in log)
    assert len(log) == 12 and sent == 2 * 2 * 6, (
        f"row shards on 3 ranks: {len(log)} messages with {sent} elements; an all-reduce of 6 elements has 12 "
        "messages and 24 elements. Use ring_all_reduce with the given send."
    )


@pytest.mark.points(3)
def test_shards_that_do_not_fit_are_refused():
    """ValueError for shards that don't tile x, that differ where they mustn't, and for an unknown split."""
    w, x = values(4, 6), values(6, salt=1)
    cases = [
        ("row", [w[:, :2], w[:, 3:]], "columns that don't add up to the length of x"),
        ("row", [w[:, :4], w[:, 2:]], "columns that overlap"),
        ("row", [w[:, :3], w[:3, 3:]], "different numbers of outputs"),
        ("column", [w[:2], w[2:, :5]], "a shard with too few inputs"),
        ("diagonal", [w], "an unknown split"),
    ]
    for split, shards, what in cases:
        try:
            y = lab.tensor_parallel_matmul(shards, x, split)
        except ValueError:
            continue
        pytest.fail(f"{split}: {what} should be a ValueError, and gave {y}: a wrong Y that nobody notices")


# ---------------------------------------------------------------------------- pipeline


@pytest.mark.points(5)
def test_bubble_fraction():
    """(P-1)/(M+P-1): 3/7 for 4 and 4; none with one stage; smaller with more microbatches."""
    assert lab.pipeline_bubble_fraction(4, 4) == pytest.approx(3 / 7, abs=1e-15), (
        f"4 stages, 4 microbatches: {lab.pipeline_bubble_fraction(4, 4)}, expected 3/7 of the makespan; (P-1)/M would "
        "be the overhead over the ideal"
    )
    for p, m in [(1, 5), (4, 64), (2, 1), *(abs(values(6, 2)) + 1).astype(int).tolist()]:
        found, wanted = lab.pipeline_bubble_fraction(p, m), (p - 1) / (m + p - 1)
        assert found == pytest.approx(wanted, abs=1e-12), (
            f"{p} stages, {m} microbatches: {found}, expected {wanted}"
        )
    for bad in ((0, 4), (4, 0)):
        with pytest.raises(ValueError):
            lab.pipeline_bubble_fraction(*bad)


PIPELINES = [(1, 1), (1, 3), (2, 1), (2, 5), (3, 3), (4, 2), (4, 4), (5, 9)]


@pytest.mark.points(4)
def test_schedule_counts():
    """2M useful and 2(P-1) bubble steps; their ratio is the bubble fraction."""
    for p, m in PIPELINES:
        s = lab.pipeline_schedule_1f1b(p, m)
        found = (s["useful_steps"], s["bubble_steps"], s["total_steps"])
        wanted = (2 * m, 2 * (p - 1), 2 * (m + p - 1))
        assert found == wanted, (
            f"{p} stages, {m} microbatches: useful, bubble, total {found}, expected {wanted}"
        )
        assert s["bubble_steps"] / s["total_steps"] == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    for bad in ((0, 4), (4, 0)):
        with pytest.raises(ValueError):
            lab.pipeline_schedule_1f1b(*bad)


def slots(rows):
    """(kind, stage, microbatch) -> step."""
    return {
        (slot[0], stage, int(slot[1:])): step
        for stage, row in enumerate(rows)
        for step, slot in enumerate(row)
        if slot != "."
    }


@pytest.mark.points(6)
def test_schedule_can_be_run():
    """Each stage does each pass once, and nothing starts before what it needs has ended."""
    for p, m in PIPELINES:
        rows = lab.pipeline_schedule_1f1b(p, m)["rows"]
        assert [len(row) for row in rows] == [2 * (m + p - 1)] * p, (
            f"{p} stages, {m} microbatches: rows of {[len(row) for row in rows]} steps, expected {p} of {2 * (m + p - 1)}"
        )
        for stage, row in enumerate(rows):
            wanted = sorted([f"F{k}" for k in range(m)] + [f"B{k}" for k in range(m)])
            assert sorted(x for x in row if x != ".") == wanted, (
                f"{p} stages, {m} microbatches: stage {stage} does {row}; each pass of each microbatch once is expected"
            )
        at = slots(rows)
        for (kind, stage, k), step in at.items():
            needs = [(kind, stage - 1, k)] if kind == "F" else [(kind, stage + 1, k), ("F", stage, k)]
            for need in needs:
                assert need not in at or at[need] < step, (
                    f"{p} stages, {m} microbatches: stage {stage} runs {kind}{k} in step {step}, but {need[0]}{k} of "
                    f"stage {need[1]} only runs in step {at[need]}"
                )


@pytest.mark.points(5)
def test_schedule_holds_few_activations():
    """Stage s never holds more than P - s microbatches: that is what 1F1B is for."""
    for p, m in PIPELINES:
        for stage, row in enumerate(lab.pipeline_schedule_1f1b(p, m)["rows"]):
            held = most = 0
            for slot in row:
                held += {"F": 1, "B": -1}.get(slot[0], 0)
                most = max(most, held)
            assert most == min(p - stage, m), (
                f"{p} stages, {m} microbatches: stage {stage} holds {most} microbatches at its worst, expected "
                f"{min(p - stage, m)}. After min(P-1-s, M) forwards, each further forward is followed by a backward; "
                "all forwards first is GPipe."
            )


# ---------------------------------------------------------------------------- ZeRO


@pytest.mark.points(6)
def test_zero_ladder():
    """7B parameters on 8 GPUs: 112, 38.5, 26.25 and 14 GB for stages 0 to 3."""
    found = [lab.zero_memory_per_gpu(7_000_000_000, 8, stage) / 1e9 for stage in range(4)]
    assert found == pytest.approx([112, 38.5, 26.25, 14], rel=1e-12), (
        f"GB a GPU by stage: {found}, expected 112, 38.5, 26.25, 14. Stage 1 shards the optimizer's 12 bytes, 2 the "
        "gradients too, 3 the weights too."
    )
    assert found[3] < found[2] < found[1] < found[0]


@pytest.mark.points(4)
def test_zero_shards_what_the_stage_says():
    """For any model and number of ranks; one rank saves nothing, many go to 4, 2 and 0 bytes a parameter."""
    for n, ranks in [(10**6, 1), (10**9, 10**6), *(abs(values(4, 2)) + 1).astype(int).tolist()]:
        for stage, (whole, cut) in enumerate(((16, 0), (4, 12), (2, 14), (0, 16))):
            found, wanted = lab.zero_memory_per_gpu(n, ranks, stage), n * (whole + cut / ranks)
            assert found == pytest.approx(wanted, rel=1e-12), (
                f"{n} parameters, {ranks} ranks, stage {stage}: {found} bytes, expected {wanted}: {whole} bytes a "
                f"parameter whole and {cut} divided"
            )


@pytest.mark.points(2)
def test_zero_refuses_what_makes_no_sense():
    """ValueError for a stage other than 0 to 3, and for no ranks."""
    for bad in ((7e9, 8, 4), (7e9, 8, -1), (7e9, 0, 1)):
        with pytest.raises(ValueError):
            lab.zero_memory_per_gpu(*bad)
