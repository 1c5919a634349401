"""Values and defaults of other trainers mean in the recipe what they mean there, by the sources of those trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plugins.importers.foreign import convert, row, value

TRAINER: dict[str, Any] = {"per_device_train_batch_size": 4, "learning_rate": 1e-4}
AXOLOTL: dict[str, Any] = {"base_model": "m", "learning_rate": 1e-4}
LITGPT: dict[str, Any] = {
    "checkpoint_dir": "c",
    "train": {"min_lr": 6e-5, "epochs": 2, "lr_warmup_steps": 10},
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 2e-4}},
}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trainer.json", TRAINER | {"lr_scheduler_type": "constant"}),
        ("llamafactory.yaml", TRAINER | {"stage": "sft", "lr_scheduler_type": "constant"}),
        ("axolotl.yml", AXOLOTL | {"lr_scheduler": "constant"}),
    ],
)
def test_the_constant_schedule_of_transformers_has_no_warmup(
    tmp_path: Path, name: str, content: dict[str, Any]
) -> None:
    assert value(convert(tmp_path, {name: content}), "schedule.warmup") == 0
    made = convert(tmp_path, {name: content | {"warmup_ratio": 0.03}})
    assert value(made, "schedule.warmup") == 0
    assert row(made, "warmup_ratio").status == "no equivalent"


def test_a_constant_schedule_with_warmup_keeps_it(tmp_path: Path) -> None:
    content = TRAINER | {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.03}
    assert value(convert(tmp_path, {"trainer.json": content}), "schedule.warmup") == 0.03


def test_only_pretraining_of_litgpt_decays_to_min_lr(tmp_path: Path) -> None:
    made = convert(tmp_path, {"lora.yaml": LITGPT})
    assert value(made, "schedule.floor") == 0.0
    assert row(made, "train.min_lr").status == "no equivalent"
    pretraining = {("model_name" if key == "checkpoint_dir" else key): LITGPT[key] for key in LITGPT}
    assert value(convert(tmp_path, {"pretrain.yaml": pretraining}), "schedule.floor") == pytest.approx(0.3)


def test_litgpt_ends_after_its_steps_or_epochs(tmp_path: Path) -> None:
    train = LITGPT["train"] | {"max_steps": 7}
    made = convert(tmp_path, {"lora.yaml": LITGPT | {"train": train}})
    assert value(made, "steps") == 7
    assert row(made, "train.epochs").status == "no equivalent"
