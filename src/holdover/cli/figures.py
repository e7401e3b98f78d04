"""`holdover figures --out DIR`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdover.cli.common import fails_politely, stage, time_limit_option
from holdover.errors import HoldoverError

if TYPE_CHECKING:
    from holdover.cli.gpt import Shape
    from holdover.memory.timeline import Choices
    from holdover.trace.graph import Trace

CARD = "h100-80gb"
BATCHES = (2, 4, 8)
KINDS = ("svg", "png")


@fails_politely
def figures(
    out: Annotated[Path, typer.Option("--out", help="The directory to draw into; made if it is not there.")],
    time_limit: Annotated[float, time_limit_option("Seconds for the solver, about.")] = 120.0,
) -> None:
    """Draw the published figures, as SVG and PNG, from computations of our own."""
    from holdover.cli.gpt import Shape
    from holdover.report.figures.canvas import check_drawable

    check_drawable(out / "stack.svg")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HoldoverError(f"cannot make the directory {out}: {error.strerror or error}") from None
    draw_megatron_models(out)
    draw_recorded(out, Shape(layers=12, width=768, heads=12, context=1024), BATCHES, time_limit)
    for name in ("megatron", "stack", "strategies", "life"):
        typer.echo(f"drew {out / name}.svg and .png")


def draw_megatron_models(out: Path) -> None:
    """The figure that needs no recording."""
    from holdover.report.figures.megatron import draw_megatron

    with stage("closed form of the Megatron models"):
        for kind in KINDS:
            draw_megatron(out / f"megatron.{kind}")


def draw_recorded(out: Path, shape: Shape, batches: tuple[int, ...], time_limit: float) -> None:
    """The figures of a GPT of some shape: its batch sizes beside each other, the largest of them planned."""
    import torch

    from holdover.cli.gpt import GPT
    from holdover.memory.estimate import workspaces
    from holdover.planning.api import priced_problem
    from holdover.planning.choices import choices_of
    from holdover.planning.frontier import frontier_of
    from holdover.planning.steps import recorded
    from holdover.report.figures.life import draw_life
    from holdover.report.figures.stack import draw_stack
    from holdover.report.figures.strategies import draw_strategies
    from holdover.report.html.moments import shown_step
    from holdover.report.html.policies import policies_of
    from holdover.units import format_bytes

    about = f"GPT, {shape.layers} blocks of width {shape.width}, length {shape.context}"
    with torch.device("meta"):
        model = GPT(shape)
        texts = {b: torch.zeros(b, shape.context, dtype=torch.long) for b in batches}
    steps = {}
    for batch, text in texts.items():
        with stage(f"recording a GPT at batch {batch}"):
            steps[batch] = recorded(model, (text, text), optimizer="adamw", precision="bf16-mixed", device=CARD)
    for kind in KINDS:
        told = f"{about}, bf16-mixed: bytes saved for backward, by layer, recorded for {CARD}"
        draw_stack({b: s.trace for b, s in steps.items()}, out / f"stack.{kind}", about=told)
    step = steps[batches[-1]]
    trace = step.trace
    with stage("finding the frontier"):
        frontier = frontier_of(trace, precision=step.precision, time_limit=time_limit, card=step.card)
    workspace, _ = workspaces(trace)
    problem, _ = priced_problem(trace, workspace, with_loss=False, card=step.card)
    policies = policies_of(shown_step(trace), workspace, problem)
    for kind in KINDS:
        told = f"{about}, batch {batches[-1]}, bf16-mixed, AdamW; times modelled for {CARD}"
        draw_strategies(frontier, policies, out / f"strategies.{kind}", about=told)
    plan = frontier.within(int(0.6 * frontier.unplanned_peak_bytes))
    choices = choices_of(trace, plan)
    value = trace.ops[_dropped_gelu(trace, choices)].outputs[0]
    peak = format_bytes(plan.predicted_peak_bytes)
    for kind in KINDS:
        told = f"{about}, batch {batches[-1]}, planned down to {peak}; recorded for {CARD}"
        draw_life(trace, value, choices, out / f"life.{kind}", about=told)


def _dropped_gelu(trace: Trace, choices: Choices) -> int:
    """The GELU in the middle of those that a plan drops in the last step."""
    last = trace.last_step
    dropped = [o for o in sorted(choices.recompute) if trace.ops[o].step == last and "gelu" in trace.ops[o].name]
    return dropped[len(dropped) // 2]
