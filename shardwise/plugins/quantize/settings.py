"""What a quantization does, by names. Checked without torch, so a wrong name costs a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from shardwise.core.atomic_file import require_new
from shardwise.core.errors import RecipeError
from shardwise.core.paths import missing, only_a_path, path_of
from shardwise.core.scheme import check_method, scheme_of

Watching = Callable[[int, int], AbstractContextManager[Callable[[int], None]]]
"""Makes the progress of a pass, from (blocks, blocks that are done): a function to call after each block."""

ROTATIONS = ("hadamard",)
"""Rotations that are folded into the weights before a method rounds them."""


@dataclass(frozen=True)
class Settings:
    """What to quantize and how.

    Attributes:
        model: folder of a run or of a model, or a hub id. out: the folder to write.
        scheme, method: names, as core/scheme.py has them.
        calibrate, evaluate: text as ``data.source`` names it; None is the run's data, or ``stdlib``.
        sequences: calibration sequences. length: their tokens; None is the recipe's, or the context up to 2048.
        max_kl: the largest mean KL divergence from the base in nats per token; None for any.
        rotate: ``hadamard``, or None for no rotation.
    """

    model: str
    out: Path
    scheme: str
    method: str
    calibrate: str | None = None
    evaluate: str | None = None
    tokenizer: str | None = None
    sequences: int = 128
    length: int | None = None
    max_kl: float | None = None
    rotate: str | None = None

    def check(self) -> None:
        """Refuse what can be refused without torch. Raises RecipeError."""
        check_method(self.method, scheme_of(self.scheme))
        if self.rotate not in (None, *ROTATIONS):
            raise RecipeError(
                f"no rotation is called {self.rotate}", where="--rotate", fix=f"give {' or '.join(ROTATIONS)}"
            )
        folder = path_of(self.model)
        known = any((folder / name).is_file() for name in ("recipe.yaml", "config.json"))
        if not known and (folder.exists() or only_a_path(self.model)):
            raise RecipeError(
                "not the folder of a run or of a model",
                where=self.model,
                why="it has neither recipe.yaml nor config.json" if folder.exists() else missing(self.model),
            )
        require_new(self.out)
