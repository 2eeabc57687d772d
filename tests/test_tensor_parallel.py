"""Chapter 4's module: every split layer equals its dense one, by the calls and bytes it should take, in both worlds."""

import doctest
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks import Cluster, simulate
from manyranks import tensor_parallel as tp
from manyranks.runtime import RankError, chunk_bounds, phantom

CLOSE = 1e-10
MLP = (tp.mlp_forward, tp.mlp_backward), (tp.parallel_mlp_forward, tp.parallel_mlp_backward)
ATTENTION = (
    (tp.attention_forward, tp.attention_backward),
    (tp.parallel_attention_forward, tp.parallel_attention_backward),
)
BLOCK = (tp.block_forward, tp.block_backward), (tp.parallel_block_forward, tp.parallel_block_backward)


def random_params(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) / np.sqrt(shape[0]) for name, shape in shapes.items()}


def whole_on_every_rank(name):
    return name.rpartition(".")[2] not in tp.SPLIT_AXIS


def both(comm, part, x, dy, forward, backward, options):
    """Forward and backward on this rank's tokens (all of them, unless sequence parallel)."""
    mine = slice(None)
    if options:
        bounds = chunk_bounds(x.shape[1], comm.size)
        mine = slice(bounds[comm.rank], bounds[comm.rank + 1])
    y, saved = forward(comm, part, x[:, mine], **options)
    dx, grads = backward(comm, part, saved, dy[:, mine])
    return y, dx, tp.sync_replicated(comm, grads) if options else grads


def assert_equals_dense(layer, params, x, ranks, options):
    (dense_forward, dense_backward), (forward, backward) = layer
    before = {name: p.copy() for name, p in params.items()}
    dy = np.random.default_rng(9).normal(size=x.shape)
    y, saved = dense_forward(params, x)
    dx, grads = dense_backward(params, saved, dy)
    parts = [tp.shard(params, r, ranks) for r in range(ranks)]
    run = simulate(both, inputs=parts, x=x, dy=dy, forward=forward, backward=backward, options=options)
    if options:
        np.testing.assert_allclose(np.concatenate([r[0] for r in run.results], axis=1), y, atol=CLOSE, rtol=0)
        np.testing.assert_allclose(
            np.concatenate([r[1] for r in run.results], axis=1), dx, atol=CLOSE, rtol=0
        )
    else:
        for mine_y, mine_dx, _ in run.results:
            np.testing.assert_allclose(mine_y, y, atol=CLOSE, rtol=0)
            np.testing.assert_allclose(mine_dx, dx, atol=CLOSE, rtol=0)
            np.testing.assert_array_equal(mine_y, run.results[0][0])  # copies must not drift apart
    whole = tp.unshard([r[2] for r in run.results])
    assert set(whole) == set(grads) == set(params)
    for name in params:
        np.testing.assert_allclose(whole[name], grads[name], atol=CLOSE, rtol=0, err_msg=name)
        if whole_on_every_rank(name):
            for _, _, mine in run.results:
                np.testing.assert_allclose(mine[name], grads[name], atol=CLOSE, rtol=0, err_msg=name)
        np.testing.assert_array_equal(params[name], before[name])
    return run


def test_worked_examples():
    result = doctest.testmod(tp)
    assert result.attempted > 20 and result.failed == 0


# -------------------------------------------------------------------------------------- linear layers


@pytest.mark.parametrize("bias", [True, False])
@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(1, 7), rows=st.integers(1, 9), columns=st.integers(1, 9), tokens=st.integers(1, 4))
def test_linear_layers_equal_dense(bias, ranks, rows, columns, tokens):
    params = random_params({"w": (rows, columns), **({"b": (columns,)} if bias else {})}, seed=rows)
    rng = np.random.default_rng(columns)
    x, dy = rng.normal(size=(tokens, 2, rows)), rng.normal(size=(tokens, 2, columns))
    y, saved = tp.linear_forward(params, x)
    dx, grads = tp.linear_backward(params, saved, dy)

    def cut(a):
        bounds = chunk_bounds(a.shape[-1], ranks)
        return [a[..., i:j] for i, j in zip(bounds, bounds[1:])]

    def column(comm, given):
        y, saved = tp.column_parallel_forward(comm, given[0], x)
        return (y, *tp.column_parallel_backward(comm, given[0], saved, given[1]))

    def row(comm, given):
        y, saved = tp.row_parallel_forward(comm, given[0], given[1])
        return (y, *tp.row_parallel_backward(comm, given[0], saved, dy))

    for split, program, pieces in (("column", column, cut(dy)), ("row", row, cut(x))):
        parts = [tp.shard_linear(params, r, ranks, split) for r in range(ranks)]
        for name, p in tp.unshard_linear(parts, split).items():
            np.testing.assert_array_equal(p, params[name])
        run = simulate(program, inputs=list(zip(parts, pieces)))
        ys, dxs, of = zip(*run.results)
        if split == "column":
            ys = [np.concatenate(ys, axis=-1)]
        else:
            dxs = [np.concatenate(dxs, axis=-1)]
        for mine in ys:
            np.testing.assert_allclose(mine, y, atol=CLOSE, rtol=0)
        for mine in dxs:
            np.testing.assert_allclose(mine, dx, atol=CLOSE, rtol=0)
        for name, g in tp.unshard_linear(of, split).items():
            np.testing.assert_allclose(g, grads[name], atol=CLOSE, rtol=0)
        if ranks > 1:
            assert {n: c.calls for n, c in tp.communication(run).items()} == {"all_reduce": 1}


# -------------------------------------------------------------------------------------- layers and blocks


def attention_shapes(hidden, heads, groups, d, bias=True):
    shapes = {
        "wq": (hidden, heads, d),
        "wk": (hidden, groups, d),
        "wv": (hidden, groups, d),
        "wo": (heads, d, hidden),
    }
    return (
        {**shapes, "bq": (heads, d), "bk": (groups, d), "bv": (groups, d), "bo": (hidden,)}
        if bias
        else shapes
    )


OPTIONS = pytest.mark.parametrize(
    "options", [{}, tp.SEQUENCE, tp.SEQUENCE_AGAIN], ids=["tensor", "sequence", "sequence again"]
)


@OPTIONS
@pytest.mark.parametrize("bias", [True, False])
@settings(max_examples=15, deadline=None)
@given(ranks=st.integers(1, 6), ffn=st.integers(1, 9), tokens=st.integers(1, 7))
def test_mlp_equals_dense(options, bias, ranks, ffn, tokens):
    shapes = {"w1": (4, ffn), "w2": (ffn, 4), **({"b1": (ffn,), "b2": (4,)} if bias else {})}
    x = np.random.default_rng(ffn).normal(size=(2, tokens, 4))
    assert_equals_dense(MLP, random_params(shapes), x, ranks, options)


@OPTIONS
@settings(max_examples=15, deadline=None)
@given(
    groups=st.integers(1, 5), per_group=st.integers(1, 3), ranks=st.integers(1, 5), tokens=st.integers(1, 6)
)
def test_attention_equals_dense(options, groups, per_group, ranks, tokens):
    params = random_params(attention_shapes(4, groups * per_group, groups, 2, bias=tokens % 2 == 0))
    x = np.random.default_rng(tokens).normal(size=(2, tokens, 4))
    if ranks > groups:
        with pytest.raises(
            ValueError, match=f"has {groups} key-value heads, too few to cut for {ranks} ranks"
        ):
            tp.shard(params, 0, ranks)
    else:
        assert_equals_dense(ATTENTION, params, x, ranks, options)


@OPTIONS
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_block_equals_dense(options, ranks):
    params = random_params(tp.block_shapes(hidden=16, heads=8), seed=ranks)
    x = np.random.default_rng(1).normal(size=(2, 9, 16))
    run = assert_equals_dense(BLOCK, params, x, ranks, options)
    if ranks == 1:
        return
    calls = {name: c.calls for name, c in tp.communication(run).items()}
    if not options:
        assert calls == {"all_reduce": 4}
    else:  # one all-reduce more, of sync_replicated
        again = 2 if options["enter"].again else 0
        assert calls == {"all_gather": 4 + again, "reduce_scatter": 4, "all_reduce": 1}


def test_causality():
    params = random_params(tp.block_shapes(hidden=8, heads=2))
    x = np.random.default_rng(1).normal(size=(1, 6, 8))
    y, _ = tp.block_forward(params, x)
    x[:, 4:] += 1
    again, _ = tp.block_forward(params, x)
    np.testing.assert_array_equal(again[:, :4], y[:, :4])
    assert np.abs(again[:, 4:] - y[:, 4:]).max() > 0.1


def numeric_slope(forward, params, x, dy, array, place, step=1e-6):
    kept, ends = array[place], []
    for nudge in (step, -step):
        array[place] = kept + nudge
        ends.append(float((forward(params, x)[0] * dy).sum()))
    array[place] = kept
    return (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize(
    "forward, backward, shapes",
    [
        (tp.mlp_forward, tp.mlp_backward, {"w1": (4, 6), "b1": (6,), "w2": (6, 4), "b2": (4,)}),
        (tp.attention_forward, tp.attention_backward, attention_shapes(4, 4, 2, 2)),
        (tp.layer_norm_forward, tp.layer_norm_backward, {"scale": (4,), "shift": (4,)}),
        (tp.block_forward, tp.block_backward, tp.block_shapes(hidden=4, heads=2, kv_heads=1, ffn=3)),
    ],
    ids=["mlp", "attention", "layer norm", "block"],
)
def test_dense_gradients_are_slopes(forward, backward, shapes):
    params, rng = random_params(shapes), np.random.default_rng(2)
    x = rng.normal(size=(1, 3, 4))
    y, saved = forward(params, x)
    dy = rng.normal(size=y.shape)
    dx, grads = backward(params, saved, dy)
    for array, gradient in [(x, dx), *((params[name], grads[name]) for name in params)]:
        for place in np.ndindex(array.shape):
            assert abs(numeric_slope(forward, params, x, dy, array, place) - gradient[place]) < 1e-7


def test_dense_block_equals_torch():
    torch = pytest.importorskip("torch")
    params = random_params(tp.block_shapes(hidden=16, heads=4, kv_heads=2), seed=3)
    x = np.random.default_rng(4).normal(size=(2, 7, 16))
    y, saved = tp.block_forward(params, x)
    dx, grads = tp.block_backward(params, saved, np.ones_like(y))
    leaves = {name: torch.tensor(p, requires_grad=True) for name, p in params.items()}
    leaf = torch.tensor(x, requires_grad=True)
    functional = torch.nn.functional

    def norm(z, i):
        return functional.layer_norm(z, (16,), leaves[f"norm{i}.scale"], leaves[f"norm{i}.shift"])

    def project(z, key):
        w, b = leaves[f"attention.w{key}"], leaves[f"attention.b{key}"]
        return (torch.einsum("bsh,had->bsad", z, w) + b).transpose(1, 2)

    z = norm(leaf, 1)
    q, k, v = (project(z, key) for key in "qkv")
    context = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mid = leaf + torch.einsum("basd,adh->bsh", context, leaves["attention.wo"]) + leaves["attention.bo"]
    wide = functional.gelu(norm(mid, 2) @ leaves["mlp.w1"] + leaves["mlp.b1"], approximate="tanh")
    theirs = mid + wide @ leaves["mlp.w2"] + leaves["mlp.b2"]
    theirs.sum().backward()
    np.testing.assert_allclose(y, theirs.detach().numpy(), atol=CLOSE, rtol=0)
    np.testing.assert_allclose(dx, leaf.grad.numpy(), atol=CLOSE, rtol=0)
    for name in params:
        np.testing.assert_allclose(grads[name], leaves[name].grad.numpy(), atol=CLOSE, rtol=0, err_msg=name)


# -------------------------------------------------------------------------------------- the two ends


@pytest.mark.parametrize("leave", [tp.G, tp.SEQUENCE["leave"]], ids=["tensor", "sequence"])
@settings(max_examples=25, deadline=None)
@given(ranks=st.integers(1, 5), more=st.integers(0, 9), tokens=st.integers(1, 6))
def test_embedding_equals_dense(leave, ranks, more, tokens):
    words = ranks + more
    params = {"table": np.random.default_rng(words).normal(size=(words, 3))}
    ids = np.random.default_rng(tokens).integers(0, words, (2, tokens))
    y, saved = tp.embedding_forward(params, ids)
    dy = np.random.default_rng(1).normal(size=y.shape)
    _, grads = tp.embedding_backward(params, saved, dy)
    expected = np.zeros_like(params["table"])
    np.add.at(expected, ids, dy)
    np.testing.assert_allclose(grads["table"], expected, atol=CLOSE, rtol=0)

    def program(comm, part):
        y, saved = tp.parallel_embedding_forward(comm, part, ids, words, leave)
        bounds = chunk_bounds(tokens, comm.size)
        mine = slice(None) if leave is tp.G else slice(bounds[comm.rank], bounds[comm.rank + 1])
        return y, tp.parallel_embedding_backward(comm, part, saved, dy[:, mine])[1]

    run = simulate(program, inputs=[tp.shard(params, r, ranks) for r in range(ranks)])
    ys = [r[0] for r in run.results]
    for mine in ys if leave is tp.G else [np.concatenate(ys, axis=1)]:
        np.testing.assert_allclose(mine, y, atol=CLOSE, rtol=0)
    whole = tp.unshard([r[1] for r in run.results])
    np.testing.assert_allclose(whole["table"], grads["table"], atol=CLOSE, rtol=0)


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(1, 5), more=st.integers(0, 9), far=st.sampled_from([0.0, 1e3, -1e3]))
def test_cross_entropy_equals_dense(ranks, more, far):
    words = ranks + more
    rng = np.random.default_rng(words)
    logits, targets = far + 3 * rng.normal(size=(2, 3, words)), rng.integers(0, words, (2, 3))
    loss, saved = tp.cross_entropy_forward(logits, targets)
    dlogits = tp.cross_entropy_backward(saved)
    bounds = chunk_bounds(words, ranks)

    def program(comm, part):
        loss, saved = tp.parallel_cross_entropy_forward(comm, part, targets, words)
        return loss, tp.cross_entropy_backward(saved)

    run = simulate(program, inputs=[logits[..., i:j] for i, j in zip(bounds, bounds[1:])])
    for mine, _ in run.results:
        assert abs(mine - loss) < CLOSE
    np.testing.assert_allclose(
        np.concatenate([r[1] for r in run.results], axis=-1), dlogits, atol=CLOSE, rtol=0
    )
    if ranks > 1:
        assert tp.communication(run)["all_reduce"].calls == 3


def test_cross_entropy_equals_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(2, 3, 7)), rng.integers(0, 7, (2, 3))
    loss, saved = tp.cross_entropy_forward(logits, targets)
    leaf = torch.tensor(logits, requires_grad=True)
    theirs = torch.nn.functional.cross_entropy(leaf.reshape(-1, 7), torch.tensor(targets).reshape(-1))
    theirs.backward()
    assert abs(float(loss) - float(theirs.detach())) < CLOSE
    np.testing.assert_allclose(tp.cross_entropy_backward(saved), leaf.grad.numpy(), atol=CLOSE, rtol=0)


def test_equal_logits_lose_the_logarithm_of_the_vocabulary():
    loss, _ = tp.cross_entropy_forward(np.zeros((2, 3, 50)), np.zeros((2, 3), int))
    assert abs(loss - math.log(50)) < CLOSE


# -------------------------------------------------------------------------------------- counts and clocks


def phantom_block(hidden, heads, batch, sequence, ranks, cluster=None, **options):
    whole = {k: phantom(shape, np.float16) for k, shape in tp.block_shapes(hidden, heads).items()}

    def program(comm, part):
        bounds = chunk_bounds(sequence, comm.size)
        tokens = bounds[comm.rank + 1] - bounds[comm.rank] if options else sequence
        y, saved = tp.parallel_block_forward(
            comm, part, phantom((batch, tokens, hidden), np.float16), **options
        )
        tp.parallel_block_backward(comm, part, saved, y)
        return saved

    return simulate(program, ranks, [tp.shard(whole, r, ranks) for r in range(ranks)], cluster)


@pytest.mark.parametrize("t", [2, 4, 8])
def test_counted_volume_is_the_formula(t):
    b, s, h = 2, 4096, 8192
    volume = tp.tensor_parallel_volume(b, s, h, t)
    tensor = tp.communication(phantom_block(h, 64, b, s, t))
    assert tensor == {"all_reduce": tp.Calls(4, 2 * volume)}
    kept = tp.communication(phantom_block(h, 64, b, s, t, **tp.SEQUENCE))
    assert {name: c.calls for name, c in kept.items()} == {"all_gather": 4, "reduce_scatter": 4}
    assert sum(c.bytes for c in kept.values()) == 2 * volume
    again = tp.communication(phantom_block(h, 64, b, s, t, **tp.SEQUENCE_AGAIN))
    assert sum(c.bytes for c in again.values()) == 2 * volume * 5 / 4


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_saved_bytes_are_the_formulas(t):
    b, s, h, a = 2, 2048, 6144, 64
    unit, scores = s * b * h, 2 * a * s * s * b / t
    for options, formula, norms in (
        ({}, unit * (8 + 24 / t) + scores, 1),
        (tp.SEQUENCE, unit * (4 / t + 4 + 24 / t) + scores, t),
        (tp.SEQUENCE_AGAIN, unit * 32 / t + scores, t),
    ):
        saved = phantom_block(h, a, b, s, t, **options).results[0]
        scales = 2 * 2 * s * b / norms  # of two norms, one 16-bit number a token
        assert tp.saved_bytes(saved) == formula + scales


@pytest.mark.parametrize("nodes, per_node", [(1, 8), (8, 1)])
def test_waiting_is_the_predicted_time_of_four_rings(nodes, per_node):
    cluster = Cluster(nodes=nodes, gpus_per_node=per_node, gpu="H100")
    run = phantom_block(8192, 64, 1, 4096, 8, cluster)
    link = cluster.tiers[0 if nodes == 1 else 1]
    predicted = tp.tensor_parallel_seconds(1, 4096, 8192, 8, link.latency, link.bandwidth)
    assert run.busy("wait") == pytest.approx(predicted)
    flops = 3 * (24 * 4096 * 8192**2 + 4 * 4096**2 * 8192) / 8
    assert run.busy("compute")[0] > flops / 989e12


# -------------------------------------------------------------------------------------- sharding and bad input


@settings(max_examples=30, deadline=None)
@given(ranks=st.integers(1, 4), groups=st.integers(4, 6), ffn=st.integers(1, 11), words=st.integers(4, 9))
def test_unshard_undoes_shard(ranks, groups, ffn, words):
    shapes = {"table": (words, 6), "unembed": (6, words), "final.scale": (6,)}
    shapes |= tp.put("blocks.0.mlp", {"w1": (6, ffn), "b1": (ffn,), "w2": (ffn, 6), "b2": (6,)})
    shapes |= tp.put("blocks.0.attention", attention_shapes(6, 2 * groups, groups, 3))
    whole = random_params(shapes)
    parts = [tp.shard(whole, r, ranks) for r in range(ranks)]
    again = tp.unshard(parts)
    assert list(again) == list(whole)
    for name in whole:
        np.testing.assert_array_equal(again[name], whole[name])
    attention = tp.take(parts[0], "blocks.0.attention")
    assert attention["wq"].shape[1] == 2 * attention["wk"].shape[1] == attention["wo"].shape[0]


def test_initial_parameters():
    made = tp.initial(
        {**tp.block_shapes(64, 4), "table": (50, 64), "unembed": (64, 50)}, np.random.default_rng(0)
    )
    assert (
        (made["norm1.scale"] == 1).all() and (made["norm2.shift"] == 0).all() and (made["mlp.b1"] == 0).all()
    )
    for name in ("attention.wo", "mlp.w1", "table", "unembed"):
        assert made[name].std() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: tp.shard({"w1": np.ones((2, 2))}, 2, 2), "rank must be from 0 to 1, got 2"),
        (lambda: tp.shard({"w1": np.ones((2, 2))}, 0, 0), "ranks must be 1 or more, got 0"),
        (lambda: tp.shard({"table": np.ones((3, 2))}, 0, 4), "table has 3 words, too few to cut for 4 ranks"),
        (
            lambda: tp.shard_linear({"w": np.ones((2, 2))}, 0, 1, "rows"),
            "split must be 'column' or 'row', got 'rows'",
        ),
        (
            lambda: tp.shard(random_params(attention_shapes(4, 5, 2, 2)), 0, 2),
            "the 2 key-value heads of wk must divide the 5 heads of wq",
        ),
        (lambda: tp.block_shapes(10, 3), "heads must divide the hidden size 10, got 3"),
        (lambda: tp.block_shapes(12, 6, 4), "kv_heads must divide the 6 heads, got 4"),
        (lambda: tp.tensor_parallel_volume(1, 1, 1, 0), "ranks must be 1 or more, got 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("id", [-100, -1, 7])  # -100 is PyTorch's mark of a token that doesn't count
@pytest.mark.parametrize("ranks", [1, 3])
def test_ids_outside_of_the_vocabulary(id, ranks):
    ids, table, logits = np.array([[0, id]]), {"table": np.ones((7, 2))}, np.ones((1, 2, 7))
    got = rf"must be from 0 to 6, got {min(id, 0)} to {max(id, 0)}"
    with pytest.raises(ValueError, match="ids " + got):
        tp.embedding_forward(table, ids)
    with pytest.raises(ValueError, match="targets " + got):
        tp.cross_entropy_forward(logits, ids)
    bounds = chunk_bounds(7, ranks)

    def lookup(comm, part):
        tp.parallel_embedding_forward(comm, part, ids, 7)

    def loss(comm, part):
        tp.parallel_cross_entropy_forward(comm, part, ids, 7)

    with pytest.raises(RankError, match="ids " + got):
        simulate(lookup, inputs=[tp.shard(table, r, ranks) for r in range(ranks)])
    with pytest.raises(RankError, match="targets " + got):
        simulate(loss, inputs=[logits[..., i:j] for i, j in zip(bounds, bounds[1:])])


def test_key_value_heads_that_do_not_divide():
    params = random_params(attention_shapes(4, 5, 2, 2))
    with pytest.raises(ValueError, match="the 2 key-value heads of wk must divide the 5 query heads of wq"):
        tp.attention_forward(params, np.ones((1, 2, 4)))


def test_ranks_with_parts_for_another_number_of_ranks():
    params = random_params({"w1": (4, 9), "w2": (9, 4)})
    # Right shapes, wrong parts: nothing can notice but the comparison with dense.
    parts = [tp.shard(params, r, 3) for r in (0, 0)]
    x = np.random.default_rng(0).normal(size=(1, 2, 4))
    wrong = simulate(tp.parallel_mlp_forward, inputs=parts, x=x).results[0][0]
    assert np.abs(wrong - tp.mlp_forward(params, x)[0]).max() > 1e-3
    with pytest.raises(RankError, match="rank 0"):
        simulate(tp.parallel_mlp_forward, inputs=[{"w1": params["w1"][:, :3], "w2": params["w2"]}] * 2, x=x)


# -------------------------------------------------------------------------------------- real processes


def everything(comm, part, x, dy, ids, words):
    """The block all three ways, the embedding and the loss."""
    out = []
    for options in ({}, tp.SEQUENCE, tp.SEQUENCE_AGAIN):
        out.append(both(comm, part["block"], x, dy, *BLOCK[1], options))
    rows, saved = tp.parallel_embedding_forward(comm, part["ends"], ids, words)
    logits, head = tp.column_parallel_forward(comm, {"w": part["ends"]["unembed"]}, rows)
    loss, ends = tp.parallel_cross_entropy_forward(comm, logits, ids, words)
    dx, of_head = tp.column_parallel_backward(
        comm, {"w": part["ends"]["unembed"]}, head, tp.cross_entropy_backward(ends)
    )
    _, of_table = tp.parallel_embedding_backward(comm, part["ends"], saved, dx)
    seconds = tp.time_block(comm, part["block"], x, repeats=2)
    assert len(seconds) == 2 and min(seconds) >= 0
    return out, rows, loss, dx, of_head["w"], of_table["table"]


def flattened(value):
    if isinstance(value, (list, tuple)):
        return [a for v in value for a in flattened(v)]
    return (
        [a for k in sorted(value) for a in flattened(value[k])]
        if isinstance(value, dict)
        else [np.asarray(value)]
    )


def test_real_processes_give_the_simulators_numbers():
    pytest.importorskip("torch")
    from manyranks import launch

    block = random_params(tp.block_shapes(hidden=12, heads=6, kv_heads=3))
    ends = random_params({"table": (11, 12), "unembed": (12, 11)})
    rng = np.random.default_rng(0)
    given = {
        "x": rng.normal(size=(2, 5, 12)),
        "dy": rng.normal(size=(2, 5, 12)),
        "ids": rng.integers(0, 11, (2, 5)),
        "words": 11,
    }
    parts = [{"block": tp.shard(block, r, 2), "ends": tp.shard(ends, r, 2)} for r in range(2)]
    real = launch(everything, inputs=parts, timeout=120, device="cpu", **given)
    virtual = simulate(everything, inputs=parts, **given)
    for ours, theirs in zip(real.results, virtual.results):
        for a, b in zip(flattened(ours), flattened(theirs), strict=True):
            np.testing.assert_allclose(a, b, atol=CLOSE, rtol=0)
    counts = [
        {k: c.calls for k, c in tp.communication(run).items() if k != "barrier"} for run in (real, virtual)
    ]
    assert counts[0] == counts[1]
