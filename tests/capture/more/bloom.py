import torch
import transformers


def model():
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=3, n_head=4, use_cache=False)
    )


def batch(size):
    ids = torch.randint(90, (size, 12))
    return {"input_ids": ids, "labels": ids}, None
