"""What a step shows on a CUDA card: allocated and reserved by PyTorch, and taken by the process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdover.cost.devices import Card, all_cards, card
from holdover.errors import DeviceError
from holdover.memory.allocator import AllocatorOutOfMemoryError
from holdover.memory.allocator_config import AllocatorConfig
from holdover.memory.replay import PhaseMemory, Replay, replay
from holdover.memory.timeline import NOTHING, Choices
from holdover.memory.workspace import true_outputs
from holdover.trace.graph import Trace
from holdover.trace.record import Loss
from holdover.trace.record import record as record_step
from holdover.trace.step import OptimizerSpec
from holdover.trace.target import Target
from holdover.units import format_bytes

SETTINGS_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class Place:
    """Where a step is to run: a device of this machine, or a card that need not be here."""

    device: torch.device | None = None
    card: Card | None = None

    @property
    def target(self) -> Target | None:
        """The card as the recorder wants it."""
        if self.card is None:
            return None
        assert self.card.capability is not None
        return Target(self.card.name, self.card.capability)

    def record(
        self, model: torch.nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *,
        loss: Loss | None = None, optimizer: OptimizerSpec = None, precision: str | None = None,
    ) -> Trace:  # fmt: skip
        """The step as it runs there; arguments and errors are those of `trace.record.record`."""
        return record_step(
            model, args, kwargs, loss=loss, optimizer=optimizer, precision=precision, device=self.device,
            corrections=true_outputs, target=self.target,
        )  # fmt: skip


def place_of(device: str | None) -> Place:
    """What `device=` of the public functions stands for.

    Args:
        device: None, for the device of the tensors; "cpu"; or a card by its name in the table (`holdover devices`).

    Raises:
        DeviceError: an unknown name, or one of AMD's cards.

    >>> place_of("h100-80gb").target
    Target(name='h100-80gb', capability=(9, 0), cudnn=91900)
    """
    if device is None:
        return Place()
    if device == "cpu":
        return Place(torch.device("cpu"))
    names = ", ".join(name for name, known in all_cards().items() if known.capability is not None)
    if device.split(":")[0] == "cuda":
        raise DeviceError(
            f"device={device!r} says no card's size. Put the model and its inputs on the card and leave device= out, "
            f"or name a card, which need not be here: {names}."
        )
    if _is_torch_device(device):
        raise DeviceError(
            f"device={device!r} is none that steps can be recorded for: known are 'cpu', the CUDA devices of this "
            "machine (put the model and its inputs on one and leave device= out), and cards by name, which need not be "
            f"here (`holdover devices` lists them: {names}). Give device='cpu', whose tensors come nearest, or a card; "
            "--devices or HOLDOVER_DEVICES names a file with cards of your own."
        )
    try:
        found = card(device)
    except DeviceError as error:
        raise DeviceError(f"{error}; besides, 'cpu'") from None
    if found.capability is None:
        raise DeviceError(f"{found.title} is AMD's: what PyTorch does on it is not known here, only on CUDA cards")
    return Place(card=found)


def _is_torch_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class CardMemory:
    """A step's memory on a card.

    Attributes:
        card: its name.
        usable_bytes: what a process can have on it, the context included.
        allocated_bytes: `torch.cuda.max_memory_allocated()` after the step: tensors, rounded up by the allocator, and
            cuBLAS's workspace.
        reserved_bytes: `torch.cuda.max_memory_reserved()`.
        cublas_bytes: cuBLAS's workspace, of both.
        context_bytes: least and most that the context takes beside that; it varies.
        settings: of the allocator; "" for PyTorch's defaults.
        retries: how often the allocator has to give cached memory back to go on within `usable_bytes`; None if the step
            does not fit even so.
        phases: allocated and reserved in each phase.
    """

    card: str
    usable_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    cublas_bytes: int
    context_bytes: tuple[int, int]
    settings: str
    retries: int | None
    phases: tuple[PhaseMemory, ...]

    @property
    def process_bytes(self) -> tuple[int, int]:
        """What nvidia-smi shows for the process, least and most: reserved and the context."""
        low, high = self.context_bytes
        return self.reserved_bytes + low, self.reserved_bytes + high

    @property
    def fits(self) -> bool:
        """Whether the step runs on the card, with the largest context."""
        return self.retries is not None

    def remarks(self) -> list[str]:
        """What a reader should know about these figures."""
        low, high = map(format_bytes, self.context_bytes)
        said = [f"The context of CUDA is taken as {low} to {high}; it depends on versions and on the kernels used."]
        if self.retries is None:
            said.append(f"The step does not fit {self.card}, which has {format_bytes(self.usable_bytes)}.")
        elif self.retries:
            said.append(
                f"It fits only because cached memory is given back {self.retries} times on the way, which stalls the "
                "card each time; expandable_segments:True, or a plan, may help."
            )
        return said

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "card": self.card, "usable_bytes": self.usable_bytes, "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes, "cublas_bytes": self.cublas_bytes,
            "context_bytes": list(self.context_bytes), "process_bytes": list(self.process_bytes),
            "allocator_settings": self.settings, "fits": self.fits, "retries": self.retries,
            "phases": [
                {
                    "step": p.step, "phase": p.phase.value, "allocated_bytes": p.allocated_bytes,
                    "reserved_bytes": p.reserved_bytes, "fragmentation_bytes": p.fragmentation_bytes,
                }
                for p in self.phases
            ],
        }  # fmt: skip


def allocator_settings() -> str:
    """The allocator's settings that a program started from here would have: the first variable that is set."""
    return next((os.environ[name] for name in SETTINGS_VARIABLES if os.environ.get(name)), "")


def replay_on(
    trace: Trace, card: Card, choices: Choices = NOTHING, workspace: Mapping[int, int] | None = None, *,
    memory_bytes: int | None = None, record: bool = False,
) -> Replay:  # fmt: skip
    """The step through the allocator of a card; arguments and errors are those of `memory.replay.replay`."""
    config = AllocatorConfig.parse(allocator_settings())
    return replay(
        trace, choices, workspace, config=config, memory_bytes=memory_bytes, cublas_bytes=card.cublas_bytes,
        record=record,
    )  # fmt: skip


def card_memory(
    trace: Trace, card: Card, choices: Choices = NOTHING, workspace: Mapping[int, int] | None = None
) -> CardMemory:
    """What the step shows on a card, and whether it fits."""
    free = replay_on(trace, card, choices, workspace)
    room = card.usable_bytes - card.context_bytes[1]
    retries: int | None = 0
    if free.reserved_bytes > room:
        try:
            retries = replay_on(trace, card, choices, workspace, memory_bytes=room).retries
        except AllocatorOutOfMemoryError:
            retries = None
    return CardMemory(
        card=card.name, usable_bytes=card.usable_bytes, allocated_bytes=free.allocated_bytes,
        reserved_bytes=free.reserved_bytes, cublas_bytes=free.cublas_bytes, context_bytes=card.context_bytes,
        settings=allocator_settings(), retries=retries, phases=free.phases,
    )  # fmt: skip
