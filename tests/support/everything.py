"""A small model with all that makes cutting hard: tied weights, skips over stages, batch norm, dropout, a frozen layer,
a tensor without gradient and one of integers that cross, two inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, LENGTH, DROPOUT = 32, 16, 8, 0.2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2)
        return x + self.dropout(self.outer(functional.gelu(hidden)))


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.join = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.place.weight.requires_grad_(False)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        rounded = self.place(tokens % LENGTH).mul(3).round().long()  # integers made from weights, read at the end
        x = self.token(tokens) * scale[:, None, None]
        early = x = self.blocks[1](self.blocks[0](x))
        for block in self.blocks[2:5]:
            x = block(x) + 0.1 * early
        x = self.blocks[5](self.join(torch.cat([x, early], dim=-1)))
        return self.head(x) + rounded.float().mean(-1, keepdim=True)


def model() -> nn.Module:
    return Everything()


def batch(size: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    tokens = torch.randint(VOCABULARY, (size, LENGTH))
    return (tokens, 0.5 + torch.rand(size)), tokens.roll(1, 1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)
