"""T5-like models under the seq2seq objective: transformers' own loss, plans, sharded training, padding and files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.core.errors import DataError, RecipeError
from shardwise.data import Batch, open_data
from shardwise.data.opening import check_data
from shardwise.dryrun.run import dry_run
from shardwise.engine.build import build
from shardwise.engine.step import step
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.corpora import SPECIAL, write_tokenizer
from tests.harness.families import config_of
from tests.harness.parity import Parity, Trial

transformers = pytest.importorskip("transformers")

END = SPECIAL.index("</s>")
LETTERS = len(SPECIAL) + 1
"""Id of the letter a."""


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def _saved(family: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config_of(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / family)
    return folder / family


def _recipe(family: str, folder: Path, data: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [letters[i % 20 : i % 20 + 1 + i % 6] for i in range(24)]
    lines = [json.dumps({"prompt": f"reverse {word}", "completion": word[::-1]}) for word in words]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = write_tokenizer(folder / "letters", "</s>", ending=family == "t5")
    read = {"source": str(folder / "pairs.jsonl"), "tokenizer": str(tokenizer), "sequence_length": 16}
    values = {
        "model": {"hf": str(_saved(family, folder)), "objective": "seq2seq"},
        "data": read | {"completion_length": 8} | (data or {}),
        "steps": 3,
        "batch_size": 4,
    }
    return recipe_of(values | sections, SETTINGS)


def _batch(recipe: Recipe, folder: Path, size: int = 4) -> Batch:
    return open_data(recipe, cache=folder / "cache").micro_batches(0, 0, 1, size)[0]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_the_loss_is_transformers(family: str, tmp_path: Path, whole: Any) -> None:
    """Padded prompts and completions; transformers shifts the labels itself."""
    recipe = _recipe(family, tmp_path)
    blueprint, batch = blueprint_of(recipe), _batch(recipe, tmp_path)
    assert 0 < int(batch["attention_mask"].sum()) < batch["attention_mask"].numel()
    total, count = blueprint.loss(whole(blueprint).train(), batch)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(recipe.model.hf, dtype=torch.float32).eval()
    assert (total / count).item() == pytest.approx(theirs(**batch).loss.item(), rel=1e-6)


def test_a_batch_is_the_framed_prompt_and_the_framed_completion(tmp_path: Path) -> None:
    recipe = _recipe("t5", tmp_path, data={"held_out": 0})
    data = open_data(recipe, cache=tmp_path / "cache")
    (batch,) = data.micro_batches(0, 0, 1, 6)  # 4 samples and 2 rows of padding
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "input_ids": (6, 16),
        "attention_mask": (6, 16),
        "labels": (6, 8),
    }
    for row, sample in enumerate(data.samples(0)):
        width = 1 + sample % 6
        word = [LETTERS + sample % 20 + i for i in range(width)]
        ids, mask, labels = (batch[name][row].tolist() for name in ("input_ids", "attention_mask", "labels"))
        assert labels == [*reversed(word), END] + [-100] * (7 - width)
        assert ids[8 : 9 + width] == [*word, END], "after `reverse ` come the word and the end"
        assert mask == [1] * (9 + width) + [0] * (7 - width)
    assert (batch["labels"][4:] == -100).all() and (batch["attention_mask"][4:] == 1).all()


def test_long_records_are_cut_and_keep_the_prompts_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    recipe = _recipe("t5", tmp_path, data={"sequence_length": 6, "completion_length": 2})
    batch = _batch(recipe, tmp_path)
    assert (batch["input_ids"][:, -1] == END).all() and (batch["attention_mask"] == 1).all()
    assert batch["labels"].shape == (4, 2)
    assert any("cut at its end" in sentence for sentence in check_data(recipe))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("adapter", [None, {"rank": 4}], ids=["full", "lora"])
def test_it_learns(adapter: dict[str, Any] | None, tmp_path: Path) -> None:
    recipe = _recipe("t5", tmp_path, adapter=adapter)
    blueprint = blueprint_of(recipe)
    run = build(recipe, blueprint, strategy_from({"micro_batch_size": 4}), torch.device("cpu"))
    batch = _batch(recipe, tmp_path)
    losses = [float(step(run, [batch], 1e-2).loss) for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0], losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_is_planned(precision: str, tmp_path: Path) -> None:
    recipe = _recipe("t5", tmp_path)
    strategy = strategy_from({"zero_stage": 3, "micro_batch_size": 2, "precision": precision})
    cluster = cluster_of(recipe.cluster.model_copy(update={"devices_per_node": 2}))
    planned = dry_run(recipe, blueprint_of(recipe), strategy, cluster)
    assert planned.cost.flops > 0 and planned.peak.bytes > 0


def test_sharded_training_is_that_of_one_process(tmp_path: Path, parity: Parity) -> None:
    """In fp32, since T5 takes its norms and its softmax in fp32 whatever the weights are in."""
    recipe = _recipe("t5", tmp_path, batch_size=5)  # the last micro-batch has rows of padding
    sharded = {"precision": "fp32", "zero_stage": 3, "micro_batch_size": 2}
    parity.all_pass(
        Trial(recipe, 2, sharded | {"activation_checkpointing": "full"}),
        Trial(_recipe("t5", tmp_path, adapter={"rank": 4}), 2, sharded),
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sequence_parallel": 2}, "its attention is not causal"),
        ({"tensor_parallel": 2}, "this model has no tensor parallelism"),
        ({"pipeline_parallel": 2}, "cannot be cut into stages"),
    ],
)
def test_layouts_of_decoders_are_refused(settings: dict[str, int], says: str, tmp_path: Path) -> None:
    recipe = _recipe("t5", tmp_path)
    cluster = cluster_of(recipe.cluster.model_copy(update={"devices_per_node": 2}))
    with pytest.raises(RecipeError, match=says):
        dry_run(recipe, blueprint_of(recipe), strategy_from(settings | {"micro_batch_size": 2}), cluster)


def test_plain_text_and_chats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("some text\n")
    with pytest.raises(DataError, match="the seq2seq objective needs prompts and completions"):
        check_data(_recipe("t5", tmp_path, data={"source": str(tmp_path / "text.txt")}))


def test_an_adapter_says_its_task_to_peft(tmp_path: Path) -> None:
    blueprint: Any = blueprint_of(_recipe("t5", tmp_path, adapter={"rank": 4}))
    assert blueprint.config()["task_type"] == "SEQ_2_SEQ_LM"
