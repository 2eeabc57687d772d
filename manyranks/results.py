"""Recorded runs on real hardware: JSON in `results/`, each with its machine, versions and date.

A measurement is worth keeping with what it was measured on. `record` writes one, `recorded` reads them back for the
cells that put them beside a prediction. `python -m manyranks.bench NAME --record` and `tools/record.py` call `record`.
(`python -m benchmarks` keeps its figures there too, in benchmarks.json.)
"""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

from manyranks.runtime import machine

__all__ = ["FOLDER", "record", "recorded"]

#: Beside the package in a checkout of the repository. An installed wheel has no such folder, and no recorded runs.
FOLDER = Path(__file__).resolve().parent.parent / "results"


def record(name: str, world: str, folder: Path = FOLDER, **measured: Any) -> Path:
    """Write one measurement as ``results/<name>--<world>.json``, over an earlier one of the same name and world.

    Args:
        name: what was measured, such as "02_all_reduce_sweep".
        world: what it ran on, as ``Run.world`` says it, such as "2 processes, gloo on CPU".
        **measured: the figures, in units that their names or the chapter say; anything that JSON can hold.

    Returns: the file's path.
    """
    if not re.fullmatch(r"\w+", name):
        raise ValueError(f"name must be letters, digits and underscores, got {name!r}")
    slug = re.sub(r"[^a-z0-9]+", "-", world.lower()).strip("-")
    here = machine()
    here["summary"] = summary(here)
    entry = {"name": name, "world": world, "date": date.today().isoformat(), "machine": here, **measured}
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}--{slug}.json"
    path.write_text(json.dumps(entry, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def recorded(name: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """All recorded measurements of `name`, ordered by world; an empty list if there are none.

    "02_all_reduce_sweep" counts what ``python -m manyranks.bench all_reduce --record`` wrote too, of worlds that have
    no entry of its own: the backend's all-reduce as "auto".
    """
    entries = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{name}--*.json"))
    ]
    if name == "02_all_reduce_sweep":
        worlds = {entry["world"] for entry in entries}
        entries += [_sweep(e) for e in recorded("bench_all_reduce", folder) if e["world"] not in worlds]
        entries.sort(key=lambda entry: entry["world"])
    return entries


def _sweep(entry: dict[str, Any]) -> dict[str, Any]:
    """A recorded nccl-tests table of all_reduce as chapter 2's sweep: bytes, and seconds by algorithm."""
    rows = [row for row in entry["rows"] if row["in_place"]]
    times = [row["in_place"]["us"] / 1e6 for row in rows]
    kept = {key: entry[key] for key in ("date", "machine", "world", "ranks")}
    return {
        **kept,
        "name": "02_all_reduce_sweep",
        "sizes": [row["size"] for row in rows],
        "seconds": {"auto": times},
    }


def summary(here: dict[str, Any]) -> str:
    """A machine in a few words, from what `manyranks.runtime.machine` says of it."""
    gpus = [gpu["name"] for gpu in here.get("gpus", [])]
    cpu = f"{here.get('cores', '?')} cores of {here.get('cpu', 'an unknown CPU')}"
    return f"{len(gpus)} x {gpus[0]}, {cpu}" if gpus else cpu
