"""``shardwise eval``: the loss that a plain pass over the same text gives, with the adapter and without."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from shardwise.cli.main import run

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4)
    model.save_pretrained(folder / "model")
    (folder / "text.txt").write_text("all work and no play makes a dull day\n" * 11, encoding="utf-8")
    return folder


def test_the_loss_is_that_of_a_plain_pass(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [
        str(folder / "model"),
        str(folder / "text.txt"),
        "--tokenizer",
        "bytes",
        "--sequence-length",
        "16",
    ]
    assert run(["eval", *words, "--batch", "4", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    text = torch.tensor([*(folder / "text.txt").read_bytes(), 0])
    model = transformers.GPT2LMHeadModel.from_pretrained(folder / "model")
    whole = text[: (len(text) - 1) // 16 * 16 + 1]
    inputs, labels = whole[:-1].view(-1, 16), whole[1:].view(-1, 16)
    with torch.no_grad():
        logits = model(input_ids=inputs).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert found["sequences"] == len(inputs) and found["targets"] == labels.numel()
    assert found["loss"] == pytest.approx(float(expected), abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert run(["eval", *words, "--sequences", "2"]) == 0
    assert "of 32 targets in 2 sequences of 16 tokens" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--sequence-length", "33"], 2, "the model's context is 32"),
        (["--precision", "fp4"], 2, "precision is 'fp4'"),
        (["--device", "tpu"], 2, "no device 'tpu'"),
    ],
)
def test_one_line_and_the_right_code(
    words: list[str], code: int, says: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [str(folder / "model"), str(folder / "text.txt"), "--tokenizer", "bytes"]
    assert run(["eval", *given, *words]) == code
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and says in said[0]
