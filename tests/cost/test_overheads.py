"""Python's share: from stand-ins of known cost."""

from __future__ import annotations

import pytest

from holdover.cost import overheads as module
from holdover.cost.overheads import overheads


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(zip(module._TRAFFIC_BYTES, (1.0, 2.0, 4.0), strict=True))
    monkeypatch.setattr(module, "_stand_in_seconds", known.__getitem__)


def test_known_amounts_of_traffic_cost_what_was_timed() -> None:
    per_unit = overheads(0).watched
    for nbytes, seconds in zip(module._TRAFFIC_BYTES, (1.0, 2.0, 4.0), strict=True):
        assert overheads(nbytes).watched == pytest.approx(per_unit * seconds, rel=0.05)


def test_more_traffic_never_costs_less_and_ends_at_the_largest_that_was_timed() -> None:
    costs = [overheads(2.0**n).recorded for n in range(10, 34)]
    assert costs == sorted(costs)
    assert costs[-1] == pytest.approx(overheads(64 << 20).recorded)


def test_recording_costs_more_than_watching() -> None:
    found = overheads(1 << 20)
    assert found.recorded > found.watched
    assert min(found.watched, found.hooked, found.quiet_call, found.plain) > 0
