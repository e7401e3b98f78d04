"""Which modules of a model are compiled, each by itself, and compiling them again by another backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdover.integrations._torch import compiled_call, is_optimized_module, set_compiled_call

Backend = Callable[..., Any]


def regions(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that `module.compile()` or `torch.compile(module)` took over, by name; the outermost of each.

    A model in which nothing is compiled is one region: the whole of it.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> list(regions(model))
    ['']
    >>> model[0].compile()
    >>> list(regions(model))
    ['0']
    """
    found: dict[str, torch.nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(not outer or path.startswith(f"{outer}.") for outer in found)
        if not inside and (is_optimized_module(module) or compiled_call(module) is not None):
            found[path] = module
    return found or {"": model}


def compile_regions(model: torch.nn.Module, backend: Backend) -> None:
    """Compile each region of the model, in place, by `backend`."""
    for module in regions(model).values():
        if is_optimized_module(module):
            again = torch.compile(module._orig_mod, backend=backend)  # type: ignore[arg-type]
            module.__dict__["dynamo_ctx"], module.__dict__["forward"] = again.dynamo_ctx, again.forward
        else:
            module.compile(backend=backend)


def release_regions(model: torch.nn.Module) -> None:
    """Let the regions that were compiled in place run in Python again."""
    for module in regions(model).values():
        if compiled_call(module) is not None:
            set_compiled_call(module, None)
