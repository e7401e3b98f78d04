"""Which modules of a model are compiled, each by itself, and compiling them again by another backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from holdover.integrations._torch import COMPILED_CALL, compiled_call, is_optimized_module, skipped_by_dynamo

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
        if not inside and is_compiled(module):
            found[path] = module
    return found or {"": model}


def is_compiled(module: torch.nn.Module) -> bool:
    return is_optimized_module(module) or compiled_call(module) is not None


@dataclass
class Former:
    """How a module was compiled before."""

    module: torch.nn.Module
    attributes: dict[str, Any]

    def restore(self) -> None:
        self.module.__dict__.update(self.attributes)


def compile_regions(model: torch.nn.Module, backend: Backend, names: Iterable[str]) -> list[Former]:
    """Compile each of these modules of the model, in place, by `backend`; returns what undoes it."""
    undo, chosen = [], list(names)
    # Each plan is another backend, and of those one piece of code takes eight before dynamo gives up on it, unless
    # told that they have nothing to do with each other. Equal blocks are to share what is compiled.
    apart: dict[str, Any] = {"backend": backend, "isolate_recompiles": len(chosen) == 1}
    for name in chosen:
        module = model.get_submodule(name)
        if is_optimized_module(module):
            again = torch.compile(module._orig_mod, **apart)  # type: ignore[arg-type]
            changed = {key: again.__dict__[key] for key in ("dynamo_ctx", "forward")}
            undo.append(Former(module, {key: module.__dict__[key] for key in changed}))
            module.__dict__.update(changed)
        else:
            undo.append(Former(module, {COMPILED_CALL: compiled_call(module)}))
            if skipped_by_dynamo(module):
                # `module.compile()` would compile nothing: dynamo starts in no frame of PyTorch's own files.
                module.__dict__[COMPILED_CALL] = functools.partial(torch.compile(_call, **apart), module)
            else:
                module.compile(**apart)
    return undo


def _call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)
