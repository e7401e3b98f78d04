"""Record a training step of any model, without its memory where fake tensors can go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from holdover.errors import TraceError
from holdover.trace.escapes import Escapes
from holdover.trace.failure import StepFailedError, isolated_step
from holdover.trace.fake import Faker, unnoticed
from holdover.trace.fingerprint import fingerprint
from holdover.trace.frames import frame_modules
from holdover.trace.generators import seeing_states
from holdover.trace.graph import Category, Phase, Signature, TensorSpec, Trace
from holdover.trace.isolate import ForeignError
from holdover.trace.recorder import Recorder
from holdover.trace.replace import replace_tensors
from holdover.trace.step import (
    OptimizerSpec,
    autocast_for,
    check_optimizer,
    check_precision,
    checked_loss,
    make_optimizer,
    model_dtype,
    tensors_in,
)
from holdover.trace.target import Target
from holdover.trace.target.emulate import card_faker, emulated
from holdover.trace.target.pretend import OnCard
from holdover.trace.target.unknowns import unknowns
from holdover.trace.transforms import yielding_to_transforms
from holdover.trace.wrapped import refuse_wrapped

Loss = Callable[[Any], torch.Tensor]
Corrections = Callable[[Signature], "list[TensorSpec | None] | None"]


@dataclass
class Step:
    """What a training step is made of. Isolation hands this over as one object, so that shared tensors stay shared."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Loss | None
    optimizer: OptimizerSpec
    precision: str | None


def record(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerSpec = None,
    precision: str | None = None,
    device: torch.device | None = None,
    corrections: Corrections | None = None,
    target: Target | None = None,
) -> Trace:
    """Run the caller's own training step and return what it did, leaving no mark on the caller.

    The step is forward, loss, backward; with an optimizer also `step()`, `zero_grad()` and all of it once more, since
    the optimizer's state exists from the second step on. Tensors are fake, so nothing of the model's size is
    allocated. Where fake tensors cannot go (`.item()`, `nonzero`, a branch on a value), the step is recorded on the
    real tensors instead, in isolation, and `Trace.notes` says why.

    Args:
        model: real, or built on `torch.device("meta")` or under fake tensors.
        args, kwargs: the model's arguments.
        loss: a function of the model's output that gives a scalar; see `step.default_loss`.
        optimizer: None, a name, a `params -> Optimizer` callable or an Optimizer.
        precision: one of Lightning's names, see `step.PRECISIONS`.
        device: where meta tensors are taken to be; default CPU.
        corrections: true outputs of ops whose fake kernels are wrong.
        target: a CUDA card that need not be here; the step is recorded as it would run there.

    Raises:
        TraceError: the step itself fails (says in which module and at which line; its cause is the error), or returns
            no usable loss.

    >>> import torch
    >>> trace = record(torch.nn.Linear(4, 2), (torch.ones(3, 4),))
    >>> [op.name for op in trace.ops if op.phase == "forward"]
    ['aten.t.default', 'aten.addmm.default']
    """
    check_precision(precision)
    check_optimizer(optimizer)
    if isinstance(args, torch.Tensor) or not isinstance(args, (tuple, list)):
        raise TraceError(f"args must be a tuple of the model's arguments, not {type(args).__name__}: write args=(x,).")
    if not isinstance(model, torch.nn.Module):
        raise TraceError(f"A torch.nn.Module is needed, not {type(model).__name__}.")
    refuse_wrapped(model)
    step = Step(model, tuple(args), dict(kwargs or {}), loss, optimizer, precision)
    has_data = not any(t.device.type == "meta" or type(t).__name__ == "FakeTensor" for t in _tensors(step))

    # here and not in the child: what it imports then stays imported
    faker = card_faker() if target else Faker(device or torch.device("cpu"))

    def on_fake(disguise: Callable[[], AbstractContextManager[None]]) -> Trace:
        fixes = None if target else corrections
        return isolated_step(lambda subject: _record_fake(subject, faker, fixes, disguise(), target), step)

    try:
        return on_fake(unnoticed)
    except StepFailedError as failed:
        reason = failed
    if not has_data or target is not None:
        try:
            trace = on_fake(nullcontext)
        except Exception:
            trace = None
        if trace is not None:
            trace.notes.append(
                "The model asks for values that are not known without data, and takes another path where it sees that "
                f"tensors have none. That path was recorded; a real step may take less memory. {said(reason)}"
            )
            return trace
        if target is not None:
            raise TraceError(
                f"The step cannot be recorded for {target.name} without that card: {_told(reason)} There is no data "
                "on a card that is not here, so forward can take no branch on values, and its tensors must be made on "
                "the device of its inputs. Without device=, the step is recorded for the CPU, data and all."
            ) from reason.cause
        raise TraceError(
            "The step cannot be recorded without data, and the model or its inputs have none: "
            f"{_told(reason)} Build the model and the inputs on a real device, or avoid reading values in forward."
        ) from reason.cause
    try:
        trace = isolated_step(_record_real, step)
    except StepFailedError as failed:
        bare = "" if args or kwargs else (
            " The model was called without arguments: they are args= and kwargs=, or the second and third value that "
            "a factory returns."
        )  # fmt: skip
        raise TraceError(f"The training step itself fails: {_told(failed)}{bare}") from failed.cause
    trace.notes.append(f"Recorded on real tensors, because fake ones cannot follow this step: {said(reason)}")
    return trace


def _told(failed: StepFailedError) -> str:
    return f"{said(failed)} {failed.where}".rstrip()


def said(error: Exception) -> str:
    text = str(error) if isinstance(error, ForeignError) else f"{type(error).__name__}: {error}"
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return first[:300] + ("" if first.endswith(".") else ".")


def _tensors(step: Step) -> list[torch.Tensor]:
    return [*step.model.parameters(), *step.model.buffers(), *tensors_in((step.args, step.kwargs))]


def _record_fake(
    step: Step,
    faker: Faker,
    corrections: Corrections | None,
    disguise: AbstractContextManager[None],
    target: Target | None,
) -> Trace:
    described = describe((step.args, step.kwargs))
    identity = fingerprint(step.model)
    with emulated(target, faker) if target else nullcontext():
        if target:
            _as_on_a_card(step, faker)
        step = replace_tensors(step, faker)
        with torch.random.fork_rng(devices=[]), faker.mode, disguise:
            recorder = Recorder(real=False, corrections=corrections, known=faker.known)
            trace = run_step(step, recorder, identity, described, faker.device, OnCard if target else nullcontext)
    if target:
        trace.recorded_on = f"fake {target.name}"
        trace.uncertainties += unknowns(trace, target)
    return trace


def is_packed(value: Any) -> bool:
    return isinstance(value, torch.nn.utils.rnn.PackedSequence)


def _as_on_a_card(step: Step, faker: Faker) -> None:
    """What a card holds elsewhere: step counts and batch sizes on the CPU, a recurrent layer's weights in one piece."""
    sequences = [x for x in tree_leaves((step.args, step.kwargs), is_leaf=is_packed) if is_packed(x)]
    faker.stay.update(id(sequence.batch_sizes) for sequence in sequences)
    if isinstance(step.optimizer, torch.optim.Optimizer):
        counts = (state.get("step") for state in step.optimizer.state.values())
        faker.stay.update(id(count) for count in counts if isinstance(count, torch.Tensor))
    for module in step.model.modules():
        if isinstance(module, torch.nn.RNNBase) and not any(map(torch.nn.parameter.is_lazy, module.parameters())):
            faker.flatten(list(module.parameters()))


def _record_real(step: Step) -> Trace:
    recorder = Recorder(real=True)
    device = next((t.device for t in _tensors(step)), torch.device("cpu"))
    return run_step(step, recorder, fingerprint(step.model), describe((step.args, step.kwargs)), device)


def run_step(
    step: Step,
    recorder: Recorder,
    identity: str,
    described: str,
    device: torch.device,
    above: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Trace:
    model, trace = step.model, recorder.trace
    dtype = model_dtype(step.precision)
    if dtype is not None:
        _convert(model, dtype)
        to_dtype = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
        step.args, step.kwargs = replace_tensors((step.args, step.kwargs), to_dtype)
    trace.model, trace.fingerprint, trace.inputs = type(model).__name__, identity, described
    trace.recorded_on = "real" if recorder.real else "fake"
    optimizer = make_optimizer(step.optimizer, model)
    trace.optimizer = type(optimizer).__name__ if optimizer is not None else ""
    _know_what_exists(recorder, step, optimizer)
    frame_modules(model, recorder)
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if recorder.real:
            stack.enter_context(Escapes(recorder))
        if device.type == "cpu":
            stack.enter_context(seeing_states(recorder))
        for number in range(2 if optimizer is not None else 1):
            _one_step(step, recorder, optimizer, number, device, above)
    _name_activations(trace)
    for value in trace.values:
        value.escapes = recorder.escaped.get(value.storage, "")
    return trace


def _convert(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """`model.to(dtype)`, which refuses fake parameters whenever something holds a weak reference to them."""
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p.is_floating_point() and not torch.nn.parameter.is_lazy(p):
                p.data = p.data.to(dtype)
                if p.grad is not None:
                    p.grad = p.grad.to(dtype)
        for name, b in module.named_buffers(recurse=False):
            if b.is_floating_point() and not torch.nn.parameter.is_lazy(b):
                module._buffers[name] = b.to(dtype)


def _name_activations(trace: Trace) -> None:
    """What autograd saved and did not exist before is an activation, for as long as its storage lives."""
    for slot in trace.slots:
        storage = trace.storages[trace.values[slot.value].storage]
        if storage.category is Category.TEMPORARY:
            storage.category = Category.ACTIVATION


def _one_step(
    step: Step,
    recorder: Recorder,
    optimizer: torch.optim.Optimizer | None,
    number: int,
    device: torch.device,
    above: Callable[[], AbstractContextManager[Any]],
) -> None:
    recorder.begin(number, Phase.FORWARD)
    hooks = torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack)
    with recorder, above(), yielding_to_transforms():
        with hooks, autocast_for(step.precision, device.type) if step.precision else nullcontext():
            output = step.model(*step.args, **step.kwargs)
            recorder.begin(number, Phase.LOSS)
            loss = checked_loss(step.loss, output)
        recorder.begin(number, Phase.BACKWARD)
        loss.backward()
        _name_gradients(recorder, step)
        if optimizer is not None:
            recorder.begin(number, Phase.OPTIMIZER)
            optimizer.step()
            _know_optimizer(recorder, optimizer)
            optimizer.zero_grad(set_to_none=True)
        del output, loss


def _know_what_exists(recorder: Recorder, step: Step, optimizer: torch.optim.Optimizer | None) -> None:
    for name, p in step.model.named_parameters():
        if not torch.nn.parameter.is_lazy(p):
            recorder.live.know(p, Category.PARAMETER, name)
    for name, b in step.model.named_buffers():
        if not torch.nn.parameter.is_lazy(b):
            recorder.live.know(b, Category.BUFFER, name)
    for i, t in enumerate(tensors_in((step.args, step.kwargs))):
        recorder.live.know(t, Category.INPUT, f"input {i}")
    if optimizer is not None:
        _know_optimizer(recorder, optimizer)
    replace_tensors(step, lambda t: _know_other(recorder, t))
    _name_gradients(recorder, step)


def _know_other(recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor:
    """Tensors that a module or a loss holds without registering them exist as well."""
    if not torch.nn.parameter.is_lazy(tensor):
        recorder.live.know(tensor, Category.BUFFER, "attribute")
    return tensor


def _know_optimizer(recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for t in tensors_in(state):
            recorder.live.know(t, Category.OPTIMIZER)
            for live in recorder.live.inside(t):
                storage = recorder.trace.storages[live.storage]
                if storage.category is Category.TEMPORARY:
                    storage.category = Category.OPTIMIZER


def _name_gradients(recorder: Recorder, step: Step) -> None:
    inputs = ((f"input {i}", t) for i, t in enumerate(tensors_in((step.args, step.kwargs))))
    for name, p in (*step.model.named_parameters(), *inputs):
        if p.is_leaf and p.grad is not None:
            for live in recorder.live.inside(p.grad):
                storage = recorder.trace.storages[live.storage]
                storage.category, storage.name = Category.GRADIENT, name


def describe(obj: Any) -> str:
    """Shapes and dtypes of nested arguments, readable.

    >>> import torch
    >>> describe(((torch.ones(2, 3),), {"mask": None}))
    '(float32[2, 3]), mask=None'
    """
    args, kwargs = obj
    parts = [f"({', '.join(_described(a) for a in args)})"] if args else []
    return ", ".join(parts + [f"{k}={_described(v)}" for k, v in kwargs.items()])


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape) if value.layout is torch.strided else ''}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_described(v) for v in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_described(v)}" for k, v in value.items()) + "}"
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__
