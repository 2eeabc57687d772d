# Generated from chapters/08_overlap_and_frameworks.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""Checkpoints that survive a crash: atomic, sharded, resumed on other numbers of ranks; and how often to save."""

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from manyranks.collectives import split
from manyranks.data_parallel import Layer, flatten, loss_and_gradient, unflatten
from manyranks.runtime import Array, Comm, LaunchTimeout, RankError, Run

__all__ = [
    "FORGETTABLE",
    "LLAMA3_DAYS",
    "LLAMA3_GPUS",
    "LLAMA3_INTERRUPTIONS",
    "Resumed",
    "Shard",
    "best_interval",
    "daly_interval",
    "goodput",
    "latest_checkpoint",
    "load_manifest",
    "load_shard",
    "mean_time_between_failures",
    "run_until_done",
    "save_checkpoint",
    "simulate_failures",
    "train_resumably",
    "write_atomically",
    "young_interval",
]

LLAMA3_INTERRUPTIONS = 419
LLAMA3_DAYS = 54.0
LLAMA3_GPUS = 16384


def mean_time_between_failures(gpus: float) -> float:
    """Seconds between unexpected interruptions, at the rate of Llama 3's training.

    A job of n GPUs fails n times as often as a job of one.

    Args:
        gpus: of the job.

    Source: Llama 3 (2024): 419 in 54 days on 16,384 H100.

    >>> round(mean_time_between_failures(16384) / 3600, 2)
    3.09
    """
    if gpus <= 0:
        raise ValueError(f"gpus must be above 0, got {gpus}")
    return LLAMA3_DAYS * 86400 / LLAMA3_INTERRUPTIONS * LLAMA3_GPUS / gpus


def write_atomically(path: str | Path, data: bytes) -> None:
    """Put `data` into a file so that it is there whole or not at all.

    Writes a neighbour, flushes it to the disk, and renames it over `path`.
    """
    path = Path(path)
    beside = path.with_name(path.name + ".part")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


class Shard(NamedTuple):
    """One rank's part of the training state.

    Attributes:
        start: where its part of the flat parameters begins.
        params, m, v: that part of parameters and moments, flat float64.
    """

    start: int
    params: np.ndarray
    m: np.ndarray
    v: np.ndarray


def _name(step: int) -> str:
    return f"step-{step:08d}"


def save_checkpoint(
    comm: Comm,
    folder: str | Path,
    step: int,
    shard: Shard,
    common: dict[str, Any],
    before_commit: Callable[[], None] | None = None,
) -> Path:
    """Write a sharded checkpoint; all ranks call it.

    Each rank writes its shard into a temporary folder. When all have, rank 0 writes the
    manifest (lengths and checksums of the shards, and `common`) and renames the folder.

    Args:
        comm: the communicator.
        folder: where checkpoints are kept; the same on all ranks, on a shared disk.
        step: how many steps are done.
        shard: this rank's part.
        common: what is the same on all ranks; anything that JSON can hold.
        before_commit: called when the shard is written and nothing is committed yet;
            for trying what a crash does at that moment.

    Returns: the finished checkpoint's folder.
    """
    folder = Path(folder)
    final, part = folder / _name(step), folder / (_name(step) + ".part")
    if comm.rank == 0:
        shutil.rmtree(part, ignore_errors=True)  # left by a crash
        part.mkdir(parents=True)
    comm.barrier()
    arrays = np.concatenate([shard.params, shard.m, shard.v]).astype("<f8")
    data = arrays.tobytes()
    write_atomically(part / f"{comm.rank:05d}.shard", data)
    if before_commit is not None:
        before_commit()
    facts = [shard.start, len(shard.params), zlib.crc32(data)]
    gathered = comm.all_gather(comm.xp.asarray(np.array([facts])))
    facts = [[int(n) for n in row] for row in gathered]
    if comm.rank == 0:
        manifest = {"step": step, "shards": facts, "common": common}
        write_atomically(part / "manifest.json", json.dumps(manifest).encode())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(part, final)
    comm.barrier()
    return final


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in a folder; None if there is none."""
    found = sorted(Path(folder).glob("step-????????/manifest.json"))
    return found[-1].parent if found else None


def load_manifest(checkpoint: str | Path) -> dict[str, Any]:
    """What a checkpoint says of itself: "step", "shards", "common"."""
    return json.loads((Path(checkpoint) / "manifest.json").read_bytes())


def load_shard(checkpoint: str | Path, start: int, stop: int) -> Shard:
    """Elements start to stop of the state, from whichever shards hold them.

    So a checkpoint of N ranks can be read by any other number of ranks. Only the
    shards that overlap are read.

    Raises: ValueError if a shard isn't what the manifest says.
    """
    checkpoint = Path(checkpoint)
    parts: list[list[np.ndarray]] = [[], [], []]
    for rank, (begin, length, crc) in enumerate(load_manifest(checkpoint)["shards"]):
        low, high = max(start, begin), min(stop, begin + length)
        if low >= high:
            continue
        path = checkpoint / f"{rank:05d}.shard"
        data = path.read_bytes()
        if zlib.crc32(data) != crc:
            raise ValueError(f"checkpoint must be undamaged, but {path.name} differs from its checksum")
        three = np.frombuffer(data, "<f8").reshape(3, length)
        for part, row in zip(parts, three):
            part.append(row[low - begin : high - begin])
    params, m, v = (np.concatenate(part) if part else np.zeros(0) for part in parts)
    if len(params) != stop - start:
        raise ValueError(f"stop must be at most the state's length, got {stop}")
    return Shard(start, params, m, v)


FORGETTABLE: tuple[str, ...] = ("moments", "counter", "stream", "position")


class Resumed(NamedTuple):
    """What `train_resumably` returns.

    Attributes:
        first: the step that this run began with; 0 without a checkpoint.
        losses: of its steps, mean over all ranks.
        params: the flat parameters at the end.
    """

    first: int
    losses: list[float]
    params: np.ndarray


def train_resumably(
    comm: Comm,
    params: list[Layer],
    data: tuple[Array, Array],
    batch: int,
    steps: int,
    lr: float,
    folder: str | Path | None = None,
    every: int = 10,
    noise: float = 0.1,
    seed: int = 0,
    forget: Sequence[str] = (),
    at: Callable[[Comm, str, int], None] | None = None,
) -> Resumed:
    """Data-parallel Adam with sharded state that goes on from the last checkpoint.

    Every epoch's order, and the noise that is added to the inputs, come from one
    stream of random numbers that all ranks draw alike; a rank takes its rows.

    Args:
        comm: the communicator, of N ranks.
        params: the model at the very start; the same on all ranks.
        data: (inputs, one-hot targets).
        batch: examples of a step, all ranks together; a multiple of N.
        steps: how many in all, over all restarts.
        lr: learning rate.
        folder: where checkpoints are; None neither reads nor writes any.
        every: steps between two checkpoints.
        noise: standard deviation of what is added to the inputs.
        seed: of the stream.
        forget: some of `FORGETTABLE`, left out when a checkpoint is loaded.
        at: called with (comm, "step" or "saving", steps done).

    Returns: a `Resumed`.
    """
    for name in forget:
        if name not in FORGETTABLE:
            raise ValueError(f"forget must be some of {', '.join(FORGETTABLE)}, got {name!r}")
    if batch % comm.size:
        raise ValueError(f"batch must be a multiple of the {comm.size} ranks, got {batch}")
    x, targets = data
    flat = flatten(params)
    bounds = np.cumsum([0] + [len(part) for part in split(np.zeros(flat.shape[0]), comm.size)])
    mine = slice(int(bounds[comm.rank]), int(bounds[comm.rank + 1]))

    def here(values: np.ndarray) -> Array:
        return comm.xp.asarray(np.array(values), device=flat.device)

    def there(values: Array) -> np.ndarray:
        return np.asarray(values.cpu() if hasattr(values, "cpu") else values)

    stream = np.random.default_rng(seed)
    order = stream.permutation(x.shape[0])
    first = position = counter = 0
    m, v = flat[mine] * 0, flat[mine] * 0
    checkpoint = latest_checkpoint(folder) if folder is not None else None
    if checkpoint is not None:
        manifest = load_manifest(checkpoint)
        first, common = manifest["step"], manifest["common"]
        flat = here(load_shard(checkpoint, 0, flat.shape[0]).params)
        shard = load_shard(checkpoint, mine.start, mine.stop)
        if "moments" not in forget:
            m, v = here(shard.m), here(shard.v)
        if "counter" not in forget:
            counter = common["counter"]
        if "stream" not in forget:
            stream.bit_generator.state = common["stream"]
        if "position" not in forget:
            order, position = np.array(common["order"]), common["position"]
    losses = []
    for done in range(first, steps):
        if at is not None:
            at(comm, "step", done)
        if position + batch > len(order):
            order, position = stream.permutation(x.shape[0]), 0
        rows, position = order[position : position + batch], position + batch
        jitter = stream.normal(scale=noise, size=(batch, x.shape[1]))
        share = slice(comm.rank * batch // comm.size, (comm.rank + 1) * batch // comm.size)
        seen = x[here(rows[share])] + here(jitter[share])
        loss, grads = loss_and_gradient(unflatten(flat, params), seen, targets[here(rows[share])])
        summed = comm.all_reduce(comm.xp.concat([flatten(grads), loss.reshape((1,))]))
        losses.append(float(summed[-1]) / comm.size)
        g = summed[mine] / comm.size
        counter += 1
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        step = (m / (1 - 0.9**counter)) / ((v / (1 - 0.999**counter)) ** 0.5 + 1e-8)
        flat = comm.all_gather(flat[mine] - lr * step)
        if folder is not None and (done + 1) % every == 0:
            common = {
                "counter": counter,
                "stream": stream.bit_generator.state,
                "order": order.tolist(),
                "position": position,
            }
            shard = Shard(mine.start, *(there(part) for part in (flat[mine], m, v)))
            hook = None if at is None else partial(at, comm, "saving", done + 1)
            save_checkpoint(comm, folder, done + 1, shard, common, hook)
    return Resumed(first, losses, there(flat))


def run_until_done(start: Callable[[], Run], restarts: int = 3) -> tuple[Run, list[str]]:
    """Start a job again after each failure, as ``torchrun --max-restarts`` does.

    Args:
        start: starts the job and returns its run, such as a call of `launch`.
        restarts: how many failures are forgiven.

    Returns: (the run that came to its end, what was reported of each failed one).
    """
    failures: list[str] = []
    while True:
        try:
            return start(), failures
        except (RankError, LaunchTimeout) as error:
            failures.append(str(error).splitlines()[0])
            if len(failures) > restarts:
                raise


def _check_times(**times: float) -> None:
    for name, value in times.items():
        least = 0.0 if name == "restart" else math.ulp(0.0)
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"{name} must be a positive number of seconds, got {value}")


def young_interval(cost: float, mtbf: float) -> float:
    """Work between two checkpoints that wastes least, to first order: sqrt(2 C M).

    Args:
        cost: C, seconds to save a checkpoint.
        mtbf: M, mean seconds between failures.

    Source: Young (1974).

    >>> young_interval(cost=50.0, mtbf=10_000.0)
    1000.0
    """
    _check_times(cost=cost, mtbf=mtbf)
    return math.sqrt(2 * cost * mtbf)


def daly_interval(cost: float, mtbf: float) -> float:
    """Work between two checkpoints that wastes least, to higher order.

    sqrt(2 C M) (1 + 1/3 sqrt(C / 2M) + 1/9 C / 2M) - C for C < 2M, else M.

    Source: Daly (2006).
    """
    _check_times(cost=cost, mtbf=mtbf)
    if cost >= 2 * mtbf:
        return mtbf
    root = math.sqrt(cost / (2 * mtbf))
    return math.sqrt(2 * cost * mtbf) * (1 + root / 3 + root**2 / 9) - cost


def goodput(interval: float, cost: float, mtbf: float, restart: float = 0.0) -> float:
    """The expected fraction of time that becomes progress.

    interval / T with T = M e^(R/M) (e^((interval + C)/M) - 1), for failures that come
    at random at a constant rate.

    Args:
        interval: seconds of work between two checkpoints.
        cost: C, seconds to save one.
        mtbf: M, mean seconds between failures.
        restart: R, seconds from a failure to training again.

    Source: Daly (2006).

    >>> round(goodput(1000.0, cost=50.0, mtbf=10_000.0), 3)
    0.903
    """
    _check_times(interval=interval, cost=cost, mtbf=mtbf, restart=restart)
    if (interval + cost + restart) / mtbf > 700:
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + cost) / mtbf))


def best_interval(cost: float, mtbf: float) -> float:
    """The interval with the highest `goodput`; the restart doesn't move it.

    With x = interval / M it solves (1 - x) e^(x + C/M) = 1, here by bisection.
    """
    _check_times(cost=cost, mtbf=mtbf)
    low, high = 0.0, 1 - 2.0**-53
    for _ in range(200):
        x = (low + high) / 2
        if math.log1p(-x) + x + cost / mtbf > 0:
            low = x
        else:
            high = x
    return low * mtbf


def simulate_failures(
    interval: float,
    cost: float,
    mtbf: float,
    restart: float = 0.0,
    segments: int = 2000,
    seed: int = 0,
) -> float:
    """Goodput of a job that fails at random, played through second by second of luck.

    Args:
        interval, cost, mtbf, restart: as in `goodput`.
        segments: how many intervals of work to finish.
        seed: of the failures.

    Returns: seconds of work done by seconds passed.
    """
    _check_times(interval=interval, cost=cost, mtbf=mtbf, restart=restart)
    if segments < 1:
        raise ValueError(f"segments must be 1 or more, got {segments}")
    rng = np.random.default_rng(seed)
    clock, saved = 0.0, 0
    failure = rng.exponential(mtbf)  # when the next one comes
    while saved < segments:
        end = clock + interval + cost
        if end <= failure:
            clock, saved = end, saved + 1
            continue
        clock = failure
        failure = clock + rng.exponential(mtbf)
        while clock + restart > failure:  # it fails again while it starts
            clock = failure
            failure = clock + rng.exponential(mtbf)
        clock += restart
    return segments * interval / clock
