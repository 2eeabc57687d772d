"""A planner: write these seven functions. The README has the formulas."""


def coordinates(rank, sizes, order):
    """The rank's coordinate on each axis; the first axis of `order` runs fastest."""
    raise NotImplementedError(
        "coordinates: a rank is a number whose digits are its coordinates; the first axis of the order is the last digit"
    )


def groups(sizes, order, axes):
    """The ranks that differ on `axes` only: a list of groups, by their first ranks."""
    raise NotImplementedError("groups: put ranks together that agree on every axis that isn't in axes")


def tier_bytes(sizes, order, gpus_per_node, ring, chain):
    """Bytes that stay in a node, bytes that leave one, and the most that a single rank sends across."""
    raise NotImplementedError(
        "tier_bytes: list who sends to whom in each group. A message crosses if the two ranks' nodes differ, "
        "and rank r is in node r // gpus_per_node"
    )


def memory_bytes(job, plan):
    """Bytes on a rank of the fullest stage."""
    raise NotImplementedError(
        "memory_bytes: state, activations in flight and logits for every stage, then the largest: the first stage has "
        "most in flight, the last one has the logits"
    )


def step_seconds(job, cluster, plan):
    """How long a step takes, by the model of the README."""
    raise NotImplementedError(
        "step_seconds: the sum of the stages' times and (m - 1) times the slowest, then data traffic and optimizer. "
        "An axis uses the slow link as soon as one of its groups leaves a node"
    )


def best_plan(job, cluster):
    """The plan with the shortest step among those that fit; None if none does."""
    raise NotImplementedError(
        "best_plan: enumerate tp, pp, micro_batch, zero, recompute and order; drop what doesn't divide or fit; "
        "take the quickest"
    )


def tuned_plan(job, cluster, measure, budget):
    """The quickest plan on a machine that isn't quite its data sheet, with at most `budget` measurements."""
    raise NotImplementedError(
        "tuned_plan: measure plans that lean on different parts, find the part that the data sheet flatters, "
        "correct it, rank again, measure again"
    )
