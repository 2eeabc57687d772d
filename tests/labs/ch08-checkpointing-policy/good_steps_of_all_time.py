"""Good steps are counted since the last growth, overflows between them notwithstanding.

fails: test_scaler_update
"""

from solution import *  # noqa: F403


def scaler_update(state, overflow, growth_interval=2000, hysteresis=2, minimum=1.0, maximum=2.0**24):
    """The scaler's state after one step."""
    scale, good, left = state["scale"], state["good"], state["left"]
    if overflow:
        left = max(left - 1, 0)
        if left == 0:
            scale = max(scale / 2, minimum)
    else:
        good += 1
        if good == growth_interval:
            scale, good, left = min(scale * 2, maximum), 0, hysteresis
    return {"scale": scale, "good": good, "left": left}
