"""The replayed caching allocator: every rule of the original by hand, then whole steps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shardwise.core.errors import RecipeError
from shardwise.core.units import MiB
from shardwise.dryrun.allocator import CachingAllocator, MemoryBlock, OutOfMemoryError, segment_size
from shardwise.hardware.allocator_options import AllocatorOptions, options_from, options_in

EXPANDABLE = AllocatorOptions(expandable_segments=True)


def sizes(allocator: CachingAllocator, stream: int = 0, small: bool = False) -> list[int]:
    """Free blocks of one pool, smallest first."""
    return [size for size, _, _ in allocator._pools[stream, small].blocks]


# -- rounding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "given"), [(1, 512), (512, 512), (513, 1024), (1_000_000, 1_000_448)])
def test_requests_are_rounded_to_512_bytes(asked: int, given: int) -> None:
    """1,000,000 / 512 = 1,953.125, so 1,954 * 512 = 1,000,448."""
    assert AllocatorOptions().rounded(asked) == given


@pytest.mark.parametrize(
    ("asked", "given"), [(1200, 1280), (1024, 1024), (1025, 1280), (1900, 2048), (700, 768)]
)
def test_or_to_a_division_of_the_power_of_two(asked: int, given: int) -> None:
    """PyTorch's own example, in MiB: 1200 is between 1024 and 2048; a quarter of 1024 is 256; it becomes 1280.

    700 is above 512, and a quarter of 512 is 128, so it becomes 768. With a setting of 1 for 512 it stays 700. Up to
    512 bytes times the divisions, multiples of 512 bytes are kept.
    """
    by_size = options_from("roundup_power2_divisions:[512:1,1024:4,>:4]")
    assert by_size.rounded(asked * MiB) == (700 * MiB if asked == 700 else given * MiB)
    everywhere = options_from("roundup_power2_divisions:4")
    assert everywhere.rounded(asked * MiB) == given * MiB
    assert everywhere.rounded(4 * 512 - 3) == 4 * 512


# -- segments and pools -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "segment"),
    [
        (512, 2 * MiB),
        (MiB, 2 * MiB),
        (MiB + 512, 20 * MiB),
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB),
        (10 * MiB + 512, 12 * MiB),
        (100 * MiB, 100 * MiB),
    ],
)
def test_what_the_driver_is_asked_for(request_: int, segment: int) -> None:
    """Up to 1 MiB: 2 MiB. Below 10 MiB: 20 MiB. From there on: the next multiple of 2 MiB."""
    assert segment_size(request_) == segment
    allocator = CachingAllocator()
    allocator.allocate(request_)
    assert allocator.reserved == segment


def test_small_and_large_requests_never_share_a_segment() -> None:
    """5 MiB leave 15 MiB free in a segment of 20; 1 MiB is small all the same: 20 + 2 MiB are reserved."""
    allocator = CachingAllocator()
    allocator.allocate(5 * MiB)
    allocator.allocate(MiB)
    assert allocator.reserved == 22 * MiB


def test_streams_never_share_a_segment() -> None:
    """What stream 0 has freed does not serve stream 1: 32 + 32 MiB for two tensors that never live together."""
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(32 * MiB, stream=0))
    allocator.free(allocator.allocate(32 * MiB, stream=1))
    assert allocator.reserved == 64 * MiB and allocator.allocated == 0
    allocator.allocate(32 * MiB, stream=1)
    assert allocator.reserved == 64 * MiB


# -- splitting, fitting, merging ----------------------------------------------------------------------------


def test_the_rest_of_a_block_is_split_off_above_1_mib() -> None:
    """Of a segment of 12 MiB: 11 MiB leave exactly 1 MiB, which stays with the block; 11 MiB - 512 leave more."""
    allocator = CachingAllocator()
    assert allocator.allocate(11 * MiB).size == 12 * MiB
    assert allocator.allocate(11 * MiB - 512).size == 11 * MiB - 512
    assert sizes(allocator) == [MiB + 512]
    assert allocator.allocated == 23 * MiB - 512


def test_the_small_pool_splits_off_any_512_bytes() -> None:
    """2 MiB - 512 is no small request, but 512 KiB, 512 KiB and 1 MiB - 512 leave 512 bytes of 2 MiB."""
    allocator = CachingAllocator()
    for size in (MiB // 2, MiB // 2, MiB - 512):
        allocator.allocate(size)
    assert sizes(allocator, small=True) == [512] and allocator.reserved == 2 * MiB


def test_the_smallest_block_that_fits_is_taken_and_of_equals_the_lowest() -> None:
    """Free are 40, 30 and 30 MiB, apart: 25 MiB takes the first of the two of 30 and leaves 5 of it."""
    allocator = CachingAllocator()
    forty, thirty, again = (allocator.allocate(size * MiB) for size in (40, 30, 30))
    for block in (again, forty, thirty):
        allocator.free(block)
    assert allocator.allocate(25 * MiB).address == thirty.address
    assert sizes(allocator) == [5 * MiB, 30 * MiB, 40 * MiB]
    assert allocator.allocate(30 * MiB) is again


def quarters(allocator: CachingAllocator) -> list[MemoryBlock]:
    """Four blocks of 5 MiB that fill one segment of 20."""
    return [allocator.allocate(5 * MiB) for _ in range(4)]


def test_free_neighbours_merge() -> None:
    """Of four blocks of 5 MiB in one segment: freeing the 1st and 3rd leaves 5 and 5; the 2nd joins all to 15."""
    allocator = CachingAllocator()
    first, second, third, _ = quarters(allocator)
    assert allocator.reserved == 20 * MiB
    allocator.free(first)
    allocator.free(third)
    assert sizes(allocator) == [5 * MiB, 5 * MiB]
    allocator.free(second)
    assert sizes(allocator) == [15 * MiB]


def test_blocks_of_different_segments_never_merge() -> None:
    """Two free segments of 30 MiB do not serve 60 MiB: 120 are reserved."""
    allocator = CachingAllocator()
    for block in [allocator.allocate(30 * MiB), allocator.allocate(30 * MiB)]:
        allocator.free(block)
    allocator.allocate(60 * MiB)
    assert allocator.reserved == 120 * MiB


def test_oversize_blocks_serve_only_what_nearly_fills_them() -> None:
    """With max_split_size of 100 MiB, a free block of 200 MiB serves neither 50 MiB nor 180, but 181.

    50 is below the limit, which the block is not. 180 + 20 is not more than 200, 181 + 20 is; and the block stays
    whole, with 19 MiB lost.
    """
    allocator = CachingAllocator(options_from("max_split_size_mb:100"))
    allocator.free(allocator.allocate(200 * MiB))
    allocator.allocate(50 * MiB)
    assert allocator.reserved == 250 * MiB
    allocator.allocate(180 * MiB)
    assert allocator.reserved == 430 * MiB
    assert allocator.allocate(181 * MiB).size == 200 * MiB
    assert allocator.reserved == 430 * MiB


# -- when the driver refuses --------------------------------------------------------------------------------


def test_free_segments_go_back_to_the_driver_before_it_is_out_of_memory() -> None:
    """Limit 100 MiB. 60 are freed and cached; 80 do not fit with them: they are released, and 80 are reserved."""
    allocator = CachingAllocator(limit=100 * MiB)
    allocator.free(allocator.allocate(60 * MiB))
    allocator.allocate(80 * MiB)
    assert allocator.reserved == 80 * MiB and allocator.retries == 1
    assert allocator.peak_reserved == 80 * MiB


def test_also_those_of_other_streams() -> None:
    allocator = CachingAllocator(limit=100 * MiB)
    allocator.free(allocator.allocate(60 * MiB, stream=1))
    allocator.allocate(80 * MiB, stream=0)
    assert allocator.reserved == 80 * MiB


def pinned(allocator: CachingAllocator) -> None:
    """Five times 4 + 16 MiB, each pair one segment of 20 where segments have a size; then the 16s are freed."""
    blocks = [allocator.allocate(size * MiB) for _ in range(5) for size in (4, 16)]
    for block in blocks[1::2]:
        allocator.free(block)


def test_out_of_memory_by_fragmentation_though_the_sum_fits() -> None:
    """Limit 100 MiB, 5 * 4 = 20 in use: 20 more are 40, yet they find no room.

    80 MiB are free, in five pieces of 16; every segment holds 4 MiB, so none can go back to the driver.
    """
    allocator = CachingAllocator(limit=100 * MiB)
    pinned(allocator)
    with pytest.raises(OutOfMemoryError) as raised:
        allocator.allocate(20 * MiB)
    found = (raised.value.size, raised.value.allocated, raised.value.reserved)
    assert found == (20 * MiB, 20 * MiB, 100 * MiB)


def test_expandable_segments_do_not_find_that_room_either_where_pieces_are_pinned() -> None:
    """The same addresses side by side: 16 free, 4 used, five times. The last 16 end the range, which may grow.

    16 + 4 MiB at the end are 20, but the granule would be 120 of 100; and no free piece of 16 holds a whole
    granule of 20 that could be given back. With 20 MiB more it works.
    """
    tight = CachingAllocator(EXPANDABLE, limit=100 * MiB)
    pinned(tight)
    with pytest.raises(OutOfMemoryError):
        tight.allocate(20 * MiB)
    roomy = CachingAllocator(EXPANDABLE, limit=120 * MiB)
    pinned(roomy)
    assert roomy.allocate(20 * MiB).address == 84 * MiB


def test_max_split_size_gives_back_nothing_of_expandable_segments() -> None:
    """No block of theirs is a segment (release_available_cached_blocks): the whole cache is emptied instead."""
    allocator = CachingAllocator(
        options_from("expandable_segments:True,max_split_size_mb:100"), limit=250 * MiB
    )
    large, small = allocator.allocate(200 * MiB), allocator.allocate(20 * MiB)
    allocator.free(large)
    allocator.allocate(90 * MiB)
    assert allocator.retries == 1
    allocator.free(small)


def test_max_split_size_gives_back_one_oversize_block_before_all() -> None:
    """Limit 300 MiB, with 120 and 150 free and 128 asked. No retry: 120 stay cached.

    120 are too few, and 150 are too many: 128 + 20 <= 150. 300 - 270 = 30 are left. The smallest free block of at
    least 128 goes back, the 150, which leaves 180.
    """
    allocator = CachingAllocator(options_from("max_split_size_mb:100"), limit=300 * MiB)
    for block in [allocator.allocate(120 * MiB), allocator.allocate(150 * MiB)]:
        allocator.free(block)
    allocator.allocate(128 * MiB)
    assert allocator.retries == 0 and allocator.reserved == (120 + 128) * MiB


def test_several_oversize_blocks_are_given_back_largest_first() -> None:
    """With 110 and 120 free of a limit of 240, 200 need both: 120 is not enough, 230 are."""
    allocator = CachingAllocator(options_from("max_split_size_mb:100"), limit=240 * MiB)
    for block in [allocator.allocate(110 * MiB), allocator.allocate(120 * MiB)]:
        allocator.free(block)
    allocator.allocate(200 * MiB)
    assert allocator.retries == 0 and allocator.reserved == 200 * MiB


# -- expandable segments ------------------------------------------------------------------------------------


def test_expandable_segments_map_granules_of_20_mib() -> None:
    """30 MiB need two granules, 40 MiB; the 10 left and one more granule serve 25: 60 MiB for 55."""
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.allocate(30 * MiB)
    second = allocator.allocate(25 * MiB)
    assert allocator.reserved == 60 * MiB
    assert second.address == first.address + 30 * MiB
    allocator.allocate(512)
    assert allocator.reserved == 62 * MiB


def test_expandable_segments_merge_what_segments_cannot() -> None:
    """30 and 30 MiB freed serve 60 in the same 60 MiB, where segments of their own would make it 120."""
    allocator = CachingAllocator(EXPANDABLE)
    for block in [allocator.allocate(30 * MiB), allocator.allocate(30 * MiB)]:
        allocator.free(block)
    allocator.allocate(60 * MiB)
    assert allocator.reserved == 60 * MiB


def test_expandable_segments_split_at_512_bytes() -> None:
    """11 MiB of a granule of 20: the block is 11 MiB, not 12."""
    allocator = CachingAllocator(EXPANDABLE)
    assert allocator.allocate(11 * MiB).size == 11 * MiB
    assert allocator.allocated == 11 * MiB and allocator.reserved == 20 * MiB


def test_expandable_segments_prefer_the_block_that_cannot_grow() -> None:
    """Free are a hole of 50 MiB and 40 at the end. 30 fit best in the 40, but those can grow: the hole is taken."""
    allocator = CachingAllocator(EXPANDABLE)
    hole, _, end = (allocator.allocate(size * MiB) for size in (50, 10, 40))
    allocator.free(hole)
    allocator.free(end)
    assert allocator.allocate(30 * MiB).address == hole.address


def test_expandable_segments_unmap_free_granules_when_the_driver_refuses() -> None:
    """Limit 100 MiB. Stream 1 maps 60, holds 10 at its start and frees 50: granules 2 and 3 go back, 20 stay.

    80 MiB on stream 0 then fit exactly. The hole is mapped again for stream 1 once stream 0 is done.
    """
    allocator = CachingAllocator(EXPANDABLE, limit=100 * MiB)
    kept = allocator.allocate(10 * MiB, stream=1)
    allocator.free(allocator.allocate(50 * MiB, stream=1))
    assert allocator.reserved == 60 * MiB
    block = allocator.allocate(80 * MiB, stream=0)
    assert allocator.reserved == 100 * MiB and allocator.retries == 1
    allocator.free(block)
    again = allocator.allocate(50 * MiB, stream=1)
    assert again.address == kept.address + 10 * MiB and allocator.retries == 2


def test_expandable_segments_run_out_of_memory_too() -> None:
    allocator = CachingAllocator(EXPANDABLE, limit=100 * MiB)
    allocator.allocate(90 * MiB)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(20 * MiB)


# -- settings -----------------------------------------------------------------------------------------------


def test_settings_are_read_as_pytorch_reads_them() -> None:
    text = "expandable_segments:True, max_split_size_mb:256,garbage_collection_threshold:0.8"
    options = options_from(text)
    assert options.expandable_segments and options.max_split_size == 256 * MiB
    assert options.ignored == ("garbage_collection_threshold",)
    assert options.described() == "expandable_segments:True,max_split_size_mb:256"
    assert options_in("cuda", {"PYTORCH_CUDA_ALLOC_CONF": text}) == options
    newer = {"PYTORCH_ALLOC_CONF": "expandable_segments:False", "PYTORCH_CUDA_ALLOC_CONF": text}
    assert options_in("cuda", newer) == options_in("rocm", {}) == AllocatorOptions()
    assert options_in("cuda", {}) == EXPANDABLE  # the default of a run


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments",
        "expandable_segments:yes",
        "max_split_size_mb:20",
        "max_split_size_mb:many",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[0:2]",
    ],
)
def test_what_pytorch_refuses_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="PYTORCH_ALLOC_CONF"):
        options_from(text)


@pytest.mark.parametrize("options", [AllocatorOptions(), EXPANDABLE, options_from("max_split_size_mb:32")])
@pytest.mark.parametrize("limit", [None, 700 * MiB])
def test_the_books_balance(options: AllocatorOptions, limit: int | None) -> None:
    """2,000 allocations and frees in a fixed disorder: no two live blocks overlap, and sums are sums of blocks."""
    allocator, state = CachingAllocator(options, limit), 7
    live: list[MemoryBlock] = []
    for _ in range(2000):
        state = state * 1_103_515_245 + 12_345 & 0x7FFFFFFF
        if live and (state % 5 < 2 or len(live) > 40):
            allocator.free(live.pop(state // 7 % len(live)))
        else:
            size = (state >> 8) % (1 << (10 + state // 3 % 15)) + 1
            live.append(allocator.allocate(size, stream=state % 3 % 2))
    assert allocator.allocated == sum(block.size for block in live)
    free = [b for p in allocator._pools.values() for _, _, b in p.blocks]
    assert allocator.reserved == allocator.allocated + sum(block.size for block in free)
    spans = sorted((b.address, b.address + b.size) for b in [*live, *free])
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
