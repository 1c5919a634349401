"""From a base to an answer, by the commands a user types: train, export, adapt to a chat, generate, merge, unmerge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.commands import Done, Shell
from tests.plugins.quantize.stubs import saved_model

BASE = """
model: {preset: tiny}
data: {source: CORPUS, sequence_length: 64}
steps: 3
batch_size: 4
strategy: {zero_stage: 0, micro_batch_size: 2, activation_checkpointing: none, loss: logits}
cluster: {device: cpu, devices_per_node: 2}
evaluation: {sequences: 2}
"""
CHAT = """
model: {hf: base}
data: {source: chat.jsonl, sequence_length: 96, packing: true, held_out: 0.0}
steps: 3
batch_size: 2
adapter: {rank: 4}
optimizer: {learning_rate: 1.0e-2}
strategy: {zero_stage: 3, micro_batch_size: 1, activation_checkpointing: none, loss: logits}
cluster: {device: cpu, devices_per_node: 2}
"""


def said(done: Done) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_base_is_adapted_to_a_chat_and_answers(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text(Path(__file__).read_text(encoding="utf-8") * 4, encoding="utf-8")
    Path("base.yaml").write_text(BASE.replace("CORPUS", "corpus.txt"), encoding="utf-8")
    Path("chat.yaml").write_text(CHAT, encoding="utf-8")
    turns = [
        [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": "x" * n}]
        for n in range(1, 13)
    ]
    lines = [json.dumps({"messages": turn}) for turn in turns]
    Path("chat.jsonl").write_text("\n".join(lines), encoding="utf-8")

    said(shell.run("train", "base.yaml", "--out", "run"))
    said(shell.run("export", "run", "base", "--dtype", "fp32"))
    assert "messages (detected)" in said(shell.run("train", "chat.yaml", "--out", "tuned"))
    asked = ("--prompt", "What", "--tokens", "12", "--temperature", "0", "--tokenizer", "bytes", "--past-end")
    plain = said(shell.run("generate", "base", *asked))
    adapted = said(shell.run("generate", "base", "--adapter", "tuned", *asked))
    assert adapted != plain

    said(shell.run("merge", "base", "tuned/adapter", "merged"))
    said(shell.run("merge", "merged", "tuned/adapter", "back", "--undo"))
    assert said(shell.run("generate", "merged", *asked)) == adapted
    assert said(shell.run("generate", "back", *asked)) == plain

    Path("wrong.jsonl").write_text('{"messages": [{"role": "user", "content": "alone"}]}\n', encoding="utf-8")
    refused = shell.run("train", "chat.yaml", "data.source=wrong.jsonl", "--out", "never")
    assert refused.returncode == 3
    assert refused.stderr.count("\n") == 1 and "wrong.jsonl:1" in refused.stderr


MIXTURE = """
model: {hf: base}
data: {source: corpus.txt, tokenizer: bytes, sequence_length: 16}
steps: 2
batch_size: 2
adapter: {rank: 2, targets: all, quantize: nf4}
strategy: {precision: bf16, zero_stage: 0, micro_batch_size: 2, activation_checkpointing: none, loss: logits}
cluster: {device: cpu, devices_per_node: 1}
"""


@pytest.mark.long
def test_plan_and_train_say_what_adapters_do_not_reach(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each, with the share of the router, and what quantize leaves."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    saved_model(tmp_path / "base", "qwen3_moe", vocab_size=257)
    Path("corpus.txt").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    Path("mixture.yaml").write_text(MIXTURE, encoding="utf-8")
    reasons = json.loads(said(shell.run("plan", "mixture.yaml", "--json")))["departures"]
    frozen, packed = (line for line in reasons if "model.layers.*.mlp.gate (" in line)
    assert "of the weights)" in frozen and "stay frozen in bf16 without an adapter" in frozen
    assert "stay in bf16: nf4 packs the blocks' linear layers and experts" in packed
    shown = said(shell.run("train", "mixture.yaml", "--out", "tuned"))
    assert shown.count(frozen) == shown.count(packed) == 1
