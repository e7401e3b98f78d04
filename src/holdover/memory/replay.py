"""What the CUDA caching allocator makes of a simulated step: memory allocated and reserved, phase by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdover.memory.allocator import CachingAllocator
from holdover.memory.allocator_config import AllocatorConfig
from holdover.memory.simulate import simulate
from holdover.memory.timeline import NOTHING, Choices
from holdover.trace.graph import Phase, Trace

BLAS_OPS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "_scaled_mm", "linear"})
"""Ops that run in cuBLAS, and with the first of which its workspace comes."""


@dataclass(frozen=True)
class PhaseMemory:
    """The most that was allocated and reserved in one phase of one step, in bytes."""

    step: int
    phase: Phase
    allocated_bytes: int
    reserved_bytes: int

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved beyond the most allocated: cached, or cut up so that nothing could use it."""
        return self.reserved_bytes - self.allocated_bytes


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A step as the allocator saw it.

    Attributes:
        allocated_bytes: the peak of `torch.cuda.max_memory_allocated()`: blocks in use, rounding and the workspace of
            cuBLAS included.
        reserved_bytes: the peak of `torch.cuda.max_memory_reserved()`.
        reserved_at_peak_bytes: reserved at the moment of most allocated.
        cublas_bytes: of it cuBLAS's workspaces, one for the forward thread and one for autograd's.
        retries: how often memory was found only by giving cached blocks back to the driver, which stalls the card.
        phases: in order of time.
        allocator: as the step left it.
    """

    allocated_bytes: int
    reserved_bytes: int
    reserved_at_peak_bytes: int
    cublas_bytes: int
    retries: int
    phases: tuple[PhaseMemory, ...]
    allocator: CachingAllocator = field(repr=False, compare=False)

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved beyond the most allocated."""
        return self.reserved_bytes - self.allocated_bytes


def replay(
    trace: Trace, choices: Choices = NOTHING, workspace: Mapping[int, int] | None = None, *,
    config: AllocatorConfig | None = None, memory_bytes: int | None = None, cublas_bytes: int = 0, record: bool = False,
) -> Replay:  # fmt: skip
    """Give every allocation of the simulated step to the allocator, in order, all on one stream.

    Args:
        choices, workspace: as for `simulate`.
        config: how the allocator is set; None: PyTorch's defaults.
        memory_bytes: what the card can give; None: as much as is asked for.
        cublas_bytes: cuBLAS's workspace per thread. It is allocated with the thread's first matrix product and stays:
            one for the thread of forward, one for autograd's, as each has a cuBLAS handle of its own (PyTorch's
            `CublasHandlePool.cpp`).
        record: also keep what the allocator did, for a snapshot.

    Raises:
        AllocatorOutOfMemoryError: the step does not fit `memory_bytes`.
    """
    allocator = CachingAllocator(config, memory_bytes=memory_bytes, record=record)
    player = _Player(trace, allocator, cublas_bytes)
    simulate(trace, choices, workspace, detail=False, observer=player.observe)
    player.end_kernel()
    return Replay(
        allocated_bytes=allocator.peak_allocated_bytes, reserved_bytes=allocator.peak_reserved_bytes,
        reserved_at_peak_bytes=player.reserved_at_peak, cublas_bytes=cublas_bytes * len(player.handles),
        retries=allocator.retries, allocator=allocator,
        phases=tuple(PhaseMemory(*key, *most) for key, most in player.phases.items()),
    )  # fmt: skip


class _Player:
    """Turns what the simulator tells into calls of the allocator."""

    def __init__(self, trace: Trace, allocator: CachingAllocator, cublas_bytes: int) -> None:
        self.trace, self.allocator, self.cublas_bytes = trace, allocator, cublas_bytes
        self.skipped = _not_on_the_card(trace)
        self.labels = _labels(trace) if allocator.history is not None else {}
        self.addresses: dict[int, int] = {}
        self.kernel: list[int] = []  # workspace of the kernel that runs
        self.handles: set[bool] = set()  # whether cuBLAS has its workspace in forward's (False) and autograd's thread
        self.phases: dict[tuple[int, Phase], list[int]] = {}
        self.most = [0, 0]  # of the phase that runs
        self.reserved_at_peak = 0
        self.op = ""

    def observe(self, holding: int, nbytes: int) -> None:
        if holding < 0 and nbytes == 0:
            self.on_op(~holding)
        elif holding < 0:
            self.end_kernel()
            self.kernel.append(self.take(nbytes, "workspace"))
        elif nbytes > 0:
            if holding not in self.skipped:
                self.addresses[holding] = self.take(nbytes, self.labels.get(holding, ""))
        elif nbytes < 0:
            self.end_kernel()
            address = self.addresses.pop(holding, None)
            if address is not None:
                self.allocator.free(address)

    def on_op(self, number: int) -> None:
        self.end_kernel()
        op = self.trace.ops[number]
        key = op.step, op.phase
        if key not in self.phases:
            held = [self.allocator.allocated_bytes, self.allocator.reserved_bytes]
            self.phases[key] = held if self.phases else list(self.most)  # what exists before the step is of its start
        self.most = self.phases[key]
        self.op = op.name
        if self.cublas_bytes and op.name.split(".")[1] in BLAS_OPS:
            thread = op.phase is Phase.BACKWARD
            if thread not in self.handles:
                self.handles.add(thread)
                self.take(self.cublas_bytes, "cuBLAS workspace")

    def end_kernel(self) -> None:
        """A kernel's workspace is there until its outputs are made: it goes with the next thing that is not an
        allocation."""
        while self.kernel:
            self.allocator.free(self.kernel.pop())

    def take(self, nbytes: int, label: str) -> int:
        peak = self.allocator.peak_allocated_bytes
        address = self.allocator.allocate(nbytes, label=label or self.op)
        if self.allocator.peak_allocated_bytes > peak:
            self.reserved_at_peak = self.allocator.reserved_bytes
        self.most[0] = max(self.most[0], self.allocator.allocated_bytes)
        self.most[1] = max(self.most[1], self.allocator.reserved_bytes)
        return address


def _not_on_the_card(trace: Trace) -> set[int]:
    """Storages in the host's memory: those on the CPU, where others are on a card (an optimizer's counters)."""
    if all(s.device == "cpu" for s in trace.storages):
        return set()
    return {s.id for s in trace.storages if s.device == "cpu"}


def _labels(trace: Trace) -> dict[int, str]:
    """What each storage is, for people: its name, or the op that made it and the module that this op belongs to."""
    labels = {s.id: s.name for s in trace.storages if s.name}
    for value in trace.values:
        if value.version == 0 and value.maker >= 0 and value.storage not in labels:
            op = trace.ops[value.maker]
            path = trace.calls[op.call].path
            labels[value.storage] = f"{op.name} in {path}" if path else op.name
    return labels
