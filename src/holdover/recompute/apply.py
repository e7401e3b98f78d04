"""Putting a script on a model, in place, and taking it off again."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from holdover.errors import ApplyError
from holdover.recompute._torch import breaks_graphs, functorch_transform, others_hooks, watching_module_calls
from holdover.recompute.mutation import forget_dead_pins
from holdover.recompute.recorder import RUNNING, Session
from holdover.recompute.script import Compiled, Script
from holdover.recompute.shapes import Guide
from holdover.trace.frames import ROOT, framed_modules
from holdover.trace.graph import OUTSIDE

MISSING = object()
FUNCTION_ATTRIBUTES = frozenset(
    {"__closure__", "__code__", "__defaults__", "__globals__", "__kwdefaults__", "__qualname__"}
)
REPLICATE = "_replicate_for_data_parallel"


class Installation:
    """One script on one model; shared by the frames of its modules. A copy of the model gets one of its own.

    Attributes:
        compiled: the script.
        plan_id: whose it is.
        guide: chooses among several scripts by the shapes of a call's arguments; None for `compiled` at any shape.
        last: the session of the model's last step, for `inspect`.
    """

    def __init__(self, compiled: Compiled, plan_id: str, guide: Guide | None = None) -> None:
        self.compiled, self.plan_id, self.guide = compiled, plan_id, guide
        self.last: Session | None = None

    def choose(self, args: Any, kwargs: Any) -> Compiled:
        """The script for one call of the model."""
        return self.compiled if self.guide is None else self.guide.choose(args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"compiled": self.compiled, "plan_id": self.plan_id, "guide": self.guide}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Installation:
        return Installation(self.compiled, self.plan_id, self.guide)


@breaks_graphs(reason="this model follows a holdover plan for eager mode: plan with compiled=True instead")
def refuse_compiler() -> None:
    """Called from compiled code, where a plan for eager mode would silently do nothing."""
    raise ApplyError(
        "torch.compile is compiling a model that follows a plan for eager mode, and compiled code would not follow it: "
        "take the plan off with holdover.remove_(model), plan with holdover.plan(..., compiled=True), and apply that "
        "plan instead of calling torch.compile"
    )


class Framed:
    """A module's `forward` that says which module it is. Lies in the instance's `__dict__`, so hooks stay outside.

    Args:
        module: the module; held weakly, so that the model still dies when its user lets go of it.
        path: its name in the model.
        installation: whose frame this is.
        inner: an instance `forward` that was there before, or MISSING.
    """

    def __init__(self, module: torch.nn.Module, path: str, installation: Installation, inner: Any) -> None:
        self._module = weakref.ref(module)
        self.path, self.installation = path, installation
        self.overridden = inner is not MISSING
        self.inner: Callable[..., Any] | None = inner if self.overridden else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled() and not torch.compiler.is_exporting():
                refuse_compiler()
            return self._forward()(*args, **kwargs)
        session = RUNNING.session
        if session is None:
            if self.path:
                return self._forward()(*args, **kwargs)
            return self._run_session(args, kwargs)
        if session.owner is not self.installation:
            if session.owner is not None or session.frame.key != OUTSIDE:
                return self._forward()(*args, **kwargs)  # a model in a model: the outer one's plan decides
            adopt(session, self)
            if not self.path and session.guide is not None:
                session.follow(session.guide.choose(args, kwargs))
        if not self.path:
            note_inputs(session, args, kwargs)
        return session.call(self.path, self._module(), self._forward(), args, kwargs)  # type: ignore[arg-type]

    def _run_session(self, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or functorch_transform() is not None:
            return self._forward()(*args, **kwargs)
        compiled = self.installation.choose(args, kwargs)
        if not compiled.scripts:
            return self._forward()(*args, **kwargs)
        session = Session(compiled, ROOT, self.installation)
        adopt(session, self)
        if others_hooks():
            session.stand_back()
            return self._forward()(*args, **kwargs)
        session.modules.append(self._module())  # type: ignore[arg-type]
        note_inputs(session, args, kwargs)
        try:
            session.enter()
            return self._forward()(*args, **kwargs)
        finally:
            session.leave()

    def _forward(self) -> Callable[..., Any]:
        """The user's `forward`, bound."""
        if self.inner is not None:
            return self.inner
        module = self._module()
        return type(module).forward.__get__(module)  # type: ignore[union-attr, no-any-return]

    def replicate(self) -> torch.nn.Module:
        """In place of the module's `_replicate_for_data_parallel`, whose replicas would run this module's forward."""
        module = self._module()
        replica: torch.nn.Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[union-attr,arg-type]
        del replica.__dict__[REPLICATE]
        inner = self.inner if self.overridden else MISSING
        replica.__dict__["forward"] = Framed(replica, self.path, self.installation, inner)
        return replica

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward())

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._forward()

    @property
    def __name__(self) -> str:
        return getattr(self._forward(), "__name__", "forward")

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self._forward().__doc__

    def __getattr__(self, name: str) -> Any:
        # What exporters and scripting read of a function. Not `__func__`: whoever finds it would leave this frame out.
        if name in FUNCTION_ATTRIBUTES:
            return getattr(self._forward(), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._module = weakref.ref(state["_module"])


def adopt(session: Session, frame: Framed) -> None:
    """From now on the frames of this frame's model count in the session."""
    session.owner = frame.installation
    frame.installation.last = session
    if not frame.path:
        session.ledger.model = frame._module


def note_inputs(session: Session, *arguments: Any) -> None:
    """Remember the storages of a call's tensor arguments."""
    todo = list(arguments)
    while todo:
        a = todo.pop()
        if isinstance(a, torch.Tensor):
            if a.layout is torch.strided:
                session.inputs.add(a.untyped_storage()._cdata)
        elif isinstance(a, dict):
            todo.extend(a.values())
        elif isinstance(a, (list, tuple)):
            todo.extend(a)


def attach(model: torch.nn.Module, installation: Installation) -> None:
    """Give every module a frame."""
    for path, module in list(framed_modules(model)):
        frame = Framed(module, path, installation, module.__dict__.get("forward", MISSING))
        module.__dict__["forward"] = frame
        module.__dict__[REPLICATE] = frame.replicate


def detach(model: torch.nn.Module, installation: Installation) -> None:
    """Take the frames of `installation` off again, from under those of a model around it too."""
    for module in model.modules():
        outer, frame = None, module.__dict__.get("forward")
        while isinstance(frame, Framed) and frame.installation is not installation:
            outer, frame = frame, frame.inner
        if not isinstance(frame, Framed):
            continue
        if outer is not None:
            outer.overridden, outer.inner = frame.overridden, frame.inner
        elif frame.overridden:
            module.__dict__["forward"] = frame.inner
        else:
            del module.__dict__["forward"]
        if not isinstance(module.__dict__.get("forward"), Framed):
            module.__dict__.pop(REPLICATE, None)


def installation_of(model: torch.nn.Module) -> Installation | None:
    """What is installed on the model itself (not on a model around it)."""
    frame = model.__dict__.get("forward")
    while isinstance(frame, Framed):
        if not frame.path:
            return frame.installation
        frame = frame.inner
    return None


def install(
    model: torch.nn.Module, script: Script, quiet: Iterable[str] = (), *, plan_id: str = "", guide: Guide | None = None
) -> None:
    """Make the model follow the script, in place.

    Only the instances' `forward` changes: parameter names, `state_dict`, classes and `repr` stay, and hooks run as
    before. Where gradients are off, and where a call or op is not in the script, the model runs as it always did.

    Args:
        model: the model that the script was made for.
        script: which ops are to be recomputed or packed, by call and position.
        quiet: calls with nothing planned in them or below them, in which nothing that was made outside is written to.
        plan_id: whose script this is.

    Raises:
        ApplyError: something is installed already, or the model has no `forward` in Python.
    """
    if (there := installation_of(model)) is not None:
        raise ApplyError(
            f"this {type(model).__name__} already follows a plan ({there.plan_id or 'without a name'}): "
            "remove it first with holdover.remove_(model)"
        )
    if isinstance(model, torch.jit.ScriptModule) or type(model).__name__ == "OptimizedModule":
        raise ApplyError(
            f"a plan goes on a model that runs in Python, and this is a {type(model).__name__}: "
            "apply it to the module inside, before compiling or scripting"
        )
    for path, module in model.named_modules():
        if module._compiled_call_impl is not None and any(_reaches(call, path) for call in script):
            raise ApplyError(
                f"{path or f'this {type(model).__name__}'} is compiled by torch.compile, where a plan for eager mode "
                "is not seen: plan with holdover.plan(..., compiled=True), or apply the plan to a model that runs in "
                "Python"
            )
    attach(model, Installation(Compiled(script, quiet), plan_id, guide))


def _reaches(call: str, path: str) -> bool:
    """Whether the call is of the module, or happens inside it."""
    return not path or any(part.split(":")[0] == path for part in call.split("/"))


def uninstall(model: torch.nn.Module) -> None:
    """Undo `install` wholly.

    Raises:
        ApplyError: nothing is installed.
    """
    installation = installation_of(model)
    if installation is None:
        raise ApplyError(f"this {type(model).__name__} follows no plan, so there is none to remove")
    detach(model, installation)
    for tensor in [*model.parameters(), *model.buffers()]:
        forget_dead_pins(tensor)


@contextmanager
def session(
    script: Script, quiet: Iterable[str] = (), *, model_class: str = "", guide: Guide | None = None
) -> Iterator[Session]:
    """Follow the script in a block of code, the loss included. Ops outside of the model have the call key "".

    A model that the script is installed on brings its frames. Else the first module called whose class is
    `model_class` (or, if that is "", that has parameters) is taken for the model, and framed until the block ends.

    Raises:
        ApplyError: this thread is in such a block already.
    """
    if RUNNING.session is not None:
        raise ApplyError("this code runs under a plan already: leave the outer block or model first")
    running = Session(Compiled(script, quiet), OUTSIDE, guide=guide)
    if others_hooks():
        running.stand_back()
    framed: list[tuple[torch.nn.Module, Installation]] = []

    def called(module: torch.nn.Module) -> None:
        if RUNNING.session is not running or running.owner is not None or running.frame.key != OUTSIDE:
            return
        if isinstance(module.__dict__.get("forward"), Framed) or isinstance(module, torch.jit.ScriptModule):
            return
        is_model = type(module).__name__ == model_class if model_class else any(True for _ in module.parameters())
        if is_model:
            installation = Installation(running.compiled, "")
            attach(module, installation)
            framed.append((module, installation))

    with watching_module_calls(called):
        try:
            running.enter()
            yield running
        finally:
            running.leave()
            for module, installation in framed:
                detach(module, installation)
