"""All choices as one flat record, as the command line and `--compare` state them, and what they mean together."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from holdover.closed_form.architecture import HUGGING_FACE, MEGATRON, PAPER, Architecture, Experts, Kernels
from holdover.closed_form.errors import ConfigurationError
from holdover.closed_form.estimate import ClosedForm, closed_form, store_all_that_fits
from holdover.closed_form.huggingface import from_config
from holdover.closed_form.layout import Layout
from holdover.closed_form.parameters import MOMENT_BYTES, States
from holdover.closed_form.pipeline import V_SHAPED
from holdover.closed_form.presets import PAPER_LAYOUTS, PRESETS
from holdover.closed_form.rates import Cluster, cluster_of
from holdover.closed_form.recompute import MODULES, Recompute
from holdover.cost.devices import card
from holdover.errors import UnitError
from holdover.names import near
from holdover.units import parse_bytes

CODE: dict[str, Kernels] = {"megatron": MEGATRON, "huggingface": HUGGING_FACE, "paper": PAPER}

CHOICES: dict[str, tuple[str, ...]] = {
    "style": ("llama", "gpt"),
    "code": ("auto", *CODE),
    "attention": ("", "fused", "eager"),
    "fp8": ("none", "tensor", "block", "mx"),
    "loss": ("", "vocab-parallel", "eager", "chunked"),
    "logits": ("", "fp32", "16-bit"),
    "weights": ("bf16", "fp16", "fp32"),
    "gradients": ("bf16", "fp16", "fp32"),
    "optimizer": tuple(MOMENT_BYTES),
    "context": ("ring", "ulysses"),
    "schedule": ("", "1f1b", "interleaved", "gpipe", "zb-h1", *V_SHAPED),
    "recompute": ("none", "selective", "full", "optimal"),
    "method": ("uniform", "block"),
}
"""What settings may be, those of which one word is chosen; "" is what the code or the layout implies."""


OF_MODEL = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq", "experts", "top_k", "expert_ffn",
    "shared_ffn",
)  # fmt: skip
"""Numbers that describe the model; 0 is what the preset or file says."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every choice. Numbers of the model at 0 are those of the preset or file."""

    model: str = ""
    style: str = "llama"
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    vocab: int = 0
    seq: int = 0
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    tied: bool | None = None
    code: str = "auto"
    attention: str = ""
    fp8: str = "none"
    fp32_residual: bool = False
    loss: str = ""
    logits: str = ""
    imbalance: float = 1.0
    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    context: str = "ring"
    replicate_kv: bool = False
    schedule: str = ""
    virtual: int = 1
    stage_layers: str = ""
    micro_batch: int = 1
    micro_batches: int = 0
    zero: int = 0
    reshard: bool = True
    weights: str = "bf16"
    gradients: str = "fp32"
    optimizer: str = "adamw"
    master: bool = True
    recompute: str = "none"
    method: str = "uniform"
    num_layers: int = 1
    modules: str = "core_attn"
    distribute_saved: bool = False
    store_all: str = "0"
    offload: float = 0.0
    card: str = "h100-80gb"
    memory: str = ""

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                listed = ", ".join(choice for choice in allowed if choice)
                raise ConfigurationError(f"{_flag(name)} {value!r} is unknown: use one of {listed}")
        for name in OF_MODEL:
            if (number := getattr(self, name)) < 0:
                raise ConfigurationError(f"{_flag(name)} {number}: give a number above 0, or 0 for the model's own")
        if not math.isfinite(self.imbalance):
            raise ConfigurationError(f"--imbalance {self.imbalance} is no number: give 1, or what is above")

    def changed(self, text: str) -> Settings:
        """These settings with some replaced.

        Args:
            text: "recompute=full,tp=4"; a switch may stand alone ("sequence-parallel"), a list takes "+".

        Raises:
            ConfigurationError: no such setting, or a value that it cannot have.

        >>> Settings(model="llama3-8b").changed("tp=4,sequence-parallel,modules=layernorm+mlp").modules
        'layernorm,mlp'
        """
        types = get_type_hints(Settings)
        values: dict[str, Any] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, value = part.partition("=")
            field = name.strip().lstrip("-").replace("-", "_")
            field = {"recompute_modules": "modules", "recompute_method": "method"}.get(field, field)
            field = {"recompute_num_layers": "num_layers"}.get(field, field)
            if field not in types:
                known = ", ".join(item.name.replace("_", "-") for item in dataclasses.fields(self))
                raise ConfigurationError(f"no setting {name!r} to compare; there are {known}")
            values[field] = _convert(field, value.strip(), types[field])
        return dataclasses.replace(self, **values)

    def architecture(self) -> Architecture:
        """The model: a preset, a `config.json`, or the numbers alone."""
        given = {
            "layers": self.layers,
            "hidden": self.hidden,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "ffn": self.ffn,
            "vocab": self.vocab,
            "sequence": self.seq,
        }
        given = {name: value for name, value in given.items() if value}
        if self.model in PRESETS:
            base = PRESETS[self.model]
        elif self.model:
            base = self._from_file()
        else:
            base = self._from_numbers(given)
        changes: dict[str, Any] = dict(given)
        if "hidden" in given or "heads" in given:
            changes.setdefault("head_dim", 0)
            if "heads" in given:
                changes.setdefault("kv_heads", 0)
        if base.rotary is False and self.seq:
            changes["sequence"] = max(self.seq, base.sequence) if self.model else self.seq
        if self.experts or self.top_k or self.expert_ffn or self.shared_ffn:
            changes["experts"] = self._experts(base)
        if self.tied is not None:
            changes["tied"] = self.tied
        return dataclasses.replace(base, **changes)

    def _from_file(self) -> Architecture:
        path = Path(self.model)
        if path.suffix != ".json" and not path.is_dir():
            raise ConfigurationError(
                f"unknown model {self.model!r}: give the path of a config.json, or one of {', '.join(PRESETS)}"
                f"{near(self.model, PRESETS)}"
            )
        return from_config(path, sequence=self.seq or None)

    def _from_numbers(self, given: dict[str, int]) -> Architecture:
        missing = [name for name in ("layers", "hidden", "heads", "vocab") if name not in given]
        if missing:
            raise ConfigurationError(
                f"without a preset or a config.json the model needs {', '.join('--' + name for name in missing)} too"
            )
        gpt = self.style == "gpt"
        hidden = given["hidden"]
        numbers = {"ffn": 4 * hidden if gpt else -(-8 * hidden // 3 // 256) * 256, "sequence": 4096, **given}
        shape: dict[str, Any] = {"name": "model", **numbers}
        if gpt:
            shape |= {"norm": "layernorm", "activation": "gelu", "rotary": False, "tied": True}
            shape |= {"linear_bias": True, "qkv_bias": True}
        return Architecture(**shape)

    def _experts(self, base: Architecture) -> Experts:
        old = base.experts or Experts(count=self.experts or 1, top_k=self.top_k or 1, ffn=self.expert_ffn or base.ffn)
        return dataclasses.replace(
            old,
            count=self.experts or old.count,
            top_k=self.top_k or old.top_k,
            ffn=self.expert_ffn or old.ffn,
            shared_ffn=self.shared_ffn or old.shared_ffn,
        )

    def kernels(self) -> Kernels:
        """The code that runs it; by default the paper's for its models, Megatron's fused code for others."""
        name = self.code if self.code != "auto" else ("paper" if self.model in PAPER_LAYOUTS else "megatron")
        changes: dict[str, Any] = {
            "fp8": self.fp8,
            "fp32_residual": self.fp32_residual,
            "imbalance": self.imbalance,
        }
        if self.attention:
            changes["attention"] = self.attention
        if self.loss:
            changes["loss"] = self.loss
        if self.logits:
            changes["logits_bytes"] = 4 if self.logits == "fp32" else 2
        if self.weights == "fp32" and name == "huggingface":
            changes["element_bytes"] = 4
        return dataclasses.replace(CODE[name], **changes)

    def layout(self) -> Layout:
        """The parallel layout; without a number of micro-batches, enough to fill the pipeline."""
        schedule = self.schedule or ("interleaved" if self.virtual > 1 else "1f1b")
        try:
            stage_layers = tuple(int(part) for part in self.stage_layers.split(",") if part.strip())
        except ValueError:
            raise ConfigurationError(
                f"cannot read stage layers {self.stage_layers!r}: write numbers, such as 3,4,4,3"
            ) from None
        if self.zero not in (0, 1, 2, 3):
            raise ConfigurationError(f"--zero {self.zero} is unknown: use 0, 1, 2 or 3")
        return Layout(
            dp=self.dp,
            tp=self.tp,
            cp=self.cp,
            pp=self.pp,
            ep=self.ep,
            etp=self.etp,
            sequence_parallel=self.sequence_parallel,
            context=self.context,  # type: ignore[arg-type]
            replicate_kv=self.replicate_kv,
            schedule=schedule,  # type: ignore[arg-type]
            virtual=self.virtual,
            stage_layers=stage_layers,
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches or 4 * self.pp,
            sequence=self.seq,
            zero=self.zero,  # type: ignore[arg-type]
            reshard_after_forward=self.reshard,
        )

    def states(self) -> States:
        """What is kept per parameter."""
        return States(
            weights=self.weights,  # type: ignore[arg-type]
            gradients=self.gradients,  # type: ignore[arg-type]
            optimizer=self.optimizer,  # type: ignore[arg-type]
            master=self.master,
        )

    def recomputation(self) -> Recompute:
        """What is recomputed."""
        if self.store_all != "auto" and not self.store_all.isdigit():
            raise ConfigurationError(f"--store-all {self.store_all!r}: give a number of micro-batches, or auto")
        modules = tuple(name.strip() for name in self.modules.split(",") if name.strip())
        if self.recompute == "selective" and not modules:
            raise ConfigurationError(f"--recompute-modules names none: use some of {', '.join(MODULES)}")
        return Recompute(
            granularity=self.recompute,  # type: ignore[arg-type]
            method=self.method,  # type: ignore[arg-type]
            num_layers=self.num_layers,
            modules=modules,
            distribute_saved=self.distribute_saved,
            store_all_micro_batches=0 if self.store_all == "auto" else int(self.store_all),
            offload=self.offload,
        )

    def cluster(self) -> Cluster:
        """The cards."""
        return cluster_of(card(self.card))

    def memory_bytes(self) -> int:
        """The budget of each GPU."""
        if not self.memory:
            return card(self.card).usable_bytes
        if not (memory := parse_bytes(self.memory)):
            raise UnitError("--memory of 0 bytes makes no sense: give what each GPU has, such as 72GiB")
        return memory

    def run(self) -> ClosedForm:
        """The result."""
        architecture, layout, recompute = self.architecture(), self.layout(), self.recomputation()
        options: dict[str, Any] = {"kernels": self.kernels(), "states": self.states(), "cluster": self.cluster()}
        if self.store_all == "auto":
            recompute = store_all_that_fits(architecture, layout, recompute, self.memory_bytes(), **options)
        return closed_form(architecture, layout, recompute=recompute, memory_bytes=self.memory_bytes(), **options)


def _flag(name: str) -> str:
    return "--" + {"method": "recompute-method"}.get(name, name).replace("_", "-")


def _convert(field: str, value: str, kind: Any) -> Any:
    if kind is bool or kind == bool | None:
        if value.lower() not in ("", "true", "false", "yes", "no", "1", "0"):
            raise ConfigurationError(f"{field} is a switch: write {field} or {field}=false, not {value!r}")
        return value.lower() in ("", "true", "yes", "1")
    if kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            raise ConfigurationError(f"{field} must be a number, not {value!r}") from None
    return value.replace("+", ",")
