import torch
import transformers


def model():
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=3, state_size=8, use_cache=False)
    )


def batch(size):
    ids = torch.randint(90, (size, 12))
    return {"input_ids": ids, "labels": ids}, None
