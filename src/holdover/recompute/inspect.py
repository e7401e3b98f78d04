"""What an applied plan did in the last step."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from holdover.errors import ApplyError
from holdover.recompute.apply import installation_of
from holdover.recompute.recorder import Session
from holdover.units import format_bytes

NOT_REACHED = ""


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A place of the plan where something else ran.

    Attributes:
        call: key of the module call, "" outside the model.
        index: position among the call's ops.
        expected: the op that the plan names.
        found: the op that ran there; "" if the call ended before, or never came.
    """

    call: str
    index: int
    expected: str
    found: str

    def __str__(self) -> str:
        where = f"{self.call or 'outside the model'}, op {self.index}"
        return f"{where}: {self.expected} was planned, {self.found or 'nothing'} ran"


@dataclass(frozen=True, slots=True)
class Unsafe:
    """Planned ops whose outputs were kept all the same, because running them again could give something else."""

    op: str
    reason: str
    count: int

    def __str__(self) -> str:
        return f"{self.op} ({self.count} x): {self.reason}"


@dataclass(frozen=True, slots=True)
class Inspection:
    """What an applied plan did in the model's last step, as far as it has come.

    Attributes:
        plan_id: whose plan it is.
        matched: places of the plan where the planned op ran.
        unmatched: the others.
        kept: planned ops that could not be dropped safely.
        replayed_ops: how many ops ran again in backward, so far.
        replayed_bytes: what they made that was asked for.
        dropped_bytes: storages that autograd saved and that were not kept for it.
        packed_bytes: what packed values take.
        packed_from_bytes: what they would take unpacked.
    """

    plan_id: str
    matched: int
    unmatched: tuple[Unmatched, ...]
    kept: tuple[Unsafe, ...]
    replayed_ops: int
    replayed_bytes: int
    dropped_bytes: int
    packed_bytes: int
    packed_from_bytes: int

    def __str__(self) -> str:
        lines = [
            f"{self.matched} planned ops ran as planned, {len(self.unmatched)} did not",
            f"dropped {format_bytes(self.dropped_bytes)} that autograd saved; "
            f"ran {self.replayed_ops} ops again, making {format_bytes(self.replayed_bytes)}",
        ]
        if self.packed_from_bytes:
            lines.append(f"packed {format_bytes(self.packed_from_bytes)} into {format_bytes(self.packed_bytes)}")
        for title, rows in (("not as planned", self.unmatched), ("kept, to be safe", self.kept)):
            lines += [f"{title}:", *(f"  {row}" for row in rows[:SHOWN])] if rows else []
            if len(rows) > SHOWN:
                lines.append(f"  and {len(rows) - SHOWN} more")
        return "\n".join(lines)


SHOWN = 10


def inspect(model: torch.nn.Module) -> Inspection:
    """What the plan applied to `model` did in the model's last call with gradients on.

    Replayed counts grow while backward runs: ask after it.

    Raises:
        ApplyError: no plan is applied to the model, or one for compiled code, whose ops nobody watches.
    """
    installation = installation_of(model)
    compiler = sys.modules.get("holdover.integrations.compile")
    if compiler is not None and (backend := compiler.backend_of(model)) is not None:
        raise ApplyError(_compiled(type(model).__name__, backend.partition))
    if installation is None:
        raise ApplyError(
            f"this {type(model).__name__} follows no plan: apply one first with holdover.apply_(model, plan)"
        )
    if installation.last is None:
        return Inspection(installation.plan_id, 0, (), (), 0, 0, 0, 0, 0)
    return inspection_of(installation.last, installation.plan_id)


def _compiled(name: str, partition: Any) -> str:
    """What can be said of a plan for compiled code."""
    followed, others = len(set(partition.matched)), len(set(partition.unmatched))
    so_far = (
        f"so far the compiler made {followed} graph{'s' * (followed != 1)} that the plan knows, and {others} that it "
        "does not"
        if followed or others
        else "it has not run yet"
    )
    return (
        f"this {name} follows a plan for compiled code, where no op is watched as it runs; {so_far}. "
        "holdover.verify(model, args, plan=plan) measures what the plan does to memory, time and gradients"
    )


def inspection_of(session: Session, plan_id: str = "") -> Inspection:
    """The same for one session."""
    ledger = session.ledger
    reached: dict[str, set[int]] = {}
    for frame in session.frames:
        reached.setdefault(frame.key, set()).update(frame.seen)
    unmatched = [Unmatched(*m) for m in session.mismatches]
    for key, entries in session.compiled.scripts.items():
        seen = reached.get(key, set())
        unmatched += [Unmatched(key, i, entry.name, NOT_REACHED) for i, entry in entries.items() if i not in seen]
    kept = tuple(Unsafe(op, why, n) for (op, why), n in session.unsafe.items())
    return Inspection(
        plan_id, session.matched, tuple(unmatched), kept, ledger.replayed_ops, ledger.replayed_bytes,
        ledger.dropped_bytes, ledger.packed_bytes, ledger.packed_from_bytes,
    )  # fmt: skip
