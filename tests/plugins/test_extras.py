"""Optional dependencies of plugins; those of trackers are in tests/core/test_extras.py."""

from __future__ import annotations

from tests.core.test_extras import calls


def test_plugins_name_their_extras() -> None:
    """That an extra exists, tests/core/test_extras.py checks for all of them."""
    assert {"gguf", "eval"} <= calls().keys()
