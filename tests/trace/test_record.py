"""Recorded steps against what one writes down by hand for small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.trace.helpers import bytes_of, forward, op, places, saved
from torch import nn
from torch.utils.checkpoint import checkpoint

from holdover.memory.workspace import true_outputs
from holdover.trace.graph import Category, Event, Phase
from holdover.trace.record import record

F4 = 4  # bytes of a float32


class Module(nn.Module):
    """A module whose forward is given as a function."""

    def __init__(self, function: Any, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


# -- places ----------------------------------------------------------------------------------------------------------


def test_nested_calls() -> None:
    model = nn.Sequential(nn.Sequential(nn.Tanh(), nn.GELU()), nn.Hardswish())
    assert places(record(model, (torch.ones(3, 4, requires_grad=True),))) == [
        ("model/0/0.0", 0, "tanh"),
        ("model/0/0.1", 0, "gelu"),
        ("model/1", 0, "hardswish"),
    ]


def test_a_shared_module_is_numbered_in_each_caller() -> None:
    act = nn.Tanh()
    inner = Module(lambda m, x: m.act(m.act(x)), act=act)
    model = Module(lambda m, x: m.act(m.inner(m.act(x))) * m.w, act=act, inner=inner, w=nn.Parameter(torch.ones(1)))
    assert places(record(model, (torch.ones(3),))) == [
        ("model/act", 0, "tanh"), ("model/inner/act", 0, "tanh"), ("model/inner/act:1", 0, "tanh"),
        ("model/act:1", 0, "tanh"), ("model", 0, "mul"),
    ]  # fmt: skip


def test_ops_of_a_call_are_counted_around_nested_calls_and_hooks_belong_to_the_caller() -> None:
    act = nn.Tanh()
    act.register_forward_hook(lambda m, a, y: y * 2)
    model = Module(lambda m, x: m.act(x * m.w).sin(), act=act, w=nn.Parameter(torch.ones(1)))
    assert places(record(model, (torch.ones(3),))) == [
        ("model", 0, "mul"), ("model/act", 0, "tanh"), ("model", 1, "mul"), ("model", 2, "sin"),
    ]  # fmt: skip


def test_the_loss_is_outside() -> None:
    trace = record(nn.Linear(4, 2), (torch.ones(3, 4),), loss=lambda y: y.sin().mean())
    loss = [o for o in trace.ops if o.phase is Phase.LOSS]
    assert [(o.name, trace.calls[o.call].key, o.index) for o in loss[:2]] == [
        ("aten.sin.default", "", 0), ("aten.mean.default", "", 1),
    ]  # fmt: skip


def test_a_second_step_has_the_places_of_the_first() -> None:
    trace = record(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.ones(3, 4),), optimizer="adamw")
    assert places(trace, 0) == places(trace, 1)
    assert {o.step for o in trace.ops} == {0, 1}
    assert trace.optimizer == "AdamW"


def test_backward_ops_know_their_forward_op_and_its_call() -> None:
    trace = record(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.ones(3, 4),))
    tanh = op(trace, "tanh_backward")
    assert (tanh.phase, tanh.index, trace.calls[tanh.call].key) == (Phase.BACKWARD, -1, "model/1")
    assert trace.ops[tanh.of].name == "aten.tanh.default"
    mm = op(trace, "mm")
    assert trace.calls[mm.call].key == "model/0"
    assert trace.ops[mm.of].name == "aten.addmm.default"


def test_inner_activation_checkpointing_is_recorded_as_it_runs() -> None:
    for reentrant in (False, True):
        inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        model = Module(lambda m, x, r=reentrant: checkpoint(m.inner, x * 1.0, use_reentrant=r), inner=inner)
        trace = record(model, (torch.ones(3, 8, requires_grad=True),))
        assert trace.recorded_on == "fake"
        assert sum(o.name == "aten.tanh.default" for o in trace.ops) == 2  # in forward and once more in backward
        assert op(trace, "tanh", 1).phase is Phase.BACKWARD
        saved_values = {s.value for s in trace.slots}
        assert not saved_values & {*op(trace, "tanh").outputs, *op(trace, "addmm").outputs}


# -- values ----------------------------------------------------------------------------------------------------------


def test_views_make_no_values() -> None:
    trace = record(Module(lambda m, x: (x * m.w).view(6).t().expand(2, 6), w=nn.Parameter(torch.ones(1))),
                   (torch.ones(2, 3),))  # fmt: skip
    made = [o.name.split(".")[1] for o in forward(trace) if o.outputs]
    assert made == ["mul"]


def test_an_in_place_op_makes_a_version() -> None:
    trace = record(Module(lambda m, x: (x * m.w).relu_(), w=nn.Parameter(torch.ones(1))), (torch.ones(3),))
    made, relu = op(trace, "mul").outputs[0], op(trace, "relu_")
    assert relu.inputs == (made,)
    (after,) = relu.outputs
    assert relu.writes == ((made, after),)
    old, new = trace.values[made], trace.values[after]
    assert (old.storage, old.version, new.version, new.maker) == (new.storage, 0, 1, relu.id)
    assert made in {trace.slots[i].value for i in range(len(trace.slots))} or after in {s.value for s in trace.slots}


def test_a_full_overwrite_reads_nothing() -> None:
    trace = record(Module(lambda m, x: F.dropout(x * m.w, 0.5), w=nn.Parameter(torch.ones(1))), (torch.ones(64),))
    bernoulli = op(trace, "bernoulli_")
    assert bernoulli.random
    assert bernoulli.inputs == ()
    assert [before for before, _ in bernoulli.writes] == [-1]


def test_a_write_to_a_part_reads_the_rest() -> None:
    def write(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * m.w
        y[1:].zero_()
        return y

    trace = record(Module(write, w=nn.Parameter(torch.ones(1))), (torch.ones(3),))
    assert op(trace, "zero_").writes[0][0] == op(trace, "mul").outputs[0]


def test_what_cannot_run_again_says_why() -> None:
    trace = record(Module(lambda m, x: torch.empty_like(x).copy_(x) * m.w, w=nn.Parameter(torch.ones(1))),
                   (torch.ones(3),))  # fmt: skip
    assert "uninitialised" in op(trace, "empty_like").keep
    assert op(trace, "mul").keep == ""


def test_attention_draws_only_with_dropout() -> None:
    q = torch.ones(1, 1, 4, 8, requires_grad=True)
    for p in (0.0, 0.5):
        trace = record(Module(lambda m, q, p=p: F.scaled_dot_product_attention(q, q, q, dropout_p=p)), (q,))
        assert any(o.random for o in forward(trace)) == (p > 0)


# -- what autograd saves ---------------------------------------------------------------------------------------------


def test_saved_of_a_perceptron() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    # The input exists anyway; GELU saves its argument, the second layer its own.
    assert sorted(saved(record(model, (torch.ones(5, 8),))).values()) == [5 * 32 * F4, 5 * 32 * F4]


def test_saved_of_layer_norm() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    assert sorted(saved(record(model, (torch.ones(5, 8),))).values()) == [5 * F4, 5 * F4, 5 * 8 * F4]  # mean, rstd


def test_saved_of_batch_norm_and_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
    image = 2 * 6 * 4 * 4 * F4
    # The norm saves its argument, mean and inverse deviation; ReLU its result.
    assert sorted(saved(record(model, (torch.ones(2, 3, 4, 4),))).values()) == [6 * F4, 6 * F4, image, image]


def test_saved_of_attention() -> None:
    def attend(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = m.qkv(x).view(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)

    trace = record(Module(attend, qkv=nn.Linear(16, 48)), (torch.ones(2, 5, 16),))
    # Queries, keys and values are one storage; then the result and the log-sum-exp of each row.
    assert sorted(saved(trace).values()) == [2 * 2 * 5 * F4, 2 * 5 * 16 * F4, 2 * 5 * 48 * F4]


def test_saved_of_softmax_cross_entropy() -> None:
    ids = torch.zeros(6, dtype=torch.int64)
    trace = record(nn.Linear(4, 10), (torch.ones(6, 4),), loss=lambda y: F.cross_entropy(y, ids))
    assert sorted(saved(trace).values()) == [F4, 6 * 10 * F4]  # total weight; log-softmax
    assert all(trace.calls[s.call].key == "" for s in trace.slots if trace.values[s.value].maker > 1)


# -- categories ------------------------------------------------------------------------------------------------------


def test_categories_with_adamw() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    trace = record(model, (torch.ones(5, 8),), optimizer=lambda p: torch.optim.AdamW(p, foreach=False))
    weights = (8 * 8 + 8 + 8 + 8) * F4
    assert bytes_of(trace, Category.PARAMETER) == weights
    assert bytes_of(trace, Category.BUFFER) == 2 * 8 * F4 + 8
    assert bytes_of(trace, Category.INPUT) == 5 * 8 * F4
    assert bytes_of(trace, Category.GRADIENT) == 2 * weights  # of two steps
    assert bytes_of(trace, Category.OPTIMIZER) == 2 * weights + 4 * F4  # moments, and a step count each
    names = {s.name for s in trace.storages if s.category is Category.GRADIENT}
    assert names == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_no_bytes_of_an_sgd_without_momentum() -> None:
    assert bytes_of(record(nn.Linear(4, 4), (torch.ones(2, 4),), optimizer="sgd"), Category.OPTIMIZER) == 0


def test_tied_weights_are_one_storage() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    trace = record(model, (torch.zeros(3, dtype=torch.int64),))
    assert bytes_of(trace, Category.PARAMETER) == 40 * F4
    assert bytes_of(trace, Category.GRADIENT) == 40 * F4


def test_unregistered_tensors_exist_too() -> None:
    hidden = torch.ones(100)
    model = Module(lambda m, x: m.layer(x) + m.table + m.several[0][0], layer=nn.Linear(100, 100),
                   table=torch.ones(100), several=[(torch.ones(100),)])  # fmt: skip
    model.layer.register_forward_hook(lambda m, a, y: y * hidden)
    trace = record(model, (torch.ones(2, 100),))
    assert trace.recorded_on == "fake"
    assert bytes_of(trace, Category.BUFFER) == 3 * 100 * F4


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm])
def test_parametrizations(wrap: Any) -> None:
    trace = record(nn.Sequential(wrap(nn.Linear(8, 8)), nn.Tanh()), (torch.ones(3, 8),))
    assert trace.recorded_on == "fake"
    assert "aten.tanh.default" in [o.name for o in forward(trace)]
    assert any(key.startswith("model/0/0.parametrizations") for key, _, _ in places(trace))


def test_lazy_modules_are_made_while_recording_and_stay_lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(6), nn.ReLU())
    trace = record(model, (torch.ones(3, 8),))
    # Fake tensors cannot take the place of a parameter that is not there yet.
    assert (trace.recorded_on, len(trace.notes)) == ("real", 1)
    assert sorted(saved(trace).values()) == [3 * 6 * F4]
    assert isinstance(model[0], nn.LazyLinear)
    assert torch.nn.parameter.is_lazy(model[0].weight)


# -- precision and devices -------------------------------------------------------------------------------------------


def test_autocast_by_precision_and_by_hand() -> None:
    def dtype(trace: Any) -> str:
        return trace.values[op(trace, "addmm").outputs[0]].dtype

    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    own = Module(lambda m, x: by_hand(m, x), layer=model)
    assert dtype(record(model, (x,))) == "float32"
    assert dtype(record(model, (x,), precision="bf16-mixed")) == "bfloat16"
    assert dtype(record(own, (x,))) == "bfloat16"
    true = record(model, (x,), precision="bf16-true")
    assert dtype(true) == "bfloat16"
    assert bytes_of(true, Category.PARAMETER) == (16 + 4) * 2
    assert bytes_of(true, Category.INPUT) == 8 * 2


def by_hand(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.layer(x)


def test_what_finding_a_true_output_takes_is_no_part_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is known yet: the kernel is run meanwhile
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    trace = record(model, (torch.ones(2, 4),), precision="bf16-true", corrections=true_outputs)
    assert list(tmp_path.rglob("*.jsonl"))
    assert {s.name for s in trace.storages} == {"", "input 0", "0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_model_on_meta_is_never_allocated() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(100_000, 100_000) for _ in range(4)))  # 160 GB
        x = torch.ones(1000, 100_000)
    trace = record(model, (x,), optimizer="adamw")
    weights = 4 * (100_000**2 + 100_000) * F4
    assert bytes_of(trace, Category.PARAMETER) == weights
    assert bytes_of(trace, Category.OPTIMIZER) >= 2 * weights
    assert {s.device for s in trace.storages} == {"cpu"}
    assert all(p.device.type == "meta" for p in model.parameters())


# -- events ----------------------------------------------------------------------------------------------------------


def test_holders_balance() -> None:
    trace = record(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 8)), (torch.ones(4, 8),))
    held = [0] * len(trace.storages)
    packed: set[int] = set()
    for kind, number in trace.events:
        if kind is Event.HOLD:
            held[number] += 1
        elif kind is Event.DROP:
            held[number] -= 1
            assert held[number] >= 0
        elif kind is Event.PACK:
            packed.add(number)
        elif kind is Event.RELEASE:
            packed.remove(number)
        elif kind is Event.UNPACK:
            assert number in packed
    assert not packed
    lasting = {Category.PARAMETER, Category.INPUT, Category.GRADIENT}
    assert {trace.storages[n].category for n, h in enumerate(held) if h} <= lasting
