"""What all tests share: one thread (the machine's cores belong to the parallel workers) and a fixed seed."""

from __future__ import annotations

import random

import pytest
import torch


def pytest_configure() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(20260101)
    random.seed(20260101)
