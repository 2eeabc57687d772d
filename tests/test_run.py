"""`Run`: what it counts, in which order, and how it says it."""

import doctest

import numpy as np
import pytest

from manyranks.runtime import run as run_module
from manyranks.runtime.hardware import Cluster
from manyranks.runtime.run import Interval, Message, Timeline, Traffic, human_bytes, human_seconds
from manyranks.runtime.simulator import simulate


def program(comm):
    comm.compute(seconds=0.5 * comm.rank, label="forward")
    total = comm.all_reduce(np.ones(6))
    if comm.rank == 0:
        comm.send(np.ones(2), 1)
    elif comm.rank == 1:
        comm.recv(0)
    return float(total[0])


@pytest.fixture(scope="module")
def run():
    return simulate(program, ranks=3)


def test_docstring_examples():
    result = doctest.testmod(run_module)
    assert result.attempted > 0 and result.failed == 0


def test_counts(run):
    assert run.ranks == 3 and run.results == [3.0] * 3
    assert len(run.traffic) == run.traffic.count == 13
    assert run.bytes_sent.tolist() == [80, 64, 64] and run.bytes_received.tolist() == [64, 80, 64]
    assert run.bytes_sent.dtype == np.int64
    assert run.traffic.bytes == 208 == run.traffic.matrix().sum()
    assert run.traffic.matrix().sum(axis=1).tolist() == run.bytes_sent.tolist()
    assert run.rounds == 5  # the send comes after the ring's four
    assert run.seconds == max(run.ends) > 1.0
    assert run.busy().tolist() == [0, 0.5, 1.0]
    assert run.busy("wait")[0] > 1.0


def test_messages_in_order_and_by_field(run):
    messages = list(run.traffic)
    assert all(isinstance(m, Message) for m in messages)
    assert [m.start for m in messages] == sorted(m.start for m in messages)
    assert run.traffic[-1] == messages[-1] == Message(0, 1, 16, messages[-1].start, messages[-1].end, 5)
    assert run.traffic[2:4] == messages[2:4]
    sends = run.traffic.where(call="send")
    assert len(sends) == 1 and sends.bytes == 16 and sends.ranks == 3
    assert run.traffic.where(source=0, destination=1).bytes == 80
    assert run.traffic.where(source=9).count == 0
    with pytest.raises(ValueError, match="a message has the fields source, destination, .*, got size"):
        run.traffic.where(size=3)


def test_timeline_in_order(run):
    intervals = list(run.timeline)
    assert all(isinstance(i, Interval) and i.end > i.start for i in intervals)
    assert [(i.rank, i.lane, i.start) for i in intervals] == sorted(
        (i.rank, i.lane, i.start) for i in intervals
    )
    for a, b in zip(intervals, intervals[1:]):  # a rank does one thing at a time
        assert a.rank != b.rank or a.lane != b.lane or a.end <= b.start
    assert repr(run.timeline) == f"Timeline({len(intervals)} intervals)"


def test_busy_takes_two_kinds(run):
    with pytest.raises(ValueError, match="kind must be 'compute' or 'wait', got 'comm'"):
        run.busy("comm")


def test_repr(run):
    assert repr(run).startswith("<Run: 3 ranks, simulated, 1") and repr(run).endswith(
        " s, 13 messages, 208 B>"
    )
    assert "\n" not in repr(run)
    assert repr(run.traffic) == "Traffic(13 messages, 208 bytes)"
    assert repr(simulate(lambda comm: None, ranks=1)) == "<Run: 1 rank, simulated, 0 ns, 0 messages, 0 B>"


def test_nothing_happened():
    run = simulate(lambda comm: comm.rank, cluster=Cluster(1, 2))
    assert run.seconds == 0 and run.rounds == 0 and run.traffic.bytes == 0 and len(run.timeline) == 0
    assert (
        run.bytes_sent.tolist() == [0, 0] and list(run.traffic) == [] and run.notes == [] and not run.nominal
    )
    assert run.cluster == Cluster(1, 2)


def test_made_by_hand():
    traffic = Traffic([(1, 0, 5, 2.0, 3.0, 1), (0, 1, 7, 1.0, 2.0, 1, "send", 0, 4)], ranks=2)
    with pytest.raises((IndexError, TypeError)):
        traffic[5]
    timeline = Timeline([(1, 0, "wait", "a", 0.0, 1.0), (0, 0, "wait", "b", 0.0, 1.0)])
    assert [i.rank for i in timeline] == [0, 1]


@pytest.mark.parametrize(
    "n, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (24.5e9, "24.5 GB"),
        (3e15, "3000 TB"),
        (999_950, "1 MB"),
        (-2000, "-2 kB"),
    ],
)
def test_human_bytes(n, text):
    assert human_bytes(n) == text


@pytest.mark.parametrize(
    "s, text",
    [
        (0, "0 ns"),
        (1e-9, "1 ns"),
        (1e-6, "1 µs"),
        (0.0025, "2.5 ms"),
        (1, "1 s"),
        (12345.6, "1.235e+04 s"),
        (0.9999999, "1 s"),
    ],
)
def test_human_seconds(s, text):
    assert human_seconds(s) == text
