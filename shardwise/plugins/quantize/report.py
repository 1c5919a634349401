"""The result of a pass: what ``--json`` prints and ``quantization.json`` holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.model.unreached import reach_in_words, reached_shares
from shardwise.plugins.quantize.gate import Lost
from shardwise.plugins.quantize.state import UNQUANTIZED, LayerRow


@dataclass(frozen=True)
class Quantized:
    """A finished pass.

    Attributes:
        notes: sentences about weights that are not reached, and about readers of the folder.
        folder: the folder written; None if the gate refused.
        stored_bytes: bytes of the tensors written; 0 if none were.
    """

    scheme: str
    method: str
    layers: Sequence[LayerRow]
    lost: Lost
    predicted_peak_bytes: int
    measured_peak_bytes: int
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    stored_bytes: int = 0

    @property
    def bits(self) -> float:
        """Stored bits per weight over all matrices of the blocks, those that are kept included."""
        return sum(row.bits * row.numel for row in self.layers) / max(
            1, sum(row.numel for row in self.layers)
        )

    @property
    def kept(self) -> dict[str, float]:
        """The share of the blocks' weights that stay as they are, by name, with ``*`` for numbers."""
        kept = [(row.name, row.numel) for row in self.layers if row.method == UNQUANTIZED]
        return reached_shares(kept, sum(row.numel for row in self.layers))

    @property
    def kept_sentence(self) -> str:
        """Which matrices of the blocks stay as they are, with their shares; "" if there are none."""
        bits = sorted({row.bits for row in self.layers if row.method == UNQUANTIZED})
        named = reach_in_words(self.kept, "the blocks' weights") if bits else ""
        return f"{named} stay in {' and '.join(f'{each:g}' for each in bits)} bits" if bits else ""

    def result(self) -> dict[str, Any]:
        """What ``quantization.json`` holds: the same for the same settings, wherever and whenever they run."""
        return {
            "scheme": self.scheme,
            "method": self.method,
            "bits": self.bits,
            "kept": self.kept,
            "notes": list(self.notes),
            "perplexity": self.lost.perplexity,
            "kl": self.lost.kl,
            "tokens": self.lost.tokens,
            "layers": [_row_json(row) for row in self.layers],
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


def _row_json(row: LayerRow) -> dict[str, Any]:
    said: dict[str, Any] = {"name": row.name, "error": row.error, "method": row.method, "bits": row.bits}
    return {**said, "shape": list(row.shape), **({"why": row.why} if row.why else {})}
