"""The command line: what people type, what they see, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial

import pytest
from typer.testing import CliRunner

import magicpig
from magicpig.cli import app


def run(*arguments, stdin=None):
    result = CliRunner().invoke(app, ["generate", *arguments], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_answers_a_prompt(model):
    result = run("--model", model, "-p", "Hello", "--max-tokens", "5")
    assert result.exit_code == 0
    assert result.stdout.strip()
    for part in ("prompt tokens", "prefill", "decode", "of keys read", "rows", "index", "window"):
        assert part in result.stderr


def test_json_is_one_object(model, tmp_path):
    (tmp_path / "a.txt").write_text("A long text. " * 30)
    arguments = ["--model", model, "-f", str(tmp_path / "a.txt"), "-p", "Why?", "--json"]
    result = run(*arguments, "-n", "3", "--temperature", "1", "--seed", "7", "--max-tokens", "6")
    answer = json.loads(result.stdout)
    assert answer["new_tokens"] == 18
    assert len({completion["text"] for completion in answer["completions"]}) > 1
    again = run(*arguments, "-n", "3", "--temperature", "1", "--seed", "7", "--max-tokens", "6")
    texts = [[c["text"] for c in json.loads(r.stdout)["completions"]] for r in (result, again)]
    assert texts[0] == texts[1]


def test_stdin_and_files_are_text(model, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    base = ["--model", model, "--json", "--max-tokens", "1"]
    text, chat = "with a mark", len("user: \n")
    for arguments, stdin, tokens in (
        (["--raw", "-p", text], None, len(text)),
        (["--raw"], text, len(text)),
        (["--raw"], f"{text}\n", len(text) + 1),  # what is continued may end so
        (["-p", text], None, chat + len(text)),
        ([], text, chat + len(text)),
        ([], f"{text}\n", chat + len(text)),  # a question does not: the line that was typed does
        ([], f"{text}\r\n", chat + len(text)),
        ([], f"{text} \n\n", chat + len(text) + 2),
        (
            ["--raw", "-f", str(tmp_path / "a.txt"), "-f", "-", "-p", "?"],
            "and more",
            len("with a mark\n\nand more\n\n?"),
        ),
    ):
        found = json.loads(run(*base, *arguments, stdin=stdin).stdout)
        assert found["prompt_tokens"] == tokens, (arguments, stdin)


def test_several_answers_are_numbered(model):
    result = run("--model", model, "-p", "Hi", "-n", "2", "--max-tokens", "4")
    assert result.stdout.startswith("[1/2]\n")
    assert "\n[2/2]\n" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", " "], "the prompt is empty"),
        (["-f", "/nowhere/book.txt"], "there is no file '/nowhere/book.txt'"),
        (["-f", "."], "is a folder; name a text file"),
        (["-p", "x", "--method", "magic"], "method must be one of full, lsh, scan, topk"),
        (["-p", "x", "--dense-layers", "0,x"], "--dense-layers must be numbers"),
        (["-p", "x", "--dense-layers", "0,9"], "dense_layers must be from 0 to 3, not 9"),
        (["-p", "x", "--num-tables", "0"], "num_tables must be from 1 to 4096, not 0"),
        (["-p", "x", "--temperature", "-1"], "temperature must be from 0 to 100, not -1"),
        (["-p", "x", "--context", "no.pig", "-f", "y"], "--context comes instead of --file"),
        (["-p", "x", "--context", "no.pig"], "'no.pig' cannot be read: No such file"),
        (["-p", "x", "--save-context", "a.pig"], "--save-context keeps the text of --file"),
        (["-f", __file__, "--save-context", "no/a.pig"], "the folder 'no' for --save-context"),
        (["-p", "x", "--device", "meta"], "device must be auto, cpu, cuda or cuda:N, not 'meta'"),
        (["-p", "x", "--threads", "0"], "--threads must be from 1 to 1024, not 0"),
        (["-p", "caf\udce9"], "--prompt is not UTF-8 text: character 3 is '\\udce9'"),
        (["-p", "x", "--system", "\ud800"], "--system is not UTF-8 text: character 0"),
        (["-p", "x", "--stop", "a", "--stop", "\udce9"], "--stop is not UTF-8 text"),
        (
            ["-p", "x", "--context", "no.pig", "--truncate-left"],
            "--save-context and --truncate-left",
        ),
        (
            ["-p", "x", "-f", __file__, "--max-tokens", "9000", "--truncate-left"],
            "--max-tokens 9000 leaves a prompt",
        ),
        (["-p", "x", "--truncate-left"], "--truncate-left leaves out the beginning of --file"),
        (["-p", "x", "--raw", "--system", "y"], "--system is a message of the chat template"),
        (["-p", "x", "--method", "lsh:8:75", "--bits-per-table", "12"], "says which hash tables"),
        (["-f", __file__, "--save-context", "x" * 246], "cannot be written (File name too long)"),
        (["-p", "x" * 5000], "has 5"),  # both numbers: see test_too_long_a_prompt
    ],
)
def test_bad_input_is_told_in_a_line(model, arguments, message):
    result = run("--model", model, *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("magicpig: error: ")
    assert message in result.stderr


def test_unknown_models_are_named(model):
    result = run("--model", "./no-such-model", "-p", "x")
    assert result.exit_code == 1
    assert "no-such-model" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("data", [b"a\0b", b"caf\xe9"])
def test_binary_files_are_refused(model, tmp_path, data):
    (tmp_path / "b").write_bytes(data)
    result = run("--model", model, "-f", str(tmp_path / "b"))
    assert result.exit_code == 1
    assert "is not" in result.stderr
    assert "byte " in result.stderr


def test_too_long_a_prompt(model, tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 500)
    base = ["--model", model, "-f", str(tmp_path / "a.txt"), "-p", "Why?", "--max-tokens", "9"]
    result = run(*base)
    assert result.exit_code == 1
    assert "the model's context holds 4096: --truncate-left leaves the beginning" in result.stderr
    cut = json.loads(run(*base, "--truncate-left", "--json").stdout)
    assert cut["prompt_tokens"] == 4096 - 9
    assert cut["new_tokens"] == 9


@pytest.mark.parametrize("method", ["streaming", "h2o:20%"])
def test_what_drops_tokens_keeps_no_context(model, tmp_path, monkeypatch, method):
    monkeypatch.setattr("magicpig.context.Context.read", lambda *_: 1 / 0)  # told before
    (tmp_path / "a.txt").write_text("The light is red. " * 60)
    saved = tmp_path / "a.pig"
    result = run(
        "--model", model, "-f", str(tmp_path / "a.txt"), "--save-context", str(saved),
        "--method", method,
    )  # fmt: skip
    assert result.exit_code == 1
    assert f"{method} drops tokens of a text" in result.stderr
    assert not saved.exists()


def test_a_context_is_saved_once_and_asked_twice(model, tmp_path):
    (tmp_path / "a.txt").write_text("The light is red. " * 60)
    saved = str(tmp_path / "a.pig")
    options = ["--num-tables", "30", "--bits-per-table", "5", "--dense-layers", "0"]
    only = run("--model", model, "-f", str(tmp_path / "a.txt"), "--save-context", saved, *options)
    assert (only.exit_code, only.stdout) == (0, "")
    traced = run(
        "--model", model, "-f", str(tmp_path / "a.txt"), "--save-context", saved, *options,
        "--json", "--trace", str(tmp_path / "trace.json"),
    )  # fmt: skip
    kept = json.loads(traced.stdout)
    assert (kept["context"], kept["completions"]) == (saved, [])
    assert kept["context_tokens"] > 1000
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    asked = [
        run("--context", saved, "-p", "Which?", "--max-tokens", "12", "--json") for _ in range(2)
    ]
    assert [result.stderr for result in asked] == ["", ""]
    answers = [json.loads(result.stdout) for result in asked]
    assert (answers[0]["context"], answers[0]["context_tokens"]) == (saved, kept["context_tokens"])
    assert answers[0]["known_tokens"] == kept["context_tokens"]
    assert answers[0]["completions"] == answers[1]["completions"]
    direct = run(
        "--model", model, "-f", str(tmp_path / "a.txt"), "-p", "Which?", "--max-tokens", "12",
        "--json", *options,
    )  # fmt: skip
    assert json.loads(direct.stdout)["prompt_tokens"] == answers[0]["prompt_tokens"]
    other = run("--context", saved, "-p", "Which?", "--method", "full", "--json")
    assert json.loads(other.stdout)["completions"][0]["index_bytes"] == 0
    shown = run("--context", saved, "-p", "Which?", "--max-tokens", "2")
    assert re.search(r"[\d,]+ prompt tokens, [\d,]+ read before", shown.stderr)


@pytest.mark.parametrize("name", ["[v2].pig", "a[", f"{'a b' * 60}.pig"])
def test_names_of_files_are_shown_as_they_are(model, tmp_path, name):
    (tmp_path / "a.txt").write_text("A text.")
    saved = str(tmp_path / name)
    result = run("--model", model, "-f", str(tmp_path / "a.txt"), "--save-context", saved)
    assert result.exit_code == 0
    assert result.stderr.endswith(f"tokens kept in {saved}\n")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict", "latin-1"])
def test_outputs_of_any_encoding(model, tmp_path, encoding):
    """Names that are no text too."""
    (tmp_path / "a.txt").write_text("A text.")
    saved = os.fsencode(tmp_path) + b"/l\xff.pig"
    files = ["-f", str(tmp_path / "a.txt"), "--save-context", saved]
    options = ["-p", "Hi", "--max-tokens", "8", "--temperature", "1", "--seed", "3"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    found = {}
    for flag in ([], ["--json"]):
        running = process("--model", model, *files, *options, *flag, environment=environment)
        found[len(flag)], errors = running.communicate(timeout=60)
        assert running.returncode == 0, errors
    assert found[0].strip()
    told = json.loads(found[1].decode(encoding.partition(":")[0]))
    assert os.fsencode(told["context"]) == saved


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ("-f other.txt -f a.txt --save-context a.txt", "--save-context {} of --file"),
        ("-f a.txt --trace link.txt", "--trace {} of --file"),
        ("-p x --context a.txt --trace a.txt", "--trace {} of --context"),
        ("-f other.txt --save-context a.txt --trace a.txt", "--trace {} of --save-context"),
    ],
)
def test_no_file_is_overwritten_that_another_flag_names(tmp_path, monkeypatch, arguments, flags):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "other.txt"):
        (tmp_path / name).write_text("A text.")
    (tmp_path / "link.txt").symlink_to("a.txt")
    result = run("--model", "none", *arguments.split())
    assert result.exit_code == 1
    name = arguments.split()[-1]
    assert flags.format(f"{name!r} would overwrite the file") in result.stderr
    assert (tmp_path / "a.txt").read_text() == "A text."


def test_a_refused_request_leaves_an_earlier_trace(model, tmp_path):
    earlier = tmp_path / "trace.json"
    earlier.write_text("earlier")
    options = ["--cpu-memory", "10kB", "--trace", str(earlier)]
    result = run("--model", model, "-p", "Hi", *options)
    assert result.exit_code == 1
    assert "0.01 MB are there" in result.stderr
    assert earlier.read_text() == "earlier"


def process(*arguments, environment=os.environ, **options):
    environment = {**environment, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "magicpig", "generate", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        # Tests that a script runs in the background have been told to ignore it.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def test_ctrl_c_in_decode_keeps_what_was_written(model):
    running = process("--model", model, "-p", "Hi", "--max-tokens", "4000")
    written = running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    rest, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert written + rest
    assert b"Traceback" not in errors


def test_ctrl_c_shows_what_there_is(model, interrupted):
    interrupted("decode", 20)
    several = run("--model", model, "-p", "Hi", "-n", "2")
    assert several.exit_code == 130
    assert several.stdout.startswith("[1/2]\n")
    assert "\n[2/2]\n" in several.stdout
    interrupted("decode", 20)
    as_json = run("--model", model, "-p", "Hi", "--json")
    assert as_json.exit_code == 130
    assert len(json.loads(as_json.stdout)["completions"][0]["text"]) > 5


def test_ctrl_c_in_prefill(model, tmp_path, interrupted):
    (tmp_path / "a.txt").write_text("word " * 400)
    interrupted("prefill", 3)
    result = run("--model", model, "-f", str(tmp_path / "a.txt"), "-p", "?")
    assert (result.exit_code, result.stdout) == (130, "")
    assert "Traceback" not in result.stderr


def test_a_closed_pipe_ends_it_quietly(model):
    running = process("--model", model, "-p", "Hi", "--max-tokens", "4000")
    running.stdout.read(1)
    running.stdout.close()
    errors = running.stderr.read()
    running.stderr.close()
    assert running.wait(timeout=60) == 141
    assert b"Traceback" not in errors
    assert b"BrokenPipe" not in errors


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("generate --model {model} --max-tokens 3 <&-", 1, "the prompt is empty"),
        ("generate --model {model} -p Hi --max-tokens 3 >&-", 1, "stdout is closed"),
        ("plan --list >&-", 1, "stdout is closed"),
        ("plan --gpu none 2>&-", 0, ""),
        ("--help > /dev/full", 1, "No space left"),
        ("--version > /dev/full", 1, "No space left"),
        ("plan --list > /dev/full", 1, "No space left"),
        ("plan | true", 141, ""),
        ("doctor --quick | true", 141, ""),
    ],
)
def test_closed_and_full_outputs(model, command, code, said):
    shell = f"set -o pipefail; {sys.executable} -m magicpig {command.format(model=model)}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert said in done.stderr


@pytest.mark.parametrize("mine", [None, "expandable_segments:True"])
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_host_memory_is_pinned_by_several_threads(name, mine):
    """If the user has said nothing about it."""
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
    environment = {key: value for key, value in os.environ.items() if key not in names}
    code = f"""if True:
        import os, sys
        from magicpig import cli
        cli.app = lambda **_: print("torch" in sys.modules, *map(os.environ.get, {names}))
        cli.main()"""
    given = environment | ({name: mine} if mine else {})
    done = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True
    )
    expected = {key: given.get(key) for key in names}
    expected["PYTORCH_ALLOC_CONF"] = (
        mine
        if mine and name == names[0]
        else (None if mine else "pinned_use_cuda_host_register:True,pinned_num_register_threads:8")
    )
    assert done.stdout.split() == ["False", *map(str, expected.values())]


def test_help_fits_a_screen_and_version_is_told():
    result = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) <= 52
    for group in ("Prompt", "Sampling", "Attention", "output"):
        assert group in result.stdout
    assert CliRunner().invoke(app, ["--version"]).stdout.strip() == magicpig.__version__
