"""How long it takes to plan large models, stage by stage, and how much memory that takes.

    python benchmarks/planning.py [--blocks 96] [--chain 4500]

Aim: under 30 s for a few hundred blocks or 20,000 ops, on two cores.
"""

from __future__ import annotations

import argparse
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


def gpt(blocks: int) -> tuple[nn.Module, tuple[Any, ...]]:
    with torch.device("meta"):
        return GPT(blocks, 1024, 16), (torch.zeros(2, 512, dtype=torch.int64),)


def measure(name: str, model: nn.Module, args: tuple[Any, ...], optimizer: str | None) -> None:
    times: list[tuple[str, float]] = []
    last = time.perf_counter()

    def done(stage: str) -> None:
        nonlocal last
        now = time.perf_counter()
        times.append((stage, now - last))
        last = now

    trace = record(model, args, optimizer=optimizer, corrections=true_outputs)
    done("record")
    workspace, _ = workspaces(trace)
    problem, _ = priced_problem(trace, workspace, with_loss=False)
    done("price")
    search = Search(problem, workspace, same_places(trace, problem))
    plain = search.judge(()).peak_bytes
    done("simulate")
    search, floor = lowest_of(search, problem, with_loss=False, quick=True)
    done("floor")
    budget = (floor.peak_bytes + plain) // 2
    bound = bound_seconds(problem, budget)
    done("bound")
    best = search.cheapest(budget, floor, bound)
    done("cheapest")
    plan = plan_of(trace, budget)
    done("plan_of, all again")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{name}: {len(trace.ops):,} ops, {len(problem.eligible):,} eligible, optimizer {optimizer}")
    print("  " + ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in times))
    share, proved = best.seconds / problem.step_seconds, bound / problem.step_seconds
    print(f"  peak {plain:,} -> floor {floor.peak_bytes:,}; at {budget:,}: {share:.2%} of the step, bound {proved:.2%}")
    print(f"  {len(plan.choices)} choices; {peak:.2f} GiB resident")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=96)
    parser.add_argument("--chain", type=int, default=4500, help="ops of forward; five times as many in all")
    options = parser.parse_args()
    if options.blocks:
        measure(f"GPT, {options.blocks} blocks", *gpt(options.blocks), None)
    if options.chain:
        measure(f"chain of {options.chain} ops", Chain(options.chain), (torch.zeros(8, 64),), None)


if __name__ == "__main__":
    main()
