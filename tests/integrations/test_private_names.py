"""The private PyTorch names under compiled plans do what it takes them to do."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from holdover.integrations import _torch as private


def test_every_name_is_there() -> None:
    missing = [name for name in private.__all__ if not hasattr(private, name)]
    assert not missing, f"PyTorch {torch.__version__} has moved what holdover.integrations._torch calls {missing}"


def split(model: nn.Module, x: torch.Tensor, choose: private.Choose) -> list[fx.GraphModule]:
    found: list[fx.GraphModule] = []

    def partition(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        with private.choosing(choose):
            found.extend(private.min_cut_rematerialization_partition(gm, inputs, **kwargs))
        return found[-2], found[-1]

    torch._dynamo.reset()
    torch.compile(model, backend=private.aot_autograd(fw_compiler=private.boxed_nop, partition_fn=partition))(x)
    return found


def test_the_partitioner_asks_once_what_to_save_and_takes_the_answer() -> None:
    asked: list[list[fx.Node]] = []

    def inputs_only(graph: fx.Graph, info: private.NodeInfo, stock: list[fx.Node]) -> list[fx.Node]:
        asked.append(stock)
        assert not info.tangents_closure.isdisjoint(graph.nodes)
        return [node for node in graph.nodes if node.op == "placeholder" and "primals" in node.name]

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    forward, backward = split(model, torch.ones(3, 4), inputs_only)
    assert len(asked) == 1, "PyTorch's partitioner no longer asks choose_saved_values_set, once per graph, what to save"
    assert sum("tanh.default" in str(n.target) for n in backward.graph.nodes) == 1, "its answer is not followed"
    assert any("tanh" in node.name for node in asked[0]), "PyTorch itself would save tanh's output here"
    assert forward.meta is not None


def test_the_question_is_put_back() -> None:
    from torch._functorch import partitioners

    before = partitioners.choose_saved_values_set
    with private.choosing(lambda graph, info, stock: stock):
        assert partitioners.choose_saved_values_set is not before
    assert partitioners.choose_saved_values_set is before


def test_compiling_in_place_leaves_its_mark_where_it_is_looked_for() -> None:
    model = nn.Linear(2, 2)
    assert private.compiled_call(model) is None
    model.compile()
    assert private.compiled_call(model) is not None
    assert private.is_optimized_module(torch.compile(nn.Linear(2, 2)))
    assert private.skipped_by_dynamo(nn.Sequential())
    assert not private.skipped_by_dynamo(type("Own", (nn.Module,), {"forward": lambda self, x: x})())


def test_what_fuses() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    add = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    product = graph.call_function(torch.ops.aten.mm.default, (add, add))
    assert private.fuses(add, add)
    assert not private.fuses(add, product)
