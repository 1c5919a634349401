"""The token cache: keyed, complete or absent, built once, and the same whatever happened on the way."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from shardwise.core.cache_folder import default_root
from shardwise.core.errors import DataError, ResourceError
from shardwise.data.cache import TokenCache, open_cache
from shardwise.data.readers import TextPiece
from shardwise.data.source import Source
from shardwise.data.sources import open_source
from shardwise.data.tokenizer import open_tokenizer

BYTES = open_tokenizer("bytes")
FORK = multiprocessing.get_context("fork")


class Counted(Source):
    """A source that writes a line to `log` each time it is read, slowly."""

    def __init__(self, log: Path, documents: list[bytes], pause: float = 0.0) -> None:
        self.name = "counted"
        self._log, self._documents, self._pause = log, documents, pause

    def identity(self) -> object:
        return ["counted", len(self._documents)]

    def pieces(self) -> Iterator[TextPiece]:
        with self._log.open("a") as file:
            file.write("read\n")
        for document in self._documents:
            time.sleep(self._pause)
            yield TextPiece(document, ends=True)


def complete(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()]


def opened(root: Path, name: str) -> TokenCache:
    return open_cache(open_source(name, "text"), BYTES, root)


def test_documents_and_separators_are_what_was_read(tmp_path: Path) -> None:
    rows = ["ab", "", "cde", "ab"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    cache = opened(tmp_path / "cache", str(tmp_path / "a.jsonl"))
    assert cache.tokens.tobytes() == b"ab\0cde\0ab\0"
    documents = cache.documents()
    assert documents["end"].tolist() == [3, 7, 10]
    assert documents["hash"].tolist() == [xxhash.xxh3_64_intdigest(row) for row in (b"ab", b"cde", b"ab")]
    assert (cache.header.tokens, cache.header.documents, cache.header.empty_documents) == (10, 3, 1)


def resident(cache: TokenCache) -> int:
    """KiB of the mapped token file that count as this process's memory."""
    after = Path("/proc/self/smaps").read_text().split("tokens.bin")[1]
    return next(int(line.split()[1]) for line in after.splitlines() if line.startswith("Rss"))


def test_released_pages_are_no_memory_of_this_process(tmp_path: Path) -> None:
    cache = opened(tmp_path / "cache", "stdlib")
    total = int(cache.tokens.sum())
    assert resident(cache) > 5000
    cache.release()
    assert resident(cache) == 0
    assert int(cache.tokens.sum()) == total


def test_the_digest_speaks_of_content_and_not_of_paths_times_or_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("same text")
    (tmp_path / "b.txt.jsonl").write_text('{"text": "same text"}')
    (tmp_path / "c.txt").write_text("same texT")
    one = [opened(tmp_path / "cache", str(path)).header.digest for path in sorted(tmp_path.glob("*.*"))]
    assert one[0] == one[1] != one[2]
    library = opened(tmp_path / "cache", "stdlib").header.digest
    monkeypatch.setattr("shardwise.data.cache._BATCH_BYTES", 10_000)
    assert opened(tmp_path / "other", "stdlib").header.digest == library


def test_it_is_built_once_and_again_only_when_the_source_changes(tmp_path: Path) -> None:
    root, log = tmp_path / "cache", tmp_path / "log"
    for _ in range(3):
        open_cache(Counted(log, [b"ab"]), BYTES, root)
    assert log.read_text().count("read") == 1
    open_cache(Counted(log, [b"ab", b"c"]), BYTES, root)
    assert log.read_text().count("read") == 2
    assert len(complete(root)) == 2


def test_processes_that_meet_build_it_once(tmp_path: Path) -> None:
    root, log = tmp_path / "cache", tmp_path / "log"
    source = Counted(log, [b"some text"] * 10, pause=0.02)
    workers = [FORK.Process(target=open_cache, args=(source, BYTES, root)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert log.read_text().count("read") == 1
    assert len(complete(root)) == 1


def test_a_builder_that_is_killed_leaves_the_way_free(tmp_path: Path) -> None:
    root, log = tmp_path / "cache", tmp_path / "log"
    source = Counted(log, [b"some text"] * 100, pause=0.05)
    worker = FORK.Process(target=open_cache, args=(source, BYTES, root))
    worker.start()
    while not log.exists():
        time.sleep(0.01)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(30)
    assert [path.suffix for path in complete(root)] == [".tmp"]
    source = Counted(log, [b"some text"] * 100)
    assert open_cache(source, BYTES, root).header.documents == 100
    assert [path.suffix for path in complete(root)] == [""]


def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 10_000_000 + b"\xff")
    with pytest.raises(DataError):
        opened(tmp_path / "cache", str(tmp_path / "a.txt"))
    assert complete(tmp_path / "cache") == []


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "header.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "longer", "empty"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, name: str, damage: str) -> None:
    root, log = tmp_path / "cache", tmp_path / "log"
    source = Counted(log, [b"some text"] * 10)
    digest = open_cache(source, BYTES, root).header.digest
    path = complete(root)[0] / name
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": data[:-1], "longer": data + b"x", "empty": b""}[damage])
    assert open_cache(source, BYTES, root).header.digest == digest
    assert log.read_text().count("read") == 2
    assert open_cache(source, BYTES, root).header.digest == digest
    assert log.read_text().count("read") == 2


def test_every_file_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.rpartition(".")[2])
        fsync(descriptor)

    def watched_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    open_cache(Counted(tmp_path / "log", [b"x"]), BYTES, tmp_path / "cache")
    assert events == ["bin", "bin", "json", "tmp", "rename", "cache"]


def full_disk(root: Path, report: Path) -> None:
    """In a process of its own: files may not grow past 64 KiB, as if the disk were full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    try:
        opened(root, "stdlib")
    except ResourceError as error:
        report.write_text(json.dumps([error.line(), [path.name for path in complete(root)]]))


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    worker = FORK.Process(target=full_disk, args=(tmp_path / "cache", tmp_path / "report"))
    worker.start()
    worker.join(30)
    line, left = json.loads((tmp_path / "report").read_text())
    assert "cannot write the token cache" in line and "bytes free" in line and "SHARDWISE_CACHE" in line
    assert left == []


def test_a_place_that_is_no_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(ResourceError, match="cannot write the token cache"):
        opened(tmp_path / "file" / "cache", str(tmp_path / "a.txt"))


def test_the_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    assert default_root() == tmp_path
    monkeypatch.delenv("SHARDWISE_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_root() == Path("/home/someone/.cache/shardwise")


def test_tokens_take_the_narrowest_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("abc")
    for vocab, size in ((256, 1), (257, 2), (65536, 2), (65537, 4)):
        monkeypatch.setattr(BYTES, "vocab", vocab)
        cache = opened(tmp_path / f"cache{vocab}", str(tmp_path / "a.txt"))
        assert cache.tokens.itemsize == size
        assert np.array_equal(cache.tokens, [97, 98, 99, 0])


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "header.json"])
def test_one_changed_bit_is_found_at_the_start_of_a_run(tmp_path: Path, name: str) -> None:
    """The launcher verifies; ranks, which open the cache next, do not read it all."""
    source = Counted(tmp_path / "log", [b"some text"] * 50)
    digest = open_cache(source, BYTES, tmp_path / "cache", verify=True).header.digest
    path = complete(tmp_path / "cache")[0] / name
    whole = path.read_bytes()
    for position in (0, len(whole) // 2, len(whole) - 1):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        assert open_cache(source, BYTES, tmp_path / "cache", verify=True).header.digest == digest
        assert path.read_bytes() == whole
    assert len((tmp_path / "log").read_text().splitlines()) == 4
