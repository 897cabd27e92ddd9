import torch
import transformers


def model():
    config = transformers.CLIPConfig(
        text_config={
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 16,
            "eos_token_id": 2,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
        projection_dim=16,
    )
    return transformers.CLIPModel(config)


def batch(size):
    return {
        "input_ids": torch.randint(3, 90, (size, 8)),
        "pixel_values": torch.randn(size, 3, 16, 16),
        "return_loss": True,
    }, None
