"""Which model is it? A plan is only for the model it was made for, whatever its batch size."""

from __future__ import annotations

import hashlib

import torch


def fingerprint(model: torch.nn.Module) -> str:
    """A short hash of module names and classes and of parameter names, shapes and trainability.

    The batch, the device and the values do not enter, so a plan made on `meta` fits the real model.

    >>> import torch
    >>> fingerprint(torch.nn.Linear(2, 3)) == fingerprint(torch.nn.Linear(2, 3, device="meta"))
    True
    >>> fingerprint(torch.nn.Linear(2, 3)) == fingerprint(torch.nn.Linear(3, 2))
    False
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"{name}:{type(module).__qualname__}\n".encode())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape = () if torch.nn.parameter.is_lazy(parameter) else tuple(parameter.shape)
        digest.update(f"{name}:{shape}:{parameter.requires_grad}\n".encode())
    return digest.hexdigest()[:16]
