"""Runs of autograd's engine: a step may have several, one after another or one within another."""

from __future__ import annotations

from collections.abc import Callable

from holdover.trace._torch import at_end_of_pass, current_graph_task_id, engines_running


class Passes:
    """Tells `entered` the number of the run that is now under way whenever that changes, -1 where there is none.

    A run within another is what a backward called from a node's own backward makes, as reentrant activation
    checkpointing does for each of its regions. When it ends, the one around it is told again. A run that fails says
    nothing of its end; where the step goes on nevertheless, the end is told with the next op or saved tensor.
    """

    def __init__(self, entered: Callable[[int], None]) -> None:
        self.entered = entered
        self.under_way: list[int] = []

    def look(self) -> bool:
        """Whether autograd's engine is running."""
        task = current_graph_task_id()
        if task == (self.under_way[-1] if self.under_way else -1):
            return task != -1
        if task == -1:
            self.forget(0)
        elif task in self.under_way:
            self.forget(self.under_way.index(task) + 1)
        else:
            self.forget(engines_running() - 1)
            self.under_way.append(task)
            self.entered(task)
            at_end_of_pass(lambda: self.left(task))
        return task != -1

    def forget(self, depth: int) -> None:
        """Only the outermost `depth` runs are still under way: the others have failed."""
        if len(self.under_way) > depth:
            del self.under_way[depth:]
            self.entered(self.under_way[-1] if self.under_way else -1)

    def left(self, task: int) -> None:
        self.forget(self.under_way.index(task))
