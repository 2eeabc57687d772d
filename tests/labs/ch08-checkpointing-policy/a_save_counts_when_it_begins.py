"""A failure during a save loses nothing, as if the save were complete when it begins.

fails: test_replay_by_hand
"""

from solution import *  # noqa: F403


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
        if when >= work and target < steps:
            saved, saves, since = target, saves + 1, when
        lost += when - since
        restarts += 1
        while fails_before(when + restart):
            when = failures[nth]
            nth += 1
            restarts += 1
        now = since = when + restart
        done = saved
