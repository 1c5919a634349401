"""Whether transformers' AutoTokenizer cuts text as the recipe's tokenizer does.

Shardwise reads ``tokenizer.json``. AutoTokenizer may rebuild the pre-tokenizer of the class that
``tokenizer_config.json`` names. So a tokenizer that was trained anew under an old class name gives other ids there,
and an exported model answers differently in transformers. A few probes find that before training.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.core.errors import one_line, shorten
from shardwise.core.paths import path_of
from shardwise.data.tokenizer import Tokenizer

PROBES = (
    "Hello, world!",
    "How much is 3 plus 4?",
    "1234567 89.5%",
    "def f(x):\n\treturn  x  # ok",
    "naïve café, Привет, 你好",
    "  two  spaces and\n\n\nlines ",
    "don't we're I'LL",
)
"""Numbers, blanks, code, contractions and other scripts: where pre-tokenizers differ."""


def tokenizer_differences(tokenizer: Tokenizer, source: str) -> Iterator[str]:
    """A sentence if AutoTokenizer reads ``source`` (a folder, or an id on the Hub) and gives other tokens for a probe.

    Nothing is said of a tokenizer that only Shardwise has, or that AutoTokenizer cannot read.
    """
    path = path_of(source)
    if source == "bytes" or path.is_file():
        return
    try:
        from transformers import AutoTokenizer

        other = AutoTokenizer.from_pretrained(str(path) if path.is_dir() else source, trust_remote_code=False)
    except Exception:  # transformers is not installed, or the folder lacks files that only it needs
        return
    for probe in PROBES:
        here = tokenizer.encode(probe)
        there = list(other.encode(probe, add_special_tokens=False))
        if here != there:
            text = shorten(one_line(repr(probe)), 40)
            yield (
                f"AutoTokenizer reads {source} differently: {text} is {len(here)} tokens here and {len(there)} there"
                f" ({type(other).__name__}); correct tokenizer_class in its tokenizer_config.json, or models trained"
                " here answer differently in transformers"
            )
            return
