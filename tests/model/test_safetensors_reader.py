"""Weight files as they are found in the wild: other names, shared tensors, and every kind of damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.core.errors import CheckpointError, ShardwiseError
from shardwise.model.files import safetensors_reader as weights
from shardwise.model.files.peft import AdapterFiles, write_adapter
from shardwise.model.hf import HuggingFaceModel

transformers = pytest.importorskip("transformers")

LLAMA = {
    "vocab_size": 53, "hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


def _configs() -> dict[str, Any]:
    return {
        "llama": transformers.LlamaConfig(**LLAMA),
        "llama-tied": transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True),
        "gpt2": transformers.GPT2Config(vocab_size=53, n_embd=36, n_layer=2, n_head=3, n_positions=64),
    }


def _edit(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_names_without_the_base_prefix(saved: Any, whole: Any) -> None:
    """As GPT-2's own files are, with the mask buffers that transformers once saved."""
    folder = saved(_configs()["gpt2"])
    expected = whole(HuggingFaceModel(str(folder), 24)).state_dict()

    def change(tensors: dict[str, Tensor]) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("transformer.")] = tensors.pop(key)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)

    _edit(folder, change)
    found = whole(HuggingFaceModel(str(folder), 24)).state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_tied_weights_under_either_name_or_both(saved: Any, whole: Any) -> None:
    folder = saved(_configs()["llama-tied"])
    expected = whole(HuggingFaceModel(str(folder), 24)).state_dict()
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    _edit(folder, lambda t: t.update({head: t[embed].clone()}))
    both = whole(HuggingFaceModel(str(folder), 24)).state_dict()
    _edit(folder, lambda t: t.pop(embed))
    other = whole(HuggingFaceModel(str(folder), 24)).state_dict()
    for key, value in expected.items():
        assert torch.equal(both[key], value)
        assert torch.equal(other[key], value)
    _edit(folder, lambda t: t.update({embed: t[head] + 1}))
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight and lm_head\.weight differ"):
        whole(HuggingFaceModel(str(folder), 24))


def _drop(key: str) -> Any:
    return lambda tensors: tensors.pop(key)


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_drop(NORM), f"tensor {NORM} is missing"),
        (
            lambda t: t.update({NORM: t[NORM][:-1]}),
            rf"tensor {NORM} has another shape .*\[35\] in the file, \[36\]",
        ),
        (
            lambda t: t.update({"model.adapter": t[NORM].clone()}),
            r"tensor model\.adapter is not in the model",
        ),
    ],
    ids=["missing", "short", "extra"],
)
def test_files_that_do_not_fit(change: Any, says: str, saved: Any, whole: Any) -> None:
    folder = saved(_configs()["llama"])
    _edit(folder, change)
    with pytest.raises(CheckpointError, match=says):
        whole(HuggingFaceModel(str(folder), 24))


def _cut(folder: Path) -> None:
    file = next(folder.glob("*-00002-*"))
    file.write_bytes(file.read_bytes()[:-10])


def _index(folder: Path, **changes: Any) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


def _instead_of_weights(folder: Path, file: str = "") -> None:
    for weight_file in (*folder.glob("*.safetensors"), folder / weights.INDEX):
        weight_file.unlink()
    if file:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_cut, r"file of the weights is damaged .*00002"),
        (lambda f: next(f.glob("*-00002-*")).unlink(), r"file of the weights is missing .*00002"),
        (lambda f: (f / weights.INDEX).write_text("{"), "index of the weights cannot be read"),
        (lambda f: _index(f, weight_map=[1]), "index of the weights cannot be read"),
        (lambda f: _index(f, weight_map={"a": "../x.safetensors"}), r"the index names '\.\./x\.safetensors'"),
        (lambda f: _index(f, weight_map={"a": "model-00001-of-00099.bin"}), "not a safetensors file"),
        (lambda f: (f / weights.INDEX).unlink(), "the index of the weights is missing"),
        (lambda f: _instead_of_weights(f), "no weights"),
        (lambda f: _instead_of_weights(f, "a.bin"), "the weights are pickles"),
        (lambda f: _instead_of_weights(f, "consolidated.safetensors"), r"only consolidated\.safetensors"),
        (lambda f: _instead_of_weights(f, "original/consolidated.00.pth"), "only original/"),
        (
            lambda f: _instead_of_weights(f, ".cache/huggingface/download/x.incomplete"),
            "download .* not complete",
        ),
        (lambda f: next(f.glob("*-00002-*")).write_text(POINTER), "is a Git LFS pointer.*git lfs pull"),
        (lambda f: (f / "config.json").write_text(POINTER), r"config\.json is a Git LFS pointer"),
    ],
    ids=[
        "cut",
        "gone",
        "json",
        "list",
        "escape",
        "pickled",
        "shards",
        "none",
        "pickles",
        "consolidated",
        "original",
        "incomplete",
        "pointer",
        "config",
    ],
)
def test_damaged_folders(damage: Any, says: str, saved: Any, whole: Any) -> None:
    folder = saved(_configs()["llama"], max_shard_size="8KB")
    damage(folder)
    with pytest.raises(ShardwiseError, match=says) as caught:
        whole(HuggingFaceModel(str(folder), 24))
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_integers_are_not_weights(saved: Any, whole: Any, dtype: torch.dtype) -> None:
    folder = saved(_configs()["llama"])
    head = "lm_head.weight"
    _edit(folder, lambda tensors: tensors.update({head: tensors[head].to(dtype)}))
    with pytest.raises(CheckpointError, match=f"tensor {head} is not of weights"):
        whole(HuggingFaceModel(str(folder), 24))


@pytest.mark.parametrize(
    "content", ["[" * 200_000, json.dumps({"weight_map": {"x": "a" * 300 + ".safetensors"}})]
)
def test_an_index_that_leads_nowhere(tmp_path: Path, content: str) -> None:
    (tmp_path / weights.INDEX).write_text(content)
    with pytest.raises(CheckpointError):
        weights.WeightFiles(tmp_path)


def test_an_adapter_s_config_that_is_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="config cannot be read"):
        AdapterFiles(tmp_path)


def test_an_adapter_of_integers(tmp_path: Path) -> None:
    tensors = {f"layers.0.q_proj.lora_{part}.weight": torch.ones(2, 2, dtype=torch.int8) for part in "AB"}
    write_adapter(tmp_path, tensors, {"peft_type": "LORA", "r": 2, "lora_alpha": 2}, None)
    with pytest.raises(CheckpointError, match="is not of weights"):
        AdapterFiles(tmp_path)
