"""What a transformer is (`Architecture`) and which kernels run it (`Kernels`)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from holdover.closed_form.errors import ConfigurationError

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "relu", "swiglu", "geglu"]
Kind = Literal["dense", "moe"]
DENSE: Kind = "dense"
MOE: Kind = "moe"


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The dimensions of multi-head latent attention (MLA)."""

    query_rank: int
    """Width of the compressed query; 0 projects the query directly."""
    kv_rank: int
    """Width of the compressed key and value."""
    nope_dim: int
    """Per head, the part of query and key without position."""
    rope_dim: int
    """Per head, the rotated part of query and key; the key's is shared by all heads."""
    value_dim: int
    """Per head, the width of the value."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The dimensions of a mixture of experts (MoE)."""

    count: int
    """Routed experts of a layer."""
    top_k: int
    """Experts that each token visits."""
    ffn: int
    """Intermediate width of a routed expert."""
    shared_ffn: int = 0
    """Intermediate width of the shared experts together; 0 for none."""
    first_dense: int = 0
    """Layers at the start whose MLP is dense."""
    every: int = 1
    """After those, one layer in so many has experts."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder-only transformer.

    Raises:
        ConfigurationError: the dimensions contradict each other; the message says which to change.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    sequence: int
    """Tokens of a training sequence; also the rows of a learned position table."""
    kv_heads: int = 0
    """Key and value heads; 0 for as many as query heads."""
    head_dim: int = 0
    """Width of a head; 0 for hidden / heads."""
    norm: Norm = "rmsnorm"
    activation: Activation = "swiglu"
    rotary: bool = True
    """Rotary positions; otherwise a learned position table."""
    tied: bool = False
    """The output layer shares the embedding's weight."""
    linear_bias: bool = False
    """Every linear layer has a bias."""
    qkv_bias: bool = False
    """The query, key and value projections have a bias."""
    qk_norm: bool = False
    """Query and key are normalised per head (Qwen3)."""
    hidden_dropout: bool = False
    """Dropout after the embedding, the attention and the MLP."""
    attention_dropout: bool = False
    latent: Latent | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "ffn", "vocab", "sequence"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{self.name}: {name} is {getattr(self, name)}; it must be at least 1")
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if not self.head_dim:
            if self.hidden % self.heads:
                raise ConfigurationError(
                    f"{self.name}: {self.heads} heads do not divide hidden size {self.hidden}: give the width of a "
                    f"head (head_dim), or a number of heads such as {_divisor(self.hidden, self.heads)}"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise ConfigurationError(
                f"{self.name}: {self.kv_heads} key-value heads do not divide {self.heads} heads: "
                f"give a divisor, such as {_divisor(self.heads, self.kv_heads)}"
            )
        experts = self.experts
        if experts and not 1 <= experts.top_k <= experts.count:
            raise ConfigurationError(
                f"{self.name}: each token visits {experts.top_k} experts of {experts.count}: "
                f"top_k must be from 1 to {experts.count}"
            )

    @property
    def gated(self) -> bool:
        """The MLP multiplies two projections (SwiGLU, GeGLU)."""
        return self.activation in ("swiglu", "geglu")

    @property
    def layer_kinds(self) -> tuple[Kind, ...]:
        """Dense or mixture of experts, for each layer."""
        if self.experts is None:
            return (DENSE,) * self.layers
        first, every = self.experts.first_dense, self.experts.every
        return tuple(MOE if index >= first and (index - first) % every == 0 else DENSE for index in range(self.layers))

    def values(self) -> dict[str, int]:
        """What the symbols of the formulas stand for."""
        values = {
            "h": self.hidden,
            "a": self.heads,
            "g": self.kv_heads,
            "d": self.head_dim,
            "f": self.ffn,
            "v": self.vocab,
        }
        if self.latent:
            latent = self.latent
            values |= {
                "r_q": latent.query_rank,
                "r_k": latent.kv_rank,
                "d_n": latent.nope_dim,
                "d_r": latent.rope_dim,
                "d_v": latent.value_dim,
            }
        if self.experts:
            experts = self.experts
            values |= {"E": experts.count, "k": experts.top_k, "f_e": experts.ffn, "f_s": experts.shared_ffn}
        return values


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which code runs the transformer: it decides which tensors autograd keeps.

    The default is the fused code of Megatron-LM with Transformer Engine on CUDA. `HUGGING_FACE` is the eager code of
    transformers with scaled-dot-product attention.
    """

    attention: Literal["fused", "eager"] = "fused"
    """Flash attention (also cuDNN's or SDPA's), or matmul, softmax, dropout, matmul."""
    norm: Literal["fused", "eager", "composite"] = "fused"
    """One kernel that keeps its input; transformers' RMSNorm (upcast, scale, cast, weight); `nn.RMSNorm` on CPU."""
    gated: Literal["fused", "eager"] = "fused"
    """SwiGLU in one kernel, or activation and product apart."""
    expand_kv: bool = False
    """Key and value are copied for every query head before attention (`repeat_kv`)."""
    element_bytes: Literal[2, 4] = 2
    """Bytes of an activation's element: 16-bit or fp32."""
    mask_bytes: Literal[1, 2, 4] = 1
    """Bytes of a dropout mask's element: 1 on CUDA (bool); on CPU the noise has the activation's dtype."""
    statistic_bytes: Literal[2, 4] = 4
    """Bytes of a norm's mean or reciprocal deviation: fp32 on CUDA; LayerNorm on CPU keeps the activation's dtype."""
    fp8: Literal["none", "tensor", "block", "mx"] = "none"
    """Inputs of linear layers in fp8, with one scale a tensor, one per 1x128 block (fp32), or one per 32 (MXFP8)."""
    fp8_gated_input: bool = False
    """SwiGLU's input is stored in fp8 (`activation_func_fp8_input_store`)."""
    fp32_residual: bool = False
    """The residual stream is fp32."""
    router_fp32_input: bool = False
    """The router's input is upcast to fp32 and kept."""
    separate_probs: bool = False
    """Expert outputs are multiplied by their probability after the second matmul, which keeps them."""
    pad_value: bool = False
    """MLA's value is padded to the width of the key, because the attention kernel wants it."""
    loss: Literal["vocab-parallel", "eager", "chunked"] = "vocab-parallel"
    """Cross entropy: Megatron's over a sharded vocabulary, `F.cross_entropy`, or fused with the head in chunks."""
    logits_bytes: Literal[2, 4] = 4
    """Bytes of an element of what the loss keeps: 4 when logits are upcast to fp32."""
    logits_returned: bool = False
    """The caller holds the logits until backward has ended (a model's `.logits`)."""
    chunk_tokens: int = 1024
    """Tokens of a chunk of the chunked loss."""
    imbalance: float = 1.0
    """The most loaded expert rank's tokens over the mean: its maximum, at least 1."""

    def __post_init__(self) -> None:
        if self.imbalance < 1:
            raise ConfigurationError(
                f"an expert imbalance of {self.imbalance} is below 1: give the most loaded rank's share over the mean"
            )
        if self.chunk_tokens < 1:
            raise ConfigurationError(f"a chunk of {self.chunk_tokens} tokens: the chunked loss needs at least 1")

    @property
    def linear_bytes(self) -> Fraction:
        """Bytes of an element of a linear layer's kept input."""
        if self.fp8 == "none":
            return Fraction(self.element_bytes)
        return 1 + {"tensor": Fraction(0), "block": Fraction(4, 128), "mx": Fraction(1, 32)}[self.fp8]


MEGATRON = Kernels()
HUGGING_FACE = Kernels(norm="eager", gated="eager", loss="eager", logits_returned=True)
PAPER = Kernels(attention="eager")
"""Korthikanti et al.: eager attention, bool dropout masks."""


def _divisor(number: int, near: int) -> int:
    """The divisor of a number nearest to another."""
    return min((other for other in range(1, number + 1) if number % other == 0), key=lambda other: abs(other - near))
