"""Pipeline parallelism: consecutive blocks on each rank, and micro-batches that pass from rank to rank.

A rank builds only its own stages, by names that the whole model has too, so seeds, weight files and checkpoints of
any other division fit (model/parts.py; there also where is cut). What a rank does when is one of the schedules of
core/pipeline_schedule.py; engine/pipeline/ carries it out. Everything else sees a model of fewer blocks: ZeRO divides
a stage over the ranks that hold it, checkpointing wraps its blocks, and the loss is the last stage's.

The micro-batches are those of accumulation, all of an optimizer step. There may be fewer of them than stages: the
plan then says how much of the time the ranks wait.

    schedule      in flight on rank s of p, of M     weights between passes
    naive         1                                  as ZeRO has it
    gpipe         M                                  as ZeRO has it
    1f1b          min(M, p - s)                      as ZeRO has it
    interleaved   min(M v, (v-1) p + 2 (p-s) - 1)    as ZeRO has it; of v stages on a rank, each 1/v as large
    zero_bubble   min(M, p)                          gathered from the first to the last pass
    pipedream     p - s                              as ZeRO 0 or 3 has it, and older ones (engine/pipeline/stash.py)

A tied table lies on the first stage and on the last; its gradient is summed over both before the update.

Refused: torch.distributed.pipelining's own runtime as the executor, see engine/pipeline/executor.py; a model that
does not say what lies before, within and after its blocks (a factory's), which would have to be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise.core.errors import RecipeError
from shardwise.core.pipeline_schedule import orders, play
from shardwise.core.presets import Dimensions, dimensions_of
from shardwise.core.strategy import Case, Layout, Rule, Setting, Strategy
from shardwise.technique.base import Channel, Pipeline, Site, divides_world
from shardwise.technique.checkpointing import ACTIVATION_CHECKPOINTING
from shardwise.technique.in_backward import OPTIMIZER_IN_BACKWARD
from shardwise.technique.loss import LOSS
from shardwise.technique.offload import OFFLOAD
from shardwise.technique.offload import parts as offloaded
from shardwise.technique.precision import PRECISION
from shardwise.technique.zero import ZERO_STAGE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PIPELINE_PARALLEL: Setting[int] = Setting(
    "pipeline_parallel",
    default=1,
    doc="ranks among which the blocks are divided, one after the other",
    kind=int,
    minimum=1,
)

PIPELINE_SCHEDULE: Setting[str] = Setting(
    "pipeline_schedule",
    default="1f1b",
    doc="in which order a rank of a pipeline computes: one micro-batch at a time (naive); all forward passes first"
    " (gpipe); a backward pass as soon as there is one (1f1b); that with several stages on each rank (interleaved);"
    " or with backward passes in halves, of which one fills the gaps (zero_bubble); pipedream is never emptied, and"
    " computes gradients by weights that are some updates old: another training than all others",
    choices=("1f1b", "naive", "gpipe", "interleaved", "zero_bubble", "pipedream"),
)

PIPELINE_VERTICAL_SYNC: Setting[bool] = Setting(
    "pipeline_vertical_sync",
    default=False,
    doc="under pipedream: every stage uses the weights of the step that the first stage used for the same micro-batch;"
    " else each stage its newest ones",
    kind=bool,
    choices=(False, True),
)

PIPELINE_STAGES_PER_RANK: Setting[int] = Setting(
    "pipeline_stages_per_rank",
    default=2,
    doc="stages on each rank under the interleaved schedule; the others have one",
    kind=int,
    minimum=2,
)


def stages_per_rank(strategy: Strategy) -> int:
    return strategy[PIPELINE_STAGES_PER_RANK] if strategy[PIPELINE_SCHEDULE] == "interleaved" else 1


def _halved(case: Case) -> bool:
    """Whether backward passes come in two halves."""
    return case.strategy[PIPELINE_PARALLEL] > 1 and case.strategy[PIPELINE_SCHEDULE] == "zero_bubble"


def _endless(case: Case) -> bool:
    """Whether stages are at different steps at the same time."""
    return case.strategy[PIPELINE_PARALLEL] > 1 and case.strategy[PIPELINE_SCHEDULE] == "pipedream"


def _clips(case: Case) -> bool:
    spec = case.recipe.optimizer
    return spec.clip_norm is not None or spec.adaptive_clip is not None


def _rewinds(case: Case) -> bool:
    return case.recipe.guard.rewinds > 0 or case.recipe.guard.snapshot_every is not None


def _dimensions(case: Case) -> Dimensions | None:
    """Of the model, where the recipe says so."""
    model = case.recipe.model
    if model.hf is not None or model.factory is not None:
        return None
    try:
        return dimensions_of(model)
    except RecipeError:
        return None  # which is refused elsewhere


def _blocks(case: Case) -> int | None:
    dimensions = _dimensions(case)
    return None if dimensions is None else dimensions.layers


def _tied(case: Case) -> bool:
    dimensions = _dimensions(case)
    return dimensions is not None and dimensions.tied


def _too_many_stages(case: Case) -> bool:
    blocks, ranks = _blocks(case), case.strategy[PIPELINE_PARALLEL]
    return blocks is not None and ranks > 1 and ranks * stages_per_rank(case.strategy) > blocks


def _fewer_stages(case: Case) -> Mapping[str, object]:
    strategy, blocks = case.strategy, _blocks(case) or 1
    if strategy[PIPELINE_SCHEDULE] == "interleaved" and strategy[PIPELINE_PARALLEL] <= blocks:
        each = blocks // strategy[PIPELINE_PARALLEL]
        return {"pipeline_stages_per_rank": each} if each > 1 else {"pipeline_schedule": "1f1b"}
    others = case.model_ranks // strategy[PIPELINE_PARALLEL]
    fitting = [
        ranks
        for ranks in range(1, strategy[PIPELINE_PARALLEL])
        if ranks * stages_per_rank(strategy) <= blocks and case.world_size % (ranks * others) == 0
    ]
    return {"pipeline_parallel": fitting[-1] if fitting else 1}


def _pipelined(broken: Callable[[Case], bool]) -> Callable[[Case], bool]:
    return lambda case: case.strategy[PIPELINE_PARALLEL] > 1 and broken(case)


def _without_activations(offload: str) -> str:
    return offload.removeprefix("activations").removeprefix("+") or "none"


RULES: tuple[Rule, ...] = (
    divides_world(PIPELINE_PARALLEL),
    Rule(
        key="pipeline_parallel",
        reason="a model from a factory does not say what lies before, within and after its blocks",
        broken=_pipelined(lambda case: case.recipe.model.factory is not None),
        nearest=lambda case: {"pipeline_parallel": 1},
    ),
    Rule(
        key="pipeline_parallel",
        reason="every stage needs a block of the model",
        broken=_too_many_stages,
        nearest=_fewer_stages,
    ),
    Rule(
        key="optimizer_in_backward",
        reason="the first stages of a pipeline would be updated before the last micro-batch's loss is known to be"
        " finite on all of them",
        broken=_pipelined(lambda case: case.strategy[OPTIMIZER_IN_BACKWARD]),
        nearest=lambda case: {"optimizer_in_backward": False},
    ),
    Rule(
        key="offload",
        reason="activations come back from the host in the order of one micro-batch at a time, and a pipeline has"
        " several under way",
        broken=_pipelined(lambda case: "activations" in offloaded(case.strategy)),
        nearest=lambda case: {"offload": _without_activations(case.strategy[OFFLOAD])},
    ),
    Rule(
        key="pipeline_schedule",
        reason="between the halves of a backward pass the weights must stay gathered, and zero_stage 3 frees them",
        broken=lambda case: _halved(case) and case.strategy[ZERO_STAGE] == 3,
        nearest=lambda case: {"pipeline_schedule": "1f1b"},
    ),
    Rule(
        key="pipeline_schedule",
        reason="both halves of a backward pass would recompute the block, which costs more than the bubble",
        broken=lambda case: _halved(case) and case.strategy[ACTIVATION_CHECKPOINTING] != "none",
        nearest=lambda case: {"pipeline_schedule": "1f1b"},
    ),
    Rule(
        key="pipeline_schedule",
        reason="the norm to clip by is that of all stages, which are not at the same step under pipedream",
        broken=lambda case: _endless(case) and _clips(case),
        fix="set optimizer.clip_norm and optimizer.adaptive_clip to null, or take 1f1b",
    ),
    Rule(
        key="pipeline_schedule",
        reason="a rewind takes all stages back together, and they are not at the same step under pipedream",
        broken=lambda case: _endless(case) and _rewinds(case),
        fix="set guard.rewinds to 0 and guard.snapshot_every to null, or take 1f1b",
    ),
    Rule(
        key="pipeline_schedule",
        reason="fp16's loss scale is one for all stages, which are not at the same step under pipedream",
        broken=lambda case: _endless(case) and case.strategy[PRECISION] == "fp16",
        nearest=lambda case: {"precision": "bf16"},
    ),
    Rule(
        key="pipeline_schedule",
        reason="a backward pass of pipedream needs older weights than those that zero_stage 1 and 2 keep gathered",
        broken=lambda case: _endless(case) and case.strategy[ZERO_STAGE] in (1, 2),
        nearest=lambda case: {"zero_stage": 3},
    ),
    Rule(
        key="pipeline_schedule",
        reason="the first and the last stage share the table of a tied model, and pipedream updates them at different"
        " times",
        broken=lambda case: _endless(case) and _tied(case),
        nearest=lambda case: {"pipeline_schedule": "1f1b"},
    ),
    Rule(
        key="pipeline_schedule",
        reason="pipedream's older weights lie beside the newest ones, on the device",
        broken=lambda case: _endless(case) and "parameters" in offloaded(case.strategy),
        nearest=lambda case: {"offload": "optimizer"},
    ),
    Rule(
        key="pipeline_schedule",
        reason="a chunked loss yields the gradients of its input and of its weights together, not in halves",
        broken=lambda case: _halved(case) and case.strategy[LOSS] == "chunked",
        nearest=lambda case: {"pipeline_schedule": "1f1b"},
    ),
)


@dataclass(frozen=True)
class PipelineParallel:
    """Leaves of the model what belongs to this rank's stages."""

    name: str = "pipeline"
    settings: Sequence[Setting[Any]] = (
        PIPELINE_PARALLEL,
        PIPELINE_SCHEDULE,
        PIPELINE_STAGES_PER_RANK,
        PIPELINE_VERTICAL_SYNC,
    )
    rules: Sequence[Rule] = RULES

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        return {"pipeline": strategy[PIPELINE_PARALLEL]}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        if strategy[PIPELINE_PARALLEL] == 1:
            return ""
        schedule, each = strategy[PIPELINE_SCHEDULE], stages_per_rank(strategy)
        return f"pp{strategy[PIPELINE_PARALLEL]} {schedule}" + (f"×{each}" if each > 1 else "")

    def apply(self, site: Site) -> None:
        ranks, each = site.strategy[PIPELINE_PARALLEL], stages_per_rank(site.strategy)
        if ranks == 1:
            return
        import torch

        from shardwise.model.parts import Parts, cut

        rank = site.mesh["pipeline"].get_local_rank()
        stages = cut(site.blueprint, ranks * each, site.recipe.data.sequence_length)
        held = {
            stage: part.shortened(site.depth) for stage, part in enumerate(stages) if stage % ranks == rank
        }
        with torch.device("meta"):
            models = [site.blueprint.part(part) for part in held.values()]
        site.parts, site.model = models, Parts(models).train()
        site.units = [unit for model in models for unit in site.blueprint.units(model)]
        site.head = site.blueprint.head(models[-1]) if stages[-1] in held.values() else []
        site.output = site.blueprint.output(models[-1])
        schedule, channels = site.strategy[PIPELINE_SCHEDULE], _channels(site, ranks, each)
        blocks = tuple(len(stage.blocks) for stage in stages)
        site.pipeline = Pipeline(schedule, ranks, each, rank, held, blocks, channels)
        if schedule == "pipedream":
            _refuse_tied(site)
            sync = site.strategy[PIPELINE_VERTICAL_SYNC]
            site.pipeline = replace(site.pipeline, stage_group=_stage(site), vertical_sync=sync)
        if tied := site.blueprint.tied():
            group = _ends(site, ranks)  # made by all ranks together
            if rank in (0, ranks - 1):
                site.pipeline = replace(site.pipeline, tied=tied, tied_group=group)
        site.notes += _notes(site, blocks)


def _channels(site: Site, ranks: int, each: int) -> dict[Channel, ProcessGroup]:
    """A group for every channel that the schedule uses: hidden states take the mesh's own.

    Not another mesh's: of a pipeline that is the whole world every mesh has the one default group.
    """
    import torch.distributed as dist

    channels = {(True, False): site.mesh["pipeline"].get_group()}
    stride = site.layout.stride("pipeline")
    for channel in ((False, False), *(((True, True), (False, True)) if each > 1 else ())):
        lines = [[place + stage * stride for stage in range(ranks)] for place in range(stride)]
        groups = [dist.new_group(line) for line in lines]  # made by all ranks together
        channels[channel] = groups[dist.get_rank() % stride]
    return channels


def _stage(site: Site) -> ProcessGroup:
    """The ranks that share out or copy this rank's stages."""
    axes = tuple(axis for axis in site.mesh.mesh_dim_names or () if axis != "pipeline")
    return site.mesh[axes]._flatten("stage").get_group()


def _refuse_tied(site: Site) -> None:
    """Raise RecipeError where two stages, which are at different steps, share parameters.

    Of a native decoder a rule says so first; a model of transformers tells only when it is built.
    """
    if tied := site.blueprint.tied():
        raise RecipeError(
            "pipeline_schedule cannot be pipedream for this model",
            where="strategy.pipeline_schedule",
            why=f"its first and last stage share {tied[0]}, and update it at different times",
            fix="take 1f1b, or a model whose head is its own",
        )


def _ends(site: Site, ranks: int) -> ProcessGroup | None:
    """The first and the last rank of this rank's pipeline; None on a rank between them."""
    import torch.distributed as dist

    stride = site.layout.stride("pipeline")
    groups = [dist.new_group([place, place + (ranks - 1) * stride]) for place in range(stride)]
    at_an_end = site.mesh["pipeline"].get_local_rank() in (0, ranks - 1)
    return groups[dist.get_rank() % stride] if at_an_end else None


def _notes(site: Site, blocks: Sequence[int]) -> list[str]:
    """How the model is cut, and how long its ranks wait where they have too little to do."""
    from shardwise.technique import micro_batches

    count = micro_batches(site.strategy, site.layout, site.recipe.batch_size)
    pipeline = site.pipeline
    assert pipeline is not None
    notes = [f"blocks of the stages, by what they compute: {', '.join(map(str, blocks))}"]
    if count < pipeline.ranks:
        lists = orders(pipeline.schedule, pipeline.ranks, pipeline.stages_per_rank, count)
        bubble = play(lists, lambda action: 2.0 if action.kind == "B" else 1.0).bubble
        notes.append(
            f"{count} micro-batches do not fill {pipeline.ranks} ranks: they wait for {bubble:.0%} of the time;"
            " a smaller micro_batch_size or a larger batch helps"
        )
    return notes
