"""``shardwise finetune`` and ``init``: the choices, the recipe that they write, and the way to an adapter."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from shardwise.cli.main import run
from shardwise.core.errors import DataError, RecipeError, ResourceError
from shardwise.core.plan import Plan
from shardwise.core.units import GiB
from shardwise.plugins.finetune import choosing as finetuning
from shardwise.plugins.finetune.choosing import choose_method, draft, hardware_here, shape_of, with_overrides
from shardwise.plugins.finetune.model_card import class_of, finish_adapter, model_card
from shardwise.plugins.finetune.written_recipe import (
    FINE_TUNING_METHODS,
    FineTuning,
    FineTuningMethod,
    Hardware,
)
from shardwise.recipe.load import parse_recipe
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS
from tests.harness.commands import Shell
from tests.harness.corpora import write_tokenizer
from tests.harness.plans import small_plan

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '</s>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '[SEP]' }}{% endif %}{% endfor %}"
)


def write_base(folder: Path, positions: int = 256, weights: bool = False) -> Path:
    """A Llama of two blocks with a tokenizer of letters and a chat template."""
    write_tokenizer(folder, "</s>")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    small = {"vocab_size": 33, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes = small | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": positions}
    if weights:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=5, bos_token_id=None)).save_pretrained(folder)
    else:
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_chats(path: Path, count: int = 60, letters: int = 4) -> Path:
    turns = [("say " + "ab"[n % 2], "ab"[n % 2] * letters) for n in range(count)]
    chats = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in turns
    ]
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    return path


@pytest.mark.parametrize("method", FINE_TUNING_METHODS)
def test_the_recipe_of_every_method_is_a_recipe(method: FineTuningMethod) -> None:
    asked = FineTuning("org/model", "chats/*.jsonl", 2.0, hardware=Hardware("H100-80GB", 8, 79.2, "bf16"))
    recipe = parse_recipe(asked.recipe(method, "because"), SETTINGS)
    assert (recipe.epochs, recipe.data.packing, recipe.cluster.devices_per_node) == (2.0, True, 8)
    assert (recipe.adapter is None) == (method == "full")
    assert recipe.adapter is None or (recipe.adapter.quantize == "nf4") == (method == "qlora")


@pytest.mark.parametrize(
    ("letters", "length", "packing"),
    [(4, 64, True), (100, 128, False), (600, 256, False)],  # 10, 106 and 606 tokens a record, context 256
)
def test_sequences_follow_from_the_records(letters: int, length: int, packing: bool, tmp_path: Path) -> None:
    """The longest record decides the length up to the context; packing where two records fit."""
    base, data = write_base(tmp_path / "base"), write_chats(tmp_path / "chats.jsonl", letters=letters)
    shape, sequences = shape_of(str(base), str(data), finetuning.context_of(str(base)))
    assert (shape.sequence_length, shape.packing) == (length, packing)
    assert 5 < sequences < 12 if packing else sequences > 50
    asked = draft(str(base), str(data), 3.0).on(Hardware(count=3))
    assert asked.batch_size % 3 == 0  # every device has a sequence
    recipe = parse_recipe(asked.recipe("lora"), SETTINGS)
    assert recipe.data.sequence_length == length


@pytest.mark.parametrize(
    ("letters", "length", "packing"),
    [(8, 64, True), (50, 64, False), (600, 256, False)],  # 20, 62 and 612 tokens a document, context 256
)
def test_pairs_are_packed_where_padding_would_take_half(
    letters: int, length: int, packing: bool, tmp_path: Path
) -> None:
    base, data = write_base(tmp_path / "base"), tmp_path / "pairs.jsonl"
    record = {"prompt": "say a or b: ", "chosen": "a" * letters, "rejected": "b" * letters}
    data.write_text("\n".join([json.dumps(record)] * 60))
    shape, _ = shape_of(str(base), str(data), finetuning.context_of(str(base)), "pairs")
    assert (shape.sequence_length, shape.packing) == (length, packing)


@pytest.mark.parametrize(
    ("file", "fix"),
    [("recipe.yaml", "shardwise export given OUT"), ("adapter_config.json", "adapter.start_from")],
)
def test_a_run_or_an_adapter_that_is_given_for_a_model_is_named(
    file: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("given").mkdir()
    Path("given", file).touch()
    with pytest.raises(RecipeError, match="not a model folder") as caught:
        finetuning.text_config("given")
    assert fix in caught.value.fix


def test_records_that_do_not_suit_the_objective_are_refused_by_its_option(tmp_path: Path) -> None:
    base, data = write_base(tmp_path / "base"), write_chats(tmp_path / "chats.jsonl")
    with pytest.raises(DataError) as caught:
        draft(str(base), str(data), 1.0, preference="dpo")
    assert caught.value.what.startswith("this --objective needs pairs: chosen and rejected")
    assert caught.value.fix == "give pairs, or leave --objective out"
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "choosen": "b", "rejected": "c"}')
    with pytest.raises(DataError, match="did you mean 'chosen' by 'choosen'"):
        draft(str(base), str(tmp_path / "pairs.jsonl"), 1.0, preference="dpo")


def test_a_fault_of_the_data_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    base, pairs = write_base(tmp_path / "base"), tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "choosen": "b", "rejected": "c"}')
    lines = (
        "import sys",
        "from shardwise.cli.main import run",
        f"assert run(['finetune', {str(base)!r}, {str(pairs)!r}, '--objective', 'dpo']) != 0",
        "assert 'torch' not in sys.modules",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=tmp_path)


def test_text_is_cut_into_sequences(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    (tmp_path / "a.txt").write_text("some words of text " * 200)
    shape, _ = shape_of(str(base), str(tmp_path / "a.txt"), 256)
    assert (shape.sequence_length, shape.packing) == (256, False)


def planned(monkeypatch: pytest.MonkeyPatch, fitting: set[str]) -> list[str]:
    """Plans of which only those of ``fitting`` fit; the methods that were planned."""
    seen: list[str] = []

    def make(recipe: Recipe, *_: Any, **__: Any) -> Plan:
        adapter = recipe.adapter
        seen.append("full" if adapter is None else "lora" if adapter.quantize == "none" else "qlora")
        plan = small_plan()
        room = plan.peak.bytes * 2 if seen[-1] in fitting else plan.peak.bytes - 1
        return replace(plan, capacity_bytes=room)

    monkeypatch.setattr(finetuning, "make_plan", make)
    return seen


@pytest.mark.parametrize("method", FINE_TUNING_METHODS)
def test_the_first_method_that_fits_is_chosen(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = planned(monkeypatch, {method, "qlora"})
    chosen = choose_method(FineTuning("org/model", "a.jsonl"), None)
    text, recipe, plan = chosen.text, chosen.recipe, chosen.plan
    assert seen == list(FINE_TUNING_METHODS[: FINE_TUNING_METHODS.index(method) + 1]) and plan.fits
    if method != "full":
        assert f"{seen[-2]} needs " in text  # why not the one before
    assert recipe == parse_recipe(text, SETTINGS)


def test_no_method_fits_or_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = planned(monkeypatch, set())
    with pytest.raises(ResourceError, match="does not fit"):
        choose_method(FineTuning("org/model", "a.jsonl"), None)
    assert seen == list(FINE_TUNING_METHODS)
    seen = planned(monkeypatch, {"full", "lora"})
    overrides = ["adapter.rank=4", "batch_size=2"]
    recipe = choose_method(FineTuning("org/model", "a.jsonl"), "lora", overrides).recipe
    assert (
        seen == ["lora"]
        and recipe.adapter is not None
        and recipe.adapter.rank == 4
        and recipe.batch_size == 2
    )


def test_overrides_are_part_of_the_recipe_that_is_written() -> None:
    text = with_overrides(FineTuning("m", "d.jsonl").recipe("lora"), ["steps=5", "data.held_out=0.2"])
    recipe = parse_recipe(text, SETTINGS)
    assert (recipe.steps, recipe.epochs, recipe.data.held_out) == (5, None, 0.2)
    assert "# from the command line: " in text


def test_gpus_are_found_with_their_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))

    def gpu(name: str, memory: float, bf16: bool) -> Hardware:
        found = SimpleNamespace(name=name, total_memory=int(memory * GiB), major=8, minor=9)
        found.multi_processor_count = 36
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
        return hardware_here()

    known = gpu("NVIDIA H100 80GB HBM3", 79.19, True)
    assert (known.device, known.count, known.memory_gib, known.precision) == ("H100-80GB", 4, 79.1, "bf16")
    unknown = gpu("Some New Card", 23.6, False)
    assert (unknown.memory_gib, unknown.precision) == (23.5, "fp16") and "has no profile" in unknown.note
    assert unknown.device == str(tmp_path / "some-new-card.toml")
    assert hardware_here("cpu") == Hardware()
    for found in (known, unknown):
        recipe = parse_recipe(FineTuning("m", "d", hardware=found).recipe("lora"), SETTINGS)
        assert recipe.cluster.memory_gib == found.memory_gib


def test_presets_have_no_weights_to_tune() -> None:
    with pytest.raises(RecipeError, match="llama-3-8b cannot be fine-tuned"):
        draft("llama-3-8b", "a.jsonl", 1.0)


@pytest.mark.parametrize("adapter", ["", "adapter: {rank: 8, quantize: nf4}\n"])
def test_the_card_has_metadata_that_the_hub_reads(adapter: str) -> None:
    text = f"model: {{hf: org/base}}\ndata: {{source: 'x: y'}}\nsteps: 7\nbatch_size: 4\n{adapter}"
    recipe = parse_recipe(text, SETTINGS)
    _, head, body = model_card(recipe, small_plan(), 1.25, "AutoModelForCausalLM").split("---\n", 2)
    values = yaml.safe_load(head)
    assert values["base_model"] == "org/base" and "text-generation" in values["tags"]
    assert values["library_name"] == ("peft" if adapter else "transformers")
    assert "1.2500 nats" in body and ("rank 8 on a base in nf4" in body) == bool(adapter)


@pytest.mark.parametrize("adapter", ["", "adapter: {rank: 8}\n"])
def test_the_card_of_a_reward_model_loads_its_score(adapter: str) -> None:
    """A causal language model would be loaded with a new output layer in the place of the score."""
    text = f"model: {{hf: org/base}}\nobjective: reward\ndata: {{source: p.jsonl}}\nsteps: 7\nbatch_size: 4\n{adapter}"
    recipe = parse_recipe(text, SETTINGS)
    _, head, body = model_card(recipe, small_plan(), 0.5, class_of(recipe)).split("---\n", 2)
    tags = yaml.safe_load(head)["tags"]
    assert {"text-classification", "reward"} <= {*tags} and "text-generation" not in tags
    assert "ForCausalLM" not in body and "ForSequenceClassification.from_pretrained" in body
    assert ("num_labels=1" in body) == bool(adapter)
    assert "| steps | 7 of 4 pairs of 256 tokens |" in body and "| objective | reward |" in body


def test_an_adapter_gets_every_file_of_the_tokenizer(tmp_path: Path) -> None:
    """Also those in folders, and the settings without the code that is not copied."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    (base / "additional_chat_templates").mkdir(parents=True)
    adapter.mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("x")
    settings = {"eos_token": "</s>", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    text = "model: {hf: org/base}\nobjective: reward\nadapter: {rank: 8}\nsteps: 7\nbatch_size: 4\n"
    recipe = parse_recipe(f"{text}data: {{source: p.jsonl, tokenizer: '{base}'}}\n", SETTINGS)
    for _ in range(2):  # a run that goes on writes them again
        finish_adapter(adapter, recipe, small_plan(), 0.5)
    assert (adapter / "additional_chat_templates" / "tools.jinja").read_text() == "x"
    assert json.loads((adapter / "tokenizer_config.json").read_text()) == {"eos_token": "</s>"}


def test_the_card_of_preferences_names_the_objective() -> None:
    text = "model: {hf: org/base}\nobjective: dpo\nadapter: {rank: 8}\ndata: {source: p.jsonl}\nsteps: 7\n"
    recipe = parse_recipe(text + "batch_size: 4\n", SETTINGS)
    _, head, body = model_card(recipe, small_plan(), 0.5, "AutoModelForCausalLM").split("---\n", 2)
    assert yaml.safe_load(head)["tags"] == ["shardwise", "text-generation", "dpo", "lora"]
    assert "| objective | dpo, beta 0.1 |" in body and "AutoPeftModelForCausalLM" in body


def test_init_writes_a_recipe_and_replaces_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "recipe.yaml"
    given = ["init", "org/model", "chats.jsonl", "--out", str(out), "--method", "qlora", "--device", "cpu"]
    assert run(given) == 0
    recipe = parse_recipe(out.read_text(), SETTINGS)
    assert recipe.model.hf == "org/model" and recipe.adapter is not None and recipe.adapter.quantize == "nf4"
    assert out.read_text().count("#") > 10
    assert run(given) == 2 and "nothing is replaced" in capsys.readouterr().err


def _refuses_options_of_another_run(shell: Shell, method: str) -> None:
    """Each one that the finished folder would ignore is named; the folder stays as it is, and works elsewhere."""
    other = {"lora": "qlora", "full": "lora"}[method]
    for options, said in (
        (("--epochs", "3", "--method", other), (f"--epochs 3 and --method {other}", f"2, method: {method}")),
        (("--epochs", "1"), ("--epochs 1 would be ignored",)),
        (("optimizer.learning_rate=1e-3",), ("optimizer.learning_rate was ", "now 0.001")),
    ):
        done = shell.run("finetune", "base", "chats.jsonl", *options, "--out", "out")
        assert done.returncode == 2 and all(words in done.stderr for words in said), done.stderr
    Path("elsewhere").mkdir()
    for folder in ("base", "chats.jsonl"):
        Path(folder).rename(Path("elsewhere") / folder)
    written = Path(shutil.copytree("out", "elsewhere/out")) / ("adapter" if method == "lora" else "model")
    before = (written / "README.md").stat().st_mtime, (written / "README.md").read_text()
    words = ("finetune", "elsewhere/base", "elsewhere/chats.jsonl", "epochs=3", "--out", "elsewhere/out")
    done = shell.run(*words)
    assert done.returncode == 0, done.stderr
    weights = next(written.glob("*.safetensors"))
    assert weights.stat().st_mtime > before[0], "what the further steps trained is written again"
    assert str(Path("elsewhere/base").absolute()) in (written / "README.md").read_text() != before[1]
    for folder in ("base", "chats.jsonl"):
        (Path("elsewhere") / folder).rename(folder)


@pytest.mark.long
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_small_model_learns_conversations_in_one_command(
    method: str, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result answers in PEFT or transformers as it does in Shardwise; the same command again does nothing."""
    import transformers

    monkeypatch.chdir(tmp_path)
    write_base(Path("base"), weights=True)
    write_chats(Path("chats.jsonl"))
    command = ("finetune", "base", "chats.jsonl", "--method", method, "--epochs", "2", "--out", "out")
    done = shell.run(*command)
    assert done.returncode == 0, done.stderr
    assert "answer " in done.stdout and "expected " in done.stdout and "shardwise chat out" in done.stdout
    again = shell.run(*command)
    assert (
        again.returncode == 0
        and "nothing to do" in again.stdout
        and "out/finetune.yaml: the recipe, read" in again.stdout
    )
    assert shell.run("finetune", "base", "other.jsonl", "--out", "out").returncode == 2
    _refuses_options_of_another_run(shell, method)

    folder = Path("out") / ("adapter" if method == "lora" else "model")
    assert {"README.md", "tokenizer.json", "chat_template.jinja"} <= {path.name for path in folder.iterdir()}
    if method == "lora":
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(folder)  # needs task_type and the base's name
        asked = ("base", "--adapter", str(folder))
    else:
        model, asked = transformers.AutoModelForCausalLM.from_pretrained(folder), (str(folder),)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode("say a[SEP]")])
    found = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, eos_token_id=5)[
        0, ids.shape[1] :
    ]
    words = ("--prompt", "say a[SEP]", "--temperature", "0", "--tokens", "8", "--json")
    said = json.loads(shell.run("generate", *asked, *words).stdout)["text"]
    assert said.replace(" ", "") == tokenizer.decode(found, skip_special_tokens=True).replace(" ", "")
