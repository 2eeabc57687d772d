"""What to keep, what to compute again, what to scale, and how often to save: write these nine functions."""


def run_chain(forward, backward, x, dy, keep, layers, put, get, drop):
    """Forward and backward through a chain that keeps some inputs and computes the others again: (y, dx)."""
    raise NotImplementedError(
        "run_chain: go forward and put what is kept; then take the segments from the last to the first, compute the "
        "inputs inside each again from its kept one, and go backward through it"
    )


def peak_bytes(sizes, keep):
    """The most that a chain with these kept inputs holds."""
    raise NotImplementedError(
        "peak_bytes: while a segment goes backward, the kept inputs up to it are held, and all inputs inside it"
    )


def best_keep(sizes, costs, limit):
    """The inputs to keep so that the peak is within the limit and as little as can be is computed again."""
    raise NotImplementedError(
        "best_keep: walk along the chain; for each input that might be kept remember every pair of (bytes kept so far, "
        "recomputation so far) that no other pair beats in both"
    )


def least_limit(sizes):
    """The smallest limit, in bytes, with which the chain can run at all."""
    raise NotImplementedError("least_limit: if a limit works, every larger one does. Search by halves")


def scaler_update(state, overflow, growth_interval=2000, hysteresis=2, minimum=1.0, maximum=2.0**24):
    """The scaler's state after one step."""
    raise NotImplementedError(
        "scaler_update: two counters, good steps in a row and overflows that are still tolerated, decide about the scale"
    )


def scaled_training(comm, grads, weights, lr, state, growth_interval=2000, hysteresis=2):
    """SGD on float32 master weights with gradients that exist in float16 only, scaled."""
    raise NotImplementedError(
        "scaled_training: scale, cast to float16, ask all ranks whether anyone overflowed, unscale in float32, average, step"
    )


def replay(steps, step, every, save, restart, failures):
    """A job with these failures: how long it takes, what is lost, how often it saves and restarts."""
    raise NotImplementedError(
        "replay: a segment of steps and its save either ends before the next failure, or is done again after a restart"
    )


def expected_seconds(steps, step, every, save, restart, mtbf):
    """The mean time of the job when failures come at random, `mtbf` seconds apart on average."""
    raise NotImplementedError(
        "expected_seconds: a segment of x seconds takes mtbf * exp(restart / mtbf) * (exp(x / mtbf) - 1) on average; "
        "add up the segments, of which the last is shorter and isn't saved"
    )


def best_every(steps, step, save, restart, mtbf):
    """After how many steps to save, so that the job's mean time is least."""
    raise NotImplementedError("best_every: try every whole number; Young's formula is only near it")
