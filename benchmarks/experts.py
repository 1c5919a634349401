"""Predicted against published memory and seconds of mixtures with expert parallelism: ``python benchmarks/experts.py``.

Every setting of a row is pinned, and no constant was fitted to these rows. Published software holds the same states as
the plan: weights in 16 bits, gradients in fp32, master weights and two moments in fp32, sharded where the row says so.
Unknown of every row is the imbalance of its router; plans take the default ``expert_capacity``. Writes
benchmarks/results/experts.json.

    torchtitan   commits 27aa49077c and 9f7f460280: DeepSeek-V3 16B on 8 H100 of 95 GiB; peak reserved, tokens/s and GPU
    ms-swift     examples/megatron: Qwen3-30B-A3B and 235B-A22B, GiB as annotated by the authors, rounded; their
                 seconds are of devices without a name
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from annotated import packed_pairs
from machine import described

from shardwise.core.units import GiB
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs.planning import make_plan
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from

RESULTS = Path(__file__).parent / "results" / "experts.json"
DEEPSEEK_16B: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN = {"preset": "qwen3-30b-a3b"}
ROWS: tuple[Mapping[str, Any], ...] = (
    {
        "name": "torchtitan DeepSeek-V3 16B, FSDP 8 x EP 8, full recomputation (local batch of 4 assumed)",
        "model": DEEPSEEK_16B,
        "cluster": "8xH100-80GB",
        "length": 4096,
        "batch": 32,
        "strategy": {
            "zero_stage": 3,
            "expert_parallel": 8,
            "micro_batch_size": 4,
            "activation_checkpointing": "full",
        },
        "gib": 52.02,
        "seconds": 4 * 4096 / 7444,
    },
    {
        "name": "torchtitan DeepSeek-V3 16B, FSDP 8 x EP 4, local batch of 16 (full recomputation assumed)",
        "model": DEEPSEEK_16B,
        "cluster": "8xH100-80GB",
        "length": 4096,
        "batch": 128,
        "strategy": {
            "zero_stage": 3,
            "expert_parallel": 4,
            "micro_batch_size": 16,
            "activation_checkpointing": "full",
        },
        "gib": 65.7,
        "seconds": 16 * 4096 / 12540,
    },
    {
        "name": "ms-swift moe/qwen3_moe.sh, Megatron, PP 2 x EP 8, 16 GPUs",
        "model": QWEN,
        "cluster": "16xH100-80GB",
        "length": 8192,
        "batch": 16,
        "strategy": {
            "zero_stage": 1,
            "expert_parallel": 8,
            "pipeline_parallel": 2,
            "activation_checkpointing": "full",
        },
        "gib": 60,
        "seconds": None,
    },
    {
        "name": "ms-swift mcore_bridge/full/moe.sh, Megatron, TP 4 x PP 2 x EP 4, 8 GPUs",
        "model": QWEN,
        "cluster": "8xH100-80GB",
        "length": 8192,
        "batch": 4,
        "strategy": {
            "zero_stage": 1,
            "tensor_parallel": 4,
            "expert_parallel": 4,
            "pipeline_parallel": 2,
            "activation_checkpointing": "full",
        },
        "gib": 76,
        "seconds": None,
    },
    {
        "name": "ms-swift moe/qwen3_moe_offload.sh, Megatron, EP 4 and optimizer offload, 4 GPUs",
        "model": QWEN,
        "cluster": "4xH100-80GB",
        "length": 8192,
        "batch": 16,
        "strategy": {
            "zero_stage": 1,
            "expert_parallel": 4,
            "activation_checkpointing": "full",
            "offload": "optimizer+parameters",  # Megatron moves master weights, too
        },
        "gib": 75,
        "seconds": None,
    },
    {
        "name": "ms-swift mcore_bridge/lora/moe.sh, Megatron, LoRA, EP 2, 2 GPUs",
        "model": QWEN,
        "cluster": "2xH100-80GB",
        "length": 2048,
        "batch": 16,
        "adapter": {"rank": 8, "targets": "all"},
        "strategy": {
            "zero_stage": 1,
            "expert_parallel": 2,
            "micro_batch_size": 8,
            "activation_checkpointing": "full",
        },
        "gib": 50,
        "seconds": None,
    },
    {
        "name": "ms-swift lora/qwen3_235b.sh, Megatron, LoRA, TP 4 x EP 8, 8 GPUs (without sequence parallelism here)",
        "model": {"preset": "qwen3-235b-a22b"},
        "cluster": "8xH100-80GB",
        "length": 2048,
        "batch": 16,
        "adapter": {"rank": 8, "targets": "all"},
        "strategy": {
            "zero_stage": 1,
            "tensor_parallel": 4,
            "expert_parallel": 8,
            "micro_batch_size": 8,
            "activation_checkpointing": "full",
        },
        "gib": 80,
        "seconds": None,
    },
    {
        "name": "ms-swift flash_attention_3/mcore.sh, Megatron, LoRA, EP 4, 4 GPUs",
        "model": QWEN,
        "cluster": "4xH100-80GB",
        "length": 8192,
        "batch": 16,
        "adapter": {"rank": 32, "targets": "all"},
        "strategy": {"zero_stage": 1, "expert_parallel": 4, "activation_checkpointing": "full"},
        "gib": 49,
        "seconds": None,
    },
    {
        "name": "ms-swift rlhf/dpo/moe.sh, Megatron, DPO, TP 4 x EP 8, 8 GPUs",
        "model": QWEN,
        "cluster": "8xH100-80GB",
        "length": 8192,
        "batch": 4,
        "objective": "dpo",
        "strategy": {
            "zero_stage": 1,
            "tensor_parallel": 4,
            "expert_parallel": 8,
            "activation_checkpointing": "full",
            "reference": "copy",
            "offload": "optimizer+parameters",
        },
        "gib": 46,
        "seconds": 13.0,
    },
)


def predicted(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """GiB that the allocator reserves, and seconds of a step."""
    model = row["model"]
    if "preset" not in model:
        (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
        model = {"hf": str(folder)}
    settings = strategy_from({"precision": "bf16", **row["strategy"]})
    length, objective = row["length"], row.get("objective")
    values = {
        "model": model,
        "data": packed_pairs(folder, length) if objective else {"sequence_length": length},
        "steps": 2,
        "batch_size": row["batch"],
        "cluster": {"preset": row["cluster"]},
        "adapter": row.get("adapter"),
        **({"objective": objective} if objective else {}),
        "strategy": dict(settings.values),
    }
    recipe = recipe_of(values, SETTINGS)
    cluster = cluster_of(recipe.cluster)
    with mock.patch.dict(os.environ, {"SHARDWISE_CACHE": str(folder / "cache")}):
        plan = make_plan(recipe, cluster)
    reserved = plan.peak.bytes - (plan.ledger.overhead - cluster.device.overhead.workspace_bytes)
    return {
        "gib": round(reserved / GiB, 1),
        "seconds": round(plan.step.seconds, 2),
        "line": plan.line,
        "ledger": {name: round(size / GiB, 2) for name, size in plan.ledger.as_dict().items() if size},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name contains this; writes nothing")
    only = parser.parse_args().only
    rows = []
    for row in ROWS:
        if only not in row["name"]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = predicted(row, Path(folder))
        known = {key: row[key] for key in ("gib", "seconds") if row[key] is not None}
        errors = {key: found[key] / value - 1 for key, value in known.items()}
        print(row["name"], known, found, {key: f"{e:+.1%}" for key, e in errors.items()}, flush=True)
        rows.append({"name": row["name"], "published": known, "predicted": found, "errors": errors})
    for key in ("gib", "seconds"):
        sizes = [abs(row["errors"][key]) for row in rows if key in row["errors"]]
        if sizes:
            print(f"{key}: median {statistics.median(sizes):.1%}, worst {max(sizes):.1%} of {len(sizes)}")
    if not only:
        RESULTS.write_text(
            json.dumps({"machine": described(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
