"""Planned models that torch.distributed wraps, shards or splits: exact, whether the plan came before that or after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.recompute.helpers import same, script
from tests.several import on_two_ranks
from torch import nn

import holdover
from holdover.recompute.apply import install
from holdover.recompute.inspect import inspect
from holdover.recompute.sharded import FREED


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deep = self.down(nn.functional.gelu(self.up(x)))
        result: torch.Tensor = self.norm(x + nn.functional.dropout(deep, 0.2))
        return result


class Net(nn.Module):
    """Each block is called twice, so that its parameters are gathered twice within forward, and works in between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = (block(x) * 1.5).sin()
        result: torch.Tensor = self.head(x)
        return result


def distributed(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-3)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def sharded_as_of_old(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
    )


def sharded_in_half(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def gathered_once(model: nn.Module) -> nn.Module:
    return sharded(model, reshard_after_forward=False)


def split(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


WAYS = {
    distributed: "plan", sharded: "plan", sharded_in_half: "wrap", gathered_once: "wrap", split: "plan",
    sharded_as_of_old: "plan",
}  # fmt: skip
"""Each with what comes first."""


def whole(tensor: Any) -> torch.Tensor | None:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def trained(model: nn.Module, rank: int) -> list[Any]:
    torch.manual_seed(rank)
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(2):
        model(torch.randn(6, 16)).float().square().sum().backward()
        seen += [whole(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(whole(p.data) for p in model.parameters()), torch.get_rng_state()]


def both(way: Callable[[nn.Module], nn.Module], first: str, rank: int) -> tuple[list[Any], list[Any], Any]:
    torch.manual_seed(0)
    plain = trained(way(Net()), rank)
    torch.manual_seed(0)
    model = Net()
    choices = script(model, (torch.randn(6, 16),))
    if first == "plan":
        install(model, choices)
    wrapped = way(model)
    if first == "wrap":
        install(model, choices)
    return plain, trained(wrapped, rank), inspect(model)


def findings(rank: int) -> dict[str, Any]:
    found = {}
    for way, first in WAYS.items():
        plain, planned, done = both(way, first, rank)
        reasons = sorted({k.reason for k in done.kept})
        found[way.__name__] = (same(plain, planned), done.replayed_ops > 0, reasons, len(done.unmatched))
    return found


def test_training_in_two_processes_is_exact(tmp_path: Path) -> None:
    found = on_two_ranks(findings, tmp_path)
    assert [name for name, (exact, replayed, _, _) in found.items() if not (exact and replayed)] == []
    assert "tensor subclass DTensor" in found.pop("split")[2]
    assert found.pop("sharded_as_of_old")[2] == [FREED]
    # Everything is dropped, in one chain back to the input: replays need parameters of blocks that backward has not
    # reached, or is done with, and these are gathered for them.
    assert {name: (kept, unmatched) for name, (_, _, kept, unmatched) in found.items()} == dict.fromkeys(found, ([], 0))


class Reading(nn.Module):
    """Decides on a value, which fake tensors do not have, and then exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if y.sum() > 0:
            y = y * 2
        torch.distributed.all_reduce(y.detach())
        result: torch.Tensor = y.sin()
        return result


def refusals(rank: int) -> dict[str, str]:
    def said(model: nn.Module) -> str:
        try:
            holdover.plan(model, (torch.randn(6, 16),), budget="min")
        except holdover.TraceError as error:
            return str(error)
        return "nothing"

    return {
        "distributed": said(distributed(Net())), "within": said(nn.Sequential(distributed(Net()))),
        "sharded": said(sharded(Net())), "split": said(split(Net())), "reading": said(Reading()),
    }  # fmt: skip


def test_what_cannot_be_recorded_apart_from_the_others_is_refused(tmp_path: Path) -> None:
    said = on_two_ranks(refusals, tmp_path)
    assert "Plan for the module inside (model.module)" in said["distributed"]
    assert "Plan for the module inside (model.0.module)" in said["within"]
    assert "apply the plan, before fully_shard" in said["sharded"]
    assert "blocks.0.up.weight is a DTensor" in said["split"]
    assert "before the model is parallelized" in said["split"]
    assert "recorded on real tensors, and c10d.allreduce_.default exchanges data" in said["reading"]
