"""The exception tree is what its docstring draws."""

from __future__ import annotations

import re

import pytest

import holdover
from holdover import errors


def test_the_tree_in_the_docstring_is_complete() -> None:
    drawn = set(re.findall(r"\b\w+Error\b", errors.__doc__ or "")) - {"ValueError", "RuntimeError"}
    assert drawn == set(errors.__all__)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_a_holdover_error_under_its_public_name(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, holdover.HoldoverError)
    assert error is getattr(holdover, name)
    assert error.__module__ == "holdover"
    assert error.__doc__


def test_users_can_catch_the_builtin_errors() -> None:
    assert issubclass(holdover.ReplayError, RuntimeError)
    for error in (holdover.BudgetError, holdover.UnitError, holdover.DeviceError, holdover.ModelSpecError):
        assert issubclass(error, ValueError)


def test_a_budget_error_carries_its_numbers() -> None:
    error = holdover.BudgetError("no", floor_bytes=3, budget_bytes=2, parts={"weights": 3})
    assert (str(error), error.floor_bytes, error.budget_bytes, error.parts) == ("no", 3, 2, {"weights": 3})
