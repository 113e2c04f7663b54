"""pack: models with native layers compute what they did before, and hold nothing twice."""

import copy
import gc
import weakref

import pytest
import torch
import transformers as tf
from torch import nn

from magicpig.nn import GatedMLP, Joint, PackedEmbedding, PackedLinear, RMSNorm, pack
from magicpig.nn.joint import Share

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 64,
}
ODD = {
    **SIZES,
    "hidden_size": 75,
    "intermediate_size": 101,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 18,
    "vocab_size": 131,
}
MODELS = {
    "llama": (tf.LlamaConfig, tf.LlamaForCausalLM, {}),
    "llama tied": (tf.LlamaConfig, tf.LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama biased": (
        tf.LlamaConfig,
        tf.LlamaForCausalLM,
        {"mlp_bias": True, "attention_bias": True},
    ),
    "mistral": (tf.MistralConfig, tf.MistralForCausalLM, {}),
    "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM, {}),
    "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM, {"tie_word_embeddings": True}),
    "gemma3": (tf.Gemma3TextConfig, tf.Gemma3ForCausalLM, {"query_pre_attn_scalar": 16}),
}


def make(name, sizes=SIZES, dtype=torch.bfloat16):
    config, model, options = MODELS[name]
    torch.manual_seed(1)
    model = model(config(**{**sizes, **options})).to(dtype).eval()
    for parameter in model.parameters():  # norms and biases that say something
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def kinds(model):
    return {type(module) for module in model.modules()}


@torch.no_grad()
def logits(model, ids):
    return model(ids).logits.float()


@pytest.mark.parametrize("sizes", [SIZES, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("name", MODELS)
def test_a_packed_model_is_as_exact_as_the_original(name, sizes):
    model = make(name, sizes)
    truth_model = copy.deepcopy(model).float()
    ids = torch.randint(0, sizes["vocab_size"], (3, 21))
    truth, original = logits(truth_model, ids), logits(model, ids)
    pack(model)
    packed = logits(model, ids)
    assert not kinds(model) & {nn.Linear}
    assert {GatedMLP, PackedLinear, RMSNorm} <= kinds(model)
    assert (packed - truth).norm() <= 1.5 * (original - truth).norm()


@pytest.mark.parametrize("name", MODELS)
def test_no_original_weight_stays_alive(name):
    model = make(name)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    kept = id(model.get_input_embeddings().weight) if not tied else None
    originals = [weakref.ref(p) for p in model.parameters() if id(p) != kept]
    storages = {p.data_ptr() for p in model.parameters() if p.dim() == 2 and id(p) != kept}
    pack(model)
    gc.collect()
    assert not [ref for ref in originals if ref() is not None]
    assert not storages & {p.data_ptr() for p in model.parameters() if p.dim() == 2}
    assert (type(model.get_input_embeddings()) is PackedEmbedding) == tied


def test_no_more_than_a_layer_is_there_twice(monkeypatch):
    """When a twin is made, all weights packed before it are gone."""
    model = make("llama tied", {**SIZES, "num_hidden_layers": 6})
    sizes = {weakref.ref(p): p.numel() for p in model.parameters()}
    total, packed, most = sum(sizes.values()), 0, 0
    largest = max(sum(p.numel() for p in model.model.layers[0].parameters()), 160 * 64)

    def watch(cls):
        init = cls.__init__

        def watched(self, *arguments, **options):
            nonlocal packed, most
            init(self, *arguments, **options)
            layers = [a for a in arguments if isinstance(a, nn.Linear)]
            packed += sum(layer.weight.numel() for layer in layers)
            alive = sum(size for ref, size in sizes.items() if ref() is not None)
            most = max(most, packed + alive)

        monkeypatch.setattr(cls, "__init__", watched)

    watch(PackedLinear)
    watch(GatedMLP)
    pack(model)
    assert packed > 0.9 * total
    assert most <= total + largest


def test_generation_goes_on_as_before():
    model = make("qwen3")
    ids = torch.randint(0, 160, (2, 9))
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **arguments)
    pack(model)
    after = model.generate(ids, **arguments)
    assert after.shape == before.shape
    assert (after == before).float().mean() > 0.8  # a tie may fall the other way
    assert model.dtype == torch.bfloat16
    assert model.device.type == "cpu"


def test_packing_twice_changes_nothing():
    model = make("llama tied")
    pack(model)
    modules = list(model.modules())
    pack(model)
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_left_alone(dtype):
    model = make("llama", dtype=dtype)
    modules = list(model.modules())
    pack(model)
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_other_devices_are_left_alone():
    model = make("llama").to("meta")
    pack(model)
    assert not kinds(model) & {PackedLinear, GatedMLP, RMSNorm}


class Holder(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def linear(out_features=8, in_features=8):
    return nn.Linear(in_features, out_features, bias=False, dtype=torch.bfloat16)


class Special(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_what_is_not_plain_is_left_alone():
    hooked, overridden, normed = linear(), linear(), linear()
    hooked.register_forward_hook(lambda module, arguments, out: out + 1)
    overridden.forward = lambda x: x
    nn.utils.parametrizations.weight_norm(normed)
    special = Special(8, 8, dtype=torch.bfloat16)
    model = Holder(
        hooked=hooked, overridden=overridden, special=special, normed=normed, plain=linear()
    )
    pack(model)
    assert type(model.plain) is PackedLinear
    assert model.hooked is hooked
    assert model.overridden is overridden
    assert model.special is special
    assert model.normed is normed


def test_a_shared_module_has_one_twin_and_a_shared_weight_stays():
    one, two, both = linear(), linear(), linear()
    two.weight = one.weight
    model = Holder(a=one, b=two, c=both, inner=Holder(d=both))
    pack(model)
    assert model.a is one
    assert model.b is two
    assert type(model.c) is PackedLinear
    assert model.c is model.inner.d


class LayerScale(nn.Module):
    """Looks like a norm, computes something else."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, dtype=torch.bfloat16))
        self.eps = 1e-6

    def forward(self, x):
        return x * self.weight


class MLP(nn.Module):
    def __init__(self, act_fn, clip=None):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(16), linear(16), linear(8, 16)
        self.act_fn, self.clip = act_fn, clip

    def forward(self, x):
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner if self.clip is None else inner.clamp(-self.clip, self.clip))


def test_what_only_looks_alike_is_left_alone():
    scale = LayerScale()
    model = Holder(
        scale=scale,
        silu=MLP(nn.SiLU()),
        tanh=MLP(nn.GELU(approximate="tanh")),
        erf=MLP(nn.GELU()),
        relu=MLP(nn.ReLU()),
        clipped=MLP(nn.SiLU(), clip=0.01),
    )
    pack(model)
    assert model.scale is scale
    assert type(model.silu) is type(model.tanh) is GatedMLP
    for left in (model.erf, model.relu, model.clipped):
        assert type(left) is MLP
        assert type(left.down_proj) is PackedLinear


class Doubled(nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


def test_a_tied_embedding_of_unknown_kind_keeps_its_weight():
    embedding, head = Doubled(32, 8, dtype=torch.bfloat16), linear(32)
    head.weight = embedding.weight
    model = Holder(embedding=embedding, head=head, other=linear())
    pack(model)
    assert model.embedding is embedding
    assert model.head is head
    assert type(model.other) is PackedLinear


def test_layers_of_one_input_as_one_product():
    torch.manual_seed(0)
    layers = [nn.Linear(8, size, bias=size == 5) for size in (6, 5, 7)]
    joint = Joint(layers)
    shares = [Share(joint, i) for i in range(3)]
    one, other = torch.randn(2, 3, 8), torch.randn(4, 8)
    with torch.no_grad():
        for order in ((0, 1, 2), (2, 2, 0), (1,), (0, 1, 2)):
            for x in (one, other):
                for i in order:
                    torch.testing.assert_close(shares[i](x), layers[i](x))
    assert joint._last.x is None  # all were asked for: nothing is kept
    with pytest.raises(RuntimeError, match="no gradient"):
        shares[0](one.requires_grad_())
