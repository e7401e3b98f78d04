"""Each branch of the advice, on a step small enough to be planned in a moment."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import holdover
from holdover import Advice, advise
from holdover.memory.estimate import estimate

ROWS = 400


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 8)) for _ in range(3)]
    return nn.Sequential(*layers)


def ask(memory: int | str, rows: int = ROWS, **more: object) -> Advice:
    found = advise(model(), (torch.ones(rows, 8),), memory=memory, time_limit=2, **more)  # type: ignore[arg-type]
    assert json.loads(found.to_json())["verdict"] == found.verdict
    assert found.verdict.split()[0] in str(found)
    return found


@pytest.fixture(scope="module")
def peak() -> int:
    return estimate(model(), (torch.ones(ROWS, 8),)).peak_bytes


@pytest.fixture(scope="module")
def enough(peak: int) -> Advice:
    return ask(2 * peak)


@pytest.fixture(scope="module")
def too_little(peak: int) -> Advice:
    return ask(3 * peak // 4, optimizer="adamw")


def test_what_fits_is_stored(peak: int, enough: Advice) -> None:
    found = enough
    assert found.fits
    assert (found.constraint, found.floor, found.levers) == ("time", None, ())
    (option,) = found.options
    assert (option.kind, option.peak_bytes, option.extra_time, option.plan) == ("store everything", peak, 0.0, None)
    largest = found.growth.largest
    assert largest is not None
    assert estimate(model(), (torch.ones(largest, 8),)).peak_bytes <= 2 * peak
    assert estimate(model(), (torch.ones(largest + 1, 8),)).peak_bytes > 2 * peak
    assert found.growth.linear
    assert f"enough for batch {largest:,}" in found.verdict
    assert found.best_rate in found.rates
    assert {rate.batch for rate in found.rates} >= {ROWS, largest, largest // 2}
    assert all(rate.peak_bytes <= 2 * peak for rate in found.rates)
    assert "of float32[400, 8]" in str(found)


def test_sizes_far_below_the_memory_are_told_in_a_unit_that_shows_them(peak: int, enough: Advice) -> None:
    printed = str(replace(enough, memory_bytes=8 * 2**30))
    assert " 8.00 GiB" in printed
    assert f" {peak / 2**20:.2f} MiB " in printed
    assert " 0.00 GiB" not in printed
    assert " 0.01 GiB" not in printed


def test_every_batch_that_was_recorded_is_listed(enough: Advice, too_little: Advice) -> None:
    for found in (enough, too_little):
        listed = [batch for batch, _ in found.growth.peaks]
        assert listed == sorted(listed)
        assert {rate.batch for rate in found.rates} <= set(listed)
        assert {option.micro_batch for option in found.options} <= set(listed)
        printed = " ".join(str(found).split())
        assert f"recorded at batch {', '.join(f'{batch:,}' for batch in listed)}: peaks on one line" in printed


def test_where_the_search_ends_before_the_memory_it_says_so(peak: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdover.planning.batch.MOST", ROWS + 100)
    found = ask(2 * peak)
    assert (found.growth.largest, found.growth.largest_accumulating) == (ROWS + 99, ROWS + 99)
    assert found.growth.limit == "larger ones were not tried"
    assert found.verdict.endswith("enough for batch 499 (larger ones were not tried).")
    said = "largest batch without recomputation: 499, which is not the most that memory allows (larger ones were not"
    assert said in " ".join(str(found).split())
    assert max(rate.batch for rate in found.rates) == ROWS + 99


def test_where_a_larger_batch_cannot_be_recorded_it_says_so_and_slow_batches_are_not_timed(
    peak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdover.planning.advise.MOST_SECONDS", 1e-9)

    class Few(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.shift = model(), nn.Parameter(torch.zeros(ROWS + 1, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x + self.shift[: len(x)])

    found = advise(Few(), (torch.ones(ROWS, 8),), memory=2 * peak, time_limit=2)
    assert found.growth.largest == ROWS + 1
    assert found.growth.limit.startswith("a larger one cannot be recorded: ")
    assert "must match the size of tensor" in found.growth.limit

    assert [rate.batch for rate in found.rates] == [ROWS]
    assert found.notes[-1].startswith(f"Batches from {(ROWS + 1) // 4} on would take more than 0 s")


def test_what_does_not_fit_is_recomputed_or_accumulated_and_both_prices_are_told(too_little: Advice) -> None:
    found, memory = too_little, too_little.memory_bytes
    assert found.constraint == "memory"
    kinds = {option.kind: option for option in found.options}
    assert set(kinds) == {"recompute", "accumulate"}
    assert all(option.peak_bytes <= memory for option in found.options)
    recompute, accumulate = kinds["recompute"], kinds["accumulate"]
    assert recompute.plan is not None
    assert recompute.plan.predicted_peak_bytes == recompute.peak_bytes
    assert recompute.extra_time > 0
    assert accumulate.micro_batch * accumulate.micro_steps >= ROWS > accumulate.micro_batch
    assert list(found.options) == sorted(found.options, key=lambda o: o.seconds)
    for option in found.options:
        assert f"{100 * option.extra_time:+.1f} % time" in found.verdict
    assert found.floor is not None
    assert found.floor.helps
    assert found.floor.peak_bytes <= recompute.peak_bytes
    assert sum(n for _, n in found.floor.parts) == found.floor.peak_bytes
    assert "of it" in str(found) or found.floor.loss_bytes == 0


def test_where_nothing_fits_it_says_so() -> None:
    found = ask(1000)
    assert not found.fits
    assert found.options == found.rates == ()
    assert found.verdict.startswith("Nothing fits: the step takes")
    assert found.growth.largest == 0
    assert found.best_rate is None


def test_where_no_plan_helps_it_says_why() -> None:
    wide = nn.Sequential(nn.Linear(8, 4000), nn.ReLU(), nn.Linear(4000, 8))
    peak = estimate(wide, (torch.ones(2, 8),), optimizer="adamw").peak_bytes
    found = advise(wide, (torch.ones(2, 8),), memory=peak - 1, optimizer="adamw", time_limit=2)
    assert found.floor is not None
    assert not found.floor.helps
    assert (
        found.floor.reason == "it stands in the optimizer's step, where nothing that recomputation could drop is held"
    )
    assert "no plan helps" in str(found)
    assert found.levers[0].peak_after_bytes < found.levers[0].peak_before_bytes


def test_without_a_batch_there_is_still_a_plan(peak: int) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()
            self.register_buffer("x", torch.ones(ROWS, 8))

        def forward(self) -> torch.Tensor:
            return self.inner(self.x)

    found = advise(Own(), memory=4 * peak // 5, time_limit=2)
    assert [option.kind for option in found.options] == ["recompute"]
    assert found.growth.reason == "no argument of the model is a tensor"
    assert found.growth.largest is None
    assert "batch: no argument of the model is a tensor" in str(found)


def test_bad_memory_is_refused() -> None:
    with pytest.raises(holdover.UnitError, match="cannot read 'much'"):
        ask("much")
    with pytest.raises(holdover.UnitError, match="memory of 0 bytes makes no sense"):
        ask(0)
