"""Files that ask for a training that Shardwise cannot do, or that are of no known trainer, are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import run
from shardwise.core.errors import RecipeError
from tests.plugins.importers.foreign import convert, row, value, written

LLAMA_FACTORY: dict[str, Any] = {
    "model_name_or_path": "m",
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 8,
}
AXOLOTL: dict[str, Any] = {"base_model": "m", "micro_batch_size": 1, "num_epochs": 1}
TRL: dict[str, Any] = {"model_name_or_path": "m", "per_device_train_batch_size": 1, "num_train_epochs": 1}
TORCHTITAN: dict[str, Any] = {
    "job": {},
    "model": {"name": "llama3", "flavor": "8B"},
    "training": {"steps": 10},
}

LOST: list[tuple[dict[str, Any], str]] = [
    *[(LLAMA_FACTORY | {"stage": stage}, f"stage: {stage}") for stage in ("ppo",)],
    *[(LLAMA_FACTORY | {"finetuning_type": kind}, f"finetuning_type: {kind}") for kind in ("freeze", "oft")],
    *[(LLAMA_FACTORY | {key: True}, key) for key in ("use_dft_loss", "use_asft_loss", "use_eaft_loss")],
    (LLAMA_FACTORY | {"use_llama_pro": True}, "use_llama_pro"),
    (LLAMA_FACTORY | {"mixture_of_depths": "convert"}, "mixture_of_depths: convert"),
    *[(AXOLOTL | {"rl": kind}, f"rl: {kind}") for kind in ("gdpo", "ebft")],
    *[(AXOLOTL | {key: True}, key) for key in ("process_reward_model", "kd_trainer", "relora")],
    (AXOLOTL | {"adapter": "llama-adapter"}, "adapter: llama-adapter"),
    (AXOLOTL | {"unfrozen_parameters": ["^lm_head.weight$"]}, "unfrozen_parameters"),
    (AXOLOTL | {"plugins": ["axolotl.integrations.kd.KDPlugin"]}, "KDPlugin"),
    (AXOLOTL | {"plugins": ["my_company.ObjectivePlugin"]}, "ObjectivePlugin"),
    (TRL | {"beta": 0.1}, "beta: 0.1"),  # DPOConfig, or another's
    (TRL | {"loss_type": "hinge"}, "loss_type: hinge"),
    (TRL | {"loss_type": "dft"}, "loss_type: dft"),  # of SFTTrainer
    (TRL | {"max_prompt_length": 512}, "max_prompt_length: 512"),  # KTOConfig, or another's
    (TRL | {"max_length": 512, "teacher_model_name_or_path": "t"}, "teacher_model_name_or_path: t"),  # GKDConfig
    (TORCHTITAN | {"training": {"classifier_free_guidance_prob": 0.1}}, "classifier_free_guidance_prob: 0.1"),  # flux
]  # fmt: skip


@pytest.mark.parametrize(("content", "said"), LOST, ids=[said for _, said in LOST])
def test_another_objective_is_refused(
    content: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = written(tmp_path, {"a.yaml": content}), tmp_path / "recipe.yaml"
    assert run(["from", str(path), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and said in printed.err and str(path) in printed.err
    assert not out.exists() and not printed.out
    assert run(["plan", str(path)]) == 2
    assert said in capsys.readouterr().err


HARMLESS = [
    (LLAMA_FACTORY | {"pref_beta": 0.1, "use_dft_loss": False, "mixture_of_depths": None, "reward_model": None}),
    (AXOLOTL | {"rl": None, "reward_model": False, "plugins": ["axolotl.integrations.liger.LigerPlugin"]}),
    (AXOLOTL | {"adapter": ""}),
    (AXOLOTL | {"rl": "", "unfrozen_parameters": None, "trl": None, "dpo_label_smoothing": None}),
    (TRL | {"loss_type": "nll", "packing": True, "beta": None}),
    (TRL | {"loss_type": None, "max_length": 128}),
]  # fmt: skip


@pytest.mark.parametrize("content", HARMLESS)
def test_keys_of_another_objective_that_are_off_are_no_reason(
    content: dict[str, Any], tmp_path: Path
) -> None:
    assert value(convert(tmp_path, {"a.yaml": content}), "model.preset") == "llama-3-8b"


STRANGERS: list[tuple[str, Any, str]] = [
    ("torchtune", {"model": {"_component_": "torchtune.x"}, "batch_size": 2, "epochs": 1}, "_component_"),
    ("ms-swift", {"model": "m", "train_type": "lora", "num_train_epochs": 1, "learning_rate": 1e-4}, "train_type"),
    ("LLaMA-Factory v1", {"model": "m", "model_class": "llm", "train_dataset": "d.yaml"}, "model_class"),
    ("Megatron-LM", {"tensor_model_parallel_size": 8, "micro_batch_size": 1, "seed": 1}, "tensor_model_parallel_size"),
    ("verl", {"actor_rollout_ref": {"model": {"path": "m"}}, "trainer": {"nnodes": 1}}, "actor_rollout_ref"),
    ("Foundry", {"max_duration": "1ep", "global_train_batch_size": 8, "model": {"name": "m"}}, "max_duration"),
    ("MLX", {"model": "m", "train": True, "fine_tune_type": "lora", "iters": 100}, "fine_tune_type"),
    ("Python configurations", {"model_spec": {"name": "l"}, "training": {}, "parallelism": {}}, "model_spec"),
    ("adapter_config", {"peft_type": "LORA", "r": 8, "lora_alpha": 16}, "peft_type"),
    ("model of transformers", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "architectures"),
    ("no known trainer", {"base_model": "m", "task": "sft", "log": "none", "hub": {}}, "task, log, hub"),
    (
        "no known trainer",
        {"num_train_epochs": 1, "learning_rate": 1e-4, "data_path": "d", "lora_r": 8, "cool_flag": 1},
        "data_path, lora_r, cool_flag",
    ),
    ("no known trainer", {"some": "thing"}, "give --format"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "keys"), STRANGERS)
def test_a_file_of_another_trainer_is_refused_by_name_and_keys(
    name: str, content: dict[str, Any], keys: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as refused:
        convert(tmp_path, {"a.yaml": content})
    line = refused.value.line()
    assert name in line and keys in line and "a.yaml" in line and "\n" not in line


def test_plan_says_whose_file_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, {"a.yaml": {"model": {"_component_": "x"}, "epochs": 1}})
    assert run(["plan", str(path)]) == 2
    assert "files of torchtune are not read" in capsys.readouterr().err


def test_a_named_format_reads_a_strange_file_and_names_its_keys(tmp_path: Path) -> None:
    content = {"num_train_epochs": 1, "learning_rate": 1e-4, "data_path": "d", "lora_r": 8, "cool_flag": 1}
    made = convert(tmp_path, {"a.yaml": content}, kind="trainer")
    assert [each.key for each in made.of("unknown")] == ["data_path", "lora_r", "cool_flag"]
    assert value(made, "optimizer.learning_rate") == 1e-4 and row(made, "data_path").status == "unknown"


RECOGNISED: list[tuple[dict[str, Any], str, str]] = [
    ({"train_batch_size": 8, "zero_optimization": {"stage": 1}}, "deepspeed", "train_batch_size"),
    ({"distributed_type": "NO"}, "accelerate", "distributed_type"),
    ({"lr_scheduler_type": "cosine"}, "trainer", "lr_scheduler_type"),
    (TRL, "trainer", "num_train_epochs"),
    (TRL | {"packing": True}, "trl", "packing"),
    (LLAMA_FACTORY, "llamafactory", "finetuning_type"),
    (TRL | {"cutoff_len": 2048, "template": "qwen"}, "llamafactory", "cutoff_len"),
    (AXOLOTL, "axolotl", "base_model"),
    ({"checkpoint_dir": "c", "train": {"epochs": 1}}, "litgpt", "checkpoint_dir"),
    (TORCHTITAN, "torchtitan", "job"),
]


@pytest.mark.parametrize(("content", "form", "key"), RECOGNISED)
def test_a_file_is_recognised_by_keys_that_are_shown(
    content: dict[str, Any], form: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = convert(tmp_path, {"a.yaml": content})
    assert made.format.name == form and key in made.keys
    assert run(["from", str(tmp_path / "a.yaml"), "--model", "llama-3-8b"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"a.yaml ({made.format.title}, recognised by " in said and key in said
