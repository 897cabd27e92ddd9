"""Llama-2-70B as Hugging Face builds it, in bfloat16: shapes without weights (needs the extra ``models``)."""

import torch
import transformers

TOKENS = 4096

global_batch = 512


def model():
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def batch(size):
    ids = torch.randint(32000, (size, TOKENS))
    return {"input_ids": ids, "labels": ids}, None
