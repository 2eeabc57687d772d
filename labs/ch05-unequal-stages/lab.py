"""Pipeline schedules for unequal stages: write these four functions. The README says what each has to do."""


def clock(plan, forward, backward, weight=None, hop=0.0):
    """When every pass of a plan starts, the makespan, and what each stage holds at most."""
    raise NotImplementedError(
        "clock: a pass starts when its stage is free and everything that it needs is there. "
        "Go round the stages, start what can start, and stop when nothing moves."
    )


def lower_bound(forward, backward, micro_batches, hop=0.0, limits=None):
    """Seconds that no schedule can beat."""
    raise NotImplementedError(
        "lower_bound: stage s can't start before a micro-batch reaches it, has micro_batches times its own "
        "passes to do, and after its last backward pass the gradient still has to travel to stage 0."
    )


def partition(costs, fixed, saved, stages, micro_batches, memory=None):
    """Layers per stage, so that the slowest stage is as quick as can be and every stage fits."""
    raise NotImplementedError(
        "partition: dynamic programming over (stages used, layers placed). An early stage holds more "
        "micro-batches than a late one, so whether a group of layers fits depends on the stage."
    )


def schedule(forward, backward, micro_batches, limits, weight=None, hop=0.0):
    """A plan: for each stage a list of ("F", mb), ("B", mb) and, if weight is given, ("W", mb)."""
    raise NotImplementedError(
        "schedule: start with 1F1B whose warm-up respects the limits, then build other plans, "
        "time each with your clock, and return the quickest."
    )
