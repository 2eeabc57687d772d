"""One measurement in a process of its own: ``python -m benchmarks.probe NAME ...`` prints it as JSON.

all_reduce CLUSTER RANKS BYTES      a ring all-reduce of phantoms; CLUSTER is flat or nodes (of 8)
memory RANKS MESSAGES               what a rank costs, in bytes: one that waits, after it has sent so many messages
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import numpy as np

from benchmarks.models import ring
from manyranks import Cluster, simulate
from manyranks.runtime.phantom import phantom


def _resident() -> int:
    """Bytes of memory in use now where the system says so, else the most so far."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def all_reduce(cluster: str, ranks: int, nbytes: int) -> dict[str, Any]:
    gradients = phantom(nbytes // 2, np.float16)
    where = Cluster.flat(ranks) if cluster == "flat" else Cluster(nodes=ranks // 8)
    cpu, wall = time.process_time(), time.perf_counter()
    run = simulate(lambda comm: comm.all_reduce(gradients), cluster=where)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert run.traffic.count == 2 * (ranks - 1) * ranks
    return {
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "virtual_seconds": run.seconds,
        "messages": run.traffic.count,
    }


def memory(ranks: int, messages: int) -> dict[str, Any]:
    """Resident memory per rank, looked at by the last rank when all others wait for it."""
    simulate(ring, ranks=4, x=phantom(64), steps=2)  # what is loaded on first use doesn't count
    before = _resident()
    seen = []

    def program(comm: Any) -> None:
        ring(comm, phantom(64), messages)
        if comm.rank == comm.size - 1:
            comm.compute(seconds=1.0)
            for rank in range(comm.size - 1):
                comm.recv(rank)
                if rank == comm.size // 2:
                    seen.append(_resident())
        else:
            comm.send(phantom(64), comm.size - 1)

    simulate(program, ranks=ranks)
    return {"bytes_per_rank": (seen[0] - before) / ranks}


def main(name: str, *arguments: str) -> None:
    given = [int(a) if a.isdigit() else a for a in arguments]
    print(json.dumps({"all_reduce": all_reduce, "memory": memory}[name](*given)))


if __name__ == "__main__":
    main(*sys.argv[1:])
