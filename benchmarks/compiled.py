"""Plans under torch.compile against PyTorch's own activation memory budget: measured peaks and times of one model.

    OMP_NUM_THREADS=1 python benchmarks/compiled.py [--model resnet18] [--backend aot_eager] [--blocks]

Peaks are the profiler's, above weights, gradients and inputs, relative to plain eager; times are the process's
processor time, medians of interleaved steps, relative to plain eager. `equal`: gradients are those of the same backend
without recomputation, to the last bit. Exit status: the number of plans whose peak is over the promise by more than
1 %.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable

import frontier_models
import torch
import torch._functorch.config as functorch_config
from frontier_blocks import Case

import holdover
from holdover.memory.measure import existing_bytes, measure_peak

STOCK = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)
PLANNED = ("80%", "60%", "50%", "40%", "min")
ROUNDS = 9


class Contender:
    """A model that has run once: its peak, its gradients, and a step to time."""

    def __init__(self, case: Case, prepare: Callable[[torch.nn.Module], object]) -> None:
        torch._dynamo.reset()
        self.case, self.model = case, copy.deepcopy(case.model)
        prepare(self.model)
        self.step()
        self.gradients = [p.grad for p in self.model.parameters()]
        self.clear()
        subjects = (self.model, case.args)
        self.fixed_bytes = existing_bytes(*subjects) + sum(p.nbytes for p in self.model.parameters())
        self.peak_bytes = measure_peak(self.step, *subjects)[1]

    def step(self) -> torch.Tensor:
        output = self.model(*self.case.args)  # held until the end, as in a training loop
        self.case.loss(output).backward()
        return output

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)
        gc.collect()

    def seconds(self) -> float:
        self.clear()
        start = time.process_time()
        self.step()
        return time.process_time() - start


def ratio(one: Contender, other: Contender) -> float:
    pairs = [(one.seconds(), other.seconds()) for _ in range(ROUNDS)]
    return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)


def compiled(case: Case, backend: str, *, blocks: bool) -> Callable[[torch.nn.Module], None]:
    def prepare(model: torch.nn.Module) -> None:
        for module in [model.get_submodule(name) for name in case.blocks] if blocks else [model]:
            module.compile(backend=backend)

    return prepare


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt", choices=frontier_models.CASES)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--blocks", action="store_true", help="compile each block by itself")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    case = frontier_models.CASES[options.model]()
    prepare = compiled(case, options.backend, blocks=options.blocks)
    eager = Contender(case, lambda model: None)
    room = eager.peak_bytes - eager.fixed_bytes
    broken = 0
    print(f"{options.model}, {options.backend}, {'blocks by themselves' if options.blocks else 'whole model'}")
    print(f"{'':24} {'peak':>6} {'promised':>9} {'time':>6} {'promised':>9}  equal")
    plain: Contender | None = None
    for budget in STOCK:
        with functorch_config.patch(activation_memory_budget=budget):
            stock = Contender(case, prepare)
            plain = plain or stock
            peak, seconds = (stock.peak_bytes - stock.fixed_bytes) / room, ratio(stock, eager)
            print(f"{f'PyTorch, budget {budget}':24} {peak:6.3f} {'':9} {seconds:6.3f}", flush=True)
    assert plain is not None
    for asked in PLANNED:
        planned = copy.deepcopy(case.model)
        prepare(planned)
        try:
            plan = holdover.plan(planned, case.args, loss=case.loss, budget=asked, compiled=options.backend)
        except holdover.BudgetError:
            continue
        ours = Contender(case, lambda model, plan=plan: holdover.apply_(model, plan))
        broken += ours.peak_bytes > 1.01 * plan.predicted_peak_bytes
        equal = all(torch.equal(a, b) for a, b in zip(ours.gradients, plain.gradients, strict=True))
        peak, promised = ((n - ours.fixed_bytes) / room for n in (ours.peak_bytes, plan.predicted_peak_bytes))
        seconds = ratio(ours, eager)
        print(
            f"{f'holdover, budget {asked}':24} {peak:6.3f} {promised:9.3f} {seconds:6.3f} {1 + plan.extra_time:9.3f}  "
            f"{'yes' if equal else 'NO'}",
            flush=True,
        )
    return broken


if __name__ == "__main__":
    raise SystemExit(main())
