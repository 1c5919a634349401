"""``shardwise verify`` compares runs without dropout, because layouts draw other numbers, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS
from shardwise.verifier.dropout import drop_nothing
from shardwise.verifier.verdict import Verdict
from tests.harness.corpora import write_words
from tests.harness.pool import Pool
from tests.harness.ranks import plain_rank, verified_rank

OFF = "dropout is off in all runs"
TINY = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "vocab": 256}


class Dropping(nn.Module):
    """Dropout of modules, or of a function where ``drawn``."""

    def __init__(self, drawn: bool) -> None:
        super().__init__()
        self.table, self.drawn = nn.Embedding(256, 16), drawn
        self.block = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True, bias=False)
        self.out = nn.Linear(16, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.block(self.table(ids))
        return self.out(F.dropout(x, 0.1) if self.drawn else x)


def dropping(drawn: bool = False) -> Any:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits, labels = model(batch["input_ids"]).flatten(0, 1).float(), batch["labels"].flatten()
        return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), (labels != -100).sum()

    return Dropping(drawn), loss


def verdict(
    pool: Pool, folder: Path, model: dict[str, Any], precision: str, world: int = 2, **sections: Any
) -> Verdict:
    values = {
        "model": model,
        "data": {"source": str(write_words(folder / "corpus.txt")), "sequence_length": 12},
        "steps": 2,
        "batch_size": 4,
        **sections,
    }
    settings = {"precision": precision, "zero_stage": 2, "micro_batch_size": 1}
    jobs = [(recipe_of(values, SETTINGS), settings, folder)]
    pool.run(1, plain_rank, jobs, timeout=120)
    [found], *others = pool.run(world, verified_rank, jobs, timeout=120)
    assert all(other == [found] for other in others)
    return found


OWN = f"{__name__}:dropping"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dropout_of_modules_and_adapters_is_off(precision: str, pool: Pool, tmp_path: Path) -> None:
    found = verdict(pool, tmp_path, {"factory": OWN}, precision)
    assert found.passed and OFF in found.notes, found
    found = verdict(pool, tmp_path, TINY, precision, adapter={"rank": 2, "dropout": 0.2})
    assert found.passed and OFF in found.notes, found
    assert found.proof is None or OFF not in found.proof.notes  # once is enough


def test_without_dropout_nothing_is_said(pool: Pool, tmp_path: Path) -> None:
    found = verdict(pool, tmp_path, TINY, "fp32", adapter={"rank": 2})
    assert found.passed and not found.notes


def test_random_numbers_of_own_code_are_named(pool: Pool, tmp_path: Path) -> None:
    found = verdict(pool, tmp_path, {"factory": OWN, "arguments": {"drawn": True}}, "fp32")
    assert not found.passed
    assert any("draws random numbers" in note for note in found.notes)


class Centring(Dropping):
    """Subtracts a running mean of the rows that it has seen."""

    def __init__(self) -> None:
        super().__init__(drawn=False)
        self.register_buffer("mean", torch.empty(16))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.mean.zero_()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.block(self.table(ids))
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.1)
        return self.out(x - self.mean)


def centring() -> Any:
    return Centring(), dropping()[1]


def test_buffers_that_forward_passes_read_and_change_are_named(pool: Pool, tmp_path: Path) -> None:
    """On one rank they are those of the plain process: the checks before its training leave them as they were."""
    model = {"factory": f"{__name__}:centring"}
    found = verdict(pool, tmp_path, model, "fp64")
    assert not found.passed and found.depends_on_layout
    assert any("read buffers that they change" in note for note in found.notes)
    assert verdict(pool, tmp_path, model, "fp64", world=1).passed


def test_dropout_of_a_model_of_transformers_is_off(pool: Pool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=256, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    found = verdict(pool, tmp_path, {"hf": str(tmp_path / "gpt2"), "dropout": True}, "fp32")
    assert found.passed and found.notes == (OFF,)


def test_every_module_of_torch_that_drops() -> None:
    modules: list[nn.Module] = [
        nn.Dropout(0.1),
        nn.Dropout2d(0.1),
        nn.AlphaDropout(0.1),
        nn.LSTM(4, 4, num_layers=2, dropout=0.1),
        nn.MultiheadAttention(4, 2, dropout=0.1),
    ]
    for module in modules:
        assert drop_nothing(module) and not drop_nothing(module)
        module.train()
        shape = (3, 2, 4, 4) if isinstance(module, nn.Dropout2d) else (3, 2, 4)
        x = torch.rand(shape) + 1
        given = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
        outputs = [module(*given) for _ in range(2)]
        first, second = (out[0] if isinstance(out, tuple) else out for out in outputs)
        assert torch.equal(first, second)
