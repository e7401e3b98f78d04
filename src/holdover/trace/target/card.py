"""The device that a step is recorded for, where it is not the one at hand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A CUDA card by what decides which kernels PyTorch picks on it, and so what autograd saves.

    Attributes:
        name: for the reader ("h100-80gb").
        capability: compute capability, (9, 0) for an H100.
        cudnn: version of cuDNN as `torch.backends.cudnn.version()` gives it; 0 for none. PyTorch's wheels for CUDA 13
            bring 9.15.1 or later, which takes over attention on some cards; those for CUDA 12 bring earlier ones.

    >>> Target("a100-80gb", (8, 0)).capability
    (8, 0)
    """

    name: str
    capability: tuple[int, int]
    cudnn: int = 91900
