"""A cost model of NCCL's collectives: three protocols, two algorithms, and the tuner's choice between them.

The flat alpha-beta model gives one latency and one bandwidth. NCCL has several of each and picks per call:

- protocol `LL`: 4 bytes of data and 4 of flag a store. Least latency, at most half the bandwidth.
- protocol `LL128`: 120 bytes of data and 8 of flag. Little latency, 92 % of the bandwidth; needs NVLink.
- protocol `Simple`: whole chunks and a memory fence. All of the bandwidth, most latency.
- algorithm `ring`: 2(n-1) steps and the most bandwidth.
- algorithm `tree`: within a node a chain, between nodes a double binary tree, so that the latency grows with
  log2(nodes). Only for all-reduce.

The time of one collective, as NCCL's own tuner computes it (all figures in the tables below):

    seconds   = latency + bytes / (bus bandwidth x ratio)
    ratio     = n / steps for a ring, 1/2 for a tree       (steps: 2(n-1) all-reduce; n-1 all-gather and
                                                            reduce-scatter; n broadcast and reduce)
    ring      latency = base + (steps - network steps) x hop in the node + network steps x network hop
    tree      latency = base + 2 ((n/nodes - 1) x hop in the node + log2(nodes) x network hop)

Source: NCCL 2.30, src/graph/tuning.cc (tables and formulas) and src/graph/topo.h (link rates). Ours, and
simpler than NCCL: the bus bandwidth of several nodes is the lesser of a GPU's links and its node's network
ports (NCCL searches the topology), channel counts are looked up, and there is no NVLS, CollNet or PAT. So an
H100 or B200 node, where NCCL reduces inside the NVSwitch (NVLS), beats this prediction on large all-reduces.

It is the model by which NCCL *ranks* its choices, and no more. Against a measured 8 x A100 curve (Azure AI
Benchmarking Guide, `manyranks.published`) its times are within 9 % from 256 MiB up, 17 to 36 % too short from
1 to 128 MiB, and 46 to 67 % too short below, where that machine takes 42 us a call or more and the tables 15.

    >>> from manyranks.runtime.hardware import Cluster
    >>> node = Cluster(nodes=1, gpus_per_node=8, gpu="A100")
    >>> choose(1024, node), choose(2**20, node), choose(2**30, node)
    (('ring', 'LL'), ('ring', 'LL'), ('ring', 'Simple'))
    >>> round(1e6 * all_reduce_seconds(1024, node), 1)                # predicted, microseconds
    15.0
"""

from __future__ import annotations

import math

import numpy as np

from manyranks.runtime.costs import check_sizes, like
from manyranks.runtime.hardware import Cluster, check_count, check_number, pcie_bandwidth

ALGORITHMS = ("tree", "ring")
PROTOCOLS = ("LL", "LL128", "Simple")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")

# Microseconds, in the order of PROTOCOLS. Source: NCCL 2.30, tuning.cc, baseLatencies and hwLatencies.
BASE_LATENCY_US = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
HOP_LATENCY_US = {
    "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)},
    "pcie": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
    "network": {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)},
}
# GB/s: the most that LL carries on 1, 2, more nodes. On one node the GPU limits it (its row); on several the
# CPU does (row volta for Intel, ampere for AMD). Source: the same file, llMaxBws.
LL_MAX_GBPS = {
    "volta": (39.0, 39.0, 20.4),
    "ampere": (87.7, 22.5, 19.0),
    "hopper": (141.0, 45.0, 35.0),
    "blackwell": (282.0, 90.0, 70.0),
}
# GB/s a channel on 1, 2, more nodes. Source: the same file, perChMax*Bws.
RING_LL128_MAX_GBPS = {
    "volta": (20.0, 20.0, 20.0),
    "ampere": (20.0, 20.0, 20.0),
    "hopper": (36.7, 36.7, 36.7),
    "blackwell": (40.0, 40.0, 40.0),
}
TREE_LL128_MAX_GBPS = {
    "volta": (20.0, 20.0, 20.0),
    "ampere": (20.0, 20.0, 20.0),
    "hopper": (36.7, 36.7, 29.0),
    "blackwell": (55.6, 31.67, 20.0),
}
TREE_MAX_GBPS = {
    "volta": (26.5, 18.5, 10.0),
    "ampere": (24.0, 23.6, 17.8),
    "hopper": (38.7, 41.4, 36.0),
    "blackwell": (70.0, 42.8, 24.0),
}
# What a tree keeps of its bandwidth at 64 B x 2^i, i = 0, 1, ... Source: the same file, treeCorrectionFactor.
TREE_CORRECTION = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (
        1,
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.8,
        0.8,
        0.7,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.8,
        0.9,
        0.9,
        0.9,
        0.9,
        1,
        1,
    ),
    "Simple": (
        0.9,
        0.9,
        0.9,
        0.9,
        0.9,
        0.9,
        0.9,
        0.8,
        0.7,
        0.6,
        0.6,
        0.5,
        0.5,
        0.5,
        0.5,
        0.6,
        0.7,
        0.8,
        0.7,
        0.7,
        0.8,
        0.9,
        0.9,
    ),
}
# The part of a link's wire rate that NCCL counts on. NVLink: 20.0, 20.0, 20.6, 40.1 GB/s of 25, 25, 25, 50 a
# link; PCIe: 12 GB/s for generation 3 x16. Source: NCCL 2.30, src/graph/topo.h.
NVLINK_FRACTION = {"volta": 0.8, "ampere": 0.8, "hopper": 0.824, "blackwell": 0.802}
PCIE_FRACTION = 12e9 / pcie_bandwidth(3)
# Channels on one node and on several, for the 8-GPU servers. A100 in a node as NCCL_DEBUG=INFO prints it (12
# of 20 GB/s); the others are our estimate. They matter only where a limit per channel binds.
CHANNELS = {"volta": (6, 4), "ampere": (12, 8), "hopper": (12, 16), "blackwell": (16, 16)}
# T4 (Turing, compute capability 7.5) and L4 (Ada, 8.9) take the rows that NCCL gives those capabilities.
ARCHITECTURE = {
    "V100": "volta",
    "T4": "volta",
    "A100": "ampere",
    "L4": "ampere",
    "H100": "hopper",
    "H200": "hopper",
    "B200": "blackwell",
}
# Microseconds to post one send to the network. Source: tuning.cc, getNetOverhead.
NETWORK_OVERHEAD_US = {"amd": 2.0, "intel": 1.0}


def bus_factor(collective: str, ranks: int) -> float:
    """busbw / algbw: what one link carries for each byte of the collective's size.

    all_reduce 2(n-1)/n; reduce_scatter, all_gather, all_to_all (n-1)/n, of the *total* size (n times the
    shard that one rank gives or keeps); broadcast, reduce 1. Source: nccl-tests, doc/PERFORMANCE.md.

    >>> [bus_factor(c, 8) for c in ("all_reduce", "all_gather", "broadcast")]
    [1.75, 0.875, 1.0]
    """
    n = check_count("ranks", ranks)
    factors = {
        "all_reduce": 2 * (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "all_gather": (n - 1) / n,
        "all_to_all": (n - 1) / n,
        "broadcast": 1.0,
        "reduce": 1.0,
    }
    if collective not in factors:
        raise ValueError(f"collective must be one of {', '.join(factors)}, got {collective!r}")
    return factors[collective]


def algbw(bytes, seconds):
    """Algorithm bandwidth, bytes/s: the collective's size over its time, whatever it moves meanwhile.

    >>> algbw(1e9, 0.010)
    100000000000.0
    """
    bytes, seconds = check_sizes("bytes", bytes), check_sizes("seconds", seconds)
    if np.any(seconds <= 0):
        raise ValueError("seconds must all be > 0")
    return like(bytes / seconds)


def busbw(collective: str, bytes, seconds, ranks: int):
    """Bus bandwidth, bytes/s: algbw x `bus_factor`, a rate to hold against a link's at any number of ranks.

    bytes is the total size: for reduce_scatter and all_gather n times one rank's shard. It isn't the speed
    at which the collective is done (that is algbw), and reducing inside a switch can put it above the wire's.

    >>> busbw("all_reduce", 1e9, 0.010, ranks=8)          # 1 GB in 10 ms; each GPU sends 1.75 GB
    175000000000.0
    >>> busbw("all_gather", 8e9, 0.035, ranks=8)          # shards of 1 GB; each GPU receives 7 GB in 35 ms
    200000000000.0
    """
    return like(algbw(bytes, seconds) * bus_factor(collective, ranks))


def _setting(cluster, ranks, nodes, channels, bus_bandwidth, cpu):
    """The checked (ranks, nodes, architecture, hop kind, channels, {algorithm: bus GB/s})."""
    if not isinstance(cluster, Cluster):
        raise TypeError(f"cluster must be a Cluster, got {cluster!r} ({type(cluster).__name__})")
    architecture = ARCHITECTURE.get(cluster.gpu.name)
    if architecture is None:
        raise ValueError(
            f"cluster must be of GPUs that NCCL has constants for ({', '.join(ARCHITECTURE)}), "
            f"got {cluster.gpu.name!r}"
        )
    if cpu not in NETWORK_OVERHEAD_US:
        raise ValueError(f"cpu must be one of {', '.join(NETWORK_OVERHEAD_US)}, got {cpu!r}")
    n = cluster.ranks if ranks is None else check_count("ranks", ranks)
    if nodes is not None:
        nodes = check_count("nodes", nodes)
    else:
        nodes = cluster.nodes if ranks is None else -(-n // cluster.gpus_per_node)
    if nodes > cluster.nodes or n % nodes or n // nodes > cluster.gpus_per_node:
        raise ValueError(
            f"ranks and nodes must fit {cluster.nodes} x {cluster.gpus_per_node} GPUs, equally "
            f"many on each node, got ranks={n}, nodes={nodes}"
        )
    nvlink = cluster.gpu.link_bandwidth is not None
    channels = CHANNELS[architecture][nodes > 1] if channels is None else check_count("channels", channels)
    if bus_bandwidth is not None:
        bus = {a: check_number("bus_bandwidth", bus_bandwidth, positive=True) / 1e9 for a in ALGORITHMS}
    else:
        links = cluster.intra.bandwidth * (NVLINK_FRACTION[architecture] if nvlink else PCIE_FRACTION) / 1e9
        ports = n // nodes * cluster.inter.bandwidth / 1e9
        if nodes == 1:
            bus = {a: links for a in ALGORITHMS}
        elif n == nodes:  # one GPU a node: its links inside the node are idle
            bus = {"ring": ports, "tree": ports * (2 if nodes == 2 else 1)}
        else:  # two nodes of a tree exchange their halves, more relay them, so two get twice the network
            bus = {"ring": min(links, ports), "tree": min(links, ports * (2 if nodes == 2 else 1))}
    return n, nodes, architecture, "nvlink" if nvlink else "pcie", channels, bus


def _bus_gbps(collective, algorithm, protocol, bus, nodes, architecture, channels, cpu):
    """Bus bandwidth in GB/s of one algorithm and protocol, after the protocol's factor and limits."""
    column = min(nodes, 3) - 1  # 1 node, 2 nodes, more
    ll_max = LL_MAX_GBPS[architecture if nodes == 1 else {"intel": "volta", "amd": "ampere"}[cpu]][column]
    if algorithm == "ring":
        if protocol == "LL":
            return min(bus * 0.5, ll_max)
        if protocol == "LL128":
            return min(bus * 0.92, channels * RING_LL128_MAX_GBPS[architecture][column])
        return bus
    bus = min(bus * 0.92, channels * TREE_MAX_GBPS[architecture][column])
    if protocol == "LL":
        return min(bus / 3.8, ll_max)
    if protocol == "LL128":
        kept = 7 / 9 if nodes == 1 else 120 / 128
        return min(bus * kept, channels * TREE_LL128_MAX_GBPS[architecture][column])
    return bus


def _latency_us(collective, algorithm, protocol, n, nodes, hop_kind, cpu):
    """Latency in microseconds of one algorithm and protocol."""
    p = PROTOCOLS.index(protocol)
    base = BASE_LATENCY_US[algorithm][p]
    hop = HOP_LATENCY_US[hop_kind][algorithm][p]
    # with one GPU a node nothing hides the network's latency: NCCL then takes the tree's for rings too
    network_hop = HOP_LATENCY_US["network"]["tree" if n == nodes else algorithm][p]
    if algorithm == "tree":
        return base + 2 * ((n // nodes - 1) * hop + int(math.log2(nodes)) * network_hop)
    if collective in ("broadcast", "reduce"):
        if nodes == 1:  # the same channels throughout: chunks flow through the ring as through a pipe
            return base + hop
        return base + n * HOP_LATENCY_US["network"]["tree" if protocol == "Simple" else "ring"][p]
    halves = 2 if collective == "all_reduce" else 1
    steps, network_steps = halves * (n - 1), halves * (nodes - 1)
    if nodes > 1:
        hop = max(hop, NETWORK_OVERHEAD_US[cpu] * (3 if protocol == "Simple" else 1))
    return base + (steps - network_steps) * hop + network_steps * network_hop


def _candidates(collective, algorithm, protocol, hop_kind):
    """The (algorithm, protocol) pairs to consider, in NCCL's order; ValueError if the request leaves none."""
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be None or one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    if protocol is not None and protocol not in PROTOCOLS:
        raise ValueError(f"protocol must be None or one of {', '.join(PROTOCOLS)}, got {protocol!r}")
    if collective not in COLLECTIVES:
        raise ValueError(f"collective must be one of {', '.join(COLLECTIVES)}, got {collective!r}")
    if algorithm == "tree" and collective != "all_reduce":
        raise ValueError(f"algorithm must be None or ring for {collective}: only all_reduce has a tree")
    if protocol == "LL128" and hop_kind != "nvlink":
        raise ValueError("protocol must be LL or Simple without NVLink: LL128 relies on its 128-byte stores")
    return [
        (a, p)
        for a in ALGORITHMS
        for p in PROTOCOLS
        if a == (algorithm or a)
        and p == (protocol or p)
        and (a == "ring" or collective == "all_reduce")
        and (p != "LL128" or hop_kind == "nvlink")
    ]


def _table(collective, bytes, cluster, ranks, nodes, algorithm, protocol, channels, bus_bandwidth, cpu):
    """(pairs, seconds): the candidates and their predicted times, one row a pair, one column a size."""
    size = check_sizes("bytes", bytes)
    n, nodes, architecture, hop_kind, channels, bus = _setting(
        cluster, ranks, nodes, channels, bus_bandwidth, cpu
    )
    pairs = _candidates(collective, algorithm, protocol, hop_kind)
    if n == 1:
        return pairs, np.zeros((len(pairs), *size.shape))
    rows = []
    for a, p in pairs:
        latency = np.full(size.shape, _latency_us(collective, a, p, n, nodes, hop_kind, cpu))
        gbps = np.full(size.shape, _bus_gbps(collective, a, p, bus[a], nodes, architecture, channels, cpu))
        if a == "ring":
            gbps = gbps * (1 / bus_factor(collective, n))
            if collective == "all_reduce" and p == "Simple" and nodes > 1:  # NCCL: "plateau effect of ring"
                plateau = 1.9 if architecture == "volta" else 1.4
                latency = np.where(size // (channels * n) >= 64, latency * plateau, latency)
        else:
            index = np.floor(np.log2(np.maximum(size // 64, 1))).astype(int)
            factors = np.array(TREE_CORRECTION[p])
            known = (size >= 64) & (index < len(factors))
            gbps = gbps * 0.5 * np.where(known, factors[np.minimum(index, len(factors) - 1)], 1.0)
        rows.append(latency * 1e-6 + size / (gbps * 1e9))
    return pairs, np.array(rows)


def collective_seconds(
    collective: str,
    bytes,
    cluster: Cluster,
    *,
    ranks: int | None = None,
    nodes: int | None = None,
    algorithm: str | None = None,
    protocol: str | None = None,
    channels: int | None = None,
    bus_bandwidth: float | None = None,
    cpu: str = "intel",
):
    """Predicted seconds of an NCCL collective, by the formula at the top of this module.

    collective: all_reduce, all_gather, reduce_scatter, broadcast or reduce (the last four by ring only).
    bytes: the total size, a number or an array: for all_gather and reduce_scatter n times one rank's shard.
    cluster: its GPUs, links and shape. `ranks` GPUs on `nodes` take part: by default all of them, and for a
        given `ranks` as few nodes as hold them.
    algorithm ("ring", "tree"), protocol ("LL", "LL128", "Simple"): None leaves it to the tuner, size by size.
    channels: None takes `CHANNELS`. cpu: the hosts' make, "intel" or "amd", which matters between nodes.
    bus_bandwidth: bytes/s, in place of the links' rate: one calibrated constant for one machine.
    Returns seconds, a float or an array of the shape of `bytes`; 0 for a single rank.
    """
    _, seconds = _table(
        collective, bytes, cluster, ranks, nodes, algorithm, protocol, channels, bus_bandwidth, cpu
    )
    return like(seconds.min(axis=0))


def choose(bytes: float, cluster: Cluster, *, collective: str = "all_reduce", **options) -> tuple[str, str]:
    """The (algorithm, protocol) that the tuner takes for one size: the pair with the least predicted time.

    options: as in `collective_seconds`.
    """
    if np.ndim(bytes):
        raise ValueError(f"bytes must be one size, got an array of shape {np.shape(bytes)}")
    defaults = dict(
        ranks=None, nodes=None, algorithm=None, protocol=None, channels=None, bus_bandwidth=None, cpu="intel"
    )
    unknown = set(options) - set(defaults)
    if unknown:
        raise TypeError(f"choose takes {', '.join(defaults)}, got {', '.join(sorted(unknown))}")
    pairs, seconds = _table(collective, bytes, cluster, **(defaults | options))
    return pairs[int(np.argmin(seconds))]


def all_reduce_seconds(bytes, cluster: Cluster, **options):
    """Predicted seconds of an all-reduce of `bytes` on each rank; options as in `collective_seconds`.

    >>> node = Cluster(nodes=1, gpus_per_node=8, gpu="A100")
    >>> seconds = all_reduce_seconds(2**33, node, algorithm="ring", protocol="Simple")
    >>> round(busbw("all_reduce", 2**33, seconds, ranks=8) / 1e9, 1)  # 12 links of 20 GB/s, less 56 us
    239.8
    """
    return collective_seconds("all_reduce", bytes, cluster, **options)


def all_gather_seconds(bytes, cluster: Cluster, **options):
    """Predicted seconds of an all-gather whose *result* is `bytes`; options as in `collective_seconds`."""
    return collective_seconds("all_gather", bytes, cluster, **options)


def reduce_scatter_seconds(bytes, cluster: Cluster, **options):
    """Predicted seconds of a reduce-scatter of `bytes` on each rank; options as in `collective_seconds`."""
    return collective_seconds("reduce_scatter", bytes, cluster, **options)


def broadcast_seconds(bytes, cluster: Cluster, **options):
    """Predicted seconds of a broadcast of `bytes`; options as in `collective_seconds`."""
    return collective_seconds("broadcast", bytes, cluster, **options)


def reduce_seconds(bytes, cluster: Cluster, **options):
    """Predicted seconds of a reduce of `bytes` on each rank; options as in `collective_seconds`."""
    return collective_seconds("reduce", bytes, cluster, **options)
