"""`magicpig plan`: its cost model and its command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner
from zoo import make_model

from magicpig.cli import app
from magicpig.cli.plan import quantity
from magicpig.planning import costs, here
from magicpig.planning.costs import Load, Machine, systems
from magicpig.planning.geometry import KNOWN, geometry_of
from magicpig.planning.machines import CPUS, GIB, GPUS, any_gpu, named
from magicpig.planning.plan import best_of, choices

L20 = Machine(named("L20", GPUS, "--gpu"), replace(named("8563C", CPUS, "--cpu"), stream=300e9))
LLAMA = geometry_of("llama-3.1-8b")


def by_name(machine, load, model=LLAMA):
    return {choice.system: choice for choice in choices(model, machine, load)}


def test_geometries_are_those_of_the_models():
    assert (LLAMA.layers, LLAMA.heads, LLAMA.kv_heads, LLAMA.head_dim) == (32, 32, 8, 128)
    assert LLAMA.parameters == 8_030_261_248
    assert LLAMA.parameters - LLAMA.parameters_read == 128256 * 4096
    assert LLAMA.kv_bytes(98304) == pytest.approx(12.88e9, rel=0.01)  # the paper: 12.9 GB
    assert geometry_of("llama-2-13b").parameters == pytest.approx(13.0e9, rel=0.01)
    for name in KNOWN:
        assert geometry_of(name).parameters > 1e9


def test_the_papers_machine_is_met():
    """MagicPIG: 8B, 96k, L20: GPU-only 30.5 tokens/s at the largest batch that fits."""
    found = by_name(L20, Load(98304, lsh_share=0.02))
    assert found["gpu-only"].largest == 2
    assert found["gpu-only"].tokens_per_second == pytest.approx(30.5, rel=0.1)
    lsh = found["lsh:10:150"]
    assert lsh.tokens_per_second > 53.8  # with its kernels; ours are faster
    assert 1 / lsh.alone.seconds > 18.3


def test_halves_are_taken_where_they_are_faster():
    system = costs.Lsh(LLAMA, L20, Load(98304), (10, 150))
    for batch in (2, 3, 8):
        halved, whole = system.step(batch).seconds, system.by_turns(batch)[0]
        assert whole / 2 < halved < whole, batch
    assert system.step(1).seconds == system.by_turns(1)[0]
    short = costs.Lsh(LLAMA, L20, Load(2048, lsh_share=0.02), (10, 150))
    assert short.step(2).seconds == short.by_turns(2)[0]  # whose weights would be read twice


def test_more_tables_read_more_keys():
    """As the measured shares do: 1.57 and 1.97 % of random keys (docs/performance.md)."""
    assert costs.more_than_default(10, 150) == 1
    assert costs.more_than_default(10, 170) == pytest.approx(1.97 / 1.57, rel=0.02)
    found = by_name(L20, Load(98304))
    assert found["lsh:10:170"].tokens_per_second < 0.9 * found["lsh:10:150"].tokens_per_second


def test_what_fits_is_what_fitted():
    """By the batches that throughput.py found to fit into the memory of a GPU."""
    points = json.loads((Path(__file__).parents[1] / "docs/throughput-h200.json").read_text())
    checked = 0
    for point in points:
        if point["system"] not in ("full", "scan:2:1%") or not point["fits"]:
            continue
        for budget in ("24GiB", "40GiB", "48GiB"):
            gpu = replace(named("H200", GPUS, "--gpu"), memory=quantity("--gpu-memory", budget))
            found = by_name(Machine(gpu, L20.cpu), Load(point["context"]))
            name = "gpu-only" if point["system"] == "full" else point["system"]
            assert (point["batch"] <= found[name].largest) is (budget in point["fits"])
            checked += 1
    assert checked > 20


def test_short_contexts():
    """Are read whole by `lsh`; copying what is there already makes nothing faster."""
    for context in (1, 100, 1000):
        found = by_name(L20, Load(context))
        assert found["kv-stream"].tokens_per_second <= found["gpu-only"].tokens_per_second
        assert found["lsh:10:150"].alone.seconds == pytest.approx(
            found["cpu-dense"].alone.seconds, rel=0.05
        )


def test_more_of_anything_is_no_slower():
    load = Load(98304)
    before = by_name(L20, load)
    gpu, cpu = L20.gpu, L20.cpu
    for better in (
        Machine(replace(gpu, bandwidth=2 * gpu.bandwidth), cpu),
        Machine(replace(gpu, memory=2 * gpu.memory), cpu),
        Machine(replace(gpu, link=2 * gpu.link), cpu),
        Machine(gpu, replace(cpu, stream=2 * cpu.stream, gather=2 * cpu.gather)),
        Machine(gpu, replace(cpu, cores=2 * cpu.cores)),
    ):
        after = by_name(better, load)
        for name, choice in before.items():
            assert after[name].tokens_per_second >= 0.98 * choice.tokens_per_second, name


def test_longer_contexts_take_longer_and_fit_fewer():
    short, long = (by_name(L20, Load(tokens)) for tokens in (16384, 98304))
    for name in short:
        assert long[name].largest <= short[name].largest
        assert long[name].alone.seconds > short[name].alone.seconds


def test_the_largest_batch_fits_and_more_would_not():
    machine = Machine(L20.gpu, replace(L20.cpu, memory=100 * GIB))
    for system in systems(LLAMA, machine, Load(98304)):
        largest = system.largest_batch()
        step, more = system.step(largest), system.step(largest + 1)
        assert step.gpu_memory <= L20.gpu.memory
        assert step.cpu_memory <= 100 * GIB
        assert more.gpu_memory > 0.9 * L20.gpu.memory or more.cpu_memory > 100 * GIB, system.name


def test_where_a_gpu_holds_everything_it_wins():
    """Its memory is tens of times as fast as a CPU's."""
    machine = Machine(named("H200", GPUS, "--gpu"), named("Xeon-16", CPUS, "--cpu"))
    assert best_of(choices(LLAMA, machine, Load(16384))).system == "gpu-only"
    machine = Machine(replace(machine.gpu, memory=24 * GIB), machine.cpu)
    assert best_of(choices(LLAMA, machine, Load(98304))).system.startswith("scan")


def test_a_machine_without_a_gpu():
    report = json.loads(run("--json", "--gpu", "none", "--cpu", "EPYC-9354").stdout)
    assert report["gpu"] is None
    rows = {row["system"]: row for row in report["systems"]}
    assert set(rows) == {"cpu-dense", "lsh:10:150", "lsh:10:170", "scan:2:1%", "scan:4:1%"}
    assert report["best"] == "scan:2:1%"
    assert all(row["gpu_memory_bytes"] == 0 for row in rows.values())
    assert rows["cpu-dense"]["cpu_memory_bytes"] > 16e9 + 12e9
    shown = run("--gpu", "none", "--model", "llama-2-7b", "--context", "8k").stdout
    assert "L20" not in shown
    assert "gpu-only" not in shown


def test_the_default_model_on_two_cores_is_met():
    """README, benchmarks/decode.py: 6,000 tokens, alone and in a batch of eight."""
    small = replace(LLAMA, parameters=134_515_008, parameters_read=134_515_008, layers=30)
    small = replace(small, heads=9, kv_heads=3, head_dim=64)
    machine = Machine(None, named("EPYC-2-cores", CPUS, "--cpu"))
    found = {s.name: s for s in systems(small, machine, Load(6000, lsh_share=0.045))}
    for name, batch, measured in (
        ("cpu-dense", 1, 47.5),
        ("cpu-dense", 8, 131),
        ("lsh:10:150", 1, 53.2),
        ("lsh:10:150", 8, 217),
        ("scan:2:1%", 1, 55.8),
        ("scan:2:1%", 8, 237),
    ):
        planned = batch / found[name].step(batch).seconds
        assert planned == pytest.approx(measured, rel=0.25), (name, batch)


def saved(folder, kind, **fields):
    AutoConfig.for_model(kind, **fields).save_pretrained(folder)
    return geometry_of(str(folder))


def test_sliding_layers_take_time_too(tmp_path):
    sizes = {"num_hidden_layers": 12, "hidden_size": 2048, "intermediate_size": 4096}
    found = saved(tmp_path, "gemma2", sliding_window=4096, **sizes)
    assert (found.layers, found.spans) == (6, (4096,) * 6)
    without = replace(found, spans=())
    for machine in (L20, Machine(None, L20.cpu)):
        for context in (2048, 32768):
            slow, fast = (
                {s.name: s for s in systems(m, machine, Load(context))} for m in (found, without)
            )
            for name, system in slow.items():
                more = system.step(1).seconds - fast[name].step(1).seconds
                read = found.kv_bytes(min(context, 4096), 6)
                assert more > read / (machine.gpu.bandwidth if machine.gpu else machine.cpu.stream)


def test_experts_that_nobody_asks_are_not_read(tmp_path):
    sizes = {"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2}
    found = saved(tmp_path, "mixtral", **sizes)
    assert found.expert_share == 0.25
    assert 0.8 * found.parameters < found.expert_parameters < found.parameters
    rest = found.parameters_read - found.expert_parameters
    assert found.parameters_used == rest + found.expert_parameters / 4
    assert found.weights_read(1) == 2 * found.parameters_used
    assert 2 * found.parameters_used < found.weights_read(4) < found.weights_read(64)
    assert found.weights_read(64) == pytest.approx(2 * found.parameters_read)
    assert LLAMA.weights_read(1) == LLAMA.weights_read(9) == 2 * LLAMA.parameters_read


def test_what_a_plan_does_not_know_is_said(tmp_path):
    assert not LLAMA.notes
    for field in ({"quantization_config": {"quant_method": "gptq"}}, {"dtype": "float32"}):
        saved(tmp_path, "llama", num_hidden_layers=2, **field)
        assert "this plan counts two bytes for each" in run("--model", str(tmp_path)).stdout


def test_names_of_machines_are_whole_words():
    for name, full in (
        ("4090", "RTX-4090"),
        ("a6000", "RTX-A6000"),
        ("l40", "L40"),
        ("H20", "H20"),
    ):
        assert named(name, GPUS, "--gpu").name == full
    assert any_gpu("L20", 24 * GIB, None).memory == 24 * GIB
    made = any_gpu("abacus", 24 * GIB, 500e9)
    assert (made.name, made.memory, made.bandwidth) == ("abacus", 24 * GIB, 500e9)
    shown = run("--gpu", "abacus", "--gpu-memory", "30GiB", "--gpu-bandwidth", "500GB/s").stdout
    assert "abacus: 30.0 GiB, 500 GB/s" in shown


def test_few_cores_do_not_get_all_of_a_memory():
    cpu = L20.cpu
    assert cpu.with_cores(52) == cpu
    few = cpu.with_cores(2)
    assert (few.cores, few.stream) == (2, 40e9)
    assert few.gather / few.stream == pytest.approx(cpu.gather / cpu.stream)
    dense = [by_name(Machine(L20.gpu, c), Load(98304))["cpu-dense"] for c in (cpu, few)]
    assert dense[0].tokens_per_second > 5 * dense[1].tokens_per_second


@pytest.mark.parametrize(
    ("text", "value"),
    [("24GiB", 24 * 2**30), ("1.5tb", 1.5e12), ("7b", 7.0), ("64 MiB", 2**26)],
)
def test_quantities(text, value):
    assert quantity("--x", text) == value
    assert quantity("--x", f"{text}/s", "300GB/s") == value
    assert quantity("--x", text, "300GB/s") == value


@pytest.mark.parametrize(
    "text", ["", "many", "-3GB", "0GB", "1.2.3GB", "GB", "300", "24GiB/s", "9e9"]
)
def test_what_is_no_quantity(text):
    with pytest.raises(ValueError, match="--x must be a number and a unit, like 24GiB, not"):
        quantity("--x", text)


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_table_marks_the_best():
    result = run("--gpu-memory", "24GiB", "--cpu-memory", "256GiB")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    [gpu_only] = [line for line in lines if line.strip().startswith("gpu-only")]
    assert "does not fit: GPU memory" in gpu_only
    assert "gpu-only is --method full" in result.stdout
    [best] = [line for line in lines if line.startswith("*  ")]
    assert "scan:2:1%" in best


@pytest.mark.parametrize("gpu", ["RTX-4090", "none"])
def test_where_nothing_fits_the_longest_context_that_does_is_named(gpu):
    memory = ["--cpu-memory", "16GiB" if gpu != "none" else "24GiB"]
    report = json.loads(run("--json", "--gpu", gpu, *memory).stdout)
    longest = report["longest_that_fits"]
    assert report["best"] is None
    for tokens, fits in ((longest["context"], True), (longest["context"] + 1024, False)):
        found = json.loads(run("--json", "--gpu", gpu, *memory, "--context", str(tokens)).stdout)
        of_batch = {row["system"]: row["batch"] for row in found["systems"]}
        assert any(of_batch.values()) is fits
        assert bool(of_batch[longest["system"]]) is fits
        assert (found["longest_that_fits"] is None) is fits
    said = run("--gpu", gpu, *memory).stdout.splitlines()[-1]
    assert said == f"Nothing fits. {longest['context']:,} tokens would, with {longest['system']}."


def test_no_longer_context_than_the_models_is_named():
    arguments = ["--context", "10M", "--gpu", "RTX-4090", "--cpu-memory", "256GiB"]
    longest = json.loads(run("--json", *arguments).stdout)["longest_that_fits"]
    assert longest["context"] == 131072


def test_where_not_even_a_short_context_fits():
    said = run("--model", "llama-3.1-70b", "--gpu", "RTX-4090").stdout.splitlines()[-1]
    assert said.startswith("Nothing fits, not even 1,024 tokens")
    assert run("--gpu", "none", "--cpu-memory", "1GiB", "--context", "500").exit_code == 0


def test_json_has_all():
    result = run("--json", "--context", "16k", "--gpu", "rtx 4090", "--cores", "8", "--batch", "4")
    report = json.loads(result.stdout)
    assert report["load"]["context"] == 16384
    assert (report["gpu"]["name"], report["cpu"]["cores"]) == ("RTX-4090", 8)
    assert len(report["systems"]) == 7
    assert all(row["largest_batch"] <= 4 for row in report["systems"])
    assert report["largest_looked_at"] == 4
    assert report["systems"][0]["method"] == "full"
    assert report["best"] in [row["system"] for row in report["systems"]]


def test_contexts_longer_than_the_models():
    shown = run("--model", "llama-2-7b", "--context", "96k").stdout
    assert "made for 4,096 tokens" in shown
    assert "made for" not in run("--context", "96k").stdout


def test_a_single_layer_is_dense(tmp_path):
    config = make_model("llama").config
    config.num_hidden_layers = 1
    config.save_pretrained(tmp_path)
    report = json.loads(run("--json", "--model", str(tmp_path)).stdout)
    assert all(row["cpu_memory_bytes"] >= 0 for row in report["systems"])


def test_any_folder_is_a_model(tmp_path):
    for name, layers in (("llama", 4), ("gemma2", 2)):
        make_model(name).config.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        written["attn_implementation"] = "flash_attention_2"  # which it was trained with
        (tmp_path / "config.json").write_text(json.dumps(written))
        report = json.loads(run("--json", "--model", str(tmp_path)).stdout)
        assert report["model"]["layers"] == layers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "abacus"], "--gpu 'abacus' is not known: A10,"),
        (["--model", "./none"], "has a configuration that makes no model"),
        (["--gpu", "L4S"], "--gpu-memory and --gpu-bandwidth describe others"),
        (["--gpu", "H2"], "--gpu 'H2' is not known"),
        (["--gpu", "abacus", "--gpu-memory", "1GB"], "--gpu 'abacus' is not known"),
        (["--here", "--cpu", "EPYC-9354"], "leave --cpu out, or --here"),
        (["--gpu-bandwidth", "fast"], "--gpu-bandwidth must be a number and a unit, like 864GB/s"),
        (["--gpu", ""], "--gpu '' is not known"),
        (["--cpu", ""], "--cpu '' is not known"),
        (["--model", "falcon"], "does not let its attention be replaced"),
        (["--model", "bloom"], "BloomForCausalLM does not let its attention be replaced"),
        (["--model", "wrong"], "--model 'wrong' cannot be read: "),
        (["--model", "empty"], "--model 'empty' cannot be read: "),
        (["--model", "bert"], "which does not continue text"),
        (["--model", "sinks"], "does not know learned sinks"),
        (["--model", "latent"], "latent attention (MLA)"),
        (["--model", "uneven"], "32 heads cannot share 7 KV heads evenly"),
        (
            ["--model", "smollm2-ruler-32k"],
            "`magicpig pull smollm2-ruler-32k --adapter PATH` makes",
        ),
        (["--gpu", "A100"], "could be more than one: A100-40GB, A100-80GB"),
        (["--cpu", "6502"], "--cpu '6502' is not known"),
        (["--context", "long"], "a length must be a number of tokens"),
        (["--context", "1000000000000"], "1,073,741,824 at most, like 4k"),
        (["--model", "no/such/model"], "is neither here nor on the hub"),
        (["--cpu-bandwidth", "fast"], "--cpu-bandwidth must be a number and a unit"),
        (["--cpu-bandwidth", "300"], "like 300GB/s, not '300'"),
        (["--gpu", "A10", "--gpu-memory", "80GiB"], "more than the A10 has, 24.0 GiB: take"),
        (["--lsh-share", "2"], "--lsh-share must be above 0"),
        (["--gpu", "none", "--gpu-memory", "24GiB"], "--gpu-memory limits a GPU"),
        (["--cpu-memory", "9" * 400], "--cpu-memory must be a number and a unit"),
        (["--model", "all-sliding"], "has no layer that attends to a whole context"),
        (["--model", "mamba"], "has no attention to be quicker at"),
        (["--model", "smollm2"], "is not here yet: `magicpig pull smollm2` fetches it"),
    ],
)
def test_what_is_wrong_is_said(monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAGICPIG_CACHE", str(tmp_path / "cache"))
    window = {"sliding_window": 64, "num_hidden_layers": 2}
    AutoConfig.for_model("mistral", **window).save_pretrained("all-sliding")
    AutoConfig.for_model("mamba", num_hidden_layers=2).save_pretrained("mamba")
    AutoConfig.for_model("bert", architectures=["BertForMaskedLM"]).save_pretrained("bert")
    for name in ("falcon", "bloom"):
        AutoConfig.for_model(name, num_hidden_layers=2).save_pretrained(name)
    for name, config in (
        ("wrong", {"num_attention_heads": "x"}),
        ("none", {"num_key_value_heads": 0}),
        ("empty", {}),
    ):
        Path(name).mkdir()
        model_type = {"model_type": "llama"} if config else {}
        (Path(name) / "config.json").write_text(json.dumps({**model_type, **config}))
    AutoConfig.for_model("gpt_oss", num_hidden_layers=2).save_pretrained("sinks")
    AutoConfig.for_model("deepseek_v3", num_hidden_layers=2).save_pretrained("latent")
    AutoConfig.for_model("llama", num_key_value_heads=7).save_pretrained("uneven")
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr


def test_known_machines_are_listed():
    shown = run("--list").stdout
    assert all(one.name in shown for one in [*GPUS, *CPUS])
    listed = json.loads(run("--list", "--json").stdout)
    assert [gpu["name"] for gpu in listed["gpus"]] == [gpu.name for gpu in GPUS]
    assert [cpu["name"] for cpu in listed["cpus"]] == [cpu.name for cpu in CPUS]


def test_this_machine_is_measured(monkeypatch):
    monkeypatch.setattr(here, "TOKENS", 4096)
    cpu = here.this_cpu()
    assert cpu.stream > cpu.gather / 4 > 0
    assert 0 < cpu.entry_seconds < 1e-6
    assert 0 < cpu.row_seconds < 1e-5
    assert cpu.macs > 1e8
    result = run("--here", "--json", "--model", "llama-2-7b", "--context", "4k")
    report = json.loads(result.stdout)
    assert report["cpu"]["name"] == "here"
    gpu = here.this_gpu()
    assert (report["gpu"] is None) is (gpu is None)
    assert ("there is no GPU here" in result.stderr) is (gpu is None)
    asked = json.loads(run("--here", "--json", "--gpu", "L20").stdout)
    assert asked["gpu"]["name"] == "L20"
    if gpu is None:
        for flag, value in (("--gpu-memory", "8GiB"), ("--gpu-bandwidth", "500GB/s")):
            said = run("--here", flag, value).stderr
            assert f"{flag} is of a GPU, and there is none here" in said
