"""Parity of models that are not the native decoder: Hugging Face folders and a user's own module and loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwise.engine.run import Run
from shardwise.recipe.load import dump_recipe, parse_recipe, recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import local_part, named_parameters
from shardwise.technique import MICRO_BATCH_SIZE, SETTINGS
from shardwise.verifier.reference import GradientScale
from shardwise.verifier.verdict import Verdict, relative
from shardwise.verifier.verify import shortened
from tests.harness.corpora import write_words
from tests.harness.parity import Parity, Trial
from tests.harness.pool import Pool
from tests.harness.ranks import reference_rank, strategy_rank

STEPS = 20


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Points in three classes; every fifth has no label."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        features = torch.randn(10, generator=generator, dtype=torch.float64).float()
        label = -100 if index % 5 == 0 else index % 3
        return {"features": features + index % 3, "labels": torch.tensor(label)}


def classifier(hidden: int = 23) -> Any:
    """A model, a loss and a dataset, as ``model.factory`` wants them."""
    model = nn.Sequential(nn.Linear(10, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, 3))

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        scores = module(batch["features"].to(next(module.parameters()).dtype))
        total = nn.functional.cross_entropy(scores, batch["labels"], ignore_index=-100, reduction="sum")
        return total, (batch["labels"] != -100).sum()

    return model, loss, Rows


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models as transformers saves them, one of them tied, and a corpus."""
    import transformers

    root = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(
        vocab_size=263, hidden_size=36, intermediate_size=50, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    gpt2 = transformers.GPT2Config(vocab_size=259, n_embd=30, n_layer=2, n_head=3, n_positions=64)
    for name, config in (("llama", llama), ("gpt2", gpt2)):
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    corpus = write_words(root / "corpus.txt", even=True)
    return {"llama": root / "llama", "gpt2": root / "gpt2", "corpus": corpus}


def recipe_for(model: str, folders: dict[str, Path]) -> Recipe:
    own = model == "classifier"
    named = {"factory": f"{__name__}:classifier"} if own else {"hf": str(folders[model])}
    values = {
        "model": named,
        "data": {"source": str(folders["corpus"]), "sequence_length": 20},
        "steps": STEPS,
        "batch_size": 7,
        "optimizer": {"learning_rate": 1e-3},
    }
    return recipe_of(values, SETTINGS)


@pytest.mark.parametrize(
    ("model", "world", "settings"),
    [
        # Not in fp64: transformers' Llama rounds to fp32 in every norm, whatever the weights are.
        ("llama", 2, {"zero_stage": 3, "precision": "fp32", MICRO_BATCH_SIZE.key: 2}),
        pytest.param(
            "llama", 4, {"zero_stage": 2, "precision": "fp32", "replicate": 2}, marks=pytest.mark.long
        ),
        pytest.param(
            "gpt2", 2, {"zero_stage": 1, "precision": "fp32", MICRO_BATCH_SIZE.key: 2}, marks=pytest.mark.long
        ),
        ("gpt2", 2, {"zero_stage": 3, "precision": "fp64"}),
        ("classifier", 2, {"zero_stage": 0, "precision": "fp64", MICRO_BATCH_SIZE.key: 3}),
        pytest.param("classifier", 4, {"zero_stage": 3, "precision": "fp32"}, marks=pytest.mark.long),
    ],
)
def test_other_models_train_as_one_plain_process(
    model: str, world: int, settings: dict[str, Any], folders: dict[str, Path], parity: Parity
) -> None:
    verdict = parity.verdict(Trial(recipe_for(model, folders), world, settings))
    assert verdict.passed, verdict
    assert verdict.tolerance == {"fp64": 1e-10, "fp32": 1e-5}[str(settings["precision"])]
    keys = {name for name in verdict.undetermined if "k_proj" in name or "c_attn" in name}
    assert set(verdict.undetermined) == keys and verdict.worst_parameter


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_scaled_rates_and_schedules_are_the_reference_s_too(
    rule: str, folders: dict[str, Path], pool: Pool, tmp_path: Path
) -> None:
    recipe = recipe_for("classifier", folders)
    values: dict[str, Any] = {
        **recipe.model_dump(),
        "optimizer": {"learning_rate": 1e-3, "scale_learning_rate": {"from_batch": 3, "rule": rule}},
        "schedule": {"name": "wsd", "warmup": 4, "decay": 8},
    }
    recipe = recipe_of(values, SETTINGS)
    settings = {"zero_stage": 3, "precision": "fp64"}
    pool.run(1, reference_rank, [(recipe, {**settings, MICRO_BATCH_SIZE.key: 7}, tmp_path)])
    for [verdict] in pool.run(2, strategy_rank, [(recipe, settings, tmp_path)]):
        assert verdict.passed, verdict


@pytest.mark.long
def test_adaptive_clipping_is_the_reference_s_too(
    folders: dict[str, Path], pool: Pool, tmp_path: Path
) -> None:
    """Beyond its 25 steps of warmup; without it the same steps are others."""
    values: dict[str, Any] = {**recipe_for("classifier", folders).model_dump(), "steps": 36}
    rate = {"learning_rate": 1e-3, "clip_norm": None}
    clipped, plain = (
        recipe_of({**values, "optimizer": rate | more}, SETTINGS) for more in ({"adaptive_clip": 0.01}, {})
    )
    settings = {"zero_stage": 3, "precision": "fp64"}
    pool.run(1, reference_rank, [(clipped, {**settings, MICRO_BATCH_SIZE.key: 7}, tmp_path)])
    assert all(verdict.passed for [verdict] in pool.run(2, strategy_rank, [(clipped, settings, tmp_path)]))
    assert not any(verdict.passed for [verdict] in pool.run(2, strategy_rank, [(plain, settings, tmp_path)]))


@pytest.mark.parametrize("steps", [1, 3, 20, 99, 500])
@pytest.mark.parametrize(("warmup", "decay"), [(30, 70), (0.5, 0.5), (0.33, None), (0, 0), (1, 99)])
def test_a_shortened_run_keeps_the_proportions_of_its_schedule(
    steps: int, warmup: float, decay: float | None
) -> None:
    values: dict[str, Any] = {
        "model": {"preset": "tiny"},
        "steps": 100,
        "batch_size": 1,
        "schedule": {"name": "wsd", "warmup": warmup, "decay": decay},
        "checkpoint": {"start_from": "elsewhere"},
    }
    whole = recipe_of(values, SETTINGS)
    short = shortened(whole, steps)
    again = parse_recipe(dump_recipe(short), SETTINGS)  # what the ranks read: it must not contradict itself
    assert again == short and short.checkpoint.start_from is None
    for name in ("warmup_steps", "decay_steps"):
        before, after = (getattr(r.schedule, name)(r.steps) / r.steps for r in (whole, short))
        assert abs(before - after) < 1 / steps


def test_a_difference_fails_and_nan_is_infinitely_far() -> None:
    assert relative(float("nan"), 1.0) == float("inf")
    assert relative(1.001, 1.0) == pytest.approx(1e-3)
    close = Verdict(1e-7, 1e-7, 1e-7, "w", 1e-5, 20)
    assert close.passed
    for field in ("max_loss_difference", "max_gradient_norm_difference", "max_parameter_difference"):
        assert not Verdict(**{**vars(close), field: 2e-5}).passed


def corrupted(recipe: Recipe, settings: dict[str, Any], folder: Path) -> Verdict:
    """Every rank scales one gradient before the norm is taken: a wrong strategy, as a person would write it."""
    from shardwise.engine.step import step
    from shardwise.verifier import verify

    def wrong(run: Any, batches: Any, rate: float) -> Any:
        run.options.micro_batch_hooks.clear()
        parameter = next(p for p in run.model.parameters() if p.ndim == 2)
        if not parameter._post_accumulate_grad_hooks:
            parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(1.01))
        return step(run, batches, rate)

    verify.step = wrong
    return strategy_rank([(recipe, settings, folder)])[0]


def test_verify_sees_a_gradient_that_is_one_percent_off(
    folders: dict[str, Path], pool: Pool, tmp_path: Path
) -> None:
    recipe, settings = (
        recipe_for("llama", folders),
        {"zero_stage": 3, "precision": "fp32", MICRO_BATCH_SIZE.key: 4},
    )
    pool.run(1, reference_rank, [(recipe, {**settings, MICRO_BATCH_SIZE.key: 7}, tmp_path)])
    assert not pool.run(2, corrupted, recipe, settings, tmp_path)[0].passed


OFF = 0.01


def nudged(recipe: Recipe, settings: dict[str, Any], folder: Path, name: str) -> Verdict:
    """One value of one weight is OFF by a little when weights are compared, on rank 1 alone."""
    import shardwise.verifier.verify as verify

    compare = verify.parameter_differences

    def nudge_first(run: Run, *others: Any) -> dict[str, float]:
        if dist.get_rank() == 1:
            with torch.no_grad():
                local_part(dict(named_parameters(run.model))[name]).view(-1)[0] += OFF
        return compare(run, *others)

    verify.parameter_differences = nudge_first
    return strategy_rank([(recipe, settings, folder)])[0]


@pytest.mark.parametrize("stage", [3, 0])
def test_verify_names_a_weight_of_which_one_value_is_off(
    stage: int, folders: dict[str, Path], pool: Pool, tmp_path: Path
) -> None:
    """Sharded or as one of two copies, which differ then; loss and gradients were right."""
    recipe = recipe_for("llama", folders)
    settings = {"zero_stage": stage, "precision": "fp32", MICRO_BATCH_SIZE.key: 4}
    pool.run(1, reference_rank, [(recipe, {**settings, MICRO_BATCH_SIZE.key: 7}, tmp_path)])
    weights = {
        name: tensor.double() for name, tensor in load_file(tmp_path / "reference.safetensors").items()
    }
    name = next(name for name in weights if "up_proj" in name)
    for verdict in pool.run(2, nudged, recipe, settings, tmp_path, name):
        assert not verdict.passed and verdict.worst_parameter == name
        assert max(verdict.max_loss_difference, verdict.max_gradient_norm_difference) < verdict.tolerance
        mean_square = sum(float(w.square().sum()) for w in weights.values()) / sum(
            w.numel() for w in weights.values()
        )
        size = max(float(weights[name].norm()), (mean_square * weights[name].numel()) ** 0.5)
        expected = OFF / size / (1 if stage == 3 else 2**0.5)
        assert verdict.max_parameter_difference == pytest.approx(expected, rel=0.05)


def test_a_parameter_is_undetermined_while_its_gradient_is_rounding() -> None:
    model, scale = nn.Linear(2, 2), GradientScale()
    model.weight.grad, model.bias.grad = torch.ones(2, 2), torch.full((2,), 1e-9)
    scale.watch(model)
    assert scale.undetermined(torch.float32) == ["bias"] and not scale.undetermined(torch.float64)
    model.bias.grad.fill_(1e-3)
    scale.watch(model)
    model.bias.grad.zero_()
    scale.watch(model)
    assert not scale.undetermined(torch.float32), "it rose once"


def test_what_the_loss_does_not_determine_is_left_out_and_nan_is_not() -> None:
    """A vector's element without a gradient is NaN, which no comparison counts; NaN of training is infinite."""
    model, scale = nn.Linear(2, 2), GradientScale()
    model.weight.grad, model.bias.grad = torch.ones(2, 2), torch.tensor([1.0, 1e-9])
    scale.watch(model)
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
        model.bias[0] = torch.nan
    left = scale.compared({name: each.detach() for name, each in model.named_parameters()}, torch.float32)
    assert torch.isinf(left["weight"]).sum() == 1 and not left["weight"].isnan().any()
    assert torch.isinf(left["bias"][0]) and left["bias"][1].isnan()
