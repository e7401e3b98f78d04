"""What the simulation knows of a recorded op: its recipe, as `recompute/recipe.py` has it."""

from __future__ import annotations

from holdover.memory.timeline import FOREVER


class Recipe:
    """A recorded op in a simulated step: what it reads and holds, and who still wants what it makes."""

    __slots__ = (
        "aside", "dead", "held_from", "inputs", "op", "outputs", "pins", "refs", "replayed", "returns_pin", "spent",
        "stage", "state", "wanted",
    )  # fmt: skip

    def __init__(self, op: int, outputs: tuple[int, ...], stage: int = 0, held_from: int = FOREVER) -> None:
        self.op, self.outputs, self.stage, self.held_from = op, outputs, stage, held_from
        self.inputs: list[tuple[Recipe, int]] = []  # (recipe, value); each claimed while this one wants it
        self.pins: list[list[int]] = []  # one-element lists: the holding they point to moves on copy-on-write
        self.refs = self.wanted = self.state = self.aside = 0
        self.replayed = self.spent = self.dead = False  # spent: asked for in this pass
        self.returns_pin = False  # a clone, and what it read is pinned as that clone (rule 5)
