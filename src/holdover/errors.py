"""What holdover raises.

    HoldoverError                  everything below; nothing else is raised on purpose
     +-- BudgetError               no plan meets the budget; a ValueError too
     +-- TraceError                the step could not be recorded
     +-- PlanError                 a plan that cannot be read, or does not belong to this model or version
     +-- ApplyError                a plan that cannot be applied to, or removed from, this model
     +-- ReplayError               a dropped tensor could not be made again in backward; a RuntimeError too
     +-- UnitError                 a size or budget that cannot be read; a ValueError too
     +-- DeviceError               an unknown or absent device; a ValueError too
     +-- ModelSpecError            the command line's MODEL cannot be made into a training step; a ValueError too

Each message says what was asked, what was found and the ways out.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "ApplyError",
    "BudgetError",
    "DeviceError",
    "HoldoverError",
    "ModelSpecError",
    "PlanError",
    "ReplayError",
    "TraceError",
    "UnitError",
]


class HoldoverError(Exception):
    """The base of all of holdover's errors."""


class BudgetError(HoldoverError, ValueError):
    """No plan meets the budget.

    Attributes:
        floor_bytes: the lowest peak that a plan can reach.
        budget_bytes: the budget that was asked for.
        parts: what makes the floor, in bytes by name.
    """

    def __init__(
        self, message: str, *, floor_bytes: int = 0, budget_bytes: int = 0, parts: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(message)
        self.floor_bytes = floor_bytes
        self.budget_bytes = budget_bytes
        self.parts = dict(parts or {})


class TraceError(HoldoverError):
    """The training step could not be recorded."""


class PlanError(HoldoverError):
    """The plan cannot be read, or belongs to another model, version or step."""


class ApplyError(HoldoverError):
    """The plan cannot be applied to, or removed from, this model."""


class ReplayError(HoldoverError, RuntimeError):
    """A tensor that was dropped after forward could not be made again in backward."""


class UnitError(HoldoverError, ValueError):
    """A size or a budget cannot be read."""


class DeviceError(HoldoverError, ValueError):
    """The device is unknown, or not there."""


class ModelSpecError(HoldoverError, ValueError):
    """The MODEL of the command line cannot be made into a training step."""


for _error in list(globals().values()):
    if isinstance(_error, type) and issubclass(_error, HoldoverError):
        _error.__module__ = "holdover"  # so that a traceback shows the name people import
del _error
