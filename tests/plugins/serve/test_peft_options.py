"""PEFT's options for single layers and for modules that are trained in full, read and written, against PEFT itself.

Logits in fp32 are compared with those of PEFT's own model of the same files: served, merged, continued, and of a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardwise.cli.main import run
from shardwise.core.errors import CheckpointError, RecipeError
from shardwise.model.files.peft import AdapterFiles, write_adapter
from shardwise.model.initial import fill_uniform
from shardwise.model.open import blueprint_of
from shardwise.plugins.serve.serving import load_model
from shardwise.recipe.load import dump_recipe, recipe_of
from shardwise.runtime.parallel.shard_slices import named_parameters
from shardwise.technique import SETTINGS
from tests.harness.commands import Shell
from tests.harness.corpora import write_tokenizer
from tests.plugins.finetune.test_finetune import write_chats

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

IDS = torch.arange(24).view(2, 12) % 33
SMALL = {
    "vocab_size": 33,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 5,
    "bos_token_id": None,
    "attention_bias": True,
    "mlp_bias": True,
    "initializer_range": 0.08,
}

# A name; PEFT's options; the same as a recipe's section.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ranks and alphas": (
        {
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {"^model.layers.2.mlp.down_proj": 1, r"layers\.0\.self_attn\.q_proj": 6, "q_proj": 3},
            "alpha_pattern": {"down_proj": 2.5, "layers.1.*": 20},  # sorted, as PEFT saves them
        },
        {"targets": ["q_proj", "down_proj"]},
    ),
    "one layer": ({"target_modules": ["q_proj"], "layers_to_transform": 1}, {"targets": ["q_proj"]}),
    "layers by pattern": (
        {"target_modules": ["v_proj", "up_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
        {"targets": ["v_proj", "up_proj"]},
    ),
    "modules to save": (
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        {"targets": ["q_proj"]},
    ),
    "norms to save": (
        {"target_modules": ["k_proj"], "modules_to_save": ["model.norm", "post_attention_layernorm"]},
        {"targets": ["k_proj"]},
    ),
    "part of a block to save": (
        {"target_modules": "all-linear", "modules_to_save": ["layers.1.mlp"]},
        {"targets": "all"},
    ),
    "output layer": ({"target_modules": ["lm_head", "o_proj"]}, {"targets": ["lm_head", "o_proj"]}),
    "output layer by expression": (
        {"target_modules": r"lm_head|.*layers\.1\.self_attn\.q_proj", "rank_pattern": {"lm_head": 2}},
        {"targets": r"lm_head|.*layers\.1\.self_attn\.q_proj"},
    ),
    "excluded": (
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*layers\.0\..*"},
        {"targets": r".*layers\.[12]\.self_attn\.[qk]_proj"},
    ),
    "bias of B": ({"target_modules": ["q_proj", "gate_proj"], "lora_bias": True}, {"targets": ["q_proj", "gate_proj"]}),
    "rslora and dora": (
        {"target_modules": ["q_proj"], "use_dora": True, "use_rslora": True, "rank_pattern": {"layers.2.*": 7}},
        {"targets": ["q_proj"], "name": "dora", "rank_stabilized": True},
    ),
}  # fmt: skip
PLAIN = {
    "tensor_parallel": 1,
    "sequence_parallel": 1,
    "pipeline_parallel": 1,
    "activation_checkpointing": "none",
}
"""Pinned, so that the plan has no search."""
COPIED = ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "lora_bias")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_tokenizer(folder, "</s>")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.uniform_(parameter, -0.1, 0.1)
    model.save_pretrained(folder)
    return folder


def opened(base: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(base).eval()


def saved_by_peft(base: Path, folder: Path, options: dict[str, Any]) -> Tensor:
    """An adapter with random values, also of modules to save. Returns the logits of the files.

    PEFT sorts the patterns when it saves them. The first that matches counts, so the files may be another adapter.
    """
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    if options.get("lora_bias"):
        config.init_lora_weights = True
    model = peft.get_peft_model(opened(base), config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(str(folder))
    return logits(peft.PeftModel.from_pretrained(opened(base), str(folder)).eval())


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=IDS).logits


def served(folder: Path, **adapters: Path) -> Callable[..., Tensor]:
    """Logits of rows with the adapters of these names."""
    model = load_model(folder, adapters)

    def logits_of(*names: str) -> Tensor:
        model.bank.select(names)
        return logits(model.model)

    return logits_of


@pytest.fixture(params=OPTIONS)
def case(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    options, section = OPTIONS[request.param]
    copied = {key: value for key, value in options.items() if key in COPIED}
    return options, {"rank": 4, "alpha": 8.0, **copied, **section}


def recipe_with(base: Path, section: dict[str, Any]) -> Any:
    values = {"model": {"hf": str(base)}, "data": {"sequence_length": 16}, "steps": 1, "batch_size": 1}
    return recipe_of({**values, "adapter": section}, SETTINGS)


def close(ours: Tensor, theirs: Tensor) -> None:
    """Relative to the largest logit, or to 1."""
    assert float((ours - theirs).abs().max()) <= 1e-6 * max(1.0, float(theirs.abs().max()))


def test_what_peft_saved_is_served_merged_and_continued(
    case: tuple[dict[str, Any], dict[str, Any]],
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options, section = case
    expected, plain = saved_by_peft(base, tmp_path / "theirs", options), logits(opened(base))
    assert float((expected - plain).abs().max()) > 1e-3, "the adapter does something"
    found = served(base, theirs=tmp_path / "theirs")
    close(found("theirs", "theirs"), expected)
    close(found("base", "base"), plain)
    mixed = found("base", "theirs")
    close(mixed[:1], plain[:1])
    close(mixed[1:], expected[1:])

    assert run(["merge", str(base), str(tmp_path / "theirs"), str(tmp_path / "merged")]) == 0, (
        capsys.readouterr().err
    )
    merged = opened(tmp_path / "merged")
    theirs = peft.PeftModel.from_pretrained(opened(base), str(tmp_path / "theirs")).merge_and_unload()
    close(logits(merged), logits(theirs.eval()))
    if "modules_to_save" not in options:
        undo = [
            "merge",
            "--undo",
            str(tmp_path / "merged"),
            str(tmp_path / "theirs"),
            str(tmp_path / "undone"),
        ]
        assert run(undo) == 0
        close(logits(opened(tmp_path / "undone")), plain)
    else:
        undo = [
            "merge",
            "--undo",
            str(tmp_path / "merged"),
            str(tmp_path / "theirs"),
            str(tmp_path / "undone"),
        ]
        assert run(undo) == 4 and "in full" in capsys.readouterr().err

    blueprint = blueprint_of(recipe_with(base, {**section, "start_from": str(tmp_path / "theirs")}))
    with torch.device("meta"):
        model = blueprint.build()
    model.to_empty(device="cpu")
    blueprint.fill(model, 0)
    blueprint.restore(model)
    close(logits(model.eval()), expected)


TRAINED = ("modules to save",)
"""By a whole run in `make test`; technique/test_peft_training.py trains the options without the command."""


@pytest.mark.parametrize(
    "case",
    [name if name in TRAINED else pytest.param(name, marks=pytest.mark.long) for name in OPTIONS],
    indirect=True,
)
def test_what_a_run_trains_is_read_by_peft(
    case: tuple[dict[str, Any], dict[str, Any]], base: Path, shell: Shell, tmp_path: Path
) -> None:
    """Two ranks with sharded weights; the run's own files, its export, and the files on the base."""
    write_chats(tmp_path / "chats.jsonl")
    values = {
        "model": {"hf": str(base)},
        "data": {"source": str(tmp_path / "chats.jsonl"), "sequence_length": 32, "held_out": 0.1, "format": "messages"},
        "steps": 3, "batch_size": 4, "adapter": case[1],
        "optimizer": {"learning_rate": 0.05}, "schedule": {"name": "constant", "warmup": 0},
        "cluster": {"device": "cpu", "devices_per_node": 2},
        "strategy": {"precision": "fp32", "zero_stage": 3, "micro_batch_size": 2, "loss": "logits", **PLAIN},
    }  # fmt: skip
    (base / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}", encoding="utf-8"
    )
    (tmp_path / "r.yaml").write_text(json.dumps(values), encoding="utf-8")
    done = shell.run("train", "r.yaml", "--out", "run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    model = peft.PeftModel.from_pretrained(opened(base), str(tmp_path / "run" / "adapter")).eval()
    expected = logits(model)
    assert float((expected - logits(opened(base))).abs().max()) > 1e-3
    close(served(tmp_path / "run")("own", "own"), expected)
    close(served(base, ours=tmp_path / "run" / "adapter")("ours", "ours"), expected)
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    close(logits(opened(tmp_path / "out")), expected)
    # PEFT saves what it has read, with every option as it was.
    model.save_pretrained(str(tmp_path / "again"))
    ours, theirs = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "run" / "adapter", tmp_path / "again")
    )
    assert ours.keys() <= theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(".base_layer." in name for name in theirs.keys() - ours.keys())


def test_the_order_of_patterns_is_kept(base: Path, tmp_path: Path) -> None:
    """The first that matches counts, and PEFT reads them in the order of the file."""
    section = {
        "targets": ["q_proj"],
        "rank": 4,
        "alpha": 8.0,
        "alpha_pattern": {"q_proj": 2.0, "layers.1.*": 90.0},
    }
    blueprint = blueprint_of(recipe_with(base, {**section, "rank_pattern": {"z|q_proj": 2, "layers.0.*": 5}}))
    with torch.device("meta"):
        model = blueprint.build()
    model.to_empty(device="cpu")
    blueprint.fill(model, 0)
    blueprint.restore(model)
    for name, parameter in named_parameters(model):
        if parameter.requires_grad:
            fill_uniform(parameter, 0.5, 1, name)
    tensors = {name: p.detach() for name, p in named_parameters(model) if p.requires_grad}
    write_adapter(tmp_path / "ours", tensors, blueprint.config(), None)  # type: ignore[attr-defined]
    assert AdapterFiles(tmp_path / "ours").spec("all").strength("model.layers.0.self_attn.q_proj") == (2, 2.0)
    theirs = peft.PeftModel.from_pretrained(opened(base), str(tmp_path / "ours")).eval()
    close(logits(model.eval()), logits(theirs))


REFUSED = [
    ({"trainable_token_indices": [1, 2]}, "trainable_token_indices is [1, 2]"),
    (
        {"target_parameters": ["self_attn.sinks"]},
        "target_parameters is ['self_attn.sinks']",
    ),
    ({"bias": "all"}, "bias is all"),
    ({"ensure_weight_tying": True}, "ensure_weight_tying is True"),
    ({"an_option_of_next_year": True}, "an_option_of_next_year is True"),
    ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is [3]"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is"),
    (
        {"modules_to_save": ["lm_head"]},
        "its config has lm_head.weight trained in full, and it has no such tensor",
    ),
    ({"rank_pattern": {"q_proj": 9}}, "gives it the rank 9"),
    (
        {"target_modules": ["q_proj", "k_proj"]},
        "its config names model.layers.0.self_attn.k_proj, and it has no",
    ),
    (
        {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [2]},
        "names model.layers.2.self_attn.k_proj",
    ),
]


@pytest.mark.parametrize(("change", "said"), REFUSED, ids=[next(iter(change)) for change, _ in REFUSED])
def test_an_option_that_is_not_honoured_is_named(
    change: dict[str, Any], said: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_by_peft(base, tmp_path / "theirs", {"target_modules": ["q_proj"]})
    config = tmp_path / "theirs" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert run(["merge", str(base), str(tmp_path / "theirs"), str(tmp_path / "merged")]) == 4
    assert said in capsys.readouterr().err


def test_an_embedding_with_an_adapter_and_a_resized_base_are_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_by_peft(base, tmp_path / "embedding", {"target_modules": ["embed_tokens"]})
    saved_by_peft(base, tmp_path / "head", {"target_modules": ["lm_head"]})
    path = tmp_path / "head" / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors["base_model.model.lm_head.base_layer.weight"] += 0.01
    save_file(tensors, path, {"format": "pt"})
    for name, said in (
        ("embedding", "adapts an embedding"),
        ("head", "its lm_head.weight is not the base's"),
    ):
        assert run(["merge", str(base), str(tmp_path / name), str(tmp_path / "merged")]) == 4
        assert said in capsys.readouterr().err
        with pytest.raises(CheckpointError):
            load_model(base, {"a": tmp_path / name})


def test_a_tied_base(tmp_path: Path) -> None:
    """Its output layer can be served with an adapter, and a copy of it; it is neither trained nor merged."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
    write_tokenizer(tmp_path / "tied", "</s>")
    for number, options in enumerate(
        ({"target_modules": ["lm_head"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
    ):
        folder = tmp_path / f"adapter{number}"
        expected = saved_by_peft(tmp_path / "tied", folder, options)
        found = served(tmp_path / "tied", theirs=folder)
        close(found("theirs", "theirs"), expected)
        close(found("base", "base"), logits(opened(tmp_path / "tied")))
        assert run(["merge", str(tmp_path / "tied"), str(folder), str(tmp_path / "out")]) in (2, 4)
    for section, said in (
        ({"targets": ["lm_head"]}, "shares its weight with the embedding"),
        ({"targets": "all", "modules_to_save": ["lm_head"]}, "would untie the model"),
        ({"targets": "all", "modules_to_save": ["embed_tokens"]}, "would untie the model"),
    ):
        with pytest.raises(RecipeError, match=said):
            blueprint_of(recipe_with(tmp_path / "tied", section))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"modules_to_save": ["no_such"]}, "'no_such' cannot be trained in full"),
        ({"modules_to_save": ["rotary_emb"]}, "no module with weights"),
        ({"rank_pattern": {"c_attn": 2}}, "no adapted layer is 'c_attn'"),
        (
            {"targets": ["q_proj"], "alpha_pattern": {"k_proj": 2.0}},
            "the first is model.layers.0.self_attn.q_proj",
        ),
        ({"targets": ["q_proj"], "layers_to_transform": [7]}, "number blocks from 0"),
        (
            {"targets": ["q_proj"], "modules_to_save": ["self_attn"]},
            "no linear layer of the model's blocks is 'q_proj'",
        ),
        ({"name": "dora", "lora_bias": True}, "dora has no lora_bias"),
    ],
)
def test_a_recipe_that_names_nothing(section: dict[str, Any], said: str, base: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        blueprint_of(recipe_with(base, section))
    assert said in caught.value.line()


def test_a_run_without_the_base_s_own_modules_says_so(
    base: Path, shell: Shell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoint has the trained ones; the base's are asked for where they are needed."""
    write_chats(tmp_path / "chats.jsonl")
    (base / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}")
    recipe = recipe_with(base, {"rank": 2, "modules_to_save": ["lm_head"], "quantize": "int8"})
    text = dump_recipe(recipe).replace("source: stdlib", f"source: {tmp_path / 'chats.jsonl'}")
    (tmp_path / "r.yaml").write_text(text.replace("sequence_length: 16", "sequence_length: 32"))
    done = shell.run("train", "r.yaml", "--out", "run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = str(tmp_path / "run")
    assert run(["generate", folder, "--prompt", "a", "--tokens", "2"]) == 0
    capsys.readouterr()
    for words, said in (
        (["generate", folder, "--prompt", "a", "--adapter", "base"], "give the folder of the base model"),
        (["generate", folder, "--prompt", "a", "--adapter", f"x={folder}/adapter"], "takes no other adapter"),
        (["export", folder, str(tmp_path / "out"), "--base"], f"take the base from {base}"),
    ):
        assert run(words) == 2 and said in capsys.readouterr().err
    words = ["generate", str(base), "--prompt", "a", "--tokens", "2", "--adapter", f"x={folder}/adapter"]
    assert run([*words, "--adapter", "base"]) == 0
