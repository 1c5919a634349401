"""Hugging Face models: logit for logit what ``from_pretrained`` gives, by slice; every refusal in a line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.core.errors import RecipeError
from shardwise.model.blueprint import Batch
from shardwise.model.files import safetensors_reader as weights
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.runtime.parallel.shard_slices import named_parameters, share, shared_names

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 53, "hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip


def _configs() -> dict[str, Any]:
    t = transformers
    gpt2 = {"vocab_size": 53, "n_embd": 36, "n_layer": 3, "n_head": 3, "n_positions": 64}
    gpt_neo = {  # its causal masks, one of them of a window, are buffers of bool
        "vocab_size": 53, "hidden_size": 36, "num_layers": 2, "num_heads": 3, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]], "window_size": 8,
    }  # fmt: skip
    return {
        "llama": t.LlamaConfig(**SMALL),
        "llama-tied": t.LlamaConfig(**SMALL, tie_word_embeddings=True),
        "llama-3.1": t.LlamaConfig(**SMALL, rope_parameters=ROPE),
        "gpt2": t.GPT2Config(**gpt2),
        "gpt2-untied": t.GPT2Config(**gpt2, tie_word_embeddings=False),
        "qwen2": t.Qwen2Config(**SMALL),
        "qwen2-tied": t.Qwen2Config(**SMALL, tie_word_embeddings=True),
        "mistral-window": t.MistralConfig(**SMALL, sliding_window=8),
        "mixtral": t.MixtralConfig(**SMALL, num_local_experts=3),
        "gpt-neo": t.GPTNeoConfig(**gpt_neo),
    }


EACH = pytest.mark.parametrize("name", list(_configs()))
VARIED = pytest.mark.parametrize("name", ["llama-3.1", "gpt2", "qwen2-tied", "mistral-window"])


def _batch(length: int = 24) -> Batch:
    ids = torch.randint(0, 53, (2, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


@EACH
@pytest.mark.parametrize("shard_size", ["1GB", "8KB"])
def test_logits_are_those_of_from_pretrained(name: str, shard_size: str, saved: Any, whole: Any) -> None:
    folder = saved(_configs()[name], max_shard_size=shard_size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard_size == "8KB")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = whole(HuggingFaceModel(str(folder), 24)).eval()
    ids = _batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, theirs(ids).logits)


@EACH
def test_sharded_fill_is_the_whole_fill(name: str, saved: Any, whole: Any, gathered: Any) -> None:
    blueprint = HuggingFaceModel(str(saved(_configs()[name], max_shard_size="30KB")), 24)
    expected = dict(named_parameters(whole(blueprint)))
    parts = gathered(blueprint, {"data": 5})
    assert parts.keys() == expected.keys()
    for key, parameter in expected.items():
        assert torch.equal(parts[key], parameter), key


@VARIED
def test_real_and_fake_runs_are_one_program_without_waits(
    name: str, saved: Any, whole: Any, recorder: Any
) -> None:
    """No S x S mask where there is no window, no look at the ids, in training mode."""
    blueprint = HuggingFaceModel(str(saved(_configs()[name])), 24)
    real, fake, batch = recorder(), recorder(), _batch()
    model = whole(blueprint).train()
    with real:
        _forward_backward(blueprint, model, batch)
    with torch.device("meta"):
        imagined = blueprint.build().train()
        aliases = shared_names(imagined)
    with FakeTensorMode(allow_non_fake_inputs=True):
        imagined.to_empty(device="cpu")
        share(imagined, aliases)
        batch = {key: torch.empty_like(value) for key, value in batch.items()}
        with fake:
            _forward_backward(blueprint, imagined, batch)
    assert real.names == fake.names
    attention = [n for n in real.names if "attention" in n and "backward" not in n]
    assert len(attention) == 3
    assert all("local_attention" in n for n in attention) == (name == "mistral-window"), attention
    assert "aten.le.Tensor" not in real.names, "transformers made a mask"


def _forward_backward(blueprint: HuggingFaceModel, model: nn.Module, batch: Batch) -> None:
    total, count = blueprint.loss(model, batch)
    (total / count).backward()


def test_loss_is_transformers_loss(saved: Any, whole: Any) -> None:
    blueprint = HuggingFaceModel(str(saved(transformers.LlamaConfig(**SMALL))), 24)
    model, batch = whole(blueprint), _batch()
    batch["labels"][:, -3:] = -100
    total, count = blueprint.loss(model, batch)
    shifted = torch.nn.functional.pad(batch["labels"], (1, 0), value=-100)[:, :-1]  # they shift themselves
    theirs = model(batch["input_ids"], labels=torch.cat([shifted, batch["labels"][:, -1:]], 1)[:, :24]).loss
    assert count.item() == blueprint.count(batch).item() == 42
    assert (total / count).item() == pytest.approx(theirs.item(), rel=1e-5)


def test_double_precision(saved: Any, whole: Any) -> None:
    blueprint = HuggingFaceModel(str(saved(transformers.LlamaConfig(**SMALL))), 24)
    total, _ = blueprint.loss(whole(blueprint, dtype=torch.float64), _batch())
    single, _ = blueprint.loss(whole(blueprint), _batch())
    assert total.dtype == torch.float64
    assert total.item() == pytest.approx(single.item(), rel=1e-5)


def test_half_precision_files_fill_full_precision_models(saved: Any, whole: Any) -> None:
    folder = saved(transformers.LlamaConfig(**SMALL))
    tensors = {k: v.bfloat16() for k, v in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = whole(HuggingFaceModel(str(folder), 24))
    assert model.lm_head.weight.dtype == torch.float32
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"].float())


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_reduced_depth(name: str, saved: Any, whole: Any) -> None:
    blueprint = HuggingFaceModel(str(saved(_configs()[name])), 24)
    assert blueprint.depth == 3
    with torch.device("meta"):
        shallow, full = blueprint.build(depth=1), blueprint.build()
    assert len(blueprint.blocks(shallow)) == 1
    assert len(blueprint.blocks(full)) == 3
    block = sum(p.numel() for p in blueprint.blocks(full)[0].parameters())
    assert blueprint.parameter_count() - blueprint.parameter_count(1) == 2 * block
    # The first blocks of the deep model, though the files have more.
    deep = dict(named_parameters(whole(blueprint)))
    shallow.to_empty(device="cpu")
    blueprint.fill(shallow, 0)
    assert all(torch.equal(p, deep[key]) for key, p in named_parameters(shallow))


def test_unequal_blocks_cannot_be_varied(saved: Any) -> None:
    alternating = ["full_attention", "sliding_attention", "full_attention"]
    config = transformers.Qwen2Config(
        **SMALL, layer_types=alternating, use_sliding_window=True, sliding_window=8
    )
    assert HuggingFaceModel(str(saved(config)), 24).depth is None


def test_units_are_found_after_wrapping(saved: Any, rank_of: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    blueprint = HuggingFaceModel(str(saved(transformers.LlamaConfig(**SMALL))), 24)
    with torch.device("meta"):
        model = blueprint.build()
    units = blueprint.blocks(model)
    assert units == list(model.model.layers)
    with rank_of(0, {"data": 2}) as mesh:
        for unit in units:
            fully_shard(unit, mesh=mesh)
        assert blueprint.blocks(model) == units


def test_the_head_is_what_follows_the_blocks(saved: Any) -> None:
    """Norm and output layer; nothing where the output layer is the embedding."""
    for tied in (False, True):
        config = transformers.LlamaConfig(**SMALL | {"tie_word_embeddings": tied})
        blueprint = HuggingFaceModel(str(saved(config)), 24)
        with torch.device("meta"):
            model = blueprint.build()
        assert blueprint.head(model) == ([] if tied else [model.model.norm, model.lm_head])


def test_the_head_of_an_adapted_output_layer(saved: Any) -> None:
    """The head lists the output layer, but not the adapter's layers in it, because FSDP2 groups root modules only."""
    folder = str(saved(transformers.LlamaConfig(**SMALL)))
    values = {"model": {"hf": folder}, "steps": 1, "batch_size": 1, "data": {"sequence_length": 8}}
    blueprint = blueprint_of(recipe_of({**values, "adapter": {"rank": 2, "targets": ["lm_head"]}}))
    with torch.device("meta"):
        model: Any = blueprint.build()
    assert blueprint.head(model) == [model.model.norm, model.lm_head]
    assert len(list(model.lm_head.modules())) > 1


def test_no_dropout_and_no_pad_token(saved: Any) -> None:
    config = transformers.GPT2Config(vocab_size=53, n_embd=36, n_layer=1, n_head=3, pad_token_id=0)
    assert config.resid_pdrop == 0.1
    blueprint = HuggingFaceModel(str(saved(config)), 24)
    with torch.device("meta"):
        model = blueprint.build()
    dropouts = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert dropouts
    assert not any(dropouts)
    assert model.config.pad_token_id is None


def test_a_rank_reads_its_own_slice(saved: Any, rank_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import fully_shard

    blueprint = HuggingFaceModel(str(saved(transformers.LlamaConfig(**SMALL))), 24)
    read = []
    pieces = weights.WeightFiles._matched_pieces

    def watched(self: Any, tensor: Tensor, name: str) -> Any:
        for part, value in pieces(self, tensor, name):
            read.append(value.numel())
            yield part, value

    monkeypatch.setattr(weights.WeightFiles, "_matched_pieces", watched)
    with rank_of(1, {"data": 4}) as mesh:
        with torch.device("meta"):
            model = blueprint.build()
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        blueprint.fill(model, 0)
    assert sum(read) == pytest.approx(blueprint.parameter_count() / 4, rel=0.05)


def test_pieces_are_bounded(saved: Any, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(saved(transformers.LlamaConfig(**SMALL)))
    expected = whole(HuggingFaceModel(folder, 24)).state_dict()
    monkeypatch.setattr(weights, "PIECE", 1000)
    found = whole(HuggingFaceModel(folder, 24)).state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def _config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: (f / "config.json").unlink(), "not a model folder"),
        (lambda f: (f / "config.json").write_text("{]"), r"config\.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "names no model_type"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), r"config\.json cannot be read"),
        (lambda f: _config(f, auto_map={"AutoModel": "x.Y"}, model_type="own"), "needs its own code"),
        (lambda f: _config(f, quantization_config={"quant_method": "gptq"}), "quantized weights"),
        (lambda f: _config(f, model_type="nothing"), r"config\.json is not valid"),
        (lambda f: _config(f, model_type="vit"), "not a causal language model"),
        (lambda f: _config(f, hidden_size="wide"), r"config\.json is not valid"),
        (lambda f: _config(f, max_position_embeddings=23), "longer than the model.s context"),
    ],
    ids=["gone", "json", "list", "bytes", "code", "quantized", "unknown", "vision", "type", "short"],
)
def test_refused_configs(change: Any, says: str, saved: Any) -> None:
    folder = saved(_configs()["llama"])
    change(folder)
    with pytest.raises(RecipeError, match=says) as caught:
        HuggingFaceModel(str(folder), 24).parameter_count()
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize("source", ["./nowhere", "/no/such/folder", "~/no-such-folder", "a/b/c"])
def test_a_path_is_never_looked_up_on_the_hub(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("went to the hub"))
    with pytest.raises(RecipeError, match="no such folder"):
        HuggingFaceModel(source, 24)


@pytest.mark.parametrize("shard_size", ["1GB", "30KB"])
def test_a_hub_id_is_downloaded_in_parts(
    shard_size: str, saved: Any, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that the index does not name are not downloaded: authors publish their own format next to them."""
    import huggingface_hub

    folder, asked = saved(_configs()["llama"], max_shard_size=shard_size), []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, *allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    blueprint = HuggingFaceModel("org/model", 24)
    assert blueprint.parameter_count() > 0
    assert asked == [("org/model", "config.json")], "planning needs no weights"
    whole(blueprint)
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    of_index = [] if shards == [weights.SINGLE] else [("org/model", *shards)]
    assert asked[1:] == [("org/model", weights.SINGLE, weights.INDEX), *of_index]


def test_a_failed_download_is_one_line() -> None:
    code = (
        "from shardwise.core.errors import ShardwiseError\n"
        "from shardwise.model.hf import HuggingFaceModel\n"
        "try: HuggingFaceModel('org/no-such-model', 24)\n"
        "except ShardwiseError as error: print(error.line())\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"HF_HUB_OFFLINE": "1", "HOME": "/nonexistent"},
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("error: no such model here or on the Hub (model.hf: org/no-such-model): ")
    assert ran.stdout.count("\n") == 1


def _broken(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "no_such_activation"},
        {"rope_parameters": {"rope_type": "no_such_type", "rope_theta": 1e4}},
        {"head_dim": 0},
        {"num_attention_heads": 0},
        {"text_config": {"vocab_size": 3}},
        {"vocab_size": None},
        {"hidden_size": 10**18},
        {"num_hidden_layers": 10**9},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_config_that_transformers_does_not_check(saved: Any, changes: dict[str, Any]) -> None:
    folder = _broken(saved(_configs()["llama"]), **changes)
    with pytest.raises(RecipeError, match=r"config\.json is not valid|transformers does not build the model"):
        HuggingFaceModel(str(folder), 24).parameter_count()


def test_a_config_that_is_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(RecipeError, match=r"config\.json cannot be read"):
        HuggingFaceModel(str(tmp_path), 24)
