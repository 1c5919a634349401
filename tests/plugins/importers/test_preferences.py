"""Preferences, rewards and rollouts of other trainers: each value is the same training, or one line that refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import RecipeError
from shardwise.plugins.importers.checked import read_imported
from shardwise.recipe.objective import ObjectiveSpec
from tests.plugins.importers.foreign import convert, row, value

TRL: dict[str, Any] = {
    "model_name_or_path": "m",
    "dataset_name": "trl-lib/pairs",
    "per_device_train_batch_size": 8,
    "num_train_epochs": 1,
}
FACTORY: dict[str, Any] = {
    "model_name_or_path": "m",
    "stage": "dpo",
    "dataset": "pairs.jsonl",
    "dataset_dir": "ONLINE",
    "finetuning_type": "lora",
}
AXOLOTL: dict[str, Any] = {
    "base_model": "m",
    "micro_batch_size": 8,
    "num_epochs": 1,
    "learning_rate": 5e-7,
    "sequence_len": 1024,
    "datasets": [{"path": "pairs.jsonl", "type": "chat_template.default"}],
}
GRPO = {"num_generations": 8, "reward_funcs": ["rewards.length"]}


def objective(folder: Path, content: dict[str, Any], **options: Any) -> ObjectiveSpec | None:
    """The objective of the checked recipe that a file becomes."""
    return read_imported(convert(folder, {"a.yaml": content}, **options))[0].objective


EQUALS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        TRL | {"beta": 0.05, "loss_type": "sigmoid", "label_smoothing": 0.1},
        {"name": "dpo", "beta": 0.05, "label_smoothing": 0.1, "length_normalised": False},
    ),
    (TRL | {"loss_type": ["sigmoid_norm"]}, {"name": "dpo", "beta": 0.1, "length_normalised": True}),
    (
        TRL | {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]},
        {"name": "dpo", "nll_weight": 0.2},
    ),
    (TRL | {"rpo_alpha": 1.0}, {"name": "dpo", "nll_weight": 1.0}),
    (TRL | {"reference_free": True}, {"name": "dpo", "reference_free": True}),
    (TRL | {"loss_type": "ipo", "beta": 0.2}, {"name": "ipo", "beta": 0.2}),
    (TRL | {"cpo_alpha": 0.5}, {"name": "cpo", "beta": 0.1, "nll_weight": 0.5}),
    (
        TRL | {"loss_type": "simpo", "simpo_gamma": 1.6, "beta": 2.0, "cpo_alpha": 0.0},
        {"name": "simpo", "beta": 2.0, "margin": 1.6, "nll_weight": 0.0},
    ),
    (TRL | {"loss_type": "simpo"}, {"name": "simpo", "beta": 0.1, "margin": 0.5, "nll_weight": 1.0}),
    (TRL | {"desirable_weight": 1.5}, {"name": "kto", "desirable_weight": 1.5, "undesirable_weight": 1.0}),
    (TRL | {"center_rewards_coefficient": 0.01}, {"name": "reward", "center_weight": 0.01}),
    (
        TRL | GRPO,
        {
            "name": "grpo", "beta": 0.0, "group": 8, "rewards": ("rewards:length",), "normalise": "tokens",
            "scale_rewards": True, "mask_truncated": False, "completion_length": 512, "temperature": 1.0,
        },
    ),
    (
        TRL | GRPO | {"loss_type": "dr_grpo", "scale_rewards": "none", "mask_truncated_completions": True},
        {"name": "grpo", "normalise": "length", "scale_rewards": False, "mask_truncated": True},
    ),
    (
        TRL | {"reward_model_path": "r", "kl_coef": 0.1, "lam": 0.9, "num_ppo_epochs": 2, "response_length": 64},
        {
            "name": "ppo", "reward_model": "r", "beta": 0.1, "trace_decay": 0.9, "epochs": 2, "completion_length": 64,
            "temperature": 0.7, "epsilon": 0.2, "value_weight": 0.1, "discount": 1.0,
        },
    ),
    (FACTORY | {"pref_beta": 0.2, "pref_ftx": 0.1}, {"name": "dpo", "beta": 0.2, "nll_weight": 0.1}),
    (FACTORY | {"dpo_label_smoothing": 0.1}, {"name": "dpo", "beta": 0.1, "label_smoothing": 0.1}),
    (FACTORY | {"ref_model_quantization_bit": 4}, {"name": "dpo", "reference_quantize": "nf4"}),
    (FACTORY | {"ref_model": "m"}, {"name": "dpo"}),
    (FACTORY | {"pref_loss": "ipo"}, {"name": "ipo", "beta": 0.1}),
    (FACTORY | {"pref_loss": "orpo", "pref_beta": 0.3}, {"name": "orpo", "beta": 0.3}),
    (FACTORY | {"pref_loss": "simpo"}, {"name": "simpo", "beta": 0.1, "margin": 0.5, "nll_weight": 0.0}),
    (FACTORY | {"stage": "kto", "kto_rejected_weight": 0.5}, {"name": "kto", "undesirable_weight": 0.5}),
    (FACTORY | {"stage": "rm"}, {"name": "reward", "center_weight": 0.0}),
    (AXOLOTL | {"rl": "dpo", "rl_beta": 0.2}, {"name": "dpo", "beta": 0.2}),
    (AXOLOTL | {"rl": "dpo", "dpo_loss_type": ["ipo"]}, {"name": "ipo"}),
    (AXOLOTL | {"rl": "dpo", "dpo_norm_loss": True}, {"name": "dpo", "length_normalised": True}),
    (AXOLOTL | {"rl": "dpo", "dpo_norm_loss": False}, {"name": "dpo", "length_normalised": False}),
    (AXOLOTL | {"rl": "ipo", "dpo_norm_loss": True}, {"name": "ipo", "beta": 0.1}),
    (TRL | {"loss_type": "sigmoid", "ld_alpha": 1.0}, {"name": "dpo"}),
    (AXOLOTL | {"rl": "ipo"}, {"name": "ipo", "beta": 0.1}),
    (AXOLOTL | {"rl": "orpo", "orpo_alpha": 0.2}, {"name": "orpo", "beta": 0.2}),
    (AXOLOTL | {"rl": "kto", "kto_desirable_weight": 0.2}, {"name": "kto", "desirable_weight": 0.2}),
    (AXOLOTL | {"rl": "simpo", "simpo_gamma": 0.7}, {"name": "simpo", "margin": 0.7, "nll_weight": 1.0}),
    (AXOLOTL | {"reward_model": True}, {"name": "reward"}),
    (
        AXOLOTL | {"rl": "grpo", "trl": GRPO | {"beta": 0.01, "num_generations": 4}},
        {"name": "grpo", "beta": 0.01, "group": 4, "rewards": ("rewards:length",)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("content", "expected"), EQUALS)
def test_the_same_training_is_imported(
    content: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    made = objective(tmp_path, content)
    assert made is not None and not made.unread
    assert {key: getattr(made, key) for key in expected} == expected


LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm", "kto_pair", "simpo", "alphapo", "kto", "aot_pair",
    "apo_zero_unpaired", "grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo", "nll", "chunked_nll",
    "dft", "unheard_of",
)  # fmt: skip
ROLLOUT_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
"""All values of `loss_type` in TRL's trainers, of the present version and of those before."""
VALUES: list[tuple[dict[str, Any], str, str]] = [
    *((TRL | (GRPO if kind in ROLLOUT_LOSSES else {}), "loss_type", kind) for kind in LOSSES),
    *((AXOLOTL | {"trl": GRPO}, "rl", kind)
      for kind in ("dpo", "gdpo", "grpo", "ipo", "orpo", "kto", "simpo", "ebft", "unheard_of")),
    *((AXOLOTL | {"rl": "dpo"}, "dpo_loss_type", kind) for kind in LOSSES[:15]),
    *((FACTORY, "stage", kind) for kind in ("pt", "sft", "rm", "ppo", "dpo", "kto", "unheard_of")),
    *((FACTORY, "pref_loss", kind) for kind in ("sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo", "robust")),
]  # fmt: skip
SAME = {
    ("loss_type", "sigmoid"): "dpo", ("loss_type", "sigmoid_norm"): "dpo", ("loss_type", "ipo"): "ipo",
    ("loss_type", "simpo"): "simpo", ("loss_type", "kto"): "kto", ("loss_type", "dapo"): "grpo",
    ("loss_type", "dr_grpo"): "grpo", ("loss_type", "nll"): None, ("loss_type", "chunked_nll"): None,
    **{("rl", kind): kind for kind in ("dpo", "grpo", "ipo", "orpo", "kto", "simpo")},
    ("dpo_loss_type", "sigmoid"): "dpo", ("dpo_loss_type", "sigmoid_norm"): "dpo", ("dpo_loss_type", "ipo"): "ipo",
    ("stage", "sft"): None, ("stage", "pt"): None, ("stage", "rm"): "reward", ("stage", "dpo"): "dpo",
    ("stage", "kto"): "kto", ("pref_loss", "sigmoid"): "dpo", ("pref_loss", "ipo"): "ipo", 
    ("pref_loss", "orpo"): "orpo", ("pref_loss", "simpo"): "simpo",
}  # fmt: skip
"""The values that have an equal, and its name; None is fine-tuning, which these values ask for."""


@pytest.mark.parametrize(("content", "key", "kind"), VALUES, ids=lambda value: str(value)[:20])
def test_every_value_is_the_same_objective_or_refused(
    content: dict[str, Any], key: str, kind: str, tmp_path: Path
) -> None:
    asked = content | {key: [kind] if key == "dpo_loss_type" else kind}
    if (key, kind) in SAME:
        made = objective(tmp_path, asked)
        assert (made and made.name) == SAME[key, kind]
        return
    with pytest.raises(RecipeError) as refused:
        convert(tmp_path, {"a.yaml": asked})
    line = refused.value.line()
    assert kind in line and key in line and "\n" not in line


REFUSED: list[tuple[dict[str, Any], str]] = [
    (TRL | {"loss_type": ["sigmoid", "bco_pair"]}, "loss_type"),
    (TRL | {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 1.0]}, "loss_type"),
    *[(TRL | {"loss_type": "sigmoid", key: some}, key) for key, some in (
        ("use_weighting", True), ("ld_alpha", 0.5), ("f_divergence_type", "js_divergence"), ("sync_ref_model", True),
    )],
    (TRL | {"loss_type": "ipo", "rpo_alpha": 1.0}, "rpo_alpha"),
    *[(TRL | GRPO | {key: some}, key) for key, some in (
        ("num_iterations", 4), ("top_p", 0.9), ("top_k", 50), ("min_p", 0.1), ("repetition_penalty", 1.1),
        ("scale_rewards", "batch"), ("importance_sampling_level", "sequence"), ("delta", 2.0),
        ("reward_funcs", ["accuracy_reward"]), ("multi_objective_aggregation", "normalize_then_sum"),
    )],
    # Values that turn other keys off, or are the default of another key of their group.
    *[(TRL | {"loss_type": "sigmoid", "ld_alpha": 0.0}, "ld_alpha"), (FACTORY | {"ld_alpha": 0.0}, "ld_alpha")],
    *[(TRL | GRPO | {key: some}, key) for key, some in (
        ("top_k", 1), ("min_p", 1.0), ("delta", 1.0), ("entropy_coef", 1.0), ("top_p", 0.0), ("repetition_penalty", 0),
    )],
    *[(TRL | {"num_ppo_epochs": 4, key: 1}, key) for key in ("missing_eos_penalty", "stop_token_id")],
    *[(AXOLOTL | {"rl": "grpo", "trl": GRPO | {key: 1}}, key) for key in ("top_k", "min_p", "replay_buffer_size")],
    (TRL | {"num_ppo_epochs": 4, "whiten_rewards": True}, "whiten_rewards"),
    (TRL | {"num_ppo_epochs": 4, "kl_estimator": "k3"}, "kl_estimator"),
    (TRL | {"beta": 0.1}, "objective.name=dpo"),
    (TRL | {"precompute_ref_log_probs": True}, "objective.name=dpo"),
    (FACTORY | {"ref_model": "another"}, "ref_model"),
    (FACTORY | {"pref_bco_weight": 1.0}, "pref_bco_weight"),
    (FACTORY | {"ld_alpha": 0.5}, "ld_alpha"),
    (FACTORY | {"pref_loss": "orpo", "pref_ftx": 1.0}, "pref_ftx"),
    (FACTORY | {"pref_loss": "ipo", "dpo_label_smoothing": 0.1}, "dpo_label_smoothing"),
    (AXOLOTL | {"rl": "dpo", "dpo_use_weighting": True}, "dpo_use_weighting"),
    (AXOLOTL | {"rl": "grpo", "trl": GRPO | {"num_iterations": 2}}, "trl.num_iterations"),
    (AXOLOTL | {"rl": "kto", "dpo_label_smoothing": 0.1}, "dpo_label_smoothing"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "said"), REFUSED)
def test_a_part_without_an_equal_is_refused(content: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        convert(tmp_path, {"a.yaml": content})
    assert said in refused.value.line() and "\n" not in refused.value.line()


OFF_VALUES = [
    ("top_k", -1), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("repetition_penalty", 1.0), ("num_iterations", 1),
    ("entropy_coef", 0.0), ("delta", None), ("importance_sampling_level", "token"), ("sync_ref_model", False),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), OFF_VALUES)
def test_a_part_that_is_off_is_not_refused(key: str, value: Any, tmp_path: Path) -> None:
    assert objective(tmp_path, TRL | GRPO | {key: value}) is not None


@pytest.mark.parametrize(
    ("name", "made"), [("dpo", "dpo"), ("ipo", "ipo"), ("orpo", "orpo"), ("simpo", "simpo"), ("kto", "kto")]
)
@pytest.mark.parametrize("key", ["objective", "objective.name"])
def test_the_command_line_says_the_trainer_where_trl_does_not(
    name: str, made: str, key: str, tmp_path: Path
) -> None:
    spec = objective(tmp_path, TRL | {"beta": 0.3}, overrides=[f"{key}={name}"])
    assert spec is not None and (spec.name, spec.beta) == (made, 0.3)


def test_the_reference_packing_lengths_rate_and_dropout_of_trl(tmp_path: Path) -> None:
    dpo = {"loss_type": "sigmoid", "precompute_ref_log_probs": True, "padding_free": True, "use_peft": True}
    made = convert(tmp_path, {"a.yaml": TRL | dpo})
    assert value(made, "strategy.reference") == "precomputed" and value(made, "data.packing") is True
    assert value(made, "optimizer.learning_rate") == 1e-6 and value(made, "data.sequence_length") == 1024
    assert value(made, "adapter.dropout") == 0.0  # TRL's disable_dropout
    for asked, kept in ((True, 0.0), (False, 0.1)):
        made = convert(tmp_path, {"a.yaml": TRL | dpo | {"disable_dropout": asked, "lora_dropout": 0.1}})
        assert value(made, "adapter.dropout") == kept
        assert row(made, "disable_dropout").status == ("mapped" if asked else "not needed")
    for stage, kept in (("dpo", 0.0), ("kto", 0.0), ("rm", 0.1)):
        made = convert(tmp_path, {"a.yaml": FACTORY | {"stage": stage, "lora_dropout": 0.1}})
        assert value(made, "adapter.dropout") == kept
    made = convert(
        tmp_path, {"a.yaml": TRL | GRPO | {"max_prompt_length": 256, "max_completion_length": 768}}
    )
    assert value(made, "data.sequence_length") == 1024 and value(made, "objective.completion_length") == 768
    made = convert(tmp_path, {"a.yaml": TRL | {"packing": True, "padding_free": True}})
    assert value(made, "objective") is None and value(made, "data.packing") is True


def test_what_is_assumed_and_what_is_lost_is_said(tmp_path: Path) -> None:
    made = convert(tmp_path, {"a.yaml": TRL | {"loss_type": ["sigmoid"], "max_prompt_length": 128}})
    assert row(made, "objective.name").status == "assumed" and "cpo" in row(made, "objective.name").detail
    assert row(made, "max_prompt_length").status == "no equivalent"
    for asked, key in (
        ({"rpo_alpha": 1.0}, "objective.nll_weight"),
        ({"loss_type": "simpo"}, "objective.nll_weight"),
    ):
        assert (
            "over all tokens of a batch there" in row(convert(tmp_path, {"a.yaml": TRL | asked}), key).detail
        )
    orpo = convert(tmp_path, {"a.yaml": AXOLOTL | {"rl": "orpo"}})
    assert "prompts included" in row(orpo, "objective.name").detail
    for asked in ({"pref_ftx": 0.1}, {"pref_loss": "orpo"}):  # the same likelihood as here
        assert not [
            each for each in convert(tmp_path, {"a.yaml": FACTORY | asked}).rows if "there" in each.detail
        ]
    made = convert(tmp_path, {"a.yaml": FACTORY | {"stage": "sft", "pref_beta": 0.2, "pref_loss": "ipo"}})
    assert {row(made, key).status for key in ("pref_beta", "pref_loss")} == {"no equivalent"}


def test_pairs_of_llamafactory_and_axolotl_have_their_format(tmp_path: Path) -> None:
    pairs = {
        "ranking": True,
        "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"},
    }
    chats = {
        "formatting": "sharegpt",
        "ranking": True,
        "columns": pairs["columns"] | {"messages": "conversations"},
    }
    labels = {"columns": {"messages": "messages", "kto_tag": "label"}, "formatting": "sharegpt"}
    info = {
        "a": pairs,
        "b": chats,
        "c": labels,
        "d": pairs | {"columns": {"chosen": "good", "rejected": "bad"}},
    }
    for name, stage, form in (
        ("a", "dpo", "preference"),
        ("b", "rm", "preference"),
        ("c", "kto", "unpaired"),
    ):
        asked = FACTORY | {"dataset": name, "dataset_dir": "data", "stage": stage}
        made = convert(tmp_path, {"a.yaml": asked, "data/dataset_info.json": info})
        assert value(made, "data.format") == form and not made.of("no equivalent")
    asked = FACTORY | {"dataset": "d", "dataset_dir": "data"}
    made = convert(tmp_path, {"a.yaml": asked, "data/dataset_info.json": info})
    assert "good" in row(made, "dataset").detail
    for kind, form in (
        ("chat_template.default", "preference"),
        ("llama3.ultra", "preference"),
        ("chatml.intel", None),
    ):
        asked = AXOLOTL | {"rl": "dpo", "datasets": [{"path": "p.jsonl", "type": kind}]}
        made = convert(tmp_path, {"a.yaml": asked})
        assert value(made, "data.format") == form
        assert row(made, "datasets[0].type").status == ("mapped" if form else "no equivalent")
