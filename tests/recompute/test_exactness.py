"""Every awkward but legal kind of model: the same step, to the last bit, with everything replayed that can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.recompute.helpers import assert_exact, script, step
from torch import nn

from holdover.recompute.apply import install

WIDTH = 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, p: float = 0.0, math: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.p, self.math = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), p, math

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        if self.math:
            scores = F.dropout((q @ k.mT * 0.5).softmax(-1), self.p)
            y = scores @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, p: float = 0.1, math: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(Attention(p, math), nn.Dropout(p), Mlp()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1, 1).flatten())


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x)), inplace=True), 2)
        x = F.relu6(self.norm2(self.conv2(x)), inplace=True)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class InPlace(nn.Module):
    """Writes to fresh tensors, views of them, a pinned input and a caller's buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y.mul_(2).add_(1)
        y = y + self.seen
        self.seen += x.detach().sum(0)
        y[:, ::2].mul_(0.5)
        z = self.b(y).relu_() * 1.5
        z[0] = y[1].detach()
        torch.add(z.detach(), 1, out=(scratch := torch.empty_like(z.detach())))
        z = z * scratch.clone()
        torch._foreach_mul_([scratch, self.seen], 2.0)
        return z.sigmoid_() * self.seen.clone() + scratch.square_()


class Views(nn.Module):
    """Real parts, bit casts, conjugates, negatives, expansion, diagonals, strides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x * 1.5)
        mixed = spectrum * self.weight
        turned = mixed.conj() * spectrum.exp()
        pair = torch.view_as_real(turned)
        y = pair[..., 0].exp() * turned.imag
        negative = torch.conj(mixed).imag  # a view with the negative bit
        y = y * negative.sin()
        wide = (y[:, :1] * 2).expand(-1, 5)
        y = y * wide * wide.tan()
        bits = (y * 2).view(torch.int32)
        y = y * (bits & 1).float()
        square = y[:4, :4] * 3
        square.diagonal().mul_(2)
        return square.mT.cos().as_strided((3, 2), (1, 4), 1) * turned.abs()[:3, :2]


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp() * 2
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        first = ctx.saved_tensors[1]
        return grad * ctx.saved_tensors[1] * (first == ctx.saved_tensors[1])


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubling.apply(Doubling.apply(self.layer(x) * 0.1).log())


class Random(nn.Module):
    """Default and private generators, factories, in-place draws, noise arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        x = x * torch.rand(x.shape) + torch.randn_like(x)
        x = x * torch.randn(x.shape, generator=self.generator)
        x = F.dropout(x, 0.3) * torch.empty_like(x).normal_(generator=self.generator)
        x = F.rrelu(x, training=True) + F.alpha_dropout(x, 0.2) + F.dropout1d(x[None], 0.5)[0]
        x = x * torch.bernoulli(x.sigmoid()) + torch.native_dropout(x, 0.25, True)[0]
        order = torch.randperm(len(x))
        noise = torch.empty(2, WIDTH).uniform_()
        noise[0].exponential_()
        return x[order] * noise.sum() * torch.multinomial(x.softmax(-1), 2).sum()


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.b(self.a(x).tanh())
            with torch.autocast("cpu", enabled=False):
                x = self.a(x.float()).softmax(-1)
            return self.b(self.b(x)).float()


class NoGradParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        with torch.inference_mode():
            scale = self.teacher(x).abs().mean()
        return F.kl_div(self.student(x).log_softmax(-1), target) * float(scale)


class ManyOutputs(nn.Module):
    """Ops with several outputs, lists of tensors, and outputs that only some ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = self.layer(x)
        top, where = x.topk(3)
        u, s, v = torch.linalg.svd(x[:4, :4] + torch.eye(4))
        parts = torch._foreach_exp([x[0], x[1]])
        order, back = x.sort(dim=0)
        return {
            "top": top.exp() * where, "s": s * u.diagonal() * v.diagonal(), "parts": [p * p for p in parts],
            "sorted": order.gather(0, back), "var": torch.var_mean(x, 0), "n": 3, "none": None,
            "index": x[[0, 2], [1, 1]], "scatter": torch.zeros(3).scatter_add(0, torch.tensor([0, 1, 1]), top[0]),
        }  # fmt: skip


class Shared(nn.Module):
    """One module called several times, and one that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Mlp()
        self.again = self.block

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = self.block(self.again(x)).tanh()
        return self(x, depth - 1) if depth else x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.GRU(WIDTH, WIDTH, dropout=0.2, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (h, c) = self.lstm(x)
        return self.gru(y)[0] * h.sum() * c.sum()


class GradInside(nn.Module):
    """A force field: forward takes a gradient, with and without a graph of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = self.net(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        (flat,) = torch.autograd.grad(self.net(x).sum(), x)
        return energy.tanh() * (force * flat).square().sum() + self.net(x).exp().sum()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bag = nn.Embedding(9, WIDTH, sparse=True), nn.EmbeddingBag(9, WIDTH, mode="max")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        matrix = torch.eye(len(ids)).to_sparse()
        return torch.sparse.mm(matrix, self.embed(ids).mean(1).exp()) * self.bag(ids)


class Hooked(nn.Module):
    """User hooks that read, replace and count."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0
        self.a.register_forward_hook(lambda m, args, out: out.tanh() * 2)
        self.b.register_forward_pre_hook(self.count)

    def count(self, module: nn.Module, args: Any) -> Any:
        self.calls += 1
        return (args[0] * (1 + self.calls),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if y.requires_grad:
            y.register_hook(lambda g: g * 3)
        return self.b(y)


class Frozen(nn.Module):
    """No gradient into the first part, none out of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Mlp().requires_grad_(False)
        self.adapter, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.adapter(self.base(x)) + self.base(x)
        return self.base(h), self.unused(h).detach(), h.detach().exp()


def batch(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=grad)


KINDS = {
    "mlp": lambda: (Mlp(), (batch(5, WIDTH, grad=True),)),
    "transformer": lambda: (Transformer(), (torch.randint(11, (2, 6)),)),
    "transformer, math attention": lambda: (Transformer(0.2, math=True), (torch.randint(11, (2, 6)),)),
    "transformer, eval": lambda: (Transformer().eval(), (torch.randint(11, (2, 6)),)),
    "convolutions, batch norm": lambda: (ConvNet(), (batch(3, 2, 8, 8, grad=True),)),
    "batch norm, eval": lambda: (ConvNet().eval(), (batch(3, 2, 8, 8),)),
    "in place": lambda: (InPlace(), (batch(4, WIDTH, grad=True),)),
    "views": lambda: (Views(), (batch(4, 8, grad=True),)),
    "custom function": lambda: (Custom(), (batch(4, WIDTH, grad=True),)),
    "random": lambda: (Random(), (batch(4, WIDTH),)),
    "autocast": lambda: (Autocast(), (batch(4, WIDTH, grad=True),)),
    "no-grad parts": lambda: (NoGradParts(), (batch(4, WIDTH),)),
    "many outputs": lambda: (ManyOutputs(), (batch(6, WIDTH, grad=True),)),
    "shared": lambda: (Shared(), (batch(4, WIDTH, grad=True),)),
    "recurrent": lambda: (Recurrent(), (batch(3, 4, WIDTH, grad=True),)),
    "gradient inside": lambda: (GradInside(), (batch(4, WIDTH),)),
    "sparse": lambda: (Sparse(), (torch.randint(9, (4, 3)),)),
    "hooks": lambda: (Hooked(), (batch(4, WIDTH),)),
    "frozen": lambda: (Frozen(), (batch(4, WIDTH),)),
    "double precision": lambda: (Mlp().double(), (batch(4, WIDTH).double(),)),
    "bfloat16": lambda: (Mlp().bfloat16(), (batch(4, WIDTH).bfloat16(),)),
    "channels last": lambda: (
        ConvNet().to(memory_format=torch.channels_last),
        (batch(3, 2, 8, 8).to(memory_format=torch.channels_last),),
    ),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), (batch(2, 4, WIDTH),)),
    "spectral norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), (batch(4, WIDTH),)),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), (batch(4, WIDTH),)),
    "script module inside": lambda: (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(nn.Tanh()), nn.Linear(WIDTH, WIDTH)),
        (batch(4, WIDTH),),
    ),
}


def seeded(kind: str) -> Any:
    torch.manual_seed(11)
    return KINDS[kind]()


def some(fraction: int) -> Any:
    """A policy that picks by a fixed hash of the place."""
    return lambda key, i, name: ("recompute", "", "pack")[(len(key) * 7 + i * 5 + len(name) * fraction) % 3]


@pytest.mark.parametrize("kind", KINDS)
def test_replaying_everything_is_exact(kind: str) -> None:
    done = assert_exact(lambda: seeded(kind))
    assert done.matched > 0
    assert done.unmatched == ()


@pytest.mark.parametrize("fraction", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_any_mixture_of_choices_is_exact(kind: str, fraction: int) -> None:
    assert assert_exact(lambda: seeded(kind), some(fraction)).unmatched == ()


def test_python_runs_once() -> None:
    make = lambda: seeded("hooks")  # noqa: E731
    assert_exact(make)
    model, args = make()
    assert model(*args) is not None
    assert model.calls == 1


def test_replay_leaves_a_private_generator_where_forward_left_it() -> None:
    ends = []
    for planned in (False, True):
        model, args = seeded("random")
        counted = script(model, args)
        model.generator = torch.Generator().manual_seed(3)
        if planned:
            install(model, counted)
        step(model, args)
        ends.append(model.generator.get_state())
    assert torch.equal(*ends)
