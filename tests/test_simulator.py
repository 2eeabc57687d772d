"""The simulator's clock and messages: against a second simulator, by hand, and whatever order the ranks run in."""

import doctest
import functools
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyranks.runtime import schedules, simulator
from manyranks.runtime.hardware import Cluster, Tier
from manyranks.runtime.phantom import phantom
from manyranks.runtime.simulator import _simulate, simulate
from tests.reference_network import clocks

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def flat(ranks, latency=1.0, bandwidth=2.0):
    return Cluster.flat(ranks, latency=latency, bandwidth=bandwidth)


def two_tiers(nodes, per_node, near=(1.0, 2.0), far=(5.0, 1.0)):
    return Cluster(nodes, per_node, intra=Tier("near", *near), inter=Tier("far", *far))


def seen(run):
    """All of a run that must not depend on the order in which its ranks ran."""
    return run.ends, run.seconds, list(run.traffic), list(run.timeline), run.rounds, run.notes


def shuffled(program, cluster, inputs=None, seeds=range(3), **options):
    """`_simulate` in several orders of the ranks: all must agree to the bit. Returns the run in the usual order."""
    ranks = cluster.ranks
    first = _simulate(program, ranks, inputs, cluster, False, {}, **options)
    for seed in seeds:
        again = _simulate(program, ranks, inputs, cluster, False, {}, shuffle=seed, **options)
        assert seen(again) == seen(first)
    return first


def test_docstring_examples():
    result = doctest.testmod(simulator)
    assert result.attempted > 0 and result.failed == 0


# ---------------------------------------------------------------------- against the second simulator


CLUSTERS = [
    flat(2),
    flat(5, 1e-6, 100e9),
    flat(8, 3.0, 1e9),
    flat(4, 1e-3, 3.0),
    two_tiers(2, 3),
    two_tiers(3, 2, near=(1e-6, 450e9), far=(14e-6, 50e9)),
    two_tiers(4, 1),
    two_tiers(2, 4, near=(7.0, 1.0), far=(0.5, 3.0)),  # a network quicker than the node
]


def random_programs(rng, cluster, beside=0.0):
    """A list of actions for each rank and lane, free of deadlock, in the terms of `reference_network`.

    All messages stand in one global order, and every rank does its share in that order, so that the earliest unfinished
    one can always go on. Waits are put off at random. Sizes include 0, and hit one receiver more often than others.
    """
    n = cluster.ranks
    acts = [[] for _ in range(n)]  # of the program itself
    open_waits = [[] for _ in range(n)]
    scale = 10 ** rng.uniform(-1, 1)
    group = sorted(rng.sample(range(n), rng.randint(2, n)))
    lanes = [{0: acts[r]} for r in range(n)]
    parts = [[0, 0] for _ in range(n)]
    unjoined = [[] for _ in range(n)]
    sink = rng.randrange(n)

    def pause(r):
        if rng.random() < 0.5:
            acts[r].append(("compute", rng.random() * scale))

    def some_waits(r, everything=False):
        rng.shuffle(open_waits[r])
        keep = []
        for name in open_waits[r]:
            if everything or rng.random() < 0.4:
                acts[r].append(("wait", name))
            else:
                keep.append(name)
        open_waits[r] = keep

    def some_joins(r, everything=False):
        keep = []
        for join in unjoined[r]:
            (acts[r] if everything or rng.random() < 0.3 else keep).append(join)
        unjoined[r] = keep

    for r in range(n):
        acts[r].append(("compute", rng.random() * scale))
    for i in range(rng.randint(1, 8 * n)):
        if rng.random() < beside:
            which = rng.randrange(2)
            members = list(range(n)) if which == 0 else group
            length = rng.choice([0, 1, 5, 100])
            name = rng.choice(["ring", "tree", "naive", "halving_doubling"])
            for r in members:
                pause(r)
                some_joins(r)
                lane = lanes[r].setdefault(which + 1, [])
                lane.append(("begin",))
                lane.extend(collective(name, length, members, r, f"c{i}"))
                lane.append(("end",))
                acts[r].append(("start", which + 1, name, length))
                unjoined[r].append(("join", which + 1, parts[r][which]))
                parts[r][which] += 1
            continue
        src = rng.randrange(n)
        dst = sink if rng.random() < 0.3 and src != sink else (src + rng.randrange(1, n)) % n
        nbytes = rng.choice([0, 0, 1, 3, 8, rng.randrange(200), int(1e9 * rng.random())])
        for r, action in ((src, ("isend", f"s{i}", dst, nbytes)), (dst, ("irecv", f"r{i}", src))):
            pause(r)
            some_joins(r)
            acts[r].append(action)
            open_waits[r].append(action[1])
            some_waits(r)
    for r in range(n):
        some_waits(r, everything=True)
        some_joins(r, everything=rng.random() < 0.7)
    return lanes, group


def collective(name, length, members, rank, prefix):
    """The actions of one rank in an all-reduce of `length` float64."""
    me, n = members.index(rank), len(members)
    chunks, steps = schedules.ALL_REDUCE_STEPS[name](me, n, [list(range(n))])
    bounds = schedules.chunk_bounds(length, chunks)
    for k, (dst, send, src, _, _) in enumerate(steps):
        if dst is not None:
            yield "isend", f"{prefix}s{k}", members[dst], 8 * (bounds[send[1]] - bounds[send[0]])
        if src is not None:
            yield "irecv", f"{prefix}r{k}", members[src]
            yield "wait", f"{prefix}r{k}"
        if dst is not None:
            yield "wait", f"{prefix}s{k}"


def play(lanes, group):
    """The rank program that does what a list of actions says."""

    def program(comm):
        comms = {1: comm, 2: comm.group(group)}
        names, works = {}, {1: [], 2: []}
        for action in lanes[comm.rank][0]:
            kind = action[0]
            if kind == "compute":
                comm.compute(seconds=action[1])
            elif kind == "isend":
                names[action[1]] = comm.isend(phantom(action[3], np.uint8), action[2])
            elif kind == "irecv":
                names[action[1]] = comm.irecv(action[2])
            elif kind == "wait":
                names[action[1]].wait()
            elif kind == "start":
                x = phantom(action[3], np.float64)
                works[action[1]].append(comms[action[1]].all_reduce(x, algorithm=action[2], async_op=True))
            elif kind == "join":
                works[action[1]][action[2]].wait()
        return comm.time()

    return program


def messages(run):
    return sorted((m.start, m.source, m.destination, m.bytes, m.end) for m in run.traffic)


@FEW
@given(st.integers(0, 10**9), st.sampled_from(CLUSTERS))
def test_random_programs_keep_the_reference_clock(seed, cluster):
    lanes, group = random_programs(random.Random(seed), cluster)
    ends, log = clocks(cluster, lanes)
    run = shuffled(play(lanes, group), cluster)
    assert run.ends == ends == run.results
    assert messages(run) == log


@FEW
@given(st.integers(0, 10**9), st.sampled_from(CLUSTERS))
def test_random_programs_with_collectives_beside_keep_the_reference_clock(seed, cluster):
    lanes, group = random_programs(random.Random(seed), cluster, beside=0.2)
    ends, log = clocks(cluster, lanes)
    run = shuffled(play(lanes, group), cluster)
    assert run.ends == ends
    assert messages(run) == log
    assert run.seconds >= max(ends)


def test_no_latency_at_all_is_the_same_in_every_order():
    for cluster in (flat(6, 0.0, 3.0), two_tiers(2, 3, near=(0.0, 2.0), far=(0.0, 1.0))):
        for seed in range(8):
            lanes, group = random_programs(random.Random(seed), cluster, beside=0.2)
            shuffled(play(lanes, group), cluster)


# ---------------------------------------------------------------------- worked by hand: one second, two bytes a second


def bytes_of(n):
    return np.zeros(n, np.uint8)


def test_one_message():
    def program(comm):
        if comm.rank == 0:
            comm.send(bytes_of(8), 1)
        else:
            comm.recv(0)
        return comm.time()

    run = shuffled(program, flat(2))
    assert run.results == [4.0, 5.0]  # the sender is rid of it after 8 / 2 s, it arrives 1 s later
    assert list(run.traffic) == [(0, 1, 8, 0.0, 5.0, 1, "send", 0, 1)]
    assert [tuple(i) for i in run.timeline] == [(0, 0, "wait", "send", 0, 4), (1, 0, "wait", "recv", 0, 5)]
    assert run.busy("wait").tolist() == [4, 5] and run.busy().tolist() == [0, 0]


def test_a_send_ends_when_it_is_asked_for():
    def program(comm):
        if comm.rank == 0:
            comm.send(bytes_of(2), 1)
        else:
            comm.compute(seconds=10.0)
            comm.recv(0)
        return comm.time()

    assert shuffled(program, flat(2)).results == [10.0, 10.0]


def test_two_to_one_queue_at_its_in_port():
    def program(comm):
        if comm.rank:
            comm.send(bytes_of(8), 0)
        else:
            coming = [comm.irecv(1), comm.irecv(2)]
            times = []
            for work in coming:
                work.wait()
                times.append(comm.time())
            return times
        return comm.time()

    run = shuffled(program, flat(3))
    assert run.results[0] == [5.0, 9.0]  # the second comes 8 / 2 s later
    assert run.results[1:] == [4.0, 4.0]  # the senders don't notice


def test_first_come_first_served_whoever_is_asked_for_first():
    def program(comm):
        if comm.rank == 0:
            comm.recv(1)
            between = comm.time()
            comm.recv(2)
            return between, comm.time()
        comm.compute(seconds=1.0 if comm.rank == 1 else 0.5)
        comm.send(bytes_of(8), 0)

    # rank 2's message is at the port at 1.5 and holds it to 5.5, rank 1's comes at 2 and has to wait
    assert shuffled(program, flat(3)).results[0] == (9.5, 9.5)


def test_one_to_two_queue_at_its_out_port():
    def program(comm):
        if comm.rank == 0:
            works = [comm.isend(bytes_of(8), 1), comm.isend(bytes_of(8), 2)]
            for work in works:
                work.wait()
        else:
            comm.recv(0)
        return comm.time()

    assert shuffled(program, flat(3)).results == [8.0, 5.0, 9.0]


def test_full_duplex():
    def program(comm):
        sending = comm.isend(bytes_of(8), 1 - comm.rank)
        comm.recv(1 - comm.rank)
        sending.wait()
        return comm.time()

    assert shuffled(program, flat(2)).results == [5.0, 5.0]


def test_the_two_tiers_are_independent():
    """Rank 0 sends to its neighbour and to another node, and gets one from each, all at once."""

    def program(comm):
        if comm.rank == 0:
            works = [comm.isend(bytes_of(8), 1), comm.isend(bytes_of(8), 2), comm.irecv(1), comm.irecv(2)]
            for work in works:
                work.wait()
        elif comm.rank < 3:
            sending = comm.isend(bytes_of(8), 0)
            comm.recv(0)
            sending.wait()
        return comm.time()

    run = shuffled(program, two_tiers(2, 2))
    assert run.results == [13.0, 5.0, 13.0, 0.0]  # near: 1 + 8 / 2; far: 5 + 8 / 1
    assert [m.tier for m in run.traffic] == [0, 1, 0, 1]
    assert run.traffic.where(tier=1).bytes == 16


def test_zero_bytes_cost_the_latency_only():
    run = shuffled(lambda comm: comm.send(bytes_of(0), 1) if comm.rank == 0 else comm.recv(0).shape, flat(2))
    assert (
        run.ends == [0.0, 1.0]
        and run.results[1] == (0,)
        and run.traffic.bytes == 0
        and run.traffic.count == 1
    )


def test_compute_is_the_slower_of_arithmetic_and_memory():
    def program(comm):
        comm.compute(flops=100e12, label="a")
        comm.compute(flops=100e12, bytes=3e12, label="b")
        comm.compute(seconds=0.5, label="c")
        comm.compute()
        return comm.time()

    run = simulate(program, ranks=1)
    assert run.results == [4.5]
    assert [(i.label, i.start, i.end) for i in run.timeline] == [("a", 0, 1), ("b", 1, 4), ("c", 4, 4.5)]


def test_a_collective_beside_the_program_overlaps_it():
    def program(comm, wait):
        work = comm.all_reduce(bytes_of(4), async_op=True)  # two steps of 1 + 2 / 2 s
        comm.compute(seconds=3.0)
        if wait:
            work.wait()
        return comm.time()

    waited = shuffled(lambda comm: program(comm, True), flat(2))
    assert waited.ends == [4.0, 4.0]
    assert [tuple(i)[:4] for i in waited.timeline][:3] == [
        (0, 0, "compute", "compute"),
        (0, 0, "wait", "all_reduce"),
        (0, 1, "comm", "all_reduce"),
    ]
    left = shuffled(lambda comm: program(comm, False), flat(2))
    assert left.ends == [3.0, 3.0] and left.seconds == 4.0  # nobody waited for it, yet it was under way


def test_a_later_collective_of_the_group_waits_for_the_earlier():
    """Also a synchronous one, if nobody has waited for the one beside the program."""

    def program(comm, asynchronous):
        comm.all_reduce(bytes_of(4), async_op=True)
        second = comm.all_reduce(bytes_of(4), async_op=asynchronous)
        if asynchronous:
            second.wait()
        return comm.time()

    for asynchronous in (True, False):
        assert shuffled(functools.partial(program, asynchronous=asynchronous), flat(2)).ends == [8.0, 8.0]


def test_programs_and_collectives_beside_share_the_out_port_in_virtual_time():
    """A message keeps its place in the line when the collective that made it queue there has ended."""
    cluster = flat(4)

    def program(comm):
        times = []
        pair = comm.group([0, 1])
        if comm.rank == 0:
            work = pair.all_reduce(bytes_of(40), async_op=True)
            comm.compute(seconds=0.25)
            a = comm.isend(bytes_of(100), 2)
            comm.compute(seconds=0.25)
            comm.recv(3)
            b = comm.isend(bytes_of(2), 2)
            for w in (work, a, b):
                w.wait()
        elif comm.rank == 1:
            pair.all_reduce(bytes_of(40))
        elif comm.rank == 2:
            for _ in range(2):
                times.append((comm.recv(0).nbytes, comm.time()))
        else:
            comm.send(bytes_of(0), 0)
        return times

    run = shuffled(program, cluster, seeds=range(10))
    # the ring's 20 bytes leave in 0..10, the 100 bytes in 10..60, then the ring's second 20, then the 2 bytes
    starts = [(m.bytes, m.start) for m in run.traffic if m.source == 0]
    assert starts == [(20, 0.0), (100, 10.0), (2, 60.0), (20, 61.0)]
    assert run.results[2] == [(100, 61.0), (2, 62.0)]


@pytest.mark.parametrize("n", [2, 3, 5, 9, 16])
def test_naive_all_reduce_has_a_hotspot(n):
    """All to rank 0 and back, one after the other at its port: 2 (alpha + (n - 1) S / beta)."""
    run = shuffled(lambda comm: comm.all_reduce(bytes_of(8), algorithm="naive"), flat(n), seeds=[1])
    assert run.seconds == 2 * (1.0 + (n - 1) * 4.0)


# ---------------------------------------------------------------------- snapshots


def test_a_send_is_a_snapshot_and_a_receive_is_ones_own():
    def program(comm):
        x = np.arange(4.0)
        if comm.rank == 0:
            sending = comm.isend(x, 1), comm.isend(x, 2), comm.isend(x[::2], 3)
            x[:] = -1
            for work in sending:
                work.wait()
        else:
            got = comm.recv(0)
            got += comm.rank
            return got.tolist()

    assert simulate(program, ranks=4).results[1:] == [[1, 2, 3, 4], [2, 3, 4, 5], [3, 5]]


def test_collectives_beside_the_program_take_a_snapshot():
    def program(comm):
        x, parts = np.ones(3), [np.ones(2), np.ones(2)]
        works = (
            comm.all_reduce(x, async_op=True),
            comm.all_to_all(parts, async_op=True),
            comm.all_gather(x, async_op=True),
        )
        x[:] = 99
        parts[0][:] = parts[1][:] = 99
        return [np.asarray(w.wait()).tolist() for w in works]

    assert simulate(program, ranks=2).results == [[[2, 2, 2], [[1, 1], [1, 1]], [1] * 6]] * 2


COLLECTIVES = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "broadcast": lambda comm, x: comm.broadcast(x),
    "reduce": lambda comm, x: comm.reduce(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "gather": lambda comm, x: comm.gather(x),
    "scatter": lambda comm, x: comm.scatter(x),
    "all_to_all": lambda comm, x: comm.all_to_all([x] * comm.size),
}


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_a_collective_gives_is_nobody_elses(name, ranks):
    def program(comm, x):
        before = x.copy()
        out = COLLECTIVES[name](comm, x)
        assert (x == before).all()
        for part in out if isinstance(out, list) else [out]:
            if part is not None:
                assert not np.shares_memory(part, x)
                part[...] = -1e6 - comm.rank
        comm.barrier()
        assert (x == before).all()
        return out

    results = simulate(program, inputs=[np.arange(10.0) + r for r in range(ranks)]).results
    for rank, out in enumerate(results):
        for part in out if isinstance(out, list) else [out]:
            assert part is None or (part == -1e6 - rank).all()


def test_inputs_and_shared_are_the_ranks_own():
    import collections
    import dataclasses

    @dataclasses.dataclass
    class Weights:
        w: np.ndarray

    Pair = collections.namedtuple("Pair", "a b")
    x = np.zeros(3)
    shared = {
        "array": np.zeros(2),
        "nested": {"list": [np.zeros(2), (np.zeros(1),)]},
        "weights": Weights(np.zeros(1)),
        "pair": Pair(np.zeros(1), 2),
        "default": collections.defaultdict(list, a=[1]),
        "rng": np.random.default_rng(0),
    }

    def program(comm, x, array, nested, weights, pair, default, rng):
        for mine in (x, array, nested["list"][0], nested["list"][1][0], weights.w, pair.a):
            mine += 1
            assert (mine == 1).all()
        nested["list"].append(1)
        default["b"].append(2)
        assert default == {"a": [1], "b": [2]} and len(nested["list"]) == 3
        return rng.random()

    run = simulate(program, inputs=[x, x, x], **shared)
    assert len(set(run.results)) == 1  # every rank drew from a generator of its own, as processes would
    assert (
        not x.any()
        and not shared["array"].any()
        and not shared["weights"].w.any()
        and not shared["pair"].a.any()
    )
    assert len(shared["nested"]["list"]) == 2 and dict(shared["default"]) == {"a": [1]}


def test_waiting_twice_gives_the_same():
    def program(comm):
        if comm.rank == 0:
            sending = comm.isend(np.arange(3), 1)
            sending.wait()
            sending.wait()
        else:
            coming = comm.irecv(0)
            assert (coming.wait() == coming.wait()).all()
        work = comm.all_reduce(np.ones(2), async_op=True)
        first, at = work.wait(), comm.time()
        assert work.wait() is first and comm.time() == at
        return first.tolist()

    assert simulate(program, ranks=2).results == [[2, 2]] * 2


# ---------------------------------------------------------------------- groups


def test_groups_of_groups_and_overlapping_groups_at_the_same_time():
    def program(comm):
        me = np.array([float(comm.rank)])
        even, low = comm.group([4, 2, 0]), comm.group([0, 1, 2])
        works = [g.all_reduce(me, async_op=True) if g else None for g in (even, low, comm)]
        sums = [float(w.wait()[0]) if w else None for w in works]
        inner = even.group([2, 0]) if even else None  # its numbers, so ranks 0 and 4, in this order
        if inner:
            assert inner.ranks == (0, 4) and inner.rank == (0 if comm.rank == 0 else 1)
            sums.append(inner.all_gather(me).tolist())
        return sums

    run = shuffled(program, flat(5), seeds=range(6))
    assert run.results == [
        [6, 3, 10, [0, 4]],
        [None, 3, 10],
        [6, 3, 10],
        [None, None, 10],
        [6, None, 10, [0, 4]],
    ]


def test_a_group_made_twice_is_two_groups():
    def program(comm):
        a, b = comm.group([0, 1]), comm.group([0, 1])
        if comm.rank == 0:
            a.send(np.array([1]), 1)
            b.send(np.array([2]), 1)
        else:
            second, first = b.irecv(0), a.irecv(0)
            return int(first.wait()[0]), int(second.wait()[0])

    assert simulate(program, ranks=2).results[1] == (1, 2)


def test_collectives_messages_and_the_programs_own_are_not_confused():
    def program(comm):
        if comm.rank == 0:
            sending = comm.isend(np.array([7.0]), 1)
        total = comm.all_reduce(np.array([1.0]))
        if comm.rank == 0:
            sending.wait()
            return float(total[0])
        return float(comm.recv(0)[0]), float(total[0])

    assert simulate(program, ranks=2).results == [2.0, (7.0, 2.0)]


@pytest.mark.parametrize("seed", range(4))
def test_many_collectives_in_flight_on_two_groups(seed):
    rng = np.random.default_rng(seed)
    xs = rng.integers(0, 9, (6, 5, 7)).astype(float)

    def program(comm, x):
        half = comm.group(range(3)) or comm.group(range(3, 6))
        works = []
        for i in range(5):
            where = (comm, half)[i % 2]
            works.append(where.all_reduce(x[i], algorithm=("ring", "tree", "naive")[i % 3], async_op=True))
            comm.compute(seconds=0.1 * comm.rank)
        order = (0, 3, 1, 4, 2)
        return {i: works[i].wait().tolist() for i in order}

    run = shuffled(program, flat(6), inputs=list(xs), seeds=range(4))
    for rank, out in enumerate(run.results):
        for i in range(5):
            members = range(6) if i % 2 == 0 else range(3) if rank < 3 else range(3, 6)
            assert out[i] == sum(xs[r][i] for r in members).tolist()


def test_phantom_and_real_payloads_take_the_same_time():
    def program(comm, make):
        x = make((12, 5), np.float32)
        works = [comm.isend(x, (comm.rank + 1) % comm.size)]
        got = comm.recv((comm.rank - 1) % comm.size)
        works[0].wait()
        outs = [
            got,
            comm.all_reduce(x),
            comm.all_reduce(x, algorithm="tree", op="max"),
            comm.reduce_scatter(x),
        ]
        outs += [comm.all_gather(outs[-1]), comm.broadcast(x, 2), comm.reduce(x, 1), comm.gather(x, 3)]
        outs += [
            comm.scatter(x if comm.rank == 2 else None, 2),
            *comm.all_to_all([x[: r + 1] for r in range(comm.size)]),
        ]
        comm.barrier()
        outs.append(comm.all_reduce(x, algorithm="halving_doubling", op="mean"))
        return [None if o is None else (o.shape, o.dtype) for o in outs]

    cluster = Cluster(2, 3)
    real = simulate(program, cluster=cluster, make=np.ones)
    imagined = simulate(program, cluster=cluster, make=phantom)
    assert real.results == imagined.results
    assert real.ends == imagined.ends and list(real.traffic) == list(imagined.traffic)


def test_record():
    def program(comm):
        comm.compute(seconds=1.0 - comm.rank)
        x = np.array([comm.rank])
        comm.record("x", x)
        x[:] = 9

    for seed in (None, 1, 2):
        run = _simulate(program, 2, None, flat(2), True, {}, shuffle=seed)
        assert [(r.rank, r.time, r.label, r.value.tolist()) for r in run.records] == [
            (1, 0, "x", [1]),
            (0, 1, "x", [0]),
        ]
    assert simulate(program, ranks=2).records == []
