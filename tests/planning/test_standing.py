"""Standing costs, counted by hand, and what plans make of them."""

from __future__ import annotations

import torch
from torch import nn

from holdover.cost.overheads import Overheads
from holdover.planning.describe import quiet_calls
from holdover.planning.plan import Choice
from holdover.planning.standing import Standing
from holdover.trace.graph import Trace
from holdover.trace.record import record

HOOK, WATCHED, QUIET = 1000.0, 10.0, 1.0
OVERHEADS = Overheads(watched=WATCHED, recorded=0.0, hooked=HOOK, quiet_call=QUIET, plain=0.0)


def traced() -> Trace:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.Dropout(0.5))
    return record(model, (torch.ones(2, 4),))


def number(trace: Trace, name: str) -> int:
    return next(i for i, op in enumerate(trace.ops) if op.name == name)


def test_hooks_are_everywhere_and_calls_left_alone_are_quiet() -> None:
    trace = traced()
    standing = Standing(trace, OVERHEADS, with_loss=False)
    # Saved: the input of the linear layer, the GELU's and the dropout's mask. Quiet: the linear layer and the dropout.
    assert standing.seconds([number(trace, "aten.gelu.default")]) == 3 * HOOK + WATCHED + 2 * QUIET


def test_ops_beside_a_planned_one_are_watched_views_included() -> None:
    trace = traced()
    standing = Standing(trace, OVERHEADS, with_loss=False)
    # In the linear layer the transposition and the product are watched; quiet are the GELU and the dropout.
    assert standing.seconds([number(trace, "aten.addmm.default")]) == 3 * HOOK + 2 * WATCHED + 2 * QUIET
    # Both in one plan: only the dropout is quiet.
    both = [number(trace, "aten.addmm.default"), number(trace, "aten.gelu.default")]
    assert standing.seconds(both) == 3 * HOOK + 3 * WATCHED + QUIET


def test_nothing_planned_costs_nothing_and_anything_at_least_the_least() -> None:
    trace = traced()
    standing = Standing(trace, OVERHEADS, with_loss=False)
    assert standing.seconds([]) == 0.0
    assert standing.least == 3 * HOOK
    assert all(standing.seconds([o]) >= standing.least for o in (1, 2, 6))


def test_with_the_loss_its_ops_are_watched_too() -> None:
    trace = traced()
    standing = Standing(trace, OVERHEADS, with_loss=True)
    assert standing.least == 3 * HOOK + WATCHED  # the sum that makes the loss


class WritesOutside(nn.Module):
    """A module that writes to what it was given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2.0)


def test_a_call_that_writes_to_outside_things_is_never_quiet() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(WritesOutside()), nn.GELU())
    trace = record(model, (torch.ones(2, 4),))
    quiet = quiet_calls(trace, [Choice("model/2", 0, "aten.gelu.default", "recompute")])
    assert quiet == ["model/0"]


def test_a_call_that_writes_to_what_no_planned_op_reads_is_quiet() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.GELU())
    trace = record(model, (torch.ones(2, 2, 3, 3),))
    gelu = Choice("model/2", 0, "aten.gelu.default", "recompute")
    assert quiet_calls(trace, [gelu]) == ["model/0", "model/1"]  # the running statistics are the batch norm's own
    norm = next(op for op in trace.ops if op.name == "aten.native_batch_norm.default")
    assert quiet_calls(trace, [Choice("model/1", norm.index, norm.name, "recompute")]) == ["model/0", "model/2"]


class Counted(nn.Module):
    """Scales by a counter that another module of the same model moves on."""

    def __init__(self, count: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("count", count)
        self.act = nn.Sigmoid()
        self.move = MovesOn(count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.move(self.act(self.act(x) * self.count))


class MovesOn(nn.Module):
    """Writes to its buffer, and passes its argument on."""

    def __init__(self, count: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("count", count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1.0)
        return x * 2.0


def test_a_call_that_writes_to_what_a_planned_op_reads_is_loud() -> None:
    trace = record(Counted(torch.ones(5000)), (torch.ones(5000, requires_grad=True),))
    product = next(op for op in trace.ops if op.name == "aten.mul.Tensor")
    assert quiet_calls(trace, [Choice("model", product.index, product.name, "recompute")]) == [
        "model/act", "model/act:1",
    ]  # fmt: skip
    act = next(c for c in trace.calls if c.key == "model/act:1")
    assert "model/move" in quiet_calls(trace, [Choice(act.key, 0, "aten.sigmoid.default", "recompute")])


def test_charges_add_up_to_what_plans_pay() -> None:
    trace = traced()
    standing = Standing(trace, OVERHEADS, with_loss=False)
    eligible = [number(trace, name) for name in ("aten.addmm.default", "aten.gelu.default")]
    charges = standing.charges(eligible)
    root = standing.least + QUIET  # the model itself is a call that is not quiet
    for chosen in ([eligible[0]], [eligible[1]], eligible):
        paid = sum(seconds for seconds, ops in charges if ops & set(chosen))
        assert root + paid == standing.seconds(chosen)
