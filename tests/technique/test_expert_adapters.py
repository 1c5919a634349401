"""Adapters of experts under strategies: what PEFT trains, one plain process's steps, memory, and a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from shardwise.checkpoint.adapter import gathered_adapter
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.engine.build import build
from shardwise.engine.run_state import parameters_of
from shardwise.engine.step import step
from shardwise.hardware.cluster import cluster_of
from shardwise.model import expert_lora
from shardwise.model.files.peft_experts import layout_there, names_there
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.corpora import EVEN
from tests.harness.families import config_of, save_tiny
from tests.harness.parity import Parity, Trial
from tests.harness.pool import Pool
from tests.harness.tiers import quick

transformers = pytest.importorskip("transformers")

STEPS, RATE = 5, 1e-2


def recipe_for(folder: Path, adapter: dict[str, Any], **sections: Any) -> Any:
    values = {
        "model": {"hf": str(folder)},
        "data": {"source": EVEN, "sequence_length": 16},
        "steps": 4,
        "batch_size": 4,
        "adapter": adapter,
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
    }
    return recipe_of(values | sections, SETTINGS)


# ---- training ---------------------------------------------------------------------------------------------


def tokens() -> Tensor:
    return torch.randint(1, 64, (4, 17), generator=torch.Generator().manual_seed(3))


def trained_by_peft(base: Path, start: Path) -> dict[str, Tensor]:
    """PEFT's own file after the steps, by its names without the prefix."""
    import peft

    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float64, experts_implementation="eager"
        ),
        str(start),
        is_trainable=True,
        autocast_adapter_dtype=False,
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    ids = tokens()
    for _ in range(STEPS):
        logits = model(input_ids=ids[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(str(start.parent / "trained"))
    file = load_file(start.parent / "trained" / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): tensor for name, tensor in file.items()}


def trained_rank(values: dict[str, Any], settings: dict[str, Any]) -> dict[str, Tensor]:
    recipe = recipe_of(values, SETTINGS)
    run = build(recipe, blueprint_of(recipe), strategy_from(settings), torch.device("cpu"))
    mine = tokens()[run.data_rank :: run.data_degree]
    for _ in range(STEPS):
        step(run, [{"input_ids": mine[:, :-1], "labels": mine[:, 1:]}], RATE)
    return gathered_adapter(run, parameters_of(run))


@pytest.mark.parametrize("family", quick(["mixtral", "qwen3_moe"], "mixtral"))
def test_trains_what_peft_trains(family: str, pool: Pool, tmp_path: Path) -> None:
    """Five steps of AdamW with clipping in fp64, from PEFT's file: PEFT adds the whole update to W every time."""
    peft = pytest.importorskip("peft")
    base, start = tmp_path / "base", tmp_path / "start"
    save_tiny(family, base, initializer_range=0.08)
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj"], target_parameters=["gate_up_proj", "down_proj"]
    )
    opened = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    peft.get_peft_model(opened, config, autocast_adapter_dtype=False).save_pretrained(str(start))
    expected = trained_by_peft(base, start)
    values = {
        "model": {"hf": str(base)}, "data": {"sequence_length": 16}, "steps": STEPS, "batch_size": 4,
        "adapter": {"rank": 3, "alpha": 6.0, "start_from": str(start), "targets": ["q_proj", "experts"]},
        "optimizer": {"betas": [0.9, 0.95], "epsilon": 1e-5, "weight_decay": 0.0, "clip_norm": 1.0},
    }  # fmt: skip
    for world, settings in ((1, {}), (2, {"zero_stage": 3}), (2, {"tensor_parallel": 2})):
        found = pool.run(world, trained_rank, values, {"precision": "fp64", **settings}, timeout=180)[0]
        there = names_there(found)
        stored = {there.get(n, n): layout_there(n, t) if n in there else t for n, t in found.items()}
        assert stored.keys() == expected.keys() and len(there) == 8
        apart = {name: float((stored[name] - value).abs().max()) for name, value in expected.items()}
        assert max(apart.values()) <= 1e-10, (settings, apart)
    first = load_file(start / "adapter_model.safetensors")
    moved = [name for name in expected if not torch.equal(first[f"base_model.model.{name}"], expected[name])]
    assert len(moved) == len(expected), "every tensor is trained"


LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2, "micro_batch_size": 2},
    {"zero_stage": 3, "activation_checkpointing": "full"},
]
OTHERS: list[dict[str, Any]] = [
    *({"zero_stage": stage} for stage in range(4)),
    {"zero_stage": 2, "activation_checkpointing": "selective"},
]


@pytest.mark.parametrize("settings", [LAYOUTS, pytest.param(OTHERS, marks=pytest.mark.long)], ids=len)
def test_trains_as_one_plain_process(settings: list[dict[str, Any]], parity: Parity, tmp_path: Path) -> None:
    """Every ZeRO stage, tensor and pipeline parallelism, recomputation: in fp64, within 1e-10."""
    save_tiny("qwen3_moe", tmp_path, vocab_size=264)
    recipe = recipe_for(tmp_path, {"rank": 3, "alpha": 6.0, "dropout": 0.0})
    parity.all_pass(*(Trial(recipe, 2, {"precision": "fp64", **each}) for each in settings))


@pytest.mark.long
def test_packed_experts_train_as_in_one_process(parity: Parity, tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path, vocab_size=264)
    recipe = recipe_for(tmp_path, {"rank": 3, "alpha": 6.0, "quantize": "nf4"})
    settings = [{"zero_stage": 0}, {"zero_stage": 3}, {"zero_stage": 3, "activation_checkpointing": "full"}]
    parity.all_pass(*(Trial(recipe, 2, {"precision": "fp64", **each}) for each in settings))


NATIVE = {
    "layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 264, "context": 32, "experts": 4,
    "experts_per_token": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        [{"expert_parallel": 2}, {"zero_stage": 3, "activation_checkpointing": "full"}],
        pytest.param(
            [*({"zero_stage": s} for s in (0, 2, 3)), {"pipeline_parallel": 2, "micro_batch_size": 2}],
            marks=pytest.mark.long,
        ),
    ],
    ids=len,
)
def test_dora_trains_as_in_one_process(
    settings: list[dict[str, Any]], parity: Parity, tmp_path: Path
) -> None:
    """Magnitudes are divided with the experts, which expert parallelism and ZeRO divide. In fp64, within 1e-10."""
    dora = {"name": "dora", "rank": 3, "alpha": 6.0}
    plain, packed = (recipe_for(tmp_path, dora | {"quantize": q}, model=NATIVE) for q in ("none", "nf4"))
    trials = [Trial(plain, 2, {"precision": "fp64", **each}) for each in settings]
    trials.append(Trial(packed, 2, {"precision": "fp64", "zero_stage": 3}))
    parity.all_pass(*trials)
    assert {parity.verdict(trial).tolerance for trial in trials} == {1e-10}


# ---- memory -----------------------------------------------------------------------------------------------

WIDTH, INNER, EXPERTS, RANK = 256, 512, 32, 8


def planned(folder: Path, adapter: dict[str, Any], **settings: Any) -> tuple[DryRun, int]:
    """A dry run of two sequences of 16 tokens, and the trained weights."""
    recipe = recipe_for(folder, adapter, batch_size=2, optimizer={"name": "adamw"})
    blueprint = blueprint_of(recipe)
    strategy = strategy_from({"precision": "bf16", "micro_batch_size": 2, **settings})
    found = dry_run(recipe, blueprint, strategy, cluster_of(recipe.cluster))
    return found, blueprint.parameter_counts()[0]


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    config = config_of("qwen3_moe")
    config.hidden_size, config.moe_intermediate_size, config.num_experts = WIDTH, INNER, EXPERTS
    config.save_pretrained(tmp_path)
    return tmp_path


def test_nothing_of_the_size_of_the_experts_is_allocated(wide: Path) -> None:
    """Adapters on experts take their own weights, gradients and states, and rows; PEFT would add E · 2m · h."""
    (small, few), (whole, more) = (
        planned(wide, {"rank": RANK, "targets": targets}) for targets in ("attention", "all")
    )
    stack = 2 * EXPERTS * 2 * INNER * WIDTH
    added = more - few
    assert added == 2 * EXPERTS * RANK * ((2 * INNER + WIDTH) + (INNER + WIDTH))
    grown = whole.peaks["backward"].bytes - small.peaks["backward"].bytes
    states = (4 + 4 + 8) * added  # fp32 weights, gradients and moments
    copies = 4 * added  # inputs of the reductions of both blocks in fp32, until the backward pass ends
    rows = 4 * 2 * 2 * 16 * (2 * INNER + INNER + WIDTH)
    assert states < grown <= states + copies + rows
    assert rows + copies < stack / 2


def test_the_norms_of_dora_take_the_sums_of_some_experts(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of fewer experts lower the peak by their size in bf16, at most twice."""
    peaks = []
    for experts in (EXPERTS, 2):
        monkeypatch.setattr(expert_lora, "_SUMMED", experts * 2 * INNER * WIDTH)
        found, _ = planned(wide, {"name": "dora", "rank": RANK, "targets": "experts"})
        peaks.append(found.peaks["forward"].bytes)
    one = 2 * 2 * INNER * WIDTH
    assert 0.9 * (EXPERTS - 2) * one <= peaks[0] - peaks[1] <= 2 * (EXPERTS - 2) * one


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_a_packed_base_takes_its_bits_and_one_stack(quantize: str, wide: Path) -> None:
    (plain, _), (packed, _) = (
        planned(wide, {"rank": RANK, "targets": "experts", "quantize": kind}) for kind in ("none", quantize)
    )
    experts = 2 * EXPERTS * 3 * INNER * WIDTH
    attention = 2 * WIDTH * (4 + 4 + 2 + 2) * WIDTH // 4
    bits = {"nf4": 4.127, "int8": 8 + 32 / WIDTH}[quantize]
    held, less = plain.peaks["clip"].ledger.parameters, packed.peaks["clip"].ledger.parameters
    assert held - less == pytest.approx((2 - bits / 8) * (experts + attention), rel=0.01)
    passing = packed.peaks["backward"].bytes - packed.peaks["clip"].bytes
    stack, block = EXPERTS * 2 * INNER * WIDTH, bits / 8 * (experts + attention) / 2
    copies, rows = 2 * 2 * EXPERTS * RANK * 2048, 4 * 2 * 2 * 16 * (3 * INNER + WIDTH)
    # One stack in bf16, and its values in fp32 and their codes, of at most 2^25 values at a time.
    assert 2 * stack < passing <= block + 2 * stack + 6 * min(stack, 2**25) + copies + rows
    assert packed.parameters == plain.parameters
    start = packed.peaks["setup"].bytes - plain.peaks["setup"].bytes + held - less
    assert 0 <= start - 4 * (experts + attention) / 2 <= 16 * min(stack, 2**25), (
        "a block in fp32, and what packs it"
    )
