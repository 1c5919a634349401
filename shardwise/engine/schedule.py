"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no scheduler state.

Warmup is linear and counts steps from 1, so that the first update is not wasted on a rate of zero. A decay would reach
``floor`` times the peak one step after the last, so that the last update is not wasted either where ``floor`` is 0.
From the end of the warmup on, cosine (Loshchilov & Hutter 2017) and linear decay are those of transformers' schedulers.

Warmup-stable-decay (``wsd``; Hu et al. 2024, MiniCPM, arXiv 2404.06395) stays at the peak and falls towards
``floor`` over its last ``decay`` steps. Before those, its rate does not depend on how long the run is, so one
stable run can be branched into runs of any length (``checkpoint.start_from``). After the part t of the decay,
the share of the way that is left is, by ``decay_shape``:

    sqrt    1 - sqrt(t)           Hägele et al. 2024 (arXiv 2405.18392): better than the others at every
                                  length and size they tried, so it is the default
    linear  1 - t                 the same paper's baseline; Bergsma et al. 2025 (arXiv 2502.15938) for decays to 0
    cosine  (1 + cos(pi t)) / 2   half a cosine, as in ``transformers.get_wsd_schedule``
"""

from __future__ import annotations

import math

from shardwise.core.errors import RecipeError
from shardwise.core.user_objects import resolve
from shardwise.recipe.lr_scaling import scaled
from shardwise.recipe.sections import Recipe, ScheduleSpec


def learning_rate(recipe: Recipe, step: int) -> float:
    """The rate of update number ``step`` (0-based): the peak that the batch size asks for, times the schedule."""
    return scaled(recipe).learning_rate * multiplier(recipe.schedule, step, recipe.steps)


def multiplier(schedule: ScheduleSpec, step: int, steps: int) -> float:
    """The factor on the peak learning rate for the update number ``step`` (0-based) of ``steps``.

    Raises RecipeError if the recipe's function cannot be imported, fails or returns no fraction of the peak.
    """
    if schedule.factory is not None:
        return _factor_of_user(schedule.factory, step, steps)
    if step < (warmup := schedule.warmup_steps(steps)):
        return (step + 1) / warmup
    start = schedule.decay_start(steps)
    # The part of the decay that is done. ``max(1, ...)``: a run that is all warmup has no decay.
    done = min(1.0, max(0, step - start) / max(1, steps - start))
    return schedule.floor + (1 - schedule.floor) * _SHAPES[schedule.shape](done)


def _factor_of_user(target: str, step: int, steps: int) -> float:
    """The factor by a user's function."""
    function = resolve(target, "schedule.factory")
    try:
        factor = float(function(step, steps))
        if not 0 <= factor < math.inf:  # also false for NaN
            raise ValueError(f"{factor:g} is no fraction of the peak learning rate")
        return factor
    except Exception as error:  # the user's code
        why = f"{type(error).__name__}: {error}"
        raise RecipeError(
            f"the schedule failed at step {step}",
            where=f"schedule.factory: {target}",
            why=why,
            fix="it is called with the step, from 0, and the number of steps, and returns a number of at least 0",
        ) from error


_SHAPES = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "sqrt": lambda done: 1 - math.sqrt(done),
}
"""Fraction of the range from floor to peak after the part ``done`` of the decay: from 1 to 0."""
