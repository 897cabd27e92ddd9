import torch
import transformers


def model():
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            use_cache=False,
        )
    )


def batch(size):
    ids = torch.randint(90, (size, 12))
    return {"input_ids": ids, "labels": ids}, None
