"""The tokens that end an answer: in the folders that are written, and where answers are generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.exporter.export_run import export_run
from shardwise.plugins.gguf.export import export_gguf
from shardwise.plugins.serve.requests import Request
from shardwise.plugins.serve.sampling import Sampling
from shardwise.plugins.serve.serving import TEXT_END, load_model
from tests.data import chat_templates as templates
from tests.data.test_chat import folder_of
from tests.exporter.test_export_run import leave_run
from tests.harness.pool import Pool

transformers = pytest.importorskip("transformers")

EOS, IM_END, NAMED = 1, 3, 4
"""Ids of </s>, of <|im_end|>, which ends the template's answers, and of <|end|>."""

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


def base(folder: Path, template: str = templates.CHATML, generation: dict[str, Any] | None = None) -> Path:
    """A base model that names </s> alone as its end; without generation_config.json if it is None."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, bos_token_id=0, eos_token_id=EOS)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    folder_of(folder, template)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def recipe_values(folder: Path) -> dict[str, Any]:
    return {"model": {"hf": str(folder)}, "data": {"tokenizer": str(folder), "sequence_length": 16}}


@pytest.mark.parametrize(
    "generation", [None, {"eos_token_id": EOS, "top_k": 7}, {"eos_token_id": [EOS, NAMED]}]
)
def test_an_exported_run_names_the_end_of_its_template(
    generation: dict[str, Any] | None, pool: Pool, tmp_path: Path
) -> None:
    folder = base(tmp_path / "base", generation=generation)
    pool.run(1, leave_run, tmp_path / "run", recipe_values(folder), {"zero_stage": 0})
    export_run(tmp_path / "run", tmp_path / "out")
    assert load_model(tmp_path / "run").context == load_model(tmp_path / "out").context == 64
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    known = [EOS, NAMED] if generation and isinstance(generation["eos_token_id"], list) else [EOS]
    assert loaded.generation_config.eos_token_id == [*known, IM_END]
    assert loaded.generation_config.top_k == (generation or {}).get("top_k", loaded.generation_config.top_k)
    assert (tmp_path / "out" / "generation_config.json").exists() == (generation is not None)
    assert (
        load_model(tmp_path / "out")._opened.ends
        == load_model(tmp_path / "run")._opened.ends
        == {*known, IM_END}
    )


def test_no_end_is_added_that_the_files_know(pool: Pool, tmp_path: Path) -> None:
    folder = base(tmp_path / "base", templates.TRAILING_END, {"eos_token_id": EOS})
    pool.run(1, leave_run, tmp_path / "run", recipe_values(folder), {"zero_stage": 0})
    export_run(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": EOS}


def test_a_native_model_names_all_ends(pool: Pool, tmp_path: Path) -> None:
    sizes = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "ffn": 16, "vocab": 320, "context": 64}
    values = {
        "model": sizes,
        "data": {"tokenizer": folder_of(tmp_path / "t", templates.CHATML), "sequence_length": 16},
    }
    pool.run(1, leave_run, tmp_path / "run", values, {"zero_stage": 0})
    export_run(tmp_path / "run", tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.eos_token_id == EOS and loaded.generation_config.eos_token_id == [EOS, IM_END]
    gguf = pytest.importorskip("gguf")
    export_gguf(tmp_path / "run", tmp_path / "out.gguf", "fp32")
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["tokenizer.ggml.eos_token_id"].contents() == EOS
    assert fields["tokenizer.ggml.eot_token_id"].contents() == IM_END


@pytest.mark.parametrize("end", [EOS, IM_END, NAMED])
def test_an_answer_ends_at_each_of_them_as_in_transformers(end: int, tmp_path: Path) -> None:
    folder = base(tmp_path / "base", generation={"eos_token_id": [EOS, NAMED]})
    served = load_model(folder)
    with torch.no_grad():  # after any token the model says `end`
        for parameter in served.model.parameters():
            parameter.zero_()
        served.model.get_submodule("model.norm").weight.fill_(1.0)
        served.model.get_submodule("model.embed_tokens").weight.fill_(1.0)
        served.model.get_submodule("lm_head").weight[end] = 1.0
    pieces = list(served.generate([Request("the answer", None, Sampling(tokens=5, temperature=0.0))]))
    assert [(piece.text, piece.end) for piece in pieces] == [("", TEXT_END)]
    endless = Sampling(tokens=3, temperature=0.0, past_end=True)
    assert list(served.generate([Request("the answer", None, endless)]))[-1].end == "length"
