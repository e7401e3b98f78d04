"""Estimate, plan, apply and verify: an image classifier in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import nn

import holdover


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(192, 4, 768, activation="gelu", batch_first=True, norm_first=True)
        self.patches = nn.Conv2d(3, 192, 8, stride=8)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(192, 10)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.encoder(tokens).mean(1))


model = Vision()
images, labels = torch.randn(16, 3, 64, 64), torch.randint(10, (16,))


def loss(logits):
    return F.cross_entropy(logits, labels)


estimate = holdover.estimate(model, (images,), loss=loss, optimizer="adamw")
print(estimate)

plan = holdover.plan(model, (images,), loss=loss, optimizer="adamw", budget="70%")
print(plan)
plan.save("plan.json")

holdover.apply_(model, plan)  # in place; your training loop stays as it is
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss(model(images)).backward()
    optimizer.step()
    optimizer.zero_grad()
print(holdover.inspect(model))
holdover.remove_(model)

result = holdover.verify(model, (images,), loss=loss, optimizer="adamw", plan=plan)
print(result)
assert result.holds
