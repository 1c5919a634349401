"""The weights of a checkpoint for one process, unsharded: to sample from, to export, to merge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint import manifest as manifests
from shardwise.checkpoint.manifest import Damaged, Manifest
from shardwise.checkpoint.shards import DTYPES_BY_NAME, ShardFiles
from shardwise.core.errors import CheckpointError
from shardwise.core.strategy import Strategy
from shardwise.engine.run_state import OPTIMIZER
from shardwise.technique import SETTINGS, strategy_from


class SavedWeights:
    """The unsharded weights and buffers of one checkpoint, for one process. A shared tensor has its first name.

    Verifies their files first, and does not read the optimizer's files. Files are mapped for one tensor at a time,
    because mapped pages count as memory until the file is unmapped. Raises CheckpointError.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        try:
            manifest = manifests.read_manifest(checkpoint)
            self.strategy = _strategy_of(manifest, checkpoint)
            self._tensors = {n: t for n, t in manifest.tensors.items() if not n.startswith(OPTIMIZER)}
            for file in sorted({piece.file for entry in self._tensors.values() for piece in entry.pieces}):
                manifests.verify_file(checkpoint, file, manifest.files[file])
        except Damaged as damage:
            raise CheckpointError(
                "the checkpoint is damaged", where=str(damage.path), why=damage.reason
            ) from None

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtype by tensor name, in the checkpoint's order."""
        return {name: DTYPES_BY_NAME[entry.dtype] for name, entry in self._tensors.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by tensor name."""
        return {name: entry.shape for name, entry in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """One unsharded tensor, on the CPU."""
        entry = self._tensors[name]
        files = ShardFiles(self.checkpoint)
        whole = torch.empty(entry.shape, dtype=DTYPES_BY_NAME[entry.dtype])
        for piece in entry.pieces:
            ends = zip(piece.offsets, piece.sizes, strict=True)
            target = tuple(slice(start, start + size) for start, size in ends)
            everything = tuple(slice(0, size) for size in piece.sizes)
            whole[target] = files.block(name, piece, everything)
        return whole


def _strategy_of(manifest: Manifest, checkpoint: Path) -> Strategy:
    """The strategy of a checkpoint. Raises Damaged for a value that no setting has."""
    for setting in SETTINGS:
        try:
            setting.parse(manifest.strategy.get(setting.key, setting.default))
        except ValueError as error:
            raise Damaged(checkpoint / manifests.MANIFEST, f"strategy.{setting.key}: {error}") from None
    return strategy_from(manifest.strategy)


def stream_weights(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """The unsharded weights and buffers of one checkpoint, tensor by tensor (see ``SavedWeights``)."""
    weights = SavedWeights(checkpoint)
    for name in weights.dtypes:
        yield name, weights.read(name)


def load_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of ``stream_weights`` as a dict."""
    return dict(stream_weights(checkpoint))
