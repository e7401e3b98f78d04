"""Reading the allocator's options, with PyTorch's own parser as the oracle: it is in the CPU build too."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdover.errors import UnitError
from holdover.memory.allocator_config import MIB, AllocatorConfig

ACCEPTED = [
    "", "max_split_size_mb:20", "max_split_size_mb:512,", " expandable_segments : True , max_split_size_mb : 99",
    "large_segment_size_mb:11", "large_segment_size_mb:30,max_split_size_mb:30", "max_non_split_rounding_mb:20",
    "garbage_collection_threshold:0.8", "roundup_power2_divisions:4", "roundup_power2_divisions:[256:1,512:2,>:8]",
    "roundup_power2_divisions:[64:0]", "pinned_use_background_threads:True",
    "expandable_segments:False,roundup_power2_divisions:[4:2,16:8,>:1],max_split_size_mb:40",
]  # fmt: skip
REFUSED = [
    "max_split_size_mb:19", "max_split_size_mb:x", "max_split_size_mb", "large_segment_size_mb:10",
    "large_segment_size_mb:30,max_split_size_mb:20", "max_non_split_rounding_mb:10",
    "garbage_collection_threshold:1.0", "garbage_collection_threshold:0", "roundup_power2_divisions:3",
    "roundup_power2_divisions:0", "roundup_power2_divisions:[3:1]", "roundup_power2_divisions:[4:3]",
    "expandable_segments:true", "roundup_power2_divisions:[64:8,,>:1]",
]  # fmt: skip
TABLES = ["4", "[256:1,512:2,>:8]", "[4:2,16:8,>:1]", "[64:8,128:2,256:4,512:2,1024:4,>:1]", "[1:16]", "[65536:2]",
          "[>:4]", "[2:4,>:2,8:1]"]  # fmt: skip
# The mangled name of c10::CachingAllocator::AcceleratorAllocatorConfig::roundup_power2_divisions(unsigned long).
ROUNDUP = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"


@pytest.fixture
def pytorch() -> Iterator[None]:
    yield
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20,roundup_power2_divisions:1")


@pytest.mark.usefixtures("pytorch")
@pytest.mark.parametrize("text", ACCEPTED)
def test_pytorch_and_we_accept(text: str) -> None:
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    torch._C._accelerator_setAllocatorSettings(text)
    AllocatorConfig.parse(text)


@pytest.mark.usefixtures("pytorch")
@pytest.mark.parametrize("text", REFUSED)
def test_pytorch_and_we_refuse(text: str) -> None:
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    with pytest.raises((ValueError, RuntimeError)):
        torch._C._accelerator_setAllocatorSettings(text)
    with pytest.raises(UnitError):
        AllocatorConfig.parse(text)


@pytest.mark.usefixtures("pytorch")
@pytest.mark.parametrize("table", TABLES)
def test_divisions_are_those_of_pytorch(table: str) -> None:
    """If the symbol is gone, PyTorch has moved its table of divisions: read the new one and the header it came from."""
    roundup = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))[ROUNDUP]
    roundup.argtypes, roundup.restype = [ctypes.c_size_t], ctypes.c_size_t
    torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:[65536:0]")  # nothing is left of earlier ones
    torch._C._accelerator_setAllocatorSettings(f"roundup_power2_divisions:{table}")
    config = AllocatorConfig.parse(f"roundup_power2_divisions:{table}")
    sizes = [1, 512, MIB - 1, MIB, 3 * MIB, *(2**k * MIB + d for k in range(18) for d in (-1, 0, 1))]
    assert [config.divisions(n) for n in sizes] == [roundup(n) for n in sizes]


def test_what_is_read() -> None:
    config = AllocatorConfig.parse(
        "max_split_size_mb:128,max_non_split_rounding_mb:64,garbage_collection_threshold:0.6,expandable_segments:True,"
        "per_process_memory_fraction:0.5,backend:native"
    )
    assert config == AllocatorConfig(
        max_split_bytes=128 * MIB, max_non_split_rounding_bytes=64 * MIB, garbage_collection_threshold=0.6,
        expandable_segments=True, memory_fraction=0.5,
    )  # fmt: skip


def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(UnitError, match="backend 'cudaMallocAsync' is another allocator: only 'native'"):
        AllocatorConfig.parse("backend:cudaMallocAsync")
    with pytest.raises(UnitError, match=r"unknown allocator option 'max_split_mb'.*max_split_size_mb"):
        AllocatorConfig.parse("max_split_mb:64")
    with pytest.raises(UnitError, match="max_split_size_mb is 8, too small: PyTorch wants at least 20"):
        AllocatorConfig.parse("max_split_size_mb:8")
    with pytest.raises(UnitError, match="expandable_segments is True or False, not 'true'"):
        AllocatorConfig.parse("expandable_segments:true")
    with pytest.raises(UnitError, match=r"cannot read the allocator options .* at 'max_split_size_mb'"):
        AllocatorConfig.parse("expandable_segments:True,max_split_size_mb")
