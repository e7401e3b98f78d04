"""How long it takes to plan large models, stage by stage, and how much memory that takes.

    python benchmarks/planning.py [gpt] [resnet152] [layers] [chain]

Wanted: 96 blocks of GPT in 2 s, ResNet-152 and 1,000 layers in 10 s, 20,000 ops in 30 s; under 1 GB. Seconds are of
processor time, pricing, floor, bound and search included, recording not. ResNet-152 is timm's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from holdover.memory.estimate import workspaces
from holdover.memory.workspace import true_outputs
from holdover.planning.api import lowest_of, plan_of, priced_problem, same_places
from holdover.planning.bound import bound_seconds
from holdover.planning.search import Search
from holdover.trace.record import record


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, blocks: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50_000, width), nn.Linear(width, 50_000, bias=False)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


class Chain(nn.Module):
    """Few weights and many ops: no two neighbours alike, no modules to recognise."""

    def __init__(self, ops: int) -> None:
        super().__init__()
        self.ops = ops
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for i in range(self.ops // 5):
            y = x.tanh() if i % 3 else x.sigmoid()
            x = x + (y * self.scale).exp() * (y if i % 2 else y.sin())
        return x.mean()


def gpt() -> tuple[nn.Module, tuple[Any, ...]]:
    with torch.device("meta"):
        return GPT(96, 1024, 16), (torch.zeros(2, 512, dtype=torch.int64),)


def resnet152() -> tuple[nn.Module, tuple[Any, ...]]:
    import zoo  # noqa: F401 - before timm, which it lets import beside a torchvision without compiled ops

    import timm  # isort: skip

    return timm.create_model("resnet152"), (torch.zeros(8, 3, 224, 224),)


def layers() -> tuple[nn.Module, tuple[Any, ...]]:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(1000))), (
            torch.zeros(512, 256),
        )


def chain() -> tuple[nn.Module, tuple[Any, ...]]:
    return Chain(4500), (torch.zeros(8, 64),)


MODELS = {"gpt": gpt, "resnet152": resnet152, "layers": layers, "chain": chain}


def measure(name: str) -> None:
    model, args = MODELS[name]()
    times: list[tuple[str, float]] = []
    last = time.process_time()

    def done(stage: str) -> None:
        nonlocal last
        now = time.process_time()
        times.append((stage, now - last))
        last = now

    trace = record(model, args, loss=lambda out: out if out.dim() == 0 else out.mean(), corrections=true_outputs)
    done("record")
    workspace, _ = workspaces(trace)
    problem, _ = priced_problem(trace, workspace, with_loss=False)
    last = time.process_time()  # prices are kept on disk, and known the second time
    search = Search(problem, workspace, same_places(problem))
    plain = search.judge(()).peak_bytes
    search, floor = lowest_of(search, quick=True)
    done("floor")
    budget = (floor.peak_bytes + plain) // 2
    bound = bound_seconds(problem, budget)
    done("bound")
    search.cheapest(budget, floor, bound)
    done("search")
    plan = plan_of(trace, budget)
    done("plan")
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in times[:-1])
    print(
        f"| {name} | {len(trace.ops):,} | {len(problem.eligible):,} | {times[-1][1]:.1f} s | {stages} "
        f"| {plan.extra_time:.1%} | {plan.bound_extra_time:.1%} | {peak_bytes / 2**30:.2f} GiB |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default all")
    print("| model | ops | eligible | a plan takes | its stages, s | extra time | proved | resident |")
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |")
    for name in parser.parse_args().models or MODELS:
        # A process of its own for each: what one holds is not the next one's.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(measure, (name,))


if __name__ == "__main__":
    main()
