"""The private PyTorch names that the runtime stands on do what it takes them to do."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from tests.recompute.helpers import IdentityHooks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from holdover.recompute import _torch as private


def test_every_name_is_there() -> None:
    assert all(hasattr(private, name) for name in private.__all__)


def test_a_storage_keeps_its_python_object() -> None:
    x = torch.zeros(3)
    x.untyped_storage().mark = object()
    known = id(x.untyped_storage())
    view = x[1:]
    del x
    assert id(view.untyped_storage()) == known
    gone = weakref.ref(view.untyped_storage())
    del view
    assert gone() is None


def test_a_tensor_keeps_its_python_object_while_its_views_do() -> None:
    x = torch.zeros(3, requires_grad=True) * 1
    ref = weakref.ref(x)
    view = x[1:]
    del x
    assert ref() is view._base
    del view
    assert ref() is None


def test_pack_hooks_see_the_version_of_the_original() -> None:
    seen: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = torch.zeros(3, requires_grad=True).exp()
    with torch.no_grad():
        y.add_(1)
    assert seen[0]._version == y._version == 1


def test_who_saves_its_own_output() -> None:
    seen: list[bool] = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            ctx.save_for_backward(y)
            return y

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen.append(private.saves_own_output(t))
        return t.detach()

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = x.sin().exp().mul_(2).relu_()  # a leaf, its own output, nothing twice, its own output
        Saves.apply(y)
    assert seen == [False, True, True, True]


def test_an_alias_counts_versions_with_its_original_inside_a_mode() -> None:
    aliases: list[torch.Tensor] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.sin.default:
                aliases.append(private.alias(args[0]))
            return func(*args, **(kwargs or {}))

    y = torch.zeros(3, requires_grad=True) * 1
    with Mode():
        y.sin()
    y.add_(1)
    assert aliases[0]._version == y._version == 1
    assert aliases[0].grad_fn is None
    assert aliases[0].untyped_storage() is y.untyped_storage()


def test_plain_kernels_leave_everything_as_it_was() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with private.plain_kernels():
            assert torch.is_grad_enabled()
            y = torch.mm(x, x)
            x.view(4).add_(1)
        assert not torch.is_grad_enabled()
        assert torch.mm(x, x).dtype is torch.bfloat16
    assert y.dtype is torch.float32
    assert y.grad_fn is None
    assert x._version == 0


def test_a_pass_ends_with_its_callback() -> None:
    events: list[Any] = []

    class Hook(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            events.append(private.current_graph_task_id())
            private.at_end_of_pass(lambda: events.append("end"))
            return grad

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        Hook.apply(x).sum().backward()
    assert events[1] == events[3] == "end"
    assert -1 < events[0] < events[2]
    assert private.current_graph_task_id() == -1


def test_transforms_find_our_hooks_lifted_and_others_in_place() -> None:
    hooks = IdentityHooks()
    with torch.autograd.graph.saved_tensors_hooks(hooks.same, hooks.same), private.yielding_to_transforms():
        assert torch.equal(torch.func.grad(lambda x: x.sin().sum())(torch.zeros(2)), torch.ones(2))
        assert private.top_saved_tensors_hooks(False)[0] == hooks.same
        assert private.functorch_transform() is None
    assert private.top_saved_tensors_hooks(False) is None


def test_module_calls_are_seen_before_they_begin() -> None:
    seen: list[Any] = []
    module = torch.nn.Sequential(torch.nn.Tanh())
    module.register_forward_pre_hook(lambda m, args: seen.append("hook"))
    with private.watching_module_calls(seen.append):
        module(torch.zeros(2))
    module(torch.zeros(2))
    assert seen == [module, "hook", module[0], "hook"]


def test_settings_are_read_and_written() -> None:
    settings = [*private.switches(), *private.precision_settings()]
    before = [read() for read, _ in settings]
    assert set(before[-3:]) <= {"none", "ieee", "tf32", "bf16"}
    for (read, write), value in zip(settings, before, strict=True):
        if read is torch._C._get_cpu_allow_fp16_reduced_precision_reduction:  # cannot be set on most CPUs
            continue
        other = "bf16" if isinstance(value, str) else not value
        write(other)
        assert read() == other
        write(value)
    assert [read() for read, _ in settings] == before
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


def test_a_users_mode_is_told_from_pytorchs_and_put_back() -> None:
    class Mode(TorchDispatchMode):
        entered = 0

        def __enter__(self) -> Any:
            Mode.entered += 1
            return super().__enter__()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {})) * 2

    with FakeTensorMode(), Mode() as mode:
        assert private.foreign_modes() == [mode]
        with private.in_modes([mode]):
            assert private.dispatch_modes() == 2
    ones, twice = torch.ones(2), torch.full((2,), 2.0)
    with private.in_modes([mode]):
        out = ones * 1
    assert torch.equal(out, twice)
    assert private.dispatch_modes() == 0
    assert Mode.entered == 1
