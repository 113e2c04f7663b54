"""Models load from folders and from the hub's cache; what cannot be loaded is explained."""

import json
import os
import shutil

import huggingface_hub
import pytest
import torch
import zoo
from huggingface_hub.errors import RepositoryNotFoundError

from magicpig import LLM, SamplingParams
from magicpig.models import BUILTIN, ModelError, load, loader
from tests.processes import raising, run_python


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    """A folder with a random model of two layers, in float16, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "llama"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).half().save_pretrained(folder)
    return folder


@pytest.fixture
def altered(tiny_llama, tmp_path):
    """Makes a copy of the tiny model with other fields in its config.json."""

    def alter(**fields):
        folder = shutil.copytree(tiny_llama, tmp_path / "altered")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))
        return folder

    return alter


def test_a_folder_loads(tiny_llama):
    loaded = load(str(tiny_llama), device="cpu")
    assert loaded.path == tiny_llama
    assert loaded.name == str(tiny_llama)
    assert not loaded.model.training
    assert loaded.model.config._attn_implementation == "sdpa"
    ids = torch.tensor([loaded.tokenizer("hello")["input_ids"]])
    assert loaded.model(ids).logits.isfinite().all()
    assert loaded.tokenizer.decode(ids[0]) == "hello"


@pytest.mark.parametrize("name", zoo.CONFIGS)
def test_every_model_that_works_loads_from_a_folder(name, tmp_path):
    """Also those that transformers gives no quick attention of its own."""
    here = zoo.loaded(name)
    here.model.save_pretrained(tmp_path)
    here.tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    trained_with = {"attn_implementation": "flash_attention_2"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **trained_with}))
    found = [
        LLM(model, method="lsh:4:12").generate([[5, 6, 7] * 20], SamplingParams(max_tokens=5))
        for model in (here, load(str(tmp_path), device="cpu"))
    ]
    quick = "eager" if name == "gemma2" else "sdpa"  # which transformers has for all others
    assert loader.own_attention(here.model.config) == quick
    texts = [generation[0].completions[0].token_ids for generation in found]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("stored", "isas", "dtype", "expected"),
    [
        ("float16", ["avx2"], "auto", torch.float32),
        ("bfloat16", ["avx2"], "auto", torch.float32),
        ("float16", ["avx2", "avx512_bf16"], "auto", torch.bfloat16),
        ("bfloat16", ["avx2", "avx512_bf16"], "auto", torch.bfloat16),
        ("float32", ["avx2", "avx512_bf16"], "auto", torch.float32),
        ("float16", ["avx2"], "float16", torch.float16),
        ("float32", ["avx2"], "bfloat16", torch.bfloat16),
    ],
)
def test_cpus_get_a_dtype_they_are_fast_in(altered, monkeypatch, stored, isas, dtype, expected):
    monkeypatch.setattr(loader, "supported_isas", lambda: isas)
    monkeypatch.setattr(loader.platform, "machine", lambda: "x86_64")
    model = load(str(altered(dtype=stored)), device="cpu", dtype=dtype).model
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "t5", "architectures": ["T5Model"]}, "T5Model.*causal LM"),
        ({"model_type": "nonsense"}, "nonsense"),
        ({"num_hidden_layers": 3}, r"lacks 9 of its weights.*layers\.2"),
        ({"vocab_size": 300}, "cannot be loaded.*size"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_folders_that_are_no_causal_models(altered, fields, message):
    folder = altered(**fields)
    with pytest.raises(ModelError, match=f"(?s)altered.*{message}"):
        load(str(folder), device="cpu")


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model.safetensors"])
def test_folders_that_lack_a_file(altered, lost):
    folder = altered()
    (folder / lost).unlink()
    with pytest.raises(ModelError, match="altered"):
        load(str(folder), device="cpu")


def test_truncated_weights_are_refused(altered):
    folder = altered()
    os.truncate(folder / "model.safetensors", 1000)
    with pytest.raises(ModelError, match=r"altered.*cannot be loaded"):
        load(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "cuda:99"}, ModelError, "'cuda:99' cannot be used.*cpu"),
        ({"dtype": "int8"}, ValueError, "bfloat16.*'int8'"),
    ],
)
def test_devices_and_dtypes_that_do_not_exist(tiny_llama, arguments, error, message):
    with pytest.raises(error, match=message):
        load(str(tiny_llama), **arguments)


@pytest.mark.parametrize("device", ["gpu", "meta", "mps", "cuda:x", "", None])
def test_devices_of_no_use(tiny_llama, device):
    with pytest.raises(
        ValueError, match=f"device must be auto, cpu, cuda or cuda:N, not '{device}'"
    ):
        load(str(tiny_llama), device=device)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RepositoryNotFoundError.__new__(RepositoryNotFoundError), "hub has no model"),
        (ConnectionError("no route"), "could not be reached.*no route"),
    ],
)
def test_names_that_nobody_knows(monkeypatch, error, message):
    monkeypatch.setattr(huggingface_hub, "model_info", raising(error))
    with pytest.raises(ModelError, match=f"'no-such/model'.*smollm2.*{message}"):
        load("no-such/model")


def test_names_that_cannot_be():
    with pytest.raises(ModelError, match=r"'\./no/such/folder'.*no folder"):
        load("./no/such/folder")


def test_a_model_in_the_hub_cache_needs_no_network(tiny_llama, tmp_path):
    """Quietly too: a warning about the network would be on stderr."""
    snapshot = tmp_path / "hub/models--some--tiny/snapshots/abc"
    shutil.copytree(tiny_llama, snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text("abc")
    code = "import magicpig.models as m; print(m.load('some/tiny', device='cpu').path)"
    result = run_python(code, HF_HOME=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9")
    assert result.stdout == f"{snapshot}\n", result.stderr


def test_loading_changes_no_settings(tiny_llama, monkeypatch, capfd):
    import gc

    from transformers.utils import logging

    monkeypatch.setitem(BUILTIN, "tiny", BUILTIN["smollm2"])
    monkeypatch.setattr(loader, "pull", lambda name: tiny_llama)
    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), logging._tqdm_hook
    load("tiny", device="cpu")
    after = logging.get_verbosity(), logging.is_progress_bar_enabled(), logging._tqdm_hook
    assert before == after
    assert gc.isenabled()
    assert capfd.readouterr().err == ""


def test_the_default_model_lost_nothing_in_the_conversion(default_model):
    config = default_model.model.config
    tokenizer = default_model.tokenizer
    assert config.max_position_embeddings == tokenizer.model_max_length == 8192
    assert config.rope_parameters["rope_theta"] == 100_000
    assert config.tie_word_embeddings
    assert config.eos_token_id == tokenizer.eos_token_id == 2
    assert default_model.model.generation_config.eos_token_id == 2
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer("x  12")["input_ids"] == [104, 256, 33, 34]  # digits end a run of spaces
    for text in ("café 漢字 🙂", "\n\n  def f(x):\n\treturn x²", "<|im_start|>user\nhi<|im_end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_default_model_answers(default_model):
    tokenizer = default_model.tokenizer
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert tokenizer.decode(prompt["input_ids"][0]).endswith("<|im_start|>assistant\n")
    ids = default_model.model.generate(**prompt, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
