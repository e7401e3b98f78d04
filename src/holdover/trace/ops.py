"""What an ATen op does to memory and state, read from its schema, with a short table of what schemas do not say."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

UNINITIALISED = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "resize_", "resize"}
)
"""Ops whose result is whatever the memory held: another run gives another content."""

OVERWRITES = frozenset(
    {
        "bernoulli_", "uniform_", "normal_", "exponential_", "random_", "geometric_", "log_normal_", "cauchy_",
        "fill_", "zero_", "copy_",
    }
)  # fmt: skip
"""In-place ops whose result does not depend on what they overwrite, if they cover the whole storage."""

DATA_DEPENDENT = frozenset({"nonzero", "masked_select", "unique", "_unique2", "unique_dim", "unique_consecutive"})
"""Ops whose output size depends on values: another run would have to wait for the device to know it."""

LETS_GO = frozenset({"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "detach"})
"""Ops whose result lies on their argument's memory without keeping the argument itself alive, as views do."""

PURE_NAMESPACES = frozenset({"aten", "prims", "torchvision"})
"""Namespaces whose kernels are known to touch nothing but their arguments."""

NO_WORK = frozenset({"prim", "profiler"})
"""Namespaces whose ops ask or label: `torch.profiler.record_function` is two of them."""

STATEFUL = frozenset({"_cudnn_init_dropout_state", "_fused_moving_avg_obs_fq_helper", "_cudnn_rnn", "miopen_rnn"})
"""Ops with a state of their own that another run would advance or miss."""


def op_name(op: Any) -> str:
    """`aten.addmm.default` for an overload, the plain name for a higher-order op.

    >>> op_name(torch.ops.aten.mul.Tensor)
    'aten.mul.Tensor'
    """
    return str(op) if isinstance(op, OpOverload) else getattr(op, "__name__", type(op).__name__)


def resolve(name: str) -> OpOverload:
    """The op of that name; the inverse of `op_name` for overloads."""
    namespace, packet, overload = name.split(".")
    op: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return op


@cache
def takes_a_place(op: Any) -> bool:
    """Whether an op counts among those of its module call: not if it only looks at its argument in another way.

    Views come and go with the kind of tensor (autograd makes some anew for subclasses after an in-place write), so
    places that counted them would differ between recording and training.

    >>> takes_a_place(torch.ops.aten.t.default), takes_a_place(torch.ops.aten.mm.default)
    (False, True)
    """
    if not isinstance(op, OpOverload):
        return True
    returns = op._schema.returns
    views = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return op.namespace not in NO_WORK and not views


@cache
def written_arguments(op: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of each argument that the op writes to: what its schema says, which collectives' do not.

    >>> written_arguments(torch.ops.aten.relu_.default), written_arguments(torch.ops.c10d.allreduce_.default)
    (((0, 'self'),), ((0, 'tensors'),))
    """
    if not isinstance(op, OpOverload):
        return ()
    if op.namespace == "c10d":
        name = op._schema.name
        return ((0, op._schema.arguments[0].name),) if name.endswith("_") else ()
    return tuple(
        (i, a.name) for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )


RUNNING_STATISTICS = {
    "native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4),
    "batch_norm_update_stats": (1, 2), "batch_norm_gather_stats": (3, 4), "batch_norm_gather_stats_with_counts": (3, 4),
}  # fmt: skip
"""Arguments that these ops may write to, which neither their schemas say nor version counters show."""

ONLY_IN_TRAINING = {"native_batch_norm": 5, "cudnn_batch_norm": 5, "miopen_batch_norm": 5}
"""They write to them where this argument is true; the others always."""


@cache
def running_statistics(op: Any) -> tuple[int, ...]:
    """Positions of the running statistics among the arguments of a batch norm.

    >>> running_statistics(torch.ops.aten.native_batch_norm.default), running_statistics(torch.ops.aten.relu.default)
    ((3, 4), ())
    """
    return RUNNING_STATISTICS.get(op._schema.name.split("::")[1], ()) if isinstance(op, OpOverload) else ()


def statistics_given(op: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    """The running statistics among the arguments of this call of a batch norm."""
    given = (args[i] for i in running_statistics(op) if i < len(args))
    return [t for t in given if isinstance(t, torch.Tensor)]


@cache
def is_random(op: Any) -> bool:
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


@cache
def generator_argument(op: Any) -> str:
    """The name of the argument that takes a generator; "" for ops that always draw from their device's own.

    >>> generator_argument(torch.ops.aten.bernoulli.default), generator_argument(torch.ops.aten.native_dropout.default)
    ('generator', '')
    """
    arguments = op._schema.arguments if isinstance(op, OpOverload) else ()
    return next((a.name for a in arguments if str(a.type) in ("Optional[Generator]", "Generator")), "")


@cache
def dropout_position(op: Any) -> int:
    """Where the op's dropout probability stands among its arguments; -1 if it has none."""
    names = [a.name for a in op._schema.arguments] if isinstance(op, OpOverload) else []
    return names.index("dropout_p") if "dropout_p" in names else -1


def draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call of the op takes random numbers: attention without dropout does not.

    >>> q = torch.ones(1, 1, 2, 8)
    >>> draws(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q), {})
    False
    """
    position = dropout_position(op)
    if position < 0:
        return is_random(op)
    return is_random(op) and (args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)) != 0.0


@cache
def obstacle(op: Any) -> str:
    """Why the outputs of `op` can never be made again by running it once more; "" when they can."""
    if not isinstance(op, OpOverload):
        return "higher-order op" if isinstance(op, HigherOrderOperator) else "op without a schema"
    packet = op._schema.name.split("::")[1]
    if "c10d" in op.namespace:
        return "collective"
    if op.namespace not in PURE_NAMESPACES:
        return f"custom op of namespace {op.namespace}"
    if type(op) is not OpOverload:
        return "op on script objects"
    if packet in UNINITIALISED:
        return "uninitialised memory"
    if packet in DATA_DEPENDENT or torch.Tag.data_dependent_output in op.tags:
        return "data-dependent"
    if packet in STATEFUL:
        return "op with a state of its own"
    if torch.Tag.inplace_view in op.tags:
        return "changes a tensor's metadata in place"
    return ""
