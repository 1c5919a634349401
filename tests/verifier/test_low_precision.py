"""``shardwise verify`` of runs with fewer bits than fp32: healthy ones pass, a faulty gradient fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS
from shardwise.verifier.verdict import Verdict
from tests.harness.corpora import write_words
from tests.harness.optimizers import FACTORIES
from tests.harness.pool import Pool
from tests.harness.ranks import plain_rank, verified_rank

TINY = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "vocab": 256}
DEEP = {"layers": 4, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 256}


def recipe_for(folder: Path, model: dict[str, int], steps: int, **sections: Any) -> Recipe:
    values = {
        "model": model,
        "data": {
            "source": str(write_words(folder / "corpus.txt")),
            "sequence_length": 32 if steps > 9 else 12,
        },
        "steps": steps,
        "batch_size": 8 if steps > 9 else 4,
        **sections,
    }
    values["optimizer"] = {"learning_rate": 3e-3, **sections.get("optimizer", {})}
    return recipe_of(values, SETTINGS)


def verdict_of(pool: Pool, jobs: list[Any], world: int = 2, verify: Any = verified_rank) -> list[Verdict]:
    pool.run(1, plain_rank, jobs, timeout=300)
    found = pool.run(world, verify, jobs, timeout=300)
    assert all(verdicts == found[0] for verdicts in found), "the ranks disagree"
    return list(found[0])


def one_percent_off(jobs: list[Any]) -> list[Verdict]:
    """On every rank one gradient is 1 % too large."""
    from shardwise.engine.step import step
    from shardwise.verifier import verify

    def wrong(run: Any, batches: Any, rate: float) -> Any:
        run.options.micro_batch_hooks.clear()
        parameter = next(p for p in run.model.parameters() if p.ndim == 2)
        if not parameter._post_accumulate_grad_hooks:
            parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(1.01))
        return step(run, batches, rate)

    verify.step = wrong
    return verified_rank(jobs)


def scaled_wrongly(jobs: list[Any]) -> list[Verdict]:
    """Gradients are divided by another loss scale than the loss was multiplied by, where there is one."""
    from shardwise.engine import forward_backward

    plain = forward_backward.Sequential.forward_backward

    def wrong(self: Any, *rest: Any) -> Any:
        value = self._live.loss_scale.value
        before = value.clone()
        value.mul_(1.0 if before == 1 else 1.05)
        result = plain(self, *rest)
        value.copy_(before)
        return result

    forward_backward.Sequential.forward_backward = wrong
    return verified_rank(jobs)


def test_a_healthy_run_in_bf16_passes_and_a_gradient_off_by_one_percent_fails(
    pool: Pool, tmp_path: Path
) -> None:
    recipe = recipe_for(tmp_path, TINY, 3)
    job = (recipe, {"precision": "bf16", "zero_stage": 3, "micro_batch_size": 2}, tmp_path)
    [healthy] = verdict_of(pool, [job])
    assert healthy.passed and healthy.precision == "bf16" and healthy.allowed is not None, healthy
    assert healthy.proof is not None and healthy.proof.tolerance == 1e-10
    assert healthy.proof.notes == ("precision: fp64 for bf16",)
    for [faulty] in pool.run(2, one_percent_off, [job]):
        assert not faulty.passed and faulty.proof is not None
        assert faulty.proof.max_gradient_norm_difference > 1e-5


def test_a_fault_that_only_low_precision_has_is_beyond_its_noise(pool: Pool, tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, TINY, 2, loss_scale={"initial": 1024.0})
    job = (recipe, {"precision": "fp16", "zero_stage": 2, "micro_batch_size": 2}, tmp_path)
    [healthy] = verdict_of(pool, [job])
    assert healthy.passed, healthy
    for [faulty] in pool.run(2, scaled_wrongly, [job]):
        assert not faulty.agrees and faulty.proof is not None and faulty.proof.passed, faulty
        assert faulty.max_gradient_norm_difference == pytest.approx(0.05, rel=0.2)


EIGHT_BIT = {"optimizer": {"name": "adamw_8bit"}}
MUON = {"optimizer": {"factory": FACTORIES["Muon"], "learning_rate": 3e-3, "clip_norm": None}}
HEALTHY = {
    "fp16": ({}, {"precision": "fp16", "zero_stage": 2}),
    "fp16 at 1024": ({"loss_scale": {"initial": 1024.0}}, {"precision": "fp16", "zero_stage": 2}),
    "bf16": ({}, {"precision": "bf16", "zero_stage": 2}),
    "bf16 alone": ({}, {"precision": "bf16", "master_weights": False, "zero_stage": 2}),
    "adamw_8bit": (EIGHT_BIT, {"precision": "fp32", "zero_stage": 2}),
    "adamw_8bit in bf16": (EIGHT_BIT, {"precision": "bf16", "zero_stage": 3}),
    "muon": (MUON, {"precision": "fp32", "tensor_parallel": 2}),
    "tensor": ({}, {"precision": "bf16", "tensor_parallel": 2}),
    "pipeline": ({}, {"precision": "bf16", "pipeline_parallel": 2}),
    "ring": ({}, {"precision": "bf16", "sequence_parallel": 2, "sequence_method": "ring"}),
    "ulysses in fp16": ({}, {"precision": "fp16", "sequence_parallel": 2}),
    "16-bit reduction": ({}, {"precision": "bf16", "reduce_dtype": "compute", "zero_stage": 3}),
    "fp8": ({}, {"precision": "fp8", "fp8_layers": "all", "zero_stage": 2}),
    "fp8 rows": ({}, {"precision": "fp8", "fp8_layers": "all", "fp8_scaling": "row", "tensor_parallel": 2}),
    "qlora": ({"adapter": {"quantize": "nf4"}}, {"precision": "bf16", "zero_stage": 3}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_pass_at_an_ordinary_rate(name: str, pool: Pool, tmp_path: Path) -> None:
    """Four layers, 20 steps at 3e-3: gradients jump, and fp16 overflows at its first loss scale."""
    if "fp8" in name:
        pytest.importorskip("torchao")
    sections, settings = HEALTHY[name]
    recipe = recipe_for(tmp_path, DEEP, 20, **sections)
    [verdict] = verdict_of(pool, [(recipe, {"micro_batch_size": 2, **settings}, tmp_path)])
    assert verdict.passed, verdict
    assert verdict.proof is not None and verdict.proof.tolerance == 1e-10
    if name == "fp16":
        assert verdict.skipped[1] > 0, "else no skipped step is tested"


@pytest.mark.long
@pytest.mark.parametrize("name", ["fp16", "bf16 alone", "adamw_8bit", "muon", "tensor", "pipeline"])
def test_one_percent_of_one_gradient_fails(name: str, pool: Pool, tmp_path: Path) -> None:
    sections, settings = HEALTHY[name]
    recipe = recipe_for(tmp_path, DEEP, 10, **sections)
    job = (recipe, {"micro_batch_size": 2, **settings}, tmp_path)
    pool.run(1, plain_rank, [job], timeout=300)
    assert not any(verdict.passed for [verdict] in pool.run(2, one_percent_off, [job], timeout=300))


def test_a_model_whose_code_rounds_to_fp32_is_proved_to_fp32_s_tolerance(tmp_path: Path) -> None:
    """transformers' Llama rounds in every norm; the native decoder nowhere."""
    from shardwise.data import open_data
    from shardwise.model.open import blueprint_of
    from shardwise.verifier.reference import reference_model, rounds_to_fp32

    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    for model, rounds in (({"hf": str(tmp_path / "llama")}, True), (TINY, False)):
        recipe = recipe_for(tmp_path, model, 1)  # type: ignore[arg-type]
        blueprint = blueprint_of(recipe)
        batch = open_data(recipe).micro_batches(0, 0, 1, 1)[0]
        assert rounds_to_fp32(blueprint.loss, reference_model(blueprint, 0, torch.float64), batch) is rounds
