"""Mixture of experts with replicated experts, where a token crosses a network once for each node: write these seven functions."""


def replicas(loads, slots, most):
    """How often each expert is held, so that the largest load of one copy is as small as it can be."""
    raise NotImplementedError(
        "replicas: every expert needs a copy. Which expert should get the next one, as long as there are slots?"
    )


def place(loads, copies, ranks):
    """The experts of each rank: equally many, all different, with loads that differ as little as you can manage."""
    raise NotImplementedError(
        "place: find any placement with different experts on each rank first. Then exchange copies between the fullest "
        "rank and another while that helps."
    )


def choose_replicas(chosen, placement, rank, node):
    """Which rank serves each choice: this one, else one of this node, else any, in turn from token to token."""
    raise NotImplementedError(
        "choose_replicas: list the ranks that hold the expert, keep the nearest kind, and take number t modulo how many."
    )


def count_rows(ranks, rank, node):
    """{"across", "inside"}: rows that travel between nodes and inside nodes in the dispatch of this rank's tokens."""
    raise NotImplementedError(
        "count_rows: for each token, the set of ranks that it visits. One row to each other node; there, and at home, one "
        "row to each visited rank, but for the one at which the row already is."
    )


def moe_layer(comm, part, placement, node):
    """A rank program: {"y"}, the layer's output for this rank's tokens; with part["dy"] also the gradients."""
    raise NotImplementedError(
        "moe_layer: dispatch in two hops, add up what a rank's experts make of a token, and bring the sums home by the "
        "same two hops. comm.group(...).all_to_all takes lists of arrays of any length."
    )


def keep_heaviest(comm, chosen, weight, experts, capacity):
    """A rank program: which of this rank's choices are among the `capacity` heaviest of their expert, over all ranks."""
    raise NotImplementedError(
        "keep_heaviest: a choice that is not among the heaviest on its own rank can't be among those of all ranks."
    )


def update_bias(comm, bias, chosen, rate):
    """A rank program: the biases after a step, up for experts with less than the average, down for those with more."""
    raise NotImplementedError(
        "update_bias: the counts are those of all ranks: one all-reduce of whole numbers."
    )
