"""What lowers a floor, against bytes counted by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from holdover.memory.estimate import workspaces
from holdover.memory.simulate import simulate
from holdover.memory.timeline import NOTHING
from holdover.planning.levers import CHUNKS, RANKS, largest_layer, levers, loss_storages, optimizer_sizes
from holdover.planning.steps import Recorded, recorded
from holdover.trace.graph import Category

BATCH, WIDTH, VOCAB = 256, 16, 4096


def language_model(optimizer: str | None) -> Recorded:
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False))
    tokens = torch.zeros(BATCH, dtype=torch.long)
    return recorded(model, (tokens,), loss=lambda out: F.cross_entropy(out, tokens), optimizer=optimizer)


def peak(step: Recorded) -> int:
    return simulate(step.trace, workspace=workspaces(step.trace)[0]).peak_bytes


def test_the_loss_in_chunks_divides_logits_and_their_gradients() -> None:
    step = language_model(None)
    logits = BATCH * VOCAB * 4
    sizes = [step.trace.storages[s].nbytes for s in loss_storages(step.trace)]
    large = [n for n in sizes if n == logits]
    assert len(large) >= 3  # logits, their log-softmax, its gradient
    (chunked,) = [x for x in levers(step, NOTHING, peak(step)) if x.name == f"the loss in {CHUNKS} chunks"]
    assert chunked.how == "modelled"
    assert chunked.peak_before_bytes == peak(step)
    saved = chunked.peak_before_bytes - chunked.peak_after_bytes
    assert 2 * logits * (CHUNKS - 1) // CHUNKS <= saved < 4 * logits


def test_an_8_bit_optimizer_keeps_a_byte_for_each_moment() -> None:
    step = language_model("adamw")
    parameters = 2 * VOCAB * WIDTH
    assert sum(optimizer_sizes(step.trace).values()) == 2 * parameters
    (lever,) = [x for x in levers(step, NOTHING, peak(step)) if x.name == "an 8-bit optimizer"]
    assert lever.peak_before_bytes - lever.peak_after_bytes == 6 * parameters
    assert optimizer_sizes(language_model("sgd").trace) == {}


def test_sharding_divides_what_belongs_to_weights_and_gathers_a_layer() -> None:
    step = language_model("adamw")
    weight = VOCAB * WIDTH * 4
    assert largest_layer(step.trace) == weight
    (lever,) = [x for x in levers(step, NOTHING, peak(step)) if x.name == f"sharding over {RANKS} devices"]
    at_peak = simulate(step.trace, workspace=workspaces(step.trace)[0])
    kinds = {Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER}
    sharded = sum(n for s, n in at_peak.at_peak.items() if step.trace.storages[s].category in kinds)
    saved = lever.peak_before_bytes - lever.peak_after_bytes
    assert saved <= sharded * (RANKS - 1) // RANKS - 2 * weight


def test_levers_that_change_nothing_are_not_told() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    step = recorded(model, (torch.ones(10_000, 4),))
    assert levers(step, NOTHING, peak(step)) == []
