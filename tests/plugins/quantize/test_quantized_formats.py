"""Every format that ``shardwise quantize`` writes is read by ``generate`` and, where it has one, by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli.main import run
from shardwise.plugins.serve.serving import load_model
from tests.harness.corpora import write_words
from tests.plugins.quantize.stubs import saved_model

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

IDS = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
CASES = {
    "pack-quantized": ("w4a16-g16", "awq"),
    "int-quantized": ("w8a8", "gptq"),
    "float-quantized": ("fp8", "rtn"),
    "kashin": ("w4a16-channel", "kashin"),
}


@pytest.mark.parametrize(
    "form",
    [name if name == "pack-quantized" else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def test_it_is_read(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    saved_model(tmp_path / "base", vocab_size=256, num_hidden_layers=1)
    write_words(tmp_path / "words.txt", 2000)
    scheme, method = CASES[form]
    words = [
        "quantize",
        str(tmp_path / "base"),
        str(tmp_path / "out"),
        "--scheme",
        scheme,
        "--method",
        method,
    ]
    words += ["--tokenizer", "bytes", "--sequences", "4", "--sequence-length", "16"]
    assert run([*words, "--calibrate", str(tmp_path / "words.txt")]) == 0
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["format"] == form
    served: Any = load_model(tmp_path / "out", tokenizer="bytes").model
    folder, given = tmp_path / "out", {}
    if said["quant_method"] == "compressed-tensors":
        given = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    else:
        assert run(["export", str(folder), str(tmp_path / "dense")]) == 0
        folder = tmp_path / "dense"
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given)
    with torch.no_grad():
        found, expected = served(IDS).logits, theirs(IDS).logits
    assert (found - expected).abs().max() <= 1e-5
