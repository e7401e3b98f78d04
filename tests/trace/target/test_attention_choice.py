"""Which attention kernel a card gets, by what the kernels are documented to take."""

from __future__ import annotations

import pytest
import torch
from tests.trace.target.cases import A100, H100, H100_CUDA12, RTX4090, T4

from holdover.trace.target import Target
from holdover.trace.target.rules import CUDNN, EFFICIENT, FLASH, MATH, Attention, attention_backend

HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
BLACKWELL = Target("rtx5090", (12, 0))
GB300 = Target("gb300", (10, 3))


def attention(
    dtype: torch.dtype, *, head: int = 64, value: int | None = None, heads: int = 4, kv_heads: int | None = None,
    length: int = 16, keys: int | None = None, dropout: float = 0.0, causal: bool = False,
    mask: torch.Tensor | None = None, grad: bool = True, dims: int = 4,
) -> Attention:  # fmt: skip
    shape = (2, heads, length, head)[4 - dims :]
    kv = (2, kv_heads or heads, keys or length)[4 - dims :]
    with torch.device("meta"):
        q = torch.empty(shape, dtype=dtype, requires_grad=grad)
        k, v = torch.empty(*kv, head, dtype=dtype), torch.empty(*kv, value or head, dtype=dtype)
    return Attention(q, k, v, mask, dropout, causal, kv_heads is not None)


def mask(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=BF16, device="meta", requires_grad=grad)


CHOICES = {
    "T4 half": (attention(HALF), T4, EFFICIENT),
    "T4 float32": (attention(SINGLE), T4, EFFICIENT),
    "T4 bfloat16": (attention(BF16), T4, MATH),
    "T4 half of head size 20": (attention(HALF, head=20), T4, MATH),
    "T4 float32 of head size 20": (attention(SINGLE, head=20), T4, EFFICIENT),
    "A100 bfloat16": (attention(BF16), A100, FLASH),
    "A100 float32": (attention(SINGLE), A100, EFFICIENT),
    "A100 float32 of head size 18": (attention(SINGLE, head=18), A100, MATH),
    "A100 float64": (attention(DOUBLE), A100, MATH),
    "A100 head size 20 (padded)": (attention(BF16, head=20), A100, FLASH),
    "A100 head size 256": (attention(BF16, head=256), A100, FLASH),
    "A100 head size 264": (attention(BF16, head=264), A100, EFFICIENT),
    "A100 other head size of values": (attention(BF16, value=128), A100, EFFICIENT),
    "A100 mask": (attention(BF16, mask=mask(16, 16)), A100, EFFICIENT),
    "A100 mask with gradient": (attention(BF16, mask=mask(16, 16, grad=True)), A100, EFFICIENT),
    "A100 causal, fewer queries": (attention(BF16, causal=True, keys=32), A100, EFFICIENT),
    "A100 grouped heads": (attention(BF16, kv_heads=2), A100, FLASH),
    "A100 grouped heads in float32": (attention(SINGLE, kv_heads=2), A100, MATH),
    "A100 grouped heads and a mask": (attention(BF16, kv_heads=2, mask=mask(16, 16)), A100, MATH),
    "A100 three dimensions": (attention(BF16, dims=3), A100, MATH),
    "4090 head size 200 in training": (attention(BF16, head=200), RTX4090, EFFICIENT),
    "4090 head size 200 without gradient": (attention(BF16, head=200, grad=False), RTX4090, FLASH),
    "4090 head size 256": (attention(BF16, head=256), RTX4090, FLASH),
    "4090 head size 256 with dropout": (attention(BF16, head=256, dropout=0.1), RTX4090, EFFICIENT),
    "5090": (attention(BF16), BLACKWELL, FLASH),
    "H100": (attention(BF16), H100, CUDNN),
    "GB300": (attention(BF16), GB300, CUDNN),
    "H100 with an older cuDNN": (attention(BF16), H100_CUDA12, FLASH),
    "H100 head size 136": (attention(BF16, head=136), H100, FLASH),
    "H100 head size 20": (attention(BF16, head=20), H100, FLASH),
    "H100 heads of 192 and 128": (attention(BF16, head=192, value=128), H100, CUDNN),
    "H100 dropout of 1/8": (attention(BF16, dropout=0.125), H100, CUDNN),
    "H100 dropout of 1/10": (attention(BF16, dropout=0.1), H100, FLASH),
    "H100 mask": (attention(BF16, mask=mask(2, 1, 1, 16)), H100, CUDNN),
    "H100 mask of three dimensions": (attention(BF16, mask=mask(4, 16, 16)), H100, EFFICIENT),
    "H100 mask with gradient": (attention(BF16, mask=mask(16, 16, grad=True)), H100, EFFICIENT),
    "H100 one key": (attention(BF16, keys=1), H100, FLASH),
    "H100 float32": (attention(SINGLE), H100, EFFICIENT),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_choice(name: str) -> None:
    call, target, backend = CHOICES[name]
    assert attention_backend(call, target) == backend


def test_switches_of_the_program_are_obeyed() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention_backend(attention(BF16), H100) == MATH
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert attention_backend(attention(BF16), H100) == EFFICIENT
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match="No available kernel"),
    ):
        attention_backend(attention(SINGLE), H100)


def test_deterministic_algorithms_keep_cudnn_out() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert attention_backend(attention(BF16), H100) == FLASH
    finally:
        torch.use_deterministic_algorithms(False)
