"""A tensor whose memory leaves through numpy is changed where no dispatcher looks: nothing near it is replayed."""

from __future__ import annotations

import torch
from torch import nn

import holdover


class WritesThroughNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.a(x))
        hidden.detach().numpy()[:5] = 0.25
        later = torch.sigmoid(torch.sin(self.b(torch.sin(hidden))))
        return torch.tanh(self.b(later)) * later


def gradients(planned: bool) -> tuple[list[torch.Tensor | None], list[tuple[str, str, int]]]:
    torch.manual_seed(0)
    model, x = WritesThroughNumpy(), torch.randn(500, 8)
    choices: list[tuple[str, str, int]] = []
    if planned:
        plan = holdover.plan(model, (x,), budget="min")
        choices = [(choice.call, choice.op, choice.index) for choice in plan.choices]
        holdover.apply_(model, plan)
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()], choices


def test_what_numpy_wrote_to_is_neither_replayed_nor_replayed_from() -> None:
    plain, _ = gradients(planned=False)
    planned, choices = gradients(planned=True)
    assert choices, "ops away from the escaped tensor can still be recomputed"
    assert not [choice for choice in choices if choice[0] == "model/a"], "its input to tanh: fine, its output: escaped"
    places = {(call, op): index for call, op, index in choices}
    assert ("model", "aten.tanh.default") not in places or places["model", "aten.tanh.default"] > 0
    assert not [choice for choice in choices if choice[:2] == ("model", "aten.sin.default") and choice[2] < 3]
    for a, b in zip(plain, planned, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
