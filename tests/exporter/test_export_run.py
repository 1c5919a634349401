"""Runs as folders of transformers: logits of the loaded model, for any sharding of the run; further training."""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardwise.checkpoint.checkpoint import latest, save_checkpoint
from shardwise.checkpoint.saved_weights import SavedWeights
from shardwise.cli.main import run as run_cli
from shardwise.core.errors import CheckpointError, RecipeError, ResourceError, ShardwiseError
from shardwise.engine.build import build
from shardwise.engine.train_state import TrainState
from shardwise.exporter import hf_writer as model_folder
from shardwise.exporter.export_run import export_run
from shardwise.model.files.safetensors_reader import INDEX, WeightFiles
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import dump_recipe, load_recipe, recipe_of
from shardwise.runtime.parallel.shard_slices import local_part, named_parameters
from shardwise.technique import SETTINGS, strategy_from
from shardwise.verifier.reference import reference_model
from tests.harness.pool import Pool
from tests.harness.tiny_run import flip

transformers = pytest.importorskip("transformers")

LLAMA = {"layers": 2, "width": 24, "heads": 4, "kv_heads": 2, "ffn": 40, "vocab": 257, "context": 64}
GPT2 = {"family": "gpt2", "layers": 2, "width": 24, "heads": 4, "ffn": 40, "vocab": 257, "context": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "rope_theta": 500.0},
    "llama tied": {**LLAMA, "tied": True},
    "qwen3": {**LLAMA, "family": "qwen3", "head_dim": 8},
    "gpt2": GPT2,
    "gpt2 untied": {**GPT2, "tied": False},
    "mixture of llama": {**LLAMA, "experts": 3},
    "mixture of qwen3": {
        **LLAMA, "family": "qwen3", "head_dim": 8, "experts": 4, "experts_per_token": 3, "expert_ffn": 16,
        "dense_layers": 1, "normalized_weights": False,
    },
    "deepseek": {
        **LLAMA, "kv_heads": 4, "head_dim": 12, "kv_lora_rank": 10, "q_lora_rank": 14, "rope_head_dim": 4,
        "v_head_dim": 6, "experts": 4, "experts_per_token": 2, "expert_ffn": 16, "shared_ffn": 32, "dense_layers": 1,
        "router": "sigmoid", "router_groups": 2, "router_scale": 2.5, "router_bias": True, "rope_theta": 500.0,
    },
    "latent attention": {
        **LLAMA, "kv_heads": 4, "head_dim": 12, "kv_lora_rank": 10, "rope_head_dim": 4, "tied": True,
    },
}  # fmt: skip


def leave_run(folder: Path, values: dict[str, Any], settings: dict[str, Any]) -> None:
    """A run of loud weights that has saved once; called on every rank."""
    recipe = recipe_of({"steps": 1, "batch_size": 4, "data": {"sequence_length": 16}, **values}, SETTINGS)
    run = build(recipe, blueprint_of(recipe), strategy_from(settings), torch.device("cpu"))
    torch.manual_seed(torch.distributed.get_rank())
    for parameter in run.model.parameters():
        part = local_part(parameter)
        if part.is_floating_point():
            part += 0.1 * torch.randn(part.shape).to(part)
    for name, buffer in run.model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # equal on all ranks
            buffer += torch.linspace(-0.2, 0.3, len(buffer))
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    save_checkpoint(run, TrainState(1, 4), folder / "checkpoints", 1)


def ids(vocab: int = 257) -> Tensor:
    return torch.randint(vocab, (2, 16), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def ours(folder: Path, dtype: torch.dtype) -> Tensor:
    """Logits of a run's model."""
    blueprint = blueprint_of(load_recipe(folder / "recipe.yaml", [], SETTINGS))
    model = reference_model(blueprint, 0, dtype).eval()
    checkpoint = latest(folder / "checkpoints")
    assert checkpoint is not None
    weights = SavedWeights(checkpoint)
    for name, tensor in (*named_parameters(model), *model.named_buffers()):
        if name in weights.dtypes:
            tensor.copy_(weights.read(name))
    return blueprint.logits(model, ids())


@torch.no_grad()
def theirs(folder: Path, dtype: torch.dtype) -> Tensor:
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"]
    if dtype == torch.float64:
        widen(model)
    found: Tensor = model.eval()(ids()).logits
    return found


def widen(model: torch.nn.Module) -> None:
    """transformers takes norms and angles in fp32, whatever the weights are in."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            norm: Any = module
            norm.forward = lambda x, norm=norm: torch.rms_norm(
                x, x.shape[-1:], norm.weight, norm.variance_epsilon
            )
        elif type(module).__name__.endswith("RotaryEmbedding"):
            rope: Any = module
            theta = rope.config.rope_parameters["rope_theta"]
            width = rope.config.head_dim
            rope.forward = lambda x, position_ids, theta=theta, width=width: angles(
                x, position_ids, theta, width
            )


def angles(x: Tensor, at: Tensor, theta: float, width: int) -> tuple[Tensor, Tensor]:
    found = at[..., None] * theta ** -(torch.arange(0, width, 2, dtype=x.dtype) / width)
    found = torch.cat([found, found], -1)
    return found.cos(), found.sin()


ADAPTED: dict[str, dict[str, Any]] = {
    "lora": {"model": LLAMA, "adapter": {"rank": 4, "alpha": 8}},
    "dora": {"model": GPT2, "adapter": {"name": "dora", "rank": 4, "alpha": 8, "rank_stabilized": True}},
    "nf4": {"model": LLAMA, "adapter": {"rank": 4, "alpha": 8, "targets": "attention", "quantize": "nf4"}},
}
CASES = [
    ("llama", "fp64"),
    ("llama tied", "fp32"),
    ("qwen3", "fp64"),
    ("gpt2", "fp64"),
    ("gpt2 untied", "fp32"),
    ("mixture of llama", "fp32"),
    ("mixture of qwen3", "fp32"),
    ("deepseek", "fp32"),
    ("latent attention", "fp64"),
]


@pytest.fixture(scope="module")
def runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of every model of ``CASES`` and ``ADAPTED``, and of Hugging Face models, saved by two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    for name, config in hub_configs().items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / f"source {name}")
        (folder / f"source {name}" / "tokenizer.json").write_text(TOKENIZER)
        (folder / f"source {name}" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    pool.run(2, leave_runs, folder)
    return {path.name: path for path in folder.iterdir()}


def hub_configs() -> dict[str, Any]:
    t = transformers
    small = {"vocab_size": 257, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return {
        "mixtral": t.MixtralConfig(**small, num_local_experts=3),
        "gpt2": t.GPT2Config(vocab_size=257, n_positions=64, n_embd=24, n_layer=2, n_head=2),
    }


TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "</s>": 2}, "unk_token": "a"},
    }
)


def leave_runs(folder: Path) -> None:
    for name in hub_configs():
        source = str(folder / f"source {name}")
        values = {"model": {"hf": source}, "data": {"sequence_length": 16, "tokenizer": source}}
        leave_run(folder / f"hf {name}", values, {"precision": "bf16", "zero_stage": 3})
    for name, values in ADAPTED.items():
        leave_run(folder / name, values, {"precision": "fp32", "zero_stage": 3})
    for name, precision in CASES:
        leave_run(folder / name, {"model": MODELS[name]}, {"precision": precision, "zero_stage": 3})


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_logits_are_those_of_our_model(
    name: str, precision: str, tmp_path: Path, runs: dict[str, Path]
) -> None:
    export_run(runs[name], tmp_path / "out")
    dtype, near = {"fp64": (torch.float64, 1e-10), "fp32": (torch.float32, 1e-6)}[precision]
    expected, found = ours(runs[name], dtype), theirs(tmp_path / "out", dtype)
    assert found.dtype == dtype
    assert (found - expected).abs().max() <= near * max(1, expected.abs().max())


@pytest.mark.parametrize("name", ["mixture of llama", "mixture of qwen3", "deepseek"])
def test_files_of_mixtures_are_those_that_transformers_writes(
    name: str, tmp_path: Path, runs: dict[str, Path]
) -> None:
    export_run(runs[name], tmp_path / "ours")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[stored], tensor) for stored, tensor in expected.items())


def test_biases_of_routers_are_not_rounded(tmp_path: Path, runs: dict[str, Path]) -> None:
    export_run(runs["deepseek"], tmp_path / "out", "bf16")
    kinds = WeightFiles(tmp_path / "out").kinds
    assert {name for name, kind in kinds.items() if kind == "F32"} == {
        "model.layers.1.mlp.gate.e_score_correction_bias"
    }


@pytest.mark.parametrize("name", list(ADAPTED))
def test_adapters_are_merged(name: str, tmp_path: Path, runs: dict[str, Path]) -> None:
    """With packed weights: into what they stand for."""
    _, merge = export_run(runs[name], tmp_path / "out")
    expected, found = ours(runs[name], torch.float32), theirs(tmp_path / "out", torch.float32)
    scale = float(expected.abs().max())
    assert (found - expected).abs().max() <= 2e-6 * scale
    assert merge is not None and merge.layers == {"lora": 14, "dora": 12, "nf4": 8}[name]
    assert merge.unpacked == (("nf4",) if name == "nf4" else ())
    assert merge.difference <= 2e-6 * scale


@pytest.mark.parametrize("name", ["mixtral", "gpt2"])
def test_a_hugging_face_model_keeps_its_names(name: str, tmp_path: Path, runs: dict[str, Path]) -> None:
    """Its config too, and its tokenizer; what the model has as one tensor and its files as many is taken apart."""
    source, run, out = runs[f"source {name}"], runs[f"hf {name}"], tmp_path / "out"
    export_run(run, out, "fp32")
    before, after = WeightFiles(source), WeightFiles(out)
    assert after.shapes == before.shapes and set(after.kinds.values()) == {"F32"}
    assert any("experts.2.w1" in stored for stored in after.shapes) == (name == "mixtral")
    said = {folder: json.loads((folder / "config.json").read_text()) for folder in (source, out)}
    for folder in said.values():
        folder.pop("torch_dtype", None)
    assert said[out] == said[source]
    assert (out / "tokenizer.json").read_text() == TOKENIZER
    expected, found = ours(run, torch.float32), theirs(out, torch.float32)
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()
    export_run(run, tmp_path / "narrow")
    assert set(WeightFiles(tmp_path / "narrow").kinds.values()) == {"BF16"}, "what the run computed in"


def test_a_recipe_trains_on_from_it(tmp_path: Path, runs: dict[str, Path]) -> None:
    export_run(runs["llama tied"], tmp_path / "out")
    recipe = recipe_of(
        {
            "model": {"hf": str(tmp_path / "out")},
            "data": {"sequence_length": 16},
            "steps": 1,
            "batch_size": 1,
            "adapter": {"rank": 4},
        }
    )
    blueprint = blueprint_of(recipe)
    model = reference_model(blueprint, 0, torch.float32)
    expected = ours(runs["llama tied"], torch.float32)
    found = blueprint.logits(model, ids())
    assert (found - expected).abs().max() <= 1e-6 * max(1, expected.abs().max())
    total, count = blueprint.loss(model, {"input_ids": ids()[:, :-1], "labels": ids()[:, 1:]})
    (total / count).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_shards_with_an_index(tmp_path: Path, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    export_run(runs["llama"], tmp_path / "one")
    monkeypatch.setattr(model_folder, "LARGEST_SHARD", 30_000)
    written, _ = export_run(runs["llama"], tmp_path / "many")
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert written.files == len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    sizes = {file: sum(t.nbytes for t in load_file(file).values()) for file in files}
    assert all(size <= 30_000 or len(load_file(file)) == 1 for file, size in sizes.items())
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(sizes.values()) == written.bytes
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert {
        name: load_file(tmp_path / "many" / file)[name] for name, file in index["weight_map"].items()
    }.keys() == (whole.keys())
    assert torch.equal(theirs(tmp_path / "one", torch.float64), theirs(tmp_path / "many", torch.float64))


def peak_of_export(small: Path, run: Path, target: Path) -> int:
    """Bytes by which this process grew at most, as the system sees it: files that are mapped count."""
    export_run(small, target.with_name("small"))  # the imported model
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark is now the level
    before = status("VmHWM")
    export_run(run, target)
    return status("VmHWM") - before


def status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith(key))


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_memory_is_that_of_a_few_tensors(tmp_path: Path, runs: dict[str, Path], pool: Pool) -> None:
    model = {**LLAMA, "layers": 16, "width": 256, "ffn": 704}
    pool.run(2, leave_run, tmp_path / "run", {"model": model}, {"precision": "fp32", "zero_stage": 3})
    peak = pool.run(1, peak_of_export, runs["llama"], tmp_path / "run", tmp_path / "out")[0]
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert size > 40e6
    assert peak < size / 4, f"{peak:,} bytes for a file of {size:,}"


def test_the_command(tmp_path: Path, runs: dict[str, Path], capfd: Any) -> None:
    run, out = str(runs["lora"]), str(tmp_path / "out")
    assert run_cli(["export", run, "--to", out, "--dtype", "bf16"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[0].startswith(f"{out}: 21 tensors, ") and said[0].endswith(
        "in 1 file, read back and compared"
    )
    assert said[1].startswith(
        "14 layers merged: the greatest difference between the logits of the adapted and of the"
    )
    difference = float(said[1].split(" is ")[1].split(",")[0])
    assert 1e-4 < difference < 1, "rounded to bf16"
    for words in ([run], [run, out, "--to", out], [run, out, "--dtype", "fp8"]):
        assert run_cli(["export", *words]) == 2


# ---- refusals ---------------------------------------------------------------------------------------------


def refused(kind: type[ShardwiseError], run: Path, target: Path) -> str:
    with pytest.raises(kind) as caught:
        export_run(run, target)
    assert not target.exists() or list(target.iterdir()) == [target / "mine"]
    assert not list(target.parent.glob("tmp-*"))
    return caught.value.line()


def test_what_is_no_run(tmp_path: Path, runs: dict[str, Path]) -> None:
    out = tmp_path / "out"
    assert "not the folder of a run" in refused(CheckpointError, tmp_path, out)
    (tmp_path / "recipe.yaml").write_bytes((runs["gpt2"] / "recipe.yaml").read_bytes())
    assert "no checkpoint" in refused(CheckpointError, tmp_path, out)
    out.mkdir()
    (out / "mine").touch()
    assert "the folder exists already" in refused(RecipeError, runs["llama"], out)


def test_models_that_transformers_cannot_say(tmp_path: Path) -> None:
    grouped = {"model": {**GPT2, "kv_heads": 2}, "data": {"sequence_length": 16}}
    wide = {"model": {**GPT2, "head_dim": 8}, "data": {"sequence_length": 16}}
    factory = {"model": {"factory": "tests.harness.dropping:dropped", "arguments": {"blocks": 2}}}
    shared = {"model": {**LLAMA, "experts": 4, "shared_ffn": 8}, "data": {"sequence_length": 16}}
    unshared, unbiased = (
        {"model": {**MODELS["deepseek"], **change}, "data": {"sequence_length": 16}}
        for change in ({"shared_ffn": 0}, {"router_bias": False})
    )
    for values, message in [
        (shared, "(model.shared_ffn): its Mixtral has it at 0"),
        (unshared, "(model.shared_ffn): its DeepseekV3 has a multiple of the 16 of an expert"),
        (unbiased, "(model.router_bias): its DeepseekV3 has it at true"),
        (grouped, "no grouped heads, and this model has 2 key/value heads for 4"),
        (wide, "heads of its GPT-2 are 24 / 4 wide, and this model's 8"),
        (factory, "it is user code, which no config.json describes"),
    ]:
        blueprint = blueprint_of(recipe_of({"steps": 1, "batch_size": 1, **values}))
        with pytest.raises(RecipeError, match="cannot be written for transformers") as caught:
            blueprint.hf_folder()
        assert message in caught.value.line()


def test_a_damaged_checkpoint(tmp_path: Path, runs: dict[str, Path]) -> None:
    shutil.copytree(runs["llama"], tmp_path / "run")
    flip(next((tmp_path / "run" / "checkpoints").rglob("weights-*")), 5000)
    assert "does not match its hash" in refused(CheckpointError, tmp_path / "run", tmp_path / "out")


def test_a_disk_that_loses_bytes_is_noticed(
    tmp_path: Path, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_same = model_folder._require_equal_hashes

    def lost(staged: Path, hashes: Any) -> None:
        flip(staged / "model.safetensors", -100)
        require_same(staged, hashes)

    monkeypatch.setattr(model_folder, "_require_equal_hashes", lost)
    assert "reads back with other values" in refused(CheckpointError, runs["llama"], tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage())
    assert "needed, 10 B free" in refused(ResourceError, runs["llama"], tmp_path / "out")


class Usage:
    free = 10
