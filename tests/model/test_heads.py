"""Models with a number per token: a score in the place of logits, and a value next to them, under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.dryrun.run import dry_run
from shardwise.engine.build import build
from shardwise.engine.step import step
from shardwise.hardware.cluster import cluster_of
from shardwise.model.adapted import AdaptedModel
from shardwise.model.blueprint import Batch, Blueprint, LossSum, TrainingObjective
from shardwise.model.factory import FactoryModel
from shardwise.model.heads import scalar_head, value_head
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.open import base_of
from shardwise.model.scalar_head import values
from shardwise.model.value_head import log_probabilities_and_values
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import gather, named_parameters
from shardwise.technique import SETTINGS, strategy_from
from shardwise.verifier.reference import GradientScale, ReferenceLoss, reference_model, train_reference
from tests.harness.pool import Pool
from tests.harness.tiers import quick

LENGTH, ROWS, STEPS, VOCAB = 16, 8, 3, 256
LLAMA: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": VOCAB}
VALUES: dict[str, Any] = {
    "data": {"sequence_length": LENGTH},
    "steps": STEPS,
    "batch_size": ROWS,
    "optimizer": {"learning_rate": 1e-2, "clip_norm": None},
    "schedule": {"name": "constant", "warmup": 0},
}


def _targets(labels: Tensor, dtype: torch.dtype) -> Tensor:
    return labels.to(dtype).sin()


class Scores(TrainingObjective):
    """Squares of the distances of scores from numbers of their labels."""

    def loss(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> LossSum:
        valid, scores = batch["labels"] >= 0, values(blueprint, model, batch)
        return ((scores - _targets(batch["labels"], scores.dtype)).square() * valid).sum(), valid.sum()


class Both(TrainingObjective):
    """Cross-entropies, and squares of the distances of values from numbers of their labels."""

    def loss(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> LossSum:
        valid = batch["labels"] >= 0
        logs, estimates = log_probabilities_and_values(blueprint, model, batch)
        assert estimates.shape == logs.shape == valid.shape
        squares = (estimates - _targets(batch["labels"], estimates.dtype)).square()
        return ((squares - logs) * valid).sum(), valid.sum()


def made(kind: str, model: dict[str, Any], adapter: dict[str, Any] | None) -> tuple[Recipe, Blueprint]:
    optimizer = VALUES["optimizer"] | ({"name": "sgd"} if "hf" in model else {})
    given = {**VALUES, "model": model, "adapter": adapter, "optimizer": optimizer}
    recipe = recipe_of(given, SETTINGS)
    blueprint = (scalar_head if kind == "score" else value_head)(base_of(recipe))
    if recipe.adapter is not None:
        blueprint = AdaptedModel(blueprint, recipe.adapter)
    blueprint.minimises = Scores() if kind == "score" else Both()
    return recipe, blueprint


def micro_batches(rank: int, ranks: int) -> list[list[Batch]]:
    """Of every step: rows of ids; a part of their labels is ignored."""
    chance = torch.Generator().manual_seed(3)
    steps = []
    for _ in range(STEPS):
        ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=chance)
        labels = ids.roll(-1, 1).masked_fill(torch.rand(ids.shape, generator=chance) < 0.3, -100)
        mine = slice(rank, None, ranks)
        pairs = zip(ids[mine].split(2), labels[mine].split(2), strict=True)
        steps.append([{"input_ids": i, "labels": t} for i, t in pairs])
    return steps


Trained = tuple[list[tuple[float, float]], dict[str, Tensor]]
"""(loss, gradient norm) of every step, and the weights after them."""


def plain(kind: str, model: dict[str, Any], adapter: dict[str, Any] | None) -> Trained:
    recipe, blueprint = made(kind, model, adapter)
    whole = reference_model(blueprint, recipe.seed, torch.float64)
    if adapter is not None:
        for name, parameter in whole.named_parameters():
            parameter.requires_grad_("lora" in name or name.startswith(("score.", "v_head.")))
    loss = ReferenceLoss(blueprint, recipe.seed, torch.float64)
    batches = iter(micro_batches(0, 1))
    steps = [
        (seen.loss, seen.grad_norm)
        for seen in train_reference(recipe, blueprint, whole, loss, batches, GradientScale())
    ]
    return steps, {name: p.detach() for name, p in whole.named_parameters()}


Job = tuple[str, dict[str, Any], dict[str, Any] | None, dict[str, Any]]


def trained_ranks(jobs: list[Job]) -> list[Trained]:
    return [trained_rank(*job) for job in jobs]


def trained_rank(
    kind: str, model: dict[str, Any], adapter: dict[str, Any] | None, settings: dict[str, Any]
) -> Trained:
    recipe, blueprint = made(kind, model, adapter)
    strategy = strategy_from({"precision": "fp64", "micro_batch_size": 2, **settings})
    run = build(recipe, blueprint, strategy, torch.device("cpu"))
    steps = []
    for batches in micro_batches(run.data_rank, run.data_degree):
        result = step(run, batches, 1e-2)
        steps.append((float(result.loss), float(result.grad_norm)))
    return steps, {name: gather(p).detach() for name, p in named_parameters(run.model)}


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero_stage": 0},
    "zero 3": {"zero_stage": 3, "activation_checkpointing": "full"},
    "tensor": {"tensor_parallel": 2},
    "tensor, sequence shares": {"tensor_parallel": 2, "tensor_sequence_parallel": "gathered"},
    "pipeline": {"pipeline_parallel": 2},
    "context": {"sequence_parallel": 2, "sequence_method": "ring"},
    "chunked": {"zero_stage": 2, "loss": "chunked", "offload": "optimizer"},
}
LORA = {"name": "lora", "rank": 4, "targets": "all"}


def agree(found: Trained, expected: Trained, tolerance: float) -> None:
    for (loss, norm), (known_loss, known_norm) in zip(found[0], expected[0], strict=True):
        assert loss == pytest.approx(known_loss, rel=tolerance)
        assert norm == pytest.approx(known_norm, rel=tolerance)
    for name, value in found[1].items():
        torch.testing.assert_close(value, expected[1][name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("kind", "adapter"),
    quick(
        [(kind, adapter) for kind in ("score", "value") for adapter in (None, LORA)],
        ("value", LORA),
    ),
    ids=str,
)
def test_trains_as_one_plain_process(kind: str, adapter: dict[str, Any] | None, pool: Pool) -> None:
    tied = {**LLAMA, "tied": kind == "score"}
    expected = plain(kind, tied, adapter)
    assert expected[0][0][0] != expected[0][-1][0]
    names = LAYOUTS if adapter is None else ("zero 0", "zero 3", "tensor", "pipeline", "chunked")
    jobs = [(kind, tied, adapter, LAYOUTS[name]) for name in names]
    for ranks in pool.run(2, trained_ranks, jobs, timeout=120):
        for found in ranks:
            agree(found, expected, 1e-10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of transformers whose embedding is its output layer."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    target = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(target)
    return target


@pytest.mark.parametrize("kind", quick(["score", "value"], "value"))
def test_models_of_transformers_train_as_one_plain_process(kind: str, folder: Path, pool: Pool) -> None:
    """Their norms round to fp32, which Adam would enlarge."""
    names = ("zero 3", "tensor", "pipeline", "context", "chunked")
    jobs = [(kind, {"hf": str(folder)}, LORA if name == "zero 3" else None, LAYOUTS[name]) for name in names]
    expected = {adapted: plain(kind, {"hf": str(folder)}, LORA if adapted else None) for adapted in (0, 1)}
    for ranks in pool.run(2, trained_ranks, jobs, timeout=120):
        for name, found in zip(names, ranks, strict=True):
            agree(found, expected[name == "zero 3"], 2e-6)


def test_first_values() -> None:
    """A score is normal with variance 1 / (h + 1), by seed; a value head is zero."""
    recipe = recipe_of({**VALUES, "model": {**LLAMA, "width": 1024, "layers": 1}}, SETTINGS)
    scoring, valuing = (head(base_of(recipe)) for head in (scalar_head, value_head))
    score = reference_model(scoring, 0, torch.float32).get_parameter("score.weight")
    assert score.square().sum().item() == pytest.approx(1024 / 1025, rel=0.15)
    assert not torch.equal(score, reference_model(scoring, 1, torch.float32).get_parameter("score.weight"))
    model = reference_model(valuing, 0, torch.float32)
    assert not any(model.get_parameter(f"v_head.{name}").any() for name in ("weight", "bias"))


def test_logits_are_those_without_a_value_head() -> None:
    recipe = recipe_of({**VALUES, "model": LLAMA}, SETTINGS)
    base = base_of(recipe)
    ids = torch.arange(32).view(2, 16)
    one, other = (of.logits(reference_model(of, 0, torch.float32), ids) for of in (base, value_head(base)))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("kind", "tied"),
    quick(
        [("score", False), ("score", True), ("value", False), ("value", True)],
        ("score", False),
        ("value", True),
    ),
)
def test_a_plan_counts_the_heads(kind: str, tied: bool) -> None:
    """Adam's state against that of the language model, on the first of 2 ranks: it has the whole of one row."""
    recipe, blueprint = made(kind, {**LLAMA, "tied": tied}, None)
    causal = base_of(recipe)
    removed = VOCAB * 32 if kind == "score" and not tied else 0
    added, tensors = {"score": (32, 1), "value": (33, 2)}[kind]
    tensors -= removed > 0
    assert blueprint.parameter_count() == causal.parameter_count() + added - removed
    cluster = cluster_of(recipe.cluster.model_copy(update={"devices_per_node": 2}))

    def state(of: Blueprint, stage: int) -> int:
        strategy = strategy_from({"zero_stage": stage, "micro_batch_size": 2})
        return dry_run(recipe, of, strategy, cluster).peak.ledger.optimizer_state

    counters = 4 * tensors  # of steps
    assert state(blueprint, 0) - state(causal, 0) == 2 * 4 * (added - removed) + counters
    assert state(blueprint, 3) - state(causal, 3) == 2 * 4 * (added - removed // 2) + counters


def test_models_without_a_known_output_layer_are_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    base = HuggingFaceModel(str(tmp_path), 16, "seq2seq")
    for head in (scalar_head, value_head):
        with pytest.raises(RecipeError, match="attention has to be causal"):
            head(base)
        with pytest.raises(RecipeError, match="does not name its output layer"):
            head(FactoryModel(f"{__name__}:_module", {}))


def _module() -> Any:
    return nn.Linear(2, 2), lambda model, batch: None
