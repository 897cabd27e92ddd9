import torch
import transformers


def model():
    return transformers.DebertaV2ForMaskedLM(
        transformers.DebertaV2Config(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            max_position_embeddings=32,
        )
    )


def batch(size):
    ids = torch.randint(90, (size, 12))
    return {"input_ids": ids, "labels": ids}, None
