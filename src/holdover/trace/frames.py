"""Which module call is running: each module's `forward` announces itself to whoever counts ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Protocol

import torch

ROOT = "model"


class Counter(Protocol):
    """Who is told about module calls."""

    def enter(self, path: str, kind: str) -> None: ...
    def leave(self) -> None: ...


def frame_modules(model: torch.nn.Module, counter: Counter) -> None:
    """Make each call of a module of `model` tell `counter`. For isolated models: nothing takes it off again.

    The instance's `forward` is what is wrapped, so that a module's hooks run in its caller's frame and a direct call
    of `module.forward` is seen too. ScriptModules keep their own, and count as part of their caller.
    """
    for path, module in framed_modules(model):
        module.__dict__["forward"] = _framed(module.forward, path, type(module).__name__, counter)


def framed_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that get a frame, by name: all but ScriptModules and what torch.compile has taken over."""
    compiled: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or any(path.startswith(c) for c in compiled):
            continue
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            compiled.append(f"{path}." if path else "")
            if module._compiled_call_impl is not None:
                continue
        yield path, module


def _framed(forward: Callable[..., Any], path: str, kind: str, counter: Counter) -> Callable[..., Any]:
    def framed(*args: Any, **kwargs: Any) -> Any:
        counter.enter(path, kind)
        try:
            return forward(*args, **kwargs)
        finally:
            counter.leave()

    return framed


_FRAME = next(code for code in _framed.__code__.co_consts if isinstance(code, CodeType))


def is_frame(frame: FrameType) -> bool:
    """Whether a running frame is that of a framed module: its locals `path` and `kind` say of which."""
    return frame.f_code is _FRAME


def call_key(parent: str, path: str, occurrence: int) -> str:
    """The key of the `occurrence`-th call of module `path` within the call `parent`.

    >>> call_key("model", "act", 0), call_key("model", "act", 1), call_key("", "", 0)
    ('model/act', 'model/act:1', 'model')
    """
    own = path or ROOT
    key = f"{parent}/{own}" if parent else own
    return f"{key}:{occurrence}" if occurrence else key
