"""What a recipe means once it is read: values, overrides, and back to YAML."""

import pickle
import random
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Setting
from shardwise.recipe.load import SECTIONS, dump_recipe, load_recipe, parse_recipe, recipe_of
from shardwise.recipe.section import Section
from shardwise.recipe.sections import Recipe

SETTINGS: tuple[Setting[Any], ...] = (
    Setting("zero_stage", 0, "ZeRO stage", kind=int, choices=(0, 1, 2, 3)),
    Setting("precision", "fp32", "dtype of compute", choices=("fp32", "bf16")),
    Setting("compile", False, "torch.compile", kind=bool),
    Setting("activation_checkpointing", "none", "recomputed activations"),
)

CONTRACT = """\
model:      # dimensions alone
  layers: 8
  width: 512
  heads: 8
  kv_heads: 8
  ffn: 1408
  vocab: 256
data:
  source: stdlib
  tokenizer: bytes
  sequence_length: 256
steps: 100
batch_size: 16
seed: 0
optimizer: {name: adamw, learning_rate: 3.0e-4, weight_decay: 0.1, betas: [0.9, 0.95], clip_norm: 1.0}
schedule:  {name: cosine, warmup: 0.03, floor: 0.1}
cluster:   {device: cpu, nodes: 1, devices_per_node: 2}
strategy:
  precision: fp32
  zero_stage: 3
  activation_checkpointing: budget:0.5
  compile: false
checkpoint: {every: 50, keep: 2}
"""
SMALL = "model: {preset: tiny}\nsteps: 10\nbatch_size: 4\n"


def load(tmp_path: Path, text: str | bytes, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_recipe(path, overrides, SETTINGS)


def test_the_recipe_of_the_contract(tmp_path: Path) -> None:
    recipe = load(tmp_path, CONTRACT)
    assert (recipe.steps, recipe.batch_size, recipe.seed) == (100, 16, 0)
    assert (recipe.model.layers, recipe.model.ffn, recipe.model.preset) == (8, 1408, None)
    assert recipe.optimizer.learning_rate == 3e-4 and recipe.optimizer.betas == (0.9, 0.95)
    assert recipe.schedule.warmup == 0.03
    assert (recipe.cluster.device, recipe.cluster.devices_per_node) == ("cpu", 2)
    pins = {"precision": "fp32", "zero_stage": 3, "activation_checkpointing": "budget:0.5", "compile": False}
    assert recipe.strategy == pins


def test_defaults() -> None:
    recipe = parse_recipe(SMALL, SETTINGS)
    assert recipe.data.source == "stdlib" and recipe.data.sequence_length == 256
    assert recipe.optimizer.epsilon == 1e-8 and recipe.optimizer.clip_norm == 1.0
    assert recipe.checkpoint.every is None and recipe.evaluation.sequences == 32
    assert recipe.strategy == {}


@pytest.mark.parametrize(
    ("written", "rate"),
    [("3e-4", 3e-4), ("3.0e-4", 3e-4), ("1e-4", 1e-4), ("1E-4", 1e-4), (".5", 0.5), ("1", 1.0), ("+1.", 1.0)],
)
def test_a_float_is_a_float_however_written(tmp_path: Path, written: str, rate: float) -> None:
    recipe = load(tmp_path, SMALL + f"optimizer: {{learning_rate: {written}}}\n")
    assert recipe.optimizer.learning_rate == rate and type(recipe.optimizer.learning_rate) is float
    assert load(tmp_path, SMALL, f"optimizer.learning_rate={written}") == recipe


@pytest.mark.parametrize(
    "word", ["no", "on", "yes", "off", "1_000", "12:30", "2024-01-01", "1f1b", "0b1", "e5"]
)
def test_words_of_yaml_1_1_stay_text(tmp_path: Path, word: str) -> None:
    assert load(tmp_path, SMALL + f"data: {{source: {word}}}\n").data.source == word
    assert load(tmp_path, SMALL, f"data.source={word}").data.source == word


@pytest.mark.parametrize(("written", "steps"), [("017", 17), ("0o17", 15), ("0x1F", 31), ("+5", 5)])
def test_integers_of_yaml_1_2(tmp_path: Path, written: str, steps: int) -> None:
    assert load(tmp_path, SMALL, f"steps={written}").steps == steps


def test_mark_line_ends_and_empty_sections_are_accepted(tmp_path: Path) -> None:
    plain = load(tmp_path, CONTRACT)
    assert load(tmp_path, b"\xef\xbb\xbf" + CONTRACT.encode()) == plain
    assert load(tmp_path, CONTRACT.replace("\n", "\r\n")) == plain
    assert load(tmp_path, "%YAML 1.2\n---\n" + CONTRACT + "...\n") == plain
    assert load(tmp_path, SMALL + "strategy:\n  # zero_stage: 3\ndata:\n") == load(tmp_path, SMALL)


@pytest.mark.parametrize("value", [5, 0, 0.5, 0.0])
def test_warmup_keeps_its_kind(value: float) -> None:
    warmup = recipe_of(
        {"model": {"preset": "tiny"}, "steps": 9, "batch_size": 1, "schedule": {"warmup": value}}
    )
    assert warmup.schedule.warmup == value and type(warmup.schedule.warmup) is type(value)


def test_adapters_are_trained_without_weight_decay_unless_it_is_asked_for() -> None:
    values = {"model": {"preset": "tiny"}, "steps": 2, "batch_size": 1}
    given = {"optimizer": {"weight_decay": 0.1}}
    for more, decay in (({}, 0.1), ({"adapter": {}}, 0.0), ({"adapter": {}, **given}, 0.1)):
        recipe = recipe_of({**values, **more}, SETTINGS)
        assert recipe.optimizer.weight_decay == decay
        assert parse_recipe(dump_recipe(recipe), SETTINGS) == recipe


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.03), (1, 1), (2, 1), (10, 0.9)])
def test_a_warmup_may_take_all_but_the_last_step_or_the_only_one(steps: int, warmup: float) -> None:
    recipe_of({"model": {"preset": "tiny"}, "steps": steps, "batch_size": 1, "schedule": {"warmup": warmup}})


class TestOverrides:
    def test_they_replace_and_make_sections(self, tmp_path: Path) -> None:
        recipe = load(tmp_path, SMALL, "steps=20", "strategy.zero_stage=2", "evaluation.every=5", "seed = 3")
        assert (recipe.steps, recipe.seed, recipe.evaluation.every) == (20, 3, 5)
        assert recipe.strategy == {"zero_stage": 2}

    def test_the_last_one_wins(self, tmp_path: Path) -> None:
        assert load(tmp_path, SMALL, "steps=20", "steps=30").steps == 30

    def test_they_mend_the_file(self, tmp_path: Path) -> None:
        assert load(tmp_path, SMALL.replace("10", "many"), "steps=20").steps == 20

    def test_null_unsets(self, tmp_path: Path) -> None:
        recipe = load(tmp_path, CONTRACT, "strategy.zero_stage=null", "optimizer.clip_norm=null", "data=null")
        assert "zero_stage" not in recipe.strategy and "precision" in recipe.strategy
        assert recipe.optimizer.clip_norm is None and recipe.optimizer.weight_decay == 0.1

    @pytest.mark.parametrize(
        "text", ["*.txt", "a: b", "x=y", "&c", "@d", "%e", "!f", "a #b", "-", "? g", "C:\\h"]
    )
    def test_values_are_literal(self, tmp_path: Path, text: str) -> None:
        assert load(tmp_path, SMALL, f"data.source={text}").data.source == text

    def test_brackets_and_quotes_are_yaml(self, tmp_path: Path) -> None:
        recipe = load(
            tmp_path, SMALL, "optimizer.betas=[0.8, 0.9]", 'data.source="7"', "checkpoint={every: 3, keep: 1}"
        )
        assert recipe.optimizer.betas == (0.8, 0.9)
        assert recipe.data.source == "7"
        assert (recipe.checkpoint.every, recipe.checkpoint.keep) == (3, 1)

    def test_naming_the_cluster_replaces_its_name(self, tmp_path: Path) -> None:
        recipe = load(tmp_path, CONTRACT, "cluster.preset=8xH100-80GB", "cluster.nodes=4")
        assert recipe.cluster.model_dump() == {
            "preset": "8xH100-80GB",
            "device": None,
            "nodes": 4,
            "devices_per_node": 1,
            "memory_gib": None,
            "host_memory_gib": None,
            "hours_between_failures": 50_000.0,
            "price_per_device_hour": None,
        }
        on_preset = CONTRACT.replace("{device: cpu, nodes: 1, devices_per_node: 2}", "{preset: 8xH100-80GB}")
        assert load(tmp_path, on_preset, "cluster.device=cpu").cluster.preset is None

    def test_naming_the_model_replaces_its_name(self, tmp_path: Path) -> None:
        model = load(tmp_path, CONTRACT, "model.preset=gpt2-124m").model
        assert (model.preset, model.layers) == ("gpt2-124m", None)
        assert load(tmp_path, CONTRACT, "model.hf=folder").model.width is None
        on_preset = SMALL.replace("preset: tiny", "preset: tiny, layers: 3")
        model = load(
            tmp_path, on_preset, "model.preset=small"
        ).model  # the same way of naming: the rest stays
        assert (model.preset, model.layers) == ("small", 3)

    def test_two_new_names_are_both_seen(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match=r"specified twice \(command line: model.hf\)"):
            load(tmp_path, CONTRACT, "model.preset=tiny", "model.hf=folder")

    def test_dimensions_may_follow_the_preset(self, tmp_path: Path) -> None:
        for overrides in (("model.layers=4", "model.preset=small"), ("model.preset=small", "model.layers=4")):
            model = load(tmp_path, CONTRACT, *overrides).model
            assert (model.preset, model.layers, model.width) == ("small", 4, None)


class TestDump:
    @pytest.mark.parametrize(
        "text",
        [
            CONTRACT,
            SMALL,
            SMALL + "optimizer: {clip_norm: null}\nschedule: {warmup: 5}\n",
            SMALL + "cluster: {preset: 8xH100-80GB, nodes: 2, memory_gib: 70.5}\n",
            "model: {factory: 'a.b:c', arguments: {n: 3, f: 0.5, s: 'no', t: '3', b: true, z: null}}\n"
            "steps: 1\nbatch_size: 1\n",
            "model: {hf: ./folder}\nsteps: 1\nbatch_size: 1\n",
        ],
    )
    def test_it_reads_back_as_the_same_recipe(self, text: str) -> None:
        recipe = parse_recipe(text, SETTINGS)
        dumped = dump_recipe(recipe)
        assert parse_recipe(dumped, SETTINGS) == recipe
        assert dump_recipe(parse_recipe(dumped, SETTINGS)) == dumped

    def test_any_text_survives(self) -> None:
        generator = random.Random(0)
        letters = string.printable[:-3] + "é\xa0\u2028\u2029\x85😀\u200b"
        special = [
            "null",
            "~",
            "true",
            "1e3",
            ".nan",
            "0x1",
            "a: b",
            "- a",
            "#",
            "'",
            '"',
            "{",
            "a:",
            ":a",
            " a ",
            "é",
        ]
        words = special + ["".join(generator.choices(letters, k=generator.randint(1, 9))) for _ in range(300)]
        for word in words:
            recipe = recipe_of(
                {"model": {"preset": "tiny"}, "steps": 1, "batch_size": 1, "data": {"text_key": word}}
            )
            assert parse_recipe(dump_recipe(recipe), ()).data.text_key == word, repr(word)

    def test_it_says_all_values(self) -> None:
        dumped = dump_recipe(parse_recipe(SMALL, SETTINGS))
        for piece in ("learning_rate: 0.0003", "betas: [0.9, 0.95]", "sequence_length: 256", "preset: tiny"):
            assert piece in dumped


def test_a_recipe_is_frozen_and_crosses_processes() -> None:
    recipe = parse_recipe(CONTRACT, SETTINGS)
    with pytest.raises(ValidationError):
        recipe.steps = 5
    with pytest.raises(ValidationError):
        recipe.model.width = 5
    assert pickle.loads(pickle.dumps(recipe)) == recipe  # noqa: S301 (bytes of our own making)


@pytest.mark.parametrize(
    ("note", "hint"), [("", "did you mean 'bf16'?"), ("not in this version", "(not in this")]
)
def test_a_refusal_with_a_note_is_not_taken_for_a_misspelling(note: str, hint: str) -> None:
    setting = Setting("precision", "fp32", "", choices=("fp32", "bf16"), note=note)
    with pytest.raises(RecipeError) as caught:
        parse_recipe(SMALL + "strategy: {precision: fp16}\n", [setting])
    assert hint in caught.value.line() and ("did you mean" in caught.value.line()) == (not note)


def test_from_plain_data_errors_name_the_key() -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_of({"model": {"widht": 3}, "steps": 1, "batch_size": 1})
    assert caught.value.where == "recipe: model.widht"


def test_plain_data_is_left_as_it_was() -> None:
    values = {"model": {"preset": "tiny"}, "steps": 1, "batch_size": 1, "strategy": {"zero_stage": 1}}
    recipe = recipe_of(values, SETTINGS)
    assert values["strategy"] == {"zero_stage": 1} and recipe.strategy is not values["strategy"]


def test_every_key_is_documented() -> None:
    sections: list[type[Section]] = [Recipe, *SECTIONS.values()]
    for section in sections:
        assert all(section.meanings().values()) and section.meanings().keys() == section.model_fields.keys()


@pytest.mark.parametrize("path", ["absent.yaml", ".", "absent/recipe.yaml", "x" * 5000, "null\0.yaml"])
def test_a_path_that_is_no_file(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        load_recipe(Path(path), [], [])
    line = caught.value.line()
    assert line.isprintable() and len(line) <= 300 and "recipe" in line


def test_damaged_text_is_read_or_refused_in_one_line() -> None:
    generator = random.Random(0)
    letters = ":{}[],&*!|>'\"%@`#-? \n\t\\~=<.019eEnax_\r\x85\u2028é\ufeff\x00😀"
    refused = 0
    for _ in range(300):
        text = list(CONTRACT)
        for _ in range(generator.randint(1, 6)):
            place, amount = generator.randrange(len(text)), generator.choice([1, 1, 40])
            text[place : place + generator.randint(0, 3)] = generator.choice(letters) * amount
        try:
            recipe = parse_recipe("".join(text), SETTINGS)
        except RecipeError as error:
            refused += 1
            assert len(error.line()) <= 300 and error.line().isprintable()
        else:
            assert parse_recipe(dump_recipe(recipe), SETTINGS) == recipe
    assert refused > 200


def test_a_first_error_loads_little(tmp_path: Path) -> None:
    """Importing is nearly all that it costs: neither torch nor numpy, and not 350 modules in all.

    Seconds depend on what else a machine does, and are measured by benchmarks/first_error.py.
    """
    program = """
import sys
from shardwise.recipe.load import load_recipe
try:
    load_recipe("recipe.yaml", [], [])
finally:
    assert "torch" not in sys.modules and "numpy" not in sys.modules
    assert len(sys.modules) < 350, sorted(sys.modules)
"""
    (tmp_path / "recipe.yaml").write_text(CONTRACT.replace("width", "widht"))
    child = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert "RecipeError: unknown key 'widht' (recipe.yaml:3: model.widht)" in child.stderr
