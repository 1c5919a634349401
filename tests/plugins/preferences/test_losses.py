"""Every objective against published values and against plain PyTorch on whole logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

from shardwise.core.errors import RecipeError
from shardwise.core.plugins import OBJECTIVES, require_plugin
from shardwise.model.blueprint import Blueprint
from shardwise.model.open import blueprint_of
from shardwise.model.plain_passes import PlainPasses
from shardwise.plugins.preferences.documents import Answers
from shardwise.plugins.preferences.dpo import DPO
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.measures import Measures, collecting
from shardwise.technique import SETTINGS
from shardwise.verifier.reference import ReferenceLoss, reference_model
from tests.harness.families import config_of
from tests.plugins.preferences.pairs import documents, packed, padded_answers, padded_pairs

LENGTH = 32
DOCUMENTS = documents(8)


def recipe(objective: Any, **more: Any) -> Recipe:
    values = {
        "model": {"layers": 2, "width": 32, "heads": 4, "vocab": 256},
        "objective": objective,
        "data": {"source": "pairs.jsonl", "sequence_length": LENGTH},
        "steps": 1,
        "batch_size": 4,
        **more,
    }
    return recipe_of(values, SETTINGS)


def test_dpo_is_torchtunes_triple() -> None:
    """torchtune's tests/torchtune/rlhf/loss/test_dpo_loss.py: the margins are 0, 1 and 2."""
    policy = torch.tensor([[[-0.5, -0.1], [-10.0, -30.0], [-1.0, -21.0]]])
    reference = torch.tensor([[[-0.5, -0.1], [-10.1, -20.1], [-0.1, -0.1]]])
    dpo = DPO(recipe({"name": "dpo", "beta": 0.1}))
    pairs = Answers(policy, torch.ones_like(policy))
    losses = dpo.losses(dpo.rewards(pairs, {"reference": reference}), pairs)
    expected = -logsigmoid(torch.tensor([0.0, 1.0, 2.0]))
    torch.testing.assert_close(losses.squeeze(0), expected, rtol=0, atol=1e-6)


# -- plain PyTorch


def sums(blueprint: Blueprint, model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum of the log-probabilities, number of targets) of rows, from whole logits."""
    labels = batch["labels"]
    probabilities = log_softmax(blueprint.logits(model, batch["input_ids"]), -1)
    picked = probabilities.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (picked * (labels >= 0)).sum(1), (labels >= 0).sum(1)


def dpo(p: Tensor, r: Tensor, n: Tensor) -> Tensor:
    return -logsigmoid(0.1 * ((p[0] - r[0]) - (p[1] - r[1])))


def smoothed_dpo(p: Tensor, r: Tensor, n: Tensor) -> Tensor:
    margin = 0.3 * ((p[0] - r[0]) - (p[1] - r[1]))
    return -0.8 * logsigmoid(margin) - 0.2 * logsigmoid(-margin) - 0.5 * p[0] / n[0]


def ipo(p: Tensor, r: Tensor, n: Tensor) -> Tensor:
    return ((p[0] - r[0]) / n[0] - (p[1] - r[1]) / n[1] - 1 / (2 * 0.1)) ** 2


def orpo(p: Tensor, r: Tensor, n: Tensor) -> Tensor:
    chosen, rejected = (p[0] / n[0]).exp(), (p[1] / n[1]).exp()
    odds = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    return -chosen.log() - 0.1 * logsigmoid(odds.log())


def simpo(p: Tensor, r: Tensor, n: Tensor) -> Tensor:
    return -logsigmoid(2.0 * (p[0] / n[0] - p[1] / n[1]) - 1.0)


def cpo(p: Tensor, r: Tensor, n: Tensor) -> Tensor:
    return -logsigmoid(0.1 * (p[0] - p[1])) - p[0] / n[0]


PLAIN: list[tuple[Any, Callable[[Tensor, Tensor, Tensor], Tensor]]] = [
    ("dpo", dpo),
    ({"name": "dpo", "beta": 0.3, "label_smoothing": 0.2, "nll_weight": 0.5}, smoothed_dpo),
    ("ipo", ipo),
    ("orpo", orpo),
    ("simpo", simpo),
    ("cpo", cpo),
]


def moved(model: torch.nn.Module) -> None:
    """Another policy than the reference, so that no term is zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize(("objective", "plain"), PLAIN, ids=lambda value: getattr(value, "__name__", ""))
def test_loss_and_gradients_are_those_of_plain_pytorch(
    objective: Any, plain: Callable[[Tensor, Tensor, Tensor], Tensor], rows: str
) -> None:
    blueprint = blueprint_of(recipe(objective))
    ours, theirs, reference = (reference_model(blueprint, 0, torch.float64) for _ in range(3))
    moved(ours)
    moved(theirs)
    batch = padded_pairs(DOCUMENTS, LENGTH)
    flat = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
    p, n = sums(blueprint, theirs, flat)
    with torch.no_grad():
        r, _ = sums(blueprint, reference, flat)
    expected = plain(*(x.view(-1, 2).t() for x in (p, r, n))).mean()
    expected.backward()

    given = batch if rows == "padded" else packed([DOCUMENTS[:4], DOCUMENTS[4:6], DOCUMENTS[6:]], 2 * LENGTH)
    loss = ReferenceLoss(blueprint, 0, torch.float64)
    (prepared,) = loss.prepared(ours, [given])
    total, count = loss(ours, prepared)
    (total / count).backward()
    assert count == 4
    torch.testing.assert_close(total / count, expected, rtol=1e-12, atol=0)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-14)


def plain_balance(model: torch.nn.Module, labels: Tensor, logits: list[Tensor]) -> Tensor:
    """Fedus et al. 2021, equations 4 to 6, of every router, over the tokens up to the last target of a row."""
    targets = torch.arange(labels.shape[1]).expand_as(labels).where(labels >= 0, -1)
    filled = torch.arange(labels.shape[1]) <= targets.amax(1, keepdim=True)
    total = torch.zeros((), dtype=torch.float64)
    for of_router in logits:
        rows = of_router.unflatten(0, labels.shape)[filled]
        chosen = rows.topk(2, -1).indices
        load = torch.stack([(chosen == expert).any(-1).double().mean() for expert in range(4)])
        total = total + 4 * (load * rows.softmax(-1).mean(0)).sum()
    return total


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_the_balance_loss_of_a_mixture_is_that_of_the_policys_pass(rows: str) -> None:
    """TRL adds router_aux_loss_coef times the auxiliary loss to that of the preferences; the reference adds none."""
    mixture = {
        "layers": 2, "width": 32, "heads": 4, "vocab": 256, "experts": 4, "experts_per_token": 2,
        "balance_loss": 0.3,
    }  # fmt: skip
    blueprint = blueprint_of(recipe("dpo", model=mixture))
    ours, theirs, reference = (reference_model(blueprint, 0, torch.float64) for _ in range(3))
    moved(ours)
    moved(theirs)
    logits: list[Tensor] = []
    for layer in blueprint.blocks(theirs):
        router: Any = layer.get_submodule("mlp.gate")
        router.register_forward_hook(lambda r, given, _: logits.append(given[0] @ r.weight.t()))
    flat = {name: tensor.flatten(0, 1) for name, tensor in padded_pairs(DOCUMENTS, LENGTH).items()}
    p, n = sums(blueprint, theirs, flat)
    balance = plain_balance(theirs, flat["labels"], logits)
    with torch.no_grad():
        r, _ = sums(blueprint, reference, flat)
    expected = dpo(*(x.view(-1, 2).t() for x in (p, r, n))).mean() + 0.3 * balance
    expected.backward()
    loss = ReferenceLoss(blueprint, 0, torch.float64)
    given = padded_pairs(DOCUMENTS, LENGTH) if rows == "padded" else packed([DOCUMENTS], 4 * LENGTH)
    (prepared,) = loss.prepared(ours, [given])
    total, count = loss(ours, prepared)
    (total / count).backward()
    torch.testing.assert_close(total / count, expected, rtol=1e-12, atol=0)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-14)


def test_a_mixture_of_transformers_has_transformers_auxiliary_loss(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = config_of("mixtral", vocab_size=256, output_router_logits=True, router_aux_loss_coef=0.5)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path / "m")
    blueprint = blueprint_of(recipe("orpo", model={"hf": str(tmp_path / "m")}))
    ours = reference_model(blueprint, 0, torch.float32)
    batch = padded_pairs(DOCUMENTS, LENGTH)
    flat = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
    filled = (flat["labels"] >= 0).flip(1).cumsum(1).flip(1) > 0
    auxiliary = theirs(flat["input_ids"], attention_mask=filled.long()).aux_loss
    p, n = sums(blueprint, ours, flat)
    expected = orpo(p.view(-1, 2).t(), p, n.view(-1, 2).t()).mean() + 0.5 * auxiliary
    total, count = ReferenceLoss(blueprint, 0, torch.float32)(ours, flat | {"present": batch["present"]})
    assert auxiliary > 1
    torch.testing.assert_close(total / count, expected, rtol=1e-5, atol=0)


def test_kto_is_that_of_plain_pytorch() -> None:
    blueprint = blueprint_of(recipe({"name": "kto", "desirable_weight": 1.5}))
    ours, theirs, reference = (reference_model(blueprint, 0, torch.float64) for _ in range(3))
    moved(ours)
    moved(theirs)
    batch = padded_answers(DOCUMENTS, LENGTH)
    mismatched = {"input_ids": batch["kl_input_ids"], "labels": batch["kl_labels"]}
    p, _ = sums(blueprint, theirs, batch)
    with torch.no_grad():
        r, _ = sums(blueprint, reference, batch)
        kl = (sums(blueprint, theirs, mismatched)[0] - sums(blueprint, reference, mismatched)[0]).mean()
    kl = kl.clamp(min=0)
    good = batch["desirable"].squeeze(1).bool()
    value = torch.where(good, torch.sigmoid(0.1 * (p - r - kl)), torch.sigmoid(0.1 * (kl - (p - r))))
    expected = (torch.where(good, 1.5, 1.0) * (1 - value)).mean()
    expected.backward()

    loss = ReferenceLoss(blueprint, 0, torch.float64)
    halves = [{name: tensor[part] for name, tensor in batch.items()} for part in (slice(3), slice(3, None))]
    total = sum((loss(ours, part)[0] for part in loss.prepared(ours, halves)), torch.zeros(()))
    (total / len(p)).backward()
    torch.testing.assert_close(total / len(p), expected, rtol=1e-12, atol=0)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-14)


def test_a_reward_model_is_scored_at_the_last_token() -> None:
    blueprint = blueprint_of(recipe({"name": "reward", "center_weight": 0.01}))
    model = reference_model(blueprint, 0, torch.float64)
    batch = padded_pairs(DOCUMENTS, LENGTH)
    last = batch["labels"] >= 0
    last &= last.flip(-1).cumsum(-1).flip(-1) == 1  # the last target of each row
    batch["labels"] = batch["labels"].where(last, -100)
    batch["counted"] = (last & (torch.tensor([1, 0]).view(1, 2, 1) > 0)).long()
    batch["margin"] = torch.tensor([[0.1], [0.0], [0.3], [0.2]])
    ids = batch["input_ids"].flatten(0, 1)
    scores = blueprint.logits(model, ids).squeeze(-1)[last.flatten(0, 1)].view(-1, 2)
    chosen, rejected = scores.unbind(1)
    expected = (
        -logsigmoid(chosen - rejected - batch["margin"].squeeze(1)) + 0.01 * (chosen + rejected) ** 2
    ).mean()
    loss = ReferenceLoss(blueprint, 0, torch.float64)
    (prepared,) = loss.prepared(model, [batch])
    total, count = loss(model, prepared)
    torch.testing.assert_close(total / count, expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("name", [name for name, module in OBJECTIVES.items() if "preferences" in module])
def test_a_padding_sample_changes_nothing(name: str) -> None:
    """Loss, gradients and measures are finite and the same with a sample of no documents."""
    made = recipe(name)
    blueprint = blueprint_of(made)
    batch = padded_answers(DOCUMENTS, LENGTH) if name == "kto" else padded_pairs(DOCUMENTS, LENGTH)
    nothing = {key: torch.zeros_like(tensor[:1]) for key, tensor in batch.items()}
    nothing |= {key: torch.full_like(nothing[key], -100) for key in nothing if "labels" in key}
    longer = {key: torch.cat([batch[key], nothing[key]]) for key in batch}
    results = []
    for given in (batch, longer):
        model = reference_model(blueprint, 0, torch.float64)
        loss = ReferenceLoss(blueprint, 0, torch.float64)
        (prepared,) = loss.prepared(model, [given])
        measures = Measures(blueprint.minimises.measures, torch.device("cpu"))
        with collecting(measures):
            total, count = loss(model, prepared)
        total.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        results.append((total.item(), int(count), norm.item(), measures.sums))
    (loss_a, count_a, norm_a, sums_a), (loss_b, count_b, norm_b, sums_b) = results
    assert count_a == count_b
    assert math.isfinite(norm_b)
    assert loss_b == pytest.approx(loss_a, rel=1e-12)
    assert norm_b == pytest.approx(norm_a, rel=1e-12)
    torch.testing.assert_close(sums_b, sums_a)


@pytest.mark.parametrize(
    "objective",
    [
        *({"name": name, "beta": 0} for name in ("dpo", "ipo", "simpo", "kto")),
        {"name": "cpo", "beta": 0, "nll_weight": 0},
        {"name": "kto", "desirable_weight": 0, "undesirable_weight": 0},
    ],
    ids=str,
)
def test_a_loss_that_does_not_depend_on_the_model_is_refused(objective: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="would not depend on the model") as refused:
        recipe(objective)
    assert refused.value.exit_code == 2 and "\n" not in refused.value.line()
    recipe({"name": "cpo", "beta": 0})
    recipe({"name": "orpo", "beta": 0})  # the likelihood alone


def test_every_objective_has_its_module() -> None:
    for name, module in OBJECTIVES.items():
        assert callable(require_plugin(module, name).objective)


def test_passes_of_one_process_leave_the_mode_of_the_model() -> None:
    blueprint = blueprint_of(recipe("dpo"))
    model = reference_model(blueprint, 0, torch.float32)
    PlainPasses(blueprint, model, {}).forward_only([], lambda m, b: torch.zeros(()))
    assert model.training
