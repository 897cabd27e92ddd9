import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    """One block six times, halting by a learned gate; weight-tied in and out; a GRU reader."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1)
        self.gate = nn.Linear(32, 1)
        self.gru = nn.GRU(32, 32, batch_first=True)

    def forward(self, ids):
        x = self.embed(ids)
        left = torch.ones_like(x[..., :1])
        total = torch.zeros_like(x)
        for _ in range(6):
            x = self.block(x)
            share = left * self.gate(x).sigmoid()
            total = total + share * x
            left = left - share
        y, _ = self.gru(total + left * x)
        return y @ self.embed.weight.T


def model():
    return Net()


def batch(size):
    ids = torch.randint(50, (size, 10))
    return ids, ids


def loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())
