"""How a model is laid over GPUs, and whether it can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdover.closed_form.architecture import Architecture
from holdover.closed_form.errors import ConfigurationError
from holdover.closed_form.pipeline import V_SHAPED, Schedule, even_split


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A parallel layout and the batch that one step works through. `dp * tp * cp * pp` GPUs take part."""

    dp: int = 1
    """Data-parallel replicas."""
    tp: int = 1
    """Tensor-parallel ranks."""
    cp: int = 1
    """Context-parallel ranks, which share the tokens of each sequence."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Expert-parallel ranks, taken from the data, context and tensor ranks."""
    etp: int = 1
    """Tensor-parallel ranks inside an expert."""
    sequence_parallel: bool = False
    """Norms, dropout and the residual stream are sharded over the tensor-parallel ranks too."""
    context: Literal["ring", "ulysses"] = "ring"
    """Keys and values travel round the ranks, or an all-to-all shards by head inside attention."""
    replicate_kv: bool = False
    """More ranks than key-value heads: each rank keeps a copy of one."""
    schedule: Schedule = "1f1b"
    virtual: int = 1
    """Chunks of each stage under the interleaved schedule; the V-shaped ones have two."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each chunk in the model's order; empty for even ones."""
    micro_batch: int = 1
    """Sequences of a micro-batch."""
    micro_batches: int = 1
    """Micro-batches of a step, on each data-parallel replica."""
    sequence: int = 0
    """Tokens of a sequence; 0 for the architecture's."""
    zero: Literal[0, 1, 2, 3] = 0
    """What the data-parallel ranks share: 1 optimizer states (Megatron's distributed optimizer), 2 gradients too,
    3 weights too (FSDP's full sharding)."""
    reshard_after_forward: bool = True
    """With zero=3, weights are let go after forward and gathered again for backward."""

    @property
    def gpus(self) -> int:
        """GPUs of the layout."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.dp * self.micro_batch * self.micro_batches

    @property
    def chunks_per_stage(self) -> int:
        """Runs of consecutive layers on each stage."""
        return 2 if self.schedule in V_SHAPED else self.virtual

    def tokens(self, architecture: Architecture) -> int:
        """Tokens of a micro-batch on one rank, before tensor and sequence parallelism."""
        return self.micro_batch * (self.sequence or architecture.sequence) // self.cp

    def split(self, architecture: Architecture) -> tuple[int, ...]:
        """Layers of each chunk, in the model's order."""
        parts = self.pp * self.chunks_per_stage
        return self.stage_layers or even_split(architecture.layers, parts)

    def kv_copies(self, architecture: Architecture) -> int:
        """Copies of each key-value head that attention holds."""
        ranks = self.tp * (self.cp if self.context == "ulysses" else 1)
        return max(1, ranks // architecture.kv_heads)

    def values(self, architecture: Architecture, imbalance: float = 1) -> dict[str, int | float]:
        """What the symbols of the formulas stand for under this layout."""
        sequence = self.sequence or architecture.sequence
        return {
            **architecture.values(),
            "s": sequence,
            "s_max": max(sequence, architecture.sequence),
            "b": self.micro_batch,
            "t": self.tp,
            "t_s": self.tp if self.sequence_parallel else 1,
            "t_e": self.etp,
            "ep": self.ep,
            "kv_copies": self.kv_copies(architecture),
            "rho": imbalance,
            "sp": int(self.sequence_parallel and self.tp > 1),
        }

    def problems(self, architecture: Architecture) -> list[str]:
        """What makes the layout impossible for a model; each line says what to change."""
        sizes = self._sizes()
        return sizes or [*self._division(architecture), *self._experts(architecture), *self._pipeline(architecture)]

    def notes(self) -> list[str]:
        """What a reader of the result should know: when full sharding gathers what."""
        if self.zero < 3 or self.dp * self.cp == 1:
            return []
        again = "again in backward" if self.reshard_after_forward else "held until backward"
        return [
            f"weights are gathered layer by layer in the forward of every micro-batch, the next layer's ahead of time, "
            f"and {again}; embedding and head stay gathered; gradients are scattered layer by layer"
        ]

    def check(self, architecture: Architecture) -> None:
        """Refuse an impossible layout.

        Raises:
            ConfigurationError: with every problem and its ways out.
        """
        problems = self.problems(architecture)
        if problems:
            raise ConfigurationError(f"{architecture.name} cannot be laid out so: " + "; ".join(problems))

    def _sizes(self) -> list[str]:
        names = ("dp", "tp", "cp", "pp", "ep", "etp", "virtual", "micro_batch", "micro_batches")
        return [f"{name} is {getattr(self, name)}, but must be at least 1" for name in names if getattr(self, name) < 1]

    def _division(self, architecture: Architecture) -> list[str]:
        problems = []
        sequence = self.sequence or architecture.sequence
        tp, ranks = self.tp, self.tp * (self.cp if self.context == "ulysses" else 1)
        head_ranks = f"tp {tp}" + (f" x cp {self.cp} (Ulysses)" if ranks != tp else "")
        if architecture.heads % ranks:
            problems.append(
                f"{architecture.heads} heads do not divide over {head_ranks}: use {_divisors(architecture.heads)}"
            )
        groups = architecture.kv_heads
        if architecture.latent is None and groups % ranks and ranks % groups:
            problems.append(f"{groups} key-value heads do not divide over {head_ranks}: use {_divisors(groups)}")
        elif architecture.latent is None and ranks > groups and not self.replicate_kv:
            problems.append(
                f"{head_ranks} is above the {groups} key-value heads: lower it to {groups}, or let each rank keep a "
                f"copy of a head (--replicate-kv)"
            )
        for name, size in (("MLP width", architecture.ffn), ("hidden size", architecture.hidden)):
            if size % tp:
                problems.append(f"{name} {size} does not divide over tp {tp}: use {_divisors(size)}")
        if architecture.vocab % tp:
            padded = -(-architecture.vocab // (128 * tp)) * 128 * tp
            problems.append(f"vocabulary {architecture.vocab} does not divide over tp {tp}: pad it to --vocab {padded}")
        parts = self.cp * (tp if self.sequence_parallel else 1)
        if sequence % parts:
            longer = -(-sequence // parts) * parts
            problems.append(
                f"a sequence of {sequence} does not divide over {parts} context and sequence ranks: use --seq {longer}"
            )
        if not architecture.rotary and sequence > architecture.sequence:
            problems.append(
                f"a sequence of {sequence} is longer than the position table of {architecture.sequence}: lower --seq"
            )
        if self.zero and self.dp * self.cp == 1 and self.ep == 1:
            problems.append(f"zero={self.zero} shares states over data-parallel ranks, and there is one: raise --dp")
        return problems

    def _experts(self, architecture: Architecture) -> list[str]:
        experts = architecture.experts
        if experts is None:
            if self.ep > 1 or self.etp > 1:
                return [f"ep {self.ep}, etp {self.etp} without experts: leave out --ep and --etp, or describe experts"]
            return []
        problems = []
        if experts.count % self.ep:
            problems.append(f"{experts.count} experts do not divide over ep {self.ep}: use {_divisors(experts.count)}")
        if experts.ffn % self.etp:
            problems.append(f"expert width {experts.ffn} does not divide over etp {self.etp}: lower --etp")
        ranks = self.dp * self.cp * self.tp
        if ranks % (self.ep * self.etp):
            problems.append(
                f"ep {self.ep} x etp {self.etp} experts' ranks do not divide the {ranks} ranks of dp x cp x tp: "
                f"raise --dp or lower --ep"
            )
        if self.tp > 1 and not self.sequence_parallel:
            problems.append("experts with tensor parallelism need their tokens sharded: add --sequence-parallel")
        return problems

    def _pipeline(self, architecture: Architecture) -> list[str]:
        problems = []
        layers, parts = architecture.layers, self.pp * self.chunks_per_stage
        if self.virtual > 1 and self.schedule != "interleaved":
            problems.append(f"virtual {self.virtual} needs --schedule interleaved, not {self.schedule}")
        if self.schedule == "interleaved" and self.virtual < 2:
            problems.append("the interleaved schedule needs at least two chunks a stage: --virtual 2")
        if self.schedule in (*V_SHAPED, "interleaved", "zb-h1") and self.pp < 2:
            problems.append(f"schedule {self.schedule} needs at least two stages: raise --pp or use --schedule 1f1b")
        if self.schedule == "interleaved" and self.micro_batches % self.pp:
            problems.append(
                f"the interleaved schedule takes micro-batches in groups of pp {self.pp}; {self.micro_batches} is not "
                f"a multiple: use {-(-self.micro_batches // self.pp) * self.pp}"
            )
        if self.stage_layers:
            if len(self.stage_layers) != parts or sum(self.stage_layers) != layers or min(self.stage_layers) < 0:
                problems.append(
                    f"stage layers {','.join(map(str, self.stage_layers))} must be {parts} numbers that add up to "
                    f"{layers}, such as {','.join(map(str, even_split(layers, parts)))}"
                )
        elif layers < parts:
            problems.append(f"{layers} layers are fewer than the {parts} pipeline chunks: lower --pp or --virtual")
        elif layers % parts:
            problems.append(
                f"{layers} layers do not divide over {parts} pipeline chunks: give them, "
                f"--stage-layers {','.join(map(str, even_split(layers, parts)))}"
            )
        return problems


def _divisors(number: int) -> str:
    small = [str(other) for other in range(1, min(number, 128) + 1) if number % other == 0]
    return "a divisor: " + ", ".join(small)
