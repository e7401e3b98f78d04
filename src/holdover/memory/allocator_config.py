"""The settings of PyTorch's CUDA caching allocator, as `PYTORCH_CUDA_ALLOC_CONF` spells them.

Names, defaults and limits are those of torch 2.13 (`c10/core/AllocatorConfig.h`, `c10/cuda/CUDAAllocatorConfig.h`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from holdover.errors import UnitError

MIB = 2**20
INTERVALS = 16
"""Size classes of `roundup_power2_divisions`: up to 2 MiB, up to 4 MiB, ... from 32 GiB on."""

WITHOUT_EFFECT = frozenset(
    {
        "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register", "pinned_num_register_threads", "pinned_use_background_threads",
        "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb", "pinned_reserve_segment_size_mb",
        "pinned_free_catch_all", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
        "expandable_segments_handle_type",
    }
)  # fmt: skip
"""Options that PyTorch knows and that change no byte on the card outside CUDA graphs."""


@dataclass(frozen=True, kw_only=True)
class AllocatorConfig:
    """How the allocator is set; the defaults are PyTorch's.

    Attributes:
        max_split_bytes: blocks of this size and more are never split; None: all may be.
        max_non_split_rounding_bytes: how much larger than asked for a block may be that is too large to be split.
        roundup_power2_divisions: by size class, into how many steps a power of two is divided for rounding sizes up;
            0 and 1 round to 512 bytes only.
        expandable_segments: one growing segment per pool and stream, instead of one per request.
        garbage_collection_threshold: share of the allowed memory from which on old cached blocks are released before
            more is asked for; 0: never. PyTorch heeds it only where the process's share of the memory is limited.
        memory_fraction: `per_process_memory_fraction`; None: not limited.
        large_segment_bytes: size of the segments that requests from 1 to 10 MiB are cut from, and of the pages that an
            expandable segment of large blocks grows by.
    """

    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    expandable_segments: bool = False
    garbage_collection_threshold: float = 0.0
    memory_fraction: float | None = None
    large_segment_bytes: int = 20 * MIB

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Read the value of `PYTORCH_ALLOC_CONF` or `PYTORCH_CUDA_ALLOC_CONF`.

        Raises:
            UnitError: an option that PyTorch does not know, or a value that it refuses.

        >>> AllocatorConfig.parse("max_split_size_mb:128,expandable_segments:True").max_split_bytes == 128 * 2**20
        True
        >>> AllocatorConfig.parse("roundup_power2_divisions:[256:1,512:2,>:8]").divisions(700 * 2**20)
        2
        """
        config = cls()
        for key, value in _pairs(text):
            if key in _OPTIONS:
                config = _OPTIONS[key](config, key, value)
            elif key == "backend":
                if value != "native":
                    raise UnitError(f"backend {value!r} is another allocator: only 'native' can be replayed")
            elif key not in WITHOUT_EFFECT:
                known = ", ".join([*_OPTIONS, "backend"])
                raise UnitError(f"unknown allocator option {key!r} in {text!r}: those that change memory are {known}")
        return config

    def divisions(self, nbytes: int) -> int:
        """Divisions of a power of two that sizes like `nbytes` are rounded up to."""
        return self.roundup_power2_divisions[min(max(nbytes.bit_length() - 21, 0), INTERVALS - 1)]


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Key and value of each option; a value may be a list in brackets."""
    text = re.sub(r"\s+", "", text)
    place = 0
    while place < len(text):
        match = re.compile(r"([^:,\[\]]+):(\[[^\]]*\]|[^,\[\]:]+)(?:,|$)").match(text, place)
        if match is None:
            raise UnitError(
                f"cannot read the allocator options {text!r} at {text[place:]!r}: write key:value,key:value"
            )
        yield match.group(1), match.group(2)
        place = match.end()


_Option = Callable[[AllocatorConfig, str, str], AllocatorConfig]


def _number(key: str, value: str) -> int:
    if not value.isdecimal():
        raise UnitError(f"allocator option {key} needs a whole number, not {value!r}")
    return int(value)


def _mebibytes(field: str, least: int | None = None) -> _Option:
    """Without `least`, not less than the segments of large blocks, as set so far."""

    def read(config: AllocatorConfig, key: str, value: str) -> AllocatorConfig:
        number, limit = _number(key, value), least or config.large_segment_bytes // MIB
        if number < limit:
            raise UnitError(f"allocator option {key} is {number}, too small: PyTorch wants at least {limit}")
        return replace(config, **{field: number * MIB})  # type: ignore[arg-type]

    return read


def _share(field: str, *, one: bool) -> _Option:
    def read(config: AllocatorConfig, key: str, value: str) -> AllocatorConfig:
        try:
            share = float(value)
        except ValueError:
            raise UnitError(f"allocator option {key} needs a number, not {value!r}") from None
        if not 0 < share <= 1 or (share == 1 and not one):
            raise UnitError(f"allocator option {key} is {value}: it is a share between 0 and 1")
        return replace(config, **{field: share})  # type: ignore[arg-type]

    return read


def _switch(config: AllocatorConfig, key: str, value: str) -> AllocatorConfig:
    if value not in ("True", "False"):
        raise UnitError(f"allocator option {key} is True or False, not {value!r}")
    return replace(config, expandable_segments=value == "True")


def _power_of_two(key: str, value: str, *, zero: bool) -> int:
    number = _number(key, value)
    if number & (number - 1) or not (number or zero):
        raise UnitError(f"allocator option {key} needs powers of two, not {value}")
    return number


def _divisions(config: AllocatorConfig, key: str, value: str) -> AllocatorConfig:
    """One number for all sizes, or a list: sizes in MiB, each with the divisions from there on; ">" for the rest.

    As in PyTorch, the first entry also holds for all smaller sizes, and a class between two entries that is not
    named keeps 0.
    """
    if not value.startswith("["):
        return replace(config, roundup_power2_divisions=(_power_of_two(key, value, zero=False),) * INTERVALS)
    table = [0] * INTERVALS
    last, first = 0, True
    for entry in value[1:-1].split(","):
        size, colon, number = entry.partition(":")
        if not colon:
            raise UnitError(f"allocator option {key}: cannot read {entry!r}, write for example [256:1,512:2,>:8]")
        divisions = _power_of_two(key, number, zero=True)
        if size == ">":
            table[last + 1 :] = [divisions] * (INTERVALS - last - 1)
            continue
        last = min(_power_of_two(key, size, zero=False).bit_length() - 1, INTERVALS - 1)
        if first:
            table[:last] = [divisions] * last
            first = False
        table[last] = divisions
    return replace(config, roundup_power2_divisions=tuple(table))


_OPTIONS: dict[str, _Option] = {
    "max_split_size_mb": _mebibytes("max_split_bytes"),
    "max_non_split_rounding_mb": _mebibytes("max_non_split_rounding_bytes"),
    "large_segment_size_mb": _mebibytes("large_segment_bytes", 11),
    "roundup_power2_divisions": _divisions,
    "expandable_segments": _switch,
    "garbage_collection_threshold": _share("garbage_collection_threshold", one=False),
    "per_process_memory_fraction": _share("memory_fraction", one=True),
}
