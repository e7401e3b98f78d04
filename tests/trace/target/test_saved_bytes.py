"""What autograd saves on the card, against bytes counted by hand; and that each rule is what makes the difference."""

from __future__ import annotations

import pytest
from tests.trace.target.cases import CASES, Case

from holdover.trace.graph import Category, Phase, Trace
from holdover.trace.record import record
from holdover.trace.target import composites


def recorded(case: Case) -> Trace:
    model, args = case.make()
    return record(model, args, precision=case.precision, target=case.target)


def saved_bytes(trace: Trace) -> int:
    storages = {trace.values[slot.value].storage for slot in trace.slots}
    return sum(trace.storages[n].nbytes for n in storages if trace.storages[n].category is Category.ACTIVATION)


def forward_ops(trace: Trace) -> list[str]:
    return [op.name.split(".")[1] for op in trace.ops if op.phase is Phase.FORWARD]


@pytest.mark.parametrize("name", CASES)
def test_saved_bytes_are_those_counted_by_hand(name: str) -> None:
    case = CASES[name]
    trace = recorded(case)
    assert case.op in forward_ops(trace)
    assert saved_bytes(trace) == case.saved
    assert {storage.device for storage in trace.storages} == {"cuda"}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rule])
def test_without_its_rule_another_step_is_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    with_rule = [op.name for op in recorded(case).ops]
    if case.rule in composites.COMPOSITES:
        monkeypatch.delitem(composites.COMPOSITES, case.rule)
    else:
        kernels = tuple(kernel for kernel in composites.KERNELS if kernel != case.rule)
        monkeypatch.setattr(composites, "KERNELS", kernels)
    assert [op.name for op in recorded(case).ops] != with_rule


def test_every_rule_has_a_case() -> None:
    shown = {case.rule for case in CASES.values()}
    elsewhere = {"to.device", "to.dtype_layout"}  # test_recording.py
    assert set(composites.COMPOSITES) | set(composites.KERNELS) == (shown | elsewhere) - {""}
