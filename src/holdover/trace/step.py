"""The parts of a training step that the caller may leave out or name by a string: loss, optimizer, precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from holdover.errors import TraceError

OptimizerSpec = str | torch.optim.Optimizer | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None
"""None, a name ("adamw"), a `params -> Optimizer` callable, or an Optimizer."""

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": torch.optim.Adafactor,
}

PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    # name: (dtype that the model is converted to, dtype of autocast)
    "32-true": (None, None),
    "bf16-mixed": (None, torch.bfloat16),
    "16-mixed": (None, torch.float16),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
}
"""Lightning's names for how numbers are held and computed."""


def tensors_in(obj: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested containers and dataclasses, in order."""
    if isinstance(obj, torch.Tensor):
        yield obj
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        for f in dataclasses.fields(obj):
            yield from tensors_in(getattr(obj, f.name, None))
    elif isinstance(obj, dict):
        for v in obj.values():
            yield from tensors_in(v)
    elif isinstance(obj, (list, tuple, set)):
        for v in obj:
            yield from tensors_in(v)
    elif hasattr(obj, "__dict__") and not isinstance(obj, (type, torch.nn.Module)) and not callable(obj):
        for v in vars(obj).values():
            yield from tensors_in(v)


def default_loss(output: Any) -> torch.Tensor:
    """The output itself if it is a scalar, its `.loss` (or `["loss"]`), else the sum of its floating tensors.

    Raises:
        TraceError: nothing in the output can be differentiated.

    >>> default_loss({"logits": torch.ones(2, 3, requires_grad=True)}).item()
    6.0
    """
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        return output
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss if loss.dim() == 0 else loss.sum()
    floating = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    if not floating:
        raise TraceError(
            f"The model returned {_returned(output)} without a floating tensor that requires a gradient, so there "
            "is no loss to differentiate. Pass loss=, a function of the output that gives a scalar tensor; on the "
            "command line it is the fourth value that the factory returns."
        )
    total = floating[0].sum()
    for t in floating[1:]:
        total = total + t.sum()
    return total


def _returned(output: Any) -> str:
    """What kind of output it is: a tensor that the step is recorded on may be of a class that nobody knows."""
    if isinstance(output, torch.Tensor):
        return f"a tensor of {str(output.dtype).removeprefix('torch.')}"
    return type(output).__name__


def checked_loss(loss: Callable[[Any], torch.Tensor] | None, output: Any) -> torch.Tensor:
    """The scalar to call backward on, or a TraceError that says what came instead."""
    value = (loss or default_loss)(output)
    if not isinstance(value, torch.Tensor):
        raise TraceError(f"The loss function returned {type(value).__name__}; a scalar tensor is needed.")
    if value.numel() != 1:
        raise TraceError(f"The loss has shape {tuple(value.shape)}; a scalar is needed (for example its .mean()).")
    if not value.requires_grad:
        raise TraceError(
            "The loss does not depend on anything that requires a gradient: all parameters are frozen, or the "
            "output was detached or made under no_grad. Nothing is kept for backward then."
        )
    return value


def make_optimizer(spec: OptimizerSpec, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    """Build what `spec` names for the parameters of `model` that require a gradient.

    Raises:
        TraceError: an unknown name, or a callable that returns something else.
    """
    if spec is None or isinstance(spec, torch.optim.Optimizer):
        return spec
    check_optimizer(spec)
    if not any(p.requires_grad for p in model.parameters()):
        raise TraceError(
            "No parameter of the model requires a gradient, so that an optimizer has nothing to train: all are frozen, "
            "or there are none. With optimizer=None (--optimizer none) forward and backward alone are looked at."
        )
    if isinstance(spec, str):
        name = spec.lower()
        kwargs: dict[str, Any] = {"lr": 1e-3} if name == "sgd" else {}
        return OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad], **kwargs)
    made = spec(p for p in model.parameters() if p.requires_grad)
    if not isinstance(made, torch.optim.Optimizer):
        raise TraceError(f"optimizer= returned {type(made).__name__}, not a torch.optim.Optimizer.")
    return made


def check_optimizer(spec: OptimizerSpec) -> None:
    if isinstance(spec, str) and spec.lower() not in OPTIMIZERS:
        raise TraceError(
            f"Unknown optimizer {spec!r}. Known names: {', '.join(sorted(OPTIMIZERS))}; None, or none on the "
            "command line, is forward and backward alone. Any other is given in Python, as an "
            "Optimizer or as a function that makes one of the parameters."
        )


def check_precision(precision: str | None) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise TraceError(f"Unknown precision {precision!r}. Known: {', '.join(PRECISIONS)}.")


def autocast_for(precision: str | None, device_type: str) -> AbstractContextManager[Any]:
    """The autocast context that `precision` asks for."""
    dtype = PRECISIONS[precision][1] if precision else None
    return torch.autocast(device_type, dtype=dtype) if dtype is not None else nullcontext()


def model_dtype(precision: str | None) -> torch.dtype | None:
    """The dtype that `precision` converts parameters and floating inputs to, if any."""
    return PRECISIONS[precision][0] if precision else None
