"""Paths on the command line: every one is read in the same way, and a run works from any folder and after it moved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from shardwise.cli.common import local_file, local_path, recipe_file
from shardwise.cli.main import app, run
from tests.harness.commands import Done, Shell
from tests.harness.pool import Pool
from tests.plugins.finetune.test_finetune import write_base, write_chats

RECIPE = """
model: {{hf: models/base}}
data: {{source: "chats/*.jsonl", sequence_length: 64, held_out: 0.2}}
steps: 2
batch_size: 4
cluster: {{device: cpu}}
strategy: {{zero_stage: 0, micro_batch_size: 4, activation_checkpointing: none, loss: logits}}
evaluation: {{sequences: 4}}
{more}
"""

ROUNDED = ("--scheme", "w8a16", "--method", "rtn", "--sequences", "1")
"""Options of a quantization that takes layers of any width."""


def test_every_path_of_a_command_is_read_by_one_function() -> None:
    """``local_file`` calls it. Names that may be ids (MODEL, DATA), NAME=DIR and OUT of launch are read by it later."""
    readers = []
    for registered in app.registered_commands:
        assert registered.callback is not None
        for hint in get_type_hints(registered.callback, include_extras=True).values():
            kinds = {hint, *get_args(hint), *(inner for kind in get_args(hint) for inner in get_args(kind))}
            if Path in kinds:
                (option,) = hint.__metadata__
                readers.append(option.parser)
    assert set(readers) == {local_path, local_file, recipe_file} and len(readers) > 30


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    """A folder with a model, chats, recipes in a folder of their own, and two runs, all named by relative paths."""
    folder = tmp_path_factory.mktemp("project")
    write_base(folder / "models" / "base", weights=True)
    (folder / "chats").mkdir()
    write_chats(folder / "chats" / "a.jsonl")
    (folder / "recipes").mkdir()
    for name, more in (("full", ""), ("lora", "adapter: {rank: 4}")):
        (folder / "recipes" / f"{name}.yaml").write_text(RECIPE.format(more=more), encoding="utf-8")
        words = ("train", f"recipes/{name}.yaml", "--out", f"runs/{name}")
        assert Shell(pool).run(*words, folder=folder).returncode == 0
    return folder


def used(shell: Shell, run_folder: Path, out: Path, where: Path) -> list[Done]:
    """Every command that reads the folder of a run, from another folder."""
    folder, recipe = str(run_folder), str(run_folder / "recipe.yaml")
    commands = [
        ("generate", folder, "--prompt", "a", "--tokens", "2"),
        ("chat", folder, "--tokens", "2"),
        ("eval", folder, str(run_folder.parent / "text.txt"), "--sequences", "1", "--sequence-length", "16"),
        ("export", folder, str(out / "exported")),
        ("quantize", folder, str(out / "quantized"), *ROUNDED),
        ("plan", "--serve", folder),
        ("report", folder),
        ("train", recipe, "steps=3", "--out", folder),
    ]
    (run_folder.parent / "text.txt").write_text("some words of a text " * 20, encoding="utf-8")
    return [shell.run(*words, folder=where) for words in commands]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "move"),
    [
        *(("full", move) for move in ("nothing", "the run", "the project")),
        *(("lora", move) for move in ("nothing", "the run", "the project")),
    ],
)
def test_a_run_works_from_any_folder_and_after_a_move(
    name: str, move: str, project: Path, shell: Shell, tmp_path: Path
) -> None:
    base = project
    run_folder = shutil.copytree(project / "runs", tmp_path / "runs") / name
    if move == "nothing":
        run_folder = project / "runs" / name
    elif move == "the project":
        shutil.move(project, tmp_path / "moved")
        base, run_folder = tmp_path / "moved", tmp_path / "moved" / "runs" / name
    before = shutil.copytree(run_folder, tmp_path / "before")
    try:
        found = used(shell, run_folder, tmp_path, Path("/"))
        assert [done.returncode for done in found] == [0] * len(found), [done.stderr for done in found]
        assert "next:\n  shardwise " in found[-1].stdout, "it trained the third step"
        if move == "the project":
            assert str(base / "models" / "base") in (run_folder / "recipe.yaml").read_text(encoding="utf-8")
    finally:
        shutil.rmtree(run_folder)
        shutil.copytree(before, run_folder)
        if move == "the project":
            shutil.move(base, project)


@pytest.mark.parametrize("name", ["full", "lora"])
def test_a_base_that_is_gone_is_named_and_no_hub_is_asked(
    name: str, project: Path, shell: Shell, tmp_path: Path
) -> None:
    """The advice works: its new path in the recipe of the run."""
    shutil.copytree(project, tmp_path / "copy")
    run_folder, recipe = tmp_path / "copy" / "runs" / name, tmp_path / "copy" / "runs" / name / "recipe.yaml"
    (tmp_path / "copy" / "models").rename(tmp_path / "there")
    text = recipe.read_text(encoding="utf-8").replace(f"{project}/models", f"{tmp_path}/copy/models")
    recipe.write_text(text, encoding="utf-8")
    for words in (("generate", "--prompt", "a"), ("export", str(tmp_path / "e")), ("plan", "--serve")):
        done = shell.run(words[0], str(run_folder), *words[1:])
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert f"(model.hf: {tmp_path}/copy/models/base)" in done.stderr and "Hub" not in done.stderr
    recipe.write_text(text.replace(f"{tmp_path}/copy/models", f"{tmp_path}/there"), encoding="utf-8")
    done = shell.run("generate", str(run_folder), "--prompt", "a", "--tokens", "2")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_home_folders(project: Path, shell: Shell, tmp_path: Path) -> None:
    """A shell does not expand ~ after = or in quotes."""
    home = tmp_path / "home"
    shutil.copytree(project / "models" / "base", home / "m")
    shutil.copytree(project / "chats", home / "chats")
    (tmp_path / "r.yaml").write_text(
        RECIPE.format(more="").replace("models/base", "~/m").replace("chats/", "~/chats/"), encoding="utf-8"
    )

    def call(*words: str) -> Done:
        done = shell.run(*words, folder=tmp_path, environment={"HOME": str(home)})
        assert done.returncode == 0, done.stderr
        return done

    call("train", "r.yaml", "--out=~/runs/one")
    call("export", "~/runs/one", "~/exported")
    call("train", "r.yaml", "checkpoint.start_from=~/runs/one/checkpoints", "steps=3", "--out", "~/two")
    call("generate", "~/m", "--prompt", "a", "--tokens", "2")
    call("plan", "r.yaml", "--html=~/plan.html")
    call("report", "~/runs/one", "~/two", "--out", "~/compared.html")
    call("init", "~/m", "~/chats/a.jsonl", "--out", "~/init.yaml", "--device", "cpu")
    call("quantize", "~/m", "~/q", *ROUNDED, "--calibrate", "~/chats/a.jsonl")
    call("train", "r.yaml", "strategy.offload=nvme:~/runs", "steps=1", "--out", "~/three")
    assert not (tmp_path / "~").exists()
    assert {"runs", "exported", "two", "three", "plan.html", "compared.html", "init.yaml", "q"} <= {
        path.name for path in home.iterdir()
    }
    assert "hf: m " in (home / "init.yaml").read_text(encoding="utf-8"), "as the file sees it"


def test_a_recipe_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The nearest name, else those that are there."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("model: {preset: tiny}\n", encoding="utf-8")
    Path("site.yml").write_text("site_name: no recipe\n", encoding="utf-8")
    for given, said in (
        ("mime.yaml", "did you mean mine.yaml?"),
        ("quickstrat", "did you mean quickstart?"),
        ("nothing-like-it.yaml", "recipes are "),
    ):
        assert run(["plan", given]) == 2
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1
    assert "mine.yaml, " in told and "finetune-chat" in told and len(told) < 302
    assert "site.yml" not in told


@pytest.mark.parametrize("key", ["model.hf", "data.tokenizer", "data.source"])
@pytest.mark.parametrize("name", ["./gone", "~/gone", "a/b/gone", "gone"])
def test_a_path_that_is_missing_is_no_fault_of_the_network(
    key: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``gone`` could be an id: then both the folder and the Hub are named."""
    monkeypatch.chdir(tmp_path)
    more = "strategy: {zero_stage: 0}\n"
    (tmp_path / "r.yaml").write_text(
        f"model: {{preset: tiny}}\nsteps: 1\nbatch_size: 1\n{more}", encoding="utf-8"
    )
    verb = "plan" if key == "model.hf" else "data"
    assert run([verb, "r.yaml", f"{key}={name}"]) == (2 if key == "model.hf" else 3)
    told = capsys.readouterr().err
    assert "no file or folder of this name" in told or "no local file of this name" in told
    assert ("Hub:" in told or "on the Hub" in told or "from the hub" in told) == (name == "gone"), told


def test_the_job_of_slurm_starts_where_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in it").mkdir()
    monkeypatch.chdir(tmp_path / "in it")
    assert run(["launch", "slurm", "quickstart", "data.source=x.txt", "--out=~/runs/one"]) == 0
    lines = Path("quickstart.sbatch").read_text(encoding="utf-8").splitlines()
    assert lines.index(f"cd '{tmp_path}/in it'") < next(
        n for n, line in enumerate(lines) if line.startswith("srun")
    )
    assert f"--out {Path('~/runs/one').expanduser()}" in "\n".join(lines)


def test_an_imported_recipe_names_paths_as_it_sees_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They start at the folder of the other trainer's file."""
    write_base(tmp_path / "axolotl" / "model")
    write_chats(tmp_path / "axolotl" / "chats.jsonl")
    other = {"base_model": "model", "datasets": [{"path": "chats.jsonl", "type": "chat_template"}]}
    text = json.dumps(other | {"micro_batch_size": 1, "num_epochs": 1, "learning_rate": 1e-4})
    (tmp_path / "axolotl" / "q.yml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for out, named in (("r.yaml", "axolotl/model"), ("axolotl/r.yaml", "model"), ("else/r.yaml", None)):
        Path(out).parent.mkdir(exist_ok=True)
        assert run(["from", "axolotl/q.yml", "--out", out, "--world", "1"]) == 0
        written = Path(out).read_text(encoding="utf-8")
        assert f"hf: {named or tmp_path / 'axolotl' / 'model'} " in written
        assert run(["data", out, "--samples", "1"]) == 0, capsys.readouterr().err


MODULE = """
import torch
import torch.nn.functional as F


def loss(model, batch):
    labels = batch["labels"]
    return F.cross_entropy(model(batch["x"]), labels, reduction="sum"), (labels != -100).sum()


def make():
    return torch.nn.Linear(4, 2), loss, data


def data():
    return [{"x": torch.ones(4) * n, "labels": torch.tensor(n % 2)} for n in range(8)]


class Quiet:
    def on_step(self, step):
        pass
"""
OWN = """
model: {factory: "own:make"}
callbacks: ["own:Quiet"]
steps: 1
batch_size: 4
strategy: {zero_stage: 0, micro_batch_size: 4, activation_checkpointing: none}
"""


def test_the_module_of_a_recipe_is_found_from_any_folder(shell: Shell, tmp_path: Path) -> None:
    """It is next to the recipe; then the run is moved with it, and goes on by its own recipe."""
    code, module = tmp_path / "before" / "code", MODULE.lstrip()
    code.mkdir(parents=True)
    (code / "own.py").write_text(module, encoding="utf-8")
    (code / "r.yaml").write_text(OWN, encoding="utf-8")
    done = shell.run("train", str(code / "r.yaml"), "--out", "before/run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "before").rename(tmp_path / "after")
    run_folder = tmp_path / "after" / "run"
    done = shell.run(
        "train", str(run_folder / "recipe.yaml"), "steps=2", "--out", str(run_folder), folder=Path("/")
    )
    assert done.returncode == 0, done.stderr
    done = shell.run("train", "r.yaml", "steps=3", "--out", "../run", folder=tmp_path / "after" / "code")
    assert done.returncode == 0, done.stderr


def test_two_modules_of_one_name_are_not_confused(tmp_path: Path) -> None:
    from shardwise.core.errors import RecipeError
    from shardwise.core.user_objects import resolve

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_named_twice.py").write_text(f"where = {name!r}\n", encoding="utf-8")
    assert resolve(f"{tmp_path}/one/own_named_twice:where", "model.factory") == "one"
    with pytest.raises(RecipeError, match="another module has this name"):
        resolve(f"{tmp_path}/two/own_named_twice:where", "model.factory")
