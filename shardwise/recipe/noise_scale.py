"""The gradient noise scale: the batch size at which noise and gradient are equally large, and the advice from it.

McCandlish et al. 2018, An Empirical Model of Large-Batch Training, arXiv 1812.06162. A batch of B tokens has a gradient
with E|G_B|^2 = |G|^2 + S / B, so two batch sizes give |G|^2 and S (appendix A.1), and B_noise = S / |G|^2. Both are
averaged over measurements before they are divided, because the ratio of two noisy estimates is biased.

With a batch of B tokens, a loss takes 1 + B / B_noise times the fewest tokens, and 1 + B_noise / B times the fewest
steps (equation 2.7). Up to B_noise the learning rate grows with the batch: with its square root for Adam (Malladi et
al. 2022, arXiv 2205.10287), linearly for SGD (Goyal et al. 2017, arXiv 1706.02677). Near B_noise the best rate of Adam
peaks, and then it falls (Li et al. 2024, arXiv 2405.14578), so no larger batch is advised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.errors import RecipeError
from shardwise.core.run_files import GradientNoise
from shardwise.core.units import format_count
from shardwise.recipe.lr_scaling import scaled
from shardwise.recipe.optimizer_factory import is_adaptive, optimizer_label
from shardwise.recipe.sections import Recipe, ScalingSpec

LATE = 0.5
"""Share of the measurements, the last ones, that count: the noise scale grows while the loss falls."""
NEAR_FACTOR = 2.0
"""A batch size within this factor of the noise scale is left as it is."""


@dataclass(frozen=True)
class NoiseScale:
    """Estimates from several measurements.

    Attributes:
        tokens: B_noise.
        gradient: |G|^2, the square of the gradient without noise.
        variance: S, the trace of the covariance of one token's gradient.
        measurements: how many were averaged.
        batch_tokens: mean targets of the batches that were measured, fewer than positions where prompts are left out.
    """

    tokens: float
    gradient: float
    variance: float
    measurements: int
    batch_tokens: float


def noise_scale(measured: Sequence[GradientNoise]) -> NoiseScale | None:
    """The noise scale of the last half of the measurements; None where noise hides the gradient, or without any."""
    late = list(measured)[int(LATE * len(measured)) :]
    gradients, variances, sizes = [], [], []
    for pair in late:
        small, big = pair.micro_batch_tokens, pair.batch_tokens
        overflowed = not math.isfinite(
            pair.micro_batch_square + pair.batch_square
        )  # of scaled fp16 gradients
        if big > small > 0 and not overflowed:
            sizes.append(big)
            gradients.append((big * pair.batch_square - small * pair.micro_batch_square) / (big - small))
            variances.append((pair.micro_batch_square - pair.batch_square) / (1 / small - 1 / big))
    if not gradients:
        return None
    gradient, variance = math.fsum(gradients) / len(gradients), math.fsum(variances) / len(variances)
    if gradient <= 0 or variance <= 0:
        return None
    return NoiseScale(variance / gradient, gradient, variance, len(gradients), math.fsum(sizes) / len(sizes))


def batch_sentences(
    noise: NoiseScale, recipe: Recipe, tokens: float, words: tuple[str, str] = ("tokens", "sequences")
) -> list[str]:
    """What the noise scale says of the recipe's batch size, and the overrides to change it by.

    Args:
        tokens: targets of one optimizer step.
        words: the names of those, and of the rows that ``batch_size`` counts.
    """
    counted, rows = words
    ratio = noise.tokens / tokens
    sequences = ratio * recipe.batch_size
    said = [
        f"gradient noise scale: {format_count(noise.tokens)} {counted}, {sequences:.3g} {rows}"
        f" (mean of {noise.measurements} measurements)",
        f"batch_size {recipe.batch_size} takes {1 + 1 / ratio:.3g} times the fewest {counted} and {1 + ratio:.3g}"
        " times the fewest steps to a loss",
    ]
    if 1 / NEAR_FACTOR <= ratio <= NEAR_FACTOR:
        return [*said, "it is near the noise scale: keep it"]
    batch = 2 ** max(0, math.floor(math.log2(sequences))) if sequences >= 1 else 1
    change = "fewer steps" if ratio > 1 else f"fewer {counted}"
    return [*said, f"for {change}: {_overrides(recipe, batch)}"]


def _overrides(recipe: Recipe, batch: int) -> str:
    """The recipe's keys for another batch size with the learning-rate rule of its optimizer."""
    spec = recipe.optimizer
    scaling = recipe.optimizer.scale_learning_rate
    keys = f"batch_size={batch}"
    if scaling is None:
        adaptive = is_adaptive(spec)
        keys += f" optimizer.scale_learning_rate.from_batch={recipe.batch_size}"
        if adaptive is None:
            return (
                f"{keys}, with rule=sqrt if {optimizer_label(spec)} is of Adam's kin, rule=linear if of SGD's"
            )
        scaling = ScalingSpec(from_batch=recipe.batch_size, rule="sqrt" if adaptive else "linear")
        keys += f" optimizer.scale_learning_rate.rule={scaling.rule}"
    optimizer = spec.model_copy(update={"scale_learning_rate": scaling})
    try:
        rate = scaled(recipe.model_copy(update={"batch_size": batch, "optimizer": optimizer})).learning_rate
    except RecipeError as error:
        return f"batch_size={batch}, but {error.what}: {error.why}; {error.fix}"
    return f"{keys} (learning rate {rate:.3g})"
