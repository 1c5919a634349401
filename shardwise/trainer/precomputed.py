"""Values of the model before training that samples carry (``strategy.reference: precomputed``).

They are computed once, before the first step, by forward passes in the layout of the run, and cached under a key of
their content: the samples, all weights, what computes with them and the precision. So another run on them finds them.
Finished values are written now and then, so that a run which is killed goes on from there. Rank 0 reads and writes; all
ranks have all values, which take 16 bytes a pair.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from shardwise.core import heartbeat
from shardwise.core.cache_folder import code_digest, default_root, key_of, store
from shardwise.core.progress import Say
from shardwise.core.units import format_seconds
from shardwise.data import Data
from shardwise.data.added_values import AddedValues
from shardwise.data.batches import TRAIN, batch_of, deal
from shardwise.data.dataset import Dataset
from shardwise.engine.run import Run
from shardwise.model.blueprint import Batch
from shardwise.runtime.fingerprint import fingerprint_of
from shardwise.runtime.offload.host import to_device
from shardwise.technique import MICRO_BATCH_SIZE, precision_of

_EXCHANGED = 16
"""Micro-batches of a rank between two exchanges."""
_WRITTEN = 20.0
"""Seconds after which values are written again."""

ByName = dict[str, dict[int, npt.NDArray[np.float64]]]
"""Values [units, ...] by name and number of the sample."""


def with_precomputed(run: Run, data: Data, say: Say) -> None:
    """Give the samples of ``data`` what the objective reads of the model, which has its first weights. Collective."""
    names = list(run.objective.precomputed())
    if not names:
        return
    recipe = run.recipe
    # All that the values follow from, except the samples.
    model = (
        fingerprint_of(run.model, trained=True),
        recipe.model.model_dump_json(),
        "" if recipe.adapter is None else recipe.adapter.model_dump_json(),
        run.blueprint.config_text,
        precision_of(run.strategy),
        code_digest(),
    )
    for name, (dataset, numbers, fingerprint) in data.asked(recipe).items():
        key = key_of(("reference", names, fingerprint, name == TRAIN, *model))
        values = _computed(run, dataset, numbers, default_root() / "reference" / f"{key}.npz", say)
        data.replace(name, AddedValues(dataset, values))


def _computed(run: Run, dataset: Dataset, numbers: Sequence[int], path: Path, say: Say) -> ByName:
    """The values of the samples with these numbers, from the cache where it has them."""
    # What rank 0 reads counts for all: their own caches may differ, and passes need the same samples everywhere.
    box = [_read_values(path, list(run.objective.precomputed())) if dist.get_rank() == 0 else {}]
    dist.broadcast_object_list(box, device=run.device)
    known = box[0]
    computed = next(iter(known.values()))  # every name has the same samples
    missing = [number for number in numbers if number not in computed]
    began = written = time.monotonic()
    for by_rank in _passed(run, dataset, missing):
        for values in by_rank:
            for name, values_of_name in values.items():
                known[name].update(values_of_name)
        if dist.get_rank() == 0 and time.monotonic() > written + _WRITTEN:
            written = time.monotonic()
            _write_values(path, known)
    if missing and dist.get_rank() == 0:
        _write_values(path, known)
    new = f"{len(missing):,} samples computed in {format_seconds(time.monotonic() - began)}"
    say(f"reference: {new if missing else f'{len(numbers):,} samples in the cache'}")
    return known


def _passed(run: Run, dataset: Dataset, numbers: Sequence[int]) -> Iterator[list[ByName]]:
    """The values of all samples, some micro-batches after the other, of every rank."""
    function = partial(run.objective.of_reference, run.blueprint)
    # All ranks have as many micro-batches: the last ones have padding, which is None.
    slots = deal(len(numbers), run.data_rank, run.data_degree, run.strategy[MICRO_BATCH_SIZE])
    for start in range(0, len(slots), _EXCHANGED):
        indices = [
            [None if s is None else numbers[s] for s in row] for row in slots[start : start + _EXCHANGED]
        ]
        batches = [run.local_batch(_on_device(batch_of(dataset, rows), run.device)) for rows in indices]
        values: ByName = {}
        for name, part in run.objective.precomputed().items():
            parts = list(map(part, batches))
            results = run.passes.forward_only(parts, function)
            while run.exceeded():  # the room of experts
                results = run.passes.forward_only(parts, function)
            values[name] = dict(_by_sample(indices, batches, results))
        heartbeat.mark()
        by_rank: list[ByName] = [{}] * dist.get_world_size()
        dist.all_gather_object(by_rank, values)
        yield by_rank


def _by_sample(
    indices: Sequence[Sequence[int | None]],
    batches: Sequence[Batch],
    results: Sequence[torch.Tensor | None],
) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """The values of the units that each sample has."""
    for rows, batch, result in zip(indices, batches, results, strict=True):
        if result is None:  # this rank has not the last stage of a pipeline
            continue
        units = batch["present"].sum(1).tolist()  # of each sample; the row is padded to the largest number
        values = result.double().cpu().numpy()
        for row, number in enumerate(rows):
            if number is not None:
                yield number, values[row, : units[row]]


def _on_device(batch: Batch, device: torch.device) -> Batch:
    return {name: to_device(tensor, device) for name, tensor in batch.items()}


def _read_values(path: Path, names: Sequence[str]) -> ByName:
    """The values in a file; nothing of one that is missing or damaged."""
    empty: ByName = {name: {} for name in names}
    try:
        with np.load(path, allow_pickle=False) as file:
            numbers = file["numbers"].tolist()
            # The rows of all samples are one array of each name; ``units`` says how many each sample has.
            ends = np.cumsum(file["units"])[:-1]
            return {name: dict(zip(numbers, np.split(file[name], ends), strict=True)) for name in names}
    except (OSError, KeyError, ValueError, EOFError, BadZipFile):
        return empty


def _write_values(path: Path, values: ByName) -> None:
    numbers = sorted(next(iter(values.values())))
    rows = {name: [by_number[number] for number in numbers] for name, by_number in values.items()}
    units = [len(row) for row in next(iter(rows.values()))]
    content = io.BytesIO()
    arrays = {name: np.concatenate(rows_of_name) for name, rows_of_name in rows.items()}
    np.savez(content, allow_pickle=False, numbers=np.array(numbers), units=np.array(units), **arrays)
    store(path, content.getvalue())
