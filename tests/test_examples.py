"""The documentation's examples are files, and they run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_pages_show_what_the_examples_run() -> None:
    """Pages are read as plain Markdown too, so the code stands in them; every line of it is a line of the example."""
    for name in ("quickstart", "compile"):
        lines = {line.strip() for line in (ROOT / "examples" / f"{name}.py").read_text().splitlines()}
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), re.DOTALL)
        assert len(blocks) >= 2
        shown = [line for block in blocks[: 5 if name == "quickstart" else 2] for line in block.splitlines()]
        assert [line for line in shown if line.strip() not in lines] == []
