"""Plan for compiled code: each block of a small GPT compiled by itself, within a budget for the whole step's peak."""

import torch
import torch.nn.functional as F
from torch import nn

import holdover


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width=128, blocks=6):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = GPT()
ids = torch.randint(256, (8, 128))


def loss(logits):
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


for block in model.blocks:  # as with plain torch.compile: six equal blocks are compiled once or twice
    block.compile()

plan = holdover.plan(model, (ids,), loss=loss, budget="50%", compiled="aot_eager")  # compiled=True for Inductor
print(plan)

holdover.apply_(model, plan)  # compiles the blocks again, by a backend that follows the plan
loss(model(ids)).backward()
