"""Estimated against measured peak memory of two training steps, over the zoo, three optimizers and two precisions.

    python benchmarks/fidelity.py [MODEL ...] [--optimizer sgd] [--precision 32-true]

"Measured" is the highest sum of the profiler's own allocation events in a real run, and what existed before it.
Exit status: the number of rows that are off by more than 1 %.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from zoo import ZOO, Example

import holdover
from holdover.memory.measure import measure_peak
from holdover.units import format_bytes

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
}
PRECISIONS = ("32-true", "bf16-mixed")
TOLERANCE = 0.01


def real_peak(example: Example, optimizer: torch.optim.Optimizer, precision: str) -> int:
    """The peak of two real training steps."""
    model, args, kwargs, loss_of = example

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            output = model(*args, **kwargs)
            loss = output.loss if loss_of is None else loss_of(output)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def two_steps() -> None:
        step()
        step()

    return measure_peak(two_steps, model, args, kwargs, loss_of)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(ZOO)}; default all")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, action="append")
    parser.add_argument("--precision", choices=PRECISIONS, action="append")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{'model':14} {'optimizer':14} {'precision':10} {'estimated':>11} {'measured':>11} {'error':>9}  seconds")
    wrong = 0
    for name in chosen.models or ZOO:
        for precision in chosen.precision or PRECISIONS:
            for optimizer in chosen.optimizer or OPTIMIZERS:
                torch.manual_seed(0)
                example = ZOO[name]()
                model, args, kwargs, loss = example
                start = time.perf_counter()
                estimate = holdover.estimate(
                    model, args, kwargs, loss=loss, optimizer=OPTIMIZERS[optimizer], precision=precision
                )
                seconds = time.perf_counter() - start
                measured = real_peak(example, OPTIMIZERS[optimizer](model.parameters()), precision)
                error = estimate.peak_bytes / measured - 1
                wrong += abs(error) > TOLERANCE
                mark = "  <--" if abs(error) > TOLERANCE else ""
                print(
                    f"{name:14} {optimizer:14} {precision:10} {format_bytes(estimate.peak_bytes):>11} "
                    f"{format_bytes(measured):>11} {error:>+9.3%} {seconds:>8.2f}{mark}",
                    flush=True,
                )
                for line in estimate.uncertainties:
                    print(f"  {line}")
    print(f"{wrong} rows off by more than {TOLERANCE:.0%}")
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
