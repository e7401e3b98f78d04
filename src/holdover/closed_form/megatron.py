"""Megatron-LM's side: the flags nearest to a setting, and what its own estimator would say."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from holdover.closed_form.architecture import Architecture, Kernels
from holdover.closed_form.errors import ConfigurationError
from holdover.closed_form.estimate import ClosedForm, closed_form
from holdover.closed_form.layout import Layout
from holdover.closed_form.pipeline import V_SHAPED
from holdover.closed_form.recompute import Recompute


@dataclass(frozen=True)
class Nearest:
    """The cheapest of Megatron's own settings that fits, beside the optimal set of tensors."""

    flags: tuple[str, ...]
    found: ClosedForm
    optimal: ClosedForm
    not_expressible: tuple[str, ...]
    """What of the layout Megatron-LM has no flag for."""

    @property
    def lost_time(self) -> float:
        """How much longer the step is than under the optimal set, as a fraction."""
        return self.found.step_seconds / self.optimal.step_seconds - 1

    @property
    def replay_ratio(self) -> float:
        """Replay seconds of the first stage over the optimal set's; infinite where that needs none."""
        ours, theirs = self.optimal.stages[0].replay_seconds, self.found.stages[0].replay_seconds
        return theirs / ours if ours else (float("inf") if theirs else 1.0)


def megatron_settings(architecture: Architecture, layout: Layout, kernels: Kernels) -> list[Recompute]:
    """Every recomputation that Megatron's flags can say for a model."""
    names = ["layernorm"]
    names += ["core_attn"] if kernels.attention == "eager" else []
    names += ["mlp"] if "dense" in architecture.layer_kinds else []
    names += ["moe_act", "moe"] if architecture.experts else []
    names += ["shared_experts"] if architecture.experts and architecture.experts.shared_ffn else []
    names += ["mla_up_proj"] if architecture.latent else []
    settings = [Recompute()]
    for size in range(1, len(names) + 1):
        settings += [Recompute(granularity="selective", modules=x) for x in itertools.combinations(names, size)]
    per_chunk = max(layout.split(architecture))
    settings += [Recompute(granularity="full", method="block", num_layers=count) for count in _spread(per_chunk)]
    settings += [
        Recompute(granularity="full", method="uniform", num_layers=count)
        for count in range(1, per_chunk + 1)
        if per_chunk % count == 0
    ]
    return settings


def nearest(optimal: ClosedForm, memory_bytes: int, *, small: bool = True) -> Nearest:
    """The cheapest Megatron setting that fits where the optimal set fits.

    Args:
        optimal: the result under recompute "optimal".
        memory_bytes: of each GPU.
        small: count small buffers.

    Raises:
        ConfigurationError: no Megatron setting fits.
    """
    best: ClosedForm | None = None
    lightest = None
    for setting in megatron_settings(optimal.architecture, optimal.layout, optimal.kernels):
        found = closed_form(
            optimal.architecture,
            optimal.layout,
            kernels=optimal.kernels,
            states=optimal.states,
            recompute=dataclasses.replace(setting, offload=0.0),
            cluster=optimal.cluster,
            small=small,
        )
        if lightest is None or found.peak_bytes < lightest.peak_bytes:
            lightest = found
        if found.peak_bytes <= memory_bytes and (best is None or _cost(found) < _cost(best)):
            best = found
    if best is None:
        assert lightest is not None
        raise ConfigurationError(
            f"no Megatron-LM setting fits: the lightest, {' '.join(recompute_flags(lightest.recompute))}, needs "
            f"{lightest.peak_bytes} bytes of {memory_bytes}. Raise --tp or --pp, or lower --micro-batch"
        )
    return Nearest((*layout_flags(best), *recompute_flags(best.recompute)), best, optimal, tuple(_missing(best.layout)))


def _cost(found: ClosedForm) -> tuple[float, float, int]:
    """Step time; among equals (the slowest stage recomputes nothing) all stages' replay, then bytes."""
    return found.step_seconds, sum(stage.replay_seconds for stage in found.stages), found.peak_bytes


def recompute_flags(recompute: Recompute) -> list[str]:
    """Megatron-LM's flags for a recomputation."""
    if recompute.granularity == "selective":
        flags = ["--recompute-granularity selective", f"--recompute-modules {' '.join(recompute.modules)}"]
    elif recompute.granularity == "full":
        flags = [
            "--recompute-granularity full",
            f"--recompute-method {recompute.method}",
            f"--recompute-num-layers {recompute.num_layers}",
        ]
    else:
        return []
    if recompute.distribute_saved:
        flags.append("--distribute-saved-activations")
    return flags


def layout_flags(found: ClosedForm) -> list[str]:
    """Megatron-LM's flags for a layout and what is kept per parameter."""
    layout, states = found.layout, found.states
    flags = [
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {layout.global_batch}",
    ]
    if layout.sequence_parallel and layout.tp > 1:
        flags.append("--sequence-parallel")
    if layout.cp > 1:
        kind = "p2p" if layout.context == "ring" else "a2a"
        flags += [f"--context-parallel-size {layout.cp}", f"--cp-comm-type {kind}"]
    if layout.virtual > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {layout.virtual}")
    if layout.ep > 1:
        flags += [
            f"--expert-model-parallel-size {layout.ep}",
            f"--expert-tensor-parallel-size {layout.etp}",
        ]
    if layout.zero == 1:
        flags.append("--use-distributed-optimizer")
    if layout.zero >= 2:
        kinds = {2: "optim_grads", 3: "optim_grads_params"}
        flags += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {kinds[layout.zero]}"]
    if states.optimizer == "adamw-bf16":
        flags += ["--use-precision-aware-optimizer", "--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16"]
    return flags


def _missing(layout: Layout) -> list[str]:
    missing = []
    if layout.schedule in (*V_SHAPED, "zb-h1", "gpipe"):
        missing.append(f"schedule {layout.schedule} (Megatron-LM has 1F1B and interleaved)")
    if layout.stage_layers and len(set(layout.stage_layers)) > 1:
        missing.append("uneven stages need --pipeline-model-parallel-layout or the first and last stage's layer counts")
    return missing


def _spread(most: int) -> list[int]:
    """Numbers of layers worth trying: all, thinned where there are many."""
    return list(range(1, most + 1)) if most <= 16 else sorted({round(most * step / 16) for step in range(1, 17)} - {0})


@dataclass(frozen=True)
class Estimator:
    """What Megatron-LM's theoretical memory report says, in bytes for the first stage's rank."""

    states_bytes: float
    activations_bytes: float
    branch: str


def megatron_estimate(
    architecture: Architecture, layout: Layout, recompute: Recompute, *, distributed_optimizer: bool | None = None
) -> Estimator:
    """Megatron-LM's own formulas (`megatron/training/theoretical_memory_usage.py`), in our words.

    It has two branches. Sequence parallelism with selective recomputation: s b h (18 + 4 f / h) a layer, whatever is
    recomputed. Everything else: s b h (10 + 24 / t) a layer, times 1.05. Neither knows full recomputation, attention
    scores, key-value heads, a gated MLP's third tensor, experts, latent attention or context parallelism.

    Args:
        architecture: the model.
        layout: its layout.
        recompute: only whether it is selective matters.
        distributed_optimizer: None takes `layout.zero >= 1`.

    Returns:
        Its bytes of weights and optimizer, and of activations.
    """
    h, f, v = architecture.hidden, architecture.ffn, architecture.vocab
    s, b, p, t = layout.sequence or architecture.sequence, layout.micro_batch, layout.pp, layout.tp
    shared = layout.zero >= 1 if distributed_optimizer is None else distributed_optimizer
    per_parameter = 6 + 12 / layout.dp if shared else 18.0
    block = sum(_layer_parameters(architecture, kind == "moe") for kind in architecture.layer_kinds)
    norm = h if architecture.norm == "rmsnorm" else 2 * h
    shard: float = (block + norm) / p + v * h
    if not architecture.tied and p == 1:
        shard += v * h
    selective = layout.sequence_parallel and recompute.granularity == "selective"
    layer_bytes = s * b * h * ((18 + 4 * f / h) if selective else (10 + 24 / t))
    total: float = layer_bytes * architecture.layers + 8 * s * b * p + s * b * h * p
    if layout.virtual > 1:
        total *= 1 + (p - 1) / (p * layout.virtual)
    elif p > 1:
        total *= min(1, layout.micro_batches / p)
    if selective:
        if p == 1:
            total += 4 * s * b * h * (1 + v / h)
        total /= t
    else:
        if p == 1:
            total += 2 * (s * b * v / t + s * b * h)
        total *= 1.05
    return Estimator(shard / t * per_parameter, total, "SP and selective" if selective else "without SP")


def _layer_parameters(architecture: Architecture, moe: bool) -> float:
    h, gated = architecture.hidden, 1.5 if architecture.gated else 1.0
    norm = 1 if architecture.norm == "rmsnorm" else 2
    if architecture.latent:
        x, a = architecture.latent, architecture.heads
        key = x.nope_dim + x.rope_dim
        query = x.query_rank * (h + a * key + norm) if x.query_rank else h * a * key
        kv = x.kv_rank * (h + a * (x.nope_dim + x.value_dim) + norm) + h * x.rope_dim
        attention: float = query + kv + a * x.value_dim * h
    else:
        ratio = architecture.head_dim * architecture.heads / h
        attention = 2 * h * h * (1 + architecture.kv_heads / architecture.heads) * ratio
    if moe and architecture.experts:
        width: float = (architecture.experts.ffn * architecture.experts.count + architecture.experts.shared_ffn) * gated
    else:
        width = architecture.ffn * gated
    return 2 * h * (width + norm) + attention
