"""The result of a pass: what ``--json`` prints and ``quantization.json`` holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.model.unreached import SHOWN, reach_in_words, reached_shares
from shardwise.plugins.quantize.gate import Lost
from shardwise.plugins.quantize.methods import method_of
from shardwise.plugins.quantize.state import UNQUANTIZED, LayerRow


@dataclass(frozen=True)
class Quantized:
    """A finished pass.

    Attributes:
        others: the tensors of the folder that are no matrices of the blocks: embeddings, output layer, vectors.
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
    others: Sequence[LayerRow] = ()
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    stored_bytes: int = 0

    @property
    def bits(self) -> float:
        """Stored bits per weight over all weights of the model, those that are kept included."""
        return _mean_bits([*self.layers, *self.others])

    @property
    def block_bits(self) -> float:
        """Stored bits per weight over all matrices of the blocks, those that are kept included."""
        return _mean_bits(self.layers)

    @property
    def kept(self) -> dict[str, float]:
        """The shares of the model's weights that stay as they are, by name, with ``*`` for numbers."""
        return reached_shares(
            [(row.name, row.numel) for row in self._unquantized],
            sum(row.numel for row in (*self.layers, *self.others)),
        )

    @property
    def _unquantized(self) -> list[LayerRow]:
        return [row for row in (*self.layers, *self.others) if row.method == UNQUANTIZED]

    @property
    def kept_sentence(self) -> str:
        """Which weights stay as they are, with their shares and reasons; "" if there are none."""
        unquantized = self._unquantized
        if not unquantized:
            return ""
        bits = " and ".join(f"{width:g}" for width in sorted({row.bits for row in unquantized}))
        reasons = "; ".join(dict.fromkeys(row.why for row in unquantized))
        return f"{reach_in_words(self.kept, 'the weights')} stay in {bits} bits: {reasons}"

    @property
    def unseen(self) -> list[LayerRow]:
        """The matrices of experts that no calibration token reached."""
        return [row for row in self._expert_rows if not row.tokens]

    @property
    def few(self) -> list[LayerRow]:
        """The matrices of experts that fewer calibration tokens reached than they have input channels."""
        return [row for row in self._expert_rows if 0 < (row.tokens or 0) < row.shape[1]]

    @property
    def _expert_rows(self) -> list[LayerRow]:
        return [row for row in self.layers if row.stack]

    @property
    def expert_sentences(self) -> list[str]:
        """Which experts a method that needs calibration could not calibrate well; [] for other methods."""
        rows = self._expert_rows
        nearest = [row for row in rows if row.tokens and row.method != self.method]
        if not rows or not method_of(self.method).calibrated:
            return []
        outcomes = {
            "got no calibration token and are rounded to nearest": self.unseen,
            "got fewer calibration tokens than input channels, and a shrunk Hessian": self.few,
            f"have no result of {self.method} and are rounded to nearest": nearest,
        }
        return [
            f"{len(matrices)} of {len(rows)} matrices of experts {outcome}: {_experts_in_words(matrices)}"
            for outcome, matrices in outcomes.items()
            if matrices
        ]

    def result(self) -> dict[str, Any]:
        """What ``quantization.json`` holds: the same for the same settings, wherever and whenever they run."""
        return {
            "scheme": self.scheme,
            "method": self.method,
            "bits": self.bits,
            "block_bits": self.block_bits,
            "kept": self.kept,
            "experts": self._experts_json(),
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

    def _experts_json(self) -> dict[str, Any]:
        return {
            "matrices": len(self._expert_rows),
            "unseen": [row.name for row in self.unseen],
            "few": [row.name for row in self.few],
        }


def _experts_in_words(rows: Sequence[LayerRow]) -> str:
    """The experts of some matrices by name, each once although it has up to three matrices."""
    names = list(dict.fromkeys(row.name.rpartition(".")[0] for row in rows))
    shown = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        return f"{shown} and {len(names) - SHOWN} others"
    return shown


def _mean_bits(rows: Sequence[LayerRow]) -> float:
    return sum(row.bits * row.numel for row in rows) / max(1, sum(row.numel for row in rows))


def _row_json(row: LayerRow) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": row.name, "error": row.error, "method": row.method, "bits": row.bits}
    if row.tokens is not None:
        entry["tokens"] = row.tokens
    entry["shape"] = list(row.shape)
    if row.why:
        entry["why"] = row.why
    return entry
