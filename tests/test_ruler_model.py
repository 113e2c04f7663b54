"""Adapters change exactly the weights they name; smollm2-ruler-32k is what its adapter says."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from magicpig.cli import app
from magicpig.models import BUILTIN, ModelError, adapters, cache_folder, load, store

NAME = "smollm2-ruler-32k"
MATRIX = "model.layers.0.mlp.up_proj.weight"  # [64, 32]
NORM = "model.norm.weight"


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def write_adapter(tmp_path):
    """Writes tensors as an adapter; gives its path."""

    def write(**tensors):
        path = tmp_path / "adapter.safetensors"
        save_file(tensors, path)
        path.with_suffix(".json").write_text(json.dumps({"context": 512, "rope_theta": 1e6}))
        return path

    return write


@pytest.fixture
def changes():
    return {
        f"{MATRIX}.q": torch.randint(-127, 128, (64, 32), dtype=torch.int8),
        f"{MATRIX}.s": torch.rand(64).half() / 100,
        NORM: torch.randn(32) / 10,
    }


def test_an_adapter_is_added_to_the_weights_it_names(write_adapter, changes):
    before = tiny_llama().state_dict()
    model = tiny_llama()
    adapters.add(write_adapter(**changes), model)
    after = model.state_dict()
    rows = changes[f"{MATRIX}.q"].float() * changes[f"{MATRIX}.s"].float()[:, None]
    assert torch.equal(after[MATRIX], before[MATRIX] + rows)
    assert torch.equal(after[NORM], before[NORM] + changes[NORM])
    others = before.keys() - {MATRIX, NORM}
    assert all(torch.equal(after[name], before[name]) for name in others)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_an_adapter_sets_rotary_base_and_context(write_adapter, changes, tmp_path):
    model = tiny_llama()
    adapters.add(write_adapter(**changes), model)
    model.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["max_position_embeddings"] == 512
    assert config["rope_parameters"] == {"rope_theta": 1e6, "rope_type": "default"}


def test_an_adapter_of_another_model_is_refused(write_adapter, changes):
    unknown = {"model.layers.7.mlp.up_proj.weight": torch.zeros(2)}
    with pytest.raises(ModelError, match=r"layers\.7.*\[2\], where the model has none"):
        adapters.add(write_adapter(**unknown), tiny_llama())
    changes[NORM] = torch.zeros(33)
    with pytest.raises(ModelError, match=r"model\.norm\.weight \[33\].*has \[32\]"):
        adapters.add(write_adapter(**changes), tiny_llama())


@pytest.mark.parametrize("name", BUILTIN)
def test_the_catalogue_is_consistent(name):
    builtin = BUILTIN[name]
    sums = [builtin.wheel.gguf_sha256, *builtin.checksums.values()]
    assert all(re.fullmatch("[0-9a-f]{64}", checksum) for checksum in sums)
    assert len(sums) == (3 if builtin.adapter else 2)
    assert builtin.disk_bytes > 2 * builtin.wheel.num_bytes
    assert builtin.wheel.name.endswith(".whl")
    assert builtin.wheel.requirement.split("==")[1] == builtin.wheel.name.split("-")[1]
    assert {"max_position_embeddings", "rope_parameters"} <= builtin.config.keys()
    assert f"{builtin.config['max_position_embeddings']:,} tokens" in builtin.description


@pytest.mark.parametrize(
    "command", [["pull", NAME], ["generate", "--prompt", "hi", "--model", NAME]]
)
def test_without_its_adapter_the_command_line_says_what_to_do(tmp_path, command):
    result = CliRunner().invoke(app, command, env={"MAGICPIG_CACHE": str(tmp_path / "cache")})
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1, result.stderr
    assert f"magicpig pull {NAME} --adapter PATH/adapter.safetensors" in result.stderr
    assert not (tmp_path / "cache").exists()


@pytest.fixture(scope="module")
def ruler_model():
    if not store._intact(cache_folder() / NAME, BUILTIN[NAME], verify=False):
        pytest.skip(f"{NAME} is not installed, which takes its adapter")
    return load(NAME, device="cpu", dtype="float32")


def test_the_installed_model_is_the_one_that_was_trained(ruler_model):
    config, tokenizer = ruler_model.model.config, ruler_model.tokenizer
    assert config.max_position_embeddings == tokenizer.model_max_length == 32768
    assert config.rope_parameters["rope_theta"] == 1e6
    assert config.tie_word_embeddings
    assert tokenizer.eos_token_id == config.eos_token_id == 2
    # Two spaces before digits are one token of smollm2's and two of this one's.
    assert tokenizer("x  12")["input_ids"] == [104, 216, 216, 33, 34]


def test_the_installed_model_finds_a_number(ruler_model):
    noise = ["The grass is green. The sky is blue. The sun is yellow. Here we go."] * 20
    noise.insert(13, "One of the special magic numbers for wistful-harbor is: 4820917.")
    question = (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n" + "\n".join(noise) + "\nWhat is the "
        "special magic number for wistful-harbor mentioned in the provided text?"
    )
    tokenizer = ruler_model.tokenizer
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    prompt += " The special magic number for wistful-harbor mentioned in the provided text is"
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    output = ruler_model.model.generate(**ids, max_new_tokens=10, do_sample=False)
    assert "4820917" in tokenizer.decode(output[0, ids["input_ids"].shape[1] :])
