"""Attention with a sliding window over packed documents, on a ring that moves only what is read: write these six functions."""


def balanced_split(documents, ranks, window=None, most=None):
    """Offsets of contiguous shards whose largest work is as small as it can be: ranks + 1 numbers."""
    raise NotImplementedError(
        "balanced_split: a token's work is the number of keys that it reads. For a given limit of work, can you tell "
        "whether `ranks` shards are enough? Then search for the smallest limit."
    )


def needed_rows(bounds, documents, window=None):
    """Which keys each rank reads: for each rank a list of (source, start, stop), its own shard first."""
    raise NotImplementedError(
        "needed_rows: the first query of a shard reads furthest back, to where its document or its window begins. "
        "Which part of which shard lies between?"
    )


def ring_attention(comm, part, bounds, documents, window=None):
    """A rank program: {"out", "lse"} of this rank's queries."""
    raise NotImplementedError(
        "ring_attention: for one block after the other, pass on the rows that the next rank reads, ask for the next "
        "block, declare and do the work on this one, and only then wait."
    )


def ring_attention_backward(comm, part, out, lse, dout, bounds, documents, window=None):
    """A rank program: {"dq", "dk", "dv"} of this rank's tokens."""
    raise NotImplementedError(
        "ring_attention_backward: keys and values travel as in the forward program; the probabilities are "
        "exp(scores - lse). Their gradients come home the way the block went, and each rank adds its share."
    )


def ring_bytes(bounds, documents, kv_heads, head_size, window=None, itemsize=2, backward=False):
    """A list: the bytes that each rank sends in the forward program, or in the backward one."""
    raise NotImplementedError(
        "ring_bytes: a rank sends the rows that the next rank with tokens reads of all shards before it, and backward "
        "also the gradients of all foreign rows that it read."
    )


def smallest_hidden_shard(window, heads, kv_heads, head_size, flops, bandwidth, latency=0.0, itemsize=2):
    """The fewest tokens a rank can have so that each transfer ends before the work that goes on meanwhile."""
    raise NotImplementedError(
        "smallest_hidden_shard: for c tokens a rank, count the rows of each block back and the pairs of the block before "
        "it. Which of them is the hardest to hide?"
    )
