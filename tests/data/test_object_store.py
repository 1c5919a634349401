"""Object stores through fsspec: what they hold is tokenized as local files are, and errors are one line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import DataError
from shardwise.data.sources import open_source

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def store() -> Iterator[Any]:
    """A file system in memory with two data files and one that is none."""
    system = fsspec.filesystem("memory")
    lines = "".join(json.dumps({"text": f"line {i}", "n": i}) + "\n" for i in range(3))
    system.pipe("/bucket/a.jsonl", lines.encode())
    system.pipe("/bucket/deep/b.jsonl.gz", gzip.compress(b'{"text": "zipped", "n": 9}\n'))
    system.pipe("/bucket/README.bin", b"no data")
    yield system
    system.rm("/bucket", recursive=True)


def texts(name: str) -> list[str]:
    return [record.fields["text"] for record in open_source(name, "text").records(("text",))]  # type: ignore[misc]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("name", "count"),
    [("memory://bucket", 4), ("memory://bucket/a.jsonl", 3), ("memory://bucket/*.jsonl", 3)],
)
def test_files_folders_and_globs(name: str, count: int) -> None:
    found = texts(name)
    assert len(found) == count and found[0] == "line 0"
    source = open_source(name, "text")
    assert source.fields() == {"text", "n"}
    assert b"".join(piece.data for piece in source.pieces()).decode().startswith("line 0")
    [*records] = source.records(("text",))
    assert records[0].where == "/bucket/a.jsonl:1, byte 0"


def test_what_changes_is_read_again(store: Any) -> None:
    before = open_source("memory://bucket", "text").identity()
    assert open_source("memory://bucket", "text").identity() == before
    store.pipe("/bucket/a.jsonl", b'{"text": "other"}\n')
    assert open_source("memory://bucket", "text").identity() != before


def test_hidden_files_are_left_out_as_of_a_local_folder(store: Any) -> None:
    for name in (".hidden.jsonl", ".ipynb_checkpoints/a.jsonl"):
        store.pipe(f"/bucket/{name}", b'{"text": "hidden"}\n')
    for pattern in ("", "/*.jsonl", "/**/*.jsonl*"):
        assert "hidden" not in texts(f"memory://bucket{pattern}")
    assert texts("memory://bucket/.*/*.jsonl") == ["hidden"]


@pytest.mark.usefixtures("store")
def test_every_match_of_a_glob_must_be_readable_as_of_a_local_one() -> None:
    with pytest.raises(DataError, match=r"not a data file \(/bucket/README.bin"):
        texts("memory://bucket/*")


def test_the_fields_are_read_once_and_from_the_start_of_a_file(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet

    line = json.dumps({"messages": "é" * 99}, ensure_ascii=False).encode() + b"\n"
    pyarrow.parquet.write_table(pyarrow.table({"messages": ["a"], "tools": ["b"]}), tmp_path / "a.parquet")
    files = {
        "a.jsonl": line * 9000,
        "a.csv": b"messages\na\n" * 200000,
        "b.parquet": (tmp_path / "a.parquet").read_bytes(),
    }
    files["long.jsonl"] = json.dumps({"messages": "a" * (1 << 21)}).encode()
    copied: list[str] = []
    whole = type(store).get_file
    monkeypatch.setattr(
        type(store), "get_file", lambda self, path, *more: (copied.append(path), whole(self, path, *more))
    )
    for name, content in files.items():
        store.pipe(f"/bucket/fields/{name}", content)
        source = open_source(f"memory://bucket/fields/{name}", "text")
        for _ in range(3):
            assert source.fields() == {"messages", *(["tools"] if name == "b.parquet" else [])}
    assert copied == ["/bucket/fields/long.jsonl"]


def test_local_files_through_a_url_are_the_same_documents(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("words " * 50, encoding="utf-8")
    through, plain = (open_source(name, "text") for name in (f"file://{tmp_path}", str(tmp_path)))
    assert list(through.pieces()) == list(plain.pieces())


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("memory://bucket/none.jsonl", "cannot read the object store"),
        ("memory://nowhere", "cannot read the object store"),
        ("memory://bucket/*.csv", "no data files"),
        ("nonsense://x/y.jsonl", "cannot read the object store"),
    ],
)
def test_errors_are_one_line_with_the_url(name: str, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        open_source(name, "text")
    assert name in caught.value.line()


def test_a_malformed_record_is_named_by_its_url(store: Any) -> None:
    store.pipe("/bucket/bad.jsonl", b'{"text": "ok"}\n{"text": \n')
    with pytest.raises(DataError) as caught:
        list(open_source("memory://bucket/bad.jsonl", "text").pieces())
    assert "/bucket/bad.jsonl:2" in caught.value.line() and "/tmp" not in caught.value.line()
