"""The job saves after its last step too.

fails: test_replay_by_hand, test_expected_seconds
"""

import math

from solution import *  # noqa: F403


def expected_seconds(steps, step, every, save, restart, mtbf):
    """The mean time of the job when failures come at random, `mtbf` seconds apart on average."""
    whole = (steps - 1) // every  # segments that end with a save
    rest = (steps - whole * every) * step
    per_failure = mtbf * math.exp(restart / mtbf)
    return per_failure * (whole * math.expm1((every * step + save) / mtbf) + math.expm1((rest + save) / mtbf))


def best_every(steps, step, save, restart, mtbf):
    """After how many steps to save, so that the job's mean time is least."""
    return min(range(1, steps + 1), key=lambda n: expected_seconds(steps, step, n, save, restart, mtbf))


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
        end = work + save
        if not fails_before(end):
            if target == steps:
                return {"seconds": end, "lost": lost, "saves": saves + 1, "restarts": restarts}
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
