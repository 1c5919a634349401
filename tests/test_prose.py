"""The language of the project: banned private words, and the terms of the field with their pages."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KINDS = (".py", ".md", ".yaml", ".toml", ".html")
# Private words and constructions, each with a plain replacement.
BANNED = {
    r"whoever|somebody|nobody": "name the caller, the user or the process",
    r"manieth": "'index'",
    r"beside|besides": "'next to', 'with' or 'in addition to'",
    r"lies|lay": "'is', 'was' or 'is stored'",
    r"apart from": "'except'",
    r"(of|by|in|for|to|from) (what|whom|so many)": "name the thing",
    r"what (is|was|are|were|lies|may|must|has|had)": "name the thing: a clause with 'what' is not a subject",
}
PATTERN = re.compile(r"\b(" + "|".join(BANNED) + r")\b", re.IGNORECASE)
TERMS = {
    "DDP": "docs/concepts/zero.md",
    "FSDP": "docs/concepts/zero.md",
    "HSDP": "docs/concepts/zero.md",
    "context parallel": "docs/concepts/sequence.md",
    "tensor parallel": "docs/concepts/tensor-parallelism.md",
    "pipeline parallel": "docs/concepts/pipelines.md",
    "mixed precision": "docs/concepts/precision.md",
    "loss scal": "docs/concepts/precision.md",
    "activation checkpointing": "docs/concepts/activation-memory.md",
    "CPU offload": "docs/concepts/offload-state.md",
    "OOM": "docs/how-to/survive-out-of-memory.md",
    "validation": "docs/how-to/train-on-your-data.md",
    "gradient accumulation": "docs/concepts/pipelines.md",
    "LoRA": "docs/concepts/lora.md",
}


def pages() -> list[Path]:
    """Every text file that git tracks, except this test, the licence and the changelog of released work."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    left_out = {"tests/test_prose.py", "CHANGELOG.md"}
    return [ROOT / name for name in listed.splitlines() if name.endswith(KINDS) and name not in left_out]


def test_banned_words_are_absent() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}"
        for path in pages()
        if path.exists()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := PATTERN.search(line))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("term", "page"), TERMS.items())
def test_the_terms_of_the_field_lead_to_their_pages(term: str, page: str) -> None:
    """The page uses the term in its first lines, and an index (README.md or docs/README.md) links the page."""
    head = "\n".join((ROOT / page).read_text(encoding="utf-8").splitlines()[:25])
    assert term.lower() in head.lower()
    indexes = [
        (ROOT / "README.md").read_text(encoding="utf-8"),
        (ROOT / "docs/README.md").read_text(encoding="utf-8"),
    ]
    assert any(page.removeprefix("docs/") in index for index in indexes)
