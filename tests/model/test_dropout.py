"""Dropout of transformers' models: said where it is off, and transformers' own where it is on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.data import open_data
from shardwise.engine.build import build
from shardwise.engine.seeding import seed_step
from shardwise.engine.step import step
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.verifier.reference import reference_model
from tests.harness.commands import Shell
from tests.harness.corpora import write_tokenizer, write_words
from tests.harness.families import save_tiny
from tests.harness.pool import Pool

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
STEPS, BATCH, RATE = 4, 4, 1e-2
BERT = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
OPT = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 48,
    "max_position_embeddings": 64, "word_embed_proj_dim": 32,
}  # fmt: skip
PHI = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "resid_pdrop": 0.1, "embd_pdrop": 0.1,
    "attention_dropout": 0.1,
}  # fmt: skip
LLAMA = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "attention_dropout": 0.3,
}  # fmt: skip
CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA, "causal"),
    "phi": ("PhiConfig", "PhiForCausalLM", PHI, "causal"),
    "bert": ("BertConfig", "BertForMaskedLM", BERT, "masked"),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5, "seq2seq"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2, "causal"),
    "opt": ("OPTConfig", "OPTForCausalLM", OPT, "causal"),
}
OFF = "dropout is off, and model.dropout=true turns it on"


def folder_of(path: Path, name: str, **changes: Any) -> Path:
    config, model, values, _ = CLASSES[name]
    torch.manual_seed(0)
    getattr(transformers, model)(getattr(transformers, config)(**values, **changes)).save_pretrained(path)
    return path


def departures(folder: Path, name: str, dropout: bool = False, compute: str = "fp32") -> tuple[str, ...]:
    return HuggingFaceModel(str(folder), 16, CLASSES[name][3], dropout=dropout).departures(compute)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("bert", {}, "hidden_dropout_prob 0.1, attention_probs_dropout_prob 0.1"),
        ("bert", {"hidden_dropout_prob": 0.0}, "attention_probs_dropout_prob 0.1"),
        ("t5", {"dropout_rate": 0.2, "classifier_dropout": 0.3}, "dropout_rate 0.2"),
        ("gpt2", {}, "resid_pdrop 0.1, embd_pdrop 0.1, attn_pdrop 0.1"),
    ],
)
def test_what_config_json_asks_for_is_said(
    name: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Not what other heads would drop. Nothing is left to say where dropout is on."""
    folder = folder_of(tmp_path, name, **changes)
    assert departures(folder, name) == (f"config.json asks for {said}: {OFF}",)
    assert departures(folder, name, dropout=True) == ()


def test_weights_that_transformers_keeps_in_fp32_are_named(tmp_path: Path) -> None:
    """T5's wo in fp16 alone: its products overflow there."""
    folder = folder_of(tmp_path, "t5", dropout_rate=0.0)
    assert departures(folder, "t5", compute="bf16") == ()
    (said,) = departures(folder, "t5", compute="fp16")
    assert "DenseReluDense.wo.weight" in said and "training computes with fp16 copies, whose" in said


def test_nothing_is_said_without_dropout(tmp_path: Path) -> None:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    folder = folder_of(tmp_path, "bert", **none)
    assert departures(folder, "bert") == ()
    (said,) = departures(folder, "bert", dropout=True)
    assert said == "model.dropout is true, and config.json asks for none: there is no dropout"


def test_phi_moe_routes_in_training_as_in_inference(tmp_path: Path) -> None:
    """Its noise is a threshold, too, which moves the weights of experts; in training it draws experts."""
    save_tiny("phimoe", tmp_path, router_jitter_noise=0.3)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    blueprint = HuggingFaceModel(str(tmp_path), 16)
    ours = reference_model(blueprint, 0, torch.float32).train()
    assert blueprint.departures("bf16") == ()
    ids = torch.arange(1, 17).unsqueeze(0)
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)


def test_leaving_out_layers_stays_off(tmp_path: Path) -> None:
    """Ranks would run different layers."""
    folder = folder_of(tmp_path, "opt", dropout=0.1, layerdrop=0.2)
    assert departures(folder, "opt") == (
        f"config.json asks for dropout 0.1: {OFF}",
        "config.json asks for layerdrop 0.2, which is off",
    )
    assert departures(folder, "opt", dropout=True) == ("config.json asks for layerdrop 0.2, which is off",)
    with torch.device("meta"):
        model: Any = HuggingFaceModel(str(folder), 16, dropout=True).build()
    assert model.model.decoder.layerdrop == 0 and model.model.decoder.layers[0].dropout == 0.1


def recipe_for(folder: Path, name: str, dropout: bool = True, **strategy: Any) -> Recipe:
    tokenizer = write_tokenizer(folder / "tokenizer", "</s>", ending=name == "t5")
    data: dict[str, Any] = {"tokenizer": str(tokenizer), "sequence_length": 16, "held_out": 0.0}
    if name == "t5":
        lines = [{"prompt": "a b c d " * (i % 3 + 1), "completion": "e f g"} for i in range(40)]
        (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        data |= {"source": str(folder / "pairs.jsonl"), "format": "prompt", "completion_length": 8}
    else:
        data["source"] = str(write_words(folder / "words.txt"))
    values: dict[str, Any] = {
        "model": {"hf": str(folder / name), "objective": CLASSES[name][3], "dropout": dropout},
        "data": data,
        "steps": STEPS,
        "batch_size": BATCH,
        "optimizer": {
            "name": "sgd",
            "momentum": 0,
            "weight_decay": 0,
            "learning_rate": RATE,
            "clip_norm": None,
        },
        "schedule": {"name": "constant", "warmup": 0},
        "strategy": {"precision": "fp32", "micro_batch_size": BATCH, **strategy},
    }
    return recipe_of(values, SETTINGS)


def ours(recipe: Recipe) -> list[float]:
    blueprint = blueprint_of(recipe)
    run = build(recipe, blueprint, strategy_from(recipe.strategy), CPU)
    data, losses = open_data(recipe), []
    for index in range(STEPS):
        seed_step(recipe.seed, index, run.random_rank)
        size = recipe.strategy["micro_batch_size"]
        batches = data.micro_batches(index, run.data_rank, run.data_degree, int(str(size)))
        losses.append(float(step(run, batches, RATE).loss))
    return losses


def of_transformers(recipe: Recipe, name: str) -> list[float]:
    """The plain loop over transformers' class in training mode, as its Trainer runs it."""
    model = getattr(transformers, CLASSES[name][1]).from_pretrained(recipe.model.hf).train()
    data, losses = open_data(recipe), []
    for index in range(STEPS):
        seed_step(recipe.seed, index, 0)
        (batch,) = data.micro_batches(index, 0, 1, BATCH)
        named: dict[str, Tensor] = {
            key: batch[key] for key in ("input_ids", "attention_mask") if key in batch
        }
        if name == "t5":
            loss = model(**named, labels=batch["labels"]).loss
        else:
            logits = model(**named).logits.flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, batch["labels"].flatten())
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
                    parameter.grad = None
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["bert", "t5", "gpt2"])
def test_a_model_with_dropout_trains_as_transformers_does(name: str, pool: Pool, tmp_path: Path) -> None:
    """The same elements are dropped, because the generator has the same seed. Blocks that run again drop them too."""
    folder_of(tmp_path / name, name)
    recipe = recipe_for(tmp_path, name)
    expected = of_transformers(recipe, name)
    for checkpointing in ("none", "full"):
        [found] = pool.run(1, ours, recipe_for(tmp_path, name, activation_checkpointing=checkpointing))
        assert found == pytest.approx(expected, rel=2e-6)
    [without] = pool.run(1, ours, recipe_for(tmp_path, name, dropout=False))
    assert without[0] != pytest.approx(expected[0], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("phi", {"tensor_parallel": 2, "tensor_sequence_parallel": "none"}),
        ("llama", {"pipeline_parallel": 2}),
        pytest.param("phi", {"zero_stage": 3}, marks=pytest.mark.long),
        pytest.param("phi", {"sequence_parallel": 2}, marks=pytest.mark.long),
    ],
)
def test_every_layout_has_dropout(name: str, settings: dict[str, Any], pool: Pool, tmp_path: Path) -> None:
    """Its draws are other ones, so losses are near those of one process, and not those without dropout."""
    folder_of(tmp_path / name, name)
    one = {"micro_batch_size": 2, **settings}
    [with_dropout, other] = pool.run(2, ours, recipe_for(tmp_path, name, **one))
    [without, _] = pool.run(2, ours, recipe_for(tmp_path, name, dropout=False, **one))
    assert with_dropout == other
    assert with_dropout == pytest.approx(without, rel=0.05) and with_dropout != pytest.approx(
        without, rel=1e-4
    )


def test_a_ring_refuses_dropout_of_attention(pool: Pool, tmp_path: Path) -> None:
    folder_of(tmp_path / "phi", "phi")
    with pytest.raises(RecipeError, match="the ring has no dropout"):
        pool.run(2, ours, recipe_for(tmp_path, "phi", sequence_parallel=2, sequence_method="ring"))


def test_dropout_is_of_models_of_hf() -> None:
    with pytest.raises(RecipeError, match="dropout cannot be set here"):
        recipe_of({"model": {"preset": "tiny", "dropout": True}, "steps": 1, "batch_size": 1}, SETTINGS)


YAML = """
model: {hf: HF, objective: masked}
data: {source: CORPUS, tokenizer: TOKENIZER, sequence_length: 16}
steps: 1
batch_size: 2
cluster: {device: cpu, devices_per_node: 1}
strategy: {precision: fp32, zero_stage: 0, micro_batch_size: 2, activation_checkpointing: none, loss: logits}
"""


@pytest.mark.long
def test_plan_and_train_say_it(shell: Shell, tmp_path: Path) -> None:
    folder_of(tmp_path / "bert", "bert")
    tokenizer, corpus = write_tokenizer(tmp_path / "tokenizer", "</s>"), write_words(tmp_path / "words.txt")
    text = YAML.replace("HF", str(tmp_path / "bert")).replace("TOKENIZER", str(tokenizer))
    path = tmp_path / "recipe.yaml"
    path.write_text(text.replace("CORPUS", str(corpus)), encoding="utf-8")
    asked = "config.json asks for hidden_dropout_prob 0.1, attention_probs_dropout_prob 0.1"
    planned = shell.run("plan", str(path))
    assert asked in " ".join(planned.stdout.split()), planned.stderr
    assert json.loads(shell.run("plan", str(path), "--json").stdout)["departures"] == [f"{asked}: {OFF}"]
    trained = shell.run("train", str(path), "--out", str(tmp_path / "run"))
    assert f"{asked}: {OFF}" in trained.stdout + trained.stderr
    planned = shell.run("plan", str(path), "model.dropout=true", "--json")
    assert json.loads(planned.stdout)["departures"] == []
