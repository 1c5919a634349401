"""The memory of serving a model, counted without an accelerator: ``shardwise plan --serve``.

The decoding steps of serve/ run on fake tensors: the model as it is stored, the first pass over the prompts, and one
token with a full key-value cache. So a quantized model, a model of transformers with its own cache and the native
decoder are counted by the code that serves them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.run_folder import RECIPE, require_base_in_place
from shardwise.core.errors import RecipeError, ResourceError
from shardwise.core.units import format_bytes
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.jobs.request import read_request
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe

if TYPE_CHECKING:
    from torch import nn

    from shardwise.model.blueprint import Blueprint

_CONFIG = "config.json"

MOST_REQUESTS = 1024
"""Requests at a time that are counted at most."""


@dataclass(frozen=True)
class ServingPlan:
    """Bytes on one device that answers ``batch`` requests at a time.

    Attributes:
        context: tokens of each request, with its answer. prompt: tokens that are read in one pass.
        weights: parameters and buffers as they are held: packed where the model is quantized.
        cache: keys and values of all tokens.
        activations: all other tensors at the peak, such as logits and dequantized weights.
        overhead: context and workspaces of the device's profile.
        when: of the peak, prompt or token.
        most_requests: of this context that fit at a time, up to MOST_REQUESTS; 0 if not even one does.
    """

    device: str
    precision: str
    batch: int
    context: int
    prompt: int
    weights: int
    cache: int
    activations: int
    overhead: int
    when: str
    capacity_bytes: int
    most_requests: int

    @property
    def peak_bytes(self) -> int:
        return self.weights + self.cache + self.activations + self.overhead

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.capacity_bytes

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "peak_bytes": self.peak_bytes, "fits": self.fits}


def served_recipe(path: Path, overrides: Sequence[str]) -> tuple[Recipe, Cluster]:
    """The model and the cluster of a recipe's file, of a run's folder, or of a model's folder.

    Raises RecipeError.
    """
    if (path / RECIPE).is_file():
        recipe, cluster = read_request(path / RECIPE, overrides, modules=False)
        require_base_in_place(path, recipe)
        return recipe, cluster
    if not (path / _CONFIG).is_file():
        return read_request(path, overrides)
    values: dict[str, Any] = {
        "model": {"hf": str(path)},
        "data": {"sequence_length": 1},
        "steps": 1,
        "batch_size": 1,
    }
    values["adapter"] = {}  # its weights are frozen, so quantized ones stay packed
    recipe = recipe_of(values, overrides=overrides)
    return recipe, cluster_of(recipe.cluster)


def plan_serving(
    recipe: Recipe,
    cluster: Cluster,
    *,
    precision: str = "fp32",
    context: int | None = None,
    prompt: int | None = None,
    batch: int = 1,
) -> ServingPlan:
    """Count the memory of serving a recipe's model on one device of the cluster, without adapters.

    Args:
        precision: compute dtype: fp32, bf16 or fp16.
        context: tokens of each request; the model's own limit when not given.
        prompt: tokens of the prompt; all but one when not given.

    Raises RecipeError for a model that does not generate text, or sizes that do not fit it.
    """
    from shardwise.model.open import base_of
    from shardwise.plugins.serve.load import require_text

    blueprint = base_of(recipe)
    require_text(blueprint)
    context = _context(blueprint, context)
    prompt = context - 1 if prompt is None else prompt
    if not 1 <= prompt < context:
        raise RecipeError(
            f"a prompt of {prompt} tokens leaves no room for an answer",
            where="--prompt",
            why=f"the context has {context}",
            fix=f"give 1 to {context - 1}",
        )
    counted = _Counted(recipe, blueprint, cluster, precision)
    at_prompt, weights, _ = counted.run(prompt, context, batch, follow=False)
    at_token, _, cached = counted.run(context - 1, context, batch, follow=True)
    peak, profile = max(at_prompt, at_token), cluster.device.overhead
    overhead = profile.workspace_bytes + profile.outside_allocator(0)

    @cache
    def peak_of(requests: int) -> int:
        if requests == batch:
            return peak
        passes = ((prompt, False), (context - 1, True))
        return max(counted.run(read, context, requests, follow)[0] for read, follow in passes)

    return ServingPlan(
        device=cluster.device.name,
        precision=precision,
        batch=batch,
        context=context,
        prompt=prompt,
        weights=weights,
        cache=cached,
        activations=peak - weights - cached,
        overhead=overhead,
        when="prompt" if at_prompt > at_token else "token",
        capacity_bytes=cluster.capacity_bytes,
        most_requests=_most_requests(peak_of, batch, cluster.capacity_bytes - overhead),
    )


def _most_requests(peak_of: Callable[[int], int], asked: int, room: int) -> int:
    """The most requests whose peak is within ``room`` bytes. Both it and one more are counted.

    Bytes grow with the requests, nearly in proportion. So the line through two counted numbers names the next one.

    Args:
        asked: requests that were counted already, if ``peak_of`` remembers them.
    """
    fitting = 1
    too_many = MOST_REQUESTS + 1
    other = max(2, asked)
    if peak_of(1) > room:
        return 0
    while too_many - fitting > 1:
        slope = (peak_of(other) - peak_of(fitting)) / (other - fitting) if other != fitting else 0.0
        guess = fitting + int((room - peak_of(fitting)) / slope) if slope > 0 else MOST_REQUESTS
        guess = max(fitting + 1, min(guess, too_many - 1))
        if peak_of(guess) <= room:
            fitting, other = guess, fitting
        else:
            too_many = other = guess
    return fitting


def refuse_unfit_serving(plan: ServingPlan) -> None:
    """Raise ResourceError when the device is too small."""
    if not plan.fits:
        raise ResourceError(
            "does not fit",
            where=f"{plan.batch} requests of {plan.context:,} tokens",
            why=f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.capacity_bytes)}",
            fix=f"{_fewer(plan)}, or quantize the model: shardwise quantize",
        )


def _fewer(plan: ServingPlan) -> str:
    if plan.most_requests == 0:
        return "lower --context: not even one request of this context fits"
    return f"--batch {plan.most_requests}: at most so many requests of this context fit"


def _context(blueprint: Blueprint, asked: int | None) -> int:
    limit = blueprint.context
    if asked is None and limit is None:
        raise RecipeError("the model has no limit of its context", where="--context", fix="give one")
    if asked is not None and limit is not None and asked > limit:
        raise RecipeError(
            f"the model's context has {limit} tokens", where=f"--context {asked}", fix="give fewer"
        )
    return max(2, asked or limit or 2)


@dataclass(frozen=True)
class _Counted:
    """Runs the decoding steps of one model on fake tensors."""

    recipe: Recipe
    blueprint: Blueprint
    cluster: Cluster
    precision: str

    def run(self, prompt: int, context: int, batch: int, follow: bool) -> tuple[int, int, int]:
        """(peak bytes, bytes of weights, bytes of the cache) of the first pass, or with ``follow`` of one token."""
        import torch

        from shardwise.dryrun.reading import peaks
        from shardwise.dryrun.target import TARGET_KERNELS
        from shardwise.dryrun.tracker import Tracker
        from shardwise.plugins.serve.decoding import reader_of
        from shardwise.plugins.serve.load import allocated, meta_model
        from shardwise.plugins.serve.multi_lora import BASE, Bank
        from shardwise.plugins.serve.serving import SERVED_DTYPES
        from shardwise.runtime.torch_private_fake import StaticFakeMode

        dtype = SERVED_DTYPES[self.precision]
        target = TARGET_KERNELS[self.cluster.device.kind]
        built = meta_model(self.blueprint, self.recipe.adapter, dtype)
        tracker = Tracker({}, target.workspace, target.kept, lambda: "")
        fake = StaticFakeMode(allow_non_fake_inputs=True)
        with fake, tracker.watching(), target.kernels(1, self.cluster.device.attention), torch.no_grad():
            model = allocated(built, torch.device("cpu"))
            weights = _stored_bytes(model)
            reader = reader_of(self.blueprint, model, Bank(model, dtype))
            start = tracker.now
            reader.begin([[0] * prompt] * batch, [BASE] * batch, context - prompt)
            if follow:
                start = tracker.now
                reader.follow([0] * batch)
            cache = reader.cache_bytes
        return max(peak.bytes for peak in peaks(tracker, since=start).values()), weights, cache


def _stored_bytes(model: nn.Module) -> int:
    return sum({id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}.values())
