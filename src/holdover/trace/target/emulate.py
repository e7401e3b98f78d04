"""Everything a recording needs to run on a card that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from holdover.trace.target.card import Target
from holdover.trace.target.composites import rules_in_effect
from holdover.trace.target.pretend import pretending


@contextmanager
def emulated(target: Target, faker: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within, fake tensors on "cuda" behave as PyTorch makes tensors on this card behave.

    PyTorch's dispatcher and a few of its functions are changed for the whole process until the end; recording does
    this in a child process wherever one can be had.

    Args:
        faker: gives the fake tensor on the card for a real one.
    """
    with pretending(target, faker), rules_in_effect(target):
        yield
