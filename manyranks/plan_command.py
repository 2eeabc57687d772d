"""`python -m manyranks plan`: the planner of chapter 7 in a terminal.

    python -m manyranks plan --model 175B --gpus 128 --gpu A100 --batch 1536 --sequence 2048 --explain
    python -m manyranks plan --layers 96 --hidden 12288 --heads 96 --cluster 16x8xA100 --batch 1536 --json plan.json
    python -m manyranks plan --model 13B --gpus 32 --batch 256 --pick 2 --write run/
    python -m manyranks plan --model llama3-8b --gpus 32 --batch 32 --sequence 131072 --causal --cp 1,2,4,8,16
    python -m manyranks plan --model mixtral-8x7b --gpus 64 --batch 512 --sequence 4096 --ep 8

It prints a table of the fastest plans, predicted. `--json FILE` ("-" for the terminal) writes them as one object:

    format          "manyranks plan", and version, 1
    job             model (layers, hidden, heads, vocabulary, positions; for a `Decoder` its other fields too),
                    parameters, sequence, batch, convention, attention, dropout, overlap, causal
    cluster         nodes, gpus_per_node, gpu, memory_bytes, efficiency, intra and inter (name, latency, bandwidth)
    constants       the planner's constants; sources says where each comes from
    considered      how many plans there were; fitting: how many of them fit
    plans           fastest first; each with plan (the fields of `Plan`), seconds (of a step), parts (seconds by what
                    they are spent on, "context" and "experts" among them where there are such axes), memory (bytes by part, a list with one entry a pipeline stage), peak_bytes,
                    usable_bytes, mfu, hfu, tokens_per_second. All of these are predictions.

Sizes are in bytes, times in seconds, bandwidths in bytes/s. `read` gives a plan, a job and a cluster back.

`--write FOLDER` writes the first plan, or the one that `--pick N` names, for the frameworks that can express it, with
notes.txt; `--write-torchrun FILE` and the like write it for one of them. See `manyranks.frameworks`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from manyranks import planner
from manyranks.memory import CONVENTIONS, Transformer
from manyranks.models import MODELS, Decoder
from manyranks.planner import CONSTANTS, Constants, Job, Plan, Prediction
from manyranks.runtime import Cluster
from manyranks.runtime.hardware import GPUS, Tier
from manyranks.search import NothingFits, Ranking, search

FORMAT = "manyranks plan"
# framework -> what is written for it
WRITTEN = {
    "torchrun": "a PyTorch script, started by torchrun",
    "torchtitan": "a job file of torchtitan, TOML",
    "deepspeed": "a configuration of DeepSpeed, JSON",
    "megatron": "arguments of Megatron-LM, one a line",
}
# framework -> what torchrun starts, {} being the file
STARTED = {
    "torchrun": ("{}",),
    "torchtitan": ("-m", "torchtitan.train", "--job.config_file", "{}"),
    "deepspeed": ("your_training_script.py", "--deepspeed", "--deepspeed_config", "{}"),
    "megatron": ("pretrain_gpt.py", "$(cat {})"),
}
# what a shape may say beyond a GPT's, and what it means
SHAPE = {
    "ffn": "width of the gated MLP",
    "kv-heads": "heads for keys and values",
    "experts": "experts of a layer",
    "top-k": "experts that a token goes to",
    "expert-ffn": "width of an expert",
    "shared-experts": "experts that every token goes to",
    "dense-layers": "layers at the start that have no experts",
}
UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def count(text: str) -> float:
    """175B, 7e9, 350M -> a number."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([KMBGT]?)", text.strip(), re.IGNORECASE)
    try:
        return float(found[1]) * UNITS[found[2].upper()]
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"takes a count such as 175B or 7e9, got {text!r}") from None


def model(text: str) -> float | str:
    """175B -> a number; llama3-8b -> that name."""
    if text.lower() in MODELS:
        return text.lower()
    try:
        return count(text)
    except argparse.ArgumentTypeError:
        known = ", ".join(MODELS)
        raise argparse.ArgumentTypeError(
            f"takes a count such as 175B or 7e9, or one of {known}, got {text!r}"
        ) from None


def whole(text: str) -> int:
    """1,536 or 2048 -> an integer of 1 or more."""
    try:
        value = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"takes a whole number, 1 or more, got {text!r}")
    return value


def integers(text: str) -> tuple[int, ...]:
    """4 or 2,4,8 -> the numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"takes a whole number, or several joined by commas, got {text!r}"
        ) from None


def words(text: str) -> tuple[str, ...]:
    """none,full -> the words."""
    return tuple(part.strip() for part in text.split(","))


def shape(text: str) -> tuple[int, int, str]:
    """16x8xH100 -> (16, 8, "H100")."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\w+)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"takes NODESxGPUSxNAME such as 16x8xH100, got {text!r}")
    return int(found[1]), int(found[2]), found[3]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m manyranks plan",
        description="Lay out a training job on a cluster: which parallelism fits, and which is fastest. "
        "All times and sizes it prints are predictions.",
        epilog="The JSON is described in manyranks/plan_command.py.",
    )
    job = made.add_argument_group("the job")
    job.add_argument(
        "--model",
        type=model,
        metavar="N",
        help=f"parameters, such as 175B: takes a usual shape; or one of {', '.join(MODELS)}",
    )
    job.add_argument("--layers", type=whole)
    job.add_argument("--hidden", type=whole)
    job.add_argument("--heads", type=whole)
    job.add_argument("--vocabulary", type=whole, help="default 51200")
    for name, what in SHAPE.items():
        job.add_argument(f"--{name}", type=whole, help=f"{what}; makes it a model like Llama")
    job.add_argument("--sequence", type=whole, default=2048, help="tokens of a sequence (default 2048)")
    job.add_argument("--batch", type=whole, required=True, help="sequences of a step, all GPUs together")
    job.add_argument(
        "--convention", choices=sorted(CONVENTIONS), default="mixed16", help="bytes of a parameter"
    )
    job.add_argument("--attention", choices=("flash", "stored"), default="flash")
    job.add_argument("--dropout", action="store_true")
    job.add_argument(
        "--causal", action="store_true", help="attention skips what the mask hides: half of its operations"
    )
    job.add_argument(
        "--overlap",
        type=words,
        default=planner.OVERLAPS,
        help="what is hidden behind computing: tensor,data,pipeline, or none",
    )
    where = made.add_argument_group("the cluster")
    where.add_argument("--cluster", type=shape, metavar="NxGxNAME", help="such as 16x8xH100")
    where.add_argument(
        "--gpus", type=whole, help="how many, in nodes of --gpus-per-node, instead of --cluster"
    )
    where.add_argument("--gpus-per-node", type=whole, default=8)
    where.add_argument("--gpu", default=None, help=f"one of {', '.join(GPUS)} (default H100)")
    where.add_argument("--intra-GBps", type=float, help="GB/s one way of a GPU's link inside the node")
    where.add_argument("--inter-Gbps", type=float, help="Gb/s of each GPU's network port")
    only = made.add_argument_group("only such plans (several joined by commas)")
    for name in ("tp", "pp", "micro-batch", "zero-stage", "virtual-stages"):
        only.add_argument(f"--{name}", type=integers)
    only.add_argument("--cp", type=integers, help="context parallel; 1 if you don't say so")
    only.add_argument("--ep", type=integers, help="expert parallel; all that fit if you don't say so")
    only.add_argument("--schedule", type=words, help=", ".join(planner.SCHEDULES))
    only.add_argument("--recompute", type=words, help=", ".join(planner.RECOMPUTE))
    only.add_argument("--sequence-parallel", choices=("yes", "no"))
    only.add_argument(
        "--ends-as-layers",
        choices=("yes", "no"),
        help="embedding and output count as a layer each where stages are cut",
    )
    only.add_argument(
        "--tensor-across-nodes", action="store_true", help="lift the rule that tp stays in a node"
    )
    out = made.add_argument_group("the answer")
    out.add_argument("--top", type=whole, default=5, help="how many plans (default 5)")
    out.add_argument("--explain", action="store_true", help="say why the winner wins")
    out.add_argument("--json", metavar="FILE", help="write the answer as JSON; - for the terminal, alone")
    out.add_argument(
        "--constants", metavar="FILE", help="JSON with some of the planner's constants, for your machine"
    )
    files = made.add_argument_group("files for frameworks")
    files.add_argument(
        "--pick", type=whole, metavar="N", help="which plan is written, counted from 1 (default 1)"
    )
    files.add_argument(
        "--write", metavar="FOLDER", help="for every framework that can express it, with notes.txt"
    )
    for framework, what in WRITTEN.items():
        files.add_argument(f"--write-{framework}", metavar="FILE", help=what)
    return made


def _job(given: argparse.Namespace) -> Job:
    explicit = [name for name in ("layers", "hidden", "heads") if getattr(given, name) is not None]
    if given.model is not None and explicit:
        raise ValueError(f"--model and --{explicit[0]} exclude each other: give a count or a shape")
    if given.model is None and len(explicit) < 3:
        raise ValueError("give --model N, or all of --layers, --hidden and --heads")
    more = {name.replace("-", "_"): getattr(given, name.replace("-", "_")) for name in SHAPE}
    more = {name: value for name, value in more.items() if value is not None}
    vocabulary = given.vocabulary or 51200
    if given.model is not None and more:
        raise ValueError(f"--model and --{next(iter(more)).replace('_', '-')} exclude each other")
    if isinstance(given.model, str):
        if given.vocabulary:
            raise ValueError(f"--model {given.model} and --vocabulary exclude each other")
        model: Transformer = MODELS[given.model]
    elif given.model is not None:
        model = planner.model_of(given.model, vocabulary)
    else:
        kind = Decoder if more else Transformer
        model = kind(given.layers, given.hidden, given.heads, vocabulary, **more)
    overlap = () if given.overlap == ("none",) else given.overlap
    return Job(
        *(model, given.sequence, given.batch, given.convention, given.attention, given.dropout),
        overlap=tuple(overlap),
        causal=given.causal,
    )


def _cluster(given: argparse.Namespace) -> Cluster:
    if given.cluster and (given.gpus or given.gpu):
        raise ValueError("--cluster and --gpus or --gpu exclude each other")
    if not given.cluster and not given.gpus:
        raise ValueError("give --cluster NODESxGPUSxNAME, or --gpus N")
    if given.cluster:
        nodes, node, name = given.cluster
    else:
        node, name = min(given.gpus_per_node, given.gpus), given.gpu or "H100"
        nodes, left = divmod(given.gpus, node)
        if left:
            raise ValueError(f"--gpus must fill nodes of {node}, got {given.gpus}")
    rates: dict[str, float] = {}
    if given.intra_GBps is not None:
        rates["intra_bandwidth"] = given.intra_GBps * 1e9
    if given.inter_Gbps is not None:
        rates["inter_bandwidth"] = given.inter_Gbps * 1e9 / 8
    return Cluster(nodes, node, name, **rates)


def _constants(path: str | None) -> Constants:
    if path is None:
        return CONSTANTS
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--constants: {path}: {error}") from None
    names = [field.name for field in fields(Constants)]
    if not isinstance(given, dict) or set(given) - set(names):
        unknown = ", ".join(sorted(set(given) - set(names))) if isinstance(given, dict) else "no object"
        raise ValueError(f"--constants: {path} must hold some of {', '.join(names)}, got {unknown}")
    return replace(CONSTANTS, **given)


def prediction_object(found: Prediction) -> dict[str, Any]:
    """One prediction as JSON has it."""
    return {
        "plan": asdict(found.plan),
        "seconds": found.seconds,
        "parts": found.parts,
        "memory": list(found.memory),
        "peak_bytes": found.peak,
        "usable_bytes": found.usable,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "tokens_per_second": found.tokens_per_second,
    }


def document(ranking: Ranking, top: int = 5) -> dict[str, Any]:
    """The answer as JSON has it; see this module's docstring."""
    job, cluster = ranking.job, ranking.cluster
    told = asdict(job)
    told["parameters"] = job.model.parameters
    told["overlap"] = list(job.overlap)
    return {
        "format": FORMAT,
        "version": 1,
        "job": told,
        "cluster": {
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "gpu": cluster.gpu.name,
            "memory_bytes": cluster.gpu.memory_bytes,
            "efficiency": cluster.efficiency,
            "intra": asdict(cluster.intra),
            "inter": asdict(cluster.inter),
        },
        "constants": asdict(ranking.constants),
        "sources": planner.SOURCES,
        "considered": ranking.considered,
        "fitting": ranking.fitting,
        "plans": [prediction_object(found) for found in ranking.best[:top]],
    }


def read(source: str | Path | dict[str, Any], place: int = 0) -> tuple[Plan, Job, Cluster]:
    """A plan of a JSON answer, with its job and cluster, ready for `planner.predict`.

    Args:
        source: a file that `--json` wrote, or its content.
        place: which of its plans, 0 for the fastest.
    """
    answer = source
    if not isinstance(source, dict):
        answer = json.loads(Path(source).read_text(encoding="utf-8"))
    if not isinstance(answer, dict) or answer.get("format") != FORMAT or answer.get("version") != 1:
        raise ValueError(f"source must be what `manyranks plan --json` writes ({FORMAT!r}, version 1)")
    plans = answer["plans"]
    if not 0 <= place < len(plans):
        raise ValueError(f"place must be from 0 to {len(plans) - 1}, got {place}")
    told = dict(answer["job"])
    told.pop("parameters")
    kind = Decoder if "kv_heads" in told["model"] else Transformer
    job = Job(**{**told, "model": kind(**told["model"]), "overlap": tuple(told["overlap"])})
    where = answer["cluster"]
    cluster = Cluster(
        where["nodes"],
        where["gpus_per_node"],
        where["gpu"],
        Tier(**where["intra"]),
        Tier(**where["inter"]),
        where["efficiency"],
    )
    return Plan(**plans[place]["plan"]), job, cluster


def table(ranking: Ranking, top: int) -> str:
    """The fastest plans, one a line."""
    further = [name for name in ("cp", "ep") if np.any(getattr(ranking.table, name) > 1)]
    head = ("seconds", "MFU", "GB", "dp", "tp", "pp", *further)
    head += ("micro-batch", "schedule", "ZeRO", "recompute", "seq.")
    rows = [head]
    for found in ranking.best[:top]:
        plan = found.plan
        v = f" v={plan.virtual_stages}" if plan.virtual_stages > 1 else ""
        rows.append(
            (
                f"{found.seconds:.4g}",
                f"{found.mfu:.1%}",
                f"{found.peak / 1e9:.1f}",
                *map(str, (plan.dp, plan.tp, plan.pp, *(getattr(plan, name) for name in further))),
                f"{plan.micro_batch} x {plan.micro_batches}",
                plan.schedule + v if plan.pp > 1 else "-",
                str(plan.zero_stage),
                plan.recompute,
                "split" if plan.sequence_parallel else "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths)) for row in rows)


def _say(ranking: Ranking, top: int, explain: bool) -> str:
    job, cluster = ranking.job, ranking.cluster
    model = job.model
    active = ""
    if isinstance(model, Decoder) and model.experts:
        active = f", {model.active_parameters / 1e9:.4g}B of them for a token"
    lines = [
        f"{model.parameters / 1e9:.4g}B parameters ({model.layers} layers, hidden {model.hidden}, "
        f"{model.heads} heads{active}), {job.batch:,} sequences of {job.sequence:,} tokens a step, "
        f"{CONVENTIONS[job.convention].name}",
        str(cluster),
        f"{ranking.considered:,} plans, {ranking.fitting:,} fit in "
        f"{ranking.winner.usable / 1e9:.1f} GB. Predicted, fastest first (within half a percent the simplest):",
        "",
        table(ranking, top),
    ]
    if explain:
        lines += ["", ranking.explain()]
    return "\n".join(lines)


def _files(given: argparse.Namespace) -> dict[str, str]:
    """Framework -> file, of those that are asked for."""
    paths = {name: getattr(given, f"write_{name}") for name in WRITTEN}
    return {name: path for name, path in paths.items() if path is not None}


def _write(given: argparse.Namespace, ranking: Ranking, say: Callable[[str], None]) -> int:
    """Write the picked plan for the frameworks that are asked for; the exit status."""
    from manyranks import frameworks

    plan, job, cluster = ranking.best[(given.pick or 1) - 1].plan, ranking.job, ranking.cluster
    say(f"\nplan {given.pick or 1}: {plan}")
    texts: dict[str, Callable[[], str]] = {
        "torchrun": lambda: frameworks.torchrun_script(plan, job),
        "torchtitan": lambda: frameworks.torchtitan_toml(plan, job),
        "deepspeed": lambda: frameworks.deepspeed_json(plan, job),
        "megatron": lambda: " ".join(frameworks.megatron_arguments(plan, job)).replace(" --", "\n--") + "\n",
    }
    status = 0
    if given.write is not None:
        try:
            paths = frameworks.write(plan, job, cluster, given.write)
        except (OSError, ValueError) as error:
            print(f"error: --write: {error}", file=sys.stderr)
            return 2
        for name in WRITTEN:
            say(f"  {name:10} {paths.get(name, 'not written: see notes.txt')}")
        say(f"  {'notes':10} {paths['notes']}")
    for name, path in _files(given).items():
        try:
            Path(path).write_text(texts[name](), encoding="utf-8")
        except (OSError, ValueError) as error:  # Unsupported is a ValueError
            print(f"error: --write-{name}: {error}", file=sys.stderr)
            status = 2
            continue
        say(f"  {name:10} {path}")
        words = [word.format(path) for word in STARTED[name]]
        say(f"  {'':10} on every node: {frameworks.launch_command(plan, cluster, *words)}")
        for line in frameworks.omissions(name, plan, job):
            say(f"  {'':10} differs. {line}")
    return status


def main(argv: list[str]) -> int:
    """Run the command.

    Exit status: 0; 1 if nothing fits; 2 for what it can't understand, or a framework can't express.
    """
    given = parser().parse_args(argv)
    writes = given.write is not None or bool(_files(given))
    try:
        if given.pick and not writes:
            raise ValueError(
                "--pick says which plan is written: give --write, or --write-torchrun and the like"
            )
        job, cluster, constants = _job(given), _cluster(given), _constants(given.constants)
        answers = {"yes": True, "no": False, None: None}
        ranking = search(
            job,
            cluster,
            constants,
            keep=max(given.top, 5, given.pick or 1),
            tensor_within_node=not given.tensor_across_nodes,
            tp=given.tp,
            pp=given.pp,
            micro_batch=given.micro_batch,
            zero_stage=given.zero_stage,
            virtual_stages=given.virtual_stages,
            schedule=given.schedule,
            recompute=given.recompute,
            sequence_parallel=answers[given.sequence_parallel],
            cp=given.cp,
            ep=given.ep,
            ends_as_layers=answers[given.ends_as_layers],
        )
        if given.pick and given.pick > len(ranking.best):
            raise ValueError(
                f"--pick must be at most the {len(ranking.best)} plans that fit, got {given.pick}"
            )
    except NothingFits as error:
        print(error, file=sys.stderr)
        return 1
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = json.dumps(document(ranking, given.top), indent=1) + "\n" if given.json else ""
    if given.json == "-":
        sys.stdout.write(text)
    else:
        print(_say(ranking, given.top, given.explain))
    if given.json and given.json != "-":
        try:
            Path(given.json).write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"error: --json: {error}", file=sys.stderr)
            return 2
        print(f"\nwritten to {given.json}")
    if not writes:
        return 0
    out = sys.stderr if given.json == "-" else sys.stdout
    return _write(given, ranking, lambda line: print(line, file=out))
