"""What timing must and must not do; the times themselves depend on the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from holdover.cost import measured
from holdover.cost.measured import OpCost, launch_seconds, price
from holdover.cost.overheads import overheads
from holdover.measuring.store import open_store
from holdover.trace.graph import Signature, TensorSpec


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def square(size: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec((size, size), (size, 1), dtype, "cpu")


def product(size: int) -> Signature:
    return Signature("aten.mm.default", (square(size), square(size)), ())


DROPOUT = Signature("aten.bernoulli_.float", (square(16), 0.5), ())
VIEW = Signature("aten.transpose.int", (square(16), 0, 1), ())


def test_larger_work_costs_more() -> None:
    small, large = price([product(16), product(512)])
    assert small.source == large.source == "measured"
    assert 0 < small.seconds < large.seconds


def test_random_state_grad_mode_and_threads_are_left_alone() -> None:
    before = torch.get_rng_state()
    price([DROPOUT, product(16)])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 1
    with torch.no_grad():
        price([product(17)])
        assert not torch.is_grad_enabled()


def test_a_view_costs_a_launch() -> None:
    assert price([VIEW])[0].seconds == launch_seconds("cpu")


def test_an_op_too_large_for_memory_is_modelled() -> None:
    small, huge = price([product(256), product(1 << 22)])
    assert (small.source, huge.source) == ("measured", "modelled")
    assert huge.seconds > 1e6 * small.seconds


@pytest.mark.parametrize(
    "signature",
    [
        Signature("aten.mm.default", (square(8), None), (), runnable=False),
        Signature("nowhere.nothing.default", (square(8),), ()),
        Signature("aten.cholesky.default", (square(8),), ()),  # random values are not positive definite
    ],
)
def test_what_does_not_run_is_modelled(signature: Signature) -> None:
    (cost,) = price([signature])
    assert cost.source == "modelled"
    assert cost.seconds >= launch_seconds("cpu")


def test_costs_are_kept_on_disk(empty_cache: Path) -> None:
    first = price([product(32), DROPOUT])
    assert list(empty_cache.rglob("*.jsonl"))
    assert price([DROPOUT, product(32)]) == first[::-1]


def test_no_time_left_means_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_TOTAL_SECONDS", -1.0)
    assert [c.source for c in price([product(16), product(32)])] == ["modelled", "modelled"]


def test_prices_do_not_depend_on_the_modes_around() -> None:
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        costs = price([product(24), DROPOUT])
    assert [c.source for c in costs] == ["measured", "measured"]


def test_replaying_costs_some_microseconds() -> None:
    assert 1e-6 < overheads().recorded < 1e-3


def test_a_timing_of_poor_quality_is_not_trusted_and_taken_again() -> None:
    store = open_store(torch.device("cpu"))
    store.put("warm", product(40), [1.0, 0.9, 1])  # seconds, spread, tries
    (cost,) = price([product(40)])
    assert cost.seconds < 0.1
    assert store.get("warm", product(40))[2] >= 2


def test_an_op_whose_time_varies_by_itself_is_taken_as_it_is_in_the_end() -> None:
    store = open_store(torch.device("cpu"))
    store.put("warm", product(41), [1.0, 0.9, measured._TRIES])
    (cost,) = price([product(41)], replayed=())
    assert (cost.seconds, cost.spread) == (1.0, 0.9)


def test_only_what_may_be_replayed_is_timed_with_cold_caches() -> None:
    once, again = elementwise(1 << 18), elementwise(1 << 18, "aten.cos.default")
    costs = price([once, again], replayed={1})
    assert open_store(torch.device("cpu")).get("cold", once) is None
    assert costs[1].cold_seconds is not None
    assert costs[1].replay_seconds >= costs[1].seconds


def test_cold_caches_make_no_difference_to_what_moves_nothing() -> None:
    costs = price([product(8), VIEW])
    assert [c.replay_seconds for c in costs] == [c.seconds for c in costs]


def test_a_replay_never_takes_less_than_the_op() -> None:
    assert OpCost(2.0, "measured", cold_seconds=1.0).replay_seconds == 2.0


def elementwise(size: int, name: str = "aten.neg.default") -> Signature:
    return Signature(name, (TensorSpec((size,), (1,), "float32", "cpu"),), ())
