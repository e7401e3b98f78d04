"""The weights of a model as a list, and the bytes that training keeps beside each."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from holdover.closed_form.architecture import Architecture, Kind
from holdover.closed_form.formula import Formula, symbols, total

h, a, g, d, f, v, t, copies = symbols("h a g d f v t kv_copies")
r_q, r_k, d_n, d_r, d_v = symbols("r_q r_k d_n d_r d_v")
E, f_e, f_s, s_max = symbols("E f_e f_s s_max")
ep, t_e = symbols("ep t_e")


class Split(enum.StrEnum):
    """What divides a weight between the ranks of one pipeline stage."""

    NONE = "none"
    TENSOR = "tensor"
    KV = "tensor, key-value heads"
    EXPERT = "expert"


_FACTOR = {
    Split.NONE: Formula() + 1,
    Split.TENSOR: (Formula() + 1) / t,
    Split.KV: copies / t,
    Split.EXPERT: (Formula() + 1) / (ep * t_e),
}


@dataclass(frozen=True)
class Parameter:
    """One weight: its name, its elements, and what divides them."""

    name: str
    elements: Formula
    split: Split

    @property
    def rank_elements(self) -> Formula:
        """Elements on one rank."""
        return self.elements * _FACTOR[self.split]


def elements(parameters: tuple[Parameter, ...], *, experts: bool | None = None, rank: bool = True) -> Formula:
    """The elements of a list, on one rank or in all. `experts` keeps only routed experts, or only the rest."""
    return total(
        parameter.rank_elements if rank else parameter.elements
        for parameter in parameters
        if experts is None or (parameter.split is Split.EXPERT) == experts
    )


@lru_cache(maxsize=256)
def layer_parameters(architecture: Architecture, kind: Kind) -> tuple[Parameter, ...]:
    """The weights of one layer."""
    norms = _norm("attention norm", architecture, h) + _norm("MLP norm", architecture, h)
    block = _latent(architecture) if architecture.latent else _attention(architecture)
    mlp = _experts(architecture) if kind == "moe" else _mlp("MLP", architecture, f, Split.TENSOR)
    return norms + block + mlp


@lru_cache(maxsize=256)
def first_parameters(architecture: Architecture) -> tuple[Parameter, ...]:
    """The weights of the embedding."""
    table = (Parameter("token embedding", v * h, Split.TENSOR),)
    if architecture.rotary:
        return table
    return (*table, Parameter("position embedding", s_max * h, Split.NONE))


@lru_cache(maxsize=256)
def last_parameters(architecture: Architecture, *, separate: bool) -> tuple[Parameter, ...]:
    """The weights after the last layer. `separate`: the head is on another stage than the embedding, so that even a
    tied one is there a second time."""
    head = (Parameter("output layer", v * h, Split.TENSOR),) if separate or not architecture.tied else ()
    return (*_norm("final norm", architecture, h), *head)


def unique_parameters(architecture: Architecture) -> int:
    """The model's parameters, each counted once.

    The paper's count leaves out the final norm:

    >>> from holdover.closed_form.presets import PRESETS
    >>> unique_parameters(PRESETS["gpt3-175b"]) - 2 * 12288
    174615822336
    """
    lists = [layer_parameters(architecture, kind) for kind in architecture.layer_kinds]
    lists += [first_parameters(architecture), last_parameters(architecture, separate=False)]
    values = architecture.values() | {"s_max": architecture.sequence}
    return int(sum(elements(parameters, rank=False).at(values) for parameters in lists))


def _norm(name: str, architecture: Architecture, width: Formula) -> tuple[Parameter, ...]:
    weight = Parameter(f"{name} weight", width, Split.NONE)
    if architecture.norm == "rmsnorm":
        return (weight,)
    return (weight, Parameter(f"{name} bias", width, Split.NONE))


def _attention(architecture: Architecture) -> tuple[Parameter, ...]:
    parameters = [
        Parameter("query weight", h * a * d, Split.TENSOR),
        Parameter("key, value weight", 2 * h * g * d, Split.KV),
        Parameter("output projection weight", a * d * h, Split.TENSOR),
    ]
    if architecture.qkv_bias:
        parameters += [
            Parameter("query bias", a * d, Split.TENSOR),
            Parameter("key, value bias", 2 * g * d, Split.KV),
        ]
    if architecture.linear_bias:
        parameters.append(Parameter("output projection bias", h, Split.NONE))
    if architecture.qk_norm:
        parameters.append(Parameter("query, key norm weight", 2 * d, Split.NONE))
    return tuple(parameters)


def _latent(architecture: Architecture) -> tuple[Parameter, ...]:
    assert architecture.latent is not None
    key_dim = d_n + d_r
    compressed = bool(architecture.latent.query_rank)
    query = (
        Parameter("query down weight", h * r_q, Split.NONE),
        *_norm("query norm", architecture, r_q),
        Parameter("query up weight", r_q * a * key_dim, Split.TENSOR),
    )
    return (
        *(query if compressed else (Parameter("query weight", h * a * key_dim, Split.TENSOR),)),
        Parameter("key, value down weight", h * (r_k + d_r), Split.NONE),
        *_norm("key, value norm", architecture, r_k),
        Parameter("key, value up weight", r_k * a * (d_n + d_v), Split.TENSOR),
        Parameter("output projection weight", a * d_v * h, Split.TENSOR),
    )


def _mlp(name: str, architecture: Architecture, width: Formula, split: Split) -> tuple[Parameter, ...]:
    first = (2 if architecture.gated else 1) * width
    weights = (
        Parameter(f"{name} input weight", h * first, split),
        Parameter(f"{name} output weight", h * width, split),
    )
    if not architecture.linear_bias or split is Split.EXPERT:
        return weights
    return (
        *weights,
        Parameter(f"{name} input bias", first, split),
        Parameter(f"{name} output bias", h, Split.NONE),
    )


def _experts(architecture: Architecture) -> tuple[Parameter, ...]:
    assert architecture.experts is not None
    shared = _mlp("shared expert", architecture, f_s, Split.TENSOR) if architecture.experts.shared_ffn else ()
    return (
        Parameter("router weight", h * E, Split.NONE),
        *_mlp("expert", architecture, E * f_e, Split.EXPERT),
        *shared,
    )


Dtype = Literal["bf16", "fp16", "fp32"]
Optimizer = Literal["adamw", "adamw-bf16", "adamw-8bit", "sgd", "sgd-momentum", "none"]

DTYPE_BYTES: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
MOMENT_BYTES: dict[str, Fraction] = {
    "adamw": Fraction(8),
    "adamw-bf16": Fraction(4),
    # Two bytes of moments, and for each a 4-byte scale per block of 256.
    "adamw-8bit": 2 + Fraction(2 * 4, 256),
    "sgd": Fraction(0),
    "sgd-momentum": Fraction(4),
    "none": Fraction(0),
}


@dataclass(frozen=True, kw_only=True)
class States:
    """What is kept per parameter.

    The default is Megatron's mixed precision: bf16 weight, fp32 gradient, fp32 master weight and moments, 18 bytes.
    """

    weights: Dtype = "bf16"
    gradients: Dtype = "fp32"
    optimizer: Optimizer = "adamw"
    master: bool = True
    """The optimizer keeps an fp32 copy of 16-bit weights, and then one of 16-bit gradients while it steps."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight."""
        return DTYPE_BYTES[self.weights]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient."""
        return DTYPE_BYTES[self.gradients]

    @property
    def optimizer_bytes(self) -> Fraction:
        """Bytes of optimizer state for a parameter.

        >>> [str(States(optimizer=name).optimizer_bytes) for name in ("adamw", "adamw-bf16", "sgd")]
        ['12', '8', '4']
        """
        if self.optimizer == "none":
            return Fraction(0)
        mixed = self.master and self.weight_bytes == 2
        copies_bytes = (4 if mixed else 0) + (4 if mixed and self.gradient_bytes == 2 and self.weights == "fp16" else 0)
        return copies_bytes + MOMENT_BYTES[self.optimizer]
