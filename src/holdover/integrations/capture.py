"""Record a training step as it runs under the compiler: the ops of its graphs, forward and backward, in their order.

The model is compiled for fake tensors, by a backend that runs the graphs node by node under the recorder. What stands
outside the graphs (the loss, blocks that are not compiled, autograd's own sums) is recorded as it runs anyway, so the
trace is of the whole step, as for a plan in eager mode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from holdover.errors import TraceError
from holdover.integrations._torch import (
    FUNCTIONALIZED_DRAWS,
    NodeInfo,
    aot_autograd,
    disable_compiler_caches,
    fuses,
    inductor,
    laid_out_inputs,
)
from holdover.integrations.joint_graph import JointGraph, holds_tensors, read
from holdover.integrations.lifetimes import inlined, let_go_early, unpack_late
from holdover.integrations.partition import Partition, Script
from holdover.integrations.regions import compile_regions, regions
from holdover.memory.timeline import RNG_STATE_BYTES
from holdover.trace.fake import Faker, unnoticed
from holdover.trace.fingerprint import fingerprint
from holdover.trace.graph import Call, Trace
from holdover.trace.isolate import ForeignError, isolated
from holdover.trace.record import Corrections, Loss, Step, describe, run_step, said
from holdover.trace.recorder import Recorder
from holdover.trace.replace import replace_tensors
from holdover.trace.step import (
    OptimizerSpec,
    autocast_for,
    check_optimizer,
    check_precision,
    checked_loss,
    model_dtype,
)
from holdover.trace.tensors import Frame

GRAPH = "graph:"
"""How the key of a graph's call begins; the graph's fingerprint follows. Calls of equal graphs have the same key."""

INFO = "holdover"


@dataclass(frozen=True)
class Recording:
    """A step under the compiler.

    Attributes:
        trace: the step. The ops of a graph stand in a call whose key is `graph:` and the graph's fingerprint, their
            index is their place in the joint graph.
        fused: ops whose results never reach memory, because Inductor has them in the same kernel as their readers.
        inline: op of forward -> the fused ops whose work is part of it when it runs again.
        graphs: number of calls of each graph, by fingerprint, in order.
        regions: the modules that were compiled.
    """

    trace: Trace
    fused: frozenset[int]
    inline: Mapping[int, frozenset[int]]
    graphs: Mapping[str, int]
    regions: tuple[str, ...]


def capture(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, *, backend: str,
    loss: Loss | None = None, optimizer: OptimizerSpec = None, precision: str | None = None,
    device: torch.device | None = None, corrections: Corrections | None = None,
    names: Iterable[str] | None = None, script: Script | None = None,
) -> Recording:  # fmt: skip
    """Record the step of `holdover.trace.record.record` as it runs when compiled by `backend`.

    Args:
        names: the modules that are compiled; None for those that are compiled already, else the whole model.
        script: what a plan would have made again in backward.

    Raises:
        TraceError: the step fails, or the compiler finds no graph in it that has a backward.
    """
    check_precision(precision)
    check_optimizer(optimizer)
    faker = Faker(device or torch.device("cpu"))
    step = Step(model, tuple(args), dict(kwargs or {}), loss, optimizer, precision)
    compiled = tuple(regions(model)) if names is None else tuple(names)
    graphs = Graphs(backend, compiled, script or {})
    try:
        return isolated(lambda subject: _capture(subject, graphs, faker, corrections), step)
    except ForeignError as failed:
        raise TraceError(
            f"The step fails when compiled by {backend}: {said(failed)} Run it with torch.compile by itself to "
            "see more; without compiled= the plan is for eager mode."
        ) from failed


def _capture(step: Step, graphs: Graphs, faker: Faker, corrections: Corrections | None) -> Recording:
    described, identity = describe((step.args, step.kwargs)), fingerprint(step.model)
    step = replace_tensors(step, faker)
    with torch.random.fork_rng(devices=[]), faker.mode, unnoticed(), disable_compiler_caches():
        dtype = model_dtype(step.precision)
        if dtype is not None:
            step.model.to(dtype)
            to_dtype = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
            step.args, step.kwargs = replace_tensors((step.args, step.kwargs), to_dtype)
        compile_regions(step.model, graphs.backend, graphs.names)
        _warm_up(step, faker.device)
        recorder = graphs.recorder = GraphRecorder(real=False, corrections=corrections, known=faker.known)
        trace = run_step(step, recorder, identity, described, faker.device)
    return graphs.finished(trace)


def _warm_up(step: Step, device: torch.device) -> None:
    """Compile everything, as the first step of training does."""
    before = [(p, p.grad) for p in step.model.parameters()]
    with torch.enable_grad():
        with autocast_for(step.precision, device.type):
            loss = checked_loss(step.loss, step.model(*step.args, **step.kwargs))
        loss.backward()
    for p, grad in before:
        p.grad = grad


class GraphRecorder(Recorder):
    """Knows which saved tensors belong to which graph's call, and puts their use where the graph uses them.

    The compiled function unpacks all that it saved before its backward graph begins; each is then used, and let go of,
    in its own time.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.slots_of: dict[int, list[int]] = defaultdict(list)
        self.saving = self.expected = 0
        self.unpacking = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        number = len(self.trace.slots)
        packed = super().pack(tensor)
        if self.expected and len(self.trace.slots) > number:
            self.expected -= 1
            self.trace.slots[number] = replace(self.trace.slots[number], call=self.saving)
            self.slots_of[self.saving].append(number)
        return packed

    def unpack(self, packed: Any) -> torch.Tensor:
        tensor = super().unpack(packed)
        slot = getattr(packed, "slot", None)
        if slot is not None and self.trace.slots[slot].call in self.slots_of:
            self.unpacking = self.trace.slots[slot].call
        return tensor

    def begin_graph(self, info: GraphInfo) -> int:
        """A graph's forward is called; its saved tensors are told to `pack` right after."""
        call = len(self.trace.calls)
        key = f"{GRAPH}{info.joint.fingerprint}"
        self.trace.calls.append(Call(call, key, key, "graph", self.frames[-1].call))
        self.frames.append(Frame(call))
        return call

    def end_graph(self, call: int, saved: int) -> None:
        self.frames.pop()
        self.saving, self.expected = call, saved

    def end_backward(self) -> None:
        """A graph's backward has run."""
        unpack_late(self.trace, self.slots_of[self.unpacking])


@dataclass(frozen=True)
class GraphInfo:
    """What the backend knows of a graph that it is given."""

    joint: JointGraph
    outputs: int  # of forward, without what is saved; -1 for backward


@dataclass
class Graphs:
    """The backend that runs graphs under a recorder, and what it saw."""

    backend_name: str
    names: tuple[str, ...]
    script: Script = field(default_factory=dict)
    recorder: GraphRecorder | None = None
    fused: set[int] = field(default_factory=set)

    def backend(self, gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        if self.backend_name == "inductor":
            patches = {"custom_partitioner_fn": RecordingPartition(self.script, fused=self.backend_name == "inductor")}
            return inductor(gm, inputs, patches, self.runner)
        kwargs = {"keep_inference_input_mutations": True}
        return aot_autograd(fw_compiler=self.runner, partition_fn=RecordingPartition(self.script), **kwargs)(gm, inputs)

    def runner(self, gm: fx.GraphModule, inputs: Any, **options: Any) -> Callable[[list[Any]], Any]:
        runner = GraphRunner(gm, self)
        if self.backend_name == "inductor":
            lay_out(gm, laid_out_inputs(gm, options))

        def run(args: list[Any]) -> Any:
            return runner.call(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def finished(self, trace: Trace) -> Recording:
        """Ops outside of graphs are not the compiler's to make again; fused results take no memory."""
        for op in trace.ops:
            if not trace.calls[op.call].key.startswith(GRAPH) and not op.keep:
                op.keep = "outside of the compiled graphs"
        written = {before for op in trace.ops for before, _ in op.writes}
        for op in trace.ops:
            if op.random:
                op.keep = op.keep or "random"
            if written.intersection(op.inputs):
                op.keep = op.keep or "reads an input that the graph writes to"
        for i, signature in enumerate(trace.signatures):
            if "." not in signature.name:  # a higher-order op
                trace.signatures[i] = replace(signature, name=f"higher_order.{signature.name}.default", runnable=False)
        inline = inlined(trace, self.fused)
        let_go_early(trace, GRAPH)
        counts: dict[str, int] = defaultdict(int)
        for call in trace.calls:
            if call.key.startswith(GRAPH):
                counts[call.key.removeprefix(GRAPH)] += 1
        return Recording(trace, frozenset(self.fused), inline, dict(counts), self.names)


class RecordingPartition(Partition):
    """Leaves a note on both graphs."""

    def __init__(self, script: Script, *, fused: bool = False) -> None:
        super().__init__(script, fused=fused)
        self.joint: JointGraph | None = None

    def choose(self, graph: fx.Graph, info: NodeInfo, stock: list[fx.Node]) -> list[fx.Node]:
        self.joint = read(graph, info)
        return super().choose(graph, info, stock)

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        self.joint = None
        forward, backward = super().__call__(gm, joint_inputs, **kwargs)
        if self.joint is not None:
            forward.meta[INFO] = GraphInfo(self.joint, kwargs["num_fwd_outputs"])
            backward.meta[INFO] = GraphInfo(self.joint, -1)
        return forward, backward


class GraphRunner(fx.Interpreter):
    """Runs a graph node by node and lets each value go after its last use, as compiled code does."""

    def __init__(self, gm: fx.GraphModule, graphs: Graphs) -> None:
        super().__init__(gm)
        self.graphs = graphs
        self.info: GraphInfo | None = gm.meta.get(INFO)
        self.inlined = fused_nodes(gm.graph) if graphs.backend_name == "inductor" else frozenset()
        output = next(iter(gm.graph.find_nodes(op="output")))
        seen = len(output.args[0]) if self.info is None or self.info.outputs < 0 else self.info.outputs
        self.strides = [told_strides(node) for node in output.args[0][:seen]]

    def call(self, args: list[Any]) -> Any:
        recorder, info = self.graphs.recorder, self.info
        forward = info is not None and info.outputs >= 0
        call = recorder.begin_graph(info) if recorder is not None and info is not None and forward else 0
        out = self.boxed_run(args)
        self.env = {}
        if self.graphs.backend_name == "inductor":
            with recorder.unwatched() if recorder is not None else nullcontext():
                self.restride(out)
        if recorder is not None and info is not None:
            if forward:
                recorder.end_graph(call, sum(isinstance(t, torch.Tensor) for t in out[info.outputs :]))
            else:
                recorder.end_backward()
        return out

    def restride(self, out: Iterable[Any]) -> None:
        """Whatever layout Inductor works in, what it hands out has the strides that it was traced with."""
        for value, strides in zip(out, self.strides, strict=False):
            if strides is not None and value.stride() != strides:
                value.as_strided_(value.shape, strides)

    def draw(self, n: fx.Node) -> Any:
        """A random op that the user's activation checkpointing replays: the op itself, and the generator's state."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is not FUNCTIONALIZED_DRAWS[0]:
            return args[1](*args[2:], **kwargs)
        return torch.empty(RNG_STATE_BYTES["cpu"], dtype=torch.uint8), args[0](*args[1:], **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        recorder, info = self.graphs.recorder, self.info
        if recorder is None or n.op != "call_function":
            return super().run_node(n)
        if n.target in FUNCTIONALIZED_DRAWS:
            return self.draw(n)
        first = len(recorder.trace.ops)
        if info is not None and info.outputs >= 0:
            recorder.frames[-1].index = info.joint.numbers.get(n.name, 0)
        result = super().run_node(n)
        ops = recorder.trace.ops[first:]
        for op in ops:
            if info is None or n.name not in info.joint.numbers or len(ops) > 1:
                op.keep = op.keep or "no op of its own in the joint graph"
            elif info.outputs >= 0:
                op.keep = op.keep or info.joint.pinned.get(info.joint.numbers[n.name], "")
            if n.name in self.inlined:
                self.graphs.fused.add(op.id)
        return result


def told_strides(node: Any) -> tuple[int, ...] | None:
    """Of an image; None for other tensors, which are never laid out anew, and for sizes that are not known."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or not all(type(n) is int for n in value.stride()):
        return None
    return value.stride()


def lay_out(gm: fx.GraphModule, inputs: Iterable[fx.Node]) -> None:
    """Have the graph begin by copying these of its inputs into channels-last layout, and read the copies only."""
    begin = next(node for node in gm.graph.nodes if node.op != "placeholder")
    for node in inputs:
        readers = list(node.users)
        with gm.graph.inserting_before(begin):
            laid = gm.graph.create_node(
                "call_function", torch.ops.aten.clone.default, (node,), {"memory_format": torch.channels_last}
            )
        laid.meta.update(node.meta)
        for reader in readers:
            reader.replace_input_with(node, laid)
    gm.recompile()


def fused_nodes(graph: fx.Graph) -> frozenset[str]:
    """Nodes that Inductor computes inside the kernels of their readers: all of these fuse, and nothing that does not
    fuse runs between.
    """
    nodes = list(graph.nodes)
    era: dict[fx.Node, int] = {}
    now = 0
    for node in nodes:
        era[node] = now
        now += node.op == "call_function" and holds_tensors(node) and not fuses(node, node)
    return frozenset(
        node.name
        for node in nodes
        if node.op == "call_function" and node.users and all(fuses(node, u) and era[u] == era[node] for u in node.users)
    )
