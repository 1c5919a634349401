"""What benchmarks/memory.py puts in the place of Shardwise's loss and recomputation computes the same."""

from __future__ import annotations

import practised
import pytest
import stacks
import torch
import torch.nn.functional as F

from shardwise.core.cost import Collective
from shardwise.dryrun.run import dry_run
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.runtime.parallel.vocabulary import WHOLE_VOCABULARY
from shardwise.runtime.recompute import selective
from shardwise.technique import SETTINGS, strategy_from

ROWS, CLASSES = 24, 40


@pytest.mark.parametrize("name", ["fp32", "fp32 in chunks", "softmax", "sharded"])
def test_a_loss_is_cross_entropy(name: str) -> None:
    logits = torch.randn(2, ROWS // 2, CLASSES, dtype=torch.float64, generator=torch.manual_seed(0)).float()
    labels = torch.randint(CLASSES, (2, ROWS // 2), generator=torch.manual_seed(1))
    own, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = F.cross_entropy(own.flatten(0, 1), labels.flatten(), reduction="sum")
    if name == "sharded":
        found = practised._LogSoftmax.apply(theirs.flatten(0, 1), labels.flatten(), WHOLE_VOCABULARY)
    else:
        found = practised.LOSSES[name](theirs, labels, WHOLE_VOCABULARY)
    (3 * expected).backward()
    (3 * found).backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(theirs.grad, own.grad)


def test_every_second_product_is_kept() -> None:
    results = selective.Results()
    x = torch.ones(4, 8)
    with selective.Keeping(results, practised.keeps_every_second):
        for _ in range(4):
            x = (x @ torch.ones(8, 8)).relu()
    assert [number for _, number in results.calls()] == [0, 2]


def test_what_is_replaced_is_put_back() -> None:
    language_loss = practised.language_loss
    before = language_loss.cross_entropy_sum, selective.selective_contexts
    with practised.practised(stacks.Practice(repeats=True, loss="fp32")):
        assert language_loss.cross_entropy_sum is practised.LOSSES["fp32"]
        assert selective.selective_contexts is not before[1]
    assert (language_loss.cross_entropy_sum, selective.selective_contexts) == before


def test_heads_that_are_rotated_everywhere_are_gathered_before_and_their_gradients_after() -> None:
    """Queries (4 heads) and keys (2 heads) of 8 channels, of 16 tokens, in both blocks."""
    sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 256, "context": 16}
    values = {
        "model": {"family": "qwen3", **sizes},
        "data": {"sequence_length": 16},
        "steps": 2,
        "batch_size": 1,
        "cluster": {"preset": "1x2xH100-80GB"},
    }
    recipe = recipe_of(values, SETTINGS)
    strategy = strategy_from({"tensor_parallel": 2, "tensor_sequence_parallel": "gathered"})

    def gathers() -> dict[tuple[str, int], int]:
        run = dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster), history=False)
        return {(each.phase, each.elements): each.calls for each in run.cost.collectives if of_heads(each)}

    def of_heads(each: Collective) -> bool:
        return (each.kind, each.axis) == ("all_gather", "tensor") and each.elements in (16 * 32, 16 * 16)

    before = gathers()
    with practised.set_apart({stacks.ALL_HEADS: True}):
        after = gathers()
    more = {key: calls - before.get(key, 0) for key, calls in after.items()}
    assert more == {(phase, 16 * wide): 2 for phase in ("forward", "backward") for wide in (32, 16)}
