"""All ranks read the same data, or none trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.core.errors import DataError
from shardwise.data import open_data
from shardwise.recipe.load import recipe_of
from shardwise.trainer.batches import require_one_data
from tests.harness.pool import Pool


def compare(folders: list[str]) -> None:
    """Each rank reads a folder and has a cache of its own, as on nodes without a shared disk."""
    own = Path(folders[dist.get_rank()])
    recipe = recipe_of(
        {
            "model": {"preset": "tiny"},
            "data": {"source": str(own / "a.jsonl"), "sequence_length": 8},
            "steps": 1,
            "batch_size": 2,
        }
    )
    require_one_data(open_data(recipe, cache=own / "cache"))


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["some words", "some words", "some words"], None),
        (["some words", "some words", "other ones"], r"rank 2 on \S+\): their tokens differ"),
        (["some words", "some", "some words"], r"rank 1 on \S+\): rank 0 has 5 training samples, this one 2"),
    ],
)
def test_ranks_that_read_other_files_are_refused(
    texts: list[str], why: str | None, pool: Pool, tmp_path: Path
) -> None:
    for rank, text in enumerate(texts):
        (tmp_path / str(rank)).mkdir()
        line = json.dumps({"text": text}) + "\n"
        (tmp_path / str(rank) / "a.jsonl").write_text(line * 5)
    folders = [str(tmp_path / str(rank)) for rank in range(3)]
    if why is None:
        pool.run(3, compare, folders)
        return
    with pytest.raises(DataError, match=f"different data .{why}"):
        pool.run(3, compare, folders)
