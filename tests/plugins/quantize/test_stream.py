"""The streaming pass: what a loop over the whole model makes, block by block; interrupted or not; within its memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.errors import CheckpointError, RecipeError
from shardwise.core.scheme import scheme_of
from shardwise.model.hf import HuggingFaceModel
from shardwise.plugins.quantize.blocks import ATTENTION_LAYERS, BLOCK_NORMS
from shardwise.plugins.quantize.gate import lost
from shardwise.plugins.quantize.methods import method_of
from shardwise.plugins.quantize.methods.awq import ScalingGroup
from shardwise.plugins.quantize.methods.base import QuantizationMethod
from shardwise.plugins.quantize.source import open_source_model
from shardwise.plugins.quantize.state import UNQUANTIZED, PassState
from shardwise.plugins.quantize.stream import Batches, Quantizer, quantize_blocks
from shardwise.plugins.quantize.walk import Walk
from shardwise.runtime.quantization.stored import weight_of
from tests.harness.pool import LostRank, Pool
from tests.plugins.quantize.stubs import KillPoint, ToMultiples, saved_model

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

LENGTH = 12


def tokens(count: int, seed: int, vocab: int = 64) -> Tensor:
    return torch.randint(vocab, (count, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def batches() -> Batches:
    calibration, held_out = tokens(4, 1), tokens(2, 2)
    ids = [each[:, :-1] for each in calibration.split(2)]
    return Batches(ids, [held_out[:, :-1]], [held_out[:, 1:]], [None] * 2)


def walk_of(folder: Path) -> Walk:
    blueprint = HuggingFaceModel(str(folder), LENGTH, objective=None)
    return Walk(blueprint, blueprint.weights().read, torch.float32)


def quantized(folder: Path, state: PassState, **options: Any) -> Tensor:
    return pass_over(folder, state, ToMultiples(**options), "w8a16")


def pass_over(folder: Path, state: PassState, method: QuantizationMethod, scheme: str) -> Tensor:
    walk = walk_of(folder)
    dtypes = {name: torch.float32 for name, _ in walk.model.named_parameters()}
    return quantize_blocks(walk, Quantizer(method, scheme_of(scheme), dtypes), batches(), state)


def reference(folder: Path) -> tuple[nn.Module, nn.Module]:
    """The base, and the model quantized in memory: block by block, with plain hooks on the whole model."""
    model, base = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for _ in range(2)
    )
    calibration = torch.cat(list(batches().calibration))
    for block in _blocks(model):
        inputs: dict[nn.Module, Tensor] = {}

        def keep(layer: nn.Module, args: Any, inputs: dict[nn.Module, Tensor] = inputs) -> None:
            inputs[layer] = args[0]

        linear = [module for module in block.modules() if isinstance(module, nn.Linear)]
        hooks = [layer.register_forward_pre_hook(keep) for layer in linear]
        with torch.no_grad():
            model(input_ids=calibration)
        for hook in hooks:
            hook.remove()
        for layer in linear:
            x = inputs[layer].reshape(-1, layer.in_features).double()
            diagonal = (x * x).sum(0)
            large = diagonal > diagonal.median()
            shifted = torch.where(large, layer.weight / 0.4, layer.weight / 0.4 + 0.25)
            layer.weight.data = shifted.round() * 0.4
    return base, model


def _blocks(model: Any) -> list[nn.Module]:
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2]
    return list(lists[0])


def losses_of(base: nn.Module, model: nn.Module) -> dict[str, float]:
    ids, labels = batches().held_out[0], batches().labels[0]
    with torch.no_grad():
        ours, theirs = (F.log_softmax(m(input_ids=ids).logits.double(), -1) for m in (base, model))
    found = [F.nll_loss(each.flatten(0, 1), labels.flatten()) for each in (ours, theirs)]
    kl = F.kl_div(theirs, ours, log_target=True, reduction="none").sum(-1).mean()
    return {"base": float(found[0]), "quantized": float(found[1]), "kl": float(kl)}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox", "bloom", "falcon", "phi3", "mpt"])
def test_streamed_is_what_the_whole_model_gives(family: str, tmp_path: Path) -> None:
    """Every layer's codes, and the losses, of a loop that has the whole model in memory."""
    folder = saved_model(tmp_path / "model", family)
    state = PassState(tmp_path / "out", {})
    found = lost(quantized(folder, state))
    base, model = reference(folder)
    expected = losses_of(base, model)
    assert found.base_loss == pytest.approx(expected["base"], rel=1e-5)
    assert found.quantized_loss == pytest.approx(expected["quantized"], rel=1e-4)
    assert found.kl == pytest.approx(expected["kl"], rel=1e-3) and found.kl > 1e-4
    assert found.tokens == 2 * LENGTH
    modules = dict(model.named_modules())
    rows = {row.name: row for row in state.rows()}
    inside = {m for block in _blocks(model) for m in block.modules()}
    assert rows.keys() == {
        p for p, m in modules.items() if m in inside and type(m).__name__ in ("Linear", "FalconLinear")
    }
    for row, tensors in state.weights():
        weight = weight_of(tensors(), 8, row.shape).dequantize()
        torch.testing.assert_close(weight, modules[row.name].weight.data, atol=1e-6, rtol=0)
        assert row.method == "multiples" and 0 < row.error < 1 and 8 < row.bits < 10


def killed_pass(folder: Path, target: Path, method: str, killed_at: KillPoint) -> None:
    """A pass that a SIGKILL ends; called in a process of its own."""
    killed_at.set()
    pass_over(folder, PassState(target, {}), method_of(method), "w4a16-g16")


LAYERS, TENSORS = 7, 3
"""Linear layers of a block, and stored tensors of each."""
POINTS = (
    ("gptq", KillPoint("shardwise.plugins.quantize.methods.gptq:GPTQ.quantize", 4), 0),
    ("gptq", KillPoint("shardwise.exporter.hf_writer:_tensor_content", 5), 0),
    ("gptq", KillPoint("shardwise.plugins.quantize.state:sync_folder", 1), 1),
    ("gptq", KillPoint("shardwise.plugins.quantize.methods.gptq:GPTQ.quantize", LAYERS + 4), 1),
    ("gptq", KillPoint("shardwise.exporter.hf_writer:_tensor_content", LAYERS * TENSORS + 5), 1),
    (
        "awq",
        KillPoint("shardwise.plugins.quantize.methods.awq:AWQ.quantize", LAYERS + 4),
        1,
    ),  # norms have changed
)
"""Method, where the pass is killed, and the blocks that are then finished."""


def test_a_killed_pass_goes_on_with_the_same_bits(tmp_path: Path, pool: Pool) -> None:
    """A real SIGKILL, in calibrating and in writing of each block."""
    folder = saved_model(tmp_path / "model")
    wholes: dict[str, tuple[PassState, Tensor]] = {}
    for method in ("gptq", "awq"):
        whole = PassState(tmp_path / f"{method}-whole", {})
        wholes[method] = whole, pass_over(folder, whole, method_of(method), "w4a16-g16")
    for number, (method, point, done) in enumerate(POINTS):
        target = tmp_path / f"killed-{number}"
        with pytest.raises(LostRank):
            pool.run(1, killed_pass, folder, target, method, point)
        state, (whole, expected) = PassState(target, {}), wholes[method]
        assert state.done == done
        for left in state.folder.glob(".*"):  # in a container the next process often has the same number
            left.rename(left.with_suffix(f".{os.getpid()}"))
        assert torch.equal(pass_over(folder, state, method_of(method), "w4a16-g16"), expected)
        assert {path.name for path in state.folder.iterdir()} == {p.name for p in whole.folder.iterdir()}
        for path in whole.folder.glob("block-*"):
            assert (state.folder / path.name).read_bytes() == path.read_bytes()


def test_other_settings_are_refused(tmp_path: Path) -> None:
    PassState(tmp_path / "out", {"scheme": "w8a16", "data": "a"})
    PassState(tmp_path / "out", {"scheme": "w8a16", "data": "a"})
    with pytest.raises(RecipeError, match="other settings") as caught:
        PassState(tmp_path / "out", {"scheme": "w4a16-g16", "data": "a"})
    assert "scheme was w8a16, now it is w4a16-g16" in caught.value.line()


def test_another_config_is_another_model(tmp_path: Path) -> None:
    """A pass on a model with another rotary base does not go on with the blocks of this one."""
    folder = saved_model(tmp_path / "model")
    before = open_source_model(str(folder), LENGTH).identity
    assert open_source_model(str(folder), LENGTH).identity == before
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    assert open_source_model(str(folder), LENGTH).identity != before


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    """A block's file whose header is not that of a pass, and settings that are no JSON."""
    folder = saved_model(tmp_path / "model")
    state = PassState(tmp_path / "out", {})
    quantized(folder, state)
    path = state.folder / "block-00001.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="damaged"):
        quantized(folder, PassState(tmp_path / "out", {}))
    (state.folder / "settings.json").write_text("{")
    with pytest.raises(CheckpointError, match="state of an interrupted pass is damaged"):
        PassState(tmp_path / "out", {})


def test_layers_that_do_not_converge_are_kept_and_reported(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "model")
    state = PassState(tmp_path / "out", {})
    quantized(folder, state, refused="square")
    kept = {row.name: row.why for row in state.rows() if row.method == UNQUANTIZED}
    square = [f"model.layers.{i}.self_attn.{letter}_proj" for i in range(2) for letter in "qo"]
    assert kept == dict.fromkeys(square, "it is square")
    assert {row.bits for row in state.rows() if row.method == UNQUANTIZED} == {
        32.0
    }  # the folder's dtype is fp32
    assert not {row.name for row, _ in state.weights()} & kept.keys()


def test_inputs_that_are_no_multiple_of_the_group_get_no_scale(tmp_path: Path) -> None:
    """48 of the block's input: its readers stay as they are, the others are quantized."""
    folder = saved_model(tmp_path / "model", hidden_size=48, head_dim=16, intermediate_size=64)
    state = PassState(tmp_path / "out", {})
    pass_over(folder, state, method_of("awq"), "w4a16-g32")
    kept = {row.name.rpartition(".")[2]: row.why for row in state.rows() if row.method == UNQUANTIZED}
    why = "48 input channels are no multiple of the group of 32"
    assert kept == dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), why)
    assert {row.name.rpartition(".")[2] for row, _ in state.weights()} == {"o_proj", "down_proj"}


def test_a_folding_that_moves_the_output_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of a norm that one of its readers does not get: nothing is quantized, in one line."""
    folder = saved_model(tmp_path / "model")
    forgotten = [ScalingGroup(BLOCK_NORMS[0], ATTENTION_LAYERS[:2])]
    monkeypatch.setattr("shardwise.plugins.quantize.methods.awq.scaling_groups", lambda _: forgotten)
    state = PassState(tmp_path / "out", {})
    with pytest.raises(RecipeError, match="awq would change this model before it rounds") as caught:
        pass_over(folder, state, method_of("awq"), "w4a16-g16")
    assert "model.layers.0" in caught.value.line() and state.done == 0
