"""A recorded step with what it was recorded for: what plans, explanations and advice are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from holdover.cost.devices import Card
from holdover.memory.on_card import place_of
from holdover.planning.api import plan_of
from holdover.planning.outline import Outline, outline_of
from holdover.planning.plan import Plan
from holdover.trace.graph import Trace
from holdover.trace.record import Loss
from holdover.trace.step import OptimizerSpec


@dataclass(frozen=True)
class Recorded:
    """A trace, the card it was recorded for (None: a device of this machine), its precision, the model's outline."""

    trace: Trace
    card: Card | None = None
    precision: str | None = None
    outline: Outline = field(default_factory=dict)

    def plan(self, budget: int | float | str, *, time_limit: float = 60.0) -> Plan:
        """The plan for a budget, which is as `units.parse_budget` returns it.

        Raises:
            BudgetError: it is below the lowest peak that can be reached.
        """
        made = plan_of(self.trace, budget, precision=self.precision, card=self.card, time_limit=time_limit)
        return replace(made, outline=self.outline)


def recorded(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerSpec = None,
    precision: str | None = None,
    device: str | None = None,
) -> Recorded:
    """Record a training step, the arguments being as for `holdover.plan`.

    Raises:
        TraceError: the step fails, or gives no loss.
        DeviceError: an unknown device.
    """
    place = place_of(device)
    trace = place.record(model, args, kwargs, loss=loss, optimizer=optimizer, precision=precision)
    return Recorded(trace, place.card, precision, outline_of(model))
