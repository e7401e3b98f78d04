"""Tensors without memory: stand-ins for parameters, inputs and whatever else a step touches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from holdover.trace._torch import FakeTensor, FakeTensorMode
from holdover.trace.known import KnownValues, few
from holdover.trace.tensors import PLAIN_TYPES


class Faker:
    """Turns tensors into fake ones; storages shared before are shared after, ties and views included.

    Tensors on `meta` (and fake ones of another mode) become fake tensors on `device`, since it is the step on a real
    device that the caller wants to know about. With `mode`, a mode for another device, all tensors move there but
    those in `stay`.
    """

    def __init__(self, device: torch.device, mode: FakeTensorMode | None = None) -> None:
        self.mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
        self.device, self.moves = device, mode is not None
        self.stay: set[int] = set()
        self.flat: dict[int, torch.Tensor] = {}  # what is to be a part of a fake tensor that exists already
        self.storages: dict[int, torch.Tensor] = {}
        self.alive: list[torch.Tensor] = []
        self.known = KnownValues()

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if torch.nn.parameter.is_lazy(tensor):
            return tensor
        if not (type(tensor) in PLAIN_TYPES or isinstance(tensor, FakeTensor)) or tensor.layout is not torch.strided:
            return self.mode.from_tensor(tensor)
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode:
            return tensor
        self.alive.append(tensor)
        moves = tensor.device.type == "meta" or (self.moves and id(tensor) not in self.stay)
        device = self.device if moves else tensor.device
        with self.mode, torch.no_grad():
            if id(tensor) in self.flat:
                fake = self.flat[id(tensor)]
            else:
                base = self.base(tensor, device)
                fake = torch.as_strided(base, tensor.size(), tensor.stride(), tensor.storage_offset())
            if tensor.is_conj():
                fake = torch._conj(fake)
            fake = fake.detach()
        if (has_integers(tensor) or id(tensor) in self.stay) and few(tensor):
            self.known.learn(fake, tensor)
        if isinstance(tensor, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            fake.requires_grad_()
        fake.__dict__.update({k: v for k, v in tensor.__dict__.items() if not k.startswith("_")})
        self.carry_hooks(tensor, fake)
        if tensor.is_leaf and tensor.grad is not None:
            fake.grad = self(tensor.grad)
        return fake

    def base(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """One fake tensor per storage, seen in the dtype asked for."""
        storage = tensor.untyped_storage()
        self.alive.append(storage)  # type: ignore[arg-type]
        found = self.storages.get(storage._cdata)
        if found is None:
            count = -(-storage.nbytes() // tensor.element_size())
            found = self.storages[storage._cdata] = torch.empty(count, dtype=tensor.dtype, device=device)
        return found if found.dtype == tensor.dtype else found.view(tensor.dtype)

    def flatten(self, parameters: list[torch.Tensor]) -> None:
        """Let these become parts of one fake tensor, as recurrent layers' weights are on a card."""
        with self.mode, torch.no_grad():
            buffer = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=self.device)
            offset = 0
            for p in parameters:
                self.flat[id(p)] = buffer.narrow(0, offset, p.numel()).view(p.shape)
                offset += p.numel()

    @staticmethod
    def carry_hooks(tensor: torch.Tensor, fake: torch.Tensor) -> None:
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks: dict[int, Callable[..., object]] | None = getattr(tensor, name, None)
            if hooks and tensor.is_leaf:
                setattr(fake, name, hooks)


def has_integers(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds real data that is no floating-point number."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and not tensor.dtype.is_floating_point
        and not tensor.dtype.is_complex
    )


@contextmanager
def unnoticed() -> Iterator[None]:
    """Let libraries that ask whether a tensor is fake believe that it is not.

    transformers takes other paths under fake tensors (masks are built that a real step does without), so the
    recording would not be of the step that the user runs.
    """
    library = sys.modules.get("transformers.utils.import_utils")
    asked = getattr(library, "is_fake_tensor", None)
    if library is None or asked is None:
        yield
        return
    library.is_fake_tensor = lambda _: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        library.is_fake_tensor = asked  # type: ignore[attr-defined]


def grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Any dtype, rows of the result padded to 16 bytes (cuda/GroupedBlas.cpp, and so on the CPU). PyTorch's fake kernel
    takes bfloat16 alone, so that experts in float32 or float16 could only be recorded with their data."""
    dtype = out_dtype or a.dtype
    shape: tuple[int, ...] = (a.size(-2), b.size(-1))
    if a.dim() == b.dim():
        groups = a.size(0) if a.dim() == 3 else offs.size(0)  # type: ignore[union-attr]
        shape = (groups, *shape)
    width = -(-shape[-1] * dtype.itemsize // 16) * 16 // dtype.itemsize
    strides = (shape[-2] * width, width, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device=a.device)


STAND_INS: dict[Any, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: grouped_mm}
"""What ops give back where PyTorch's own fake kernels refuse what the real ones take."""
