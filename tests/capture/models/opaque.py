"""What an export cannot take or would change: lost backwards, branches, Python's random numbers, sizes."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Tripled(torch.autograd.Function):
    """Its backward is not that of its forward, so that a lost one shows."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return 3 * gradient * weight, (3 * gradient * x).sum((0, 1))


apply_stored = Tripled.apply


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return apply_stored(x, self.weight)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        share = x.sigmoid()
        return gradient * (share + x * share * (1 - share))


class Activation(nn.Module):
    def forward(self, x):
        return Swish.apply(x)


class Branch(nn.Module):
    """A branch on a value, batch norm and dropout inside, a buffer assigned anew."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return functional.dropout(self.up(y), 0.2) if y[:, 0].sum() > 0 else self.down(y)


@dataclass
class Routed:
    hidden: Tensor
    load: Tensor
    experts: int


class Experts(nn.Module):
    """Every expert takes the tokens that are its own: sizes hang on the values. Keywords in, a dataclass out."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, *, scale):
        shares = self.gate(x).softmax(-1)
        best, index = shares.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            where = torch.where(index == number)
            if len(where[0]):
                out[where] = expert(x[where]) * best[where][:, None] * scale["by"]
        return Routed(hidden=out, load=shares.mean((0, 1)), experts=3)


class Dropped(nn.Module):
    """Skips its layer by Python's random numbers; holds modules that would be kept whole themselves."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), Activation(), nn.Dropout(0.1))

    def forward(self, x):
        return x if random.random() < 0.5 else x + self.inner(x)


class InPlace(nn.Module):
    """Changes what it is given, and gives it back beside something else."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        if x.abs().max() > 100:
            return x, x
        x.mul_(self.weight)
        return x, x.sum(-1, keepdim=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(WIDTH), Scale()
        self.first, self.act, self.second = nn.Linear(WIDTH, 16), Activation(), nn.Linear(16, WIDTH)

    def forward(self, x):
        x = x + self.scale(self.norm(x))
        return x + functional.dropout(self.second(self.act(self.first(x))), 0.1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.branch, self.experts, self.dropped, self.place = Branch(), Experts(), Dropped(), InPlace()
        self.kept = nn.Linear(WIDTH, WIDTH)
        self.rewound = Rewound()
        self.branch.register_forward_hook(lambda module, given, output: output * 1.5)
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.branch(x) + self.branch(self.kept(x))
        routed = self.experts(x, scale={"by": 0.5 * x.detach().abs().mean()})
        x = x + routed.hidden
        x = self.dropped(self.dropped(x))
        y, total = self.place(x * 2)
        x = self.rewound(y + total, {"residual": x})
        return {"logits": self.head(x), "load": (routed.load * routed.experts).square().sum()}


class Rewound(nn.Module):
    """A checkpoint of the kind that runs backward within backward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))

    def forward(self, x, beside):
        return checkpoint(self.inner, x, use_reentrant=True) + beside["residual"]


def model():
    return Net()


def batch(size):
    return torch.randint(20, (size, 6)), torch.randint(20, (size, 6))


def loss(output, target):
    return functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten()) + 0.01 * output["load"]


leaves = ["kept"]
