"""Simulated steps given to the allocator: against bytes worked out by hand, and PyTorch's own reader of snapshots."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from tests.memory.programs import Program, programs
from tests.memory.test_simulate import Step
from torch.cuda import _memory_viz

from holdover.errors import HoldoverError
from holdover.memory.allocator import AllocatorOutOfMemoryError
from holdover.memory.allocator_config import MIB, AllocatorConfig
from holdover.memory.replay import Replay, replay
from holdover.memory.simulate import simulate
from holdover.memory.snapshot import snapshot_of, write_snapshot
from holdover.memory.timeline import Choices
from holdover.trace.graph import Phase, Trace
from holdover.trace.record import record


def chain() -> Step:
    """A parameter of 30 MiB; a (12), b (40) and c (16) are made and saved; backward uses c, b, a and makes nothing."""
    step = Step()
    value, slots = step.exists(30 * MIB), []
    for size in (12, 40, 16):
        old, value = value, step.op(value, makes=size * MIB)
        slots.append(step.save(value))
        if len(slots) > 1:
            step.drop(old)
    step.drop(value)
    for slot in reversed(slots):
        step.use(slot)
    return step


def mebibytes(result: Replay) -> list[tuple[str, float, float]]:
    return [(p.phase.value, p.allocated_bytes / MIB, p.reserved_bytes / MIB) for p in result.phases]


def test_a_plain_step() -> None:
    result = replay(chain().trace)
    assert mebibytes(result) == [("forward", 98, 98), ("backward", 98, 98)]
    assert (result.allocated_bytes, result.reserved_bytes) == (98 * MIB, 98 * MIB)
    assert result.fragmentation_bytes == 0


def test_a_plan_that_drops_b_reserves_what_b_took_when_it_was_made() -> None:
    # Forward: 30 + 12 + 40, and c while b is still there. In backward c has gone before b is made again where it was.
    result = replay(chain().trace, Choices(frozenset({1})))
    assert mebibytes(result) == [("forward", 98, 98), ("backward", 82, 98)]


def test_reserved_stays_where_allocated_falls() -> None:
    step = Step()
    a = step.op(makes=40 * MIB)
    step.drop(a)
    step.op(makes=24 * MIB)  # cut from what a left
    step.op(makes=20 * MIB)  # the 16 MiB left over are no use
    result = replay(step.trace)
    assert (result.allocated_bytes, result.reserved_bytes) == (44 * MIB, 60 * MIB)
    assert result.fragmentation_bytes == 16 * MIB
    assert result.reserved_at_peak_bytes == 60 * MIB
    expandable = replay(step.trace, config=AllocatorConfig(expandable_segments=True))
    assert (expandable.allocated_bytes, expandable.reserved_bytes) == (44 * MIB, 60 * MIB)  # 44, in pages of 20


def test_a_kernels_workspace_lives_beside_its_outputs_and_then_goes() -> None:
    step = Step()
    a = step.op(makes=10 * MIB)
    b = step.op(a, makes=12 * MIB)
    step.op(b, makes=14 * MIB)
    result = replay(step.trace, workspace={1: 40 * MIB})
    assert result.allocated_bytes == (10 + 40 + 12) * MIB
    assert result.reserved_bytes == (10 + 40 + 12) * MIB  # the third output is cut from what the workspace left
    assert simulate(step.trace, workspace={1: 40 * MIB}).peak_bytes == result.allocated_bytes


def test_cublas_takes_its_workspace_once_in_forward_and_once_in_backward() -> None:
    step = chain()
    for op in step.trace.ops:
        op.name = "aten.addmm.default" if op.phase is Phase.FORWARD else "aten.mm.default"
    result = replay(step.trace, cublas_bytes=32 * MIB)
    assert mebibytes(result) == [("forward", 130, 130), ("backward", 162, 162)]
    assert result.cublas_bytes == 64 * MIB
    forward_only = replay(chain().trace, cublas_bytes=32 * MIB)
    assert forward_only.cublas_bytes == 0  # no matrix product, no workspace


def test_the_hosts_tensors_are_not_on_the_card() -> None:
    step = chain()
    for storage in step.trace.storages:
        storage.device = "cuda"
    step.trace.storages[2].device = "cpu"
    assert replay(step.trace).allocated_bytes == 58 * MIB


def test_a_step_too_large_for_the_card() -> None:
    with pytest.raises(AllocatorOutOfMemoryError, match=r"16.00 MiB were asked for; of 90.00 MiB, 82.00 MiB"):
        replay(chain().trace, memory_bytes=90 * MIB)
    assert replay(chain().trace, memory_bytes=98 * MIB).retries == 0


@given(programs)
@settings(max_examples=15, deadline=None)
def test_allocated_is_the_simulators_bytes_rounded_up(program: list[tuple[str, int, int]]) -> None:
    """With expandable segments nothing is left unsplit, so that each storage takes its bytes rounded up to 512."""
    trace = record(Program(program), (torch.ones(24, 64),))
    result = replay(trace, config=AllocatorConfig(expandable_segments=True))
    peak = simulate(trace).peak_bytes
    assert peak <= result.allocated_bytes <= simulate(rounded(trace)).peak_bytes
    assert result.allocated_bytes <= result.reserved_bytes


def rounded(trace: Trace) -> Trace:
    for storage in trace.storages:
        storage.nbytes = -(-storage.nbytes // 512) * 512
    return trace


# -- snapshots --------------------------------------------------------------------------------------------------------


def test_pytorchs_own_reader_opens_a_snapshot(tmp_path: Path) -> None:
    step = chain()
    step.trace.storages[0].name = "weight"
    result = replay(step.trace, record=True)
    path = tmp_path / "step.pickle"
    write_snapshot(result, path)
    snapshot = pickle.loads(path.read_bytes())
    summary = _memory_viz.segsum(snapshot)
    assert "total_reserved: 98.0MiB" in summary
    assert "total_allocated: 30.0MiB" in summary
    story = _memory_viz.trace(snapshot)
    assert [line.split("(")[0] for line in story.splitlines() if "cudaMalloc" in line] == [
        "a = cudaMalloc", "c = cudaMalloc", "e = cudaMalloc", "g = cudaMalloc"
    ]  # fmt: skip
    assert story.count("free completed") == 3
    for draw in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<!DOCTYPE html>" in draw(snapshot)
    assert "weight" in _memory_viz.segments(snapshot, format_flamegraph=str)
    kept = _memory_viz.filter_alloc_free_pairs(snapshot)["device_traces"][0]
    assert [e["size"] for e in kept if e["action"] == "alloc"] == [30 * MIB]


def test_a_snapshot_of_expandable_segments_and_of_running_out() -> None:
    result = replay(chain().trace, config=AllocatorConfig(expandable_segments=True), record=True)
    snapshot = snapshot_of(result)
    assert [s["is_expandable"] for s in snapshot["segments"]] == [True]
    assert {e["action"] for e in snapshot["device_traces"][0]} == {
        "segment_map", "alloc", "free_requested", "free_completed"
    }  # fmt: skip
    assert "total_reserved: 100.0MiB" in _memory_viz.segsum(snapshot)
    allocator = result.allocator
    allocator.memory_bytes = allocator.reserved_bytes
    with pytest.raises(AllocatorOutOfMemoryError):
        allocator.allocate(200 * MIB)
    assert "raise OutOfMemoryError # 200.0MiB requested" in _memory_viz.trace(snapshot_of(result))


def test_a_snapshot_says_what_each_block_is() -> None:
    trace = record(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()), (torch.ones(8, 64),))
    entries = snapshot_of(replay(trace, record=True, cublas_bytes=512))["device_traces"][0]
    names = {frame["name"] for entry in entries for frame in entry["frames"]}
    assert {
        "0.weight",
        "0.bias",
        "input 0",
        "aten.addmm.default in 0",
        "aten.relu.default in 1",
        "cuBLAS workspace",
    } <= names


def test_a_snapshot_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(HoldoverError, match=r"cannot write .*nowhere"):
        write_snapshot(replay(chain().trace), tmp_path / "nowhere" / "step.pickle")
