"""How people name tensors of a step: a module, or an op of one, as `memory.life.name_of` writes it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping

from holdover.errors import HoldoverError
from holdover.memory.life import name_of, saved_values
from holdover.trace.graph import EXISTING, OUTSIDE, Phase, Trace

LOSS = "loss"
MOST, MOST_OPS = 5, 12


def find(trace: Trace, text: str) -> list[int]:
    """The values of the last step that a name stands for, in order of making.

    Args:
        text: "blocks.0.mlp" is all that autograd saves of what this module and those below it make; "blocks.0.mlp:2"
            is the result of one op, by its place; "blocks.0.mlp:gelu" are those of an op by its name; ":2" is of the
            model itself, "loss:0" of the loss. A second result of an op is "norm:0.1", one of the module's second
            call "drop:1:2". Names of parameters, buffers and inputs are known too.

    Raises:
        HoldoverError: there is no such thing; says what is near.

    >>> import torch
    >>> from holdover.trace.record import record
    >>> trace = record(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), (torch.ones(2, 4),))
    >>> [name_of(trace, v) for text in ("0", "1:gelu", "0.weight") for v in find(trace, text)]
    ['0:0', '1:0', '0.weight']
    """
    found = _found(trace, text)
    if not found:
        raise HoldoverError(_unknown(trace, text))
    return found


def _found(trace: Trace, text: str) -> list[int]:
    """The same, and nothing where there is no such thing."""
    made = _made(trace)
    if text in made:
        return [made[text]]
    existing = _existing(trace)
    if text in existing:
        return [_at_start(trace, existing[text])]
    module, colon, op = text.rpartition(":")
    if colon and not re.fullmatch(r"[\d.]+", op):
        found = [v for name, v in made.items() if _home(name) == module and _is_named(trace, v, op)]
        saved = set(saved_values(trace))
        if found:
            return [v for v in found if v in saved] or found
    return [v for v in saved_values(trace) if _is_below(trace, v, text)]


def _existing(trace: Trace) -> dict[str, int]:
    return {s.name: s.id for s in trace.storages if s.name and s.category in EXISTING}


def _made(trace: Trace) -> dict[str, int]:
    last = trace.last_step
    return {
        name_of(trace, v): v
        for op in trace.ops
        if op.step == last and op.phase in (Phase.FORWARD, Phase.LOSS) and op.index >= 0
        for v in op.outputs
    }


def _at_start(trace: Trace, storage: int) -> int:
    """What a storage holds when the last step begins."""
    last = trace.last_step
    before = [v for v in trace.values if v.storage == storage and (v.maker < 0 or trace.ops[v.maker].step < last)]
    return max(before, key=lambda v: v.version).id


def _home(name: str) -> str:
    """The module, with the number of its call, of a name."""
    return name.rpartition(":")[0]


def _is_named(trace: Trace, value: int, op: str) -> bool:
    name = trace.ops[trace.values[value].maker].name
    return op in (name, name.removeprefix("aten."), name.split(".")[1] if "." in name else name)


def _is_below(trace: Trace, value: int, path: str) -> bool:
    call = trace.calls[trace.ops[trace.values[value].maker].call]
    if call.key == OUTSIDE:
        return path == LOSS
    return path in ("", ".") or path in (call.path, call.key) or call.path.startswith(f"{path}.")


def _unknown(trace: Trace, text: str) -> str:
    paths = [c.path for c in trace.calls if c.path]
    made = _made(trace)
    module, colon, op = text.rpartition(":")
    if text in paths:
        return f"nothing that {text} makes is saved for backward, so there is nothing to drop there"
    if colon and (module in paths or module in ("", LOSS)):
        below = [p for p in dict.fromkeys(paths) if p.startswith(f"{module}." if module else "")]
        near = [name for name in (f"{path}:{op}" for path in below) if _found(trace, name)][:MOST]
        hint = f"; near it: {', '.join(near)}" if near else ""
        own = _ops(trace, made, [module])
        if own:
            return f"{module or 'the model itself'} has no op {op!r}; its ops: {', '.join(own)}{hint}"
        inner = _ops(trace, made, below)
        if inner:
            hint = hint or f", such as {', '.join(inner)}"
            return f"{module or 'the model itself'} makes nothing of its own, only the modules in it do{hint}"
    choices = dict.fromkeys([*paths, *made, *_existing(trace)])
    near = _near(trace, text, paths, choices)
    return f"there is no module or tensor {text!r} in this step" + (
        f"; near it: {', '.join(near)}" if near else f"; it begins with: {', '.join(list(choices)[:MOST])}"
    )


def _ops(trace: Trace, made: Mapping[str, int], modules: Collection[str]) -> list[str]:
    """The first names of what some modules make themselves, each with its op."""
    names = [name for name in made if _home(name) in modules]
    return [f"{name} ({trace.ops[trace.values[made[name]].maker].name})" for name in names[:MOST_OPS]]


def _near(trace: Trace, text: str, paths: Iterable[str], choices: Iterable[str]) -> list[str]:
    """Names like `text`: those that it is the end of, as what stands before is easily left out; else like spellings."""
    module, colon, op = text.partition(":")
    tails: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        tails.setdefault(path.rpartition(".")[2], []).append(path)
    made = _made(trace)
    groups = (
        [path + colon + op for path in dict.fromkeys(paths) if path.endswith(f".{module}")],
        [name for name in choices if name.endswith(f".{text}")],
        dict.fromkeys(f"{_home(name)}:{text}" for name, v in made.items() if _is_named(trace, v, text)),
        [path + colon + op for like in difflib.get_close_matches(module, tails, cutoff=0.6) for path in tails[like]],
        dict.fromkeys(f"{_home(name)}:{op}" for name, v in made.items() if op and _is_named(trace, v, op)),
        difflib.get_close_matches(text, choices, n=MOST, cutoff=0.4),
        [name for name in choices if text and text in name],
    )
    there = ([name for name in group if name != text and _found(trace, name)] for group in groups)
    return next((names[:MOST] for names in there if names), [])
