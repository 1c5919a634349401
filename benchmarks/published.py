"""Published training runs as (model, cluster, strategy): benchmarks/data/published_runs.csv, one row per run.

A row is expressed where its settings have a counterpart here: a dense decoder on a device with a profile. The others
are listed with the reason. What a row does not say is assumed as follows.

- A blank recomputation is none. Megatron's "selective" recomputes the scores of attention, which a fused kernel does
  anyway, so it is none.
- A blank global batch is one micro-batch on each data-parallel rank.
- Nodes have eight devices; those of GB200 and GB300, whose switch joins 72, have up to 64.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"

DEVICES: Mapping[str, str] = {
    "H100 80GB": "H100-80GB",
    "h100_80gb": "H100-80GB",
    "H100": "H100-80GB",
    "DGX-H100": "H100-80GB",
    "H100 80GB 700W": "H100-80GB",
    "H100 80GB (800Gbps net)": "H100-80GB",
    "H100 95GiB": "H100-96GB",
    "H100 94GB": "H100-96GB",
    "H100 96GB HBM2e 2.4TB/s 500W": "H100-96GB",
    "H200": "H200-141GB",
    "A100 80GB": "A100-80GB",
    "a100_80gb": "A100-80GB",
    "A100 80GB (400Gbps/node-pair net)": "A100-80GB",
    "a100_40gb": "A100-40GB",
    "DGX-B200": "B200-180GB",
    "DGX-GB200": "GB200-192GB",
    "DGX-GB300": "GB300-288GB",
    "MI300X": "MI300X-192GB",
}
"""Profile by the source's name of the device."""

NETWORKS: Mapping[str, float] = {
    "A100 80GB (400Gbps/node-pair net)": 50e9 / 8,
    "H100 80GB (800Gbps net)": 100e9 / 8,
}
"""Bytes/s of one device to other nodes, where the source gives the node's."""

NODE, LARGE_NODE = 8, 64


@dataclass(frozen=True)
class Published:
    """One published run.

    Attributes:
        stack: the software that ran it.
        model: ``model:`` of a recipe, less the number of layers.
        degrees: tensor, pipeline, sequence (context) and data-parallel degrees, and copies among the last.
        settings: of the strategy, less the degrees.
        seconds: of an optimizer step.
        memory_gib: peak, if it is published.
        recomputation, eight_bits: in the source's words.
    """

    source: str
    stack: str
    name: str
    device: str
    gpus: int
    network: float | None
    layers: int
    model: Mapping[str, object]
    length: int
    tensor: int
    pipeline: int
    sequence: int
    data: int
    copies: int
    stages: int
    settings: Mapping[str, object]
    micro_batch: int
    batch: int
    seconds: float | None
    memory_gib: float | None
    recomputation: str = ""
    eight_bits: str = ""
    compiled: bool = False
    notes: str = ""

    @property
    def node(self) -> int:
        """Devices of a node."""
        large = LARGE_NODE if self.device.startswith("GB") else NODE
        return large if self.gpus % large == 0 else self.gpus

    @property
    def software(self) -> str:
        """The stack without "compiled"."""
        return self.stack.split(",")[0]

    @property
    def passes(self) -> int:
        """Micro-batches in a step."""
        return self.batch // (self.micro_batch * self.data)

    @property
    def group(self) -> tuple[object, ...]:
        """Runs of one group do the same work on the same devices."""
        return (
            self.source,
            self.name,
            self.length,
            self.gpus,
            self.device,
            self.batch,
            self.settings["precision"],
        )

    @property
    def family(self) -> str:
        """The source without the version: releases of one table are one source."""
        return re.sub(r"(commit|perf) .*", r"\1", self.source)


class Inexpressible(Exception):
    """Why a row has no counterpart here."""


def stack_of(row: Mapping[str, str]) -> str:
    """The software by name; torch.compile generates other kernels, so it makes another stack."""
    source = row["source"]
    if "SC21" in source and row["zero_stage_or_sharding"].startswith("ZeRO-3"):
        return "deepspeed"
    for word, stack in (
        ("nanotron", "nanotron"),
        ("MosaicML", "composer"),
        ("IBM", "fms-fsdp"),
        ("Llama 3 paper", "meta"),
        ("Megatron", "megatron"),
        ("NeMo", "megatron"),
        ("Korthikanti", "megatron"),
        ("torch", "torchtitan"),
    ):
        if word in source:
            return f"{stack}, compiled" if stack == "torchtitan" and _compiled(row) else stack
    raise Inexpressible("another stack")


def _compiled(row: Mapping[str, str]) -> bool:
    return row["compile"] not in ("", "no")


def _zero(row: Mapping[str, str], data: int) -> tuple[int, int]:
    """(ZeRO stage, copies)."""
    word = row["zero_stage_or_sharding"]
    if word.startswith("HSDP"):
        return 3, data // NODE
    for start, stage in (
        ("ZeRO-3", 3),
        ("ZeRO-2", 2),
        ("ZeRO-1", 1),
        ("ZeRO-0", 0),
        ("FSDP (ZeRO-2", 2),
        ("FSDP1 SHARD_GRAD_OP", 2),
        ("FSDP", 3),
        ("SimpleFSDP", 3),
        ("Megatron-FSDP 64", 3),
        ("Megatron (distributed", 1),
        ("DDP (overlap", 1),
        ("DDP + distributed", 1),
        ("DDP", 0),
        ("PTD", 0),
        ("none", 0),
    ):
        if word.startswith(start):
            return stage, 1
    raise Inexpressible(f"sharding {word or 'unknown'}")


def _recomputation(row: Mapping[str, str], stack: str) -> str:
    word = row["ac"]
    if word in ("default", "auto_perf_maxing") or "SAC" in word:
        raise Inexpressible(f"recomputation {word}")
    if word.startswith("full"):
        return "full"
    return "selective" if word.startswith("selective") and stack != "megatron" else "none"


def _model(row: Mapping[str, str]) -> dict[str, object]:
    if not row["layers"] or not row["hidden"]:
        raise Inexpressible("its dimensions are not published")
    name = row["model"]
    if any(word in name for word in ("DeepSeek", "Qwen3_", "Kimi", "OSS", "Nemotron_3", "a3B", "a22B")):
        raise Inexpressible("a mixture of experts")
    qwen = name.startswith("Qwen3")
    gpt = name.startswith(("MPT", "GPT", "Nemotron"))
    vocab = int(row["vocab"] or 51200)
    return {
        "family": "gpt2" if gpt else "qwen3" if qwen else "llama",
        "width": int(row["hidden"]),
        "heads": int(row["heads"]),
        "kv_heads": int(row["kv_heads"] or row["heads"]),
        "ffn": int(row["ffn"]),
        "vocab": vocab,
        "context": int(row["seq_len"]),
        "tied": gpt or "; tied embeddings" in row["notes"],
        **({"head_dim": 128} if qwen else {}),
    }


def _settings(row: Mapping[str, str], stack: str, stage: int) -> dict[str, object]:
    precision = "bf16" if row["fp8"] in ("no", "") else "fp8"
    if "NVFP4" in row["fp8"] or "mx" in row["fp8"].lower():
        raise Inexpressible(f"precision {row['fp8']}")
    settings: dict[str, object] = {
        "precision": precision,
        "zero_stage": stage,
        "activation_checkpointing": _recomputation(row, stack),
    }
    if precision == "fp8" and row["fp8"].startswith("rowwise"):
        settings["fp8_scaling"] = "row"
    if "PURE" in row["precision"] or stack == "fms-fsdp":
        # composer/distributed/shared_utils.py and fms_fsdp/policies/mixed_precision.py reduce gradients in bf16.
        settings["reduce_dtype"] = "compute"
    if int(row["tp"] or 1) > 1 and stack != "composer" and row["source"][:18] != "Megatron-LM SC21 T":
        settings["tensor_sequence_parallel"] = "gathered"
    return settings


def _step_seconds(row: Mapping[str, str], batch: int, gpus: int) -> float | None:
    """From tokens/s, or from FLOP/s where the source gives only those: 6N + 12 L h s per token.

    The figures of Megatron's paper of 2021 count recomputation, four thirds of that.
    """
    tokens = batch * int(row["seq_len"])
    if row["tokens_per_s_per_gpu"]:
        return tokens / float(row["tokens_per_s_per_gpu"]) / gpus
    if row["tflops_per_gpu"] and row["params_b"] and row["seq_len"] != "131072":
        attention = 12 * int(row["layers"]) * int(row["hidden"]) * int(row["seq_len"])
        work = tokens * (6e9 * float(row["params_b"]) + attention)
        counted = 4 / 3 if "SC21" in row["source"] and row["ac"] == "full" else 1.0
        return work * counted / (1e12 * float(row["tflops_per_gpu"])) / gpus
    return None


def expressed(row: Mapping[str, str]) -> Published:
    """The row as a run of this package. Raises Inexpressible."""
    stack, model = stack_of(row), _model(row)
    if row["gpu"] not in DEVICES:
        raise Inexpressible(f"no profile of {row['gpu']}")
    if not row["gpus"] or not row["micro_batch"]:
        raise Inexpressible("devices or micro-batch are not published")
    if "LoRA" in row["notes"] or "Finetuning" in row["notes"]:
        raise Inexpressible("fine-tuning")
    gpus, tensor = int(row["gpus"]), int(row["tp"] or 1)
    pipeline, sequence = int(row["pp"] or 1), int(row["cp"] or 1)
    data = gpus // (tensor * pipeline * sequence)
    micro = int(row["micro_batch"])
    batch = int(row["global_batch"] or micro * data)
    if data < 1 or batch % (micro * data):
        raise Inexpressible("the batch is not a whole number of micro-batches")
    stage, copies = _zero(row, data)
    virtual = re.search(r"VP=(\d+)|interleave (\d+)", row["notes"])
    memory = float(row["peak_mem_gib"]) if row["peak_mem_gib"] else None
    return Published(
        source=row["source"],
        stack=stack,
        name=row["model"],
        device=DEVICES[row["gpu"]],
        gpus=gpus,
        network=NETWORKS.get(row["gpu"]),
        layers=int(row["layers"]),
        model=model,
        length=int(row["seq_len"]),
        tensor=tensor,
        pipeline=pipeline,
        sequence=sequence,
        data=data,
        copies=data if stage == 0 else copies,
        stages=int((virtual[1] or virtual[2]) if virtual and pipeline > 1 else 1),
        settings=_settings(row, stack, stage),
        micro_batch=micro,
        batch=batch,
        seconds=_step_seconds(row, batch, gpus),
        memory_gib=memory,
        recomputation=row["ac"],
        eight_bits=row["fp8"],
        compiled=_compiled(row),
        notes=row["notes"],
    )


def read(name: str) -> tuple[list[Published], Counter[str]]:
    """The expressed rows of a file in benchmarks/data, and how many others there are by reason."""
    rows, left_out = list[Published](), Counter[str]()
    for row in lines(name):
        try:
            rows.append(expressed(row))
        except Inexpressible as reason:
            left_out[str(reason)] += 1
    return rows, left_out


def lines(name: str) -> Iterator[dict[str, str]]:
    """The rows of a file in benchmarks/data."""
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)
