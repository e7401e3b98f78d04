"""Estimates, plans and verifications as plain text: what printing them shows."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from holdover.report.estimate_view import estimate_view
from holdover.report.frontier_view import frontier_view
from holdover.report.plan_view import plan_view
from holdover.report.tables import WIDTH
from holdover.report.verification_view import verification_view

if TYPE_CHECKING:
    from holdover.memory.estimate import Estimate
    from holdover.planning.frontier import Frontier
    from holdover.planning.plan import Plan
    from holdover.verification import Verification


def render(view: RenderableType, width: int = WIDTH) -> str:
    """A rich view as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(view)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")


def render_estimate(estimate: Estimate) -> str:
    """What `print(estimate)` shows."""
    return render(estimate_view(estimate))


def render_plan(plan: Plan) -> str:
    """What `print(plan)` shows."""
    return render(plan_view(plan))


def render_frontier(frontier: Frontier) -> str:
    """What `print(frontier)` shows."""
    return render(frontier_view(frontier))


def render_verification(verification: Verification) -> str:
    """What `print(verification)` shows."""
    return render(verification_view(verification))
