"""AWQ's scales between the up and the down projection of every expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardwise.plugins.quantize import experts
from shardwise.plugins.quantize.job import quantize_model
from shardwise.plugins.quantize.quantizer import Quantizer
from shardwise.plugins.quantize.report import Quantized
from shardwise.plugins.quantize.settings import Settings
from tests.harness.corpora import write_words
from tests.harness.families import config_of
from tests.plugins.quantize.stubs import saved_model, unpredicted

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

LENGTH, SEQUENCES = 32, 8


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


def with_outliers(folder: Path, family: str = "qwen3_moe", **changes: Any) -> dict[str, Tensor]:
    """A mixture whose down projections read a few large channels; its tensors."""
    write_words(folder / "words.txt", 3000)
    base = saved_model(folder / "base", family, vocab_size=256, num_hidden_layers=1, **changes)
    tensors = load_file(base / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name and name.rpartition(".experts.")[2].endswith("up_proj.weight"):
            tensor[::16] *= 30
        elif ".experts." in name and name.endswith("down_proj.weight"):
            tensor *= 20
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return tensors


def quantized(folder: Path, method: str, out: str, scheme: str = "w3a16-g16") -> Quantized:
    settings = Settings(
        str(folder / "base"), folder / out, scheme, method, calibrate=str(folder / "words.txt"),
        tokenizer="bytes", sequences=SEQUENCES, length=LENGTH,
    )  # fmt: skip
    with unpredicted():
        return quantize_model(settings)


def mean_error(found: Quantized, matrix: str) -> float:
    errors = [row.error for row in found.layers if row.stack and row.name.endswith(matrix)]
    return sum(errors) / len(errors)


@pytest.mark.long
def test_scales_lose_less_than_clipping_and_rounding_to_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of the whole model, where down reads a few large channels."""
    with_outliers(tmp_path)
    awq, nearest = (quantized(tmp_path, name, name, "w4a16-channel") for name in ("awq", "rtn"))
    monkeypatch.setattr(experts, "_passes_scales", lambda _: False)
    clipped = quantized(tmp_path, "awq", "clipped", "w4a16-channel")
    lost = [mean_error(each, "down_proj") for each in (awq, clipped, nearest)]
    assert lost[0] < 0.9 * lost[1] and lost[0] < 0.5 * lost[2]
    assert awq.lost.kl < clipped.lost.kl < nearest.lost.kl
    how = transformers.CompressedTensorsConfig(dequantize=True)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "awq", quantization_config=how)
    model = opened.eval()
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    ids = torch.arange(64, 64 + LENGTH).view(1, LENGTH)
    with torch.no_grad():
        moved = float((model(ids).logits - base(ids).logits).norm() / base(ids).logits.norm())
    assert moved < 0.5


def test_the_scaled_matrices_are_the_same_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = with_outliers(tmp_path)
    seen: dict[str, Tensor] = {}
    whole = Quantizer.expert

    def recording(self: Quantizer, name: str, stack: str, weight: Tensor, statistics: Any) -> Any:
        seen[name] = weight.clone()
        return whole(self, name, stack, weight, statistics)

    monkeypatch.setattr(Quantizer, "expert", recording)
    quantized(tmp_path, "awq", "out")
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))

    def run(weights: dict[str, Tensor], path: str, suffix: str = "") -> Tensor:
        gate, up, down = (weights[f"{path}.{name}_proj{suffix}"] for name in ("gate", "up", "down"))
        return (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    for expert in range(4):
        path = f"model.layers.0.mlp.experts.{expert}"
        torch.testing.assert_close(run(seen, path), run(tensors, path, ".weight"), rtol=1e-4, atol=1e-4)
        assert torch.equal(seen[f"{path}.gate_proj"], tensors[f"{path}.gate_proj.weight"])
        assert not torch.allclose(seen[f"{path}.up_proj"], tensors[f"{path}.up_proj.weight"])


def test_a_stack_that_stays_leaves_the_other_unscaled(tmp_path: Path) -> None:
    """40 inputs of down have no groups of 16."""
    tensors = with_outliers(tmp_path, moe_intermediate_size=40)
    found = quantized(tmp_path, "awq", "out")
    rows = {row.name: row for row in found.layers}
    assert rows["model.layers.0.mlp.experts.down_proj"].method == "kept"
    stored = load_file(tmp_path / "out" / "model.safetensors")
    path = "model.layers.0.mlp.experts.0"
    down = stored.get("model.layers.0.mlp.experts.down_proj")
    kept = stored[f"{path}.down_proj.weight"] if down is None else down[0]
    assert torch.equal(kept, tensors[f"{path}.down_proj.weight"])
    scales = stored[f"{path}.up_proj.weight_scale"]
    largest = tensors[f"{path}.up_proj.weight"].view(40, 2, 16).abs().amax(2)
    assert bool((scales * 4.1 >= 0.3 * largest).all()), "up is of its own size"


@pytest.mark.parametrize(
    ("family", "passes"), [("qwen3_moe", True), ("mixtral", True), ("gpt_oss", False), ("nemotron_h", False)]
)
def test_which_experts_pass_scales(family: str, passes: bool) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config_of(family))
    (module, *_) = [m for m in model.modules() if hasattr(m, "has_gate")]
    assert experts._passes_scales(module) == passes
