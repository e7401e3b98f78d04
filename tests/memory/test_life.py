"""The life of an activation, against hand-told lives and against what the simulator holds at the peak."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from tests.memory.programs import ROWS, WIDTH, Program, programs
from torch import nn

from holdover.memory.life import Fate, State, life_of, lives_of, name_of, saved_values
from holdover.memory.simulate import simulate
from holdover.memory.timeline import Choices
from holdover.trace.graph import Phase, Trace
from holdover.trace.record import record


def mlp() -> Trace:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 1))
    return record(model, (torch.ones(32, 8),))


def named(trace: Trace) -> dict[str, int]:
    return {name_of(trace, v): v for v in saved_values(trace)}


def first(trace: Trace, name: str, phase: Phase = Phase.FORWARD) -> int:
    return next(op.id for op in trace.ops if op.name == name and op.phase is phase)


def test_a_kept_value_lives_from_its_op_to_its_last_reader() -> None:
    trace = mlp()
    life = life_of(trace, named(trace)["0:0"])
    assert (life.op_name, life.nbytes, life.fate) == ("aten.addmm.default", 32 * 16 * 4, Fate.KEPT)
    (read,) = life.reads
    gelu = first(trace, "aten.gelu.default")
    assert (read.name, read.module, read.of) == ("aten.gelu_backward.default", "1", gelu)
    assert life.replays == ()
    (span,) = life.spans
    assert (span.start, span.end, span.state) == (life.produced, read.position, State.ORIGINAL)
    assert life.freed == read.position
    assert life.saved == (gelu - life.first_op - 1,)  # autograd saves an argument before the op runs
    assert life.asked[0] < read.position
    assert life.state_at(life.backward) is State.ORIGINAL
    assert life.state_at(life.freed) is None


def test_a_dropped_value_is_gone_between_its_forward_reader_and_its_replay() -> None:
    trace = mlp()
    linear, gelu = first(trace, "aten.addmm.default"), first(trace, "aten.gelu.default")
    life = life_of(trace, named(trace)["1:0"], Choices(frozenset({linear, gelu})))
    assert life.fate is Fate.DROPPED
    (replay,) = life.replays
    assert replay.ops == (linear, gelu)
    assert replay.asked == life.value
    original, replayed = life.spans
    assert (original.state, replayed.state) == (State.ORIGINAL, State.REPLAYED)
    assert original.start == life.produced
    assert original.end < life.backward <= replayed.start == replay.position == life.asked[0]
    assert replayed.end == life.freed > life.reads[0].position
    assert life.state_at(life.backward) is None


def test_a_value_that_nothing_asks_for_again_is_no_life_in_backward() -> None:
    trace = record(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 1)), (torch.ones(2, 4),))
    before = next(op.outputs[0] for op in trace.ops if op.name == "aten.addmm.default")
    life = life_of(trace, before)  # sigmoid's backward reads its result, not its argument
    assert (life.fate, life.saved, life.reads) == (Fate.UNSAVED, (), ())
    assert life.freed < life.backward


def test_a_mask_packed_to_bits_stays_as_an_eighth() -> None:
    trace = record(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), Masked()), (torch.ones(128, 8),))
    mask = next(v for v in saved_values(trace) if trace.values[v].dtype == "bool")
    size = trace.storages[trace.values[mask].storage].nbytes
    life = life_of(trace, mask, Choices(pack={mask: size // 8}))
    assert life.fate is Fate.PACKED
    assert [(s.state, s.nbytes) for s in life.spans] == [
        (State.ORIGINAL, size), (State.PACKED, size // 8), (State.REPLAYED, size),
    ]  # fmt: skip


class Masked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x > 0.5, 0.0) * 2


def test_with_an_optimizer_the_life_is_that_of_the_second_step() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    trace = record(model, (torch.ones(4, 8),), optimizer="sgd")
    lives = lives_of(trace, saved_values(trace))
    assert {trace.ops[life.op].step for life in lives.values()} == {1}
    assert all(0 <= life.produced < life.backward < life.freed < life.length for life in lives.values())


def test_names_tell_calls_and_results_apart() -> None:
    norm = nn.LayerNorm(8)
    trace = record(nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8), norm), (torch.ones(4, 8),))
    names = named(trace)
    assert {"1:0", "1:0.1", "1:0.2", "1:1:0.1", "1:1:0.2"} <= set(names)
    assert len(names) == len(saved_values(trace))


@settings(max_examples=25, deadline=None)
@given(programs)
def test_lives_agree_with_what_the_simulator_holds_at_the_peak(instructions: Any) -> None:
    trace = record(Program(instructions), (torch.ones(ROWS, WIDTH),))
    able = [op.id for op in trace.ops if op.phase is Phase.FORWARD and not op.keep and op.index >= 0 and op.outputs]
    rewritten = {trace.values[after].storage for op in trace.ops for _, after in op.writes}
    for recorded in (frozenset(), frozenset(able), frozenset(able[::2])):
        choices = Choices(recorded)
        timeline = simulate(trace, choices)
        aside = {e.value for e in timeline.extra_at_peak}
        for life in lives_of(trace, saved_values(trace), choices).values():
            at = timeline.peak_op - life.first_op
            if any(s.start < at < s.end for s in life.spans):
                assert life.storage in timeline.at_peak or life.value in aside
            elif life.storage not in rewritten and not any(s.start <= at <= s.end for s in life.spans):
                assert life.storage not in timeline.at_peak or at == life.produced


def test_unknown_positions_hold_nothing() -> None:
    trace = mlp()
    life = life_of(trace, named(trace)["0:0"])
    assert life.state_at(-1) is None
    assert life.to_dict()["fate"] == "kept"
