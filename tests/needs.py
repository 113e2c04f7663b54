"""What requests need of memory, of small models and of larger ones."""

import torch
from transformers import LlamaConfig
from zoo import make_model

from magicpig import WindowConfig
from magicpig.attention.plan import make_plan
from magicpig.engine.memory import Needs

CPU, GPU = torch.device("cpu"), torch.device("cuda")

WINDOW = WindowConfig(4, 8, 16)

LAYERS, KV_HEADS, DIM = 4, 2, 16

VECTORS = KV_HEADS * 2 * DIM * 2  # bytes of a token in a layer


def codes_of(tokens):
    return KV_HEADS * (-(-tokens // 16) * 16 * (DIM * 2 // 8 + 8) + 2 * 4 * DIM)  # and means


def needs(method, device, name="llama", dense=(), block=16):
    config = make_model(name).config
    plan = make_plan(method, LAYERS, dense_layers=dense)
    return Needs(config, plan, WindowConfig(4, 8, block), torch.bfloat16, device, 512)


def of_8b(method):
    """Needs of Llama-3.1-8B's geometry."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    config = LlamaConfig(num_hidden_layers=32, num_key_value_heads=8, vocab_size=128256, **sizes)
    config.max_position_embeddings = 131_072
    return Needs(config, make_plan(method, 32), WindowConfig(), torch.bfloat16, GPU, 2048)
