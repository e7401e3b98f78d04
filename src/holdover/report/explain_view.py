"""Why a tensor is held, and what dropping it would do, as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdover.memory.life import Fate, Life, State
from holdover.report.tables import WIDTH
from holdover.units import format_bytes, format_seconds, format_share

if TYPE_CHECKING:
    from holdover.planning.explain import Account, Effect, Explanation

MARGIN = 14
_SIGNS = {State.ORIGINAL: ("█", "bold yellow"), State.PACKED: ("▄", "cyan"), State.COPY: ("▒", "cyan"),
          State.REPLAYED: ("▓", "bold green")}  # fmt: skip


def explain_view(account: Account) -> Group:
    """One value's whole story, or a table of all that a module keeps."""
    head = Text.assemble(
        (account.target, "bold"), f"  in {account.model}  {account.inputs}\n",
        f"the step's peak is {format_bytes(account.unplanned_peak_bytes)}, in {account.peak_at}",
    )  # fmt: skip
    blocks: list[RenderableType] = [head]
    if account.plan is not None:
        asked = "min" if account.plan.budget_bytes is None else format_bytes(account.plan.budget_bytes)
        asked += " of reserved memory" if account.plan.budget_kind == "reserved" else ""
        peak, time = format_bytes(account.plan.predicted_peak_bytes), format_share(account.plan.extra_time)
        blocks.append(Text(f"with the plan for {asked} it is {peak}, for {time} more time"))
    if len(account.explanations) == 1:
        blocks += _story(account, account.explanations[0])
    else:
        blocks += [_table(account), *_together(account)]
    blocks.append(Text(f"times: the sum of ops, {account.priced}", style="dim"))
    return Group(*blocks)


def _story(account: Account, found: Explanation) -> list[RenderableType]:
    life = found.life
    size = format_bytes(life.nbytes)
    made = f"{life.op_name} in {life.module or 'the model itself'}" if life.op >= 0 else "there before the step"
    lines: list[RenderableType] = [Text(), Text(f"{life.name}: {size}, {life.dtype}, {made}", style="bold")]
    if found.why_saved:
        lines += [Text(f"  saved because backward reads it: {reader}") for reader in found.why_saved]
    elif life.saved:
        lines.append(Text("  saved by autograd, but no op of backward reads it"))
    if found.obstacle:
        lines.append(Text(f"  cannot be dropped: {found.obstacle}"))
    lines.append(Text())
    if life.fate is not Fate.EXISTING:
        lines += [*_timelines(account, found), Text()]
    if found.alone is not None:
        lines += [Text("if it were dropped", style="bold"), _effects(found), Text(_verdict(found))]
        lines += [Text(), Text("its recomputation", style="bold")]
        if found.with_it:
            shown = ", ".join(found.with_it[:4]) + (f" and {len(found.with_it) - 4} more" if found.with_it[4:] else "")
            lines.append(Text(f"  runs again as well: {shown}"))
        lines += [Text("  reads" if found.needs else "  reads nothing"), _needs(found), Text()]
    if found.planned is not None:
        planned = found.planned
        lines += [Text(f"the plan: {planned.fate.value}", style="bold"), Text(f"  {planned.why}")]
        if planned.life.replays:
            replays = planned.life.replays
            others = len({op for replay in replays for op in replay.ops}) - 1
            text = f"  made again {len(replays)} time{'s' * (len(replays) > 1)}"
            lines.append(Text(text + (f", with {others} other op{'s' * (others > 1)} that it needs" if others else "")))
        lines.append(Text())
    return lines


def _timelines(account: Account, found: Explanation) -> list[RenderableType]:
    """Its life on the time line, as it is and as planned, and its moments in words."""
    columns = min(WIDTH - MARGIN, found.life.length)
    length = max(found.life.length, 1)
    legend = ""
    for (name, start), (_, end) in zip(account.phases, [*account.phases[1:], ("", length)], strict=True):
        room = end * columns // length - start * columns // length
        legend += f"|{name}"[:room].ljust(room)
    peak = min(account.peak_position * columns // length, columns - 1)
    lines: list[RenderableType] = [
        Text("its life over the step", style="bold"),
        Text(" " * MARGIN + legend, style="dim"),
        Text("as it is".ljust(MARGIN)) + _strip(found.life, columns),
    ]
    if found.planned is not None and found.planned.life.spans != found.life.spans:
        lines.append(Text("planned".ljust(MARGIN)) + _strip(found.planned.life, columns))
    lines.append(Text(" " * (MARGIN + peak) + "^ peak", style="red"))
    shown = found.planned.life if found.planned is not None else found.life
    if any(s.state is not State.ORIGINAL for s in shown.spans):
        told = {State.PACKED: "packed", State.COPY: "a copy of it", State.REPLAYED: "made again"}
        states = dict.fromkeys(s.state for s in shown.spans if s.state is not State.ORIGINAL)
        lines.append(Text(" " * MARGIN + ", ".join(f"{_SIGNS[s][0]} {told[s]}" for s in states), style="dim"))
    return [*lines, _moments(account, shown)]


def _strip(life: Life, columns: int) -> Text:
    text = Text()
    for column in range(columns):
        start, end = column * life.length // columns, max((column + 1) * life.length // columns, 1)
        here = [s.state for s in life.spans if s.start < max(end, start + 1) and s.end > start]
        sign, style = _SIGNS[here[-1]] if here else ("·", "dim")
        text.append(sign, style=style)
    return text


def _moments(account: Account, life: Life) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", style="dim")
    table.add_column(style="dim")
    table.add_column()
    rows: list[tuple[int, int, str]] = []
    if life.op >= 0:
        rows.append((life.produced, 0, f"produced by {life.op_name}"))
    rows += [(at, 1, "saved for backward") for at in life.saved[:1]]
    backward = life.backward
    gone = [s.end for s in life.spans if s.state is State.ORIGINAL and s.end < backward]
    if gone and life.fate in (Fate.DROPPED, Fate.PACKED):
        rows.append((gone[-1], 2, "dropped" if life.fate is Fate.DROPPED else "kept in packed form only"))
    rows += [(at, 3, "asked for") for at in life.asked]
    rows += [(r.position, 4, f"made again, by {len(r.ops)} op{'s' * (len(r.ops) > 1)}") for r in life.replays]
    rows += [(r.position, 5, f"read by {r.name}") for r in life.reads]
    if life.op >= 0 and life.freed < life.length:
        rows.append((life.freed, 6, "freed"))
    for at, _, what in sorted(rows):
        phase = [name for name, start in account.phases if start <= at][-1:] or [""]
        table.add_row(f"{at}", phase[0], what)
    return table


def _effects(found: Explanation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("", "held from forward", "at the peak", "extra time", "of the step"):
        table.add_column(name, justify="right" if name else "left")
    for name, count, effect in (("it alone", 1, found.alone), ("it and its like", None, found.alike)):
        if effect is not None:
            number = f"{name} ({effect.dropped})" if count is None else name
            table.add_row(number, format_bytes(found.life.nbytes) if count else "", *_figures(effect))
    return table


def _figures(effect: Effect) -> tuple[str, str, str]:
    change = effect.saved_bytes
    sign = "-" if change > 0 else "+" if change < 0 else ""
    return f"{sign}{format_bytes(abs(change))}", format_seconds(effect.seconds), format_share(effect.extra_time)


def _verdict(found: Explanation) -> str:
    best = found.alike or found.alone
    assert best is not None
    if best.saved_bytes > 0:
        which = "without them" if found.alike else "without it"
        return f"  {which} the peak would be {format_bytes(best.peak_after_bytes)}"
    if not found.at_peak:
        return "  it is not there when memory is highest, so dropping it gains nothing"
    if best.saved_bytes < 0:
        return "  that would raise the peak: what its recomputation reads is not kept otherwise"
    return "  the peak would stay: what its recomputation reads or other moments are as high"


def _needs(found: Explanation) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify)
    for need in found.needs:
        table.add_row(need.name, format_bytes(need.nbytes), need.how)
    return table


def _table(account: Account) -> Table:
    """A row per op, whose results are dropped together."""
    rows: dict[int, list[Explanation]] = {}
    for found in account.explanations:
        rows.setdefault(found.life.op, []).append(found)
    cells = [_row(row, planned=account.plan is not None) for row in rows.values()]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    names = ("tensor", "op", "held", "at the peak", "if dropped", "time", "plan")
    for i, column in enumerate(zip(*cells, strict=True)):
        if i < 2:  # what is too wide is cut here, and never a figure
            table.add_column(names[i], no_wrap=True, overflow="ellipsis", max_width=(32, 26)[i])
        else:
            width = max(map(len, (names[i], *column)))
            table.add_column(names[i], no_wrap=True, min_width=width, justify="left" if names[i] == "plan" else "right")
    for row in cells:
        table.add_row(*row)
    return table


def _row(row: Sequence[Explanation], *, planned: bool) -> list[str]:
    first = row[0]
    effect = ("cannot be", "") if first.alone is None else _figures(first.alone)[::2]
    sizes = (sum(e.life.nbytes for e in row), sum(e.life.nbytes for e in row if e.at_peak))
    fate = first.planned.fate.value if first.planned else first.life.fate.value
    op = first.life.op_name.removeprefix("aten.").removesuffix(".default")
    return [first.life.name, op, *map(format_bytes, sizes), *effect, *([fate] if planned else [])]


def _together(account: Account) -> list[RenderableType]:
    number, total = account.held
    more = f"; the largest {len(account.explanations)} are shown" if number > len(account.explanations) else ""
    lines: list[RenderableType] = [Text(f"{number} tensors, {format_bytes(total)} held from forward{more}")]
    if account.together is not None:
        peak, _, share = _figures(account.together)
        lines.append(Text(f"all that can be dropped, together: {peak} at the peak for {share} of the step"))
    return lines
