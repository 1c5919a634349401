"""Commands print nothing on standard error unless they fail, whatever the libraries that they import warn about."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import main


def test_what_torchao_logs_when_it_is_imported_stays_silent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A command within which torchao is imported, as transformers does."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]

    def importing(arguments: list[str]) -> int:
        assert os.environ["TORCHAO_FORCE_SKIP_LOADING_SO_FILES"] == "1"
        for logger in loggers:
            logger.warning("built for another Python")
        return 0

    monkeypatch.delenv("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", raising=False)
    monkeypatch.setattr(main, "_invoked", importing)
    before = [logger.level for logger in loggers]
    assert main.run(["plan"]) == 0
    assert capfd.readouterr().err == ""
    assert [logger.level for logger in loggers] == before
    assert "TORCHAO_FORCE_SKIP_LOADING_SO_FILES" not in os.environ


@pytest.mark.long
def test_a_model_of_transformers_is_planned_in_silence(tmp_path: Path) -> None:
    """In a process of its own: a fork of the tests' process has imported everything already."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{hf: {tmp_path / 'llama'}}}\ndata: {{sequence_length: 16}}\nsteps: 1\nbatch_size: 2\n"
        "strategy: {zero_stage: 0, micro_batch_size: 2, activation_checkpointing: none, loss: logits}\n"
    )
    words = [sys.executable, "-m", "shardwise", "plan", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
