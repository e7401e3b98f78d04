"""What the runtime knows of each op: what it writes to, whether it is random, and whether running it again is safe.

Nearly all of it is read from the op's schema and tags, once per overload. The tables here hold what schemas do not say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdover.recompute._torch import OpOverload
from holdover.trace.ops import (
    ONLY_IN_TRAINING,
    OVERWRITES,
    dropout_position,
    generator_argument,
    is_random,
    obstacle,
    running_statistics,
    takes_a_place,
    written_arguments,
)
from holdover.trace.varying import ASKED


class Op:
    """An op as the runtime sees it.

    Attributes:
        name: "aten.addmm.default".
        counted: whether it takes a place in the call it runs in, see `trace.ops.takes_a_place`.
        simple: counted, an overload, and writes to nothing: the fast path.
        writes: (position, argument name) of what it writes to.
        obstacle: why its outputs can never be made again by running it once more; "" when they can.
        random: draws from a generator.
        generator: name of its generator argument, or "".
        resizes: changes its argument's metadata (a view made in place), maybe its memory.
        statistics: positions of running statistics, see `trace.ops.running_statistics`.
        clones: copies its argument, element by element.
        labels: begins (1) or ends (-1) a label of the profiler's.
        may_vary: `trace.varying.varies` has to be asked of each call.
        counted_before: how often a write of it is counted when it is seen: those of custom ops in Python once.
    """

    __slots__ = (
        "argument_names", "clones", "counted", "counted_before", "dropout", "func", "generator", "labels", "may_vary",
        "name", "obstacle", "overwrites", "packet", "random", "resizes", "simple", "statistics", "writes",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        self.func = func  # keeps the id by which OPS finds this taken
        self.random = self.counted = self.simple = self.resizes = self.overwrites = self.clones = self.may_vary = False
        self.writes: tuple[tuple[int, str], ...] = ()
        self.argument_names: tuple[str, ...] = ()
        self.statistics: tuple[int, ...] = ()
        self.generator = self.obstacle = self.packet = ""
        self.dropout, self.labels, self.counted_before = -1, 0, 0
        if not isinstance(func, OpOverload):
            self.name = getattr(func, "__name__", type(func).__name__)
            self.counted = True
            self.obstacle = obstacle(func)
            return
        schema = func._schema
        self.name, self.packet = str(func), schema.name.split("::")[1]
        self.counted, self.counted_before = takes_a_place(func), int(func.namespace != "aten")
        arguments = schema.arguments
        self.argument_names = tuple(a.name for a in arguments)
        self.writes = written_arguments(func)
        self.statistics = running_statistics(func)
        self.simple = self.counted and not self.writes and not self.statistics and type(func) is OpOverload
        self.random = is_random(func)
        self.generator = generator_argument(func)
        self.dropout = dropout_position(func)
        self.resizes = torch.Tag.inplace_view in func.tags
        self.overwrites = self.packet in OVERWRITES or (bool(self.writes) and self.writes[0][1] == "out")
        self.obstacle = obstacle(func)
        self.labels = {"_record_function_enter_new": 1, "_record_function_exit": -1}.get(self.packet, 0)
        self.may_vary = self.packet in ASKED
        self.clones = func is torch.ops.aten.clone.default

    def draws(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether this call of a random op takes random numbers: attention without dropout does not."""
        if self.dropout < 0:
            return self.random
        p = args[self.dropout] if self.dropout < len(args) else kwargs.get("dropout_p", 0.0)
        return self.random and p != 0.0

    def updates(self, args: Sequence[Any]) -> bool:
        """Whether this call of a batch norm writes to its running statistics."""
        if not self.statistics:
            return False
        flag = ONLY_IN_TRAINING.get(self.packet, -1)
        return flag < 0 or (flag < len(args) and bool(args[flag]))

    def forgets(self, name: str, args: Sequence[Any]) -> bool:
        """Whether what it writes to argument `name` does not depend on what was there, provided it covers it all."""
        in_training = self.packet == "rrelu_with_noise" and len(args) > 4 and bool(args[4])
        return self.overwrites or (in_training and name == "noise")


OPS: dict[int, Op] = {}
"""By `id` of the overload, which costs less to look up than its hash. Each entry keeps its overload alive."""


def describe(func: Any) -> Op:
    """The entry of `func`, made on first use.

    >>> describe(torch.ops.aten.relu_.default).writes
    ((0, 'self'),)
    >>> describe(torch.ops.aten.empty_like.default).obstacle
    'uninitialised memory'
    """
    op = OPS.get(id(func))
    if op is None:
        op = OPS[id(func)] = Op(func)
    return op
