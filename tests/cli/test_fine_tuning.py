"""From a base to an answer, by the commands a user types: train, export, adapt to a chat, generate, merge, unmerge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.main import run

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


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_base_is_adapted_to_a_chat_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text(Path(__file__).read_text(encoding="utf-8") * 4, encoding="utf-8")
    Path("base.yaml").write_text(BASE.replace("CORPUS", "corpus.txt"), encoding="utf-8")
    Path("chat.yaml").write_text(CHAT, encoding="utf-8")
    turns = [
        [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": "x" * n}]
        for n in range(1, 13)
    ]
    lines = [json.dumps({"messages": turn}) for turn in turns]
    Path("chat.jsonl").write_text("\n".join(lines), encoding="utf-8")

    said(capsys, "train", "base.yaml", "--out", "run")
    said(capsys, "export", "run", "base", "--dtype", "fp32")
    assert "messages (detected)" in said(capsys, "train", "chat.yaml", "--out", "tuned")
    asked = ("--prompt", "What", "--tokens", "12", "--temperature", "0", "--tokenizer", "bytes", "--past-end")
    plain = said(capsys, "generate", "base", *asked)
    adapted = said(capsys, "generate", "base", "--adapter", "tuned", *asked)
    assert adapted != plain

    said(capsys, "merge", "base", "tuned/adapter", "merged")
    said(capsys, "merge", "merged", "tuned/adapter", "back", "--undo")
    assert said(capsys, "generate", "merged", *asked) == adapted
    assert said(capsys, "generate", "back", *asked) == plain

    Path("wrong.jsonl").write_text('{"messages": [{"role": "user", "content": "alone"}]}\n', encoding="utf-8")
    assert run(["train", "chat.yaml", "data.source=wrong.jsonl", "--out", "never"]) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "wrong.jsonl:1" in error
