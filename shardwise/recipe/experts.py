"""The number of experts in a layer of a local Hugging Face folder, from its config.json. No torch."""

from __future__ import annotations

import json
from pathlib import Path

_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Of a config.json of transformers."""


def experts_in_folder(folder: str) -> int | None:
    """0 for a dense model; None for a model of the hub, and where config.json cannot be read."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config") or config
        return next((int(config[key]) for key in _KEYS if config.get(key)), 0)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
