"""Estimates: published figures, what was measured here, counts that can be made by hand."""

from __future__ import annotations

import importlib.util
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from planner.capture import Capture, capture, load_model_file
from planner.cluster import DEVICE_MEMORY_BYTES
from planner.errors import InputError
from planner.measure import Asked
from planner.measure.clock import CpuClock, time_calls
from planner.measure.estimate import estimate_layers, estimate_profile
from planner.measure.roofline import ROOFS, STREAM, Estimator, Roof, known_device
from planner.measure.timing import Timed
from tests.measure.test_profiler import EXAMPLES, _copy, _measured

DECODER = """
import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, LAYERS, TOKENS, WORDS = {width}, {heads}, {layers}, 2048, 50304

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.after(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

def model():
    return Net().to(torch.bfloat16)

def batch(size):
    ids = torch.randint(WORDS, (size, TOKENS))
    return ids, ids

def loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())
"""


def _total(timed: Timed) -> float:
    return sum(one.forward + one.backward_input + one.backward_weight for one in timed.layers)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """About GPT-3 7B, in bfloat16, 4 samples of 2048 tokens."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("decoder") / "decoder.py"
    path.write_text(DECODER.format(width=4096, heads=32, layers=32))
    return capture(load_model_file(path), microbatch_size=4, weightless=True)


@pytest.mark.parametrize(
    ("device", "least", "most"),
    [
        ("a100-80gb", 0.45, 0.65),  # MosaicML's llm-foundry, 7B on A100: 0.55 to 0.60; Megatron-LM: 0.44 to 0.57
        ("h100-sxm", 0.40, 0.60),  # the same on H100: 0.45 to 0.50; Llama 3: 0.38 to 0.43 with all its communication
        ("mi300x", 0.25, 0.50),  # AMD's and others' figures: 0.3 to 0.45
    ],
)
def test_the_part_of_the_peak_that_training_reaches_is_as_published(
    decoder: Capture, device: str, least: float, most: float
) -> None:
    """Model FLOPs as PaLM counts them: 6 per parameter and token, and attention's 12 · layers · width · tokens."""
    timed, _ = estimate_layers(decoder, ROOFS[device])
    parameters = sum(p.numel() for name, p in decoder.module.named_parameters() if name != "words.weight")
    flops = 4 * 2048 * (6 * parameters + 12 * 32 * 4096 * 2048)
    assert least < flops / _total(timed) / ROOFS[device].half < most
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e6, "weights were held"


def test_a_backward_takes_about_twice_a_forward(decoder: Capture) -> None:
    timed, _ = estimate_layers(decoder, ROOFS["h100-sxm"])
    block = timed.layers[1]
    assert 1.8 < (block.backward_input + block.backward_weight) / block.forward < 2.5
    assert len({one.forward for one in timed.layers[1:-2]}) == 1


@pytest.mark.slow
def test_bytes_are_those_of_a_model_with_weights(tmp_path: Path) -> None:
    """Held bytes by fake tensors are those by real ones."""
    path = _copy("gpt", tmp_path)
    whole = _measured(path, (2,)).profile
    captured = capture(load_model_file(path), microbatch_size=2, weightless=True)
    _, held = estimate_layers(captured, ROOFS["a100-80gb"])
    for one, layer in zip(held, whole.layers, strict=True):
        assert one.saved_for_weight == layer.costs[0].saved_for_weight_bytes
        assert one.workspace == pytest.approx(layer.costs[0].workspace_bytes, rel=0.1, abs=2**16)


ROOF = Roof(half=8e12, single=1e12, convolution=2e12, memory=1e9, units=1, link=1, product=1, has_bfloat16=True)


def test_seconds_of_single_kernels_by_hand() -> None:
    bare = Roof(**{name: getattr(ROOF, name) for name in ROOF.__slots__} | {"launch_s": 0.0})
    x, y = torch.ones(512, 256), torch.ones(256, 128)
    with Estimator(bare) as estimator:
        x @ y
        assert estimator.taken() == pytest.approx((512 * 256 + 256 * 128 + 512 * 128) * 4 / (1e9 * STREAM))
        assert estimator.flops == 2 * 512 * 256 * 128
        torch.relu(x)
        assert estimator.taken() == pytest.approx(2 * 512 * 256 * 4 / (1e9 * STREAM))
        x.t().expand(3, 256, 512)[1].detach()
        torch.empty(10)
        assert estimator.taken() == 0
        x.add_(1)
        assert estimator.taken() == pytest.approx(2 * 512 * 256 * 4 / (1e9 * STREAM))
    fast = Roof(**{name: getattr(bare, name) for name in ROOF.__slots__} | {"memory": 1e18})
    with Estimator(fast) as estimator:
        x @ y
        assert estimator.taken() == pytest.approx(2 * 512 * 256 * 128 / 1e12)
        x.bfloat16() @ y.bfloat16()
        assert estimator.taken() == pytest.approx(2 * 512 * 256 * 128 / 8e12, rel=1e-3)
        nn.functional.conv2d(torch.ones(1, 8, 16, 16), torch.ones(8, 8, 3, 3), padding=1)
        assert estimator.taken() == pytest.approx(2 * 8 * 8 * 9 * 256 / (2e12 * 0.8), rel=1e-3)


def test_every_device_of_a_cluster_file_can_be_estimated() -> None:
    assert ROOFS.keys() == DEVICE_MEMORY_BYTES.keys()
    assert known_device("A100") == "a100-80gb"
    assert known_device("H100 SXM") == "h100-sxm"
    with pytest.raises(InputError, match="no known device"):
        known_device("abacus")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_layers_rank_as_they_are_measured_here(name: str, tmp_path: Path) -> None:
    """With this CPU's own roof, found by a product and a copy, layers rank about as they do when timed."""
    torch.set_num_threads(1)
    path = _copy(name, tmp_path)
    measured = _measured(path, (2,)).profile
    captured = capture(load_model_file(path), microbatch_size=2, weightless=True)
    timed, _ = estimate_layers(captured, _roof_here())
    figures = [
        (
            one.forward + one.backward_input + one.backward_weight,
            cost.forward_s + cost.backward_input_s + cost.backward_weight_s,
        )
        for one, layer in zip(timed.layers, measured.layers, strict=True)
        for cost in layer.costs
    ]
    assert _rank_correlation(figures) > 0.8, figures
    estimated, found = (sum(column) for column in zip(*figures, strict=True))
    assert 0.4 < estimated / found < 2.5


def _roof_here() -> Roof:
    x, long = torch.randn(1024, 1024), torch.randn(2**24)
    clock = CpuClock()
    product = min(time_calls(clock, [lambda: x @ x] * 5))
    copy = min(time_calls(clock, [lambda: long.add(1)] * 5))
    flops = 2 * 1024**3 / product
    return Roof(
        half=flops,
        single=flops,
        convolution=flops,
        memory=2 * long.nbytes / copy,
        units=1,
        link=1e9,
        product=1.0,
        has_bfloat16=True,
    )


def _rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Spearman's."""
    ranks = []
    for column in zip(*pairs, strict=True):
        order = sorted(range(len(column)), key=column.__getitem__)
        ranks.append({index: rank for rank, index in enumerate(order)})
    number = len(pairs)
    off = sum((ranks[0][index] - ranks[1][index]) ** 2 for index in range(number))
    return 1 - 6 * off / (number * (number**2 - 1))


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra models")
@pytest.mark.parametrize("blocks", [10, pytest.param(80, marks=pytest.mark.slow)])
def test_billions_of_parameters_take_no_memory(blocks: int, tmp_path: Path) -> None:
    """Llama's 70 billion, and its first 9: 18 GB."""
    path = tmp_path / "llama.py"
    path.write_text(
        "import torch, transformers\n"
        "def model():\n"
        "    config = transformers.LlamaConfig(hidden_size=8192, num_attention_heads=64,\n"
        f"        num_hidden_layers={blocks},\n"
        "        num_key_value_heads=8, intermediate_size=28672, vocab_size=32000, use_cache=False)\n"
        "    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)\n"
        "def batch(size):\n"
        "    ids = torch.randint(32000, (size, 4096))\n"
        "    return {'input_ids': ids, 'labels': ids}, None\n"
    )
    captured = capture(load_model_file(path), microbatch_size=1, weightless=True)
    timed, held = estimate_layers(captured, ROOFS["h100-sxm"])
    assert sum(layer.parameter_bytes for layer in captured.layers) == pytest.approx(
        2 * (0.855e9 * blocks + 0.524e9), rel=0.01
    )
    assert len(timed.layers) == len(held)
    if blocks == 80:  # and the head: embedding and last norm are tiny beside them, and join a neighbour
        assert len(held) == 81
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e6


def test_tensor_ranks_hold_and_exchange_what_can_be_counted_by_hand(tmp_path: Path) -> None:
    """Blocks of 12 · width² weights and their biases; two sums a block, each way."""
    width, tokens, words = 512, 2048, 50304
    path = tmp_path / "decoder.py"
    path.write_text(DECODER.format(width=width, heads=8, layers=3))
    asked = Asked(
        microbatch_sizes=(1,), device="cpu", granularity="block", neighbours=0, tensor=(1, 2, 4), estimate="a100-80gb"
    )
    profile = estimate_profile(load_model_file(path), asked, folder=tmp_path, progress=lambda what, done: None).profile
    for size in (2, 4):
        rows = [next(cost for cost in layer.costs if cost.tensor == size) for layer in profile.layers]
        split = 12 * width**2 + 3 * width + 4 * width  # matrices, biases of the columns
        block = split / size + (2 + 4) * width  # biases of the rows, norms
        head = next(row for layer, row in zip(profile.layers, rows, strict=True) if layer.name == "head")
        blocks = [row for layer, row in zip(profile.layers, rows, strict=True) if layer.name.startswith("blocks")]
        assert sum(row.parameter_bytes or 0 for row in blocks) == 3 * 2 * block
        assert head.parameter_bytes == 2 * words * width / size
        sums = [row.collectives for row in blocks if row.collectives is not None]
        assert sum(one.forward.count for one in sums) == sum(one.backward_input.count for one in sums) == 3 * 2
        assert sum(one.forward.bytes for one in sums) == 3 * 2 * tokens * width * 2
        for row, layer in zip(rows, profile.layers, strict=True):
            assert layer.kind != "Linear" or row.backward_weight_s < layer.costs[0].backward_weight_s
        told = {
            module: how for layer in profile.layers for one in layer.splits or () for module, how in one.split.items()
        }
        assert (told["blocks.0.qkv"], told["blocks.0.out"], told["words"]) == ("column", "row", "vocabulary")


@pytest.mark.slow
def test_a_tensor_size_that_nothing_takes_is_left_out(tmp_path: Path) -> None:
    path = _copy("unet", tmp_path)
    asked = Asked(
        microbatch_sizes=(1,), device="cpu", granularity="block", neighbours=0, tensor=(1, 2), estimate="a100-80gb"
    )
    made = estimate_profile(load_model_file(path), asked, folder=tmp_path, progress=lambda what, done: None)
    assert "no layer can be split over 2 tensor ranks" in made.tensor_left_out[2]
    assert {cost.tensor for layer in made.profile.layers for cost in layer.costs} == {1}
