"""The runtime: rank programs on virtual ranks (`simulate`) and on real processes (`launch`)."""

from manyranks.runtime.comm import Array, Comm, Work
from manyranks.runtime.errors import (
    CollectiveMismatchError,
    DeadlockError,
    LaunchTimeout,
    RankError,
    UnreceivedMessageError,
)
from manyranks.runtime.hardware import GPU, GPUS, Cluster, Tier, machine
from manyranks.runtime.phantom import Phantom, is_phantom, phantom
from manyranks.runtime.run import Interval, Message, Run, Traffic, human_bytes, human_seconds
from manyranks.runtime.schedules import chunk_bounds
from manyranks.runtime.simulator import simulate

__all__ = [
    "GPU",
    "GPUS",
    "Array",
    "Cluster",
    "CollectiveMismatchError",
    "Comm",
    "DeadlockError",
    "Interval",
    "LaunchTimeout",
    "Message",
    "Phantom",
    "RankError",
    "Run",
    "Tier",
    "Traffic",
    "UnreceivedMessageError",
    "Work",
    "chunk_bounds",
    "human_bytes",
    "human_seconds",
    "is_phantom",
    "machine",
    "phantom",
    "simulate",
]
