"""Tensors of a step in other shapes."""

from __future__ import annotations

import re

import pytest
import torch

from holdover.errors import TraceError
from holdover.trace.resize import with_shapes


def resized(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    (made,) = with_shapes((tensor,), torch.nn.Identity(), lambda _: shape)
    return made


def test_rows_are_repeated_in_turn() -> None:
    assert resized(torch.tensor([[1, 2], [3, 4]]), 5, 2).tolist() == [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2]]
    assert resized(torch.tensor([[1, 2], [3, 4]]), 1, 3).tolist() == [[1, 2, 1]]


def test_an_empty_dimension_may_stay_empty_or_others_become_so() -> None:
    assert resized(torch.ones(4, 0), 8, 0).shape == (8, 0)
    assert resized(torch.ones(4, 2), 0, 2).shape == (0, 2)
    assert resized(torch.ones(0, 2), 0, 5).shape == (0, 5)


def test_an_empty_dimension_cannot_grow() -> None:
    with pytest.raises(TraceError, match=re.escape("shape (0, 2) cannot be taken at (4, 2): dimension 0 is empty")):
        resized(torch.ones(0, 2), 4, 2)
