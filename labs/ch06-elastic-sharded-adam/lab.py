"""A sharded Adam that stops on one number of ranks and goes on with another: write these six functions."""


def shard_bounds(numel, ranks):
    """Where each rank's shard of a flat vector begins and ends: ranks + 1 offsets."""
    raise NotImplementedError(
        "shard_bounds: cut as comm.reduce_scatter does. Sizes differ by one at most, the longer ones come first, "
        "and a shard may be empty."
    )


def shard_pieces(shapes, ranks, rank):
    """Which part of which tensor a rank's shard holds: (tensor, start, stop) in the tensor's own flat order."""
    raise NotImplementedError(
        "shard_pieces: a shard is an interval of the flat vector, and so is a tensor. Intersect them."
    )


def peak_bytes(numel, ranks, rank, stage, micro_batches, weight_bytes=2, grad_bytes=4, state_bytes=12):
    """What a rank holds at the worst moment of a step, by kind, and the total."""
    raise NotImplementedError(
        "peak_bytes: weights are whole, the state is a shard. Of gradients count every array that is alive at the "
        "worst moment: the fresh one, the running sum, the reduced shard."
    )


def sharded_adam(
    comm,
    grads,
    params=None,
    checkpoint=None,
    stage=1,
    lr=1e-3,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    clip=None,
    weight_dtype="float64",
):
    """Train len(grads) steps; every rank keeps its shard of the master weights and of the moments."""
    raise NotImplementedError(
        "sharded_adam: reduce-scatter the flat gradient, step your shard of the master weights, all-gather the weights."
    )


def save_checkpoint(states, shapes):
    """One checkpoint of all ranks' shards that doesn't depend on how many there were."""
    raise NotImplementedError(
        "save_checkpoint: join the shards in rank order and cut the vector into tensors; nothing in the result "
        "may tell how many ranks there were."
    )


def load_shard(checkpoint, ranks, rank):
    """What one of `ranks` ranks needs of a checkpoint: its own shard of master, m and v, and the step."""
    raise NotImplementedError(
        "load_shard: shard_pieces says which part of which tensor to read; moments move exactly like weights."
    )
