"""Facts of another trainer that only together say a value of the recipe: batch sizes, devices, precision, offload.

Each function takes the facts that were collected under the ``@names`` of the tables, and sets keys of the draft. The
source of a value, the other file's keys, goes along for the table and for the comments of the recipe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from shardwise.core.errors import RecipeError
from shardwise.importers.datasets import datasets
from shardwise.importers.draft import ASSUMED, Draft
from shardwise.recipe.presets import PRESETS


def combine(draft: Draft) -> None:
    """Apply all facts. Raises RecipeError for facts that contradict each other."""
    for apply in _STEPS:
        apply(draft)
    for keys in draft.sources.values():
        if not keys:
            keys.append(ASSUMED)


def _model(draft: Draft) -> None:
    model = draft.facts.get("model")
    if model is None:
        return
    name = str(model)
    preset = name if name in PRESETS else None
    draft.put(*(("model.preset", preset) if preset else ("model.hf", name)), "model")


_PRECISIONS = {
    "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16", "32-true": "fp32", "no": "fp32",
    "false": "fp32",
}  # fmt: skip


def _precision(draft: Draft) -> None:
    facts = draft.facts
    chosen = facts.get("precision")
    if chosen is not None:
        word = str(chosen).lower()
        draft.put("strategy.precision", _PRECISIONS.get(word, word), "precision")
        if word in ("bf16-true", "16-true") and "enables:adapter" not in facts:
            draft.put("strategy.master_weights", word != "bf16-true", "precision")
    for name in ("fp16", "bf16", "fp8"):
        on = facts.get(name)
        on = on if isinstance(on, bool) else str(on).lower() in ("true", "auto", "full")
        if on:
            draft.put("strategy.precision", name, name)
    if chosen is None and "strategy.precision" not in draft.values and {"fp16", "bf16"} & facts.keys():
        draft.put("strategy.precision", "fp32", "fp16", "bf16")


def _loss_scale(draft: Draft) -> None:
    if draft.values.get("strategy.precision") != "fp16":
        draft.drop("loss_scale.")
        return
    scale, power = draft.number("loss_scale"), draft.number("scale_power")
    if scale:  # 0 is dynamic
        draft.put("loss_scale.dynamic", False, "loss_scale")
        draft.put("loss_scale.initial", float(scale), "loss_scale")
    elif scale is not None:
        draft.put("loss_scale.dynamic", True, "loss_scale")
    if power is not None and not scale:
        draft.put("loss_scale.initial", 2.0**power, "scale_power")


_ADAMW = re.compile(
    r"(fused)?adamw?|adamw_(torch(_fused)?|hf|torch_xla|torch_npu_fused|apex_fused)"
    r"|optimi_adamw|flash_adamw?|paged_adamw(_32bit)?"
)
_ADAMW_8BIT = re.compile(r"(paged_)?adamw_?(bnb_|torch_)?8bit|ao_adamw_8bit")


def _optimizer(draft: Draft) -> None:
    facts = draft.facts
    if (chosen := facts.get("optimizer")) is not None:
        name = str(chosen).rpartition(".")[2].lower()
        if _ADAMW_8BIT.fullmatch(name):
            draft.put("optimizer.name", "adamw_8bit", "optimizer")
        elif _ADAMW.fullmatch(name):
            draft.put("optimizer.name", "adamw", "optimizer")
        elif name == "sgd":
            draft.put("optimizer.name", "sgd", "optimizer")
        else:
            draft.lose("optimizer", f"there is no {name}; adamw is used")
    if "beta1" in facts and "beta2" in facts and draft.values.get("optimizer.name") != "sgd":
        draft.put("optimizer.betas", [facts["beta1"], facts["beta2"]], "beta1", "beta2")
    if (norm := draft.number("clip_norm")) is not None:
        draft.put("optimizer.clip_norm", float(norm) or None, "clip_norm")


_SHARDING = {
    "full_shard": (3, False), "shard_grad_op": (2, False), "no_shard": (0, False), "hybrid_shard": (3, True),
    "hybrid_shard_zero2": (2, True), "1": (3, False), "2": (2, False), "3": (0, False), "4": (3, True), "5": (2, True),
    "true": (3, False), "false": (2, False),
}  # fmt: skip
"""ZeRO stage, and whether shards are kept within a node, by FSDP's names."""


def _sharding(draft: Draft) -> None:
    if "sharding" not in draft.facts:
        return
    words = re.findall(r"\w+", str(draft.facts["sharding"]).lower())
    found = [_SHARDING[word] for word in words if word in _SHARDING]
    if not found:
        if words and words != ["none"]:
            draft.lose("sharding", "sharding is full_shard, shard_grad_op, no_shard or hybrid_shard")
        return
    stage, hybrid = found[0]
    draft.put("strategy.zero_stage", stage, "sharding")
    if hybrid:
        draft.facts["hybrid"], draft.keys["hybrid"] = True, draft.keys["sharding"]
    if "offload" in words:
        draft.facts["offload_parameters"], draft.keys["offload_parameters"] = "cpu", draft.keys["sharding"]


def _offload(draft: Draft) -> None:
    facts = draft.facts
    devices = [str(facts.get(name) or "none").lower() for name in ("offload_optimizer", "offload_parameters")]
    state, weights = (device != "none" for device in devices)
    names = ("offload_optimizer", "offload_parameters", "nvme_path")
    if "nvme" in devices:
        draft.put("strategy.offload", f"nvme:{facts.get('nvme_path') or 'nvme'}", *names)
        if weights:
            draft.lose("offload_parameters", "files hold the optimizer state, never the weights")
    elif weights:
        draft.put("strategy.offload", "optimizer+parameters", *names)
    elif state and draft.values.get("strategy.offload") == "activations":
        draft.put("strategy.offload", "activations+optimizer", *names)
    elif state:
        draft.put("strategy.offload", "optimizer", *names)
    elif {
        "offload_optimizer",
        "offload_parameters",
    } & facts.keys() and "strategy.offload" not in draft.values:
        draft.put("strategy.offload", "none", *names)
    fraction = draft.number("offload_fraction")
    if fraction is not None and state and not weights:
        draft.put("strategy.offload_fraction", float(fraction), "offload_fraction")


def _adapter(draft: Draft) -> None:
    on = bool(draft.facts.get("enables:adapter"))
    if on:
        names = [name for name, value in draft.facts.items() if name.startswith("lora_target:") and value]
        targets = [layer for name in names for layer in name.partition(":")[2].split(",")]
        if targets:
            draft.put("adapter.targets", targets, *names)
        if isinstance(listed := draft.values.get("adapter.targets"), str) and listed == "all-linear":
            draft.values["adapter.targets"] = "all"
        for key in ("adapter.alpha", "adapter.dropout"):
            if key in draft.values:
                draft.values[key] = float(draft.values[key] or 0)
        draft.assume("adapter.rank", 8)
        return
    draft.drop("adapter.")


def _devices(draft: Draft) -> None:
    facts = draft.facts
    nodes = int(draft.number("nodes") or 1)
    world = draft.number("world")
    if world is None and isinstance(facts.get("devices_per_node"), int):
        world = nodes * facts["devices_per_node"]
    degrees = (value for key, value in draft.values.items() if key.endswith("_parallel"))
    inner = math.prod(value for value in degrees if isinstance(value, int))
    if "ring" in facts and (facts["ring"] or 1) > 1:
        draft.put("strategy.sequence_parallel", facts["ring"], "ring")
        draft.put("strategy.sequence_method", "ring", "ring")
        inner *= int(facts["ring"])
    total, micro, accumulated = (
        draft.number(name) for name in ("global_batch", "micro_batch", "accumulation")
    )
    if world is None and total and micro and accumulated:
        world = max(1, round(total / (micro * accumulated))) * inner
        names = ("global_batch", "micro_batch", "accumulation")
        draft.keys["world"] = [key for name in names for key in draft.keys[name]]
    world = max(int(world or 1), 1)
    draft.facts["degree"] = max(1, world // inner)
    draft.put("cluster.devices_per_node", max(1, world // nodes), "world", "devices_per_node")
    if nodes > 1:
        draft.put("cluster.nodes", nodes, "nodes")
    else:
        draft.targets |= {key: ["cluster.nodes"] for key in draft.keys.get("nodes", [])}
    if facts.get("hybrid") and nodes > 1:
        draft.put("strategy.replicate", nodes, "hybrid")
    shard = draft.number("shard_size")
    if shard is not None and 1 <= shard < draft.facts["degree"]:
        draft.put("strategy.replicate", draft.facts["degree"] // int(shard), "shard_size")


def _batch(draft: Draft) -> None:
    total, micro = draft.number("global_batch"), draft.number("micro_batch")
    accumulated, degree = draft.number("accumulation"), draft.facts["degree"]
    if (each := draft.number("batch_per_device")) is not None and micro:
        accumulated, draft.keys["accumulation"] = each / micro, draft.keys["batch_per_device"]
    names = ("global_batch", "micro_batch", "accumulation")
    if total and micro and accumulated and total != micro * accumulated * degree:
        raise RecipeError(
            f"{draft.keys['global_batch'][0]} is not micro-batch x accumulation x devices",
            where=draft.keys["global_batch"][0],
            why=f"{total} is not {micro} x {accumulated} x {degree}",
            fix="correct it, or give the number of devices with --world",
        )
    if total is None:
        total = (micro or 1) * (accumulated or 1) * degree
    if micro:
        draft.put("strategy.micro_batch_size", int(micro), "micro_batch")
    if micro is not None or "global_batch" in draft.facts or "accumulation" in draft.facts:
        draft.put("batch_size", int(total), *names)
    draft.assume("batch_size", int(total))


def _length(draft: Draft) -> None:
    steps, epochs, tokens = (draft.number(name) for name in ("max_steps", "epochs", "max_tokens"))
    draft.assume("data.sequence_length", 2048)
    if steps is not None and steps > 0:
        draft.put("steps", int(steps), "max_steps")
    elif epochs:
        draft.put("epochs", float(epochs), "epochs")
    elif tokens:
        length = draft.values["batch_size"] * draft.values["data.sequence_length"]
        draft.put("steps", max(1, round(tokens / length)), "max_tokens")
    if "steps" not in draft.values and "epochs" not in draft.values:
        draft.assume("steps", 1000)


def _schedule(draft: Draft) -> None:
    warmup, ratio, least = (draft.number(name) for name in ("warmup_steps", "warmup_ratio", "min_lr"))
    if warmup:
        draft.put("schedule.warmup", int(warmup) if warmup >= 1 else float(warmup), "warmup_steps")
    elif ratio is not None:
        draft.put("schedule.warmup", float(ratio), "warmup_ratio")
    elif warmup is not None:
        draft.put("schedule.warmup", 0, "warmup_steps")
    rate = draft.values.get("optimizer.learning_rate")
    if least is not None and rate:
        draft.put("schedule.floor", min(1.0, float(least) / float(rate)), "min_lr")
    if draft.values.get("schedule.name") != "wsd":
        draft.drop("schedule.decay")
    steps, warm = draft.values.get("steps"), draft.values.get("schedule.warmup")
    if isinstance(steps, int) and isinstance(warm, int) and warm >= max(steps, 2):
        draft.values["schedule.warmup"] = max(0, steps - 1)


def _pauses(draft: Draft) -> None:
    facts = draft.facts
    pauses = (
        ("save_strategy", "save_steps", "checkpoint.every"),
        ("eval_strategy", "eval_steps", "evaluation.every"),
    )
    for *names, target in pauses:
        strategy, every = (facts.get(name) for name in names)
        word = str(strategy).lower()
        if word == "epoch":
            draft.lose(names[0], f"{target} is in steps; the last step has one anyway")
        elif every and word in ("steps", "none") and every >= 1:
            draft.put(target, int(every), *names)
        elif every and every < 1:
            draft.lose(names[1], f"{target} is in steps, and not a fraction of the run")
    held = draft.number("held_out")
    percent = draft.number("held_out_percent")
    if percent is not None:
        held, draft.keys["held_out"] = percent / 100, draft.keys["held_out_percent"]
    if held is not None and held < 1:
        draft.put("data.held_out", float(held), "held_out")
    elif held is not None:
        draft.lose("held_out", "data.held_out is a fraction of the documents")
    if draft.values.get("data.held_out") == 0:
        draft.drop("evaluation.every")
    if (batches := draft.number("evaluation_batches")) is not None:
        size = draft.values.get("strategy.micro_batch_size", 1)
        draft.put(
            "evaluation.sequences", max(1, int(batches * size * draft.facts["degree"])), "evaluation_batches"
        )


_STEPS: tuple[Callable[[Draft], None], ...] = (
    _model,
    datasets,
    _precision,
    _loss_scale,
    _optimizer,
    _sharding,
    _offload,
    _adapter,
    _devices,
    _batch,
    _length,
    _schedule,
    _pauses,
)
