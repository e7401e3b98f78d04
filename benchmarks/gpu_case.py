"""One case of benchmarks/gpu.py, run on the card: predictions, measurements, and the fixtures."""

from __future__ import annotations

import functools
import gc
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from gpu_fixture import SCHEMA_VERSION, on_device, ran
from gpu_models import blocks_of
from torch.utils.checkpoint import checkpoint
from zoo import Example

import holdover
from holdover.cost.devices import CARDS, Card, add_cards

BUDGETS = ("85%", "65%", "min")
PLAN_SECONDS = 8.0
WARM_UP, TIMED = 3, 7
SEED = 20260713


def card_here(folder: Path) -> tuple[Card, Path | None]:
    """The table's card that this one is; else one of its own capability and memory, priced as the nearest, and the file
    that says so."""
    found = torch.cuda.get_device_properties(0)
    capability = found.major, found.minor
    alike = [c for c in CARDS.values() if c.capability == capability]
    near = min(alike or CARDS.values(), key=lambda c: abs(c.usable_bytes - found.total_memory))
    if alike and abs(near.usable_bytes - found.total_memory) < 0.05 * found.total_memory:
        return near, None
    name = re.sub(r"[^a-z0-9]+", "-", found.name.lower())
    own = {**near.to_dict(), "name": name, "capability": capability, "usable_bytes": found.total_memory}
    path = folder / "this-card.json"
    path.write_text(json.dumps(own))
    return add_cards(path)[0], path


def predict(make: Callable[[], Example], precision: str, card: str) -> dict[str, Any]:
    """What is predicted for the card by a process that sees none: the step's memory, and plans at three budgets."""
    with torch.device("meta"):
        model, args, kwargs, loss = make()
    step: dict[str, Any] = {"loss": loss, "optimizer": "adamw", "precision": precision, "device": card}
    found = holdover.estimate(model.train(), args, kwargs, **step).on_card
    assert found is not None
    plans: dict[str, Any] = {}
    for budget in BUDGETS:
        try:
            plan = holdover.plan(model, args, kwargs, budget=budget, time_limit=PLAN_SECONDS, **step)
            plans[budget] = plan.to_json()
        except holdover.BudgetError as error:
            plans[budget] = {"refused": str(error)}
    return {"allocated_bytes": found.allocated_bytes, "reserved_bytes": found.reserved_bytes, "plans": plans}


def measure(make: Callable[[], Example], precision: str, predicted: dict[str, Any]) -> dict[str, Any]:
    """What the card shows, beside what was predicted."""
    runner = Runner(make, precision)
    plain = runner.figures()
    plain["predicted_allocated_bytes"] = predicted["allocated_bytes"]
    plain["predicted_reserved_bytes"] = predicted["reserved_bytes"]
    gradients = runner.gradients()
    own_error = difference(gradients, runner.gradients())  # atomics differ from run to run without any plan
    rows, refused = [], []
    for budget, text in predicted["plans"].items():
        if isinstance(text, dict):
            refused.append({"budget": budget, **text})
            continue
        plan = holdover.Plan.from_json(text)
        holdover.apply_(runner.model, plan)
        row = runner.figures()
        row["gradient_error"] = difference(gradients, runner.gradients())
        row["mismatches"] = str(holdover.inspect(runner.model))
        holdover.remove_(runner.model)
        rows.append({
            **row, "budget": budget, "own_error": own_error, "choices": len(plan.choices),
            "promised_extra_time": plan.extra_time, "predicted_allocated_bytes": plan.allocated_bytes,
            "predicted_reserved_bytes": plan.reserved_bytes,
        })  # fmt: skip
    return {
        "plain": plain, "plans": rows, "refused": refused, "own_error": own_error, "stock": runner.checkpointed()
    }  # fmt: skip


class Runner:
    """The step on the card."""

    def __init__(self, make: Callable[[], Example], precision: str) -> None:
        torch.manual_seed(SEED)
        self.device = torch.device("cuda")
        self.model, self.args, self.kwargs, self.loss, _ = on_device(*make(), self.device)
        self.lower = precision == "bf16-mixed"
        self.initial = {name: value.cpu().clone() for name, value in self.model.state_dict().items()}

    def value(self) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16) if self.lower else nullcontext():
            output = self.model(*self.args, **self.kwargs)
            value: torch.Tensor = self.loss(output) if self.loss is not None else output.loss
        return value

    def step(self) -> None:
        self.value().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def figures(self) -> dict[str, Any]:
        """Allocated and reserved over two steps of an allocator without cached memory, and seconds of one step."""
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        self.step()
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {
            "measured_allocated_bytes": allocated,
            "measured_reserved_bytes": reserved,
            "seconds": event_seconds(self.step),
        }

    def gradients(self) -> list[torch.Tensor]:
        """Gradients of the same step with the same weights and random numbers, on the host."""
        self.model.load_state_dict(self.initial)
        torch.manual_seed(SEED)
        self.value().backward()
        found = [p.grad.detach().cpu() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return found

    def checkpointed(self) -> dict[str, Any]:
        """The figures with activation checkpointing around every block; none where the model has no blocks."""
        blocks = blocks_of(self.model)
        for block in blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return self.figures() if blocks else {}


def event_seconds(step: Callable[[], None]) -> float:
    """Seconds of a step by the card's own clock: the median of a few, after some to warm up."""
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(TIMED):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def difference(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """The largest difference of two lists of gradients, as a share of the largest gradient."""
    largest = max((t.abs().max().item() for t in a), default=0.0) or 1.0
    return max(((x - y).abs().max().item() for x, y in zip(a, b, strict=True)), default=0.0) / largest


def write_fixtures(
    examples: Mapping[str, Callable[[], Example]], precisions: Sequence[str], folder: Path, card: str
) -> dict[str, Any]:
    """What the card runs and saves for small models, a file each."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, make in examples.items():
        for precision in precisions:
            model, args, kwargs, loss = make()
            found = ran(model, args, kwargs, loss, precision, torch.device("cuda"))
            data = {
                "schema_version": SCHEMA_VERSION, "example": f"zoo:{name}", "precision": precision, "card": card,
                "source": f"measured on {torch.cuda.get_device_name()}, torch {torch.__version__}", **found,
            }  # fmt: skip
            path = folder / f"{card}-{name}-{precision}.json"
            path.write_text(json.dumps(data, indent=1) + "\n")
            written.append(path.name)
    return {"holds": True, "written": written}
