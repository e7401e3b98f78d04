"""The recorder and the closed form agree tensor by tensor, on one CPU, for GPT and Llama at several sizes.

Where CPU differs from CUDA, the kernels' description says so: dropout keeps noise in the activation's dtype instead of
a bool mask (`mask_bytes`), and LayerNorm its statistics in that dtype instead of fp32 (`statistic_bytes`).
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.closed_form.models import Gpt, Llama
from torch import nn
from torch.nn import functional as F

from holdover.closed_form.architecture import Architecture, Kernels
from holdover.closed_form.layers import first_end, last_end, layer, rotary_tables
from holdover.closed_form.layout import Layout
from holdover.closed_form.tensors import Layer
from holdover.trace.graph import Category
from holdover.trace.record import record

Saved = dict[str, int]


def recorded(model: nn.Module, batch: int, sequence: int) -> Saved:
    """Bytes of every storage that autograd keeps, by who made it: "blocks.0.norm1:native_layer_norm 0"."""
    with torch.device("meta"):
        ids, targets = (torch.zeros(batch, sequence, dtype=torch.int64) for _ in range(2))
    trace = record(model, (ids, targets))
    assert trace.recorded_on == "fake"
    kept = {trace.values[slot.value].storage for slot in trace.slots}
    made: dict[int, int] = {}
    for value in trace.values:
        made.setdefault(value.storage, value.maker)
    saved: Saved = {}
    count: Counter[str] = Counter()
    for storage in sorted(made, key=lambda number: (made[number], number)):
        place = trace.storages[storage]
        if place.category is Category.PARAMETER:
            continue
        name = place.name
        if made[storage] >= 0:
            op = trace.ops[made[storage]]
            maker = f"{trace.calls[op.call].path}:{op.name.split('.')[1]}"
            name = f"{maker} {count[maker]}"
            count[maker] += 1
        if storage in kept:
            saved[name] = place.nbytes
    return saved


def listed(of: Layer, architecture: Architecture, kernels: Kernels, batch: int, sequence: int) -> Saved:
    values = Layout(micro_batch=batch, sequence=sequence).values(architecture)
    return {value.name: value.bytes.at(values) * batch * sequence for value in of.stored}


def gpt_names(block: int, *, eager: bool, dropout: bool, folds: bool) -> dict[str, str]:
    """Who makes each of a GPT block's listed tensors; several makers' bytes are added.

    `folds`: one sequence's heads fold into a batched product as a view, so that the projections themselves are kept.
    """
    at = f"blocks.{block}"
    before = f"blocks.{block - 1}:add 1" if block else ("dropout:mul 0" if dropout else ":add 0")
    names = {
        before: "layer input",
        f"{at}.norm1:native_layer_norm 0": "attention norm output",
        f"{at}.norm1:native_layer_norm 1": "attention norm statistics",
        f"{at}.norm1:native_layer_norm 2": "attention norm statistics",
        f"{at}:add 0": "attention residual",
        f"{at}.norm2:native_layer_norm 0": "MLP norm output",
        f"{at}.norm2:native_layer_norm 1": "MLP norm statistics",
        f"{at}.norm2:native_layer_norm 2": "MLP norm statistics",
        f"{at}.up:addmm 0": "MLP pre-activation",
        f"{at}.act:gelu 0": "MLP activation",
    }
    if dropout:
        names |= {
            f"{at}.dropout1:empty_like 0": "attention dropout mask",
            f"{at}.dropout2:empty_like 0": "MLP dropout mask",
        }
    projections = ("projected query", "projected key", "value")
    if eager and not folds:
        names |= {f"{at}.attention:clone {place}": name for place, name in enumerate(projections)}
    else:
        names |= {f"{at}.{name.split()[-1]}:addmm 0": name for name in projections}
    if eager:
        names |= {
            f"{at}.attention:_softmax 0": "softmax output",
            f"{at}:clone 0": "attention output",
        }
        if dropout:
            names |= {
                f"{at}.attention.dropout:empty_like 0": "softmax dropout mask",
                f"{at}.attention.dropout:mul 0": "softmax dropout output",
            }
    else:
        flash = f"{at}.attention:_scaled_dot_product_flash_attention_for_cpu"
        names |= {
            f"{flash} 0": "attention output",
            f"{flash} 1": "log-sum-exp",
        }
    return names


def llama_names(block: int, *, expand: bool, wide: bool) -> dict[str, str]:
    """Who makes each of a Llama block's listed tensors. `wide`: fp32, in which the upcast of a norm copies nothing."""
    at = f"blocks.{block}"
    flash = f"{at}.attention:_scaled_dot_product_flash_attention_for_cpu"
    names = {
        f"{flash} 0": "attention output",
        f"{flash} 1": "log-sum-exp",
        f"{at}.gate:mm 0": "MLP gate",
        f"{at}.up:mm 0": "MLP up",
        f"{at}.act:silu 0": "MLP activated gate",
        f"{at}:mul 4": "MLP product",
        f"{at}:add 0": "query",
    }
    names |= (
        {f"{at}.attention:clone 0": "expanded key", f"{at}.attention:clone 1": "expanded value"}
        if expand
        else {f"{at}:add 1": "key", f"{at}.value:mm 0": "value"}
    )
    if wide:
        before = f"blocks.{block - 1}:add 3" if block else "tokens:embedding 0"
        names |= {before: "layer input", f"{at}:add 2": "attention residual"}
    for module, norm in (("norm1", "attention norm"), ("norm2", "MLP norm")):
        names |= {
            f"{at}.{module}:rsqrt 0": f"{norm} statistics",
            f"{at}.{module}:mul {0 if wide else 1}": f"{norm} scaled" if wide else f"{norm} output",
        }
        names |= (
            {f"{at}.{module}:mul 1": f"{norm} output"}
            if wide
            else {f"{at}.{module}:_to_copy 0": f"{norm} input, fp32", f"{at}.{module}:_to_copy 1": f"{norm} scaled"}
        )
    return names


def take(saved: Saved, names: dict[str, str]) -> Saved:
    """Move the named storages out of `saved`, under the closed form's names."""
    taken: Saved = {}
    for maker, name in names.items():
        assert maker in saved, f"{maker} ({name}) is not kept; kept are {sorted(saved)}"
        taken[name] = taken.get(name, 0) + saved.pop(maker)
    return taken


SIZES = [
    pytest.param(1, 16, 32, 4, 4, 2, id="small"),
    pytest.param(2, 64, 128, 4, 2, 2, id="even"),
    pytest.param(3, 40, 96, 6, 2, 3, id="odd"),
    pytest.param(2, 512, 1024, 16, 4, 2, id="larger"),
]
DTYPES = {torch.float32: 4, torch.bfloat16: 2}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "fused"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "sequence", "hidden", "heads", "kv_heads", "layers"), SIZES)
def test_gpt(
    batch: int, sequence: int, hidden: int, heads: int, kv_heads: int, layers: int, dtype: torch.dtype, eager: bool,
    dropout: float,
) -> None:  # fmt: skip
    shape = Architecture(
        name="gpt", layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocab=320, sequence=sequence,
        norm="layernorm", activation="gelu", rotary=False, tied=True,
        hidden_dropout=dropout > 0, attention_dropout=dropout > 0,
    )  # fmt: skip
    size = DTYPES[dtype]
    kernels = Kernels(
        attention="eager" if eager else "fused", element_bytes=size, mask_bytes=size, statistic_bytes=size, loss="eager"
    )  # type: ignore[arg-type]
    with torch.device("meta"):
        model = Gpt(shape, eager=eager, dropout=dropout).to(dtype)
    saved = recorded(model, batch, sequence)
    for block in range(layers):
        names = gpt_names(block, eager=eager, dropout=dropout > 0, folds=batch == 1)
        assert take(saved, names) == listed(layer(shape, kernels), shape, kernels, batch, sequence)
    first = {"input 0": "token ids", ":arange 0": "position ids"}
    if dropout:
        first["dropout:empty_like 0"] = "embedding dropout mask"
    assert take(saved, first) == listed(first_end(shape, kernels), shape, kernels, batch, sequence)
    last = {
        f"blocks.{layers - 1}:add 1": "layer input",
        "norm:native_layer_norm 0": "final norm output",
        "norm:native_layer_norm 1": "final norm statistics",
        "norm:native_layer_norm 2": "final norm statistics",
        ":_log_softmax 0": "log-softmax of the logits",
        "input 1": "target ids",
    }
    assert take(saved, last) == listed(last_end(shape, kernels), shape, kernels, batch, sequence)
    # One scalar, the number of targets that count, is all that the lists leave out.
    assert saved == {":nll_loss_forward 1": 4}


@pytest.mark.parametrize("expand", [False, True], ids=["grouped", "expanded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "sequence", "hidden", "heads", "kv_heads", "layers"), SIZES)
def test_llama(
    batch: int, sequence: int, hidden: int, heads: int, kv_heads: int, layers: int, dtype: torch.dtype, expand: bool
) -> None:
    expand = expand and kv_heads < heads
    shape = Architecture(
        name="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=3 * hidden, vocab=320,
        sequence=sequence,
    )  # fmt: skip
    size = DTYPES[dtype]
    kernels = Kernels(norm="eager", gated="eager", expand_kv=expand, element_bytes=size, loss="eager")  # type: ignore[arg-type]
    with torch.device("meta"):
        model = Llama(shape, expand=expand).to(dtype)
    saved = recorded(model, batch, sequence)
    wide = size == 4
    for block in range(layers):
        names = llama_names(block, expand=expand, wide=wide)
        assert take(saved, names) == listed(layer(shape, kernels), shape, kernels, batch, sequence)
    assert take(saved, {"input 0": "token ids"}) == listed(first_end(shape, kernels), shape, kernels, batch, sequence)
    values = Layout(micro_batch=batch, sequence=sequence).values(shape)
    tables = [maker for maker in (":cos 0", ":sin 0", ":_to_copy 0", ":_to_copy 1") if maker in saved]
    assert sum(saved.pop(maker) for maker in tables) == rotary_tables(shape, kernels).at(values) * batch * sequence
    last = {
        "norm:rsqrt 0": "final norm statistics",
        ":_log_softmax 0": "log-softmax of the logits",
        "input 1": "target ids",
        "norm:mul 1": "final norm output",
    }
    last |= (
        {f"blocks.{layers - 1}:add 3": "layer input", "norm:mul 0": "final norm scaled"}
        if wide
        else {"norm:_to_copy 0": "final norm input, fp32", "norm:_to_copy 1": "final norm scaled"}
    )
    assert take(saved, last) == listed(last_end(shape, kernels), shape, kernels, batch, sequence)
    assert saved == {":nll_loss_forward 1": 4}


class Normed(nn.Module):
    """An embedding, PyTorch's own RMSNorm, a head: what `last_end` lists but for the loss."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(shape.vocab, shape.hidden), nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.tokens(ids)))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pytorchs_own_rms_norm_is_composite_on_cpu(dtype: torch.dtype) -> None:
    """Two fp32 copies and the output, where CUDA's kernel keeps its input alone."""
    shape = Architecture(name="x", layers=1, hidden=64, heads=4, ffn=96, vocab=320, sequence=32)
    wide = dtype == torch.float32
    kernels = Kernels(norm="composite", element_bytes=DTYPES[dtype], loss="eager")  # type: ignore[arg-type]
    with torch.device("meta"):
        model = Normed(shape).to(dtype)
    saved = recorded(model, 2, 32)
    names = {"norm:rsqrt 0": "final norm statistics", "norm:mul 0": "final norm scaled"}
    names |= (
        {"tokens:embedding 0": "layer input", "norm:mul 1": "final norm output"}
        if wide
        else {"norm:_to_copy 0": "final norm input, fp32", "norm:_to_copy 1": "final norm output"}
    )
    names |= {":_log_softmax 0": "log-softmax of the logits", "input 1": "target ids"}
    assert take(saved, names) == listed(last_end(shape, kernels), shape, kernels, 2, 32)
    assert saved == {"input 0": 2 * 32 * 8, ":nll_loss_forward 1": 4}
