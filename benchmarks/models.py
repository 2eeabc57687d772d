"""The same ring program written for other tools, with the same ports and the same virtual clock.

All models move one message to the right-hand neighbour in each step and wait for the one from the left. A message of
b bytes on a link of latency alpha and bandwidth beta takes its turn on the sender's out port, holds it for b / beta,
reaches the receiver's in port alpha later, takes its turn there and holds that for b / beta too. Ports serve in order.
A send ends when the message has left and its receiver has asked for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from manyranks.runtime.comm import Comm
from manyranks.runtime.phantom import Phantom, phantom


def phantom_of(nbytes: int) -> Phantom:
    """A payload of so many bytes that are not there."""
    return phantom(nbytes, np.uint8)


def ring(comm: Comm, x: Any, steps: int) -> Any:
    """The rank program: `steps` times, send to the right and receive from the left."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for _ in range(steps):
        sending = comm.isend(x, right)
        x = comm.recv(left)
        sending.wait()
    return x


def simpy_lean(ranks: int, steps: int, nbytes: int, alpha: float, beta: float) -> float:
    """The ring in simpy, written for speed: a port is the time at which it is free next. Returns the clock.

    Two events a message (it reaches the in port; it has arrived) and one for each wait of a rank.
    """
    env = simpy.Environment()
    out_free, in_free = [0.0] * ranks, [0.0] * ranks
    inbox = [simpy.Store(env) for _ in range(ranks)]
    asked = [[] for _ in range(ranks)]  # for each receiver: when it asked for its k-th message
    took = nbytes * (1.0 / beta)
    ends = [0.0] * ranks
    payload = np.ones(nbytes, np.uint8)

    def reach(event: simpy.Event) -> None:
        dst, data = event.value
        now, free = env.now, in_free[dst]
        in_free[dst] = arrival = (now if now > free else free) + took
        arrived = env.timeout(arrival - now, (dst, data))
        arrived.callbacks.append(deliver)

    def deliver(event: simpy.Event) -> None:
        dst, data = event.value
        inbox[dst].put(data)

    def rank(r: int) -> Generator:
        right, data = (r + 1) % ranks, payload
        for k in range(steps):
            now, free = env.now, out_free[r]
            start = now if now > free else free
            out_free[r] = sent = start + took
            env.timeout(start + alpha - now, (right, data.copy())).callbacks.append(reach)
            asked[r].append(now)
            data = yield inbox[r].get()
            until = max(sent, asked[right][k] if k < len(asked[right]) else 0.0)
            if until > env.now:
                yield env.timeout(until - env.now)
        ends[r] = env.now

    for r in range(ranks):
        env.process(rank(r))
    env.run()
    return max(ends)


def simpy_resources(ranks: int, steps: int, nbytes: int, alpha: float, beta: float) -> float:
    """The ring in simpy as its manual teaches it: a port is a `Resource`, a message a process. Returns the clock."""
    env = simpy.Environment()
    out_port = [simpy.Resource(env) for _ in range(ranks)]
    in_port = [simpy.Resource(env) for _ in range(ranks)]
    inbox = [simpy.Store(env) for _ in range(ranks)]
    took = nbytes * (1.0 / beta)
    ends = [0.0] * ranks
    payload = np.ones(nbytes, np.uint8)

    def receive(dst: int, data: np.ndarray) -> Generator:
        yield env.timeout(alpha)
        with in_port[dst].request() as turn:
            yield turn
            yield env.timeout(took)
        inbox[dst].put(data)

    def send(src: int, dst: int, data: np.ndarray) -> Generator:
        with out_port[src].request() as turn:
            yield turn
            env.process(receive(dst, data))
            yield env.timeout(took)

    def rank(r: int) -> Generator:
        data = payload
        for _ in range(steps):
            sending = env.process(send(r, (r + 1) % ranks, data.copy()))
            data = yield inbox[r].get()
            yield sending
        ends[r] = env.now

    for r in range(ranks):
        env.process(rank(r))
    env.run()
    return max(ends)


def threads(ranks: int, steps: int, nbytes: int) -> None:
    """The ring with a thread for each rank and a queue for each link: no clock, only the moving of messages."""
    links = [queue.SimpleQueue() for _ in range(ranks)]

    def rank(r: int) -> None:
        data = np.ones(nbytes, np.uint8)
        for _ in range(steps):
            links[(r + 1) % ranks].put(data.copy())
            data = links[r].get()

    workers = [threading.Thread(target=rank, args=(r,)) for r in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
