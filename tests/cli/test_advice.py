"""The advice of an error, followed: the same command with it is not refused any more."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardwise.cli.main import run
from tests.harness.commands import Shell
from tests.harness.dry_runs import remembered_dry_runs, uncompared
from tests.plugins.finetune.test_finetune import write_base, write_chats

__all__ = ["remembered_dry_runs", "uncompared"]

SMALL = """
model: {layers: 2, width: 32, heads: 4, kv_heads: 2, ffn: 64, vocab: 256, context: 64}
data: {sequence_length: 32}
steps: 4
batch_size: 8
cluster: {device: cpu, devices_per_node: 2}
strategy: {precision: fp32, zero_stage: 0, micro_batch_size: 4, loss: logits, compile: false,
  activation_checkpointing: none, tensor_parallel: 1, sequence_parallel: 1, pipeline_parallel: 1}
"""

FOLLOWED = [
    # refused, a part of the advice, the overrides that follow it
    ("steps=", "write steps=null to unset it", "steps=null epochs=1"),
    ("seed=", "write seed=null to unset it", "seed=null"),
    ("optimizer.learning_rate=", "=null to unset it", "optimizer.learning_rate=null"),
    ("model.heads=7", "use 4 heads", "model.heads=4"),
    ("model.kv_heads=3", "use 2 kv_heads", "model.kv_heads=2"),
    ("data.sequence_length=100", "raise model.context", "data.sequence_length=100 model.context=100"),
    ("model.vocab=100", "write vocab: 256", "model.vocab=256"),
    ("schedule.warmup=10", "raise steps", "schedule.warmup=10 steps=40"),
    ("schedule.decay=2", "write name: wsd", "schedule.decay=2 schedule.name=wsd"),
    ("strategy.tensor_parallel=3", "tensor_parallel: 2", "strategy.tensor_parallel=2"),
    (
        "strategy.pipeline_parallel=2 strategy.pipeline_schedule=interleaved",
        "pipeline_schedule: 1f1b",
        "strategy.pipeline_parallel=2 strategy.pipeline_schedule=1f1b",
    ),
    (
        "strategy.sequence_parallel=2 strategy.tensor_parallel=2",
        "tensor_parallel: 1",
        "strategy.sequence_parallel=2 strategy.tensor_parallel=1",
    ),
    ("strategy.replicate=3", "replicate: 2", "strategy.replicate=2"),
    (
        "strategy.optimizer_in_backward=true",
        "clip_norm and optimizer.adaptive_clip to null",
        "strategy.optimizer_in_backward=true optimizer.clip_norm=null optimizer.adaptive_clip=null",
    ),
    ("adapter.targets=[q_prj]", "their names are", "adapter.targets=[q_proj]"),
    ("adapter.init=loftq", "quantize: nf4", "adapter.init=loftq adapter.quantize=nf4"),
    ("adapter={} strategy.precision=fp8", "precision: bf16", "adapter={} strategy.precision=bf16"),
    ("data.train_on=completion", "train_on: all", "data.train_on=all"),
    ("data.mixture=[]", "write [{source", "data.mixture=[{source:stdlib,weight:1}]"),
    (
        "evaluation.every=2 data.held_out=0",
        "evaluation.sets",
        "evaluation.every=2 evaluation.sets={a:stdlib}",
    ),
    ("cluster.device=h10", "did you mean 'H100-80GB'?", "cluster.device=H100-80GB"),
    ("law=besirogl", "the laws are besiroglu", "law=besiroglu"),
]


@pytest.mark.parametrize(("refused", "said", "followed"), FOLLOWED, ids=[case[0] for case in FOLLOWED])
def test_what_a_plan_advises(
    refused: str,
    said: str,
    followed: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    remembered_dry_runs: None,
    uncompared: None,
) -> None:
    (tmp_path / "r.yaml").write_text(SMALL, encoding="utf-8")
    assert run(["plan", str(tmp_path / "r.yaml"), *refused.split(" ")]) == 2
    assert said in capsys.readouterr().err
    followed = re.sub(r"(?<=[a-z]):(?=[a-z0-9])", ": ", followed)
    assert run(["plan", str(tmp_path / "r.yaml"), *re.split(r" (?=[a-z_.]+=)", followed)]) == 0, (
        capsys.readouterr().err
    )


def test_a_tokenizer_with_more_tokens_than_the_model_has_embeddings(shell: Shell, tmp_path: Path) -> None:
    """A base is resized in transformers first; a native model by its key, which a base does not have."""
    from transformers import AutoModelForCausalLM

    base = write_base(tmp_path / "base", weights=True)
    write_chats(tmp_path / "chats.jsonl")
    content = json.loads((base / "tokenizer.json").read_text())
    like = content["added_tokens"][-1]
    content["added_tokens"] += [{**like, "id": 33 + n, "content": f"<|{n}|>"} for n in range(7)]
    (base / "tokenizer.json").write_text(json.dumps(content))
    text = SMALL.replace("data: {", "data: {source: chats.jsonl, tokenizer: base, held_out: 0, ")
    hf = re.sub(r"model: .*", "model: {hf: base}", text)
    for name, recipe in (("hf", hf), ("native", text.replace("vocab: 256", "vocab: 33"))):
        (tmp_path / f"{name}.yaml").write_text(recipe.replace("devices_per_node: 2", "devices_per_node: 1"))

    def train(name: str, *overrides: str) -> str:
        done = shell.run("train", f"{name}.yaml", *overrides, "--out", f"run-{name}", folder=tmp_path)
        assert (done.returncode == 0) == (done.stderr == ""), done.stderr
        return done.stderr

    assert "has 33 embeddings, and the tokenizer 40 tokens" in (told := train("hf"))
    assert "model.resize_token_embeddings(40) and save_pretrained" in told and "model.vocab" not in told
    assert "set model.vocab to at least 40" in train("native")
    assert train("native", "model.vocab=40") == ""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(40)
    model.save_pretrained(base)
    assert train("hf") == ""


def test_a_folder_without_a_tokenizer_is_no_empty_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers makes one without words of a config.json."""
    monkeypatch.chdir(tmp_path)
    base = write_base(tmp_path / "base")
    for path in base.iterdir():
        if path.name != "config.json":
            path.unlink()
    (tmp_path / "r.yaml").write_text(SMALL)
    assert run(["data", "r.yaml", "data.tokenizer=base"]) == 3
    assert "no tokenizer in 'base'" in capsys.readouterr().err
    assert run(["data", "r.yaml", "data.tokenizer=bytes", "--samples", "0"]) == 0
