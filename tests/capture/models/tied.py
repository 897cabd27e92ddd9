"""A decoder with tied embeddings, Conv1D-like layers (addmm), a mask in a buffer, rotary tables, dropout everywhere."""

import torch
from torch import nn
from torch.nn import functional

WIDTH, LENGTH, VOCABULARY = 16, 6, 29


class Affine(nn.Module):
    def __init__(self, n, m):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(n, m) * 0.2), nn.Parameter(torch.randn(m) * 0.1)

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = Affine(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k = (t * cos + t.roll(1, -1) * sin for t in (q, k))
        scores = (q @ k.transpose(1, 2) / 4).masked_fill(~self.mask, float("-inf"))
        mixed = functional.dropout(scores.softmax(-1), 0.1, self.training) @ v
        x = x + functional.dropout(mixed @ self.out.t(), 0.1, self.training)
        return x + functional.dropout(self.mlp(x), 0.2)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids):
        angle = torch.arange(LENGTH, dtype=torch.float32)[:, None] / torch.arange(1, WIDTH + 1)
        cos, sin = angle.cos(), angle.sin()
        x = self.token(ids)
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if index == 2:
                x = x + 0.1 * self.token(ids.flip(1))  # the tied weight in a third place
        return self.head(x)


def model():
    return Decoder()


def batch(size):
    ids = torch.randint(VOCABULARY, (size, LENGTH))
    return ids, ids  # one object twice


def loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())
