"""One contender on one model, measured: memory from the profiler's allocation events, time on the processor's clock.

Runs in a child process whose allocator neither maps nor trims (`QUIET_MALLOC`): page faults of fresh memory would be
charged to whoever holds most, and make recomputation look almost free.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch._dynamo  # what every checkpointed call loads, here once before the children are made
from frontier_blocks import Case
from frontier_models import build
from torch._C._profiler import _ExtraFields_Allocation
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from holdover.memory.measure import _quiet_profiler, existing_bytes

QUIET_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 26)}
MARK = "frontier: forward is over"
LEAST_ROUNDS, MOST_ROUNDS = 7, 25
LONG_STEP_SECONDS, FEW_ROUNDS = 2.0, 3
"""Steps that take long vary less, and seven rounds of them would take hours."""


class UnavailableError(Exception):
    """The contender does not apply to this model, or cannot run here; the text says why."""


@dataclass
class Point:
    """One setting of a contender: how to change a copy of the model, and what choosing it took."""

    label: str
    prepare: Callable[[torch.nn.Module], Any]  # changes the model in place
    solve_seconds: float | None = None
    promised_peak_bytes: int | None = None
    promised_extra_time: float | None = None
    answers_for_ops: bool = False  # results are put in at the dispatcher, where the profiler counts them as work


@dataclass
class Row:
    """What was measured. `ratio`: the step's time over plain eager's. Peaks: above weights, gradients, inputs."""

    label: str
    error: str = ""
    peak_bytes: int = 0
    peak_share: float = 0.0
    saved_bytes: int = 0
    replayed_flops: int = 0
    ratio: float = 0.0
    ratio_low: float = 0.0  # quartiles over the rounds
    ratio_high: float = 0.0
    gradients_equal: bool = False
    buffers_equal: bool = False
    largest_difference: float = 0.0
    first_step_seconds: float = 0.0
    solve_seconds: float | None = None
    promised_peak_bytes: int | None = None
    promised_extra_time: float | None = None


@dataclass
class Report:
    model: str
    contender: str
    unavailable: str = ""
    plain_peak_bytes: int = 0
    plain_seconds: float = 0.0
    existing_bytes: int = 0
    rounds: int = 0
    rows: list[Row] = field(default_factory=list)


Contender = Callable[[Case, "Setting"], Iterator[Point]]


@dataclass(frozen=True)
class Setting:
    """What a contender may know: how many points to offer, and the peaks (bytes, absolute) that others reached."""

    quick: bool
    peaks: tuple[int, ...] = ()
    model: str = ""


def measure(name: str, contender: str, offers: Contender, setting: Setting, seconds: float) -> dict[str, Any]:
    """Prepare every point of one contender, check it, weigh it, and time all of them and plain in turns."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case = build(name)
    report = Report(name, contender)
    plain, start = _step(case, case.model), _state(case.model)
    reference = _outcome(case.model, plain)
    report.existing_bytes = existing_bytes(case.model, case.args, case.loss)
    plain_flops, report.plain_peak_bytes, _ = _weigh(plain)
    steps: dict[str, Callable[[], None]] = {}
    try:
        for point in offers(case, setting):
            row = Row(point.label, solve_seconds=point.solve_seconds, promised_peak_bytes=point.promised_peak_bytes,
                      promised_extra_time=point.promised_extra_time)  # fmt: skip
            report.rows.append(row)
            try:
                steps[point.label] = _prepared(case, point, row, reference, start, plain_flops)
            except Exception as error:  # a peer's crash is a finding, not ours to pass on
                row.error = _told(error)
            row.peak_share = row.peak_bytes / report.plain_peak_bytes
    except UnavailableError as why:
        report.unavailable = str(why)
    except Exception as error:
        report.unavailable = f"failed: {_told(error)}"
    if steps:
        _time(plain, steps, report, seconds)
    return asdict(report)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:200]}".replace("\n", " ")


def many_graphs() -> None:
    """Let the compiler keep one graph per setting and block, all made of the same code."""
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 4096


def twin_of(model: torch.nn.Module) -> torch.nn.Module:
    """A copy that shares the parameters, so that ten settings of a model take the memory of one."""
    shared = {id(p): p for p in model.parameters()}
    return copy.deepcopy(model, shared)


def _step(case: Case, model: torch.nn.Module) -> Callable[[], None]:
    """Forward, loss and backward, whose gradients are added to those that exist."""

    def run() -> None:
        output = model(*case.args)  # held until the step is over, as in most training loops
        loss = case.loss(output)
        with record_function(MARK):
            pass
        loss.backward()

    return run


def _state(model: torch.nn.Module) -> list[torch.Tensor]:
    return [b.clone() for b in model.buffers()]


def _outcome(model: torch.nn.Module, step: Callable[[], None]) -> tuple[list[Any], list[torch.Tensor]]:
    """Gradients and buffers after one step from the seed."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    torch.manual_seed(1)
    step()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()], _state(model)


def _prepared(
    case: Case, point: Point, row: Row, reference: tuple[list[Any], list[torch.Tensor]], start: list[torch.Tensor],
    plain_flops: int,
) -> Callable[[], None]:  # fmt: skip
    model = twin_of(case.model)
    for buffer, value in zip(model.buffers(), start, strict=True):
        buffer.copy_(value)
    changed = point.prepare(model)
    model = model if changed is None else changed
    step = _step(case, model)
    begun = time.perf_counter()
    gradients, buffers = _outcome(model, step)
    row.first_step_seconds = time.perf_counter() - begun
    row.gradients_equal = all(_same(a, b) for a, b in zip(gradients, reference[0], strict=True))
    row.buffers_equal = all(_same(a, b) for a, b in zip(buffers, reference[1], strict=True))
    row.largest_difference = max(
        ((a - b).abs().max().item() for a, b in zip(gradients, reference[0], strict=True) if a is not None), default=0.0
    )
    step()  # what is made once in a process is not the step's
    flops, row.peak_bytes, row.saved_bytes = _weigh(step)
    if point.answers_for_ops:
        with _Work() as work:
            step()
        flops = work.flops
    row.replayed_flops = flops - plain_flops
    return step


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None) == (b is None) and (a is None or torch.equal(a, b))  # type: ignore[arg-type]


# -- memory and work ------------------------------------------------------------------------------------------------


def _weigh(step: Callable[[], None]) -> tuple[int, int, int]:
    """Floating-point operations of matmul, convolution and attention kernels; peak; bytes held when forward is over."""
    gc.collect()
    with _quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        step()
    peak, saved = _curve(memory)
    with _quiet_profiler(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as shapes:
        step()
    return sum(_flops(e.name, e.input_shapes, e.concrete_inputs) for e in shapes.events() if not _again(e)), peak, saved


class _Work(TorchDispatchMode):
    """Counts what reaches it, below every mode that the step brings along."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [list(a.shape) if isinstance(a, torch.Tensor) else [] for a in args]
        self.flops += _flops(op._schema.name, shapes, list(args))
        return op(*args, **(kwargs or {}))


def _again(event: Any) -> bool:
    """Whether it is the same call once more: a dispatch mode hands an op on to the dispatcher."""
    outer = event.cpu_parent
    while outer is not None:
        if outer.name == event.name:
            return True
        outer = outer.cpu_parent
    return False


def _curve(profiler: profile) -> tuple[int, int]:
    events, mark = [], math.inf
    nodes = list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children)
        fields = node.extra_fields
        if isinstance(fields, _ExtraFields_Allocation):
            events.append((node.start_time_ns, fields.ptr, fields.alloc_size))
        elif node.name == MARK:
            mark = node.start_time_ns
    now = peak = saved = 0
    alive: dict[int, int] = {}
    for when, address, size in sorted(events, key=lambda event: event[0]):
        if when <= mark:
            saved = now
        if size > 0:
            alive[address] = size
            now += size
        else:
            now -= alive.pop(address, 0)
        peak = max(peak, now)
        if when <= mark:
            saved = now
    return peak, saved


def _flops(name: str, shapes: list[list[int]], values: list[Any]) -> int:
    """Of a kernel by its name and arguments; views, pointwise ops and the backward of convolutions count nothing."""
    match name:
        case "aten::mm" | "aten::bmm":
            return 2 * math.prod(shapes[0]) * shapes[1][-1]
        case "aten::addmm" | "aten::baddbmm":
            return 2 * math.prod(shapes[1]) * shapes[2][-1]
        case "aten::_scaled_dot_product_flash_attention_for_cpu":
            return 4 * math.prod(shapes[0]) * shapes[1][-2]
        case "aten::convolution":
            stride, padding = values[3], values[4]
            places: list[int] = [
                (n + 2 * p - k) // s + 1
                for n, k, s, p in zip(shapes[0][2:], shapes[1][2:], stride, padding, strict=True)
            ]
            return 2 * shapes[0][0] * math.prod(shapes[1]) * math.prod(places)
    return 0


# -- time -----------------------------------------------------------------------------------------------------------


def _time(plain: Callable[[], None], steps: dict[str, Callable[[], None]], report: Report, seconds: float) -> None:
    """Medians and quartiles of each setting's time over plain's in the same round."""
    everyone: list[tuple[str, Callable[[], None]]] = [("", plain), *steps.items()]
    gc.collect()
    gc.freeze()  # what is there now need not be looked through before every step
    once = sum(_seconds(step) for _, step in everyone)
    least = FEW_ROUNDS if once > LONG_STEP_SECONDS * len(everyone) else LEAST_ROUNDS
    report.rounds = max(least, min(MOST_ROUNDS, int(seconds / max(once, 1e-3))))
    taken: dict[str, list[float]] = {label: [] for label, _ in everyone}
    for number in range(report.rounds):
        turn = number % len(everyone)
        for label, step in everyone[turn:] + everyone[:turn]:
            taken[label].append(_seconds(step))
    report.plain_seconds = statistics.median(taken[""])
    for row in report.rows:
        if row.label in steps:
            ratios = [a / b for a, b in zip(taken[row.label], taken[""], strict=True)]
            row.ratio_low, row.ratio, row.ratio_high = statistics.quantiles(ratios, n=4)


def _seconds(step: Callable[[], None]) -> float:
    gc.collect()
    gc.disable()
    begun = time.process_time()
    step()
    taken = time.process_time() - begun
    gc.enable()
    return taken
