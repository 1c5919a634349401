"""Preferences, rewards and rollouts of other trainers as the recipe's `objective:`.

The facts ``@rl:KEY`` have TRL's names of keys, which Axolotl passes on to it; LLaMA-Factory's are mapped to them.
``@rl:trainer`` is the trainer. TRL's own files do not say it, because its command does, so it follows from their keys.
A loss or a setting that has no equal here is refused: a fine-tuning recipe in its stead would be another training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.core.errors import RecipeError, shorten
from shardwise.plugins.importers.draft import DEFAULT_MARK, Draft
from shardwise.recipe.objective import SAMPLES

Reads = Mapping[str, tuple[str, Any]]
"""For each of TRL's keys, the key of `objective:` and TRL's default."""

_READS_BETA: Reads = {"beta": ("beta", 0.1)}
_SMOOTHING: Reads = {"label_smoothing": ("label_smoothing", 0.0)}
_REFERENCE: Reads = {
    "reference_free": ("reference_free", False), "reference_bits": ("reference_quantize", None),
    "precompute_ref_log_probs": ("strategy.reference", None),
}  # fmt: skip
_NLL: Reads = {"rpo_alpha": ("nll_weight", 0.0)}
_SAMPLED: Reads = {
    "reward_funcs": ("rewards", None), "reward_weights": ("reward_weights", None), "temperature": ("temperature", 1.0),
    "reward_model_name_or_path": ("reward_model", None), "max_completion_length": ("completion_length", 512),
    "mask_truncated_completions": ("mask_truncated", False), "max_prompt_length": ("", None),
}  # fmt: skip
_DPO: Reads = {**_READS_BETA, **_SMOOTHING, **_NLL, **_REFERENCE}

EQUALS: Mapping[tuple[str, str], tuple[str, Reads]] = {
    ("dpo", "sigmoid"): ("dpo", _DPO),
    ("dpo", "sigmoid_norm"): ("dpo", _DPO),
    ("dpo", "ipo"): ("ipo", {**_READS_BETA, **_REFERENCE}),
    ("cpo", "sigmoid"): ("cpo", {**_READS_BETA, **_SMOOTHING, "cpo_alpha": ("nll_weight", 1.0)}),
    ("cpo", "simpo"): (
        "simpo",
        {**_READS_BETA, **_SMOOTHING, "simpo_gamma": ("margin", 0.5), "cpo_alpha": ("nll_weight", 1.0)},
    ),
    ("simpo", "simpo"): ("simpo", {**_READS_BETA, "simpo_gamma": ("margin", 0.5), **_NLL}),
    ("orpo", "orpo"): ("orpo", _READS_BETA),
    ("kto", "kto"): (
        "kto",
        {
            **_READS_BETA,
            "desirable_weight": ("desirable_weight", 1.0),
            "undesirable_weight": ("undesirable_weight", 1.0),
            "reference_bits": ("reference_quantize", None),
            "precompute_ref_log_probs": ("strategy.reference", None),
        },
    ),
    ("reward", "reward"): ("reward", {"center_rewards_coefficient": ("center_weight", 0.0)}),
    ("grpo", "dapo"): ("grpo", {**_SAMPLED, "num_generations": ("group", 8), "beta": ("beta", 0.0)}),
    ("grpo", "dr_grpo"): ("grpo", {**_SAMPLED, "num_generations": ("group", 8), "beta": ("beta", 0.0)}),
    ("rloo", "rloo"): ("rloo", {**_SAMPLED, "num_generations": ("group", 2), "beta": ("beta", 0.05)}),
    ("ppo", "ppo"): (
        "ppo",
        {
            "reward_model_path": ("reward_model", None), "response_length": ("completion_length", 53),
            "temperature": ("temperature", 0.7), "kl_coef": ("beta", 0.05), "cliprange": ("epsilon", 0.2),
            "cliprange_value": ("value_epsilon", 0.2), "vf_coef": ("value_weight", 0.1), "gamma": ("discount", 1.0),
            "lam": ("trace_decay", 0.95), "num_ppo_epochs": ("epochs", 4), "num_mini_batches": ("minibatches", 1),
        },
    ),
}  # fmt: skip
"""(trainer, loss) -> the objective, and what it reads of the other file."""

_USUAL_LOSS = {"dpo": "sigmoid", "cpo": "sigmoid", "grpo": "dapo"}
_IMPLIED: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("dpo", "sigmoid_norm"): {"length_normalised": True},
    ("grpo", "dapo"): {"normalise": "tokens"},
    ("grpo", "dr_grpo"): {"normalise": "length"},
    ("rloo", "rloo"): {"normalise": "length"},
    ("ppo", "ppo"): {"mask_truncated": False},
}
_RATES = {"ppo": 3e-6, "reward": 1e-4}
_EVIDENCE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ppo", ("num_ppo_epochs", "cliprange", "cliprange_value", "vf_coef", "kl_coef", "reward_model_path", "lam",
             "response_length", "num_mini_batches")),
    ("grpo", ("scale_rewards", "num_generations", "mask_truncated_completions", "reward_funcs", "reward_weights")),
    ("kto", ("desirable_weight", "undesirable_weight")),
    ("reward", ("center_rewards_coefficient",)),
    ("cpo", ("cpo_alpha", "simpo_gamma")),
    ("dpo", ("reference_free", "rpo_alpha", "loss_weights")),
)  # fmt: skip
"""Keys that only one of TRL's trainers has; RLOO's are GRPO's, too."""

_OF_LOSS = {
    **dict.fromkeys(("kto", "apo_zero_unpaired"), "kto"),
    **dict.fromkeys(("simpo", "alphapo"), "cpo"),
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"), "grpo"),
}
FINE_TUNING_LOSSES = ("nll", "chunked_nll")
_NAMES = ("dpo", "orpo", "cpo", "kto", "reward", "grpo", "rloo", "ppo")
_TRAINERS = {"ipo": "dpo", "simpo": "cpo"}
_ROLLOUT_TRAINERS = ("grpo", "rloo", "ppo")


def objectives(draft: Draft) -> None:
    """Set the objective. Raises RecipeError for one that has no equal here."""
    _llama_factory(draft)
    said = [fact for fact in draft.facts if fact.startswith("rl:") and draft.is_said(fact)]
    trainer = draft.facts.get("rl:trainer") or (_trl_trainer(draft, said) if draft.facts.get("trl") else None)
    if trainer is None:
        draft.facts["trl_sft"] = draft.facts.get("trl")
        idle = ["rl:padding_free", *["rl:loss_type"] * bool(draft.facts.get("trl"))]  # which is nll
        for fact in said:
            if fact not in idle:
                draft.lose(fact, "it belongs to a training that is not asked for")
        return
    loss = _loss(draft, trainer)
    if (trainer, loss) not in EQUALS:
        known = ", ".join(name for of, name in EQUALS if of == trainer)
        what = f"of the losses of {trainer} Shardwise has {known}"
        raise _unsupported(draft, "rl:loss_type" if "rl:loss_type" in draft.facts else "rl:trainer", what)
    name, reads = EQUALS[trainer, loss]
    if trainer == "orpo" and "rl:orpo_alpha" in draft.facts and "rl:beta" not in draft.facts:
        draft.take("@rl:beta", draft.facts["rl:orpo_alpha"], *draft.keys["rl:orpo_alpha"])
        draft.facts.pop("rl:orpo_alpha")
        said.remove("rl:orpo_alpha")
    draft.facts["samples"] = SAMPLES[name] if SAMPLES[name] in ("unpaired", "prompts") else "pairs"
    draft.put("objective.name", name, "rl:trainer", "rl:loss_type", "rl:loss_weights")
    for key, value in _IMPLIED.get((trainer, loss), {}).items():
        draft.put(f"objective.{key}", value, "rl:loss_type", "rl:trainer", "rl:norm_loss")
    for key, (target, default) in reads.items():
        _read_key(draft, key, target, default)
    known_facts = {"rl:trainer", "rl:loss_type", "rl:loss_weights", *(f"rl:{key}" for key in reads)}
    known_facts |= {"rl:norm_loss"} if trainer == "dpo" else set()
    if (asked := _likelihood_note(draft, trainer)) and draft.facts.get("lf_stage") is None:
        draft.notes[asked[0]] = asked[1]
    if trainer == "ppo":
        draft.notes["objective.value_weight"] = "of a head of the trained model here, of a second model there"
    if trainer == "rloo":
        draft.notes["objective.beta"] = "the KL divergence is a part of the loss here, of the reward there"
        draft.notes["objective.normalise"] = "by completion_length too, which scales the gradient alone"
    if trainer == "grpo":
        _scale_rewards(draft)
        known_facts.add("rl:scale_rewards")
    for fact in said:
        if fact not in known_facts and fact != "rl:padding_free":
            _lose_or_refuse(draft, fact, name)
    _data_and_rate(draft, trainer)


def _llama_factory(draft: Draft) -> None:
    """The trainer of LLaMA-Factory's stage, and its loss by TRL's names. Raises RecipeError for another reference."""
    facts = draft.facts
    stage = draft.facts.get("lf_stage")
    loss = str(facts.get("lf_loss") or "sigmoid")
    if stage is None:
        for fact in ("lf_loss", "lf_reference", "lf_reference_adapter"):
            draft.lose(fact, "it belongs to a training that is not asked for")
        return
    for fact, own in (("lf_reference", "@model"), ("lf_reference_adapter", "adapter.start_from")):
        if facts.get(fact) and facts[fact] not in [said.value for said in draft.statements.get(own, ())]:
            raise _unsupported(
                draft, fact, "the reference is the model before training, with its adapter.start_from"
            )
    trainer = {"rm": "reward", "dpo": loss if loss in ("orpo", "simpo") else "dpo"}.get(stage, stage)
    draft.take("@rl:trainer", trainer, *draft.keys["lf_stage"])
    if stage == "dpo":
        name = draft.keys.get("lf_loss", [f"pref_loss{DEFAULT_MARK}"])
        draft.take("@rl:loss_type", loss, *name)
    else:
        draft.lose("lf_loss", f"it belongs to the stage dpo, not {stage}")


def _trl_trainer(draft: Draft, said: list[str]) -> str | None:
    """The trainer that a file of TRL is for; None for SFT. Raises RecipeError where several read its keys."""
    if asked := draft.facts.get("objective_asked"):
        named = _TRAINERS.get(asked, asked)
        draft.keys["rl:trainer"] = draft.keys["objective_asked"]
        if named != asked and not draft.is_said("rl:loss_type"):
            draft.take("@rl:loss_type", asked, f"objective={asked}")
        return str(named)
    losses = _listed(draft.facts.get("rl:loss_type"))
    if losses and all(loss in FINE_TUNING_LOSSES for loss in losses):
        return None
    for trainer, keys in _EVIDENCE:
        if evidence := [fact for key in keys if (fact := f"rl:{key}") in said]:
            draft.keys["rl:trainer"] = [name for fact in evidence for name in draft.keys[fact]]
            if trainer == "grpo":
                draft.notes["objective.name"] = "RLOOTrainer has these keys too: objective.name=rloo"
            return trainer
    if losses and losses[0] == "dft":
        raise _unsupported(
            draft, "rl:loss_type", "Shardwise trains on the next token: of TRL's losses it has nll"
        )
    if losses:
        trainer = _OF_LOSS.get(losses[0], "dpo")
        if losses == ["sigmoid"]:
            draft.notes["objective.name"] = "DPO, whose loss_type it is; of CPO: objective.name=cpo"
        return trainer
    asking = [fact for fact in said if fact != "rl:padding_free" and draft.facts[fact] not in (None, False)]
    if not asking:
        return None
    key = draft.keys[asking[0]][0]
    raise RecipeError(
        "the file does not say which of TRL's trainers it is for",
        where=f"{draft.path}: {key}: {draft.facts[asking[0]]}",
        why=f"the command says it, as in trl dpo, and several of {', '.join(_NAMES)} read {key}",
        fix="add objective.name=dpo, or another of these names",
    )


def _listed(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list) else [value] if value else [])]


def _loss(draft: Draft, trainer: str) -> str:
    """The loss, where that of the chosen answers is a part of a list. Raises RecipeError for other lists."""
    losses = _listed(draft.facts.get("rl:loss_type")) or [_USUAL_LOSS.get(trainer, trainer)]
    asked = draft.facts.get("rl:loss_weights") or [1.0] * len(losses)
    weights = asked if isinstance(asked, list) else [asked]
    if trainer == "dpo" and losses[1:] == ["sft"] and weights[:1] == [1.0] and len(weights) == 2:
        draft.take("@rl:rpo_alpha", weights[1], *draft.keys["rl:loss_type"])
    elif len(losses) > 1 or weights != [1.0]:
        why = "of several losses, sft may follow sigmoid or sigmoid_norm, of weight 1: objective.nll_weight"
        raise _unsupported(draft, "rl:loss_type" if len(losses) > 1 else "rl:loss_weights", why)
    # Axolotl's dpo_norm_loss takes the log-probabilities as ipo does: the means over the tokens of an answer.
    normalised = trainer == "dpo" and losses[0] == "sigmoid" and draft.facts.get("rl:norm_loss")
    return "sigmoid_norm" if normalised else losses[0]


def _read_key(draft: Draft, key: str, target: str, default: Any) -> None:
    """One key of TRL's, or its default."""
    fact = f"rl:{key}"
    value = draft.facts.get(f"rl:{key}")
    if value is None and default is None:
        return
    if value is None:
        value = default
        draft.take(f"@{fact}", value, f"{key}{DEFAULT_MARK}")
    if target == "strategy.reference":
        if value:
            draft.put(target, "precomputed", fact)
        return
    if key == "reference_bits":
        value = {"4": "nf4", "8": "int8"}.get(str(value))
    elif key == "reward_funcs":
        value = [_function(draft, fact, name) for name in _listed(value)]
    elif target == "beta" and draft.number(fact) is not None:
        value = float(value)
    if target:
        draft.put(f"objective.{target}", value, fact)


def _likelihood_note(draft: Draft, trainer: str) -> tuple[str, str] | None:
    """The key with TRL's likelihood of chosen answers, and how that differs. LLaMA-Factory's is that of here."""
    mean = "per token of each pair here, over all tokens of a batch there"
    if trainer == "orpo":
        return "objective.name", f"the likelihood of chosen answers is {mean}, prompts included"
    return ("objective.nll_weight", mean) if draft.values.get("objective.nll_weight") else None


def _function(draft: Draft, fact: str, name: str) -> str:
    """A reward by its module and function. Raises RecipeError for TRL's own, and for a model."""
    module, dot, function = name.rpartition(".")
    if not dot or "/" in name:
        why = f"{name} is TRL's own, or a model: rewards are package.module:function, a model is objective.reward_model"
        raise _unsupported(draft, fact, why)
    return f"{module}:{function}"


def _scale_rewards(draft: Draft) -> None:
    fact = "rl:scale_rewards"
    scale = str(draft.facts.get(fact, "group")).lower()
    if scale not in ("group", "true", "none", "false"):
        raise _unsupported(
            draft, fact, "advantages are divided by the deviation of their group, or by nothing"
        )
    if fact not in draft.facts:
        draft.take(f"@{fact}", True, f"scale_rewards{DEFAULT_MARK}")
    draft.put("objective.scale_rewards", scale in ("group", "true"), fact)


def _lose_or_refuse(draft: Draft, fact: str, objective: str) -> None:
    """A key that the objective does not read. One that would add a part to the loss is refused."""
    value = draft.facts[fact]
    if value in (None, False, 0, [], ""):
        return
    if fact in ("rl:rpo_alpha", "rl:label_smoothing", "rl:simpo_gamma", "rl:cpo_alpha", "rl:loss_weights"):
        raise _unsupported(draft, fact, f"the objective {objective} has no such part")
    draft.lose(fact, f"the objective {objective} does not read it")


def _data_and_rate(draft: Draft, trainer: str) -> None:
    """What such a training reads otherwise: packing, lengths, dropout and the learning rate."""
    draft.facts.pop("packing", None)
    padding_free = draft.facts.get("rl:padding_free")
    if "data.packing" in draft.values or padding_free:
        draft.drop("data.packing")
    if padding_free:
        draft.put("data.packing", True, "rl:padding_free")
    draft.drop("data.train_on")
    draft.facts.pop("completion_only", None)
    if trainer in _ROLLOUT_TRAINERS and draft.facts.get("trl"):
        completion = int(
            draft.number("rl:max_completion_length") or draft.number("rl:response_length") or 512
        )
        prompt = int(draft.number("rl:max_prompt_length") or 512)
        draft.drop("data.sequence_length")
        draft.keys.pop("data.sequence_length", None)
        names = ("rl:max_prompt_length", "rl:max_completion_length", "rl:response_length")
        draft.put("data.sequence_length", prompt + completion, *names)
        if not draft.is_said("rl:max_prompt_length"):
            draft.notes["data.sequence_length"] = "prompts of up to 512 tokens, and the completion"
    # LLaMA-Factory trains reward models by a trainer of its own, which leaves dropout on.
    keeps = draft.facts.get("disable_dropout") is False or draft.facts.get("lf_stage") == "rm"
    if trainer not in _ROLLOUT_TRAINERS and draft.facts.get("enables:adapter") and not keeps:
        draft.take(
            "adapter.dropout", 0.0, *draft.keys.get("disable_dropout", [f"disable_dropout{DEFAULT_MARK}"])
        )
    if draft.facts.get("trl") and not draft.is_said("optimizer.learning_rate"):
        draft.drop("optimizer.learning_rate")
        draft.take("optimizer.learning_rate", _RATES.get(trainer, 1e-6), f"learning_rate{DEFAULT_MARK}")


def _unsupported(draft: Draft, fact: str, why: str) -> RecipeError:
    key = draft.keys[fact][0]
    value = draft.facts[fact]
    where = f"{draft.path}: {key}: {shorten(str(value), 60)}"
    fix = f"remove {key}, or train this with the other trainer"
    return RecipeError("this training cannot be done here", where=where, why=why, fix=fix)
