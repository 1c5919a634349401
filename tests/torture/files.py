"""Malformed files of every kind that is read: each is accepted or refused by a code of the contract, in a second."""

from __future__ import annotations

import gzip
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from shardwise.checkpoint import manifest as manifests
from shardwise.checkpoint.run_folder import read_job, read_outcome, write_job, write_outcome
from shardwise.checkpoint.saved_weights import load_weights
from shardwise.core.run_files import Outcome, RankMemory, StepRecord
from shardwise.data.opening import open_splits
from shardwise.data.tokenizer import open_tokenizer
from shardwise.model.files.peft import write_adapter
from shardwise.model.hf import HuggingFaceModel
from shardwise.plugins.serve.adapters import open_adapter
from shardwise.plugins.serve.requests import read_requests
from shardwise.plugins.serve.sampling import Sampling
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import DataSpec
from shardwise.report.record import read_run
from shardwise.trainer.metrics import MetricsFile
from tests.harness.plans import small_plan
from tests.torture.bitflips import checkpoints
from tests.torture.cases import Case, damaged_bytes, damaged_json, main

ALLOWED = (0, 2, 3, 4)
Action = Callable[[], object]
Damage = Callable[[random.Random], Action]
"""Damages a file, and returns what reads it."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 53, "hidden_size": 36,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
    "head_dim": 12, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu", "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}  # fmt: skip
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}


def _filled(folder: Path) -> object:
    """A model read from a folder of Hugging Face's format."""
    blueprint = HuggingFaceModel(str(folder), 16)
    with torch.device("meta"):
        model = blueprint.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        blueprint.fill(model, 0)
    return model


def hugging_face(folder: Path) -> Iterator[Damage]:
    """config.json, the index, and the header and bytes of the weights."""
    config, index = folder / "config.json", folder / "model.safetensors.index.json"
    weights = folder / "model.safetensors"
    config.write_text(json.dumps(LLAMA))
    with torch.device("meta"):
        tensors = HuggingFaceModel(str(folder), 16).build().state_dict()
    save_file({name: torch.ones(tensor.shape) for name, tensor in tensors.items()}, weights, {"format": "pt"})
    whole = weights.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])

    def restored() -> None:
        config.write_text(json.dumps(LLAMA))
        weights.write_bytes(whole)
        index.unlink(missing_ok=True)

    def of_config(random: random.Random) -> Action:
        restored()
        config.write_bytes(damaged_json(LLAMA, random))
        return lambda: HuggingFaceModel(str(folder), 16).parameter_count()

    def of_header(random: random.Random) -> Action:
        restored()
        changed = damaged_json(header, random)
        size = len(changed) if random.random() < 0.8 else random.choice([0, 2**63, 2**64 - 1, length])
        weights.write_bytes(size.to_bytes(8, "little") + changed + whole[8 + length :])
        return lambda: _filled(folder)

    def of_index(random: random.Random) -> Action:
        restored()
        if random.random() < 0.3:
            weights.write_bytes(damaged_bytes(whole, random))
        files = dict.fromkeys(tensors, weights.name)
        index.write_bytes(damaged_json({"metadata": {"total_size": 1}, "weight_map": files}, random))
        return lambda: _filled(folder)

    yield from (of_config, of_header, of_index)


def adapter(folder: Path) -> Iterator[Damage]:
    tensors = {f"model.layers.0.self_attn.q_proj.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    write_adapter(folder, tensors, ADAPTER, "0" * 32)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole = weights.read_bytes()

    def read() -> None:
        served = open_adapter("one", folder)
        for path in served.shapes:
            served.read(path)

    def of_config(random: random.Random) -> Action:
        weights.write_bytes(whole)
        config.write_bytes(damaged_json(ADAPTER, random))
        return read

    def of_weights(random: random.Random) -> Action:
        config.write_text(json.dumps(ADAPTER))
        weights.write_bytes(damaged_bytes(whole, random))
        return read

    yield from (of_config, of_weights)


def run_files(folder: Path) -> Iterator[Damage]:
    """plan.json, report.json and metrics.jsonl, as jobs, reports and resumed runs read them."""
    plan = small_plan()
    write_job(folder, recipe_of({"model": {"preset": "tiny"}, "steps": 4, "batch_size": 4}), plan)
    write_outcome(folder, Outcome((RankMemory(0, 1, 1),), 0.1, 0.1, plan.ledger, parameters=1000))
    metrics = folder / "metrics.jsonl"
    file = MetricsFile(metrics, 0)
    for step in range(1, 5):
        file.write(StepRecord(step, 2.0, 1.0, 1e-3, 8, 0.1, 80.0))
    file.close()
    whole = {path: path.read_bytes() for path in (folder / "plan.json", folder / "report.json", metrics)}

    def replaced(name: str, content: bytes) -> None:
        for path, raw in whole.items():
            path.write_bytes(content if path.name == name else raw)

    def of_plan(random: random.Random) -> Action:
        replaced("plan.json", damaged_json(json.loads(whole[folder / "plan.json"]), random))
        return random.choice([lambda: read_job(folder), lambda: read_run(folder)])

    def of_report(random: random.Random) -> Action:
        replaced("report.json", damaged_json(json.loads(whole[folder / "report.json"]), random))
        return random.choice([lambda: read_outcome(folder), lambda: read_run(folder)])

    def of_metrics(random: random.Random) -> Action:
        lines = whole[metrics].splitlines(keepends=True)
        place = random.randrange(len(lines))
        lines[place] = damaged_json(json.loads(lines[place]), random) + random.choice([b"\n", b"", b"\r\n"])
        changed = b"".join(lines) if random.random() < 0.7 else damaged_bytes(whole[metrics], random)
        replaced("metrics.jsonl", changed)
        step = random.randint(0, 5)
        return random.choice([lambda: MetricsFile(metrics, step).close(), lambda: read_run(folder)])

    yield from (of_plan, of_report, of_metrics)


def manifest(checkpoint: Path) -> Damage:
    """A manifest that was changed and sealed again, or damaged."""
    path = checkpoint / manifests.MANIFEST
    body = json.loads(path.read_bytes())
    del body["xxh3_128"]

    def of_manifest(random: random.Random) -> Action:
        part = random.choice(list(body))
        try:
            changed = json.loads(damaged_json({part: body[part]}, random))
            path.write_bytes(manifests._with_digest(body | changed))
        except (ValueError, TypeError, RecursionError):
            path.write_bytes(damaged_bytes(manifests._with_digest(body), random))
        return lambda: load_weights(checkpoint)

    return of_manifest


def _sources() -> dict[str, bytes]:
    """Sources of data by the name of their file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [{"text": f"line {number} of some text\n" * 3} for number in range(20)]
    said = [("hi", "ho " * number) for number in range(1, 9)]
    chats = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in said
    ]
    plain, records = ("".join(json.dumps(row) + "\n" for row in rows).encode() for rows in (texts, chats))
    table = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(texts), table)
    return {
        "a.txt": b"".join(row["text"].encode() for row in texts),
        "b.jsonl": plain,
        "c.jsonl": records,
        "d.jsonl.gz": gzip.compress(plain),
        "e.parquet": table.getvalue().to_pybytes(),
    }


def data(folder: Path) -> Iterator[Damage]:
    """Sources of text and records, through the token cache; and the cache itself."""
    sources, root, tokenizer = _sources(), folder / "cache", open_tokenizer("bytes")

    def read(path: Path) -> object:
        return open_splits(DataSpec(source=str(path), sequence_length=16), tokenizer, root, verify=True)

    def of_source(random: random.Random) -> Action:
        name, raw = random.choice(list(sources.items()))
        path = folder / f"{random.randrange(10**9)}-{name}"
        if name.endswith(".jsonl") and random.random() < 0.6:
            lines = raw.splitlines()
            place = random.randrange(len(lines))
            lines[place] = damaged_json(json.loads(lines[place]), random)
            path.write_bytes(b"\n".join(lines) + b"\n")
        else:
            path.write_bytes(damaged_bytes(raw, random))
        return lambda: read(path)

    source = folder / "whole.txt"
    source.write_bytes(sources["a.txt"])
    read(source)
    cache = next(path for path in root.iterdir() if path.is_dir())
    whole = {path: path.read_bytes() for path in cache.iterdir()}

    def of_cache(random: random.Random) -> Action:
        path = random.choice(sorted(whole))
        path.write_bytes(damaged_bytes(whole[path], random))

        def again() -> None:
            read(source)
            assert {each: each.read_bytes() for each in cache.iterdir()} == whole, f"{path.name} was believed"

        return again

    yield from (of_source, of_cache)


def requests(folder: Path) -> Iterator[Damage]:
    good = {"prompt": "one", "adapter": "base", "temperature": 0.5, "top_k": 3, "stop": ["x"], "tokens": 4}

    def of_requests(random: random.Random) -> Action:
        (folder / "requests.jsonl").write_bytes(damaged_json(good, random) + b"\n")
        return lambda: read_requests(folder / "requests.jsonl", Sampling())

    yield of_requests


def cases(count: int, random: random.Random) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as name, checkpoints() as saved:
        damages: list[tuple[str, Damage]] = [("manifest", manifest(saved / "step-2"))]
        for kind in (hugging_face, adapter, run_files, data, requests):
            folder = Path(name) / kind.__name__
            folder.mkdir()
            damages += [(f"{kind.__name__}.{each.__name__}", each) for each in kind(folder)]
        for number in range(count):
            label, damage = damages[number % len(damages)]
            yield f"{label} {number}", damage(random)


if __name__ == "__main__":
    sys.exit(main(cases, 2000, ALLOWED))
