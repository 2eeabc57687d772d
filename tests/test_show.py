"""Pictures of runs: `timeline`, `chunk_grid`, `before_after`, `data_grid`, `lines`."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from manyranks import Cluster, explore, simulate
from manyranks.runtime.run import Interval, Message, Record, Run, Timeline, Traffic
from manyranks.show import (
    Picture,
    before_after,
    chunk_grid,
    contributions,
    data_grid,
    lines,
    loglog,
    timeline,
)

SVG = "{http://www.w3.org/2000/svg}"


def run_of(intervals=(), messages=(), ranks=2, seconds=1.0, records=(), **more):
    more = {"cluster": {}, "world": "simulated", **more}
    return Run(
        [None] * ranks,
        seconds,
        Traffic(messages, ranks),
        Timeline(intervals),
        ends=[seconds] * ranks,
        records=list(records),
        **more,
    )


def paths(picture, cls):
    root = ET.fromstring(picture.svg)
    return "".join(p.get("d") for p in root.iter(f"{SVG}path") if p.get("class") == cls)


def boxes(picture, cls):
    """(x, y, width, height) of every rectangle of one class."""
    found = re.findall(r"M([-\d.]+) ([-\d.]+)h([-\d.]+)v([-\d.]+)h[-\d.]+z", paths(picture, cls))
    return [tuple(map(float, box)) for box in found]


def words(picture):
    return [t.text for t in ET.fromstring(picture.svg).iter(f"{SVG}text")]


def ring(comm, x):
    """Ring all-reduce that records its buffer at the start and after each of its 2(n - 1) steps."""
    x, n, r = x.copy(), comm.size, comm.rank
    chunks = np.array_split(x, n)
    comm.record("chunks", x)
    for k in range(2 * (n - 1)):
        gathering = k >= n - 1
        sent, taken = (r - k + 2 * n * gathering) % n, (r - k - 1) % n
        work = comm.isend(chunks[sent], (r + 1) % n)
        got = comm.recv((r - 1) % n)
        chunks[taken][:] = got if gathering else chunks[taken] + got
        work.wait()
        comm.record("chunks", x)
    return x


def ring_run(n, length=None):
    return simulate(ring, inputs=contributions(n, length or 2 * n), record=True)


def pipeline(comm, m=4):
    last, x = comm.size - 1, np.zeros(1000)
    for i in range(m):
        if comm.rank > 0:
            comm.recv(comm.rank - 1)
        comm.compute(seconds=1e-3, label=f"F {i}")
        if comm.rank < last:
            comm.isend(x, comm.rank + 1)
    for i in range(m):
        if comm.rank < last:
            comm.recv(comm.rank + 1)
        comm.compute(seconds=2e-3, label=f"B {i}")
        if comm.rank > 0:
            comm.isend(x, comm.rank - 1)


def naive(comm, x):
    return comm.all_reduce(x, algorithm="naive")


PICTURES = {
    "timeline": lambda: timeline(simulate(pipeline, ranks=4)),
    "ports": lambda: timeline(simulate(naive, inputs=contributions(8, 1000)), ports=True),
    "arrows": lambda: timeline(ring_run(4)),
    "two tiers": lambda: timeline(
        simulate(lambda c: c.barrier(), cluster=Cluster(nodes=2, gpus_per_node=2, gpu="H100")), messages=True
    ),
    "64 ranks": lambda: timeline(simulate(lambda c: c.all_reduce(np.zeros(640)), ranks=64), ranks=range(64)),
    "grid 4": lambda: chunk_grid(ring_run(4), 2, title="After 2 steps"),
    "grid 8": lambda: chunk_grid(ring_run(8), 9),
    "grid 16": lambda: chunk_grid(ring_run(16), 20),
    "grid 1": lambda: chunk_grid(ring_run(1)),
    "before_after": lambda: before_after(
        [[1, 2], [3, 4], None], [[4, 6], [4, 6], [np.ones(2), np.ones(3)]], "<sum>"
    ),
    "data_grid": lambda: data_grid([np.arange(6).reshape(2, 3), None, 7]),
    "lines": lambda: lines({"a": ([1, 2], [3, 4]), "b": ([1, 2], [3, 4.01])}, "x", "y", "Two & two"),
    "loglog": lambda: loglog(
        {"a": ([1e3, 1e9], [1e-6, 1e-2])}, "size", "time", xunit="bytes", yunit="seconds"
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_small_svg_with_words_and_the_same_to_the_byte(name):
    first, again = PICTURES[name](), PICTURES[name]()
    assert isinstance(first, Picture) and first.svg == again.svg and repr(first) == repr(again)
    root = ET.fromstring(first.svg)
    assert root.get("role") == "img" and root.get("aria-label") == first.alt and len(first.alt) > 10
    assert len(first.svg.encode()) < 11_000, len(first.svg)
    assert "currentColor" in first.svg and "nan" not in first.svg and words(first)
    sizes = [float(s) for s in re.findall(r'font-size[=:]"?([\d.]+)px', first.svg)]
    assert min(sizes, default=12) >= 9
    if name not in ("lines", "loglog"):
        assert " id=" not in first.svg  # copies of a picture on one page can't disturb each other


@pytest.mark.parametrize(
    "name", ["timeline", "ports", "arrows", "grid 4", "grid 8", "grid 16", "before_after"]
)
def test_nothing_is_drawn_outside_the_picture(name):
    picture = PICTURES[name]()
    root = ET.fromstring(picture.svg)
    width, height = float(root.get("width")), float(root.get("height"))
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x")) <= width and 0 <= float(text.get("y")) <= height
    for path in root.iter(f"{SVG}path"):
        for x, y in re.findall(r"M([-\d.]+) ([-\d.]+)", path.get("d")):
            assert -1 <= float(x) <= width + 1 and -1 <= float(y) <= height + 1


# --- timeline -----------------------------------------------------------------------------------------------


def test_timeline_draws_one_bar_for_each_interval_in_proportion_to_time():
    run = simulate(pipeline, ranks=4)
    picture = timeline(run)
    computing = [i for i in run.timeline if i.kind == "compute"]
    assert len(boxes(picture, "mr-compute")) == len(computing) == 32
    assert len(boxes(picture, "mr-wait")) == len([i for i in run.timeline if i.kind == "wait"])
    drawn = sorted((y, x, w) for x, y, w, h in boxes(picture, "mr-compute"))
    told = sorted((i.rank, i.start, i.end) for i in computing)
    (_, x0, _), (_, t0, _) = drawn[0], told[0]
    (_, x1, _), (_, t1, _) = drawn[7], told[7]
    scale = (x1 - x0) / (t1 - t0)
    for (_, x, w), (_, start, end) in zip(drawn, told):
        assert x == pytest.approx(x0 + (start - t0) * scale, abs=0.2)
        assert w == pytest.approx((end - start) * scale, abs=1.1)  # less the gap between neighbours
    assert len({y for y, _, _ in drawn}) == 4  # a row a rank
    assert "27 %" in words(picture) or "idle" in words(picture)
    assert {"F", "B", "waiting", "message", "time in ms, simulated"} <= set(words(picture))


def test_timeline_tells_kinds_apart_without_colour():
    run = run_of([(0, 0, "compute", "forward", 0, 0.5), (0, 0, "compute", "backward", 0.5, 1)], ranks=1)
    svg = timeline(run).svg
    assert svg.count('stroke-dasharray="1.2 2.8"') == 2  # the second kind has a texture: bar and legend
    assert {"forward", "backward"} <= set(words(timeline(run)))


def test_timeline_idle_share_is_the_runs():
    run = run_of(
        [(0, 0, "compute", "c", 0, 1), (1, 0, "compute", "c", 0, 0.25), (1, 0, "wait", "recv", 0.25, 1)]
    )
    assert [w for w in words(timeline(run)) if w.endswith("%")] == ["0 %", "75 %"]
    assert "idle" not in words(timeline(run, idle=False))


def test_timeline_ports_show_the_hotspot():
    run = simulate(naive, inputs=contributions(8, 100_000))
    picture = timeline(run, ports=True)
    into = boxes(picture, "mr-in")
    longest = max(into, key=lambda b: b[2])
    assert longest[1] == min(y for _, y, _, _ in into)  # rank 0's
    assert longest[2] > 6 * max(w for _, _, w, _ in into if w != longest[2])
    assert "rank 0's port receives 49 % of the time, the others' 7 %" in picture.alt
    assert not boxes(picture, "mr-wait")  # the run computes nothing: only the ports are drawn
    assert boxes(timeline(run, ports=True, messages=True), "mr-wait")


def test_timeline_port_shares_are_the_runs_whatever_is_drawn():
    run = simulate(lambda c: c.all_reduce(np.zeros(640)), ranks=32)
    share = run.bytes_sent[0] / run.cluster.intra.bandwidth / run.seconds
    picture = timeline(run, ports=True, until=run.seconds / 2)
    assert f"each port sends {100 * share:.1f} % of the time" in picture.alt and 0 < share < 0.01
    assert any("drawn to the pixel" in w for w in words(picture))


def test_timeline_arrows_go_from_sender_to_receiver():
    run = run_of([], [Message(0, 1, 10, 0.0, 0.5, 1), Message(1, 0, 10, 0.5, 1.0, 2, "send", 1)])
    picture = timeline(run)
    starts = [float(x) for x in re.findall(r"M([\d.]+)", paths(picture, "mr-message"))]
    assert len(starts) == 2 and starts[0] < starts[1]
    assert {"message", "message between nodes"} <= set(words(picture))
    assert not paths(timeline(run, messages=False), "mr-message")


def test_timeline_of_asynchronous_collectives_has_a_lane_for_them():
    def program(comm):
        work = comm.all_reduce(np.zeros(100_000), async_op=True)
        comm.compute(seconds=1e-3)
        work.wait()

    picture = timeline(simulate(program, ranks=2))
    (x, y, _, h), *_ = boxes(picture, "mr-compute")
    assert len(boxes(picture, "mr-comm")) == 2 and boxes(picture, "mr-comm")[0][1] >= y + h
    assert "collective under way" in words(picture)


def test_timeline_joins_what_is_too_thin_and_says_so():
    many = [(0, 0, "compute", "c", i / 5000, (i + 1) / 5000) for i in range(5000)]
    picture = timeline(run_of(many, ranks=1))
    assert len(boxes(picture, "mr-compute")) < 10 and any("joined" in w for w in words(picture))
    mixed = [(0, 0, "compute" if i % 2 else "wait", "c", i / 9000, (i + 1) / 9000) for i in range(9000)]
    picture = timeline(run_of(mixed, ranks=1))
    assert len(picture.svg) < 11_000 and any("drawn to the pixel" in w for w in words(picture))


def test_timeline_of_many_ranks_draws_some_and_says_so():
    run = simulate(lambda c: c.all_reduce(np.zeros(640)), ranks=64)
    picture = timeline(run)
    assert any("16 of 64 ranks drawn" in w for w in words(picture))
    assert [w for w in words(timeline(run, ranks=[5, 3])) if w.startswith("rank ")] == ["rank 5", "rank 3"]


def test_timeline_axis_can_be_shared_and_cut():
    run = run_of([(0, 0, "compute", "c", 0, 1)], ranks=1)
    ((x, _, w, _),) = boxes(timeline(run, until=2.0), "mr-compute")
    ((_, _, whole, _),) = boxes(timeline(run), "mr-compute")
    assert w == pytest.approx(whole / 2, abs=1)
    ((cut_x, _, cut, _),) = boxes(timeline(run, since=0.5), "mr-compute")
    assert (cut_x, cut) == (x, whole)


def test_timeline_of_a_real_run_says_measured():
    run = run_of(
        [(r, 0, "wait", "all_reduce", 0.1, 0.4) for r in range(2)],
        [(0, 1, 800, 0.1, 0.4, 1, "all_reduce", 0, 2)],
        world="2 processes, gloo on CPU",
        cluster={"machine": "laptop"},
        nominal=True,
    )
    picture = timeline(run)
    assert "measured on 2 processes, gloo on CPU" in picture.alt and "time in s, measured" in words(picture)
    assert any("nominal" in w for w in words(picture))
    assert len(boxes(timeline(run, ports=True), "mr-out")) == 1


@pytest.mark.parametrize("ranks", [1, 3, 40])
def test_timeline_of_a_run_in_which_nothing_happens(ranks):
    picture = timeline(simulate(lambda comm: None, ranks=ranks))
    assert "0 messages" in picture.alt and ET.fromstring(picture.svg) is not None
    assert timeline(simulate(lambda comm: None, ranks=ranks), ports=True).svg


def test_run_show_draws_the_timeline():
    run = simulate(pipeline, ranks=2)
    assert run.show(ports=True).svg == timeline(run, ports=True).svg


@pytest.mark.parametrize(
    "kind, arguments, message",
    [
        (TypeError, {"run": 3}, "run must be a Run"),
        (TypeError, {"ranks": 3}, "ranks must be"),
        (TypeError, {"ranks": [0.5]}, "ranks must hold whole numbers"),
        (ValueError, {"ranks": [2]}, "ranks must be between 0 and 1"),
        (ValueError, {"ranks": [0, 0]}, "ranks must name"),
        (ValueError, {"ranks": []}, "ranks must name"),
        (TypeError, {"until": "1"}, "until must be a number"),
        (ValueError, {"until": -1.0}, "until must be"),
        (ValueError, {"until": float("nan")}, "until must be"),
        (ValueError, {"since": 0.5, "until": 0.5}, "until must be after"),
        (TypeError, {"title": 3}, "title must be"),
        (TypeError, {"alt": ""}, "alt must be"),
        (TypeError, {"ports": 3}, "ports must be"),
        (TypeError, {"messages": "all"}, "messages must be"),
        (ValueError, {"width": 10}, "width must be"),
    ],
)
def test_timeline_refuses(kind, arguments, message):
    with pytest.raises(kind, match=message):
        timeline(**{"run": run_of(), **arguments})


# --- chunk_grid ---------------------------------------------------------------------------------------------


def test_contributions_tell_who_is_in_a_sum():
    assert [int(x[0]) for x in contributions(3, 2)] == [1, 2, 4]
    for bad in (0, 63):
        with pytest.raises(ValueError, match="ranks must be"):
            contributions(bad, 4)
    with pytest.raises(TypeError, match="length must be"):
        contributions(2, 1.5)


def test_chunk_grid_follows_the_ring():
    run = ring_run(4)
    assert all((r == 15).all() for r in run.results)
    start = chunk_grid(run, 0)
    cells = [w for w in words(start) if re.fullmatch(r"[\d+]+", w)]
    assert cells == [str(r) for r in range(4) for _ in range(4)]
    assert not boxes(start, "mr-done") and len(boxes(start, "mr-sends")) == 4
    assert start.alt.endswith(
        "Next: rank 0 sends chunk 0 to rank 1, rank 1 sends chunk 1 to rank 2, "
        "rank 2 sends chunk 2 to rank 3, rank 3 sends chunk 3 to rank 0."
    )
    reduced = chunk_grid(run, 3)
    assert len(boxes(reduced, "mr-done")) == 4 and "each rank holds 1 complete chunk" in reduced.alt
    end = chunk_grid(run)
    assert len(boxes(end, "mr-done")) == 16 and not boxes(end, "mr-sends") and not boxes(end, "mr-open")
    assert paths(end, "mr-tick").count("M") == 16  # complete is said by a tick, not by colour alone
    assert end.svg == chunk_grid(run, 6).svg


def test_chunk_grid_can_mark_what_was_just_sent_or_nothing():
    run = ring_run(4)
    assert len(boxes(chunk_grid(run, 6, sends="last"), "mr-sends")) == 4
    assert not boxes(chunk_grid(run, 0, sends="last"), "mr-sends")
    assert not boxes(chunk_grid(run, 0, sends=None), "mr-sends")


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_chunk_grid_finds_the_sends_of_every_step(n):
    run = ring_run(n, 2 * n + 1)
    for step in range(2 * (n - 1)):
        assert len(boxes(chunk_grid(run, step), "mr-sends")) == n
    cells = {tuple(b[:2]) for step in range(3) for b in boxes(chunk_grid(run, step), "mr-open")}
    assert len(cells) == n * n  # cells stay where they are from frame to frame


def test_chunk_grid_finds_sends_when_rounds_and_steps_are_not_in_line():
    def late(comm, x):
        comm.barrier()
        return ring(comm, x)

    run = simulate(late, inputs=contributions(4, 8), record=True)
    assert len(boxes(chunk_grid(run, 2), "mr-sends")) == 4


def test_chunk_grid_of_many_ranks_fills_cells():
    picture = chunk_grid(ring_run(20), 19)
    assert (
        paths(picture, "mr-done").count("M") == 15
    )  # 20 complete chunks, of which 15 are in the first 16 x 16
    assert any("16 of 20 ranks" in w for w in words(picture))


def test_chunk_grid_shows_a_wrong_program_as_it_is():
    records = [Record(0, 0.0, "chunks", np.array([1, 3])), Record(1, 0.0, "chunks", np.array([4, -1]))]
    assert words(chunk_grid(run_of(records=records)))[2:6] == [
        "0",
        "?",
        "?",
        "0+1",
    ]  # 4 and -1 are no sums of 1 and 2
    mixed = [Record(r, 0.0, "chunks", np.array([1, 2, 0, 0])) for r in range(2)]
    assert {"mixed", "–"} <= set(words(chunk_grid(run_of(records=mixed))))
    lists = [Record(r, 0.0, "chunks", [None, np.full(2, 3.0)]) for r in range(2)]
    assert "each rank holds 1 complete chunk" in chunk_grid(run_of(records=lists)).alt


@pytest.mark.parametrize(
    "kind, arguments, message",
    [
        (TypeError, {"run": None}, "run must be a Run"),
        (ValueError, {"label": "chunk"}, "label must be one that every rank recorded, got 'chunk'.*'chunks'"),
        (ValueError, {"step": 3}, "step must be between 0 and 2"),
        (TypeError, {"step": 0.5}, "step must be a whole number"),
        (ValueError, {"chunks": 0}, "chunks must be at least 1"),
        (ValueError, {"sends": "now"}, "sends must be"),
        (TypeError, {"title": 1}, "title must be"),
        (
            TypeError,
            {"run": run_of(records=[Record(r, 0, "chunks", ["a", "b"]) for r in range(2)])},
            "must hold numbers",
        ),
        (ValueError, {"run": run_of()}, "record=True"),
    ],
)
def test_chunk_grid_refuses(kind, arguments, message):
    with pytest.raises(kind, match=message):
        chunk_grid(**{"run": ring_run(2), **arguments})


def test_chunk_grid_is_a_frame_of_explore():
    runs = {n: ring_run(n) for n in (2, 4)}
    found = explore(
        lambda ranks, step: chunk_grid(runs[ranks], step),
        ranks=(2, 4),
        step=lambda ranks: range(2 * (ranks - 1) + 1),
    )
    assert repr(found) == "explore(ranks: 2 | 4, step: by ranks)"


# --- tables of data -----------------------------------------------------------------------------------------


def test_before_after_shows_the_numbers():
    x = [np.array([10 * r + 1, 10 * r + 2]) for r in range(2)]
    run = simulate(lambda comm, x: comm.all_reduce(x), inputs=x)
    picture = before_after(x, run.results, "all_reduce")
    assert [w for w in words(picture) if w.isdigit()] == ["1", "2", "11", "12", "12", "14", "12", "14"]
    assert picture.alt == (
        "all_reduce on 2 ranks. Before: rank 0 has 1 2; rank 1 has 11 12. "
        "After: rank 0 has 12 14; rank 1 has 12 14."
    )


def test_before_after_keeps_the_colour_of_what_is_only_moved():
    x = [np.array([1, 2]), np.array([3, 4])]
    moved = before_after(x, simulate(lambda c, x: c.all_to_all(list(x.reshape(2, 1))), inputs=x).results)
    root = ET.fromstring(moved.svg)
    fills = [p.get("fill") for p in root.iter(f"{SVG}path") if p.get("class") == "mr-after"]
    assert len(set(fills)) == 2 and "none" not in fills
    summed = before_after(x, [x[0] + x[1]] * 2)
    fills = [
        p.get("fill") for p in ET.fromstring(summed.svg).iter(f"{SVG}path") if p.get("class") == "mr-after"
    ]
    assert fills == ["none"]


def test_before_after_of_none_lists_words_floats_and_long_arrays():
    picture = before_after([[1, 2], None], [[np.array([1]), np.array([2])], np.array([0.12345, 1e-9])])
    assert {"–", "0.1235", "1e-9"} <= set(words(picture))
    assert "a+b" in words(before_after([["a"], ["b"]], [["a+b"], None]))
    assert {"…", "99"} <= set(words(data_grid([np.arange(100)])))
    torch_like = type(
        "T", (), {"detach": lambda s: s, "cpu": lambda s: s, "numpy": lambda s: np.array([7])}
    )()
    assert "7" in words(data_grid([torch_like]))


@pytest.mark.parametrize(
    "kind, call, message",
    [
        (
            ValueError,
            lambda: before_after([1, 2], [1]),
            "results must have one entry for each of the 2 ranks",
        ),
        (TypeError, lambda: before_after(3, [1]), "inputs must be a sequence"),
        (ValueError, lambda: before_after([], []), "inputs must have at least one"),
        (ValueError, lambda: before_after([1], [1], labels=("a",)), "labels must be"),
        (ValueError, lambda: data_grid([1] * 17), "values must have at most 16"),
        (TypeError, lambda: data_grid([{"a": 1}]), r"values\[0\] must be an array"),
        (ValueError, lambda: data_grid([np.zeros((9, 1))]), "values must hold arrays of at most 8 rows"),
        (ValueError, lambda: data_grid([1], most=2), "most must be"),
        (TypeError, lambda: data_grid([1], title=""), "title must be"),
    ],
)
def test_tables_refuse(kind, call, message):
    with pytest.raises(kind, match=message):
        call()


# --- lines --------------------------------------------------------------------------------------------------


def test_lines_name_themselves_and_write_units():
    picture = loglog(
        {"ring": ([1e3, 1e6, 1e9], [1e-6, 1e-5, 1e-2]), "measured": ([1e6], [2e-5])},
        "message",
        "time",
        xunit="bytes",
        yunit="seconds",
        points=["measured"],
    )
    assert {"ring", "measured", "1 MB", "1 GB", "10 µs", "message", "time"} <= set(words(picture))
    assert picture.alt == (
        "time against message. ring: from 1 µs at 1 kB to 10 ms at 1 GB. measured: 20 µs at 1 MB."
    )


def test_line_names_do_not_overlap():
    root = ET.fromstring(lines({name: ([1, 2], [1, 2]) for name in "abcdef"}, "x", "y").svg)
    ys = sorted(float(t.get("y")) for t in root.iter(f"{SVG}text") if t.text in set("abcdef"))
    assert len(ys) == 6 and min(np.diff(ys)) >= 12 and 0 < ys[0] and ys[-1] < 300


@pytest.mark.parametrize(
    "kind, call, message",
    [
        (TypeError, lambda: lines([1], "x", "y"), "series must be a dict"),
        (ValueError, lambda: lines({}, "x", "y"), "series must have at least one"),
        (ValueError, lambda: lines({"a": ([1], [1, 2])}, "x", "y"), r"series\['a'\] must have as many"),
        (ValueError, lambda: lines({"a": ([1], [np.nan])}, "x", "y"), "finite ys"),
        (ValueError, lambda: loglog({"a": ([0, 1], [1, 1])}, "x", "y"), "positive xs on a log axis"),
        (ValueError, lambda: lines({"a": ([1], [1])}, "x", "y", xscale="ln"), "xscale must be"),
        (ValueError, lambda: lines({"a": ([1], [1])}, "x", "y", yunit="GB"), "yunit must be"),
        (ValueError, lambda: lines({"a": ([1], [1])}, "x", "y", points=["b"]), "points must be"),
        (TypeError, lambda: lines({"a": ([1], [1])}, "", "y"), "xlabel must be"),
    ],
)
def test_lines_refuse(kind, call, message):
    with pytest.raises(kind, match=message):
        call()


def test_rows_of_a_run_are_what_the_tests_take_them_for():
    assert Interval._fields[:3] == ("rank", "lane", "kind") and Message._fields[:2] == (
        "source",
        "destination",
    )
