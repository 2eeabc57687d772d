"""`python -m manyranks plan`: its table, its JSON, and what it says to bad input."""

import json
import subprocess
import sys

import pytest

from manyranks import plan_command
from manyranks.__main__ import COMMANDS, main
from manyranks.models import MODELS
from manyranks.planner import CONSTANTS, predict

JOB = ["--model", "7B", "--cluster", "1x8xH100", "--batch", "64"]


def run(capsys, *arguments):
    status = main(["plan", *arguments])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_the_table_and_the_explanation(capsys):
    status, out, err = run(capsys, *JOB, "--top", "3", "--explain")
    assert status == 0 and not err
    assert "Predicted, fastest first" in out and "Axis by axis" in out
    rows = out.split("seconds")[1].splitlines()[1:4]
    assert all(row.split()[0].replace(".", "").isdigit() for row in rows)


def test_json_is_complete_and_comes_back(capsys, tmp_path):
    path = tmp_path / "plan.json"
    status, out, _ = run(capsys, *JOB, "--tp", "2", "--json", str(path), "--inter-Gbps", "100")
    assert status == 0 and "written to" in out
    answer = json.loads(path.read_text())
    assert answer["format"] == "manyranks plan" and answer["version"] == 1
    assert answer["cluster"]["inter"]["bandwidth"] == 12.5e9
    assert answer["considered"] >= answer["fitting"] >= len(answer["plans"]) == 5
    for place, one in enumerate(answer["plans"]):
        plan, job, cluster = plan_command.read(path, place)
        again = predict(plan, job, cluster)
        assert plan.tp == 2
        assert again.seconds == one["seconds"] and again.peak == one["peak_bytes"]
        assert sum(one["parts"].values()) == pytest.approx(one["seconds"])
        assert list(again.memory) == one["memory"]


def test_json_to_the_terminal_is_nothing_but_json(capsys):
    status, out, _ = run(capsys, *JOB, "--json", "-")
    assert status == 0 and json.loads(out)["job"]["batch"] == 64


def test_a_shape_and_the_usual_shape(capsys):
    shape = ["--layers", "32", "--hidden", "4096", "--heads", "32", "--vocabulary", "51200"]
    _, out, _ = run(capsys, *shape, "--gpus", "8", "--batch", "64", "--json", "-")
    assert json.loads(out)["job"]["model"]["hidden"] == 4096
    _, out, _ = run(
        capsys, "--model", "175B", "--gpus", "128", "--gpu", "A100", "--batch", "256", "--json", "-"
    )
    answer = json.loads(out)
    assert answer["job"]["model"]["layers"] == 96 and answer["cluster"]["nodes"] == 16


def test_constraints_reach_the_search(capsys):
    only = ["--pp", "2,4", "--recompute", "full", "--schedule", "1f1b", "--sequence-parallel", "no"]
    _, out, _ = run(capsys, *JOB, *only, "--json", "-")
    for one in json.loads(out)["plans"]:
        plan = one["plan"]
        assert plan["pp"] in (2, 4) and plan["recompute"] == "full" and plan["schedule"] == "1f1b"
        assert not plan["sequence_parallel"]


def test_own_constants(capsys, tmp_path):
    path = tmp_path / "constants.json"
    path.write_text(json.dumps({"link": 0.4}))
    _, slow, _ = run(capsys, *JOB, "--tp", "8", "--constants", str(path), "--json", "-")
    _, usual, _ = run(capsys, *JOB, "--tp", "8", "--json", "-")
    slow, usual = json.loads(slow), json.loads(usual)
    assert slow["constants"]["link"] == 0.4 and usual["constants"]["link"] == CONSTANTS.link
    assert slow["plans"][0]["seconds"] > usual["plans"][0]["seconds"]
    path.write_text(json.dumps({"linck": 0.4}))
    status, _, err = run(capsys, *JOB, "--constants", str(path))
    assert status == 2 and "linck" in err


def test_five_axes(capsys, tmp_path):
    path = tmp_path / "plan.json"
    moe = ["--model", "mixtral-8x7b", "--gpus", "64", "--batch", "512", "--sequence", "4096", "--causal"]
    status, out, _ = run(capsys, *moe, "--ep", "4,8", "--cp", "1,2", "--json", str(path), "--explain")
    assert status == 0 and "12.88B of them for a token" in out and " ep " in out.splitlines()[4]
    answer = json.loads(path.read_text())
    assert answer["job"]["causal"] is True and answer["job"]["model"]["experts"] == 8
    for place, one in enumerate(answer["plans"]):
        plan, job, cluster = plan_command.read(path, place)
        assert plan.ep in (4, 8) and job.model == MODELS["mixtral-8x7b"]
        again = predict(plan, job, cluster)
        assert again.seconds == one["seconds"] and "experts" in one["parts"]
    long = ["--model", "llama3-8b", "--gpus", "32", "--batch", "32", "--sequence", "131072"]
    _, out, _ = run(capsys, *long, "--cp", "16", "--json", "-")
    assert {one["plan"]["cp"] for one in json.loads(out)["plans"]} == {16}
    _, out, _ = run(capsys, *JOB)
    assert " cp " not in out and " ep " not in out
    v3 = ["--model", "DeepSeek-V3", "--gpus", "2048", "--batch", "15360", "--sequence", "4096", "--tp", "1"]
    status, _, _ = run(capsys, *v3, "--json", str(path))
    assert status == 0 and plan_command.read(path)[1].model == MODELS["deepseek-v3"]


def test_a_shape_with_experts(capsys):
    shape = ["--layers", "8", "--hidden", "1024", "--heads", "8", "--kv-heads", "4", "--ffn", "2048"]
    more = [
        "--experts",
        "8",
        "--top-k",
        "2",
        "--expert-ffn",
        "512",
        "--shared-experts",
        "1",
        "--dense-layers",
        "1",
    ]
    _, out, _ = run(
        capsys, *shape, *more, "--gpus", "8", "--batch", "64", "--ends-as-layers", "no", "--json", "-"
    )
    found = json.loads(out)["job"]["model"]
    assert (found["kv_heads"], found["expert_ffn"], found["dense_layers"]) == (4, 512, 1)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--model", "7B", "--batch", "64"], "--cluster"),
        (["--gpus", "8", "--batch", "64"], "--model"),
        (["--model", "7B", "--layers", "3", "--gpus", "8", "--batch", "64"], "--layers"),
        (["--layers", "3", "--gpus", "8", "--batch", "64"], "--hidden"),
        (["--model", "7B", "--gpus", "12", "--batch", "64"], "nodes of 8"),
        (["--model", "7B", "--gpus", "8", "--gpu", "H1000", "--batch", "64"], "H1000"),
        ([*JOB, "--gpus", "8"], "--cluster"),
        ([*JOB, "--tp", "3"], "heads"),
        ([*JOB, "--cp", "3"], "2 x cp"),
        ([*JOB, "--ep", "2"], "ep must be 1 for a model without experts"),
        ([*JOB, "--kv-heads", "8"], "--kv-heads exclude"),
        ([*JOB, "--causal", "--attention", "stored"], "causal"),
        (["--model", "llama3-8b", "--vocabulary", "5", "--gpus", "8", "--batch", "8"], "--vocabulary"),
        ([*JOB, "--zero-stage", "4"], "zero_stage"),
        ([*JOB, "--schedule", "zb"], "schedule"),
        ([*JOB, "--overlap", "most"], "overlap"),
        ([*JOB, "--constants", "no-such-file.json"], "--constants"),
        ([*JOB, "--json", "no-such-folder/plan.json"], "--json"),
    ],
)
def test_bad_input_is_one_clear_line(capsys, arguments, says):
    status, _, err = run(capsys, *arguments)
    assert status == 2 and says in err and "Traceback" not in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--model", "7Q", "--gpus", "8", "--batch", "8"], "7Q"),
        (["--model", "7Q", "--gpus", "8", "--batch", "8"], "mixtral-8x7b"),
        ([*JOB, "--cp", "x"], "--cp"),
        (["--model", "7B", "--gpus", "8"], "--batch"),
        (["--model", "7B", "--gpus", "0", "--batch", "8"], "--gpus"),
        (["--model", "7B", "--cluster", "8xH100", "--batch", "8"], "NODESxGPUSxNAME"),
        ([*JOB, "--tp", "two"], "--tp"),
        ([*JOB, "--convention", "fp8"], "--convention"),
    ],
)
def test_the_parser_names_the_option(capsys, arguments, says):
    with pytest.raises(SystemExit) as left:
        main(["plan", *arguments])
    assert left.value.code == 2 and says in capsys.readouterr().err


def test_nothing_fits_is_status_1_and_advice(capsys):
    status, out, err = run(capsys, "--model", "400B", "--gpus", "8", "--batch", "64")
    assert status == 1 and not out and "nothing fits" in err and "times the nodes" in err


def test_read_refuses_other_files(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="source"):
        plan_command.read(path)


def test_write_for_every_framework(capsys, tmp_path):
    folder = tmp_path / "run"
    status, out, err = run(capsys, *JOB, "--write", str(folder))
    assert status == 0 and not err
    names = {path.name for path in folder.iterdir()}
    assert "notes.txt" in names and names <= {
        "train.py",
        "torchtitan.toml",
        "deepspeed.json",
        "megatron.args",
        "notes.txt",
    }
    assert all(name in out for name in names)
    for name in ("torchrun", "torchtitan", "deepspeed", "megatron"):
        assert any(line.startswith(f"  {name}") for line in out.splitlines())


def test_pick_says_which_plan_is_written(capsys, tmp_path):
    path, args = tmp_path / "plan.json", tmp_path / "megatron.args"
    one_a_line = lambda: dict(line.split(" ", 1) for line in args.read_text().splitlines() if " " in line)  # noqa: E731
    only = ["--recompute", "none", "--zero-stage", "0,1", "--schedule", "1f1b"]
    seen = []
    for pick in ([], ["--pick", "1"], ["--pick", "2"], ["--pick", "7"]):
        status, out, err = run(
            capsys, *JOB, *only, *pick, "--top", "8", "--json", str(path), "--write-megatron", str(args)
        )
        assert status == 0 and not err and str(args) in out
        plans, place = json.loads(path.read_text())["plans"], int(pick[1]) - 1 if pick else 0
        plan, knobs = plans[place]["plan"], one_a_line()
        assert int(knobs["--tensor-model-parallel-size"]) == plan["tp"]
        assert int(knobs["--pipeline-model-parallel-size"]) == plan["pp"]
        assert int(knobs["--micro-batch-size"]) == plan["micro_batch"]
        seen.append(plan)
    assert seen[0] == seen[1] and seen[2] != seen[1] != seen[3] != seen[2]


def test_pick_may_be_below_the_printed_table(capsys, tmp_path):
    path = tmp_path / "megatron.args"
    status, out, err = run(capsys, *JOB, "--top", "1", "--pick", "9", "--write-megatron", str(path))
    assert "\nplan 9: dp " in out and status in (0, 2) and (status == 0) == path.exists() == (not err)


def test_each_writer_writes_what_the_frameworks_module_gives(capsys, tmp_path):
    from manyranks import frameworks

    files = {name: tmp_path / name for name in plan_command.WRITTEN}
    options = [text for name, path in files.items() for text in (f"--write-{name}", str(path))]
    path = tmp_path / "plan.json"
    only = ["--tp", "1", "--pp", "1", "--zero-stage", "3", "--recompute", "none"]
    status, out, err = run(capsys, *JOB, *only, "--json", str(path), *options)
    plan, job, _ = plan_command.read(path)
    texts = {
        "torchrun": lambda: frameworks.torchrun_script(plan, job),
        "torchtitan": lambda: frameworks.torchtitan_toml(plan, job),
        "deepspeed": lambda: frameworks.deepspeed_json(plan, job),
    }
    for name, text in texts.items():
        assert files[name].read_text() == text()
        assert all(line in out for line in frameworks.omissions(name, plan, job))
        started = next(
            line for line in out.splitlines() if "torchrun --" in line and str(files[name]) in line
        )
        assert "--standalone --nproc-per-node 8" in started
    try:
        expected = frameworks.megatron_arguments(plan, job)
    except frameworks.Unsupported as reason:
        assert status == 2 and str(reason) in err and not files["megatron"].exists()
    else:
        assert status == 0 and files["megatron"].read_text().split() == " ".join(expected).split()


def test_what_a_framework_cannot_express_is_status_2(capsys, tmp_path):
    path = tmp_path / "train.py"
    only = ["--schedule", "interleaved", "--pp", "2"]
    status, out, err = run(capsys, *JOB, *only, "--write-deepspeed", str(path))
    assert status == 2 and not path.exists() and "Predicted, fastest first" in out
    assert err.startswith("error: --write-deepspeed:") and "pp 2" in err and err.count("\n") == 1


def test_json_to_the_terminal_stays_json_while_writing(capsys, tmp_path):
    path = tmp_path / "train.py"
    status, out, err = run(
        capsys, *JOB, "--tp", "1", "--pp", "1", "--json", "-", "--write-torchrun", str(path)
    )
    assert status == 0 and json.loads(out)["version"] == 1 and str(path) in err
    compile(path.read_text(), "train.py", "exec")


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--pick", "2"], "--write"),
        (["--pick", "99999", "--write", "x"], "--pick"),
        (["--write-torchrun", "no-such-folder/x.py", "--tp", "1", "--pp", "1"], "--write-torchrun"),
    ],
)
def test_bad_writing(capsys, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, *JOB, *arguments)
    assert status == 2 and says in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_a_file(capsys, tmp_path):
    path = tmp_path / "x"
    path.write_text("")
    status, _, err = run(capsys, *JOB, "--write", str(path))
    assert status == 2 and err.startswith("error: --write:")


def test_the_dispatcher(capsys):
    assert main([]) == 2 and main(["--help"]) == 0 and main(["fly"]) == 2
    told = capsys.readouterr()
    assert all(name in told.out for name in COMMANDS) and "fly" in told.err
    done = subprocess.run([sys.executable, "-m", "manyranks", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "plan" in done.stdout
