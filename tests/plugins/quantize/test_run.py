"""A whole quantization: the written folder is the model whose loss was reported; its memory was predicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwise.core.scheme import QUANTIZATION_METHODS
from shardwise.model.hf import HuggingFaceModel
from shardwise.plugins.quantize.calibration import Texts, open_batches
from shardwise.plugins.quantize.job import quantize_model
from shardwise.plugins.quantize.run import run_pass
from shardwise.plugins.quantize.settings import Settings
from shardwise.plugins.quantize.source import open_source_model
from tests.harness.commands import Shell
from tests.harness.corpora import write_words
from tests.harness.pool import Pool
from tests.plugins.quantize.stubs import saved_model, unpredicted

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

LENGTH = 16


def int8(x: Tensor) -> Tensor:
    """256 levels per token, as compressed-tensors has them."""
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).clamp(-128, 127).round() * scale


def e4m3(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@torch.no_grad()
def loss_of(folder: Path, base: Path, text: Path, rounded: Callable[[Tensor], Tensor] | None = None) -> float:
    """Mean loss of a written folder, loaded whole, on the held-out text of a quantization of ``base``.

    ``rounded``: what a server does with the inputs of the blocks' linear layers.
    """
    source = open_source_model(str(base), LENGTH)
    batches = open_batches(source, str(base), Texts(str(text), None, "bytes", 4)).batches
    blueprint = HuggingFaceModel(str(folder), LENGTH, objective=None)
    with torch.device("meta"):
        model = blueprint.build().float()
    model = model.to_empty(device="cpu").eval()
    blueprint.fill(model, 0)
    if rounded is not None:
        for layer in (each for block in blueprint.blocks(model) for each in block.modules()):
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(lambda _, given: rounded(given[0]))
    ids, labels = torch.cat(list(batches.held_out)), torch.cat(list(batches.labels))
    return float(F.cross_entropy(blueprint.logits(model, ids).flatten(0, 1).double(), labels.flatten()))


@pytest.mark.parametrize(
    ("scheme", "method", "rotate", "tied"),
    [
        ("w4a16-g16", "gptq", None, False),
        pytest.param("w3a16-g16", "awq", None, True, marks=pytest.mark.long),
        pytest.param("w8a16", "hqq", None, False, marks=pytest.mark.long),
        ("w4a16-channel", "rtn", "hadamard", True),
        ("w8a8", "gptq", None, False),
        ("fp8", "rtn", None, False),
        ("nf4", "rtn", None, False),
        pytest.param("w4a16-channel", "kashin", None, False, marks=pytest.mark.long),
    ],
)
def test_the_folder_has_the_loss_that_was_reported(
    scheme: str, method: str, rotate: str | None, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWQ's folded norms and a rotation's untied output layer are in it; 8-bit inputs are what a server makes."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    sizes = {
        "vocab_size": 256,
        "hidden_size": 64,
        "head_dim": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    }
    base = saved_model(tmp_path / "base", tie_word_embeddings=tied, **sizes)
    text = write_words(tmp_path / "words.txt", 2000)
    names = {"calibrate": str(text), "tokenizer": "bytes", "sequences": 4, "length": LENGTH}
    with unpredicted():
        found = quantize_model(Settings(str(base), tmp_path / "out", scheme, method, rotate=rotate, **names))
    assert {row.method for row in found.layers} == {method}
    assert loss_of(base, base, text) == pytest.approx(found.lost.base_loss, rel=1e-5)
    rounded = {"w8a8": int8, "fp8": e4m3}.get(scheme)
    assert loss_of(tmp_path / "out", base, text, rounded) == pytest.approx(
        found.lost.quantized_loss, rel=1e-5
    )
    assert found.lost.kl > 1e-6


def test_the_base_of_a_rotated_model_in_16_bits_is_the_model(tmp_path: Path) -> None:
    """Rounding the rotated weights to bf16 counts as a loss."""
    base, text = (
        saved_model(tmp_path / "fp32", vocab_size=256, tie_word_embeddings=True),
        tmp_path / "words.txt",
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16")
    model.save_pretrained(tmp_path / "base")
    write_words(text, 2000)
    with unpredicted():
        found = quantize_model(
            Settings(
                *(
                    str(tmp_path / "base"),
                    tmp_path / "out",
                    "w8a16",
                    "rtn",
                    str(text),
                    None,
                    "bytes",
                    4,
                    LENGTH,
                ),
                rotate="hadamard",
            )
        )
    base_loss = loss_of(tmp_path / "base", tmp_path / "base", text)
    assert found.lost.base_loss == pytest.approx(base_loss, rel=1e-6)
    assert found.lost.quantized_loss == pytest.approx(
        loss_of(tmp_path / "out", tmp_path / "base", text), rel=1e-6
    )


UNCALIBRATED, ROTATED = ["--sequences", "0"], ["--rotate", "hadamard"]


@pytest.mark.long
@pytest.mark.parametrize("rotate", [[], ROTATED], ids=["", "rotated"])
@pytest.mark.parametrize(
    ("method", "sequences"),
    [
        *((method, ["--sequences", "16"]) for method in QUANTIZATION_METHODS),
        *((method, UNCALIBRATED) for method in ("rtn", "hqq", "kashin")),
    ],
    ids=lambda given: given if isinstance(given, str) else given[-1],
)
def test_the_predicted_peak_is_the_measured_one(
    method: str, sequences: list[str], rotate: list[str], tmp_path: Path, shell: Shell
) -> None:
    """Within 5 %, in a process of its own, for peaks of about 90 MB."""
    sizes = {"vocab_size": 2048, "hidden_size": 384, "intermediate_size": 1024}
    layers = 1 if method == "kashin" else 2  # it takes 10 s per million weights
    saved_model(tmp_path / "base", max_position_embeddings=512, num_hidden_layers=layers, **sizes)
    write_words(tmp_path / "words.txt", 40_000)
    words = ["quantize", str(tmp_path / "base"), str(tmp_path / "out"), "--scheme", "w4a16-channel", "--json"]
    words += ["--tokenizer", "bytes", "--calibrate", str(tmp_path / "words.txt"), "--method", method]
    done = shell.run(*words, *sequences, *rotate, "--sequence-length", "512", timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["predicted_peak_bytes"] == pytest.approx(found["measured_peak_bytes"], rel=0.05)


@pytest.mark.long
def test_the_predicted_peak_of_a_mixture_is_the_measured_one(tmp_path: Path, shell: Shell) -> None:
    """With the Hessians of experts, which make the peak here."""
    sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_local_experts": 8}
    saved_model(tmp_path / "base", "mixtral", max_position_embeddings=512, **sizes)
    write_words(tmp_path / "words.txt", 40_000)
    words = ["quantize", str(tmp_path / "base"), str(tmp_path / "out"), "--scheme", "w4a16-channel", "--json"]
    words += ["--tokenizer", "bytes", "--calibrate", str(tmp_path / "words.txt"), "--method", "gptq"]
    done = shell.run(*words, "--sequences", "16", "--sequence-length", "512", timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["predicted_peak_bytes"] == pytest.approx(found["measured_peak_bytes"], rel=0.05)


def pass_here(settings: Settings) -> dict[str, Any]:
    """One rank's part of a quantization; called on every rank."""
    with unpredicted():
        return run_pass(settings, lambda _: None, lambda *_: nullcontext(lambda _: None)).as_dict()


@pytest.mark.parametrize("method", [pytest.param("rtn", marks=pytest.mark.long), "gptq"])
def test_two_ranks_give_the_weights_of_one(
    method: str, tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of other order differ in their last bits, which moves no code here."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    base = saved_model(tmp_path / "base", vocab_size=256, num_hidden_layers=1)
    text = write_words(tmp_path / "words.txt", 2000)
    names = {"calibrate": str(text), "tokenizer": "bytes", "sequences": 4, "length": LENGTH}
    alone = pass_here(Settings(str(base), tmp_path / "one", "w4a16-g16", method, **names))
    both = pool.run(2, pass_here, Settings(str(base), tmp_path / "two", "w4a16-g16", method, **names))
    for found in both:
        assert found["kl"] == pytest.approx(alone["kl"], rel=1e-5)
        for ours, theirs in zip(found["layers"], alone["layers"], strict=True):
            assert ours == {**theirs, "error": pytest.approx(theirs["error"], rel=1e-4)}
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
