"""Many adapters on one base model: ``python benchmarks/adapters.py``.

A Llama-like model of about 100M parameters in fp32 and 50 adapters of rank 16 on all linear layers are written to a
folder (random weights: nothing here depends on them). Measured are the time and bytes of a switch between adapters in
memory against those of loading the full model, by us and by transformers, its files in the system's cache; and tokens
per second with and without the cache, and of batches with one adapter, with one for each request, and with none. All
that is compared is measured in turns, and medians are given. A few minutes on two cores, about 2 GiB of memory and 0.7
GiB of disk. Writes benchmarks/results/adapters.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import described
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from shardwise import Request, Sampling, ServedModel, load_model
from shardwise.model.adapted import AdaptedModel
from shardwise.model.files.peft import write_adapter
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.lora import is_adapter
from shardwise.recipe.sections import AdapterSpec
from shardwise.runtime.parallel.shard_slices import named_parameters

RESULTS = Path(__file__).parent / "results" / "adapters.json"
ADAPTERS, RANK, BATCH = 50, 16, 8
ROUNDS, TOKENS, PROMPT = 3, 12, 48


def written(folder: Path) -> dict[str, Path]:
    """A base in ``folder/base``; the folders of the adapters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=1024,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    adapted = AdaptedModel(
        HuggingFaceModel(str(folder / "base"), 1024), AdapterSpec(rank=RANK, alpha=2.0 * RANK)
    )
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in named_parameters(adapted.build()) if is_adapter(n)}
    folders = {}
    for index in range(ADAPTERS):
        tensors = {n: (torch.randn(shape) * 0.02).bfloat16() for n, shape in shapes.items()}
        folders[f"a{index}"] = folder / f"a{index}"
        write_adapter(folders[f"a{index}"], tensors, adapted.config(), None)
    return folders


def seconds(action: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def in_turns(actions: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of every action, one of each in every round."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            found[name].append(seconds(action))
    return found


def switching(served: ServedModel, base: Path) -> dict[str, Any]:
    """A switch of a whole batch, one that mixes, and loading the model."""
    chance, names = random.Random(0), served.bank.names
    switched = {"one": 0, "mixed": 0}

    def switch(kind: str) -> None:
        for _ in range(20):
            row = chance.sample(names, BATCH)
            switched[kind] = served.bank.select(row if kind == "mixed" else row[:1] * BATCH)

    def by_transformers() -> None:
        model = AutoModelForCausalLM.from_pretrained(base)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sum()  # it may have been mapped only

    found = in_turns(
        {
            "one": lambda: switch("one"),
            "mixed": lambda: switch("mixed"),
            "load": lambda: load_model(base, tokenizer="bytes"),
            "load by transformers": by_transformers,
        }
    )
    times = {name: median(values) / (20 if name in switched else 1) for name, values in found.items()}
    fastest = min(times["load"], times["load by transformers"])
    return {
        "seconds_of_a_switch": {name: times[name] for name in switched},
        "bytes_of_a_switch": switched,
        "seconds_of_loading": times["load"],
        "seconds_of_loading_by_transformers": times["load by transformers"],
        "times_faster_than_the_faster_load": {name: fastest / times[name] for name in switched},
    }


def speeds(served: ServedModel) -> dict[str, Any]:
    """Tokens per second of a batch, prompts included."""
    names = served.bank.names
    how = Sampling(tokens=TOKENS, temperature=0, past_end=True)
    prompt = "".join(random.Random(1).choices("abcdefgh ", k=PROMPT))

    def answer(adapters: list[str], cached: bool = True) -> Callable[[], object]:
        requests = [Request(prompt, name, how) for name in adapters]
        return lambda: list(served.generate(requests, batch=BATCH, cached=cached))

    found = in_turns(
        {
            "batch without adapters": answer(["base"] * BATCH),
            "batch with one adapter": answer(names[:1] * BATCH),
            "batch with an adapter for each": answer(names[:BATCH]),
            "one request, cached": answer(names[:1]),
            "one request, not cached": answer(names[:1], cached=False),
        }
    )
    requests = {name: 1 if name.startswith("one") else BATCH for name in found}
    return {name: requests[name] * TOKENS / median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", default=None, help="where the model is written; a temporary folder otherwise"
    )
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder) as scratch:
        folder = Path(scratch)
        folders = written(folder)
        gc.collect()
        start = time.perf_counter()
        served = load_model(folder / "base", folders, tokenizer="bytes")
        model = served.nbytes - served.bank.nbytes
        result = {
            "machine": described(),
            "threads": torch.get_num_threads(),
            "parameters": sum(p.numel() for p in served.model.parameters()),
            "adapters": ADAPTERS,
            "rank": RANK,
            "batch": BATCH,
            "bytes": {"base": model, "all adapters": served.bank.nbytes},
            "seconds_of_opening_all": time.perf_counter() - start,
            **switching(served, folder / "base"),
        }
        record(result)
        speed = {"prompt_tokens": PROMPT, "new_tokens": TOKENS, "tokens_per_second": speeds(served)}
        record(result | speed)


def record(result: dict[str, Any]) -> None:
    """Write and print the results so far."""
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1), flush=True)


if __name__ == "__main__":
    main()
