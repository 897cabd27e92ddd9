"""A small GPT: twelve decoder blocks that learn to write English from the bytes of a book.

The text (public domain) ships in the package planner.examples. A model file is plain PyTorch: it says what to train,
on what and how, and nothing about how the training is spread over devices.
"""

from collections.abc import Iterable, Iterator
from importlib.resources import files

import torch
from torch import Tensor, nn
from torch.nn import functional

TIED = False  # True: the head uses the embedding's weights

VOCABULARY = 256  # bytes
CONTEXT = 64
WIDTH = 128
HEADS = 4
BLOCKS = 12
DROPOUT = 0.1

global_batch = 32


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        split = self.qkv(x).view(samples, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(samples, length, WIDTH)))


class Block(nn.Module):
    """Attention and a feed-forward network, each with a norm before and a residual around it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(DROPOUT)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes in, the logits of each next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(self._initialise)
        if TIED:
            self.head.weight = self.token.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model() -> nn.Module:
    return GPT()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def _text() -> Tensor:
    book = (files("planner.examples") / "alice.txt").read_bytes()
    return torch.frombuffer(bytearray(book), dtype=torch.uint8).long()


def _windows(text: Tensor, size: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """``size`` stretches of the text from random places, and the same one byte on."""
    starts = torch.randint(len(text) - CONTEXT, (size, 1), generator=generator)
    tokens = text[starts + torch.arange(CONTEXT + 1)]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def batch(size: int) -> tuple[Tensor, Tensor]:
    return _windows(_text(), size)


def data(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    text, generator = _text(), torch.Generator().manual_seed(1865)
    while True:
        yield _windows(text, size, generator)
