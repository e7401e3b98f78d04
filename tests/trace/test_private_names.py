"""The private PyTorch names that recording stands on: when one moves, this says which, and what it was for."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from holdover.trace import _torch

NAMES = {
    "torch._C._current_autograd_node": "which backward op belongs to which forward op",
    "torch._C._current_graph_task_id": "telling several backward passes of a step apart",
    "torch._C._autograd._get_sequence_nr": "which autograd node a forward op made",
    "torch._C._functorch.is_functorch_wrapped_tensor": "leaving tensors of function transforms alone",
    "torch._subclasses.fake_tensor.FakeTensor": "recording without memory",
    "torch._subclasses.fake_tensor.FakeTensorMode": "recording without memory",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "falling back to real tensors",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "falling back to real tensors",
    "torch.utils._python_dispatch.TorchDispatchMode": "seeing each op",
    "torch.utils._python_dispatch._disable_current_modes": "running an op on known values aside",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "looking into wrapper subclasses",
    "torch._C._ExcludeDispatchKeyGuard": "casting as CUDA's autocast does",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "knowing which ops a build without CUDA takes apart",
    "torch._C._storage_Use_Count": "knowing where the engine adds gradients in place",
    "torch.autograd.graph._engine_run_backward": "telling the engine's own ops from those of Python code it runs",
    "torch.optim.optimizer._foreach_supported_types": "foreach optimizers of fake parameters on a card",
    "torch.utils._foreach_utils._foreach_supported_types": "foreach gradient clipping of fake gradients on a card",
    "torch._C._profiler._ExtraFields_Allocation": "reading the profiler's allocation events",
}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_there(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute, None)
    assert found is not None, f"PyTorch {torch.__version__} has no {name}, needed for {NAMES[name]}"


def test_no_pass_is_minus_one_and_passes_count_up() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: seen.append(_torch.current_graph_task_id()))
    assert _torch.current_graph_task_id() == -1
    (x * 2).sum().backward()
    (x * 2).sum().backward()
    assert -1 < seen[0] < seen[1]


def test_nodes_are_numbered_as_they_are_made() -> None:
    x = torch.ones(2, requires_grad=True)
    before = _torch.sequence_number()
    y = x.sin()
    assert y.grad_fn is not None
    assert y.grad_fn._sequence_nr() == before
    assert _torch.sequence_number() == before + 1


def test_the_node_that_runs_is_the_one_of_the_forward_op() -> None:
    seen: list[Any] = []

    class Watch(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            node = _torch.current_autograd_node()
            seen.append((str(func), node and node.name()))
            return func(*args, **(kwargs or {}))

    y = torch.ones(2, requires_grad=True).sin()
    with Watch():
        y.backward(torch.ones(2))
    assert ("aten.cos.default", "SinBackward0") in seen


def test_storages_are_weakly_referable_and_keep_their_object() -> None:
    x = torch.ones(2)
    storage = x.untyped_storage()
    assert x.view(1, 2).untyped_storage() is storage
    assert isinstance(storage._cdata, int)


def test_fake_tensors_are_made_through_a_function_that_can_be_told_their_device() -> None:
    mode, made = _torch.FakeTensorMode(), []
    original = torch.Tensor._make_subclass

    def noting(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made.append((cls, kwargs.get("dispatch_device"), kwargs.get("device_for_backend_keys")))
        return original(cls, *args, **kwargs)

    with mode, pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "_make_subclass", staticmethod(noting))
        torch.empty(2)
    assert (_torch.FakeTensor, True, torch.device("cpu")) in made, (
        "recording for a card gives fake tensors its keys there"
    )


def test_a_fake_mode_can_be_told_to_touch_no_device() -> None:
    assert isinstance(_torch.FakeTensorMode.avoid_device_init, property)


class Holders(_torch.TorchDispatchMode):
    """Notes of each sum whether the caller alone holds its first term."""

    def __init__(self, modes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modes, self.seen = modes, []  # type: tuple[int, list[bool]]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and _torch.current_graph_task_id() >= 0:
            self.seen.append(_torch.held_once(args[0], self.modes))
        return func(*args, **(kwargs or {}))


class Above(_torch.TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_holders_of_a_gradient_are_counted() -> None:
    """The engine holds the first gradient of h alone when the second comes, unless backward has given it to others."""
    for above in (nullcontext(), Above()):
        x = torch.ones(4, requires_grad=True)
        holders = Holders(1 if isinstance(above, nullcontext) else 2)
        with holders, above:
            h = x * 2
            (h.sin() + h.cos()).sum().backward()  # gradients of their own
            h = x * 2
            torch.autograd.backward(h + h * 3, torch.ones(4))  # the first is the caller's
        assert holders.seen == [True, False]
