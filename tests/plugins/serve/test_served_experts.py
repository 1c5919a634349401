"""Adapters of experts, served, merged, unmerged, exported and resumed, against PEFT's own model of the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwise.cli.main import run
from shardwise.core.errors import CheckpointError
from shardwise.model.files.peft import write_adapter
from shardwise.plugins.serve.serving import load_model
from shardwise.runtime.parallel.shard_slices import named_parameters
from tests.harness.adapted_experts import adapted
from tests.harness.commands import Shell
from tests.harness.corpora import write_tokenizer
from tests.harness.families import save_tiny

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

IDS = torch.arange(24).view(2, 12) % 33
FAMILIES = pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])


def opened(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=IDS).logits


def saved_by_peft(base: Path, folder: Path, rank: int, **options: Any) -> Tensor:
    """An adapter with random values; its logits."""
    torch.manual_seed(rank)
    config = peft.LoraConfig(r=rank, lora_alpha=8, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    model = peft.get_peft_model(opened(base), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    model.save_pretrained(str(folder))
    return logits(model)


def close(ours: Tensor, theirs: Tensor) -> None:
    """Relative to the largest logit, or to 1."""
    assert float((ours - theirs).abs().max()) <= 5e-6 * max(1.0, float(theirs.abs().max()))


@FAMILIES
def test_what_peft_saved_is_served_merged_and_unmerged(family: str, tmp_path: Path) -> None:
    """Two adapters and the base in one batch; one of them has experts, linear layers, and another rank."""
    base = tmp_path / "base"
    save_tiny(family, base)
    write_tokenizer(base, "</s>")
    both = {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}
    plain = logits(opened(base))
    first = saved_by_peft(base, tmp_path / "first", 3, **both)
    second = saved_by_peft(
        base, tmp_path / "second", 5, target_modules=[], target_parameters=["experts.down_proj"]
    )
    assert min(float((found - plain).abs().max()) for found in (first, second)) > 1e-2
    model = load_model(base, {"first": tmp_path / "first", "second": tmp_path / "second"})

    def found(*names: str) -> Tensor:
        model.bank.select(names)
        return logits(model.model)

    close(found("first", "first"), first)
    close(found("base", "base"), plain)
    mixed = found("second", "first")
    close(mixed[:1], second[:1])
    close(mixed[1:], first[1:])
    mixed = found("base", "second")
    close(mixed[:1], plain[:1])
    close(mixed[1:], second[1:])
    assert model.bank.nbytes > 0

    for name, expected in (("first", first), ("second", second)):
        merged = tmp_path / f"merged {name}"
        assert run(["merge", str(base), str(tmp_path / name), str(merged)]) == 0
        close(logits(opened(merged)), expected)
        assert (
            run(["merge", "--undo", str(merged), str(tmp_path / name), str(tmp_path / f"back {name}")]) == 0
        )
        original, back = (load_file(f / "model.safetensors") for f in (base, tmp_path / f"back {name}"))
        assert original.keys() == back.keys()
        for key, tensor in original.items():
            torch.testing.assert_close(back[key], tensor, atol=1e-6, rtol=0)


def dora_saved(base: Path, folder: Path, rank: int) -> Tensor:
    """Files of an adapter with random values; its logits as a model that is trained."""
    blueprint, model = adapted(base, base.name, name="dora", rank=rank, targets=("q_proj", "experts"))
    tensors = {name: p.detach() for name, p in named_parameters(model) if p.requires_grad}
    write_adapter(folder, tensors, blueprint.config(), None)
    return logits(model)


@pytest.mark.parametrize(("family", "rank"), [("qwen3_moe", 3), ("gpt_oss", 4)])
def test_dora_of_experts_is_served_merged_and_unmerged(family: str, rank: int, tmp_path: Path) -> None:
    """The kernel of grouped products takes a rank of 4 as it is; one of 3 is padded."""
    base, adapter = tmp_path / family, tmp_path / "adapter"
    save_tiny(family, base)
    write_tokenizer(base, "</s>")
    expected, plain = dora_saved(base, adapter, rank), logits(opened(base))
    assert float((expected - plain).abs().max()) > 1e-2
    model = load_model(base, {"a": adapter})
    model.bank.select(("a", "base"))
    mixed = logits(model.model)
    close(mixed[:1], expected[:1])
    close(mixed[1:], plain[1:])
    merged, back = tmp_path / "merged", tmp_path / "back"
    assert run(["merge", str(base), str(adapter), str(merged)]) == 0
    close(logits(opened(merged)), expected)
    assert run(["merge", "--undo", str(merged), str(adapter), str(back)]) == 0
    restored = load_file(back / "model.safetensors")
    for key, tensor in load_file(base / "model.safetensors").items():
        torch.testing.assert_close(restored[key], tensor, atol=1e-5, rtol=0)


def test_an_adapter_of_other_experts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, sizes in (("base", {}), ("other", {"intermediate_size": 32}), ("dense", {})):
        save_tiny("llama" if name == "dense" else "mixtral", tmp_path / name, **sizes)
        write_tokenizer(tmp_path / name, "</s>")
    saved_by_peft(
        tmp_path / "base", tmp_path / "adapter", 2, target_modules=[], target_parameters=["down_proj"]
    )
    for name, why in (
        ("other", "is [4, 32, 48] in the adapter and [4, 32, 32]"),
        ("dense", "is no stack of experts"),
    ):
        with pytest.raises(CheckpointError) as raised:
            load_model(tmp_path / name, {"a": tmp_path / "adapter"})
        assert why in str(raised.value)
        assert run(["merge", str(tmp_path / name), str(tmp_path / "adapter"), str(tmp_path / "out")]) == 4
    lacking = tmp_path / "adapter" / "adapter_config.json"
    lacking.write_text(lacking.read_text().replace('"down_proj"', '"down_proj", "gate_up_proj"'))
    capsys.readouterr()
    assert run(["merge", str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "out")]) == 4
    assert "its config names model.layers.0.mlp.experts.gate_up_proj" in capsys.readouterr().err


RECIPE = """
model: {hf: base}
data: {source: corpus.txt, tokenizer: bytes, sequence_length: 16}
steps: 4
batch_size: 4
adapter: {name: NAME, rank: 3, alpha: 6, targets: all, quantize: QUANTIZE}
optimizer: {learning_rate: 3.0e-2}
strategy: {precision: fp32, zero_stage: 3, micro_batch_size: 2, activation_checkpointing: full, loss: logits}
cluster: {device: cpu, devices_per_node: 2}
checkpoint: {every: 2, keep: 9}
"""


@pytest.mark.long
@pytest.mark.parametrize(("name", "quantize"), [("lora", "none"), ("lora", "nf4"), ("dora", "nf4")])
def test_a_run_is_resumed_exported_and_generates(
    name: str, quantize: str, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps and two more are four; the exported model, and PEFT's of the run's LoRA, have its logits."""
    monkeypatch.chdir(tmp_path)
    save_tiny("qwen3_moe", tmp_path / "base", vocab_size=257)
    Path("corpus.txt").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    Path("r.yaml").write_text(RECIPE.replace("QUANTIZE", quantize).replace("NAME", name), encoding="utf-8")
    done: Callable[..., str] = lambda *words: _output(shell.run(*words))  # noqa: E731
    done("train", "r.yaml", "--out", "whole")
    done("train", "r.yaml", "steps=2", "--out", "parts")
    done("train", "r.yaml", "checkpoint.start_from=parts/checkpoints", "--out", "rest")
    whole, rest = (load_file(f"{run}/adapter/adapter_model.safetensors") for run in ("whole", "rest"))
    assert whole.keys() == rest.keys() and any(".experts.base_layer.lora_A" in key for key in whole)
    for key, tensor in whole.items():
        torch.testing.assert_close(rest[key], tensor, atol=1e-6, rtol=1e-5)
    done("export", "whole", "merged")
    model = load_model(tmp_path / "whole")
    model.bank.select(("own", "own"))
    trained = logits(model.model)
    close(logits(opened(tmp_path / "merged")), trained)
    model.bank.select(("base", "base"))
    assert float((trained - logits(model.model)).abs().max()) > 1e-3
    done("export", "whole", "frozen", "--base")
    if name == "lora":
        theirs = peft.PeftModel.from_pretrained(opened(tmp_path / "frozen"), "whole/adapter").eval()
        close(logits(theirs), trained)
    assert done("generate", "whole", "--prompt", "def", "--tokens", "4", "--tokenizer", "bytes", "--past-end")


def _output(done: Any) -> str:
    assert done.returncode == 0, done.stderr
    return str(done.stdout)
