"""Everything that README.md and docs/ show is run here: recipes, command lines, Python, tables, links.

Recipes and command lines are checked as the command checks them, before torch. Python blocks are executed in a
folder of their own, together with the recipes and modules of the same page. The worked example of a
technique is built into a copy of the package. Reference tables are compared with what docs/generate.py writes now.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardwise.cli.main import ALL_VERBS, program
from shardwise.cli.main import run as run_command
from shardwise.core.errors import DataError
from shardwise.jobs.request import read_request
from shardwise.recipe.load import load_recipe, recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, layout_of, micro_batches, strategy_from
from tests.harness.tiers import quick

ROOT = Path(__file__).parent.parent
RECIPES_PAGE = ROOT / "docs" / "reference" / "recipes.md"
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TECHNIQUE_PAGE = ROOT / "docs" / "how-to" / "add-a-technique.md"

OBJECTIVE_PAGE = ROOT / "docs" / "how-to" / "add-an-objective.md"

PREFERENCES_PAGE = ROOT / "docs" / "how-to" / "train-on-preferences.md"
"""Its recipes are trained by tests/plugins/preferences/test_page.py, which makes their data."""

SERVING_PAGE = ROOT / "docs" / "how-to" / "serve-adapters.md"
"""Its blocks are run by tests/plugins/serve/test_serving.py, which makes the runs that it names."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``file`` is the name in its first line, when that is a comment with one."""

    page: Path
    language: str
    text: str

    @property
    def file(self) -> str:
        match = re.match(r"# ([\w./-]+\.(?:py|yaml))\n", self.text)
        return match[1] if match else ""


def blocks(page: Path, language: str = "") -> list[Block]:
    found = [Block(page, kind, text) for kind, text in _FENCE.findall(page.read_text(encoding="utf-8"))]
    return [block for block in found if not language or block.language == language]


def all_blocks(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page, language)]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def name_of(value: Any) -> str:
    page = value.page if isinstance(value, Block) else value
    return str(page.relative_to(ROOT)) if isinstance(page, Path) else str(value)


def load_generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generate()


# ---- recipes ----------------------------------------------------------------------------------------------


def feasible(recipe_file: Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe as the command does, with rules and layout."""
    recipe, cluster = read_request(recipe_file, overrides or [], modules=False)
    strategy = strategy_from(recipe.strategy)
    layout = layout_of(strategy, cluster.world_size)
    assert layout.world_size == cluster.world_size
    assert micro_batches(strategy, layout, recipe.batch_size) >= 1
    return recipe


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_recipes_are_valid_and_say_what_they_are(path: Path) -> None:
    feasible(path)
    assert path.read_text(encoding="utf-8").startswith("# ")
    assert f"recipes/{path.name}" in RECIPES_PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=name_of)
def test_recipes_in_the_docs_are_valid(block: Block, tmp_path: Path) -> None:
    """A block that shows some sections is completed by the shortest recipe."""
    text = block.text
    for key, line in (
        ("model", "model: {preset: tiny}"),
        ("steps", "steps: 1"),
        ("batch_size", "batch_size: 64"),
    ):
        if not re.search(rf"^{key}:", text, re.MULTILINE):
            text += f"{line}\n"
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    feasible(path)


# ---- command lines ----------------------------------------------------------------------------------------


def command_lines() -> Iterator[tuple[Path, str]]:
    """Every line of a shell block, and every prompt of a console block."""
    for block in [*all_blocks("sh"), *all_blocks("console")]:
        for line in block.text.replace("\\\n", " ").splitlines():
            if block.language == "console":
                if not line.startswith("$ "):
                    continue
                line = line[2:]
            if bare := line.partition("  #")[0].strip().removesuffix("&").strip():
                yield block.page, bare


LINES = list(command_lines())
INSTALLING = ("python3 -m venv .venv && source .venv/bin/activate", 'pip install -e ".[hf]"')
"""Before there is a `shardwise`: run once by hand, in an empty environment."""


@pytest.mark.parametrize(
    ("page", "line"), LINES, ids=[f"{name_of(page)}: {line[:40]}" for page, line in LINES]
)
def test_command_lines_parse(page: Path, line: str, tmp_path: Path) -> None:
    """Verbs and options exist; overrides are valid for the recipe that the line names."""
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        targets = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
        variables = re.findall(r"^([A-Z]+) \?=", makefile, re.MULTILINE)
        given = [word.partition("=")[0] for word in words[1:] if "=" in word]
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
        assert set(given) <= set(variables)
        return
    if line in INSTALLING:
        return
    assert "shardwise" in words, f"a command line of something else: {line}"
    verb, *arguments = words[words.index("shardwise") + 1 :]
    group: Any = program
    context = group.commands[verb].make_context(verb, arguments)
    if context.params.get("serve"):
        values = {"model": {"preset": "tiny"}, "steps": 1, "batch_size": 1}
        recipe_of(values, SETTINGS, context.params["overrides"] or ())
    elif context.params.get("model") is not None:  # a file of another trainer: tests/plugins/importers
        return
    elif (named := context.params.get("recipe")) is not None:
        feasible(_recipe_named(str(named), page, tmp_path), context.params["overrides"])


def _recipe_named(name: str, page: Path, folder: Path) -> Path:
    """A file of the repository, or a block of the page or of the page of recipes that has this name."""
    if (ROOT / name).exists():
        return ROOT / name
    found = [block for where in (page, RECIPES_PAGE) for block in blocks(where, "yaml") if block.file == name]
    path = folder / name
    path.write_text(found[0].text, encoding="utf-8")
    return path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_sentences_exist(page: Path) -> None:
    group: Any = program
    options = {option for verb in group.commands.values() for p in verb.params for option in p.opts}
    for span in re.findall(r"`([^`\n]+)`", prose(page)):
        if span.startswith("shardwise ") and (verb := span.split()[1]).islower():
            known = {option for p in group.commands[verb].params for option in p.opts} | {"--help"}
            assert set(re.findall(r"--[a-z-]+", span)) <= known, span
        elif span.startswith("--") and page.parent.name != "reference":
            assert span.split()[0] in options | {"--check"}, span
        elif span.startswith("make "):
            assert f"\n{span.split()[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8"), span
        for file in re.findall(r"(?:tests|benchmarks|shardwise)/[\w/]+\.py", span):
            assert (ROOT / file).exists(), span
        if re.fullmatch(r"SHARDWISE_\w+", span):
            code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "shardwise").rglob("*.py"))
            assert f'"{span}"' in code, span


# ---- generated tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_generated_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert generate.filled(text, keep=generate.SLOW) == text, "run `make docs`"


def test_every_block_is_shown() -> None:
    shown = {name for page in PAGES for name in generate.blocks_in(page.read_text(encoding="utf-8"))}
    assert shown == set(generate.BLOCKS)


@pytest.mark.long
def test_the_readme_shows_todays_plan() -> None:
    """A plan of 32 blocks, and of a dozen other strategies."""
    assert generate.shown_plan() in (ROOT / "README.md").read_text(encoding="utf-8"), "run `make docs`"
    assert list(generate.drawn()) == [], "run `make docs`"


def test_the_pictures_show_the_plan_of_the_readme() -> None:
    """The pictures are drawn with the block. Each is small, in the colours of its scheme, and says the same."""
    block = (ROOT / "README.md").read_text(encoding="utf-8").partition("<!-- plan:begin -->")[2].splitlines()
    drawings = {
        scheme: path.read_text(encoding="utf-8")
        for scheme, path in generate.picture.files(ROOT / "docs").items()
    }
    for scheme, text in drawings.items():
        assert all(f">{line}<" in text for line in block[3:6]) and len(text) < 200_000
        assert "var(" not in text and f"docs/plan-{scheme}.svg" in (ROOT / "README.md").read_text(
            encoding="utf-8"
        )
    assert drawings["light"] != drawings["dark"]


def test_keys_of_a_plan_are_those_of_the_code() -> None:
    from shardwise.jobs.planning import make_plan

    plan = make_plan(*read_request(ROOT / "recipes" / "laptop-tiny.yaml", ["model.layers=1"]))
    keys = _keys_under(ROOT / "docs" / "reference" / "files.md", "`plan.json`")
    assert keys == set(plan.as_dict())


@pytest.mark.long
def test_what_recomputation_holds_and_costs_is_todays() -> None:
    page = ROOT / "docs" / "concepts" / "activation-memory.md"
    assert generate.in_style(generate.recomputation()) in page.read_text(encoding="utf-8"), "run `make docs`"


@pytest.mark.long
def test_what_plain_and_full_recomputation_hold_and_cost_is_todays() -> None:
    """Two rows of that table, from dry runs of two and three blocks of the 32."""
    page = ROOT / "docs" / "concepts" / "activation-memory.md"
    table = set(page.read_text(encoding="utf-8").splitlines())
    rows = generate.in_style(generate.recomputation(("none", "full"))).splitlines()
    assert set(rows) <= table, "run `make docs`"


def test_keys_of_files_are_those_of_the_code() -> None:
    from shardwise.core.run_files import Outcome, StepRecord
    from shardwise.trainer.faults.oom_record import OomRecord

    page = ROOT / "docs" / "reference" / "files.md"
    assert _keys_under(page, "`metrics.jsonl`") == {field.name for field in dataclasses.fields(StepRecord)}
    assert _keys_under(page, "`report.json`") == {field.name for field in dataclasses.fields(Outcome)}
    assert _keys_under(page, "`oom.json`") == {field.name for field in dataclasses.fields(OomRecord)}


def _rows_under(page: Path, title: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    section = page.read_text(encoding="utf-8").partition(f"## {title}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    lines = table[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def _keys_under(page: Path, title: str) -> set[str]:
    return {key for row in _rows_under(page, title) for key in re.findall(r"`(\w+)`", row[0])}


def test_tolerances_are_those_of_the_code() -> None:
    from shardwise.verifier.verify import TOLERANCES

    text = (ROOT / "docs" / "how-to" / "verify-a-strategy.md").read_text(encoding="utf-8")
    assert {
        name: float(size) for name, size in re.findall(r"^\| `(\w+)` \| (\S+) \|$", text, re.M)
    } == TOLERANCES


# ---- what ZeRO sends and holds ------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", quick([0, 1, 2, 3], 1, 3))
def test_what_a_stage_sends_and_holds(stage: int) -> None:
    """The tables of docs/concepts/zero.md against the dry run, for 8 ranks, in bytes per parameter."""
    page = ROOT / "docs" / "concepts" / "zero.md"
    _, axis, sent, *_ = _rows_under(page, "Traffic")[stage]
    _, *held = _rows_under(page, "Memory")[stage]
    first, later, after = (_value(cell.replace("layer", "0.6"), N=8) for cell in held)
    runs = {count: _dry_run(stage, ranks=8, passes=count) for count in (1, 2)}
    for count, run in runs.items():
        elements = sum(c.traffic_elements for c in run.cost.collectives if c.axis == axis)
        assert elements / run.parameters == _value(sent, M=count)
        assert _state_per_parameter(run, "clip") == pytest.approx(after, abs=0.01)
    layer = 0.6 if "layer" in held[0] else 0.0
    assert first - layer <= _state_per_parameter(runs[1], "forward") + 0.01 <= first + 0.02
    assert later - layer <= _state_per_parameter(runs[2], "forward") + 0.01 <= later + 0.02


def _value(formula: str, **numbers: int) -> float:
    """A cell such as ``12/N + 2``: terms are added, factors multiplied or divided."""
    assert re.fullmatch(r"[\w\d ./*+]+", formula), formula
    total = 0.0
    for term in formula.split("+"):
        product, operation = 1.0, "*"
        for word in re.findall(r"[*/]|[\w.]+", term):
            if word in "*/":
                operation = word
                continue
            factor = float(numbers[word]) if word in numbers else float(word)
            product = product / factor if operation == "/" else product * factor
        total += product
    return total


def _dry_run(stage: int, ranks: int, passes: int) -> Any:
    from shardwise.dryrun.run import dry_run
    from shardwise.hardware.cluster import cluster_of
    from shardwise.model.open import blueprint_of

    values = {
        "model": {"layers": 8, "width": 64, "heads": 4, "kv_heads": 4, "ffn": 192, "vocab": 256},
        "data": {"sequence_length": 16},
        "steps": 2,
        "batch_size": ranks * passes,
        "cluster": {"preset": f"{ranks}xH100-80GB"},
    }
    recipe = recipe_of(values, SETTINGS)
    strategy = strategy_from({"precision": "bf16", "zero_stage": stage})
    return dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster))


def _state_per_parameter(run: Any, phase: str) -> float:
    ledger = run.peaks[phase].ledger
    state = ledger.parameters + ledger.master_weights + ledger.gradients + ledger.optimizer_state
    return float(state) / float(run.parameters)


# ---- Python -----------------------------------------------------------------------------------------------


RUN_PAGES = [
    ROOT / name
    for name in (
        "docs/reference/recipes.md",
        "docs/how-to/train-your-own-model.md",
        "docs/how-to/fine-tune-on-conversations.md",
        "docs/how-to/watch-and-steer-a-run.md",
        "docs/concepts/allocator.md",
        "docs/concepts/tensor-parallelism.md",
    )
]
OBJECTS_PAGE = ROOT / "docs" / "how-to" / "use-your-own-objects.md"
"""It trains in processes of its own."""


@pytest.mark.parametrize(
    "page", [*RUN_PAGES, pytest.param(OBJECTS_PAGE, marks=pytest.mark.long)], ids=name_of
)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with a file's name are written; the others are executed; recipes that name a module are planned."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    written = [block for block in blocks(page) if block.file]
    for block in written:
        (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    for block in blocks(page, "python"):
        if not block.file:
            exec(compile(block.text, name_of(page), "exec"), {"__name__": "__main__"})  # noqa: S102
    from shardwise import api

    for block in written:
        if block.language == "yaml" and "factory:" in block.text:
            recipe = api.load(block.file)
            assert api.plan(recipe).fits
            assert _learns(recipe)


def test_data_shows_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs/how-to/fine-tune-on-conversations.md"
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    test_python_runs(page, tmp_path, monkeypatch)
    console, _ = blocks(page, "console")  # tests/data/test_preferences.py runs the other
    command, _, shown = console.text.partition("\n")
    assert run_command(shlex.split(command.removeprefix("$ shardwise "))) == 0
    assert capsys.readouterr().out == shown


def _learns(recipe: Recipe) -> bool:
    """Train for some steps in this very process, a world of one."""
    import torch

    from shardwise.data import open_data
    from shardwise.engine.build import build
    from shardwise.engine.step import step
    from shardwise.launch.process import join
    from shardwise.model.open import blueprint_of

    torch.set_num_threads(1)  # matrices this small are slower on several
    blueprint = blueprint_of(recipe)
    data = open_data(recipe, blueprint.dataset)
    with join("cpu") as world:
        run = build(recipe, blueprint, strategy_from(recipe.strategy), world.device)
        losses = [float(step(run, data.micro_batches(i, 0, 1, 64), 3e-3).loss) for i in range(20)]
    return losses[-1] < 0.7 * losses[0]


def test_python_is_nowhere_else() -> None:
    """Every Python block is run by one of the tests here."""
    assert {block.page for block in all_blocks("python")} == {
        *RUN_PAGES,
        OBJECTS_PAGE,
        TECHNIQUE_PAGE,
        OBJECTIVE_PAGE,
        PREFERENCES_PAGE,
        SERVING_PAGE,
    }


@pytest.mark.long
def test_the_worked_objective_works(tmp_path: Path) -> None:
    """One file and a recipe: the page's tests of parity and of memory pass."""
    files = [block for block in blocks(OBJECTIVE_PAGE) if block.file]
    assert [block.file for block in files] == ["distilling.py", "distil.yaml", "tests/test_distilling.py"]
    (tmp_path / "tests").mkdir()
    for block in files:
        (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    script = "import runpy; page = runpy.run_path('tests/test_distilling.py')\n"
    script += "for name in [name for name in page if name.startswith('test_')]: page[name]()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_worked_technique_works(tmp_path: Path) -> None:
    """The examples of the page, in a copy of the package: their tests pass, a rule refuses in the words shown."""
    shutil.copytree(ROOT / "shardwise", tmp_path / "shardwise", ignore=shutil.ignore_patterns("__pycache__"))
    files = blocks(TECHNIQUE_PAGE, "python")
    for block in files:
        path = tmp_path / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
    for diff in blocks(TECHNIQUE_PAGE, "diff"):
        _apply(diff.text, tmp_path)
    tests = {
        block.file: re.findall(r"^def (test_\w+)", block.text, re.MULTILINE)
        for block in files
        if "/test_" in block.file
    }
    assert len(tests) == 2 and len(files) == 4, "one file, its test and one line"
    words = [
        "plan",
        str(ROOT / "recipes/laptop-tiny.yaml"),
        "strategy.zero_stage=1",
        "strategy.gather_ahead=2",
    ]
    script = (
        "import runpy; from shardwise.cli.main import run;"
        f" assert run({words}) == 2;"
        f" [runpy.run_path(file)[name]() for file, names in {tests}.items() for name in names]"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] in [
        line for b in blocks(TECHNIQUE_PAGE, "text") for line in b.text.splitlines()
    ]


def _apply(diff: str, folder: Path) -> None:
    """A diff without line numbers: the context of each hunk must occur once."""
    head, *hunks = re.split(r"^@@\n", diff, flags=re.MULTILINE)
    path = folder / head.removeprefix("--- ").strip()
    text = path.read_text(encoding="utf-8")
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] == " ")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path.write_text(text, encoding="utf-8")


# ---- the rest ---------------------------------------------------------------------------------------------


def test_the_data_error_reads_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.data import open_data

    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": "a" * 46}), json.dumps({"text": "b" * 46}), '{"text": oops}']
    Path("data").mkdir()
    Path("data/b.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    recipe = recipe_of({"model": {"preset": "tiny"}, "data": {"source": "data"}, "steps": 1, "batch_size": 1})
    with pytest.raises(DataError) as raised:
        open_data(recipe, cache=tmp_path / "cache")
    page = ROOT / "docs" / "how-to" / "train-on-your-data.md"
    assert raised.value.line() in [line for block in blocks(page, "text") for line in block.text.splitlines()]


def test_what_a_learning_rate_says_reads_as_shown(tmp_path: Path) -> None:
    """The sentence of the plan, and the errors of a rule and of a branch, from the recipe of the page."""
    from types import SimpleNamespace

    from shardwise.checkpoint.resume_checks import require_steps_left
    from shardwise.core.errors import RecipeError
    from shardwise.recipe.lr_scaling import scaling_sentences

    page = ROOT / "docs" / "how-to" / "choose-a-learning-rate.md"
    [block] = [block for block in blocks(page, "yaml") if "scale_learning_rate" in block.text]
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{block.text}model: {{preset: tiny}}\nsteps: 500\n", encoding="utf-8")
    recipe = load_recipe(path, [], SETTINGS)
    said = list(scaling_sentences(recipe))
    with pytest.raises(RecipeError) as rule:
        load_recipe(path, ["batch_size=8192"], SETTINGS)
    ended: Any = SimpleNamespace(state=SimpleNamespace(step=500))
    with pytest.raises(RecipeError) as branch:
        require_steps_left(recipe, Path("runs/stable/checkpoints/step-500"), ended)
    said += [rule.value.line(), branch.value.line()]
    assert set(said) == {line for block in blocks(page, "text") for line in block.text.splitlines()}


def _anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        place, _, anchor = target.partition("#")
        path = (page.parent / place).resolve() if place else page
        assert path.exists(), target
        assert not anchor or anchor in _anchors(path), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    for name, target in re.findall(r"\[(test_\w+)\]\(([^)\s]+)\)", prose(page)):
        assert f"def {name}(" in (page.parent / target).read_text(encoding="utf-8"), name


def test_pages_of_the_site_link_inside_the_site_alone() -> None:
    """A link to a file of the repository becomes its path; a picture of a benchmark is taken along."""
    spec = importlib.util.spec_from_file_location("site_links", ROOT / "docs" / "site_links.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for page in sorted((ROOT / "docs").rglob("*.md")):
        folder = str(page.parent.relative_to(ROOT / "docs"))
        text = module.linked_inside(prose(page), folder)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not target.startswith(("https://", "#")):
                place = os.path.normpath(os.path.join(folder, target.partition("#")[0]))
                assert not place.startswith("..") and (
                    (ROOT / "docs" / place).exists() or place.startswith("pictures/")
                )
    shown = module.linked_inside(
        "[test_x.py](../../tests/test_x.py), [the file](../../a/b.py#L3)", "concepts"
    )
    assert shown == "`tests/test_x.py`, the file (`a/b.py`)"


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")]
    subprocess.run(command, cwd=ROOT, check=True)
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 100_000


def test_every_page_is_reachable() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page))
    }
    assert set(itertools.chain(PAGES, RECIPES)) <= linked | {ROOT / "README.md"}


def test_recipes_resolve_to_the_same_recipe(tmp_path: Path) -> None:
    """`recipe.yaml` of a run is accepted by train, as docs/reference/files.md says."""
    from shardwise.recipe.load import dump_recipe

    for path in RECIPES:
        recipe = load_recipe(path, [], SETTINGS)
        copy = tmp_path / path.name
        copy.write_text(dump_recipe(recipe), encoding="utf-8")
        assert load_recipe(copy, [], SETTINGS) == recipe


# ---- findable ---------------------------------------------------------------------------------------------

LANDING = ROOT / "docs" / "README.md"
MOST_IN_A_GROUP = 10


def groups_of_the_landing_page() -> dict[str, list[str]]:
    """The pages of each section's list."""
    sections = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", LANDING.read_text(encoding="utf-8"), re.M | re.S)
    listed = {title: re.findall(r"^- \[[^\]]+\]\(([^)#]+)\)", text, re.M) for title, text in sections}
    return {title: pages for title, pages in listed.items() if pages}


def test_the_site_has_the_groups_of_the_landing_page_and_every_page_once() -> None:
    yaml = pytest.importorskip("yaml")
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert nav[0] == {"Shardwise": "README.md"}
    groups = {
        title: [path for page in pages for path in page.values()]
        for group in nav[1:]
        for title, pages in group.items()
    }
    assert groups == groups_of_the_landing_page()
    assert all(2 < len(pages) <= MOST_IN_A_GROUP for pages in groups.values())
    listed = [page for pages in groups.values() for page in pages]
    every = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(set(every) - {"README.md"})


def test_lists_of_every_page_are_lists_on_the_site() -> None:
    """Python-Markdown takes a list without a blank line before it as part of the paragraph."""
    for page in PAGES:
        lines = ["", *prose(page).splitlines()]
        for before, line in itertools.pairwise(lines):
            if line.startswith("- ") and before and not before.startswith(("- ", " ", "#", "|")):
                pytest.fail(f"{page.relative_to(ROOT)}: no blank line before {line!r}")


def test_the_landing_page_says_what_why_and_how_to_install() -> None:
    text = LANDING.read_text(encoding="utf-8")
    head = text[: text.index("\n## Start here")]
    assert text.startswith("# Shardwise\n\nShardwise trains ") and "**Why.**" in head
    assert 'pip install -e ".[hf]"' in head and "shardwise finetune" in head


def test_every_verb_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    for name in ALL_VERBS:
        assert f"\n## {name}\n" in text and f"| `shardwise {name}" in text
    how_to = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "how-to").glob("*.md"))
    assert "shardwise watch " in how_to


def test_generated_figures_have_the_signs_of_the_commands() -> None:
    assert generate.in_style("| rtn | +0.34% | -2.13% | w4-g64 | -1 | 2^-9 |") == (
        "| rtn | +0.34 % | −2.13 % | w4-g64 | −1 | 2^-9 |"
    )
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            assert not re.findall(r"\| [+-]?[\d.]+% \|", page.read_text(encoding="utf-8")), page
