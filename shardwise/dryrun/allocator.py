"""A model of CUDA's caching allocator: the block of each allocation, and the reserved memory. Needs no torch.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp``:
  - A request is rounded up to 512 bytes (or to a division of a power of two, if so configured).
  - The small pool serves requests up to 1 MiB, the large pool the rest. Each stream has its own pools: memory
    freed on one stream never serves another.
  - The best fitting free block is used: the smallest, then the lowest address.
  - Without a fitting block, the allocator asks the driver for a segment: 2 MiB for the small pool, 20 MiB for
    requests below 10 MiB, else the request rounded up to 2 MiB.
  - The rest of a block is split off if it has at least 512 bytes (small pool) or more than 1 MiB (large pool).
    Blocks of ``max_split_size`` or more are not split, and serve only requests that nearly fill them.
  - A freed block merges with its free neighbours in the segment and stays reserved.
  - If the driver refuses: oversize blocks are released (only if ``max_split_size`` is set), then every
    completely free segment, on all streams. Then the allocation is out of memory.
  - Expandable segments: one range of addresses for each stream and pool, mapped in granules of 2 or 20 MiB at
    its end (or in a hole), so that free memory adjoins new memory.

A factor on the sum of tensors does not replace these rules: published ratios of reserved to allocated memory range
from 1.1 to 1.4, and the ratio of a model depends on the order of its allocations.

Not modelled: memory used on a second stream through ``record_stream`` (FSDP2 holds references instead, which the
tracker sees); private pools of CUDA graphs; ``garbage_collection_threshold``, which acts only if the process is given
a fraction of the device. The driver is assumed to serve any request that fits, at growing addresses.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shardwise.core.units import MiB
from shardwise.hardware.allocator_options import AllocatorOptions

# The names in CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc,
# kRoundLarge. PyTorch does not export them; tests compare with published reserved memory.
MIN_BLOCK = 512
SMALL_REQUEST = MiB
"""Largest request of the small pool."""
SMALL_SEGMENT = 2 * MiB
LARGE_SEGMENT = 20 * MiB
MIN_OWN_SEGMENT = 10 * MiB
"""Smallest request that gets a segment of its own size."""
SEGMENT_STEP = 2 * MiB

_RANGE = 2**46
"""Address range of an expandable segment without a known limit; the driver has 2**48."""


class OutOfMemoryError(Exception):
    """No block fits, and the driver refuses a segment even after all free segments were released."""

    def __init__(self, size: int, allocated: int, reserved: int) -> None:
        super().__init__(f"{size} bytes with {allocated} allocated and {reserved} reserved")
        self.size = size
        self.allocated = allocated
        self.reserved = reserved


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A part of a segment: allocated, free, or (expandable segments) not mapped."""

    pool: Pool
    address: int
    size: int
    free: bool = False
    mapped: bool = True
    previous: MemoryBlock | None = None
    next: MemoryBlock | None = None

    @property
    def whole(self) -> bool:
        """Whether the block fills its segment."""
        return self.previous is None and self.next is None


@dataclass(eq=False, slots=True)
class Pool:
    """Free blocks of one stream and kind, by (size, address); unmapped ranges by address."""

    small: bool
    blocks: list[tuple[int, int, MemoryBlock]] = field(default_factory=list)
    unmapped: list[tuple[int, MemoryBlock]] = field(default_factory=list)

    def put(self, block: MemoryBlock) -> None:
        block.free = True
        if block.mapped:
            insort(self.blocks, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def take(self, block: MemoryBlock) -> None:
        block.free = False
        if block.mapped:
            del self.blocks[bisect_left(self.blocks, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    @property
    def granule(self) -> int:
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT


class CachingAllocator:
    """The allocator of one device.

    Args:
        limit: bytes that the driver can give; None for no limit.

    Attributes:
        allocated: bytes of allocated blocks, as ``torch.cuda.memory_allocated`` counts them.
        reserved: bytes of all segments.
        retries: number of times that all free segments were released to the driver.
    """

    def __init__(self, options: AllocatorOptions | None = None, limit: int | None = None) -> None:
        self.options = options or AllocatorOptions()
        self.limit = math.inf if limit is None else limit
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.retries = 0
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._next_address = 0

    def allocate(self, size: int, stream: int = 0) -> MemoryBlock:
        """Allocate a block of at least ``size`` bytes.

        Raises:
            OutOfMemoryError: no block fits and the driver refuses a segment.
        """
        size = self.options.rounded(size)
        small = size <= SMALL_REQUEST
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = Pool(small)
        # The order of malloc in CUDACachingAllocator.cpp.
        block = self._best_fit(pool, size) or self._new(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._new(pool, size)
        if block is None:
            self._release_free()
            self.retries += 1
            block = self._new(pool, size)
        if block is None:
            raise OutOfMemoryError(size, self.allocated, self.reserved)
        if self._splits(block, size):
            self._cut(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Return a block to its pool."""
        self.allocated -= block.size
        self._merge(block)
        block.pool.put(block)

    def segments(self, allocated: Iterable[MemoryBlock]) -> Iterator[tuple[int, bool, MemoryBlock]]:
        """The stream, the pool (whether the small one) and the first block of every segment.

        Args:
            allocated: all allocated blocks.
        """
        streams = {id(pool): key for key, pool in self._pools.items()}
        free = (block for pool in self._pools.values() for _, _, block in pool.blocks)
        # The allocator keeps no list of segments: their first blocks are reached from any block.
        firsts = {id(first): first for first in map(_first_block, (*allocated, *free))}
        for first in sorted(firsts.values(), key=lambda block: block.address):
            yield *streams[id(first.pool)], first

    # -- finding ------------------------------------------------------------------------------------

    def _best_fit(self, pool: Pool, size: int) -> MemoryBlock | None:
        blocks = pool.blocks
        index = bisect_left(blocks, (size,))
        if index == len(blocks):
            return None
        if self.options.expandable_segments:
            # A block at the growing end counts with the size that it can grow to.
            while index + 1 < len(blocks) and _reach(blocks[index + 1][2]) < _reach(blocks[index][2]):
                index += 1
        block = blocks[index][2]
        unsplit = self.options.max_split_size
        # As get_free_block: unsplit blocks are for large requests that nearly fill them.
        if size < unsplit <= block.size or (size >= unsplit and block.size >= size + LARGE_SEGMENT):
            return None
        pool.take(block)
        return block

    def _splits(self, block: MemoryBlock, size: int) -> bool:
        # As should_split.
        left = block.size - size
        if block.pool.small or self.options.expandable_segments:
            return left >= MIN_BLOCK
        return size < self.options.max_split_size and left > SMALL_REQUEST

    # -- neighbours ---------------------------------------------------------------------------------

    def _cut(self, block: MemoryBlock, size: int) -> MemoryBlock:
        """Shorten ``block`` to ``size``; the rest becomes a free (or unmapped) block behind it."""
        rest = MemoryBlock(block.pool, block.address + size, block.size - size, mapped=block.mapped)
        # Insert ``rest`` into the doubly linked list of the segment's blocks.
        rest.previous, rest.next = block, block.next
        if rest.next is not None:
            rest.next.previous = rest
        block.next = rest
        block.size = size
        block.pool.put(rest)
        return rest

    def _merge(self, block: MemoryBlock) -> None:
        """Merge free neighbours of the same kind into ``block``, which is in no list."""
        before, after = block.previous, block.next
        if before is not None and before.free and before.mapped == block.mapped:
            block.pool.take(before)
            block.address = before.address
            block.size += before.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and after.free and after.mapped == block.mapped:
            block.pool.take(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.previous = block

    # -- the driver ---------------------------------------------------------------------------------

    def _new(self, pool: Pool, size: int) -> MemoryBlock | None:
        """A new block from the driver, in no list; None if the driver refuses."""
        if self.options.expandable_segments:
            return self._expanded(pool, size)
        segment = segment_size(size)
        if not self._reserve(segment):
            return None
        return MemoryBlock(pool, self._addresses(segment), segment)

    def _reserve(self, size: int) -> bool:
        if self.reserved + size > self.limit:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _addresses(self, size: int) -> int:
        address = self._next_address
        self._next_address += -(-size // LARGE_SEGMENT) * LARGE_SEGMENT
        return address

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release an unsplit block of this pool that is large enough, or several, largest first.

        Expandable segments have no such blocks.
        """
        if self.options.max_split_size == math.inf or self.options.expandable_segments:
            return False
        needed = max(size, int(self.options.max_split_size))
        # The free blocks are sorted by size: the first one that is large enough is released alone.
        index = bisect_left(pool.blocks, (needed,))
        if index < len(pool.blocks):
            self._release(pool.blocks[index][2])
            return True
        released = 0
        while released < needed and pool.blocks and pool.blocks[-1][0] >= self.options.max_split_size:
            released += pool.blocks[-1][0]
            self._release(pool.blocks[-1][2])
        return released >= needed

    def _release_free(self) -> None:
        """Release every completely free segment or mapped granule."""
        for pool in self._pools.values():
            for _, _, block in list(pool.blocks):
                if self.options.expandable_segments:
                    self._unmap(block)
                elif block.whole:
                    self._release(block)

    def _release(self, block: MemoryBlock) -> None:
        block.pool.take(block)
        self.reserved -= block.size

    # -- expandable segments ------------------------------------------------------------------------

    def _expanded(self, pool: Pool, size: int) -> MemoryBlock | None:
        """A free block with at least ``size`` mapped bytes, at the lowest address that has room."""
        block = self._room(pool, size)
        if not block.mapped:
            if not self._map(block, min(block.size, size)):
                return None
            self._merge(block)
            pool.put(block)
        # Map what follows, piece by piece: behind a hole there may be free memory that is mapped already.
        while block.size < size:
            after = block.next
            assert after is not None  # ``_room`` has found enough after this block
            if not self._map(after, min(size - block.size, after.size)):
                return None
            self._merge(after)
            pool.put(after)
            block = after
        pool.take(block)
        return block

    def _room(self, pool: Pool, size: int) -> MemoryBlock:
        for _, unmapped in pool.unmapped:
            before = unmapped.previous
            start = before if before is not None and before.free else unmapped
            if _free_extent(start, size) >= size:
                return start
        # As PyTorch: 9/8 of the device, so that pages unmapped early in the segment can come back at its end.
        length = _RANGE if self.limit == math.inf else int(self.limit) * 9 // 8
        length = -(-max(length, size) // pool.granule) * pool.granule
        block = MemoryBlock(pool, self._addresses(length), length, mapped=False)
        pool.put(block)
        return block

    def _map(self, block: MemoryBlock, size: int) -> bool:
        """Map the first granules of an unmapped block, and take it off its list."""
        mapped = -(-size // block.pool.granule) * block.pool.granule
        if not self._reserve(mapped):
            return False
        block.pool.take(block)
        if mapped < block.size:
            self._cut(block, mapped)
        block.mapped = True
        return True

    def _unmap(self, block: MemoryBlock) -> None:
        """Release the granules that a free block covers completely."""
        pool = block.pool
        granule = pool.granule
        # Only whole granules go back to the driver; the ends that share one with a neighbour stay mapped.
        start = -(-block.address // granule) * granule
        end = (block.address + block.size) // granule * granule
        if start >= end:
            return
        pool.take(block)
        if end < block.address + block.size:
            self._cut(block, end - block.address)
        if start > block.address:
            rest = self._cut(block, start - block.address)
            pool.put(block)
            pool.take(rest)
            block = rest
        self.reserved -= block.size
        block.mapped = False
        self._merge(block)
        pool.put(block)


def segment_size(size: int) -> int:
    """Bytes asked of the driver for a rounded request that no free block serves."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < MIN_OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_STEP) * SEGMENT_STEP


def _first_block(block: MemoryBlock) -> MemoryBlock:
    """The first block of the segment."""
    while block.previous is not None:
        block = block.previous
    return block


def _reach(block: MemoryBlock) -> int:
    """Size of the block and of the unmapped range after it."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _free_extent(start: MemoryBlock, size: int) -> int:
    """Free or unmapped bytes from ``start`` on, counted until they reach ``size``."""
    free_bytes = 0
    block: MemoryBlock | None = start
    while block is not None and block.free and free_bytes < size:
        free_bytes += block.size
        block = block.next
    return free_bytes
