"""The table of rules, held against what PyTorch itself says of its operators."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torchgen
import yaml
from tests.trace.target.cases import A100, H100_CUDA12, T4

from holdover.trace.target import Target, rules
from holdover.trace.target.composites import COMPOSITES, KERNELS

ROOT = Path(__file__).parent.parent.parent.parent
OPERATORS = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"


def test_the_cast_lists_name_the_ops_for_which_pytorch_has_casts_on_cuda() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    theirs = {
        n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::") and has_kernel(n, "AutocastCUDA")
    }
    ours = (
        *rules.LOWER_PRECISION, *rules.FLOAT32, *rules.FLOAT32_BY_DTYPE, *rules.FLOAT32_BY_OTHER_OVERLOAD,
        *rules.PROMOTE, *rules.REFUSED,
    )  # fmt: skip
    assert len(ours) == len(set(ours))
    assert {f"aten::{name}" for name in ours} == theirs - {"aten::_cudnn_rnn"}  # there in builds with cuDNN only


def test_ops_that_only_a_cuda_build_has_kernels_for_are_kept_whole() -> None:
    entries = yaml.load(OPERATORS.read_text(), yaml.CSafeLoader)
    tables = {e["func"].split("(")[0]: e.get("dispatch") or {} for e in entries}
    delegates = {e["func"].split("(")[0]: e.get("structured_delegate") for e in entries}

    def keys(name: str) -> set[str]:
        return {key.strip() for group in tables[name] for key in group.split(",")}

    split = {
        name
        for name in tables
        if "CompositeImplicitAutograd" in keys(name)
        and "CUDA" in keys(name) | (keys(delegates[name]) if delegates[name] else set())
    }
    assert split == set(KERNELS)


def test_each_rule_says_where_it_was_read() -> None:
    for rule in rules.RULES:
        assert re.search(r"\w+\.(cpp|cu|h|py|yaml) \w", rule.source), rule
    named = {name.strip() for rule in rules.RULES for name in rule.op.split(",")}
    for op in (*COMPOSITES, *KERNELS):
        name = op.partition(".")[0].removeprefix("_fused_").replace("_batch_norm_impl_index", "batch_norm")
        assert name in named or name == "to", f"{op} has no row in RULES"


def test_the_page_for_readers_has_the_same_rows() -> None:
    page = (ROOT / "docs" / "cuda-target.md").read_text()
    for rule in rules.RULES:
        assert f"| {rule.op} | {rule.does} | {rule.saves} | {rule.source} |" in page


def choice(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **changes: Any) -> bool:
    with torch.device("meta"):
        weight = torch.empty(shape[1], dtype=changes.pop("weight_dtype", dtype))
        arguments: dict[str, Any] = {
            "input": torch.empty(shape, dtype=dtype), "weight": weight, "bias": weight, "running_mean": weight,
            "running_var": weight, "training": True, "eps": 1e-5, "cudnn_enabled": True, "target": A100, **changes,
        }  # fmt: skip
    return rules.batch_norm_is_cudnn(**arguments)


def test_which_batch_norm() -> None:
    image = (4, 8, 6, 6)
    assert choice(image)
    assert choice((4, 8, 6))
    assert not choice((4, 8))
    assert not choice(image, torch.bfloat16)
    assert not choice(image, torch.bfloat16, weight_dtype=torch.float32)
    assert choice(image, torch.float16, weight_dtype=torch.float32)
    assert not choice(image, torch.float16)
    assert not choice(image, weight=None, bias=None)
    assert choice(image, running_mean=None, running_var=None)
    assert not choice(image, running_mean=None, running_var=None, training=False)
    assert not choice(image, cudnn_enabled=False)
    assert choice((70_000, 8, 1))
    assert not choice((70_000, 8, 1), training=False)
    assert not choice((2**15, 2**10, 2**6))
    assert not choice(image, target=Target("x", (8, 0), cudnn=0))


def test_which_recurrent_layers() -> None:
    def is_cudnn(dtype: torch.dtype, target: Target) -> bool:
        return rules.rnn_is_cudnn(torch.empty(2, 3, dtype=dtype, device="meta"), target)

    assert is_cudnn(torch.float32, T4)
    assert is_cudnn(torch.bfloat16, A100)
    assert not is_cudnn(torch.bfloat16, T4)
    assert not is_cudnn(torch.bfloat16, H100_CUDA12)
    with torch.backends.cudnn.flags(enabled=False):
        assert not is_cudnn(torch.float32, A100)
