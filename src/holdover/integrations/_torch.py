"""The private PyTorch names that plans under torch.compile depend on; tests/integrations/test_private_names.py.

The compiler has a public slot for a whole partitioner, and none for the one question that a plan answers: which values
of forward are saved. PyTorch's own partitioner asks it in one function, `choose_saved_values_set`; everything around
that question (random states, mutations, symbolic sizes, the order of backward) stays PyTorch's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo import trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.partitioners import NodeInfo, min_cut_rematerialization_partition, must_recompute
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.graph import GraphLowering
from torch._prims import rng_prims
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "COMPILED_CALL",
    "FUNCTIONALIZED_DRAWS",
    "CheckpointPolicy",
    "CustomPartitionerFn",
    "NodeInfo",
    "aot_autograd",
    "boxed_nop",
    "choosing",
    "compiled_call",
    "disable_compiler_caches",
    "fuses",
    "inductor",
    "inductor_config",
    "is_getitem",
    "is_optimized_module",
    "laid_out_inputs",
    "min_cut_rematerialization_partition",
    "must_recompute",
    "skipped_by_dynamo",
]

COMPILED_CALL = "_compiled_call_impl"
"""Where `module.compile()` puts what it made."""

FUNCTIONALIZED_DRAWS = (rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state)
"""A random op of forward that hands out the generator's state, and the same op in backward from that state."""

Choose = Callable[[fx.Graph, NodeInfo, list[fx.Node]], list[fx.Node]]


@contextmanager
def choosing(choose: Choose) -> Iterator[None]:
    """While PyTorch's partitioner runs inside, `choose` has the last word on what is saved.

    It gets the joint graph, what the partitioner knows of its nodes, and PyTorch's own choice for an unlimited budget.
    """
    stock = partitioners.choose_saved_values_set

    def chosen(joint_graph: fx.Graph, node_info: NodeInfo, memory_budget: float = 1) -> list[fx.Node]:
        return choose(joint_graph, node_info, stock(joint_graph, node_info, memory_budget=memory_budget))

    partitioners.choose_saved_values_set = chosen
    try:
        yield
    finally:
        partitioners.choose_saved_values_set = stock


def disable_compiler_caches() -> AbstractContextManager[Any]:
    """A graph that comes out of a cache is not partitioned again."""
    stack = ExitStack()
    stack.enter_context(inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False))
    stack.enter_context(functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False))
    return stack


def inductor(
    gm: fx.GraphModule, inputs: Any, patches: dict[str, Any], run_graph: Callable[..., Any] | None = None
) -> Any:
    """Compile a graph as the Inductor backend does, with these settings; `run_graph` in place of its code generator."""
    return compile_fx(gm, inputs, config_patches=patches, inner_compile=run_graph or _compile_keeping_parameters)


def _compile_keeping_parameters(gm: fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """Inductor's code generator, told that a parameter which forward hands to backward is to stay as it is.

    It may lay out anew whatever only backward sees. Of a parameter that convolutions read it would make a copy, which
    forward then saves beside the parameter itself.
    """
    output = next(iter(gm.graph.find_nodes(op="output")))
    visible = output.meta.get("user_visible_output_idxs")
    parameters = _parameters(gm, options)
    if visible is not None and not options.get("is_backward"):
        own = [i for i, node in enumerate(output.args[0]) if node in parameters]
        output.meta["user_visible_output_idxs"] = sorted({*visible, *own})
    return compile_fx_inner(gm, inputs, **options)


def _parameters(gm: fx.GraphModule, options: dict[str, Any]) -> frozenset[fx.Node]:
    places = set(options.get("static_input_idxs") or ())
    return frozenset(node for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if i in places)


def laid_out_inputs(gm: fx.GraphModule, options: dict[str, Any]) -> list[fx.Node]:
    """Inputs of a forward graph, no parameters, that Inductor copies into another layout for its convolutions.

    Everything else in the graph reads the copy too, and backward gets it. `options` are those of the code generator.
    """
    if options.get("is_backward") or not GraphLowering.decide_layout_opt(gm, is_inference=False):
        return []
    parameters = _parameters(gm, options)
    read = {node.args[0] for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)}
    return [
        node
        for node in gm.graph.find_nodes(op="placeholder")
        if node in read and node not in parameters and node.meta["val"].dim() == 4
        and not node.meta["val"].is_contiguous(memory_format=torch.channels_last)
    ]  # fmt: skip


def fuses(first: fx.Node, second: fx.Node) -> bool:
    """Whether Inductor takes the two into one kernel when nothing stands between them, as its partitioner has it."""
    kinds = partitioners.get_default_op_list()
    return bool(kinds.is_fusible(first) and kinds.is_fusible(second))


def is_optimized_module(module: torch.nn.Module) -> bool:
    """Whether this is what `torch.compile(module)` returned."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def compiled_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What `module.compile()` made, None if it was not called."""
    return module.__dict__.get(COMPILED_CALL)


def skipped_by_dynamo(module: torch.nn.Module) -> bool:
    """Whether the module's `forward` is one that dynamo does not begin to trace in, as those of `torch.nn`."""
    return bool(trace_rules.check(type(module).forward))


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem
