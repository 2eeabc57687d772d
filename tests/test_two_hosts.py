"""Two network namespaces as two hosts: predictions by hand, and the real thing where namespaces can be made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manyranks.bench import two_hosts
from manyranks.results import recorded
from tools import clusters_page

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def real():
    """Skip where two hosts can't be made, with the reason."""
    why = two_hosts.obstacle()
    if why:
        pytest.skip(f"two hosts: {why}")


# ------------------------------------------------------------------------------------------------ by hand


def test_predictions_by_hand():
    # 100 Mb/s are 12.5 MB/s of frames; 1,448 of 1,514 bytes are payload.
    assert two_hosts.goodput(100) == pytest.approx(12.5e6 * 1448 / 1514)
    # Two ranks: each sends S/2 twice. 4 MB at 12.5 MB/s, and two latencies.
    seconds = two_hosts.predicted_all_reduce(4e6, 2, 100, alpha=1e-3)
    assert seconds == pytest.approx(4e6 / (12.5e6 * 1448 / 1514) + 2e-3)
    # Four ranks of a ring: three quarters twice, over either direction of the one cable.
    assert two_hosts.predicted_all_reduce(4e6, 4, 100, alpha=0) == pytest.approx(1.5 * (seconds - 2e-3))
    # The wall: the rate at which the gradient's all-reduce takes what computing takes.
    wall = two_hosts.predicted_wall(gradient=1e6, compute=0.2)
    assert two_hosts.predicted_all_reduce(1e6, 2, wall, alpha=0) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="megabits"):
        two_hosts.goodput(0)


def test_crossing():
    assert two_hosts.crossing([200, 100, 50], [0.5, 1.0, 2.0]) == pytest.approx(100)
    assert two_hosts.crossing([10, 20], [3.0, 2.0]) is None
    assert two_hosts.crossing([10, 20], [0.9, 0.5]) is None


def test_the_bucket_grows_with_the_rate():
    assert two_hosts.tbf(50)[:5] == ["tbf", "rate", "50mbit", "burst", "32000b"]
    assert two_hosts.tbf(1000)[4] == "125000b"  # 1 ms


def test_a_missing_tool_is_the_reason(monkeypatch):
    monkeypatch.setattr(two_hosts.sys, "platform", "darwin")
    assert "darwin" in two_hosts.obstacle()
    monkeypatch.setattr(two_hosts.sys, "platform", "linux")
    monkeypatch.setattr(two_hosts.shutil, "which", lambda tool: None if tool == "tc" else "/sbin/ip")
    assert two_hosts.obstacle() == "tc not found; on Debian and Ubuntu: apt-get install iproute2"
    monkeypatch.setattr(two_hosts.shutil, "which", lambda tool: "/sbin/" + tool)
    monkeypatch.setattr(two_hosts.os, "geteuid", lambda: 1000)
    assert "sudo" in two_hosts.obstacle()


@pytest.mark.parametrize(
    "wrong", [["--rates", "0"], ["--rates", "-5", "10"], ["--batch", "0"], ["--sizes", "x"]]
)
def test_wrong_options(wrong):
    with pytest.raises(SystemExit) as error:
        two_hosts.main(wrong)
    assert error.value.code == 2


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_shows_the_recorded_figures():
    assert clusters_page.main(["--check"]) == 0, "run `python tools/clusters_page.py`"
    (entry,) = recorded("two_hosts")
    text = clusters_page.PAGE.read_text(encoding="utf-8")
    for table in two_hosts.tables(entry).values():
        assert table in text
    # What the page says of them in words.
    seen = two_hosts.compared(entry)
    ring, hierarchical = seen["two_a_host"]
    assert hierarchical["seconds"] < ring["seconds"] and hierarchical["predicted"] < ring["predicted"]
    assert seen["wall"][0]["all_reduce"] > entry["compute"] > seen["wall"][-1]["all_reduce"]


def test_a_stale_page_is_seen(tmp_path, monkeypatch, capsys):
    copy = tmp_path / "clusters.md"
    copy.write_text(
        clusters_page.PAGE.read_text(encoding="utf-8").replace("Mb/s |", "Gb/s |"), encoding="utf-8"
    )
    monkeypatch.setattr(clusters_page, "PAGE", copy)
    assert clusters_page.main(["--check"]) == 1
    assert "clusters_page" in capsys.readouterr().err
    assert clusters_page.main([]) == 0 and clusters_page.main(["--check"]) == 0


# ------------------------------------------------------------------------------------------------ the real thing


@pytest.mark.slow
def test_predictions_hold_on_a_real_link(real):
    """All-reduce at three rates beside the model, ring and hierarchical, and the comms wall."""
    plan = {"rates": [40, 80, 160], "sizes": [2**20], "repeats": 2, "batch": 512, "wall": [0.25, 4.0]}
    found = two_hosts.measure(plan, timeout=150)
    print(two_hosts.told(found))
    seen = two_hosts.compared(found)
    assert [row["rate"] for row in seen["all_reduce"]] == plan["rates"]
    for row in seen["all_reduce"]:
        assert 0.9 < row["seconds"] / row["predicted"] < 1.6, row
    slow, middle, fast = (row["seconds"] for row in seen["all_reduce"])
    assert 1.5 < slow / middle < 2.7 and 2.7 < slow / fast < 5.5, "time grows as 1 / rate"

    ring, hierarchical = seen["two_a_host"]
    assert 0.9 < ring["seconds"] / ring["predicted"] < 1.8, ring
    assert 0.9 < hierarchical["seconds"] / hierarchical["predicted"] < 2.2, hierarchical

    below, above = seen["wall"]
    assert below["all_reduce"] > found["compute"], "below the predicted wall the network takes longer"
    assert above["all_reduce"] < found["compute"], "above it computing does"
    assert below["rate"] < seen["measured_wall"] < above["rate"]
    assert seen["predicted_wall"] == pytest.approx(seen["measured_wall"], rel=0.6)
    assert below["step"] > 0.9 * (found["compute"] + below["all_reduce"]), "no overlap: the step is the sum"
    assert two_hosts._namespaces() == [] or all(f"-{os.getpid()}-" not in n for n in two_hosts._namespaces())


@pytest.mark.slow
def test_a_failing_command_ends_both_hosts(real, tmp_path):
    program = tmp_path / "fails.py"
    program.write_text(
        "import os, sys, time\nif os.environ['GROUP_RANK'] == '1':\n    sys.exit(3)\ntime.sleep(600)\n"
    )
    with two_hosts.TwoHosts(100) as hosts:
        names = hosts.names
        for host in (0, 1):
            hosts.torchrun(host, 1, str(program), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert hosts.wait(90) != 0
        processes = list(hosts.processes)
    assert not set(names) & set(two_hosts._namespaces())
    assert all(process.poll() is not None for process in processes)


@pytest.mark.slow
def test_ctrl_c_removes_the_namespaces(real):
    process = subprocess.Popen(
        [sys.executable, "-m", "manyranks.bench.two_hosts"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        mine = {f"manyranks-{process.pid}-a", f"manyranks-{process.pid}-b"}
        end = time.monotonic() + 60
        while not mine <= set(two_hosts._namespaces()):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130 and b"interrupted" in output, output
        assert not mine & set(two_hosts._namespaces())
    finally:
        process.kill()


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed(real):
    code = "import os, signal\nfrom manyranks.bench.two_hosts import TwoHosts\n"
    code += "TwoHosts(50).__enter__()\nos.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    assert done.wait(60) == -signal.SIGKILL
    left = [name for name in two_hosts._namespaces() if f"-{done.pid}-" in name]
    assert len(left) == 2
    with two_hosts.TwoHosts():
        assert not set(left) & set(two_hosts._namespaces())
