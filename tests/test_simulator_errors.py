"""What the simulator says when a program is wrong, and that it always says so, and the same in every order."""

import functools
import gc
import pickle
import re
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from greenlet import GreenletExit

from manyranks.runtime.errors import CollectiveMismatchError, DeadlockError, RankError, UnreceivedMessageError
from manyranks.runtime.hardware import Cluster
from manyranks.runtime.phantom import phantom
from manyranks.runtime.simulator import _simulate, simulate

SEEDS = (None, 0, 1, 2, 3, 4)


def raises_alike(kind, program, ranks, match=None):
    """`program` raises `kind` with the same text in whatever order the ranks run. Returns the exception."""
    errors = []
    for seed in SEEDS:
        with pytest.raises(kind, match=match) as caught:
            _simulate(program, ranks, None, Cluster.flat(ranks), False, {}, shuffle=seed)
        errors.append(caught.value)
    assert len({str(error) for error in errors}) == 1, errors
    return errors[0]


def inside(call, ranks=2):
    """What `call(comm)` raises in rank 0, as the cause of the RankError."""

    def program(comm):
        if comm.rank == 0:
            call(comm)

    with pytest.raises(RankError) as caught:
        simulate(program, ranks=ranks)
    assert caught.value.rank == 0
    return caught.value.__cause__


# ---------------------------------------------------------------------- arguments of simulate


def nothing(comm, *args):
    return None


def generator(comm):
    yield


async def coroutine(comm):
    return None


class Callable:
    def __call__(self, comm):
        yield


@pytest.mark.parametrize(
    "arguments, kind, match",
    [
        ({"program": 3, "ranks": 2}, TypeError, "program must be a function of a communicator, got 3"),
        ({"program": generator, "ranks": 2}, TypeError, "generator"),
        ({"program": coroutine, "ranks": 2}, TypeError, "async"),
        ({"program": functools.partial(generator), "ranks": 2}, TypeError, "generator"),
        ({"program": Callable(), "ranks": 2}, TypeError, "generator"),
        ({"program": nothing}, ValueError, "Give ranks=, inputs= or cluster="),
        ({"program": nothing, "ranks": 0}, ValueError, "ranks must be an integer >= 1, got 0"),
        ({"program": nothing, "ranks": -3}, ValueError, "ranks must be an integer >= 1, got -3"),
        ({"program": nothing, "ranks": 2.0}, TypeError, "ranks must be an integer"),
        ({"program": nothing, "ranks": True}, TypeError, "ranks must be an integer"),
        ({"program": nothing, "ranks": "2"}, TypeError, "ranks must be an integer"),
        (
            {"program": nothing, "ranks": 2, "inputs": [1]},
            ValueError,
            "inputs must have one entry for each of the 2 ranks, got 1",
        ),
        ({"program": nothing, "inputs": []}, ValueError, "inputs must have at least one entry"),
        ({"program": nothing, "inputs": 5}, TypeError, "inputs must be a list or tuple"),
        ({"program": nothing, "inputs": "ab"}, TypeError, "inputs must be a list or tuple"),
        ({"program": nothing, "inputs": {0: 1}}, TypeError, "inputs must be a list or tuple"),
        ({"program": nothing, "inputs": iter([1])}, TypeError, "inputs must be a list or tuple"),
        ({"program": nothing, "inputs": np.ones(2)}, TypeError, "got a flat array"),
        (
            {"program": lambda comm, x: x, "ranks": 2},
            TypeError,
            r"can't be called as <lambda>\(comm\).*missing.*'x'.*Give inputs=",
        ),
        (
            {"program": nothing, "ranks": 2, "size": 3},
            TypeError,
            r"can't be called as nothing\(comm, size=...\).*unexpected keyword",
        ),
        ({"program": nothing, "cluster": 8}, TypeError, "cluster must be a Cluster, got 8"),
        (
            {"program": nothing, "cluster": Cluster.flat(4), "ranks": 5},
            ValueError,
            "ranks must be at most the 4",
        ),
        (
            {"program": nothing, "cluster": Cluster.flat(4), "inputs": [1, 2]},
            ValueError,
            "each of the 4 ranks, got 2",
        ),
    ],
)
def test_arguments_of_simulate(arguments, kind, match):
    with pytest.raises(kind, match=match):
        simulate(**arguments)


def test_what_simulate_takes():
    assert simulate(nothing, ranks=np.int64(3)).ranks == 3
    assert simulate(nothing, cluster=Cluster.flat(4), ranks=2).ranks == 2
    assert simulate(nothing, inputs=(1, 2)).ranks == 2
    assert simulate(nothing, inputs=np.ones((3, 2))).ranks == 3
    assert simulate(functools.partial(nothing), ranks=1).results == [None]
    assert simulate(lambda comm, x: x.shape, inputs=list(phantom((3, 2)))).results == [(2,)] * 3


# ---------------------------------------------------------------------- arguments of communication

X = np.ones(4)


@pytest.mark.parametrize(
    "call, kind, match",
    [
        (lambda c: c.send(X, 0), ValueError, "dst is this rank itself"),
        (lambda c: c.send(X, 2), ValueError, "dst must be a rank from 0 to 1, got 2"),
        (lambda c: c.send(X, -1), ValueError, "dst must be a rank from 0 to 1, got -1"),
        (lambda c: c.send(X, True), TypeError, "dst must be a rank, got True"),
        (lambda c: c.send(X, 1.0), TypeError, "dst must be a rank, got 1.0"),
        (lambda c: c.isend(X, "1"), TypeError, "dst must be a rank"),
        (lambda c: c.isend(X, None), TypeError, "dst must be a rank"),
        (lambda c: c.recv(0), ValueError, "src is this rank itself"),
        (lambda c: c.recv(7), ValueError, "src must be a rank from 0 to 1, got 7"),
        (lambda c: c.irecv(False), TypeError, "src must be a rank, got False"),
        (lambda c: c.recv(1.0), TypeError, "src must be a rank, got 1.0"),
        (lambda c: c.send([1, 2], 1), TypeError, "x must be a NumPy array, a phantom or a number, got list"),
        (lambda c: c.send(None, 1), TypeError, "got NoneType"),
        (lambda c: c.send(np.array([None]), 1), TypeError, "dtype object"),
        (lambda c: c.send(np.zeros(1, [("a", object)]), 1), TypeError, "dtype object"),
        (lambda c: c.all_reduce("x"), TypeError, "x must be"),
        (
            lambda c: c.all_reduce(X, op="avg"),
            ValueError,
            "op must be one of 'sum', 'mean', 'max', 'min', 'prod', got 'avg'",
        ),
        (lambda c: c.all_reduce(X, op=["sum"]), ValueError, "op must be one of"),
        (
            lambda c: c.all_reduce(X, algorithm="rings"),
            ValueError,
            "algorithm of all_reduce must be one of 'auto', 'ring'",
        ),
        (lambda c: c.all_reduce(X, algorithm=None), ValueError, "algorithm of all_reduce"),
        (
            lambda c: c.all_gather(X, algorithm="tree"),
            ValueError,
            "algorithm of all_gather must be one of 'auto', 'ring'",
        ),
        (
            lambda c: c.all_reduce(np.ones(2, int), op="mean"),
            TypeError,
            "op='mean' needs a floating-point array, got dtype int64",
        ),
        (lambda c: c.all_reduce(np.ones(2, bool), op="mean"), TypeError, "floating-point"),
        (
            lambda c: c.reduce_scatter(np.float32(1)),
            ValueError,
            "reduce_scatter needs an array of at least one dimension",
        ),
        (lambda c: c.scatter(np.float32(1)), ValueError, "scatter needs an array of at least one dimension"),
        (lambda c: c.broadcast(None), TypeError, "x must be"),
        (lambda c: c.broadcast(X, 2), ValueError, "src must be a rank from 0 to 1, got 2"),
        (lambda c: c.reduce(X, -1), ValueError, "dst must be a rank"),
        (lambda c: c.gather(X, 0.0), TypeError, "dst must be a rank"),
        (lambda c: c.scatter(X, True), TypeError, "src must be a rank"),
        (
            lambda c: c.all_to_all([X]),
            ValueError,
            "xs must be a list of 2 arrays, one for each rank, got 1 of them",
        ),
        (lambda c: c.all_to_all(X), ValueError, "xs must be a list of 2 arrays"),
        (lambda c: c.all_to_all([X, "a"]), TypeError, r"xs\[1\] must be"),
        (lambda c: c.group([]), ValueError, "ranks must be different numbers from 0 to 1"),
        (lambda c: c.group([0, 0]), ValueError, "ranks must be different numbers"),
        (lambda c: c.group([0, 2]), ValueError, "ranks must be different numbers"),
        (lambda c: c.group([0, 1.0]), TypeError, "ranks must be a list of whole numbers"),
        (lambda c: c.group([True, 1]), TypeError, "ranks must be a list of whole numbers"),
        (lambda c: c.group(3), TypeError, "ranks must be"),
        (lambda c: c.compute(seconds=-1.0), ValueError, "seconds must be a finite number >= 0"),
        (lambda c: c.compute(seconds=float("nan")), ValueError, "seconds must be"),
        (lambda c: c.compute(seconds=float("inf")), ValueError, "seconds must be"),
        (lambda c: c.compute(flops=-1), ValueError, "flops must be"),
        (lambda c: c.compute(flops=float("nan")), ValueError, "flops must be"),
        (lambda c: c.compute(bytes="1"), TypeError, "bytes must be"),
        (lambda c: c.compute(seconds=True), TypeError, "seconds must be"),
    ],
)
def test_arguments_of_communication(call, kind, match):
    error = inside(call)
    assert type(error) is kind and re.search(match, str(error)), repr(error)


def test_whole_numbers_of_any_kind_are_ranks():
    def program(comm):
        peer = np.int64(1 - comm.rank)
        sending = comm.isend(3, peer)
        assert comm.recv(peer) == 3
        sending.wait()
        assert comm.group(np.arange(2)).size == 2
        return comm.broadcast(X, np.int32(1)).tolist()

    assert simulate(program, ranks=2).results == [[1] * 4] * 2


def test_hierarchical_needs_even_nodes():
    def program(comm):
        g = comm.group([0, 1, 2])
        if g:
            g.all_reduce(X, algorithm="hierarchical")

    with pytest.raises(RankError, match=r"needs the same number of ranks on every node, got \[1, 2\]"):
        simulate(program, cluster=Cluster(2, 2))


# ---------------------------------------------------------------------- collectives that don't match


@pytest.mark.parametrize(
    "calls, a, b",
    [
        (
            [lambda c: c.all_reduce(X), lambda c: c.broadcast(X)],
            "all_reduce(op='sum', shape=(4,), dtype=float64)",
            "broadcast(root=0)",
        ),
        ([lambda c: c.all_reduce(X), lambda c: c.barrier()], "all_reduce(", "barrier()"),
        ([lambda c: c.all_reduce(X), lambda c: c.all_reduce(X[:2])], "shape=(4,)", "shape=(2,)"),
        ([lambda c: c.all_reduce(X), lambda c: c.all_reduce(X.astype("f4"))], "float64", "float32"),
        ([lambda c: c.all_reduce(X), lambda c: c.all_reduce(X, op="max")], "op='sum'", "op='max'"),
        (
            [lambda c: c.all_reduce(X), lambda c: c.all_reduce(X, algorithm="tree")],
            "dtype=float64)",
            "algorithm='tree'",
        ),
        ([lambda c: c.broadcast(X, 0), lambda c: c.broadcast(X, 1)], "root=0", "root=1"),
        ([lambda c: c.reduce(X, 0), lambda c: c.reduce(X, 1)], "root=0", "root=1"),
        ([lambda c: c.all_gather(X), lambda c: c.all_gather(np.ones((4, 2)))], "shape=()", "shape=(2,)"),
        ([lambda c: c.all_reduce(X, async_op=True), lambda c: c.barrier()], "all_reduce(", "barrier()"),
    ],
)
def test_mismatched_collectives_are_named(calls, a, b):
    error = raises_alike(CollectiveMismatchError, lambda comm: calls[comm.rank](comm), 2)
    text = str(error)
    assert "rank 0 called" in text and "rank 1 called" in text and text.index(a) < text.index("rank 1 called")
    assert b in text[text.index("rank 1 called") :]


def test_of_many_that_disagree_the_lowest_ranks_are_named():
    def program(comm):
        comm.compute(seconds=(comm.rank * 7) % 5)
        (comm.barrier, lambda: comm.broadcast(X), lambda: comm.all_reduce(X))[min(comm.rank // 2, 2)]()

    error = raises_alike(CollectiveMismatchError, program, 6)
    assert "rank 0 called barrier(), rank 2 called broadcast" in str(error)


def test_a_mismatch_in_a_group_names_the_ranks_of_the_run():
    def program(comm):
        g = comm.group([3, 1])
        if g:
            g.all_reduce(X) if g.rank == 0 else g.barrier()

    assert "rank 1 called barrier(), rank 3 called all_reduce" in str(
        raises_alike(CollectiveMismatchError, program, 4)
    )


def test_a_mismatch_cannot_be_swallowed():
    def program(comm):
        try:
            comm.all_reduce(X) if comm.rank else comm.barrier()
        except BaseException:
            pass

    raises_alike(CollectiveMismatchError, program, 3)


# ---------------------------------------------------------------------- deadlocks


def test_both_send_first():
    def program(comm):
        comm.send(X, 1 - comm.rank)
        comm.recv(1 - comm.rank)

    error = raises_alike(DeadlockError, program, 2, "deadlock: 2 of 2 ranks wait")
    assert error.cycle == (0, 1, 0)
    assert error.waiting[0].startswith("rank 1 to receive its message [test_simulator_errors.py:")
    assert "They wait in a circle: 0 → 1 → 0" in str(error)


def test_a_circle_of_receives():
    def program(comm):
        if comm.rank < 3:
            comm.recv((comm.rank + 2) % 3)
        else:
            comm.recv(0)

    error = raises_alike(DeadlockError, program, 4)
    assert error.cycle == (0, 2, 1, 0) and set(error.waiting) == {0, 1, 2, 3}


def test_waiting_for_a_rank_that_has_finished():
    def program(comm):
        if comm.rank:
            comm.recv(0)

    error = raises_alike(DeadlockError, program, 2)
    assert error.cycle == ()
    assert error.waiting[1].startswith("a message from rank 0 (which has finished)")


def test_a_collective_that_not_all_join():
    def program(comm):
        if comm.rank != 2:
            comm.all_reduce(X)

    error = raises_alike(DeadlockError, program, 4)
    assert "rank 2 (which has finished), in all_reduce(op='sum'" in str(error)


@pytest.mark.parametrize("ranks", [4, 20])
def test_a_collective_of_phantoms_that_not_all_join(ranks):
    def program(comm):
        if comm.rank != 2:
            comm.all_reduce(phantom(100))

    assert "rank 2 (which has finished)" in str(raises_alike(DeadlockError, program, ranks))


def test_a_closed_form_that_not_all_join():
    def program(comm):
        if comm.rank != 2:
            comm.all_reduce(X, algorithm="closed_form")

    assert "rank 2 to join all_reduce (which has finished)" in str(raises_alike(DeadlockError, program, 4))


def test_a_collective_beside_that_not_all_join():
    def program(comm, wait):
        if comm.rank:
            work = comm.all_reduce(X, async_op=True)
            if wait:
                work.wait()

    for wait in (True, False):
        error = raises_alike(DeadlockError, functools.partial(program, wait=wait), 3)
        assert "rank 0 (which has finished)" in str(error)
        assert ("its own all_reduce started with async_op=True, which waits for" in str(error)) is wait


def test_many_that_wait_are_not_all_listed():
    error = raises_alike(DeadlockError, lambda comm: comm.recv((comm.rank + 1) % comm.size), 40)
    assert "and 24 more" in str(error) and len(error.waiting) == 40 and len(error.cycle) == 41


def test_unreceived():
    def sent(comm):
        if comm.rank in (1, 3):
            for _ in range(2):
                comm.isend(X, comm.rank - 1)

    error = raises_alike(UnreceivedMessageError, sent, 4)
    assert str(error) == "rank 1 sent 2 message(s) to rank 0 that nobody received (the first: 32 bytes)"

    def asked(comm):
        if comm.rank == 1:
            comm.irecv(0)

    assert (
        str(raises_alike(UnreceivedMessageError, asked, 2))
        == "rank 1 posted a receive from rank 0 that nothing answered"
    )


# ---------------------------------------------------------------------- exceptions


def test_the_rank_that_failed_first_in_virtual_time_is_told():
    def program(comm):
        if comm.rank == 1:
            comm.compute(seconds=50.0)  # runs ahead, and fails late
            raise KeyError("late")
        if comm.rank == 2:
            comm.recv(0)
            comm.compute(seconds=1.0)
            raise ZeroDivisionError("early")
        if comm.rank == 0:
            comm.send(X, 2)
            comm.recv(1)

    error = raises_alike(RankError, program, 3)
    assert error.rank == 2 and type(error.__cause__) is ZeroDivisionError
    assert str(error).startswith("rank 2: ZeroDivisionError: early\n\nTraceback (most recent call last):")
    assert "in program" in error.traceback_text and "manyranks/runtime" not in error.traceback_text
    again = pickle.loads(pickle.dumps(error))
    assert again.rank == 2 and str(again) == str(error)


def test_at_the_same_moment_the_lowest_rank_is_told():
    def program(comm):
        if comm.rank:
            raise ValueError(f"rank {comm.rank}")

    assert raises_alike(RankError, program, 5).rank == 1


def test_an_exception_ends_ranks_that_wait():
    ended = []

    def program(comm):
        if comm.rank == 3:
            raise ValueError("no")
        try:
            comm.recv(3)
        finally:
            ended.append(comm.rank)
            with pytest.raises(GreenletExit):
                comm.barrier()

    assert raises_alike(RankError, program, 4).rank == 3
    assert sorted(ended) == sorted([0, 1, 2] * len(SEEDS))


def test_system_exit_is_told():
    assert type(inside(lambda comm: sys.exit(3))) is SystemExit


def test_keyboard_interrupt_ends_the_run_at_once():
    started = []

    def program(comm):
        started.append(comm.rank)
        if comm.rank == 1:
            raise KeyboardInterrupt
        comm.barrier()

    with pytest.raises(KeyboardInterrupt):
        simulate(program, ranks=5)
    assert started == [0, 1]


def test_a_program_that_swallows_every_exception(capfd):
    def program(comm):
        while True:
            try:
                comm.recv(1 - comm.rank)
            except BaseException:
                pass

    raises_alike(DeadlockError, program, 2)
    gc.collect()
    assert capfd.readouterr().err == ""


def test_a_program_that_catches_its_own_error_goes_on():
    def program(comm):
        try:
            comm.send(X, 99)
        except ValueError:
            return float(comm.all_reduce(1.0))

    assert simulate(program, ranks=3).results == [3.0] * 3


def test_deep_recursion():
    def depth(n):
        return 0 if n == 0 else 1 + depth(n - 1)

    limit = sys.getrecursionlimit()

    def program(comm):
        got = depth(limit // 2)
        comm.barrier()
        return got + depth(limit // 2) if comm.rank < 30 else got

    assert simulate(program, ranks=200).results[:30] == [2 * (limit // 2)] * 30
    error = inside(lambda comm: depth(10 * limit))
    assert type(error) is RecursionError


# ---------------------------------------------------------------------- simulations elsewhere


def test_a_simulation_within_a_rank():
    def inner(comm, x):
        return float(comm.all_reduce(x))

    def program(comm):
        mine = simulate(inner, inputs=[float(comm.rank), 10.0])
        total = float(comm.all_reduce(mine.results[0]))
        with pytest.raises(RankError, match="no"):
            simulate(broken, ranks=2)
        with pytest.raises(DeadlockError):
            simulate(lambda c: c.recv(1 - c.rank), ranks=2)
        comm.barrier()
        return total, mine.seconds

    def broken(comm):
        raise ValueError("no")

    run = simulate(program, ranks=3)
    assert [r[0] for r in run.results] == [33.0] * 3


def test_another_simulations_communicator_is_refused():
    def program(outer):
        simulate(lambda inner: outer.recv(1 - outer.rank), ranks=2)

    error = raises_alike(RankError, program, 2)
    assert "only that rank's own program may" in str(error)


def test_another_ranks_communicator_is_refused():
    comms = {}

    def program(comm):
        comms[comm.rank] = comm
        comm.barrier()
        if comm.rank == 0:
            comms[1].recv(0)
        comm.barrier()

    with pytest.raises(RankError, match="rank 1's communicator was called from another rank's program"):
        simulate(program, ranks=2)
    with pytest.raises(RuntimeError, match="after its run"):
        comms[0].recv(1)


def test_a_communicator_in_a_thread_is_refused():
    caught = []

    def program(comm):
        def work():
            try:
                comm.recv(1)
            except RuntimeError as error:
                caught.append(str(error))

        if comm.rank == 0:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

    with pytest.raises(UnreceivedMessageError):
        simulate(program, ranks=2)
    assert "thread" in caught[0]


def test_simulations_in_threads():
    out, threshold = {}, gc.get_threshold()

    def work(i):
        run = simulate(lambda comm: [float(comm.all_reduce(float(i))) for _ in range(30)][-1], ranks=6)
        out[i] = run.results

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert out == {i: [6.0 * i] * 6 for i in range(6)}
    assert gc.get_threshold() == threshold


def test_the_collector_is_as_it_was():
    before = gc.isenabled(), gc.get_threshold()
    simulate(lambda comm: comm.barrier(), ranks=2)
    with pytest.raises(RankError):
        simulate(lambda comm: 1 / 0, ranks=2)
    assert (gc.isenabled(), gc.get_threshold()) == before


def test_a_programs_own_cycles_are_collected():
    """A program that makes cyclic garbage (an autograd graph) must not grow without end."""

    def program(comm):
        for _ in range(600_000):
            a = []
            a.append(a)
        return len(gc.get_objects())

    before = len(gc.get_objects())
    assert simulate(program, ranks=1).results[0] < before + 550_000


# ---------------------------------------------------------------------- memory


def _everything(comm):
    x = np.ones(1000)
    g = comm.group(range(comm.size // 2)) or comm.group(range(comm.size // 2, comm.size))
    works = [comm.all_reduce(x, async_op=True), g.all_gather(x, async_op=True)]
    sending = comm.isend(x, (comm.rank + 1) % comm.size)
    comm.recv((comm.rank - 1) % comm.size)
    sending.wait()
    for work in works:
        work.wait()
    comm.all_reduce(phantom(10**9))
    comm.all_reduce(x, algorithm="closed_form")


def _deadlocked(comm):
    x = np.ones(1000)
    comm.all_reduce(x, async_op=True)
    comm.recv((comm.rank + 1) % comm.size)
    return x


def _failing(comm):
    x = np.ones(1000)
    comm.all_reduce(x)
    if comm.rank == 1:
        raise ValueError("no")
    comm.recv(1)
    return x


@pytest.mark.parametrize(
    "program, error", [(_everything, None), (_deadlocked, DeadlockError), (_failing, RankError)]
)
def test_a_run_is_freed(program, error):
    """Without the collector's help where nothing went wrong, and with it after an error (whose traceback holds frames)."""

    def once():
        if error is None:
            simulate(program, ranks=20)
        else:
            with pytest.raises(error):
                simulate(program, ranks=20)
            gc.collect()

    for _ in range(3):
        once()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        tracemalloc.start()
        once()
        base, _ = tracemalloc.get_traced_memory()
        for _ in range(5):
            once()
        grown = tracemalloc.get_traced_memory()[0] - base
        tracemalloc.stop()
        assert len(gc.get_objects()) < before + 300
        assert grown < 60_000
    finally:
        gc.enable()
