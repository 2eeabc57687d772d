"""Two hosts on one machine: two network namespaces joined by a cable whose rate is set.

    sudo .venv/bin/python -m manyranks.bench.two_hosts                      # predicted and measured, a minute
    sudo .venv/bin/python -m manyranks.bench.two_hosts --rates 25 50 100 --record
    sudo .venv/bin/python -m manyranks.bench.two_hosts --rate 100 -- -m manyranks.bench all_reduce -e 4M

A namespace is a host as far as the network goes: interfaces, addresses, ports and a loopback of its own. A pair of
virtual Ethernet interfaces (veth) is the cable, and ``tc qdisc ... tbf`` on both ends lets through so many bits a
second, each way. torchrun runs in each namespace as on two machines: the same rendezvous, the same failures.

Without arguments after ``--`` it measures all-reduce over the cable at several rates beside the alpha-beta model, the
ring beside the hierarchical all-reduce with two ranks a host, and finds where a data-parallel step becomes bound by
the cable. With them it runs that command under torchrun on both hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from manyranks import collectives, data_parallel
from manyranks.results import FOLDER, record
from manyranks.runtime import Comm, human_bytes, human_seconds

__all__ = [
    "TwoHosts",
    "crossing",
    "goodput",
    "measure",
    "obstacle",
    "predicted_all_reduce",
    "predicted_wall",
    "tables",
]

INTERFACE = "eth0"  # in both namespaces
ADDRESSES = ("10.77.0.1", "10.77.0.2")
#: Of an Ethernet frame's 1,514 bytes that tbf counts, 1,448 are TCP's payload: 14 Ethernet, 20 IP, 32 TCP with time stamps.
PAYLOAD = 1448 / 1514
WORLD = "2 hosts on one machine, gloo over veth"


# ------------------------------------------------------------------------------------------------ predictions


def goodput(megabits: float) -> float:
    """Payload in bytes per second over a cable of so many Mb/s, headers paid.

    >>> round(goodput(100) / 1e6, 2)
    11.96
    """
    if not megabits > 0:
        raise ValueError(f"megabits must be positive, got {megabits}")
    return megabits * 1e6 / 8 * PAYLOAD


def predicted_all_reduce(size: float, ranks: int, megabits: float, alpha: float) -> float:
    """Predicted seconds of a ring all-reduce that crosses the cable once each way.

    The ring visits one host's ranks after the other's, so that each direction of the cable carries one rank's traffic,
    2 S (n - 1) / n, whatever n is.

    >>> round(predicted_all_reduce(1e6, 2, 100, alpha=0), 4)
    0.0836
    """
    return collectives.ring_all_reduce_seconds(size, ranks, alpha, goodput(megabits))


def predicted_wall(gradient: float, compute: float, ranks: int = 2) -> float:
    """The rate in Mb/s at which the gradient's all-reduce is predicted to take as long as computing it.

    Chapter 3's `wall_bandwidth`, with headers. `gradient` in bytes, `compute` in seconds.

    >>> round(predicted_wall(1.2e6, 0.1), 1)
    100.4
    """
    rate = data_parallel.wall_bandwidth(1, tokens=1, flops=6 / compute, ranks=ranks, grad_bytes=gradient)
    return rate * 8 / 1e6 / PAYLOAD


def crossing(rates: Sequence[float], ratios: Sequence[float]) -> float | None:
    """The rate at which a falling ratio passes 1, between the two measured rates around it (log-log); None if it doesn't.

    >>> crossing([50, 100, 200], [2.0, 1.25, 0.8])
    141.42135623730948
    """
    points = sorted(zip(rates, ratios))
    for (r0, q0), (r1, q1) in zip(points, points[1:]):
        if q0 >= 1 > q1:
            share = np.log(q0) / np.log(q0 / q1)
            return float(r0 * (r1 / r0) ** share)
    return None


# ------------------------------------------------------------------------------------------------ namespaces


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def tbf(megabits: float) -> list[str]:
    """tc's arguments for a rate. A bucket of 1 ms, 32 kB at least; a queue that no TCP window overflows.

    What the bucket holds goes at once, so that short messages come in below the prediction.
    """
    burst = max(32_000, int(megabits * 1e6 / 8 * 0.001))
    return ["tbf", "rate", f"{megabits:g}mbit", "burst", f"{burst}b", "limit", "64mb"]


class TwoHosts:
    """Two namespaces and the cable between them, for a ``with`` block.

    What was started in them is ended and they are removed when the block is left, however it is left; what a killed
    process has left behind goes when the next one starts.

    Attributes:
        names: of the two namespaces.
    """

    def __init__(self, megabits: float | None = None):
        self.names = tuple(f"manyranks-{os.getpid()}-{side}" for side in "ab")
        self.megabits = megabits
        self.processes: list[subprocess.Popen] = []
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> TwoHosts:
        for number in (signal.SIGTERM, signal.SIGHUP):
            try:  # so that being ended is an exception, and the block is left
                self.handlers[number] = signal.signal(number, lambda n, frame: sys.exit(128 + n))
            except ValueError:  # not the main thread: its owner has to see to it
                break
        _remove_stale()
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            a, b = self.names
            _run(
                "ip",
                "link",
                "add",
                INTERFACE,
                "netns",
                a,
                "type",
                "veth",
                "peer",
                "name",
                INTERFACE,
                "netns",
                b,
            )
            for name, address in zip(self.names, ADDRESSES):
                _run("ip", "-n", name, "addr", "add", f"{address}/30", "dev", INTERFACE)
                _run("ip", "-n", name, "link", "set", "lo", "up")
                _run("ip", "-n", name, "link", "set", INTERFACE, "up")
                _calm(name)
            if self.megabits is not None:
                self.set_rate(self.megabits)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def set_rate(self, megabits: float) -> None:
        """Let through so many Mb/s, each way."""
        for name in self.names:
            _run("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", *tbf(megabits))

    def torchrun(self, host: int, per_host: int, *command: str, **options: Any) -> subprocess.Popen:
        """Start torchrun on one of the two hosts; both have to be started. `options` go to Popen."""
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",  # both hosts would claim the same GPUs
            "TORCH_CPP_LOG_LEVEL": os.environ.get(
                "TORCH_CPP_LOG_LEVEL", "ERROR"
            ),  # no warning of missing DNS
        }
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], sys.executable, "-m", "torch.distributed.run",
             "--nnodes=2", f"--nproc-per-node={per_host}", "--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29500",
             f"--rdzv-id={self.names[0]}", f"--rdzv-conf=is_host={1 - host}", f"--local-addr={ADDRESSES[host]}", *command],
            env=environment, start_new_session=True, **options,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def wait(self, timeout: float) -> int:
        """Wait for both; the first failure's exit status, 0, or TimeoutError."""
        end = time.monotonic() + timeout
        while True:
            codes = [process.poll() for process in self.processes]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            if time.monotonic() > end:
                raise TimeoutError(f"not done within {timeout:g} s")
            time.sleep(0.1)

    def close(self) -> None:
        """End what runs in the namespaces and remove them. May be called again; Ctrl-C does not stop it halfway."""
        try:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        except ValueError:  # not the main thread, to which Ctrl-C goes
            return self._close()
        try:
            self._close()
        finally:
            signal.signal(signal.SIGINT, before)

    def _close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        for name in self.names:
            _remove(name)
        for process in self.processes:
            process.wait()
        self.processes.clear()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers.clear()


def _calm(name: str) -> None:
    """The usual congestion control, if the machine's own is another one: BBR paces by a model of its own."""
    subprocess.run(
        ["ip", "netns", "exec", name, "sh", "-c", "echo cubic > /proc/sys/net/ipv4/tcp_congestion_control"],
        capture_output=True, timeout=30,
    )  # fmt: skip


def _namespaces() -> list[str]:
    return re.findall(r"^(manyranks-\d+-[ab])\b", _run("ip", "netns", "list"), re.MULTILINE)


def _remove(name: str) -> None:
    """A namespace and all that runs in it."""
    for _ in range(50):
        pids = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, timeout=30
        ).stdout.split()
        if not pids:
            break
        for pid in map(int, pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)


def _remove_stale() -> None:
    for name in _namespaces():
        pid = int(name.split("-")[1])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            _remove(name)
        except PermissionError:
            pass


def obstacle() -> str | None:
    """Why two hosts can't be made here, or None if they can: it makes them, and removes them."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, and this is {sys.platform}"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; on Debian and Ubuntu: apt-get install iproute2"
    if os.geteuid() != 0:
        return "making network namespaces needs root: start it with sudo"
    try:
        with TwoHosts(megabits=100):
            return None
    except (OSError, subprocess.SubprocessError) as error:
        return f"this machine makes no namespaces or no rate limit: {error}"


# ------------------------------------------------------------------------------------------------ on the hosts


def _quickest(group: Comm, work: Any, repeats: int) -> float:
    """Of each repetition the slowest rank's seconds, and of these the least; one more warms up."""
    import torch

    times = []
    for _ in range(repeats + 1):
        group.barrier()
        began = group.time()
        work()
        times.append(group.time() - began)
    everyones = group.all_gather(torch.tensor([times[1:]], dtype=torch.float64))  # (ranks, repeats)
    return float(everyones.amax(0).amin())


def worker(comm: Comm, plan: dict[str, Any]) -> dict[str, Any]:
    """What each rank does; returns the figures on rank 0."""
    import torch

    per_host = comm.size // 2
    pair = comm.group([0, per_host])  # one rank of each host
    found: dict[str, Any] = {
        "ranks": comm.size,
        "per_host": per_host,
        "all_reduce": [],
        "two_a_host": [],
        "wall": [],
    }

    def at_rate(megabits: float) -> None:
        """Each host's first rank sets its end of the cable while nothing is under way."""
        comm.barrier()
        if comm.rank % per_host == 0:
            _run("tc", "qdisc", "replace", "dev", INTERFACE, "root", *tbf(megabits))
        comm.barrier()
        time.sleep(0.05)  # the bucket fills

    def reduce_of(group: Comm, size: int) -> Any:
        x = torch.ones(size // 4)
        return lambda: group.all_reduce(x)

    at_rate(max(plan["rates"]))
    if pair is not None:
        found["alpha"] = _quickest(pair, reduce_of(pair, 8), 50) / 2  # two messages, one after the other
    for rate in plan["rates"]:
        at_rate(rate)
        for size in plan["sizes"]:
            if pair is not None:
                seconds = _quickest(pair, reduce_of(pair, size), plan["repeats"])
                found["all_reduce"].append({"rate": rate, "size": size, "seconds": seconds})
    if per_host > 1:
        rate, size = (
            sorted(plan["rates"])[:2][-1],
            plan["sizes"][-1],
        )  # slow: the cable, not the cores, is to count
        at_rate(rate)
        x = torch.ones(size // 4)
        ring = _quickest(comm, lambda: comm.all_reduce(x), plan["repeats"])
        two_levels = _quickest(
            comm, lambda: collectives.hierarchical_all_reduce(comm, x, per_host), plan["repeats"]
        )
        found["two_a_host"] = [
            {"algorithm": "ring", "rate": rate, "size": size, "seconds": ring},
            {"algorithm": "hierarchical", "rate": rate, "size": size, "seconds": two_levels},
        ]
    found |= _wall(comm, pair, plan, at_rate)
    return found


def _wall(comm: Comm, pair: Comm | None, plan: dict[str, Any], at_rate: Any) -> dict[str, Any]:
    """A data-parallel step's parts around the rate at which the wall is predicted."""
    import torch

    params = data_parallel.tree_map(
        torch.from_numpy, data_parallel.init_mlp((64, 512, 512, 10), dtype=np.float32)
    )
    rng = np.random.default_rng(comm.rank)
    batch = plan["batch"]
    x = torch.from_numpy(rng.random((batch, 64), dtype=np.float32))
    targets = torch.eye(10)[torch.from_numpy(rng.integers(0, 10, batch))]
    flat = data_parallel.flatten(params)
    gradient = flat.numel() * 4

    def compute() -> Any:
        return data_parallel.loss_and_gradient(params, x, targets)[1]

    def step() -> None:
        data_parallel.average_gradients(pair, compute())

    estimate = torch.zeros(1, dtype=torch.float64)
    if pair is not None:
        estimate[0] = _quickest(pair, compute, plan["repeats"] + 2)
    seconds = float(comm.broadcast(estimate, src=0)[0])
    wall = predicted_wall(gradient, seconds)
    rows = []
    for factor in plan["wall"]:
        rate = round(wall * factor, 1)
        at_rate(rate)
        if pair is not None:
            seconds = min(seconds, _quickest(pair, compute, plan["repeats"]))
            rows.append({
                "rate": rate,
                "all_reduce": _quickest(pair, lambda: pair.all_reduce(flat), plan["repeats"]),
                "step": _quickest(pair, step, plan["repeats"]),
            })  # fmt: skip
    return {"gradient": gradient, "batch": batch, "compute": seconds, "wall": rows}


def measure(plan: dict[str, Any], per_host: int = 2, timeout: float = 300.0) -> dict[str, Any]:
    """Make two hosts, measure what `plan` says, remove them. Returns the figures.

    Args:
        plan: "rates" in Mb/s, "sizes" in bytes, "repeats", "batch" (examples a rank and step) and "wall" (factors of
            the predicted wall at which steps are timed).
        per_host: ranks on each host; the comparison of ring and hierarchical needs 2.
        timeout: seconds.

    Raises: RuntimeError with the hosts' last lines if a run fails; TimeoutError.
    """
    with tempfile.TemporaryDirectory(prefix="manyranks-") as folder, TwoHosts(max(plan["rates"])) as hosts:
        answer, logs = Path(folder) / "found.json", [Path(folder) / f"host-{side}" for side in "ab"]
        (Path(folder) / "plan.json").write_text(json.dumps(plan))
        for host, log in enumerate(logs):
            with log.open("wb") as out:
                hosts.torchrun(host, per_host, "-m", "manyranks.bench.two_hosts", "--worker", folder,
                               stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)  # fmt: skip
        try:
            code = hosts.wait(timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{_tails(logs)}") from None
        if code or not answer.exists():
            raise RuntimeError(f"torchrun ended with status {code}\n{_tails(logs)}")
        return json.loads(answer.read_text())


def _tails(logs: Sequence[Path]) -> str:
    texts = [
        f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]) for log in logs
    ]
    return "\n".join(texts)


# ------------------------------------------------------------------------------------------------ telling


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """The figures with the predictions beside them: "all_reduce", "two_a_host", "wall", and the two walls in Mb/s."""
    alpha = found["alpha"]
    reductions = [
        {**row, "predicted": predicted_all_reduce(row["size"], 2, row["rate"], alpha)}
        for row in found["all_reduce"]
    ]
    two_a_host = []
    for row in found["two_a_host"]:
        predicted = predicted_all_reduce(row["size"], found["ranks"], row["rate"], alpha)
        if row["algorithm"] == "hierarchical":  # the hosts' ranks share the cable, S/2 bytes each
            predicted = 2 * alpha + row["size"] / goodput(row["rate"])
        two_a_host.append({**row, "predicted": predicted})
    rows, compute = found["wall"], found["compute"]
    wall = [
        {**row, "predicted": compute + predicted_all_reduce(found["gradient"], 2, row["rate"], alpha)}
        for row in rows
    ]
    return {
        "all_reduce": reductions,
        "two_a_host": two_a_host,
        "wall": wall,
        "predicted_wall": predicted_wall(found["gradient"], compute),
        "measured_wall": crossing([r["rate"] for r in rows], [r["all_reduce"] / compute for r in rows]),
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The figures as Markdown, by part."""
    seen = compared(found)

    def pair(row: dict[str, Any], measured: str = "seconds") -> list[str]:
        return [
            human_seconds(row["predicted"]),
            human_seconds(row[measured]),
            f"{row[measured] / row['predicted']:.2f}",
        ]

    measured_wall = seen["measured_wall"]
    walls = [
        f"Computing alone, measured: {human_seconds(found['compute'])}.",
        f"Predicted wall: {seen['predicted_wall']:.0f} Mb/s.",
        f"Measured: {measured_wall:.0f} Mb/s." if measured_wall else "Measured: not among these rates.",
    ]
    return {
        "all_reduce": _table(
            ["rate", "size", "predicted", "measured", "measured / predicted"],
            [[f"{r['rate']:g} Mb/s", human_bytes(r["size"]), *pair(r)] for r in seen["all_reduce"]],
        ),
        "two_a_host": _table(
            ["algorithm", "rate", "size", "predicted", "measured", "measured / predicted"],
            [[r["algorithm"], f"{r['rate']:g} Mb/s", human_bytes(r["size"]), *pair(r)] for r in seen["two_a_host"]],
        ),
        "wall": _table(
            ["rate", "all-reduce, measured", "longer", "step, predicted", "step, measured", "measured / predicted"],
            [
                [f"{r['rate']:g} Mb/s", human_seconds(r["all_reduce"]),
                 "all-reduce" if r["all_reduce"] > found["compute"] else "computing", *pair(r, "step")]
                for r in seen["wall"]
            ],
        ) + "\n\n" + " ".join(walls),
    }  # fmt: skip


def told(found: dict[str, Any]) -> str:
    """All of it, for a terminal."""
    made, alpha = tables(found), found["alpha"]
    parts = [
        f"{WORLD}, {found['ranks']} processes. alpha measured with 8 bytes: {human_seconds(alpha)}; beta from tc's rate "
        f"and TCP's headers ({PAYLOAD:.1%} payload). Nothing is fitted.",
        "All-reduce between two ranks, one on each host:",
        made["all_reduce"],
    ]
    if found["two_a_host"]:
        parts += [f"{found['per_host']} ranks a host, all {found['ranks']} of them:", made["two_a_host"]]
    size = human_bytes(found["gradient"])
    parts += [
        f"A data-parallel step, {size} of gradient, batch {found['batch']} a rank, no overlap:",
        made["wall"],
    ]
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; see the module's docstring."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command: list[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, command = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m manyranks.bench.two_hosts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[50, 100, 200, 400], help="Mb/s (50 100 200 400)"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[2**20, 2**22], help="bytes of the all-reduces"
    )
    parser.add_argument(
        "--repeats", type=int, default=6, help="timed repetitions, of which the best counts (6)"
    )
    parser.add_argument("--batch", type=int, default=2048, help="examples of a rank's step (2048)")
    parser.add_argument("--record", action="store_true", help="keep the figures in results/")
    parser.add_argument("--rate", type=float, default=1000, help="Mb/s, for a command after -- (1000)")
    parser.add_argument(
        "--nproc-per-node", type=int, default=1, help="ranks a host, for a command after -- (1)"
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds (600)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return _worker_main(options.worker)
    for name in ("rates", "sizes", "repeats", "batch", "rate", "nproc_per_node", "timeout"):
        if min(np.atleast_1d(getattr(options, name))) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started this with it ignored
    try:
        why = obstacle()
        if why:
            print(f"two_hosts: {why}", file=sys.stderr)
            return 2
        if command:
            with TwoHosts(options.rate) as hosts:
                hosts.torchrun(0, options.nproc_per_node, *command)
                hosts.torchrun(1, options.nproc_per_node, *command, stdout=subprocess.DEVNULL)
                return hosts.wait(options.timeout)
        plan = {"rates": options.rates, "sizes": options.sizes, "repeats": options.repeats, "batch": options.batch,
                "wall": [0.25, 0.5, 1.0, 2.0, 4.0]}  # fmt: skip
        found = {
            "load": os.getloadavg()[0],
            **measure(plan, timeout=options.timeout),
        }  # load: of other work, before
    except KeyboardInterrupt:
        print("two_hosts: interrupted; the namespaces are removed", file=sys.stderr)
        return 130
    except (RuntimeError, TimeoutError) as error:
        print(f"two_hosts: {error}", file=sys.stderr)
        return 1
    print(told(found))
    if options.record:
        print(f"\nrecorded: {record('two_hosts', WORLD, folder=FOLDER, **found).name}")
    return 0


def _worker_main(folder: Path) -> NoReturn:
    import torch.distributed as dist

    from manyranks.runtime.processes import from_environment, leave

    comm = from_environment(timeout=300)
    found = worker(comm, json.loads((folder / "plan.json").read_text()))
    if comm.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    comm.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    raise SystemExit(main())
