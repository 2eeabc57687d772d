"""Lab of chapter 4: tensor parallelism for grouped queries. The README has the rules; `comm` is a rank's communicator.

Shapes: b sequences of s tokens, hidden size h, a query heads and k key-value heads of size d.
"""

import numpy as np  # noqa: F401


def head_layout(heads, kv_heads, ranks):
    """Which query heads each rank has, and the key-value heads that they read.

    Args:
        heads, kv_heads: a and k; k divides a, and query head i reads key-value head i // (a / k).
        ranks: 1 to a.

    Returns: for each rank {"q": (start, stop), "kv": (start, stop)}.
    """
    raise NotImplementedError(
        "head_layout: deal out the query heads first; then, which key-value heads do the first and the last of them read?"
    )


def shard_attention(params, rank, ranks):
    """A rank's part of attention's parameters.

    Args:
        params: "wq" (h, a, d), "wk" and "wv" (h, k, d), "wo" (a, d, h), and perhaps "bq" (a, d), "bk" and "bv" (k, d), "bo"
            (h,).
        rank, ranks: whose part, of how many.

    Returns: a dict of the same names.
    """
    raise NotImplementedError(
        "shard_attention: along which axis does each array count heads, and which kind of heads?"
    )


def attention_step(comm, part, x, dy, heads, kv_heads):
    """Forward and backward pass of causal attention, of which each rank has a part; a rank program.

    Args:
        part: this rank's, by `shard_attention`.
        x, dy: input and gradient of the result, both (b, s, h), the same on all ranks.
        heads, kv_heads: of the whole layer.

    Returns: (y, dx, grads): y and dx (b, s, h), whole on all ranks; grads like `part`, with the gradients of the whole
        layer's arrays there.
    """
    raise NotImplementedError(
        "attention_step: with a key-value head repeated for each query head that reads it, the part is a layer that "
        "manyranks.tensor_parallel can compute; what has to be added up afterwards, in the rank and between ranks?"
    )


def attention_bytes(batch, sequence, hidden, heads, kv_heads, head_size, ranks, itemsize=2):
    """Predicted bytes that each rank sends in `attention_step` without biases; every ring with equal chunks.

    Returns: list with a number for each rank.
    """
    raise NotImplementedError(
        "attention_bytes: two all-reduces among all ranks, and one for each key-value head among its holders"
    )


def kv_cache_bytes(batch, sequence, layers, heads, kv_heads, head_size, ranks, itemsize=2):
    """Bytes of keys and values that each rank keeps for all layers while text is generated.

    Returns: list with a number for each rank.
    """
    raise NotImplementedError("kv_cache_bytes: keys and values, of the key-value heads that a rank has")


def shard_vocabulary(w, rank, ranks, multiple=1):
    """A rank's columns of the output matrix w, (h, words), padded with zeros behind the last word.

    All ranks get equally many, the smallest multiple of `multiple` with room for all words.
    """
    raise NotImplementedError(
        "shard_vocabulary: how wide must a part be, so that all of them together have room?"
    )


def vocab_parallel_loss(comm, part, hidden, targets, words, z=0.0, ignore=-100):
    """Mean loss over tokens, and its gradients; a rank program.

    Args:
        part: this rank's columns of the output matrix, (h, width), by `shard_vocabulary`; what stands in the padding is
            not to be trusted.
        hidden: (b, s, h), the same on all ranks.
        targets: (b, s), whole numbers; `ignore` for tokens that don't count.
        words: how many words there really are.
        z: weight of the z-loss, z * logsumexp(logits) ** 2, which is added to each token's cross-entropy.

    Returns: (loss, gradient of hidden, gradient of part).
    """
    raise NotImplementedError(
        "vocab_parallel_loss: no rank may see all logits. Of each token they share the largest logit, a sum, and the "
        "target's logit"
    )
