"""Text that tests train on: the same on every machine."""

from __future__ import annotations

import random
import string
from pathlib import Path

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>")
"""Ids 0 to 5 of the tokenizers below."""

WORDS, EVEN, FEW_LETTERS = "words.txt", "even.txt", "few_letters.txt"
"""Corpora of parity tests: words by Zipf's law, words that are equally frequent, and those of eight letters."""


def write_words(
    path: Path, count: int = 8000, even: bool = False, letters: str = string.ascii_lowercase
) -> Path:
    """Words drawn from 300, by Zipf's law, so rare ones are among them, or evenly. Returns ``path``.

    The more uneven the text, the larger the first gradients of the output layer: beyond fp16 at the first loss scale,
    which leaves that step out and lowers the scale.
    """
    chance = random.Random(0)
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(300)]
    weights = None if even else [1 / rank for rank in range(1, 301)]
    path.write_text(" ".join(chance.choices(words, weights=weights, k=count)), encoding="utf-8")
    return path


def write_tokenizer(folder: Path, end: str, ending: bool = False) -> Path:
    """A tokenizer of single letters, 33 ids. ``end`` is its end-of-text token. Returns ``folder``.

    Args:
        ending: whether the tokenizer appends ``end`` itself, as T5's does.
    """
    from tokenizers import Tokenizer, models, processors

    names = [*SPECIAL, " ", *string.ascii_lowercase]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(SPECIAL))
    if ending:
        template = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, vocab[end])])
        tokenizer.post_processor = template
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(f'{{"eos_token": "{end}"}}', encoding="utf-8")
    return folder
