"""Which masks compiled code computes again."""

from __future__ import annotations

import torch
from tests.integrations.helpers import Residual
from tests.integrations.test_joint_graph import Watched
from torch import nn
from torch._inductor.decomposition import select_decomp_table

from holdover.integrations._torch import aot_autograd, boxed_nop


def saved(model: nn.Module, x: torch.Tensor, *, fused: bool) -> set[str]:
    """Names of what forward saves, of the ops into which Inductor takes a model apart."""
    torch._dynamo.reset()
    watched = Watched({})
    watched.fused = fused
    options = {"fw_compiler": boxed_nop, "partition_fn": watched, "decompositions": select_decomp_table()}
    torch.compile(model, backend=aot_autograd(**options))(x).sum().backward()
    return set(watched.saved)


def test_a_mask_is_computed_again_from_what_is_saved_anyway() -> None:
    block, x = Residual(8), torch.randn(4, 8, 6, 6, requires_grad=True)
    theirs, ours = saved(block, x, fused=False), saved(block, x, fused=True)
    assert theirs - ours == {"le"}, "PyTorch no longer saves which elements the last activation let through"
    assert {"convolution", "convolution_1"} <= ours


class Gated(nn.Module):
    """Lets through what passes a gate that backward has no other use for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return torch.where(x.floor().cumsum(0) > 1.0, y, 0.0) + y.sin()


class Dropped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return torch.where(torch.rand_like(y) > y, y, 0.0) + y.sin()


def test_a_mask_that_is_told_from_what_is_not_saved_is_saved() -> None:
    assert saved(Gated(), torch.randn(40, 3, requires_grad=True), fused=True) >= {"gt"}


def test_a_mask_that_is_random_is_saved() -> None:
    assert saved(Dropped(), torch.randn(40, 3, requires_grad=True), fused=True) >= {"gt"}
