import torch
import transformers


def model():
    return transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(
            hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, num_labels=5, drop_path_rate=0.1
        )
    )


def batch(size):
    return {"pixel_values": torch.randn(size, 3, 32, 32), "labels": torch.randint(5, (size,))}, None
