"""Many Ranks: distributed training from first principles.

The names that a notebook starts with. `simulate` and `Cluster` need NumPy only; `launch` needs PyTorch when it is
called; `explore` needs matplotlib and ipywidgets.
"""

from manyranks.runtime import Cluster, simulate

__all__ = ["Cluster", "explore", "launch", "simulate"]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name == "explore":
        from manyranks.show.explore import explore

        return explore
    if name == "launch":
        from manyranks.runtime.processes import launch

        return launch
    raise AttributeError(f"module 'manyranks' has no attribute {name!r}")
