"""What the runtime reads from schemas, and the few things it knows beside them."""

from __future__ import annotations

import pytest
import torch

from holdover.recompute.geometry import copy_with_storage, covers_storage, geometry, oddity, rebuild
from holdover.recompute.recipe import Pins, Source
from holdover.recompute.rules import describe
from holdover.recompute.script import Compiled
from holdover.trace.frames import call_key

ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (ATEN.empty_like.default, "uninitialised memory"),
        (ATEN.nonzero.default, "data-dependent"),
        (ATEN._local_scalar_dense.default, "data-dependent"),
        (ATEN._cudnn_rnn.default, "state of its own"),
        (ATEN.set_.source_Tensor, "metadata"),
        (ATEN.unsqueeze_.default, "metadata"),
        (torch.ops.quantized.add.default, "custom op of namespace quantized"),
        (torch.ops.higher_order.cond, "higher-order op"),
        (ATEN.index.Tensor, ""),
        (ATEN.bernoulli_.float, ""),
        (ATEN.native_batch_norm.default, ""),
    ],
)
def test_obstacles(op: object, reason: str) -> None:
    assert reason in describe(op).obstacle
    assert bool(reason) == bool(describe(op).obstacle)


def test_collectives_are_never_run_again() -> None:
    assert describe(torch.ops._c10d_functional.all_reduce.default).obstacle == "collective"


def test_a_custom_op_is_kept() -> None:
    @torch.library.custom_op("holdover_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert describe(torch.ops.holdover_tests.twice.default).obstacle == "custom op of namespace holdover_tests"


def test_what_ops_write_to() -> None:
    assert describe(ATEN.add_.Tensor).writes == ((0, "self"),)
    assert describe(ATEN.add.out).writes == ((3, "out"),)
    assert describe(ATEN.rrelu_with_noise.default).writes == ((1, "noise"),)
    assert describe(ATEN.rrelu_with_noise.default).forgets("noise", (None, None, 0.1, 0.3, True))
    assert not describe(ATEN.rrelu_with_noise.default).forgets("noise", (None, None))
    assert describe(ATEN.add.out).forgets("out", ())
    assert not describe(ATEN.add_.Tensor).forgets("self", ())
    norm = describe(ATEN.native_batch_norm.default)
    assert norm.updates([None] * 5 + [True])
    assert not norm.updates([None] * 5 + [False])
    assert describe(ATEN.batch_norm_update_stats.default).updates([None] * 4)
    assert not describe(ATEN.native_batch_norm.default).simple
    assert describe(ATEN.sin.default).simple
    assert not describe(torch.ops.prim.device.default).counted


def test_which_calls_draw() -> None:
    attention = describe(ATEN._scaled_dot_product_flash_attention_for_cpu.default)
    assert not attention.draws((None, None, None), {})
    assert not attention.draws((None, None, None, 0.0), {})
    assert attention.draws((None, None, None, 0.1), {})
    assert attention.draws((None, None, None), {"dropout_p": 0.1})
    assert describe(ATEN.native_dropout.default).draws((None, 0.5, True), {})
    assert not describe(ATEN.sin.default).draws((None,), {})


def test_geometry_survives_every_view() -> None:
    base = torch.randn(4, 6, dtype=torch.complex64)
    views = [
        base, base.t(), base[1:, ::2], base.conj(), base.imag, base.conj().imag, torch.view_as_real(base)[..., 1],
        base.view(torch.float64), base[2].expand(3, 6), torch.view_as_real(base).view(torch.int32), base[:0],
        base.conj().t()[3],
    ]  # fmt: skip
    for v in views:
        again = rebuild(base, geometry(v))
        assert (again.shape, again.stride(), again.dtype) == (v.shape, v.stride(), v.dtype)
        assert (again.is_conj(), again.is_neg()) == (v.is_conj(), v.is_neg())
        assert torch.equal(again.resolve_conj().resolve_neg(), v.resolve_conj().resolve_neg())
        copied = copy_with_storage(v)
        assert copied.untyped_storage().nbytes() == base.untyped_storage().nbytes()
        assert copied.untyped_storage() is not base.untyped_storage()
        assert (copied.stride(), copied.storage_offset()) == (v.stride(), v.storage_offset())


def test_which_tensors_cover_their_storage() -> None:
    x = torch.zeros(4, 6)
    assert covers_storage(x)
    assert covers_storage(x.t())
    assert not covers_storage(x[1:])
    assert not covers_storage(x[:, :3].unsqueeze(-1).expand(4, 3, 2))


def test_odd_tensors() -> None:
    assert oddity(torch.zeros(2).to_sparse()) == "sparse_coo tensor"
    assert oddity(torch.nested.nested_tensor([torch.zeros(2)])) == "nested tensor"
    assert oddity(torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)) == "tensor subclass NestedTensor"
    assert oddity(torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)) == "quantized tensor"
    assert oddity(torch.nn.Parameter(torch.zeros(2))) == ""


def test_pins_forget_the_dead() -> None:
    pins, ledger, x = Pins(), object(), torch.zeros(3)
    first = Source(x, 0, ledger)
    pins.add(first)
    assert pins.find(0, ledger) is first
    assert pins.find(1, ledger) is None
    assert pins.find(0, object()) is None
    del first
    assert pins.find(0, ledger) is None
    pins.add(Source(x, 1, ledger))
    assert len(pins) == 1


def test_scripts() -> None:
    compiled = Compiled({"model/a/b:1": {3: ("aten.sin.default", "pack")}, "model/c": {}}, ["model/c"])
    assert compiled.open == {"model/a/b:1", "model/a", "model"}
    assert compiled.quiet == {"model/c"}
    assert call_key("model/a", "b", 1) == "model/a/b:1"
