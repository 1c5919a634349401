"""Held out and packed: documents stay whole, sides disjoint, and every token is a target once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from shardwise.data.cache_header import DOCUMENT
from shardwise.data.text import Stream, split_text


def corpus(lengths: list[int], seed: int = 0) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.void]]:
    """Tokens 0, 1, 2, ... in documents of these lengths with random hashes."""
    documents = np.zeros(len(lengths), dtype=DOCUMENT)
    documents["end"] = np.cumsum(lengths)
    documents["hash"] = np.random.default_rng(seed).integers(0, 2**64, len(lengths), dtype=np.uint64)
    return np.arange(sum(lengths), dtype=np.uint32), documents


def targets(stream: Stream) -> list[int]:
    return [int(t) for i in range(stream.sequences) for t in stream.sequence(i)[1:]]


def test_documents_are_whole_and_on_one_side() -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 2000).tolist()
    tokens, documents = corpus(lengths)
    train, held_out = split_text(tokens, documents, 0.1, 16)
    held = documents["hash"] < np.uint64(0.1 * 2**64)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    for stream, side in ((train, False), (held_out, True)):
        inside = np.flatnonzero(held[document_of] == side)
        whole = (len(inside) - 1) // 16 * 16
        assert stream.sequences == whole // 16
        assert targets(stream) == inside[1 : whole + 1].tolist()
    assert 0.08 < held_out.sequences / (train.sequences + held_out.sequences) < 0.12


def test_sequences_overlap_by_one_token_and_reach_over_runs() -> None:
    tokens, documents = corpus([5, 3, 4, 2, 9])
    documents["hash"] = np.array([2**63, 1, 2**63, 1, 2**63], dtype=np.uint64)
    train, held_out = split_text(tokens, documents, 0.25, 4)
    assert [train.sequence(i).tolist() for i in range(4)] == [
        [0, 1, 2, 3, 4],
        [4, 8, 9, 10, 11],
        [11, 14, 15, 16, 17],
        [17, 18, 19, 20, 21],
    ]
    assert [held_out.sequence(i).tolist() for i in range(held_out.sequences)] == [[5, 6, 7, 12, 13]]
    with pytest.raises(IndexError):
        train.sequence(4)
    with pytest.raises(IndexError):
        train.sequence(-1)


def test_more_documents_move_none_that_were_there() -> None:
    tokens, documents = corpus([20] * 300)
    before = set(targets(split_text(tokens, documents, 0.1, 8)[1]))
    tokens, documents = corpus([20] * 400)
    assert before - set(targets(split_text(tokens, documents, 0.1, 8)[1])) <= {*range(6000 - 20, 6000)}


@pytest.mark.parametrize("lengths", [[1001], [500, 501], [10, 980, 11]])
@pytest.mark.parametrize("seed", range(4))
def test_a_book_or_a_few_documents_hold_out_the_end(lengths: list[int], seed: int) -> None:
    tokens, documents = corpus(lengths, seed)
    train, held_out = split_text(tokens, documents, 0.1, 10)
    assert (train.sequences, held_out.sequences) == (90, 10)
    assert targets(train) + targets(held_out) == list(range(1, 1001))


@pytest.mark.parametrize(
    ("length", "train_count", "held_count"), [(1000, 1, 0), (500, 1, 1), (1001, 0, 0), (333, 2, 1)]
)
def test_little_data_trains_before_it_is_held_out(length: int, train_count: int, held_count: int) -> None:
    train, held_out = split_text(*corpus([1001]), 0.05, length)
    assert (train.sequences, held_out.sequences) == (train_count, held_count)


def test_fraction_0_holds_nothing_out() -> None:
    train, held_out = split_text(*corpus([50] * 40), 0.0, 10)
    assert (train.sequences, held_out.sequences) == (199, 0)
