"""Layers with the bytes that autograd keeps of them on a card, counted by hand from what the kernels give back.

None of them was used to write a rule. B, T, D and so on are the sizes in the counts; inputs and parameters are not
counted, as in an estimate's activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from holdover.trace.target import Target

T4 = Target("t4", (7, 5))
A100 = Target("a100-80gb", (8, 0))
RTX4090 = Target("rtx4090", (8, 9))
H100 = Target("h100-80gb", (9, 0))
H100_CUDA12 = Target("h100-80gb", (9, 0), cudnn=91002)

B, T, D, HEADS, HEAD = 2, 40, 64, 4, 16
N = B * T


@dataclass(frozen=True)
class Case:
    """A step, what it saves on the card, and an op of forward that the rule brings about."""

    rule: str  # name in COMPOSITES or KERNELS, or "" where what is shown needs none
    make: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]
    saved: int
    op: str
    precision: str = "32-true"
    target: Target = A100


class Attention(nn.Module):
    """Self-attention whose q, k and v are views of one product, as in GPT-2."""

    def __init__(self, dropout: float = 0.0, causal: bool = False, head: int = HEAD) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * HEADS * head, bias=False)
        self.dropout, self.causal, self.head = dropout, causal, head

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, self.head)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, mask, self.dropout, self.causal)


class Grouped(nn.Module):
    """Attention with half as many heads of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        k, v = (t.unflatten(-1, (HEADS // 2, HEAD)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(D, 96, bias=False), nn.Linear(D, 96, bias=False)
        self.down = nn.Linear(96, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Top-2 of three experts, every expert over every token and weighted by its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 3, bias=False)
        self.up = nn.ModuleList(nn.Linear(D, 96, bias=False) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(96, D, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, chosen = self.router(x).softmax(-1).topk(2)
        gates = torch.zeros(len(x), 3, device=x.device).scatter(1, chosen, values)
        return sum(gates[:, i, None] * self.down[i](F.silu(self.up[i](x))) for i in range(3))  # type: ignore[return-value]


class Call(nn.Module):
    """A function after a linear layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(D, D, bias=False), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


class Experts(nn.Module):
    """Each group of rows by a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(D, D, bias=False), nn.Parameter(torch.randn(2, D, 20))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return F.silu(torch._grouped_mm(self.linear(x), self.weight, offs=ends))


class Cell(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = kind(D, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.cell(x)
        return out[0] if isinstance(out, tuple) else out


class After(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.linear = nn.LSTM(D, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.rnn(x)[0])


class Warp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1, bias=False)

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(self.conv(x), grid, align_corners=True)


def sequence(*shape: int) -> tuple[torch.Tensor]:
    return (torch.randn(*shape),)


def swiglu() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return SwiGLU(), sequence(N, D)


def conv_norm(norm: nn.Module, act: nn.Module) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), norm, act), sequence(2, 3, 10, 10)


def channels_last(
    made: tuple[nn.Module, tuple[torch.Tensor, ...]], dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model, args = made
    return model.to(dtype), tuple(t.to(dtype, memory_format=torch.channels_last) for t in args)


def boolean_mask() -> torch.Tensor:
    return torch.ones(T, T, dtype=torch.bool).tril()


def random_bias(length: int) -> torch.Tensor:
    return torch.randn(1, 1, length, length)


RNG_FLASH = 16 + 8  # a state of two uint64, and an unused one
RNG_INT = 8 + 8  # seed and offset
QKV = N * 3 * D  # elements of q, k and v
OUT = N * D
LSE = B * HEADS * T * 4
LSE_32 = B * HEADS * 64 * 4  # memory-efficient attention rounds 40 up to 64

CASES: dict[str, Case] = {
    "flash": Case(
        "scaled_dot_product_attention", lambda: (Attention(causal=True), sequence(B, T, D)),
        2 * QKV + 2 * OUT + LSE + RNG_FLASH, "_scaled_dot_product_flash_attention", "bf16-true",
    ),
    "flash of head size 12, padded to 16": Case(
        "scaled_dot_product_attention", lambda: (Attention(head=12), sequence(B, T, D)),
        # the padded copies of q, k and v and the padded result; the product itself is not needed again
        4 * (2 * N * HEADS * 16) + LSE + RNG_FLASH, "_scaled_dot_product_flash_attention", "bf16-true",
    ),
    "flash with dropout": Case(
        "scaled_dot_product_attention", lambda: (Attention(dropout=0.1), sequence(B, T, D)),
        2 * QKV + 2 * OUT + LSE + RNG_FLASH, "_scaled_dot_product_flash_attention", "bf16-true", H100,
    ),
    "cudnn attention with dropout": Case(
        "scaled_dot_product_attention", lambda: (Attention(dropout=0.125), sequence(B, T, D)),
        2 * QKV + 2 * OUT + LSE + RNG_INT, "_scaled_dot_product_cudnn_attention", "bf16-true", H100,
    ),
    "grouped heads in flash": Case(
        "scaled_dot_product_attention", lambda: (Grouped(), sequence(B, T, D)),
        2 * (N * D + N * D) + 2 * OUT + LSE + RNG_FLASH, "_scaled_dot_product_flash_attention", "bf16-true",
    ),
    "grouped heads in float32 take the long way": Case(
        "", lambda: (Grouped(), sequence(B, T, D)),
        # scaled q, repeated and scaled k, repeated v, all as wide as q; the probabilities
        4 * 3 * N * D + 4 * B * HEADS * T * T, "_safe_softmax",
    ),
    "efficient": Case(
        "scaled_dot_product_attention", lambda: (Attention(causal=True), sequence(B, T, D)),
        4 * QKV + 4 * OUT + LSE_32 + RNG_INT, "_scaled_dot_product_efficient_attention",
    ),
    "efficient with a boolean mask": Case(
        "scaled_dot_product_attention", lambda: (Attention(), (torch.randn(B, T, D), boolean_mask())),
        # the mask as numbers, once for all heads
        2 * QKV + 2 * OUT + LSE_32 + RNG_INT + 2 * T * T,
        "_scaled_dot_product_efficient_attention", "bf16-true",
    ),
    "efficient with a bias of 42 columns, padded to 48": Case(
        "scaled_dot_product_attention", lambda: (Attention(), (torch.randn(B, 42, D), random_bias(42))),
        4 * (B * 42 * 3 * D) + 4 * (B * 42 * D) + LSE_32 + RNG_INT + 4 * 42 * 48,
        "_scaled_dot_product_efficient_attention",
    ),
    "cudnn attention with a boolean mask": Case(
        "scaled_dot_product_attention", lambda: (Attention(), (torch.randn(B, T, D), boolean_mask())),
        2 * QKV + 2 * OUT + LSE + RNG_INT + 2 * T * T, "_scaled_dot_product_cudnn_attention", "bf16-true", H100,
    ),
    "dropout": Case(
        "dropout", lambda: (Call(nn.Dropout(0.1)), sequence(N, D)), N * D, "native_dropout",
    ),
    "dropout in place is a product with the mask": Case(
        "", lambda: (Call(nn.Dropout(0.1, inplace=True)), sequence(N, D)), 4 * N * D, "bernoulli_",
    ),
    "swiglu": Case(
        "silu_backward", swiglu,
        # x as bfloat16 for each of two products, gate, silu, up, their product, and down's weight as bfloat16
        2 * 2 * N * D + 4 * 2 * N * 96 + 2 * 96 * D, "silu", "bf16-mixed",
    ),
    "mish": Case("mish_backward", lambda: (Call(nn.Mish()), sequence(N, D)), 4 * N * D, "mish"),
    "group norm and silu": Case(
        "silu_backward", lambda: conv_norm(nn.GroupNorm(2, 8), nn.SiLU()),
        # x and the weight as bfloat16; float32 from there: the norm's input, its statistics and silu's input
        2 * (2 * 3 * 100) + 2 * (8 * 3 * 9) + 4 * (2 * 8 * 100) + 2 * 4 * (2 * 2) + 4 * (2 * 8 * 100),
        "native_group_norm", "bf16-mixed",
    ),
    "rms norm": Case(
        "_fused_rms_norm", lambda: (Call(nn.RMSNorm(D)), sequence(N, D)), 2 * N * D + 4 * N, "_fused_rms_norm",
        "bf16-true",
    ),
    "rms norm under autocast": Case(
        "_fused_rms_norm", lambda: (Call(nn.RMSNorm(D)), sequence(N, D)),
        2 * N * D + 4 * N * D + 4 * N, "_fused_rms_norm", "bf16-mixed",
    ),
    "layer norm in bfloat16 keeps its statistics in float32": Case(
        "", lambda: (Call(nn.LayerNorm(D)), sequence(N, D)), 2 * N * D + 2 * 4 * N, "native_layer_norm", "bf16-true",
    ),
    "conv, batch norm, relu in place": Case(
        "_batch_norm_impl_index", lambda: conv_norm(nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        4 * (2 * 8 * 100) + 2 * 4 * 8 + 4 * (2 * 8 * 100), "cudnn_batch_norm",
    ),
    "batch norm in bfloat16 is PyTorch's own": Case(
        "", lambda: conv_norm(nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        2 * (2 * 3 * 100) + 2 * (8 * 3 * 9) + 2 * (2 * 8 * 100) + 2 * 4 * 8 + 2 * (2 * 8 * 100),
        "native_batch_norm", "bf16-mixed",
    ),
    "lstm of two layers": Case(
        "lstm.input", lambda: (nn.LSTM(D, 32, 2, batch_first=True), sequence(B, T, D)),
        # hidden and cell state at the start, the output, and the reserve (guessed)
        2 * 4 * (2 * B * 32) + 4 * (N * 32) + 4 * 6 * (2 * N * 32), "_cudnn_rnn",
    ),
    "gru in both directions": Case(
        "gru.input", lambda: (nn.GRU(D, 32, bidirectional=True), sequence(T, B, D)),
        4 * (2 * B * 32) + 4 * (N * 2 * 32) + 4 * 5 * (2 * N * 32), "_cudnn_rnn",
    ),
    "tanh rnn": Case(
        "rnn_tanh.input", lambda: (nn.RNN(D, 32), sequence(T, B, D)),
        4 * (B * 32) + 4 * (N * 32) + 4 * 2 * (N * 32), "_cudnn_rnn",
    ),
    "relu rnn": Case(
        "rnn_relu.input", lambda: (nn.RNN(D, 32, nonlinearity="relu"), sequence(T, B, D)),
        4 * (B * 32) + 4 * (N * 32) + 4 * 2 * (N * 32), "_cudnn_rnn",
    ),
    "lstm under autocast runs in float16": Case(
        "lstm.input", lambda: (nn.LSTM(D, 32), sequence(T, B, D)),
        # the input and states cast, the weights in one cast buffer, the output and the reserve
        2 * (N * D) + 2 * 2 * (B * 32) + 2 * (4 * 32 * (D + 32 + 2)) + 2 * (N * 32) + 2 * 6 * (N * 32),
        "_cudnn_rnn", "bf16-mixed",
    ),
    "lstm cell": Case(
        "lstm_cell", lambda: (Cell(nn.LSTMCell), sequence(N, D)),
        # hidden state and gates of zeros, a product each for input and state, old and new cell state and the workspace
        4 * (N * 32) + 2 * 4 * (N * 4 * 32) + 4 * (N * 32) + 4 * (N * 4 * 32), "_thnn_fused_lstm_cell",
    ),
    "gru cell": Case(
        "gru_cell", lambda: (Cell(nn.GRUCell), sequence(N, D)),
        4 * (N * 32) + 2 * 4 * (N * 3 * 32) + 4 * (N * 5 * 32), "_thnn_fused_gru_cell",
    ),
    "softmax of float16 in float32 makes no copy": Case(
        "softmax.int", lambda: (Call(lambda y: y.softmax(-1, dtype=torch.float32)), sequence(N, D)),
        4 * N * D, "_softmax", "16-true",
    ),
    "log softmax of float16 in float32 makes no copy": Case(
        "log_softmax.int", lambda: (Call(lambda y: y.log_softmax(-1, dtype=torch.float32)), sequence(N, D)),
        4 * N * D, "_log_softmax", "16-true",
    ),
    "cross entropy under autocast": Case(
        "", lambda: (Call(lambda y: F.cross_entropy(y, torch.zeros(N, dtype=torch.long, device=y.device))),
                     sequence(N, D)),
        # x as bfloat16, probabilities in bfloat16 and cast to float32, targets, the sum of weights
        2 * N * D + 2 * N * D + 4 * N * D + 8 * N + 4, "_log_softmax", "bf16-mixed",
    ),
    "grid sample": Case(
        "grid_sampler", lambda: (Warp(), (torch.randn(2, 3, 8, 8), torch.rand(2, 6, 6, 2))),
        4 * (2 * 4 * 64), "cudnn_grid_sampler",
    ),
    "mixture of experts": Case(
        "silu_backward", lambda: (Mixture(), sequence(N, D)),
        # the router's probabilities, chosen indices, gates; per expert silu's input and output and the expert's result
        4 * N * 3 + 8 * N * 2 + 4 * N * 3 + 3 * (4 * N * 96 + 4 * N * 96 + 4 * N * D), "topk",
    ),
    "convolution, group norm and silu, channels last": Case(
        "", lambda: channels_last(conv_norm(nn.GroupNorm(2, 8), nn.SiLU())),
        # the norm copies its input to have each channel in one piece, and keeps the copy; the convolution's result goes
        4 * (2 * 8 * 100) + 2 * 4 * (2 * 2) + 4 * (2 * 8 * 100), "clone",
    ),
    "convolution in float64 ignores channels last": Case(
        "", lambda: channels_last(conv_norm(nn.BatchNorm2d(8), nn.Identity()), torch.float64),
        8 * (2 * 8 * 100) + 2 * 8 * 8, "cudnn_batch_norm",
    ),
    "lstm before a linear layer": Case(
        "", lambda: (After(), sequence(B, T, D)),
        # its result lies with time first, so the linear layer copies it
        2 * 4 * (B * 32) + 4 * (N * 32) + 4 * 6 * (N * 32) + 4 * (N * 32), "clone",
    ),
    "grouped product of float16": Case(
        "", lambda: (Experts(), (torch.randn(N, D), torch.tensor([30, N], dtype=torch.int32))),
        # rows; the products, of 20 columns in rows of 24, the last of which ends where it ends
        2 * N * D + 2 * ((N - 1) * 24 + 20), "_grouped_mm", "16-true",
    ),
    "max pool keeps int64 indices": Case(
        "", lambda: (nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.MaxPool2d(2)),
                     sequence(2, 3, 10, 10)),
        4 * (2 * 8 * 100) + 8 * (2 * 8 * 25), "max_pool2d_with_indices",
    ),
}  # fmt: skip
