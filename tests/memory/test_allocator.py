"""The replayed caching allocator against sequences worked out by hand from PyTorch's rules, and against invariants."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.memory.allocator import AllocatorOutOfMemoryError, CachingAllocator
from holdover.memory.allocator_config import MIB, AllocatorConfig

KIB = 2**10


class Sequence:
    """Allocations by name: a number of MiB allocates, None frees."""

    def __init__(self, config: str = "", memory: float | None = None) -> None:
        memory_bytes = None if memory is None else int(memory * MIB)
        self.allocator = CachingAllocator(AllocatorConfig.parse(config), memory_bytes=memory_bytes, record=True)
        self.addresses: dict[str, int] = {}

    def take(self, stream: int = 0, **sizes: float | None) -> tuple[float, float]:
        """Act, then tell (allocated, reserved) in MiB."""
        for name, mib in sizes.items():
            if mib is None:
                self.allocator.free(self.addresses.pop(name))
            else:
                self.addresses[name] = self.allocator.allocate(int(mib * MIB), stream)
        return self.allocator.allocated_bytes / MIB, self.allocator.reserved_bytes / MIB

    def offset(self, name: str) -> float:
        """Where a block lies behind the first segment's start, in MiB."""
        first = min(entry.address for entry in self.allocator.history or () if entry.action == "segment_alloc")
        return (self.addresses[name] - first) / MIB


# -- sizes and segments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest that shares a small segment
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # from here on a segment of its own
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # a remainder of nearly 2 MiB is split off ...
        (11 * MIB, 12 * MIB, 12 * MIB),  # ... one of 1 MiB is not, and counts as allocated
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
    ],
)
def test_one_request(asked: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)
    assert allocator.requested_bytes == asked


def test_small_blocks_share_a_segment_until_it_is_full() -> None:
    s = Sequence()
    assert s.take(a=0.5, b=1.0, c=0.5) == (2, 2)
    assert s.take(d=0.25) == (2.25, 4)


def test_small_and_large_blocks_never_share() -> None:
    s = Sequence()
    assert s.take(a=1.5) == (1.5, 20)
    assert s.take(b=0.5) == (2, 22)
    assert s.take(b=None, c=1.25) == (2.75, 22)  # the free 2 MiB of the small pool are no use


def test_the_smallest_free_block_that_fits_is_taken_and_the_lowest_of_equals() -> None:
    s = Sequence()
    s.take(a=30, b=20, c=40, d=20)
    s.take(a=None, b=None, c=None, d=None)
    s.take(e=20)
    assert s.offset("e") == 30  # where b was, not d at 90
    s.take(f=20)
    assert s.offset("f") == 90
    s.take(g=25)
    assert s.offset("g") == 0


def test_free_neighbours_merge() -> None:
    s = Sequence()
    s.take(whole=40)
    s.take(whole=None, a=12, b=12, c=12)
    assert s.take(a=None, c=None) == (12, 40)
    assert s.take(d=16) == (28, 40)  # behind b: what c left and the end of the segment
    assert s.offset("d") == 24
    assert s.take(b=None, e=24) == (40, 40)  # a and b
    assert s.offset("e") == 0


def test_what_cannot_be_used_is_fragmentation() -> None:
    s = Sequence()
    s.take(whole=30)
    s.take(whole=None, a=12)
    assert s.take(b=20) == (32, 50)  # 18 MiB are free and of no use


def test_streams_do_not_share_blocks() -> None:
    s = Sequence()
    s.take(a=30)
    s.take(a=None)
    assert s.take(stream=1, b=30) == (30, 60)
    assert s.take(c=30) == (60, 60)


def test_empty_cache_gives_back_whole_segments_only() -> None:
    s = Sequence()
    s.take(a=30, b=40)
    s.take(a=None, b=None, c=12)  # c lies in a's segment
    s.allocator.empty_cache()
    assert s.take() == (12, 30)


def test_a_snapshot_that_a_card_gave() -> None:
    """`y = X @ W + b` as a user saw it in `torch.cuda.memory_snapshot()` (discuss.pytorch.org, topic 178671)."""
    allocator = CachingAllocator()
    for nbytes in (40000, 40, 4000):  # W, b, X
        allocator.allocate(nbytes)
    allocator.allocate(8_519_680)  # cuBLAS
    product = allocator.allocate(40)
    allocator.allocate(40)  # y
    allocator.free(product)
    found = [[(block.nbytes, block.used) for block in segment] for segment in allocator.segments()]
    assert found == [
        [(40448, True), (512, True), (4096, True), (512, False), (512, True), (2051072, False)],
        [(8519680, True), (12451840, False)],
    ]


# -- settings ---------------------------------------------------------------------------------------------------------


def test_sizes_are_rounded_to_divisions_of_a_power_of_two() -> None:
    allocator = CachingAllocator(AllocatorConfig.parse("roundup_power2_divisions:4"))
    assert allocator.rounded(1200 * KIB) == 1280 * KIB  # 1 MiB, 1.25, 1.5, 1.75, 2: PyTorch's own example
    assert allocator.rounded(1280 * KIB) == 1280 * KIB
    assert allocator.rounded(MIB) == MIB
    assert allocator.rounded(2048) == 2048
    assert allocator.rounded(2049) == 2560  # a quarter of 2 KiB is one block
    assert allocator.rounded(1900) == 2048  # not above 4 blocks: multiples of 512 only


def test_divisions_by_size_class() -> None:
    allocator = CachingAllocator(AllocatorConfig.parse("roundup_power2_divisions:[4:2,16:8,>:1]"))
    assert allocator.rounded(5 * MIB) == 6 * MIB  # class of 4 MiB, and of all smaller
    assert allocator.rounded(int(2.5 * MIB)) == 3 * MIB
    assert allocator.rounded(9 * MIB) == 9 * MIB  # the class of 8 MiB is not named
    assert allocator.rounded(17 * MIB) == 18 * MIB
    assert allocator.rounded(33 * MIB) == 33 * MIB


def test_blocks_of_the_split_limit_are_neither_split_nor_given_to_smaller_requests() -> None:
    s = Sequence("max_split_size_mb:64")
    s.take(a=100)
    assert s.take(a=None, b=30) == (30, 130)  # not cut from the 100
    assert s.take(c=90) == (130, 130)  # within 20 MiB of it: taken whole
    s.take(c=None)
    assert s.take(d=80) == (110, 210)  # 20 MiB less than the block: too much to waste


def test_large_segments_of_another_size() -> None:
    assert Sequence("large_segment_size_mb:40").take(a=2) == (2, 40)


def test_expandable_segments_grow_by_pages() -> None:
    s = Sequence("expandable_segments:True")
    assert s.take(a=50) == (50, 60)
    assert s.take(b=0.25) == (50.25, 62)
    assert s.take(c=20) == (70.25, 82)  # 10 are there, one more page is enough


def test_expandable_segments_do_not_fragment() -> None:
    s = Sequence("expandable_segments:True")
    s.take(a=30, b=30)
    assert s.take(a=None, b=None, c=60) == (60, 60)
    plain = Sequence()
    plain.take(a=30, b=30)
    assert plain.take(a=None, b=None, c=60) == (60, 120)


def test_expandable_segments_split_down_to_512_bytes() -> None:
    s = Sequence("expandable_segments:True")
    assert s.take(a=11.5) == (11.5, 20)
    assert s.take(b=8.5) == (20, 20)


def test_expandable_segments_give_back_whole_free_pages() -> None:
    s = Sequence("expandable_segments:True")
    s.take(a=25, b=60, c=5)
    s.take(b=None)  # free from 25 to 85: the pages from 40 to 80 go
    s.allocator.empty_cache()
    assert s.take() == (30, 60)
    assert s.take(d=50) == (80, 100)  # 25 to 75, in the hole; two pages are mapped again


# -- when memory runs out ---------------------------------------------------------------------------------------------


def test_cached_segments_are_given_back_before_giving_up() -> None:
    s = Sequence(memory=100)
    s.take(a=40, b=40)
    assert s.take(a=None, b=None) == (0, 80)
    assert s.take(c=70) == (70, 70)
    assert s.allocator.retries == 1


def test_oversize_blocks_are_given_back_first_and_only_as_many_as_needed() -> None:
    s = Sequence("max_split_size_mb:64", memory=200)
    s.take(a=70, b=80, c=30)
    s.take(a=None, b=None, c=None)
    assert s.take(d=120) == (120, 150)  # b, the largest, is not enough: a goes too, c stays
    assert s.allocator.retries == 0


def test_out_of_memory() -> None:
    s = Sequence(memory=100)
    s.take(a=60, b=30)
    with pytest.raises(AllocatorOutOfMemoryError) as error:
        s.take(c=20)
    assert str(error.value) == (
        "out of memory: 20.00 MiB were asked for; of 100.00 MiB, 90.00 MiB are allocated and 0 B reserved beside them. "
        "Plan with a lower budget, use a smaller batch, or try expandable_segments:True against fragmentation."
    )
    assert (s.allocator.history or [])[-1].action == "oom"
    assert s.take() == (90, 90)


def test_garbage_is_collected_from_the_oldest_above_the_threshold() -> None:
    s = Sequence("garbage_collection_threshold:0.5,per_process_memory_fraction:1.0", memory=200)
    s.take(old=60)
    s.take(old=None)
    s.take(young=50)  # cut from the 60
    s.take(young=None, x=70)
    assert s.take() == (70, 130)
    assert s.take(y=20) == (90, 130)  # cut from the 60 that is free: no new memory, no collection
    s.take(y=None)
    assert s.take(z=66) == (136, 136)  # above 100 and new memory is needed: the 60 is released
    assert s.allocator.retries == 0


# -- invariants -------------------------------------------------------------------------------------------------------

CONFIGS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:8",
    "expandable_segments:True,roundup_power2_divisions:4,large_segment_size_mb:24",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9",
]
STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "free", "free", "take", "empty"]), st.integers(0, 10**9), st.integers(0, 1)),
    max_size=60,
)


def size_of(number: int) -> int:
    """From 1 byte to 48 MiB, small ones and round ones as often as large."""
    kind, number = number % 3, number // 3
    return (number % (1536 * KIB) + 1, number % (48 * MIB) + 1, (number % 24 + 1) * 2 * MIB)[kind]


@given(STEPS, st.sampled_from(range(len(CONFIGS))), st.sampled_from([None, 256]))
@settings(max_examples=150, deadline=None)
def test_invariants(steps: list[tuple[str, int, int]], config: int, memory: int | None) -> None:
    limit = None if memory is None else memory * MIB
    allocator = CachingAllocator(AllocatorConfig.parse(CONFIGS[config]), memory_bytes=limit)
    live: dict[int, int] = {}
    for what, number, stream in steps:
        if what == "take":
            try:
                address = allocator.allocate(size_of(number), stream)
            except AllocatorOutOfMemoryError:
                continue
            live[address] = size_of(number)
        elif what == "free" and live:
            address = sorted(live)[number % len(live)]
            allocator.free(address)
            del live[address]
        elif what == "empty":
            allocator.empty_cache()
        check(allocator, live, limit)
    for address in live:
        allocator.free(address)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.requested_bytes, allocator.reserved_bytes) == (0, 0, 0)
    assert allocator.segments() == []


def check(allocator: CachingAllocator, live: dict[int, int], limit: int | None) -> None:
    """Blocks tile their segments, none overlaps another, each holds what it was asked for, and the sums are right."""
    blocks = [block for segment in allocator.segments() for block in segment]
    assert {b.address: b.requested_bytes for b in blocks if b.used} == live
    assert all(b.nbytes >= b.requested_bytes and b.nbytes % 512 == 0 for b in blocks)
    for before, after in itertools.pairwise(blocks):
        assert before.address + before.nbytes <= after.address
    for segment in allocator.segments():
        for before, after in itertools.pairwise(segment):
            if before.next is after:
                assert before.address + before.nbytes == after.address
                assert before.used or after.used  # free neighbours are merged
    assert allocator.allocated_bytes == sum(b.nbytes for b in blocks if b.used)
    assert allocator.reserved_bytes == sum(b.nbytes for b in blocks)
    assert allocator.requested_bytes == sum(live.values())
    assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes
    assert allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes
    assert limit is None or allocator.reserved_bytes <= limit
