"""Lab of chapter 3: a bucketed DDP that accumulates. The README has the rules; `comm` is a rank's communicator."""

import numpy as np  # noqa: F401


def bucket_plan(tensors, first, limit):
    """Which tensors are sent together.

    Args:
        tensors: (elements, dtype, trained) of each tensor, first layer first; dtype a name such as "float32".
        first: bytes at which the first bucket of the plan is closed, above 0.
        limit: bytes at which every later bucket is closed.

    Returns: list of buckets, each a list of tensor numbers, in the order in which they are closed.
    """
    raise NotImplementedError(
        "bucket_plan: go through the tensors as the backward pass does, last one first, with one open bucket for each dtype"
    )


def ddp_gradient(comm, micro_batches, shapes, dtypes, seconds, plan):
    """The mean gradient over all examples of all ranks; a rank program.

    Args:
        comm: the communicator.
        micro_batches: this rank's: list of (examples, gradients), where gradients holds an array for each tensor, the
            mean over the micro-batch's examples. Ranks may have different numbers of them, also none.
        shapes, dtypes: of each tensor.
        seconds: that the backward pass of one micro-batch computes on each tensor; to be declared with comm.compute.
        plan: buckets of tensor numbers, in the order in which they are sent.

    Returns: (list with a gradient for each tensor, number of examples on all ranks).
    """
    raise NotImplementedError(
        "ddp_gradient: add up examples x gradient locally; only in the last micro-batch does a bucket leave, as soon as it "
        "is complete, while the backward pass goes on"
    )


def step_timeline(nbytes, seconds, plan, micro_batches, ranks, alpha, beta):
    """Predicted time of `ddp_gradient`, if all ranks have as many micro-batches.

    Args:
        nbytes, seconds: of each tensor.
        plan: as in `ddp_gradient`.
        micro_batches: how many.
        ranks, alpha, beta: the ring's.

    Returns: (seconds until the last bucket has arrived, how much of that is after the end of the backward pass).
    """
    raise NotImplementedError(
        "step_timeline: when is each bucket complete? It starts then, or when the one before has ended, and takes a ring's time"
    )


def best_limit(tensors, seconds, micro_batches, ranks, alpha, beta, candidates):
    """The bucket size, of some candidates, with the shortest predicted step; the largest of several that are as good.

    Args:
        tensors: as in `bucket_plan`.
        candidates: bytes; each is tried as first and as later limit.
    """
    raise NotImplementedError("best_limit: plan and predict for each candidate")


def train_step(comm, shard, layers, micro_batch, lr, limit, clip=None):
    """One step of gradient descent on the batch that all ranks' shards make up; a rank program.

    Args:
        shard: (x, targets) of this rank; any number of rows, also none.
        layers: the model, as in `manyranks.data_parallel`.
        micro_batch: rows in a forward and backward pass, at most.
        lr: learning rate.
        limit: bucket size in bytes.
        clip: longest gradient to step with: a longer one is scaled down. None for any length.

    Returns: (mean loss of the whole batch before the step, new layers).
    """
    raise NotImplementedError(
        "train_step: what ddp_gradient does, with real passes (manyranks.data_parallel.forward, backward and its `ready`)"
    )
