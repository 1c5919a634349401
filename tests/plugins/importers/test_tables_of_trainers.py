"""LLaMA-Factory, torchtitan and trackers: what their files mean, by their own sources and documentation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import RecipeError
from shardwise.engine.schedule import learning_rate
from shardwise.plugins.importers.checked import read_imported
from tests.plugins.importers.foreign import convert, row, value

LLAMA_FACTORY: dict[str, Any] = {
    "stage": "sft",
    "finetuning_type": "lora",
    "dataset": "chats,facts",
    "cutoff_len": 512,
}
INFO = {
    "chats": {"file_name": "chats.json", "formatting": "sharegpt"},
    "facts": {"hf_hub_url": "me/facts", "subset": "en", "split": "test"},
    "openai": {
        "file_name": "o.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages", "system": "system"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "pairs": {"file_name": "p.jsonl", "columns": {"prompt": "prompt", "response": "completion"}},
    "plain": {"file_name": "t.txt", "columns": {"prompt": "body"}},
    "odd": {"file_name": "q.json", "columns": {"prompt": "question", "response": "answer", "images": "images"}},
}  # fmt: skip


def factory(folder: Path, **more: Any) -> Any:
    files = {"lf.yaml": LLAMA_FACTORY | more, "data/dataset_info.json": INFO}
    return convert(folder, files)


def test_data_sets_of_llama_factory_are_those_of_its_registry(tmp_path: Path) -> None:
    source = {
        name: str(tmp_path / "data" / name)
        for name in ("chats.json", "o.jsonl", "p.jsonl", "t.txt", "q.json")
    }
    chats = {"source": source["chats.json"], "format": "sharegpt"}
    facts = {"source": "me/facts:en#test", "format": "alpaca"}
    made = factory(tmp_path)
    assert value(made, "data.mixture") == [chats, facts]
    assert [each.key for each in made.of("assumed")][:1] == ["data.mixture"]  # its weights
    made = factory(tmp_path, mix_strategy="interleave_once", interleave_probs="0.7, 0.3")
    assert value(made, "data.mixture") == [{**chats, "weight": 0.7}, {**facts, "weight": 0.3}]
    with pytest.raises(RecipeError, match=r"interleave_probs.*0.7, and there are 2 data sets"):
        factory(tmp_path, mix_strategy="interleave_once", interleave_probs="0.7")
    for name, wanted in (
        ("openai", {"source": source["o.jsonl"], "format": "messages"}),
        ("pairs", {"source": source["p.jsonl"], "format": "prompt"}),
        ("plain", {"source": source["t.txt"], "format": "text", "text_key": "body"}),
    ):
        made = factory(tmp_path, dataset=name)
        assert {key: value(made, f"data.{key}") for key in wanted} == wanted
        assert row(made, "dataset").status == "mapped"
    assert value(factory(tmp_path, eval_dataset="chats"), "evaluation.sets") == {
        "chats": source["chats.json"]
    }
    odd = factory(tmp_path, dataset="odd")
    assert row(odd, "dataset").status == "no equivalent" and "question, answer" in row(odd, "dataset").detail
    assert "images" in row(odd, "dataset").detail and value(odd, "data.source") == source["q.json"]
    with pytest.raises(RecipeError, match=r"no such data set .*nothing.*it lists chats, facts"):
        factory(tmp_path, dataset="nothing")


def test_without_a_registry_the_data_are_assumed(tmp_path: Path) -> None:
    made = convert(tmp_path, {"lf.yaml": LLAMA_FACTORY})
    assert "dataset_info.json" in row(made, "dataset").detail and value(made, "data.mixture") is None
    assert "data.source" in [each.key for each in made.of("assumed")]
    online = convert(tmp_path, {"lf.yaml": LLAMA_FACTORY | {"dataset": "me/chats", "dataset_dir": "ONLINE"}})
    assert value(online, "data.source") == "me/chats"


def test_llama_factorys_defaults_are_its_own(tmp_path: Path) -> None:
    """hparams/finetuning_args.py: LoRA of rank 8, alpha twice the rank; checkpointing is on; 2,048 tokens."""
    made = convert(tmp_path, {"lf.yaml": {"stage": "sft", "lora_rank": 8}})
    assert value(made, "adapter") == {
        "rank": 8,
        "dropout": 0.0,
        "targets": "all",
        "alpha": 16.0,
        "name": "lora",
    }
    assert value(made, "strategy.activation_checkpointing") == "full"
    assert value(made, "data.sequence_length") == 2048
    assert value(made, "strategy.precision") == "bf16"  # the model's, which is assumed
    full = convert(tmp_path, {"lf.yaml": {"stage": "pt", "finetuning_type": "full", "pure_bf16": True}})
    assert value(full, "adapter") is None and value(full, "strategy.master_weights") is False
    assert value(full, "data.format") == "text" and value(full, "data.packing") is None
    off = {"stage": "sft", "disable_gradient_checkpointing": True, "train_on_prompt": True, "packing": True}
    made = convert(tmp_path, {"lf.yaml": off})
    assert (
        value(made, "strategy.activation_checkpointing") == "none" and value(made, "data.train_on") == "all"
    )
    assert value(made, "data.packing") and "neat_packing" in row(made, "data.packing").detail
    assert row(
        convert(tmp_path, {"lf.yaml": {"stage": "sft", "use_galore": True}}), "use_galore"
    ).detail.startswith("there is no galore")


TITAN: dict[str, Any] = {
    "job": {"description": "x"},
    "model": {"name": "llama3", "flavor": "8B"},
    "training": {"steps": 100, "local_batch_size": 1, "seq_len": 128},
}


def titan(folder: Path, world: str | None = "8", **sections: Any) -> Any:
    merged = {key: {**TITAN.get(key, {}), **sections.get(key, {})} for key in {**TITAN, **sections}}
    return convert(folder, {"t.json": merged}, model=None, world=world)


def factor(step: int, steps: int, warmup: int, ratio: float | None, shape: str, least: float) -> float:
    """torchtitan/components/lr_scheduler.py: ``linear_warmup_stable_decay``."""
    decay = round(steps * ratio) if ratio is not None else steps - warmup
    decay = min(decay, steps - warmup)
    stable = warmup + steps + 1 - warmup - decay
    if step < warmup:
        return (step + 1) / warmup
    if step < stable:
        return 1.0
    progress = (step + 1 - stable) / decay
    curve = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }
    return least + (1 - least) * curve[shape]


@pytest.mark.parametrize(
    ("warmup", "ratio", "shape", "least"),
    [
        (10, None, "linear", 0.0), (10, None, "cosine", 0.1), (0, None, "sqrt", 0.0), (10, 0.5, "linear", 0.0),
        (20, 0.8, "cosine", 0.1), (30, 0.9, "sqrt", 0.2), (10, 1.0, "linear", 0.0),
    ],
)  # fmt: skip
def test_rates_are_those_of_torchtitan(
    warmup: int, ratio: float | None, shape: str, least: float, tmp_path: Path
) -> None:
    schedule = {"warmup_steps": warmup, "decay_type": shape, "min_lr_factor": least}
    schedule |= {} if ratio is None else {"decay_ratio": ratio}
    made = titan(tmp_path, world="1", lr_scheduler=schedule, optimizer={"lr": 1.0})
    recipe, _ = read_imported(made)
    ours = [learning_rate(recipe, step) for step in range(100)]
    assert ours == pytest.approx(
        [factor(step, 100, warmup, ratio, shape, least) for step in range(100)], abs=1e-12
    )


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"strategy.zero_stage": 3, "strategy.precision": "bf16", "strategy.activation_checkpointing": "every:2"}),
    ({"parallelism": {"fsdp_reshard_after_forward": "never"}}, {"strategy.zero_stage": 2}),
    ({"parallelism": {"pipeline_parallel_degree": 2}}, {"strategy.zero_stage": 2, "strategy.micro_batch_size": 1}),
    (
        {"parallelism": {"pipeline_parallel_degree": 2, "fsdp_reshard_after_forward": "always"}},
        {"strategy.zero_stage": 3, "strategy.pipeline_schedule": "1f1b"},
    ),
    (
        {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B",
                         "pipeline_parallel_microbatch_size": 2}, "training": {"local_batch_size": 8}},
        {"strategy.pipeline_schedule": "interleaved", "strategy.micro_batch_size": 2, "batch_size": 32},
    ),
    ({"parallelism": {"expert_parallel_degree": 4}}, {"strategy.expert_parallel": 4, "strategy.zero_stage": 3}),
    ({"parallelism": {"context_parallel_degree": 4}}, {"strategy.sequence_parallel": 4, "batch_size": 2}),
    (
        {"parallelism": {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 8}},
        {"strategy.zero_stage": 0, "strategy.replicate": None},  # DDP
    ),
    (
        {"parallelism": {"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2}},
        {"strategy.zero_stage": 3, "strategy.replicate": 2},
    ),
    ({"training": {"global_batch_size": 32}}, {"batch_size": 32, "strategy.micro_batch_size": 1}),
    ({"training": {"global_batch_size": -1}}, {"batch_size": 8}),
    ({"training": {"enable_cpu_offload": True}}, {"strategy.offload": "optimizer+parameters"}),
    ({"training": {"dtype": "bfloat16"}}, {"strategy.precision": "bf16", "strategy.master_weights": False}),
    ({"training": {"mixed_precision_param": "float32"}}, {"strategy.precision": "fp32"}),
    ({"activation_checkpoint": {"mode": "full"}}, {"strategy.activation_checkpointing": "full"}),
    ({"activation_checkpoint": {"mode": "none"}}, {"strategy.activation_checkpointing": "none"}),
    ({"activation_checkpoint": {"selective_ac_option": "op"}}, {"strategy.activation_checkpointing": "selective"}),
    ({"activation_checkpoint": {"selective_ac_option": "1"}}, {"strategy.activation_checkpointing": "full"}),
    (
        {"activation_checkpoint": {"mode": "memory_budget", "memory_budget": 0.3}},
        {"strategy.activation_checkpointing": "budget:0.3"},
    ),
    (
        {"model": {"converters": ["float8"]}, "quantize": {"linear": {"float8": {"recipe_name": "rowwise"}}}},
        {"strategy.precision": "fp8", "strategy.fp8_scaling": "row"},
    ),
    ({"float8": {"enable_float8_linear": True}}, {"strategy.precision": "fp8"}),
    ({"compile": {"enable": True}}, {"strategy.compile": "block"}),
    ({"training": {"compile": True}}, {"strategy.compile": "block"}),
    ({"compile": {"enable": True}, "model": {"converters": ["float8"]}}, {"strategy.compile": "block"}),
    ({"checkpoint": {"interval": 20}}, {"checkpoint.every": None}),  # off, unless it is enabled
    ({"checkpoint": {"enable": True, "interval": 20}}, {"checkpoint.every": 20}),
    ({"checkpoint": {"enable_checkpoint": True}}, {"checkpoint.every": 500}),
    ({"validation": {"enable": False, "freq": 5, "steps": 10}}, {"evaluation": None, "data.held_out": 0.0}),
    ({"validation": {"enabled": True, "freq": 5, "steps": 10}}, {"evaluation.every": 5, "evaluation.sequences": 640}),
    ({"model": {"name": "qwen3", "flavor": "0.6B"}}, {"model.preset": "qwen3-0.6b"}),
    ({"model": {"name": "llama3", "flavor": "debugmodel"}}, {"model.layers": 6, "model.width": 256}),
    (
        {"model": {"hf_assets_path": "assets/Qwen"}, "checkpoint": {"enable": True, "initial_load_in_hf": True}},
        {"model": {"hf": "assets/Qwen"}, "data.tokenizer": "assets/Qwen"},
    ),
    ({"experimental": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "GPipe"}},
     {"strategy.pipeline_schedule": "gpipe"}),
    ({"training": {"tensor_parallel_degree": 2, "data_parallel_degree": -1}}, {"strategy.tensor_parallel": 2}),
    ({"training": {"dataset_path": "/data/c4", "dataset": "c4"}}, {"data.source": "/data/c4"}),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "wanted"), SETTINGS)
def test_settings_of_torchtitan(sections: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    made = titan(tmp_path, **sections)
    assert {key: value(made, key) for key in wanted} == wanted
    assert not made.of("unknown")


def test_the_number_of_devices_comes_from_the_degrees(tmp_path: Path) -> None:
    degrees = {
        "data_parallel_shard_degree": 4,
        "tensor_parallel_degree": 8,
        "data_parallel_replicate_degree": 2,
    }
    made = titan(tmp_path, world=None, parallelism=degrees)
    assert value(made, "cluster") == {"devices_per_node": 8, "nodes": 8, "device": "h100"}
    with pytest.raises(RecipeError, match=r"data_parallel_shard_degree: 4.* on 32 devices"):
        titan(tmp_path, world="32", parallelism=degrees)


def test_what_torchtitan_has_alone_is_named(tmp_path: Path) -> None:
    made = titan(
        tmp_path,
        lr_scheduler={"total_steps": 500},
        parallelism={"enable_async_tensor_parallel": True, "expert_tensor_parallel_degree": 2},
        checkpoint={"initial_load_path": "outputs/checkpoint/step-10"},
        optimizer={"name": "Adam"},
        training={"dataset": "my_data"},
    )
    lost = {each.key for each in made.of("no equivalent")}
    assert lost == {
        "lr_scheduler.total_steps", "parallelism.enable_async_tensor_parallel",
        "parallelism.expert_tensor_parallel_degree", "checkpoint.initial_load_path", "optimizer.name",
        "training.dataset",
    }  # fmt: skip
    assert value(made, "steps") == 100
    other = titan(tmp_path, model={"name": "deepseek_v3", "flavor": "16B"})
    assert "no preset of deepseek_v3 16b" in row(other, "model.flavor").detail
    assert value(other, "model") == {"hf": "MODEL"}


TRACKERS: list[tuple[dict[str, Any], list[str] | None, dict[str, str]]] = [
    ({"num_train_epochs": 1, "report_to": "wandb"}, ["wandb"], {}),
    ({"num_train_epochs": 1, "report_to": ["tensorboard", "mlflow"]}, ["tensorboard", "mlflow"], {}),
    ({"num_train_epochs": 1, "report_to": "WandB, tensorboard"}, ["wandb", "tensorboard"], {}),
    ({"num_train_epochs": 1, "report_to": "none"}, None, {}),
    ({"num_train_epochs": 1, "report_to": ["none"]}, None, {}),
    ({"num_train_epochs": 1, "report_to": []}, None, {}),
    ({"num_train_epochs": 1, "report_to": ["wandb", "comet_ml"]}, ["wandb"], {"report_to": "no tracker comet_ml"}),
    ({"num_train_epochs": 1, "report_to": "clearml"}, None, {"report_to": "no tracker clearml"}),
    ({"stage": "sft", "report_to": "swanlab"}, None, {"report_to": "no tracker swanlab"}),
    ({"stage": "sft", "report_to": "none", "use_swanlab": True}, None, {"use_swanlab": "no tracker swanlab"}),
    ({"base_model": "m", "wandb_project": "lab", "wandb_name": "one"}, ["wandb"], {}),
    ({"base_model": "m", "wandb_project": None, "use_wandb": None}, None, {}),
    ({"base_model": "m", "wandb_project": ""}, None, {}),
    ({"base_model": "m", "wandb_project": "lab", "wandb_mode": "disabled"}, None, {}),
    ({"base_model": "m", "use_wandb": True, "use_tensorboard": True}, ["wandb", "tensorboard"], {}),
    ({"base_model": "m", "mlflow_experiment_name": "e"}, ["mlflow"], {}),
    ({"base_model": "m", "trackio_project_name": "p"}, ["trackio"], {}),
    ({"base_model": "m", "use_comet": True}, None, {"use_comet": "no tracker comet"}),
    ({"base_model": "m", "swanlab_project": "p"}, None, {"swanlab_project": "no tracker swanlab"}),
    ({"distributed_type": "NO", "log_with": "wandb"}, ["wandb"], {}),
    ({"checkpoint_dir": "c", "train": {"epochs": 1}, "logger_name": "csv"}, ["csv"], {}),
    ({"checkpoint_dir": "c", "train": {"epochs": 1}, "logger_name": "lit"}, None, {"logger_name": "trackers are"}),
    ({**TITAN, "metrics": {"enable_wandb": True, "enable_tensorboard": False}}, ["wandb"], {}),
    ({"train_batch_size": 8, "tensorboard": {"enabled": True}, "wandb": {"enabled": False}}, ["tensorboard"], {}),
    ({"train_batch_size": 8, "comet": {"enabled": True}}, None, {"comet.enabled": "no tracker comet"}),
]  # fmt: skip


@pytest.mark.parametrize(("content", "trackers", "lost"), TRACKERS)
def test_trackers(content: Any, trackers: list[str] | None, lost: dict[str, str], tmp_path: Path) -> None:
    made = convert(tmp_path, {"a.yaml": content})
    assert value(made, "trackers") == trackers
    read_imported(made)
    assert {each.key for each in made.of("no equivalent")} == lost.keys()
    for key, said in lost.items():
        assert said in row(made, key).detail


def test_all_trackers_are_those_that_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' ``get_available_reporting_integrations``."""
    from shardwise.plugins.importers import facts

    content = {"num_train_epochs": 1, "report_to": "all"}
    monkeypatch.setattr(facts, "find_spec", lambda name: name in ("wandb", "tensorboard") or None)
    assert value(convert(tmp_path, {"a.yaml": content}), "trackers") == ["tensorboard", "wandb"]
    monkeypatch.setattr(facts, "find_spec", lambda name: None)
    assert "none is" in row(convert(tmp_path, {"a.yaml": content}), "report_to").detail


def test_every_tracker_of_transformers_is_mapped_or_named(tmp_path: Path) -> None:
    known = pytest.importorskip("transformers.integrations.integration_utils").INTEGRATION_TO_CALLBACK
    for name in known:
        made = convert(tmp_path, {"a.yaml": {"num_train_epochs": 1, "report_to": [name]}})
        assert value(made, "trackers") == [name] or f"no tracker {name}" in row(made, "report_to").detail


@pytest.mark.parametrize(
    ("key", "asked", "target"),
    [
        ("lr_scheduler_type", "inverse_sqrt", "schedule.name"),
        ("gradient_checkpointing", "unsloth", "strategy.activation_checkpointing"),
    ],
)
def test_a_value_without_an_equivalent_is_not_the_default(
    key: str, asked: str, target: str, tmp_path: Path
) -> None:
    """The key is in the file: the recipe takes none of the values that the trainer uses without it."""
    file = (
        {"base_model": "m"} if key == "gradient_checkpointing" else {"output_dir": "o", "num_train_epochs": 1}
    )
    made = convert(tmp_path, {"f.yaml": {**file, "learning_rate": 1e-4, key: asked}})
    assert row(made, key).status == "no equivalent" and value(made, target) is None
    assert [r.status for r in made.rows if r.key.startswith(key)] == ["no equivalent"]
