"""Tests of the lab beyond the chapter on long context. Run them in this folder: pytest test_lab.py -v"""

import importlib
import os

import numpy as np
import pytest

from manyranks import Cluster, simulate

lab = importlib.import_module(os.environ.get("LAB_MODULE", "lab"))
SEED = int(os.environ.get("LAB_SEED", "1"))


def rng_of(*salt):
    """Random numbers of their own for each use, others for each LAB_SEED."""
    return np.random.default_rng([SEED, *salt])


# --------------------------------------------------------------------- what the tests compare with


def all_seen(documents, window=None):
    """seen[i, j]: whether query i reads key j."""
    tokens = sum(documents)
    document = np.repeat(np.arange(len(documents)), documents)
    i, j = np.arange(tokens)[:, None], np.arange(tokens)[None, :]
    seen = (j <= i) & (document[:, None] == document[None, :])
    return seen & (i - j < (tokens + 1 if window is None else window))


def reads(bounds, documents, window=None):
    """The answer of needed_rows, looked up in the whole mask."""
    seen, out = all_seen(documents, window), []
    for rank in range(len(bounds) - 1):
        read = np.flatnonzero(seen[bounds[rank] : bounds[rank + 1]].any(axis=0))
        mine = []
        for source in range(rank, -1, -1):
            rows = [int(j) for j in read if bounds[source] <= j < bounds[source + 1]]
            if rows:
                mine.append((source, rows[0], rows[-1] + 1))
        out.append(mine)
    return out


def after(bounds):
    """For each rank the next one that has tokens."""
    full = [r for r in range(len(bounds) - 1) if bounds[r] < bounds[r + 1]]
    return dict(zip(full, full[1:]))


def sent_rows(bounds, documents, window=None, backward=False):
    """Rows of keys (and as many of values) that each rank sends, and to whom: a matrix."""
    needs, rows = reads(bounds, documents, window), np.zeros((len(bounds) - 1,) * 2, dtype=int)
    for rank, following in after(bounds).items():
        rows[rank, following] += sum(stop - start for _, start, stop in needs[following][1:])
    return rows + rows.T if backward else rows


def dense(q, k, v, seen):
    """Output and log-sum-exp of all queries."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("iad,jad->aij", q, k) / np.sqrt(q.shape[2])
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(axis=-1, keepdims=True)
    return np.einsum("aij,jad->iad", p / total, v), (top + np.log(total))[..., 0].T


def dense_backward(q, k, v, dout, seen):
    """Gradients of q, k and v of all tokens."""
    kv_heads, scale = k.shape[1], 1 / np.sqrt(q.shape[2])
    group = q.shape[1] // kv_heads
    wide_k, wide_v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.where(seen, np.einsum("iad,jad->aij", q, wide_k) * scale, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = np.einsum("iad,jad->aij", dout, wide_v)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * scale

    def of_groups(x):
        return x.reshape(len(x), kv_heads, group, -1).sum(axis=2)

    dk, dv = np.einsum("aij,iad->jad", ds, q), np.einsum("aij,iad->jad", p, dout)
    return np.einsum("aij,jad->iad", ds, wide_k), of_groups(dk), of_groups(dv)


#: documents, bounds, window, query heads, key-value heads, head size
CASES = [
    ([12], [0, 3, 6, 9, 12], None, 2, 2, 3),
    ([17], [0, 5, 9, 13, 17], 4, 4, 2, 3),
    ([17], [0, 5, 9, 13, 17], 11, 6, 2, 2),
    ([5, 1, 9, 2], [0, 7, 8, 9, 17], 6, 4, 1, 3),
    ([1, 14, 5], [0, 2, 6, 7, 9, 20], None, 6, 3, 2),
    ([10], [0, 10], 3, 2, 1, 4),
    ([4, 4, 3], [0, 4, 8, 11], None, 3, 1, 2),
    ([9], [0, 3, 6, 9], 1, 2, 1, 2),
    ([3, 30, 2], [0, 20, 24, 27, 31, 35], 19, 2, 1, 2),
]


#: the same, with ranks that have no tokens: first, last, between, several in a row
WITH_EMPTY = [
    ([5, 1, 9, 2], [0, 7, 8, 8, 17], 6, 4, 1, 3),
    ([1, 14, 5], [0, 0, 6, 6, 9, 20], None, 6, 3, 2),
    ([11], [0, 4, 4, 4, 9, 11], 7, 2, 1, 2),
    ([6, 7], [0, 0, 8, 13, 13], None, 2, 2, 2),
]


def random_case(rng, empty=False):
    documents = [int(n) for n in rng.integers(1, 15, rng.integers(1, 5))]
    tokens, ranks = sum(documents), int(rng.integers(2, 6))
    inner = rng.integers(0, tokens + 1, ranks - 1)
    if not empty:
        inner = rng.permutation(np.arange(1, tokens))[: ranks - 1]
    bounds = [0, *sorted(int(n) for n in inner), tokens]
    kv_heads, group = (int(n) for n in rng.integers(1, 4, 2))
    window = None if rng.random() < 0.3 else int(rng.integers(1, 16))
    return documents, bounds, window, kv_heads * group, kv_heads, 2


def cases(salt, more=3):
    rng = rng_of(salt)
    return CASES + [random_case(rng) for _ in range(more)]


def cases_with_empty(salt, more=3):
    rng = rng_of(salt)
    return WITH_EMPTY + [random_case(rng, empty=True) for _ in range(more)]


def named(documents, bounds, window, heads=None, kv_heads=None, d=None):
    what = f"documents {documents}, bounds {bounds}, window {window}"
    return what if heads is None else f"{what}, {heads} query heads and {kv_heads} key-value heads"


def tensors(documents, heads, kv_heads, d, salt, scale=1.0):
    rng, tokens = rng_of(salt, sum(documents), heads), sum(documents)
    q, k, v = (rng.normal(size=(tokens, n, d)) for n in (heads, kv_heads, kv_heads))
    return scale * q, scale * k, v


def cut(x, bounds):
    return [x[a:b] for a, b in zip(bounds, bounds[1:])]


def parts_of(q, k, v, bounds):
    return [{"q": a, "k": b, "v": c} for a, b, c in zip(*(cut(x, bounds) for x in (q, k, v)))]


def forward(case, salt, scale=1.0, cluster=None):
    documents, bounds, window, heads, kv_heads, d = case
    q, k, v = tensors(documents, heads, kv_heads, d, salt, scale)
    run = simulate(
        lab.ring_attention,
        inputs=parts_of(q, k, v, bounds),
        bounds=bounds,
        documents=documents,
        window=window,
        cluster=cluster,
    )
    for rank, result in enumerate(run.results):
        assert isinstance(result, dict) and {"out", "lse"} <= set(result), (
            f"rank {rank}: ring_attention returns a dict with out and lse, got {type(result).__name__}"
        )
    return run, dense(q, k, v, all_seen(documents, window))


# given to every rank as its input: what the forward program left, computed here, so that backward is tested by itself
def _backward(comm, given, **shared):
    return lab.ring_attention_backward(comm, *given, **shared)


def backward(case, salt):
    documents, bounds, window, heads, kv_heads, d = case
    q, k, v = tensors(documents, heads, kv_heads, d, salt)
    dout, seen = rng_of(salt, 7).normal(size=q.shape), all_seen(documents, window)
    out, lse = dense(q, k, v, seen)
    given = list(zip(parts_of(q, k, v, bounds), *(cut(x, bounds) for x in (out, lse, dout))))
    run = simulate(_backward, inputs=given, bounds=bounds, documents=documents, window=window)
    for rank, result in enumerate(run.results):
        assert isinstance(result, dict) and {"dq", "dk", "dv"} <= set(result), (
            f"rank {rank}: ring_attention_backward returns a dict with dq, dk and dv, got {type(result).__name__}"
        )
    return run, dict(zip(("dq", "dk", "dv"), dense_backward(q, k, v, dout, seen)))


def compare(results, name, whole, bounds, what, why, tolerance=1e-9):
    for rank, (result, wanted) in enumerate(zip(results, cut(whole, bounds))):
        found = result[name]
        assert np.shape(found) == wanted.shape, (
            f"{what}: {name} of rank {rank} has shape {np.shape(found)}, not {wanted.shape}"
        )
        off = float(np.abs(found - wanted).max()) if wanted.size else 0.0
        assert off <= tolerance, f"{what}: {name} of rank {rank} is off by {off:.1e}. {why}"


def check_links(run, case, directions):
    """Messages between neighbours that have tokens, and between nobody else."""
    what, links = named(*case), set(after(case[1]).items())
    if directions == 2:
        links |= {(b, a) for a, b in links}
    for message in run.traffic:
        assert (message.source, message.destination) in links, (
            f"{what}: rank {message.source} sends to rank {message.destination}. The ring consists of the ranks that have "
            f"tokens, and it links {sorted(links)}"
        )


def check_traffic(run, case, directions):
    """Messages between neighbours, one for a block, with the rows that are read and no others."""
    documents, bounds, window, heads, kv_heads, d = case
    what, needs = named(*case), reads(bounds, documents, window)
    check_links(run, case, directions)
    wanted = 2 * 8 * kv_heads * d * sent_rows(bounds, documents, window, directions == 2)
    found = run.traffic.matrix()
    assert found.tolist() == wanted.tolist(), (
        f"{what}: bytes from rank (row) to rank (column) are {found.tolist()}, and {wanted.tolist()} are enough: of each "
        "block the rows that the next rank or one behind it reads, for the key-value heads, in 8 bytes"
    )
    messages = directions * sum(max(0, len(mine) - 1) for mine in needs)
    assert run.traffic.count == messages, (
        f"{what}: {run.traffic.count} messages, and {messages} are enough: one for each block that a rank reads of another, "
        "keys and values together, and none for what nobody reads"
    )


# --------------------------------------------------------------------- the split


def work_of(documents, window, bounds):
    rows = all_seen(documents, window).sum(axis=1)
    return [int(rows[a:b].sum()) for a, b in zip(bounds, bounds[1:])]


def best_work(documents, ranks, window, most):
    """The smallest possible largest work, by trying every cut: best[r][t] for r ranks and the first t tokens."""
    before = np.concatenate([[0], np.cumsum(all_seen(documents, window).sum(axis=1))])
    tokens = len(before) - 1
    best = np.where(np.arange(tokens + 1) == 0, 0.0, np.inf)
    for _ in range(ranks):
        best = np.array(
            [
                min(max(best[s], before[t] - before[s]) for s in range(max(0, t - most), t + 1))
                for t in range(tokens + 1)
            ]
        )
    return best[tokens]


def check_split(documents, ranks, window, most):
    what = f"documents {documents}, {ranks} ranks, window {window}, most {most}"
    found = [int(n) for n in lab.balanced_split(documents, ranks, window, most)]
    tokens = sum(documents)
    assert len(found) == ranks + 1 and found[0] == 0 and found[-1] == tokens and found == sorted(found), (
        f"{what}: {ranks + 1} offsets that rise from 0 to {tokens}, got {found}"
    )
    sizes = [b - a for a, b in zip(found, found[1:])]
    assert most is None or max(sizes) <= most, f"{what}: shards of {sizes} tokens, at most {most} have room"
    work = work_of(documents, window, found)
    best = best_work(documents, ranks, window, tokens if most is None else most)
    assert max(work) == best, (
        f"{what}: {found} has pairs {work}, the most {max(work)}; it can be done with {best:g} at most"
    )


@pytest.mark.points(9)
def test_split_balances_the_work():
    """Contiguous shards, and the largest number of pairs is the smallest possible."""
    for documents, ranks, window in (
        ([16], 4, None), ([16], 4, 3), ([16], 1, None), ([2], 4, None), ([1] * 9, 4, 5), ([30, 2, 2, 2], 3, None),
        ([5, 7, 11, 13], 5, 6),
    ):  # fmt: skip
        check_split(documents, ranks, window, None)
    rng = rng_of(1)
    for _ in range(12):
        documents, _, window, *_ = random_case(rng)
        check_split(documents, int(rng.integers(1, 7)), window, None)


@pytest.mark.points(6)
def test_split_within_memory():
    """No shard has more tokens than there is room for; a ValueError that names most if there is no room at all."""
    for documents, ranks, window, most in (
        ([16], 4, None, 6), ([16], 4, None, 4), ([30, 2, 2, 2], 3, None, 13), ([4, 8, 12], 3, 3, 10),
        ([3, 3, 20], 3, 2, 9), ([7], 1, 2, 7),
    ):  # fmt: skip
        check_split(documents, ranks, window, most)
    rng = rng_of(2)
    for _ in range(12):
        documents, _, window, *_ = random_case(rng)
        ranks = int(rng.integers(1, 7))
        check_split(documents, ranks, window, -(-sum(documents) // ranks) + int(rng.integers(0, 3)))
    with pytest.raises(ValueError, match="most"):
        lab.balanced_split([9, 4], 3, None, 4)


# --------------------------------------------------------------------- who reads what


@pytest.mark.points(8)
def test_needed_rows():
    """Rows by source, back along the ring; nothing of other documents, of what the window has left, or of empty shards."""
    for case in cases(3) + cases_with_empty(17, more=12):
        documents, bounds, window, *_ = case
        found = [
            [tuple(int(n) for n in row) for row in mine]
            for mine in lab.needed_rows(bounds, documents, window)
        ]
        wanted = reads(bounds, documents, window)
        assert len(found) == len(wanted), f"{named(*case[:3])}: a list for each of {len(wanted)} ranks"
        for rank in range(len(wanted)):
            assert found[rank] == wanted[rank], (
                f"{named(*case[:3])}: rank {rank} reads {wanted[rank]} (source, start, stop), got {found[rank]}"
            )


# --------------------------------------------------------------------- forward


def check_forward(run, wanted, case):
    out, lse = wanted
    compare(
        run.results, "out", out, case[1], named(*case),
        "Positions are those of the whole sequence, query head i reads key-value head i // (heads / kv_heads), and what "
        "was summed under an old maximum has to be scaled to the new one",
    )  # fmt: skip
    compare(
        run.results,
        "lse",
        lse,
        case[1],
        named(*case),
        "It is log of the sum of exp(score) over all keys read",
    )


@pytest.mark.points(13)
def test_forward_equals_dense():
    """Output and log-sum-exp of every query, with shards of different lengths and one rank to five."""
    for case in cases(4):
        check_forward(*forward(case, 4), case)


@pytest.mark.points(4)
def test_forward_with_large_scores():
    """Scores in the tens of thousands, of either sign, neither overflow nor vanish."""
    for case in (CASES[0], CASES[2], CASES[4], CASES[8]):
        run, (out, lse) = forward(case, 5, scale=2e4)
        what = named(*case) + ", scores up to 1e5"
        for rank, result in enumerate(run.results):
            assert np.isfinite(result["out"]).all() and np.isfinite(result["lse"]).all(), (
                f"{what}: rank {rank} has inf or NaN. Subtract the largest score so far; and mind a query for which a block "
                "holds no key at all"
            )
        compare(run.results, "out", out, case[1], what, "Is the running maximum that of all keys?", 1e-6)
        compare(run.results, "lse", lse, case[1], what, "Add the maximum again", 1e-6)


@pytest.mark.points(9)
def test_forward_moves_only_what_is_read():
    """One message for a block that a rank reads of another, between neighbours, with no row that isn't read."""
    for case in cases(6):
        run, _ = forward(case, 6)
        check_traffic(run, case, 1)


@pytest.mark.points(4)
def test_forward_with_empty_shards():
    """Ranks without tokens return empty arrays and are left out of the ring; the others have the right values."""
    for case in cases_with_empty(18):
        run, wanted = forward(case, 18)
        check_forward(run, wanted, case)
        check_links(run, case, 1)


def _overlapped(comm, blocks, sizes, following, previous):
    """What the rank program does, with nothing in the arrays: send on, ask for the next, work, wait."""
    for i, flops in enumerate(blocks):
        going = comm.isend(np.zeros(sizes[i]), following) if i < len(sizes) else None
        coming = comm.irecv(previous) if i + 1 < len(blocks) else None
        comm.compute(flops=flops)
        for work in (going, coming):
            if work is not None:
                work.wait()


@pytest.mark.points(8)
def test_forward_overlaps():
    """Declared work is that of the pairs that are read; a block is passed on before the work on it."""
    for case in (
        ([48], [0, 12, 24, 36, 48], None, 4, 2, 4),
        ([30, 34], [0, 16, 32, 48, 64], 30, 4, 2, 4),
        ([40], [0, 8, 16, 24, 32, 40], 17, 2, 1, 4),
    ):
        documents, bounds, window, heads, kv_heads, d = case
        ranks, seen, needs = len(bounds) - 1, all_seen(documents, window), reads(bounds, documents, window)
        links = after(bounds)
        back = {b: a for a, b in links.items()}
        given = []
        for rank, mine in enumerate(needs):
            pairs = [int(seen[bounds[rank] : bounds[rank + 1], start:stop].sum()) for _, start, stop in mine]
            theirs = needs[links[rank]][1:] if rank in links else []
            sizes = [2 * kv_heads * d * (stop - start) for _, start, stop in theirs]
            given.append(([4 * n * heads * d for n in pairs], sizes, links.get(rank), back.get(rank)))
        size = (bounds[1] - bounds[0]) * kv_heads * d * 2 * 8
        # A whole block takes about as long to send as half a block of pairs to compute.
        cluster = Cluster.flat(
            ranks, latency=0.0, bandwidth=size / 0.4, peak_flops=4 * heads * d * (bounds[1]) ** 2
        )
        wanted = simulate(lambda comm, x: _overlapped(comm, *x), inputs=given, cluster=cluster)
        run, _ = forward(case, 8, cluster=cluster)
        declared, right = run.busy() * cluster.gpu.peak_flops, [sum(blocks) for blocks, *_ in given]
        assert np.allclose(declared, right), (
            f"{named(*case)}: work declared with comm.compute is {declared.tolist()} on each rank; 4 * pairs * heads * head "
            f"size are {right}, where pairs are those that the mask leaves"
        )
        assert run.seconds <= 1.02 * wanted.seconds, (
            f"{named(*case)}: it takes {run.seconds:.3f} s, and {wanted.seconds:.3f} s are enough. Before the work on a block "
            "start sending the next rank's part of it (isend) and receiving your next one (irecv); wait after the work"
        )


# --------------------------------------------------------------------- backward


def check_dq(run, wanted, case):
    compare(
        run.results, "dq", wanted["dq"], case[1], named(*case),
        "ds = p * (dp - sum of dout * out), and a query adds up over all blocks",
    )  # fmt: skip


def check_dk_and_dv(run, wanted, case):
    for name in ("dv", "dk"):
        compare(
            run.results, name, wanted[name], case[1], named(*case),
            "Every query of every rank that read a row has a share, and so has every query head of its group",
        )  # fmt: skip


@pytest.mark.points(7)
def test_gradient_of_the_queries():
    """dq, from the output and log-sum-exp that the forward program left."""
    for case in cases(9):
        check_dq(*backward(case, 9), case)


@pytest.mark.points(10)
def test_gradients_of_keys_and_values():
    """dk and dv are complete at home, with the shares of all ranks that read them and of all heads of a group."""
    for case in cases(10):
        check_dk_and_dv(*backward(case, 10), case)


@pytest.mark.points(7)
def test_backward_comes_home_along_the_ring():
    """Keys and values out, their gradients back between neighbours: as many messages and bytes again, and no more."""
    for case in cases(11):
        run, _ = backward(case, 11)
        check_traffic(run, case, 2)


@pytest.mark.points(3)
def test_backward_with_empty_shards():
    """Gradients, where ranks without tokens are left out of the ring."""
    for case in cases_with_empty(19):
        run, wanted = backward(case, 19)
        check_dq(run, wanted, case)
        check_dk_and_dv(run, wanted, case)
        check_links(run, case, 2)


# --------------------------------------------------------------------- plans


@pytest.mark.points(5)
def test_ring_bytes():
    """The prediction, forward and backward: two jobs worked by hand, and random ones."""
    for sizes, wanted, why in (
        (
            dict(bounds=[0, 4, 8, 12], documents=[12], kv_heads=1, head_size=1, itemsize=1),
            [8, 16, 0],
            "rank 1 reads 4 rows of rank 0, rank 2 reads 4 of each, and all come from its neighbour",
        ),
        (
            dict(
                bounds=[0, 4, 8, 12],
                documents=[3, 9],
                kv_heads=2,
                head_size=4,
                window=6,
                itemsize=2,
                backward=True,
            ),
            [32, 192, 160],
            "rank 1 reads row 3 of rank 0; rank 2 reads row 3 too, and 4 rows of rank 1; gradients go the other way",
        ),
    ):
        found = [int(n) for n in lab.ring_bytes(**sizes)]
        assert found == wanted, f"{sizes}: {wanted}, because {why}; got {found}"
    rng = rng_of(12)
    for case in cases(12) + cases_with_empty(20, more=5):
        documents, bounds, window, *_ = case
        kv_heads, d, itemsize = (int(n) for n in rng.integers(1, 9, 3))
        for back in (False, True):
            rows = sent_rows(bounds, documents, window, back).sum(axis=1)
            wanted = [int(n) * 2 * kv_heads * d * itemsize for n in rows]
            found = [int(n) for n in lab.ring_bytes(bounds, documents, kv_heads, d, window, itemsize, back)]
            assert found == wanted, (
                f"{named(*case[:3])}, {kv_heads} heads of size {d}, {itemsize} bytes, backward {back}: {wanted} bytes "
                f"sent by each rank, got {found}"
            )


def is_hidden(tokens, window, heads, kv_heads, d, flops, bandwidth, latency, itemsize):
    """Block by block, for a rank that has enough tokens before its own."""
    i = np.arange(tokens)[:, None]
    pairs = None
    for back in range(window // tokens + 3):
        far = back * tokens + i - np.arange(tokens)[None, :]
        seen = (far >= 0) & (far < window)
        rows = int(seen.any(axis=0).sum())
        if back and rows:
            seconds = latency + 2 * rows * kv_heads * d * itemsize / bandwidth
            if seconds > 4 * pairs * heads * d / flops:
                return False
        pairs = int(seen.sum())
    return True


@pytest.mark.points(7)
def test_smallest_hidden_shard():
    """Where each transfer hides behind the work on the block before: worked by hand, and block by block."""
    for sizes, wanted, why in (
        (
            dict(window=100, heads=8, kv_heads=2, head_size=4, flops=128.0, bandwidth=8.0),
            7,
            "a pair takes 1 s and a row of keys and values 4 s: 7 tokens have 28 pairs of their own, and 28 s of rows",
        ),
        (
            dict(window=5, heads=8, kv_heads=2, head_size=4, flops=128.0, bandwidth=8.0),
            6,
            "a window of 5 reads 4 rows, 16 s, of the block before; 5 tokens have 15 pairs, 6 have 20",
        ),
        (
            dict(window=1, heads=8, kv_heads=8, head_size=4, flops=128.0, bandwidth=1e-3),
            1,
            "a token that reads itself only waits for nothing",
        ),
    ):
        found = lab.smallest_hidden_shard(**sizes)
        assert found == wanted, f"{sizes}: {wanted} tokens, because {why}; got {found}"
    rng = rng_of(13)
    for _ in range(12):
        window, kv_heads, group, d = (int(n) for n in (rng.integers(2, 40), *rng.integers(1, 5, 3)))
        job = dict(
            window=window, heads=kv_heads * group, kv_heads=kv_heads, head_size=d, flops=float(4 * kv_heads * group * d),
            bandwidth=float(2 * kv_heads * d * 2 / rng.uniform(0.3, 12)), latency=float(rng.uniform(0, 30)),
            itemsize=int(rng.choice([1, 2, 4, 8])),
        )  # fmt: skip
        options = (job["flops"], job["bandwidth"], job["latency"], job["itemsize"])
        wanted = next(
            c for c in range(1, 10_000) if is_hidden(c, window, job["heads"], kv_heads, d, *options)
        )
        found = lab.smallest_hidden_shard(**job)
        assert found == wanted, (
            f"{job}: {wanted} tokens a rank, got {found}. Only key-value heads travel, in rows that the window reaches; all "
            "query heads work"
        )
