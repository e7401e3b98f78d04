"""A replayed step as a memory snapshot of PyTorch: https://pytorch.org/memory_viz opens it.

The format is that of `torch.cuda.memory._snapshot()` (torch 2.13; `torch/cuda/_memory_viz.py` reads it).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdover.errors import HoldoverError
from holdover.memory.allocator_blocks import Block
from holdover.memory.replay import Replay

_POOL = (0, 0)  # the default pool


def snapshot_of(replay: Replay) -> dict[str, Any]:
    """The snapshot that the allocator would give after the step: its segments, and all that happened.

    Args:
        replay: of `replay(..., record=True)`; without the recording the timeline is empty.
    """
    allocator = replay.allocator
    return {
        "segments": [_segment(blocks) for blocks in allocator.segments()],
        "device_traces": [
            [
                {
                    "action": entry.action,
                    **({"device_free": 0} if entry.action == "oom" else {"addr": entry.address}),
                    "size": entry.nbytes,
                    "stream": entry.stream,
                    "time_us": moment,
                    "pool_id": _POOL,
                    "frames": _frames(entry.label),
                }
                for moment, entry in enumerate(allocator.history or ())
            ]
        ],
        "allocator_settings": {
            "max_split_size": -1 if allocator.config.max_split_bytes is None else allocator.config.max_split_bytes,
            "expandable_segments": allocator.config.expandable_segments,
            "garbage_collection_threshold": allocator.config.garbage_collection_threshold,
        },
    }


def _segment(blocks: Sequence[Block]) -> dict[str, Any]:
    used = sum(block.nbytes for block in blocks if block.used)
    return {
        "device": 0,
        "address": blocks[0].address,
        "total_size": sum(block.nbytes for block in blocks),
        "stream": blocks[0].stream,
        "segment_type": "small" if blocks[0].small else "large",
        "segment_pool_id": _POOL,
        "is_expandable": blocks[0].expandable,
        "allocated_size": used,
        "active_size": used,
        "requested_size": sum(block.requested_bytes for block in blocks if block.used),
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.nbytes,
                "requested_size": block.requested_bytes,
                "state": "active_allocated" if block.used else "inactive",
                "frames": _frames(block.label),
            }
            for block in blocks
        ],
    }


def _frames(label: str) -> list[dict[str, Any]]:
    """The label in the place of a stack: viewers show it with the block."""
    return [{"filename": "holdover", "line": 0, "name": label}] if label else []


def write_snapshot(replay: Replay, path: str | os.PathLike[str]) -> None:
    """Write the snapshot as `torch.cuda.memory._dump_snapshot` does: a pickle that memory_viz opens.

    Raises:
        HoldoverError: the file cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            pickle.dump(snapshot_of(replay), file)
        temporary.replace(target)
    except OSError as error:
        raise HoldoverError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
