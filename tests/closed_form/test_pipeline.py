"""Micro-batches in flight, against published figures and against slow replays of the schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdover.closed_form.pipeline import bubble, chunks, even_split, in_flight


def replay_1f1b(stages: int, micro_batches: int, stage: int) -> int:
    """Most micro-batches held at once: warm-up, then forward and backward in turn, then backward alone."""
    held = most = done = 0
    for _ in range(min(stages - stage - 1, micro_batches)):
        held, done = held + 1, done + 1
        most = max(most, held)
    while done < micro_batches:
        held, done = held + 1, done + 1
        most, held = max(most, held), held - 1
    return most


def replay_interleaved(stages: int, count: int, micro_batches: int, stage: int) -> int:
    """Most chunk passes held at once under Megatron's interleaved schedule."""
    total = micro_batches * count
    warmup = min((stages - stage - 1) * 2 + (count - 1) * stages, total)
    held = most = warmup
    for _ in range(total - warmup):
        held += 1
        most = max(most, held)
        held -= 1
    return most


@given(st.integers(1, 12), st.integers(1, 30), st.data())
def test_1f1b(stages: int, micro_batches: int, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    assert in_flight("1f1b", stages, 1, micro_batches, stage) == (replay_1f1b(stages, micro_batches, stage),)


@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 6), st.data())
def test_interleaved(stages: int, count: int, groups: int, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    held = in_flight("interleaved", stages, count, groups * stages, stage)
    assert len(held) == count
    assert sum(held) == replay_interleaved(stages, count, groups * stages, stage)
    if stage == 0 and groups > 1:  # of p m chunk passes, as many as L (1 + (p - 1) / (p m)) layers
        assert sum(held) == stages * count + stages - 1


def test_the_first_chunk_of_the_interleaved_schedule_is_held_twice_as_often() -> None:
    """The paper counts the embedding's dropout p times; the first chunk, which has it, is held 2 p times."""
    assert in_flight("interleaved", 8, 3, 64, 0)[0] == 16


def test_fewer_micro_batches_than_stages() -> None:
    assert [in_flight("1f1b", 8, 1, 3, stage)[0] for stage in range(8)] == [3, 3, 3, 3, 3, 3, 2, 1]


@pytest.mark.parametrize(("schedule", "whole"), [("zb-v", 8), ("v-half", 5), ("v-min", 4)])
def test_v_shaped_schedules_hold_the_same_on_every_stage(schedule: str, whole: int) -> None:
    """Qi et al.: p, (p + 2) // 2 and (p + 4) // 3 micro-batches of a stage's two half-size chunks."""
    held = [in_flight(schedule, 8, 2, 64, stage) for stage in range(8)]  # type: ignore[arg-type]
    assert {sum(pair) for pair in held} == {2 * whole}
    assert all(down >= up >= 1 for down, up in held)


def test_a_v_puts_the_first_and_the_last_chunk_on_one_stage() -> None:
    first = chunks("zb-v", (1, 2, 3, 4, 5, 6), 3, 12)[0]
    assert [(chunk.first_layer, chunk.layers) for chunk in first] == [(0, 1), (15, 6)]


def test_gpipe_holds_all() -> None:
    assert in_flight("gpipe", 4, 1, 16, 3) == (16,)


def test_chunks_cover_the_layers_once() -> None:
    for schedule, count in (("1f1b", 1), ("interleaved", 3), ("v-half", 2)):
        split = tuple(range(1, 4 * count + 1))
        found = [chunk for stage in chunks(schedule, split, 4, 16) for chunk in stage]  # type: ignore[arg-type]
        covered = sorted(x for chunk in found for x in range(chunk.first_layer, chunk.first_layer + chunk.layers))
        assert covered == list(range(sum(split)))


def test_idle_share() -> None:
    assert bubble("1f1b", 8, 1, 64) == 7 / 64
    assert bubble("interleaved", 8, 3, 64) == 7 / 192
    assert bubble("zb-h1", 8, 1, 64) == 7 / 192
    assert bubble("zb-v", 8, 2, 64) == 0
    assert bubble("v-half", 8, 2, 64) == 8 / 128
    assert bubble("v-min", 8, 2, 64) == 16 / 192
    assert {bubble(name, 1, 1, 8) for name in ("1f1b", "gpipe", "v-half", "v-min")} == {0}  # type: ignore[arg-type]


@given(st.integers(1, 200), st.integers(1, 64))
def test_even_split(layers: int, parts: int) -> None:
    split = even_split(layers, parts)
    assert sum(split) == layers
    assert len(split) == parts
    assert max(split) - min(split) <= 1
