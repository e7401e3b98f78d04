"""Step time against peak memory: holdover beside what else there is for PyTorch, in one run.

    python benchmarks/frontier.py --quick                      five small models, few settings, under 10 minutes
    python benchmarks/frontier.py --results frontier.json      all models and settings; goes on where it was interrupted
    python benchmarks/frontier.py --table frontier.json        the tables of docs/benchmarks.md, from a results file

Each contender runs on each model in a process of its own, with a time limit, on one thread; what it does to the step is
timed on the processor's clock in turns with the plain step. Peaks come from the profiler's allocation events. Which
points ours is asked for are the peaks that the others reached before it, so contenders run in the order listed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from frontier_measure import QUIET_MALLOC, Contender, Setting, measure
from frontier_models import CASES, QUICK
from frontier_ours import OURS
from frontier_peers import NOT_RUN, PEERS
from frontier_report import by_model, is_compiled, is_ours, markdown, measured, plot, show, verdict
from rich.console import Console

CONTENDERS: dict[str, Contender] = {**PEERS, **OURS}
QUICK_SKIPS = (
    "compile budget, model", "compile budget, model, aot_eager", "compile budget, blocks, aot_eager", "ckptplan",
    "holdover, compiled model",
)  # fmt: skip
QUICK_COMPILED = ("gpt",)
"""Models of a quick run that are compiled too: compiling takes longer than all the rest."""
FAILED = "failed"
LIMIT_SECONDS, TIMED_SECONDS, QUICK_TIMED_SECONDS = 900.0, 20.0, 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)}; few settings of each contender")
    parser.add_argument("--models", nargs="+", choices=CASES, help="these models only")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, help="these contenders only")
    parser.add_argument("--results", type=Path, help="add to this file, and leave out what is in it")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for one contender on one model")
    parser.add_argument("--figures", type=Path, help="draw a PNG per model into this directory")
    parser.add_argument("--table", type=Path, metavar="RESULTS", help="print Markdown from a results file, run nothing")
    chosen = parser.parse_args()
    if chosen.table:
        results = json.loads(chosen.table.read_text())
        _draw(results, chosen)
        print(markdown(results, NOT_RUN, quick=chosen.quick, figures="figures"), end="")
        return 0
    if any(os.environ.get(name) != value for name, value in QUIET_MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **QUIET_MALLOC})
    path = chosen.results or Path("frontier-quick.json" if chosen.quick else "frontier.json")
    results = json.loads(path.read_text()) if chosen.results and path.exists() else _empty()
    console = Console(width=180 if not sys.stdout.isatty() else None)
    for model in chosen.models or (QUICK if chosen.quick else CASES):
        for name in CONTENDERS:
            if (not chosen.only or name in chosen.only) and not _skipped(name, model, chosen):
                _run(model, name, results, path, chosen)
    for model, reports in by_model(results, quick=chosen.quick).items():
        show(console, model, reports)
        for compiled in (False, True):
            for line in verdict(reports, compiled=compiled):
                console.print(line, highlight=False)
    _draw(results, chosen)
    for name, why in NOT_RUN.items():
        console.print(f"not run: {name}: {why}", highlight=False)
    return 0


def _empty() -> dict[str, Any]:
    return {"torch": torch.__version__, "processor": platform.processor() or platform.machine(), "runs": []}


def _skipped(name: str, model: str, chosen: argparse.Namespace) -> bool:
    return chosen.quick and not chosen.only and (
        name in QUICK_SKIPS or (is_compiled(name) and model not in QUICK_COMPILED)
    )  # fmt: skip


def _run(model: str, name: str, results: dict[str, Any], path: Path, chosen: argparse.Namespace) -> None:
    """One contender on one model, unless the results hold it already; written at once."""
    same = [r for r in results["runs"] if r["model"] == model and r["quick"] == chosen.quick]
    before = [r for r in same if r["contender"] == name]
    if before and not before[0]["failed"]:
        return
    peaks = tuple(
        row["peak_bytes"] for r in same if is_ours(name) and not is_ours(r["contender"])
        and is_compiled(r["contender"]) == is_compiled(name) for row in measured(r)
    )  # fmt: skip
    begun = time.perf_counter()
    report = _in_child(model, name, Setting(chosen.quick, peaks), chosen)
    failed = not measured(report) and report["unavailable"].startswith(FAILED)
    report |= {"quick": chosen.quick, "wall_seconds": time.perf_counter() - begun, "failed": failed}
    results["runs"] = [r for r in results["runs"] if r not in before] + [report]
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1))
    new.replace(path)
    points = ", ".join(f"{r['peak_share']:.2f} @ {r['ratio']:.2f}" for r in measured(report))
    errors = [r["error"] for r in report["rows"] if r["error"]]
    told = report["unavailable"] or points + (f"; {len(errors)} failed: {errors[0]}" if errors else "")
    print(f"{model}, {name} ({report['wall_seconds']:.0f} s): {told}", file=sys.stderr, flush=True)


def _in_child(model: str, name: str, setting: Setting, chosen: argparse.Namespace) -> dict[str, Any]:
    """A fork, so that nobody pays for importing PyTorch again and no crash or hang reaches the next."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    seconds = QUICK_TIMED_SECONDS if chosen.quick else TIMED_SECONDS
    process = context.Process(target=_child, args=(sender, model, name, setting, seconds))
    process.start()
    sender.close()
    failed: dict[str, Any] = {
        "model": model,
        "contender": name,
        "rows": [],
        "plain_peak_bytes": 0,
        "plain_seconds": 0.0,
    }
    try:
        if receiver.poll(chosen.limit):
            return receiver.recv()  # type: ignore[no-any-return]
        return failed | {"unavailable": f"{FAILED}: stopped after {chosen.limit:.0f} s"}
    except EOFError:
        process.join()
        return failed | {"unavailable": f"{FAILED}: its process ended with status {process.exitcode}"}
    finally:
        if process.is_alive():
            process.join(2)
        if process.is_alive() and process.pid:
            os.killpg(process.pid, signal.SIGKILL)  # with the compiler's workers
        process.join()


def _child(sender: Any, model: str, name: str, setting: Setting, seconds: float) -> None:
    os.setsid()
    sender.send(measure(model, name, CONTENDERS[name], setting, seconds))


def _draw(results: dict[str, Any], chosen: argparse.Namespace) -> None:
    if chosen.figures:
        for model, reports in by_model(results, quick=chosen.quick).items():
            plot(model, reports, chosen.figures)


if __name__ == "__main__":
    raise SystemExit(main())
