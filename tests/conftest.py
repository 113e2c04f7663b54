"""Fixtures: seeds, and running a test on every instruction set this machine supports."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import pytest
from hypothesis import HealthCheck, settings
from zoo import make_model, make_tokenizer

import magicpig
from magicpig.engine.runner import Runner
from magicpig.models import ModelError, load, pull

settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("default")
torch.set_num_threads(1)  # the models here are tiny; threads would only wait for each other


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=magicpig.supported_isas())
def every_isa(request):
    before = magicpig.isa()
    magicpig.set_isa(request.param)
    yield request.param
    magicpig.set_isa(before)


@pytest.fixture(scope="session")
def default_model():
    """In float32, from the cache folder; fetched where that is possible."""
    try:
        pull()
    except ModelError as error:
        pytest.skip(f"the default model cannot be had: {error}")
    return load("smollm2", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder with a small model that never ends by itself."""
    folder = tmp_path_factory.mktemp("model")
    tiny = make_model("llama")
    tiny.generation_config.eos_token_id = tiny.config.eos_token_id = None
    tiny.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def short_parts(monkeypatch):
    """Prompts are read in many parts."""
    monkeypatch.setattr("magicpig.engine.prefill.PREFILL_TOKENS", 32)


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C comes in the n-th call of one of the runner's methods."""

    def at(name, call):
        method, calls = getattr(Runner, name), []

        def interrupting(*arguments):
            calls.append(1)
            if len(calls) == call:
                raise KeyboardInterrupt
            return method(*arguments)

        monkeypatch.setattr(Runner, name, interrupting)

    return at
