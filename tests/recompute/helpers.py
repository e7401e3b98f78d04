"""A script that drops everything, from a dry run that counts ops on a copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdover.recompute._torch import yielding_to_transforms
from holdover.recompute.apply import install
from holdover.recompute.inspect import inspect
from holdover.recompute.rules import describe
from holdover.trace.frames import call_key
from holdover.trace.ops import takes_a_place

Policy = Callable[[str, int, str], str]
"""(call key, index, op name) -> "recompute", "pack" or ""."""


def everything(key: str, index: int, name: str) -> str:
    return "recompute"


class Counting(TorchDispatchMode):
    """Counts ops by call, as the runtime does, with none of its code."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[list[Any]] = [["", 0, {}]]
        self.seen: dict[str, dict[int, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if takes_a_place(func) and torch._C._current_graph_task_id() == -1:
            frame = self.frames[-1]
            self.seen.setdefault(frame[0], {})[frame[1]] = str(func)
            frame[1] += 1
        return func(*args, **(kwargs or {}))

    def frame(self, model: torch.nn.Module) -> None:
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                module.__dict__["forward"] = self.framed(path, module.forward)

    def framed(self, path: str, forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            parent = self.frames[-1]
            n = parent[2].get(path, 0)
            parent[2][path] = n + 1
            self.frames.append([call_key(parent[0], path, n), 0, {}])
            try:
                return forward(*args, **kwargs)
            finally:
                self.frames.pop()

        return run


class IdentityHooks:
    """Autograd saves without a `detach` of its own under hooks, so ops are counted under hooks."""

    yields_to_transforms = True

    def same(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def count(model: torch.nn.Module, args: Any, kwargs: Any = None, loss: Any = None) -> dict[str, dict[int, str]]:
    """Call key -> index -> op name, of one forward (and loss) on copies."""
    model, args, kwargs = copy.deepcopy((model, args, kwargs or {}))
    counting = Counting()
    counting.frame(model)
    state = torch.get_rng_state()
    hooks = IdentityHooks()
    with counting, yielding_to_transforms(), torch.autograd.graph.saved_tensors_hooks(hooks.same, hooks.same):
        out = model(*args, **kwargs)
        if loss is not None:
            loss(out)
    torch.set_rng_state(state)
    return counting.seen


def script_of(seen: dict[str, dict[int, str]], policy: Policy = everything) -> dict[str, dict[int, tuple[str, str]]]:
    return {
        key: {i: (name, action) for i, name in ops.items() if replayable(name) and (action := policy(key, i, name))}
        for key, ops in seen.items()
    }


def replayable(name: str) -> bool:
    """Not a view, and nothing that the runtime refuses on sight."""
    namespace, packet, overload = name.split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return not views and not describe(func).obstacle


def script(model: torch.nn.Module, args: Any, kwargs: Any = None, policy: Policy = everything) -> Any:
    return script_of(count(model, args, kwargs), policy)


def tensors_of(obj: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(obj) if isinstance(t, torch.Tensor)]


def default_loss(out: Any) -> torch.Tensor:
    parts = [t for t in tensors_of(out) if t.requires_grad]
    return sum((t.abs() if t.is_complex() else t).square().sum() for t in parts)  # type: ignore[return-value]


def step(model: torch.nn.Module, args: Any, kwargs: Any = None, loss: Any = None) -> dict[str, Any]:
    """One forward and backward from a fixed seed, and all that can be compared afterwards."""
    kwargs = kwargs or {}
    torch.manual_seed(7)
    out = model(*args, **kwargs)
    (loss or default_loss)(out).backward()
    return {
        "out": [t.detach().clone() for t in tensors_of(out)],
        **results(model, args, kwargs),
    }


def results(model: torch.nn.Module, args: Any = (), kwargs: Any = None) -> dict[str, Any]:
    return {
        "grads": {n: p.grad for n, p in model.named_parameters()},
        "input grads": [t.grad for t in tensors_of((args, kwargs or {})) if t.is_leaf],
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "rng": torch.get_rng_state(),
    }


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    """NaNs and the sign of zero count too."""
    return t.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.is_sparse:
            a, b = a.coalesce().to_dense(), b.coalesce().to_dense()
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bytes_of(a), bytes_of(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert [k for k in a if not same(a[k], b[k])] == []


def assert_exact(make: Callable[[], Any], policy: Policy = everything, loss: Any = None) -> Any:
    """Plain and planned give the same step to the last bit. Returns what the plan did.

    `make` gives a fresh seeded (model, args) or (model, args, kwargs).
    """
    model, args, *rest = make()
    kwargs = rest[0] if rest else {}
    expected = step(model, args, kwargs, loss)
    model, args, *rest = make()
    kwargs = rest[0] if rest else {}
    install(model, script(model, args, kwargs, policy))
    assert_same(expected, step(model, args, kwargs, loss))
    return inspect(model)
