"""Tests of the lab beyond the chapter on mixture of experts. Run them in this folder: pytest test_lab.py -v"""

import importlib
import itertools
import os

import numpy as np
import pytest

from manyranks import simulate

lab = importlib.import_module(os.environ.get("LAB_MODULE", "lab"))
SEED = int(os.environ.get("LAB_SEED", "1"))


def rng_of(*salt):
    """Random numbers of their own for each use, others for each LAB_SEED."""
    return np.random.default_rng([SEED, *salt])


def zipf_loads(rng, experts):
    """Loads as routers make them: a few experts have most of the tokens."""
    return [int(n) for n in rng.permutation(1000 / np.arange(1, experts + 1) ** rng.uniform(0, 1.2))]


# --------------------------------------------------------------------- copies and places


def fewest_copies(loads, limit):
    """How many copies of each expert keep the load of one at `limit`, a fraction (numerator, denominator)."""
    return [max(1, -(-load * limit[1] // limit[0])) for load in loads]


def best_share(loads, slots, most):
    """The smallest possible largest load of a copy: one of the fractions load / n, tried from below."""
    fractions = sorted(
        {(load, n) for load in loads for n in range(1, most + 1) if load}, key=lambda f: f[0] / f[1]
    )
    for limit in fractions:
        copies = fewest_copies(loads, limit)
        if max(copies) <= most and sum(copies) <= slots:
            return limit[0] / limit[1]
    return 0.0


@pytest.mark.points(8)
def test_replicas():
    """Every slot is used, every expert has a copy, none more than `most`, and the hottest copy is as cool as possible."""
    jobs = [
        ([90, 30, 20, 10], 6, 4), ([90, 30, 20, 10], 4, 4), ([90, 30, 20, 10], 6, 2), ([5, 5, 5], 9, 3), ([0, 0, 7], 5, 3),
        ([8], 3, 3), ([100, 1, 1, 1, 1], 8, 4),
    ]  # fmt: skip
    rng = rng_of(1)
    for _ in range(20):
        experts, most = int(rng.integers(1, 17)), int(rng.integers(1, 9))
        jobs.append((zipf_loads(rng, experts), int(rng.integers(experts, experts * most + 1)), most))
    for loads, slots, most in jobs:
        what = f"loads {loads}, {slots} slots, at most {most} copies of an expert"
        found = [int(n) for n in lab.replicas(loads, slots, most)]
        assert len(found) == len(loads) and sum(found) == slots, (
            f"{what}: {slots} copies of {len(loads)} experts, got {found}"
        )
        assert min(found) >= 1 and max(found) <= most, f"{what}: 1 to {most} copies of each, got {found}"
        hottest = max(load / n for load, n in zip(loads, found))
        best = best_share(loads, slots, most)
        assert hottest <= best + 1e-9, (
            f"{what}: with {found} a copy has a load of {hottest:g}; {best:g} is possible. The next copy goes where the load "
            "of one is largest"
        )
    for loads, slots, most in (([3, 4, 5], 2, 4), ([3, 4], 9, 4)):
        with pytest.raises(ValueError, match="slots"):
            lab.replicas(loads, slots, most)


def copies_of(loads, slots, most):
    copies = [1] * len(loads)
    for _ in range(slots - len(loads)):
        copies[
            max((e for e in range(len(loads)) if copies[e] < most), key=lambda e: loads[e] / copies[e])
        ] += 1
    return copies


def deal(copies, ranks, rng=None):
    """A placement without regard to loads."""
    order = range(len(copies)) if rng is None else rng.permutation(len(copies))
    slots = [int(e) for e in order for _ in range(copies[e])]
    return [sorted(slots[r::ranks]) for r in range(ranks)]


def placement_jobs(salt):
    rng, jobs = rng_of(salt), []
    for _ in range(20):
        ranks, slots = int(rng.integers(2, 9)), int(rng.integers(2, 6))
        experts = int(rng.integers(max(slots, ranks * slots // 3), ranks * slots + 1))
        loads = zipf_loads(rng, experts)
        jobs.append((loads, copies_of(loads, ranks * slots, ranks), ranks))
    return jobs


def placed(loads, copies, ranks):
    found = [[int(e) for e in mine] for mine in lab.place(loads, copies, ranks)]
    what = f"loads {loads}, copies {copies}, {ranks} ranks"
    assert len(found) == ranks, f"{what}: a list for each rank, got {len(found)}"
    sizes = [len(mine) for mine in found]
    assert sizes == [sum(copies) // ranks] * ranks, (
        f"{what}: {sum(copies) // ranks} slots on each rank, got {sizes}"
    )
    for rank, mine in enumerate(found):
        assert len(set(mine)) == len(mine), (
            f"{what}: rank {rank} holds an expert twice, which helps nobody: {mine}"
        )
    got = [sum(e in mine for mine in found) for e in range(len(loads))]
    assert got == list(copies), f"{what}: experts are held {got} times"
    return found


@pytest.mark.points(7)
def test_placement_is_sound():
    """As many copies as asked for, equally many on every rank, and no expert twice on one."""
    for loads, copies, ranks in (
        ([90, 30, 20, 10], [3, 1, 1, 1], 3), ([5, 4, 3, 2], [2, 2, 2, 2], 2), ([7, 1], [4, 4], 4), ([3, 2, 1], [1, 1, 1], 1),
        ([9, 9, 9, 1, 1, 1], [3, 3, 3, 1, 1, 1], 3), ([0, 0, 0, 0], [1, 1, 1, 1], 2),
        *placement_jobs(2),
    ):  # fmt: skip
        placed(loads, copies, ranks)
    for copies, ranks in (
        ([2, 1, 1, 1], 2),
        ([5, 1, 1, 1], 4),
    ):  # 5 slots for 2 ranks; an expert five times on 4
        with pytest.raises(ValueError):
            lab.place([4, 3, 2, 1], copies, ranks)


def unbeatable(loads, copies, ranks):
    """A load that some rank has in any placement: the mean, or the hottest copy beside the lightest others."""
    share = [load / n for load, n in zip(loads, copies)]
    order = sorted(range(len(loads)), key=lambda e: share[e])
    lightest = order[:-1][: sum(copies) // ranks - 1]
    return max(sum(loads) / ranks, share[order[-1]] + sum(share[e] for e in lightest))


@pytest.mark.points(9)
def test_placement_is_balanced():
    """Never above the mean by more than a copy; on average at most 1.05 times what no placement can beat."""
    ratios = []
    for loads, copies, ranks in (([80, 20, 60, 40, 70, 30, 55, 45], [1] * 8, 4), *placement_jobs(3)):
        found = placed(loads, copies, ranks)
        share = [load / n for load, n in zip(loads, copies)]
        work = [sum(share[e] for e in mine) for mine in found]
        mean = sum(loads) / ranks
        assert max(work) <= mean + max(share) + 1e-6, (
            f"loads {loads}, copies {copies}, {ranks} ranks: one has {max(work):.1f}; the mean is {mean:.1f} and the hottest "
            f"copy has {max(share):.1f}. {found}: exchange copies between the fullest rank and the emptiest"
        )
        ratios.append(max(work) / unbeatable(loads, copies, ranks))
        assert len(ratios) > 1 or ratios[0] <= 1.05, (
            f"loads {loads} on 4 ranks of 2 slots: 100 each is possible (80 and 20, 70 and 30, ...), got {work}"
        )
    assert np.mean(ratios) <= 1.05, (
        f"in {len(ratios)} jobs the fullest rank has on average {np.mean(ratios):.3f} times the load that no placement can "
        "beat; 1.05 is wanted. Place the hottest first, each on the emptiest rank that may have it, or exchange copies"
    )


# --------------------------------------------------------------------- where tokens go

#: ranks, ranks of a node, experts, slots of a rank, choices of a token
WORLDS = [
    (1, 1, 4, 4, 2),
    (2, 1, 3, 2, 2),
    (4, 4, 6, 2, 3),
    (4, 2, 5, 2, 3),
    (6, 3, 8, 3, 4),
    (6, 2, 4, 2, 1),
]


def goals(chosen, placement, rank, node):
    """The answer of choose_replicas."""
    out = np.full(np.shape(chosen), -1)
    for (t, j), expert in np.ndenumerate(chosen):
        holders = sorted(r for r in range(len(placement)) if expert in placement[r])
        near = [r for r in holders if r // node == rank // node]
        if rank in near:
            out[t, j] = rank
        elif expert >= 0:
            out[t, j] = (near or holders)[t % len(near or holders)]
    return out


def world(ranks, node, experts, slots, k, salt, tokens=None, h=6, f=5, drop=0.15):
    """A placement, every expert's weights, and each rank's part."""
    rng = rng_of(salt, ranks, node, experts)
    copies = copies_of(zipf_loads(rng, experts), ranks * slots, ranks)
    placement = deal(copies, ranks, rng)
    weights = [{"w1": rng.normal(size=(h, f)), "w2": rng.normal(size=(f, h))} for _ in range(experts)]
    parts = []
    for rank in range(ranks):
        t = int(rng.integers(0, 12)) if tokens is None else tokens
        t = 0 if tokens is None and rank == 1 else t
        chosen = np.array([rng.permutation(experts)[:k] for _ in range(t)], dtype=np.int64).reshape(t, k)
        chosen[rng.random((t, k)) < drop] = -1
        parts.append(
            {
                "x": rng.normal(size=(t, h)),
                "chosen": chosen,
                "weight": rng.uniform(0.1, 1, (t, k)),
                "ranks": goals(chosen, placement, rank, node),
                "experts": {e: weights[e] for e in placement[rank]},
            }
        )
    return placement, weights, parts


@pytest.mark.points(7)
def test_choose_replicas():
    """The own rank before the own node before any, the holders in turn, and nobody for a dropped choice."""
    placement = [[0, 1], [0, 2], [0, 3], [1, 3]]
    found = np.asarray(lab.choose_replicas(np.array([[0, 1], [2, 3], [3, -1]]), placement, 0, 2)).tolist()
    assert found == [[0, 0], [1, 3], [2, -1]], (
        "rank 0 of nodes of 2 holds experts 0 and 1; 2 is on rank 1; 3 is on ranks 2 and 3 of the other node, and token 1 takes "
        f"the second of them, token 2 the first again: [[0, 0], [1, 3], [2, -1]], got {found}"
    )
    for sizes in WORLDS:
        placement, _, parts = world(*sizes, salt=5)
        for rank, part in enumerate(parts):
            found = np.asarray(lab.choose_replicas(part["chosen"], placement, rank, sizes[1]))
            assert found.shape == part["ranks"].shape and np.array_equal(found, part["ranks"]), (
                f"rank {rank} of {sizes[0]}, {sizes[1]} a node, placement {placement}, choices {part['chosen'].tolist()}: "
                f"{part['ranks'].tolist()}, got {found.tolist()}"
            )


def dispatch_rows(ranks_of, node):
    """Rows from each rank to each other in a dispatch of two hops; all ranks' goals."""
    n = len(ranks_of)
    rows = np.zeros((n, n), dtype=int)
    for rank, goal in enumerate(ranks_of):
        for row in goal:
            visited = {int(r) for r in row if r >= 0}
            for there in {r // node for r in visited}:
                door = there * node + rank % node
                rows[rank, door] += door != rank
                for r in visited:
                    rows[door, r] += r // node == there and r != door
    return rows


@pytest.mark.points(7)
def test_count_rows():
    """One row to each node, from there one to each rank: worked by hand, and random choices."""
    for goal, rank, node, wanted, why in (
        ([[0, 1, 2, 3]], 0, 4, (0, 3), "one node: a row to each of three others"),
        ([[4, 4, 5, -1]], 0, 4, (1, 1), "one row to rank 4, which passes one on to rank 5"),
        ([[5, 6, 7, 1]], 0, 4, (1, 4), "rank 4 gets the row for 5, 6 and 7, and rank 1 gets one"),
        (
            [[2, 4], [3, 3], [-1, -1]],
            1,
            2,
            (3, 2),
            "rank 3 gets a row for 2, rank 5 one for 4, and rank 3 one of its own",
        ),
        ([[0, 0]], 0, 1, (0, 0), "it stays"),
    ):
        found = {name: int(n) for name, n in lab.count_rows(np.array(goal), rank, node).items()}
        assert found == dict(zip(("across", "inside"), wanted)), (
            f"ranks {goal}, from rank {rank}, {node} a node: across {wanted[0]}, inside {wanted[1]} ({why}); got {found}"
        )
    for sizes in WORLDS:
        _, _, parts = world(*sizes, salt=6)
        for rank, part in enumerate(parts):
            alone = [part["ranks"] if r == rank else np.zeros((0, 1)) for r in range(sizes[0])]
            rows = dispatch_rows(alone, sizes[1])
            there = np.arange(sizes[0]) // sizes[1]
            wanted = {
                "across": int(rows[there[:, None] != there].sum()),
                "inside": int(rows[there[:, None] == there].sum()),
            }
            found = {name: int(n) for name, n in lab.count_rows(part["ranks"], rank, sizes[1]).items()}
            assert found == wanted, (
                f"rank {rank}, {sizes[1]} a node, tokens go to {part['ranks'].tolist()}: {wanted}, got {found}"
            )


# --------------------------------------------------------------------- the layer


def layer(sizes, salt, backward=False, **options):
    """The run of the lab's program, what one rank with everything computes, and the parts."""
    placement, weights, parts = world(*sizes, salt=salt, **options)
    rng = rng_of(salt, 1)
    if backward:
        parts = [{**part, "dy": rng.normal(size=part["x"].shape)} for part in parts]
    run = simulate(lab.moe_layer, inputs=parts, placement=placement, node=sizes[1])
    for rank, result in enumerate(run.results):
        names = {"y", "dx", "dweight", "grads"} if backward else {"y"}
        assert isinstance(result, dict) and names <= set(result), (
            f"rank {rank}: moe_layer returns a dict with {sorted(names)}, got {type(result).__name__}"
        )
    grads = [{name: np.zeros_like(w) for name, w in expert.items()} for expert in weights]
    wanted = []
    for part in parts:
        x, dy = part["x"], part.get("dy", part["x"])
        y, dx, dweight = np.zeros_like(x), np.zeros_like(x), np.zeros_like(part["weight"])
        for (t, j), e in np.ndenumerate(part["chosen"]):
            if e < 0:
                continue
            before, w = x[t] @ weights[e]["w1"], part["weight"][t, j]
            inner = np.maximum(before, 0)
            out = inner @ weights[e]["w2"]
            y[t] += w * out
            dweight[t, j] = dy[t] @ out
            dinner = w * (weights[e]["w2"] @ dy[t]) * (before > 0)
            dx[t] += weights[e]["w1"] @ dinner
            grads[e]["w1"] += np.outer(x[t], dinner)
            grads[e]["w2"] += np.outer(inner, w * dy[t])
        wanted.append({"y": y, "dx": dx, "dweight": dweight})
    return run, wanted, grads, placement, parts


def of(sizes):
    ranks, node, experts, slots, k = sizes
    return f"{ranks} ranks, {node} a node, {experts} experts in {slots} slots a rank, {k} choices a token"


def same(found, wanted, what, why):
    assert np.shape(found) == wanted.shape, f"{what} has shape {np.shape(found)}, not {wanted.shape}"
    off = float(np.abs(found - wanted).max()) if wanted.size else 0.0
    assert off <= 1e-9, f"{what} is off by {off:.1e}. {why}"


@pytest.mark.points(14)
def test_forward_equals_dense():
    """Every token gets the weighted sum of the experts that it chose, in its place; dropped choices count nothing."""
    for sizes in WORLDS:
        for options in ({}, {"drop": 0.7}, {"tokens": 0}):
            run, wanted, *_ = layer(sizes, 7, **options)
            for rank, result in enumerate(run.results):
                same(
                    result["y"], wanted[rank]["y"], f"{of(sizes)}: y of rank {rank}",
                    "Is each expert's part multiplied by the token's own weight for it? Do rows come home in their places? "
                    "A choice of -1 has been dropped",
                )  # fmt: skip


def check_rows(run, parts, node, passes, numbers, what):
    """Bytes between any two ranks: rows of x as many as two hops need, and with each token a few numbers for its k choices."""
    h, k = parts[0]["x"].shape[1], parts[0]["chosen"].shape[1]
    tokens = dispatch_rows([part["ranks"] for part in parts], node)
    tokens = tokens + tokens.T  # out and home
    rows = passes * tokens
    found, there = run.traffic.matrix(), np.arange(len(parts)) // node
    for a, b in itertools.permutations(range(len(parts)), 2):
        link = "inside a node" if there[a] == there[b] else "between nodes"
        least = 8 * h * int(rows[a, b])
        most = least + 8 * numbers * k * int(tokens[a, b]) + 64
        assert least <= found[a, b] <= most, (
            f"{what}: rank {a} sends rank {b} ({link}) {found[a, b]} bytes. {rows[a, b]} rows of {h} numbers, "
            f"those that go out and those that go home, are {least}; with {numbers} numbers for each of a token's {k} choices, and 64 bytes, "
            f"{most} are allowed. A token goes to each node once, to the rank with the same place in it, and from there to each rank "
            "once; sums come home the same way"
        )


@pytest.mark.points(12)
def test_forward_sends_each_token_once():
    """To a node, and inside it to a rank, however many of its experts are there; and one row comes back."""
    for sizes in (*WORLDS, (8, 4, 6, 2, 4), (4, 1, 4, 3, 3)):
        run, _, _, _, parts = layer(sizes, 8, tokens=9, h=256, f=2)
        check_rows(run, parts, sizes[1], 1, 4, of(sizes))


@pytest.mark.points(10)
def test_gradients_of_tokens_and_weights():
    """dx and dweight, at home; nothing for dropped choices."""
    for sizes in WORLDS:
        run, wanted, *_ = layer(sizes, 9, backward=True)
        for rank, result in enumerate(run.results):
            what = f"{of(sizes)}: %s of rank {rank}"
            same(result["y"], wanted[rank]["y"], what % "y", "It is returned with the gradients too")
            same(
                result["dweight"], wanted[rank]["dweight"], what % "dweight",
                "A choice's slope is dy times what its expert made of the token, before the weight",
            )  # fmt: skip
            same(
                result["dx"], wanted[rank]["dx"], what % "dx", "Every expert of a token has a share in it, by its weight"
            )  # fmt: skip


@pytest.mark.points(10)
def test_gradients_of_experts():
    """Summed over all copies, and the same on each to the last bit, or they would drift apart."""
    for sizes in WORLDS:
        run, _, grads, placement, _ = layer(sizes, 10, backward=True)
        for e, wanted in enumerate(grads):
            holders = [r for r, mine in enumerate(placement) if e in mine]
            for rank in holders:
                found = run.results[rank]["grads"]
                assert set(found) == set(placement[rank]), (
                    f"{of(sizes)}: rank {rank} has gradients of {sorted(found)}, and the experts {placement[rank]}"
                )
                for name in ("w1", "w2"):
                    same(
                        found[e][name], wanted[name], f"{of(sizes)}: the gradient of {name} of expert {e} on rank {rank}",
                        f"The expert is on ranks {holders}, and each has seen some of its tokens",
                    )  # fmt: skip
                    assert np.array_equal(found[e][name], run.results[holders[0]]["grads"][e][name]), (
                        f"{of(sizes)}: ranks {holders[0]} and {rank} hold expert {e}, and their gradients of {name} differ in "
                        "the last bits: after a thousand steps these are two experts"
                    )


@pytest.mark.points(6)
def test_backward_sends_no_more():
    """Rows of dy out, rows of dx back; an expert's gradients travel among the ranks that hold it, and no others."""
    for sizes in (*WORLDS, (8, 4, 6, 2, 4)):
        run, _, grads, placement, parts = layer(sizes, 11, backward=True, tokens=0)
        copies = [sum(e in mine for mine in placement) for e in range(len(grads))]
        size = 8 * (grads[0]["w1"].size + grads[0]["w2"].size)
        wanted, slack = sum(2 * (n - 1) * size for n in copies), 64 * sizes[0] ** 2
        found = run.traffic.bytes
        assert wanted <= found <= wanted + slack, (
            f"{of(sizes)}, no tokens at all: {found} bytes are sent, and a ring all-reduce of each expert's {size} bytes among its "
            f"{copies} holders sends {wanted}"
        )
    for sizes in (
        (1, 1, 4, 4, 2),
        (4, 4, 8, 2, 3),
        (4, 2, 8, 2, 3),
        (6, 3, 18, 3, 4),
        (8, 4, 16, 2, 4),
        (4, 1, 8, 2, 3),
    ):
        run, _, _, _, parts = layer(sizes, 12, backward=True, tokens=9, h=256, f=2)  # each expert once
        check_rows(run, parts, sizes[1], 2, 6, f"{of(sizes)}, forward and backward")


# --------------------------------------------------------------------- capacity and bias


def drops(ranks, experts, k, salt, most=12, levels=None, drop=0.0):
    """Each rank's choices and weights; with `levels` weights are few different numbers, so that there are ties."""
    rng, parts = rng_of(salt, ranks, experts), []
    for rank in range(ranks):
        t = 0 if rank == 1 else int(rng.integers(1, most))
        chosen = np.array([rng.permutation(experts)[:k] for _ in range(t)], dtype=np.int64).reshape(t, k)
        chosen[rng.random((t, k)) < drop] = -1
        weight = rng.random((t, k)) if levels is None else rng.integers(1, levels + 1, (t, k)) / levels
        parts.append((chosen, weight))
    return parts


def kept(parts, experts, capacity):
    out = [np.zeros(chosen.shape, dtype=bool) for chosen, _ in parts]
    for e in range(experts):
        mine = [
            (-weight[t, j], r, t, j)
            for r, (chosen, weight) in enumerate(parts)
            for t, j in np.argwhere(chosen == e).tolist()
        ]
        for _, r, t, j in sorted(mine)[:capacity]:
            out[r][t, j] = True
    return out


def _keep(comm, part, **options):
    return lab.keep_heaviest(comm, *part, **options)


@pytest.mark.points(5)
def test_keep_heaviest():
    """An expert's capacity is for all ranks together, and the heaviest choices have it; lower rank, then token, among equals."""
    for ranks, experts, k, capacity, levels in (
        (1, 4, 2, 3, None), (4, 4, 2, 5, None), (3, 5, 3, 4, 2), (5, 3, 1, 2, 1), (4, 6, 2, 0, None), (2, 2, 2, 100, None),
    ):  # fmt: skip
        parts = drops(ranks, experts, k, 13, levels=levels, drop=0.15)
        run = simulate(_keep, inputs=parts, experts=experts, capacity=capacity)
        for rank, (found, wanted) in enumerate(zip(run.results, kept(parts, experts, capacity))):
            assert np.shape(found) == wanted.shape and np.array_equal(found, wanted), (
                f"{ranks} ranks, {experts} experts of capacity {capacity}: rank {rank}, choices {parts[rank][0].tolist()} with "
                f"weights {parts[rank][1].round(2).tolist()}: kept {wanted.tolist()}, got {np.asarray(found).tolist()}. The heaviest of "
                "all ranks; a choice of -1 is of no expert, and is not kept"
            )


@pytest.mark.points(2)
def test_keep_heaviest_sends_candidates_only():
    """No more choices than an expert has room for travel from a rank; three numbers for each."""
    for ranks, experts, k, capacity in ((4, 4, 2, 2), (3, 3, 2, 1), (5, 8, 3, 4)):
        parts = drops(ranks, experts, k, 14, most=60)
        run = simulate(_keep, inputs=parts, experts=experts, capacity=capacity)
        candidates = sum(
            min(int((chosen == e).sum()), capacity) for chosen, _ in parts for e in range(experts)
        )
        found, most = run.traffic.bytes, (ranks - 1) * 24 * candidates + 64 * ranks**2
        assert found <= most, (
            f"{ranks} ranks, {experts} experts of capacity {capacity}: {found} bytes are sent; {candidates} choices are among the "
            f"{capacity} heaviest on their rank, and gathering 3 numbers for each sends {most} at most"
        )


def _bias(comm, chosen, **options):
    return lab.update_bias(comm, chosen=chosen, **options)


@pytest.mark.points(3)
def test_update_bias():
    """One step up or down by the counts of all ranks; experts with exactly the average stay as they are."""
    for ranks, experts, k in ((1, 4, 1), (4, 4, 2), (3, 6, 2)):
        parts = [chosen for chosen, _ in drops(ranks, experts, k, 15, most=30)]
        bias = rng_of(16).normal(size=experts)
        run = simulate(_bias, inputs=parts, bias=bias, rate=0.01)
        counts = np.bincount(np.concatenate([c.reshape(-1) for c in parts]), minlength=experts)
        wanted = bias + 0.01 * np.sign(counts.mean() - counts)
        for rank, found in enumerate(run.results):
            assert np.allclose(found, wanted, rtol=0, atol=1e-12), (
                f"rank {rank} of {ranks}: experts have {counts.tolist()} tokens on all ranks together, so biases change by "
                f"{(wanted - bias).round(3).tolist()}, got {(np.asarray(found) - bias).round(3).tolist()}"
            )
    even = [
        np.array([[0, 1, 2, 3]]),
        np.array([[0, 0, 2, 2]]),
        np.array([[1, 1, -1, -1]]),
    ]  # 3, 3, 3, 1 of 10
    run = simulate(_bias, inputs=even[:2], bias=np.zeros(4), rate=1.0)  # 3, 1, 3, 1: the average is 2
    assert [np.asarray(r).tolist() for r in run.results] == [[-1, 1, -1, 1]] * 2, (
        f"counts 3, 1, 3, 1: {run.results}"
    )
    run = simulate(_bias, inputs=[even[0], even[0]], bias=np.zeros(4), rate=1.0)
    assert np.asarray(run.results[1]).tolist() == [0, 0, 0, 0], (
        f"all have 2: nothing changes, got {run.results[1]}"
    )
    run = simulate(_bias, inputs=even, bias=np.zeros(4), rate=1.0)
    assert np.asarray(run.results[0]).tolist() == [-1, -1, -1, 1], (
        f"counts 3, 3, 3, 1 (a choice of -1 is of no expert): got {np.asarray(run.results[0]).tolist()}"
    )
