"""The sweep accounts for many layouts at once exactly as `closed_form` does for one."""

from __future__ import annotations

import pytest

from holdover.closed_form.architecture import MEGATRON, PAPER, Kernels
from holdover.closed_form.errors import ConfigurationError
from holdover.closed_form.estimate import closed_form
from holdover.closed_form.presets import PRESETS
from holdover.closed_form.rates import cluster_of
from holdover.closed_form.recompute import Recompute
from holdover.closed_form.sweep import layouts_for, recomputations_for, sweep
from holdover.cost.devices import card

CLUSTER = cluster_of(card("h100-80gb"))


@pytest.mark.parametrize(
    ("name", "kernels", "gpus", "batch"),
    [("gpt-22b", PAPER, 16, 64), ("llama3-8b", MEGATRON, 16, 64), ("mixtral-8x7b", MEGATRON, 64, 128)],
)
def test_every_candidate_is_what_closed_form_says(name: str, kernels: Kernels, gpus: int, batch: int) -> None:
    model = PRESETS[name]
    layouts = layouts_for(model, gpus, global_batch=batch)
    swept = sweep(model, layouts, kernels=kernels, cluster=CLUSTER)
    assert swept.tried == len(layouts) * len(recomputations_for(model, kernels))
    assert len(swept.fitting) > 10
    for candidate in swept.fitting[:: max(1, len(swept.fitting) // 25)]:
        alone = closed_form(model, candidate.layout, kernels=kernels, recompute=candidate.recompute, cluster=CLUSTER)
        if candidate.recompute.granularity == "optimal":  # the sweep walks the hull, one layout alone is solved exactly
            assert alone.step_seconds <= candidate.step_seconds * (1 + 1e-9)
            assert candidate.step_seconds <= alone.step_seconds * 1.02
        else:
            assert candidate.peak_bytes == alone.peak_bytes
            assert candidate.step_seconds == pytest.approx(alone.step_seconds)
            assert candidate.mfu == pytest.approx(alone.mfu())


def test_candidates_fit_and_are_sorted() -> None:
    model = PRESETS["llama3-8b"]
    swept = sweep(model, layouts_for(model, 8, global_batch=32), cluster=CLUSTER, memory_bytes=60 * 2**30)
    assert all(found.peak_bytes <= 60 * 2**30 for found in swept.fitting)
    times = [found.step_seconds for found in swept.fitting]
    assert times == sorted(times)


def test_layouts_are_possible_and_different() -> None:
    for name, gpus in (("llama3-70b", 64), ("deepseek-v3", 128), ("gpt3-175b", 64)):
        model = PRESETS[name]
        layouts = layouts_for(model, gpus, global_batch=256)
        assert layouts
        assert len(layouts) == len(set(layouts))
        for layout in layouts:
            assert layout.problems(model) == []
            assert layout.gpus == gpus
            assert layout.global_batch == 256


def test_nothing_fits_but_the_lightest_is_known() -> None:
    model = PRESETS["llama3-70b"]
    swept = sweep(model, layouts_for(model, 8, global_batch=8), cluster=CLUSTER, memory_bytes=2**30)
    assert swept.fitting == ()
    assert swept.lightest_bytes > 2**30


def test_no_layouts_at_all() -> None:
    with pytest.raises(ConfigurationError, match="Change --gpus or --global-batch"):
        sweep(PRESETS["llama3-8b"], layouts_for(PRESETS["llama3-8b"], 37, global_batch=3))


def test_long_sequences_may_be_shared() -> None:
    model = PRESETS["llama3-8b"]
    layouts = layouts_for(model, 8, global_batch=8, sequence=32768, context=(1, 2, 4))
    assert {layout.cp for layout in layouts} == {1, 2, 4}


def test_settings_worth_trying_follow_the_model() -> None:
    modules = {x.modules for x in recomputations_for(PRESETS["deepseek-v3"], MEGATRON) if x.granularity == "selective"}
    assert modules == {("layernorm",), ("layernorm", "moe_act", "mla_up_proj")}
    kinds = [x.granularity for x in recomputations_for(PRESETS["gpt-22b"], PAPER)]
    assert kinds == ["none", "selective", "selective", "full", "optimal"]
    assert Recompute() in recomputations_for(PRESETS["llama3-8b"], MEGATRON)
