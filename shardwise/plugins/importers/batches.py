"""Devices, sharding and batch sizes out of other trainers' facts, and the arithmetic that ties them together."""

from __future__ import annotations

import math
import re

from shardwise.core.errors import RecipeError
from shardwise.plugins.importers.draft import Draft

_SHARDING = {
    "full_shard": (3, False), "shard_grad_op": (2, False), "no_shard": (0, False), "hybrid_shard": (3, True),
    "hybrid_shard_zero2": (2, True), "1": (3, False), "2": (2, False), "3": (0, False), "4": (3, True), "5": (2, True),
    "true": (3, False), "false": (2, False),
}  # fmt: skip
"""ZeRO stage, and whether shards are kept within a node, by FSDP's names."""


def _or_world(draft: Draft) -> str:
    """Another remedy, where the command line has not named the devices yet."""
    named = any(key.startswith("--world") for key in draft.keys.get("world", []))
    return "" if named else ", or give the number of devices with --world"


def devices(draft: Draft) -> None:
    """Set the cluster, and how its ranks are divided. Raises RecipeError for degrees that are not its size."""
    facts, values = draft.facts, draft.values
    if "stage_schedule" in facts and _uses_pipeline(draft):
        draft.put(facts["stages"]["schedule"], facts["stage_schedule"], "stage_schedule")
    nodes = draft.size("nodes") or 1
    ring = draft.number("ring")
    if ring and ring > 1:
        draft.put("strategy.sequence_parallel", int(ring), "ring")
        if not values.get("data.packing"):  # the ring takes no mask between packed records
            draft.put("strategy.sequence_method", "ring", "ring")
    degrees = [key for key in values if key.endswith("_parallel") and key != "strategy.expert_parallel"]
    inner = max(1, math.prod(draft.size(key) or 1 for key in degrees))
    experts = draft.size("strategy.expert_parallel") or 1
    apart = experts if facts.get("experts_apart") else 1
    world = _world(draft, nodes, inner, apart)
    facts["degree"] = max(1, world // inner)  # ranks of experts have samples of their own
    degree = max(1, world // (inner * apart))
    draft.put("cluster.devices_per_node", max(1, world // nodes), "world", "devices_per_node")
    if nodes > 1:
        draft.put("cluster.nodes", nodes, "nodes")
    else:
        draft.targets |= {key: ["cluster.nodes"] for key in draft.keys.get("nodes", [])}
    if facts.get("hybrid") and nodes > 1:
        draft.put("strategy.replicate", nodes, "hybrid")
    shard, copies = draft.number("shard_size"), draft.number("strategy.replicate")
    if shard is None or shard < 1:
        return
    if degree % shard or (
        copies is not None and draft.is_said("strategy.replicate") and shard * copies != degree
    ):
        raise RecipeError(
            "the degrees are not the number of devices",
            where=draft.origin("shard_size"),
            why=f"{draft.shown('shard_size', 'strategy.replicate', *degrees)} on {world} devices"
            + (f" ({draft.keys['world'][0]})" if draft.keys.get("world") else ""),
            fix="correct them" + _or_world(draft),
        )
    if shard == 1 and degree > 1:  # plain data parallelism
        draft.put("strategy.zero_stage", 0, "shard_size")
        draft.drop("strategy.replicate")
    elif shard < degree:
        draft.put("strategy.replicate", degree // int(shard), "shard_size")


def _world(draft: Draft, nodes: int, inner: int, apart: int) -> int:
    """The number of devices: as said, or by the batch sizes, or by the degrees."""
    world, per_node = draft.size("world"), draft.size("devices_per_node")
    if world is None and per_node is not None:
        world = nodes * per_node
    names = ("global_batch", "micro_batch", "accumulation")
    total, micro, accumulated = (draft.size(name) for name in names)
    if world is None and total and micro and accumulated:
        world = max(1, round(total / (micro * accumulated))) * inner
        draft.keys["world"] = [key for name in names for key in draft.keys[name]]
    if world is None:
        copies = draft.size("strategy.replicate") or 1
        shards = int(max(1, draft.number("shard_size") or 1))
        stages, experts = (draft.size(f"strategy.{key}_parallel") or 1 for key in ("pipeline", "expert"))
        world = math.lcm(shards * copies * inner * apart // stages, experts) * stages
    return world


def sharding(draft: Draft) -> None:
    """ZeRO stage and offload by FSDP's words; the key that the other trainer prefers comes first."""
    stage = None
    for name in ("sharding:reshard", "sharding:strategy", "sharding:fsdp"):
        if name not in draft.facts:
            continue
        words = re.findall(r"\w+", str(draft.facts[name]).lower())
        names = _SHARDING | {"default": (2 if _uses_pipeline(draft) else 3, False)}  # torchtitan's
        known = [names[word] for word in words if word in names]
        if "offload" in words:
            draft.take("@offload_parameters", "cpu", *draft.keys[name])
        if known and stage is None:
            stage, hybrid = known[0]
            draft.put("strategy.zero_stage", stage, name)
            if hybrid:
                draft.take("@hybrid", True, *draft.keys[name])
        elif not known and words and words != ["none"]:
            draft.lose(name, "sharding is full_shard, shard_grad_op, no_shard or hybrid_shard")


def _uses_pipeline(draft: Draft) -> bool:
    """Whether torchtitan divides the blocks among stages."""
    return (draft.number(draft.facts.get("stages", {}).get("degree", "")) or 1) > 1


def batch(draft: Draft) -> None:
    """Set the batch sizes. Raises RecipeError where micro-batch x accumulation x devices is not the global batch."""
    names = ("global_batch", "micro_batch", "accumulation")
    sizes: list[float | None] = [draft.size(name) for name in names]
    total, micro, accumulated = sizes
    degree = draft.facts["degree"]
    counted = bool(draft.keys.get("world") or draft.keys.get("devices_per_node"))
    if (per_device := draft.size("batch_per_device")) is not None and micro:
        accumulated, draft.keys["accumulation"] = max(1, per_device // micro), draft.keys["batch_per_device"]
    if total and micro and not draft.is_said("accumulation"):  # as the other trainer computes it
        accumulated = total / (micro * degree) if counted else None
    elif total and accumulated and not draft.is_said("micro_batch"):
        micro, draft.keys["micro_batch"] = total / (accumulated * degree) if counted else None, []
    whole = all(value is None or float(value).is_integer() for value in (micro, accumulated))
    if total and micro and accumulated and (not whole or total != micro * accumulated * degree):
        world = f" on {degree} data-parallel ranks"
        raise RecipeError(
            f"{draft.keys['global_batch'][0]} is not micro-batch x accumulation x devices",
            where=draft.origin("global_batch"),
            why=draft.shown(*names) + world,
            fix="correct it" + _or_world(draft),
        )
    if total is None:
        total = (micro or 1) * (accumulated or 1) * degree
    if (pieces := draft.number("stage_batch")) and _uses_pipeline(
        draft
    ):  # stages split torchtitan's local batch
        draft.put("strategy.micro_batch_size", int(pieces), "stage_batch")
    elif micro:
        draft.put("strategy.micro_batch_size", int(micro), "micro_batch")
    if micro is not None or "global_batch" in draft.facts or "accumulation" in draft.facts:
        draft.put("batch_size", int(total), *names)
    draft.assume("batch_size", int(total))
