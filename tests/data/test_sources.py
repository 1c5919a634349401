"""Sources: which files a name means, in which order, and what documents come out of them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import DataError
from shardwise.data.readers import PIECE_BYTES, TextPiece, read_file
from shardwise.data.source import Source
from shardwise.data.sources import open_source


def documents(pieces: Iterator[TextPiece]) -> list[str]:
    found, parts = [], []
    for piece in pieces:
        assert len(piece.data) <= PIECE_BYTES
        parts.append(piece.data)
        if piece.ends:
            found.append(b"".join(parts).decode("utf-8"))
            parts = []
    assert not parts, "the last document does not end"
    return found


def texts(source: object, text_key: str = "text") -> list[str]:
    return documents(open_source(str(source), text_key).pieces())


def lines(*rows: str, key: str = "text") -> bytes:
    return b"".join(json.dumps({key: row}).encode() + b"\n" for row in rows)


def parquet(path: Path, *rows: str) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(len(rows))), "text": list(rows)}), path)


def test_every_format_gives_its_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo é\n")
    (tmp_path / "b.jsonl").write_bytes(lines("three", "fo\nur"))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"five"))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines("six", "seven")))
    parquet(tmp_path / "e.parquet", "eight", "nine")
    assert texts(tmp_path / "a.txt") == ["one\ntwo é\n"]
    assert texts(tmp_path / "e.parquet") == ["eight", "nine"]
    everything = ["one\ntwo é\n", "three", "fo\nur", "five", "six", "seven", "eight", "nine"]
    assert texts(tmp_path) == everything
    assert texts(tmp_path / "*") == everything
    assert texts(tmp_path / "[bd].jsonl*") == ["three", "fo\nur", "six", "seven"]


def test_a_folder_is_searched_in_the_order_of_paths_past_other_and_hidden_files(tmp_path: Path) -> None:
    for name in ("z.txt", "B.txt", "sub/a.txt", "sub.txt", ".hidden.txt", ".git/c.txt", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["B.txt", "sub.txt", "sub/a.txt", "z.txt"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "b.json", "c.csv", "d.parquet", "e.txt"])
def test_documents_behind_a_place_are_those_of_the_whole_file(name: str, tmp_path: Path) -> None:
    import pyarrow.parquet

    rows = [f"row {number}, café" for number in range(700)]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf\r\n \n" + lines(*rows).replace(b"\n", b"\n\n"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "b.json").write_text(json.dumps([{"text": row} for row in rows]))
    (tmp_path / "c.csv").write_text("text\n" + "".join(f'"{row}"\n' for row in rows))
    (tmp_path / "e.txt").write_text("one")
    table = pyarrow.table({"text": rows})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=300)
    whole = documents(read_file(tmp_path / name, "text"))
    for skip in (0, 1, 299, 300, 650, 699, 700):
        assert documents(read_file(tmp_path / name, "text", skip)) == whole[skip:]


def test_documents_that_are_skipped_are_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{not JSON}\n" + lines("later"))
    assert documents(read_file(tmp_path / "a.jsonl", "text", 1)) == ["later"]


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("elsewhere/far.txt", "data/z/near.txt", "data/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    for name, place in (("far", "elsewhere"), ("b", "data/z"), ("loop", "data")):
        (tmp_path / "data" / name).symlink_to(tmp_path / place)
    assert texts(tmp_path / "data") == ["data/a.txt", "elsewhere/far.txt", "data/z/near.txt"]


def test_a_glob_that_matches_a_file_twice_reads_it_once(tmp_path: Path) -> None:
    (tmp_path / "sub/deep").mkdir(parents=True)
    (tmp_path / "sub/deep/a.txt").write_text("one")
    assert texts(f"{tmp_path}/**/**/*.txt") == ["one"]


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", "\n\n"), ("a.csv", "messages\n"), ("a.json", "[]")]
)
def test_the_first_record_may_be_in_a_later_file(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "b.jsonl").write_text('{"messages": []}\n')
    assert open_source(f"{tmp_path}/*", "text").fields() == {"messages"}


def test_a_misspelled_path_is_not_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks like the id of a dataset; the hub would be asked again and again for half a minute."""
    (tmp_path / "data" / "train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.data.sources.HubDataset", None)
    with pytest.raises(DataError, match=r"did you mean data/train\?"):
        open_source("data/trian", "text")


def test_text_key_names_the_json_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines("x", key="body"))
    assert texts(tmp_path / "a.jsonl", "body") == ["x"]


@pytest.mark.parametrize(
    "text",
    [
        "a line of ordinary length\n" * 100_000,
        "words without any newline " * 100_000,
        "x" * 3_000_000,
        "é" * 1_500_001,
        "x" + "😀" * 600_000,
        "\n" * 1_200_000,
        "y" * PIECE_BYTES,
    ],
    ids=["lines", "words", "letters", "two-byte", "four-byte", "newlines", "exactly-one-piece"],
)
def test_long_documents_come_in_pieces_that_join_to_the_whole(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text, newline="")
    (tmp_path / "b.jsonl").write_bytes(lines(text))
    assert texts(tmp_path) == [text, text]
    for piece in read_file(tmp_path / "a.txt", ""):
        piece.data.decode("utf-8")  # no character is cut in two


def test_reading_takes_a_few_pieces_of_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        for _ in range(64):
            file.write(b"a line of text\n" * (PIECE_BYTES // 15))
    tracemalloc.start()
    read = sum(len(piece.data) for piece in read_file(tmp_path / "a.txt.gz", ""))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read > 60 * PIECE_BYTES
    assert peak < 8 * PIECE_BYTES


def test_stdlib_is_the_library_without_tests_and_installed_packages() -> None:
    found = texts("stdlib")
    assert 400 < len(found) < 1500
    assert any("class Counter(dict)" in text for text in found)
    assert not any(
        "site-packages" in name for name in map(str, json.loads(identity(open_source("stdlib", ""))))
    )


def identity(source: Source) -> str:
    return json.dumps(source.identity())


def test_identity_follows_content_order_and_key(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines("x"))
    before = identity(open_source(str(path), "text"))
    assert identity(open_source(str(path), "text")) == before
    assert identity(open_source(str(path), "body")) != before
    path.write_bytes(lines("xy"))
    assert identity(open_source(str(path), "text")) != before


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    source = open_source(str(path), "text")
    path.write_text("after it was opened")
    with pytest.raises(DataError, match="changed while it was read"):
        list(source.pieces())


def test_saved_datasets_with_and_without_splits(tmp_path: Path) -> None:
    import datasets

    one = datasets.Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]})
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(str(tmp_path / "two"))
    assert texts(tmp_path / "one") == texts(tmp_path / "two") == ["a", "b"]
    assert texts(f"{tmp_path}/two#test") == ["b"]
    for source, key, says in [
        ("two#dev", "text", "it has train, test"),
        ("one#test", "text", "saved without splits"),
        ("one", "body", "it has text, n"),
        ("one", "n", "'n' is not text .*row 1.*number"),
    ]:
        with pytest.raises(DataError, match=says):
            texts(tmp_path / source, key)


@pytest.mark.parametrize(
    "form", [{"type": "numpy"}, {"type": "arrow"}, {"type": "pandas"}, {"columns": ["n"]}]
)
def test_the_format_of_a_saved_dataset_is_not_that_of_its_records(
    form: dict[str, Any], tmp_path: Path
) -> None:
    import datasets

    rows = [{"messages": [{"role": "user", "content": "a"}], "text": "b", "n": n} for n in range(2)]
    datasets.Dataset.from_list(rows).with_format(**form).save_to_disk(str(tmp_path / "one"))
    source = open_source(str(tmp_path / "one"), "text")
    assert [record.fields for record in source.records(("messages", "text", "n"))] == rows
    assert texts(tmp_path / "one") == ["b", "b"]


def test_a_name_that_is_no_path_is_loaded_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(path: str, name: str | None, split: str) -> object:
        asked.append((path, name, split))
        return datasets.Dataset.from_dict({"text": [split]})

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert texts("someone/corpus") == ["train"]
    assert texts("someone/corpus:small#test") == ["test"]
    assert asked == [("someone/corpus", None, "train"), ("someone/corpus", "small", "test")]


def test_a_hub_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(*_: object, **__: object) -> object:
        raise ConnectionError("Couldn't reach 'someone/corpus' on the Hub\n(long story)")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError) as raised:
        texts("someone/corpus")
    assert "no local file of this name" in raised.value.line() and "Couldn't reach" in raised.value.line()
    assert raised.value.line().isprintable()


def test_importing_the_package_and_reading_text_imports_no_heavy_library(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines("x"))
    code = (
        "import sys; from shardwise.data.sources import open_source; import shardwise.data;"
        f"assert list(open_source({str(tmp_path / 'a.jsonl')!r}, 'text').pieces());"
        "heavy = {'datasets', 'transformers', 'tokenizers', 'pyarrow', 'pandas', 'huggingface_hub'};"
        "sys.exit(','.join(heavy & set(sys.modules)) or 0)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_dataset` tries six times, in half a minute: it is asked offline where the Hub does not answer."""
    datasets = pytest.importorskip("datasets")
    hub = pytest.importorskip("huggingface_hub")
    asked: list[object] = []

    def load(repository: str, **_: object) -> object:
        asked.append((repository, hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE))
        raise ConnectionError("offline, and nothing is cached")

    def unreachable(*_: object, **options: object) -> None:
        asked.append(options["timeout"])
        raise OSError("Name or service not known")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub.HfApi, "dataset_info", unreachable)
    before = hub.constants.HF_HUB_OFFLINE
    with pytest.raises(DataError, match="nothing is cached"):
        open_source("org/data", "text")
    assert asked == [10.0, ("org/data", True, True)] and before == hub.constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("error", "says"), [("RepositoryNotFoundError", "no such"), ("GatedRepoError", "no access")]
)
def test_a_dataset_that_is_not_there_is_said_at_once(
    error: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    hub = pytest.importorskip("huggingface_hub")
    kind = getattr(hub.errors, error)

    def missing(*_: object, **__: object) -> None:
        raise kind.__new__(kind)

    monkeypatch.setattr(datasets, "load_dataset", None)
    monkeypatch.setattr(hub.HfApi, "dataset_info", missing)
    with pytest.raises(DataError, match=says):
        open_source("org/data", "text")
