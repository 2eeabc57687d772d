"""What to keep, what to compute again, what to scale, and how often to save."""

from __future__ import annotations

import itertools
import math

import numpy as np

# ------------------------------------------------------------------ activation checkpointing


def _segments(keep, layers):
    return list(zip(keep, [*keep[1:], layers]))


def run_chain(forward, backward, x, dy, keep, layers, put, get, drop):
    """Forward and backward through a chain that keeps some inputs and computes the others again: (y, dx)."""
    segments = _segments(keep, layers)
    last = keep[-1]
    for i in range(layers):
        if i in keep or i > last:
            put(i, x)
        x = forward(i, x)
    y = x
    for start, end in reversed(segments):
        if start != last:
            x = get(start)
            for i in range(start, end - 1):
                x = forward(i, x)
                put(i + 1, x)
        for i in range(end - 1, start - 1, -1):
            dy = backward(i, get(i), dy)
            drop(i)
    return y, dy


def peak_bytes(sizes, keep):
    """The most that a chain with these kept inputs holds."""
    most = kept = 0
    for start, end in _segments(keep, len(sizes)):
        kept += sizes[start]
        most = max(most, kept + sum(sizes[start + 1 : end]))
    return most


def best_keep(sizes, costs, limit):
    """The inputs to keep so that the peak is within the limit and as little as can be is computed again."""
    layers = len(sizes)
    size, cost = [0, *itertools.accumulate(sizes)], [0, *itertools.accumulate(costs)]
    # fronts[k]: (bytes kept up to and with input k, recomputation so far, the kept inputs), none of them beaten
    fronts = [[] for _ in range(layers)]
    fronts[0] = [(sizes[0], 0, (0,))]
    best = None
    for k in range(layers):
        front, least = [], math.inf
        for kept, spent, keep in sorted(fronts[k]):
            if spent < least:
                front.append((kept, spent, keep))
                least = spent
        for kept, spent, keep in front:
            if kept + size[layers] - size[k + 1] <= limit and (best is None or spent < best[0]):
                best = spent, keep
            for n in range(k + 1, layers):
                if kept + size[n] - size[k + 1] > limit:
                    break
                fronts[n].append((kept + sizes[n], spent + cost[n - 1] - cost[k], (*keep, n)))
    if best is None:
        raise ValueError(f"limit: nothing that can be kept stays within {limit} bytes")
    return list(best[1])


def least_limit(sizes):
    """The smallest limit, in bytes, with which the chain can run at all."""
    low, high = max(sizes) - 1, sum(sizes)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            best_keep(sizes, [0] * len(sizes), middle)
            high = middle
        except ValueError:
            low = middle
    return high


# ------------------------------------------------------------------ loss scaling


def scaler_update(state, overflow, growth_interval=2000, hysteresis=2, minimum=1.0, maximum=2.0**24):
    """The scaler's state after one step."""
    scale, good, left = state["scale"], state["good"], state["left"]
    if overflow:
        good, left = 0, max(left - 1, 0)
        if left == 0:
            scale = max(scale / 2, minimum)
    else:
        good += 1
        if good == growth_interval:
            scale, good, left = min(scale * 2, maximum), 0, hysteresis
    return {"scale": scale, "good": good, "left": left}


def scaled_training(comm, grads, weights, lr, state, growth_interval=2000, hysteresis=2):
    """SGD on float32 master weights with gradients that exist in float16 only, scaled."""
    weights = np.array(weights, dtype=np.float32)
    state, skipped, scales = dict(state), [], []
    for step, gradient in enumerate(grads):
        scales.append(state["scale"])
        with np.errstate(over="ignore"):
            half = (np.asarray(gradient) * state["scale"]).astype(np.float16)
        bad = comm.all_reduce(np.array([0.0 if np.isfinite(half).all() else 1.0]), op="max")
        overflow = bool(bad[0] > 0)
        if overflow:
            skipped.append(step)
        else:
            mean = comm.all_reduce(half.astype(np.float32) / np.float32(state["scale"])) / np.float32(
                comm.size
            )
            weights = weights - np.float32(lr) * mean
        state = scaler_update(state, overflow, growth_interval, hysteresis)
    return {"weights": weights, "state": state, "skipped": skipped, "scales": scales}


# ------------------------------------------------------------------ losing ranks


def replay(steps, step, every, save, restart, failures):
    """A job with these failures: how long it takes, what is lost, how often it saves and restarts."""
    failures, nth = sorted(failures), 0
    now, done, saved = 0.0, 0, 0
    lost, saves, restarts = 0.0, 0, 0
    since = 0.0  # when the work that isn't saved yet began

    def fails_before(end):
        return nth < len(failures) and failures[nth] < end

    while True:
        target = min(steps, saved + every)
        work = now + (target - done) * step
        end = work + (save if target < steps else 0.0)
        if not fails_before(end):
            if target == steps:
                return {"seconds": work, "lost": lost, "saves": saves, "restarts": restarts}
            now, since, done, saved, saves = end, end, target, target, saves + 1
            continue
        when = failures[nth]
        nth += 1
        lost += when - since
        restarts += 1
        while fails_before(when + restart):
            when = failures[nth]
            nth += 1
            restarts += 1
        now = since = when + restart
        done = saved


def expected_seconds(steps, step, every, save, restart, mtbf):
    """The mean time of the job when failures come at random, `mtbf` seconds apart on average."""
    whole = (steps - 1) // every  # segments that end with a save
    rest = (steps - whole * every) * step
    per_failure = mtbf * math.exp(restart / mtbf)
    return per_failure * (whole * math.expm1((every * step + save) / mtbf) + math.expm1(rest / mtbf))


def best_every(steps, step, save, restart, mtbf):
    """After how many steps to save, so that the job's mean time is least."""
    return min(range(1, steps + 1), key=lambda n: expected_seconds(steps, step, n, save, restart, mtbf))


if __name__ == "__main__":
    sizes, costs = [9, 1, 9, 2, 9, 1, 9, 2, 9, 1], [4, 1, 4, 1, 4, 1, 4, 1, 4, 1]
    for limit in (52, 40, 30, least_limit(sizes)):
        keep = best_keep(sizes, costs, limit)
        again = sum(sum(costs[a : b - 1]) for a, b in _segments(keep, 10)[:-1])
        print(
            f"limit {limit} of {sum(sizes)}: keep {keep}, peak {peak_bytes(sizes, keep)}, {again} computed again"
        )
    even = [0, 3, 6, 9]
    print(f"every third: peak {peak_bytes(sizes, even)}")
    state = {"scale": 1024.0, "good": 0, "left": 2}
    for overflow in (True, True, False, True, False, False, False):
        state = scaler_update(state, overflow, growth_interval=3)
        print("overflow" if overflow else "good    ", state)
    print(replay(10, 1.0, 3, 0.5, 2.0, [4.0, 5.0]))
    every = best_every(100_000, 2.0, 60.0, 600.0, 6 * 3600)
    young = math.sqrt(2 * 60 * 6 * 3600) / 2.0
    print(
        f"save every {every} steps (Young: {young:.0f}): {expected_seconds(100_000, 2.0, every, 60.0, 600.0, 21600) / 3600:.2f} h"
    )
