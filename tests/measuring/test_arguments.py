"""Arguments made again: geometry kept, values valid, calls independent of each other."""

from __future__ import annotations

import pytest
import torch

from holdover.measuring.arguments import Arena, UnrunnableError, extent_bytes, is_view_or_factory, resolve
from holdover.trace.graph import Signature, TensorSpec

CPU = torch.device("cpu")


def test_geometry_is_kept() -> None:
    spec = TensorSpec((3, 4), (1, 5), "float32", "cpu", offset=17)
    _, (made,), _ = Arena(CPU).call(Signature("aten.neg.default", (spec,), ()))
    assert (made.shape, made.stride(), made.dtype) == ((3, 4), (1, 5), torch.float32)
    assert made.data_ptr() % 64 == 4 * 17 % 64
    assert extent_bytes(spec) == 4 * (1 + 2 * 1 + 3 * 5)


def test_values_are_valid_for_any_op() -> None:
    table, ids = TensorSpec((10, 2), (2, 1), "float32", "cpu"), TensorSpec((5,), (1,), "int64", "cpu")
    op, args, kwargs = Arena(CPU).call(Signature("aten.embedding.default", (table, ids), ()))
    found = op(*args, **kwargs)
    assert torch.equal(found, args[0][:1].expand(5, 2))  # indices are 0
    assert 0.25 <= found.min() < found.max() <= 0.75
    mask = TensorSpec((5,), (1,), "bool", "cpu")
    assert Arena(CPU).call(Signature("aten.all.default", (mask,), ()))[1][0].all()


ENDS = TensorSpec((4,), (1,), "int32", "cpu")


@pytest.mark.parametrize(
    ("a", "b", "named"),
    [
        ((40, 16), (4, 16, 8), False),
        ((40, 16), (4, 16, 8), True),
        ((16, 40), (40, 8), False),
        ((4, 8, 16), (16, 40), True),
    ],
    ids=["rows", "rows, named", "inner", "columns"],
)
def test_groups_of_a_product_are_of_one_size(a: tuple[int, ...], b: tuple[int, ...], named: bool) -> None:
    """With all ends at 0 there would be nothing to multiply, and experts would seem to cost no time."""
    operands = tuple(TensorSpec(s, torch.empty(s).stride(), "float32", "cpu") for s in (a, b))
    signature = Signature(
        "aten._grouped_mm.default", operands if named else (*operands, ENDS), (("offs", ENDS),) if named else ()
    )
    arena = Arena(CPU)
    op, args, kwargs = arena.call(signature)
    assert (kwargs["offs"] if named else args[2]).tolist() == [10, 20, 30, 40]
    if a[0] != 16:  # the kernel wants its operands laid out otherwise then
        assert op(*args, **kwargs).abs().sum(-1).min() > 0
    index = Signature("aten.embedding.default", (TensorSpec((1, 2), (2, 1), "float32", "cpu"), ENDS), ())
    assert not arena.call(index)[1][1].any()


def test_arguments_of_one_call_do_not_share_memory() -> None:
    spec = TensorSpec((4,), (1,), "float32", "cpu")
    _, (lists,), _ = Arena(CPU).call(Signature("aten.cat.default", ((spec, spec),), ()))
    lists[0].fill_(7)
    assert lists[1].max() <= 0.75


def test_what_an_op_wrote_is_put_back() -> None:
    arena, spec = Arena(CPU), TensorSpec((4,), (1,), "float32", "cpu")
    op, args, kwargs = arena.call(Signature("aten.zero_.default", (spec,), ()))
    before = args[0].clone()
    assert not op(*args, **kwargs).any()
    arena.restore(op, args, kwargs)
    assert torch.equal(arena.call(Signature("aten.neg.default", (spec,), ()))[1][0], before)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtypes_may_be_named_or_given(dtype: object) -> None:
    spec = TensorSpec((4,), (1,), "float32", "cpu")
    op, args, kwargs = Arena(CPU).call(Signature("aten._to_copy.default", (spec,), (("dtype", dtype),)))
    assert op(*args, **kwargs).dtype is torch.bfloat16


@pytest.mark.parametrize(
    "signature",
    [
        Signature("aten.no_such_op.default", (), ()),
        Signature("nonsense", (), ()),
        Signature("aten.resize_.default", (TensorSpec((4,), (1,), "float32", "cpu"), (8,)), ()),
        Signature("aten.neg.default", (TensorSpec((4,), (1,), "float99", "cpu"),), ()),
        Signature("aten.neg.default", (TensorSpec((4,), (1,), "float32", "cuda:0"),), ()),
        Signature("aten.neg.default", (None,), (), runnable=False),
        Signature("aten.mkldnn_rnn_layer_backward.default", (TensorSpec((0,), (1,), "uint8", "cpu"),), ()),
    ],
)
def test_what_cannot_be_called_is_refused(signature: Signature) -> None:
    with pytest.raises(UnrunnableError):
        Arena(CPU).call(signature)


def test_views_and_factories_are_told_from_ops_that_read() -> None:
    assert is_view_or_factory("aten.view.default")
    assert is_view_or_factory("aten.zeros.default")
    assert not is_view_or_factory("aten.mul_.Tensor")
    assert not is_view_or_factory("aten.clone.default")
    assert not is_view_or_factory("nowhere.nothing.default")
    assert resolve("aten.add.Tensor") is torch.ops.aten.add.Tensor
