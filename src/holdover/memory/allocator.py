"""PyTorch's CUDA caching allocator, acted out: which blocks a sequence of allocations gets, and what is reserved.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp`, class `DeviceCachingAllocator`; each method says which
function of it it follows. Left out: CUDA graphs and other private pools, and blocks used on a second stream, which
PyTorch frees late. Addresses are made up: a new segment lies above all earlier ones, as with a driver that hands out
memory from low to high. They decide between free blocks of equal size, nothing else.
"""

from __future__ import annotations

import bisect

from holdover.errors import DeviceError
from holdover.memory.allocator_blocks import Action, Block, Entry, Pool
from holdover.memory.allocator_config import MIB, AllocatorConfig
from holdover.units import format_bytes

MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
"""Requests up to here share segments of `SMALL_SEGMENT_BYTES`."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_REQUEST_BYTES = 10 * MIB
"""Requests from here on get a segment of their own, rounded up to `ROUND_LARGE_BYTES`."""
ROUND_LARGE_BYTES = 2 * MIB
_VIRTUAL_BYTES = 1 << 44  # address space of an expandable segment: more than any card has
_FIRST_ADDRESS = 1 << 45


class AllocatorOutOfMemoryError(DeviceError):
    """The replayed allocator ran out of memory, as `torch.cuda.OutOfMemoryError`."""


class CachingAllocator:
    """The allocator of one card.

    Args:
        config: its settings.
        memory_bytes: what the driver can give it; None: as much as is asked for.
        record: keep all that was done in `history`, with labels.

    Attributes:
        allocated_bytes, reserved_bytes: now, as `torch.cuda.memory_allocated()` and `memory_reserved()` count them: the
            whole of each block in use, and all segments.
        requested_bytes: now, what was asked for, not rounded.
        peak_allocated_bytes, peak_reserved_bytes: the most so far.
        retries: how often memory was found only after cached blocks had been given back to the driver.

    >>> allocator = CachingAllocator()
    >>> address = allocator.allocate(11 * 2**20 + 2**19)  # the remainder of 0.5 MiB is too small to be split off
    >>> allocator.allocated_bytes == allocator.reserved_bytes == 12 * 2**20
    True
    """

    def __init__(
        self, config: AllocatorConfig | None = None, *, memory_bytes: int | None = None, record: bool = False
    ) -> None:
        self.config = config or AllocatorConfig()
        self.memory_bytes = memory_bytes
        self.history: list[Entry] | None = [] if record else None
        self.allocated_bytes = self.reserved_bytes = self.requested_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = self.retries = 0
        self.used: dict[int, Block] = {}
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._searches = {True: 0, False: 0}
        self._next_address = _FIRST_ADDRESS
        self._heads: dict[int, Block] = {}  # first block of each segment, by the segment's address
        fraction = self.config.memory_fraction
        self._allowed = None if fraction is None or memory_bytes is None else int(fraction * memory_bytes)

    # -- what a program calls -------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: int = 0, label: str = "") -> int:
        """Take a block (`malloc`); returns its address.

        Raises:
            AllocatorOutOfMemoryError: the memory is used up, with cached blocks given back too.
        """
        size = self.rounded(nbytes)
        small = size <= SMALL_BYTES
        pool = self._pools.setdefault((small, stream), Pool())
        self._searches[small] += 1
        block = self._free_block(pool, size)
        if block is None:
            if self.config.garbage_collection_threshold and self._allowed is not None:
                self._collect()
            block = self._new_block(pool, size, small, stream)
        if block is None and self._release_oversize(pool, size):
            block = self._new_block(pool, size, small, stream)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._new_block(pool, size, small, stream)
        if block is None:
            self._note("oom", 0, nbytes, stream, label)
            raise self._out_of_memory(nbytes)
        if self._splits(block, size):
            rest = Block(
                block.address + size, block.nbytes - size, stream, small, block.segment, block.expandable,
                born=self._searches[small], prev=block, next=block.next,
            )  # fmt: skip
            if block.next is not None:
                block.next.prev = rest
            block.next, block.nbytes = rest, size
            pool.add(rest)
        block.used, block.requested_bytes, block.label = True, nbytes, label
        self.used[block.address] = block
        self.allocated_bytes += block.nbytes
        self.requested_bytes += nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self._note("alloc", block.address, nbytes, stream, label)
        return block.address

    def free(self, address: int) -> None:
        """Give a block back to its pool, merged with the free ones beside it (`free`, `free_block`)."""
        block = self.used.pop(address)
        self.allocated_bytes -= block.nbytes
        self.requested_bytes -= block.requested_bytes
        for action in ("free_requested", "free_completed"):
            self._note(action, address, block.requested_bytes, block.stream, block.label)
        block.used, block.requested_bytes, block.label = False, 0, ""
        pool = self._pool_of(block)
        self._merge(block, block.prev, pool)
        self._merge(block, block.next, pool)
        block.born = self._searches[block.small]
        pool.add(block)

    def empty_cache(self) -> None:
        """Give to the driver every segment with nothing in use, and every such page of an expandable one
        (`release_cached_blocks`)."""
        for pool in self._pools.values():
            for block in pool.blocks():
                if block.expandable:
                    self._unmap(block, pool)
                elif not block.split:
                    self._release(block, pool)

    def rounded(self, nbytes: int) -> int:
        """The size of the block that a request needs (`round_size`)."""
        divisions = self.config.divisions(nbytes)
        if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
            step = (1 << (nbytes.bit_length() - 1)) // divisions
            return -(-nbytes // step) * step
        return max(-(-nbytes // MIN_BLOCK_BYTES), 1) * MIN_BLOCK_BYTES

    def segments(self) -> list[list[Block]]:
        """The mapped blocks of each segment, in order of their addresses."""
        found = []
        for head in self._heads.values():
            blocks: list[Block] = []
            block: Block | None = head
            while block is not None:
                if block.mapped:
                    blocks.append(block)
                block = block.next
            if blocks:
                found.append(blocks)
        return sorted(found, key=lambda blocks: blocks[0].address)

    # -- blocks ---------------------------------------------------------------------------------------------------

    def _free_block(self, pool: Pool, size: int) -> Block | None:
        """The smallest free block that is large enough, the lowest of several (`get_free_block`)."""
        place = bisect.bisect_left(pool.free, ((size, 0),))
        if place == len(pool.free):
            return None
        block = pool.free[place][1]
        while block.expandable and place + 1 < len(pool.free):
            larger = pool.free[place + 1][1]
            if larger.can_grow_to >= block.can_grow_to:
                break
            block, place = larger, place + 1
        limit = self.config.max_split_bytes
        if limit is not None:
            if size < limit <= block.nbytes:
                return None
            if size >= limit and block.nbytes >= size + self.config.max_non_split_rounding_bytes:
                return None
        del pool.free[place]
        return block

    def _splits(self, block: Block, size: int) -> bool:
        """Whether what the request does not need becomes a block of its own (`should_split`)."""
        rest = block.nbytes - size
        if block.small or self.config.expandable_segments:
            return rest >= MIN_BLOCK_BYTES
        limit = self.config.max_split_bytes
        return rest > SMALL_BYTES and (limit is None or size < limit)

    def _new_block(self, pool: Pool, size: int, small: bool, stream: int) -> Block | None:
        """Memory from the driver, None if it has no more (`alloc_block`, `get_allocation_size`)."""
        if small:
            wanted = SMALL_SEGMENT_BYTES
        elif size < LARGE_REQUEST_BYTES:
            wanted = self.config.large_segment_bytes
        else:
            wanted = -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        if self._allowed is not None and self.reserved_bytes + wanted > self._allowed:
            return None
        if self.config.expandable_segments:
            return self._grown_block(pool, size, small, stream)
        if not self._reserve(wanted):
            return None
        block = Block(self._next_address, wanted, stream, small, self._next_address)
        self._heads[block.address] = block
        self._next_address += -(-wanted // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        self._note("segment_alloc", block.address, wanted, stream)
        return block

    def _reserve(self, nbytes: int) -> bool:
        if self.memory_bytes is not None and self.reserved_bytes + nbytes > self.memory_bytes:
            return False
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _merge(self, block: Block, other: Block | None, pool: Pool) -> None:
        """Take a free neighbour into a block (`try_merge_blocks`)."""
        if other is None or other.used or other.mapped is not block.mapped:
            return
        if other.mapped:
            pool.remove(other)
        else:
            pool.unmapped.remove(other)
        if other is block.prev:
            if self._heads.get(block.segment) is other:
                self._heads[block.segment] = block
            block.address, block.prev = other.address, other.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.prev = block
        block.nbytes += other.nbytes

    # -- giving back ----------------------------------------------------------------------------------------------

    def _release(self, block: Block, pool: Pool) -> None:
        """A whole segment goes back to the driver (`release_block`)."""
        pool.remove(block)
        self.reserved_bytes -= block.nbytes
        del self._heads[block.segment]
        self._note("segment_free", block.address, block.nbytes, block.stream)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Free as many of the blocks that are never split as the request needs (`release_available_cached_blocks`)."""
        limit = self.config.max_split_bytes
        if limit is None:
            return False
        wanted = max(size, limit)
        place = bisect.bisect_left(pool.free, ((wanted, 0),))
        if place < len(pool.free):
            if pool.free[place][1].expandable:
                return False
            self._release(pool.free[place][1], pool)
            return True
        released = 0
        for block in reversed(tuple(pool.blocks())):
            if released >= wanted or block.nbytes < limit:
                break
            if not block.expandable:
                released += block.nbytes
                self._release(block, pool)
        return released >= wanted

    def _collect(self) -> None:
        """Release cached blocks of more than average age, above the threshold (`garbage_collect_cached_blocks`)."""
        threshold = int(self.config.garbage_collection_threshold * (self._allowed or 0))
        excess = self.reserved_bytes - threshold
        pools = [pool for (small, _), pool in self._pools.items() if not small]
        now = self._searches[False]
        old = [(now - b.born, b, p) for p in pools for b in p.blocks() if not b.split and not b.expandable]
        while excess > 0 and old:
            age = sum(a for a, _, _ in old) / len(old)
            for a, block, pool in old:
                if a >= age:
                    excess -= block.nbytes
                    self._release(block, pool)
            old = [entry for entry in old if entry[0] < age]

    def _out_of_memory(self, nbytes: int) -> AllocatorOutOfMemoryError:
        total = self._allowed if self._allowed is not None else self.memory_bytes or 0
        cached = self.reserved_bytes - self.allocated_bytes
        more = "" if self.config.expandable_segments else ", or try expandable_segments:True against fragmentation"
        return AllocatorOutOfMemoryError(
            f"out of memory: {format_bytes(nbytes)} were asked for; of {format_bytes(total)}, "
            f"{format_bytes(self.allocated_bytes)} are allocated and {format_bytes(cached)} reserved beside them. "
            f"Plan with a lower budget, use a smaller batch{more}."
        )

    # -- expandable segments --------------------------------------------------------------------------------------

    def _page(self, small: bool) -> int:
        return SMALL_SEGMENT_BYTES if small else self.config.large_segment_bytes

    def _grown_block(self, pool: Pool, size: int, small: bool, stream: int) -> Block | None:
        """Free memory at the lowest place that can grow to the size (`try_allocate_expandable_block`)."""
        block = self._place_to_grow(pool, size, small, stream)
        if not block.mapped and not self._map(block, min(block.nbytes, size), pool):
            return None
        while block.nbytes < size:
            after = block.next
            assert after is not None
            if not self._map(after, min(size - block.nbytes, after.nbytes), pool):
                return None
            block = after
        pool.remove(block)
        return block

    def _place_to_grow(self, pool: Pool, size: int, small: bool, stream: int) -> Block:
        """Where free and unmapped blocks in a row have room, else a new segment (`find_expandable_block`)."""
        for unmapped in pool.unmapped:
            start = unmapped.prev if unmapped.prev is not None and not unmapped.prev.used else unmapped
            room, block = 0, start
            while room < size and block is not None and not block.used:
                room += block.nbytes
                block = block.next  # type: ignore[assignment]
            if room >= size:
                return start
        head = Block(
            self._next_address, _VIRTUAL_BYTES, stream, small, self._next_address, expandable=True, mapped=False
        )
        self._next_address += _VIRTUAL_BYTES
        self._heads[head.segment] = head
        bisect.insort(pool.unmapped, head, key=lambda b: b.address)
        return head

    def _map(self, block: Block, nbytes: int, pool: Pool) -> bool:
        """Back the start of an unmapped block with whole pages (`map_block`)."""
        page = self._page(block.small)
        mapped = min(-(-nbytes // page) * page, block.nbytes)
        if not self._reserve(mapped):
            return False
        pool.unmapped.remove(block)
        if mapped < block.nbytes:
            rest = Block(
                block.address + mapped, block.nbytes - mapped, block.stream, block.small, block.segment,
                expandable=True, mapped=False, prev=block, next=block.next,
            )  # fmt: skip
            if block.next is not None:
                block.next.prev = rest
            block.next, block.nbytes = rest, mapped
            bisect.insort(pool.unmapped, rest, key=lambda b: b.address)
        block.mapped = True
        self._note("segment_map", block.address, mapped, block.stream)
        self._merge(block, block.prev, pool)
        self._merge(block, block.next, pool)
        pool.add(block)
        return True

    def _unmap(self, block: Block, pool: Pool) -> None:
        """Give back the whole pages inside a free block (`unmap_block`)."""
        page = self._page(block.small)
        start = -(-(block.address - block.segment) // page) * page + block.segment
        end = (block.address + block.nbytes - block.segment) // page * page + block.segment
        if end <= start:
            return
        pool.remove(block)
        block = self._cut(block, start, pool) if start > block.address else block
        if end < block.address + block.nbytes:
            pool.add(self._cut_off(block, end))
        block.mapped = False
        self.reserved_bytes -= block.nbytes
        self._note("segment_unmap", block.address, block.nbytes, block.stream)
        self._merge(block, block.prev, pool)
        self._merge(block, block.next, pool)
        if block.split:
            bisect.insort(pool.unmapped, block, key=lambda b: b.address)
        else:
            del self._heads[block.segment]

    def _cut(self, block: Block, at: int, pool: Pool) -> Block:
        """Cut a block in two; the first part stays free, the second is returned."""
        second = self._cut_off(block, at)
        pool.add(block)
        return second

    def _cut_off(self, block: Block, at: int) -> Block:
        second = Block(
            at, block.address + block.nbytes - at, block.stream, block.small, block.segment, block.expandable,
            block.mapped, prev=block, next=block.next,
        )  # fmt: skip
        if block.next is not None:
            block.next.prev = second
        block.next, block.nbytes = second, at - block.address
        return second

    # -- the rest -------------------------------------------------------------------------------------------------

    def _pool_of(self, block: Block) -> Pool:
        return self._pools[block.small, block.stream]

    def _note(self, action: Action, address: int, nbytes: int, stream: int, label: str = "") -> None:
        if self.history is not None:
            self.history.append(Entry(action, address, nbytes, stream, label))
