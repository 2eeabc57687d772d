"""The search: every plan enumerated, those that fit ranked, and the answer in words and pictures."""

from dataclasses import replace

import numpy as np
import pytest

from manyranks.memory import Transformer
from manyranks.models import MODELS, Decoder
from manyranks.planner import CONSTANTS, Job, check_plan, model_of, predict
from manyranks.runtime import Cluster
from manyranks.search import NothingFits, plan_table, search, stacked_bars, step_bars

GPT3 = Transformer(96, 12288, 96, 51200, 2048)
SMALL = Transformer(8, 1024, 8, 5120)
A100 = Cluster(1, 8, "A100")


def test_the_table_holds_only_and_all_valid_plans():
    job, cluster = Job(Transformer(12, 1536, 12, 5120), 1024, 24, attention="stored"), Cluster(3, 4, "A100")
    table = plan_table(job, cluster)
    plans = [table.plan(i) for i in range(len(table.dp))]
    assert len(set(plans)) == len(plans)
    for plan in plans:
        check_plan(plan, job, cluster)
        assert plan.tp in (1, 2, 4) and 12 % plan.pp == 0
    assert {plan.recompute for plan in plans} == {"none", "selective", "full"}
    assert {plan.schedule for plan in plans} == {"gpipe", "1f1b", "interleaved"}
    assert {(plan.dp, plan.tp, plan.pp) for plan in plans} == {
        (12 // (t * p), t, p)
        for t in (1, 2, 4)
        for p in (1, 2, 3, 4, 6, 12)
        if 12 % (t * p) == 0 and 24 % (12 // (t * p)) == 0
    }
    wide = plan_table(job, cluster, tensor_within_node=False)
    assert {3, 6, 12} <= set(wide.tp)


def test_search_is_the_brute_force_minimum():
    job, cluster = Job(model_of(13e9), 2048, 64), Cluster(2, 8, "A100")
    found = search(job, cluster, keep=5)
    table = plan_table(job, cluster)
    every = [predict(table.plan(i), job, cluster) for i in range(0, len(table.dp), 7)]
    fitting = [one for one in every if one.fits]
    assert found.winner.seconds <= min(one.seconds for one in fitting) * 1.006
    assert all(one.fits for one in found.best) and len(found.best) == 5
    assert found.considered == len(table.dp) > found.fitting > 0
    seconds = [one.seconds for one in found.best]
    assert seconds == sorted(seconds) or max(seconds) / min(seconds) < 1.1
    assert len({(p.plan.tp, p.plan.pp) for p in found.layouts}) == len(found.layouts)


@pytest.mark.parametrize(
    "only",
    [
        {"tp": 4},
        {"pp": (2, 4)},
        {"zero_stage": 0},
        {"micro_batch": 1},
        {"schedule": "gpipe", "pp": 2},
        {"recompute": ("full",)},
        {"sequence_parallel": False},
        {"virtual_stages": (2, 5), "schedule": "interleaved", "pp": 2},
    ],
)
def test_constraints_hold(only):
    found = search(Job(model_of(7e9), 2048, 64), Cluster(2, 8, "A100"), **only)
    for name, value in only.items():
        takes = value if isinstance(value, tuple) else (value,)
        assert all(getattr(one.plan, name) in takes for one in found.best)


@pytest.mark.parametrize(
    "wrong, names",
    [
        ({"zero": 1}, "zero"),
        ({"zero_stage": 7}, "zero_stage"),
        ({"tp": 0}, "tp"),
        ({"schedule": "fast"}, "schedule"),
        ({"recompute": ("none", "all")}, "recompute"),
        ({"keep": 0}, "keep"),
        ({"tp": 7}, "tp=7"),
        ({"tp": 2.0}, "tp"),
        ({"pp": "2"}, "pp"),
        ({"sequence_parallel": 2}, "sequence_parallel"),
    ],
)
def test_bad_search_options_are_named(wrong, names):
    with pytest.raises((ValueError, TypeError), match=names):
        search(Job(SMALL, 1024, 16), A100, **wrong)


def test_nothing_fits_says_what_would():
    job, cluster = Job(model_of(70e9), 8192, 64), Cluster(2, 8, "H100")
    with pytest.raises(NothingFits) as caught:
        search(job, cluster)
    advice = caught.value.advice
    assert any("32 GPUs" in line for line in advice) and any("H200" in line for line in advice)
    search(job, Cluster(4, 8, "H100"))
    search(job, Cluster(2, 8, "H200"))
    with pytest.raises(NothingFits) as caught:
        search(Job(model_of(30e9), 2048, 64), Cluster(2, 8, "A100"), zero_stage=0, pp=1, tp=1)
    said = str(caught.value)
    assert "zero_stage=0" in said or "tp=1" in said or "pp=1" in said


def test_the_explanation_names_the_winner_and_its_rivals():
    found = search(Job(GPT3, 2048, 256), Cluster(16, 8, "A100"))
    told = found.explain()
    assert str(found.winner.plan) in told and str(found.layouts[1].plan) in told
    for axis in ("tp", "pp", "micro batch", "zero stage", "recompute", "sequence parallel"):
        assert f"  {axis} " in told
    assert "Links: tensor over NVLink, pipeline over network" in told


def test_ties_go_to_the_simpler_plan():
    job = Job(model_of(1e9), 2048, 4096)
    found = search(job, Cluster(1, 8, "H100"), micro_batch=8, zero_stage=(0, 1))
    one = search(job, Cluster(1, 8, "H100"), micro_batch=8, zero_stage=1)
    assert one.winner.seconds < found.winner.seconds < 1.005 * one.winner.seconds
    assert found.winner.plan.zero_stage == 0 and found.winner.plan.tp == found.winner.plan.pp == 1


def test_pictures_tell_their_numbers():
    found = search(Job(SMALL, 1024, 64), A100, keep=2)
    drawn = step_bars(found.best, "Two plans")
    assert str(found.winner.plan) in drawn.alt and "products" in drawn.alt
    assert "<svg" in drawn.svg and len(drawn.svg) < 10_000
    with pytest.raises(ValueError, match="predictions"):
        step_bars([])
    with pytest.raises(ValueError, match="rows"):
        stacked_bars({}, (), str)


def test_own_constants_reach_the_ranking():
    slow = replace(CONSTANTS, matmul=0.5)
    job = Job(SMALL, 1024, 16)
    found = search(job, A100, slow)
    assert found.constants is slow and found.winner == predict(found.winner.plan, job, A100, slow)


def test_options_may_be_numpys():
    found = search(Job(SMALL, 1024, 16), A100, tp=np.int64(2), pp=np.array([2, 4]))
    assert {one.plan.tp for one in found.best} == {2} and found.winner.plan.pp in (2, 4)


def test_no_plan_says_what_must_divide():
    with pytest.raises(ValueError, match="dp the batch of 7") as caught:
        search(Job(Transformer(1, 64, 1, 100), 16, 7), A100)
    assert "tensor_within_node" not in str(caught.value)


def test_several_values_are_all_tried():
    table = plan_table(Job(SMALL, 1024, 16), A100, pp=(2, 4), recompute=("none", "full"))
    assert set(table.pp) == {2, 4} and set(table.recompute) == {0, 2}


MOE = Decoder(12, 1024, 8, 5120, kv_heads=4, experts=8, top_k=2, expert_ffn=512, dense_layers=1)


def test_sequences_are_split_only_where_asked_and_experts_everywhere():
    job, cluster = Job(MOE, 4096, 64, causal=True), Cluster(4, 8)
    usual, asked = plan_table(job, cluster), plan_table(job, cluster, cp=(1, 2, 4))
    assert set(usual.cp) == {1} and set(usual.ep) == {1, 2, 4, 8}
    assert set(asked.cp) == {1, 2, 4} and np.count_nonzero(asked.cp == 1) == len(usual.dp)
    dense = plan_table(Job(SMALL, 1024, 64), cluster)
    assert set(dense.cp) == set(dense.ep) == {1} and not dense.ends_as_layers.any()
    plans = [asked.plan(i) for i in range(len(asked.dp))]
    assert len(set(plans)) == len(plans)
    for plan in plans[::7]:
        check_plan(plan, job, cluster)


def test_stages_of_a_decoder_may_differ():
    llama = Job(MODELS["llama3-405b"], 8192, 2048, "mixed18", causal=True)
    table = plan_table(llama, Cluster(1024, 8), tp=8, pp=16, recompute="none")
    kinds = set(zip(table.schedule.tolist(), table.virtual_stages.tolist(), table.ends_as_layers.tolist()))
    assert kinds >= {(1, 1, 0), (1, 1, 1), (2, 8, 1)} and (2, 8, 0) not in kinds
    found = search(llama, Cluster(1024, 8), tp=8, pp=16)
    assert found.winner.plan.ends_as_layers and found.winner.plan.virtual_stages == 8


def test_a_search_over_five_axes_explains_itself():
    job, cluster = Job(MOE, 32768, 32, causal=True), Cluster(4, 8)
    found = search(job, cluster, cp=(1, 2, 4, 8), ep=(1, 4, 8))
    told = found.explain()
    assert "\n  cp " in told and "\n  ep " in told
    assert "experts" in told or "context" in told
    assert len({(p.plan.tp, p.plan.pp, p.plan.cp, p.plan.ep) for p in found.layouts}) == len(found.layouts)
    spread = search(job, cluster, cp=4, ep=8, keep=2)
    assert "context over" in spread.explain() and "experts over" in spread.explain()
    drawn = step_bars(spread.best)
    assert "context" in drawn.alt or "other" in drawn.alt
    assert abs(sum(spread.winner.parts.values()) / spread.winner.seconds - 1) < 1e-9


def test_bad_degrees_of_the_further_axes_are_named():
    with pytest.raises(ValueError, match="ep must be 1 for a model without experts, with ep=2"):
        search(Job(SMALL, 1024, 16), A100, ep=2)
    with pytest.raises(ValueError, match="ep must divide dp x cp and the 8 experts"):
        search(Job(MOE, 4096, 64), A100, ep=3)
    with pytest.raises(ValueError, match="2 x cp must divide the sequence"):
        search(Job(MOE, 4096, 64), A100, cp=3)
    with pytest.raises(ValueError, match="cp"):
        search(Job(MOE, 4096, 64), A100, cp=0)
    with pytest.raises(TypeError, match="ends_as_layers"):
        search(Job(MOE, 4096, 64), A100, ends_as_layers=2)


def test_what_does_not_fit_may_fit_with_split_sequences():
    job = Job(MODELS["llama3-8b"], 262144, 8, causal=True)
    with pytest.raises(NothingFits) as caught:
        search(job, Cluster(8, 8), recompute="none", tp=1)
    assert any(line.startswith("split sequences, cp=") for line in caught.value.advice)
