"""Several inputs by name (integers, booleans, None), a dataclass out, the loss inside, one module twice, LoRA."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class Output:
    loss: Tensor
    states: tuple
    unused: Tensor


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=index % 2 == 0)
            for index in range(3)
        )

    def forward(self, x, padding):
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(23, 16, padding_idx=0)
        self.encoder = Encoder()
        self.shared = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.low = nn.ModuleList([nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)])
        self.head = nn.Linear(16, 23)
        for parameter in self.head.parameters():
            parameter.requires_grad_(False)
        self.embed_side = nn.Linear(16, 16)
        self.unused_layer = nn.Linear(3, 3)

    def forward(self, source, target_ids, padding, labels, weights=None, side=None):
        if weights is not None:
            raise ValueError("weights are None here")
        memory = self.shared(self.encoder(self.embed(source), padding))
        h = self.shared(self.embed(target_ids)) + self.embed_side(side)[:, None]
        causal = torch.full((h.shape[1], h.shape[1]), float("-inf"))
        causal.triu_(1)
        for layer in self.decoder:
            h = layer(h, memory, tgt_mask=causal, memory_key_padding_mask=padding)
        h = h + self.low[1](self.low[0](h))
        logits = self.head(h)
        kept = labels.masked_fill(target_ids == 3, -100)
        value = functional.cross_entropy(logits.flatten(0, 1), kept.flatten())
        return Output(loss=value, states=(memory, h), unused=logits.argmax(-1))


def model():
    return Model()


def batch(size):
    source = torch.randint(1, 23, (size, 7))
    padding = torch.zeros(size, 7, dtype=torch.bool)
    padding[:, 5:] = True
    ids = torch.randint(1, 23, (size, 5))
    labels = torch.randint(4, 23, (size, 5))
    inputs = {
        "source": source,
        "target_ids": ids,
        "padding": padding,
        "labels": labels,
        "weights": None,
        "side": torch.randn(size, 16),
    }
    return inputs, None
