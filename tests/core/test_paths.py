"""Paths that a user writes: expansion, where relative ones start, and which names stay ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.core.errors import RecipeError
from shardwise.core.paths import PathBase, is_gone, only_a_path, path_of, seen_from


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; the home folder is ``home`` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def made(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_home_folders_are_expanded_and_variables_are_not(here: Path) -> None:
    assert path_of("~/a") == here / "home" / "a"
    assert path_of("~root") == Path("~root").expanduser() != Path("~root")
    assert path_of("a/~b") == Path("a/~b") and path_of("$HOME/a") == Path("$HOME/a")
    with pytest.raises(RecipeError, match="~no-such-user has no home folder here"):
        path_of("~no-such-user/a")


def test_the_folder_of_the_file_comes_before_the_current_one(here: Path) -> None:
    made(here / "recipes" / "both", here / "both", here / "one" / "two", here / "linked")
    (here / "recipes" / "link").symlink_to("nowhere")
    base = PathBase.of_file(Path("recipes/r.yaml"))
    assert base.located("both") == str(here / "recipes" / "both")
    assert base.located("one/two") == str(here / "one" / "two")
    assert base.located("../one/two") == str(here / "one" / "two")  # as the system follows ..
    assert base.located("link") == str(here / "recipes" / "link")  # an error says that it leads nowhere
    assert PathBase.here().located("both") == str(here / "both")
    for name in ("org/model", "gpt2", "./both/x", "a/b/c"):
        assert base.located(name) == name, "nothing is there: an id, or an error that says so"
    assert base.located("~/x") == str(here / "home" / "x")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("data/a.jsonl", "HERE/data/a.jsonl"),
        ("data/*.jsonl", "HERE/data/*.jsonl"),
        ("data", "HERE/data"),
        ("data#train", "HERE/data#train"),
        ("data/*.txt", "data/*.txt"),
        ("org/set:config#train", "org/set:config#train"),
        ("stdlib", "stdlib"),
        ("hf://datasets/ID/*.parquet", "hf://datasets/ID/*.parquet"),
        ("#", "#"),
        ("~/*.jsonl", "HERE/home/*.jsonl"),
    ],
)
def test_sources(name: str, found: str, here: Path) -> None:
    made(here / "data" / "a.jsonl", here / "stdlib", here / "home" / "b.jsonl")
    assert PathBase.here().located_source(name) == found.replace("HERE", str(here))


def test_a_glob_below_a_folder_with_brackets(here: Path) -> None:
    folder = here / "run [1]"
    made(folder / "a.jsonl")
    pattern = PathBase.of_file(folder / "r.yaml").located_source("*.jsonl")
    import glob

    assert glob.glob(pattern) == [str(folder / "a.jsonl")]


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("mine:make", "HERE/recipes/mine:make"),
        ("package.inner:make", "HERE/package.inner:make"),
        ("package:make", "HERE/package:make"),
        ("torch.optim:Adafactor", "torch.optim:Adafactor"),
        ("python:model", "python:model"),
        ("mine", "mine"),  # it names no object, and the error shows it as it is written
        ("../recipes/mine:make", "HERE/recipes/mine:make"),
        ("/elsewhere/mine:make", "/elsewhere/mine:make"),
    ],
)
def test_modules(target: str, found: str, here: Path) -> None:
    made(here / "recipes" / "mine.py", here / "mine.py", here / "python.py", here / "package" / "inner.py")
    made(here / "package" / "__init__.py")
    base = PathBase.of_file(here / "recipes" / "r.yaml")
    assert base.located_module(target) == found.replace("HERE", str(here))


def test_a_run_folder_that_has_moved(here: Path) -> None:
    """Paths that are gone are looked up as they were seen from the folder, and ids not in the current folder."""
    before, run = here / "old" / "runs" / "one", here / "new" / "runs" / "one"
    made(here / "new" / "base" / "config.json", here / "new" / "chats" / "a.jsonl", here / "gpt2")
    made(run / "recipe.yaml", here / "new" / "code" / "own.py", here / "kept")
    line = {"time": "", "command": "", "host": "", "commit": "", "folder": str(before)}
    (run / "starts.jsonl").write_text(json.dumps(line) + "\n")
    base = PathBase.of_file(run / "recipe.yaml")
    assert base.located(str(here / "old" / "base")) == str(here / "new" / "base")
    assert base.located(str(here / "kept")) == str(here / "kept")
    assert base.located(str(here / "old" / "gone")) == str(here / "old" / "gone")
    assert base.located("gpt2") == "gpt2"
    assert base.located_source(f"{here}/old/chats/*.jsonl") == f"{here}/new/chats/*.jsonl"
    assert base.located_module(f"{here}/old/code/own:make") == f"{here}/new/code/own:make"
    assert PathBase.of_file(run / "other.yaml").located("gpt2") == str(here / "gpt2")


def test_which_names_can_be_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that is a folder here is a misspelled path: the Hub would be asked for half a minute."""
    monkeypatch.chdir(tmp_path)
    assert not any(map(only_a_path, ("gpt2", "org/model", "org/set:config#split")))
    (tmp_path / "models").mkdir()
    assert only_a_path("models/base") and not only_a_path("model/base")
    assert all(map(only_a_path, ("/a", "./a", "../a", "~/a", "a/b/c", "a/")))


def test_gone(here: Path) -> None:
    made(here / "a.jsonl")
    for name in ("a.jsonl", "*.jsonl", "a.jsonl#train"):
        assert not is_gone(str(here / name)) and not is_gone(name)
    for name in ("b.jsonl", "*.txt", "b#train"):
        assert is_gone(str(here / name))


def test_how_a_file_names_a_path(here: Path) -> None:
    made(here / "a" / "b", here / "b")
    assert seen_from(str(here / "a" / "b"), Path("a")) == "b"
    assert seen_from(str(here / "b"), Path("a")) == str(here / "b")
    assert seen_from(str(here / "a" / "gone"), Path("a")) == str(here / "a" / "gone"), "it is no id"
    assert seen_from("org/model", Path("a")) == "org/model"
