"""Folders as they are published: with their authors' code, further blocks, other parts, or without large files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.core.errors import CheckpointError, RecipeError
from shardwise.exporter.export_run import export_model
from shardwise.model.hf import HuggingFaceModel
from tests.model.hf.test_model import SMALL

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 53, (2, 16), generator=torch.Generator().manual_seed(0))
VISION = {
    "hidden_size": 12,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def configured(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def require_logits_of_transformers(
    folder: Path, whole: Any, kind: str = "AutoModelForCausalLM"
) -> HuggingFaceModel:
    blueprint = HuggingFaceModel(str(folder), 16)
    theirs = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(blueprint.logits(whole(blueprint).eval(), IDS), theirs(IDS).logits)
    return blueprint


def require_whole_export(folder: Path) -> None:
    """Export the folder's model to out: all tensors are there, also those that do not train."""
    export_model(folder / "model", folder / "out")
    before, after = (load_file(folder / name / "model.safetensors") for name in ("model", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_code_of_the_authors_is_not_needed_where_transformers_has_the_class(
    saved: Any, whole: Any, tmp_path: Path
) -> None:
    """Phi-3 and DeepSeek-V3 keep ``auto_map``; an export is without the code, so without the key."""
    folder = saved(transformers.LlamaConfig(**SMALL))
    configured(folder, auto_map={"AutoModelForCausalLM": "modeling_llama.Llama"})
    require_logits_of_transformers(folder, whole)
    export_model(folder, tmp_path / "out")
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
    configured(folder, model_type="of_its_authors")
    with pytest.raises(RecipeError, match=r"trust_remote_code.*no class for 'of_its_authors'"):
        HuggingFaceModel(str(folder), 16)


def test_blocks_that_predict_further_tokens_are_copied(saved: Any, whole: Any, tmp_path: Path) -> None:
    """Whatever the number of blocks: the class names only that of the largest model."""
    sizes = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    }
    config = transformers.Glm4MoeConfig(**SMALL, **sizes, n_group=1, topk_group=1, head_dim=12)
    folder = saved(config)
    added = {
        "model.layers.3.eh_proj.weight": torch.rand(36, 72),
        "model.layers.3.enorm.weight": torch.rand(36),
    }
    rewritten(folder, lambda tensors: tensors | added)
    configured(folder, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match="not in the model"):
        require_logits_of_transformers(folder, whole)
    configured(folder, num_nextn_predict_layers=1)
    blueprint = require_logits_of_transformers(folder, whole)
    assert "num_nextn_predict_layers 1" in " ".join(blueprint.departures("fp32"))
    export_model(folder, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in added.items())


def test_other_parts_than_the_language_model_are_copied(whole: Any, tmp_path: Path) -> None:
    """Llama 4 and Qwen3.5 are trained without their vision tower; an export has it nevertheless."""
    text = {**SMALL, "head_dim": 12, "num_local_experts": 2, "intermediate_size_mlp": 40}
    vision = {**VISION, "vision_output_dim": 12, "projector_input_dim": 12, "projector_output_dim": 12}
    torch.manual_seed(0)
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    transformers.Llama4ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text("{}")
    blueprint = require_logits_of_transformers(tmp_path / "model", whole)
    assert blueprint.departures("fp32") == (
        "only the language model is trained; exports copy what vision_config describes",
    )
    require_whole_export(tmp_path)
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()


def test_the_language_model_of_a_larger_one_keeps_its_pad_token(whole: Any, tmp_path: Path) -> None:
    """Gemma 4 puts it in the place of images, though there are none."""
    text = {**SMALL, "head_dim": 12, "sliding_window": 8, "vocab_size_per_layer_input": 53}
    config = transformers.Gemma4Config(
        text_config=text, vision_config={**VISION, "head_dim": 6}, audio_config=None
    )
    torch.manual_seed(0)
    transformers.Gemma4ForConditionalGeneration(config).save_pretrained(tmp_path)
    require_logits_of_transformers(tmp_path, whole)


def test_a_clone_without_its_large_files(saved: Any, whole: Any) -> None:
    folder = saved(transformers.LlamaConfig(**SMALL))
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"
    )
    with pytest.raises(CheckpointError, match=r"Git LFS pointer.*git lfs pull"):
        whole(HuggingFaceModel(str(folder), 16))


def test_a_repository_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"give its snapshots/abc$"):
        HuggingFaceModel(str(tmp_path / "models--org--name"), 16)


def test_masks_of_older_files(saved: Any, whole: Any) -> None:
    folder = saved(transformers.GPT2Config(vocab_size=53, n_embd=36, n_layer=1, n_head=3, n_positions=64))
    masks = {"h.0.attn.masked_bias": torch.tensor(-1e4), "h.0.attn.bias": torch.ones(1, 1, 64, 64)}
    rewritten(folder, lambda t: {n.removeprefix("transformer."): v for n, v in t.items()} | masks)
    require_logits_of_transformers(folder, whole)


def test_every_file_of_the_tokenizer_and_the_processors_is_exported(saved: Any, tmp_path: Path) -> None:
    folder, exported = saved(transformers.LlamaConfig(**SMALL)), tmp_path / "out"
    kept = (
        "sentencepiece.bpe.model",
        "additional_chat_templates/tools.jinja",
        "video_preprocessor_config.json",
    )
    for name in (*kept, "tokenization_own.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    settings = {"eos_token": "</s>", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    export_model(folder, exported)
    assert all((exported / name).is_file() for name in kept)
    assert json.loads((exported / "tokenizer_config.json").read_text()) == {"eos_token": "</s>"}
    assert not (exported / "tokenization_own.py").exists()


@pytest.mark.parametrize("name", ["mistral3", "qwen3_vl"])
def test_models_that_read_images_are_given_text_alone(name: str, whole: Any, tmp_path: Path) -> None:
    """transformers has no causal class of them. What text does not reach is not built."""
    text = {**SMALL, "head_dim": 12}
    if name == "mistral3":
        parts = {
            "text_config": {**text, "model_type": "mistral"},
            "vision_config": {**VISION, "model_type": "pixtral"},
        }
        model = transformers.Mistral3ForConditionalGeneration(
            transformers.Mistral3Config(**parts, image_token_index=52)
        )
    else:
        vision = {
            "depth": 1,
            "hidden_size": 12,
            "intermediate_size": 12,
            "num_heads": 2,
            "out_hidden_size": 36,
        }
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
        parts = {"text_config": text, "vision_config": {**vision, "deepstack_visual_indexes": [0]}}
        model = transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig(**parts))
    model.save_pretrained(tmp_path / "model")
    blueprint = require_logits_of_transformers(tmp_path / "model", whole, "AutoModelForImageTextToText")
    assert blueprint.depth == 3 and not [name for name in blueprint.build().state_dict() if "vis" in name]
    require_whole_export(tmp_path)


def test_models_that_need_images_are_refused(tmp_path: Path) -> None:
    vision = {**VISION, "intermediate_size": 12}
    text = {"model_type": "opt", "vocab_size": 53, "hidden_size": 12, "ffn_dim": 12, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "word_embed_proj_dim": 12}
    former = {"hidden_size": 12, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Blip2Config(vision_config=vision, text_config=text, qformer_config=former)
    config.save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"text alone.*Blip2ForConditionalGeneration needs pixel_values"):
        HuggingFaceModel(str(tmp_path), 16).parameter_count()
