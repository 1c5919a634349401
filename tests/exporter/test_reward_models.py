"""Reward models as folders of transformers and adapters of PEFT: equal scores; further training; a policy without its
value head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardwise.checkpoint.adapter import leave
from shardwise.checkpoint.checkpoint import save_checkpoint
from shardwise.core.errors import DataError, RecipeError
from shardwise.data import open_tokenizer
from shardwise.engine.build import build
from shardwise.engine.train_state import TrainState
from shardwise.exporter.export_run import export_run, open_run, padding_of
from shardwise.model.open import model_of
from shardwise.plugins.gguf import export as gguf_export
from shardwise.plugins.preferences.scoring import RewardModel, load_reward_model, scores
from shardwise.recipe.load import dump_recipe, recipe_of
from shardwise.runtime.parallel.shard_slices import local_part
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.pool import Pool
from tests.harness.small_models import write_tokenizer

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

VOCAB = 512
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": VOCAB, "tie_word_embeddings": True,
}  # fmt: skip
NATIVE = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": VOCAB, "tied": True}
REST: dict[str, Any] = {
    "steps": 1, "batch_size": 4, "data": {"sequence_length": 16, "source": "pairs.jsonl"},
}  # fmt: skip
LORA = {"name": "lora", "rank": 4, "targets": "attention"}


def causal_folder(folder: Path, kind: str) -> Path:
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return folder


def leave_run(folder: Path, values: dict[str, Any], settings: dict[str, Any]) -> None:
    """A run of loud trained weights that has saved once; called on every rank."""
    recipe = recipe_of({**REST, **values}, SETTINGS)
    run = build(recipe, model_of(recipe), strategy_from(settings), torch.device("cpu"))
    torch.manual_seed(torch.distributed.get_rank())
    for parameter in run.model.parameters():
        if parameter.requires_grad:
            part = local_part(parameter)
            part += 0.1 * torch.randn(part.shape).to(part)
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    save_checkpoint(run, TrainState(1, 4), folder / "checkpoints", 1)
    leave(run, folder)


def documents() -> list[list[int]]:
    chance = torch.Generator().manual_seed(0)
    return [torch.randint(1, 200, (length,), generator=chance).tolist() for length in (5, 16, 9, 16, 1)]


def rewards(model: Any, padding: int) -> Tensor:
    """As transformers scores padded documents."""
    rows = [torch.tensor(row) for row in documents()]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, attention_mask=(ids != padding).long()).logits.squeeze(-1)
    return found


@pytest.mark.parametrize("origin", ["Llama", "Qwen2", "native"])
def test_transformers_scores_as_the_run_does(
    origin: str, tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a causal model, over ZeRO 3; and the written folder is read as a reward model."""
    model = NATIVE if origin == "native" else {"hf": str(causal_folder(tmp_path / "base", origin))}
    run, target = tmp_path / "run", tmp_path / "written"
    pool.run(2, leave_run, run, {"model": model, "objective": "reward"}, {"zero_stage": 3})
    export_run(run, target)
    monkeypatch.setattr(gguf_export, "kind_of_tokenizer", lambda contents: "gpt2")
    assert not gguf_export.can_write(open_run(run).contents)  # llama.cpp has no name for the score's weight
    config = json.loads((target / "config.json").read_text())
    kind = "Llama" if origin == "native" else origin
    assert config["architectures"] == [f"{kind}ForSequenceClassification"]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(target, dtype=torch.float32)
    assert loaded.config.num_labels == 1
    mine = load_reward_model(run)(documents())
    assert mine.std() > 0.01
    torch.testing.assert_close(rewards(loaded, config["pad_token_id"]), mine, rtol=1e-5, atol=1e-5)
    again = load_reward_model(target)
    torch.testing.assert_close(again(documents()), mine, rtol=1e-6, atol=1e-6)
    with pytest.raises(DataError, match="no tokenizer"):
        scores(again, ["text"])
    if origin != "native":
        with pytest.raises(RecipeError, match="not a reward model"):
            load_reward_model(tmp_path / "base")


def test_peft_loads_the_adapter_with_its_score(tmp_path: Path, pool: Pool) -> None:
    base = causal_folder(tmp_path / "base", "Llama")
    run = tmp_path / "run"
    values = {"model": {"hf": str(base)}, "objective": "reward", "adapter": LORA}
    pool.run(2, leave_run, run, values, {"zero_stage": 3})
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    kind = transformers.AutoModelForSequenceClassification
    adapted = peft.PeftModel.from_pretrained(
        kind.from_pretrained(base, num_labels=1, pad_token_id=255, dtype=torch.float32), run / "adapter"
    )
    mine = load_reward_model(run)(documents())
    torch.testing.assert_close(rewards(adapted.eval(), 255), mine, rtol=1e-5, atol=1e-5)
    _, merge = export_run(run, tmp_path / "merged")
    assert merge is not None and merge.difference < 1e-4
    merged = kind.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(rewards(merged, 255), mine, rtol=1e-4, atol=1e-5)
    with pytest.raises(RecipeError, match="not in this run"):
        export_run(run, tmp_path / "base of it", base=True)


def started(recipe: Any) -> dict[str, Tensor]:
    """Trained weights as a run starts with them."""
    run = build(recipe, model_of(recipe), strategy_from({}), torch.device("cpu"))
    return {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}


@pytest.mark.long
def test_a_reward_model_goes_on(tmp_path: Path, pool: Pool) -> None:
    """From a folder with a score; from an adapter with one; and from an adapter of a plain fine-tuning run."""
    base, run = causal_folder(tmp_path / "base", "Qwen2"), tmp_path / "run"
    values = {"model": {"hf": str(base)}, "objective": "reward", "adapter": LORA}
    pool.run(1, leave_run, run, values, {})
    plain = tmp_path / "plain"
    pool.run(
        1,
        leave_run,
        plain,
        {"model": {"hf": str(base)}, "adapter": LORA, "data": {"sequence_length": 16}},
        {},
    )
    export_run(run, tmp_path / "written")
    written = load_file(tmp_path / "written" / "model.safetensors")["score.weight"]
    common = REST | {"objective": "reward"}

    def scores_of(**keys: Any) -> dict[str, Tensor]:
        (found,) = pool.run(1, started, recipe_of({**common, **keys}, SETTINGS))
        return found

    assert torch.equal(scores_of(model={"hf": str(tmp_path / "written")})["score.weight"], written)
    for adapter, known in ((run, True), (plain, False)):
        spec = {**LORA, "start_from": str(adapter / "adapter")}
        found = scores_of(model={"hf": str(base)}, adapter=spec)
        assert torch.equal(found["score.weight"], written) == known
        stored = load_file(adapter / "adapter" / "adapter_model.safetensors")
        name = "model.layers.1.self_attn.q_proj.lora_B.weight"
        assert torch.equal(found[name], stored[f"base_model.model.{name}"])


def test_a_policy_is_written_without_its_value_head(tmp_path: Path, pool: Pool) -> None:
    base, run = causal_folder(tmp_path / "base", "Llama"), tmp_path / "run"
    objective = {"name": "ppo", "rewards": ["rewards:length"], "epochs": 1}
    values = {"model": {"hf": str(base)}, "objective": objective, "adapter": LORA}
    pool.run(1, leave_run, run, values, {})
    stored = load_file(run / "adapter" / "adapter_model.safetensors")
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert not any("v_head" in name for name in stored) and config["modules_to_save"] is None
    export_run(run, tmp_path / "written")
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert json.loads((tmp_path / "written" / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    assert written.keys() == load_file(base / "model.safetensors").keys()


def test_texts_are_scored_at_their_last_token(tmp_path: Path, pool: Pool) -> None:
    base = causal_folder(tmp_path / "base", "Llama")
    tokenizer = write_tokenizer(base, "gpt2")
    pool.run(1, leave_run, tmp_path / "run", {"model": {"hf": str(base)}, "objective": "reward"}, {})
    model: RewardModel = load_reward_model(tmp_path / "run")
    texts = ["The capital of Peru", "I've seen models"]
    assert torch.equal(scores(model, texts), model([tokenizer(text).input_ids for text in texts]))


def test_padding_is_not_the_end_of_a_document(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "gpt2")
    plain = open_tokenizer(str(tmp_path))
    assert padding_of(plain, {"pad_token_id": plain.separator}) is None
    assert padding_of(plain, {"pad_token_id": 7}) == 7
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for pad, expected in (("<|im_end|>", plain.encode("<|im_end|>")[0]), ("<|endoftext|>", None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": pad}))
        assert padding_of(open_tokenizer(str(tmp_path)), {}) == expected
    assert padding_of(open_tokenizer("bytes"), {}) == 255
