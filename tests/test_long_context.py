"""The long-context chapter's module: every cut of a sequence equals dense attention, by the bytes it should take."""

import doctest
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks import Cluster, launch, simulate
from manyranks import long_context as lc
from manyranks.runtime import RankError, phantom
from manyranks.tensor_parallel import communication, tensor_parallel_volume

CLOSE = 1e-10
SPLITS = ("contiguous", "zigzag", "striped")
WAYS = {
    "ring": (lc.ring_attention_forward, lc.ring_attention_backward, {}),
    "ulysses": (lc.ulysses_forward, lc.ulysses_backward, {}),
    "gathered": (lc.gathered_forward, lc.gathered_backward, {}),
    "gathered again": (lc.gathered_forward, lc.gathered_backward, {"again": True}),
}
each_way = pytest.mark.parametrize("way", WAYS)


def random_qkv(tokens, heads, kv, d=4, batch=1, seed=0):
    """q, k, v, and a gradient of the result."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(batch, n, tokens, d)) for n in (heads, kv, kv, heads)]


def dense(q, k, v, dout, documents=None, causal=True):
    whole = lc.token_layout(q.shape[2], 1, documents=documents)[0]
    out, saved = lc.dense_attention_forward(q, k, v, whole, causal)
    return [out, *lc.dense_attention_backward(saved, dout)]


def both_passes(comm, mine, layout, way, causal=True):
    forward, backward, options = WAYS[way]
    q, k, v, dout = mine
    out, saved = forward(comm, q, k, v, layout, causal=causal, **options)
    return out, *backward(comm, saved, dout)


def run_split(way, arrays, layout, causal=True, **options):
    inputs = list(zip(*(lc.cut_tokens(x, layout) for x in arrays)))
    run = simulate(both_passes, inputs=inputs, layout=layout, way=way, causal=causal, **options)
    return [lc.join_tokens(part, layout) for part in zip(*run.results)], run


def assert_all_close(got, wanted, close=CLOSE):
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=close, rtol=0, err_msg=name)


def lengths_of(tokens, cuts):
    """Document lengths from where they are cut; some may be empty."""
    ends = [0, *sorted(c % (tokens + 1) for c in cuts), tokens]
    return [b - a for a, b in zip(ends, ends[1:])]


def test_worked_examples():
    result = doctest.testmod(lc)
    assert result.attempted > 15 and result.failed == 0


# -------------------------------------------------------------------------------------- layouts


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 40),
    ranks=st.integers(1, 9),
    split=st.sampled_from(SPLITS),
    cuts=st.lists(st.integers(0, 99), max_size=5),
    restart=st.booleans(),
)
def test_a_layout_deals_out_every_token_once(tokens, ranks, split, cuts, restart):
    lengths = lengths_of(tokens, cuts)
    layout = lc.token_layout(tokens, ranks, split, lengths, restart)
    assert sorted(np.concatenate([p.places for p in layout]).tolist()) == list(range(tokens))
    sizes = [len(p.places) for p in layout]
    assert len(layout) == ranks and max(sizes) - min(sizes) <= (2 if split == "zigzag" else 1)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    within = np.concatenate([np.arange(n) for n in lengths])
    x = np.arange(3 * tokens).reshape(3, tokens)
    np.testing.assert_array_equal(lc.join_tokens(lc.cut_tokens(x, layout, 1), layout, 1), x)
    for part in layout:
        np.testing.assert_array_equal(part.documents, owner[part.places])
        np.testing.assert_array_equal(part.positions, (within if restart else np.arange(tokens))[part.places])
    whole = lc.token_layout(tokens, 1, documents=lengths)[0]
    for causal in (True, False):
        seen = lc.visible(whole, whole, causal)
        for i, j in ((owner[a], owner[b]) for a, b in np.argwhere(seen)):
            assert i == j
        counted = [lc.count_visible(p, o, causal) for p in layout for o in layout]
        assert counted == [int(lc.visible(p, o, causal).sum()) for p in layout for o in layout]
        assert sum(counted) == seen.sum()


def test_zigzag_is_balanced_in_every_step_and_contiguous_is_not():
    tokens, ranks = 96, 8
    c = tokens // ranks
    layout = lc.token_layout(tokens, ranks, "zigzag")
    whole = lc.token_layout(tokens, 1)[0]
    assert {lc.count_visible(p, whole) for p in layout} == {c * (tokens + 1) // 2}
    for r, part in enumerate(layout):
        for other, columns in enumerate(layout):
            pairs = lc.count_visible(part, columns)
            assert pairs == (c * (c + 1) // 2 if other == r else c * c // 2)
    stretches = lc.token_layout(tokens, ranks, "contiguous")
    assert [lc.count_visible(p, whole) for p in stretches] == [c * c * r + c * (c + 1) // 2 for r in range(8)]


def test_zigzag_by_hand():
    x, layout = np.arange(22).reshape(2, 11), lc.token_layout(11, 3)
    parts = lc.cut_tokens(x, layout, axis=1)
    assert [p[0].tolist() for p in parts] == [[0, 1, 10], [2, 3, 8, 9], [4, 5, 6, 7]]
    np.testing.assert_array_equal(lc.join_tokens(parts, layout, axis=1), x)
    t = torch.arange(11)
    assert torch.equal(lc.join_tokens(lc.cut_tokens(t, layout, 0), layout, 0), t)
    assert lc.together(layout).places.tolist() == [0, 1, 10, 2, 3, 8, 9, 4, 5, 6, 7]


# -------------------------------------------------------------------------------------- softmax in blocks


@pytest.mark.parametrize("causal", [True, False])
def test_dense_equals_pytorch_and_finite_differences(causal):
    documents = [4, 1, 5]
    whole = lc.token_layout(10, 1, documents=documents)[0]
    arrays = random_qkv(10, 6, 2, batch=2)
    leaves = [torch.tensor(x, requires_grad=True) for x in arrays[:3]]
    mask = torch.tensor(lc.visible(whole, whole, causal))
    theirs = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    theirs.backward(torch.tensor(arrays[3]))
    ours = dense(*arrays, documents, causal)
    assert_all_close(ours, [theirs.detach().numpy(), *(x.grad.numpy() for x in leaves)], 1e-12)
    nudged = [x.copy() for x in arrays[:3]]
    for which, place in ((0, (1, 3, 7, 2)), (1, (0, 1, 4, 0)), (2, (1, 0, 9, 3))):
        ends = []
        for step in (1e-6, -1e-6):
            nudged[which][place] = arrays[which][place] + step
            ends.append((lc.dense_attention_forward(*nudged, whole, causal)[0] * arrays[3]).sum())
        nudged[which][place] = arrays[which][place]
        assert abs((ends[0] - ends[1]) / 2e-6 - ours[1 + which][place]) < 1e-7


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 20),
    block=st.integers(1, 25),
    share=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    scale=st.sampled_from([1.0, 1e3, 1e8]),
    kind=st.sampled_from(["numpy", "torch"]),
)
def test_blocks_and_merges_equal_dense(rows, columns, block, share, scale, kind):
    rng = np.random.default_rng(rows * 100 + columns)
    q, k, v = (rng.normal(size=(2, n, s, 3)) for n, s in ((4, rows), (2, columns), (2, columns)))
    q, seen = q * scale, rng.random((rows, columns)) < share
    if kind == "torch":
        q, k, v, seen = (torch.tensor(x) for x in (q, k, v, seen))
    out, lse = lc.attend(q, k, v, seen)
    at = [int(columns * x) for x in (0, 0.3, 0.7, 1)]
    a, b, c = (
        lc.attend(q, k[:, :, i:j], v[:, :, i:j], seen[:, i:j]) for i, j in zip(at, at[1:])
    )  # empty, some of them
    for name, (got, low) in {
        "blocks": lc.blockwise_attention(q, k, v, block, seen),
        "left": lc.merge(lc.merge(a, b), c),
        "right": lc.merge(a, lc.merge(b, c)),
        "swapped": lc.merge(lc.merge(c, b), a),
    }.items():
        assert isinstance(got, type(q))
        np.testing.assert_allclose(np.asarray(got), np.asarray(out), atol=1e-9, rtol=0, err_msg=name)
        np.testing.assert_allclose(np.asarray(low), np.asarray(lse), rtol=1e-12, atol=1e-12, err_msg=name)
    blind = ~np.asarray(seen).any(axis=1)
    assert (np.asarray(out)[:, :, blind] == 0).all() and (np.asarray(lse)[:, :, blind] == -np.inf).all()
    assert np.isfinite(np.asarray(out)).all() and np.isfinite(np.asarray(lse)[:, :, ~blind]).all()


def test_rows_that_see_nothing_have_no_gradient():
    q, k, v, dout = random_qkv(5, 2, 1)
    nothing = np.zeros((5, 5), bool)
    out, lse = lc.attend(q, k, v, nothing)
    for gradient in lc.attend_backward(q, k, v, lse, (dout * out).sum(axis=-1), dout, nothing):
        assert (gradient == 0).all()


def test_merge_by_hand():
    # three keys of score 0 and mean value 2; one of score ln 9 and value 10: (3·2 + 9·10)/12 = 8
    one = np.full((1, 1, 1, 1), 2.0), np.full((1, 1, 1), math.log(3))
    other = np.full((1, 1, 1, 1), 10.0), np.full((1, 1, 1), math.log(9))
    out, lse = lc.merge(one, other)
    assert out.item() == pytest.approx(8) and math.exp(lse.item()) == pytest.approx(12)


# -------------------------------------------------------------------------------------- across ranks


def test_two_ranks_by_hand():
    # scores 0 everywhere: a token's result is the mean of the values up to its own
    q = k = np.zeros((1, 1, 4, 1))
    v = np.array([4.0, 0.0, 8.0, 0.0]).reshape(1, 1, 4, 1)
    dout = np.array([0.0, 0.0, 0.0, 4.0]).reshape(1, 1, 4, 1)  # only the last token matters
    for way in ("ring", "gathered"):
        (out, dq, dk, dv), run = run_split(way, (q, k, v, dout), lc.token_layout(4, 2, "contiguous"))
        assert out.ravel().tolist() == pytest.approx([4, 2, 4, 3])
        assert dv.ravel().tolist() == pytest.approx([1, 1, 1, 1])
        assert (dq == 0).all() and (dk == 0).all()
    # 2 of 4 tokens, k and v, 8 bytes: 32 bytes a message, one forward and two backward
    _, run = run_split("ring", (q, k, v, dout), lc.token_layout(4, 2, "contiguous"))
    assert [m.bytes for m in run.traffic] == [32] * 6


@each_way
@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 33),
    ranks=st.integers(1, 8),
    split=st.sampled_from(SPLITS),
    cuts=st.lists(st.integers(0, 99), max_size=4),
    causal=st.booleans(),
    batch=st.integers(1, 2),
    heads=st.sampled_from([(8, 8), (16, 8), (4, 1), (6, 3), (4, 2)]),
)
def test_equals_dense(way, tokens, ranks, split, cuts, causal, batch, heads):
    if way == "ulysses":
        ranks = min(ranks, heads[1])
    documents = lengths_of(tokens, cuts)
    arrays = random_qkv(tokens, *heads, batch=batch, seed=tokens)
    before = [x.copy() for x in arrays]
    layout = lc.token_layout(tokens, ranks, split, documents)
    got, _ = run_split(way, arrays, layout, causal)
    assert_all_close(got, dense(*arrays, documents, causal))
    for x, y in zip(arrays, before):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("way", ["ring", "gathered"])
def test_huge_scores_stay_exact(way):
    arrays = random_qkv(24, 4, 2)
    arrays[0] = arrays[0] * 1e5
    got, _ = run_split(way, arrays, lc.token_layout(24, 5))
    for x, y in zip(got, dense(*arrays)):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-9 * max(1, np.abs(y).max()))


@pytest.mark.parametrize("tokens,ranks", [(17, 4), (16, 4), (9, 2), (23, 8)])
def test_ring_sends_every_block_but_the_right_neighbours(tokens, ranks):
    layout = lc.token_layout(tokens, ranks, "zigzag")
    arrays = random_qkv(tokens, 4, 2, d=3)
    _, run = run_split("ring", arrays, layout)
    block = np.array([2 * 2 * 3 * 8 * len(p.places) for p in layout])  # k and v, heads, d, float64
    right = np.roll(block, -1)
    # forward and backward all blocks but the right neighbour's; gradients of all but its own
    expected = 2 * (block.sum() - right) + (block.sum() - block)
    np.testing.assert_array_equal(run.bytes_sent, expected)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("heads,kv", [(8, 8), (16, 8), (64, 8)])
def test_counted_bytes_are_the_formulas(ranks, heads, kv):
    tokens, d = 4096, 16
    layout = lc.token_layout(tokens, ranks)

    def sent(way, backward):
        forward, back, options = WAYS[way]

        def program(comm):
            q, k = (phantom((1, n, tokens // ranks, d), np.float16) for n in (heads, kv))
            out, saved = forward(comm, q, k, k, layout, **options)
            if backward:
                back(comm, saved, out)

        run = simulate(program, ranks=ranks)
        assert len(set(run.bytes_sent.tolist())) == 1
        return run.bytes_sent[0] / 2

    ring = [lc.ring_volume(tokens, kv, d, ranks, back) for back in (False, True)]
    assert [sent("ring", False), sent("ring", True)] == [ring[0], sum(ring)]
    ulysses = lc.ulysses_volume(tokens, heads, kv, d, ranks)
    assert [sent("ulysses", False), sent("ulysses", True)] == [ulysses, 2 * ulysses]
    for way, again in (("gathered", False), ("gathered again", True)):
        both = [lc.gathered_volume(tokens, kv, d, ranks, back, again) for back in (False, True)]
        assert [sent(way, False), sent(way, True)] == [both[0], sum(both)]
        assert both == [ring[0], ring[again]]


def test_ulysses_is_the_papers_volume():
    tokens, h, ranks = 65_536, 8192, 16
    paper = 4 * tokens * h / ranks  # per link, before what stays at home is taken off
    assert lc.ulysses_volume(tokens, 64, 64, 128, ranks) == paper * (ranks - 1) / ranks
    megatron = tensor_parallel_volume(1, tokens, h, ranks) / 2
    assert megatron / lc.ulysses_volume(tokens, 64, 64, 128, ranks) == ranks


def test_calls():
    arrays, layout = random_qkv(16, 4, 4), lc.token_layout(16, 4)
    calls = {way: communication(run_split(way, arrays, layout)[1]) for way in WAYS}
    assert calls["ulysses"]["all_to_all"].calls == 8
    assert {n: c.calls for n, c in calls["gathered"].items()} == {"all_gather": 1, "reduce_scatter": 1}
    assert {n: c.calls for n, c in calls["gathered again"].items()} == {"all_gather": 2, "reduce_scatter": 1}
    assert calls["ring"]["send" if "send" in calls["ring"] else "recv"].calls > 0


def test_phantoms_take_the_time_of_real_arrays():
    machine = Cluster(2, 4, "H100")
    for split in SPLITS:
        for way in WAYS:
            layout = lc.token_layout(29, 8, split, [20, 9])
            arrays = [x.astype(np.float32) for x in random_qkv(29, 8, 8)]
            inputs = list(zip(*(lc.cut_tokens(x, layout) for x in arrays)))
            ghosts = [tuple(phantom(x.shape, x.dtype) for x in mine) for mine in inputs]
            real, imagined = (
                simulate(both_passes, inputs=given, layout=layout, way=way, cluster=machine)
                for given in (inputs, ghosts)
            )
            assert real.seconds == imagined.seconds
            np.testing.assert_array_equal(real.bytes_sent, imagined.bytes_sent)


# -------------------------------------------------------------------------------------- time, positions, bad input


def test_published_blocks():
    assert lc.minimal_block(312e12, 300e9) == 1040
    assert lc.minimal_block(312e12, 12.5e9) == pytest.approx(24_960)
    assert round(6 * lc.minimal_block(275e12, 268e9) / 1e3, 1) == 6.2
    base = lc.minimal_block(1e15, 50e9, 64, 8)
    assert base == pytest.approx(1e15 / 50e9 / 8)
    assert lc.minimal_block(1e15, 50e9, 64, 8, causal=True) == pytest.approx(2 * base)
    assert lc.minimal_block(1e15, 50e9, 64, 8, backward=True) == pytest.approx(0.8 * base)


@pytest.mark.parametrize("causal,backward", [(False, False), (True, False), (False, True)])
def test_the_ring_hides_at_the_minimal_block(causal, backward):
    machine = Cluster.flat(4, latency=1e-9, bandwidth=10e9, peak_flops=50e12)
    c = lc.minimal_block(50e12, 10e9, 8, 4, causal=causal, backward=backward)

    def waited(tokens):
        layout = lc.token_layout(4 * tokens, 4)

        def program(comm):
            q, k = (phantom((1, n, tokens, 16), np.float16) for n in (8, 4))
            out, saved = lc.ring_attention_forward(comm, q, k, k, layout, causal)
            comm.barrier()
            began = comm.time()
            if backward:
                lc.ring_attention_backward(comm, saved, out)
            return comm.time() - began if backward else began

        run = simulate(program, ranks=4, cluster=machine)
        pairs = lc.count_visible(layout[0], lc.token_layout(4 * tokens, 1)[0], causal)
        computing = lc.attention_flops(pairs, 8, 16, backward=backward) / 50e12
        return (run.results[0] - computing) / computing

    tail = 1 / 8 if backward else 0.0  # the last gradients have nothing left to hide behind
    assert waited(2 * round(0.55 * c)) < 0.005 + tail
    assert waited(2 * round(0.25 * c)) > 0.3 + tail


def test_rope_depends_on_differences_and_turns_back():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 2, 7, 6))
    at = np.array([0, 3, 4, 9, 1, 2, 8])
    scores = [lc.rope(q, at + n) @ lc.rope(k, at + n).swapaxes(-1, -2) for n in (0, 1000)]
    np.testing.assert_allclose(*scores, atol=1e-10)
    np.testing.assert_allclose(lc.rope(lc.rope(q, at), at, inverse=True), q, atol=1e-12)
    theirs = lc.rope(torch.tensor(q), torch.tensor(at))
    np.testing.assert_allclose(theirs.numpy(), lc.rope(q, at), atol=1e-12)


def test_bad_input():
    for call, words in (
        (lambda: lc.token_layout(4, 0), "ranks must be 1 or more, got 0"),
        (lambda: lc.token_layout(4, 2, "zig"), "'contiguous', 'zigzag' or 'striped', got 'zig'"),
        (lambda: lc.token_layout(4, 2, documents=[1, 2]), r"add up to 4, got \[1, 2\]"),
        (lambda: lc.token_layout(4, 2, documents=[5, -1]), "documents must be"),
        (lambda: lc.cut_tokens(np.ones((1, 1, 5)), lc.token_layout(4, 2)), "4 tokens along axis 2"),
        (lambda: lc.blockwise_attention(*random_qkv(4, 1, 1)[:3], 0), "block must be 1 or more, got 0"),
        (lambda: lc.minimal_block(0, 1), "flops and bandwidth must be positive"),
        (lambda: lc.minimal_block(1, 1, 6, 4), "kv_heads must divide the 6 heads, got 4"),
        (lambda: lc.ring_volume(4, 1, 1, 0), "ranks must be 1 or more"),
        (lambda: lc.ulysses_volume(4, 8, 2, 1, 4), r"1 to 2 \(kv_heads\), got 4"),
        (lambda: lc.rope(np.ones((2, 3)), np.arange(2)), "must be even, got 3"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert [len(part.places) for part in lc.token_layout(0, 2, documents=[])] == [0, 0]
    good, layout = random_qkv(8, 4, 4), lc.token_layout(8, 4)
    for arrays, parts, way, words in (
        (good, lc.token_layout(8, 2), "ring", "a part for each of 4 ranks, got 2"),
        (random_qkv(8, 4, 3), layout, "ring", "3 key-value heads must divide the 4 query heads"),
        (random_qkv(8, 4, 2), layout, "ulysses", "2 are too few for 4 ranks"),
        (good, [*layout[:-1], lc.token_layout(9, 1)[0]], "gathered", "9 tokens of rank 3"),
        ([good[0][..., :2], *good[1:]], layout, "ring", "q, k and v must agree"),
        ([good[0], good[1], good[2][:, :2], good[3]], layout, "ulysses", "q, k and v must agree"),
        ([good[0], good[1][:, :0], good[2][:, :0], good[3]], layout, "ring", "the 0 key-value heads"),
        ([np.concatenate([good[0]] * 2), *good[1:]], layout, "gathered", "q, k and v must agree"),
    ):
        inputs = list(zip(*(lc.cut_tokens(x, layout) for x in arrays)))
        with pytest.raises(RankError, match=words):
            simulate(both_passes, inputs=inputs, layout=parts, way=way)


# -------------------------------------------------------------------------------------- real processes


def every_way(comm, mine, layout):
    return [both_passes(comm, mine, layout, way) for way in ("ring", "ulysses", "gathered again")]


@pytest.mark.parametrize("ranks", [2])
def test_real_processes_give_the_simulators_numbers(ranks):
    arrays, documents = random_qkv(15, 4, 2), [4, 11]
    layout = lc.token_layout(15, ranks, "zigzag", documents)
    inputs = list(zip(*(lc.cut_tokens(x, layout) for x in arrays)))
    real = launch(every_way, inputs=inputs, layout=layout, timeout=120)
    virtual = simulate(every_way, inputs=inputs, layout=layout)
    for way in range(3):
        parts = [
            [lc.join_tokens(x, layout) for x in zip(*(r[way] for r in run.results))]
            for run in (real, virtual)
        ]
        assert_all_close(parts[0], parts[1], 1e-12)
        assert_all_close(parts[0], dense(*arrays, documents))


def test_the_ways_are_timed_in_turn_and_agree():
    whole = [x.astype(np.float32) for x in random_qkv(24, 6, 6)]
    for run in (
        simulate(lc.time_attention, ranks=3, whole=whole, repeats=2),
        launch(lc.time_attention, ranks=2, whole=whole, repeats=2, device="cpu", timeout=120),
    ):
        ranks, found = len(run.results), run.results
        assert np.shape([r["seconds"] for r in found]) == (ranks, 6, 2)
        assert all(r["apart"][0] == r["apart"][3] == 0 and max(r["apart"]) < 1e-5 for r in found)
        contiguous, zigzag = zip(*(r["pairs"] for r in found))
        assert sum(contiguous) == sum(zigzag) == 24 * 25 / 2
        assert set(zigzag) == {24 * 25 // 2 // ranks} and contiguous[0] < contiguous[-1]
        each = sum(lc.attention_bytes(name, 24, 6, 6, 4, ranks, 4) for name in lc.CONTEXT_PARALLEL)
        sent = run.bytes_sent - run.traffic.where(call="barrier").sent()
        assert sent.tolist() == [3 * 2 * each] * ranks  # with the warm-up, for both cuts


def test_a_wrong_way_is_far_apart(monkeypatch):
    forward, backward = lc.CONTEXT_PARALLEL["gather"]
    wrong = forward, lambda comm, saved, dout: backward(comm, saved, 2 * dout)
    monkeypatch.setitem(lc.CONTEXT_PARALLEL, "gather", wrong)
    run = simulate(lc.time_attention, ranks=2, whole=random_qkv(8, 2, 2), splits=["zigzag"], dtype="float64")
    for ring, ulysses, gather in (r["apart"] for r in run.results):
        assert ring == 0 and ulysses < 1e-12 and gather > 0.5
