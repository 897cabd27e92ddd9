import torch
import transformers


def model():
    return transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=4,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_experts_per_tok=2,
            use_cache=False,
        )
    )


def batch(size):
    ids = torch.randint(90, (size, 12))
    return {"input_ids": ids, "labels": ids}, None
