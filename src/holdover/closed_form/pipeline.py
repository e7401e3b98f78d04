"""Who holds what in a pipeline: the layers of each stage, and the micro-batches in flight for each of its chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

Schedule = Literal["1f1b", "interleaved", "gpipe", "zb-h1", "zb-v", "v-half", "v-min"]

V_SHAPED = ("zb-v", "v-half", "v-min")
"""Schedules whose stages hold one chunk on the way down and one on the way back up."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers on one stage, and how many micro-batches' activations of it are held at the stage's peak."""

    first_layer: int
    layers: int
    in_flight: int


@lru_cache(maxsize=4096)
def chunks(
    schedule: Schedule, split: tuple[int, ...], stages: int, micro_batches: int
) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of every stage.

    Args:
        schedule: the order of forward and backward passes.
        split: layers of each chunk, in the model's order; as many chunks as stages, or a multiple.
        stages: pipeline stages.
        micro_batches: micro-batches of a step.

    Returns:
        For each stage its chunks, in the model's order.

    1F1B holds p - rank micro-batches (Korthikanti et al., appendix C); the first interleaved stage holds
    1 + (p - 1) / (p m) times a stage's layers for each of p micro-batches (their section 4.2.3):

    >>> [stage[0].in_flight for stage in chunks("1f1b", (2, 2, 2, 2), 4, 16)]
    [4, 3, 2, 1]
    >>> first = chunks("interleaved", (1,) * 12, 4, 16)[0]
    >>> sum(chunk.in_flight * chunk.layers for chunk in first)  # of 12 layers: 12 (1 + 3 / 12)
    15
    """
    starts = np.concatenate([[0], np.cumsum(split)[:-1]]).astype(int)
    count = len(split) // stages
    result = []
    for stage in range(stages):
        if schedule in V_SHAPED:
            owned = [stage, 2 * stages - 1 - stage]
        else:
            owned = [stage + stages * index for index in range(count)]
        held = in_flight(schedule, stages, count, micro_batches, stage)
        result.append(
            tuple(Chunk(int(starts[index]), split[index], held[position]) for position, index in enumerate(owned))
        )
    return tuple(result)


@lru_cache(maxsize=65536)
def in_flight(schedule: Schedule, stages: int, count: int, micro_batches: int, stage: int) -> tuple[int, ...]:
    """Micro-batches held of each chunk of a stage, at the moment when the stage holds the most.

    The V-shaped schedules hold as many as their authors state (Qi et al. 2023, 2024: p, (p + 2) // 2 and
    (p + 4) // 3 micro-batches, on every stage), of which the chunk on the way down has the longer-lived share.
    """
    if schedule == "gpipe":
        return (micro_batches,) * count
    if schedule in V_SHAPED:
        whole = {"zb-v": stages, "v-half": (stages + 2) // 2, "v-min": (stages + 4) // 3}[schedule]
        up = max(1, round((1 + stage) * whole / stages))
        return min(2 * whole - up, micro_batches), min(up, micro_batches)
    if count == 1:
        return (min(stages - stage, micro_batches),)
    return _interleaved(stages, count, micro_batches, stage)


def _interleaved(stages: int, count: int, micro_batches: int, stage: int) -> tuple[int, ...]:
    """Replays Megatron's interleaved schedule on one stage: groups of p micro-batches take the chunks in turn."""
    # After four groups the pattern repeats; replaying more changes nothing.
    replayed = min(micro_batches, 4 * stages)
    position = np.arange(replayed * count)
    forward = position // stages % count
    warmup = min(2 * (stages - stage - 1) + (count - 1) * stages + 1, len(position))
    made = np.cumsum(forward[:, None] == np.arange(count), axis=0)
    freed = np.cumsum((count - 1 - forward)[:, None] == np.arange(count), axis=0)
    held = made[warmup - 1 :].copy()
    held[1:] -= freed[: len(held) - 1]
    totals = held.sum(axis=1)
    fullest = np.flatnonzero(totals == totals.max())
    # Among equally full moments, the one at which the first chunk, which has the embedding, is held most.
    return tuple(int(number) for number in held[fullest[np.argmax(held[fullest, 0])]])


def bubble(schedule: Schedule, stages: int, count: int, micro_batches: int) -> float:
    """The idle share: idle time over the time of a stage's own work.

    The zero-bubble figures assume, as their authors do, equal times of forward, input gradient and weight gradient.
    """
    p, m = stages, micro_batches
    return {
        "1f1b": (p - 1) / m,
        "gpipe": (p - 1) / m,
        "interleaved": (p - 1) / (m * count),
        "zb-h1": (p - 1) / (3 * m),
        "zb-v": 0.0,
        "v-half": p / (2 * m) if p > 1 else 0.0,
        "v-min": 2 * p / (3 * m) if p > 1 else 0.0,
    }[schedule]


def even_split(layers: int, parts: int) -> tuple[int, ...]:
    """Layers as evenly as they go, the first and last parts (which have embedding and head) not the larger ones.

    >>> even_split(61, 16)
    (3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3)
    """
    base, more = divmod(layers, parts)
    start = (parts - more + 1) // 2
    return tuple(base + (start <= index < start + more) for index in range(parts))
