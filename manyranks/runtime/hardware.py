"""GPUs, links and clusters: the numbers a simulated run is timed with, each with its source.

Every field is in plain units: bytes, bytes/s, FLOP/s, seconds. GB is 1e9 bytes. A bandwidth is **one way**:
NVIDIA prints NVLink both ways, so its "900 GB/s" for an H100 is 450 GB/s here.

    >>> cluster = Cluster(nodes=2, gpus_per_node=8, gpu="H100")
    >>> cluster
    Cluster(2 nodes x 8 H100 = 16 ranks; NVLink 450 GB/s, 3.4 us; network 50 GB/s, 14 us)
    >>> cluster.node_of(11), cluster.local_rank(11)
    (1, 3)
    >>> cluster.tier(0, 7), cluster.tier(0, 8)
    (0, 1)
    >>> cluster.tiers[1].seconds(50e9)          # 14 us of latency, then 50 GB at 50 GB/s
    1.000014
"""

from __future__ import annotations

import math
import operator
import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from numbers import Real

import numpy as np

ETHERNET_10G = 10e9 / 8  # bytes/s: 1.25 GB/s
ETHERNET_100G = 100e9 / 8  # bytes/s: 12.5 GB/s
HDR = 200e9 / 8  # bytes/s: one HDR InfiniBand port, 25 GB/s
NDR = 400e9 / 8  # bytes/s: one NDR InfiniBand port, 50 GB/s

# Seconds for one hop of NCCL's ring with the Simple protocol, the one that moves data at the link's full
# rate: the rows NVLINK, PCI and NET of `hwLatencies` in NCCL 2.30's src/graph/tuning.cc. They are what a
# GPU-to-GPU message costs with its synchronisation, not the wire alone; LL and LL128 are quicker (nccl.py).
NVLINK_LATENCY = 3.4e-6
PCIE_LATENCY = 5.7e-6
NETWORK_LATENCY = 14.0e-6


def check_count(name: str, value, minimum: int = 1) -> int:
    """`value` as an int >= `minimum`, or a TypeError or ValueError that names `name` (True is no count)."""
    takes = f"an integer >= {minimum}"
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be {takes}, got {value!r} ({type(value).__name__})") from None
    if number < minimum:
        raise ValueError(f"{name} must be {takes}, got {number}")
    return number


def check_number(name: str, value, minimum: float = 0.0, positive: bool = False) -> float:
    """`value` as a finite float >= `minimum` (> 0 if `positive`), or an error that names `name`."""
    takes = "a finite number > 0" if positive else f"a finite number >= {minimum:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {takes}, got {value!r} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be {takes}, got an integer too large for a float") from None
    if not math.isfinite(number) or number < minimum or (positive and number <= 0):
        raise ValueError(f"{name} must be {takes}, got {value!r}")
    return number


def pcie_bandwidth(generation: int, lanes: int = 16) -> float:
    """Raw PCIe bandwidth, bytes/s one way: 8, 16, 32 GT/s a lane (generation 3, 4, 5), 128 data bits in 130.

    Source: PCI-SIG base specifications 3.0, 4.0 and 5.0. Packet headers take their share of this.

    >>> round(pcie_bandwidth(3) / 1e9, 2), round(pcie_bandwidth(4) / 1e9, 2)
    (15.75, 31.51)
    """
    rates = {3: 8e9, 4: 16e9, 5: 32e9}
    if generation not in rates:
        raise ValueError(f"generation must be one of {sorted(rates)}, got {generation!r}")
    return rates[generation] * check_count("lanes", lanes) * 128 / 130 / 8


@dataclass(frozen=True)
class GPU:
    """One accelerator, as its data sheet gives it.

    name: the name it is looked up by in `GPUS`.
    peak_flops: dense 16-bit matrix peak, FLOP/s (bf16, or fp16 where `dtype` says so), without sparsity.
    memory_bytes: the data sheet's label in decimal GB; tools show up to 7 % more (80 GiB on an "80GB" A100).
    memory_bandwidth: HBM or GDDR, bytes/s.
    link_bandwidth: NVLink, bytes/s one way, all links of the GPU together; None without NVLink.
    pcie_bandwidth: PCIe, bytes/s one way, raw.
    nic_bandwidth: the network port that the reference server gives each GPU, bytes/s one way; None where
        there is no such server (T4 and L4 are sold as plain cards).
    achieved_flops: the best measured on large matrix products, FLOP/s; None if we have no figure.
    """

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float | None
    pcie_bandwidth: float
    nic_bandwidth: float | None
    source: str
    dtype: str = "bf16"
    achieved_flops: float | None = None

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name must be a non-empty string, got {self.name!r}")
        for field in ("peak_flops", "memory_bytes", "memory_bandwidth", "pcie_bandwidth"):
            object.__setattr__(self, field, check_number(field, getattr(self, field), positive=True))
        for field in ("link_bandwidth", "nic_bandwidth", "achieved_flops"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, check_number(field, getattr(self, field), positive=True))
        if self.achieved_flops is not None and self.achieved_flops > self.peak_flops:
            raise ValueError(
                f"achieved_flops must be at most peak_flops ({self.peak_flops:g}), "
                f"got {self.achieved_flops:g}"
            )

    def __repr__(self) -> str:
        link = "no NVLink" if self.link_bandwidth is None else f"NVLink {self.link_bandwidth / 1e9:g} GB/s"
        return (
            f"GPU({self.name}: {self.peak_flops / 1e12:g} TFLOP/s {self.dtype}, "
            f"{self.memory_bytes / 1e9:g} GB at {self.memory_bandwidth / 1e12:g} TB/s, {link})"
        )

    @property
    def matmul_efficiency(self) -> float | None:
        """achieved_flops / peak_flops, for `Cluster(efficiency=...)`: A100 0.87, H100 0.80; or None."""
        return None if self.achieved_flops is None else self.achieved_flops / self.peak_flops


_MAMF = "; achieved: Bekman, Machine Learning Engineering Open Book, maximum achievable matmul FLOPS"

# fmt: off
GPUS: dict[str, GPU] = {gpu.name: gpu for gpu in (
    # FLOP/s, bytes, then bytes/s of: memory, NVLink one way, PCIe one way, network port one way
    GPU("V100", 125e12, 32e9, 0.9e12, 150e9, pcie_bandwidth(3), 100e9 / 8 / 2, dtype="fp16",
        source="NVIDIA V100 data sheet (SXM2 32GB; NVLink 300 GB/s both ways); "
               "NVIDIA DGX-1 data sheet (4 x 100 Gb/s for 8 GPUs)"),
    GPU("A100", 312e12, 80e9, 2.0e12, 300e9, pcie_bandwidth(4), HDR, achieved_flops=271e12,
        source="NVIDIA A100 80GB data sheet (SXM; NVLink 600 GB/s both ways; 2,039 GB/s, rounded); "
               "NVIDIA DGX A100 data sheet (8 x 200 Gb/s)" + _MAMF),
    GPU("H100", 989e12, 80e9, 3.35e12, 450e9, pcie_bandwidth(5), NDR, achieved_flops=795e12,
        source="NVIDIA H100 data sheet (SXM, 1,979 TFLOP/s with sparsity; NVLink 900 GB/s both ways); "
               "NVIDIA DGX H100 data sheet (8 x 400 Gb/s)" + _MAMF),
    GPU("H200", 989e12, 141e9, 4.8e12, 450e9, pcie_bandwidth(5), NDR,
        source="NVIDIA H200 data sheet (SXM, 1,979 TFLOP/s with sparsity; NVLink 900 GB/s both ways); "
               "NVIDIA DGX H200 data sheet (8 x 400 Gb/s)"),
    GPU("B200", 2250e12, 180e9, 8.0e12, 900e9, pcie_bandwidth(5), NDR, achieved_flops=1745e12,
        source="NVIDIA DGX B200 data sheet (8 GPUs: 1,440 GB, 64 TB/s, 36 PFLOP/s bf16 with sparsity, NVLink "
               "1.8 TB/s both ways a GPU, 8 x 400 Gb/s)" + _MAMF),
    GPU("T4", 65e12, 16e9, 0.32e12, None, pcie_bandwidth(3), None, dtype="fp16",
        source="NVIDIA T4 data sheet (65 TFLOP/s fp16, no bf16 tensor cores; PCIe 3.0 x16)"),
    GPU("L4", 121e12, 24e9, 0.30e12, None, pcie_bandwidth(4), None,
        source="NVIDIA L4 data sheet (242 TFLOP/s bf16 with sparsity; PCIe 4.0 x16, 64 GB/s both ways)"),
)}
# fmt: on


@dataclass(frozen=True)
class Tier:
    """One level of the network: a message of b bytes takes `latency + b / bandwidth` seconds on a free port.

    latency: alpha, seconds a message. bandwidth: beta, bytes/s one way, for each rank.

    >>> Tier("NVLink", latency=3e-6, bandwidth=450e9).seconds(900e9)
    2.000003
    """

    name: str
    latency: float
    bandwidth: float

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a string, got {self.name!r} ({type(self.name).__name__})")
        object.__setattr__(self, "latency", check_number("latency", self.latency))
        object.__setattr__(self, "bandwidth", check_number("bandwidth", self.bandwidth, positive=True))

    def seconds(self, nbytes: float) -> float:
        """Seconds for one message of `nbytes` bytes that nothing else delays."""
        return self.latency + nbytes / self.bandwidth

    def __str__(self) -> str:
        return f"{self.name} {self.bandwidth / 1e9:g} GB/s, {self.latency * 1e6:g} us"


def _tier(argument: str, given, default: Tier, latency, bandwidth) -> Tier:
    """The tier passed as `argument`, or its default, with the single figures passed beside it put in."""
    if given is not None and not isinstance(given, Tier):
        raise TypeError(f"{argument} must be a Tier or None, got {given!r} ({type(given).__name__})")
    tier = default if given is None else given
    if latency is None and bandwidth is None:
        return tier
    return Tier(
        tier.name,
        tier.latency if latency is None else check_number(f"{argument}_latency", latency),
        tier.bandwidth
        if bandwidth is None
        else check_number(f"{argument}_bandwidth", bandwidth, positive=True),
    )


@dataclass(frozen=True, init=False, repr=False)
class Cluster:
    """`nodes` servers of `gpus_per_node` equal GPUs; ranks fill node 0 first, then node 1, and so on.

    gpu: a name in `GPUS` or a `GPU`.
    intra, inter: the `Tier` within a node and between nodes. Give `intra_latency=`, `intra_bandwidth=`,
        `inter_latency=` or `inter_bandwidth=` (seconds, bytes/s) to change one figure of a tier.
        By default intra is the GPU's NVLink (3.4 us a message), or PCIe (5.7 us) if it has none, and inter is
        its network port (14 us), or 100 Gb/s Ethernet = 12.5 GB/s if its reference server has none. The
        bandwidths are the wire's, an upper bound: a measured 8 x A100 all-reduce reaches 232 of 300 GB/s. The
        latencies are NCCL's for a hop of its ring with the Simple protocol (see `NVLINK_LATENCY` above).
    efficiency: the fraction of `gpu.peak_flops` that `compute_seconds` takes as reached, in (0, 1]. With the
        default 1.0 its times are lower bounds; large matrix products reach `GPUS["A100"].matmul_efficiency`.

    Immutable, hashable and picklable; equal when all fields are equal.

    >>> Cluster(nodes=1, gpus_per_node=4, gpu="T4", intra_bandwidth=12e9)
    Cluster(1 node x 4 T4 = 4 ranks; PCIe 12 GB/s, 5.7 us)
    >>> Cluster(nodes=2, gpu="H1000")
    Traceback (most recent call last):
    ...
    ValueError: gpu must be a GPU or one of V100, A100, H100, H200, B200, T4, L4, got 'H1000'
    """

    nodes: int
    gpus_per_node: int
    gpu: GPU
    intra: Tier
    inter: Tier
    efficiency: float

    def __init__(
        self,
        nodes: int = 1,
        gpus_per_node: int = 8,
        gpu: str | GPU = "H100",
        intra: Tier | None = None,
        inter: Tier | None = None,
        efficiency: float = 1.0,
        *,
        intra_latency: float | None = None,
        intra_bandwidth: float | None = None,
        inter_latency: float | None = None,
        inter_bandwidth: float | None = None,
    ):
        if isinstance(gpu, str):
            if gpu not in GPUS:
                raise ValueError(f"gpu must be a GPU or one of {', '.join(GPUS)}, got {gpu!r}")
            gpu = GPUS[gpu]
        elif not isinstance(gpu, GPU):
            raise TypeError(
                f"gpu must be a GPU or one of {', '.join(GPUS)}, got {gpu!r} ({type(gpu).__name__})"
            )
        nvlink = gpu.link_bandwidth is not None
        within = (
            Tier("NVLink", NVLINK_LATENCY, gpu.link_bandwidth)
            if nvlink
            else Tier("PCIe", PCIE_LATENCY, gpu.pcie_bandwidth)
        )
        between = Tier("network", NETWORK_LATENCY, gpu.nic_bandwidth or ETHERNET_100G)
        efficiency = check_number("efficiency", efficiency, positive=True)
        if efficiency > 1:
            raise ValueError(f"efficiency must be a fraction in (0, 1], got {efficiency:g}")
        for field, value in (
            ("nodes", check_count("nodes", nodes)),
            ("gpus_per_node", check_count("gpus_per_node", gpus_per_node)),
            ("gpu", gpu),
            ("intra", _tier("intra", intra, within, intra_latency, intra_bandwidth)),
            ("inter", _tier("inter", inter, between, inter_latency, inter_bandwidth)),
            ("efficiency", efficiency),
        ):
            object.__setattr__(self, field, value)

    @classmethod
    def flat(
        cls,
        ranks: int,
        latency: float = 1e-6,
        bandwidth: float = 100e9,
        peak_flops: float = 100e12,
        memory_bandwidth: float = 1e12,
        memory_bytes: float = 80e9,
    ) -> Cluster:
        """The ideal network of `simulate(program, ranks=8)`: every pair of ranks one equal hop apart.

        Round figures of no real machine: 1 us and 100 GB/s a link, 100 TFLOP/s, 80 GB at 1 TB/s.

        >>> Cluster.flat(8)
        Cluster(8 ranks; flat 100 GB/s, 1 us)
        """
        ranks = check_count("ranks", ranks)
        link = Tier("flat", latency, bandwidth)
        ideal = GPU(
            "ideal",
            peak_flops,
            memory_bytes,
            memory_bandwidth,
            bandwidth,
            bandwidth,
            bandwidth,
            source="none: round figures for teaching",
        )
        return cls(1, ranks, ideal, intra=link, inter=link)

    @property
    def ranks(self) -> int:
        """nodes x gpus_per_node."""
        return self.nodes * self.gpus_per_node

    @property
    def tiers(self) -> tuple[Tier, Tier]:
        """(within a node, between nodes), indexed by `tier(src, dst)`."""
        return (self.intra, self.inter)

    def _rank(self, name: str, rank: int) -> int:
        if type(rank) is not int:  # the common case costs no call: the simulator asks often
            rank = check_count(name, rank, minimum=0)
        if not 0 <= rank < self.nodes * self.gpus_per_node:
            raise ValueError(f"{name} must be a rank from 0 to {self.ranks - 1}, got {rank}")
        return rank

    def node_of(self, rank: int) -> int:
        """The node that holds `rank`, counted from 0."""
        return self._rank("rank", rank) // self.gpus_per_node

    def local_rank(self, rank: int) -> int:
        """The place of `rank` among its node's GPUs, counted from 0."""
        return self._rank("rank", rank) % self.gpus_per_node

    def tier(self, src: int, dst: int) -> int:
        """0 if `src` and `dst` share a node, 1 if a message between them crosses the network."""
        node = self._rank("src", src) // self.gpus_per_node
        return int(self._rank("dst", dst) // self.gpus_per_node != node)

    def compute_seconds(self, flops: float = 0, bytes: float = 0) -> float:
        """Roofline seconds of one kernel on one GPU: the slower of its arithmetic and its memory traffic.

        max(flops / (efficiency x peak_flops), bytes / memory_bandwidth), with bytes read plus written.

        >>> Cluster(gpu="H100").compute_seconds(flops=989e12, bytes=3.35e12)
        1.0
        """
        flops = check_number("flops", flops)
        bytes = check_number("bytes", bytes)
        return max(flops / (self.efficiency * self.gpu.peak_flops), bytes / self.gpu.memory_bandwidth)

    def __repr__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        if self.intra == self.inter and self.nodes == 1:  # what Cluster.flat makes
            return f"Cluster({ranks}; {self.intra})"
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)} x {self.gpus_per_node} {self.gpu.name}"
        network = f"; {self.inter}" if self.nodes > 1 else ""
        return f"Cluster({nodes} = {ranks}; {self.intra}{network})"


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.lower().startswith(("model name", "hardware")):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _gpus() -> list[dict]:
    """The NVIDIA GPUs, asked of the driver's tool: asking torch for a name would start CUDA in this process,
    and `launch` could then no longer fork."""
    try:
        query = ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line for line in answer.splitlines() if line.count(",") == 2]
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and all(part.strip().lstrip("-").isdigit() for part in visible.split(",") if part):
        chosen = [part.strip() for part in visible.split(",") if part]
        rows = [row for row in rows if row[0] in chosen]
    return [
        {"name": name, "memory_bytes": int(mib) * 2**20 if mib.isdigit() else None} for _, name, mib in rows
    ]


def machine() -> dict:
    """What the code runs on, to be stored beside every measurement: a dict that `json.dumps` takes.

    Keys: os, cpu, cores (those this process may use), memory_bytes, gpus (name and memory_bytes of each that
    CUDA_VISIBLE_DEVICES leaves), python, numpy, torch (a version, or None if not installed). No host name,
    user name or path. torch is not imported and CUDA is not started.

    >>> sorted(machine())
    ['cores', 'cpu', 'gpus', 'memory_bytes', 'numpy', 'os', 'python', 'torch']
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "os": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": cores,
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "numpy": _installed("numpy"),
        "torch": _installed("torch"),
    }
