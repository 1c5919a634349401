"""A file that names another: explicit values beat defaults, differing ones are refused, ``auto`` takes the other's.

The judge is transformers' own integration, which fills ``auto`` and lists mismatches (``fill_match``).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.core.errors import RecipeError
from tests.plugins.importers.foreign import convert, row, value

ARGUMENTS: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 100, "deepspeed": "ds.json"}
TRAINER = {
    "world_size": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0,
    "learning_rate": 5e-5, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0,
    "fp16": False, "bf16": False, "fp16_full_eval": False, "bf16_full_eval": False, "save_on_each_node": False,
}  # fmt: skip
"""The defaults of TrainingArguments that the integration reads."""

PAIRS = [
    ("per_device_train_batch_size", 4, "train_micro_batch_size_per_gpu", 4, 2),
    ("gradient_accumulation_steps", 4, "gradient_accumulation_steps", 4, 8),
    ("max_grad_norm", 0.5, "gradient_clipping", 0.5, 1.0),
    ("learning_rate", 2e-5, "optimizer.params.lr", 2e-5, 1e-4),
    ("learning_rate", "2e-5", "scheduler.params.warmup_max_lr", 2e-5, 3e-5),
    ("adam_beta1", 0.8, "optimizer.params.betas", [0.8, 0.999], [0.9, 0.999]),
    ("adam_beta2", 0.9, "optimizer.params.betas", [0.9, 0.9], [0.9, 0.95]),
    ("adam_epsilon", 1e-6, "optimizer.params.eps", 1e-6, 1e-8),
    ("weight_decay", 0.1, "optimizer.params.weight_decay", 0.1, 0.01),
    ("bf16", True, "bf16.enabled", True, False),
    ("fp16", True, "fp16.enabled", True, False),
]


def nested(path: str, value: Any, into: dict[str, Any] | None = None) -> dict[str, Any]:
    """A value at a dotted path."""
    made: dict[str, Any] = {} if into is None else into
    inner = made
    *sections, last = path.split(".")
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[last] = value
    return made


def mismatches(arguments: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """What transformers refuses of these two files."""
    accelerate = pytest.importorskip("accelerate.utils.deepspeed")
    integration = pytest.importorskip("transformers.integrations.deepspeed")

    class Judge(integration.HfTrainerDeepSpeedConfig, accelerate.HfDeepSpeedConfig):  # type: ignore[misc]
        def __init__(self, config: dict[str, Any]) -> None:
            accelerate.HfDeepSpeedConfig.__init__(self, config)
            self.mismatches: list[str] = []

    judge = Judge(config)
    numbers = {key: float(each) if key == "learning_rate" else each for key, each in arguments.items()}
    judge.trainer_config_process(SimpleNamespace(**(TRAINER | numbers)))
    return judge.mismatches


@pytest.mark.parametrize(("key", "said", "path", "same", "other"), PAIRS)
def test_files_are_refused_where_transformers_refuses_them(
    key: str, said: Any, path: str, same: Any, other: Any, tmp_path: Path
) -> None:
    for ours in (same, other, "auto"):
        config = nested(path, ours, {"zero_optimization": {"stage": 2}})
        asked = {**ARGUMENTS, key: said}
        files = {"args.json": asked, "ds.json": config}
        if mismatches(asked, config):
            assert ours == other
            with pytest.raises(RecipeError) as refused:
                convert(tmp_path, files, world="8")
            line = refused.value.line()
            assert all(word in line for word in ("args.json", "ds.json", key, path, str(said))), line
        else:
            made = convert(tmp_path, files, world="8")
            found = row(made, f"ds.json: {path}")
            assert ours != other and found.status == "mapped"
            assert row(made, key).detail.partition(", ")[0] in found.detail


@pytest.mark.parametrize(("key", "said", "path", "same", "other"), PAIRS)
def test_an_explicit_value_beats_a_default_of_the_other(
    key: str, said: Any, path: str, same: Any, other: Any, tmp_path: Path
) -> None:
    config = nested(path, same, {"zero_optimization": {"stage": 2}})
    config |= {"optimizer": {"type": "AdamW", **config.get("optimizer", {})}}
    alone = {"max_steps": 100, "num_train_epochs": 1, "deepspeed": "ds.json"}
    made = convert(tmp_path, {"args.json": alone, "ds.json": config}, world="8")
    target = row(made, f"ds.json: {path}").detail.partition(", ")[0]
    wanted = {"strategy.precision": key, "batch_size": 8 * 4 * 8}.get(
        target, same
    )  # 8 is the default micro-batch
    assert value(made, target) == wanted
    assert any(source.startswith("ds.json: ") for source in made.sources[target])


PRECISIONS = [
    # DeepSpeed's bf16.enabled and fp16.enabled, the precision, and whether it is assumed
    ("auto", False, "bf16", True),
    ("auto", "auto", "bf16", True),
    ("auto", None, "bf16", True),
    (None, "auto", "bf16", True),
    (False, "auto", "fp16", True),
    (True, False, "bf16", False),
    (False, True, "fp16", False),
    (True, "auto", "bf16", False),
    ("auto", True, "fp16", False),
    (False, False, "fp32", False),
    (None, False, "fp32", False),
    (False, None, "fp32", False),
    (None, None, "fp32", False),
    ("True", "false", "bf16", False),
    ("Auto", False, "bf16", True),
]


@pytest.mark.parametrize(("bf16", "fp16", "precision", "assumed"), PRECISIONS)
def test_the_precision_of_a_deepspeed_file(
    bf16: Any, fp16: Any, precision: str, assumed: bool, tmp_path: Path
) -> None:
    config: dict[str, Any] = {"train_batch_size": 8}
    config |= {name: {"enabled": on} for name, on in (("bf16", bf16), ("fp16", fp16)) if on is not None}
    made = convert(tmp_path, {"ds.json": config})
    assert value(made, "strategy.precision") == precision
    assert ("strategy.precision" in [each.key for each in made.of("assumed")]) == assumed
    if bf16 == "auto" and assumed:
        assert row(made, "bf16.enabled").status == "not needed"
        assert "auto" in row(made, "bf16.enabled").detail


@pytest.mark.parametrize("form", ["args.json", "lf.yaml", "axolotl.yaml", "accelerate.yaml", "trl.yaml"])
@pytest.mark.parametrize(
    ("bf16", "fp16", "precision"),
    [(True, None, "bf16"), (None, True, "fp16"), (True, False, "bf16"), (False, False, "fp32")],
)
def test_auto_takes_the_precision_of_the_file_that_names_it(
    form: str, bf16: bool | None, fp16: bool | None, precision: str, tmp_path: Path
) -> None:
    own = {name: on for name, on in (("bf16", bf16), ("fp16", fp16)) if on is not None}
    word = {"fp32": "no"}.get(precision, precision)
    first: dict[str, Any] = {
        "args.json": {**ARGUMENTS, **own},
        "lf.yaml": {**ARGUMENTS, "stage": "sft", "finetuning_type": "full", **own},
        "axolotl.yaml": {"base_model": "m", "deepspeed": "ds.json", **own},
        "trl.yaml": {**ARGUMENTS, "packing": True, **own},
        "accelerate.yaml": {
            "distributed_type": "DEEPSPEED", "mixed_precision": word,
            "deepspeed_config": {"deepspeed_config_file": "ds.json"},
        },
    }[form]  # fmt: skip
    config = {name: {"enabled": "auto"} for name in ("bf16", "fp16")} | {"zero_optimization": {"stage": 3}}
    made = convert(tmp_path, {form: first, "ds.json": config})
    assert value(made, "strategy.precision") == precision and value(made, "strategy.zero_stage") == 3
    assert "strategy.precision" not in [each.key for each in made.of("assumed")]


def test_without_a_statement_the_trainer_fills_auto_and_accelerate_leaves_it_open(tmp_path: Path) -> None:
    """TrainingArguments have bf16 and fp16 false; a file of Accelerate leaves them to the script."""
    config = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}
    trainer = convert(tmp_path, {"args.json": ARGUMENTS, "ds.json": config})
    assert value(trainer, "strategy.precision") == "fp32"
    section = {"deepspeed_config_file": "ds.json"}
    files = {"a.yaml": {"distributed_type": "DEEPSPEED", "deepspeed_config": section}, "ds.json": config}
    accelerate = convert(tmp_path, files)
    assert value(accelerate, "strategy.precision") == "bf16"
    assert "strategy.precision" in [each.key for each in accelerate.of("assumed")]


@pytest.mark.parametrize(
    "files",
    [
        {"a.json": {**ARGUMENTS, "bf16": True}, "ds.json": {"fp16": {"enabled": True}}},
        {"a.json": {**ARGUMENTS, "bf16": True, "fp16": True}, "ds.json": {"bf16": {"enabled": "auto"}}},
        {"ds.json": {"train_batch_size": 8, "bf16": {"enabled": True}, "fp16": {"enabled": True}}},
        {"a.yaml": {"base_model": "m", "bf16": True, "fp16": True}},
    ],
)
def test_two_precisions_are_refused(files: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"bf16.*fp16"):
        convert(tmp_path, files)


CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (
        {"base_model": "m", "micro_batch_size": 4, "deepspeed": "ds.json"},
        {"train_micro_batch_size_per_gpu": 2}, "micro_batch_size: 4", "train_micro_batch_size_per_gpu: 2",
    ),
    (
        {"base_model": "m", "learning_rate": 2e-4, "deepspeed": "ds.json"},
        {"optimizer": {"params": {"lr": 1e-4}}}, "learning_rate: 0.0002", "optimizer.params.lr: 0.0001",
    ),
    (
        {"stage": "sft", "per_device_train_batch_size": 4, "deepspeed": "ds.json"},
        {"train_micro_batch_size_per_gpu": 2}, "per_device_train_batch_size: 4", "train_micro_batch_size_per_gpu: 2",
    ),
    (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero_stage": 3}},
        {"zero_optimization": {"stage": 2}}, "zero_stage: 3", "zero_optimization.stage: 2",
    ),
    (
        {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16",
         "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
        {"bf16": {"enabled": False}, "zero_optimization": {}}, "mixed_precision: bf16", "bf16.enabled: False",
    ),
    (
        {"num_train_epochs": 3, "deepspeed": "ds.json"},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}}}, "num_train_epochs", "5000",
    ),
    (
        {"num_train_epochs": 3, "max_steps": 400, "deepspeed": "ds.json"},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}}}, "max_steps", "5000",
    ),
    (
        {"per_device_train_batch_size": 3, "max_steps": 100, "warmup_ratio": 0.1, "deepspeed": "ds.json"},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}}}, "warmup_ratio", "50 steps",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("first", "config", "one", "two"), CONTRADICTIONS)
def test_contradictions_name_both_files_keys_and_values(
    first: dict[str, Any], config: dict[str, Any], one: str, two: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as refused:
        convert(tmp_path, {"first.yaml": first, "ds.json": config}, world="8")
    line = refused.value.line()
    assert all(word in line for word in ("first.yaml", "ds.json", one, two)), line
    assert line.count("\n") == 0 and refused.value.exit_code == 2


def test_several_contradictions_are_one_line(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"params": {"lr": 1e-4, "betas": [0.8, 0.9]}}}
    asked = {
        "learning_rate": 2e-5,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "adam_beta1": 0.9,
    }
    with pytest.raises(RecipeError, match=r"0\.0001.*1 more"):
        convert(tmp_path, {"a.json": {**asked, "deepspeed": "ds.json"}, "ds.json": config}, world="8")


def test_a_length_of_the_schedule_is_the_length_of_the_run(tmp_path: Path) -> None:
    config = {
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000, "warmup_num_steps": 10}}
    }
    for asked in (
        {"per_device_train_batch_size": 2},
        {**ARGUMENTS, "max_steps": 5000},
        {**ARGUMENTS, "max_steps": -1},
    ):
        files = {"a.json": {**asked, "deepspeed": "ds.json"}, "ds.json": config}
        made = convert(tmp_path, files, world="8")
        assert value(made, "steps") == 5000 and value(made, "epochs") is None
        assert value(made, "schedule") == {"name": "linear", "warmup": 10, "floor": 0.0}
        assert row(made, "ds.json: scheduler.params.total_num_steps").detail == "steps"


def test_optimizer_and_scheduler_of_a_deepspeed_file_replace_the_trainers(tmp_path: Path) -> None:
    """So does transformers, without a word; here the row says it."""
    config = {
        "optimizer": {"type": "AdamW"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    }
    asked = {**ARGUMENTS, "optim": "adamw_bnb_8bit", "lr_scheduler_type": "cosine", "warmup_steps": 7}
    made = convert(tmp_path, {"a.json": asked, "ds.json": config})
    assert value(made, "optimizer.name") == "adamw"
    assert value(made, "schedule") == {"name": "constant", "warmup": 7}
    for key, by in (("optim", "optimizer.type: AdamW"), ("lr_scheduler_type", "scheduler.type: WarmupLR")):
        assert row(made, key).status == "no equivalent" and f"ds.json: {by} is used" in row(made, key).detail


def test_defaults_of_batch_sizes_give_way_to_the_global_batch(tmp_path: Path) -> None:
    """DeepSpeed computes the third of the three numbers from the other two."""
    files = {"a.json": {"num_train_epochs": 1, "deepspeed": "ds.json"}, "ds.json": {"train_batch_size": 256}}
    made = convert(tmp_path, files, world="8")
    assert (value(made, "batch_size"), value(made, "strategy.micro_batch_size")) == (256, 8)
    files["a.json"] |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}
    with pytest.raises(RecipeError, match=r"train_batch_size.*256.*per_device_train_batch_size: 8"):
        convert(tmp_path, files, world="8")


def test_options_of_the_command_line_replace_the_file_and_its_row_says_so(tmp_path: Path) -> None:
    made = convert(tmp_path, {"a.yaml": {"base_model": "big/model", "world_size": 64}}, world="8")
    assert value(made, "model") == {"preset": "llama-3-8b"} and value(made, "cluster.devices_per_node") == 8
    assert row(made, "base_model").detail == "--model llama-3-8b is used instead"
    assert row(made, "world_size").detail == "--world 8 is used instead"
    parallel = {"distributed_type": "FSDP", "num_processes": 8, "parallelism_config": {
        "parallelism_config_dp_shard_size": 4, "parallelism_config_dp_replicate_size": 2}}  # fmt: skip
    assert value(convert(tmp_path, {"b.yaml": parallel}), "strategy.replicate") == 2
    with pytest.raises(
        RecipeError, match=r"dp_shard_size: 4.*dp_replicate_size: 2 on 16 devices \(--world\)"
    ):
        convert(tmp_path, {"b.yaml": parallel}, world="16")


def test_a_section_may_be_a_file_or_json_in_text(tmp_path: Path) -> None:
    files: dict[str, Any] = {
        "a.json": {**ARGUMENTS, "fsdp": "full_shard", "fsdp_config": "fsdp.json", "deepspeed": None},
        "fsdp.json": {"reshard_after_forward": False, "activation_checkpointing": True},
    }
    made = convert(tmp_path, files)
    assert value(made, "strategy.zero_stage") == 2
    assert (
        row(made, "fsdp.json: fsdp_config.activation_checkpointing").detail
        == "strategy.activation_checkpointing"
    )
    text = '{"zero_optimization": {"stage": 3}}'
    assert value(convert(tmp_path, {"b.json": {**ARGUMENTS, "deepspeed": text}}), "strategy.zero_stage") == 3
    with pytest.raises(RecipeError, match="not JSON"):
        convert(tmp_path, {"b.json": {**ARGUMENTS, "deepspeed": text[:-1]}})


def test_a_section_of_the_file_itself_is_another_file_to_it(tmp_path: Path) -> None:
    """DeepSpeed's settings as a mapping in the Trainer's arguments."""
    config: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 3},
    }
    asked = {**ARGUMENTS, "optim": "adamw_bnb_8bit", "learning_rate": 2e-5, "deepspeed": config}
    made = convert(tmp_path, {"a.json": asked})
    assert value(made, "optimizer") | {"name": "adamw", "learning_rate": 2e-5} == value(made, "optimizer")
    assert "deepspeed.optimizer.type: AdamW is used" in row(made, "optim").detail
    config["optimizer"]["params"]["lr"] = 1e-4
    with pytest.raises(
        RecipeError, match=r"learning_rate: 2e-05 in a.json, optimizer.params.lr: 0.0001 in a.json: deepspeed"
    ):
        convert(tmp_path, {"a.json": asked})
    length = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 7}}}
    with pytest.raises(RecipeError, match="two lengths of the run"):
        convert(tmp_path, {"a.json": {"num_train_epochs": 3, "deepspeed": length}})
