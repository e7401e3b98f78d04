"""Writes that neither schemas nor version counters tell of: batch norms' running statistics, and `.data`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.recompute.helpers import script
from torch import nn

from holdover.errors import ReplayError
from holdover.planning.describe import quiet_calls
from holdover.planning.plan import RECOMPUTE, Choice
from holdover.recompute.apply import install, uninstall
from holdover.recompute.script import Entry
from holdover.trace.record import record


class Centred(nn.Module):
    """Reads a batch norm's running mean before that batch norm runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.scale = nn.BatchNorm1d(width), nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.scale - self.norm.running_mean).sin()
        return (y.exp() * y).sum() + self.norm(x).sum()


def follow(model: nn.Module, x: torch.Tensor, *, calls: tuple[str, ...]) -> list[str]:
    """Install a script that drops all it can in these calls; the calls that are quiet under it."""
    trace = record(copy.deepcopy(model), (x,), loss=lambda out: out.sum())
    choices = [
        Choice(trace.calls[op.call].key, op.index, op.name, RECOMPUTE)
        for op in trace.ops
        if op.index >= 0 and not op.keep and trace.calls[op.call].key in calls and op.outputs
    ]
    script: dict[str, dict[int, Entry]] = {}
    for c in choices:
        script.setdefault(c.call, {})[c.index] = Entry(c.op, c.action)
    quiet = quiet_calls(trace, choices)
    install(model, script, quiet)
    return quiet


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model(x).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def same(a: nn.Module, b: nn.Module, x: torch.Tensor) -> bool:
    equal = all(torch.equal(p, q) for p, q in zip(gradients(a, x), gradients(b, x), strict=True))
    return equal and all(torch.equal(p, q) for p, q in zip(a.buffers(), b.buffers(), strict=True))


@pytest.mark.parametrize("width", [8, 2048])  # below and above what is copied for its smallness
@pytest.mark.parametrize("trained", [True, False])  # while it was recorded
def test_running_statistics_that_a_planned_op_reads(width: int, trained: bool) -> None:
    model = Centred(width).train(trained)
    plain, x = copy.deepcopy(model), torch.randn(16, width) + 1
    assert follow(model, x, calls=("model",)) == []  # the batch norm has to be watched
    assert same(plain.train(), model.train(), x)


class Synchronised(nn.Module):
    """The ops of which synchronised batch norm is made, with running statistics above what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(2048))
        self.register_buffer("mean", torch.zeros(2048))
        self.register_buffer("var", torch.ones(2048))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        with torch.no_grad():
            mean, _ = torch.batch_norm_update_stats(y, self.mean, self.var, 0.1)
        return ((y - mean).sin() * mean).exp()


def test_statistics_are_updated_once_though_their_op_runs_again() -> None:
    model = Synchronised()
    plain, x = copy.deepcopy(model), torch.randn(16, 2048)
    follow(model, x, calls=("model",))
    assert same(plain, model, x)


@pytest.mark.parametrize("gradients_on", [True, False])
def test_a_batch_norm_in_evaluation_mode_that_trains_before_backward(gradients_on: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2048), nn.Tanh(), nn.BatchNorm1d(2048), nn.Sigmoid()).eval()
    plain, x = copy.deepcopy(model), torch.randn(16, 2048)
    follow(model, x, calls=("model/0", "model/1", "model/2", "model/3"))
    found = []
    for each in (plain, model):
        loss = each(x).sum()
        with torch.set_grad_enabled(gradients_on):
            each.train()(x + 3)
        loss.backward()
        found.append([p.grad for p in each.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(2048))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x + self.shift).sin().exp() + self.shift).cos()


def test_other_memory_for_what_a_replay_reads_is_refused() -> None:
    model, x = Waves(), torch.randn(4, 2048)
    follow(model, x, calls=("model",))
    loss = model(x).sum()
    kept = model.shift.data
    model.shift.data = model.shift.data * 0.5
    with pytest.raises(ReplayError, match=r"was given other memory \(by assigning to its \.data\)"):
        loss.backward()
    model.shift.data = kept
    uninstall(model)


def test_memory_that_came_back_in_time_is_the_same() -> None:
    model, x = Waves(), torch.randn(4, 2048)
    plain = copy.deepcopy(model)
    follow(model, x, calls=("model",))
    loss = model(x).sum()
    kept = model.shift.data
    model.shift.data = torch.zeros(2048)
    model.shift.data = kept
    loss.backward()
    (expected,) = gradients(plain, x)
    assert model.shift.grad is not None
    assert torch.equal(model.shift.grad, expected)


class FillsByNumPy(torch.autograd.Function):
    """Writes past the dispatcher, and says so."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor) -> torch.Tensor:
        table.detach().numpy()[:] += 1
        ctx.mark_dirty(table)
        return table

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@torch.library.custom_op("holdover_tests::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


def doubled(table: torch.Tensor) -> None:
    double_(table)


class Shifted(nn.Module):
    """Changes a large buffer after it was read."""

    def __init__(self, *changes: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, 2048))
        self.register_buffer("table", torch.linspace(0, 1, 2048))
        self.changes = changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = ((x * self.scale) + self.table).sin()
        with torch.no_grad():
            for change in self.changes:
                change(self.table)
        return y


def test_what_a_custom_op_is_about_to_write_to_is_copied_though_its_write_is_counted() -> None:
    model, x = Shifted(doubled, doubled), torch.randn(4, 2048)
    plain = copy.deepcopy(model)
    install(model, script(model, (x,)))
    model(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(model.scale.grad, plain.scale.grad)


def test_what_changed_unseen_is_not_copied_as_if_it_had_not() -> None:
    model, x = Shifted(FillsByNumPy.apply, lambda table: table.mul_(2)), torch.randn(4, 2048)
    install(model, script(model, (x,)))
    loss = model(x).sum()
    with pytest.raises(ReplayError, match="was modified in place"):
        loss.backward()


def test_an_output_whose_memory_is_given_away_before_backward_is_made_again() -> None:
    """Pipelines do so with what they have sent on (Megatron-LM's `deallocate_pipeline_outputs`)."""

    class Squashed(Waves):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()  # saves its own result, which lives on as the output

    model, x = Squashed(), torch.randn(4, 2048)
    (expected,) = gradients(copy.deepcopy(model), x)
    follow(model, x, calls=("model",))
    for other in (torch.zeros(1), torch.zeros(4, 2048)):
        model.zero_grad()
        out = model(x)
        loss = out.sum()
        out.data = other
        loss.backward()
        assert model.shift.grad is not None
        assert torch.equal(model.shift.grad, expected)


def test_a_small_buffer_that_the_callers_frame_reads() -> None:
    """Old spectral norm works in a pre-hook, before its module's own frame, and in a forward without gradients too."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(64, 32)), nn.Tanh())

    def trained(model: nn.Module) -> list[torch.Tensor]:
        loss = model(x).sum()
        with torch.no_grad():
            model(x)  # turns the vectors of the power method further
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    x = torch.rand(16, 64)
    plain, planned = build(), build()
    trace = record(copy.deepcopy(planned), (x,), loss=lambda out: out.sum())
    clones = {op.index: Entry(op.name, RECOMPUTE) for op in trace.ops if op.name == "aten.clone.default"}
    assert len(clones) == 2
    install(planned, {"model": clones})
    assert all(torch.equal(a, b) for a, b in zip(trained(plain), trained(planned), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), planned.buffers(), strict=True))
