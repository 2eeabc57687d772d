"""One measurement in a process of its own: ``python -m benchmarks.probe NAME ...`` prints it as JSON.

all_reduce CLUSTER RANKS BYTES      a ring all-reduce of phantoms; CLUSTER is flat or nodes (of 8)
memory RANKS MESSAGES               what a rank costs, in bytes: one that waits, after it has sent so many messages
iteration MICRO_BATCHES             one training step of 1T parameters on 3,072 GPUs, 64 stages, folded
planner GPUS                        every plan of a 175B model on so many A100: enumerated, its memory and its step
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


def iteration(micro_batches: int) -> dict[str, Any]:
    """Narayanan et al.'s largest run, with so many micro-batches (theirs has 512)."""
    from dataclasses import replace

    from manyranks.iteration import simulate_plan
    from manyranks.planner import weak_scaling_run
    from manyranks.published import WEAK_SCALING

    published = weak_scaling_run(WEAK_SCALING[-1])
    plan = replace(published.plan, micro_batches=micro_batches)
    job = replace(published.job, batch=plan.batch)
    cpu, wall = time.process_time(), time.perf_counter()
    found = simulate_plan(plan, job, published.cluster)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "virtual_seconds": found.seconds,
        "messages": found.run.traffic.count,
    }


def planner(gpus: int) -> dict[str, Any]:
    """All plans of GPT-3's shape with 12 sequences a GPU; attention's scores stored, so that all recomputation counts."""
    from manyranks.planner import CONSTANTS, Job, costs, model_of
    from manyranks.search import plan_table

    job = Job(model_of(175e9), 2048, 12 * gpus, attention="stored")
    where = Cluster(nodes=gpus // 8, gpu="A100")
    # what is loaded on first use doesn't count
    costs(plan_table(job, where, tp=8, pp=8), job, where, CONSTANTS)
    began = time.process_time()
    table = plan_table(job, where)
    costs(table, job, where, CONSTANTS)
    seconds = time.process_time() - began
    return {"plans": len(table.dp), "cpu_seconds": seconds, "plans_per_second": len(table.dp) / seconds}


def main(name: str, *arguments: str) -> None:
    given = [int(a) if a.isdigit() else a for a in arguments]
    measured = {"all_reduce": all_reduce, "memory": memory, "iteration": iteration, "planner": planner}
    print(json.dumps(measured[name](*given)))


if __name__ == "__main__":
    main(*sys.argv[1:])
