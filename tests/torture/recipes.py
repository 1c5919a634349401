"""Malformed recipes and overrides: each is accepted or refused with exit code 2, within a second."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shardwise.jobs.request import read_request
from shardwise.recipe.load import SECTIONS
from shardwise.technique import SETTINGS
from tests.torture.cases import Case, damaged_bytes, main

ALLOWED = (0, 2)
GOOD = """\
model: {layers: 4, width: 64, heads: 4, kv_heads: 4, ffn: 176, vocab: 256, context: 128}
data:
  source: stdlib
  tokenizer: bytes
  sequence_length: 128
steps: 100
batch_size: 16
seed: 1
optimizer: {name: adamw, learning_rate: 3.0e-4, betas: [0.9, 0.95], clip_norm: 1.0}
schedule: {name: cosine, warmup: 0.03, floor: 0.1}
cluster:
  device: cpu
  nodes: 2
  devices_per_node: 4
strategy:
  zero_stage: 3
  tensor_parallel: 2
  pipeline_parallel: 2
  micro_batch_size: 2
  activation_checkpointing: selective
adapter: {rank: 8, targets: attention}
guard: {window: 16, rewinds: 1}
checkpoint: {every: 50, keep: 2}
evaluation: {every: 10, sequences: 8}
"""
VALUES = (
    "null", "true", "~", "-1", "0", "1", "2", "7", "64", "1000000", "10000000000", "99999999999", "1" + "0" * 25,
    "9" * 4000, "-" + "9" * 400, "0.5", "1e308", "1e-400", ".nan", ".inf", "1e9999", "0x10", "0o17", "1_000", "''",
    "' '", "[]", "{}", "[1, 2, 3]", "[[[]]]", "{a: {b: c}}", "*a", "&a 1", "!!python/object:os.system x", "<<", "|",
    "every:2", "every:0", "every:" + "9" * 500, "budget:0.5", "budget:9", "nvme:/tmp", "nvme:", "ring", "interleaved",
    "pipedream", "zero_bubble", "8xH100-80GB", "999999x999999xH100-80GB", "cpu", "h100", "é" * 200, "\u202e",
    "x" * 4096,
    "package.module:function", "os:system", "../..", "~no_such_user/x",
)  # fmt: skip


def keys() -> list[str]:
    """Every key of a recipe, and some that are none."""
    known = [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]
    known += [f"strategy.{setting.key}" for setting in SETTINGS]
    return [
        *known,
        *SECTIONS,
        "steps",
        "batch_size",
        "seed",
        "lr",
        "model.hidden_size",
        "strategy.tp",
        "a.b.c",
        "..",
        "",
    ]


def _with_a_line_changed(random: random.Random) -> str:
    lines = GOOD.splitlines()
    place = random.randrange(len(lines))
    key, colon, value = lines[place].partition(":")
    how = random.randrange(6)
    if how == 0:
        lines[place] = f"{key}: {random.choice(VALUES)}"
    elif how == 1:
        lines.insert(random.randrange(len(lines)), lines[place])
    elif how == 2:
        del lines[place]
    elif how == 3:
        lines[place] = random.choice(["\t", "   ", "- ", "? "]) + lines[place]
    elif how == 4:
        lines[place] = key[:-1] + colon + value
    else:
        prefix = "  " if key.startswith(" ") else ""
        lines[place:place] = [
            f"{prefix}k{n}: {random.choice(VALUES)}" for n in range(random.choice([1, 50, 3000]))
        ]
    return "\n".join(lines) + "\n"


def cases(count: int, random: random.Random) -> Iterator[Case]:
    named = keys()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        for number in range(count):
            text, overrides = GOOD.encode(), list[str]()
            kind = number % 4
            if kind == 0:
                text = _with_a_line_changed(random).encode()
            elif kind == 1:
                text = damaged_bytes(text, random)
            if kind in (2, 3):
                chosen = random.choices(named, k=random.randint(1, 3))
                overrides = [f"{key}={random.choice(VALUES)}" for key in chosen]
            if kind == 3 and random.random() < 0.3:
                overrides = [
                    damaged_bytes(each.encode(), random).decode("utf-8", "replace") for each in overrides
                ]
            file.write_bytes(text)
            said = " ".join(each[:60] for each in overrides) or f"the file of case {number}"
            yield said, lambda overrides=overrides: read_request(file, overrides)  # type: ignore[misc]


if __name__ == "__main__":
    sys.exit(main(cases, 5000, ALLOWED))
