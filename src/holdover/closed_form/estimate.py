"""One model under one layout: the whole answer as plain data."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from holdover.closed_form.account import Bytes, account_bytes
from holdover.closed_form.architecture import MEGATRON, Architecture, Kernels
from holdover.closed_form.fitting import choose_row, over_budget
from holdover.closed_form.layers import last_end, layer
from holdover.closed_form.layout import Layout
from holdover.closed_form.optimal import Choice
from holdover.closed_form.parameters import States, unique_parameters
from holdover.closed_form.pipeline import in_flight
from holdover.closed_form.rates import Cluster, cluster_of
from holdover.closed_form.recompute import Recompute
from holdover.closed_form.rows import Model, Rows, build_rows
from holdover.closed_form.times import account_times, step_times
from holdover.cost.devices import card

DEFAULT_CLUSTER = cluster_of(card("h100-80gb"))


@dataclass(frozen=True)
class Stage:
    """One pipeline stage's bytes on one rank. The parts add up to `total_bytes`."""

    index: int
    layers: int
    in_flight: tuple[int, ...]
    """Micro-batches held of each of its chunks."""
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    embedding_bytes: int
    head_bytes: int
    working_bytes: int
    """The larger of a layer's backward, its replay included, and the loss's own, plus gathered weights."""
    replay_bytes: int
    temporaries_bytes: int
    loss_bytes: int
    gathered_bytes: int
    host_bytes: int
    """Offloaded, not on the device."""
    stage_output_bytes: int
    """Not counted: freed once sent, because the next stage keeps it as its input."""
    replay_seconds: float
    """Of one micro-batch."""
    replay_bound_seconds: float = 0.0
    """Under "optimal": no choice of tensors to drop replays for less within the budget."""
    chosen: tuple[tuple[str, int, tuple[str, ...]], ...] = ()
    """Under "optimal": the kind, how many layers, and the ops that run again."""

    @property
    def total_bytes(self) -> int:
        """All that the rank holds at its peak, without context, workspaces and fragmentation."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.embedding_bytes
            + self.head_bytes
            + self.working_bytes
        )


@dataclass(frozen=True)
class ClosedForm:
    """What a model takes under a layout."""

    architecture: Architecture
    layout: Layout
    kernels: Kernels
    states: States
    recompute: Recompute
    cluster: Cluster
    stages: tuple[Stage, ...]
    parameters: int
    model_flops: int
    """Of one step over all GPUs: matrix products of forward and backward, attention unmasked, as in the paper."""
    hardware_flops: int
    """Model FLOPs and those that recomputation runs again."""
    step_seconds: float
    """Modelled."""
    replay_seconds: float
    """The part of it that recomputation adds."""
    bubble_seconds: float
    notes: tuple[str, ...]
    usable_bytes: int
    """Of each GPU: what was said to be there, else the card's."""

    @property
    def heaviest(self) -> Stage:
        """The stage with the most bytes."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """Bytes of the heaviest stage."""
        return self.heaviest.total_bytes

    @property
    def fits(self) -> bool:
        """Whether the heaviest stage is within what is usable."""
        return self.peak_bytes <= self.usable_bytes

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.layout.global_batch * (self.layout.sequence or self.architecture.sequence)

    @property
    def extra_time(self) -> float:
        """Recomputation's part of the step, over the step without it."""
        return self.replay_seconds / (self.step_seconds - self.replay_seconds)

    @property
    def paper_hardware_flops(self) -> int:
        """Hardware FLOPs as the paper's Eq. 8 counts them.

        Selective recomputation runs attention's forward again; Eq. 8 charges it like forward and backward, three times
        as much, and so do the HFU figures that the paper publishes.
        """
        times = 3 if self.recompute.granularity == "selective" else 1
        return self.model_flops + times * (self.hardware_flops - self.model_flops)

    def mfu(self, step_seconds: float | None = None) -> float:
        """Model FLOPs utilisation.

        Args:
            step_seconds: a measured time; None takes the modelled one.
        """
        return self.model_flops / self._peak_flops(step_seconds)

    def hfu(self, step_seconds: float | None = None) -> float:
        """Hardware FLOPs utilisation: the FLOPs of recomputation count as well."""
        return self.hardware_flops / self._peak_flops(step_seconds)

    def _peak_flops(self, step_seconds: float | None) -> float:
        seconds = step_seconds or self.step_seconds
        return seconds * self.layout.gpus * self.cluster.rate(self.kernels.element_bytes)

    def to_json(self) -> dict[str, Any]:
        """The result as plain data; sizes in bytes, times in seconds."""
        return {
            "version": 1,
            "model": _plain(self.architecture),
            "layout": _plain(self.layout) | {"gpus": self.layout.gpus, "global_batch": self.layout.global_batch},
            "kernels": _plain(self.kernels),
            "states": _plain(self.states),
            "recompute": _plain(self.recompute),
            "card": self.cluster.card.name,
            "usable_bytes": self.usable_bytes,
            "parameters": self.parameters,
            "peak_bytes": self.peak_bytes,
            "heaviest_stage": self.heaviest.index,
            "fits": self.fits,
            "stages": [_plain(stage) | {"total_bytes": stage.total_bytes} for stage in self.stages],
            "model_flops": self.model_flops,
            "hardware_flops": self.hardware_flops,
            "paper_hardware_flops": self.paper_hardware_flops,
            "step_seconds": self.step_seconds,
            "replay_seconds": self.replay_seconds,
            "bubble_seconds": self.bubble_seconds,
            "extra_time": self.extra_time,
            "mfu": self.mfu(),
            "hfu": self.hfu(),
            "notes": list(self.notes),
        }


def closed_form(
    architecture: Architecture,
    layout: Layout | None = None,
    *,
    kernels: Kernels = MEGATRON,
    states: States | None = None,
    recompute: Recompute | None = None,
    cluster: Cluster = DEFAULT_CLUSTER,
    memory_bytes: int | None = None,
    small: bool = True,
) -> ClosedForm:
    """Memory, FLOPs and modelled time of a training step, from a configuration alone.

    Args:
        architecture: the model: a preset, or `from_config`'s.
        layout: how it is laid over GPUs; None is one GPU with one sequence.
        kernels: which code runs it, which decides what is kept.
        states: what is kept per parameter; None is Megatron's mixed precision, 18 bytes.
        recompute: None recomputes nothing.
        cluster: the cards, for times and for whether it fits.
        memory_bytes: of each GPU, for whether it fits, and the budget of recompute "optimal"; None is the card's usable
            memory.
        small: count norm statistics, token ids and the like, which the paper leaves out.

    Returns:
        Every stage's bytes, FLOPs, and the modelled step time.

    Raises:
        ConfigurationError: the layout or the recomputation is impossible for the model.
        BudgetError: under "optimal", no set of dropped tensors meets the budget.

    Eq. 6 of Korthikanti et al. 2022 for the 22B model, 34 s b h L / t:

    >>> from holdover.closed_form.architecture import PAPER
    >>> from holdover.closed_form.presets import PRESETS
    >>> found = closed_form(
    ...     PRESETS["gpt-22b"],
    ...     Layout(tp=8, sequence_parallel=True, micro_batch=4),
    ...     kernels=PAPER,
    ...     recompute=Recompute(granularity="selective"),
    ... )
    >>> found.stages[0].activations_bytes - 48 * 2 * 8 * 2048 * 4 // 8 == 34 * 2048 * 4 * 6144 * 48 // 8
    True
    """
    layout, recompute = layout or Layout(), recompute or Recompute()
    layout.check(architecture)
    recompute.check(architecture, layout)
    model = Model(architecture, kernels, states or States(), recompute, small)
    rows = build_rows(model, [layout])
    counted = account_bytes(model, rows)
    times = account_times(model, rows, cluster, counted, [layout])
    replay, activations, working = times.replay, counted.activations, counted.replay
    hardware = times.hardware_flops
    choices: list[Choice | None] = [None] * len(rows.stage)
    budget = cluster.card.usable_bytes if memory_bytes is None else memory_bytes
    if recompute.granularity == "optimal":
        found = [choose_row(model, rows, row, counted, cluster, budget) for row in range(len(rows.stage))]
        for row, choice in enumerate(found):
            if choice is None:
                raise over_budget(model, rows, row, counted, cluster, budget)
        choices = list(found)
        activations = np.array([choice.bytes for choice in found if choice])
        working = np.array([choice.working_bytes for choice in found if choice])
        replay = np.array([choice.seconds for choice in found if choice])
        hardware = hardware + np.array([choice.flops for choice in found if choice])
    counted = dataclasses.replace(counted, activations=activations, replay=working)
    steps = step_times(rows, [layout], cluster, counted, times, replay)
    return ClosedForm(
        architecture,
        layout,
        kernels,
        model.states,
        recompute,
        cluster,
        tuple(_stage(rows, counted, row, float(replay[row]), choices[row]) for row in range(len(rows.stage))),
        unique_parameters(architecture),
        model_flops(architecture, layout, kernels),
        round(float(hardware.sum()) * layout.micro_batches * layout.dp * layout.cp * layout.tp),
        float(steps.seconds[0]),
        float(steps.replay_seconds[0]),
        float(steps.bubble_seconds[0]),
        (*recompute.notes(kernels), *layout.notes()),
        budget,
    )


def model_flops(architecture: Architecture, layout: Layout, kernels: Kernels = MEGATRON) -> int:
    """FLOPs of a step's matrix products, forward and backward (twice forward), over all GPUs: the paper's Eq. 7."""
    values = Layout(sequence=layout.sequence).values(architecture) | {"rho": 1}
    sequence = layout.sequence or architecture.sequence
    per_token: Any = Fraction(last_end(architecture, kernels).flops.at(values))
    for kind, count in Counter(architecture.layer_kinds).items():
        per_token += count * layer(architecture, kernels, kind).flops.at(values)
    return int(3 * per_token * layout.global_batch * sequence)


def _stage(rows: Rows, counted: Bytes, row: int, replay_seconds: float, choice: Choice | None) -> Stage:
    mine = rows.stage_chunks[row]

    def whole(name: str) -> int:
        return int(getattr(counted, name)[row])

    chosen = tuple((group.kind, count, dish.replayed) for group, dish, count in choice.counts) if choice else ()
    return Stage(
        index=int(rows.stage[row]),
        layers=sum(chunk.layers for chunk in mine),
        in_flight=tuple(chunk.in_flight for chunk in mine),
        weights_bytes=whole("weights"),
        gradients_bytes=whole("gradients"),
        optimizer_bytes=whole("optimizer"),
        activations_bytes=whole("activations"),
        embedding_bytes=whole("embedding"),
        head_bytes=whole("head"),
        working_bytes=whole("working"),
        replay_bytes=whole("replay"),
        temporaries_bytes=whole("temporaries"),
        loss_bytes=whole("loss"),
        gathered_bytes=whole("gathered"),
        host_bytes=whole("host"),
        stage_output_bytes=whole("stage_output"),
        replay_seconds=replay_seconds,
        replay_bound_seconds=choice.bound_seconds if choice else 0.0,
        chosen=chosen,
    )


def store_all_that_fits(
    architecture: Architecture, layout: Layout, recompute: Recompute, memory_bytes: int, **options: Any
) -> Recompute:
    """The paper's appendix C: the most micro-batches in flight that can keep everything.

    Args:
        architecture: the model.
        layout: its layout.
        recompute: what the other micro-batches do, full or selective.
        memory_bytes: of each GPU.
        **options: kernels, states and so on, as `closed_form` takes them.

    Returns:
        The setting with the most such micro-batches whose every stage fits; 0 of them if none do.
    """
    most = max(in_flight(layout.schedule, layout.pp, layout.chunks_per_stage, layout.micro_batches, 0))
    for count in range(most, 0, -1):
        setting = dataclasses.replace(recompute, store_all_micro_batches=count)
        if closed_form(architecture, layout, recompute=setting, **options).peak_bytes <= memory_bytes:
            return setting
    return dataclasses.replace(recompute, store_all_micro_batches=0)


def _plain(record: Any) -> dict[str, Any]:
    plain: dict[str, Any] = dataclasses.asdict(record)
    return plain
