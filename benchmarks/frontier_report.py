"""Tables, plots and verdicts of the frontier bench, from its results file alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from holdover.units import format_bytes

SAME_PEAK = 0.003
"""A peak that is higher by no more than this share of plain's is the same peak."""

PUBLISHED = {
    "gpt": {
        "Rockmate (published)": [(0.49, 1.23), (0.29, 1.50)],
        "Rotor mode of Rockmate (published)": [(0.72, 1.25), (0.53, 1.33), (0.38, 1.43), (0.23, 1.61)],
    }
}
"""Measured elsewhere on the same model, on a CPU stand-in with its memory leak mended: drawn, not judged."""

Report = dict[str, Any]
Row = dict[str, Any]


def is_ours(contender: str) -> bool:
    return contender.startswith("holdover")


def is_compiled(contender: str) -> bool:
    return "compile" in contender


def measured(report: Report) -> list[Row]:
    """The rows that ran, lowest peak first."""
    return sorted((r for r in report["rows"] if not r["error"] and r["ratio"]), key=lambda r: r["peak_share"])


def by_model(results: dict[str, Any], *, quick: bool) -> dict[str, list[Report]]:
    found: dict[str, list[Report]] = {}
    for report in results["runs"]:
        if report["quick"] == quick:
            found.setdefault(report["model"], []).append(report)
    return found


# -- verdict --------------------------------------------------------------------------------------------------------


def spread(row: Row) -> float:
    return float(row["ratio_high"] - row["ratio_low"]) / 2


def judged(reports: list[Report], *, compiled: bool) -> Iterator[tuple[str, Row, Row | None, str]]:
    """Each point of a peer, our fastest point that is no higher, and which of the two is faster beyond the spread."""
    ours = [
        r for p in reports if is_ours(p["contender"]) and is_compiled(p["contender"]) == compiled for r in measured(p)
    ]
    for report in reports:
        if is_ours(report["contender"]) or is_compiled(report["contender"]) != compiled:
            continue
        for row in measured(report):
            able = [r for r in ours if r["peak_share"] <= row["peak_share"] + SAME_PEAK]
            best = min(able, key=lambda r: r["ratio"], default=None)
            if best is None:
                word = "plain" if row["peak_share"] >= 1 - SAME_PEAK else "not reached"
            else:
                difference, noise = best["ratio"] - row["ratio"], spread(best) + spread(row)
                word = "slower" if difference > noise else "faster" if difference < -noise else "equal"
            yield report["contender"], row, best, word


def verdict(reports: list[Report], *, compiled: bool) -> list[str]:
    """What the comparison says in words: how many points, and each at which ours is slower or does not get."""
    rows = [r for r in judged(reports, compiled=compiled) if r[3] != "plain"]
    kind = "compiled" if compiled else "eager"
    if not any(is_ours(p["contender"]) and is_compiled(p["contender"]) == compiled and measured(p) for p in reports):
        return [f"{kind}: ours has no points to compare."] if rows else []
    counts = {word: sum(r[3] == word for r in rows) for word in ("faster", "equal", "slower", "not reached")}
    lines = [
        f"{kind}: at the peaks of {len(rows)} points of others, ours is faster in {counts['faster']}, equal within the "
        f"spread in {counts['equal']}, slower in {counts['slower']}; in {counts['not reached']} it does not get as low."
    ]
    for contender, row, best, word in rows:
        point = f"{contender}, {row['label']}, {row['peak_share']:.3f} @ {row['ratio']:.3f}"
        if word == "slower" and best is not None:
            by = f"{best['peak_share']:.3f} @ {best['ratio']:.3f}"
            lines.append(f"slower: {point}: ours {by} (spread {spread(row) + spread(best):.3f})")
        elif word == "not reached":
            lines.append(f"not reached: {point}")
    return lines


# -- tables ---------------------------------------------------------------------------------------------------------


def show(console: Console, model: str, reports: list[Report]) -> None:
    """All rows of one model."""
    nbytes, seconds = plain_of(reports)
    table = Table(
        title=f"{model}: plain {format_bytes(nbytes)} above weights, gradients and inputs, {seconds * 1e3:.0f} ms"
    )
    columns = ("contender", "setting", "peak", "time", "quartiles", "after forward", "replayed GFLOP", "chosen in s",
               "first step s", "gradients", "buffers")  # fmt: skip
    for name in columns:
        table.add_column(name, justify="left" if name in ("contender", "setting") else "right")
    for report in reports:
        if report["unavailable"]:
            table.add_row(report["contender"], f"not run: {report['unavailable']}", *[""] * (len(columns) - 2))
        for row in measured(report):
            table.add_row(
                report["contender"], row["label"], f"{row['peak_share']:.3f}", f"{row['ratio']:.3f}",
                f"{row['ratio_low']:.3f}-{row['ratio_high']:.3f}", format_bytes(row["saved_bytes"]),
                f"{row['replayed_flops'] / 1e9:.2f}",
                "" if row["solve_seconds"] is None else f"{row['solve_seconds']:.1f}",
                f"{row['first_step_seconds']:.1f}", _equal(row), "equal" if row["buffers_equal"] else "DIFFER",
            )  # fmt: skip
        for row in report["rows"]:
            if row["error"]:
                table.add_row(report["contender"], f"{row['label']}: {row['error']}", *[""] * (len(columns) - 2))
    console.print(table)


def _equal(row: Row) -> str:
    return "equal" if row["gradients_equal"] else f"differ by {row['largest_difference']:.0e}"


def markdown(results: dict[str, Any], not_run: dict[str, str], *, quick: bool, figures: str) -> str:
    """The section of docs/benchmarks.md: per model a table of points, the verdict, and the plot."""
    parts = []
    for model, reports in by_model(results, quick=quick).items():
        nbytes, seconds = plain_of(reports)
        lines = [
            f"Plain: {format_bytes(nbytes)} above weights, gradients and inputs, {seconds * 1e3:.0f} ms.", "",
            "| contender | peak @ time, of plain's | exact |", "| --- | --- | --- |",
        ]  # fmt: skip
        for report in reports:
            rows = measured(report)
            points = ", ".join(f"{r['peak_share']:.2f} @ {r['ratio']:.2f}" for r in rows)
            cells = f"{points} | {_exact(rows)}" if rows else f"not run: {_reason(report)} |"
            lines.append(f"| {report['contender']} | {cells} |")
        parts += [f"### {model}", "\n".join(lines)]
        for compiled in (False, True):
            said = verdict(reports, compiled=compiled)
            parts += [line[0].upper() + line[1:] for line in said[:1]]
            parts += ["\n".join(f"- {line}" for line in said[1:])] if said[1:] else []
        parts.append(f"![{model}: extra time against peak]({figures}/frontier-{model}.png)")
    parts += ["### Peers without rows", "\n".join(f"- {name}: {why}." for name, why in not_run.items())]
    return "\n\n".join(parts) + "\n"


def plain_of(reports: list[Report]) -> tuple[int, float]:
    """Bytes and median seconds of the plain step, over the contenders' processes."""
    ran = [p for p in reports if p["plain_seconds"]]
    if not ran:
        return max((p["plain_peak_bytes"] for p in reports), default=0), 0.0
    return ran[0]["plain_peak_bytes"], statistics.median(p["plain_seconds"] for p in ran)


def _reason(report: Report) -> str:
    errors = sorted({r["error"] for r in report["rows"] if r["error"]})
    return (report["unavailable"] or "; ".join(errors) or "no setting applies").replace("|", "/")


def _exact(rows: list[Row]) -> str:
    wrong = max(r["largest_difference"] for r in rows)
    gradients = "yes" if all(r["gradients_equal"] for r in rows) else f"gradients differ by {wrong:.0e}"
    return gradients if all(r["buffers_equal"] for r in rows) else f"{gradients}; batch statistics differ"


# -- plots ----------------------------------------------------------------------------------------------------------


def plot(model: str, reports: list[Report], directory: Path) -> Path:
    """Extra time against peak, one line per contender, with quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.2), layout="constrained")
    colours = iter(pyplot.get_cmap("tab20").colors)  # type: ignore[attr-defined]
    for report in sorted(reports, key=lambda p: is_ours(p["contender"])):
        rows = measured(report)
        if not rows:
            continue
        ours = is_ours(report["contender"])
        x, y = [r["peak_share"] for r in rows], [100 * (r["ratio"] - 1) for r in rows]
        low = [100 * max(r["ratio"] - r["ratio_low"], 0) for r in rows]
        high = [100 * max(r["ratio_high"] - r["ratio"], 0) for r in rows]
        dashed = is_compiled(report["contender"])
        axes.errorbar(
            x, y, [low, high], label=report["contender"], marker="o" if ours else "s", markersize=5 if ours else 4,
            linestyle=("--" if dashed else "-") if len(rows) > 1 else "none", linewidth=2 if ours else 0.8,
            elinewidth=0.6, color=("#c00000" if dashed else "black") if ours else next(colours),
        )  # fmt: skip
    for name, points in PUBLISHED.get(model, {}).items():
        axes.plot(*zip(*[(p, 100 * (t - 1)) for p, t in points], strict=True), "x:", color="grey", label=name)
    axes.axhline(0, color="grey", linewidth=0.6)
    axes.set_xlabel("peak above weights, gradients and inputs, of the plain step's")
    axes.set_ylabel("extra time of the step, % of the plain step")
    axes.set_title(model)
    axes.legend(fontsize=7)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"frontier-{model}.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
