"""Fit the training step of any PyTorch model into a byte budget.

The catalogue of public names. Each is imported when it is first asked for, so that `import holdover` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdover.errors import ApplyError as ApplyError
    from holdover.errors import BudgetError as BudgetError
    from holdover.errors import DeviceError as DeviceError
    from holdover.errors import HoldoverError as HoldoverError
    from holdover.errors import ModelSpecError as ModelSpecError
    from holdover.errors import PlanError as PlanError
    from holdover.errors import ReplayError as ReplayError
    from holdover.errors import TraceError as TraceError
    from holdover.errors import UnitError as UnitError
    from holdover.memory.estimate import Estimate as Estimate
    from holdover.memory.estimate import estimate as estimate
    from holdover.planning.advice import Advice as Advice
    from holdover.planning.advise import advise as advise
    from holdover.planning.api import plan as plan
    from holdover.planning.frontier import Frontier as Frontier
    from holdover.planning.frontier import frontier as frontier
    from holdover.planning.plan import Plan as Plan
    from holdover.recompute.inspect import Inspection as Inspection
    from holdover.recompute.inspect import inspect as inspect
    from holdover.recompute.public import apply_ as apply_
    from holdover.recompute.public import remove_ as remove_
    from holdover.verification import Verification as Verification
    from holdover.verification import verify as verify

_HOMES = {
    "Advice": "holdover.planning.advice",
    "ApplyError": "holdover.errors",
    "BudgetError": "holdover.errors",
    "DeviceError": "holdover.errors",
    "Estimate": "holdover.memory.estimate",
    "Frontier": "holdover.planning.frontier",
    "HoldoverError": "holdover.errors",
    "Inspection": "holdover.recompute.inspect",
    "ModelSpecError": "holdover.errors",
    "Plan": "holdover.planning.plan",
    "PlanError": "holdover.errors",
    "ReplayError": "holdover.errors",
    "TraceError": "holdover.errors",
    "UnitError": "holdover.errors",
    "Verification": "holdover.verification",
    "advise": "holdover.planning.advise",
    "apply_": "holdover.recompute.public",
    "estimate": "holdover.memory.estimate",
    "frontier": "holdover.planning.frontier",
    "inspect": "holdover.recompute.inspect",
    "plan": "holdover.planning.api",
    "remove_": "holdover.recompute.public",
    "verify": "holdover.verification",
}

__version__ = "0.1.0.dev0"

__all__ = [
    "Advice",
    "ApplyError",
    "BudgetError",
    "DeviceError",
    "Estimate",
    "Frontier",
    "HoldoverError",
    "Inspection",
    "ModelSpecError",
    "Plan",
    "PlanError",
    "ReplayError",
    "TraceError",
    "UnitError",
    "Verification",
    "advise",
    "apply_",
    "estimate",
    "frontier",
    "inspect",
    "plan",
    "remove_",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdover' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
