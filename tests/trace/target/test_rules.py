"""The table of rules, held against what PyTorch itself says of its operators."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torchgen
import yaml

from holdover.trace.target import rules
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
