"""Seconds of ``shardwise plan`` with a cold cache: ``python benchmarks/plan_seconds.py [--only TEXT] [--tree FOLDER]``.

Processor seconds are those of the whole process tree, imports included; next to them the wall time, and the time until
the answer's first line is printed. ``--tree`` measures another checkout of this repository with the same environment.
This machine is measured before (``doctor --calibrate`` does it once), so no plan does. Writes
benchmarks/results/plan-seconds.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "plan-seconds.json"
RECIPES = HERE.parent / "recipes"

_DENSE = {"rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-32b": {
        **_DENSE,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 25600,
        "vocab_size": 151936,
    },
    "mixtral-8x7b": {
        **_DENSE,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
        "output_router_logits": True,
    },
    "qwen3-30b-a3b": {
        **_DENSE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": True,
    },
    "gemma-3-1b": {
        **_DENSE,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 6912,
        "vocab_size": 262144,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}


def recipe(model: Mapping[str, Any], cluster: str, length: int, batch: int, **more: Any) -> dict[str, Any]:
    strategy = {"precision": "bf16", **more.pop("strategy", {})}
    values = {"model": model, "data": {"sequence_length": length}, "steps": 1000, "batch_size": batch}
    return {**values, "cluster": {"preset": cluster}, "strategy": strategy, **more}


def cases(folder: Path) -> Mapping[str, Path | dict[str, Any]]:
    """Recipes by name; ``folder`` has the models."""

    def config(name: str) -> dict[str, str]:
        return {"hf": str(folder / name)}

    lora = {"adapter": {"name": "lora", "rank": 16, "alpha": 32, "targets": "all"}}
    return {
        "tiny": RECIPES / "laptop-tiny.yaml",
        "Llama-3-8B on 8 H100": RECIPES / "llama-3-8b-8xh100.yaml",
        "Llama-3-70B on 64 H100": recipe({"preset": "llama-3-70b"}, "64xH100-80GB", 8192, 128),
        "Llama-3-70B on 8 H100, LoRA": recipe({"preset": "llama-3-70b"}, "8xH100-80GB", 4096, 64, **lora),
        "Llama-3-405B on 16,384 H100": recipe({"preset": "llama-3-405b"}, "16384xH100-80GB", 8192, 2048),
        "Qwen3-32B on 8 H100": recipe(config("qwen3-32b"), "8xH100-80GB", 4096, 64),
        "Qwen3-32B on 8 H100, TP 8": recipe(
            config("qwen3-32b"), "8xH100-80GB", 4096, 64, strategy={"tensor_parallel": 8}
        ),
        "Gemma-3-1B on an RTX 4090": recipe(config("gemma-3-1b"), "1xRTX4090-24GB", 2048, 32),
        "Mixtral-8x7B on 8 H100": recipe(config("mixtral-8x7b"), "8xH100-80GB", 4096, 64),
        "Qwen3-30B-A3B on 8 H100": recipe(config("qwen3-30b-a3b"), "8xH100-80GB", 4096, 64),
    }


def measured(path: Path, tree: Path, scratch: Path) -> dict[str, Any]:
    """One plan in processes of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "SHARDWISE_CACHE": str(scratch / "cache"),
        "SHARDWISE_MEASURE": "0",
    }
    subprocess.run(["rm", "-rf", str(scratch / "cache")], check=True)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-u", "-m", "shardwise", "plan", str(path)]
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    answered = time.perf_counter() - began
    rest, errors = process.communicate()
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = (first + rest).splitlines()
    return {
        "cpu_seconds": round(used, 1),
        "wall_seconds": round(wall, 1),
        "first_line_seconds": round(answered, 1),
        "answer": lines[:2] if process.returncode == 0 else errors.strip().splitlines()[-1:],
    }


def import_seconds() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return round(time.perf_counter() - began, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--tree", type=Path, default=HERE.parent)
    asked = parser.parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for name, config in CONFIGS.items():
            (scratch / name).mkdir()
            (scratch / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for name, case in cases(scratch).items():
            if asked.only.lower() in name.lower():
                path = case if isinstance(case, Path) else scratch / "recipe.yaml"
                if not isinstance(case, Path):
                    path.write_text(yaml.safe_dump(case), encoding="utf-8")
                rows[name] = {**measured(path, asked.tree, scratch), "import_torch_seconds": import_seconds()}
                print(name, rows[name], flush=True)
    if not asked.only and asked.tree == HERE.parent:
        RESULTS.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
