"""VGG-16: sixteen layers with weights, classifying small pictures of coloured gratings.

The layers are those of configuration D of Simonyan and Zisserman (2014); pictures are 32 x 32, so the first linear
layer reads 512 numbers. The four classes differ in the colour, direction and width of their stripes; the pictures are
made here.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTHS = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512, "pool")
PIXELS = 32
CLASSES = 4
HIDDEN = 4096

global_batch = 16


class VGG16(nn.Module):
    """Thirteen convolutions, three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in WIDTHS:
            if isinstance(width, str):
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
        self.features = nn.Sequential(*layers)
        last = nn.Linear(HIDDEN, CLASSES)
        self.classifier = nn.Sequential(
            nn.Linear(channels, HIDDEN),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Dropout(),
            last,
        )
        self.apply(self._initialise)
        nn.init.normal_(last.weight, std=0.01)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.classifier(self.features(pictures).flatten(1))


def model() -> nn.Module:
    return VGG16()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=5e-5)


def _gratings(size: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """``size`` pictures (size, 3, 32, 32), and which of four kinds of stripes each one shows."""
    kind = torch.randint(CLASSES, (size,), generator=generator)
    angle = kind * (math.pi / CLASSES)
    pitch = torch.where(kind % 2 == 0, 4.0, 9.0)
    shift = torch.rand(size, generator=generator) * 2 * math.pi
    axis = torch.arange(PIXELS, dtype=torch.float32)
    along = torch.cos(angle)[:, None, None] * axis[:, None] + torch.sin(angle)[:, None, None] * axis
    stripes = torch.sin(2 * math.pi * along / pitch[:, None, None] + shift[:, None, None])
    hue = kind[:, None] * (2 * math.pi / CLASSES) + torch.arange(3) * (2 * math.pi / 3)
    noise = torch.randn(size, 3, PIXELS, PIXELS, generator=generator) * 0.2
    return (stripes[:, None] + 1.5) * torch.cos(hue)[:, :, None, None] + noise, kind


def batch(size: int) -> tuple[Tensor, Tensor]:
    return _gratings(size)


def data(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2014)
    while True:
        yield _gratings(size, generator)
