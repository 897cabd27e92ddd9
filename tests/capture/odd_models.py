"""Small models that do what few do: state in buffers, checkpoints, masks. Each is the text of a model file."""

from __future__ import annotations

HEAD = """import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
"""

ROWS = """
def batch(size):
    return torch.randn(size, 8), torch.randint(4, (size,))
def loss(output, target):
    return F.cross_entropy(output, target)
"""

TOKENS = """
def batch(size):
    ids = torch.randint(1, 50, (size, 12))
    ids[:, -2:] = 0
    return ids, torch.randint(50, (size, 12))
def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
"""


def _block(text: str, *, before: str = "") -> str:
    """Two of a class ``Block`` among linear layers."""
    return f"""{HEAD}
{before}
class Block(nn.Module):
{text}
def model():
    return nn.Sequential(nn.Linear(8, 8), Block(), nn.ReLU(), nn.Linear(8, 8), Block(), nn.Linear(8, 4))
{ROWS}"""


def _encoder(given: str) -> str:
    return f"""{HEAD}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 4)
        self.head = nn.Linear(32, 50)
    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.encoder(self.embed(ids), {given}))
def model():
    return Net()
{TOKENS}"""


def _checkpointed(call: str) -> str:
    return _block(f"""
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)
        self.parts = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(4)))
    def inner(self, x):
        return x + self.drop(self.b(self.drop(self.a(x).relu())))
    def forward(self, x):
        return {call}
""")


ODD_MODELS: dict[str, str] = {
    "checkpoint": _checkpointed("self.parts(x) + checkpoint(self.inner, x, use_reentrant=False)"),
    "checkpoint_reentrant": _checkpointed("self.parts(x) + checkpoint(self.inner, x, use_reentrant=True)"),
    "checkpoint_sequential": _checkpointed(
        "self.inner(x) + checkpoint_sequential(self.parts, 2, x, use_reentrant=False)"
    ),
    "checkpoint_within_checkpoint": _checkpointed(
        "checkpoint(lambda x: self.parts(x) + checkpoint(self.inner, x, use_reentrant=False), x, use_reentrant=False)"
    ),
    "checkpoint_branch": _block(
        """
    def __init__(self):
        super().__init__()
        self.branch = Branch()
    def forward(self, x):
        return x + checkpoint(self.branch, x, use_reentrant=False)
""",
        before="""
class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)
    def forward(self, x):
        return self.drop(self.a(x)) if x.sum() < 1e9 else x
""",
    ),
    "counter": _block("""
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.a = nn.Linear(8, 8)
    def forward(self, x):
        self.seen += 1
        self.steps += 1
        return self.a(x) / self.seen + x * self.steps
"""),
    "counter_branch": _block("""
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(3))
        self.a = nn.Linear(8, 8)
    def forward(self, x):
        self.seen.add_(1)
        return self.a(x) / self.seen[1] if x.sum() < 1e9 else x
"""),
    "statistics": _block("""
    def __init__(self):
        super().__init__()
        self.register_buffer("stats", torch.ones(2, 8))
        self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
    def forward(self, x):
        with torch.no_grad():
            self.stats[0].mul_(0.9).add_(0.1 * x.mean(0))
            self.stats[1].mul_(0.9).add_(0.1 * x.var(0))
        return self.norm(self.a((x - self.stats[0]) * self.stats[1]))
"""),
    "assigned": _block(
        """
    def __init__(self):
        super().__init__()
        self.inner, self.b = Mean(), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(1))
    def forward(self, x):
        y = self.inner(x)
        self.inner.mean = self.inner.mean * 0.5 + 1
        self.seen = self.seen + y.detach().abs().mean()
        return self.b(y) + self.seen + self.inner.mean
""",
        before="""
class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("cache", None, persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.a = nn.Linear(8, 8)
    def forward(self, x):
        if self.cache is None:
            self.cache = torch.arange(8.0) / 8
        self.steps = self.steps + 1
        y = self.a(x) * self.cache
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y / self.mean * self.steps
""",
    ),
    "put_aside": _block("""
    def __init__(self):
        super().__init__()
        self.a, self.last, self.calls, self.seen = nn.Linear(8, 8), None, 0, []
    def forward(self, x):
        self.last, self.aside = self.a(x), x.detach()
        self.calls += 1
        self.seen.append(self.aside)
        return self.last + self.last.square().mean()
"""),
    "force": _block("""
    def __init__(self):
        super().__init__()
        self.energy, self.kept = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)), None
    def forward(self, x):
        self.kept = self.energy(x)
        (force,) = torch.autograd.grad(self.kept.sum(), x, create_graph=True)
        return x - 0.1 * force
"""),
    "reset_from_outside": _block(
        """
    def __init__(self):
        super().__init__()
        self.inner = Inner()
    def forward(self, x):
        self.inner.last = None
        return self.inner(x)
""",
        before="""
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.last = nn.Linear(8, 8), None
    def forward(self, x):
        x = self.a(x) if self.last is None else self.a(x) + self.last
        self.last = x
        return x if x.sum() < 1e9 else -x
""",
    ),
    "encoder_mask": _encoder("mask=mask"),
    "encoder_padding": _encoder("mask=mask, src_key_padding_mask=ids == 0"),
    "decoder_mask": f"""{HEAD}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.embed(ids)
        return self.head(self.transformer(x, x.flip(1), tgt_mask=mask, src_key_padding_mask=ids == 0))
def model():
    return Net()
{TOKENS}""",
    "complex": _block("""
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, dtype=torch.complex64), nn.Linear(8, 8, dtype=torch.complex64)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))
    def forward(self, x):
        return self.b(self.a(torch.complex(x, -x))).abs() + torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8)
"""),
    "vmap": _block("""
    def __init__(self):
        super().__init__()
        self.inner, self.weights = nn.Linear(8, 8), nn.Parameter(torch.randn(3, 8, 8) * 0.3)
    def forward(self, x):
        x = self.inner(x)
        return torch.func.vmap(lambda weight: torch.tanh(x @ weight))(self.weights).mean(0)
"""),
    "straight_through": _block("""
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(()))
    def forward(self, x):
        weight = self.a.weight
        self.scale.mul_(0.9).add_(weight.detach().abs().max() / 70)
        rounded = (weight / self.scale).round().clamp(-8, 7) * self.scale
        return F.linear(x, weight + (rounded - weight).detach(), self.a.bias)
"""),
    "norms_of_weights": _block("""
    def __init__(self):
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.b = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    def forward(self, x):
        return self.b(self.a(x).tanh())
"""),
    "codebook": _block("""
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        for name, value in {"code": torch.randn(6, 8), "sums": torch.randn(6, 8), "counts": torch.ones(6)}.items():
            self.register_buffer(name, value)
    def forward(self, x):
        x = self.a(x)
        nearest = torch.cdist(x, self.code).argmin(-1)
        chosen, ones = self.code[nearest], F.one_hot(nearest, 6).to(x.dtype)
        self.counts.mul_(0.9).add_(ones.sum(0), alpha=0.1)
        self.sums.mul_(0.9).add_(ones.T @ x.detach(), alpha=0.1)
        self.code.copy_(self.sums / (self.counts[:, None] + 1e-5))
        return x + (chosen - x).detach() + (x - chosen.detach()).square().mean()
"""),
    "noise": _block("""
    def __init__(self):
        super().__init__()
        self.a, self.time = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("share", torch.linspace(0.99, 0.1, 100))
    def forward(self, x):
        when = torch.randint(100, (x.shape[0],))
        share = self.share[when][:, None]
        noisy = share.sqrt() * x + (1 - share).sqrt() * torch.randn_like(x)
        keep = torch.empty(x.shape[0], 1).bernoulli_(0.8)
        return x + keep * self.a(noisy + self.time(torch.exp(-torch.arange(8.0)) * when[:, None]).sin())
"""),
    "decides_on_values": f"""{HEAD}
class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(4)])
    def forward(self, x, where):
        if where.lt(0).any():
            x = -x
        for block in self.blocks:
            if torch.rand(()) >= 0.0:
                x = x + block(x).relu()
        return x
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.stack, self.b = nn.Linear(8, 8), Stack(), nn.Linear(8, 4)
    def forward(self, x):
        if x.abs().max() > 1e9:
            raise ValueError("too large")
        x = self.stack(self.a(x), x.square())
        assert torch.isfinite(x).all()
        return self.b(x)
def model():
    return Net()
def batch(size):
    return torch.randn(size, 8), torch.randint(4, (size,))
def loss(output, target):
    assert (target >= 0).all()
    return F.cross_entropy(output, target, reduction="sum") / (target != -100).sum().item()
""",
    "decides_around_whole": f"""{HEAD}
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
    def forward(self, x, whole):
        y = self.a(x)
        if y.abs().max() < 0:
            y = y + 1
        return x + y if whole else x
class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
    def forward(self, x):
        whole = x.lt(9.0).all().item()
        for block in self.blocks:
            x = block(x, whole)
        return x
def model():
    return nn.Sequential(Stack(), nn.Linear(8, 4))
def batch(size):
    return torch.randn(size, 8), torch.randint(4, (size,))
loss = F.cross_entropy
""",
    "ctc": f"""{HEAD}
def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.LogSoftmax(-1))
def batch(size):
    return torch.randn(size, 20, 8), (torch.randint(1, 12, (size, 5)), torch.randint(2, 6, (size,)))
def loss(output, target):
    labels, lengths = target
    kept = labels.masked_select(torch.arange(5) < lengths[:, None])
    return F.ctc_loss(output.transpose(0, 1), kept, torch.full((output.shape[0],), 20), lengths)
""",
}
