"""A U-Net that finds discs in noisy pictures: its skips reach from the first layers to the last.

Four levels of two convolutions each on the way down, the same on the way up, where each level also reads what its
twin on the way down put out (Ronneberger, Fischer and Brox, 2015). Pictures and masks are made here.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTHS = (16, 32, 64, 128)
PIXELS = 64
DROPOUT = 0.1

global_batch = 16


class Convolutions(nn.Sequential):
    """Two convolutions, each with a norm and a ReLU; dropout at the end."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Dropout2d(DROPOUT),
        )


class Up(nn.Module):
    """Twice the size, then two convolutions over that and the twin's output."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(channels, width, 2, stride=2)
        self.convolutions = Convolutions(2 * width, width)

    def forward(self, x: Tensor, twin: Tensor) -> Tensor:
        return self.convolutions(torch.cat([twin, self.grow(x)], dim=1))


class UNet(nn.Module):
    """Pictures (n, 1, 64, 64) in, the logit of "disc" of each pixel out."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            Convolutions(channels, width) for channels, width in zip((1, *WIDTHS), WIDTHS, strict=False)
        )
        self.bottom = Convolutions(WIDTHS[-1], 2 * WIDTHS[-1])
        self.up = nn.ModuleList(Up(2 * width, width) for width in reversed(WIDTHS))
        self.head = nn.Conv2d(WIDTHS[0], 1, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        x, twins = pictures, []
        for level in self.down:
            x = level(x)
            twins.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for level in self.up:
            x = level(x, twins.pop())
        return self.head(x)


def model() -> nn.Module:
    return UNet()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(output, target)


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=2e-3)


def _discs(size: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """``size`` noisy pictures with three discs each, and the masks of the discs, both (size, 1, 64, 64)."""
    axis = torch.arange(PIXELS, dtype=torch.float32)
    centre = torch.rand(size, 3, 2, 1, 1, generator=generator) * PIXELS
    radius = torch.rand(size, 3, 1, 1, generator=generator) * 8 + 4
    square = (axis[:, None] - centre[:, :, 0]) ** 2 + (axis - centre[:, :, 1]) ** 2
    mask = (square < radius**2).any(dim=1, keepdim=True).float()
    noise = torch.randn(size, 1, PIXELS, PIXELS, generator=generator) * 0.5
    return mask + noise, mask


def batch(size: int) -> tuple[Tensor, Tensor]:
    return _discs(size)


def data(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2015)
    while True:
        yield _discs(size, generator)
