"""Random small models: straight-line programs over matrices, whose values live for different lengths of time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 24, 64  # 6 KiB: above the size at which pins of inputs are copied

UNARY = (
    "linear", "gelu", "tanh", "sigmoid", "norm", "dropout", "softmax", "relu_", "mul_", "transposed", "halves", "exp",
    "square", "batch_norm", "double", "cast", "attention", "overwritten", "state", "small_state", "expanded", "pooled",
    "checkpointed", "native_dropout", "reentrant",
    "inner_gradient", "silu_", "gated_", "cloned",
)  # fmt: skip
BINARY = ("add", "mul", "concat", "add_")
instruction = st.tuples(st.sampled_from(UNARY + BINARY), st.integers(0, 3), st.integers(0, 5))
programs = st.lists(instruction, min_size=2, max_size=9)


class Instruction(nn.Module):
    """One step of a program, as a module of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        if name in ("linear", "halves"):
            self.layer = nn.Linear(WIDTH, WIDTH)
        if name == "concat":
            self.layer = nn.Linear(2 * WIDTH, WIDTH)
        if name == "norm":
            self.layer = nn.LayerNorm(WIDTH)
        if name == "batch_norm":
            self.layer = nn.BatchNorm1d(WIDTH)
        if name == "state":
            self.register_buffer("state", torch.ones(ROWS, WIDTH))
        if name == "small_state":
            self.register_buffer("state", torch.ones(WIDTH))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        match self.name:
            case "linear" | "norm" | "batch_norm":
                return self.layer(a)
            case "gelu":
                return F.gelu(a)
            case "dropout":
                return F.dropout(a, 0.3)
            case "softmax":
                return a.softmax(-1)
            case "relu_":
                return (a * 1.5).relu_()
            case "mul_":
                return (a * 0.5).mul_(b.detach())
            case "add_":
                return (a + 1).add_(b).sigmoid_()
            case "transposed":
                return (a.t() * b.t()).t()
            case "halves":
                left, right = self.layer(a).chunk(2, -1)
                return torch.cat([left.sigmoid() * right, right.tanh() * left], -1)
            case "square":
                return a * a * 0.1
            case "double":
                return (a.double() * 0.5).sin().float()
            case "cast":
                return (a.bfloat16() * b.bfloat16()).float()
            case "attention":
                q = a.view(1, 2, ROWS, WIDTH // 2)
                return F.scaled_dot_product_attention(q, q, q).view(ROWS, WIDTH)
            case "overwritten":
                y = a * 1.25
                z = F.gelu(y + 1)
                return z + y.mul_(2)
            case "state" | "small_state":
                y = torch.tanh(a + self.state)
                self.state.mul_(0.9)
                return y
            case "expanded":
                row = (a[:1] * 2).sin()
                return a * row.expand(ROWS, WIDTH) * b[:, 3:4]
            case "pooled":
                return F.interpolate(F.max_pool1d(a, 2)[None], scale_factor=2)[0] * a
            case "checkpointed":
                return checkpoint(lambda t: F.gelu(t.tanh() * 1.5), a, use_reentrant=False)
            case "reentrant":
                return checkpoint(lambda t: F.gelu(t.tanh() * 1.5), a, use_reentrant=True)
            case "inner_gradient":
                a = a if a.requires_grad else a.detach().requires_grad_()
                (slope,) = torch.autograd.grad((a * 1.5).tanh().square().sum(), a, create_graph=True)
                return slope + a
            case "silu_":
                return F.silu(a * 1.5, inplace=True)
            case "gated_":  # the gate needs a gradient: autograd clones what is overwritten
                y = a * 1.25
                return y.sigmoid() + y.mul_(b.tanh())
            case "cloned":  # a clone of the program's own, saved before what it copies is written over
                y = a * 0.75
                z = y.clone()
                return y.mul_(z) + z.sin()
            case "native_dropout":
                return torch.native_dropout(a, 0.3, True)[0]
            case "exp":
                return (a * 0.1).exp()
            case "add":
                return a + b
            case "mul":
                return a * b * 0.3
            case "concat":
                return self.layer(torch.cat([a, b], -1))
            case _:
                return getattr(a, self.name)()


class Program(nn.Module):
    """Each instruction reads the latest values, `i` and `j` places back; older ones than 6 are let go."""

    def __init__(self, instructions: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.places = [(i, j) for _, i, j in instructions]
        self.first = nn.Linear(WIDTH, WIDTH)
        self.steps = nn.ModuleList(Instruction(name) for name, _, _ in instructions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x, self.first(x)]
        for step, (i, j) in zip(self.steps, self.places, strict=True):
            values.append(step(values[-1 - i % len(values)], values[-1 - j % len(values)]))
            del values[:-6]
        return values[-1] + self.first.bias


def script(trace: Any, ops: Any, action: str = "recompute") -> dict[str, dict[int, tuple[str, str]]]:
    """The runtime's form of a set of ops of a trace."""
    found: dict[str, dict[int, tuple[str, str]]] = {}
    for number in ops:
        op = trace.ops[number]
        found.setdefault(trace.calls[op.call].key, {})[op.index] = (op.name, action)
    return found
