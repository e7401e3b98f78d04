"""The lists of a model: its layers by kind, and its two ends."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from holdover.closed_form.architecture import Architecture, Kernels, Kind
from holdover.closed_form.blocks import (
    NORM,
    ONE,
    attention,
    d,
    dropout_add,
    experts,
    h,
    mlp,
    norm,
    residual_bytes,
    sp,
    t,
    t_s,
)
from holdover.closed_form.formula import Formula, symbols
from holdover.closed_form.tensors import INPUT, Builder, Layer, Shard

v, b = symbols("v b")


@lru_cache(maxsize=256)
def layer(architecture: Architecture, kernels: Kernels, kind: Kind = "dense") -> Layer:
    """One transformer layer as a list.

    The paper's Eq. 1, where query, key and value are h wide and the MLP 4h:

    >>> from holdover.closed_form.architecture import PAPER
    >>> from holdover.closed_form.presets import PRESETS
    >>> h, a = symbols("h a")
    >>> listed = layer(PRESETS["gpt3-175b"], PAPER).bytes(small=False)
    >>> print(listed.substitute(t=1, t_s=1, kv_copies=1, g=a, d=h / a, f=4 * h))
    34h + 5as
    """
    build = Builder(f"{kind} layer")
    wide = residual_bytes(kernels)
    stream = build.value(INPUT, INPUT, wide * h, Shard.SEQUENCE, stored=False)
    normed = norm(
        build,
        "attention norm",
        stream,
        h,
        wide,
        architecture,
        kernels,
        shard=Shard.SEQUENCE,
        output_bytes=kernels.linear_bytes,
        modules=NORM,
    )
    branch = attention(build, normed, architecture, kernels)
    stream = dropout_add(build, "attention", branch, stream, architecture, kernels)
    normed = norm(
        build,
        "MLP norm",
        stream,
        h,
        wide,
        architecture,
        kernels,
        shard=Shard.SEQUENCE,
        output_bytes=kernels.linear_bytes,
        modules=NORM,
    )
    branch = (experts if kind == "moe" else mlp)(build, normed, architecture, kernels)
    dropout_add(build, "MLP", branch, stream, architecture, kernels)
    return build.build()


@lru_cache(maxsize=256)
def first_end(architecture: Architecture, kernels: Kernels) -> Layer:
    """What the embedding keeps: token ids, its dropout's mask, the tables of the rotary positions."""
    build = Builder("embedding")
    ids = build.value("token ids", INPUT, 8 * ONE, stored=True, small=True, gradient=False)
    op = build.op("embedding", [ids], traffic=2 * kernels.element_bytes * h / t_s)
    embedded = build.value("embedding output", op, residual_bytes(kernels) * h, Shard.SEQUENCE, stored=False)
    if not architecture.rotary:
        build.value("position ids", INPUT, 8 * ONE / b, stored=True, small=True, gradient=False)
    if architecture.hidden_dropout:
        op = build.op("embedding dropout", [embedded], traffic=3 * kernels.element_bytes * h / t_s)
        build.value("embedding dropout mask", op, kernels.mask_bytes * h, Shard.SEQUENCE, gradient=False)
    return build.build()


@lru_cache(maxsize=256)
def rotary_tables(architecture: Architecture, kernels: Kernels) -> Formula:
    """Bytes per token of the cosine and sine that all layers of a stage share."""
    if not architecture.rotary:
        return Formula()
    symbol = symbols("d_r")[0] if architecture.latent else d
    return 2 * kernels.element_bytes * symbol / b


@lru_cache(maxsize=256)
def last_end(architecture: Architecture, kernels: Kernels) -> Layer:
    """What the final norm, the output layer and the loss keep."""
    build = Builder("head and loss")
    wide, size = residual_bytes(kernels), kernels.element_bytes
    stream = build.value(INPUT, INPUT, wide * h, Shard.SEQUENCE, stored=False)
    fused_loss = kernels.loss == "chunked"
    normed = norm(
        build,
        "final norm",
        stream,
        h,
        wide,
        architecture,
        kernels,
        shard=Shard.SEQUENCE,
        output_bytes=Fraction(size),
        output_stored=not fused_loss,
    )
    op = build.op("output layer", [normed], flops=2 * h * v / t, collective=size * h * sp)
    if fused_loss:
        build.value("gradient of the head's input", op, size * h, Shard.SEQUENCE)
        return build.build()
    sharded = Shard.TENSOR if kernels.loss == "vocab-parallel" else Shard.NONE
    logits = build.value("logits", op, size * v, Shard.TENSOR, stored=False)
    kept = 4 if size == 4 else kernels.logits_bytes
    loss = build.op("cross entropy", [logits], traffic=(size + 2 * kept) * v * sharded.factor)
    name = "softmax of the logits" if kernels.loss == "vocab-parallel" else "log-softmax of the logits"
    build.value(name, loss, kept * v, sharded)
    build.value("target ids", INPUT, 8 * ONE, stored=True, small=True, gradient=False)
    if kernels.loss == "vocab-parallel":
        build.value("target mask", loss, ONE, small=True, gradient=False)
    return build.build()


def loss_temporaries(architecture: Architecture, kernels: Kernels) -> Formula:
    """Bytes per token that the loss holds at its peak beyond what it keeps.

    Eager: backward of the log-softmax has the incoming and the outgoing gradient beside the kept output. Vocabulary
    parallel: the logits in 16 bits beside the kept softmax, in which the gradient is then made. The chunked loss
    holds one chunk, which does not grow with the tokens: see `chunk_bytes`.
    """
    size = kernels.element_bytes
    kept = 4 if size == 4 else kernels.logits_bytes
    if kernels.loss == "chunked":
        return Formula()
    if kernels.loss == "vocab-parallel":
        return size * v / t
    return (2 * kept + (size if kernels.logits_returned else 0)) * v


def chunk_bytes(architecture: Architecture, kernels: Kernels) -> Formula:
    """Bytes of the chunked loss's working set: logits, their fp32 copy and gradients of one chunk, and the weight's
    gradient, which it makes in forward."""
    if kernels.loss != "chunked":
        return Formula()
    size = kernels.element_bytes
    return (2 * size + 8) * kernels.chunk_tokens * v / t + size * v * h / t
