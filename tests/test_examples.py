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


def test_the_pages_include_sections_that_exist() -> None:
    pages = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
    included = {match for page in pages for match in re.findall(r'--8<-- "(.+?):(.+?)"', page)}
    assert included
    for file, section in included:
        assert f"[start:{section}]" in (ROOT / file).read_text()
