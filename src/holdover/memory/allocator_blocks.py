"""What the replayed allocator is made of: blocks of segments, pools of free ones, and entries of its history."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Action = Literal["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
                 "segment_unmap", "oom"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing the allocator did, by the names of PyTorch's memory snapshots."""

    action: Action
    address: int
    nbytes: int
    stream: int
    label: str = ""


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of a segment: in use, free, or (in an expandable segment) not backed by memory yet."""

    address: int
    nbytes: int
    stream: int
    small: bool
    segment: int
    expandable: bool = False
    mapped: bool = True
    used: bool = False
    requested_bytes: int = 0
    label: str = ""
    born: int = 0  # how many searches of its kind had been made when it became free
    prev: Block | None = None
    next: Block | None = None

    @property
    def split(self) -> bool:
        return self.prev is not None or self.next is not None

    @property
    def key(self) -> tuple[int, int]:
        return self.nbytes, self.address

    @property
    def can_grow_to(self) -> int:
        """Its size with the part of an expandable segment behind it that is not backed by memory."""
        after = self.next
        return self.nbytes + (after.nbytes if after is not None and not after.mapped else 0)


@dataclass(slots=True)
class Pool:
    """Free blocks of one kind and stream, by size and address, and the unmapped parts of expandable segments."""

    free: list[tuple[tuple[int, int], Block]] = field(default_factory=list)
    unmapped: list[Block] = field(default_factory=list)

    def add(self, block: Block) -> None:
        bisect.insort(self.free, (block.key, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect.bisect_left(self.free, (block.key,))]

    def blocks(self) -> Iterator[Block]:
        return (block for _, block in tuple(self.free))
