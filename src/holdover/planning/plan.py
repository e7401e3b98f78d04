"""The Plan: what to keep, what to recompute, and what that promises. Plain data, saved as JSON."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from holdover.errors import ApplyError, PlanError
from holdover.planning.inputs import PlannedShape
from holdover.units import binary_unit, parse_bytes

SCHEMA_VERSION = 1
RECOMPUTE, PACK = "recompute", "pack"
NUMBERS = (
    "predicted_peak_bytes", "unplanned_peak_bytes", "floor_bytes", "extra_time", "bound_extra_time", "step_seconds",
    "saved_bytes", "unplanned_saved_bytes",
)  # fmt: skip
"""Fields of a plan that are always there, as numbers."""


@dataclass(frozen=True)
class Choice:
    """What happens to the result of one op: its place is the `index`-th op of the module call `call`.

    In a plan of nested replays an op belongs to a `stage` of backward, which goes through the stages downwards. A
    replay on behalf of a stage above `held_from` drops the op's result again, and a later replay makes it once more;
    without stages (0 and None) replayed results are held until their last use.
    """

    call: str
    index: int
    op: str
    action: str  # "recompute" or "pack"
    stage: int = 0
    held_from: int | None = None


@dataclass(frozen=True)
class ModuleSummary:
    """What the plan does in one module: bytes that autograd would have kept and now does not, and their price."""

    path: str
    dropped_bytes: int
    packed_bytes: int
    replayed_ops: int
    seconds: float


@dataclass(frozen=True)
class Knee:
    """A budget a little above the lowest peak, at which most of the time is saved.

    Attributes:
        budget_bytes: what to ask for.
        extra_time: about what a plan for that costs, as a fraction of the step.
    """

    budget_bytes: int
    extra_time: float

    @property
    def budget(self) -> str:
        """The budget as text for `holdover.plan(budget=...)` and `--budget`, rounded up.

        >>> Knee(3 * 2**20 - 9, 0.2).budget, Knee(700, 0.2).budget
        ('3.00MiB', '700B')
        """
        unit = binary_unit(self.budget_bytes)
        if unit == "B":
            return f"{self.budget_bytes}B"
        hundredths = -(-100 * self.budget_bytes // parse_bytes(f"1{unit}"))
        return f"{hundredths // 100}.{hundredths % 100:02}{unit}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which results of forward are dropped and recomputed in backward, for one model and step.

    Attributes:
        budget_bytes: the budget that was asked for, in bytes; None for "min".
        predicted_peak_bytes: the peak that the plan promises: everything live at once, over the whole step.
        unplanned_peak_bytes: the same without the plan.
        floor_bytes: the lowest peak that could be reached.
        extra_time: time that the replays add, as a fraction of the step.
        bound_extra_time: proved: no plan of this problem that meets the budget adds less.
        step_seconds: the step's own time, as the sum of its ops; what `extra_time` is a fraction of.
        priced: how ops were priced, for example "measured here, 58 of 61 ops".
        saved_bytes, unplanned_saved_bytes: activations saved for backward, with and without the plan.
        with_loss: whether the choices reach into the loss, so that `recompute()` has to be used instead of `apply_`.
        compiled: the torch.compile backend that the plan was made for ("inductor"); "" for eager mode.
        regions: names of the modules that are compiled, each by itself; ("",) is the whole model.
        budget_kind: what the budget is for: "allocated" memory, or what PyTorch's allocator has "reserved".
        allocated_bytes, reserved_bytes: what a card's allocator shows at most under the plan, `unplanned_` without it;
            None for a plan made for the CPU. `predicted_peak_bytes` counts the tensors alone, not rounded up, without
            cuBLAS's workspace.
        notes: what a reader should know, such as "the plan buys nothing".
        knee: for budget="min", a budget a little above with a far cheaper plan, if one was met.
        shapes: all input shapes that were planned for, with the promise at each and which plan it follows. The other
            figures are those of the dearest: the one with the highest peak without a plan.
        variants: plans for some of the shapes; which one is followed is settled at each forward by its arguments.
        outline: what the model consists of (`planning.outline`), by which another one is told apart; may be empty.

    Choices are kept in one order: by call, as the calls first come, and by index in each.
    """

    model: str
    fingerprint: str
    inputs: str
    device: str
    precision: str | None
    optimizer: str
    torch_version: str
    budget_bytes: int | None
    predicted_peak_bytes: int
    unplanned_peak_bytes: int
    floor_bytes: int
    extra_time: float
    bound_extra_time: float
    step_seconds: float
    priced: str
    saved_bytes: int
    unplanned_saved_bytes: int
    peak_at: str
    peak_parts: Mapping[str, int]
    with_loss: bool = False
    choices: tuple[Choice, ...] = ()
    quiet: tuple[str, ...] = ()
    modules: tuple[ModuleSummary, ...] = ()
    notes: tuple[str, ...] = ()
    knee: Knee | None = None
    budget_kind: str = "allocated"
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    unplanned_allocated_bytes: int | None = None
    unplanned_reserved_bytes: int | None = None
    compiled: str = ""
    regions: tuple[str, ...] = ()
    shapes: tuple[PlannedShape, ...] = ()
    variants: tuple[Plan, ...] = ()
    outline: Mapping[str, Any] = field(default_factory=dict, repr=False)
    schema_version: int = field(default=SCHEMA_VERSION)

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", _in_order(self.choices))

    @property
    def gap(self) -> float:
        """How much better, as a fraction of the step, any plan could still be."""
        return max(self.extra_time - self.bound_extra_time, 0.0)

    @property
    def script(self) -> dict[str, dict[int, tuple[Any, ...]]]:
        """The choices by call and index, as the runtime reads them: op, action, and stages where there are any."""
        script: dict[str, dict[int, tuple[Any, ...]]] = {}
        for c in self.choices:
            nested = () if c.held_from is None else (c.stage, c.held_from)
            script.setdefault(c.call, {})[c.index] = (c.op, c.action, *nested)
        return script

    @property
    def packs(self) -> bool:
        """Whether some results are kept packed."""
        return any(c.action == PACK for c in self.choices)

    @property
    def nested(self) -> bool:
        """Whether some results are dropped and replayed more than once."""
        return any(c.held_from is not None for c in self.choices)

    def recompute(self) -> AbstractContextManager[Any]:
        """A context for a block of code, the loss included, in which this plan is in force.

        A model that is called inside need not have the plan applied. For plans made with `with_loss=True` this is the
        only way; for others it does the same as `apply_`.

        Raises:
            ApplyError: the plan is for compiled code.
        """
        if self.compiled:
            raise ApplyError(
                "this plan is for code that torch.compile makes, and its choices are places in the compiler's graphs: "
                "put it on the model with holdover.apply_(model, plan)"
            )
        from holdover.recompute.apply import session
        from holdover.recompute.shapes import guide_of

        return session(self.script, frozenset(self.quiet), guide=guide_of(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, choices grouped by call."""
        plain = asdict(replace(self, variants=()))
        plain["variants"] = [variant.to_dict() for variant in self.variants]
        plain["choices"] = {}
        for c in self.choices:
            nested = () if (c.stage, c.held_from) == (0, None) else (c.stage, c.held_from)
            plain["choices"].setdefault(c.call, []).append([c.index, c.op, c.action, *nested])
        return plain

    def to_json(self) -> str:
        """The plan as JSON text; `load` reads it back."""
        return json.dumps(self.to_dict(), indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, under another name first, so that a file that is there is never half lost.

        Raises:
            PlanError: the file cannot be written.
        """
        target = Path(path)
        try:
            file = tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=f".{target.name}.", delete=False)  # noqa: SIM115
            try:
                with file:
                    file.write(self.to_json())
                os.replace(file.name, target)
            finally:
                Path(file.name).unlink(missing_ok=True)
        except OSError as error:
            raise PlanError(f"The plan cannot be written to {target}: {error.strerror or error}.") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: no such file, not a plan, or of a newer version.
        """
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise PlanError(f"The plan {path} cannot be read: {error.strerror or error}.") from None
        except UnicodeDecodeError:
            raise PlanError(f"{path} is not a plan: it is not text.") from None
        return cls.from_json(text, name=str(path))

    @classmethod
    def from_json(cls, text: str, *, name: str = "the text") -> Plan:
        """Read a plan from JSON text; `name` says in errors where it came from."""
        try:
            data = json.loads(text)
        except ValueError:
            data = None
        return cls._from_dict(data, name)

    @classmethod
    def _from_dict(cls, data: Any, name: str) -> Plan:
        if not isinstance(data, dict) or "schema_version" not in data:
            raise PlanError(f"{name} is not a plan: JSON as Plan.save writes it is needed.")
        if (version := data["schema_version"]) != SCHEMA_VERSION:
            raise PlanError(f"{name} has plan version {version}; this holdover reads {SCHEMA_VERSION}. Plan again.")
        known = {f.name for f in fields(cls)}
        try:
            data["choices"] = tuple(_choice(call, *entry) for call, ops in data["choices"].items() for entry in ops)
            data["modules"] = tuple(ModuleSummary(**m) for m in data["modules"])
            data["quiet"], data["notes"] = tuple(data["quiet"]), tuple(data["notes"])
            data["knee"] = None if data.get("knee") is None else Knee(**data["knee"])
            data["outline"] = dict(data.get("outline") or {})
            data["regions"] = tuple(data.get("regions", ()))
            data["shapes"] = tuple(PlannedShape.from_dict(s) for s in data.get("shapes", ()))
            data["variants"] = tuple(cls._from_dict(v, name) for v in data.get("variants", ()))
            plan = cls(**{k: v for k, v in data.items() if k in known})
            plan._check()
            return plan
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise PlanError(f"{name} is not a whole plan: {error}. Plan again.") from None

    def _check(self) -> None:
        """Raise a ValueError for what a hand may have broken in a file, and what would otherwise fail in training."""
        for name in (n for n in NUMBERS if not isinstance(getattr(self, n), (int, float))):
            raise ValueError(f"{name} is {getattr(self, name)!r}, not a number")
        for c in self.choices:
            if c.action not in (RECOMPUTE, PACK):
                raise ValueError(f"the action of {c.op} in {c.call!r} is {c.action!r}, not {RECOMPUTE!r} or {PACK!r}")
            if c.index < 0 or c.stage < 0 or (c.held_from is not None and c.held_from < c.stage):
                raise ValueError(f"{c.op} in {c.call!r} stands at {c.index}, stage {c.stage}, held from {c.held_from}")

    def __str__(self) -> str:
        from holdover.report.text import render_plan

        return render_plan(self)

    def to_html(self, estimate: Any = None) -> str:
        """The report page for this plan: one self-contained file as text.

        Args:
            estimate: the `Estimate` of the same step, with which the page shows memory over time and each tensor's
                life under the plan. A plan alone has only its promise and its choices.

        Raises:
            PlanError: the estimate is of another model or other inputs, or the plan is for compiled code, whose ops are
                not those of an estimate.
        """
        if self.compiled and estimate is not None:
            raise PlanError(
                "this plan is for code that torch.compile makes, and an estimate is of the ops that run without it: "
                "plan.to_html() alone shows its promise and its choices."
            )
        from holdover.report.html.page import plan_page

        return plan_page(self, estimate)

    def _repr_html_(self) -> str:
        from holdover.report.html.notebook import plan_fragment

        return plan_fragment(self)


def _choice(call: Any, index: Any, op: Any, action: Any, stage: Any = 0, held_from: Any = None) -> Choice:
    """A choice from what a file says."""
    return Choice(
        str(call), int(index), str(op), str(action), int(stage), None if held_from is None else int(held_from)
    )


def _in_order(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """One choice for each place (the last, which is the one that the runtime takes), calls not interleaved."""
    calls: dict[str, dict[int, Choice]] = {}
    for c in choices:
        calls.setdefault(c.call, {})[c.index] = c
    return tuple(ops[index] for ops in calls.values() for index in sorted(ops))
