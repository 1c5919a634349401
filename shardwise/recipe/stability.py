"""What a run does about overflows, spikes and bad batches: `loss_scale:`, `guard:` and `optimizer.adaptive_clip:`."""

from typing import Annotated, Literal

from pydantic import Field

from shardwise.recipe.section import Count, Section


class LossScaleSpec(Section):
    """Loss scaling in fp16; other precisions do not use it."""

    dynamic: bool = True
    """dynamic loss scaling; false keeps the initial scale"""
    initial: Annotated[float, Field(gt=0, le=2.0**60)] = 65536.0
    """scale of the first step"""
    growth_interval: Count = 2000
    """steps without an overflow before the scale grows"""
    growth: Annotated[float, Field(ge=1, le=1e6)] = 2.0
    """growth factor"""
    backoff: Annotated[float, Field(gt=0, le=1)] = 0.5
    """factor on an overflow"""
    floor: Annotated[float, Field(gt=0, le=2.0**60)] = 1.0
    """minimum scale"""
    hysteresis: Count = 2
    """overflows after the last growth before the scale shrinks"""


class GuardSpec(Section):
    """Detection of loss spikes and bad batches, and rewinding."""

    threshold: Annotated[float, Field(gt=0, le=1e6)] = 8.0
    """spike threshold: robust standard deviations of a loss or gradient norm above the median of recent steps"""
    window: Annotated[int, Field(ge=8, le=100_000)] = 64
    """recent steps to compare with; no spikes are detected before this many steps"""
    snapshot_every: Count | None = None
    """optimizer steps between snapshots of weights and optimizer state in host memory; a spike rewinds to one of the
    last two. null takes no snapshots, and a spike rewinds to the last checkpoint, if any"""
    rewinds: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    """maximum number of rewinds; the run fails at the next spike"""
    skips: Count = 5
    """maximum number of consecutive skipped updates; overflows while fp16's loss scale is found do not count"""


class AdaptiveClipSpec(Section):
    """Adaptive gradient clipping."""

    z: Annotated[float, Field(gt=0, le=1e6)]
    """clip gradient norms above the running mean plus this many standard deviations"""
    mode: Literal["zclip", "cap"] = "zclip"
    """zclip (ZClip): the higher the norm, the closer to the mean it is clipped; cap: clip to the threshold itself"""
