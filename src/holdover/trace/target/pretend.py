"""Fake tensors that pass for tensors on a CUDA card, in any build of PyTorch.

PyTorch's own fake tensors can say "cuda", but as soon as autograd asks their device for a stream a build without CUDA
aborts, and one without a card raises. Here the two halves of the question are told apart: the dispatcher finds CUDA's
keys (so CUDA's autocast lists, autograd kernels and defaults apply), Python reads `device="cuda:0"`, and C++ is told
"meta", for which there is nothing to set up. What C++ decides by asking for the device is then decided wrongly; those
decisions are few, and `composites.py` takes them instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from holdover.trace._torch import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    disable_current_modes,
    foreach_types,
)
from holdover.trace.target.card import Target

CARD = torch.device("cuda", 0)


class CardFakeMode(FakeTensorMode):
    """Fake tensors on the card. What C++ makes "like" one of them, it makes on meta: here that is the card again.

    Args:
        kernels: what ops give back that PyTorch has no fake kernel for, or a wrong one.
    """

    avoid_device_init = True  # as without a card, whatever torch.cuda.is_available() is made to say

    def __init__(self, kernels: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.kernels = kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = self.kernels.get(func)
        if kernel is not None:
            with self:
                return kernel(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, on_card(kwargs or {}))


class OnCard(TorchDispatchMode):
    """Stands above the recorder, so that the ops it sees name the card too."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **on_card(kwargs or {}))


def on_card(kwargs: dict[str, Any]) -> dict[str, Any]:
    device = kwargs.get("device")
    return {**kwargs, "device": CARD} if device is not None and torch.device(device).type == "meta" else kwargs


@contextmanager
def pretending(target: Target, faker: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let fake tensors on "cuda" work, and `torch.cuda` describe the card.

    PyTorch's own functions are exchanged meanwhile, so this is for a process of its own where one can be had.

    Args:
        faker: gives the fake tensor on the card for a real one.
    """
    make = torch.Tensor._make_subclass

    def make_subclass(cls: Any, data: torch.Tensor, requires_grad: bool = False, **kwargs: Any) -> Any:
        device = kwargs.get("device_for_backend_keys")
        if cls is FakeTensor and device is not None and device.type == "cuda":
            kwargs["dispatch_device"] = False
        return make(cls, data, requires_grad, **kwargs)

    def is_on(kind: str) -> property:
        return property(lambda tensor: tensor.device.type == kind)

    with ExitStack() as stack:
        stack.enter_context(replaced(torch.Tensor, "_make_subclass", staticmethod(make_subclass)))
        for name, kind in (("is_cuda", "cuda"), ("is_cpu", "cpu"), ("is_meta", "meta")):
            stack.enter_context(replaced(FakeTensor, name, is_on(kind)))
        stack.enter_context(replaced(FakeTensor, "get_device", lambda tensor: -1 if tensor.is_cpu else 0))
        for name, answer in answers(target).items():
            stack.enter_context(replaced(torch.cuda, name, answer))
        stack.enter_context(replaced(torch, "tensor", placed(torch.tensor, faker)))
        stack.enter_context(replaced(torch, "as_tensor", placed(torch.as_tensor, faker)))
        for types in foreach_types():
            stack.enter_context(appended(types, FakeTensor))
        yield


def answers(target: Target) -> dict[str, Callable[..., Any]]:
    """What `torch.cuda` says of the card to models that ask."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: target.capability,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or target.capability >= (8, 0),
    }


def placed(
    make: Callable[..., torch.Tensor], faker: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """`torch.tensor(data, device="cuda")`, which copies below the dispatcher, where no card would answer.

    No mode sees that copy on the card, so none may see one here.
    """

    def made(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "cuda" or isinstance(data, torch.Tensor):
            return make(data, *args, device=device, **kwargs).requires_grad_(requires_grad)
        with disable_current_modes():
            real = make(data, *args, **kwargs)
            fake = faker(real)
        return fake.requires_grad_(requires_grad)

    return made


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a class or module another attribute for a while; one that it inherits is inherited again afterwards."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def appended(items: list[Any], item: Any) -> Iterator[None]:
    items.append(item)
    try:
        yield
    finally:
        items.remove(item)
