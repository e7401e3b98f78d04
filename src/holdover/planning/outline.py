"""What a model consists of, as plain data that a plan carries along, and how another model differs from it.

It has what `trace.fingerprint` looks at: modules with their classes, parameters with their shapes and whether they are
trained. Modules that stand in a row and are equal are written once, so that deep models stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from holdover.trace.fingerprint import fingerprint
from holdover.trace.frames import ROOT
from holdover.trace.graph import Op, Phase, Trace

if TYPE_CHECKING:
    from holdover.planning.plan import Plan

MOST = 3
"""Differences of one kind that are named; of the others the number is told."""

FROZEN = " frozen"

Outline = Mapping[str, Any]
"""A module: its "class", its "parameters" (name to shape), and its "modules" (a name, or "0-11", to such), if any."""


@dataclass
class _Parts:
    """All modules and parameters by their full names."""

    modules: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)


def outline_of(model: torch.nn.Module) -> dict[str, Any]:
    """What a model consists of.

    >>> outline_of(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU(), torch.nn.Linear(2, 3, bias=False)))
    {'class': 'Sequential', 'modules': {'0-1': {'class': 'ReLU'}, '2': {'class': 'Linear', 'parameters': \
{'weight': '3x2'}}}}
    """
    parts = _parts_of(model)
    root: dict[str, Any] = {}
    nodes = {"": root}
    for path, kind in parts.modules.items():
        node = nodes.setdefault(path, {})
        node["class"] = kind
        if path:
            parent, _, name = path.rpartition(".")
            nodes[parent].setdefault("modules", {})[name] = node
    for full, shape in parts.parameters.items():
        path, _, name = full.rpartition(".")
        if path in nodes:  # else of a module that has another name as well
            nodes[path].setdefault("parameters", {})[name] = shape
    _shorten(root)
    return root


def _parts_of(model: torch.nn.Module) -> _Parts:
    parts = _Parts({path: type(module).__qualname__ for path, module in model.named_modules()})
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape = () if torch.nn.parameter.is_lazy(parameter) else tuple(parameter.shape)
        parts.parameters[name] = "x".join(map(str, shape)) + ("" if parameter.requires_grad else FROZEN)
    return parts


def _shorten(node: dict[str, Any]) -> None:
    """Write equal modules whose names are numbers in a row once."""
    runs: list[list[Any]] = []  # first, last, what they are
    for name, child in node.get("modules", {}).items():
        _shorten(child)
        last = runs[-1] if runs else None
        if last is not None and _follows(name, last[1]) and child == last[2]:
            last[1] = name
        else:
            runs.append([name, name, child])
    if runs:
        node["modules"] = {first if first == last else f"{first}-{last}": child for first, last, child in runs}


def _follows(name: str, before: str) -> bool:
    return name.isdecimal() and before.isdecimal() and int(name) == int(before) + 1


def _written_out(outline: Outline) -> _Parts:
    """What `outline_of` was made from."""
    parts = _Parts()

    def walk(node: Mapping[str, Any], path: str) -> None:
        parts.modules[path] = str(node.get("class", ""))
        below = f"{path}." if path else ""
        for name, shape in node.get("parameters", {}).items():
            parts.parameters[below + name] = str(shape)
        for names, child in node.get("modules", {}).items():
            for name in _names(names):
                walk(child, below + name)

    walk(outline, "")
    return parts


def _names(names: str) -> Iterator[str]:
    first, dash, last = names.partition("-")
    if dash and first.isdecimal() and last.isdecimal():
        yield from map(str, range(int(first), int(last) + 1))
    else:
        yield names


def why_other(plan: Plan, model: torch.nn.Module) -> str:
    """How the model differs from the one that a plan was made for, and the ways out; nothing where it does not.

    Batch, length, device and the numbers in a model make no difference.
    """
    if fingerprint(model) == plan.fingerprint:
        return ""
    kind = type(model).__name__
    text = f"this plan was made for another model: a {plan.model}, and this is "
    text += f"a {kind}" if kind != plan.model else "one of that name that consists of something else"
    for path, module in model.named_modules():
        if path and type(module).__name__ == plan.model and fingerprint(module) == plan.fingerprint:
            return f"{text}. Its part {path!r} is what was planned: apply the plan to that, model.{path}"
    told = _differences(plan, model)
    return (
        f"{text}. {'; '.join(told)}. Ways out: plan again for this model; or build it as it was when it was planned "
        "(its batch, length, device and numbers may be others)"
    )


def _differences(plan: Plan, model: torch.nn.Module) -> list[str]:
    here = _parts_of(model)
    if not plan.outline:
        lacking = [path for path in sorted(_paths(plan)) if path not in here.modules]
        told = _told("{} that the plan names {} not here", "module", lacking)
        return told or ["It has all modules that the plan names, and others, or parameters of other shapes"]
    there = _written_out(plan.outline)
    told = [
        *_told("{} of the planned model {} not here", "module", _tops(there.modules, here.modules)),
        *_told("{} {} here only", "module", _tops(here.modules, there.modules)),
        *_changed("{} {} of another class", "module", there.modules, here.modules, lambda text: text),
        *_told("{} of the planned model {} not here", "parameter", _own(there, here)),
        *_told("{} {} here only", "parameter", _own(here, there)),
        *_changed("{} {} of another shape", "parameter", there.parameters, here.parameters, _shape),
        *_changed("{} {} trained in one only", "parameter", there.parameters, here.parameters, _trained),
    ]
    return told or ["All that they consist of has the same names, classes and shapes, but is shared in other ways"]


def _paths(plan: Plan) -> set[str]:
    """The modules that a plan says anything about."""
    calls = [c.call for c in plan.choices] + list(plan.quiet)
    called = {part.partition(":")[0] for call in calls for part in call.split("/")} - {ROOT}
    return (called | {m.path for m in plan.modules}) - {""}


def _tops(some: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Modules that the others lack, without those inside them."""
    lacking = [path for path in some if path not in others]
    return [f"{path} ({some[path]})" for path in lacking if path.rpartition(".")[0] in others]


def _own(some: _Parts, others: _Parts) -> list[str]:
    """Parameters that the others lack, although they have the module."""
    return [
        f"{name} ({shape})"
        for name, shape in some.parameters.items()
        if name not in others.parameters and name.rpartition(".")[0] in others.modules
    ]


def _changed(
    what: str, noun: str, there: Mapping[str, str], here: Mapping[str, str], of: Callable[[str], str]
) -> list[str]:
    both = [(name, of(there[name]), of(here[name])) for name in there if name in here]
    return _told(what, noun, [f"{name or 'the model itself'} (planned {a}, here {b})" for name, a, b in both if a != b])


def _shape(text: str) -> str:
    return text.removesuffix(FROZEN) or "a number"


def _trained(text: str) -> str:
    return "frozen" if text.endswith(FROZEN) else "trained"


def _told(what: str, noun: str, found: list[str]) -> list[str]:
    if not found:
        return []
    more = f" and {len(found) - MOST} more" if len(found) > MOST else ""
    many = len(found) > 1
    said = what.format(f"{len(found)} {noun}{'s' * many}", "are" if many else "is")
    return [f"{said}: {', '.join(found[:MOST])}{more}"]


def strange_places(trace: Trace, plan: Plan) -> list[str]:
    """Places of a plan where a recorded step has another op, or none: a result is kept there, whatever was planned."""
    there: dict[tuple[str, int], Op] = {
        (trace.calls[op.call].key, op.index): op for op in trace.ops if op.phase in (Phase.FORWARD, Phase.LOSS)
    }
    told = []
    for c in plan.choices:
        op = there.get((c.call, c.index))
        if op is None or op.name != c.op:
            found = "nothing" if op is None else op.name
            told.append(f"op {c.index} of {c.call} (planned {c.op}, here {found})")
    return told
