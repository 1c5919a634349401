"""Facts of other trainers that only together say a value of the recipe: precision, optimizer, adapter, pauses.

Each function takes the facts that were collected under the ``@names`` of the tables, and sets keys of the draft. The
source of a value, the other file's keys, goes along for the list of keys and for the comments of the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import get_args

from shardwise.core.errors import RecipeError
from shardwise.plugins.importers.batches import batch, devices, sharding
from shardwise.plugins.importers.datasets import datasets
from shardwise.plugins.importers.draft import ASSUMED, Draft
from shardwise.plugins.importers.objectives import objectives
from shardwise.plugins.importers.schedules import length, schedule
from shardwise.recipe.presets import PRESETS
from shardwise.recipe.section import TrackerName
from shardwise.recipe.sections import OptimizerSpec


def combine(draft: Draft) -> None:
    """Apply all facts. Raises RecipeError for facts that contradict each other."""
    for apply in _FACT_STEPS:
        apply(draft)
    for keys in draft.sources.values():
        if not keys:
            keys.append(ASSUMED)


def _served(draft: Draft) -> None:
    """What a file asks for after a training. Raises RecipeError for a file that asks for no training."""
    asked = [fact for fact in draft.facts if fact.startswith("serves:")]
    if asked and not draft.facts.get("trains"):
        fix = f"see shardwise {asked[0].partition(':')[2]} --help, or add do_train: true"
        raise RecipeError(
            "this file trains nothing", where=draft.origin(asked[0]), why="it has no do_train", fix=fix
        )
    draft.lose("serves:eval", "after the training, shardwise eval scores a data set")


def _model_facts(draft: Draft) -> None:
    """The model: a preset, or a folder or id with weights; of torchtitan a flavor, with weights where it loads some."""
    facts = draft.facts
    if "flavor" in facts and "model" not in facts:
        _flavor(draft)
    tokenizer = facts.get("tokenizer") or facts.get("assets")
    if str(tokenizer).endswith(".model"):
        draft.lose("tokenizer", "a tokenizer is a folder with tokenizer.json: give data.tokenizer")
    elif tokenizer:
        draft.put("data.tokenizer", tokenizer, "tokenizer" if facts.get("tokenizer") else "assets")
    if (model := facts.get("model")) is None:
        return
    name = str(model)
    draft.put("model.preset" if name in PRESETS else "model.hf", name, "model")
    if facts.get("from_scratch") and name in PRESETS:
        draft.put("model.preset", name, "from_scratch")
    elif facts.get("from_scratch"):
        draft.lose("from_scratch", "model.hf loads the weights; a preset (--model) starts from random ones")


def _flavor(draft: Draft) -> None:
    facts = draft.facts
    source = next((name for name in ("weights", "assets") if facts.get(name)), "")
    if facts.get("loads_weights") and source:
        draft.put("model.hf", str(facts[source]), source, "loads_weights", "family", "flavor")
        return
    draft.lose("weights", "torchtitan's own checkpoints are not loaded: save one with last_save_in_hf")
    name = f"{facts.get('family', 'llama3')} {facts['flavor']}".lower()
    chosen = facts["flavors"].get(name)
    if chosen is None:
        for fact in ("family", "flavor"):
            draft.lose(fact, f"there is no preset of {name}; give --model")
        return
    for target, value in chosen.items():
        draft.put(target, value, "family", "flavor")


def _precision(draft: Draft) -> None:
    """The one that is on; contradictory ones are refused. Where all that is said is ``auto``, bf16 is assumed."""
    facts = draft.facts
    converters = re.findall(r"[\w.]+", str(facts.get("converters", "")))
    if linear := [name for name in converters if name.endswith("float8") and "grouped" not in name]:
        draft.take("@fp8", True, *draft.keys["converters"])
    if len(linear) < len(converters):
        draft.lose("converters", "of the converters, float8 of linear layers is precision: fp8")
    names = [name for name in ("fp8", "bf16", "fp16", "fp64") if _is_on(facts.get(name))]
    said = [name for name in names if draft.is_said(name)] or names
    if (pure := facts.get("pure")) and not set(said) - {pure}:  # weights in 16 bits, too
        draft.take(f"@{pure}", True, *draft.keys.get(pure, []), *draft.keys["pure"])
        said, facts["bf16_weights"], draft.keys["bf16_weights"] = [pure], True, draft.keys["pure"]
    if len(said) > 1 and "fp8" not in said:  # fp8 is on top of bf16
        why = f"{draft.shown(*said)} cannot both be on"
        raise RecipeError("two precisions", where="/".join(draft.keys[said[0]]), why=why, fix="turn one off")
    if said:
        draft.put("strategy.precision", said[0], said[0])
        if said[0] == "fp8" and "fp8_scaling" in facts:
            draft.put("strategy.fp8_scaling", facts["fp8_scaling"], "fp8_scaling")
        if facts.get("bf16_weights") and said[0] == "bf16" and not facts.get("enables:adapter"):
            draft.put("strategy.master_weights", False, "bf16_weights")
    elif draft.is_said("no_mixed_precision"):
        draft.put("strategy.precision", "fp32", "no_mixed_precision")
    elif any(name in draft.autos and name not in facts for name in ("bf16", "fp16")):
        other = draft.is_said("bf16") and "fp16" not in facts
        draft.assume("strategy.precision", "fp16" if other else "bf16")
        draft.notes["strategy.precision"] = "the file leaves it to the device (auto)"
    elif {"fp16", "bf16", "no_mixed_precision"} & facts.keys():
        draft.put("strategy.precision", "fp32", "fp16", "bf16", "no_mixed_precision")


def _is_on(value: object) -> bool:
    return value is True or str(value).lower() in ("true", "full")


def _loss_scale(draft: Draft) -> None:
    if draft.values.get("strategy.precision") != "fp16":
        draft.drop("loss_scale.")
        return
    scale, power = draft.number("loss_scale"), draft.number("scale_power")
    if scale:  # 0 is dynamic
        draft.put("loss_scale.dynamic", False, "loss_scale")
        draft.put("loss_scale.initial", float(scale), "loss_scale")
    elif scale is not None:
        draft.put("loss_scale.dynamic", True, "loss_scale")
    if power is not None and not scale:
        draft.put("loss_scale.initial", 2.0 ** min(power, 100), "scale_power")
    if not draft.facts.get("engine_scales"):
        draft.put("loss_scale.hysteresis", 1, "fp16")  # torch's GradScaler; DeepSpeed's and Megatron's is 2


_ADAMW = re.compile(
    r"(fused)?adamw?|adamw_(torch(_fused)?|hf|torch_xla|torch_npu_fused|apex_fused)"
    r"|optimi_adamw|flash_adamw?|paged_adamw(_32bit)?"
)
_ADAMW_8BIT = re.compile(r"(paged_)?adamw_?(bnb_|torch_)?8bit|ao_adamw_8bit")


_FACTORY = "; optimizer.factory takes those of torch and other packages"


def _optimizer_facts(draft: Draft) -> None:
    facts = draft.facts
    fact = "own_optimizer" if "own_optimizer" in facts else "optimizer"
    if (chosen := facts.get(fact)) is not None:
        name = str(chosen).rpartition(".")[2].lower()
        own = get_args(OptimizerSpec.model_fields["name"].annotation)
        if _ADAMW_8BIT.fullmatch(name):
            draft.put("optimizer.name", "adamw_8bit", fact)
        elif _ADAMW.fullmatch(name):
            draft.put("optimizer.name", "adamw", fact)
        elif name in own:
            draft.put("optimizer.name", name, fact)
        else:
            draft.lose(fact, f"there is no {name} among {', '.join(own)}; adamw is used{_FACTORY}")
    if draft.values.get("optimizer.name") == "sgd" and "optimizer.momentum" not in draft.values:
        draft.put("optimizer.momentum", 0.0, fact)  # torch's
    every = facts.get("decays_norms") or any(
        key.endswith("optimizer.type") for key in draft.keys.get(fact, ())
    )
    if every and draft.number("optimizer.weight_decay") and not facts.get("enables:adapter"):
        draft.notes["optimizer.weight_decay"] = "of matrices alone; there of norms and biases, too"
    if "beta1" in facts and "beta2" in facts and draft.values.get("optimizer.name") != "sgd":
        draft.put("optimizer.betas", [facts["beta1"], facts["beta2"]], "beta1", "beta2")
    clips = [*draft.keys.get("clip_norm", []), *draft.autos.get("clip_norm", [])]
    if facts.get("engine_clips") and not any("gradient_clipping" in key for key in clips):
        draft.lose("clip_norm", "DeepSpeed clips by gradient_clipping, which its file does not have")
        draft.put("optimizer.clip_norm", None, "engine_clips")
        draft.notes["optimizer.clip_norm"] = "DeepSpeed clips by gradient_clipping, and its file has none"
    elif (norm := draft.number("clip_norm")) is not None:
        draft.put("optimizer.clip_norm", float(norm) or None, "clip_norm")


def _checkpointing_facts(draft: Draft) -> None:
    """Activation checkpointing, where no key has set it: off, or by DeepSpeed's own."""
    key = "strategy.activation_checkpointing"
    if "no_checkpointing" in draft.facts and key not in draft.values:
        draft.put(key, "none", "no_checkpointing")
    if draft.facts.get("deepspeed_checkpointing") and key in draft.values:
        why = "only DeepSpeed's own checkpointing API reads it; another key decides"
        draft.lose("deepspeed_checkpointing", why)
    elif draft.facts.get("deepspeed_checkpointing"):
        draft.put(key, "full", "deepspeed_checkpointing")
        draft.put("strategy.offload", "activations", "deepspeed_checkpointing")
    mode = draft.facts.get("selective")
    option = str(draft.facts.get("selective_option", "op"))
    if mode and option.isdecimal() and int(option) > 1:
        draft.put(key, f"every:{option}", "selective", "selective_option")
    elif mode:
        draft.put(key, "full" if option == "1" else "selective", "selective", "selective_option")
    elif draft.facts.get("memory_budget"):
        draft.put(key, f"budget:{draft.number('budget') or 0.5:g}", "memory_budget", "budget")


def _compile(draft: Draft) -> None:
    """Compiled blocks."""
    if draft.facts.get("compile"):
        draft.put("strategy.compile", "block", "compile")


def _offload(draft: Draft) -> None:
    facts = draft.facts
    names = ("offload_optimizer", "offload_parameters", "nvme_path")
    devices = [str(facts.get(name) or "none").lower() for name in names[:2]]
    state, weights = (device != "none" for device in devices)
    activations = str(draft.values.get("strategy.offload", "")).startswith("activations")
    prefix = "activations+" if activations else ""
    if "nvme" in devices:
        draft.put("strategy.offload", f"{prefix}nvme:{facts.get('nvme_path') or 'nvme'}", *names)
        if weights:
            draft.lose("offload_parameters", "files hold the optimizer state, never the weights")
    elif weights or state:
        part = "optimizer+parameters" if weights else "optimizer"
        draft.put("strategy.offload", f"{prefix}{part}", *names)
    elif {*names[:2]} & facts.keys() and "strategy.offload" not in draft.values:
        draft.put("strategy.offload", "none", *names)
    fraction = draft.number("offload_fraction")
    if fraction is not None and state and not weights:
        draft.put("strategy.offload_fraction", float(fraction), "offload_fraction")


def _adapter_facts(draft: Draft) -> None:
    facts = draft.facts
    if not facts.get("enables:adapter"):
        draft.drop("adapter.")
        draft.lose("adapter.quantize", "quantized weights are frozen, and the file trains no adapter")
        return
    names = [name for name, value in facts.items() if name.startswith("lora_target:") and value]
    if targets := [layer for name in names for layer in name.partition(":")[2].split(",")]:
        draft.put("adapter.targets", targets, *names)
    if facts.get("lora_linear"):
        draft.put("adapter.targets", "all", "lora_linear")
    if isinstance(listed := draft.values.get("adapter.targets"), str):
        several = [name.strip() for name in listed.split(",")] if re.fullmatch(r"[\w, ]+", listed) else []
        draft.values["adapter.targets"] = several if len(several) > 1 else listed.replace("all-linear", "all")
    if isinstance(listed := draft.values.get("adapter.modules_to_save"), str):
        draft.values["adapter.modules_to_save"] = [name.strip() for name in listed.split(",")]
    draft.put("adapter.name", "dora" if facts.get("dora") else "lora", "dora", "enables:adapter")
    if "adapter.alpha" not in draft.values and "alpha_per_rank" in facts:
        alpha = facts["alpha_per_rank"] * (draft.number("adapter.rank") or 0)
        draft.put("adapter.alpha", alpha, "adapter.rank")
    for key in ("adapter.alpha", "adapter.dropout"):
        if key in draft.values:
            draft.values[key] = float(draft.number(key) or 0)
    draft.assume("adapter.rank", 8)


def _pauses(draft: Draft) -> None:
    facts = draft.facts
    pauses = (
        ("save_strategy", "save_steps", "checkpoint.every"),
        ("eval_strategy", "eval_steps", "evaluation.every"),
    )
    for *names, target in pauses:
        word = str(facts.get(names[0])).lower()
        if word == "steps" and names[1] == "eval_steps" and names[1] not in facts:
            names[1] = "logging_steps"  # as the Trainer does
        every = draft.number(names[1])
        if word == "epoch":
            draft.lose(names[0], f"{target} is in steps; the last step has one anyway")
        elif every and word in ("steps", "none") and every >= 1:
            draft.put(target, int(every), *names)
        elif every and every < 1 and draft.is_said(names[1]):
            draft.lose(names[1], f"{target} is in steps, and not a fraction of the run")
    percent, part = draft.number("held_out_percent"), draft.number("held_out")
    if percent is not None:
        part, draft.keys["held_out"] = percent / 100, draft.keys["held_out_percent"]
    if part is not None and part < 1:
        draft.put("data.held_out", float(part), "held_out")
    elif part is not None:
        draft.lose("held_out", "data.held_out is a fraction of the documents")
    elif facts.get("eval_strategy") == "no" or "evaluation.sets" in draft.values:
        draft.put("data.held_out", 0.0, "eval_strategy")
    elif "eval_strategy" in facts:
        draft.assume("data.held_out", 0.05)
        draft.notes["data.held_out"] = "the script evaluates on data of its own: give evaluation.sets"
    if draft.values.get("data.held_out") == 0 and "evaluation.sets" not in draft.values:
        draft.drop("evaluation.every")
    size = draft.number("validation_batch") or draft.values.get("strategy.micro_batch_size", 1)
    batches = draft.number("evaluation_batches") if facts.get("eval_strategy") != "no" else None
    if batches is not None and batches > 0:
        sequences = max(1, int(batches * size * draft.facts["degree"]))
        draft.put("evaluation.sequences", sequences, "evaluation_batches", "validation_batch")


def _best_checkpoint_facts(draft: Draft) -> None:
    """The checkpoint that the Trainer loads at the end: that of the least loss, unless it names another metric."""
    facts, values = draft.facts, draft.values
    losses = [*values.get("evaluation.sets", {}), *["held_out_loss"] * (values.get("data.held_out") != 0)]
    if not facts.get("best"):
        draft.lose("best_metric", "no checkpoint is chosen by it: load_best_model_at_end is not set")
    elif str(facts.get("best_metric") or "loss") not in ("loss", "eval_loss"):
        for fact in ("best", "best_metric"):
            draft.lose(fact, "write evaluation.metrics, and checkpoint.best as max:NAME or min:NAME")
    elif "evaluation.every" not in values or not losses:
        draft.lose("best", "checkpoint.best needs evaluation.every, and something to evaluate")
    else:
        draft.put("checkpoint.best", losses[0], "best", "best_metric")


def _trackers(draft: Draft) -> None:
    """Trackers by name, as Shardwise has them; those that it does not have are lost."""
    facts = draft.facts
    known = get_args(TrackerName)
    asked: dict[str, list[str]] = {}
    for fact, value in facts.items():
        if fact.startswith("tracker:") and value not in (None, False, ""):
            asked.setdefault(fact.split(":")[1], []).append(fact)
    if facts.get("wandb_mode") == "disabled":
        asked.pop("wandb", None)
    report = facts.get("report_to") or []
    listed = report if isinstance(report, list) else re.split(r"[,\s]+", str(report))
    for name in [str(name).lower() for name in listed]:
        if name == "all":  # of the Trainer: every one that is installed
            asked |= {name: ["report_to"] for name in known if name != "csv" and find_spec(name)}
            if not asked:
                draft.lose("report_to", "all those that are installed, and none is: name them in trackers")
        elif name not in ("none", "no"):
            asked.setdefault(name, []).append("report_to")
    ours = [name for name in asked if name in known]
    if ours:
        draft.put("trackers", ours, *dict.fromkeys(fact for name in ours for fact in asked[name]))
    for name in asked.keys() - {*known}:
        for fact in asked[name]:
            rest = f"; trackers: [{', '.join(ours)}]" if ours and fact == "report_to" else ""
            draft.lose(fact, f"no tracker {name}: there are {', '.join(known)}{rest}")


_FACT_STEPS: tuple[Callable[[Draft], None], ...] = (
    _served,
    _model_facts,
    objectives,
    datasets,
    _precision,
    _loss_scale,
    _optimizer_facts,
    _checkpointing_facts,
    _compile,
    sharding,
    _offload,
    _adapter_facts,
    devices,
    batch,
    length,
    schedule,
    _pauses,
    _best_checkpoint_facts,
    _trackers,
)
