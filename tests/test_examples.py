"""The documentation's examples are files, and they run; so do those in docstrings."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SOURCES = ROOT / "src"
MODULES = sorted(
    ".".join(path.relative_to(SOURCES).with_suffix("").parts)
    for path in SOURCES.rglob("*.py")
    if ">>>" in path.read_text()
)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("name", MODULES)
def test_the_docstrings_of_a_module_hold(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed


def test_the_pages_show_what_the_examples_run() -> None:
    """Pages are read as plain Markdown too, so the code stands in them; every line of it is a line of the example."""
    for name in ("quickstart", "compile"):
        lines = {line.strip() for line in (ROOT / "examples" / f"{name}.py").read_text().splitlines()}
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), re.DOTALL)
        assert len(blocks) >= 2
        shown = [line for block in blocks[: 5 if name == "quickstart" else 2] for line in block.splitlines()]
        assert [line for line in shown if line.strip() not in lines] == []
