"""Real models from small configurations, without weights: what users bring. Each entry is the text of a model file."""

from __future__ import annotations

HEAD = """import torch
from torch import nn
from torch.nn import functional
"""

CAUSAL = """
def batch(size):
    ids = torch.randint({vocabulary}, (size, 16))
    return {{"input_ids": ids, "labels": ids}}, None
"""


def _transformers(kind: str, config: str, batch: str, *, before: str = "") -> str:
    return f"""{HEAD}
import transformers
{before}
def model():
    return transformers.{kind}(transformers.{config})
{batch}"""


REAL_MODELS: dict[str, str] = {
    "gpt2": _transformers(
        "GPT2LMHeadModel",
        "GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=8, n_head=4, use_cache=False)",
        CAUSAL.format(vocabulary=97),
    ),
    "llama": _transformers(
        "LlamaForCausalLM",
        "LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=8, "
        "num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, use_cache=False)",
        CAUSAL.format(vocabulary=97),
    ),
    "bert": _transformers(
        "BertForMaskedLM",
        "BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=8, num_attention_heads=4, "
        "intermediate_size=64, max_position_embeddings=32)",
        CAUSAL.format(vocabulary=97),
    ),
    "vit": _transformers(
        "ViTForImageClassification",
        "ViTConfig(hidden_size=32, num_hidden_layers=8, num_attention_heads=4, intermediate_size=64, "
        "image_size=16, patch_size=4, num_labels=10, hidden_dropout_prob=0.1)",
        """
def batch(size):
    return {"pixel_values": torch.randn(size, 3, 16, 16), "labels": torch.randint(10, (size,))}, None
""",
    ),
    "t5": _transformers(
        "T5ForConditionalGeneration",
        "T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4, "
        "decoder_start_token_id=0, use_cache=False)",
        """
def batch(size):
    return {"input_ids": torch.randint(97, (size, 12)), "labels": torch.randint(97, (size, 8))}, None
""",
    ),
    "mixtral": _transformers(
        "MixtralForCausalLM",
        "MixtralConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=8, "
        "num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=32, "
        "use_cache=False, output_router_logits=True)",
        CAUSAL.format(vocabulary=97),
    ),
    "resnet": _transformers(
        "ResNetForImageClassification",
        "ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[3, 4, 6, 3], num_labels=10)",
        """
def batch(size):
    return {"pixel_values": torch.randn(size, 3, 32, 32), "labels": torch.randint(10, (size,))}, None
""",
    ),
    "whisper": _transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig(vocab_size=97, d_model=32, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4, "
        "decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, "
        "max_source_positions=16, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, "
        "decoder_start_token_id=1, dropout=0.1, use_cache=False)",
        """
def batch(size):
    return {"input_features": torch.randn(size, 8, 32), "labels": torch.randint(97, (size, 8))}, None
""",
    ),
    "unet2d": f"""{HEAD}
import diffusers

def model():
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 32), layers_per_block=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4, norm_num_groups=4, dropout=0.1,
    )

def batch(size):
    inputs = {{
        "sample": torch.randn(size, 4, 8, 8), "timestep": torch.randint(1000, (size,)),
        "encoder_hidden_states": torch.randn(size, 5, 16),
    }}
    return inputs, torch.randn(size, 4, 8, 8)

def loss(output, target):
    return functional.mse_loss(output.sample, target)
""",
    "transformer": f"""{HEAD}
def model():
    return nn.Transformer(16, 4, 4, 4, 32, batch_first=True)

def batch(size):
    return (torch.randn(size, 6, 16), torch.randn(size, 5, 16)), torch.randn(size, 5, 16)

def loss(output, target):
    return functional.mse_loss(output, target)
""",
}
