"""From the built wheel to an adapter that PEFT loads, in an empty environment: ``python benchmarks/first_minutes.py``.

As a new user does it: the wheel is built, and installed with its requirements into a new virtual environment, where
``shardwise finetune MODEL DATA`` adapts a small model of transformers to conversations. PEFT then loads the adapter
with the base and answers. The model (two layers, random weights) and the conversations (sums) are made here. The
environment sees nothing of this repository. Needs pip and its index; some minutes. Writes
benchmarks/results/first-minutes.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import described

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "first-minutes.json"
TARGET = 180.0
"""Seconds from the installation to the adapter."""

MODEL = """
import json
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
pairs = [(f"Say {a} plus {b}?", f"{a} plus {b} is {a + b}.") for a in range(20) for b in range(20)]
words = Tokenizer(models.BPE())
words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
marks = ["<|end|>", "<|user|>", "<|assistant|>"]
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=marks, initial_alphabet=alphabet)
words.train_from_iterator([asked + answer for asked, answer in pairs], trainer)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>", pad_token="<|end|>")
tokenizer.chat_template = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
sizes = dict(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, eos_token_id=0, **sizes)
LlamaForCausalLM(config).save_pretrained("model")
tokenizer.save_pretrained("model")
with open("chats.jsonl", "w") as file:
    for asked, answer in pairs:
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        file.write(json.dumps({"messages": turns}) + "\\n")
"""
LOADS = """
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("tuned/adapter")
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("model"), "tuned/adapter")
assert any("lora_B" in name and weight.abs().sum() > 0 for name, weight in model.named_parameters())
turns = [{"role": "user", "content": "Say 3 plus 4?"}]
ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**ids, max_new_tokens=8, do_sample=False)[0]))
"""


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        place, clean = Path(scratch), {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

        def run(what: str, *words: str, folder: Path = place) -> str:
            print(f"{what} ...", flush=True)
            before = time.monotonic()
            done = subprocess.run(words, cwd=folder, env=clean, check=True, text=True, stdout=subprocess.PIPE)
            seconds[what] = time.monotonic() - before
            return done.stdout

        bin_ = place / "env" / "bin"
        pip = [sys.executable, "-m", "pip"]
        run("build the wheel", *pip, "wheel", "-q", "--no-deps", "-w", str(place), str(ROOT))
        run("make the environment", getattr(sys, "_base_executable", sys.executable), "-m", "venv", "env")
        [wheel] = place.glob("*.whl")
        run("install", str(bin_ / "pip"), "install", "-q", f"{wheel}[hf]", "peft")
        run("make the model", str(bin_ / "python"), "-c", MODEL)
        run("plan an installed recipe", str(bin_ / "shardwise"), "plan", "quickstart")
        epochs = ("--epochs", "3", "--method", "lora", "--out", "tuned")
        said = run("finetune", str(bin_ / "shardwise"), "finetune", "model", "chats.jsonl", *epochs)
        answer = run("load with PEFT", str(bin_ / "python"), "-c", LOADS)
        print(said, answer)
    taken = seconds["install"] + seconds["finetune"]
    results = {"machine": described(), "seconds": seconds, "to_the_adapter": taken, "met": taken <= TARGET}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"{taken:.0f} s from installation to adapter")


if __name__ == "__main__":
    main()
