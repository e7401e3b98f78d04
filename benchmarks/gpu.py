"""Predicted against measured on a CUDA card: memory, plans, times; and the fixtures that tests elsewhere compare with.

    python benchmarks/gpu.py [MODEL ...] [--seconds 500] [--out gpu.json] [--fixtures tests/fixtures/gpu]

For each model and precision, in a process of its own: what `estimate(device=...)` predicts as on a machine without the
card, and what the card shows; plans at three budgets of reserved memory with their gradients compared, their peaks
against the promise, and their step times against the promised extra time and against activation checkpointing of every
block. Needs the extra `zoo`, no network. Exit status: 0 within the bounds (allocated 2 %, reserved 8 %, plans not
above their promise by more, gradients equal as far as the step's own are), 1 outside, 3 without a card.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gpu_case import card_here, measure, predict, write_fixtures
from gpu_models import MODELS
from zoo import ZOO

PRECISIONS = ("32-true", "bf16-mixed")
FIXTURES = ("gpt2", "llama-gqa", "bert", "vit", "resnet50", "unet2d", "lstm")
ALLOCATED, RESERVED = 0.02, 0.08
NO_CARD = 3
LEAST_SECONDS = 25  # a case is not begun with less time left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default all")
    parser.add_argument("--precision", choices=PRECISIONS, action="append", help="default both")
    parser.add_argument("--seconds", type=float, default=500, help="begin nothing that would end after so many")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="all figures, as JSON")
    parser.add_argument("--fixtures", type=Path, default=Path("tests/fixtures/gpu"), help="where the fixtures go")
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)  # the child process: predict, measure or fixtures
    parser.add_argument("--card", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case and chosen.case[0] == "predict":
        return child(chosen.case, chosen)
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing can be measured", file=sys.stderr)
        return NO_CARD
    if chosen.case:
        return child(chosen.case, chosen)
    unknown = set(chosen.models) - set(MODELS)
    if unknown:
        parser.error(f"unknown model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    with tempfile.TemporaryDirectory() as folder:
        return all_cases(chosen, Path(folder))


def all_cases(chosen: argparse.Namespace, folder: Path) -> int:
    """Predictions on the processor in parallel; as soon as one is there, its measurement, one after the other."""
    deadline = time.monotonic() + chosen.seconds
    card, own = card_here(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"HOLDOVER_DEVICES": str(own)} if own else {})}
    blind = {**environment, "CUDA_VISIBLE_DEVICES": ""}
    print(machine())
    print(HEAD, flush=True)

    def run(case: list[str], env: dict[str, str]) -> dict[str, Any]:
        return run_case(case, card.name, deadline, env, folder, chosen.fixtures)

    cases = [[name, p] for name in chosen.models or MODELS for p in chosen.precision or PRECISIONS]
    rows = []
    with ThreadPoolExecutor(max(1, min(len(cases), (os.cpu_count() or 2) // 2))) as pool:
        predictions = [pool.submit(run, ["predict", *case], blind) for case in cases]
        rows.append(run(["fixtures"], environment))
        for case, prediction in zip(cases, predictions, strict=True):
            found = prediction.result()
            if "plans" in found:
                found = run(["measure", *case], environment)
            rows.append({**found, "case": " ".join(case)})
            print("\n".join(lines(rows[-1])), flush=True)
    chosen.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))
    wrong = [row["case"] for row in rows if not row.get("holds")]
    print(
        f"figures in {chosen.out}; " + (f"not within the bounds: {', '.join(wrong)}" if wrong else "all within bounds")
    )
    return 1 if wrong else 0


def machine() -> str:
    properties = torch.cuda.get_device_properties(0)
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.2f} GiB, "
        f"capability {properties.major}.{properties.minor}, driver {driver.strip() or 'unknown'}, "
        f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    )


def run_case(
    case: list[str], card: str, deadline: float, environment: dict[str, str], folder: Path, fixtures: Path
) -> dict[str, Any]:
    """One case in a process of its own, so that each finds the allocator empty."""
    left = deadline - time.monotonic()
    name = " ".join(case)
    if left < LEAST_SECONDS:
        return {"case": name, "skipped": "no time left"}
    out = folder / f"{'-'.join(case)}.json"
    command = [
        sys.executable,
        __file__,
        "--case",
        *case,
        "--card",
        card,
        "--out",
        str(out),
        "--fixtures",
        str(fixtures),
    ]
    try:
        done = subprocess.run(command, timeout=left, capture_output=True, text=True, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return {"case": name, "skipped": f"not done after {left:.0f} s"}
    if done.returncode or not out.exists():
        return {"case": name, "failed": done.stderr.strip().splitlines()[-1:] or ["no output"]}
    found: dict[str, Any] = json.loads(out.read_text())
    return {"case": name, **found}


def child(case: list[str], chosen: argparse.Namespace) -> int:
    """What `run_case` starts."""
    what, *rest = case
    try:
        if what == "fixtures":
            found = write_fixtures({name: ZOO[name] for name in FIXTURES}, PRECISIONS, chosen.fixtures, chosen.card)
        elif what == "predict":
            found = predict(MODELS[rest[0]], rest[1], chosen.card)
        else:
            predicted = json.loads((chosen.out.parent / f"predict-{rest[0]}-{rest[1]}.json").read_text())
            found = measure(MODELS[rest[0]], rest[1], predicted)
            found["holds"] = holds(found)
    except torch.cuda.OutOfMemoryError as error:
        found = {"failed": [str(error).splitlines()[0]]}
    except Exception:
        traceback.print_exc()
        return 1
    chosen.out.write_text(json.dumps(found))
    return 0


def holds(found: dict[str, Any]) -> bool:
    """Whether everything is within the bounds."""
    plain = found["plain"]
    close = abs(off(plain, "allocated")) <= ALLOCATED and abs(off(plain, "reserved")) <= RESERVED
    plans = all(
        off(p, "allocated") <= ALLOCATED and off(p, "reserved") <= RESERVED and p["gradient_error"] <= p["own_error"]
        for p in found["plans"]
    )
    return close and plans


def off(figures: dict[str, Any], what: str) -> float:
    """By how much the measured bytes are above the predicted ones."""
    return float(figures[f"measured_{what}_bytes"] / figures[f"predicted_{what}_bytes"] - 1)


HEAD = (
    f"{'case':22} {'what':>13} {'allocated':>11} {'off':>7} {'reserved':>11} {'off':>7} {'step':>9} {'+time':>7} "
    f"{'promised':>8} {'gradients':>10}"
)


def lines(found: dict[str, Any]) -> list[str]:
    if "plain" not in found:
        return [f"{found['case']:22} {found.get('skipped') or found.get('failed')}"]
    plain = found["plain"]
    rows = [("as it is", plain, "", "")]
    for plan in found["plans"]:
        same = "equal" if plan["gradient_error"] == 0 else f"{plan['gradient_error']:.1e}"
        rows.append((f"plan {plan['budget']}", plan, f"{plan['promised_extra_time']:+.1%}", same))
    printed = []
    for what, figures, promised, same in rows:
        printed.append(
            f"{found['case']:22} {what:>13} "
            + " ".join(f"{figures[f'measured_{k}_bytes'] / 2**30:>7.2f} GiB {off(figures, k):>+7.1%}"
                       for k in ("allocated", "reserved"))
            + f" {figures['seconds'] * 1e3:>6.1f} ms {figures['seconds'] / plain['seconds'] - 1:>+7.1%}"
            + f" {promised:>8} {same:>10}"
        )  # fmt: skip
    stock = found["stock"]
    if stock:
        printed.append(
            f"{found['case']:22} {'every block':>13} {stock['measured_allocated_bytes'] / 2**30:>7.2f} GiB {'':>7} "
            f"{stock['measured_reserved_bytes'] / 2**30:>7.2f} GiB {'':>7} {stock['seconds'] * 1e3:>6.1f} ms "
            f"{stock['seconds'] / plain['seconds'] - 1:>+7.1%}"
        )
    return printed


if __name__ == "__main__":
    sys.exit(main())
