"""A transformer layer as a list: norms, attention and MLP, value by value.

Each function adds one part to a `Builder` and returns the name of what it makes. What autograd keeps follows from the
op: a linear layer keeps its input, a norm its input and statistics, an activation function its input, softmax its
output, dropout its mask, a product both factors, fused attention query, key, value, output and log-sum-exp. Additions,
views, scaling by a constant and rotations keep nothing that is not kept already.
"""

from __future__ import annotations

from fractions import Fraction

from holdover.closed_form.architecture import Architecture, Kernels, Latent
from holdover.closed_form.formula import Formula, symbols
from holdover.closed_form.tensors import Builder, Shard

h, a, g, d, f, s, t, t_s = symbols("h a g d f s t t_s")
copies, sp, rho = symbols("kv_copies sp rho")
r_q, r_k, d_n, d_r, d_v = symbols("r_q r_k d_n d_r d_v")
E, k, f_e, f_s = symbols("E k f_e f_s")

ONE = Formula() + 1

CORE = frozenset({"core_attn"})
NORM = frozenset({"layernorm"})
MLP = frozenset({"mlp"})
MLA_UP = frozenset({"mla_up_proj"})
MOE = frozenset({"moe"})
MOE_ACT = frozenset({"moe", "moe_act"})
SHARED = frozenset({"moe", "shared_experts"})


def residual_bytes(kernels: Kernels) -> int:
    """Bytes of an element of the residual stream."""
    return 4 if kernels.fp32_residual else kernels.element_bytes


def norm(
    build: Builder,
    name: str,
    source: str,
    width: Formula,
    source_bytes: int,
    architecture: Architecture,
    kernels: Kernels,
    *,
    shard: Shard,
    output_bytes: Fraction,
    rows: Formula = ONE,
    output_stored: bool = True,
    modules: frozenset[str] = frozenset(),
) -> str:
    """LayerNorm or RMSNorm of `width` elements in `rows` rows: it keeps input and statistics, the next linear its
    output."""
    size = kernels.element_bytes
    decomposed = architecture.norm == "rmsnorm" and kernels.norm != "fused"
    traffic = (24 if decomposed else 2 * size) * width * shard.factor
    op = build.op(name, [source], traffic=traffic, modules=modules)
    if not decomposed:
        build.keep(source)
        statistics = kernels.statistic_bytes * (2 if architecture.norm == "layernorm" else 1)
    else:
        statistics = 4
        if source_bytes == 4:
            build.keep(source)
        else:
            build.value(f"{name} input, fp32", op, 4 * width, shard, dropped_by=modules, gradient=False)
        scaled = 4 if kernels.norm == "composite" else size
        build.value(f"{name} scaled", op, scaled * width, shard, dropped_by=modules, gradient=False)
    build.value(
        f"{name} statistics",
        op,
        statistics * rows,
        shard,
        small=True,
        gradient=False,
        dropped_by=modules if decomposed else (),
    )
    return build.value(f"{name} output", op, output_bytes * width, shard, stored=output_stored, dropped_by=modules)


def attention(build: Builder, source: str, architecture: Architecture, kernels: Kernels) -> str:
    """The attention block, from the norm's output to the output projection's result."""
    if architecture.latent:
        query, key, value = _latent_projections(build, source, architecture, kernels, architecture.latent)
        score_width, value_width = d_n + d_r, d_v
    else:
        query, key, value = _projections(build, source, architecture, kernels)
        score_width, value_width = d, d
    for kept in (query, key, value):
        build.keep(kept)
    core = _fused_attention if kernels.attention == "fused" else _eager_attention
    context = core(build, (query, key, value), score_width, value_width, architecture, kernels)
    if kernels.fp8 != "none":
        cast = build.op("attention output to fp8", [context], traffic=3 * a * value_width / t)
        context = build.value(
            "output projection input, fp8", cast, kernels.linear_bytes * a * value_width, Shard.TENSOR, gradient=False
        )
    else:
        build.keep(context)
    op = build.op(
        "output projection",
        [context],
        flops=2 * h * a * value_width / t,
        collective=kernels.element_bytes * h * (2 - sp),
    )
    return build.value("output projection output", op, kernels.element_bytes * h, Shard.SEQUENCE, stored=False)


def _projections(build: Builder, source: str, architecture: Architecture, kernels: Kernels) -> tuple[str, str, str]:
    size = kernels.element_bytes
    op = build.op(
        "query, key, value projection",
        [source],
        flops=2 * h * (a + 2 * g * copies) * d / t,
        collective=size * h * sp,
        gathered=size * h * sp,
    )
    query = build.value("projected query", op, size * a * d, Shard.TENSOR, stored=False)
    key = build.value("projected key", op, size * g * d, Shard.KV, stored=False)
    value = build.value("value", op, size * g * d, Shard.KV, stored=False)
    if architecture.qk_norm:
        for name, width, shard in (("query", a * d, Shard.TENSOR), ("key", g * d, Shard.KV)):
            normed = norm(
                build,
                f"{name} norm",
                f"projected {name}",
                width,
                size,
                architecture,
                kernels,
                shard=shard,
                output_bytes=Fraction(size),
                rows=width / d,
                output_stored=False,
            )
            query, key = (normed, key) if name == "query" else (query, normed)
    if architecture.rotary:
        query_op = build.op("rotate query", [query], traffic=2 * size * a * d / t)
        query = build.value("query", query_op, size * a * d, Shard.TENSOR, stored=False)
        key_op = build.op("rotate key", [key], traffic=2 * size * g * d * copies / t)
        key = build.value("key", key_op, size * g * d, Shard.KV, stored=False)
    if kernels.expand_kv and architecture.kv_heads < architecture.heads:
        expand = build.op("expand key, value", [key, value], traffic=4 * size * a * d / t)
        key = build.value("expanded key", expand, size * a * d, Shard.TENSOR, stored=False)
        value = build.value("expanded value", expand, size * a * d, Shard.TENSOR, stored=False)
    return query, key, value


def _latent_projections(
    build: Builder, source: str, architecture: Architecture, kernels: Kernels, latent: Latent
) -> tuple[str, str, str]:
    size, linear = kernels.element_bytes, kernels.linear_bytes
    query_source, query_width = source, h
    if latent.query_rank:
        down = build.op("query down projection", [source], flops=2 * h * r_q / t_s)
        compressed = build.value("compressed query", down, size * r_q, Shard.SEQUENCE, stored=False)
        query_source = norm(
            build,
            "query norm",
            compressed,
            r_q,
            size,
            architecture,
            kernels,
            shard=Shard.SEQUENCE,
            output_bytes=linear,
        )
        query_width = r_q
    down = build.op("key, value down projection", [source], flops=2 * h * (r_k + d_r) / t_s)
    compressed = build.value("compressed key, value", down, size * (r_k + d_r), Shard.SEQUENCE, stored=False)
    normed = norm(
        build,
        "key, value norm",
        compressed,
        r_k,
        size,
        architecture,
        kernels,
        shard=Shard.SEQUENCE,
        output_bytes=linear,
    )
    key_dim = d_n + d_r
    query_up = build.op(
        "query up projection",
        [query_source],
        flops=2 * query_width * a * key_dim / t,
        collective=size * query_width * sp,
        modules=MLA_UP,
    )
    up = build.op(
        "key, value up projection",
        [normed, compressed],
        flops=2 * r_k * a * (d_n + d_v) / t,
        collective=size * (r_k + d_r) * sp,
        modules=MLA_UP,
    )
    padded = key_dim if kernels.pad_value else d_v
    return (
        build.value("query", query_up, size * a * key_dim, Shard.TENSOR, stored=False, dropped_by=MLA_UP),
        build.value("key", up, size * a * key_dim, Shard.TENSOR, stored=False, dropped_by=MLA_UP),
        build.value("value", up, size * a * padded, Shard.TENSOR, stored=False, dropped_by=MLA_UP),
    )


def _fused_attention(
    build: Builder,
    inputs: tuple[str, str, str],
    score_width: Formula,
    value_width: Formula,
    architecture: Architecture,
    kernels: Kernels,
) -> str:
    size = kernels.element_bytes
    op = build.op(
        "attention",
        inputs,
        flops=2 * s * a * (score_width + value_width) / t,
        traffic=2 * size * a * (score_width + value_width) / t,
        modules=CORE,
        fused_attention=True,
    )
    build.value("log-sum-exp", op, 4 * a, Shard.TENSOR, dropped_by=CORE, gradient=False)
    if not (architecture.latent and kernels.pad_value):
        # The kernel keeps its output for backward, and the output projection keeps the same tensor as its input.
        return build.value("attention output", op, size * a * value_width, Shard.TENSOR)
    padded = build.value("attention output, padded", op, size * a * score_width, Shard.TENSOR)
    cut = build.op("cut attention output", [padded], traffic=2 * size * a * value_width / t)
    return build.value("attention output", cut, size * a * value_width, Shard.TENSOR, stored=False)


def _eager_attention(
    build: Builder,
    inputs: tuple[str, str, str],
    score_width: Formula,
    value_width: Formula,
    architecture: Architecture,
    kernels: Kernels,
) -> str:
    size = kernels.element_bytes
    query, key, value = inputs
    scores = build.op("scores", [query, key], flops=2 * s * a * score_width / t, modules=CORE)
    raw = build.value("attention scores", scores, size * a * s, Shard.TENSOR, stored=False)
    softmax = build.op("softmax", [raw], traffic=4 * size * a * s / t, modules=CORE)
    weights = build.value("softmax output", softmax, size * a * s, Shard.TENSOR, dropped_by=CORE)
    if architecture.attention_dropout:
        dropout = build.op(
            "softmax dropout", [weights], traffic=(2 * size + kernels.mask_bytes) * a * s / t, modules=CORE
        )
        build.value(
            "softmax dropout mask", dropout, kernels.mask_bytes * a * s, Shard.TENSOR, dropped_by=CORE, gradient=False
        )
        weights = build.value("softmax dropout output", dropout, size * a * s, Shard.TENSOR, dropped_by=CORE)
    op = build.op("attention over values", [weights, value], flops=2 * s * a * value_width / t, modules=CORE)
    return build.value("attention output", op, size * a * value_width, Shard.TENSOR, stored=False)


def dropout_add(build: Builder, name: str, branch: str, stream: str, arch: Architecture, kernels: Kernels) -> str:
    """Dropout of a branch, and its addition to the residual stream: the mask is all that is kept."""
    size = kernels.element_bytes
    if arch.hidden_dropout:
        op = build.op(f"{name} dropout", [branch], traffic=(2 * size + kernels.mask_bytes) * h / t_s)
        build.value(f"{name} dropout mask", op, kernels.mask_bytes * h, Shard.SEQUENCE, gradient=False)
        branch = build.value(f"{name} dropout output", op, size * h, Shard.SEQUENCE, stored=False)
    wide = residual_bytes(kernels)
    op = build.op(f"{name} residual addition", [branch, stream], traffic=(size + 2 * wide) * h / t_s)
    return build.value(f"{name} residual", op, wide * h, Shard.SEQUENCE, stored=False)


def mlp(build: Builder, source: str, architecture: Architecture, kernels: Kernels) -> str:
    """The dense MLP, from the norm's output to the second linear's result."""
    size = kernels.element_bytes
    activated = _activation(build, "MLP", source, f, Shard.TENSOR, MLP, MLP, architecture, kernels, gather=h)
    build.keep(activated)
    op = build.op("MLP output", [activated], flops=2 * h * f / t, collective=size * h * (2 - sp), modules=MLP)
    return build.value("MLP result", op, size * h, Shard.SEQUENCE, stored=False)


def _activation(
    build: Builder,
    name: str,
    source: str,
    width: Formula,
    shard: Shard,
    modules: frozenset[str],
    activation_modules: frozenset[str],
    architecture: Architecture,
    kernels: Kernels,
    *,
    gather: Formula,
) -> str:
    """First linear and activation function; returns the second linear's input. `width` counts what tokens visit."""
    size, linear = kernels.element_bytes, kernels.linear_bytes
    gathered = size * gather * sp
    op = build.op(
        f"{name} input",
        [source],
        flops=(4 if architecture.gated else 2) * h * width / t,
        collective=gathered,
        gathered=gathered,
        modules=modules,
    )
    if not architecture.gated:
        relu = architecture.activation == "relu"
        before = build.value(f"{name} pre-activation", op, size * width, shard, stored=not relu, dropped_by=modules)
        act = build.op(f"{name} activation", [before], traffic=2 * size * width / t, modules=activation_modules)
        return build.value(f"{name} activation", act, linear * width, shard, dropped_by=activation_modules)
    kept = Fraction(1) if kernels.fp8_gated_input else Fraction(size)
    gate = build.value(f"{name} gate", op, kept * width, shard, dropped_by=modules)
    up = build.value(f"{name} up", op, kept * width, shard, dropped_by=modules)
    if kernels.gated == "eager":
        act = build.op(f"{name} activation", [gate], traffic=2 * size * width / t, modules=activation_modules)
        gate = build.value(f"{name} activated gate", act, size * width, shard, dropped_by=activation_modules)
    act = build.op(f"{name} product", [gate, up], traffic=3 * size * width / t, modules=activation_modules)
    return build.value(f"{name} product", act, linear * width, shard, dropped_by=activation_modules)


def experts(build: Builder, source: str, architecture: Architecture, kernels: Kernels) -> str:
    """The mixture of experts: router, dispatch, experts, combination, and the shared experts beside them."""
    size = kernels.element_bytes
    assert architecture.experts is not None
    router_source = source
    if kernels.router_fp32_input and size < 4:
        upcast = build.op("router input to fp32", [source], traffic=6 * h / t_s, modules=MOE)
        router_source = build.value("router input, fp32", upcast, 4 * h, Shard.SEQUENCE, dropped_by=MOE)
    op = build.op("router", [router_source], flops=2 * h * E / t_s, traffic=9 * E / t_s, modules=MOE)
    build.value("router logits", op, 4 * E, Shard.SEQUENCE, dropped_by=MOE)
    probs = build.value("router probabilities", op, 4 * E, Shard.SEQUENCE, dropped_by=MOE)
    routing = build.value("routing map", op, 1 * E, Shard.SEQUENCE, dropped_by=MOE, gradient=False)
    op = build.op("dispatch", [source, routing], exchange=size * k * h / t, traffic=2 * size * k * h / t, modules=MOE)
    dispatched = build.value(
        "dispatched tokens", op, kernels.linear_bytes * k * h * rho, Shard.GATHERED, dropped_by=MOE
    )
    activated = _activation(
        build, "expert", dispatched, k * f_e * rho, Shard.ROUTED, MOE, MOE_ACT, architecture, kernels, gather=Formula()
    )
    op = build.op("expert output", [activated, probs], flops=2 * h * k * f_e * rho / t, modules=MOE)
    returned = build.value(
        "expert results", op, size * k * h * rho, Shard.ROUTED, stored=kernels.separate_probs, dropped_by=MOE
    )
    op = build.op("combine", [returned], exchange=size * k * h / t, traffic=2 * size * k * h / t, modules=MOE)
    result = build.value("combined experts", op, size * h, Shard.SEQUENCE, stored=False)
    if not architecture.experts.shared_ffn:
        return result
    activated = _activation(
        build, "shared expert", source, f_s, Shard.TENSOR, SHARED, SHARED, architecture, kernels, gather=h
    )
    op = build.op(
        "shared expert output",
        [activated],
        flops=2 * h * f_s / t,
        collective=size * h * (2 - sp),
        modules=SHARED,
    )
    shared = build.value("shared expert result", op, size * h, Shard.SEQUENCE, stored=False)
    op = build.op("add shared expert", [result, shared], traffic=3 * size * h / t_s, modules=MOE)
    return build.value("expert sum", op, size * h, Shard.SEQUENCE, stored=False)
