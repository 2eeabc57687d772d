"""Tests of the lab of chapter 4. LAB_MODULE=solution tests solution.py instead of lab.py."""

import importlib
import os

import numpy as np
import pytest

from manyranks import simulate
from manyranks.tensor_parallel import attention_backward, attention_forward

lab = importlib.import_module(os.environ.get("LAB_MODULE", "lab"))
SEED = int(os.environ.get("LAB_SEED", "1"))

#: (query heads, key-value heads): for each rank its query heads and its key-value heads.
LAYOUTS = {
    (4, 4): [((0, 2), (0, 2)), ((2, 4), (2, 4))],
    (8, 2): [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2))],
    (6, 2): [((0, 2), (0, 1)), ((2, 4), (0, 2)), ((4, 6), (1, 2))],
    (7, 1): [((0, 3), (0, 1)), ((3, 5), (0, 1)), ((5, 7), (0, 1))],
    (9, 3): [((0, 5), (0, 2)), ((5, 9), (1, 3))],
    (6, 3): [((0, 2), (0, 1)), ((2, 3), (1, 2)), ((3, 4), (1, 2)), ((4, 5), (2, 3)), ((5, 6), (2, 3))],
    (4, 2): [((0, 4), (0, 2))],
}


def rng_of(*salt):
    return np.random.default_rng([SEED, *salt])


def layout_of(heads, kv_heads, ranks):
    """The lab's answer as pairs of tuples."""
    found = lab.head_layout(heads, kv_heads, ranks)
    assert len(found) == ranks, f"{len(found)} entries for {ranks} ranks"
    return [(tuple(map(int, mine["q"])), tuple(map(int, mine["kv"]))) for mine in found]


# ---------------------------------------------------------------------------- who has which heads


@pytest.mark.points(6)
def test_query_heads_are_dealt_out_evenly():
    """Contiguous, each head once, numbers that differ by one at most, the larger ones first."""
    rng = rng_of(1)
    for _ in range(12):
        kv_heads, group = (int(n) for n in rng.integers(1, 6, 2))
        heads = kv_heads * group
        ranks = int(rng.integers(1, heads + 1))
        spans = [q for q, _ in layout_of(heads, kv_heads, ranks)]
        case = f"{heads} query heads on {ranks} ranks: {spans}"
        assert [i for start, stop in spans for i in range(start, stop)] == list(range(heads)), (
            f"{case}: each once, in order"
        )
        sizes = [stop - start for start, stop in spans]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1, (
            f"{case}: as even as possible"
        )


@pytest.mark.points(6)
def test_ranks_hold_the_key_value_heads_that_they_read():
    """Also if there are fewer than ranks, or a rank's queries read several groups."""
    for (heads, kv_heads), wanted in LAYOUTS.items():
        found = layout_of(heads, kv_heads, len(wanted))
        assert found == wanted, (
            f"{heads} query heads, {kv_heads} key-value heads, {len(wanted)} ranks: (q, kv) by rank {found}, expected "
            f"{wanted}. A key-value head is on every rank that has one of its {heads // kv_heads} query heads."
        )
    rng = rng_of(2)
    for _ in range(8):
        kv_heads, group = (int(n) for n in rng.integers(1, 6, 2))
        ranks = int(rng.integers(1, kv_heads * group + 1))
        for (start, stop), kv in layout_of(kv_heads * group, kv_heads, ranks):
            needed = {i // group for i in range(start, stop)}
            assert set(range(*kv)) == needed, (
                f"query heads {start} to {stop - 1}, {group} a group, read {needed}, not {kv}"
            )


@pytest.mark.points(2)
def test_layouts_that_cannot_be_are_refused():
    """ValueError if key-value heads don't divide the heads, and for more ranks than heads, or none."""
    for bad in ((6, 4, 2), (4, 2, 5), (4, 2, 0)):
        with pytest.raises(ValueError):
            lab.head_layout(*bad)


def layer(heads, kv_heads, h=6, d=2, biases=True, salt=0):
    rng = rng_of(3, salt, heads, kv_heads)
    shapes = {"wq": (h, heads, d), "wk": (h, kv_heads, d), "wv": (h, kv_heads, d), "wo": (heads, d, h)}
    if biases:
        shapes |= {"bq": (heads, d), "bk": (kv_heads, d), "bv": (kv_heads, d), "bo": (h,)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def own(params, q, kv):
    """What a rank with these heads has of each array."""
    return {
        "wq": params["wq"][:, slice(*q)],
        "wk": params["wk"][:, slice(*kv)],
        "wv": params["wv"][:, slice(*kv)],
        "wo": params["wo"][slice(*q)],
        **{
            name: params[name][slice(*at)]
            for name, at in (("bq", q), ("bk", kv), ("bv", kv))
            if name in params
        },
        **({"bo": params["bo"]} if "bo" in params else {}),
    }


@pytest.mark.points(8)
def test_shards_are_cut_along_the_heads():
    """Each array along its own heads; bo whole; with and without biases."""
    for (heads, kv_heads), layout in LAYOUTS.items():
        for biases in (True, False):
            params = layer(heads, kv_heads, biases=biases)
            for rank, (q, kv) in enumerate(layout):
                found, wanted = lab.shard_attention(params, rank, len(layout)), own(params, q, kv)
                case = f"{heads}/{kv_heads} heads, rank {rank} of {len(layout)}"
                assert set(found) == set(wanted), f"{case}: arrays {sorted(found)}, expected {sorted(wanted)}"
                for name in wanted:
                    assert np.array_equal(found[name], wanted[name]), (
                        f"{case}: {name} has shape {np.shape(found[name])}, expected {wanted[name].shape} (or other heads)"
                    )


# ---------------------------------------------------------------------------- attention


def step(heads, kv_heads, biases=True, b=2, s=3, **options):
    """The lab's step on parts cut here, and the dense layer's results."""
    layout, params = LAYOUTS[heads, kv_heads], layer(heads, kv_heads, biases=biases, salt=1, **options)
    x, dy = rng_of(4, heads, kv_heads).normal(size=(2, b, s, params["wo"].shape[2]))
    parts = [own(params, q, kv) for q, kv in layout]
    run = simulate(lab.attention_step, inputs=parts, x=x, dy=dy, heads=heads, kv_heads=kv_heads)
    y, saved = attention_forward(params, x)
    dx, grads = attention_backward(params, saved, dy)
    return run, y, dx, grads, layout


@pytest.mark.points(10)
def test_attention_equals_dense():
    """y is the dense layer's on every rank, whatever heads a rank has."""
    for heads, kv_heads in LAYOUTS:
        run, wanted, *_ = step(heads, kv_heads)
        for r, (y, _, _) in enumerate(run.results):
            assert np.allclose(y, wanted), (
                f"{heads}/{kv_heads} heads, rank {r} of {run.ranks}: y is off by {abs(y - wanted).max():.2g}. Does each query "
                "head read its own key-value head, and is bo added once?"
            )


@pytest.mark.points(10)
def test_gradient_of_the_input_equals_dense():
    """dx is the dense layer's, whole on every rank."""
    for heads, kv_heads in LAYOUTS:
        run, _, wanted, *_ = step(heads, kv_heads)
        for r, (_, dx, _) in enumerate(run.results):
            assert np.allclose(dx, wanted), (
                f"{heads}/{kv_heads} heads, rank {r} of {run.ranks}: dx is off by {abs(dx - wanted).max():.2g}; every rank's "
                "heads have a share in it"
            )


@pytest.mark.points(10)
def test_gradients_of_the_parameters_equal_dense():
    """Each rank's gradients are those of the whole layer's arrays, shared heads' included."""
    for heads, kv_heads in LAYOUTS:
        for biases in (True, False):
            run, _, _, grads, layout = step(heads, kv_heads, biases)
            for r, (q, kv) in enumerate(layout):
                found, wanted = run.results[r][2], own(grads, q, kv)
                case = f"{heads}/{kv_heads} heads, rank {r} of {run.ranks}"
                assert set(found) == set(wanted), (
                    f"{case}: gradients of {sorted(found)}, expected {sorted(wanted)}"
                )
                for name in wanted:
                    assert np.shape(found[name]) == wanted[name].shape and np.allclose(
                        found[name], wanted[name]
                    ), (
                        f"{case}: the gradient of {name} is wrong. A key-value head's is the sum over all query heads that "
                        "read it, in this rank and in others; a bias that all have is counted once."
                    )


@pytest.mark.points(8)
def test_attention_sends_no_more_than_needed():
    """Two all-reduces of (b, s, h), and one of each shared head's gradients among its holders."""
    for heads, kv_heads in LAYOUTS:
        run, *_, layout = step(heads, kv_heads, biases=False)
        n = len(layout)
        elements = 2 * 2 * (n - 1) * 2 * 3 * 6
        for head in range(kv_heads):
            holders = sum(kv[0] <= head < kv[1] for _, kv in layout)
            elements += 2 * (holders - 1) * 2 * 6 * 2
        sent = int(run.bytes_sent.sum())
        assert sent == 8 * elements, (
            f"{heads}/{kv_heads} heads on {n} ranks: {sent} bytes in all, expected {8 * elements}. Only holders of a shared "
            "head talk about it, and nobody gathers weights or heads."
        )


@pytest.mark.points(7)
def test_attention_bytes():
    """The prediction: cases worked by hand, and random sizes."""
    for sizes, wanted in (
        (dict(batch=1, sequence=2, hidden=8, heads=8, kv_heads=2, head_size=4, ranks=4), [224] * 4),
        (dict(batch=1, sequence=3, hidden=6, heads=6, kv_heads=2, head_size=2, ranks=3), [144, 192, 144]),
        (dict(batch=2, sequence=5, hidden=7, heads=4, kv_heads=4, head_size=3, ranks=1), [0]),
        (
            dict(batch=1, sequence=1, hidden=9, heads=7, kv_heads=1, head_size=2, ranks=3, itemsize=8),
            [576] * 3,
        ),
    ):
        found = [float(n) for n in lab.attention_bytes(**sizes)]
        assert found == pytest.approx(wanted), f"{sizes}: {found}, expected {wanted}"
    rng = rng_of(9)
    for (heads, kv_heads), layout in LAYOUTS.items():
        b, s, h, d, size = (int(n) for n in rng.integers(1, 9, 5))
        n = len(layout)
        holders = [sum(kv[0] <= head < kv[1] for _, kv in layout) for head in range(kv_heads)]
        wanted = [
            size * (4 * (n - 1) / n * b * s * h + sum(4 * h * d * (k - 1) / k for k in holders[slice(*kv)]))
            for _, kv in layout
        ]
        found = [float(x) for x in lab.attention_bytes(b, s, h, heads, kv_heads, d, n, size)]
        assert found == pytest.approx(wanted), (
            f"{heads}/{kv_heads} heads on {n} ranks, b {b}, s {s}, h {h}, d {d}, {size} bytes: {found}, expected {wanted}; "
            f"the key-value heads have {holders} holders"
        )


@pytest.mark.points(6)
def test_kv_cache():
    """It shrinks with the ranks only while there are key-value heads to deal out."""
    rng = rng_of(5)
    for (heads, kv_heads), layout in LAYOUTS.items():
        b, s, layers, d, size = (int(n) for n in rng.integers(1, 9, 5))
        found = lab.kv_cache_bytes(b, s, layers, heads, kv_heads, d, len(layout), size)
        wanted = [2 * b * s * layers * d * size * (kv[1] - kv[0]) for _, kv in layout]
        assert list(found) == wanted, (
            f"{heads}/{kv_heads} heads on {len(layout)} ranks, b {b}, s {s}, {layers} layers, d {d}, {size} bytes: {found}, "
            f"expected {wanted}: keys and values"
        )


# ---------------------------------------------------------------------------- vocabulary


@pytest.mark.points(4)
def test_vocabulary_is_padded_to_equal_parts():
    """All ranks get equally many columns, no more than needed, zeros behind the last word."""
    for words, ranks, multiple, width in (
        (10, 2, 1, 5),
        (11, 4, 1, 3),
        (11, 3, 4, 4),
        (2, 4, 1, 1),
        (13, 2, 8, 8),
        (17, 2, 8, 16),
    ):
        w = rng_of(6, words).normal(size=(3, words))
        parts = [np.asarray(lab.shard_vocabulary(w, r, ranks, multiple)) for r in range(ranks)]
        shapes = [p.shape for p in parts]
        assert shapes == [(3, width)] * ranks, (
            f"{words} words, {ranks} ranks, multiples of {multiple}: {shapes}, width {width} wanted"
        )
        whole = np.concatenate(parts, axis=1)
        assert np.array_equal(whole[:, :words], w) and not whole[:, words:].any(), (
            f"{words} words on {ranks} ranks: other columns"
        )


def dense_loss(w, hidden, targets, z=0.0, ignore=-100):
    """The loss of the whole output matrix, computed on one rank."""
    logits = (hidden @ w)[targets != ignore]
    top = logits.max(axis=-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(axis=-1)) + top[:, 0]
    picked = np.take_along_axis(logits, targets[targets != ignore][:, None], 1)[:, 0]
    return float(np.mean(lse - picked + z * lse**2)) if len(logits) else 0.0


def vocabulary(words, ranks, width, ignored=0.0, scale=1.0):
    """Padded parts with rubbish in the padding, the dense matrix, tokens and targets."""
    rng = rng_of(7, words, ranks)
    w, hidden = scale * rng.normal(size=(4, words)), rng.normal(size=(2, 3, 4))
    targets = rng.integers(0, words, (2, 3))
    targets[0, 0], targets[1, 1] = words - 1, 0
    if ignored:
        targets[rng.permutation(6).reshape(2, 3) < round(6 * ignored)] = -100
    padded = np.concatenate([w, np.full((4, ranks * width - words), 7.0)], axis=1)
    return np.split(padded, ranks, axis=1), w, hidden, targets


VOCABULARIES = [(5, 1, 6), (10, 2, 5), (11, 3, 4), (9, 4, 4), (2, 3, 1)]  # words, ranks, width


@pytest.mark.points(7)
def test_loss_equals_dense():
    """With uneven vocabularies, rubbish in the padding, a z-loss, and logits of any size."""
    for words, ranks, width in VOCABULARIES:
        for z, scale in ((0.0, 1.0), (0.01, 1.0), (0.0, 3000.0)):
            parts, w, hidden, targets = vocabulary(words, ranks, width, scale=scale)
            run = simulate(
                lab.vocab_parallel_loss, inputs=parts, hidden=hidden, targets=targets, words=words, z=z
            )
            wanted = dense_loss(w, hidden, targets, z)
            for r, (loss, _, _) in enumerate(run.results):
                assert float(loss) == pytest.approx(wanted, rel=1e-9), (
                    f"{words} words, {ranks} ranks of {width} columns, z {z}: rank {r} has {loss}, dense {wanted}. Do padded "
                    "columns take part? Is the largest logit that of all ranks?"
                )


@pytest.mark.points(4)
def test_ignored_tokens_do_not_count():
    """The mean is over the others; with nobody left, loss and gradients are 0."""
    for words, ranks, width in VOCABULARIES[1:4]:
        for ignored in (0.34, 0.67, 1.0):
            parts, w, hidden, targets = vocabulary(words, ranks, width, ignored)
            run = simulate(
                lab.vocab_parallel_loss, inputs=parts, hidden=hidden, targets=targets, words=words, z=0.01
            )
            wanted, case = dense_loss(w, hidden, targets, 0.01), f"{words} words, targets {targets.tolist()}"
            for r, (loss, dhidden, dw) in enumerate(run.results):
                assert float(loss) == pytest.approx(wanted, rel=1e-9), (
                    f"{case}: rank {r} has {loss}, expected {wanted}"
                )
                assert not np.any(np.asarray(dhidden)[targets == -100]), (
                    f"{case}: an ignored token has a gradient"
                )
                assert ignored < 1 or not np.any(dw), (
                    f"{case}: no token counts, but rank {r} has a gradient of w"
                )


@pytest.mark.points(8)
def test_gradients_of_the_loss():
    """They are the slopes of the dense loss, measured; padding has none."""
    for words, ranks, width in VOCABULARIES:
        for z, ignored in ((0.0, 0.0), (0.05, 0.34)):
            parts, w, hidden, targets = vocabulary(words, ranks, width, ignored)
            run = simulate(
                lab.vocab_parallel_loss, inputs=parts, hidden=hidden, targets=targets, words=words, z=z
            )
            dw = np.concatenate([result[2] for result in run.results], axis=1)
            case = f"{words} words, {ranks} ranks of {width} columns, z {z}"
            assert dw.shape == (4, ranks * width), (
                f"{case}: gradients of w are {dw.shape} in all, the parts {(4, ranks * width)}"
            )
            assert not dw[:, words:].any(), (
                f"{case}: padded columns have a gradient: they would grow into words"
            )
            for way in range(3):
                rng = rng_of(8, way)
                along_w, along_x = rng.normal(size=w.shape), rng.normal(size=hidden.shape)
                eps = 1e-5
                up, down = (dense_loss(w + e * along_w, hidden, targets, z) for e in (eps, -eps))
                slope, found = (up - down) / 2 / eps, float((dw[:, :words] * along_w).sum())
                assert found == pytest.approx(slope, rel=1e-5, abs=1e-8), (
                    f"{case}: slope along w {found}, measured {slope}"
                )
                up, down = (dense_loss(w, hidden + e * along_x, targets, z) for e in (eps, -eps))
                slope = (up - down) / 2 / eps
                for r, (_, dhidden, _) in enumerate(run.results):
                    found = float((np.asarray(dhidden) * along_x).sum())
                    assert found == pytest.approx(slope, rel=1e-5, abs=1e-8), (
                        f"{case}: rank {r}, slope along hidden {found}, measured {slope}. Each rank's columns have a share in it."
                    )


@pytest.mark.points(4)
def test_loss_does_not_gather_logits():
    """Three numbers a token for the loss, and one all-reduce for the gradient of hidden."""
    words, ranks, width, tokens, h = 60, 3, 20, 6, 4
    parts, _, hidden, targets = vocabulary(words, ranks, width)
    run = simulate(lab.vocab_parallel_loss, inputs=parts, hidden=hidden, targets=targets, words=words)
    sent, most = int(run.bytes_sent.sum()), 2 * (ranks - 1) * 8 * (3 * tokens + tokens * h)
    assert 0 < sent <= most, (
        f"{sent} bytes in all, {most} are enough: a maximum, a sum and the target's logit for each token"
    )
