"""Recording a step as a CUDA card would run it, on a machine without one.

`card.py` says which card, `rules.py` what PyTorch does on it and where its source says so, `pretend.py` makes fake
tensors that pass for tensors on it; the other modules put rules into effect.
"""

from holdover.trace.target.card import Target

__all__ = ["Target"]
