"""The recipes of docs/how-to/train-on-preferences.md train, and what it says of their evaluation and page holds."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.run_folder import read_job
from shardwise.cli.main import run as run_command
from shardwise.data.opening import open_part, tokenizer_of
from tests.harness.small_models import write_model
from tests.plugins.preferences.test_layouts import write_pairs
from tests.test_docs import PREFERENCES_PAGE, ROOT, blocks

RECIPE = str(ROOT / "recipes" / "preferences.yaml")


def trained(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[str, Any]:
    """The last line of the metrics of a run of two steps."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SHARDWISE_CACHE", str(folder / "cache"))
    for block in blocks(PREFERENCES_PAGE):
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
    write_pairs(folder / "pairs.jsonl")
    prompts = [{"prompt": f"count from {number}: "} for number in range(40)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    assert run_command(["train", name, "--out", "run", "steps=2", "batch_size=8", *overrides]) == 0
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return dict(json.loads(lines[-1]))


def write_held_out(run: Path, path: Path) -> None:
    """The held-out pairs of a run as a file."""
    recipe, _ = read_job(run)
    tokenizer, rows = tokenizer_of(recipe.data), []
    held_out = open_part(recipe, recipe.data, tokenizer).held_out
    for number in range(held_out.records):
        row = {}
        for side, document in zip(("chosen", "rejected"), held_out.documents(number), strict=True):
            first = next(place for place, (_, trained) in enumerate(document) if trained)
            row["prompt"] = tokenizer.decode([token for token, _ in document[:first]])
            row[side] = tokenizer.decode([token for token, _ in document[first:]])
        rows.append(json.dumps(row))
    path.write_text("\n".join(rows), encoding="utf-8")


REFERENCES = {
    ("dpo.yaml",): "the model without its adapter",
    ("dpo.yaml", "adapter=null"): "the model before training",
    (RECIPE,): "",
}


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=[pytest.mark.long] * (words != (RECIPE,))) for words in REFERENCES],
    ids=["adapter", "all weights", "recipe"],
)
def test_eval_of_the_held_out_pairs_is_the_last_evaluation_and_the_page_shows_it(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under two steps, packed and sharded, and in one process after it."""
    name, *overrides = words
    evaluated = trained(name, tmp_path, monkeypatch, *overrides)["metrics"]
    write_held_out(tmp_path / "run", tmp_path / "held_out.jsonl")
    said = capfd.readouterr().out
    assert "  shardwise eval run --preferences PAIRS " in said.rpartition("next:\n")[2]
    assert run_command(["eval", "run", "--preferences", "held_out.jsonl", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["reference"] == REFERENCES[words] and found["cut"] == found["left_out"] == 0
    both = found["measures"].keys() & evaluated.keys()
    assert {"chosen_reward", "rejected_reward", "chosen_log_probability"} <= both
    for measure in both:
        assert found["measures"][measure] == pytest.approx(evaluated[measure], rel=1e-4, abs=1e-6), measure
    report = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))
    assert report["answers"] and all(each["before"] is not None for each in report["answers"])
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "What the model answers" in page and "chosen log probability" in page
    assert "nats per token" not in page and "perplexity" not in page


def test_the_commands_after_fine_tuning_run_and_eval_has_the_reference_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The merged model and the continued adapter. The reference of the second is the adapter's first values."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "MODEL", "llama", max_position_embeddings=256)
    chat = [{"role": "user", "content": "Yes?"}, {"role": "assistant", "content": "yes yes"}]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"messages": chat})] * 8), encoding="utf-8")
    write_pairs(tmp_path / "pairs.jsonl", 12)
    [console] = [b for b in blocks(PREFERENCES_PAGE, "console") if "adapter.start_from" in b.text]
    fast = ("--device", "cpu", "steps=2", "optimizer.learning_rate=1e-2")
    for line in console.text.splitlines():
        words = shlex.split(line.removeprefix("$ shardwise "))
        assert run_command([*words, *fast] if words[0] == "finetune" else words) == 0, capfd.readouterr().err
    run = tmp_path / "runs" / "dpo-adapter"
    write_held_out(run, tmp_path / "held_out.jsonl")
    capfd.readouterr()
    assert run_command(["eval", str(run), "--preferences", "held_out.jsonl", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["reference"] == "the model before training"
    last = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    margin = json.loads(last)["metrics"]["reward_margin"]
    assert found["measures"]["reward_margin"] == pytest.approx(margin, rel=1e-3, abs=1e-6)


@pytest.mark.long
def test_rollouts_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "reward" in trained("grpo.yaml", tmp_path, monkeypatch, "steps=6")["measures"]
    report = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))
    assert (
        report["phases"]["seconds"]["rollout"] > 0
        and read_job(tmp_path / "run")[1].step.phases["rollout"] > 0
    )
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "loss, mean over completion tokens" in page and "What the model answers" in page
