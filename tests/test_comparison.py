"""Differences are found to the last bit, and described."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from holdover.comparison import compare, flatten, unlike


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0, float("nan")]),
        lambda: torch.ones(2, 3).t(),
        lambda: torch.ones(3, dtype=torch.bfloat16),
        lambda: torch.tensor([True, False]),
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        lambda: torch.ones(0, 3),
        lambda: torch.tensor(5),
        lambda: torch.sparse_coo_tensor(torch.tensor([[1, 0]]), torch.ones(2), (3,)),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: None,
        lambda: "text",
    ],
)
def test_equal_things_are_alike(make: Any) -> None:
    assert unlike(make(), make()) is None


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (torch.zeros(2), torch.tensor([0.0, -0.0]), (1, 0.0, "1 of 2 elements differ, the largest difference is 0")),
        (torch.ones(4), torch.full((4,), 3.0), (4, 2.0, "4 of 4 elements differ, the largest difference is 2")),
        (torch.ones(2), torch.ones(3), (0, math.nan, "shape torch.Size([3]) instead of torch.Size([2])")),
        (torch.ones(2), torch.ones(2).double(), (0, math.nan, "dtype torch.float64 instead of torch.float32")),
        (torch.ones(2), None, (0, math.nan, "None instead of a tensor")),
        (3, 3.0, (0, math.nan, "3.0 instead of 3")),
        (torch.tensor([True]), torch.tensor([False]), (1, 1.0, "1 of 1 elements differ, the largest difference is 1")),
    ],
)
def test_differences_are_described(a: Any, b: Any, said: tuple[int, float, str]) -> None:
    count, largest, text = unlike(a, b) or (0, 0.0, "")
    assert (count, text) == (said[0], said[2])
    assert largest == said[1] or (math.isnan(largest) and math.isnan(said[1]))


def test_a_last_bit_is_seen() -> None:
    a = torch.ones(1000)
    b = a.clone()
    b[7] = torch.nextafter(b[7], torch.tensor(2.0))
    assert (unlike(a, b) or (0,))[0] == 1


def test_containers_are_flattened_with_the_way_to_each_item() -> None:
    output = {"logits": torch.ones(1), "rest": [torch.zeros(1), (2, object())]}
    names = [name for name, _, _ in flatten("output", output)]
    assert names == ["output['logits']", "output['rest'][0]", "output['rest'][1][0]", "output['rest'][1][1]"]


def test_a_difference_names_tensor_and_module() -> None:
    (difference,) = compare("gradient", [("a.w", "a", torch.ones(2))], [("a.w", "a", torch.zeros(2))])
    assert str(difference) == ("gradient 'a.w' of module 'a': 2 of 2 elements differ, the largest difference is 1")


def test_another_structure_is_one_difference() -> None:
    (difference,) = compare("output", [("o[0]", "", 1)], [("o[0]", "", 1), ("o[1]", "", 2)])
    assert str(difference) == "output 'o[1]': there are 2 outputs instead of 1"
