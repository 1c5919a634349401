"""How fast chats become tokens: ``python benchmarks/chats.py``.

Two figures, without torch: chats of 4 turns a second, through the token cache, and the seconds of one chat of many
turns. The tokenizer is a byte-level BPE with ChatML, trained here on the words of the chats.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path

import tokenizers

from shardwise.data.encoding import Encoder
from shardwise.data.opening import open_splits
from shardwise.data.readers import Record
from shardwise.data.tokenizer import open_tokenizer
from shardwise.recipe.sections import DataSpec

CHATS, WORDS, TURNS = 10_000, 30, (25, 50, 100, 200)
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCABULARY = ("the", "answer", "is", "scale", "of", "what", "model", "layer", "gradient", "step")


def text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(VOCABULARY) for _ in range(words))


def chat(draw: random.Random, turns: int, words: int) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[turn % 2], "content": text(draw, words)} for turn in range(turns)]}


def write_tokenizer(folder: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(VOCABULARY)] * 20, trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def main() -> None:
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        tokenizer = open_tokenizer(str(folder))
        lines = [json.dumps(chat(draw, 4, WORDS)) for _ in range(CHATS)]
        (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
        spec = DataSpec(
            source=str(folder / "chats.jsonl"), tokenizer=name, sequence_length=1024, held_out=0.0
        )
        rates = []
        for repeat in range(3):
            begin = time.perf_counter()
            splits = open_splits(spec, tokenizer, folder / f"cache-{repeat}")
            rates.append(CHATS / (time.perf_counter() - begin))
        print(
            f"{CHATS:,} chats of 4 turns, {splits.train.cache.header.tokens:,} tokens: {sorted(rates)[1]:,.0f} chats/s"
        )
        encoder = Encoder(spec, "messages", tokenizer)
        for answers in TURNS:
            record = Record(chat(draw, 2 * answers, 60), "here")
            begin = time.perf_counter()
            tokens, _ = encoder.encode(record)
            print(
                f"one chat of {answers} answers, {len(tokens):,} tokens: {time.perf_counter() - begin:.3f} s"
            )


if __name__ == "__main__":
    main()
