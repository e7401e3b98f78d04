"""With what else people do to autograd and modules: activation checkpointing, transforms, hooks, compilation, modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.recompute.helpers import assert_exact, assert_same, count, results, script, script_of, step
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from holdover.errors import ApplyError
from holdover.recompute.apply import install, session, uninstall
from holdover.recompute.inspect import inspect

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.dropout(F.gelu(self.norm(self.up(x))), 0.2))


class Wrapped(nn.Module):
    """Two blocks, each called through `wrap`."""

    def __init__(self, wrap: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second, self.wrap = Block(), Block(), wrap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrap(self.second, self.wrap(self.first, x).tanh()).exp()


def reentrant(f: Any, *args: Any) -> Any:
    return checkpoint(f, *args, use_reentrant=True)


def non_reentrant(f: Any, *args: Any) -> Any:
    return checkpoint(f, *args, use_reentrant=False)


def selective(f: Any, *args: Any) -> Any:
    save = [torch.ops.aten.addmm.default]
    return checkpoint(f, *args, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(save))


def on_cpu(f: Any, *args: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return f(*args)


def direct(f: Any, *args: Any) -> Any:
    return f(*args)


WRAPS = [direct, reentrant, non_reentrant, selective, on_cpu]


def batch() -> torch.Tensor:
    return torch.randn(7, WIDTH, requires_grad=True)


@pytest.mark.parametrize("wrap", WRAPS)
def test_inside_the_model(wrap: Any) -> None:
    def make() -> Any:
        torch.manual_seed(1)
        return Wrapped(wrap), (batch(),)

    assert assert_exact(make).matched > 0


@pytest.mark.parametrize("wrap", WRAPS)
def test_around_the_model(wrap: Any) -> None:
    outcomes = []
    for plan in (False, True):
        torch.manual_seed(1)
        model, x = Wrapped(direct), batch()
        if plan:
            install(model, script(model, (x,)))
        torch.manual_seed(2)
        wrap(model, x).square().sum().backward()
        outcomes.append({n: p.grad for n, p in model.named_parameters()})
    assert_same(*outcomes)


class Counting(nn.Module):
    """What it gives depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.layer, self.norm = 0, nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.norm(self.layer(x).sin() * self.runs).exp()


def test_hooks_that_were_there_before_get_all_that_they_would() -> None:
    def coarse(f: Any, x: torch.Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            return f(x)

    for wrap in (coarse, non_reentrant):
        outcomes = []
        for plan in (False, True):
            torch.manual_seed(1)
            model, x = Counting(), batch()
            if plan:
                install(model, script(model, (x,)))
            wrap(model, x).square().sum().backward()
            outcomes.append({**results(model, (x,)), "runs": model.runs})
        assert_same(*outcomes)
        assert [k.reason for k in inspect(model).kept] == ["inside saved-tensor hooks, as of activation checkpointing"]


def test_in_a_block_hooks_that_were_there_before_get_all_too() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()), batch()
    choices, packed = script(model, (x,)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        model(x).square().sum()
        plain = len(packed)
        with session(choices, model_class="Sequential"):
            model(x).square().sum()
    assert len(packed) == 2 * plain


class Transforms(nn.Module):
    """Jacobians, per-sample gradients and maps inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x).sin()
        per_sample = torch.func.vmap(torch.func.grad(lambda v: self.net(v).square().sum()))(h)
        jacobian = torch.func.jacrev(lambda v: self.net(v))(h[0])
        forward_mode = torch.func.jvp(lambda v: v.exp() * v, (h,), (x,))[1]
        mapped = torch.func.vmap(lambda v: F.softmax(v * h[0], -1).log())(h)
        return self.net(per_sample @ jacobian + forward_mode * mapped)


def test_function_transforms_inside_forward() -> None:
    def make() -> Any:
        torch.manual_seed(1)
        return Transforms(), (batch(),)

    assert assert_exact(make).matched > 0


def test_function_transforms_around_the_model() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    plain, x = copy.deepcopy(model), batch()
    install(model, script(model, (x,)))
    for m in (plain, model):
        parameters = dict(m.named_parameters())
        m.outcome = torch.func.grad(lambda p, m=m: torch.func.functional_call(m, p, (x,)).square().sum())(parameters)
        m.jacobian = torch.func.jacrev(m)(x[0].detach())
    assert_same(plain.outcome, model.outcome)
    assert torch.equal(plain.jacobian, model.jacobian)


def test_transforms_leave_pytorch_as_it_was() -> None:
    before = torch.autograd.graph.disable_saved_tensors_hooks, nn.Module.__call__
    model, x = Transforms(), batch()
    with session(script(model, (x,)), model_class="Transforms"):
        model(x)
    assert (torch.autograd.graph.disable_saved_tensors_hooks, nn.Module.__call__) == before


def test_higher_derivatives() -> None:
    outcomes = []
    for plan in (False, True):
        torch.manual_seed(1)
        model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softplus(), nn.Linear(WIDTH, 1), nn.Tanh()), batch()
        if plan:
            install(model, script(model, (x,)))
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x, create_graph=True)
        (grad.norm() + second.norm()).backward()
        outcomes.append({"x": x.grad, **{n: p.grad for n, p in model.named_parameters()}})
    assert_same(*outcomes)


def test_gradient_check() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    install(model, script(model, (x,)))
    assert torch.autograd.gradcheck(model, (x,))
    assert torch.autograd.gradgradcheck(model, (x,))


class BackwardInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, net: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.net = net
        return net(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            ctx.net(leaf).backward(grad)
        return leaf.grad, None


def test_a_backward_within_a_backward() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(BackwardInBackward.apply(self.net(x).sin(), self.net).exp())

    def make() -> Any:
        torch.manual_seed(1)
        return Model(), (batch(),)

    assert_exact(make)


def test_several_calls_before_one_backward() -> None:
    outcomes = []
    for plan in (False, True):
        torch.manual_seed(1)
        model, x = Block(), batch()
        if plan:
            install(model, script(model, (x,)))
        state = x
        for _ in range(4):
            state = model(state)
        (state.sum() + model(x).square().sum()).backward()
        outcomes.append({"x": x.grad, **{n: p.grad for n, p in model.named_parameters()}, **model.state_dict()})
    assert_same(*outcomes)


def test_training_for_some_steps() -> None:
    outcomes = []
    for plan in (False, True):
        torch.manual_seed(1)
        model, x = Wrapped(direct), batch().detach()
        if plan:
            install(model, script(model, (x,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            F.mse_loss(model(x), x).backward()
            optimizer.step()
        outcomes.append(model.state_dict())
    assert_same(*outcomes)


def test_a_mode_of_the_user_within_forward() -> None:
    class Doubling(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.ops.aten.sin.default else out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x).cos()
            with Doubling():
                x = self.layer(x.sin()).exp()
            return x.sin()

    def make() -> Any:
        torch.manual_seed(1)
        return Model(), (batch(),)

    assert_exact(make)


class Tagged(torch.Tensor):
    """A subclass that only changes the type."""


class Wrapper(torch.Tensor):
    """A subclass that holds another tensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(t: Any) -> Any:
            return t.inner if isinstance(t, Wrapper) else t

        out = func(*torch.utils._pytree.tree_map(unwrap, args), **(kwargs or {}))
        return Wrapper(out) if isinstance(out, torch.Tensor) else out


def test_tensors_of_other_kinds_are_kept() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer(x)
            tagged = h.exp().as_subclass(Tagged).sin().as_subclass(torch.Tensor)
            wrapped = Wrapper(x.detach().exp()).mul(2).inner
            nested = torch.nested.nested_tensor([x[0].detach(), x[1].detach()]).to_padded_tensor(0.0).sum()
            sparse = (h.detach().relu().to_sparse() * 2).to_dense()
            quantized = torch.quantize_per_tensor(h.detach(), 0.1, 0, torch.qint8).dequantize()
            return tagged.cos() * wrapped.sin() * nested + sparse * h + quantized * h.sin()

    def make() -> Any:
        torch.manual_seed(1)
        return Model(), (batch(),)

    done = assert_exact(make)
    assert {"sparse_coo tensor", "quantized tensor"} <= {k.reason for k in done.kept}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_part(backend: str, in_place: bool) -> None:
    torch._dynamo.reset()

    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), nn.Tanh())

    plain, x = build(), batch()
    expected = step(plain, (x,))
    x.grad = None
    model = build()
    install_on = script(model, (x,))
    install_on = {k: v for k, v in install_on.items() if "/1" not in k}
    frames = []

    def compiler(graph: Any, inputs: Any) -> Any:
        frames.append(graph)
        return graph.forward

    chosen: Any = compiler if backend == "eager" else backend
    if in_place:
        model[1].compile(backend=chosen)
    else:
        model[1] = torch.compile(model[1], backend=chosen)
    install(model, install_on)
    got = step(model, (x,))
    assert_same(expected["grads"], {n.replace("_orig_mod.", ""): g for n, g in got["grads"].items()})
    assert inspect(model).unmatched == ()
    assert inspect(model).replayed_ops > 0
    assert backend != "eager" or frames


def test_compiling_what_follows_a_plan_is_refused() -> None:
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), batch()
    plain = step(copy.deepcopy(model), (x,))
    x.grad = None
    install(model, script(model, (x,)))
    with pytest.raises(ApplyError, match=r"follows a plan for eager mode.*compiled=True"):
        torch.compile(model, backend="aot_eager")(x)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="follows a holdover plan for eager mode: plan with compiled=True"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    with torch.no_grad():  # where nothing is saved, there is nothing to follow
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, backend="aot_eager")(x), plain["out"][0])
    uninstall(model)
    torch._dynamo.reset()
    got = step(torch.compile(model, backend="aot_eager"), (x,))
    assert_same(plain["grads"], {n.replace("_orig_mod.", ""): g for n, g in got["grads"].items()})


@pytest.mark.parametrize("name", ["", "1"])
def test_a_plan_does_not_go_on_what_is_compiled(name: str) -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), batch()
    wanted = script(model, (x,))
    model.get_submodule(name).compile()
    with pytest.raises(ApplyError, match=r"compiled by torch\.compile.*compiled=True"):
        install(model, wanted)


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model, x = Wrapped(direct), batch()
        install(model, script_of(count_fake(model, x)))
        model(x).sum().backward()
        assert model.first.up.weight.grad.shape == (12, WIDTH)
    assert inspect(model).replayed_ops > 10


def count_fake(model: nn.Module, x: torch.Tensor) -> Any:
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        return count(Wrapped(direct), (torch.randn(7, WIDTH, requires_grad=True),))


def test_meta_tensors() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.RReLU(), nn.Tanh())
        x = torch.empty(3, WIDTH, requires_grad=True)
    on_cpu = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.RReLU(), nn.Tanh())
    install(model, script(on_cpu, (batch(),)))
    model(x).sum().backward()
    assert inspect(model).replayed_ops > 0


def test_a_generator_as_forward() -> None:
    class Yields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> Any:
            for _ in range(2):
                x = self.layer(x).tanh()
                yield x

    model, x = Yields(), batch()
    install(model, {"model": {0: ("aten.tanh.default", "recompute")}})
    sum(y.sum() for y in model(x)).backward()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_profilers_and_anomaly_mode() -> None:
    model, x = Block(), batch()
    install(model, script(model, (x,)))
    with torch.autograd.detect_anomaly(check_nan=True), torch.profiler.profile():
        model(x).sum().backward()


TOOLS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "trace": lambda m, x: torch.jit.trace(m, (x,)),
    "export": lambda m, x: torch.export.export(m, (x,)).module(),
    "strict export": lambda m, x: torch.export.export(m, (x,), strict=True).module(),
    "fx": lambda m, x: torch.fx.symbolic_trace(m),
    "make_fx": lambda m, x: torch.fx.experimental.proxy_tensor.make_fx(m)(x),
    "vmap": lambda m, x: torch.vmap(m),
    "data parallel": lambda m, x: nn.DataParallel(m),
    "functional call": lambda m, x: lambda x: torch.func.functional_call(m, dict(m.named_parameters()), (x,)),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_that_take_a_model(tool: str) -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), batch()
    expected = model(x)
    install(model, script(model, (x,)))
    assert torch.equal(TOOLS[tool](model, x)(x), expected)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.equal(model(x), expected)
