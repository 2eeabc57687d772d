# Generated from chapters/07_3d_parallelism.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""Five axes: where each rank of a plan with context and expert parallelism stands, and what its two extra axes send."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from manyranks.grid import (
    Grid,
)
from manyranks.models import Decoder
from manyranks.runtime import Cluster, Tier
from manyranks.runtime.hardware import check_count

__all__ = [
    "Layout",
    "Neighbours",
    "all_to_all_seconds",
    "check_experts",
    "dispatched_bytes",
    "key_value_bytes",
    "neighbours",
]


@dataclass(frozen=True)
class Layout:
    """Where each rank of a five-axis plan stands.

    From the innermost axis, whose ranks are neighbours: tp, cp, then pp, then dp, as
    Llama 3 has it {tensor, context, pipeline, data}. Experts need no ranks of their
    own. Their group is made of neighbouring context and data ranks: the part of dp that
    it takes, ep / cp, moves inside of pp, so that an expert group is as compact as it
    can be. DeepSeek-V3's 64-way groups are eight whole nodes in this order.

    Attributes:
        dp, tp, pp, cp, ep: degrees. dp x cp must be a multiple of ep, and one of ep and
            cp a multiple of the other.

    >>> Layout(dp=8, tp=8, pp=16, cp=16)
    Layout(dp 8 x pp 16 x cp 16 x tp 8 = 16384 ranks)
    >>> Layout(dp=128, pp=16, ep=64)
    Layout(dp 2 x pp 16 x ep 64 x tp 1 = 2048 ranks)
    >>> Layout(dp=4, cp=2, ep=4).group(0, "expert")
    (0, 1, 2, 3)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        check_experts(self.dp, self.cp, self.ep)

    @property
    def grid(self) -> Grid:
        """The ranks as a `Grid`; "ep" is the part of dp, or of cp, that experts take."""
        if self.ep == 1:
            sizes = {"dp": self.dp, "pp": self.pp, "cp": self.cp, "tp": self.tp}
        elif self.ep >= self.cp:
            inner = self.ep // self.cp
            sizes = {"dp": self.dp // inner, "pp": self.pp, "ep": inner}
            sizes |= {"cp": self.cp} if self.cp > 1 else {}
        else:
            sizes = {"dp": self.dp, "pp": self.pp}
            sizes |= {"cp": self.cp // self.ep, "ep": self.ep}
        sizes["tp"] = self.tp
        if self.cp == 1:
            sizes.pop("cp", None)
        return Grid(tuple(sizes), tuple(sizes.values()))

    def __repr__(self) -> str:
        return repr(self.grid).replace("Grid", "Layout", 1)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """Which of the grid's axes each kind of group runs along.

        "tensor" and "pipeline"; "context", whose ranks share a sequence; "expert",
        whose ranks share the experts; "data", whose ranks hold the same parameters;
        "expert data", whose ranks hold the same experts.
        """
        shared = {"ep", "cp"} if self.ep >= self.cp else {"ep"}
        context = {"cp"} if self.ep >= self.cp else {"cp", "ep"}
        along = {
            "tensor": {"tp"},
            "context": context,
            "pipeline": {"pp"},
            "data": {"dp", "ep", "cp"},
            "expert": shared,
            "expert data": {"dp", "cp"} - shared if self.ep > 1 else {"dp", "cp"},
        }
        if self.ep == 1:
            along["expert"] = set()
        order = self.grid.order
        return {k: tuple(a for a in order if a in v) for k, v in along.items()}

    def members(self, kind: str) -> np.ndarray:
        """All groups of a kind, one a row: an array of shape (groups, ranks of each).

        Args:
            kind: a key of `axes`.
        """
        if kind not in self.axes:
            raise ValueError(f"kind must be one of {', '.join(self.axes)}, got {kind!r}")
        grid, along = self.grid, self.axes[kind]
        ranks = np.arange(grid.ranks).reshape(grid.shape)
        places = [grid.order.index(name) for name in along]
        last = range(ranks.ndim - len(places), ranks.ndim)
        size = math.prod(grid.size(name) for name in along)
        return np.moveaxis(ranks, places, last).reshape(-1, size)

    def group(self, rank: int, kind: str) -> tuple[int, ...]:
        """The ranks of one rank's group of a kind."""
        self.grid.coordinates(rank)  # refuses what is no rank
        groups = self.members(kind)
        row = int(np.argwhere(groups == rank)[0, 0])
        return tuple(int(x) for x in groups[row])

    def inside(self, kind: str, cluster: Cluster) -> int:
        """The fewest ranks of a group of a kind that share a node, on any node it touches."""
        nodes = np.sort(self.members(kind) // cluster.gpus_per_node, axis=1)
        starts = np.ones(nodes.shape, dtype=bool)
        starts[:, 1:] = nodes[:, 1:] != nodes[:, :-1]
        return int(np.bincount(np.cumsum(starts) - 1).min())


def check_experts(dp: int, cp: int, ep: int) -> None:
    """Refuse expert-parallel degrees that can't be laid out on dp x cp."""
    if dp * cp % ep:
        raise ValueError(f"ep must divide dp x cp, {dp} x {cp}, got {ep}")
    if ep > 1 and ep % cp and cp % ep:
        raise ValueError(f"ep must divide cp, {cp}, or be a multiple of it, got {ep}")


class Neighbours(NamedTuple):
    """How many ranks of a group share a node, and how far apart stages are.

    Attributes:
        expert, data, expert_data: ranks of such a group in one node.
        stages: distance of neighbouring pipeline stages, in ranks.
    """

    expert: Any
    data: Any
    expert_data: Any
    stages: Any


def neighbours(dp: Any, tp: Any, pp: Any, cp: Any, ep: Any, node: int) -> Neighbours:
    """`Neighbours` for arrays of degrees, in the order of `Layout`.

    Args:
        dp, tp, pp, cp, ep: degrees; arrays are taken.
        node: GPUs of a node.
    """

    def near(stride: Any, size: Any) -> Any:
        return np.clip(node // stride, 1, size)

    inner = np.maximum(ep // cp, 1)  # data ranks of an expert group
    outer, block = dp // inner, cp * inner
    stages = tp * block
    far = near(stages * pp, outer)
    rest = near(tp * ep, np.maximum(cp // ep, 1))
    return Neighbours(near(tp, ep), near(tp, block) * far, rest * far, stages)


def key_value_bytes(model: Decoder, sequence: int, micro_batch: Any, tp: Any) -> Any:
    """Bytes of one layer's keys and values of whole sequences, 16 bits, on a tensor rank.

    What context parallelism gathers. Grouped queries make it small: 8 heads in place of
    128 for Llama 3 405B.
    """
    _, k, v, _ = model.widths
    return 2 * micro_batch * sequence * (k + v) / tp


def dispatched_bytes(model: Decoder, tokens: Any, ep: Any) -> Any:
    """Bytes that a rank sends to others in one all-to-all of one layer: tokens·k·h·2·(ep - 1)/ep.

    Args:
        model: its width and `top_k`.
        tokens: of the rank.
        ep: ranks that share the experts, which all get equally many tokens.
    """
    return 2 * tokens * model.top_k * model.hidden * (ep - 1) / ep


def all_to_all_seconds(
    model: Decoder,
    tokens: Any,
    ep: Any,
    inside: Any,
    cluster: Cluster,
    link: float = 1.0,
    hop: float = 1.0,
) -> Any:
    """Predicted seconds of one all-to-all of a layer's tokens, there or back.

    Args:
        model, tokens, ep: as in `dispatched_bytes`.
        inside: ranks of the group that share a node.
        cluster: the links.
        link, hop: the part of a bandwidth and of a latency that counts.

    Pairwise: in each of ep - 1 rounds every rank sends to one other. If the group spans
    nodes, some pair crosses the network in every round and all wait for it, so that all
    rounds cost what the network takes. With a model's `node_limit` a token crosses the
    network once for each node that it goes to, to the GPU of the same place there,
    which then passes its copies on over the node's links.
    """
    ep, inside = np.asarray(ep, dtype=float), np.asarray(inside, dtype=float)
    size, rounds, near = 2 * tokens * model.top_k * model.hidden, ep - 1, inside - 1

    def tier(of: Tier, messages: Any, sent: Any) -> Any:
        return hop * messages * of.latency + sent / (link * of.bandwidth)

    sent = dispatched_bytes(model, tokens, ep)
    inner, outer = (tier(of, rounds, sent) for of in (cluster.intra, cluster.inter))
    seconds = np.where(ep > inside, outer, inner)
    if model.node_limit:
        nodes = ep / inside
        copies = np.minimum(model.node_limit, nodes) * (nodes - 1) / nodes
        over = tier(cluster.inter, nodes - 1, 2 * tokens * model.hidden * copies)
        over = over + tier(cluster.intra, near, size * near / inside)
        seconds = np.where(nodes > 1, np.minimum(seconds, over), seconds)
    return seconds
