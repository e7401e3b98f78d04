"""Whole steps recorded for a card: devices, the optimizer, casts, what is refused, what is left behind."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from tests.trace.target.cases import A100, H100, T4, SwiGLU
from torch import nn

from holdover.errors import TraceError
from holdover.trace.graph import Category, Phase, Trace
from holdover.trace.record import record
from holdover.trace.target import Target


def names(trace: Trace, phase: Phase, step: int = 0) -> list[str]:
    return [op.name.split(".")[1] for op in trace.ops if op.phase is phase and op.step == step]


def test_a_step_on_the_cpu_is_recorded_as_before_between_two_on_a_card() -> None:
    model, x = SwiGLU(), torch.randn(8, 64)
    before = record(model, (x,), precision="bf16-mixed")
    card = record(model, (x,), precision="bf16-mixed", target=A100)
    after = record(model, (x,), precision="bf16-mixed")
    assert (before.ops, before.storages, before.slots) == (after.ops, after.storages, after.slots)
    assert {s.device for s in before.storages} == {"cpu"}
    assert {s.device for s in card.storages} == {"cuda"}
    assert not torch.cuda.is_available()
    assert all(p.device.type == "cpu" and p.grad is None for p in model.parameters())


def test_it_leaves_the_process_as_it_was_where_it_cannot_fork() -> None:
    program = """
import holdover.trace.isolate as isolate
isolate.can_fork = lambda: False
import torch
from torch import nn
from holdover.trace.record import record
from holdover.trace.target import Target
import sys
lists = sys.modules["torch.optim.optimizer"]
model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.SiLU()), torch.randn(4, 8)
make, tensor = torch.Tensor._make_subclass, torch.tensor
trace = record(model, (x,), optimizer="adamw", precision="bf16-mixed", target=Target("a100-80gb", (8, 0)))
assert any(op.name.startswith("aten.native_dropout.") for op in trace.ops)
assert torch.Tensor._make_subclass == make and torch.tensor is tensor and not torch.cuda.is_available()
assert not any(kind.__name__ == "FakeTensor" for kind in lists._foreach_supported_types)
for name in ("dropout", "lstm.input", "to.dtype_layout"):
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::" + name, "AutogradCUDA"), name
assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::silu_backward", "CUDA")
model(x).sum().backward()
assert [op.name for op in record(model, (x,)).ops if "dropout" in op.name] == []
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_optimizer_is_foreach_and_counts_steps_on_the_cpu() -> None:
    trace = record(nn.Linear(4, 4), (torch.randn(2, 4),), optimizer="adamw", target=A100)
    assert "_foreach_addcdiv_" in names(trace, Phase.OPTIMIZER)
    assert "addcdiv_" not in names(trace, Phase.OPTIMIZER)
    state = [s for s in trace.storages if s.category is Category.OPTIMIZER]
    assert sorted((s.device, s.nbytes) for s in state) == sorted(
        [("cpu", 4), ("cpu", 4), ("cuda", 64), ("cuda", 64), ("cuda", 16), ("cuda", 16)]
    )


def test_an_optimizer_with_state_keeps_its_step_counts_where_they_are() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    trace = record(model, (torch.randn(2, 4),), optimizer=optimizer, target=A100)
    assert {(s.device, s.nbytes) for s in trace.storages if s.category is Category.OPTIMIZER} == {
        ("cpu", 4), ("cuda", 64), ("cuda", 16)}  # fmt: skip


def test_a_parameter_is_cast_once_per_region_of_autocast() -> None:
    layer = nn.Linear(8, 8, bias=False)
    twice = nn.Sequential(layer, layer)
    casts = names(record(twice, (torch.randn(4, 8),), precision="bf16-mixed", target=A100), Phase.FORWARD)
    assert casts.count("_to_copy") == 2  # the input and the weight; what comes between is bfloat16 already


def test_autocast_casts_as_on_cuda_and_not_as_on_the_cpu() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            dtypes = [
                y.dtype,
                y.exp().dtype,
                y.sum(-1).dtype,
                y.norm().dtype,
                F.softmax(y, -1).dtype,
                y.cumsum(0).dtype,
            ]
            dtypes += [torch.addcmul(y, y, y.float()).dtype, (y + y).dtype, F.layer_norm(y, (8,)).dtype]
            assert dtypes == [torch.bfloat16] + [torch.float32] * 6 + [torch.bfloat16, torch.float32], dtypes
            return y

    record(Norms(), (torch.randn(4, 8),), precision="bf16-mixed", target=A100)


def test_binary_cross_entropy_is_refused_under_autocast_as_on_the_card() -> None:
    model = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid())
    with pytest.raises(TraceError, match="unsafe to autocast"):
        record(model, (torch.rand(4, 8),), loss=lambda y: F.binary_cross_entropy(y, torch.ones_like(y)),
               precision="bf16-mixed", target=A100)  # fmt: skip


def test_precision_true_converts_the_model_without_data() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to("meta")
    trace = record(model, (torch.empty(4, 8, device="meta"),), precision="bf16-true", target=H100)
    assert {v.dtype for v in trace.values if trace.storages[v.storage].category is Category.PARAMETER} == {"bfloat16"}


class Asks(nn.Module):
    """Asks for the device in every way that forward does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert (x.is_cuda, x.is_cpu, x.is_meta, x.get_device()) == (True, False, False, 0)
        assert x.device == self.weight.device == torch.device("cuda", 0)
        assert (torch.cuda.is_available(), torch.cuda.device_count()) == (True, 1)
        assert torch.cuda.get_device_capability() == (7, 5)
        assert not torch.cuda.is_bf16_supported(including_emulation=False)
        y = x.to(x.device) * self.weight.to(x).to(x.device, x.dtype)
        y = y + torch.tensor(2.0, device=x.device) + torch.arange(8, device=x.device).to(x.dtype)
        return y + torch.zeros(8, device="cuda") + x.new_ones(8) + torch.as_tensor([1.0], device=x.device)


def test_the_model_sees_a_card_and_moves_nothing_that_is_there() -> None:
    trace = record(Asks(), (torch.randn(4, 8),), target=T4)
    done = names(trace, Phase.FORWARD)
    # one cast, of arange's integers: no .to(device) copies, and torch.tensor's copy shows no more than on the card
    assert done == ["mul", "add", "arange", "_to_copy", "add", "zeros", "add", "new_ones", "add", "add"]
    assert trace.signatures[trace.ops[2].signature].kwargs[0] == ("device", torch.device("cuda", 0))


def test_a_tensor_made_on_the_cpu_is_told_apart() -> None:
    class Lost(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + torch.zeros(8)

    record(Lost(), (torch.randn(4, 8),))
    with pytest.raises(TraceError, match=r"a100-80gb without that card.*cuda:0.*cpu") as error:
        record(Lost(), (torch.randn(4, 8),), target=A100)
    assert "the device of its inputs" in str(error.value)


def test_lengths_are_known_though_they_are_on_the_card() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return self.linear(x[:, : lengths.max().item()])

    trace = record(Cut(), (torch.randn(2, 9, 8), torch.tensor([3, 5])), target=A100)
    made = [
        trace.storages[trace.values[v].storage].nbytes
        for op in trace.ops
        for v in op.outputs
        if op.name.startswith("aten.mm.") and op.phase is Phase.FORWARD
    ]
    assert made == [2 * 5 * 8 * 4]


def test_values_that_only_data_can_tell_are_refused() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y if y.sum() > 0 else -y

    with pytest.raises(TraceError, match="no branch on values"):
        record(Branch(), (torch.randn(2, 8),), target=A100)


def test_a_recurrent_layers_weights_and_gradients_are_one_piece_each() -> None:
    trace = record(nn.LSTM(8, 4), (torch.randn(3, 2, 8),), target=A100)
    nbytes = 4 * 4 * 4 * (8 + 4 + 2)
    for category in (Category.PARAMETER, Category.GRADIENT):
        assert [s.nbytes for s in trace.storages if s.category is category] == [nbytes]


def test_what_is_not_known_is_named() -> None:
    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.lstm = nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.LSTM(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(self.norm(self.conv(x)).permute(2, 0, 1))[0]

    said = "\n".join(record(All(), (torch.randn(2, 8, 10),), target=H100).uncertainties)
    subjects = ("workspace of cuBLAS", "CUDA context", "NCCL, size unknown", "convolutions: size unknown", "batch norm",
                "recurrent layers keep for backward is a guess, 0.0 MiB")  # fmt: skip
    for subject in subjects:
        assert subject in said, subject
    assert record(nn.Linear(2, 2), (torch.ones(1, 2),)).uncertainties == []
    short = "\n".join(record(nn.Linear(2, 2), (torch.ones(1, 2),), target=Target("x", (8, 0))).uncertainties)
    assert "convolutions" not in short
    assert "recurrent" not in short


def test_places_of_ops_that_the_card_shares_are_the_same() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(4, 8)

    def places(trace: Trace) -> list[tuple[str, int, str]]:
        return [(trace.calls[op.call].key, op.index, op.name) for op in trace.ops]

    assert places(record(model, (x,), target=A100)) == places(record(model, (x,)))


class Packed(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.linear, self.rnn = nn.Linear(8, 8), kind(8, 4, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.linear(x), lengths.cpu(), True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


@pytest.mark.parametrize(("kind", "values"), [(nn.LSTM, 6), (nn.GRU, 5), (nn.RNN, 2)], ids=["lstm", "gru", "rnn"])
def test_packed_sequences_are_followed_where_their_lengths_are_known(kind: type[nn.RNNBase], values: int) -> None:
    model, args = Packed(kind), (torch.randn(3, 5, 8), torch.tensor([2, 5, 3]))
    card = record(model, args, target=A100)
    real = record(model, args)
    assert real.recorded_on == "real"

    def around(trace: Trace) -> tuple[list[str], list[str]]:
        """Ops before and after the layer itself, without moves between devices."""
        done = [n for n in names(trace, Phase.FORWARD) if n != "_to_copy"]
        return done[: done.index("_pack_padded_sequence") + 1], done[len(done) - done[::-1].index("full") - 1 :]

    def steady(done: tuple[list[str], list[str]]) -> tuple[list[str], list[str]]:
        return done[0], sorted(n for n in done[1] if n not in ("slice", "view"))

    assert steady(around(card)) == steady(around(real))
    assert "_cudnn_rnn" in names(card, Phase.FORWARD)
    reserve = [trace_bytes(card, v) for op in card.ops for v in op.outputs if card.values[v].dtype == "uint8"]
    assert reserve == [4 * values * (2 + 5 + 3) * 4]
    gradients = {s.name for s in card.storages if s.category is Category.GRADIENT}
    assert "linear.weight" in gradients


def trace_bytes(trace: Trace, value: int) -> int:
    return trace.storages[trace.values[value].storage].nbytes


def test_an_argument_that_is_packed_keeps_its_batch_sizes_on_the_cpu() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 4)

        def forward(self, packed: nn.utils.rnn.PackedSequence) -> torch.Tensor:
            return self.rnn(packed)[0].data

    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 8), torch.tensor([5, 3, 2]))
    trace = record(Layer(), (packed,), target=A100)
    assert {(s.device, s.nbytes) for s in trace.storages if s.category is Category.INPUT} >= {
        ("cpu", 5 * 8),
        ("cuda", 320),
    }
