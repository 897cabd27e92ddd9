from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass
class Out:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Attend(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.qkv, self.o = h, nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.head_scale = nn.Parameter(torch.ones(1, h, 1, 1))
        self.bias = nn.Embedding(32, h)

    def forward(self, x, *, rotary=None, prev=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        if rotary is not None:
            cos, sin = rotary
            q, k = (
                t * cos + torch.cat((-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]), -1) * sin for t in (q, k)
            )
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * (d // self.h) ** -0.5
        position = (torch.arange(n)[None] - torch.arange(n)[:, None]).clamp(-15, 15) + 16
        dots = dots + self.bias(position).permute(2, 0, 1)
        if prev is not None:
            dots = dots + prev
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        a = dots.masked_fill(mask, torch.finfo(dots.dtype).min).softmax(-1)
        return self.o(torch.einsum("bhij,bhjd->bhid", a, v).mul(self.head_scale).transpose(1, 2).reshape(b, n, d)), dots


class Glu(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.i, self.o = nn.Linear(d, 8 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        a, g = self.i(x).chunk(2, -1)
        return self.o(a * functional.silu(g))


class Net(nn.Module):
    def __init__(self, d=32, depth=5):
        super().__init__()
        self.e = nn.Embedding(50, d)
        self.memory = nn.Parameter(torch.randn(4, d))
        self.layers = nn.ModuleList(
            [nn.ModuleList([nn.LayerNorm(d), Attend(d, 4), nn.LayerNorm(d), Glu(d)]) for _ in range(depth)]
        )
        self.register_buffer("freq", 1e4 ** (-torch.arange(0, d // 4, 2) / (d // 4)), persistent=False)
        self.skip = nn.Linear(2 * d, d)

    def forward(self, ids, labels=None):
        x = self.e(ids)
        x = torch.cat((self.memory.expand(x.shape[0], -1, -1), x), 1)
        angle = torch.arange(x.shape[1])[:, None] * self.freq
        angle = torch.cat((angle, angle), -1)
        rotary, prev, kept = (angle.cos(), angle.sin()), None, []
        for number, (n1, attend, n2, glu) in enumerate(self.layers):
            if number < 2:
                kept.append(x)
            if number > 2:
                x = self.skip(torch.cat((x, kept.pop()), -1))
            y, prev = attend(n1(x), rotary=rotary, prev=prev)
            x = x + y
            y = glu(n2(x))
            y += x
            x = y
        logits = x[:, 4:] @ self.e.weight.t()
        return Out(
            logits, functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) if labels is not None else None
        )


def model():
    return Net()


def batch(size):
    ids = torch.randint(50, (size, 10))
    return {"ids": ids, "labels": ids}, None
