"""What plans promise against what a real run shows, over the zoo, at three budgets.

    python benchmarks/promise.py [MODEL ...] [--optimizer adamw] [--precision 32-true]

Budgets: "min", and 50 % and 80 % of the way from the lowest peak that can be reached to the unplanned peak. Measured by
the profiler's allocation events; gradients, buffers, outputs and random state are compared bit for bit. Exit status:
the number of rows where the peak is over the promise by more than 1 % or anything differs.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from zoo import ZOO, Example

import holdover
from holdover.units import format_bytes

TOLERANCE = 0.01


def row(
    name: str, example: Example, label: str, budget: int | str, optimizer: str | None, precision: str
) -> tuple[holdover.Plan, bool]:
    """Plan, verify, print one line; return the plan and whether its promise holds."""
    model, args, kwargs, loss = example
    start = time.perf_counter()
    plan = holdover.plan(model, args, kwargs, budget=budget, loss=loss, optimizer=optimizer, precision=precision)
    seconds = time.perf_counter() - start
    found = holdover.verify(model, args, kwargs, plan=plan, loss=loss, optimizer=optimizer, precision=precision)
    over = found.measured_peak_bytes / plan.predicted_peak_bytes - 1
    exact = found.gradients_equal and found.buffers_equal and found.outputs_equal and found.rng_equal
    holds = exact and over <= TOLERANCE
    cells = [
        f"{name:14} {label:>5}",
        *(f"{format_bytes(n):>11}" for n in (plan.unplanned_peak_bytes, plan.predicted_peak_bytes)),
        f"{format_bytes(found.measured_peak_bytes):>11} {over:>+8.2%}",
        f"{plan.extra_time:>8.1%} {found.step_time_ratio - 1:>8.1%} ±{found.step_time_uncertainty:>5.1%}",
        f"{plan.bound_extra_time:>7.1%}",
        f"{'yes' if exact else 'NO':>6} {seconds:>7.1f}{'' if holds else '  <--'}",
    ]
    print(*cells, flush=True)
    return plan, holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(ZOO)}; default all")
    parser.add_argument("--optimizer", help="a name as holdover takes it; default none: forward, loss, backward")
    parser.add_argument("--precision", default="32-true")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(
        f"{'model':14} {'at':>5} {'unplanned':>11} {'promised':>11} {'measured':>11} {'over':>8} {'+time':>8} "
        f"{'real':>8} {'':6} {'bound':>7} {'exact':>6} {'plan s':>7}"
    )
    broken = 0
    for name in chosen.models or ZOO:
        torch.manual_seed(0)
        example = ZOO[name]()
        lowest, holds = row(name, example, "min", "min", chosen.optimizer, chosen.precision)
        broken += not holds
        room = lowest.unplanned_peak_bytes - lowest.predicted_peak_bytes
        for share in (0.5, 0.8):
            budget = lowest.predicted_peak_bytes + int(share * room)
            _, holds = row(name, example, f"{share:.0%}", budget, chosen.optimizer, chosen.precision)
            broken += not holds
    print(f"{broken} promises broken")
    return broken


if __name__ == "__main__":
    raise SystemExit(main())
