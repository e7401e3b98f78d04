"""When replayed tensors live: the rules of recipe.py, on live storages."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.recompute.helpers import assert_same, results, script
from torch import nn

from holdover import ReplayError
from holdover.recompute.apply import install, session
from holdover.recompute.inspect import inspect

N = 20_000  # more than the 64 KiB under which inputs are copied


class Live(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts bytes of the storages of N floats (or their multiples) that are alive, and the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.refs: dict[int, weakref.ref[Any]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().nbytes() >= 4 * N:
                self.add(t.untyped_storage())
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.refs and self.refs[key]() is storage:
            return
        size = storage.nbytes() // (4 * N)

        def dead(_: Any) -> None:
            self.now -= size

        self.refs[key] = weakref.ref(storage, dead)
        self.now += size
        self.peak = max(self.peak, self.now)


@pytest.fixture
def live() -> Iterator[Live]:
    gc.collect()
    with Live() as mode:
        yield mode


class Chain(nn.Module):
    """exp saves its result, sin and cos their argument: every value is saved."""

    def __init__(self, ops: str) -> None:
        super().__init__()
        self.ops = ops.split()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for op in self.ops:
            x = getattr(x, op)()
        return x


def planned(model: nn.Module, x: torch.Tensor, keep: set[int] = frozenset()) -> nn.Module:
    install(model, script(model, (x,), None, lambda key, i, name: "" if i in keep else "recompute"))
    return model


def leaf() -> torch.Tensor:
    return torch.linspace(0, 1, N).requires_grad_()


def test_nothing_is_kept_but_what_the_program_holds(live: Live) -> None:
    model, x = planned(Chain("sin cos sin cos sin"), leaf()), leaf()
    before = live.now
    out = model(x)
    assert live.now - before == 1  # the result
    out.sum().backward()
    del out
    x.grad = None
    assert live.now == before


def test_replay_frees_what_nobody_wants_any_more(live: Live) -> None:
    model = nn.Sequential(Chain("neg neg neg neg neg neg"), Chain("sin"))
    model, x = planned(model, leaf()), leaf()
    out = model(x).sum()
    before, live.peak = live.now, live.now
    out.backward()
    # cos(saved) * grad: the value, the one before it while it is made, then cos and the product
    assert live.peak - before <= 4
    assert inspect(model).replayed_ops == 6


def test_one_replay_serves_all_who_want_it(live: Live) -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.neg().neg()
            return y.sin() + y.cos() + y.exp().detach() * y * y

    model, x = planned(Wide(), leaf()), leaf()
    model(x).sum().backward()
    counts = inspect(model).replayed_ops
    assert counts <= 2 + 2 + 2  # neg neg once, exp and the product behind the last mul


def test_a_held_original_is_used_and_not_made_again() -> None:
    model, x = planned(Chain("sin cos"), leaf()), leaf()
    kept = []
    model.register_forward_hook(lambda m, args, out: kept.append(out))
    model[0] if isinstance(model, nn.Sequential) else None
    out = model(x)
    out.exp().sum().backward()
    assert inspect(model).replayed_ops == 1  # sin's result, for cos; x is a leaf


def test_a_held_original_that_was_changed_is_not_used() -> None:
    class Holds(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = x.sin()
            return y, y.cos()

    expected, x = leaf(), leaf()
    Holds()(expected)[1].sum().backward()
    model = planned(Holds(), x)
    y, z = model(x)
    with torch.no_grad():
        y.zero_()  # plain PyTorch would refuse backward now; the recipe still knows the value
    z.sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_each_pass_frees_its_cache(live: Live) -> None:
    model, x = planned(Chain("sin cos sin cos sin"), leaf()), leaf()
    out = model(x)
    loss = out.sum()
    before = live.now
    for _ in range(3):
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        del grad
        assert live.now == before
    plain, y = Chain("sin cos sin cos sin"), leaf()
    (expected,) = torch.autograd.grad(plain(y).sum(), y)
    (grad,) = torch.autograd.grad(loss, x)
    assert torch.equal(grad, expected)


def test_a_partial_backward_frees_its_cache(live: Live) -> None:
    class Forked(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = x.sin().cos().sin()
            return y.exp().detach() * y, y.tan()

    model, x = planned(Forked(), leaf()), leaf()
    one, two = model(x)
    losses = one.sum(), two.sum()
    del one, two
    before = live.now
    losses[0].backward(retain_graph=True)
    x.grad = None
    assert live.now <= before
    losses[1].backward()
    y = leaf()
    Forked()(y)[1].sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_a_graph_that_is_dropped_without_backward_leaves_nothing(live: Live) -> None:
    model, x = planned(Chain("sin cos sin exp"), leaf()), leaf()
    before = live.now
    out = model(x)
    loss = out.sum()
    del out, loss
    assert live.now == before


def test_an_exception_in_forward_leaves_nothing(live: Live) -> None:
    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
            y = x.sin().cos()
            if fail:
                raise KeyError("as asked")
            return y.exp()

    model, x = planned(Breaks(), leaf()), leaf()
    before = live.now
    for _ in range(2):
        with pytest.raises(KeyError):
            model(x, fail=True)
        assert live.now == before
    assert_hooks_are_off()
    model(x).sum().backward()


def test_an_exception_in_backward_leaves_nothing(live: Live) -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise KeyError("as asked")

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Breaks.apply(x.sin().cos()).sin().exp()

    model, x = planned(Model(), leaf()), leaf()
    before = live.now
    loss = model(x).sum()
    with pytest.raises(KeyError):
        loss.backward()
    del loss
    gc.collect()
    assert live.now == before


def test_ten_thousand_ops_in_a_row() -> None:
    model, x = planned(Chain("sin " * 10_000), leaf()), leaf()
    plain, y = Chain("sin " * 10_000), leaf()
    model(x).sum().backward()
    plain(y).sum().backward()
    assert torch.equal(x.grad, y.grad)
    model(x)  # and a chain that is dropped unused


def test_unpacking_outside_of_backward_caches_nothing(live: Live) -> None:
    model, x = planned(Chain("sin cos exp"), leaf()), leaf()
    out = model(x)
    node = out.grad_fn.next_functions[0][0]
    before = live.now
    assert torch.equal(node._saved_self, x.sin())
    assert live.now == before
    out.sum().backward()


def test_in_place_chains_take_over_their_memory(live: Live) -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y.add_(1).mul_(3).sub_(2)
            return y.sin()

    model, x = planned(InPlace(), leaf()), leaf()
    loss = model(x).sum()
    before, live.peak = live.now, live.now
    loss.backward()
    assert live.peak - before <= 3  # the value, its cosine, the gradient: never a copy per in-place op
    y = leaf()
    InPlace()(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_a_pinned_input_is_copied_once_when_it_is_overwritten(live: Live) -> None:
    big = 32 * N

    class Overwrites(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = x.sin()
            a, b = kept.neg(), kept.neg()
            a, b = a.neg(), b.neg()
            with torch.no_grad():
                kept.zero_()
            return a.cos() * b.tan()

    x = torch.linspace(0, 1, big).requires_grad_()
    y = x.detach().clone().requires_grad_()
    model = Overwrites()
    install(model, script(model, (x,), None, lambda key, i, name: "" if "sin." in name else "recompute"))
    loss = model(x).sum()
    assert live.now // 32 >= 1
    loss.backward()
    Overwrites()(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_kept_tensors_are_checked_as_autograd_does() -> None:
    x = leaf()

    class Spoils(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = x.exp()
            return y, y.sin()

    for build in (lambda: Spoils(), lambda: planned(Spoils(), leaf(), keep={0})):
        y, z = build()(x)
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*expected version 0"):
            z.sum().backward()


def test_a_changed_parameter_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(2, 4, requires_grad=True)
    install(model, script(model, (x,)))
    loss = model(x).sin().sum()
    with torch.no_grad():
        model[0].bias.add_(1)  # plain PyTorch does not save a bias
    with pytest.raises(ReplayError, match=r"aten.addmm.default.*0\.bias of shape \[4\]"):
        loss.backward()


def test_small_buffers_and_inputs_may_change_before_backward() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((4,), 2.0))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x + self.scale + y).sin()

    outcomes = []
    for plan in (False, True):
        model, x, y = Scaled(), torch.arange(4.0).requires_grad_(), torch.ones(4)
        if plan:
            install(model, script(model, (x, y)))
        loss = model(x, y).sum()
        if plan:
            model.scale.zero_()
            y.zero_()
        loss.backward()
        outcomes.append(x.grad)
    assert torch.equal(*outcomes)


def test_memory_that_is_gone_is_noticed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(N))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.weight).sin()

    model, x = planned(Model(), leaf()), leaf()
    loss = model(x).sum()
    model.weight.untyped_storage().resize_(0)
    with pytest.raises(ReplayError, match="had its memory freed"):
        loss.backward()


def test_a_session_lets_go_of_everything(live: Live) -> None:
    model, x = Chain("sin cos exp"), leaf()
    seen = script(model, (x,))
    before = live.now
    with session(seen, model_class="Chain"):
        loss = model(x).sum()
    loss.backward()
    del loss
    x.grad = None
    assert live.now == before
    assert "forward" not in model.__dict__
    assert_hooks_are_off()


def test_an_overlap_of_two_graphs(live: Live) -> None:
    model = planned(Chain("sin cos exp sin"), leaf())
    xs = [leaf() for _ in range(3)]
    losses = [model(x).sum() for x in xs]
    for loss in reversed(losses):
        loss.backward()
    plain, y = Chain("sin cos exp sin"), leaf()
    plain(y).sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x in xs)


def test_results_compare(live: Live) -> None:
    model = nn.Linear(2, 2)
    assert_same(results(model), results(model))


def assert_hooks_are_off() -> None:
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    from holdover.recompute.recorder import RUNNING

    assert RUNNING.session is None


def test_a_result_that_the_program_holds_pins_nothing(live: Live) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin().neg()

    x = leaf()
    model = planned(Model(), x, keep={0})
    before = live.now
    out = model(x)  # neg's recipe needs sin's result; nobody needs neg's recipe
    assert live.now - before == 1
    out.sum().backward()
    x.grad = None
    assert live.now - before == 1


def test_a_kept_result_does_not_hold_itself(live: Live) -> None:
    x = leaf()
    model = planned(Chain("sin tanh"), x, keep={1})
    before = live.now
    out = model(x)
    del out
    assert live.now == before
