"""The hardware table is held to its sources, and a Cluster refuses what it can't be."""

import dataclasses
import doctest
import getpass
import json
import pickle
import socket
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks.runtime import hardware
from manyranks.runtime.hardware import (
    ETHERNET_10G,
    ETHERNET_100G,
    GPU,
    GPUS,
    HDR,
    NDR,
    Cluster,
    Tier,
    machine,
)


def test_docstring_examples():
    result = doctest.testmod(hardware)
    assert result.attempted > 0 and result.failed == 0


# name, dense TFLOP/s, GB, TB/s, NVLink GB/s *both ways* as the data sheet prints it, NIC Gb/s a GPU
DATA_SHEETS = [
    ("V100", 125, 32, 0.9, 300, 50),
    ("A100", 312, 80, 2.0, 600, 200),
    ("H100", 989, 80, 3.35, 900, 400),
    ("H200", 989, 141, 4.8, 900, 400),
    ("B200", 2250, 180, 8.0, 1800, 400),
    ("T4", 65, 16, 0.32, None, None),
    ("L4", 121, 24, 0.30, None, None),
]


@pytest.mark.parametrize("name, tflops, gb, tbps, nvlink_both_ways, nic_gbit", DATA_SHEETS)
def test_table_holds_to_its_source(name, tflops, gb, tbps, nvlink_both_ways, nic_gbit):
    gpu = GPUS[name]
    assert gpu.name == name and "data sheet" in gpu.source
    assert gpu.peak_flops == pytest.approx(tflops * 1e12)
    assert gpu.memory_bytes == pytest.approx(gb * 1e9)
    assert gpu.memory_bandwidth == pytest.approx(tbps * 1e12)
    # the mix-up of AIInfraGuide#44 and ml-engineering#38: one way is half of what is printed
    one_way = None if nvlink_both_ways is None else pytest.approx(nvlink_both_ways / 2 * 1e9)
    assert gpu.link_bandwidth == one_way
    assert gpu.nic_bandwidth == (None if nic_gbit is None else pytest.approx(nic_gbit / 8 * 1e9))


def test_every_gpu_is_checked_against_a_data_sheet():
    assert {row[0] for row in DATA_SHEETS} == set(GPUS)


@pytest.mark.parametrize(
    "name, links, each",
    [("V100", 6, 25e9), ("A100", 12, 25e9), ("H100", 18, 25e9), ("H200", 18, 25e9), ("B200", 18, 50e9)],
)
def test_nvlink_is_its_links_times_the_rate_of_one(name, links, each):
    assert GPUS[name].link_bandwidth == pytest.approx(links * each)


def test_pcie_and_network_rates():
    assert GPUS["T4"].pcie_bandwidth == pytest.approx(15.754e9, rel=1e-4)
    assert GPUS["L4"].pcie_bandwidth == pytest.approx(31.508e9, rel=1e-4)
    assert GPUS["H100"].pcie_bandwidth == pytest.approx(63.015e9, rel=1e-4)
    assert (ETHERNET_10G, ETHERNET_100G, HDR, NDR) == (1.25e9, 12.5e9, 25e9, 50e9)
    with pytest.raises(ValueError, match="generation must be one of .*got 6"):
        hardware.pcie_bandwidth(6)


def test_dtype_and_achieved_flops():
    no_bf16_tensor_cores = {"V100", "T4"}
    assert {name for name, gpu in GPUS.items() if gpu.dtype == "fp16"} == no_bf16_tensor_cores
    assert GPUS["A100"].matmul_efficiency == pytest.approx(271 / 312)
    assert GPUS["H100"].matmul_efficiency == pytest.approx(795 / 989)
    assert GPUS["B200"].matmul_efficiency == pytest.approx(1745 / 2250)
    assert GPUS["T4"].matmul_efficiency is None


def test_the_design_example():
    cluster = Cluster(nodes=8, gpus_per_node=8, gpu="H100")
    assert cluster.ranks == 64 and cluster.gpu is GPUS["H100"]
    assert cluster.tiers == (cluster.intra, cluster.inter)
    assert cluster.intra == Tier("NVLink", 3.4e-6, 450e9) and cluster.inter == Tier("network", 14e-6, 50e9)


def test_without_nvlink_a_node_is_pcie_and_the_network_100_gigabit_ethernet():
    cluster = Cluster(nodes=2, gpus_per_node=4, gpu="T4")
    assert cluster.intra == Tier("PCIe", 5.7e-6, GPUS["T4"].pcie_bandwidth)
    assert cluster.inter.bandwidth == 12.5e9


def test_tiers_can_be_overridden_whole_or_figure_by_figure():
    tier = Tier("shared memory", 1e-6, 10e9)
    assert Cluster(2, 2, intra=tier).intra is tier
    cluster = Cluster(2, 2, intra=tier, intra_latency=2e-6, inter_bandwidth=ETHERNET_100G)
    assert cluster.intra == Tier("shared memory", 2e-6, 10e9)
    assert cluster.inter == Tier("network", 14e-6, 12.5e9)
    assert Cluster(inter_latency=0).inter.latency == 0


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 16), st.data())
def test_ranks_map_to_nodes_and_tiers(nodes, gpus_per_node, data):
    cluster = Cluster(nodes, gpus_per_node)
    src, dst = (data.draw(st.integers(0, cluster.ranks - 1)) for _ in range(2))
    assert cluster.node_of(src) * gpus_per_node + cluster.local_rank(src) == src
    assert 0 <= cluster.node_of(src) < nodes and 0 <= cluster.local_rank(src) < gpus_per_node
    assert cluster.tier(src, dst) == cluster.tier(dst, src) == (cluster.node_of(src) != cluster.node_of(dst))
    assert type(cluster.tier(src, dst)) is int


@pytest.mark.parametrize("method", ["node_of", "local_rank"])
def test_a_rank_outside_is_refused(method):
    cluster = Cluster(2, 4)
    for rank in (8, -1):
        with pytest.raises(ValueError, match=rf"rank must be .*got {rank}"):
            getattr(cluster, method)(rank)
    for rank in (1.0, True, "1", None):
        with pytest.raises(TypeError, match="rank must be an integer"):
            getattr(cluster, method)(rank)
    with pytest.raises(ValueError, match="dst must be a rank from 0 to 7, got 8"):
        cluster.tier(0, 8)
    assert getattr(cluster, method)(np.int64(3)) == getattr(cluster, method)(3)


def test_compute_seconds_is_a_roofline():
    cluster = Cluster(gpu="A100")
    assert cluster.compute_seconds() == 0
    assert cluster.compute_seconds(flops=312e12) == pytest.approx(1)
    assert cluster.compute_seconds(bytes=2e12) == pytest.approx(1)
    assert cluster.compute_seconds(flops=312e12, bytes=4e12) == pytest.approx(2)  # the slower, not the sum
    assert Cluster(gpu="A100", efficiency=0.5).compute_seconds(flops=312e12, bytes=2e12) == pytest.approx(2)
    ridge = GPUS["A100"].peak_flops / GPUS["A100"].memory_bandwidth  # FLOP a byte
    assert ridge == pytest.approx(156)
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="flops must be a finite number >= 0"):
            cluster.compute_seconds(flops=bad)
        with pytest.raises(ValueError, match="bytes must be a finite number >= 0"):
            cluster.compute_seconds(bytes=bad)
    with pytest.raises(TypeError, match="flops must be .*'1e9'"):
        cluster.compute_seconds(flops="1e9")


def test_flat():
    cluster = Cluster.flat(6, latency=2e-6, bandwidth=50e9, peak_flops=1e12, memory_bandwidth=1e11)
    assert cluster.ranks == 6 and all(cluster.tier(i, j) == 0 for i in range(6) for j in range(6))
    assert cluster.tiers[0].seconds(50e9) == pytest.approx(1 + 2e-6)
    assert cluster.compute_seconds(flops=1e12) == 1 and cluster.compute_seconds(bytes=1e11) == 1
    assert repr(Cluster.flat(1)) == "Cluster(1 rank; flat 100 GB/s, 1 us)"
    with pytest.raises(ValueError, match="ranks must be an integer >= 1, got 0"):
        Cluster.flat(0)
    with pytest.raises(ValueError, match="bandwidth must be a finite number > 0, got 0"):
        Cluster.flat(2, bandwidth=0)


@pytest.mark.parametrize("make", [lambda: Cluster(2, 4, "A100", efficiency=0.8), lambda: Cluster.flat(16384)])
def test_a_cluster_is_a_value(make):
    cluster = make()
    assert cluster == make() and hash(cluster) == hash(make())
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert "\n" not in repr(cluster) and len(repr(cluster)) < 110
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster.nodes = 3
    assert dataclasses.replace(cluster, nodes=3).nodes == 3
    assert cluster != dataclasses.replace(cluster, nodes=3)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"nodes": 0}, ValueError, "nodes must be an integer >= 1, got 0"),
        ({"nodes": -2}, ValueError, "nodes must be an integer >= 1, got -2"),
        ({"nodes": 2.0}, TypeError, r"nodes must be an integer >= 1, got 2.0 \(float\)"),
        ({"nodes": True}, TypeError, r"nodes must be an integer >= 1, got True \(bool\)"),
        ({"gpus_per_node": "8"}, TypeError, r"gpus_per_node must be an integer >= 1, got '8' \(str\)"),
        ({"gpus_per_node": np.float64(8)}, TypeError, "gpus_per_node must be an integer"),
        ({"gpus_per_node": np.bool_(True)}, TypeError, "gpus_per_node must be an integer"),
        ({"gpu": "H1000"}, ValueError, "gpu must be a GPU or one of V100, A100, H100, .*got 'H1000'"),
        ({"gpu": 100}, TypeError, "gpu must be a GPU or one of V100, .*got 100"),
        ({"gpu": None}, TypeError, "gpu must be a GPU or one of"),
        ({"intra": 300e9}, TypeError, "intra must be a Tier or None, got 3"),
        ({"inter": (1e-6, 25e9)}, TypeError, "inter must be a Tier or None"),
        ({"intra_bandwidth": 0}, ValueError, "intra_bandwidth must be a finite number > 0, got 0"),
        ({"inter_bandwidth": -1e9}, ValueError, "inter_bandwidth must be a finite number > 0"),
        ({"inter_bandwidth": True}, TypeError, "inter_bandwidth must be a finite number > 0, got True"),
        ({"intra_latency": float("nan")}, ValueError, "intra_latency must be a finite number >= 0, got nan"),
        ({"inter_latency": float("inf")}, ValueError, "inter_latency must be a finite number >= 0, got inf"),
        ({"inter_latency": 10**400}, ValueError, "inter_latency must be .* too large"),
        ({"inter_latency": "14us"}, TypeError, "inter_latency must be a finite number >= 0, got '14us'"),
        ({"efficiency": 0}, ValueError, "efficiency must be"),
        ({"efficiency": 1.2}, ValueError, r"efficiency must be a fraction in \(0, 1\], got 1.2"),
    ],
)
def test_bad_clusters_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Cluster(**arguments)


def test_numbers_of_other_kinds_are_taken_as_they_are():
    cluster = Cluster(
        np.int32(2), np.uint8(4), intra_bandwidth=np.float32(1e9), inter_latency=Fraction(1, 10**6)
    )
    assert cluster == Cluster(2, 4, intra_bandwidth=1e9, inter_latency=1e-6)
    assert type(cluster.nodes) is int and type(cluster.intra.bandwidth) is float


def test_bad_gpus_and_tiers_are_refused():
    good = dict(
        name="X",
        peak_flops=1e12,
        memory_bytes=1e9,
        memory_bandwidth=1e11,
        link_bandwidth=None,
        pcie_bandwidth=1e10,
        nic_bandwidth=None,
        source="test",
    )
    assert Cluster(gpu=GPU(**good)).intra.name == "PCIe"
    for field in ("peak_flops", "memory_bytes", "memory_bandwidth", "pcie_bandwidth", "link_bandwidth"):
        with pytest.raises(ValueError, match=f"{field} must be a finite number > 0"):
            GPU(**good | {field: 0})
    with pytest.raises(ValueError, match="achieved_flops must be at most peak_flops"):
        GPU(**good, achieved_flops=2e12)
    with pytest.raises(TypeError, match="name must be"):
        GPU(**good | {"name": ""})
    with pytest.raises(TypeError, match="name must be"):
        Tier(3e-6, 1e-6, 1e9)


def test_machine_is_plain_data_without_names():
    described = machine()
    text = json.dumps(described)
    assert described["cores"] >= 1 and described["numpy"] == np.__version__
    assert described["python"] == ".".join(map(str, sys.version_info[:3]))
    for secret in (socket.gethostname(), getpass.getuser()):
        assert secret not in described.values() and (len(secret) < 5 or secret not in text)
    assert "/home" not in text and "/root" not in text


def test_neither_the_import_nor_machine_imports_torch():
    code = (
        "import sys, manyranks.runtime.hardware as h; before = 'torch' in sys.modules; h.machine(); "
        "print(before, 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split()[1] == answer.stdout.split()[0]


def test_machine_names_the_gpus_that_are_visible(monkeypatch):
    class Answer:
        stdout = "0, NVIDIA H100 80GB HBM3, 81559\n1, NVIDIA H100 80GB HBM3, 81559\n"

    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: Answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine()["gpus"] == [{"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 81559 * 2**20}] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert len(machine()["gpus"]) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine()["gpus"] == []

    def absent(*arguments, **options):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", absent)
    assert machine()["gpus"] == []
