"""Does a plan keep its promise? Run the step plain and planned, and compare everything.

Both runs happen on copies that start from the same state and the same random generators. Tensors are compared bit
for bit: a NaN equals the same NaN, and 0.0 differs from -0.0.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from holdover.comparison import Difference, Item, compare, flatten
from holdover.duplicate import duplicate
from holdover.errors import HoldoverError
from holdover.memory.measure import measure_peak
from holdover.planning.inputs import PlannedShape, shapes_of
from holdover.trace.isolate import random_state_restored
from holdover.trace.step import OptimizerSpec, autocast_for, checked_loss, make_optimizer, model_dtype, tensors_in

if TYPE_CHECKING:
    from holdover.planning.plan import Plan

Loss = Callable[[Any], torch.Tensor]

MAX_TIMED_SECONDS = 10.0
MIN_ROUNDS, MAX_ROUNDS = 5, 40
CERTAIN = 0.01
"""Steps are timed until their ratio stands to this, or the time is up."""
SLACK, SCALARS_BYTES = 0.01, 128
"""How far above its promise a peak may be: 1 %, and a few scalars, which count in steps of some KiB alone."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What came out of running a step plain and planned. Peaks are bytes and include what existed before the step."""

    gradients_equal: bool
    buffers_equal: bool
    rng_equal: bool
    outputs_equal: bool
    measured_peak_bytes: int
    predicted_peak_bytes: int
    unplanned_peak_bytes: int
    measured_unplanned_peak_bytes: int
    step_time_ratio: float  # planned over plain, median of interleaved steps
    predicted_time_ratio: float
    budget_bytes: int | None  # None for the lowest peak that could be reached
    device: str
    differences: tuple[Difference, ...] = field(default=())
    step_time_uncertainty: float = math.inf  # of `step_time_ratio`, either way; infinite from too few steps

    @property
    def exact(self) -> bool:
        """Gradients, buffers, random generators and outputs are equal to the last bit."""
        return self.gradients_equal and self.buffers_equal and self.rng_equal and self.outputs_equal

    @property
    def above_promise(self) -> float:
        """By what fraction the measured peak is above the promised one; negative where it is below."""
        return self.measured_peak_bytes / self.predicted_peak_bytes - 1

    @property
    def within_promise(self) -> bool:
        """The measured peak is at most 1 % and 128 bytes above the promised one."""
        return self.measured_peak_bytes <= self.predicted_peak_bytes * (1 + SLACK) + SCALARS_BYTES

    @property
    def holds(self) -> bool:
        """Exact, and as small as promised."""
        return self.exact and self.within_promise

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return {
            "schema": 1,
            "holds": self.holds,
            "within_promise": self.within_promise,
            "above_promise": self.above_promise,
            "gradients_equal": self.gradients_equal,
            "buffers_equal": self.buffers_equal,
            "rng_equal": self.rng_equal,
            "outputs_equal": self.outputs_equal,
            "measured_peak_bytes": self.measured_peak_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "unplanned_peak_bytes": self.unplanned_peak_bytes,
            "measured_unplanned_peak_bytes": self.measured_unplanned_peak_bytes,
            "budget_bytes": self.budget_bytes,
            "step_time_ratio": self.step_time_ratio,
            "step_time_uncertainty": None if math.isinf(self.step_time_uncertainty) else self.step_time_uncertainty,
            "predicted_time_ratio": self.predicted_time_ratio,
            "device": self.device,
            "differences": [
                {
                    "kind": d.kind,
                    "name": d.name,
                    "module": d.module,
                    "elements": d.elements,
                    "largest": None if math.isnan(d.largest) else d.largest,
                    "detail": d.detail,
                }
                for d in self.differences
            ],
        }

    def __str__(self) -> str:
        from holdover.report.text import render_verification

        return render_verification(self)


@dataclass
class _Step:
    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Loss | None
    optimizer: torch.optim.Optimizer | None
    precision: str | None
    device: torch.device

    def forward_and_backward(self) -> tuple[Any, torch.Tensor]:
        with torch.enable_grad():
            with autocast_for(self.precision, self.device.type):
                output = self.model(*self.args, **self.kwargs)
                loss = checked_loss(self.loss, output)
            loss.backward()
        return output, loss

    def whole(self) -> None:
        """As `holdover.trace.record` counts a step: with an optimizer, its update and the gradients' release too."""
        kept = self.forward_and_backward()  # a training loop's variables live on through the optimizer's update
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        del kept

    def leaves(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, name.rpartition(".")[0], parameter
        for i, tensor in enumerate(tensors_in((self.args, self.kwargs))):
            if tensor.requires_grad and tensor.is_leaf:
                yield f"input {i}", "", tensor

    def clear_gradients(self) -> None:
        for _, _, leaf in self.leaves():
            leaf.grad = None


@dataclass
class _Results:
    """What one step left behind; the field names are the kinds of a `Difference`."""

    gradient: list[Item]
    buffer: list[Item]
    output: list[Item]
    rng: list[Item]


def verify(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan,
    loss: Loss | None = None,
    optimizer: OptimizerSpec = None,
    precision: str | None = None,
) -> Verification:
    """Run the training step plain and under `plan`, and compare results, memory and time.

    Nothing of the caller's changes: both runs work on copies, and the random generators are put back.

    Args:
        model, args, kwargs, loss, optimizer: the step that was planned, as `holdover.plan` took it. The model may
            have the plan applied already.
        plan: the plan to judge.
        precision: None for that of the plan.

    Returns:
        A `Verification`; its `holds` is the verdict, `differences` says what differs where.

    Raises:
        ApplyError: the plan belongs to another model.
        HoldoverError: the step cannot be copied, or is on the meta device.

    >>> import torch, holdover
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    >>> x = torch.randn(512, 64)
    >>> plan = holdover.plan(model, (x,), budget="min")
    >>> holdover.verify(model, (x,), plan=plan).gradients_equal
    True
    """
    if any(t.is_meta for t in (*model.parameters(), *model.buffers(), *tensors_in((args, kwargs)))):
        raise HoldoverError(
            "Verifying runs the step, and this model or its arguments are on the meta device, without data: "
            "build them on a real device"
        )
    precision = precision or plan.precision
    subject = (model, tuple(args), dict(kwargs or {}), loss, optimizer)
    with random_state_restored():
        reference = replace(plan, choices=()) if plan.compiled else None  # compiled alike, so that bits can be equal
        expected = _results(prepared(subject, precision, reference))
        found = _results(prepared(subject, precision, plan))
        differences = [
            compare(kind, getattr(expected, kind), getattr(found, kind))
            for kind in ("gradient", "buffer", "output", "rng")
        ]
        del expected, found
        plain, planned = prepared(subject, precision, reference), prepared(subject, precision, plan)
        unplanned_peak, peak = _peak(plain), _peak(planned)
        ratios = _time_ratios(plain, planned)
    promise = _promise(plan, args, kwargs)
    return Verification(
        gradients_equal=not differences[0],
        buffers_equal=not differences[1],
        outputs_equal=not differences[2],
        rng_equal=not differences[3],
        measured_peak_bytes=peak,
        predicted_peak_bytes=promise.predicted_peak_bytes,
        unplanned_peak_bytes=promise.unplanned_peak_bytes,
        measured_unplanned_peak_bytes=unplanned_peak,
        step_time_ratio=statistics.median(ratios),
        step_time_uncertainty=uncertainty(ratios),
        predicted_time_ratio=1.0 + promise.extra_time,
        budget_bytes=plan.budget_bytes,
        device=_device_name(plain.device),
        differences=tuple(d for of_kind in differences for d in of_kind),
    )


def prepared(subject: tuple[Any, ...], precision: str | None, plan: Plan | None) -> _Step:
    from holdover import apply_, remove_
    from holdover.recompute.apply import installation_of

    model, args, kwargs, loss, optimizer = duplicate(subject)
    if installation_of(model) is not None:
        remove_(model)
    dtype = model_dtype(precision)
    if dtype is not None:
        model.to(dtype)
    built = make_optimizer(optimizer, model)
    if plan is not None:
        apply_(model, plan)
    tensors = (*model.parameters(), *model.buffers(), *tensors_in((args, kwargs)))
    device = next((t.device for t in tensors), torch.device("cpu"))
    step = _Step(model, args, kwargs, loss, built, precision, device)
    if plan is not None and plan.compiled:
        _compile(step)
    return step


def _compile(step: _Step) -> None:
    """The first step compiles; what it did to buffers is undone."""
    before = {name: b.detach().clone() for name, b in step.model.named_buffers()}
    with _same_start():
        step.forward_and_backward()
    step.clear_gradients()
    with torch.no_grad():
        for name, buffer in step.model.named_buffers():
            buffer.copy_(before[name])


def _results(step: _Step) -> _Results:
    with _same_start():
        output, loss = step.forward_and_backward()
        return _Results(
            gradient=[(name, module, leaf.grad) for name, module, leaf in step.leaves()],
            buffer=[(name, name.rpartition(".")[0], b.detach().clone()) for name, b in step.model.named_buffers()],
            output=[("loss", "", loss.detach()), *flatten("output", output)],
            rng=_rng_states(step.device),
        )


def _peak(step: _Step) -> int:
    """The peak of what `holdover.trace.record` records: two steps with an optimizer, since its state exists then."""

    def work() -> None:
        for _ in range(1 if step.optimizer is None else 2):
            step.whole()

    with _same_start():
        subjects = (step.model, step.args, step.kwargs, step.loss, step.optimizer)
        return measure_peak(work, subjects, device=step.device)[1]


def _promise(plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Plan | PlannedShape:
    """What the plan says of these arguments' shapes; its own figures, where it does not know them."""
    if len(plan.shapes) < 2:
        return plan
    seen = shapes_of(args, kwargs)
    return next((shape for shape in plan.shapes if shape.shapes == seen), plan)


def _time_ratios(plain: _Step, planned: _Step) -> list[float]:
    """Time of a planned step over that of the plain one before or after it, until their median is certain."""
    clock = _clock(plain.device)
    ratios: list[float] = []
    began = time.perf_counter()
    for turn in range(MAX_ROUNDS + 1):
        seconds = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            step = (plain, planned)[which]
            step.clear_gradients()
            gc.collect()
            _synchronize(step.device)
            start = clock()
            step.whole()
            _synchronize(step.device)
            seconds[which] = clock() - start
        if turn:  # the first turn warms up
            ratios.append(seconds[1] / seconds[0])
        late = time.perf_counter() - began > MAX_TIMED_SECONDS
        if len(ratios) >= MIN_ROUNDS and (late or uncertainty(ratios) <= CERTAIN):
            break
    return ratios


def _clock(device: torch.device) -> Callable[[], float]:
    """Processor time where the step has one thread, so that waiting for other programs does not count."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def uncertainty(ratios: Sequence[float]) -> float:
    """How far either way a median may be off (McGill, Tukey and Larsen 1978); infinite for fewer than four.

    >>> round(uncertainty([1.0, 1.1, 1.2, 1.3]), 3), uncertainty([1.0])
    (0.196, inf)
    """
    if len(ratios) < 4:
        return math.inf
    low, _, high = statistics.quantiles(ratios, n=4)
    return 1.57 * (high - low) / math.sqrt(len(ratios))


@contextmanager
def _same_start() -> Iterator[None]:
    """Every run starts from the caller's random generators, and does not advance them for the next run."""
    gc.collect()
    with random_state_restored():
        yield


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _rng_states(device: torch.device) -> list[Item]:
    states: list[Item] = [("torch", "", torch.get_rng_state()), ("python", "", random.getstate())]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states.append(("numpy", "", torch.from_numpy(numpy.random.get_state()[1].astype("int64"))))
    if device.type == "cuda":
        states.append(("torch.cuda", "", torch.cuda.get_rng_state(device)))
    return states
