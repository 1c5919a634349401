"""Malformed data: each case ends as one DataError line that says where and what to do, before any step."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardwise.core.errors import DataError
from shardwise.data.readers import read_file, read_records

GOOD = b'{"text": "a line that is fine, and long enough for a sequence or two"}\n'


def text(data: bytes, name: str = "a.txt") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return write


def jsonl(line: bytes) -> Callable[[Path], Path]:
    """Two good lines, then `line`: it is line 3, and starts at byte 2 * len(GOOD)."""
    return text(2 * GOOD + line + b"\n", "a.jsonl")


def parquet(**columns: object) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
        return folder / "a.parquet"

    return write


def parquet_cut(folder: Path) -> Path:
    path = parquet(text=["some text"] * 100)(folder)
    path.write_bytes(path.read_bytes()[:-40])
    return path


def parquet_bad_page(folder: Path) -> Path:
    path = parquet(text=[f"text number {i}" for i in range(1000)])(folder)
    data = bytearray(path.read_bytes())
    data[4:200] = b"\xff" * 196
    path.write_bytes(data)
    return path


def parquet_not_utf8(folder: Path) -> Path:
    import pyarrow

    buffers = [None, pyarrow.py_buffer(b"\0\0\0\0\4\0\0\0\x08\0\0\0"), pyarrow.py_buffer(b"goodb\xffad")]
    column = pyarrow.StringArray.from_buffers(2, buffers[1], buffers[2])
    return parquet(text=column)(folder)


def cut_gzip(folder: Path) -> Path:
    data = gzip.compress(b"".join(b'{"text": "%s"}\n' % os.urandom(30).hex().encode() for _ in range(5000)))
    return text(data[: len(data) // 2], "a.jsonl.gz")(folder)


def flipped_gzip(folder: Path) -> Path:
    data = bytearray(gzip.compress(b"a line of text\n" * 1000))
    data[-6] ^= 1  # in the checksum
    return text(bytes(data), "a.txt.gz")(folder)


def dangling_link(folder: Path) -> Path:
    text(b"some text")(folder)
    (folder / "b.txt").symlink_to(folder / "gone.txt")
    return folder


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "a.txt")
    return folder / "a.txt"


def folder_of_others(folder: Path) -> Path:
    (folder / "notes.md").write_text("no data")
    (folder / ".hidden.txt").write_text("hidden")
    return folder


def half_saved_dataset(folder: Path) -> Path:
    (folder / "state.json").write_text("{}")
    (folder / "dataset_info.json").write_text("{")
    return folder


@dataclass(frozen=True)
class Case:
    name: str
    write: Callable[[Path], Path | str]
    where: str  # the end of the error's place
    says: str
    data: dict[str, object] = field(default_factory=dict)


THIRD = f"a.jsonl:3, byte {2 * len(GOOD)}"

CASES = [
    Case("missing file", lambda f: f / "gone.txt", "gone.txt", "no file or folder"),
    Case("missing relative folder", lambda f: "./gone", "./gone", "no file or folder"),
    Case("empty glob", lambda f: f / "*.txt", "*.txt", "glob matches no file"),
    Case("glob meets other files", lambda f: folder_of_others(f) / "*.md", "notes.md", "its name ends"),
    Case("folder without data files", folder_of_others, "", "no data files in folder"),
    Case("empty folder", lambda f: f, "", "no data files in folder"),
    Case("unknown suffix", text(b"x", "a.xml"), "a.xml", "its name ends in"),
    Case("link to nowhere in a folder", dangling_link, "b.txt", "leads nowhere"),
    Case("pipe", pipe, "a.txt", "a pipe"),
    Case("split of a plain file", lambda f: f"{text(b'x')(f)}#train", "#train", "no splits"),
    Case("0 bytes", text(b""), "a.txt", "0 bytes"),
    Case("0 bytes of parquet", text(b"", "a.parquet"), "a.parquet", "0 bytes"),
    Case("only empty documents", text(b'{"text": ""}\n\n', "a.jsonl"), "a.jsonl", "no text"),
    Case("too little for a sequence", text(b"1234567"), "a.txt", "8 tokens"),
    Case("bad UTF-8", text(b"ab\ncd\nef\xffgh"), "a.txt:3, byte 8", "0xff"),
    Case("UTF-8 cut at the end", text("line\nzoë".encode()[:-1]), "a.txt:2, byte 7", "not UTF-8"),
    Case("UTF-16", text("hello".encode("utf-16")), "a.txt:1, byte 0", "0xff"),
    Case("bad UTF-8 far in", text(b"abcdefg\n" * 200_000 + b"\xc0"), ":200001, byte 1600000", "0xc0"),
    Case("NUL", text(b"a hole\n in a sparse\0file"), "a.txt:2, byte 19", "NUL"),
    Case("NUL before bad UTF-8", text(b"ab\0\xff"), "a.txt:1, byte 2", "NUL"),
    Case("NUL in a JSON escape", jsonl(rb'{"text": "a\u0000b"}'), THIRD, "U+0000"),
    Case("half a surrogate pair", jsonl(rb'{"text": "a\ud83d"}'), THIRD, "surrogate"),
    Case("bad UTF-8 in JSON", jsonl(b'{"text": "\xe9t\xe9"}'), f":3, byte {2 * len(GOOD) + 10}", "0xe9"),
    Case("malformed JSON line", jsonl(b'{"text": "a"'), THIRD, "column 13"),
    Case("two objects on a line", jsonl(b'{"text": "a"} {"text": "b"}'), THIRD, "Extra data"),
    Case("pretty-printed JSON", text(b'{\n "text": "a"\n}\n', "a.jsonl"), ":1, byte 0", "one JSON object"),
    Case("a list", jsonl(b'["text"]'), THIRD, "not a JSON object"),
    Case("missing key", jsonl(b'{"content": "a", "id": 3}'), THIRD, "it has content, id"),
    Case("wrong key in the recipe", jsonl(b"{}"), "a.jsonl:1, byte 0", "it has text", {"text_key": "body"}),
    Case("number for text", jsonl(b'{"text": 3}'), THIRD, "number"),
    Case("null for text", jsonl(b'{"text": null}'), THIRD, "null"),
    Case("list for text", jsonl(b'{"text": ["a"]}'), THIRD, "list"),
    Case("nested too deep", jsonl(b"[" * 100_000), THIRD, "malformed JSON"),
    Case("number too long", jsonl(b'{"text": "a", "n": ' + b"1" * 5000 + b"}"), THIRD, "malformed JSON"),
    Case("truncated gzip", cut_gzip, "a.jsonl.gz", "end-of-stream"),
    Case("gzip with a wrong checksum", flipped_gzip, "a.txt.gz", "CRC"),
    Case("gzip that is none", text(b"plain text", "a.txt.gz"), "a.txt.gz", "gzip"),
    Case("truncated parquet", parquet_cut, "a.parquet", "unreadable parquet"),
    Case("text named parquet", text(b"plain text", "a.parquet"), "a.parquet", "unreadable parquet"),
    Case("damaged parquet page", parquet_bad_page, "a.parquet", "parquet"),
    Case("parquet without the column", parquet(body=["a"], id=[1]), "a.parquet", "it has body, id"),
    Case("parquet column of numbers", parquet(text=[1, 2]), "a.parquet: row 1", "number"),
    Case("parquet null", parquet(text=["a", None]), "a.parquet: row 2", "null"),
    Case("parquet bad UTF-8", parquet_not_utf8, "a.parquet: row 2, byte 1", "not UTF-8"),
    Case("half a saved dataset", half_saved_dataset, "", "unreadable dataset"),
    Case("missing tokenizer", text(b"x" * 99), "data.tokenizer", "no tokenizer", {"tokenizer": "./gone"}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_each_is_one_line_with_its_place(case: Case, tmp_path: Path, opened: Callable[..., object]) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    source = case.write(folder)
    with pytest.raises(DataError) as raised:
        opened(source, **case.data)
    error = raised.value
    assert error.where.endswith(case.where or "data"), error.where
    assert case.says in error.line()
    assert error.fix, "says what to do"
    assert error.exit_code == 3
    assert len(error.line()) <= 300 and error.line().isprintable()
    cache = tmp_path / "cache"
    left = [path for path in cache.iterdir() if not path.name.endswith(".lock")] if cache.exists() else []
    assert not left or case.name == "too little for a sequence"


def test_a_line_longer_than_the_limit(
    tmp_path: Path, opened: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.data.readers.LONGEST_LINE_BYTES", 100)
    (tmp_path / "a.jsonl").write_bytes(GOOD + json.dumps({"text": "x" * 200}).encode())
    with pytest.raises(DataError, match=r"a\.jsonl:2, byte 71.*more than"):
        opened(tmp_path / "a.jsonl")


def test_what_is_unusual_but_not_malformed_is_read(tmp_path: Path, opened: Callable[..., object]) -> None:
    lines = [
        b"\xef\xbb\xbf" + GOOD,  # a byte order mark
        b"\n",
        b"  \r\n",
        b'{"text": "a Windows line"}\r\n',
        b'{"text": ""}\n',
        b'{"text": "\\ud83d\\ude00 a whole surrogate pair", "nan": NaN}\n',
        json.dumps({"text": "one long line " * 300_000}).encode(),  # 4 MB, and no newline at the end
    ]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    assert opened(tmp_path / "a.jsonl", held_out=0.0).train_sequences > 500_000  # type: ignore[attr-defined]


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    import pyarrow.parquet

    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for key in ("text", "other"):
        with pytest.raises(DataError, match="two columns are named 'text'"):
            list(read_file(tmp_path / "a.parquet", key))
    with pytest.raises(DataError, match="two columns are named 'text'"):
        list(read_records(tmp_path / "a.parquet", ["text"]))
