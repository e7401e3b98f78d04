"""Everything a recording needs to run on a card that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdover.trace.fake import Faker
from holdover.trace.target import packed
from holdover.trace.target.card import Target
from holdover.trace.target.composites import rules_in_effect
from holdover.trace.target.kernels import FAKE_KERNELS
from holdover.trace.target.pretend import CARD, CardFakeMode, pretending


def card_faker() -> Faker:
    """Makes fake tensors on the card of all but what stays on the CPU."""
    mode = CardFakeMode(FAKE_KERNELS)
    faker = Faker(CARD, mode)
    mode.kernels = FAKE_KERNELS | packed.fake_kernels(faker.known)
    return faker


@contextmanager
def emulated(target: Target, faker: Faker) -> Iterator[None]:
    """Within, fake tensors on "cuda" behave as PyTorch makes tensors on this card behave.

    PyTorch's dispatcher and a few of its functions are changed for the whole process until the end; recording does
    this in a child process wherever one can be had.

    Args:
        faker: from `card_faker`.
    """
    with pretending(target, faker), rules_in_effect(target, faker.known):
        yield
