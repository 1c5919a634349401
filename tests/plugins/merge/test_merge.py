"""Merging: what peft makes of the same adapter, at the base's cost; and back, or a line that says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise.cli.main import run as run_cli
from shardwise.core.errors import CheckpointError
from shardwise.model.files.peft import CONFIG, TENSORS
from shardwise.plugins.merge.merging import NORMS_FILE, RECORD_FILE, merge_adapter, unmerge

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SMALL = {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2}
KINDS: dict[str, dict[str, bool]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
}


def config_of(family: str) -> Any:
    if family == "gpt2":
        return transformers.GPT2Config(vocab_size=53, n_positions=32, n_embd=24, n_layer=2, n_head=2)
    return transformers.LlamaConfig(**SMALL, num_hidden_layers=2, num_key_value_heads=1)


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    ids = torch.randint(53, (2, 12), generator=torch.Generator().manual_seed(0))
    found: Tensor = model(input_ids=ids).logits
    return found


def written_by_peft(base: Path, folder: Path, kind: str, seed: int = 0) -> Any:
    """An adapter on all linear layers of a base, all of it random; the adapted model."""
    torch.manual_seed(seed)
    model = loaded(base)
    conv = type(model).__name__.startswith("GPT2")
    targets = ["c_attn", "c_proj", "c_fc"] if conv else ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, fan_in_fan_out=conv, **KINDS[kind])
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif "lora_" in name:
                parameter.normal_(0, 0.2)
    adapted.save_pretrained(str(folder))
    return adapted


@pytest.fixture
def base(tmp_path: Path) -> Callable[[str], Path]:
    def make(family: str) -> Path:
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config_of(family))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.2)
        model.save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return make


def test_the_folder_of_a_run_stands_for_the_adapter_that_it_trained(base: Any, tmp_path: Path) -> None:
    folder = base("llama")
    written_by_peft(folder, tmp_path / "run" / "adapter", "lora")
    for number, adapter in enumerate((tmp_path / "run", tmp_path / "run" / "adapter")):
        merge_adapter(str(folder), adapter, tmp_path / f"merged-{number}")
    one, two = (load_file(tmp_path / f"merged-{number}" / "model.safetensors") for number in (0, 1))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_merged_is_what_peft_merges_and_unmerged_the_base(
    family: str, kind: str, base: Any, tmp_path: Path
) -> None:
    folder = base(family)
    adapted = written_by_peft(folder, tmp_path / "adapter", kind)
    _, found = merge_adapter(str(folder), tmp_path / "adapter", tmp_path / "merged")
    before, theirs, mine = logits(adapted), adapted.merge_and_unload(), loaded(tmp_path / "merged")
    scale = float(before.abs().max())
    assert found.layers == (8 if family == "gpt2" else 10)
    assert found.difference <= 2e-6 * scale
    assert (logits(mine) - before).abs().max() <= 2e-6 * scale
    assert (logits(loaded(folder)) - before).abs().max() > 0.1 * scale, "the adapter does something"
    expected = dict(theirs.named_parameters())
    for name, parameter in mine.named_parameters():
        torch.testing.assert_close(parameter, expected[name], atol=1e-6, rtol=1e-6)
    unmerge(str(tmp_path / "merged"), tmp_path / "adapter", tmp_path / "back")
    original, back = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "back"))
    assert back.keys() == original.keys()
    for name, tensor in original.items():
        torch.testing.assert_close(back[name], tensor, atol=1e-6, rtol=0)
    assert not (tmp_path / "back" / RECORD_FILE).exists()


def test_a_merged_forward_pass_costs_what_the_bases_does(base: Any, tmp_path: Path) -> None:
    folder = base("llama")
    adapted = written_by_peft(folder, tmp_path / "adapter", "lora")
    merge_adapter(str(folder), tmp_path / "adapter", tmp_path / "merged")

    def flops(model: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            logits(model)
        return counter.get_total_flops()

    assert flops(loaded(tmp_path / "merged")) == flops(loaded(folder)) > 0
    assert flops(adapted) > flops(loaded(folder))


def test_dtypes(base: Any, tmp_path: Path) -> None:
    """The base's, or those asked for; a base in bf16 is restored bitwise from a merge in fp32."""
    folder = base("llama")
    written_by_peft(folder, tmp_path / "adapter", "lora")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def kinds(name: str) -> set[torch.dtype]:
        return {t.dtype for t in load_file(tmp_path / name / "model.safetensors").values()}

    _, near = merge_adapter(str(folder), tmp_path / "adapter", tmp_path / "narrow")
    assert kinds("narrow") == {torch.bfloat16}
    assert json.loads((tmp_path / "narrow" / "config.json").read_text())["dtype"] == "bfloat16"
    _, exact = merge_adapter(str(folder), tmp_path / "adapter", tmp_path / "wide", "fp32")
    assert kinds("wide") == {torch.float32} and exact.difference < 0.01 * near.difference
    unmerge(str(tmp_path / "wide"), tmp_path / "adapter", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(CheckpointError, match="cannot be restored") as caught:
        unmerge(str(tmp_path / "narrow"), tmp_path / "adapter", tmp_path / "again")
    assert "rounded to BF16; keep the base, or merge with --dtype fp32" in caught.value.line()


def test_another_adapter_is_not_taken_out(base: Any, tmp_path: Path, capfd: Any) -> None:
    folder = base("gpt2")
    written_by_peft(folder, tmp_path / "adapter", "lora")
    written_by_peft(folder, tmp_path / "other", "lora", seed=1)
    merge_adapter(str(folder), tmp_path / "adapter", tmp_path / "merged")

    def refused(merged: Path, adapter: Path) -> str:
        words = ["merge", str(merged), str(adapter), str(tmp_path / "back"), "--undo"]
        capfd.readouterr()
        assert run_cli(words) == 4
        assert not (tmp_path / "back").exists()
        return str(capfd.readouterr().err.splitlines()[-1])

    assert "another adapter was merged into this model" in refused(tmp_path / "merged", tmp_path / "other")
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    (tmp_path / "other" / CONFIG).write_text(json.dumps(config | {"lora_alpha": 9}))
    (tmp_path / "other" / TENSORS).write_bytes((tmp_path / "adapter" / TENSORS).read_bytes())
    assert "another adapter was merged" in refused(tmp_path / "merged", tmp_path / "other")
    assert "no record of a merge" in refused(folder, tmp_path / "adapter")
    (tmp_path / "merged" / RECORD_FILE).write_text("{}")
    assert "record of a merge cannot be read" in refused(tmp_path / "merged", tmp_path / "adapter")


def test_dora_comes_back_by_its_norms_alone(base: Any, tmp_path: Path) -> None:
    folder = base("llama")
    written_by_peft(folder, tmp_path / "adapter", "dora")
    merge_adapter(str(folder), tmp_path / "adapter", tmp_path / "merged")
    norms = load_file(tmp_path / "merged" / NORMS_FILE)
    assert len(norms) == 10
    (tmp_path / "merged" / NORMS_FILE).unlink()
    with pytest.raises(CheckpointError, match="missing"):
        unmerge(str(tmp_path / "merged"), tmp_path / "adapter", tmp_path / "back")
    tensors = load_file(tmp_path / "adapter" / TENSORS)
    name = next(name for name in tensors if "magnitude" in name)
    tensors[name][0] = 0
    save_file(tensors, tmp_path / "adapter" / TENSORS)
    merge_adapter(str(folder), tmp_path / "adapter", tmp_path / "zero")
    with pytest.raises(CheckpointError, match="a row's magnitude is zero"):
        unmerge(str(tmp_path / "zero"), tmp_path / "adapter", tmp_path / "back")


# ---- refusals ---------------------------------------------------------------------------------------------


def _edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def _tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any], header: Any = None) -> None:
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS, header)


def _renamed(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "layers.1.self_attn.q_proj" in name]:
        tensors[name.replace("q_proj", "c_attn")] = tensors.pop(name)


def _without(tensors: dict[str, Tensor], part: str) -> None:
    for name in [name for name in tensors if part in name]:
        del tensors[name]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: _edit(f, r=8), "lora_A.weight is [4, 40], and adapter_config.json gives it the rank 8"),
        (lambda f: _edit(f, r=10**8), "the adapter's config cannot be read"),
        (lambda f: _edit(f, lora_alpha="x"), "the adapter's config cannot be read"),
        (lambda f: (f / TENSORS).write_bytes((f / TENSORS).read_bytes()[:-9]), "is damaged"),
        (lambda f: _tensors(f, _renamed), "this model has no linear layer"),
        (
            lambda f: _tensors(f, lambda t: _without(t, "layers.1.self_attn.q_proj")),
            "the adapter is incomplete",
        ),
        (lambda f: _tensors(f, lambda t: _without(t, "lora_B")), "is absent there and"),
        (lambda f: _tensors(f, lambda t: _without(t, "lora_")), "the adapter is empty"),
        (
            lambda f: _tensors(f, lambda t: None, {"shardwise_base": "0" * 32}),
            "the adapter is for another base",
        ),
        (lambda f: (f / CONFIG).unlink(), "not an adapter's folder"),
    ],
    ids=["rank", "huge", "alpha", "short", "target", "layer", "B", "empty", "base", "config"],
)
def test_an_adapter_that_is_not_for_this_base(
    damage: Callable[[Path], Any],
    message: str,
    base: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
) -> None:
    written_by_peft(base("llama"), tmp_path / "adapter", "lora")
    damage(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)  # long paths would be cut in the error line
    capfd.readouterr()
    assert run_cli(["merge", "base", "adapter", "out"]) == 4
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_a_base_that_is_none(base: Any, tmp_path: Path, capfd: Any) -> None:
    written_by_peft(base("llama"), tmp_path / "adapter", "lora")
    (tmp_path / "empty").mkdir()
    assert run_cli(["merge", str(tmp_path / "empty"), str(tmp_path / "adapter"), str(tmp_path / "out")]) == 2
    assert "not a model folder" in capfd.readouterr().err
