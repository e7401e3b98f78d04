"""Extra time: what plans promise against what their steps take, over the zoo, at three budgets.

    python benchmarks/costs.py [MODEL ...] [--seconds 10] [--json FILE]

Budgets: "min", and 50 % and 80 % of the way from the lowest peak that can be reached to the unplanned peak. Each model
has a process of its own: one thread, processor time, forward, loss and backward of the plain step and of the three
plans in turn until the medians of their ratios stand to half a point or `--seconds` are over. The allocator is told to
give nothing back to the system: page faults of freshly mapped memory would be charged to whoever allocates more. With
`--json` each model's rows are written as soon as they are there, and a run that was interrupted goes on from them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

SHARES = {"min": 0.0, "50 %": 0.5, "80 %": 0.8}
WITHIN = 0.05
ENOUGH = 0.005
MIN_ROUNDS, MAX_ROUNDS = 5, 60
GIVE_NOTHING_BACK = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(64 << 30), "MALLOC_TOP_PAD_": str(64 << 20),
    "OMP_NUM_THREADS": "1",
}  # fmt: skip


def rows_of(name: str, seconds: float) -> list[dict[str, Any]]:
    """Plan one model, run it plain and planned, and say what was promised and what came of it."""
    import torch
    from zoo import ZOO

    from holdover.memory.workspace import true_outputs
    from holdover.planning.frontier import frontier_of
    from holdover.trace.record import record
    from holdover.verification import prepared, uncertainty

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, args, kwargs, loss = ZOO[name]()
    frontier = frontier_of(record(model, args, kwargs, loss=loss, corrections=true_outputs), time_limit=seconds)
    room = frontier.unplanned_peak_bytes - frontier.floor_bytes
    plans = {label: frontier.at(frontier.floor_bytes + int(share * room)) for label, share in SHARES.items()}
    subject = (model, args, kwargs, loss, None)
    steps = {label: prepared(subject, None, plan) for label, plan in [("plain", None), *plans.items()]}
    times: dict[str, list[float]] = {label: [] for label in steps}
    began = time.perf_counter()
    for turn in range(MAX_ROUNDS + 1):
        first = turn % len(steps)
        for label in [*list(steps)[first:], *list(steps)[:first]]:
            steps[label].clear_gradients()
            gc.collect()
            start = time.process_time()
            steps[label].whole()
            if turn:  # the first turn warms up
                times[label].append(time.process_time() - start)
        ratios = {label: [t / p for t, p in zip(times[label], times["plain"], strict=True)] for label in plans}
        late = time.perf_counter() - began > seconds
        if turn >= MIN_ROUNDS and (late or all(uncertainty(r) <= ENOUGH for r in ratios.values())):
            break
    return [
        {
            "model": name, "at": label, "promised": plan.extra_time, "measured": statistics.median(ratios[label]) - 1,
            "uncertain": uncertainty(ratios[label]), "rounds": len(ratios[label]), "bound": plan.bound_extra_time,
            "modelled_step": plan.step_seconds, "step": statistics.median(times["plain"]), "priced": plan.priced,
        }
        for label, plan in plans.items()
    ]  # fmt: skip


def show(row: dict[str, Any]) -> None:
    off = row["promised"] - row["measured"]
    print(
        f"{row['model']:14} {row['at']:>5} {row['promised']:>9.1%} {row['measured']:>9.1%} "
        f"{'±':>3}{100 * row['uncertain']:4.1f} {100 * off:>+7.1f} {row['bound']:>8.1%} "
        f"{1e3 * row['modelled_step']:>9.1f} {1e3 * row['step']:>9.1f} {row['rounds']:>5}",
        "" if abs(off) <= WITHIN else " <--",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="of the zoo; default all")
    parser.add_argument("--seconds", type=float, default=10.0, help="for planning a model, and for running it, about")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep rows here, and go on from those that are there")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(rows_of(chosen.models[0], chosen.seconds)))
        return
    from zoo import ZOO

    known = json.loads(chosen.json.read_text()) if chosen.json and chosen.json.exists() else []
    print(
        f"{'model':14} {'at':>5} {'promised':>9} {'measured':>9} {'':7} {'off':>7} {'bound':>8} {'modelled':>9} "
        f"{'step ms':>9} {'turns':>5}"
    )
    rows: list[dict[str, Any]] = []
    for name in chosen.models or ZOO:
        found = [row for row in known if row["model"] == name]
        if not found:
            command = [sys.executable, __file__, name, "--child", "--seconds", str(chosen.seconds)]
            child = subprocess.run(command, env=os.environ | GIVE_NOTHING_BACK, stdout=subprocess.PIPE, check=True)
            found = json.loads(child.stdout.splitlines()[-1])
            known += found
            if chosen.json:
                chosen.json.with_suffix(".tmp").write_text(json.dumps(known, indent=1))
                chosen.json.with_suffix(".tmp").replace(chosen.json)
        for row in found:
            show(row)
        rows += found
    near = sum(abs(row["promised"] - row["measured"]) <= WITHIN for row in rows)
    print(f"{near} of {len(rows)} rows ({near / len(rows):.0%}) are within {100 * WITHIN:.0f} points of the step")


if __name__ == "__main__":
    main()
