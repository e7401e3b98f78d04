"""Backward as it runs where nobody watches.

Autograd's engine, and some of its formulas, take another way for fake tensors and under dispatch modes than in a plain
step: they do not write in place, which no subclass could follow, and branch on no values (`isTensorSubclassLike` in
PyTorch's sources). The ops that they ask for then are exchanged here for those that a plain step runs.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch

from holdover.trace._torch import (
    ENGINE,
    current_autograd_node,
    held_once,
)
from holdover.trace.tensors import device_of, is_dense, is_plain

if TYPE_CHECKING:
    from holdover.trace.recorder import Recorder

aten = torch.ops.aten

WRITES_INTO_ZEROS = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor,
    aten.index_put.default: aten.index_put_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.put.default: aten.put_.default,
}
ZEROS = ("aten.new_zeros.", "aten.zeros.", "aten.zeros_like.")

EVENLY = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")
"""Reductions to one number, whose gradient is shared evenly among all elements that have its value."""

WRITES_INTO_OWN: dict[str, dict[Any, Any]] = {
    "BinaryCrossEntropyWithLogitsBackward0": {aten.sub.Tensor: aten.sub_.Tensor, aten.mul.Tensor: aten.mul_.Tensor},
    "ClampBackward0": {aten.logical_and.default: aten.logical_and_.default},
    **{name: {aten.logical_and.default: aten.logical_and_.default} for name in EVENLY},  # on a card
}
"""By autograd node: ops of its formula that write to their first argument, if the formula itself has made that."""

NO_ZEROS = (
    "The gradient of cumprod is taken to meet no element that is 0: with one, it takes half a dozen tensors more."
)

Asked = tuple[Any, Any, Any]
"""An op that a formula asks for, its arguments, and those by name."""

Formula = Generator[Any, Asked, Any]
"""Is sent what the watched formula asks for; yields, and at last returns, what the formula is given."""


class PlainBackward:
    """Runs a recorder's ops of backward as a plain step does."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.node: tuple[int, str] | None = None
        self.began = 0  # op at which the node began
        self.formula: Formula | None = None
        self.replaced = False  # once in each run of a node

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the op that autograd asks for, or what a plain step has in its place."""
        node = current_autograd_node()
        key = (node._sequence_nr(), node.name()) if node is not None else None
        if key != self.node:
            self.node, self.began = key, len(self.recorder.trace.ops)
            self.formula, self.replaced = None, False
        if node is None or torch.is_grad_enabled():
            return self.recorder.record(self.into_zeros(func, args), args, kwargs)
        if not self.replaced:
            self.formula = self.begun(node.name(), func, args)
            self.replaced = self.formula is not None
        if self.formula is not None:
            try:
                return self.formula.send((func, args, kwargs))
            except StopIteration as end:
                self.formula = None
                return end.value
        if func is aten.add.Tensor and self.is_accumulation(node, args, kwargs):
            func = aten.add_.Tensor
        in_place = WRITES_INTO_OWN.get(node.name(), {}).get(func)
        if in_place is not None and self.made_here(args[0]) and fits_into(args):
            func = in_place
        return self.recorder.record(self.into_zeros(func, args), args, kwargs)

    def begun(self, name: str, func: Any, args: Any) -> Formula | None:
        """What takes the place of the node's formula from this op on, if anything does."""
        if name in EVENLY and func is aten.isnan.default and device_of(args[0]).type == "cpu":
            formula = evenly(self.recorder)
        elif name == "CumprodBackward0" and func is aten.mul.Tensor and not args[0].is_complex():
            formula = scanned_product(self.recorder)
        else:
            return None
        next(formula)
        return formula

    def maker(self, tensor: torch.Tensor) -> int:
        """The op that wrote the tensor's content; -1 if it was there before the step."""
        live = self.recorder.live.find(tensor.untyped_storage()) if is_plain(tensor) else None
        return -1 if live is None else self.recorder.trace.values[live.value].maker

    def made_here(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and self.maker(tensor) >= self.began

    def into_zeros(self, func: Any, args: Any) -> Any:
        """The op in place, where it starts from zeros that the formula has just made."""
        in_place = WRITES_INTO_ZEROS.get(func)
        if in_place is None or not self.made_here(args[0]):
            return func
        return in_place if self.recorder.trace.ops[self.maker(args[0])].name.startswith(ZEROS) else func

    def is_accumulation(self, node: Any, args: Any, kwargs: Any) -> bool:
        """Whether the engine adds a gradient to an earlier one of the same tensor, in place since it alone has that.

        The rule is that of `torch/csrc/autograd/input_buffer.cpp`. While the engine does so, the node that made the
        later gradient is the current one; a sum in that node's own formula is told by its operand, made there too.
        """
        if len(args) != 2 or kwargs or not all(isinstance(t, torch.Tensor) and is_plain(t) for t in args):
            return False
        old, new = args
        modes = modes_asked_by_engine()
        if old.shape != new.shape or not modes:
            return False
        targets = node.next_functions
        if self.made_here(old) and len(set(targets)) == len(targets):
            return False
        return is_dense(old) and held_once(old, modes)


def fits_into(args: Any) -> bool:
    """Whether the result has the shape of the first argument."""
    shapes = [t.shape for t in args if isinstance(t, torch.Tensor)]
    return bool(torch.broadcast_shapes(*shapes) == shapes[0])


def modes_asked_by_engine() -> int:
    """How many dispatch modes an op has come through that the engine's own C++ code asks for; 0 if Python code asks."""
    modes, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("holdover.trace", "torch._ops")):
        modes += frame.f_code.co_name == "__torch_dispatch__"
        frame = frame.f_back
    return modes if frame.f_code is ENGINE else 0


def asked(call: Asked, op: Any) -> Any:
    """The arguments of the op, which a watched formula has to ask for now."""
    assert call[0] is op, f"autograd asks for {call[0]} where it should for {op}: its formula has changed"
    return call[1]


def aside(recorder: Recorder, call: Asked) -> Any:
    """What a watched formula asks for and a plain step never makes."""
    with recorder.unwatched():
        return call[0](*call[1], **call[2])


def evenly(recorder: Recorder) -> Formula:
    """`evenly_distribute_backward` in `torch/csrc/autograd/FunctionsManual.cpp`, its branch for plain tensors on CPU.

    The watched one asks, for an input and its largest value: isnan(input), isnan(value), both of that, input == value,
    or, the mask's sum, the gradient by it, mask times that. The plain one looks at the value only, and fills zeros.
    """

    def run(op: Any, *args: Any) -> Any:
        return recorder.record(op, args, {})

    call = yield None
    (values,) = asked(call, aten.isnan.default)
    call = yield aside(recorder, call)
    call = yield run(aten.isnan.default, *asked(call, aten.isnan.default))
    asked(call, aten.logical_and.default)
    call = yield aside(recorder, call)
    mask = run(aten.eq.Tensor, *asked(call, aten.eq.Tensor))
    call = yield mask
    asked(call, aten.logical_or_.default)
    call = yield mask
    zeros = run(aten.new_zeros.default, values, values.shape)
    call = yield run(aten.sum.default, *asked(call, aten.sum.default))
    share = run(aten.div.Tensor, *asked(call, aten.div.Tensor))
    call = yield share
    asked(call, aten.mul.Tensor)
    return run(aten.masked_fill_.Tensor, zeros, mask, share)


def scanned_product(recorder: Recorder) -> Formula:
    """`cumprod_backward` in `torch/csrc/autograd/FunctionsManual.cpp`, its way for an input without zeros.

    Both begin with w = output * gradient and input == 0. The watched one then goes a way of twenty ops that is right
    with zeros too and ends in its second where(); the plain one looks whether there are any, sums w up from behind and
    divides by the input.
    """

    def run(op: Any, *args: Any) -> Any:
        return recorder.record(op, args, {})

    call = yield None
    product = run(aten.mul.Tensor, *asked(call, aten.mul.Tensor))
    call = yield product
    values, zero = asked(call, aten.eq.Scalar)
    mask = run(aten.eq.Scalar, values, zero)
    if recorder.real and aside(recorder, (aten.any.default, (mask,), {})):
        return mask
    if NO_ZEROS not in recorder.trace.uncertainties and not recorder.real:
        recorder.trace.uncertainties.append(NO_ZEROS)
    call = yield mask
    dim, choices = None, 0
    while choices < 2:
        if call[0] is aten.cumsum.default and dim is None:
            dim = call[1][1]
        choices += call[0] is aten.where.self
        if choices < 2:
            call = yield aside(recorder, call)
    del call
    first = run(aten.flip.default, product, [dim])
    second = run(aten.cumsum.default, first, dim)
    third = run(aten.flip.default, second, [dim])
    del first, second
    return run(aten.div.Tensor, third, values)
