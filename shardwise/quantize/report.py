"""The result of a pass: what ``--json`` prints and ``quantization.json`` holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.quantize.gate import Lost
from shardwise.quantize.state import LayerRow


@dataclass(frozen=True)
class Quantized:
    """A finished pass.

    Attributes:
        folder: the folder written; None if the gate refused.
        stored_bytes: bytes of the tensors written; 0 if none were.
    """

    scheme: str
    method: str
    layers: Sequence[LayerRow]
    lost: Lost
    predicted_peak_bytes: int
    measured_peak_bytes: int
    folder: Path | None = None
    stored_bytes: int = 0

    @property
    def bits(self) -> float:
        """Stored bits per weight over all linear layers of the blocks, those that stay in 16 bits included."""
        sizes = [row.shape[0] * row.shape[1] for row in self.layers]
        return sum(row.bits * size for row, size in zip(self.layers, sizes, strict=True)) / max(1, sum(sizes))

    def result(self) -> dict[str, Any]:
        """What ``quantization.json`` holds: the same for the same settings, wherever and whenever they run."""
        return {
            "scheme": self.scheme,
            "method": self.method,
            "bits": self.bits,
            "perplexity": self.lost.perplexity,
            "kl": self.lost.kl,
            "tokens": self.lost.tokens,
            "layers": [_row(row) for row in self.layers],
            "predicted_peak_bytes": self.predicted_peak_bytes,
        }

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            **self.result(),
            "measured_peak_bytes": self.measured_peak_bytes,
            "folder": None if self.folder is None else str(self.folder),
            "stored_bytes": self.stored_bytes,
        }


def _row(row: LayerRow) -> dict[str, Any]:
    said: dict[str, Any] = {"name": row.name, "error": row.error, "method": row.method, "bits": row.bits}
    return {**said, "shape": list(row.shape), **({"why": row.why} if row.why else {})}
