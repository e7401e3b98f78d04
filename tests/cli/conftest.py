"""Run the `holdover` command as people do: as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

FACTORIES = '''
"""Models for the command line."""
import torch
from torch import nn

print("importing prints")

def make():
    print("so does building")
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 1))
    return model, (torch.randn(2048, 64),), {}, lambda output: output.square().mean()

def other():
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh()), (torch.randn(8, 64),)

def raises():
    raise KeyError("no such thing")

def exits():
    raise SystemExit(7)

def no_model():
    return 7

def bad_args():
    return nn.Linear(2, 2), torch.ones(2)

def no_loss():
    class Detached(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()
    return Detached(2, 2), (torch.ones(1, 2),)

def step_fails():
    return nn.Linear(2, 2), (torch.ones(1, 3),)

not_callable = 3
'''


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return path


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of timings for all commands of this session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(tmp_path: Path, cache: Path) -> Run:
    def run(*arguments: object, python: tuple[str, ...] = ("-m", "holdover")) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}
        done = subprocess.run(
            [sys.executable, *python, *map(str, arguments)],
            capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stdout + done.stderr
        return done

    return run
