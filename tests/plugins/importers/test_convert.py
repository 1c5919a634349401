"""Files of other trainers as recipes: every key has a row, values arrive, and faults are one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import run
from shardwise.core.errors import RecipeError
from shardwise.core.plan import Plan
from shardwise.plugins.importers.checked import is_foreign, read_imported
from shardwise.plugins.importers.convert import imported
from shardwise.plugins.importers.foreign import leaves, read_foreign
from tests.harness.plans import small_plan

FILES = Path(__file__).parent / "files"
ADAM = {"name": "adamw", "epsilon": 1e-8, "clip_norm": 1.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "ds_zero1_fp16.json": {
        "batch_size": 256,
        "steps": 50_000,
        "optimizer": ADAM | {"learning_rate": 1.5e-4, "betas": (0.9, 0.95), "weight_decay": 0.01},
        "schedule": {"name": "linear", "warmup": 1000, "floor": 0.0},
        "loss_scale": {"dynamic": True, "initial": 4096.0, "growth_interval": 500, "hysteresis": 2, "floor": 1.0},
        "cluster": {"devices_per_node": 8},  # 256 = 4 x 8 x 8
        "strategy": {"precision": "fp16", "zero_stage": 1, "micro_batch_size": 4},
    },
    "ds_zero2_offload.json": {
        "batch_size": 16,
        "optimizer": {"clip_norm": 0.5},
        "strategy": {
            "precision": "bf16", "zero_stage": 2, "micro_batch_size": 8, "offload": "activations+optimizer",
            "offload_fraction": 0.5, "reduce_dtype": "fp32", "activation_checkpointing": "full",
        },
    },
    "ds_zero3_auto.json": {
        "strategy": {"precision": "bf16", "zero_stage": 3, "offload": "optimizer+parameters"},
        "schedule": {"name": "constant"},
    },
    "ds_zeropp_nvme.json": {"batch_size": 64, "strategy": {"zero_stage": 3, "offload": "nvme:/local_nvme"}},
    "accelerate_fsdp.yaml": {
        "cluster": {"nodes": 2, "devices_per_node": 8},
        "strategy": {"precision": "bf16", "zero_stage": 3, "replicate": 2, "activation_checkpointing": "full"},
    },
    "accelerate_fsdp2.yaml": {
        "cluster": {"devices_per_node": 8},
        "strategy": {"precision": "fp8", "zero_stage": 3, "tensor_parallel": 2, "offload": "optimizer+parameters"},
    },
    "accelerate_deepspeed.yaml": {
        "batch_size": 16,  # 4 accumulated x 4 devices
        "strategy": {"precision": "bf16", "zero_stage": 3, "offload": "none"},
    },
    "accelerate_deepspeed_file.yaml": {
        "batch_size": 32,
        "strategy": {"precision": "bf16", "zero_stage": 2, "micro_batch_size": 8},
    },
    "accelerate_multi_cpu.yaml": {
        "cluster": {"device": "cpu", "devices_per_node": 2},
        "strategy": {"precision": "fp32", "zero_stage": 0},
    },
    "accelerate_megatron.yaml": {
        "batch_size": 16,  # 8 accumulated x 2 copies of 4 x 2 ranks
        "strategy": {
            "tensor_parallel": 4, "pipeline_parallel": 2, "zero_stage": 1, "activation_checkpointing": "selective"
        },
    },
    "trainer_full.json": {
        "epochs": 3.0,
        "batch_size": 32,
        "optimizer": ADAM | {"learning_rate": 2e-5, "weight_decay": 0.1, "betas": (0.9, 0.95)},
        "schedule": {"name": "cosine", "warmup": 0.03, "floor": 0.0},
        "checkpoint": {"every": 200, "keep": 3},
        "evaluation": {"every": 100},
        "strategy": {"precision": "bf16", "zero_stage": 3, "micro_batch_size": 4, "activation_checkpointing": "full"},
    },
    "trainer_run_clm.json": {
        "model": {"hf": "meta-llama/Llama-3.2-1B"},
        "data": {"source": "wikitext:wikitext-103-v1", "sequence_length": 1024, "held_out": 0.02},
        "steps": 4000,
        "optimizer": {"name": "adamw", "learning_rate": 1e-4},  # the DeepSpeed file's optimizer has priority
        "strategy": {"zero_stage": 3, "micro_batch_size": 2, "offload": "optimizer+parameters"},
    },
    "trainer_sft.json": {
        "data": {"packing": True, "sequence_length": 4096, "train_on": "completion"},
        "schedule": {"name": "cosine", "warmup": 0.1, "floor": 0.1},
        "optimizer": {"learning_rate": 2e-5, "betas": (0.9, 0.999)},
        "batch_size": 16,
    },
    "axolotl_lora.yml": {
        "data": {"source": "teknium/GPT4-LLM-Cleaned", "format": "alpaca", "packing": True, "held_out": 0.1},
        "adapter": {"rank": 16, "alpha": 32.0, "dropout": 0.05, "quantize": "none"},
        "optimizer": {"name": "adamw_8bit", "weight_decay": 0.0, "betas": (0.9, 0.999)},
        "batch_size": 4,
        "epochs": 1.0,
        "strategy": {"precision": "bf16", "activation_checkpointing": "full", "micro_batch_size": 2},
    },
    "axolotl_qlora_fsdp.yml": {
        "adapter": {
            "quantize": "nf4",
            "rank": 32,
            "targets": "all",
            "modules_to_save": ("embed_tokens", "lm_head"),
        },
        "schedule": {"floor": 0.1, "warmup": 10},
        "strategy": {"zero_stage": 3, "offload": "optimizer+parameters"},
    },
    "axolotl_full_long.yaml": {
        "data": {"source": "data/books.jsonl", "format": "text", "sequence_length": 32768},
        "optimizer": {"name": "adamw", "clip_norm": None},
        "strategy": {"offload": "activations", "activation_checkpointing": "full"},
        "checkpoint": {"every": 100, "keep": 1},
    },
    "litgpt_qlora.yaml": {
        "epochs": 2.0,
        "adapter": {"rank": 32, "alpha": 16.0, "targets": ("q_proj", "v_proj"), "quantize": "nf4"},
        "data": {"train_on": "all", "format": "alpaca"},
        "optimizer": {"clip_norm": None, "learning_rate": 2e-4, "betas": (0.9, 0.95)},
        "schedule": {"floor": 0.0},  # min_lr is of pretraining
    },
    "llamafactory_qlora.yaml": {
        "model": {"hf": "Qwen/Qwen3-8B"},
        "data": {"sequence_length": 4096, "packing": True, "held_out": 0.1},
        "adapter": {
            "name": "lora", "rank": 16, "alpha": 32.0, "dropout": 0.0, "targets": ("q_proj", "v_proj"),
            "quantize": "nf4", "learning_rate_ratio": 16.0,  # alpha is twice the rank, if it is left out
        },
        "optimizer": ADAM | {"learning_rate": 1e-4, "weight_decay": 0.0, "betas": (0.9, 0.999)},
        "schedule": {"name": "constant", "warmup": 0.1},  # of the DeepSpeed file
        "batch_size": 8,
        "epochs": 3.0,
        "evaluation": {"every": 500},
        "trackers": ("wandb",),
        "strategy": {
            "precision": "bf16", "zero_stage": 3, "offload": "optimizer+parameters", "micro_batch_size": 1,
            "activation_checkpointing": "full",  # LLaMA-Factory's default
        },
    },
    "trl_sft.yaml": {
        "data": {"packing": True, "sequence_length": 2048, "train_on": "completion", "source": "trl-lib/Capybara"},
        "adapter": {"name": "dora", "rank": 32, "alpha": 16.0, "dropout": 0.05, "targets": "all"},
        "batch_size": 128,
        "trackers": ("trackio",),
        "strategy": {"precision": "bf16", "zero_stage": 3, "activation_checkpointing": "full"},
    },
    "torchtitan_llama3_8b.toml": {
        "model": {"preset": "llama-3-8b"},
        "data": {
            "source": "allenai/c4:en", "tokenizer": "./assets/hf/Llama-3.1-8B", "sequence_length": 8192,
            "held_out": 0.0,
        },
        "steps": 1000,
        "batch_size": 16,
        "optimizer": ADAM | {"learning_rate": 3e-4, "weight_decay": 0.1, "betas": (0.9, 0.95)},
        "schedule": {"name": "wsd", "warmup": 200, "decay": 0.8, "decay_shape": "cosine", "floor": 0.1},
        "checkpoint": {"every": 500, "keep": 3, "background": True},
        "evaluation": {"every": 250, "sets": {"validation": "allenai/c4:en#validation"}, "sequences": 20 * 8 * 8},
        "trackers": ("tensorboard", "wandb"),
        "strategy": {
            "precision": "bf16", "zero_stage": 3, "replicate": 2, "tensor_parallel": 2, "micro_batch_size": 1,
            "activation_checkpointing": "full", "compile": "block",
        },
    },
    "torchtitan_2024.toml": {
        "model": {"preset": "llama-2-70b"},
        "data": {"sequence_length": 4096},
        "batch_size": 32,
        "schedule": {"name": "linear", "warmup": 200, "floor": 0.0},
        "checkpoint": {"every": None},
        "strategy": {
            "precision": "fp8", "zero_stage": 3, "tensor_parallel": 8, "activation_checkpointing": "selective",
            "micro_batch_size": 16,
        },
    },
    "litgpt_pretrain.yaml": {
        "steps": 2_861_023,  # 3e12 tokens by 512 x 2048
        "cluster": {"nodes": 2, "devices_per_node": 8},
        "schedule": {"warmup": 2000, "floor": 0.1},
    },
}  # fmt: skip
UNKNOWN = {"ds_zeropp_nvme.json": ["zero_optimisation.stage"]}


def converted(name: str) -> Any:
    world = {"axolotl_full_long.yaml": "8"}.get(name, "16" if name.startswith("torchtitan") else None)
    return imported(FILES / name, world=world)


def test_every_file_is_tested() -> None:
    assert sorted(CONFIGS) == sorted(path.name for path in FILES.iterdir()) and len(CONFIGS) >= 16


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_has_a_row_and_a_place_or_a_reason(name: str) -> None:
    found = converted(name)
    rows = {row.key: row for row in found.rows}
    assert len(rows) == len(found.rows)
    for _, key, _ in leaves(read_foreign(FILES / name)):
        row = rows.pop(key)
        assert row.detail and row.status in ("mapped", "not needed", "no equivalent", "unknown"), row
    rest = [row for row in rows.values() if row.status not in ("default", "assumed")]
    assert all(row.key.startswith("ds_zero") and row.detail for row in rest), (
        rest
    )  # of the file that a key names
    assert [row.key for row in found.rows if row.status == "unknown"] == UNKNOWN.get(name, [])


@pytest.mark.parametrize("name", CONFIGS)
def test_values_arrive_in_the_recipe(name: str) -> None:
    found = converted(name)
    recipe, _ = read_imported(found)  # passes the checks and the rules of every recipe
    for section, expected in CONFIGS[name].items():
        value = getattr(recipe, section)
        if not isinstance(expected, dict):
            assert value == expected, section
            continue
        for key, wanted in expected.items():
            assert (value[key] if section == "strategy" else getattr(value, key)) == wanted, (
                f"{section}.{key}"
            )
    targets = {target for row in found.rows if row.status == "mapped" for target in row.detail.split(", ")}
    for target in targets:  # a row that says "mapped" names a key that the recipe has
        assert re.search(rf"^(  )?{target.rpartition('.')[2]}: ", found.text(), re.MULTILINE), target


def test_devices_of_the_command_line_replace_those_of_the_file() -> None:
    found = imported(FILES / "accelerate_fsdp.yaml", model="llama-3-8b", world="4x8xA100-80GB")
    recipe, cluster = read_imported(found)
    megatron = imported(FILES / "accelerate_megatron.yaml", model="llama-3-8b")
    assert read_imported(megatron)[0].strategy["tensor_sequence_parallel"] == "gathered"  # not with model.hf
    assert (cluster.nodes, cluster.devices_per_node, cluster.device.name) == (4, 8, "A100-80GB")
    assert recipe.model.preset == "llama-3-8b" and recipe.strategy["replicate"] == 4
    with pytest.raises(RecipeError, match="train_batch_size is not micro-batch x accumulation x devices"):
        imported(FILES / "ds_zero1_fp16.json", world="4")


@pytest.mark.parametrize(("asked", "shape"), [({}, "cosine"), ({"decay_type": "1-sqrt"}, "sqrt")])
def test_the_decay_of_wsd_has_the_shape_of_transformers(
    asked: dict[str, str], shape: str, tmp_path: Path
) -> None:
    """Whose default is half a cosine (``get_wsd_schedule``)."""
    kwargs = {"num_decay_steps": 400, **asked}
    values = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": kwargs, "max_steps": 4000}
    (tmp_path / "args.json").write_text(json.dumps({"output_dir": "out", "num_train_epochs": 3.0, **values}))
    recipe, _ = read_imported(imported(tmp_path / "args.json", model="gpt2-124m"))
    schedule = recipe.schedule
    assert (schedule.name, schedule.decay, schedule.decay_shape) == ("wsd", 400, shape)


def test_an_override_replaces_an_assumed_value() -> None:
    found = imported(FILES / "ds_zero2_offload.json", overrides=["cluster.preset=8xA100-80GB", "epochs=2"])
    recipe, cluster = read_imported(found)
    assert cluster.device.name == "A100-80GB" and recipe.epochs == 2
    assert re.search("^epochs: 2 +# command line$", found.text(), re.MULTILINE)


def test_other_keys_are_unknown_with_the_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"train_batch_size": 8, "gradient_cliping": 1.0, "zero_optimization": {"stages": 2}})
    )
    rows = {row.key: row for row in imported(path).rows}
    assert "did you mean gradient_clipping?" in rows["gradient_cliping"].detail
    assert "did you mean zero_optimization.stage?" in rows["zero_optimization.stages"].detail
    assert (
        imported(path)
        .sentence()
        .endswith("2 without an equivalent: gradient_cliping, zero_optimization.stages")
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"train_batch_size": 8,}', "a.json:1"),
        ("a.yaml", "base_model: x\n  bad: [", "a.yaml:"),
        ("a.json", "[1]", "no keys at its top level"),
        ("a.yaml", "some: thing\n", "give --format"),
        ("a.json", '{"train_batch_size": "many", "train_micro_batch_size_per_gpu": 1}', "is no number"),
    ],
)
def test_a_fault_of_the_file_is_one_line(
    name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert run(["from", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and said in err, err


def test_the_command_writes_a_recipe_that_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new folder" / "recipe.yaml"
    given = [str(FILES / "ds_zero1_fp16.json"), "--model", "gpt2-124m", "--out", str(out)]
    assert run(["from", *given]) == 0
    said = capsys.readouterr().out
    assert "optimizer.params.lr" in said and "21 keys mapped" in said and f"shardwise plan {out}" in said
    assert not is_foreign(out) and is_foreign(FILES / "axolotl_lora.yml")
    assert "# zero_optimization.stage" in out.read_text()
    assert run(["from", *given[:3], "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["format"] == "deepspeed" and values["recipe"]["model"] == {"preset": "gpt2-124m"}


def test_a_precision_of_auto_is_said_to_be_the_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yml").write_text("base_model: x\nbf16: auto\nmicro_batch_size: 1\nsequence_len: 64\n")
    assert run(["from", str(tmp_path / "a.yml"), "--model", "tiny"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "strategy.precision=bf16" in line]
    assert "(auto)" in row and "does not say" not in row


def test_plan_takes_the_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe that is planned is the imported one; the plan itself is a plan as any other."""
    from shardwise.jobs import planning

    asked: list[Any] = []

    def make(*given: Any, **_: Any) -> Plan:
        asked.append(given)
        return small_plan()

    monkeypatch.setattr(planning, "make_plan", make)
    file = str(FILES / "ds_zero1_fp16.json")
    assert run(["plan", file, "--model", "tiny", "--world", "8", "data.sequence_length=128"]) == 0
    ((recipe, cluster),) = asked
    assert (
        recipe.strategy["zero_stage"] == 1 and recipe.data.sequence_length == 128 and cluster.world_size == 8
    )
    assert "21 keys mapped" in capsys.readouterr().err
    recipe_file = "recipes/laptop-tiny.yaml"
    assert run(["plan", recipe_file, "--world", "8"]) == 2
    assert "--world are for other trainers' files" in capsys.readouterr().err
