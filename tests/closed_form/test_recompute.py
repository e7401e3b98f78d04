"""What each recompute switch keeps, frees and runs again."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdover.closed_form.architecture import HUGGING_FACE, MEGATRON, PAPER
from holdover.closed_form.errors import ConfigurationError
from holdover.closed_form.estimate import closed_form, store_all_that_fits
from holdover.closed_form.formula import symbols
from holdover.closed_form.layers import layer
from holdover.closed_form.layout import Layout
from holdover.closed_form.presets import PRESETS
from holdover.closed_form.recompute import MODULES, Recompute, assign, treatment

GPT, LLAMA, DEEPSEEK = PRESETS["gpt-22b"], PRESETS["llama3-8b"], PRESETS["deepseek-v3"]
FULL = Recompute(granularity="full")
h, a, d, f, k, f_e, f_s = symbols("h a d f k f_e f_s")
ONE = {"t": 1, "t_s": 1, "t_e": 1, "kv_copies": 1, "rho": 1}


def selective(*modules: str) -> Recompute:
    return Recompute(granularity="selective", modules=modules)


@pytest.mark.parametrize(
    ("modules", "saved"),
    [
        pytest.param(("core_attn",), 4 * a, id="core_attn frees the log-sum-exp alone"),
        pytest.param(("layernorm",), 4 * h, id="layernorm frees both outputs"),
        pytest.param(("mlp",), 6 * f, id="mlp keeps its input"),
        pytest.param(("mlp", "layernorm"), 6 * f + 4 * h, id="together"),
    ],
)
def test_modules_of_a_llama_layer(modules: tuple[str, ...], saved: Any) -> None:
    listed = layer(LLAMA, MEGATRON)
    kept = treatment(listed, "selective", selective(*modules)).kept_bytes(small=False)
    assert (listed.bytes(small=False) - kept).substitute(**ONE) == saved


def test_modules_of_a_deepseek_layer() -> None:
    listed, values = layer(DEEPSEEK, MEGATRON, "moe"), DEEPSEEK.values() | ONE
    saved = {
        name: (listed.bytes(small=False) - treatment(listed, "selective", selective(name)).kept_bytes(small=False)).at(
            values
        )
        for name in ("mla_up_proj", "moe_act", "shared_experts", "moe", "layernorm")
    }
    assert saved["mla_up_proj"] == 131_072
    assert saved["moe_act"] == 2 * 8 * 2048
    assert saved["shared_experts"] == 6 * 2048
    assert saved["moe"] == 9 * 256 + 8 * (2 * 7168 + 6 * 2048) + 6 * 2048
    assert saved["layernorm"] == 4 * 7168


def test_a_checkpoint_keeps_inputs_that_nobody_else_keeps() -> None:
    """The upcasting norm does not keep its 16-bit input; to run it again, it must."""
    treated = treatment(layer(LLAMA, HUGGING_FACE), "selective", selective("layernorm"))
    names = {value.name for value in treated.kept}
    assert {"layer input", "attention residual"} <= names
    saved = layer(LLAMA, HUGGING_FACE).bytes(small=False) - treated.kept_bytes(small=False)
    assert saved.substitute(**ONE) == 2 * (8 * h - 2 * h)


def test_kept_and_remade_partition_the_list() -> None:
    for setting in (selective("core_attn"), selective("layernorm", "mlp"), FULL):
        listed = layer(GPT, PAPER)
        treated = treatment(listed, "boundary" if setting is FULL else "selective", setting)
        kept, remade = {x.name for x in treated.kept}, {x.name for x in treated.remade}
        assert not kept & remade
        assert kept | remade == {x.name for x in listed.stored}


@pytest.mark.parametrize(
    ("setting", "counts", "largest_group"),
    [
        (Recompute(), [("dense", "all", 8)], 1),
        (FULL, [("dense", "boundary", 8)], 1),
        (dataclasses.replace(FULL, num_layers=3), [("dense", "boundary", 3), ("dense", "inside", 5)], 3),
        (dataclasses.replace(FULL, method="block", num_layers=3), [("dense", "boundary", 3), ("dense", "all", 5)], 1),
        (dataclasses.replace(FULL, method="block", num_layers=99), [("dense", "boundary", 8)], 1),
        (selective("mlp"), [("dense", "selective", 8)], 1),
    ],
)
def test_assignment(setting: Recompute, counts: list[tuple[str, str, int]], largest_group: int) -> None:
    found = assign(setting, ("dense",) * 8)
    assert list(found.counts) == counts
    assert max(len(group) for group in found.groups) == largest_group


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_full_recomputation_holds_inputs_and_the_group_that_is_replayed(group: int) -> None:
    setting = dataclasses.replace(FULL, num_layers=group)
    stage = closed_form(GPT, Layout(), kernels=PAPER, recompute=setting, small=False).stages[0]
    tokens, hidden = 2048, 6144
    whole = tokens * (34 * hidden + 5 * 64 * 2048)
    assert stage.activations_bytes == 48 // group * 2 * tokens * hidden
    assert stage.replay_bytes == group * whole - 2 * tokens * hidden


def test_block_recomputation_counts_layers_of_each_chunk() -> None:
    layout = Layout(pp=4, schedule="interleaved", virtual=2, micro_batches=8)
    setting = dataclasses.replace(FULL, method="block", num_layers=2)
    first = closed_form(GPT, layout, kernels=PAPER, recompute=setting, small=False).stages[0]
    tokens, hidden = 2048, 6144
    whole = tokens * (34 * hidden + 5 * 64 * 2048)
    assert first.activations_bytes == sum(first.in_flight) * (2 * 2 * tokens * hidden + 4 * whole)


def test_micro_batches_that_keep_everything() -> None:
    """Appendix C: of the p - rank in flight, k keep everything; later stages need less recomputation."""
    layout = Layout(pp=8, micro_batches=32)
    plain, checkpointed, mixed = (
        closed_form(GPT, layout, kernels=PAPER, recompute=setting, small=False).stages
        for setting in (Recompute(), FULL, dataclasses.replace(FULL, store_all_micro_batches=3))
    )
    for stage, (everything, inputs, some) in enumerate(zip(plain, checkpointed, mixed, strict=True)):
        flight = 8 - stage
        whole = min(3, flight)
        expected = everything.activations_bytes * whole + inputs.activations_bytes * (flight - whole)
        assert some.activations_bytes * flight == expected
        assert some.replay_seconds == pytest.approx(inputs.replay_seconds * (flight - whole) / flight)
        assert (some.replay_bytes == 0) == (flight <= 3)


def test_as_many_micro_batches_keep_everything_as_fit() -> None:
    layout, budget = Layout(pp=8, micro_batches=32), 90 * 2**30
    setting = store_all_that_fits(GPT, layout, FULL, budget, kernels=PAPER)
    count = setting.store_all_micro_batches
    assert 0 < count < 8
    assert closed_form(GPT, layout, kernels=PAPER, recompute=setting).peak_bytes <= budget
    more = dataclasses.replace(setting, store_all_micro_batches=count + 1)
    assert closed_form(GPT, layout, kernels=PAPER, recompute=more).peak_bytes > budget
    assert store_all_that_fits(GPT, layout, FULL, 2**30, kernels=PAPER).store_all_micro_batches == 0


def test_offloading_moves_a_share_to_the_host() -> None:
    kept, moved = (closed_form(LLAMA, recompute=Recompute(offload=share)).stages[0] for share in (0.0, 0.25))
    assert moved.host_bytes * 4 == kept.activations_bytes
    assert moved.activations_bytes + moved.host_bytes == kept.activations_bytes


@pytest.mark.parametrize(
    ("model", "layout", "setting", "message"),
    [
        ("llama3-8b", {}, selective("attention"), f"unknown recompute module attention.*{', '.join(MODULES)}"),
        ("llama3-8b", {}, selective("moe_act"), "has no experts: leave out moe"),
        ("mixtral-8x7b", {}, selective("shared_experts"), "has no shared experts"),
        ("llama3-8b", {}, selective("mla_up_proj"), "has no latent attention"),
        ("mixtral-8x7b", {}, selective("mlp"), "has no dense MLP: recompute moe instead"),
        ("llama3-8b", {}, dataclasses.replace(FULL, num_layers=0), "must be at least 1"),
        ("llama3-8b", {}, Recompute(distribute_saved=True), "needs --recompute full"),
        ("llama3-8b", {}, dataclasses.replace(FULL, distribute_saved=True), "raise --tp"),
        (
            "llama3-8b",
            {"tp": 2, "sequence_parallel": True},
            dataclasses.replace(FULL, distribute_saved=True),
            "sharded already",
        ),
        ("llama3-8b", {}, Recompute(store_all_micro_batches=2), "need --recompute full or selective"),
        ("llama3-8b", {}, Recompute(store_all_micro_batches=-1), "cannot be fewer than 0"),
        ("llama3-8b", {}, Recompute(offload=1.5), "not between 0 and 1"),
    ],
)
def test_refusals(model: str, layout: dict[str, Any], setting: Recompute, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        closed_form(PRESETS[model], Layout(**layout), recompute=setting)


def test_the_pointless_switch_is_named() -> None:
    assert "frees only the log-sum-exp" in closed_form(LLAMA, recompute=selective("core_attn")).notes[0]
    assert closed_form(GPT, kernels=PAPER, recompute=selective("core_attn")).notes == ()
