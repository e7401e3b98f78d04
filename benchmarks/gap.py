"""How far plans may be from the best there could be: extra time beside its proved bound, over the zoo.

    python benchmarks/gap.py [MODEL ...] [--seconds 20] [--markdown]

Budgets are shares of the way from the lowest peak found to the unplanned one. Rows whose gap is more than 2 % of the
step are marked. Exit status: 0.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from zoo import ZOO

from holdover.memory.estimate import workspaces
from holdover.memory.workspace import true_outputs
from holdover.planning.api import lowest_of, priced_problem, same_places, within
from holdover.planning.search import Search
from holdover.trace.record import record
from holdover.units import format_bytes

SHARES = (0.9, 0.75, 0.6, 0.45, 0.3, 0.2, 0.1, 0.0)
WANTED = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(ZOO)}; default all")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of a plan")
    parser.add_argument("--markdown", action="store_true", help="print the rows as Markdown")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    head = ("model", "budget", "of unplanned", "extra time", "proved bound", "gap", "nested", "seconds")
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head) if chosen.markdown else "  ".join(head), flush=True)
    rows = over = 0
    for name in chosen.models or ZOO:
        model, args, kwargs, loss = ZOO[name]()
        trace = record(model, args, kwargs, loss=loss, corrections=true_outputs)
        workspace, _ = workspaces(trace)
        problem, _ = priced_problem(trace, workspace, with_loss=False)
        search = Search(problem, workspace, same_places(problem), seconds=chosen.seconds)
        plain = search.judge(())
        search, floor = lowest_of(search)
        for share in SHARES:
            start = time.perf_counter()
            budget = floor.peak_bytes + int(share * (plain.peak_bytes - floor.peak_bytes))
            _, best, least = within(search, floor, plain, budget)
            took = time.perf_counter() - start
            extra, bound = (seconds / problem.step_seconds for seconds in (best.seconds, least))
            gap = max(extra - bound, 0.0)
            rows, over = rows + 1, over + (gap > WANTED)
            cells = (
                name, format_bytes(budget), f"{budget / plain.peak_bytes:.0%}", f"{extra:.1%}", f"{bound:.1%}",
                f"{gap:.1%}{' <--' if gap > WANTED else ''}", "yes" if best.stages else "", f"{took:.1f}",
            )  # fmt: skip
            print("| " + " | ".join(cells) + " |" if chosen.markdown else "  ".join(cells), flush=True)
    print(f"\n{rows - over} of {rows} rows within {WANTED:.0%} of the step")


if __name__ == "__main__":
    main()
