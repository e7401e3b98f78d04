"""What watching costs: microseconds per op on tiny tensors, and a whole step at equal choices, all in one run.

Usage: python benchmarks/overhead.py [--rounds 40] [--json FILE]

The variants take turns within each round, so that a busy machine slows all of them alike; each figure is the median
of the fastest fifth of the rounds. "left alone" is an op in a call where something is planned, but not this op;
"quiet" is a module in which nothing is planned.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from holdover.recompute.apply import install

MATMULS = ("aten.addmm.default", "aten.mm.default", "aten.bmm.default")
SAVED = ("aten.sin.default", "aten.add.Tensor", "aten.mul.Tensor")
OPS = 150


class Chain(torch.nn.Module):
    """`OPS` elementwise ops on four numbers; half of them save something."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(OPS // 3):
            x = x.sin()
            x = x + 1.0
            x = x * 0.5
        return x


class Outer(torch.nn.Module):
    """A chain in a module of its own, so that a plan can leave the whole of it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chain(x) * 2.0  # type: ignore[no-any-return]


class Block(torch.nn.Module):
    """A transformer block, small enough for its kernels not to hide the bookkeeping."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) * (w // self.heads) ** -0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(b, t, w))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Blocks(torch.nn.Module):
    def __init__(self, depth: int, width: int, heads: int, wrap: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.wrap(block, x) if self.wrap else block(x)
        return x


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    """Names the ops of each module call, by position, for a script."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.calls: list[list[Any]] = [["", 0]]
        self.names: dict[str, dict[int, str]] = {}
        for path, module in model.named_modules():
            module.forward = self.framed(path or "model", module.forward)

    def framed(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            parent = self.calls[-1][0]
            self.calls.append([f"{parent}/{path}" if parent else path, 0])
            try:
                return forward(*args)
            finally:
                self.calls.pop()

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = self.calls[-1]
        self.names.setdefault(call[0], {})[call[1]] = str(func)
        call[1] += 1
        return func(*args, **(kwargs or {}))


Keep = Callable[[str, str, bool], bool]
"""(call key, op name, whether it is the last op of its call) -> whether its output is kept."""


def script(model: torch.nn.Module, x: torch.Tensor, keep: Keep) -> dict[str, Any]:
    """Recompute every op that makes a tensor, but for those to keep."""
    twin = copy.deepcopy(model)
    counting = Counting(twin)
    with counting, torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        twin(x)
    views = ("view", "permute", "transpose", "t", "select", "unbind", "expand", "_unsafe_view", "detach", "split")
    return {
        key: {
            i: (n, "recompute")
            for i, n in ops.items()
            if n.split(".")[1] not in views and not keep(key, n, i == max(ops))
        }
        for key, ops in counting.names.items()
    }


def planned(model: torch.nn.Module, x: torch.Tensor, keep: Keep, quiet: Any = ()) -> Any:
    install(model, script(model, x, keep), quiet)
    return model


def selective(saved: tuple[str, ...]) -> Callable[..., Any]:
    def contexts() -> Any:
        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if str(op) in saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return lambda f, *a: checkpoint(f, *a, use_reentrant=False, context_fn=contexts)


def stock(f: Any, *args: Any) -> Any:
    return checkpoint(f, *args, use_reentrant=False)


def under_empty_mode(f: Any, *args: Any) -> Any:
    with Nothing():
        return f(*args)


def time_steps(variants: dict[str, Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor, rounds: int) -> Any:
    """Seconds of forward and backward of each variant, taking turns."""
    forward: dict[str, list[float]] = {n: [] for n in variants}
    backward: dict[str, list[float]] = {n: [] for n in variants}
    for turn in range(rounds + 2):
        for name, run in variants.items():
            leaf = x.clone().requires_grad_()
            gc.disable()
            start = time.perf_counter()
            out = run(leaf)
            middle = time.perf_counter()
            out.sum().backward()
            end = time.perf_counter()
            gc.enable()
            if turn >= 2:
                forward[name].append(middle - start)
                backward[name].append(end - middle)
    return {n: (fastest(forward[n]), fastest(backward[n])) for n in variants}


def fastest(times: list[float]) -> float:
    return statistics.median(sorted(times)[: max(1, len(times) // 5)])


def per_op(rounds: int) -> dict[str, tuple[float, float]]:
    x = torch.randn(4)
    chain = Chain()
    variants: dict[str, Any] = {
        "plain": chain,
        "activation checkpointing": lambda x: stock(chain, x),
        "selective, all recomputed": lambda x: selective(())(chain, x),
        "selective, all saved": lambda x: selective(SAVED)(chain, x),
        "empty dispatch mode": lambda x: under_empty_mode(chain, x),
        "holdover, quiet module": planned(Outer(), x, lambda k, n, last: k != "model", ["model/chain"]),
        "holdover, left alone": planned(Chain(), x, lambda k, n, last: not last),
        "holdover, recorded": planned(Chain(), x, lambda k, n, last: False),
    }
    return {n: (f / OPS * 1e6, b / OPS * 1e6) for n, (f, b) in time_steps(variants, x, rounds).items()}


def matmuls_and_block_outputs(key: str, name: str, last: bool) -> bool:
    """What selective checkpointing keeps: what its policy says, and the input of each block."""
    return name in MATMULS or (last and name == "aten.add.Tensor")


def whole_step(rounds: int) -> dict[str, float]:
    size: tuple[int, int, int] = (4, 64, 4)
    x = torch.randn(2, 16, 64)
    base = Blocks(*size)

    def twin(wrap: Callable[..., Any] | None = None) -> Blocks:
        model = Blocks(*size, wrap)
        model.load_state_dict(base.state_dict())
        return model

    variants: dict[str, Any] = {
        "plain": twin(),
        "activation checkpointing": twin(stock),
        "selective, matmuls saved": twin(selective(MATMULS)),
        "holdover, matmuls kept": planned(twin(), x, matmuls_and_block_outputs),
    }
    return {n: (f + b) * 1e3 for n, (f, b) in time_steps(variants, x, rounds).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ops, steps = per_op(options.rounds), whole_step(options.rounds)
    plain = ops["plain"]
    print(f"microseconds per op ({OPS} ops on 4 numbers)    forward  over plain   backward  over plain")
    for name, (f, b) in ops.items():
        print(f"  {name:43s} {f:9.2f} {f - plain[0]:+11.2f} {b:10.2f} {b - plain[1]:+11.2f}")
    print("a whole step, milliseconds (4 small transformer blocks)            over plain")
    for name, ms in steps.items():
        print(f"  {name:43s} {ms:9.2f} {ms / steps['plain'] - 1:+11.0%}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"us_per_op": ops, "ms_per_step": steps}, file, indent=1)


if __name__ == "__main__":
    main()
