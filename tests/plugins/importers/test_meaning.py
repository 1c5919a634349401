"""Values and defaults of other trainers mean in the recipe what they mean there, by the sources of those trainers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import RecipeError
from shardwise.plugins.importers.checked import is_foreign, read_imported
from shardwise.recipe.installed import recipe_file
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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trainer.json", TRAINER | {"optim": "sgd"}),
        ("ds.json", {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}),
        ("lora.yaml", LITGPT | {"optimizer": "SGD"}),
    ],
)
def test_sgd_has_no_momentum_unless_the_file_says_one(
    tmp_path: Path, name: str, content: dict[str, Any]
) -> None:
    made = convert(tmp_path, {name: content})
    assert (value(made, "optimizer.name"), value(made, "optimizer.momentum")) == ("sgd", 0.0)


def test_adapters_of_trl_are_on_the_layers_that_peft_takes(tmp_path: Path) -> None:
    made = convert(tmp_path, {"sft.yaml": TRAINER | {"use_peft": True, "max_length": 64}})
    assert list(value(made, "adapter.targets")) == ["q_proj", "v_proj"]
    read_imported(made)


def test_updates_of_adam_that_differ_are_named(tmp_path: Path) -> None:
    params = {"lr": 1e-4, "bias_correction": False, "adam_w_mode": False, "torch_adam": False}
    made = convert(
        tmp_path, {"ds.json": {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": params}}}
    )
    lost = [each.key.rpartition(".")[2] for each in made.of("no equivalent")]
    assert lost == ["bias_correction", "adam_w_mode"]


def test_warmups_of_deepspeed_have_its_length_and_their_shape_is_named(tmp_path: Path) -> None:
    def warmup(**params: Any) -> Any:
        scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000, **params}}
        return convert(tmp_path, {"ds.json": {"train_batch_size": 8, "scheduler": scheduler}})

    assert value(warmup(), "schedule.warmup") == 1000
    assert "logarithm" in row(warmup(), "schedule.warmup").detail
    nested = {"scheduler": {"type": "WarmupLR"}, "zero_optimization": {"stage": 2}}
    assert value(convert(tmp_path, {"t.json": TRAINER | {"deepspeed": nested}}), "schedule.warmup") == 1000
    linear = warmup(warmup_type="linear", warmup_num_steps=50)
    assert value(linear, "schedule.warmup") == 50
    assert "schedule.warmup" not in [each.key for each in linear.rows]
    assert row(warmup(warmup_type="log"), "scheduler.params.warmup_type").status == "no equivalent"


SFT = TRAINER | {"dataset_name": "me/chats", "max_length": 64}


def test_all_documents_are_trained_on_unless_the_trainer_evaluates(tmp_path: Path) -> None:
    assert value(convert(tmp_path, {"t.json": TRAINER}), "data.held_out") == 0.0
    made = convert(tmp_path, {"t.json": TRAINER | {"eval_strategy": "steps", "logging_steps": 20}})
    assert value(made, "data.held_out") == 0.05
    assert "data.held_out" in [each.key for each in made.of("assumed")]
    assert value(made, "evaluation.every") == 20  # the Trainer's eval_steps are its logging_steps
    assert (
        value(convert(tmp_path, {"t.json": TRAINER | {"eval_strategy": "steps"}}), "evaluation.every") == 500
    )


def test_splits_of_trl(tmp_path: Path) -> None:
    made = convert(
        tmp_path, {"sft.json": SFT | {"eval_strategy": "steps", "dataset_train_split": "train[:9]"}}
    )
    assert value(made, "data.source") == "me/chats#train[:9]"
    assert value(made, "evaluation.sets") == {"test": "me/chats#test"}
    assert (value(made, "data.held_out"), value(made, "evaluation.every")) == (0.0, 10)
    assert value(convert(tmp_path, {"sft.json": SFT}), "evaluation") is None
    made = convert(tmp_path, {"sft.json": SFT | {"eval_strategy": "steps", "test_split_size": 0.1}})
    assert (value(made, "data.held_out"), value(made, "evaluation.sets")) == (0.1, None)
    local = SFT | {"eval_strategy": "steps", "dataset_name": "chats.jsonl"}
    assert value(convert(tmp_path, {"sft.json": local}), "evaluation.sets") is None


def test_trl_trains_on_all_turns_unless_it_is_told(tmp_path: Path) -> None:
    made = convert(tmp_path, {"sft.json": SFT})
    assert value(made, "data.train_on") == "all"
    assert "data.train_on" in [each.key for each in made.of("assumed")]
    for told, wanted in (({"assistant_only_loss": True}, "completion"), ({"loss_type": "sigmoid"}, None)):
        assert value(convert(tmp_path, {"sft.json": SFT | told}), "data.train_on") == wanted


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"expert_parallel_size": 4}, (4, 4, None)),
        ({"expert_parallel_size": 2, "dp_shard_size": 2}, (4, 4, None)),
        ({"expert_parallel_size": 2, "dp_shard_size": 2, "tensor_parallel_size": 2}, (4, 8, None)),
        ({"expert_parallel_size": 2, "dp_shard_size": 2, "dp_replicate_size": 2}, (8, 8, 2)),
    ],
)
def test_ranks_of_axolotls_experts_have_samples_of_their_own(
    tmp_path: Path, sizes: dict[str, int], wanted: tuple[int, int, int | None]
) -> None:
    made = convert(tmp_path, {"a.yml": AXOLOTL | {"micro_batch_size": 1, "fsdp_version": 2, **sizes}})
    keys = ("batch_size", "cluster.devices_per_node", "strategy.replicate")
    assert tuple(value(made, key) for key in keys) == wanted


@pytest.mark.parametrize(
    ("shards", "stages", "wanted"), [(-1, 1, (32, 8)), (16, 1, (64, 8)), (-1, 2, (32, 8))]
)
def test_ranks_of_torchtitans_experts_are_some_of_those_with_shards(
    tmp_path: Path, shards: int, stages: int, wanted: tuple[int, int]
) -> None:
    parallelism = f"[parallelism]\nexpert_parallel_degree = 8\ndata_parallel_shard_degree = {shards}\n"
    parallelism += f"pipeline_parallel_degree = {stages}\n"
    made = convert(tmp_path, {"t.toml": f"[model]\n[training]\nlocal_batch_size = 4\n{parallelism}"})
    assert (value(made, "batch_size"), value(made, "cluster.devices_per_node")) == wanted
    assert value(made, "strategy.replicate") is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "a.yml",
            AXOLOTL | {"train_on_inputs": False, "datasets": [{"path": "t.jsonl", "type": "completion"}]},
        ),
        ("lf.yaml", TRAINER | {"stage": "pt", "finetuning_type": "full", "train_on_prompt": False}),
    ],
)
def test_plain_text_has_no_prompts_to_leave_out(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    made = convert(tmp_path, {name: content})
    values = [value(made, f"data.{key}") for key in ("format", "train_on", "too_long")]
    assert values == ["text", None, None]
    read_imported(made)


def test_axolotl_drops_long_records_and_warms_up(tmp_path: Path) -> None:
    made = convert(tmp_path, {"a.yml": AXOLOTL | {"datasets": [{"path": "r.jsonl", "type": "alpaca"}]}})
    assert (value(made, "data.too_long"), value(made, "schedule.warmup")) == ("drop", 0.03)
    told = {"excess_length_strategy": "truncate", "warmup_steps": 0}
    made = convert(tmp_path, {"a.yml": AXOLOTL | told})
    assert (value(made, "data.too_long"), value(made, "schedule.warmup")) == ("cut", 0)


def test_axolotls_choices_of_tokens_and_wording_are_named(tmp_path: Path) -> None:
    def lost(**asked: Any) -> list[str]:
        made = convert(tmp_path, {"a.yml": AXOLOTL | {"datasets": [{"path": "r.jsonl", **asked}]}})
        return [each.key.rpartition(".")[2] for each in made.of("no equivalent")]

    assert lost(type="chat_template", roles_to_train=["assistant"], train_on_eos="turn") == []
    assert lost(type="chat_template", roles_to_train=["user"]) == ["roles_to_train"]
    assert lost(type="chat_template", train_on_eos="all") == ["train_on_eos"]
    assert lost(type="alpaca") == []
    assert lost(type="alpaca:chat") == ["type"]


@pytest.mark.parametrize("size", [0, -2, 2.5])
@pytest.mark.parametrize("key", ["per_device_train_batch_size", "gradient_accumulation_steps"])
def test_a_size_that_is_no_whole_number_is_refused_with_its_file_and_key(
    tmp_path: Path, key: str, size: float
) -> None:
    with pytest.raises(RecipeError) as caught:
        convert(tmp_path, {"t.json": TRAINER | {key: size}})
    assert (caught.value.what, caught.value.where) == (f"{key} is no whole number from 1", f"t.json:1: {key}")


def test_a_key_of_json_that_comes_twice_is_refused(tmp_path: Path) -> None:
    text = '{"train_batch_size": 8, "zero_optimization": {"stage": 1, "stage": 3}}'
    with pytest.raises(RecipeError, match="cannot read the file") as caught:
        convert(tmp_path, {"ds.json": text})
    assert caught.value.why == "it has twice the key stage"


def test_fp16_of_deepspeed_grows_its_scale_after_1000_steps(tmp_path: Path) -> None:
    made = convert(tmp_path, {"ds.json": {"train_batch_size": 8, "fp16": {"enabled": True}}})
    assert value(made, "loss_scale.growth_interval") == 1000
    assert value(convert(tmp_path, {"ds.json": {"train_batch_size": 8}}), "loss_scale") is None


@pytest.mark.parametrize("asked", [{"infer_backend": "vllm"}, {"export_dir": "o"}, {"do_predict": True}])
def test_a_file_of_llama_factory_that_trains_nothing_is_refused(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    content = {"model_name_or_path": "m", "template": "qwen3", **asked}
    with pytest.raises(RecipeError, match="this file trains nothing") as caught:
        convert(tmp_path, {"lf.yaml": content})
    assert caught.value.where == f"lf.yaml:1: {next(iter(asked))}"
    made = convert(tmp_path, {"lf.yaml": content | {"do_train": True, "stage": "sft"}})
    assert [each.key for each in made.of("no equivalent")] == [
        "template",
        *["do_predict"] * ("do_predict" in asked),
    ]


def test_files_of_open_instruct_are_not_read_as_those_of_trl(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="files of open-instruct are not read"):
        convert(tmp_path, {"sft.yaml": SFT | {"use_slow_tokenizer": True, "checkpointing_steps": "epoch"}})


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"lr_scheduler_type": "cosine_with_restarts"}, {"name": "cosine", "floor": 0.0, "warmup": 0}),
        ({"lr_scheduler_type": "polynomial"}, {"name": "linear", "floor": 0.0, "warmup": 0}),
    ],
)
def test_one_cycle_and_power_one_are_cosine_and_linear(
    tmp_path: Path, asked: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert value(convert(tmp_path, {"t.json": TRAINER | asked}), "schedule") == wanted
    several = asked | {"lr_scheduler_kwargs": {"num_cycles": 3, "power": 2.0}}
    lost = convert(tmp_path, {"t.json": TRAINER | several}).of("no equivalent")
    assert [each.key for each in lost] == ["lr_scheduler_kwargs.num_cycles", "lr_scheduler_kwargs.power"]


def test_quantized_weights_without_an_adapter_are_named(tmp_path: Path) -> None:
    for name, content, key in (
        ("a.yml", AXOLOTL | {"load_in_8bit": True}, "load_in_8bit"),
        ("sft.json", SFT | {"load_in_4bit": True}, "load_in_4bit"),
        ("lf.yaml", TRAINER | {"finetuning_type": "full", "quantization_bit": 4}, "quantization_bit"),
    ):
        assert row(convert(tmp_path, {name: content}), key).status == "no equivalent"


def test_a_key_of_yaml_that_comes_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="a key comes twice") as caught:
        convert(tmp_path, {"a.yml": "base_model: m\nseed: 1\nseed: 2\n"})
    assert caught.value.where.endswith("a.yml:3")


@pytest.mark.parametrize(
    ("engine", "wanted"),
    [({}, None), ({"gradient_clipping": "auto"}, 0.5), ({"gradient_clipping": 0.5}, 0.5)],
)
def test_deepspeed_clips_by_its_own_key(tmp_path: Path, engine: dict[str, Any], wanted: float | None) -> None:
    engine = {"zero_optimization": {"stage": 2}, **engine}
    made = convert(tmp_path, {"t.json": TRAINER | {"max_grad_norm": 0.5, "deepspeed": engine}})
    assert value(made, "optimizer.clip_norm") == wanted
    assert (row(made, "max_grad_norm").status == "no equivalent") is (wanted is None)
    assert "clip_norm: null" in made.text() or wanted


def test_no_norm_is_no_clipping(tmp_path: Path) -> None:
    made = convert(tmp_path, {"t.json": TRAINER | {"max_grad_norm": None}})
    assert "clip_norm: null" in made.text()
    assert value(convert(tmp_path, {"t.json": TRAINER}), "optimizer.clip_norm") == 1.0
    assert (
        value(convert(tmp_path, {"a.yml": AXOLOTL | {"max_grad_norm": None}}), "optimizer.clip_norm") == 1.0
    )


@pytest.mark.parametrize(
    ("name", "base", "key", "off", "asks"),
    [
        ("t.json", TRAINER, "train_sampling_strategy", "random", "sequential"),
        ("t.json", TRAINER, "accelerator_config.split_batches", False, True),
        ("a.yml", AXOLOTL, "accelerator_config.split_batches", False, True),
        ("a.yml", AXOLOTL, "shuffle_merged_datasets", True, False),
        ("l.yaml", LITGPT, "data.init_args.prompt_style", "alpaca", "llama3"),
        ("t.json", {"job": {}, "training": {}}, "model.norm_type", "fused_rmsnorm", "layernorm"),
        ("t.json", {"model": {}, "training": {}}, "float8.filter_fqns", ["output"], ["output", "wk"]),
    ],
)
def test_a_choice_is_named_unless_it_is_that_of_a_recipe(
    tmp_path: Path, name: str, base: dict[str, Any], key: str, off: Any, asks: Any
) -> None:
    for asked, status in ((off, "not needed"), (asks, "no equivalent")):
        inner = asked
        for part in reversed(key.split(".")):
            inner = {part: inner}
        assert row(convert(tmp_path, {name: base | inner}), key).status == status


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.json", TRAINER | {"deepspeed": "a" * 400}),
        ("a.yml", {"base_model": "a" * 400}),
        ("lf.yaml", TRAINER | {"stage": "sft", "dataset": "d", "dataset_dir": "a" * 400}),
        ("sft.json", SFT | {"dataset_name": "a" * 400}),
        ("ds.json", {"train_batch_size": 8, "fp16": {"enabled": True, "initial_scale_power": 10**9}}),
        ("l.yaml", LITGPT | {"train": {"max_tokens": 100, "max_seq_length": {"a": 1}}}),
    ],
)
def test_odd_values_are_rows_or_one_line(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    with suppress(RecipeError):
        convert(tmp_path, {name: content}).text()


def test_a_name_that_is_too_long_for_a_file_is_no_file() -> None:
    assert not is_foreign(Path("a" * 400 + ".json"))
    assert recipe_file("a" * 400) == Path("a" * 400)


def test_no_longest_length_is_said_and_is_not_the_default(tmp_path: Path) -> None:
    made = convert(tmp_path, {"t.json": SFT | {"max_length": None}})
    assert row(made, "max_length").status == "no equivalent"
    assert (
        row(made, "data.sequence_length").status == "assumed" and value(made, "data.sequence_length") == 2048
    )


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"t.json": TRAINER | {"fp16": True}}, 1),
        ({"t.json": TRAINER | {"fp16": True, "deepspeed": {"zero_optimization": {"stage": 2}}}}, None),
        ({"a.yml": {"distributed_type": "NO", "mixed_precision": "fp16"}}, 1),
        ({"a.yml": {"distributed_type": "DEEPSPEED", "mixed_precision": "fp16"}}, None),
        ({"t.json": TRAINER | {"bf16": True}}, None),
    ],
)
def test_the_loss_scale_shrinks_when_theirs_does(
    tmp_path: Path, files: dict[str, Any], wanted: int | None
) -> None:
    """At the first overflow in torch's GradScaler, at the second of DeepSpeed's, as of a recipe."""
    assert value(convert(tmp_path, files), "loss_scale.hysteresis") == wanted


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"t.toml": '[job]\n[model]\n[training]\n[parallelism]\n[optimizer]\nname = "AdamW"\n'}, True),
        (
            {
                "d.json": {
                    "train_batch_size": 8,
                    "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}},
                }
            },
            True,
        ),
        (
            {
                "d.json": {
                    "train_batch_size": 8,
                    "optimizer": {"type": "AdamW", "params": {"weight_decay": 0}},
                }
            },
            False,
        ),
        (
            {"t.json": TRAINER | {"weight_decay": 0.1, "deepspeed": {"zero_optimization": {"stage": 2}}}},
            False,
        ),
    ],
)
def test_decay_of_norms_is_said(tmp_path: Path, files: dict[str, Any], said: bool) -> None:
    made = convert(tmp_path, files)
    assert ("optimizer.weight_decay" in {other.key for other in made.of("assumed")}) is said
