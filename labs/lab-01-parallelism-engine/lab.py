"""Lab 1, the parallelism engine. Complete the functions from top to bottom; the README says what each has to do.

Only NumPy is needed. Test with `pytest test_lab.py -v`.
"""

import numpy as np  # noqa: F401


def ring_all_reduce(vectors, send=None):
    """The element-wise sum of all ranks' vectors, on every rank, moved as a ring moves it.

    Args:
        vectors: one 1-D array for each rank, all of one length L.
        send: the wire, called as ``send(step, source, destination, values)`` for every message, with the number of
            the step from 0. It returns the values that arrive at the destination: use those. Without it, messages
            arrive as they are sent.

    Returns: a list with one array for each rank, shape (L,).

    Raises: ValueError for no vectors, vectors that aren't 1-D, or different lengths.
    """
    raise NotImplementedError(
        "ring_all_reduce: cut each vector into N chunks, the remainder in the last one; then N-1 steps in which the "
        "right neighbour adds the chunk that it gets, and N-1 steps in which it replaces"
    )


def all_reduce_cost(tensor_bytes, ranks):
    """What a ring all-reduce costs.

    Args:
        tensor_bytes: S, bytes of each rank's vector, 0 or more.
        ranks: N, 1 or more.

    Returns: (steps, bytes that each rank sends), for equal chunks.
    """
    raise NotImplementedError(
        "all_reduce_cost: count what you built. How many steps has each half, and how large is a chunk?"
    )


def data_parallel_gradient_average(gradients, send=None):
    """The mean of all ranks' gradients, on every rank: an all-reduce, then a division.

    Args:
        gradients: one array for each rank, all of one shape, of any number of dimensions.
        send: as in `ring_all_reduce`.

    Returns: a list with one array of that shape for each rank.
    """
    raise NotImplementedError(
        "data_parallel_gradient_average: the ring takes vectors, so flatten first; then the sum, divided by N"
    )


def tensor_parallel_matmul(shards, x, split, send=None):
    """Y = W @ x, from shards of W.

    Args:
        shards: matrices, one for each rank. split="column": each has some of the rows (outputs) of W. split="row":
            each has some of the columns (inputs) of W. In rank order; their sizes may differ.
        x: shape (inputs,) or (inputs, batch).
        split: "column" or "row".
        send: the wire for messages between ranks, as in `ring_all_reduce`.

    Returns: Y, shape (outputs,) or (outputs, batch).

    Raises: ValueError if the shards can't be those of a W that x fits, or for another split.
    """
    raise NotImplementedError(
        "tensor_parallel_matmul: column shards give slices of Y, to be put together; row shards give terms of Y, to "
        "be all-reduced. First see that the shards fit x"
    )


def pipeline_bubble_fraction(stages, microbatches):
    """The idle fraction of a pipeline's makespan.

    Args:
        stages: P, 1 or more.
        microbatches: M, 1 or more.
    """
    raise NotImplementedError(
        "pipeline_bubble_fraction: each stage works M slots of each pass, and the pass takes how many slots in all?"
    )


def pipeline_schedule_1f1b(stages, microbatches):
    """The one-forward-one-backward schedule, if a forward and a backward each take one step.

    Args:
        stages: P, 1 or more.
        microbatches: M, 1 or more.

    Returns: a dict with "useful_steps" and "bubble_steps" of each stage, "total_steps", and "rows": for each stage a
        list of "total_steps" strings, "F3" for the forward pass of microbatch 3, "B3" for its backward pass, "." for
        an idle step.
    """
    raise NotImplementedError(
        "pipeline_schedule_1f1b: list what each stage does in order (warm-up forwards, then forward and backward in "
        "turn, then the backwards left), and let each entry run as soon as what it needs has ended"
    )


def zero_memory_per_gpu(parameters, ranks, stage):
    """Bytes of training state that each GPU holds, in mixed precision with Adam: 2 + 2 + 12 a parameter.

    Args:
        parameters: of the model.
        ranks: data-parallel GPUs, 1 or more.
        stage: ZeRO's, 0 to 3.
    """
    raise NotImplementedError(
        "zero_memory_per_gpu: which of the weights (2), gradients (2) and optimizer state (12) does a stage shard?"
    )
