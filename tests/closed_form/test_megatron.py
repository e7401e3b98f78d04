"""Megatron's flags, and its estimator's published slips."""

from __future__ import annotations

import pytest

from holdover.closed_form.architecture import MEGATRON, PAPER
from holdover.closed_form.errors import ConfigurationError
from holdover.closed_form.estimate import closed_form
from holdover.closed_form.layers import layer
from holdover.closed_form.layout import Layout
from holdover.closed_form.megatron import (
    layout_flags,
    megatron_estimate,
    megatron_settings,
    nearest,
    recompute_flags,
)
from holdover.closed_form.parameters import States
from holdover.closed_form.presets import PRESETS
from holdover.closed_form.recompute import Recompute

LLAMA, GPT = PRESETS["llama3-8b"], PRESETS["gpt-22b"]
SELECTIVE = Recompute(granularity="selective")
SP = Layout(tp=8, sequence_parallel=True)


def test_nearest_setting_fits_and_is_never_faster_than_the_optimum() -> None:
    layout = Layout(dp=8, zero=3, micro_batch=2)
    budget = 76 * 2**30
    optimal = closed_form(LLAMA, layout, recompute=Recompute(granularity="optimal"), memory_bytes=budget)
    near = nearest(optimal, budget)
    assert near.found.peak_bytes <= budget
    assert near.lost_time > 0
    assert near.replay_ratio > 1
    cheaper = [closed_form(LLAMA, layout, recompute=setting) for setting in megatron_settings(LLAMA, layout, MEGATRON)]
    fitting = [found.step_seconds for found in cheaper if found.peak_bytes <= budget]
    assert near.found.step_seconds == min(fitting)
    assert "--use-megatron-fsdp" in near.flags


def test_plenty_of_memory_needs_no_flags() -> None:
    optimal = closed_form(GPT, SP, kernels=PAPER, recompute=Recompute(granularity="optimal"), memory_bytes=2**40)
    near = nearest(optimal, 2**40)
    assert near.found.recompute.granularity == "none"
    assert (near.lost_time, near.replay_ratio) == (0, 1)


def test_nothing_fits() -> None:
    optimal = closed_form(GPT, SP, kernels=PAPER, recompute=Recompute(granularity="optimal"))
    with pytest.raises(ConfigurationError, match="no Megatron-LM setting fits: the lightest"):
        nearest(optimal, 2**30)


def test_flags() -> None:
    layout = Layout(
        dp=2, tp=4, cp=2, pp=4, ep=8, sequence_parallel=True, schedule="interleaved", virtual=2, micro_batches=8, zero=1
    )
    found = closed_form(PRESETS["mixtral-8x7b"], layout, states=States(optimizer="adamw-bf16"))
    flags = " ".join(layout_flags(found))
    for flag in (
        "--tensor-model-parallel-size 4",
        "--pipeline-model-parallel-size 4",
        "--context-parallel-size 2",
        "--expert-model-parallel-size 8",
        "--expert-tensor-parallel-size 1",
        "--sequence-parallel",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--use-distributed-optimizer",
        "--global-batch-size 16",
        "--exp-avg-dtype bf16",
    ):
        assert flag in flags
    full = Recompute(granularity="full", method="block", num_layers=3, distribute_saved=True)
    assert recompute_flags(full) == [
        "--recompute-granularity full",
        "--recompute-method block",
        "--recompute-num-layers 3",
        "--distribute-saved-activations",
    ]
    assert recompute_flags(SELECTIVE)[1] == "--recompute-modules core_attn"
    assert recompute_flags(Recompute()) == []


def test_what_megatron_cannot_say_is_said() -> None:
    layout = Layout(pp=4, schedule="zb-v", micro_batches=8, tp=2)
    optimal = closed_form(LLAMA, layout, recompute=Recompute(granularity="optimal"), memory_bytes=2**40)
    assert "zb-v" in nearest(optimal, 2**40).not_expressible[0]


def test_the_estimators_two_branches() -> None:
    sbh = 2048 * 6144
    selective = megatron_estimate(GPT, SP, SELECTIVE)
    expected = (34 * sbh * 48 + 8 * 2048 + sbh + 4 * (sbh + 2048 * 51200)) / 8
    assert selective.activations_bytes == pytest.approx(expected)
    other = megatron_estimate(GPT, SP, Recompute())
    assert other.activations_bytes == pytest.approx(
        1.05 * (13 * sbh * 48 + 8 * 2048 + sbh + 2 * (2048 * 51200 / 8 + sbh))
    )


def test_it_prints_the_same_number_for_full_recomputation_as_for_none() -> None:
    full, none = (
        megatron_estimate(LLAMA, Layout(), x).activations_bytes for x in (Recompute(granularity="full"), Recompute())
    )
    assert full == none
    kept = closed_form(LLAMA, Layout(), recompute=Recompute(granularity="full")).stages[0].activations_bytes
    assert full > 15 * kept


def test_full_recomputation_of_an_8b_model_at_8192_is_said_to_take_37_85_gib() -> None:
    """As published: 37.85 for none and for full alike."""
    assert megatron_estimate(LLAMA, Layout(), Recompute()).activations_bytes / 2**30 == pytest.approx(37.85, abs=0.005)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("llama2-7b", 0.894), ("llama3-8b", 0.940), ("llama3-70b", 0.954), ("llama3-405b", 0.975)],
)
def test_how_far_18_h_4_f_is_from_fused_llama(name: str, ratio: float) -> None:
    model = PRESETS[name]
    theirs = 18 * model.hidden + 4 * model.ffn
    ours = layer(model, MEGATRON).bytes(small=False).at(Layout().values(model))
    assert theirs / ours == pytest.approx(ratio, abs=0.001)


@pytest.mark.parametrize(("name", "ratio"), [("mixtral-8x7b", 0.54), ("deepseek-v3", 0.44)])
def test_how_far_it_is_from_experts(name: str, ratio: float) -> None:
    model = PRESETS[name]
    theirs = 18 * model.hidden + 4 * model.ffn
    ours = layer(model, MEGATRON, "moe").bytes(small=False).at(Layout().values(model))
    assert theirs / ours == pytest.approx(ratio, abs=0.005)


def test_its_weights_and_optimizer_agree_with_the_list_where_nothing_special_is_asked() -> None:
    for name in ("llama2-7b", "gpt-22b", "mixtral-8x7b"):
        model = PRESETS[name]
        theirs = megatron_estimate(model, Layout(), Recompute()).states_bytes
        stage = closed_form(model, Layout()).stages[0]
        ours = stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes
        assert theirs == pytest.approx(ours, rel=0.004)
