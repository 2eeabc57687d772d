"""What `launch` does when all goes well: programs by value, arrays, messages, groups, async, notes taken, backends."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
import types
from typing import NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="launch needs PyTorch")

from manyranks.runtime import backend, processes, supervisor  # noqa: E402
from manyranks.runtime.processes import choose_backend, launch  # noqa: E402
from manyranks.runtime.simulator import simulate  # noqa: E402

CPU = dict(device="cpu")


# ---------------------------------------------------------------------- programs


def exchange(comm, x):
    """A ring step and a sum, in code that both worlds take."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    going = comm.isend(x, right)
    got = comm.recv(left)
    going.wait()
    return comm.all_reduce(got, algorithm="ring") + comm.rank


def test_one_program_in_both_worlds():
    xs = [np.arange(6.0) * (r + 1) for r in range(4)]
    real, simulated = launch(exchange, inputs=xs, **CPU), simulate(exchange, inputs=xs)
    for a, b in zip(real.results, simulated.results):
        assert np.array_equal(a, b) and a.dtype == b.dtype
    assert np.array_equal(real.bytes_sent, simulated.bytes_sent)
    assert np.array_equal(real.traffic.matrix(), simulated.traffic.matrix())
    assert real.traffic.count == simulated.traffic.count
    assert real.rounds == simulated.rounds
    assert not real.nominal


def test_programs_travel_by_value():
    offset = 10

    def closure(comm):
        return comm.rank + offset

    cell = {}
    exec(
        compile(
            "k = 5\ndef helper(r): return r * k\ndef program(comm): return helper(comm.rank)",
            "<cell>",
            "exec",
        ),
        cell,
    )
    assert launch(closure, ranks=2, **CPU).results == [10, 11]
    assert launch(cell["program"], ranks=2, **CPU).results == [0, 5]
    assert launch(lambda comm, k: comm.rank * k, ranks=2, k=3, **CPU).results == [0, 3]
    assert launch(functools.partial(lambda comm, k: k, k=2), ranks=2, **CPU).results == [2, 2]


def made_up_module():
    module = types.ModuleType("made_up")
    module.__file__ = "made_up.py"
    exec(
        "SCALE = 3\ndef helper(r):\n    return SCALE * r\ndef program(comm):\n    return helper(comm.rank)",
        module.__dict__,
    )
    return module


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_module_that_ranks_could_not_import(method, monkeypatch):
    module = made_up_module()
    monkeypatch.setitem(sys.modules, "made_up", module)
    monkeypatch.setattr(backend, "start_method", lambda gpus: method)
    run = launch(module.program, ranks=2, **CPU)
    assert run.results == [0, 3]
    assert run.cluster["start"] == method


def test_spawned_ranks_do_as_forked_ones(monkeypatch, capfd):
    def program(comm, x):
        print("rank", comm.rank)
        return exchange(comm, x), torch.get_num_threads()

    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # more than one thread: a forked OpenMP would hang
    run = launch(program, inputs=[np.ones(3)] * 2, **CPU)
    assert run.cluster["start"] == "spawn"
    assert [threads for _, threads in run.results] == [2, 2]
    assert run.results[1][0].tolist() == [3, 3, 3]
    assert capfd.readouterr().out == "rank 0\nrank 1\n"


def test_a_forked_rank_computes_after_its_parent_has():
    x = torch.randn(600, 600, requires_grad=True)
    (x @ x).sum().backward()  # OpenMP's threads and autograd's are started here

    def program(comm):
        y = torch.ones(300, 300, requires_grad=True)
        (y @ y).sum().backward()
        return float(y.grad[0, 0]), torch.get_num_threads()

    assert launch(program, ranks=2, **CPU).results == [(600.0, 1)] * 2


# ---------------------------------------------------------------------- arguments and results


class Pair(NamedTuple):
    first: object
    second: object


def test_arrays_go_in_as_tensors_and_come_out_as_arrays():
    def program(comm, x, more):
        kinds = [type(x).__name__, type(more["list"][0]).__name__, type(more["words"]).__name__]
        return {"kinds": kinds, "x": x, "more": more, "tuple": (x + 1, Pair(x * 2, None)), "name": "text"}

    more = {
        "list": [np.arange(3), 5, "s"],
        "words": np.array(["a", "b"]),
        "zero_d": np.array(2.5),
        "empty": np.ones((0, 2)),
    }
    run = launch(program, inputs=[np.ones((2, 2), np.float32)] * 2, more=more, **CPU)
    out = run.results[1]
    assert out["kinds"] == ["Tensor", "Tensor", "ndarray"]
    assert isinstance(out["x"], np.ndarray) and out["x"].dtype == np.float32 and out["x"].shape == (2, 2)
    assert out["more"]["zero_d"].shape == () and out["more"]["zero_d"] == 2.5
    assert out["more"]["empty"].shape == (0, 2)
    assert out["more"]["words"].tolist() == ["a", "b"]
    assert out["tuple"][1].second is None and out["tuple"][1].first.tolist() == [[2, 2], [2, 2]]


NUMPY_TYPES = "float16 float32 float64 int8 int16 int32 int64 uint8 uint32 bool complex64".split()


def test_every_type_of_array_can_be_sent():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    arrays = [np.array([[0, 1], [1, 3]]).astype(t) for t in NUMPY_TYPES]
    arrays += [
        np.array([0.5, 3], dtype=ml_dtypes.bfloat16),
        np.array([0.5, 3], dtype=ml_dtypes.float8_e4m3fn),
    ]

    def program(comm, arrays):
        if comm.rank == 0:
            for x in arrays:
                comm.send(x, 1)
            return None
        return [comm.recv(0) for _ in arrays]

    for sent, got in zip(arrays, launch(program, ranks=2, arrays=arrays, **CPU).results[1]):
        assert got.dtype == sent.dtype and np.array_equal(got, sent)


# 512 float64 are 4 KiB, the longest payload that travels with its header.
SHAPES = [(), (0,), (0, 3), (3, 0, 2), (1,), (511,), (513,), (4096,), (100_003,), (7, 11, 3)]


def test_messages_of_any_size_and_shape_in_order():
    def program(comm, shapes):
        xp = comm.xp
        arrays = [xp.reshape(xp.arange(int(np.prod(s)), dtype=xp.float64), s) for s in shapes]
        matrix = xp.reshape(xp.arange(12_000.0), (100, 120))
        arrays += [matrix.T, matrix[::3, 1::2], matrix[5]]
        if comm.rank == 0:
            works = [comm.isend(x, 1) for x in arrays]
            for work in reversed(works):
                work.wait()
            return None
        got = [comm.irecv(0) for _ in arrays]
        values = [work.wait() for work in reversed(got)][::-1]
        return [bool((a == b).all()) and a.shape == b.shape for a, b in zip(arrays, values)]

    assert all(launch(program, ranks=2, shapes=SHAPES, **CPU).results[1])


@pytest.mark.parametrize("length", [4, 50_000])
def test_a_message_is_a_snapshot(length):
    def program(comm, n):
        x = comm.xp.ones(n)
        if comm.rank == 0:
            work = comm.isend(x, 1)
            x[:] = 7
            time.sleep(0.05)
            work.wait()
            return x
        time.sleep(0.05)
        return comm.recv(0)

    run = launch(program, ranks=2, n=length, **CPU)
    assert run.results[1].max() == 1


def test_both_receive_before_they_send():
    """irecv, then a large send, on both sides: what arrives is taken in while the program is in send."""

    def program(comm):
        x = comm.xp.ones(300_000) * comm.rank
        coming = comm.irecv(1 - comm.rank)
        comm.send(x, 1 - comm.rank)
        return float(coming.wait()[-1])

    assert launch(program, ranks=2, timeout=20, **CPU).results == [1, 0]


def test_send_waits_until_it_is_asked_for():
    def program(comm):
        comm.barrier()
        if comm.rank == 0:
            comm.send(np.ones(1), 1)
            return comm.time()
        time.sleep(0.4)
        comm.recv(0)

    assert launch(program, ranks=2, **CPU).results[0] > 0.35


def test_messages_and_collectives_are_not_confused():
    def program(comm):
        me, other = comm.rank, 1 - comm.rank
        group, again = comm.group([1, 0]), comm.group([1, 0])
        works = [comm.isend(np.full(2, 1), other), group.isend(np.full(2, 2), 1 - group.rank)]
        works.append(again.isend(np.full(2, 3), 1 - again.rank))
        total = comm.all_reduce(np.full(2, me), algorithm="ring")
        got = [c.recv(1 - c.rank) for c in (again, group, comm)]
        for work in works:
            work.wait()
        return [int(x[0]) for x in got], int(total[0])

    assert launch(program, ranks=2, **CPU).results == [([3, 2, 1], 1)] * 2


def test_calls_do_not_change_their_argument():
    def program(comm):
        x = comm.xp.ones(5) * (comm.rank + 1)
        for algorithm in ("auto", "ring", "tree", "halving_doubling", "naive"):
            comm.all_reduce(x, algorithm=algorithm)
        comm.reduce(x), comm.reduce_scatter(x), comm.broadcast(x), comm.all_gather(x)
        return x

    assert launch(program, ranks=2, **CPU).results[1].tolist() == [2] * 5


# ---------------------------------------------------------------------- async


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_async_collectives_overlap_and_keep_their_order(algorithm):
    def program(comm, algorithm):
        x = comm.xp.ones(20_000)
        works = [comm.all_reduce(x * i, algorithm=algorithm, async_op=True) for i in range(6)]
        x *= 100
        inner = comm.all_reduce(x, algorithm=algorithm)  # joins the queue behind them
        group = comm.group([1, 0])
        beside = group.all_gather(comm.xp.ones(2) * comm.rank, async_op=True)
        comm.send(x, 1 - comm.rank) if comm.rank == 0 else comm.recv(0)
        values = [float(w.wait()[0]) for w in reversed(works)]
        return values, float(inner[0]), beside.wait(), works[0].wait()[0]

    for values, inner, gathered, again in launch(program, ranks=2, algorithm=algorithm, **CPU).results:
        assert values == [10, 8, 6, 4, 2, 0] and inner == 200 and again == 0
        assert gathered.tolist() == [1, 1, 0, 0]


def test_collectives_that_nobody_waits_for_are_finished():
    def program(comm):
        comm.all_reduce(np.ones(200_000), async_op=True)
        comm.all_reduce(np.ones(200_000), algorithm="ring", async_op=True)
        return comm.rank

    run = launch(program, ranks=2, **CPU)
    assert run.results == [0, 1]
    assert [i.kind for i in run.timeline if i.lane == 1 and i.rank == 0] == ["comm", "comm"]


def test_an_error_of_an_async_collective_is_raised_by_wait():
    def program(comm):
        work = comm.reduce_scatter(np.ones((4, 2)), algorithm="ring", async_op=True)
        try:
            comm.all_reduce(np.ones(3), algorithm="closed_form")
        except ValueError as error:
            return str(error), work.wait().shape

    text, shape = launch(program, ranks=2, **CPU).results[0]
    assert "is a formula for the simulator" in text and shape == (2, 2)


# ---------------------------------------------------------------------- what a run tells


def test_traffic_timeline_and_records():
    def program(comm, x):
        comm.compute(label="sleep")
        time.sleep(0.1)
        comm.record("before", x)
        x = comm.all_reduce(x)
        comm.record("after", x)
        x = comm.all_reduce(x, algorithm="ring")
        if comm.rank == 0:
            comm.send(x, 1)
        if comm.rank == 1:
            comm.recv(0)

    run = launch(program, inputs=[np.ones(9) * r for r in range(3)], record=True, **CPU)
    assert run.world == "3 processes, gloo on CPU"
    assert repr(run).startswith("<Run: 3 ranks, 3 processes, gloo on CPU, ")
    assert run.nominal and any("nominal" in note for note in run.notes)
    assert run.cluster["backend"] == "gloo" and run.cluster["device"] == "cpu" and run.cluster["cores"] >= 1
    json.dumps(run.cluster)
    assert run.bytes_sent.tolist() == [
        2 * 9 * 8 * 2 // 3 * 2 + 72,
        2 * 9 * 8 * 2 // 3 * 2,
        2 * 9 * 8 * 2 // 3 * 2,
    ]
    assert run.traffic.where(call="send").bytes == 72
    assert all(0 <= m.start <= m.end <= run.seconds for m in run.traffic)
    assert run.seconds == max(run.ends) and 0.1 < run.seconds < 10
    assert [r.label for r in run.records if r.rank == 2] == ["before", "after"]
    assert run.records[-1].value.tolist() == [3] * 9
    own = [i for i in run.timeline if i.rank == 1]
    assert {i.kind for i in own} == {"compute", "wait"}
    assert [i.label for i in own if i.kind == "wait"] == ["all_reduce", "all_reduce", "recv"]
    assert next(i for i in own if i.label == "sleep").end > 0.1
    assert all(a.end <= b.start + 1e-9 for a, b in zip(own, own[1:]))
    assert run.busy("compute")[1] > 0.1


def test_records_only_when_asked_for():
    run = launch(lambda comm: comm.record("x", np.ones(1)), ranks=2, **CPU)
    assert run.records == []


def test_the_ranks_start_together():
    ends = launch(lambda comm: comm.time(), ranks=4, **CPU).results
    assert 0 <= min(ends) and max(ends) < 0.2


def test_output_is_shown_in_rank_order(capfd):
    def program(comm):
        time.sleep(0.1 * (comm.size - comm.rank))
        print("out", comm.rank)
        print("err", comm.rank, file=sys.stderr)
        os.system("echo shell " + str(comm.rank))

    launch(program, ranks=3, **CPU)
    out, err = capfd.readouterr()
    assert out == "out 0\nshell 0\nout 1\nshell 1\nout 2\nshell 2\n"
    assert err == "err 0\nerr 1\nerr 2\n"


def test_loopback_and_threads_unless_set(monkeypatch):
    def program(comm):
        return os.environ["GLOO_SOCKET_IFNAME"], os.environ["OMP_NUM_THREADS"], torch.get_num_threads()

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    name, omp, threads = launch(program, ranks=2, **CPU).results[0]
    assert name.startswith("lo") and omp == "1" and threads == 1
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    assert launch(program, ranks=2, **CPU).results[0][0] == name
    assert "RANK" not in os.environ and "MASTER_PORT" not in os.environ


def test_one_rank_and_default_ranks():
    run = launch(
        lambda comm, x: [comm.all_reduce(x), comm.all_gather(x), comm.size], inputs=[np.ones(2)], **CPU
    )
    assert run.results[0][0].tolist() == [1, 1] and run.results[0][2] == 1
    assert run.world == "1 process, gloo on CPU"
    assert launch(lambda comm: comm.size, **CPU).results == [2, 2]


def test_torch_distributed_is_there_for_its_own_modules():
    def program(comm):
        model = torch.nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp(torch.full((2, 3), float(comm.rank))).sum().backward()
        group = comm.group([0, 1])
        y = torch.ones(1)
        torch.distributed.all_reduce(y, group=group.process_group)
        return model.weight.grad, y

    run = launch(program, ranks=2, **CPU)
    assert run.results[0][0].tolist() == [[1, 1, 1]] and run.results[0][1].tolist() == [2]


def test_from_another_thread_and_while_a_port_is_taken():
    import socket

    taken = [socket.socket() for _ in range(2)]
    for s, port in zip(taken, (29500, 29400)):  # torch's own defaults
        try:
            s.bind(("127.0.0.1", port))
            s.listen()
        except OSError:
            pass
    out = []
    threads = [
        threading.Thread(target=lambda: out.append(launch(lambda c: c.rank, ranks=2, **CPU).results))
        for _ in range(2)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for s in taken:
        s.close()
    assert out == [[0, 1], [0, 1]]


def test_a_port_that_comes_again(monkeypatch):
    """Where torch does not find the server that is to be shared, another port is taken."""

    class Store:
        made = []

        def __init__(self, host, port, **options):
            Store.made.append(port)
            self.port = port or 50_000 + len(Store.made)
            if port == 50_001:
                raise RuntimeError("EADDRINUSE")

    monkeypatch.setattr(torch.distributed, "TCPStore", Store)
    assert [store.port for store in supervisor._serve()] == [50_003, 50_003]
    assert Store.made == [0, 50_001, 0, 50_003]


def test_a_launch_takes_about_two_seconds():
    launch(lambda comm: None, ranks=2, **CPU)
    began = time.monotonic()
    launch(lambda comm: comm.all_reduce(np.ones(3)), ranks=4, **CPU)
    assert time.monotonic() - began < 8  # 1 on idle cores


def test_forked_ranks_that_do_not_come_up_are_spawned(monkeypatch):
    monkeypatch.setattr(
        supervisor, "main", lambda job: time.sleep(100)
    )  # as if a lock had been held at the fork
    monkeypatch.setattr(supervisor, "FORK_START", 0.0)
    run = launch(lambda comm: comm.rank, ranks=2, **CPU)
    assert run.results == [0, 1] and run.cluster["start"] == "spawn"


def test_launch_from_a_rank():
    def program(comm):
        try:
            launch(lambda comm: 0, ranks=2)
        except RuntimeError as error:
            return str(error)

    assert "called by a rank of a launch" in launch(program, ranks=2, **CPU).results[1]


# ---------------------------------------------------------------------- scripts, notebooks, torchrun


def run_python(*command, cwd, **environment):
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=cwd, timeout=120,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(cwd), **environment},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])  # by fork, by spawn
def test_a_plain_script_without_main_guard(tmp_path, threads):
    (tmp_path / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    script = """
        import numpy as np
        from manyranks import launch
        import helper
        print("top level")
        def program(comm, x):
            return helper.double(comm.all_reduce(x))
        print(launch(program, inputs=[np.ones(2)] * 2, device="cpu").results[1])
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    run = run_python("script.py", cwd=tmp_path, OMP_NUM_THREADS=threads)
    assert run.stdout == "top level\n[4. 4.]\n", run.stderr
    assert run.stderr == ""


@pytest.mark.slow
def test_torchrun(tmp_path):
    script = """
        import os
        import numpy as np, torch
        from manyranks.runtime.processes import from_environment
        comm = from_environment()
        x = comm.all_reduce(np.ones(2) * comm.rank, algorithm="ring")
        y = comm.group([1, 0]).all_gather(np.ones(1) * comm.rank)
        line = f"{comm.rank} {comm.size} {x.tolist()} {y.tolist()}\\n"
        os.write(1, line.encode())  # at once: two ranks write to one pipe
        torch.distributed.destroy_process_group()
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    options = [
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--log-dir",
        ".",
    ]
    run = run_python(
        "-m", "torch.distributed.run", *options, "script.py", cwd=tmp_path, GLOO_SOCKET_IFNAME="lo"
    )
    assert sorted(run.stdout.splitlines()) == [f"{r} 2 [1.0, 1.0] [1.0, 0.0]" for r in (0, 1)], run.stderr


def test_without_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        RuntimeError,
        match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: start the script with torchrun",
    ):
        processes.from_environment()


@pytest.mark.slow
def test_in_a_notebook(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [
        "import asyncio, numpy as np\nfrom manyranks import launch\nscale = 3\nassert asyncio.get_event_loop().is_running()",
        "def program(comm, x):\n    print('hello from', comm.rank)\n    return comm.all_reduce(x) * scale",
        "run = launch(program, inputs=[np.ones(2), np.ones(2)], device='cpu')\nrun.results[0]",
        "try:\n    launch(lambda comm: 1 / comm.rank, ranks=2)\nexcept Exception as error:\n    print(error)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    client = nbclient.NotebookClient(notebook, timeout=90, resources={"metadata": {"path": os.getcwd()}})
    client.execute()
    outputs = [[o.get("text") or o["data"]["text/plain"] for o in cell.outputs] for cell in notebook.cells]
    assert outputs[2] == ["hello from 0\nhello from 1\n", "array([6., 6.])"]
    assert "rank 0: ZeroDivisionError" in outputs[3][0] and "1 / comm.rank" in outputs[3][0]


# ---------------------------------------------------------------------- backends


@pytest.mark.parametrize(
    "ranks, gpus, device, carrier, on, world",
    [
        (4, 0, "auto", "gloo", "cpu", "4 processes, gloo on CPU"),
        (1, 0, "cpu", "gloo", "cpu", "1 process, gloo on CPU"),
        (2, 1, "auto", "gloo", "cuda", "2 processes sharing 1 GPU (H200), gloo through host memory"),
        (1, 1, "auto", "nccl", "cuda", "1 process, NCCL on 1 GPU (H200)"),
        (8, 8, "cuda", "nccl", "cuda", "8 processes, NCCL on 8 GPUs (H200)"),
        (4, 8, "auto", "nccl", "cuda", "4 processes, NCCL on 4 GPUs (H200)"),
        (9, 8, "auto", "gloo", "cuda", "9 processes sharing 8 GPUs (H200), gloo through host memory"),
        (4, 8, "cpu", "gloo", "cpu", "4 processes, gloo on CPU"),
    ],
)
def test_choice_of_backend(ranks, gpus, device, carrier, on, world):
    place = choose_backend(ranks, ["H200"] * gpus, device)
    assert (place.backend, place.device, place.world) == (carrier, on, world)
    assert place.note


def test_cuda_without_a_gpu():
    with pytest.raises(ValueError, match="device='cuda' needs a GPU"):
        choose_backend(2, [], "cuda")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device='cuda' needs a GPU"):
            launch(lambda comm: None, ranks=2, device="cuda")


def test_start_method(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "platform", "linux")
    assert backend.start_method(0) == "fork"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert backend.start_method(0) == "spawn"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert backend.start_method(1) == "spawn"
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    assert backend.start_method(1) == "fork"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert backend.start_method(0) == "spawn"


def test_the_wire_of_nccl_with_gloo_in_its_place():
    """The wire that starts payloads together and tells tags apart by headers; NCCL itself needs a GPU for each rank."""

    def program(comm, cases):
        import torch.distributed as dist

        from manyranks.runtime.wire import NcclWire

        comm.world.wire = NcclWire(comm.world, dist.group.WORLD, dist.new_group())
        me, n = comm.rank, comm.size
        right, left = (me + 1) % n, (me - 1) % n
        works = [comm.isend(comm.xp.ones(3000) * (10 * me + i), right) for i in range(3)]
        coming = [comm.irecv(left) for _ in range(3)]
        group = comm.group(list(range(n)))
        beside = group.isend(comm.xp.ones(2) * me, right)
        got = float(group.recv(left)[0])  # before the three, which were sent first
        values = [float(w.wait()[0]) for w in reversed(coming)]
        for work in [beside, *works]:
            work.wait()
        pending = [comm.all_reduce(comm.xp.ones(5) * i, algorithm="ring", async_op=True) for i in range(3)]
        sums = [float(w.wait()[0]) for w in reversed(pending)]
        empty = comm.all_gather(comm.xp.zeros((0, 2)), algorithm="ring").shape
        moved = [comm.all_reduce(comm.xp.arange(7.0), algorithm=a) for a in cases]
        return got, values, sums, empty, moved

    cases = ["ring", "tree", "halving_doubling", "naive"]
    run = launch(program, ranks=3, timeout=30, cases=cases, **CPU)
    for r, (got, values, sums, empty, moved) in enumerate(run.results):
        left = (r - 1) % 3
        assert got == left
        assert values == [10 * left + 2, 10 * left + 1, 10 * left]
        assert sums == [6, 3, 0] and tuple(empty) == (0, 2)
        assert all(m.tolist() == [3.0 * i for i in range(7)] for m in moved)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_gpus(ranks):
    def program(comm, x):
        y = [comm.all_reduce(x), comm.all_reduce(x, algorithm="ring"), comm.all_gather(x), comm.broadcast(x)]
        w = comm.all_reduce(x, async_op=True)
        if comm.size > 1:
            comm.isend(x, 1 - comm.rank), y.append(comm.recv(1 - comm.rank))
        return str(x.device), y, w.wait()

    run = launch(program, inputs=[np.ones(70_000, np.float32)] * ranks)
    assert ("NCCL" in run.world) == (torch.cuda.device_count() >= ranks)
    for device, y, w in run.results:
        assert device.startswith("cuda")
        assert y[0].max() == y[1].max() == w.max() == ranks
