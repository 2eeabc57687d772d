"""manyranks.bench: nccl-tests' columns and factors, the checks that can fail, the steps, the command line, recording."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks import launch
from manyranks.bench import chapters, cli, collectives, steps
from manyranks.bench.site import BenchError, Site, check_surroundings, choose_device
from manyranks.results import record, recorded
from tools import record as record_tool

ROOT = Path(__file__).resolve().parent.parent


def bench(*arguments, torchrun=0, **environment):
    command = [sys.executable, "-m"]
    if torchrun:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command += ["manyranks.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment)


# ------------------------------------------------------------------------------------------------ factors and columns


def test_factors_are_nccl_tests_own():
    # PERFORMANCE.md of nccl-tests, for 8 ranks.
    expected = {"all_reduce": 14 / 8, "all_gather": 7 / 8, "reduce_scatter": 7 / 8, "all_to_all": 7 / 8}
    expected |= {"broadcast": 1.0, "reduce": 1.0}
    assert {name: collectives.busbw_factor(name, 8) for name in collectives.COLLECTIVES} == expected
    with pytest.raises(ValueError, match="name"):
        collectives.busbw_factor("gossip", 8)
    with pytest.raises(ValueError, match="ranks"):
        collectives.busbw_factor("all_reduce", 0)


@pytest.mark.parametrize("name", collectives.COLLECTIVES)
@given(nbytes=st.integers(1, 10**6), element=st.sampled_from([2, 4, 8]), ranks=st.integers(1, 17))
def test_size_is_the_total_and_count_is_what_a_rank_passes(name, nbytes, element, ranks):
    size, count = collectives.counts(name, nbytes, element, ranks)
    parts = ranks if name in ("all_gather", "reduce_scatter", "all_to_all") else 1
    assert size == parts * count * element <= nbytes
    if parts > 1:
        assert count * element % 16 == 0 and nbytes - size < 16 * ranks + element * ranks


def test_a_row_by_hand():
    """8 ranks gather 1 MiB each in 100 us: S = 8 MiB, algbw = 83.89 GB/s, busbw = 73.40 GB/s."""
    size, count = collectives.counts("all_gather", 8 * 2**20, 4, 8)
    assert (size, count) == (8388608, 262144)
    algbw = size / 100e-6 / 1e9
    cell = {
        "us": 100.0,
        "algbw": algbw,
        "busbw": algbw * collectives.busbw_factor("all_gather", 8),
        "wrong": 0,
    }
    row = {"size": size, "count": count, "type": "float", "redop": "none", "root": -1}
    text = collectives.row_text({**row, "out_of_place": cell, "in_place": None})
    assert text.split() == [
        "8388608",
        "262144",
        "float",
        "none",
        "-1",
        "100.00",
        "83.89",
        "73.40",
        "0",
        *["N/A"] * 4,
    ]


def test_numbers_keep_a_blank_between_columns():
    for value in (0.00001, 0.5, 3.14159, 12345.678, 987654321.0, 1e15):
        assert collectives._number(value, 9).startswith(" ") and len(collectives._number(value, 9)) == 9


def test_sizes():
    assert list(collectives.sizes(8, 128, 4)) == [8, 32, 128]
    assert list(collectives.sizes(64, 64, 1)) == [64]
    assert list(collectives.sizes(100, 1000, 1.5)) == [100, 150, 225, 337, 506, 759]
    assert collectives.parse_size("1G") == 2**30 and collectives.parse_size("1.5k") == 1536
    for wrong in ("", "x", "-1", "0", "1.5", "inf", "1T", "nan"):
        with pytest.raises(ValueError, match="size"):
            collectives.parse_size(wrong)
    with pytest.raises(ValueError, match="larger"):
        list(collectives.sizes(8, 4, 2))
    with pytest.raises(ValueError, match="factor"):
        list(collectives.sizes(4, 8, 1))


# ------------------------------------------------------------------------------------------------ correctness checks


class Four:
    size, device = 4, torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
@pytest.mark.parametrize("op", ["sum", "min", "max", "avg"])
@settings(deadline=None, max_examples=20)
@given(length=st.integers(1, 700), start=st.integers(0, 700))
def test_expected_results_are_the_plain_reduction(dtype, op, length, start):
    numbers = collectives.Numbers(Four, dtype)
    data = torch.stack([numbers.of(r, length, start).double() for r in range(4)])
    plain = {"sum": data.sum(0), "avg": data.mean(0), "min": data.amin(0), "max": data.amax(0)}[op]
    assert torch.equal(numbers.reduced(op, length, start), plain)
    assert numbers.wrong(plain.to(numbers.dtype), plain, op) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_element_is_counted(dtype):
    numbers = collectives.Numbers(Four, dtype)
    right = numbers.reduced("sum", 1000)
    got = right.to(numbers.dtype)
    got[17] += 1
    got[999] = float("nan")
    assert numbers.wrong(got, right) == 2
    missing = sum(numbers.of(r, 1000).double() for r in range(3))
    assert numbers.wrong(missing.to(numbers.dtype), right) > 900, "a rank left out"
    twice = right + numbers.of(0, 1000).double()
    assert numbers.wrong(twice.to(numbers.dtype), right) > 900, "a rank added twice"


def all_collectives(comm, op, dtype):
    site = Site.of(comm, "")
    site.out = lambda line: None
    options = dict(
        begin=4, end=3000, factor=7.0, iterations=1, warmup=0, dtype=dtype, op=op, root=comm.size - 1, check=1
    )
    found = {
        name: collectives.collective(site, {**options, "name": name}) for name in collectives.COLLECTIVES
    }
    return found if comm.rank == 0 else None


@pytest.mark.parametrize(
    "ranks, op, dtype", [(1, "sum", "float"), (2, "avg", "bfloat16"), (3, "max", "int32")]
)
def test_every_collective_runs_and_is_right(ranks, op, dtype):
    found = launch(all_collectives, ranks=ranks, op=op, dtype=dtype, device="cpu").results[0]
    for name, table in found.items():
        assert table["rows"] and table["wrong"] == 0, name
        for row in table["rows"]:
            for cell in filter(None, (row["out_of_place"], row["in_place"])):
                assert cell["algbw"] == pytest.approx(row["size"] / cell["us"] / 1e3)
                assert cell["busbw"] == pytest.approx(cell["algbw"] * collectives.busbw_factor(name, ranks))
            assert row["root"] == (ranks - 1 if name in ("broadcast", "reduce") else -1)
    assert found["all_reduce"]["rows"][0]["out_of_place"] is None, "torch's works in place"
    assert found["all_to_all"]["rows"][0]["in_place"] is None


def broken_all_reduce(comm):
    import torch.distributed as dist

    real = dist.all_reduce
    dist.all_reduce = lambda x, op: real(x[: len(x) // 2], op)  # half of it only
    site = Site.of(comm, "")
    site.out = lambda line: None
    options = dict(
        begin=4096, end=4096, factor=2.0, iterations=1, warmup=0, dtype="float", op="sum", root=0, check=1
    )
    return collectives.collective(site, {**options, "name": "all_reduce"})["wrong"]


def test_a_broken_all_reduce_is_seen():
    assert launch(broken_all_reduce, ranks=2, device="cpu").results[0] > 900  # of 2 x 512 left alone


def test_point_to_point_between_chosen_ranks():
    more = "--peer 1 -b 8 -e 32K -f 64 -n 2 -w 0"
    found = launch(run_step, ranks=3, device="cpu", name="point_to_point", more=more).results[0]
    assert (
        found["peer"] == 1
        and [row["size"] for row in found["rows"]] == [8, 512, 32768]
        and found["wrong"] == 0
    )
    for row in found["rows"]:
        assert row["latency_us"] > 0 and row["one_way"] > 0 and row["both_ways_each"] > 0


# ------------------------------------------------------------------------------------------------ steps


def test_block_flops_are_what_pytorch_counts():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    stack = steps.make_stack(hidden=64, heads=4, layers=3, dtype=torch.float32, device="cpu")
    x = torch.randn(2, 16, 64)
    # Attention as plain products: the fused kernel for CPUs is not in the counter's table.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        stack(x)
    forward = steps.block_flops(tokens=32, sequence=16, hidden=64) / 3
    assert counter.get_total_flops() == 3 * forward


def run_step(comm, name, more):
    site = Site.of(comm, "")
    site.out = lambda line: None
    options = vars(cli.parser().parse_args([name, *more.split()]))
    return cli.BENCHES[name](site, options)


SMALL = "-n 1 -w 0 --hidden 32 --heads 2 --seq 8 --batch 4"


@pytest.mark.parametrize(
    "name, more",
    [
        ("tensor_parallel", ""),
        ("ddp", "--layers 1"),
        ("fsdp", "--layers 2"),
        ("pipeline", "--micro-batches 1 2"),
    ],
)
def test_steps_check_themselves(name, more):
    found = launch(run_step, ranks=2, device="cpu", name=name, more=f"{SMALL} {more}").results[0]
    assert found["check"]["ok"] and found["wrong"] == 0
    for row in found["rows"]:
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        flops = found["shape"]["layers"] * steps.block_flops(row["tokens"], 8, 32)
        assert row["flops_per_second_per_rank"] == pytest.approx(flops / row["seconds"] / 2)
    replicas = 2 if name in ("ddp", "fsdp") else 1
    assert {row["tokens"] for row in found["rows"]} == {4 * 8 * replicas}
    if name == "fsdp":
        assert 2 * found["held_bytes"] == pytest.approx(found["whole_bytes"], rel=0.05)
    if name == "pipeline":
        kinds = [(r["schedule"], r["micro_batches"], r["predicted_idle"]) for r in found["rows"]]
        assert kinds == [("GPipe", 1, 1 / 2), ("GPipe", 2, 1 / 3), ("1F1B", 2, 1 / 3)]


def four_all_reduces(comm):
    """How many all-reduces the tensor-parallel block really makes."""
    from torch.distributed.tensor.debug import CommDebugMode

    site = Site.of(comm, "")
    site.out = lambda line: None
    counted = []
    real = Site.time

    def count(self, work, iterations, warmup):
        with CommDebugMode() as mode:
            work()
        counted.append(mode.get_total_counts())
        return real(self, work, 1, 0)

    Site.time = count
    options = vars(cli.parser().parse_args(["tensor_parallel", *SMALL.split()]))
    return steps.tensor_parallel(site, options)["all_reduces"], counted[0]


def test_tensor_parallel_makes_the_all_reduces_that_it_says():
    assert launch(four_all_reduces, ranks=2, device="cpu").results[0] == (4, 4)


def test_a_failed_check_is_a_failure():
    class Alone:
        gather = staticmethod(lambda value: [value])
        say = staticmethod(lambda line: None)

    task = object.__new__(steps.Task)
    task.site = Alone
    assert task.check("x", 0.5, 0.1)["ok"] is False
    assert task.check("x", float("nan"), 0.1)["ok"] is False
    assert task.check("x", 0.05, 0.1)["ok"] is True


@pytest.mark.parametrize(
    "name, more, message",
    [
        ("tensor_parallel", "--heads 3 --hidden 96", "--heads"),
        ("pipeline", "--layers 3", "--layers"),
        ("pipeline", "--batch 4 --micro-batches 3", "--micro-batches"),
        ("ddp", "--hidden 32 --heads 5", "--heads"),
        ("all_reduce", "--root 7", "--root"),
        ("point_to_point", "--peer 9", "--peer"),
    ],
)
def test_what_does_not_fit_is_named(name, more, message, capsys):
    assert cli.main([name, "--ranks", "2", "--device", "cpu", *more.split()]) == 2
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ the command line


@pytest.mark.slow
def test_under_torchrun_rank_0_speaks_alone():
    done = bench(
        "all_reduce",
        "-b",
        "64",
        "-e",
        "4K",
        "-f",
        "8",
        "-n",
        "2",
        "-w",
        "1",
        torchrun=2,
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert [int(row.split()[0]) for row in rows] == [64, 512, 4096]
    assert done.stdout.count("Out of bounds values : 0 OK") == 1
    assert "2 processes, gloo on CPU" in done.stdout and "Rank  1" in done.stdout


@pytest.mark.slow
def test_one_process_without_torchrun():
    done = bench("all_gather", "-b", "64", "-e", "64", "-n", "1", "-w", "0", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "nothing crosses a link" in done.stdout


def test_unknown_name_and_help():
    done = bench("all_reduced")
    assert (
        done.returncode == 2
        and "no bench is named 'all_reduced'" in done.stderr
        and "point_to_point" in done.stderr
    )
    assert "Traceback" not in done.stderr
    text = cli.parser().format_help()
    for word in (*cli.BENCHES, *chapters.CHAPTERS, "busbw", "torchrun", "--record"):
        assert word in text


@pytest.mark.parametrize("wrong", [["-n", "0"], ["-b", "2X"], ["--ranks", "0"], ["-d", "quad"], []])
def test_wrong_options_end_with_2(wrong, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["all_reduce", *wrong] if wrong else [])
    assert error.value.code == 2


def test_a_range_that_is_none(capsys):
    assert cli.main(["all_reduce", "-b", "1M", "-e", "1K"]) == 2
    assert "larger than the largest" in capsys.readouterr().err


def test_half_an_environment_is_told(monkeypatch):
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_NTASKS",
    ):
        monkeypatch.delenv(name, raising=False)
    check_surroundings(None)
    monkeypatch.setenv("SLURM_NTASKS", "16")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with pytest.raises(BenchError, match="16 tasks without torchrun"):
        check_surroundings(None)
    check_surroundings(4)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BenchError, match="LOCAL_RANK.*MASTER_PORT"):
        check_surroundings(None)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    check_surroundings(2)
    with pytest.raises(BenchError, match="--ranks 4"):
        check_surroundings(4)


def test_the_device_is_chosen_and_said():
    assert choose_device("auto", 8, ["H100"] * 8) == ("cuda", "NCCL: every rank has a GPU of its own")
    device, why = choose_device("auto", 2, ["H200"])
    assert device == "cpu" and "2 ranks on this node and 1 GPU" in why
    assert choose_device("auto", 2, [])[0] == choose_device("cpu", 1, ["H100"])[0] == "cpu"
    for gpus in ([], ["H200"]):
        with pytest.raises(BenchError, match="--device cuda needs a GPU for each rank"):
            choose_device("cuda", 2, gpus)


# ------------------------------------------------------------------------------------------------ recording


@pytest.mark.slow
def test_record_writes_what_recorded_reads(tmp_path):
    done = bench("broadcast", "--ranks", "2", "--device", "cpu", "-b", "64", "-e", "512", "-f", "8", "-n", "1", "-w", "0",
                 "--record", "--results", str(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    (entry,) = recorded("bench_broadcast", tmp_path)
    assert entry["world"] == "2 processes, gloo on CPU" and entry["machine"]["summary"] and entry["date"]
    assert [row["size"] for row in entry["rows"]] == [64, 512] and entry["wrong"] == 0


def test_chapter_2_reads_a_recorded_all_reduce(tmp_path):
    cell = {"us": 100.0, "algbw": 1.0, "busbw": 1.0, "wrong": 0}
    rows = [{"size": 1024, "in_place": cell, "out_of_place": None}]
    record("bench_all_reduce", "8 processes, NCCL on 8 GPUs (H100)", tmp_path, ranks=8, rows=rows)
    (entry,) = recorded("02_all_reduce_sweep", tmp_path)
    assert entry["sizes"] == [1024] and entry["seconds"] == {"auto": [1e-4]} and entry["machine"]["summary"]
    record(
        "02_all_reduce_sweep",
        "8 processes, NCCL on 8 GPUs (H100)",
        tmp_path,
        sizes=[4],
        seconds={"ours": [1.0]},
    )
    (entry,) = recorded("02_all_reduce_sweep", tmp_path)
    assert entry["sizes"] == [4], "the chapter's own program goes before"


def chapter_under_torchrun(comm):
    site = Site.of(comm, "")
    start = chapters.under_torchrun(comm, site.gather, lambda ranks: f"{ranks} of them")
    alone = start.run(lambda comm, x: (comm.size, x.sum().item()), ranks=1, x=torch.ones(3).numpy())
    every = start.run(
        lambda comm, mine, add: comm.all_reduce(mine) + add,
        ranks=3,
        inputs=[torch.ones(2).numpy()] * 3,
        add=1,
    )
    return alone, every


def test_programs_under_torchrun_run_on_the_first_ranks():
    for alone, (sums, world) in launch(chapter_under_torchrun, ranks=3, device="cpu").results:
        assert alone == ([(1, 3.0)], "1 of them")
        assert world == "3 of them" and [s.tolist() for s in sums] == [[4.0, 4.0]] * 3


def test_the_chapters_read_every_recorded_program():
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("chapters/*.ipynb")))
    assert set(re.findall(r'recorded\(\\"(\w+)\\"\)', text)) == set(chapters.CHAPTERS)
    assert list(record_tool.NAMES.values()) == list(chapters.CHAPTERS)
    assert list(record_tool.NAMES) == ["01", "02", "03", "04", "05", "06", "08", "beyond_1", "beyond_2"]


@pytest.mark.slow
def test_a_chapters_program_under_launch(tmp_path):
    done = bench(
        "08_overlap_trial", "--ranks", "2", "--device", "cpu", "--record", "--results", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    (entry,) = recorded("08_overlap_trial", tmp_path)
    assert set(entry["seconds"]) == {"computing", "communicating", "both"} and entry["ranks"] == 2


@pytest.mark.parametrize("name", ["beyond_1_attention", "beyond_2_experts"])
def test_the_programs_beyond_the_guide_are_recorded(name, tmp_path, monkeypatch, capsys):
    def small(module, function, shrink):
        program = getattr(module, function)
        monkeypatch.setattr(module, function, lambda comm, **given: program(comm, **shrink(given)))

    def fewer_tokens(given):
        return {**given, "whole": [x[:, :, :32] for x in given["whole"]], "repeats": 1}

    def fewer_rows(given):
        return {**given, "batches": [x[:64] for x in given["batches"]], "repeats": 1}

    small(chapters.long_context, "time_attention", fewer_tokens)
    small(chapters.mixture_of_experts, "time_experts", fewer_rows)
    command = [name, "--ranks", "2", "--device", "cpu", "--record", "--results", str(tmp_path)]
    assert cli.main(command) == 0
    (entry,) = recorded(name, tmp_path)
    assert entry["world"] == "2 processes, gloo on CPU" and entry["ranks"] == 2
    if name == "beyond_1_attention":
        ways = {"ring", "ulysses", "gather"}
        assert set(entry["bytes"]) == ways and set(entry["seconds"]) == {"contiguous", "zigzag"}
        for split, times in entry["seconds"].items():
            assert (
                set(times) == ways and min(times.values()) > 0 and sum(entry["pairs"][split]) == 32 * 33 / 2
            )
        assert entry["apart"] < 1e-4
    else:
        assert len(entry["seconds"]) == len(entry["hot"]) == len(entry["bytes"]) and entry["hot"][0] == 0
        assert entry["rows"][0] == [128, 128] and all(sum(rows) == 256 for rows in entry["rows"])


def test_recorded_files_hold_what_the_readers_need():
    for path in sorted((ROOT / "results").glob("*--*.json")):
        entry = json.loads(path.read_text(encoding="utf-8"))
        assert {"name", "world", "date", "machine"} <= set(entry) and "summary" in entry["machine"], path.name
        assert path.name.startswith(f"{entry['name']}--")
        if entry["name"].startswith("bench_"):
            assert entry["wrong"] == 0, path.name
