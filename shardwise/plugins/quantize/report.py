"""The result of a pass: what ``--json`` prints and ``quantization.json`` holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.model.unreached import SHOWN, reach_in_words, reached_shares
from shardwise.plugins.quantize.gate import Lost
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
            [(row.name, row.numel) for row in self._kept_rows],
            sum(row.numel for row in (*self.layers, *self.others)),
        )

    @property
    def _kept_rows(self) -> list[LayerRow]:
        return [row for row in (*self.layers, *self.others) if row.method == UNQUANTIZED]

    @property
    def kept_sentence(self) -> str:
        """Which weights stay as they are, with their shares and reasons; "" if there are none."""
        kept = self._kept_rows
        if not kept:
            return ""
        bits = " and ".join(f"{each:g}" for each in sorted({row.bits for row in kept}))
        reasons = "; ".join(dict.fromkeys(row.why for row in kept))
        return f"{reach_in_words(self.kept, 'the weights')} stay in {bits} bits: {reasons}"

    @property
    def experts_rounded(self) -> list[LayerRow]:
        """The matrices of experts that are rounded to nearest instead of by the method."""
        return [row for row in self.layers if row.stack and row.method != self.method]

    @property
    def experts_sentence(self) -> str:
        """How many matrices of experts too few tokens reached, and the experts' names; "" if there are none."""
        rounded = self.experts_rounded
        if not rounded:
            return ""
        unseen = sum(not row.tokens for row in rounded)
        few = sum(0 < (row.tokens or 0) < row.shape[1] for row in rounded)
        counts = [
            f"{unseen} got no calibration token" if unseen else "",
            f"{few} got fewer than input channels" if few else "",
        ]
        if rest := len(rounded) - unseen - few:
            counts.append(f"{rest} did not converge")
        names = list(dict.fromkeys(row.name.rpartition(".")[0] for row in rounded))
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} others" if len(names) > SHOWN else "")
        whole = sum(bool(row.stack) for row in self.layers)
        return (
            f"{len(rounded)} of {whole} matrices of experts are rounded to nearest instead:"
            f" {', '.join(filter(None, counts))}: {shown}"
        )

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
        rounded = self.experts_rounded
        return {
            "matrices": sum(bool(row.stack) for row in self.layers),
            "unseen": [row.name for row in rounded if not row.tokens],
            "few": [row.name for row in rounded if 0 < (row.tokens or 0) < row.shape[1]],
        }


def _mean_bits(rows: Sequence[LayerRow]) -> float:
    return sum(row.bits * row.numel for row in rows) / max(1, sum(row.numel for row in rows))


def _row_json(row: LayerRow) -> dict[str, Any]:
    said: dict[str, Any] = {"name": row.name, "error": row.error, "method": row.method, "bits": row.bits}
    if row.tokens is not None:
        said["tokens"] = row.tokens
    return {**said, "shape": list(row.shape), **({"why": row.why} if row.why else {})}
