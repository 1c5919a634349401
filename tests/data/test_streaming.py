"""Streams: the tokens of a whole cache in its order, exact cursors, and the same samples at any world size."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest

from shardwise.core.errors import DataError, RecipeError
from shardwise.data import open_data
from shardwise.data.batches import Data
from shardwise.data.cache import remove_cache
from shardwise.data.dataset import OpenedSource
from shardwise.data.epochs import with_steps
from shardwise.data.opening import open_splits
from shardwise.data.source import Source, SourcePosition
from shardwise.data.sources import open_source
from shardwise.data.streaming import StreamedText
from shardwise.data.tokenizer import open_tokenizer
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import DataSpec, Recipe

LENGTH, WINDOW = 16, 160
"""Tokens of a sequence and of a window: 10 sequences."""


def text_of(number: int) -> str:
    """A document of 5 to 60 digits, of which no 16 come twice."""
    return "".join(f"{number:03}{part:02}" for part in range(1 + number * 7 % 12))


def lines(count: int, start: int = 0) -> str:
    return "".join(json.dumps({"text": text_of(number)}) + "\n" for number in range(start, start + count))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "data"
    place.mkdir()
    for name, start in (("a", 0), ("b", 40), ("c", 80)):
        (place / f"{name}.jsonl").write_text(lines(40, start), encoding="utf-8")
    return place


def spec_of(source: object, **more: Any) -> DataSpec:
    values = {
        "source": str(source),
        "sequence_length": LENGTH,
        "held_out": 0.0,
        "stream_window": WINDOW,
        **more,
    }
    return DataSpec.model_validate(values)


def stream_of(source: object, cache: Path, **more: Any) -> StreamedText:
    spec = spec_of(source, **more)
    opened = open_source(spec.source, "text", streamed=True)
    return StreamedText(OpenedSource(spec, opened, "text", open_tokenizer("bytes"), cache))


def tokens_of(stream: StreamedText, window: int) -> Any:
    return stream.window(window).cache.tokens


def cursor_of(stream: StreamedText, window: int) -> tuple[str, ...]:
    return stream.cursor(window * stream.epoch)


def recipe_for(source: object, **data: Any) -> Recipe:
    values = {"sequence_length": LENGTH, "held_out": 0.0, "stream_window": WINDOW, **data}
    values |= {} if "mixture" in data else {"source": str(source)}
    return recipe_of({"model": {"preset": "tiny"}, "data": values, "steps": 50, "batch_size": 6, "seed": 3})


def read(data: Data, step: int, degree: int = 1, size: int = 2) -> list[list[int]]:
    """The inputs of a step, in the order of its samples."""
    ranks = [data.micro_batches(step, rank, degree, size) for rank in range(degree)]
    rows = [
        row for j in range(len(ranks[0])) for batches in ranks for row in batches[j]["input_ids"].tolist()
    ]
    return rows[:6]


def test_windows_are_the_stream_of_a_whole_cache_again_and_again(folder: Path, tmp_path: Path) -> None:
    """All tokens in their order, across documents, files and epochs, cut every 800 tokens."""
    whole = open_splits(spec_of(folder, stream_window=None), open_tokenizer("bytes"), tmp_path / "whole")
    tokens = whole.train.cache.tokens.tolist()
    stream = stream_of(folder, tmp_path / "cache", stream_window=800)
    count = 3 * len(tokens) // 800
    found = [token for number in range(count) for token in tokens_of(stream, number)[:800].tolist()]
    assert len(found) > 2.5 * len(tokens) and found == (tokens * 3)[: len(found)]
    last, following = stream.sample(49), stream.sample(50)
    assert stream.epoch == 50 and last["labels"][-1] == following["input_ids"][0]


def test_a_window_follows_from_its_cursor_alone(folder: Path, tmp_path: Path) -> None:
    stream = stream_of(folder, tmp_path / "one")
    expected = [tokens_of(stream, number).tolist() for number in range(9)]
    for number in (1, 4, 8):
        resumed = stream_of(folder, tmp_path / f"other-{number}")
        resumed.begin_at(cursor_of(stream, number))
        assert tokens_of(resumed, number).tolist() == expected[number]


class Watched(Source):
    """Counts the documents that are read from another source."""

    def __init__(self, source: Source) -> None:
        self.name, self._source, self.read = source.name, source, 0

    def identity(self) -> object:
        return self._source.identity()

    def pieces(self) -> Iterator[Any]:
        raise AssertionError("a stream reads from a place on")

    def pieces_from(self, position: SourcePosition) -> Iterator[tuple[Any, SourcePosition]]:
        for piece, behind in self._source.pieces_from(position):
            self.read += 1
            yield piece, behind


def test_a_cursor_is_reached_without_reading_what_is_before(folder: Path, tmp_path: Path) -> None:
    """The file of the place is opened, and no tokens are made of the documents before it."""
    stream = stream_of(folder, tmp_path / "one")
    [stream.window(number) for number in range(20)]
    source = Watched(open_source(str(folder), "text"))
    spec = spec_of(folder)
    resumed = StreamedText(OpenedSource(spec, source, "text", open_tokenizer("bytes"), tmp_path / "other"))
    resumed.begin_at(cursor_of(stream, 19))
    resumed.window(19)
    [ahead] = resumed._ahead.values()
    ahead.join()
    assert json.loads(*cursor_of(stream, 19))[1]["place"][0] == 2, "in the third file"
    assert source.read <= 2 * 40, "no document of the other files, for this window and the next"


@pytest.mark.parametrize("packing", [False, True])
def test_samples_do_not_depend_on_ranks_and_resume_exactly(
    folder: Path, tmp_path: Path, packing: bool
) -> None:
    recipe = recipe_for(folder, packing=packing)
    data = open_data(recipe, cache=tmp_path / "cache")
    steps = [read(data, step) for step in range(12)]
    assert len({tuple(row) for step in steps[:10] for row in step}) == 60, "six windows, each sequence once"
    for degree, size in ((2, 1), (3, 2), (4, 1)):
        assert [read(data, step, degree, size) for step in range(12)] == steps
    for resumed_at in (5, 9, 11):
        again = open_data(recipe, cache=tmp_path / f"new-{resumed_at}")
        assert again.fingerprint == data.fingerprint
        again.begin_at(data.cursor(resumed_at))
        assert read(again, resumed_at, 2) == steps[resumed_at]


def test_held_out_documents_are_in_no_window(folder: Path, tmp_path: Path) -> None:
    data = open_data(recipe_for(folder, held_out=0.2, stream_window=3000), cache=tmp_path / "cache")
    assert data.held_out_sequences > 0
    held = [bytes(row) for batch in data.held_out(0, 0, 1, 4) for row in batch["input_ids"].tolist()]
    trained = [bytes(row) for step in range(100) for row in read(data, step)]

    def begun(rows: list[bytes]) -> set[int]:
        """The documents that begin within a row."""
        return {n for n in range(120) if any(f"\0{n:03}00".encode() in row for row in rows)}

    assert len(begun(held)) > 8 and len(begun(trained)) > 60 and not begun(held) & begun(trained)


def test_sets_of_evaluation_are_whole(folder: Path, tmp_path: Path) -> None:
    evaluation = {"sets": {"more": str(folder / "a.jsonl")}, "sequences": 3}
    recipe = Recipe.model_validate({**recipe_for(folder).model_dump(), "evaluation": evaluation})
    data = open_data(recipe, cache=tmp_path / "cache")
    whole = open_splits(
        spec_of(folder / "a.jsonl", stream_window=None), open_tokenizer("bytes"), tmp_path / "w"
    )
    rows = [whole.train.sample(n)["input_ids"].tolist() for n in range(len(whole.train))]
    assert data.validation_sets == ["more"]
    assert all(row in rows for row in data.held_out(0, 0, 1, 3, "more")[0]["input_ids"].tolist())


def test_splits_of_a_saved_dataset_are_other_data(tmp_path: Path) -> None:
    import datasets

    splits = {name: datasets.Dataset.from_dict({"text": [name * 40]}) for name in ("train", "other")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    streams = [stream_of(f"{tmp_path}/saved{name}", tmp_path / "cache") for name in ("", "#other")]
    assert streams[0].fingerprint != streams[1].fingerprint


def test_a_mixture_of_streams_has_exact_shares_and_resumes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("xyz " * 300, encoding="utf-8")
    mixture = [{"source": str(folder), "weight": 3}, {"source": str(tmp_path / "x.txt"), "weight": 1}]
    recipe = recipe_for(None, mixture=mixture, stream_window=1600)
    data = open_data(recipe, cache=tmp_path / "cache")
    steps = [read(data, step) for step in range(200)]
    rows = [row for step in steps for row in step][:1024]
    assert sum(set(bytes(row)) <= set(b"xyz \0") for row in rows) == 256, "a quarter of every 1,024"
    again = open_data(recipe, cache=tmp_path / "new")
    again.begin_at(data.cursor(190))
    assert [read(again, step, 3) for step in range(190, 200)] == steps[190:]


def test_old_windows_are_removed(folder: Path, tmp_path: Path) -> None:
    stream = stream_of(folder, tmp_path / "cache")
    for number in range(8):
        stream.window(number)
    stream._ahead[8].join()
    kept = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(kept) == 4, "the first with the held-out documents, 6, 7 and the one ahead"


def test_runs_that_stream_one_source_share_its_windows(folder: Path, tmp_path: Path) -> None:
    """The faster one removes windows. The slower one keeps those that it has opened, and writes others again."""
    fast, slow = (stream_of(folder, tmp_path / "cache", packing=True) for _ in range(2))
    expected = [fast.window(number).sample(3)["input_ids"].tolist() for number in range(6)]
    cache = slow.window(4).cache
    with filelock.FileLock(f"{cache.folder}.lock"):
        threading.Thread(target=remove_cache, args=[cache.folder]).start()
        time.sleep(0.05)
        assert cache.folder.is_dir(), "one that a process writes stays"
    remove_cache(cache.folder)
    assert not cache.folder.exists()
    assert len(cache.documents()) == cache.header.documents
    assert [slow.window(number).sample(3)["input_ids"].tolist() for number in range(6)] == expected


def test_a_dataset_of_the_hub_is_streamed_from_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own iterable dataset, in shards; the Hub is replaced by rows in memory."""
    datasets = pytest.importorskip("datasets")
    texts = [text_of(number) for number in range(700)]
    rows = datasets.Dataset.from_dict({"text": texts, "other": range(700)})
    opened = []

    def load(repository: str, **chosen: Any) -> Any:
        opened.append((repository, chosen))
        return rows.to_iterable_dataset(num_shards=3)  # each reader's own: it holds the reader's position

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("shardwise.data.hub._revision", lambda repository, name: "abc")
    stream = stream_of("org/set:part#test", tmp_path / "cache", stream_window=1600)
    assert opened == [("org/set", {"streaming": True, "name": "part", "split": "test", "revision": "abc"})]
    expected = "\0".join(texts).encode() + b"\0"
    found = [tokens_of(stream, number)[:1600].tobytes() for number in range(16)]
    assert b"".join(found) == (expected * 2)[: 16 * 1600] and len(expected) < 16 * 1600
    for number in (3, 9, 15):
        resumed = stream_of("org/set:part#test", tmp_path / f"new-{number}", stream_window=1600)
        resumed.begin_at(cursor_of(stream, number))
        assert tokens_of(resumed, number)[:1600].tobytes() == found[number]


def test_object_stores_and_saved_datasets_have_places(folder: Path, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    datasets = pytest.importorskip("datasets")
    store = fsspec.filesystem("memory")
    for path in folder.iterdir():
        store.pipe(f"/streamed/{path.name}", path.read_bytes())
    texts = [text_of(number) for number in range(120)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "saved"))
    plain = stream_of(folder, tmp_path / "plain")
    for name in ("memory://streamed", str(tmp_path / "saved")):
        stream = stream_of(name, tmp_path / f"cache-{len(name)}")
        [stream.window(number) for number in range(12)]
        for (
            thread
        ) in threading.enumerate():  # of the window read ahead: all readers of memory:// share one position
            if thread.name.startswith("window "):
                thread.join()
        resumed = stream_of(name, tmp_path / f"new-{len(name)}")
        resumed.begin_at(cursor_of(stream, 11))
        assert np.array_equal(tokens_of(resumed, 11), tokens_of(plain, 11))
    store.rm("/streamed", recursive=True)


def test_what_cannot_be_streamed_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9, encoding="utf-8")
    with pytest.raises(DataError, match="only plain text is streamed"):
        open_data(recipe_for(tmp_path / "chats.jsonl"), cache=tmp_path / "cache")
    with pytest.raises(DataError, match="no held-out sequence in the first window"):
        open_data(recipe_for(folder, held_out=0.001), cache=tmp_path / "cache")
    with pytest.raises(DataError, match="all its documents are held out"):
        open_data(recipe_for(folder, held_out=1 - 1e-9), cache=tmp_path / "cache")
    epochs = recipe_for(folder).model_copy(update={"steps": None, "epochs": 2.0})
    with pytest.raises(RecipeError, match="a stream has no epochs"):
        with_steps(epochs)
