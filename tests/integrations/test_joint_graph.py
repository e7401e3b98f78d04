"""Places in joint graphs, and a backward in which replays do not hold what they pass."""

from __future__ import annotations

from typing import Any

import torch
from tests.integrations.helpers import tokens, transformer
from torch import fx, nn

from holdover.integrations._torch import NodeInfo, aot_autograd, boxed_nop
from holdover.integrations.joint_graph import JointGraph, read
from holdover.integrations.partition import Partition


class Watched(Partition):
    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.seen: list[JointGraph] = []
        self.backward: list[str] = []

    def choose(self, graph: fx.Graph, info: NodeInfo, stock: list[fx.Node]) -> list[fx.Node]:
        self.seen.append(read(graph, info))
        return super().choose(graph, info, stock)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, backward = super().__call__(*args, **kwargs)
        self.saved = [n.name for n in next(iter(forward.graph.find_nodes(op="output"))).args[0][1:] if n is not None]
        self.backward = [n.name for n in backward.graph.nodes if n.op == "call_function"]
        return forward, backward


def run(model: nn.Module, x: torch.Tensor, script: Any = None, steps: int = 1) -> Watched:
    torch._dynamo.reset()
    watched = Watched(script or {})
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=boxed_nop, partition_fn=watched))
    for _ in range(steps):
        compiled(x).sum().backward()
    return watched


def test_a_fingerprint_is_of_ops_and_wires_not_of_sizes() -> None:
    small, large = transformer(1), transformer(1, width=64)
    first, second = run(small, tokens(2)).seen[0], run(large, tokens(4, 64)).seen[0]
    assert first == second
    assert run(transformer(2), tokens(2)).seen[0].fingerprint != first.fingerprint
    assert run(transformer(1, dropout=0.1), tokens(2)).seen[0].fingerprint != first.fingerprint


class Exponentials(nn.Module):
    """exp saves its own output, three times over."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp().sin().exp().sin().exp()


def test_what_is_made_again_is_not_saved_and_stands_right_before_its_reader() -> None:
    x = torch.ones(5, requires_grad=True)
    plain = run(Exponentials(), x)
    graph = plain.seen[0]
    assert {"exp", "exp_1"} < set(plain.saved)
    again = run(Exponentials(), x, {graph.fingerprint: frozenset({graph.numbers["exp_1"]})})
    assert again.matched == [graph.fingerprint]
    assert "exp_1" not in again.saved
    assert "sin" in again.saved  # what it is made from
    at = again.backward.index("exp_1")
    assert again.backward[at + 1] == "cos"  # of its result
    assert again.backward[:at] == plain.backward[:at]


def test_a_graph_without_a_script_is_split_as_pytorch_does() -> None:
    x = torch.ones(5, requires_grad=True)
    plain, other = run(Exponentials(), x), run(Exponentials(), x, {"0123456789ab": frozenset({1})})
    assert (plain.saved, plain.backward) == (other.saved, other.backward)
    assert other.unmatched == [plain.seen[0].fingerprint]
