import torch
import transformers


def model():
    config = transformers.ViTMAEConfig(
        hidden_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=32,
    )
    return transformers.ViTMAEForPreTraining(config)


def batch(size):
    return {"pixel_values": torch.randn(size, 3, 16, 16)}, None
