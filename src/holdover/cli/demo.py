"""`holdover demo`: train a small GPT on real text, plain and under a plan, and compare everything."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdover.cli.common import BROKEN_PROMISE, JsonOption, fails_politely, show, show_json, stage

if TYPE_CHECKING:
    import torch

    from holdover.cli.gpt import GPT

BUDGET = "60%"
SEED = 1
LEARNING_RATE = 1e-3


@dataclass
class Trainer:
    """One of the two runs, with the state of the random generator that dropout draws from."""

    model: GPT
    optimizer: torch.optim.Optimizer
    random_state: torch.Tensor
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())


@dataclass(frozen=True)
class DemoResult:
    """What the two runs came to; `holds` is the verdict."""

    parameters: int
    steps: int
    budget_bytes: int
    estimated_peak_bytes: int
    promised_peak_bytes: int
    plain_peak_bytes: int
    planned_peak_bytes: int
    promised_extra_time: float
    measured_extra_time: float
    plain_losses: list[float]
    planned_losses: list[float]
    losses_equal: bool
    weights_equal: bool
    rng_equal: bool

    @property
    def estimate_holds(self) -> bool:
        return abs(self.plain_peak_bytes / self.estimated_peak_bytes - 1) <= 0.01

    @property
    def promise_holds(self) -> bool:
        return self.planned_peak_bytes <= self.promised_peak_bytes * 1.01

    @property
    def holds(self) -> bool:
        equal = self.losses_equal and self.weights_equal and self.rng_equal
        return equal and self.estimate_holds and self.promise_holds


@fails_politely
def demo(
    steps: Annotated[int, typer.Option("--steps", min=3, help="Training steps of each run.")] = 36,
    as_json: JsonOption = False,
) -> None:
    """Train a small GPT on real text twice, plain and under a plan, and compare everything."""
    result = run(steps)
    if as_json:
        show_json({**vars(result), "holds": result.holds})
    else:
        from holdover.report.demo_view import demo_view

        show(demo_view(result))
    if not result.holds:
        raise typer.Exit(BROKEN_PROMISE)


def run(steps: int) -> DemoResult:
    """Estimate, plan, train both ways by turns, compare."""
    import torch

    import holdover
    from holdover.cli.gpt import GPT, Shape, batches
    from holdover.trace.isolate import random_state_restored

    shape = Shape()

    def trainer() -> Trainer:
        torch.manual_seed(SEED)
        model = GPT(shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        return Trainer(model, optimizer, torch.get_rng_state())

    with random_state_restored(), _one_thread():
        plain, planned = trainer(), trainer()
        example = next(batches(shape, 1, SEED))
        with stage("estimating the memory of a training step"):
            estimate = holdover.estimate(plain.model, example, optimizer="adamw")
        with stage(f"planning for {BUDGET} of it"):
            plan = holdover.plan(planned.model, example, budget=BUDGET, optimizer="adamw")
        holdover.apply_(planned.model, plan)
        with stage(f"training both, {steps} steps each, by turns"):
            for number, batch in enumerate(batches(shape, steps, SEED)):
                for one in (plain, planned) if number % 2 else (planned, plain):
                    _take_turn(one, batch, measure=number == steps - 1)
    paired = [b / a for a, b in zip(plain.seconds[1:], planned.seconds[1:], strict=True)]
    return DemoResult(
        parameters=sum(p.numel() for p in plain.model.parameters()),
        steps=steps,
        budget_bytes=plan.budget_bytes or plan.floor_bytes,
        estimated_peak_bytes=estimate.peak_bytes,
        promised_peak_bytes=plan.predicted_peak_bytes,
        plain_peak_bytes=plain.peak_bytes,
        planned_peak_bytes=planned.peak_bytes,
        promised_extra_time=plan.extra_time,
        measured_extra_time=statistics.median(paired) - 1,
        plain_losses=plain.losses,
        planned_losses=planned.losses,
        losses_equal=plain.losses == planned.losses,
        weights_equal=_equal(plain.model, planned.model),
        rng_equal=torch.equal(plain.random_state, planned.random_state),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """On a machine that is busy otherwise, threads that wait for each other take ten times the time of one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _take_turn(trainer: Trainer, batch: tuple[Any, Any], *, measure: bool) -> None:
    """One step under the trainer's own generator state; the last one under the profiler, and not timed."""
    import torch

    from holdover.memory.measure import measure_peak

    torch.set_rng_state(trainer.random_state)
    if measure:
        _, trainer.peak_bytes = measure_peak(lambda: trainer.step(batch), (trainer.model, trainer.optimizer, batch))
    else:
        began = time.process_time()  # on one thread: waiting for other programs does not count
        trainer.step(batch)
        trainer.seconds.append(time.process_time() - began)
    trainer.random_state = torch.get_rng_state()


def _equal(a: GPT, b: GPT) -> bool:
    import torch

    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(n == m and torch.equal(x, y) for (n, x), (m, y) in pairs)
