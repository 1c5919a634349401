"""Pipeline parallelism: each rank holds consecutive blocks, and micro-batches pass from rank to rank.

A rank builds only its own stages, under the tensor names of the whole model. So seeds, weight files and checkpoints do
not depend on the stages (model/stage.py, model/balance.py). The order of passes is one of the schedules in
core/pipeline/schedule.py; engine/pipeline/ executes it. Other techniques see a model of fewer blocks: ZeRO shards a
stage over the ranks that hold it, checkpointing wraps its blocks, and the last stage computes the loss.

Micro-batches are those of gradient accumulation. With fewer than stages, the plan says how long ranks wait.

    schedule      in flight on rank s of p, of M     weights between passes
    naive         1                                  as with ZeRO
    gpipe         M                                  as with ZeRO
    1f1b          min(M, p - s)                      as with ZeRO
    interleaved   min(M v, (v-1) p + 2 (p-s) - 1)    as with ZeRO; v stages per rank, each 1/v as large
    zero_bubble   min(M, p)                          gathered from the first to the last pass
    pipedream     p - s                              as with ZeRO 0 or 3, and older ones (a plugin)

The first and the last stage both hold a tied table. Its gradient is summed over both before the update.
Refused: the runtime of torch.distributed.pipelining (see engine/pipeline/executor.py), and models from a factory, which
do not say what comes before, within and after their blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.core.errors import RecipeError
from shardwise.core.pipeline.schedule import orders, play
from shardwise.core.strategy import Layout, Setting, Strategy
from shardwise.technique.base import (
    MICRO_BATCH_SIZE,
    MOST_PASSES,
    Dividing,
    divides_world,
    divisors,
)
from shardwise.technique.checkpointing import ACTIVATION_CHECKPOINTING
from shardwise.technique.chunked_loss import LOSS
from shardwise.technique.in_backward import OPTIMIZER_IN_BACKWARD
from shardwise.technique.offload import OFFLOAD
from shardwise.technique.offload import parts as offloaded
from shardwise.technique.pipeline.compiled import COMPILED_RULES
from shardwise.technique.pipeline.place import PIPELINE_AXIS, Channel, Pipeline, stretch_of
from shardwise.technique.pipeline.settings import PIPELINE_PARALLEL as PIPELINE_PARALLEL
from shardwise.technique.pipeline.settings import PIPELINE_SCHEDULE as PIPELINE_SCHEDULE
from shardwise.technique.pipeline.settings import PIPELINE_STAGES_PER_RANK as PIPELINE_STAGES_PER_RANK
from shardwise.technique.pipeline.settings import PIPELINE_VERTICAL_SYNC as PIPELINE_VERTICAL_SYNC
from shardwise.technique.pipeline.settings import stages_per_rank as stages_per_rank
from shardwise.technique.place import Stretch
from shardwise.technique.precision import PRECISION
from shardwise.technique.rules import Case, Rule
from shardwise.technique.site import Context, Site, StageView
from shardwise.technique.zero import ZERO_STAGE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shardwise.model.stage import Stage


def _halved(case: Case) -> bool:
    """Whether backward passes come in two halves."""
    return case.strategy[PIPELINE_PARALLEL] > 1 and case.strategy[PIPELINE_SCHEDULE] == "zero_bubble"


def _endless(case: Case) -> bool:
    """Whether stages are at different steps at the same time."""
    return case.strategy[PIPELINE_PARALLEL] > 1 and case.strategy[PIPELINE_SCHEDULE] == "pipedream"


def _rewinds(case: Case) -> bool:
    return case.recipe.guard.rewinds > 0 or case.recipe.guard.snapshot_every is not None


def _block_count(case: Case) -> int | None:
    return None if case.dimensions is None else case.dimensions.layers


def _tied(case: Case) -> bool:
    return case.dimensions is not None and case.dimensions.tied


def _too_many_stages(case: Case) -> bool:
    blocks = _block_count(case)
    ranks = case.strategy[PIPELINE_PARALLEL]
    return blocks is not None and ranks > 1 and ranks * stages_per_rank(case.strategy) > blocks


def _fewer_stages(case: Case) -> Mapping[str, object]:
    strategy = case.strategy
    blocks = _block_count(case) or 1
    if strategy[PIPELINE_SCHEDULE] == "interleaved" and strategy[PIPELINE_PARALLEL] <= blocks:
        per_rank = blocks // strategy[PIPELINE_PARALLEL]
        return {"pipeline_stages_per_rank": per_rank} if per_rank > 1 else {"pipeline_schedule": "1f1b"}
    others = case.model_ranks // strategy[PIPELINE_PARALLEL]
    fitting = [
        ranks
        for ranks in range(1, min(strategy[PIPELINE_PARALLEL], case.world_size + 1))
        if ranks * stages_per_rank(strategy) <= blocks and case.world_size % (ranks * others) == 0
    ]
    return {"pipeline_parallel": fitting[-1] if fitting else 1}


def _passes(case: Case) -> int:
    """Micro-batches of a rank in one step, where the recipe says their size."""
    size = case.recipe.strategy.get(MICRO_BATCH_SIZE.key)
    return 0 if size is None else -(-case.recipe.batch_size // (size * case.data_ranks))


def _pipelined(broken: Callable[[Case], bool]) -> Callable[[Case], bool]:
    return lambda case: case.strategy[PIPELINE_PARALLEL] > 1 and broken(case)


def _without_activations(offload: str) -> str:
    return offload.removeprefix("activations").removeprefix("+") or "none"


RULES: tuple[Rule, ...] = (
    divides_world(PIPELINE_PARALLEL),
    Rule(
        key="micro_batch_size",
        reason=f"the schedule of a pipeline lists its micro-batches, at most {MOST_PASSES:,} in a step",
        broken=_pipelined(lambda case: _passes(case) > MOST_PASSES),
        nearest=lambda case: {
            "micro_batch_size": -(-case.recipe.batch_size // (MOST_PASSES * case.data_ranks))
        },
    ),
    Rule(
        key="pipeline_parallel",
        reason="a model from a factory does not declare the modules before, within and after its blocks",
        broken=_pipelined(lambda case: case.recipe.model.factory is not None),
        nearest=lambda case: {"pipeline_parallel": 1},
    ),
    Rule(
        key="pipeline_parallel",
        reason="evaluation.noise_scale compares gradients of single micro-batches, and stages pass several at once",
        broken=_pipelined(lambda case: case.recipe.evaluation.noise_scale),
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
        broken=lambda case: _endless(case) and case.clips,
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
        reason="a reference, and measures of a whole step, need all stages at the same step",
        broken=lambda case: _endless(case) and case.recipe.samples != case.recipe.model.objective,
        nearest=lambda case: {"pipeline_schedule": "1f1b"},
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
        reason="pipedream keeps older weights with the newest ones, on the device",
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


class PipelineParallel(Dividing):
    """Leaves of the model the blocks of this rank's stages."""

    name = "pipeline"
    axes = (PIPELINE_AXIS,)
    settings = (PIPELINE_PARALLEL, PIPELINE_SCHEDULE, PIPELINE_STAGES_PER_RANK, PIPELINE_VERTICAL_SYNC)
    rules = (*RULES, *COMPILED_RULES)

    def candidates(self, setting: Setting[Any], case: Case) -> Sequence[object]:
        """Naive and gpipe take longer than 1f1b or hold more; pipedream computes another training."""
        if setting is PIPELINE_PARALLEL:
            return divisors(case.world_size, _block_count(case) or 1)
        if setting is not PIPELINE_SCHEDULE or case.strategy[PIPELINE_PARALLEL] == 1:
            return ()
        allowed = [name for name in ("pipedream",) if name in case.recipe.plan.allow]
        return ("1f1b", "interleaved", "zero_bubble", *allowed)

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        return {PIPELINE_AXIS.name: strategy[PIPELINE_PARALLEL]}

    def stretch(self, strategy: Strategy, micro_batches: int) -> Stretch:
        ranks = strategy[PIPELINE_PARALLEL]
        per_rank = stages_per_rank(strategy)
        return stretch_of(strategy[PIPELINE_SCHEDULE], ranks, per_rank, micro_batches)

    def label(self, strategy: Strategy, layout: Layout) -> str:
        if strategy[PIPELINE_PARALLEL] == 1:
            return ""
        schedule = strategy[PIPELINE_SCHEDULE]
        per_rank = stages_per_rank(strategy)
        return f"pp{strategy[PIPELINE_PARALLEL]} {schedule}" + (f"×{per_rank}" if per_rank > 1 else "")

    def apply(self, site: Site) -> None:
        ranks = site.strategy[PIPELINE_PARALLEL]
        per_rank = stages_per_rank(site.strategy)
        if ranks == 1:
            return
        from shardwise.model.balance import balanced_stages, kinds_of

        context = site.context
        rank = context.mesh[PIPELINE_AXIS.name].get_local_rank()
        stages = balanced_stages(context.blueprint, ranks * per_rank, context.recipe.data.sequence_length)
        own_stages = {
            number: stage.shortened(context.depth)
            for number, stage in enumerate(stages)
            if number % ranks == rank
        }
        _keep_stages(site, list(own_stages.values()))
        endless = site.strategy[PIPELINE_SCHEDULE] == "pipedream"
        if endless:
            _refuse_tied(context)
        tied = context.blueprint.tied()
        tied_group = _ends(context, ranks) if tied else None  # made by all ranks together
        pipeline = Pipeline(
            schedule=site.strategy[PIPELINE_SCHEDULE],
            ranks=ranks,
            stages_per_rank=per_rank,
            rank=rank,
            held=own_stages,
            blocks=tuple(len(stage.blocks) for stage in stages),
            channels=_channels(context, ranks, per_rank),
            tied=tied if tied_group is not None else (),
            tied_group=tied_group,
            stage_group=_stage(context) if endless else None,
            vertical_sync=endless and site.strategy[PIPELINE_VERTICAL_SYNC],
            kinds=kinds_of(context.blueprint, stages),
        )
        site.options.place = pipeline
        site.options.groups += [(PIPELINE_AXIS.name, group) for group in pipeline.channels.values()]
        site.hints.note(*_notes(context, pipeline))


def _keep_stages(site: Site, stages: Sequence[Stage]) -> None:
    """Put this rank's stages in the place of the whole model."""
    import torch

    from shardwise.model.stage import Stages

    blueprint = site.context.blueprint
    view = site.view
    with torch.device("meta"):
        models = [blueprint.stage(stage) for stage in stages]
    view.model = Stages(models).train()
    view.stages = [
        StageView(model, blueprint.blocks(model), stage.first, stage.last)
        for model, stage in zip(models, stages, strict=True)
    ]
    view.head = blueprint.head(models[-1]) if stages[-1].last else []
    view.output = blueprint.output(models[-1])


def _channels(context: Context, ranks: int, per_rank: int) -> dict[Channel, ProcessGroup]:
    """A group for every channel that the schedule uses: hidden states take the mesh's own.

    Not another mesh's: of a pipeline that is the whole world every mesh has the one default group.
    """
    import torch.distributed as dist

    channels = {(True, False): context.mesh[PIPELINE_AXIS.name].get_group()}
    stride = context.layout.stride(PIPELINE_AXIS)
    for channel in ((False, False), *(((True, True), (False, True)) if per_rank > 1 else ())):
        lines = [[offset + stage * stride for stage in range(ranks)] for offset in range(stride)]
        groups = [dist.new_group(line) for line in lines]  # made by all ranks together
        channels[channel] = groups[dist.get_rank() % stride]
    return channels


def _stage(context: Context) -> ProcessGroup:
    """The ranks that share out or copy this rank's stages."""
    from shardwise.runtime.torch_private import flattened

    axes = tuple(axis for axis in context.mesh.mesh_dim_names or () if axis != PIPELINE_AXIS.name)
    return flattened(context.mesh[axes], "stage").get_group()


def _refuse_tied(context: Context) -> None:
    """Raise RecipeError where two stages, which are at different steps, share parameters.

    Of a native decoder a rule says so first; a model of transformers tells only when it is built.
    """
    if tied := context.blueprint.tied():
        raise RecipeError(
            "pipeline_schedule cannot be pipedream for this model",
            where="strategy.pipeline_schedule",
            why=f"its first and last stage share {tied[0]}, and update it at different times",
            fix="take 1f1b, or a model whose head is its own",
        )


def _ends(context: Context, ranks: int) -> ProcessGroup | None:
    """The first and the last rank of this rank's pipeline; None on a rank between them."""
    import torch.distributed as dist

    stride = context.layout.stride(PIPELINE_AXIS)
    groups = [dist.new_group([offset, offset + (ranks - 1) * stride]) for offset in range(stride)]
    at_an_end = context.mesh[PIPELINE_AXIS.name].get_local_rank() in (0, ranks - 1)
    return groups[dist.get_rank() % stride] if at_an_end else None


def _notes(context: Context, pipeline: Pipeline) -> list[str]:
    """How the model is cut, and how long its ranks wait where they have too little to do."""
    count = context.micro_batches
    notes = [f"blocks of the stages, balanced by FLOPs: {', '.join(map(str, pipeline.blocks))}"]
    if count < pipeline.ranks:
        lists = orders(pipeline.schedule, pipeline.ranks, pipeline.stages_per_rank, count)
        # A backward pass takes about twice the time of a forward pass.
        bubble = play(lists, lambda action: 2.0 if action.kind == "B" else 1.0).bubble
        notes.append(
            f"{count} micro-batches do not fill {pipeline.ranks} ranks: they wait for {100 * bubble:.0f} % of the"
            " time; a smaller micro_batch_size or a larger batch helps"
        )
    return notes
