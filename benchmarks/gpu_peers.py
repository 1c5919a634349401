"""Plain PyTorch and transformers' Trainer with the model, the batch and the memory of a row of the ladder.

    plain PyTorch   the native decoder, fused AdamW, clipping, F.cross_entropy on whole logits: eager and compiled
    HF Trainer      LlamaForCausalLM of the same dimensions, with and without Liger's kernels; with peft for LoRA

All in bf16: under autocast with fp32 weights, or bf16 weights alone where the recipe has ``master_weights: false``.
Blocks are recomputed where the recipe recomputes them. A missing package is the row's reason.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_bench import Bench, Refused
from gpu_contenders import Contender, Steps, seconds_of
from machine import synchronise
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.presets import dimensions_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS

RATE, CLIP = 1e-4, 1.0


def peers(bench: Bench, name: str, values: Mapping[str, Any]) -> list[Contender]:
    """The peers of one recipe with whole rows; names of rows begin with ``name``."""
    alone = values["strategy"].get("master_weights") is False
    said = "bf16 weights alone" if alone or "adapter" in values else "fp32 weights, bf16 autocast"
    kinds: dict[str, Callable[[Bench, Recipe], Any]] = {
        "HF Trainer": partial(_trainer, liger=False),
        "HF Trainer, Liger": partial(_trainer, liger=True),
    }
    if "adapter" not in values:
        plain = {"plain PyTorch": False, "plain PyTorch, torch.compile": True}
        kinds = {name: partial(_plain, compiled=compiled) for name, compiled in plain.items()} | kinds
    recipe = recipe_of(values, SETTINGS)
    return [
        Contender(f"{name}: {kind}", partial(build, bench, recipe), values, {"memory": said}, own=False)
        for kind, build in kinds.items()
    ]


@contextmanager
def _plain(bench: Bench, recipe: Recipe, compiled: bool) -> Iterator[Steps]:
    blueprint = blueprint_of(recipe)
    with torch.device(bench.device):
        model = blueprint.build()
    if _weights_alone(recipe):
        model.to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    if recipe.strategy.get("activation_checkpointing") == "full":
        for block in blueprint.blocks(model):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    run: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step() -> None:
        tokens = _tokens(bench, recipe)
        with _autocast(bench, recipe):
            logits = run(tokens)
        F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    yield partial(seconds_of, bench.device, step)


@contextmanager
def _trainer(bench: Bench, recipe: Recipe, liger: bool) -> Iterator[Steps]:
    needed = ["transformers", "accelerate", *(["liger_kernel"] if liger else [])]
    for package in [*needed, *(["peft"] if recipe.adapter else [])]:
        if importlib.util.find_spec(package) is None:
            raise Refused(f"{package} is not installed")
    from transformers import Trainer, TrainingArguments

    clock = _clock(bench)
    recomputes = recipe.strategy.get("activation_checkpointing") == "full"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=recipe.batch_size, learning_rate=RATE, max_grad_norm=CLIP,
            optim="adamw_torch_fused", use_cpu=bench.device.type == "cpu", bf16=not _weights_alone(recipe),
            gradient_checkpointing=recomputes, use_liger_kernel=liger, save_strategy="no", logging_strategy="no",
            report_to="none", disable_tqdm=True, max_steps=1,
        )  # fmt: skip
        data = _Tokens(recipe)
        trainer = Trainer(_llama(bench, recipe), arguments, train_dataset=data, callbacks=[clock])

        def times(count: int) -> float:
            trainer.args.max_steps = count
            trainer.train()
            return (clock.end - clock.began) / count

        yield times


def _clock(bench: Bench) -> Any:
    """A callback that reads the clock at the first step's begin and the last one's end, when the device is idle."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        began = end = 0.0

        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == 0:
                synchronise(bench.device)
                self.began = time.perf_counter()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            synchronise(bench.device)
            self.end = time.perf_counter()

    return Clock()


def _llama(bench: Bench, recipe: Recipe) -> nn.Module:
    """A Llama of transformers with random weights, on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    d = dimensions_of(recipe.model)
    config = LlamaConfig(
        vocab_size=d.vocab, hidden_size=d.width, intermediate_size=d.ffn, num_hidden_layers=d.layers,
        num_attention_heads=d.heads, num_key_value_heads=d.kv_heads, max_position_embeddings=d.context,
        tie_word_embeddings=d.tied, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(bench.device):
        model = LlamaForCausalLM._from_config(
            config, dtype=torch.bfloat16 if _weights_alone(recipe) else torch.float32
        )
    if recipe.adapter is None:
        return model
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(
        r=recipe.adapter.rank,
        lora_alpha=recipe.adapter.alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, adapter)


class _Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of random tokens."""

    def __init__(self, recipe: Recipe) -> None:
        self._length, self._vocabulary = recipe.data.sequence_length, _vocabulary(recipe)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens = torch.randint(self._vocabulary, (self._length,))
        return {"input_ids": tokens, "labels": tokens}


def _weights_alone(recipe: Recipe) -> bool:
    return recipe.adapter is not None or recipe.strategy.get("master_weights") is False


def _autocast(bench: Bench, recipe: Recipe) -> Any:
    return nullcontext() if _weights_alone(recipe) else torch.autocast(bench.device.type, torch.bfloat16)


def _tokens(bench: Bench, recipe: Recipe) -> Tensor:
    shape = (recipe.batch_size, recipe.data.sequence_length)
    return torch.randint(_vocabulary(recipe), shape, device=bench.device)


def _vocabulary(recipe: Recipe) -> int:
    return min(32_000, dimensions_of(recipe.model).vocab)
