"""Counted costs of published runs: a few shallow dry runs, extrapolated, and kept on disk.

What a run costs depends on its structure: dimensions, tensor and sequence degree, recomputation, precision, ZeRO stage.
Each structure is dry-run with two and with three blocks, three micro-batches, and two ranks on each axis of the data.
From these follow the costs for any depth, micro-batch, sequence length, tensor degree and data degree:

- one more block adds the difference of the two depths;
- the first and the last micro-batch cost what they did, and each between them what the second did. A step of one
  micro-batch starts every collective of the first and of the last;
- every field of a kernel is linear in the tokens of a micro-batch, and attention's FLOPs also in the length of a
  sequence; two sizes of the micro-batch give the line. The sizes are odd, so that few sizes of weights equal one of an
  activation; kernels of both counts pair in order, else by size;
- every field is linear in 1/degree of tensor parallelism, so degrees 2 and 4 give those above;
- a collective has the same payload for any data degree, and kernels of the update run on 1/degree of the elements;
- ZeRO stage 0 is counted as stage 1, whose reduce-scatter becomes an all-reduce and whose all-gather falls away.

Stages of a pipeline are taken from the whole model: blocks as the planner balances them, the embedding and the head on
the first and the last stage.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import nanotron
from interpolated import between
from practised import set_apart
from published import Published
from stacks import ALL_HEADS, NORM_IN_PARTS, changed, practice_of, synchronised

from shardwise.core.cost import Collective, Kernel, StepCost
from shardwise.core.strategy import Layout
from shardwise.dryrun import run as running
from shardwise.dryrun.tally import Tally
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.model.balance import Costs, blocks_per_stage
from shardwise.model.open import blueprint_of
from shardwise.recipe.dimensions import Dimensions
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, mesh_layout, strategy_from

DEPTHS = (2, 3)
COUNT = 3
SIZES = (3, 5)
LENGTH = 4096
"""The sequence length that is dry-run, without sequence parallelism."""

VERSION = 2
"""Of the format; part of every name, as the counted code is not."""


@dataclass(frozen=True)
class Structure:
    """A configuration of the dry run."""

    model: str
    length: int
    tensor: int
    sequence: int
    hybrid: bool
    micro_batch: int
    settings: str

    @property
    def name(self) -> str:
        return hashlib.sha256(json.dumps([VERSION, *astuple(self)]).encode()).hexdigest()[:24]


def structures_of(run: Published) -> list[Structure]:
    """The structures that have to be counted for a run."""
    practice = practice_of(run)
    found = _line_of(run, practice.settings)
    return found + _line_of(run, {**practice.settings, **_WHOLE}) if practice.whole else found


def _line_of(run: Published, changes: Mapping[str, object]) -> list[Structure]:
    """The structures that a run's cost is a line through: by tensor degree, and by micro-batch in each."""
    settings = {**run.settings, **changes}
    if settings["zero_stage"] == 0:
        settings["zero_stage"] = 1
    model = {**run.model, "context": LENGTH if run.sequence == 1 else run.length}
    length = LENGTH if run.sequence == 1 else run.length
    degrees = (run.tensor,) if run.tensor <= 2 else (2, 4)
    return [
        Structure(
            json.dumps(model, sort_keys=True),
            length,
            degree,
            run.sequence,
            run.copies > 1 and run.settings["zero_stage"] != 0,
            size,
            json.dumps(settings, sort_keys=True),
        )
        for degree in degrees
        for size in SIZES
    ]


_WHOLE: Mapping[str, object] = {"activation_checkpointing": "full"}

Tallies = dict[int | None, Tally]


def path_of(structure: Structure, folder: Path) -> Path:
    return folder / f"{structure.name}.json"


def counted(structure: Structure, folder: Path) -> list[Tallies]:
    """The tallies of both depths: from the folder, or counted now."""
    path = path_of(structure, folder)
    if not path.exists():
        made = [_written(_count(structure, depth)) for depth in DEPTHS]
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(made), encoding="utf-8")
        part.rename(path)
    return [_read(each) for each in json.loads(path.read_text(encoding="utf-8"))]


def _count(structure: Structure, depth: int) -> Tallies:
    data = 4 if structure.hybrid else 2
    world = data * structure.tensor * structure.sequence
    values = {
        "model": {**json.loads(structure.model), "layers": DEPTHS[-1] + 1},
        "data": {"sequence_length": structure.length},
        "steps": 2,
        "batch_size": COUNT * data * structure.micro_batch,
        "cluster": {"preset": f"1x{world}xH100-80GB"},
    }
    recipe, settings = recipe_of(values, SETTINGS), json.loads(structure.settings)
    apart = {name: settings.pop(name) for name in (NORM_IN_PARTS, ALL_HEADS) if name in settings}
    strategy = strategy_from(
        {
            **settings,
            "tensor_parallel": structure.tensor,
            "sequence_parallel": structure.sequence,
            "sequence_method": "ring",
            "replicate": 2 if structure.hybrid else 1,
            "micro_batch_size": structure.micro_batch,
        }
    )
    caught: list[Tallies] = []
    whole_cost = running.whole_cost

    def catching(tallies: Any, seen: int, count: int) -> StepCost:
        caught.append(dict(tallies))
        return whole_cost(tallies, seen, count)

    with (
        mock.patch.object(running, "whole_cost", catching),
        set_apart(apart),
    ):
        cluster = cluster_of(recipe.cluster)
        running.dry_run(recipe, blueprint_of(recipe), strategy, cluster, depth=depth, history=False)
    return caught[0]


def _written(tallies: Tallies) -> dict[str, Any]:
    return {
        str(number): [
            [[*astuple(kernel), calls] for kernel, calls in tally.kernels.items()],
            [[*astuple(collective), calls] for collective, calls in tally.collectives.items()],
        ]
        for number, tally in tallies.items()
    }


def _read(written: Mapping[str, Any]) -> Tallies:
    tallies = Tallies()
    for number, (kernels, collectives) in written.items():
        tally = tallies[None if number == "None" else int(number)] = Tally()
        for *fields, shape, calls in kernels:
            tally.kernels[Kernel(*fields, shape=tuple(shape))] = calls
        for *fields, calls in collectives:
            tally.collectives[Collective(*fields)] = calls
    return tallies


def _cost(tallies: Tallies, count: int) -> StepCost:
    """Of a step of ``count`` micro-batches."""
    first, middle, last = (tallies[number] for number in range(COUNT))
    rest = {number: tally for number, tally in tallies.items() if number is None}
    if count == 1:
        only = Tally(first.kernels | last.kernels, first.collectives | last.collectives)
        return running.whole_cost({**rest, 0: only}, 1, 1)
    if count == 2:
        return running.whole_cost({**rest, 0: first, 1: last}, 2, 2)
    return running.whole_cost({**rest, 0: first, 1: middle, 2: last}, COUNT, count)


@lru_cache(maxsize=4096)
def _counted_cost(structure: Structure, folder: Path, count: int) -> tuple[StepCost, StepCost]:
    shallow, deeper = (_cost(tallies, count) for tallies in counted(structure, folder))
    return shallow, deeper


def parts_of(run: Published, folder: Path, changes: Mapping[str, object]) -> tuple[StepCost, StepCost]:
    """The costs of a step of two and of three blocks, for the run's own micro-batch, length and tensor degree."""
    pairs = [_counted_cost(each, folder, run.passes) for each in _line_of(run, changes)]
    length = LENGTH if run.sequence == 1 else run.length
    size = run.micro_batch * run.length / length
    weight = (size - SIZES[0]) / (SIZES[1] - SIZES[0])
    parts = []
    for depth in range(len(DEPTHS)):
        costs = [pair[depth] for pair in pairs]
        lines = [between(*costs[i : i + 2], weight) for i in range(0, len(costs), 2)]
        # f(t) = a + b / t: degrees 2 and 4 are at 1/2 and 1/4
        cost = lines[0] if len(lines) == 1 else between(*lines, (1 / 2 - 1 / run.tensor) / (1 / 2 - 1 / 4))
        parts.append(_lengthened(cost, run, length))
    return parts[0], parts[1]


def _lengthened(cost: StepCost, run: Published, length: int) -> StepCost:
    """Attention over sequences of the run's length instead of ``length``, of as many tokens; tensor groups too."""

    def longer(kernel: Kernel) -> Kernel:
        if "attention" not in kernel.operation or run.length == length:
            return kernel
        heads, queries, keys, width = kernel.shape
        factor = run.length / length
        shape = (round(heads / factor), round(queries * factor), round(keys * factor), width)
        return replace(kernel, flops=round(kernel.flops * factor), shape=shape)

    collectives = tuple(replace(c, degree=run.tensor) if c.axis == "tensor" else c for c in cost.collectives)
    return StepCost(tuple(map(longer, cost.kernels)), collectives, (), cost.micro_batches)


def layout_of(run: Published) -> Layout:
    """The mesh as shardwise.technique orders it."""
    degrees = {
        "pipeline": run.pipeline,
        "replicate": run.copies,
        "shard": run.data // run.copies,
        "sequence": run.sequence,
        "tensor": run.tensor,
    }
    return mesh_layout(degrees)


def cluster_for(run: Published) -> Cluster:
    device = nanotron.DEVICE if run.stack == "nanotron" else run.device
    preset = f"{run.gpus // run.node}x{run.node}x{device}"
    values = {"model": {"preset": "tiny"}, "steps": 1, "batch_size": 1, "cluster": {"preset": preset}}
    cluster = cluster_of(recipe_of(values, SETTINGS).cluster)
    return cluster if run.network is None else replace(cluster, network_bandwidth=run.network)


@dataclass(frozen=True)
class Stages:
    """Costs of the different ranks of a pipeline, and which of them each rank has."""

    costs: tuple[StepCost, ...]
    of_rank: tuple[int, ...]


def stages_of(run: Published, folder: Path) -> Stages:
    """The cost of a step on every rank of the pipeline; of one rank without a pipeline."""
    practice = practice_of(run)
    shallow, deeper = parts_of(run, folder, practice.settings)
    layout = layout_of(run)
    if run.pipeline == 1:
        whole = round((practice.whole or 0.0) * run.layers)
        cost = shallow.extrapolated(deeper, run.layers - whole - DEPTHS[0])
        if whole:
            cost = _sum(cost, _blocks(*parts_of(run, folder, {**practice.settings, **_WHOLE}), whole))
        return Stages((synchronised(placed(changed(cost, run, run.layers), layout, run), run, False),), (0,))
    rest, block = shallow.extrapolated(deeper, -DEPTHS[0]), shallow.extrapolated(deeper, 1 - DEPTHS[0])
    before, after = (_of_rest(rest, first) for first in (True, False))
    kinds: dict[tuple[int, bool, bool], int] = {}
    costs, of_rank = list[StepCost](), list[int]()
    for rank, stage in enumerate(cut_of(run)):
        kind = (stage.blocks, rank == 0, stage.head)
        if kind not in kinds:
            kinds[kind] = len(costs)
            own = _plus(block, rest, stage.blocks)
            kernels = own.kernels + (before.kernels if kind[1] else ()) + (after.kernels if kind[2] else ())
            collectives = own.collectives + (after.collectives if kind[2] else ()) + _message(run)
            cost = StepCost(kernels, collectives, (), own.micro_batches)
            costs.append(
                synchronised(placed(changed(cost, run, stage.blocks), layout, run), run, any(kind[1:]))
            )
        of_rank.append(kinds[kind])
    return Stages(tuple(costs), tuple(of_rank))


def _message(run: Published) -> tuple[Collective, ...]:
    """What a stage sends to the next: the activations of a micro-batch, this rank's share of each sequence."""
    tokens = run.micro_batch * run.length // run.sequence
    if "tensor_sequence_parallel" in run.settings:
        tokens //= run.tensor
    elements = tokens * int(str(run.model["width"]))
    calls = 2 * run.passes * run.stages
    return (
        Collective("send", "pipeline", run.pipeline, calls, elements, 2 * elements, "forward", run.passes),
    )


def cut_of(run: Published) -> list[nanotron.Stage]:
    """What every rank of the pipeline has."""
    if practice_of(run).own_stages:
        return nanotron.stages(run)
    return [nanotron.Stage(blocks, n == run.pipeline - 1) for n, blocks in enumerate(blocks_of(run))]


def blocks_of(run: Published) -> list[int]:
    """Blocks on every rank of the pipeline, as the planner cuts the model."""
    d = Dimensions(**{"layers": run.layers, **run.model})  # type: ignore[arg-type]
    block = 2 * d.block_parameters + 2 * run.length * d.heads * d.head_width
    head = 2 * d.width * d.vocab
    stages = run.pipeline * run.stages
    if run.layers < stages:
        raise ValueError(f"{run.layers} blocks for {stages} stages")
    each = blocks_per_stage(run.layers, stages, Costs(block, head))
    return [sum(each[rank :: run.pipeline]) for rank in range(run.pipeline)]


def _blocks(shallow: StepCost, deeper: StepCost, blocks: int) -> StepCost:
    """What so many blocks cost."""
    rest, one = shallow.extrapolated(deeper, -DEPTHS[0]), shallow.extrapolated(deeper, 1 - DEPTHS[0])
    return _plus(one, rest, blocks)


def _sum(one: StepCost, other: StepCost) -> StepCost:
    return StepCost(one.kernels + other.kernels, one.collectives + other.collectives, (), one.micro_batches)


def _plus(with_one: StepCost, rest: StepCost, blocks: int) -> StepCost:
    """``blocks`` times what a block costs: ``with_one`` is a model of one block, ``rest`` one of none."""
    whole = rest.extrapolated(with_one, blocks)
    kernels, collectives = _calls(rest.kernels), _calls(rest.collectives)
    return StepCost(
        tuple(k for k in (_less(k, kernels) for k in whole.kernels) if k.calls > 0),
        tuple(c for c in (_less(c, collectives) for c in whole.collectives) if c.calls > 0),
        (),
        whole.micro_batches,
    )


def _calls(counted: Any) -> dict[Any, int]:
    return {replace(each, calls=0): each.calls for each in counted}


def _less(each: Any, calls: Mapping[Any, int]) -> Any:
    return replace(each, calls=each.calls - calls.get(replace(each, calls=0), 0))


def _of_rest(rest: StepCost, first: bool) -> StepCost:
    """What the embedding costs, or all else outside the blocks."""

    def is_lookup(kernel: Kernel) -> bool:
        return "embedding" in kernel.operation or "index" in kernel.operation

    kernels = tuple(k for k in rest.kernels if is_lookup(k) == first)
    return StepCost(kernels, () if first else rest.collectives, (), rest.micro_batches)


def _on_shards(kernel: Kernel) -> bool:
    """Whether a kernel works on a rank's share of the weights: the update, and what FSDP2 casts before it gathers."""
    cast = kernel.operation in ("fsdp::all_gather_copy_in", "aten::_foreach_copy_")
    return cast or kernel.phase in ("clip", "optimizer")


def placed(cost: StepCost, layout: Layout, run: Published) -> StepCost:
    """A cost counted on two ranks of each axis of the data, with the degrees of ``layout``."""
    replicated = run.settings["zero_stage"] == 0
    scale = 2.0 if replicated else 2 / layout.degree("shard")
    kernels = tuple(replace(k, bytes=round(k.bytes * scale)) if _on_shards(k) else k for k in cost.kernels)
    collectives = []
    for c in cost.collectives:
        if c.axis == "shard" and replicated:
            if c.kind == "all_gather":
                continue
            c = replace(c, kind="all_reduce", axis="replicate", degree=run.data)
        elif c.axis in ("shard", "replicate"):
            smaller = scale if c.axis == "replicate" else 1.0
            c = replace(c, degree=layout.degree(c.axis), bytes=round(c.bytes * smaller))
        elif c.axis not in layout:
            c = replace(c, degree=layout.world_size)
        if c.degree > 1:
            collectives.append(c)
    return StepCost(kernels, tuple(collectives), (), cost.micro_batches)
