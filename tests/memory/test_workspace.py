"""Workspace against the profiler that estimates are judged by, which is not the one that measures it here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from holdover.measuring.arguments import Arena
from holdover.memory import workspace
from holdover.memory.measure import measure_peak
from holdover.memory.workspace import POINTWISE, takes_nothing, true_outputs, workspace_bytes
from holdover.trace.graph import Signature, TensorSpec


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Calls(TorchDispatchMode):
    """Notes each op with its arguments, and the peak of a second run of it above what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.signatures: list[Signature] = []
        self.real: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.signatures.append(signature_of(func, args, kwargs))
        clean = not func._schema.is_mutable
        if clean:
            result, peak = measure_peak(lambda: func(*args, **kwargs))
            self.real.append(peak - new_bytes(result, args))
            return result
        self.real.append(-1)
        return func(*args, **kwargs)


def signature_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Signature:
    def plain(value: Any) -> Any:
        value = tree_map_only(torch.Tensor, spec_of, value)
        return tuple(value) if isinstance(value, list) else value

    return Signature(str(func), tuple(plain(a) for a in args), tuple((k, plain(v)) for k, v in kwargs.items()))


def spec_of(t: torch.Tensor) -> TensorSpec:
    dtype = str(t.dtype).removeprefix("torch.")
    return TensorSpec(tuple(t.shape), t.stride(), dtype, "cpu", t.storage_offset(), t.untyped_storage().nbytes())


def new_bytes(result: Any, args: Any) -> int:
    old = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
    tensors = result if isinstance(result, (tuple, list)) else [result]
    storages = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return sum({s._cdata: s.nbytes() for s in storages if s._cdata not in old}.values())


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)


def single(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def channels_last(*shape: int) -> torch.Tensor:
    return single(*shape).to(memory_format=torch.channels_last)


STEPS: dict[str, Callable[[], torch.Tensor]] = {
    "convolution": lambda: F.conv2d(single(2, 8, 16, 16), single(12, 8, 3, 3), single(12), padding=1).sum(),
    "convolution in half precision": lambda: F.conv2d(half(2, 8, 16, 16), half(12, 8, 3, 3), padding=1).sum(),
    "depthwise convolution": lambda: F.conv2d(single(2, 8, 16, 16), single(8, 1, 3, 3), groups=8).sum(),
    "3-D convolution": lambda: F.conv3d(single(1, 4, 8, 8, 8), single(8, 4, 3, 3, 3)).sum(),
    "transposed convolution": lambda: F.conv_transpose2d(single(2, 8, 8, 8), single(8, 4, 2, 2), stride=2).sum(),
    "channels last": lambda: F.conv2d(channels_last(2, 8, 16, 16), single(8, 8, 3, 3)).sum(),
    "attention": lambda: F.scaled_dot_product_attention(*(single(2, 4, 64, 32) for _ in range(3))).sum(),
    "products in half precision": lambda: (half(64, 48) @ half(48, 32) @ half(32, 16)).sum(),
    "mixed dtypes": lambda: (single(256, 64) * half(256, 64) + half(64)).sum(),
    "layer norm": lambda: F.layer_norm(single(64, 96), (96,), single(96), single(96)).sum(),
    "group norm": lambda: F.group_norm(single(4, 8, 12, 12), 2, single(8), single(8)).sum(),
    "batch norm": lambda: F.batch_norm(single(4, 8, 12, 12), None, None, single(8), single(8), True).sum(),
    "embedding": lambda: F.embedding(torch.arange(64) % 10, single(10, 32)).sum(),
    "sort": lambda: single(32, 64).sort(dim=0).values.sum(),
    "accumulating index_put": lambda: single(64, 32)[torch.arange(40) % 7].sum(),
    "bilinear upsampling": lambda: F.interpolate(single(2, 4, 8, 8), scale_factor=2, mode="bilinear").sum(),
    "max pooling": lambda: F.max_pool2d(single(2, 4, 16, 16), 2).sum(),
    "cross entropy": lambda: F.cross_entropy(single(64, 100), torch.arange(64)),
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_workspace_is_what_the_profiler_sees(step: str) -> None:
    calls = Calls()
    with calls:
        STEPS[step]().backward()
    found = workspace_bytes(calls.signatures)
    assert any(found.values()) or step in ("max pooling", "cross entropy", "attention")
    for i, (signature, real) in enumerate(zip(calls.signatures, calls.real, strict=True)):
        if real >= 0:
            # Scalars that Python hands over become tensors of 8 bytes inside some kernels.
            assert abs((found.get(i, 0) or 0) - real) <= 16, signature


def test_the_second_time_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    with calls:
        STEPS["convolution"]().backward()
    first = workspace_bytes(calls.signatures)
    monkeypatch.setattr(workspace, "_measured", lambda *_: pytest.fail("measured once more"))
    assert workspace_bytes(calls.signatures) == first


def contiguous(*shape: int, dtype: str = "float32") -> TensorSpec:
    return spec_of(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))


PLAIN_CALLS = {  # those that take something else than one tensor
    "add": 2, "add_": 2, "addcdiv": 3, "addcdiv_": 3, "addcmul": 3, "addcmul_": 3, "div": 2, "div_": 2, "mul": 2,
    "mul_": 2, "sub": 2, "sub_": 2, "rsub": 2, "maximum": 2, "minimum": 2, "gelu_backward": 2, "silu_backward": 2,
    "tanh_backward": 2, "sigmoid_backward": 2, "mish_backward": 2, "hardswish_backward": 2, "eq": 2, "ge": 2, "gt": 2,
    "le": 2, "lt": 2, "ne": 2, "copy_": 2,
}  # fmt: skip


@pytest.mark.parametrize("packet", sorted(POINTWISE - {"_to_copy"}))
def test_ops_that_are_said_to_take_nothing_take_nothing(packet: str) -> None:
    x = contiguous(64, 64)
    overload = {"fill_": "Scalar", "masked_fill": "Scalar", "masked_fill_": "Scalar", "pow": "Tensor_Scalar",
                "bernoulli_": "float", "where": "self", "lerp": "Scalar", "lerp_": "Scalar",
                "clamp": "default", "clamp_min": "default"}.get(packet)  # fmt: skip
    overload = overload or next(o for o in ("Tensor", "default") if o in getattr(torch.ops.aten, packet).overloads())
    mask = contiguous(64, 64, dtype="bool")
    args: tuple[Any, ...] = {
        "fill_": (x, 1.0), "masked_fill": (x, mask, 1.0), "masked_fill_": (x, mask, 1.0), "pow": (x, 3.0),
        "bernoulli_": (x, 0.5), "where": (mask, x, x), "lerp": (x, x, 0.1), "lerp_": (x, x, 0.1), "clamp": (x, 0.0),
        "clamp_min": (x, 0.0), "hardtanh_backward": (x, x, -1.0, 1.0), "threshold_backward": (x, x, 0.0),
        "leaky_relu_backward": (x, x, 0.1, False), "softplus_backward": (x, x, 1.0, 20.0),
        "elu_backward": (x, 1.0, 1.0, 1.0, False, x), "hardsigmoid_backward": (x, x),
        "log_sigmoid_backward": (x, x, contiguous(64, 64)), "logical_and": (mask, mask), "logical_or": (mask, mask),
        "bitwise_and": (mask, mask), "bitwise_or": (mask, mask), "bitwise_not": (mask,),
    }.get(packet, (x,) * PLAIN_CALLS.get(packet, 1))  # fmt: skip
    signature = Signature(f"aten.{packet}.{overload}", args, ())
    assert takes_nothing(signature)
    measured = workspace._measured(signature, Arena(torch.device("cpu")))
    assert measured is not None
    assert measured <= 16


def test_a_mask_that_is_multiplied_by_is_cast_first() -> None:
    mask, x = contiguous(64, 64, dtype="bool"), contiguous(64, 64)
    product = Signature("aten.mul.Tensor", (x, mask), ())
    filled = Signature("aten.masked_fill.Scalar", (x, mask, 0.0), ())
    assert workspace_bytes([product, filled]) == {0: 4 * 64 * 64}


def test_a_matrix_is_flipped_by_blocks_of_60() -> None:
    flipped = replace(contiguous(64, 96), stride=(1, 64))
    assert workspace_bytes([Signature("aten.copy_.default", (contiguous(64, 96), flipped), ())]) == {0: 4 * 60 * 60}
    assert workspace_bytes([Signature("aten.copy_.default", (contiguous(64, 96), contiguous(64, 96)), ())]) == {}


def test_blocks_of_an_expanded_gradient_are_copied_in_full() -> None:
    """As in the backward of `F.unfold(x, 3).sum()`; the image that comes of it keeps the memory of the blocks."""
    blocks = replace(contiguous(4, 72, 900), stride=(0, 0, 0))
    signature = Signature("aten.col2im.default", (blocks, (32, 32), (3, 3), (1, 1), (0, 0), (1, 1)), ())
    assert workspace_bytes([signature]) == {0: 4 * 4 * 72 * 900}
    outputs = true_outputs(signature)
    assert outputs is not None
    assert [(o.shape, o.storage_bytes) for o in outputs if o is not None] == [((4, 8, 32, 32), 4 * 4 * 72 * 900)]


def test_a_gradient_that_lies_otherwise_decides_how_the_next_one_lies() -> None:
    x, flipped = contiguous(64, 96), replace(contiguous(64, 96), stride=(1, 64))
    outputs = true_outputs(Signature("aten.elu_backward.default", (flipped, 1.0, 1, 1, False, x), ()))
    assert outputs is not None
    assert [o.stride for o in outputs if o is not None] == [(1, 64)]
    assert true_outputs(Signature("aten.elu_backward.default", (x, 1.0, 1, 1, False, x), ())) is None


def test_mixed_dtypes_and_unknown_ops_are_not_taken_for_granted() -> None:
    assert not takes_nothing(Signature("aten.mul.Tensor", (contiguous(8, 8), contiguous(8, 8, dtype="bfloat16")), ()))
    assert not takes_nothing(Signature("mine.fused.default", (contiguous(8, 8),), ()))
    assert workspace_bytes([Signature("mine.fused.default", (contiguous(8, 8),), ())]) == {0: None}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("aten.mm.default", (contiguous(4096, 256, dtype="bfloat16"), contiguous(256, 192, dtype="bfloat16"))),
        ("aten.mul.Tensor", (contiguous(512, 16, 64), contiguous(512, 16, 64, dtype="bfloat16"))),
        ("aten.sort.default", (contiguous(4096, 64), 0)),
        ("aten.native_layer_norm_backward.default",
         (contiguous(256, 64, 96), contiguous(256, 64, 96), (96,), contiguous(256, 64, 1), contiguous(256, 64, 1),
          contiguous(96), contiguous(96), (True, True, True))),
    ],
)  # fmt: skip
def test_what_is_too_large_is_scaled_up_from_smaller_sizes(
    name: str, args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    signature, arena = Signature(name, args, ()), Arena(torch.device("cpu"))
    truth = workspace._measured(signature, arena)
    assert truth is not None
    guess = workspace._scaled(signature, arena)
    assert guess is not None
    assert abs(guess - truth) <= 0.02 * truth + 1024


def test_a_convolution_too_large_for_this_machine_is_scaled() -> None:
    batch = 1 << 16
    args = (contiguous(batch, 64, 56, 56), contiguous(64, 64, 3, 3), None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    found = workspace_bytes([Signature("aten.convolution.default", args, ())])
    nbytes = 4 * batch * 64 * 56 * 56
    assert found[0] is not None
    assert 0.5 * nbytes < found[0] < 4 * nbytes


@pytest.mark.parametrize(("channels", "stride"), [(128, 1), (512, 2)])
def test_a_convolution_of_an_ordinary_network_is_measured_at_its_own_size(channels: int, stride: int) -> None:
    """What oneDNN reorders depends on the size: at a quarter of the batch it took nothing, so scaling said nothing."""
    side = 32 // stride
    gradient, image = torch.randn(16, channels, side, side), torch.randn(16, 256, 32, 32)
    calls, weight = Calls(), torch.randn(channels, 256, 1, 1)
    with calls:
        torch.ops.aten.convolution_backward(
            gradient, image, weight, [0], [stride, stride], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
        )
    assert workspace_bytes(calls.signatures).get(0, 0) == pytest.approx(calls.real[0], abs=4096)


def output_bytes(signature: Signature) -> list[int]:
    outputs = true_outputs(signature)
    assert outputs is not None
    return [o.storage_bytes for o in outputs if o is not None]


def test_the_workspace_of_an_lstm_is_told_although_fake_tensors_have_none() -> None:
    lstm = torch.nn.LSTM(16, 24)
    calls = Calls()
    with calls:
        lstm(torch.randn(10, 4, 16))
    (layer,) = [s for s in calls.signatures if "rnn_layer" in s.name]
    sizes = output_bytes(layer)
    assert sizes[:3] == [4 * 10 * 4 * 24, 4 * 4 * 24, 4 * 4 * 24]
    assert sizes[3] > 4 * 10 * 4 * 24 * 4  # the gates of every position at least


def test_statistics_of_a_norm_in_mixed_precision_are_float32() -> None:
    x, weight = contiguous(8, 32, dtype="bfloat16"), contiguous(32)
    outputs = true_outputs(Signature("aten.native_layer_norm.default", (x, (32,), weight, weight, 1e-5), ()))
    assert outputs is not None
    assert [(o.shape, o.dtype) for o in outputs if o is not None] == [
        ((8, 32), "bfloat16"), ((8, 1), "float32"), ((8, 1), "float32"),
    ]  # fmt: skip


def test_a_mean_loss_keeps_the_memory_of_its_unreduced_form() -> None:
    x = contiguous(64, 32)
    assert output_bytes(Signature("aten.mse_loss.default", (x, x), ())) == [4 * 64 * 32]


def test_ops_that_fake_tensors_know_are_not_run() -> None:
    x = contiguous(8, 8)
    assert true_outputs(Signature("aten.mm.default", (x, x), ())) is None
    assert true_outputs(Signature("aten.native_layer_norm.default", (x, (8,), None, None, 1e-5), ())) is None
