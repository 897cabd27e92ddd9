import torch
import transformers


def model():
    return transformers.SwinForImageClassification(
        transformers.SwinConfig(
            image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=5
        )
    )


def batch(size):
    return {"pixel_values": torch.randn(size, 3, 32, 32), "labels": torch.randint(5, (size,))}, None
