"""Every row of the how-to pages on other trainers: the keys that it names really become what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import RecipeError
from shardwise.plugins.importers.formats import Mapped, format_named
from tests.plugins.importers.foreign import convert, row, value

PAGES = Path(__file__).parents[3] / "docs" / "how-to"
NOT_NEEDED, LOST = "not needed", "no equivalent"

TRAINER: dict[str, Any] = {"per_device_train_batch_size": 2, "num_train_epochs": 1}
TRL = TRAINER | {"dataset_text_field": "text"}
FACTORY: dict[str, Any] = {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "full"}
LORA = FACTORY | {"finetuning_type": "lora", "lora_rank": 4}
AXOLOTL: dict[str, Any] = {"base_model": "m"}
ACCELERATE: dict[str, Any] = {"distributed_type": "FSDP", "num_processes": 8}
DEEPSPEED: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
TITAN: dict[str, Any] = {"job": {}, "model": {"flavor": "8B"}, "training": {"steps": 10}}

Example = tuple[dict[str, Any], dict[str, Any]]
"""Keys of a file, and what the recipe has of them; or for a key of the file, its status."""


def titan(**sections: Any) -> dict[str, Any]:
    return {key: {**TITAN.get(key, {}), **sections.get(key, {})} for key in {**TITAN, **sections}}


EXAMPLES: dict[str, list[Example | None]] = {
    "migrate-from-trainer.md": [
        None,
        (TRAINER | {"gradient_accumulation_steps": 4}, {"batch_size": 64}),
        (TRAINER | {"gradient_checkpointing": True}, {"strategy.activation_checkpointing": "full"}),
        (
            TRAINER | {"fsdp": "full_shard offload"},
            {"strategy.zero_stage": 3, "strategy.offload": "optimizer+parameters"},
        ),
        (TRAINER | {"torch_compile": True}, {"strategy.compile": "block"}),
        (TRL | {"packing": True}, {"data.packing": True}),
        (TRL | {"assistant_only_loss": True, "completion_only_loss": True}, {"data.train_on": "completion"}),
        (TRL | {"use_peft": True, "lora_r": 4, "load_in_4bit": True}, {"adapter.rank": 4, "adapter.quantize": "nf4"}),
        (TRAINER | {"validation_file": "held.jsonl"}, {"evaluation.sets": {"held": "held.jsonl"}}),
        None,
        (TRAINER | {"report_to": "wandb"}, {"trackers": ["wandb"]}),
        (
            TRAINER | {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 50},
            {"checkpoint.best": "held_out_loss", "evaluation.every": 50},
        ),
        (TRAINER | {"resume_from_checkpoint": True}, {"resume_from_checkpoint": NOT_NEEDED}),
        None,
    ],
    "migrate-from-llama-factory.md": [
        (FACTORY, {"model.hf": "m", "data.tokenizer": "m"}),
        (FACTORY, {"data.format": None}),
        (FACTORY | {"stage": "pt"}, {"data.format": "text"}),
        (LORA | {"lora_target": "all"}, {"adapter.name": "lora", "adapter.rank": 4, "adapter.targets": "all"}),
        (LORA, {"adapter.alpha": 8.0}),
        (
            LORA | {"use_dora": True, "use_rslora": True, "loraplus_lr_ratio": 16},
            {"adapter.name": "dora", "adapter.rank_stabilized": True, "adapter.learning_rate_ratio": 16},
        ),
        (LORA | {"quantization_bit": 4}, {"adapter.quantize": "nf4"}),
        (
            LORA | {"additional_target": "embed_tokens, lm_head"},
            {"adapter.modules_to_save": ["embed_tokens", "lm_head"]},
        ),
        (LORA | {"adapter_name_or_path": "saves/a"}, {"adapter.start_from": "saves/a"}),
        (
            FACTORY | {"dataset": "one", "dataset_dir": "d"},
            {"data.format": "sharegpt", "data.source": "me/one"},
        ),
        (
            FACTORY | {"dataset": "one,two", "dataset_dir": "d", "interleave_probs": "0.7,0.3"},
            {"data.mixture": [
                {"source": "me/one", "format": "sharegpt", "weight": 0.7},
                {"source": "me/two", "format": "alpaca", "weight": 0.3},
            ]},
        ),
        (FACTORY | {"cutoff_len": 512}, {"data.sequence_length": 512}),
        (FACTORY | {"neat_packing": True, "packing": True}, {"data.packing": True}),
        (FACTORY | {"train_on_prompt": True}, {"data.train_on": "all"}),
        (
            FACTORY | {"val_size": 0.1, "eval_dataset": "one", "dataset_dir": "d"},
            {"data.held_out": 0.1, "evaluation.sets": {"one": "me/one"}},
        ),
        (
            FACTORY | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
            {"strategy.micro_batch_size": 2, "batch_size": 64},
        ),
        (FACTORY | {"deepspeed": "ds.json"}, {"strategy.zero_stage": 2}),
        (FACTORY, {"strategy.activation_checkpointing": "full"}),
        (FACTORY | {"pure_bf16": True}, {"strategy.precision": "bf16", "strategy.master_weights": False}),
        (FACTORY | {"report_to": "wandb"}, {"trackers": ["wandb"]}),
        (FACTORY | {"flash_attn": "fa2", "enable_liger_kernel": True},
         {"flash_attn": NOT_NEEDED, "enable_liger_kernel": NOT_NEEDED}),
        (FACTORY | {"template": "qwen"}, {"template": LOST}),
        None,
    ],
    "migrate-from-axolotl.md": [
        (AXOLOTL, {"model.hf": "m", "data.tokenizer": "m"}),
        (
            AXOLOTL | {"datasets": [{"path": "a.jsonl", "type": "alpaca"}, {"path": "b.jsonl", "type": "chat_template"},
                                    {"path": "c.jsonl", "type": "completion"}]},
            {"data.mixture": [
                {"source": "a.jsonl", "format": "alpaca"}, {"source": "b.jsonl", "format": "messages"},
                {"source": "c.jsonl", "format": "text"},
            ]},
        ),
        (
            AXOLOTL | {"test_datasets": [{"path": "held.jsonl"}, {"path": "me/code"}]},
            {"evaluation.sets": {"held": "held.jsonl", "code": "me/code"}},
        ),
        (AXOLOTL | {"sample_packing": True, "sequence_len": 512}, {"data.packing": True, "data.sequence_length": 512}),
        (AXOLOTL | {"excess_length_strategy": "truncate"}, {"data.too_long": "cut"}),
        (AXOLOTL | {"train_on_inputs": False}, {"data.train_on": "completion"}),
        (
            AXOLOTL
            | {
                "adapter": "lora",
                "lora_r": 8,
                "lora_modules_to_save": ["lm_head"],
                "peft_layers_to_transform": [1],
            },
            {"adapter.modules_to_save": ["lm_head"], "adapter.layers_to_transform": [1]},
        ),
        (
            AXOLOTL | {"adapter": "qlora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True},
            {"adapter.rank": 8, "adapter.alpha": 16.0, "adapter.targets": "all", "adapter.quantize": "nf4"},
        ),
        (
            AXOLOTL | {"micro_batch_size": 2, "gradient_accumulation_steps": 4},
            {"batch_size": 64, "strategy.micro_batch_size": 2},
        ),
        (AXOLOTL | {"deepspeed": "ds.json"}, {"strategy.zero_stage": 2}),
        (AXOLOTL | {"flash_attention": True, "xformers_attention": True},
         {"flash_attention": NOT_NEEDED, "xformers_attention": NOT_NEEDED}),
        (AXOLOTL | {"gradient_checkpointing": True}, {"strategy.activation_checkpointing": "full"}),
        (AXOLOTL | {"val_set_size": 0.1}, {"data.held_out": 0.1}),
        (AXOLOTL | {"num_epochs": 2}, {"epochs": 2.0}),
        (
            AXOLOTL | {"wandb_project": "lab", "use_tensorboard": True, "mlflow_experiment_name": "e"},
            {"trackers": ["wandb", "tensorboard", "mlflow"]},
        ),
        (AXOLOTL | {"chat_template": "llama3"}, {"chat_template": LOST}),
        None,
        None,
    ],
    "migrate-from-accelerate.md": [
        ({"distributed_type": "FSDP", "num_processes": 16, "num_machines": 2},
         {"cluster.nodes": 2, "cluster.devices_per_node": 8}),
        None,
        None,
        None,
        (ACCELERATE | {"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": True}},
         {"strategy.zero_stage": 3, "strategy.offload": "optimizer+parameters"}),
        (ACCELERATE | {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}, {"strategy.zero_stage": 2}),
        (ACCELERATE | {"parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 2}},
         {"strategy.tensor_parallel": 2, "strategy.sequence_parallel": 2}),
        (ACCELERATE | {"mixed_precision": "bf16"}, {"strategy.precision": "bf16"}),
        (ACCELERATE | {"dynamo_backend": "INDUCTOR"}, {"strategy.compile": "block"}),
        (ACCELERATE | {"log_with": "wandb"}, {"trackers": ["wandb"]}),
        None,
        None,
    ],
    "migrate-from-deepspeed.md": [
        None,
        (DEEPSPEED | {"zero_optimization": {"stage": 2}}, {"strategy.zero_stage": 2}),
        (
            DEEPSPEED | {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}},
            {"strategy.offload": "nvme:/n"},
        ),
        (DEEPSPEED | {"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, {"strategy.replicate": 2}),
        (
            DEEPSPEED | {"fp16": {"enabled": True, "loss_scale_window": 500, "hysteresis": 4}},
            {"strategy.precision": "fp16", "loss_scale.growth_interval": 500, "loss_scale.hysteresis": 4},
        ),
        (DEEPSPEED | {"bf16": {"enabled": "auto"}}, {"strategy.precision": "bf16", "bf16.enabled": NOT_NEEDED}),
        (
            DEEPSPEED | {"activation_checkpointing": {"cpu_checkpointing": True}},
            {"strategy.activation_checkpointing": "full", "strategy.offload": "activations"},
        ),
        (DEEPSPEED | {"sequence_parallel_size": 2}, {"strategy.sequence_parallel": 2}),
        None,
        (DEEPSPEED | {"gradient_clipping": 0.5}, {"optimizer.clip_norm": 0.5}),
        (DEEPSPEED | {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 50}}}, {"steps": 50}),
        (
            DEEPSPEED | {key: {"enabled": True} for key in ("tensorboard", "wandb", "csv_monitor")},
            {"trackers": ["tensorboard", "wandb", "csv"]},
        ),
        (
            DEEPSPEED | {"zero_optimization": {"allgather_bucket_size": 1, "overlap_comm": True}},
            {"zero_optimization.allgather_bucket_size": NOT_NEEDED, "zero_optimization.overlap_comm": NOT_NEEDED},
        ),
        (
            DEEPSPEED | {"zero_optimization": {"zero_quantized_weights": True, "zero_hpz_partition_size": 8}},
            {"zero_optimization.zero_quantized_weights": LOST, "zero_optimization.zero_hpz_partition_size": LOST},
        ),
        None,
        (DEEPSPEED | {"autotuning": {"enabled": True}}, {"autotuning.enabled": NOT_NEEDED}),
    ],
    "migrate-from-torchtitan.md": [
        (titan(model={"name": "llama3", "flavor": "70B"}), {"model.preset": "llama-3-70b"}),
        (
            titan(model={"hf_assets_path": "a"}, checkpoint={"initial_load_in_hf": True}),
            {"model.hf": "a", "data.tokenizer": "a"},
        ),
        (titan(training={"dataset": "c4"}), {"data.source": "allenai/c4:en"}),
        (
            titan(training={"local_batch_size": 2, "global_batch_size": 32}),
            {"strategy.micro_batch_size": 2, "batch_size": 32},
        ),
        (
            titan(training={"steps": 7, "seq_len": 64, "max_norm": 0.5}),
            {"steps": 7, "data.sequence_length": 64, "optimizer.clip_norm": 0.5},
        ),
        (titan(parallelism={"data_parallel_shard_degree": -1}), {"strategy.zero_stage": 3}),
        (titan(parallelism={"fsdp_reshard_after_forward": "never"}), {"strategy.zero_stage": 2}),
        (titan(parallelism={"data_parallel_replicate_degree": 2}), {"strategy.replicate": 2}),
        (
            titan(parallelism={f"{axis}_parallel_degree": 2 for axis in ("tensor", "context", "pipeline")}),
            {"strategy.tensor_parallel": 2, "strategy.sequence_parallel": 2, "strategy.pipeline_parallel": 2},
        ),
        (
            titan(parallelism={"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}),
            {"strategy.pipeline_schedule": "interleaved"},
        ),
        (titan(activation_checkpoint={"mode": "full"}), {"strategy.activation_checkpointing": "full"}),
        (
            titan(activation_checkpoint={"selective_ac_option": "op"}),
            {"strategy.activation_checkpointing": "selective"},
        ),
        (titan(activation_checkpoint={"selective_ac_option": "2"}), {"strategy.activation_checkpointing": "every:2"}),
        (
            titan(activation_checkpoint={"mode": "memory_budget", "memory_budget": 0.3}),
            {"strategy.activation_checkpointing": "budget:0.3"},
        ),
        (titan(compile={"enable": True}), {"strategy.compile": "block"}),
        (titan(model={"converters": ["float8"]}), {"strategy.precision": "fp8"}),
        (
            titan(lr_scheduler={"warmup_steps": 2, "decay_ratio": 0.5, "decay_type": "sqrt"}),
            {"schedule.name": "wsd", "schedule.decay": 0.5, "schedule.decay_shape": "sqrt"},
        ),
        (titan(checkpoint={"enable": True, "interval": 20}), {"checkpoint.every": 20}),
        (titan(checkpoint={"async_mode": "async"}), {"checkpoint.background": True}),
        (
            titan(metrics={"enable_tensorboard": True, "enable_wandb": True}),
            {"trackers": ["tensorboard", "wandb"]},
        ),
        (
            titan(validation={"enable": True}),
            {"evaluation.sets": {"validation": "allenai/c4:en#validation"}, "evaluation.every": 10},
        ),
        (
            titan(comm={"mode": "fake_backend"}, memory_estimation={"enable": True}),
            {"comm.mode": NOT_NEEDED, "memory_estimation.enable": NOT_NEEDED},
        ),
        None,
    ],
}  # fmt: skip
"""One for every row of a page's table, in its order; None for a row on code or on a command line."""

FILES: dict[str, Any] = {
    "ds.json": {"zero_optimization": {"stage": 2}},
    "d/dataset_info.json": {
        "one": {"hf_hub_url": "me/one", "formatting": "sharegpt"}, "two": {"hf_hub_url": "me/two"},
    },
}  # fmt: skip


def table(page: str, head: str) -> list[list[str]]:
    """The rows of the table with this head."""
    text = (PAGES / page).read_text(encoding="utf-8").partition(f"\n| {head}")[2]
    lines = text[: text.index("\n\n")].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines]


def keys_of(content: Any) -> set[str]:
    """All names of keys, and short values as words."""
    if isinstance(content, dict):
        return set(content).union(*map(keys_of, content.values()))
    if isinstance(content, list):
        return set().union(*map(keys_of, content))
    return {str(content)}


@pytest.mark.parametrize("page", EXAMPLES)
def test_every_row_of_a_page_is_what_happens(page: str, tmp_path: Path) -> None:
    title = (
        (PAGES / page)
        .read_text(encoding="utf-8")
        .splitlines()[0]
        .removeprefix("# From ")
        .removeprefix("the ")
    )
    rows = table(page, title.removeprefix("Hugging Face "))
    assert len(rows) == len(EXAMPLES[page])
    for (theirs, ours), example in zip(rows, EXAMPLES[page], strict=True):
        if example is None:
            continue
        content, wanted = example
        words = set(re.findall(r"\w+", theirs)) & keys_of(content)
        assert words or "left out" in theirs, theirs  # the example is about the keys of the row
        world = None if "num_machines" in content else "8"
        made = convert(tmp_path, {"a.yaml": content, **FILES}, world=world, model=None)
        for key, expected in wanted.items():
            if expected in (NOT_NEEDED, LOST):
                assert row(made, key).status == expected, theirs
            else:
                assert value(made, key) == expected, theirs
        last = {
            key.rpartition(".")[2]
            for key, expected in wanted.items()
            if expected not in (NOT_NEEDED, LOST, None)
        }
        named = set(re.findall(r"[a-z_0-9]+", ours))
        assert not last or last & named or {key.partition(".")[0] for key in wanted} & named, (theirs, ours)


COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "DeepSpeed": ({"train_micro_batch_size_per_gpu": 2}, "deepspeed"),
    "Trainer, TRL": (TRAINER | {"use_peft": True}, "trl"),
    "Accelerate": ({"distributed_type": "FSDP"}, "accelerate"),
    "Axolotl": (AXOLOTL | {"adapter": "lora", "val_set_size": 0.1}, "axolotl"),
    "LitGPT": ({"checkpoint_dir": "c", "train": {}}, "litgpt"),
    "torchtitan": (titan(checkpoint={"enable": True}, training={}), "torchtitan"),
}


def test_names_of_the_same_setting_are_names_of_the_same_setting(tmp_path: Path) -> None:
    page = "come-from-another-trainer.md"
    rows = table(page, "here |")
    assert len(rows) >= 20
    tried = 0
    for here, *cells in rows:
        target = here.strip("`")
        for column, cell in zip(COLUMNS, cells, strict=True):
            if not cell:
                continue
            path, _, said = cell.strip("`").partition(": ")
            base, form = COLUMNS[column]
            assert isinstance(format_named(form).entry(path), Mapped), f"{column}: {path}"
            content = {key: dict(each) if isinstance(each, dict) else each for key, each in base.items()}
            inner = content
            *sections, last = path.split(".")
            for section in sections:
                inner = inner.setdefault(section, {})
            small = {"strategy.zero_stage": 3, "batch_size": 64}.get(target, 2)
            inner[last] = {"true": True, "false": False}.get(said, said) if said else small
            made = convert(tmp_path, {"a.yaml": content}, world="8", kind=form)
            found = row(made, path)
            assert found.status == "mapped" and target in found.detail.split(", "), (
                f"{column}: {path}: {found}"
            )
            tried += 1
    assert tried > 80


def test_what_the_page_refuses_is_refused(tmp_path: Path) -> None:
    """The statements of the page on two files, on other objectives and on other trainers, one each."""
    text = (PAGES / "come-from-another-trainer.md").read_text(encoding="utf-8")
    assert (
        "Two explicit values that differ are refused" in text
        and "torchtune or ms-swift, is refused by" in text
    )
    for content, more in (
        (
            TRAINER | {"learning_rate": 1e-5, "deepspeed": "x.json"},
            {"x.json": {"optimizer": {"params": {"lr": 1e-4}}}},
        ),
        (FACTORY | {"stage": "ppo"}, {}),
        ({"model": {"_component_": "x"}}, {}),
        ({"train_type": "lora", "num_train_epochs": 1}, {}),
    ):
        with pytest.raises(RecipeError):
            convert(tmp_path, {"a.yaml": content, **more})
