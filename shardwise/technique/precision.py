"""Mixed precision: the dtypes in which weights are stored, computed with, and gradients reduced.

16-bit compute keeps fp32 master weights, which are sharded and updated. The 16-bit copy exists only while a layer is
gathered (Micikevicius et al. 2018; FSDP2's mixed-precision policy). Gradients are summed over ranks and micro-batches
in fp32, or over micro-batches in bf16 with bf16 weights alone and ZeRO 2 or 3, as FSDP2 stores them. The loss is
computed in fp32, and so are norm layers, within their kernels. fp16 has too narrow a range for gradients and sums, so
its loss is scaled (engine/loss_scale.py).

Settings trade this for memory or traffic. ``master_weights: false`` stores bf16 weights alone and rounds their updates
stochastically (engine/optim/rounding.py): 2 bytes per parameter instead of 4, and no second copy of gradients in fp32.
``reduce_dtype: compute`` halves the gradient traffic, and loses small gradients in sums over thousands of ranks.
``buffer_dtype: compute`` narrows buffers such as rotary tables.

Refused: autocast, which keeps a 16-bit copy of every weight from forward to backward and decides per operation; and
fp16 weights without master weights, whose updates vanish below 1/2048 of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.core.strategy import Layout, Setting, Strategy
from shardwise.technique.base import STATES, Wrapping
from shardwise.technique.rules import Case, Rule
from shardwise.technique.site import Dtypes, Site

if TYPE_CHECKING:
    import torch
    from torch import nn

PRECISION: Setting[str] = Setting(
    "precision",
    default="fp32",
    doc="mixed precision, the dtype of compute: fp32; bf16 or fp16 with fp32 master weights; fp8 for large matmuls and"
    " bf16 for the rest; or fp64 for proofs",
    choices=("fp32", "bf16", "fp16", "fp8", "fp64"),
    compared=("bf16", "fp16", "fp8"),
    alike=("bf16", "fp16"),
    units={"fp8": "fp8"},
)
MASTER_WEIGHTS: Setting[bool] = Setting(
    "master_weights",
    default=True,
    doc="fp32 master weights with bf16 compute; false stores only bf16 weights, updated with stochastic rounding",
    kind=bool,
    choices=(True, False),
    compared=(True, False),
)
REDUCE_DTYPE: Setting[str] = Setting(
    "reduce_dtype",
    default="fp32",
    doc="dtype of the gradients' reduce-scatter or all-reduce: fp32, or the compute dtype",
    choices=("fp32", "compute"),
)
BUFFER_DTYPE: Setting[str] = Setting(
    "buffer_dtype",
    default="fp32",
    doc="dtype of floating-point buffers, such as RoPE tables: fp32, or the compute dtype",
    choices=("fp32", "compute"),
)
HALF = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
"""The 16-bit dtype of compute, of precisions that have one."""

RULES: tuple[Rule, ...] = (
    Rule(
        key="master_weights",
        reason="only bf16 weights can be stored alone: fp16 loses their updates, wider dtypes are their own masters",
        broken=lambda case: (
            not case.strategy[MASTER_WEIGHTS] and HALF.get(case.strategy[PRECISION]) != "bf16"
        ),
        nearest=lambda case: {"master_weights": True},
    ),
    Rule(
        key="reduce_dtype",
        reason="there is nothing to narrow: compute is no narrower than fp32",
        broken=lambda case: case.strategy[REDUCE_DTYPE] == "compute" and case.strategy[PRECISION] not in HALF,
        nearest=lambda case: {"reduce_dtype": "fp32"},
    ),
    Rule(
        key="buffer_dtype",
        reason="there is nothing to narrow: compute is no narrower than fp32",
        broken=lambda case: case.strategy[BUFFER_DTYPE] == "compute" and case.strategy[PRECISION] not in HALF,
        nearest=lambda case: {"buffer_dtype": "fp32"},
    ),
)


def casts_weights(strategy: Strategy) -> bool:
    """Whether trained weights are stored in another dtype than they are computed in."""
    return strategy[MASTER_WEIGHTS] and strategy[PRECISION] in HALF


class Precision(Wrapping):
    """Sets the dtypes that the techniques after it use."""

    name = "precision"
    on_frozen = True
    rounds = True
    settings = (PRECISION, MASTER_WEIGHTS, REDUCE_DTYPE, BUFFER_DTYPE)
    rules = RULES

    def within(self, strategy: Strategy, part: str | None) -> Mapping[str, object]:
        """Weights are stored where the states are; the other settings change everything."""
        own = super().within(strategy, part)
        return own if part == STATES else {**own, MASTER_WEIGHTS.key: MASTER_WEIGHTS.default}

    def candidates(self, setting: Setting[Any], case: Case) -> Sequence[object]:
        """Digits are the recipe's to choose, unless it allows the planner 8-bit products."""
        allowed = setting is PRECISION and "fp8" in case.recipe.plan.allow
        return (setting.default, "fp8") if allowed else ()

    def label(self, strategy: Strategy, layout: Layout) -> str:
        words = [strategy[PRECISION]]
        if not strategy[MASTER_WEIGHTS]:
            words.append(
                "weights alone" if HALF[strategy[PRECISION]] == strategy[PRECISION] else "bf16 weights"
            )
        if strategy[REDUCE_DTYPE] == "compute":
            words.append(f"{HALF[strategy[PRECISION]]} reduction")
        if strategy[BUFFER_DTYPE] == "compute":
            words.append(f"{HALF[strategy[PRECISION]]} buffers")
        return " ".join(words)

    def apply(self, site: Site) -> None:
        import torch

        from shardwise.runtime.accumulation import accumulation_dtype
        from shardwise.runtime.torch_private import cast_floats

        compute = {
            "fp32": torch.float32,
            "bf16": torch.bfloat16,
            "fp16": torch.float16,
            "fp8": torch.bfloat16,  # but for the layers of technique/float8.py
            "fp64": torch.float64,
        }[site.strategy[PRECISION]]
        wide = accumulation_dtype(compute)
        storage = wide if site.strategy[MASTER_WEIGHTS] else compute
        site.options.dtypes = Dtypes(
            storage=storage,
            compute=compute,
            reduce=wide if site.strategy[REDUCE_DTYPE] == "fp32" else compute,
            loss_scaled=compute == torch.float16,
        )
        if compute == torch.float16 and site.context.blueprint.trained_in == torch.bfloat16:
            site.hints.note(
                "the weights were trained in bf16; activations may exceed fp16's range of 65,504: bf16 is safer"
            )
        cast_floats(site.view.model, storage)
        if compute != storage:
            _narrow_frozen(site.view.model, compute)
        table = wide if site.strategy[BUFFER_DTYPE] == "fp32" else compute
        for module in site.view.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(table))


def _narrow_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Store frozen weights in the compute dtype: they need no wider copy."""
    from torch import nn

    narrow: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad or not parameter.is_floating_point():
                continue
            if parameter not in narrow:
                narrow[parameter] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
            module._parameters[name] = narrow[parameter]
