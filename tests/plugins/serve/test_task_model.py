"""lm-evaluation-harness gets the same answers from a served model as from its own reader of transformers models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli.main import run
from shardwise.core.errors import RecipeError
from shardwise.plugins.serve.evaluating import EvaluationOptions, TaskOptions, task_results

transformers = pytest.importorskip("transformers")

TEXT = "the quick brown fox jumps over the lazy dog while one two three four five cats sleep\n" * 40
QUESTIONS = [
    ("the quick brown", [" fox jumps", " cats", " dog sleep"]),
    ("one two", [" three", " four five"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer that adds a beginning-of-sequence token, and a task."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tasks")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = ["<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([TEXT], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", add_bos_token=True
    )
    wrapped.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(wrapped), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    fit(model, torch.tensor(made.encode(TEXT).ids))
    model.save_pretrained(folder / "model")
    rows = [{"q": q, "choices": choices, "label": 1} for q, choices in QUESTIONS]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "shapes",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "tasks").mkdir()
    (folder / "tasks" / "shapes.yaml").write_text(json.dumps(task))
    return folder


def fit(model: Any, ids: torch.Tensor) -> None:
    """A few steps, after which the model writes words rather than halves of characters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        batch = ids.roll(-17 * step)[:60].unsqueeze(0)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.long
def test_answers_are_those_of_the_harness_s_own_model(folder: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from shardwise.plugins.serve.evaluating import opened_model
    from shardwise.plugins.serve.multi_lora import BASE
    from shardwise.plugins.serve.task_model import TaskModel

    theirs = HFLM(pretrained=str(folder / "model"), device="cpu", dtype="float32", batch_size=2)
    opened, served, length = opened_model(folder / "model", EvaluationOptions())
    ours = TaskModel(opened, served, BASE, length, batch=2)

    def asked(kind: str, rows: list[tuple[Any, ...]]) -> list[Any]:
        return [Instance(kind, {}, row, index) for index, row in enumerate(rows)]

    pairs = [(q, choice) for q, choices in QUESTIONS for choice in choices] + [("", "the dog")]
    pairs.append((TEXT[:400], " one two"))  # longer than the context: both cut its beginning
    for mine, their in zip(
        ours.loglikelihood(asked("loglikelihood", pairs)),
        theirs.loglikelihood(asked("loglikelihood", pairs)),
        strict=True,
    ):
        assert mine[0] == pytest.approx(their[0], abs=1e-3) and mine[1] == their[1]
    texts = [(TEXT[:85],), (TEXT[:900],)]
    assert ours.loglikelihood_rolling(asked("loglikelihood_rolling", texts)) == pytest.approx(
        theirs.loglikelihood_rolling(asked("loglikelihood_rolling", texts)), rel=1e-4
    )
    wanted = [(q, {"until": ["\n", " the"], "max_gen_toks": 12}) for q, _ in QUESTIONS]
    assert ours.generate_until(asked("generate_until", wanted)) == theirs.generate_until(
        asked("generate_until", wanted)
    )


@pytest.mark.long
def test_tasks_of_a_folder_by_name(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    words = [str(folder / "model"), "--tasks", "shapes", "--task-folder", str(folder / "tasks"), "--json"]
    assert run(["eval", *words]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["shapes"]["acc"] in (0.0, 0.5, 1.0) and "acc_stderr" in found["shapes"]
    assert run(["eval", *words[:-1]]) == 0
    assert f"shapes  acc {found['shapes']['acc']:.4f} ± " in capfd.readouterr().out
    with pytest.raises(RecipeError, match="there is no task 'shapse'"):
        task_results(folder / "model", ["shapse"], EvaluationOptions(), TaskOptions(folder / "tasks"))


@pytest.mark.parametrize("words", [[], ["stdlib", "--tasks", "x"]])
def test_data_or_tasks(words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", str(tmp_path), *words]) == 2
    assert "give one of data, preferences and tasks" in capfd.readouterr().err


def test_a_missing_harness_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(RecipeError, match=r"pip install 'shardwise\[eval\]'"):
        task_results(tmp_path, ["x"], EvaluationOptions(), TaskOptions())
