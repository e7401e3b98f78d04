"""Random ops run again with the numbers they drew in forward, and leave every generator where forward left it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdover.recompute.rules import Op


class Draw:
    """The state of the generator that a random op was about to draw from.

    Where the op takes a generator as an argument, replay hands it a private one in this state. Else the default
    generator of the device is put into this state for the time of the op, and back.
    """

    __slots__ = ("argument", "device", "state")

    def __init__(self, argument: str, device: torch.device, state: torch.Tensor) -> None:
        self.argument, self.device, self.state = argument, device, state

    def private(self) -> torch.Generator:
        """A new generator in the recorded state."""
        generator = torch.Generator(self.device)
        generator.set_state(self.state)
        return generator


def before(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Draw:
    """What `op`, about to run on these arguments, will draw from.

    Raises:
        LookupError: the device's default generator cannot be read.
    """
    given = kwargs.get(op.generator)
    if given is None and op.generator in op.argument_names:
        position = op.argument_names.index(op.generator)
        given = args[position] if position < len(args) else None
    if given is not None:
        return Draw(op.generator, given.device, given.get_state())
    default = default_generator(_device(args, kwargs))
    return Draw(op.generator, default.device, default.get_state())  # the generator's device has an index


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that ops on `device` draw from unless told otherwise.

    Raises:
        LookupError: PyTorch does not hand out this device's generator.
    """
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    generators = getattr(torch.get_device_module(device), "default_generators", ())
    if not generators:
        raise LookupError(f"random op on {device.type}, whose generator cannot be read")
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return generators[index]  # type: ignore[no-any-return]


def _device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    for a in args:
        if isinstance(a, torch.Tensor):
            return a.device
    for a in kwargs.values():
        if isinstance(a, torch.Tensor):
            return a.device
    device = kwargs.get("device")
    return torch.device("cpu") if device is None else torch.device(device)
