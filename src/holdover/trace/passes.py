"""Runs of autograd's engine: a step may have several, one after another or one within another."""

from __future__ import annotations

from collections.abc import Callable

from holdover.trace._torch import at_end_of_pass, current_graph_task_id


class Passes:
    """Tells `entered` the number of the run that is now under way whenever that changes, -1 where there is none.

    A run within another is what a backward called from a node's own backward makes, as reentrant activation
    checkpointing does for each of its regions. When it ends, the one around it is told again.
    """

    def __init__(self, entered: Callable[[int], None]) -> None:
        self.entered = entered
        self.under_way: list[int] = []

    def look(self) -> bool:
        """Whether autograd's engine is running."""
        task = current_graph_task_id()
        if task != -1 and task not in self.under_way:
            self.under_way.append(task)
            self.entered(task)
            at_end_of_pass(lambda: self.left(task))
        return task != -1

    def left(self, task: int) -> None:
        self.under_way.remove(task)
        self.entered(self.under_way[-1] if self.under_way else -1)
