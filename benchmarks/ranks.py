"""Functions on ranks with a gloo group, each a fork of a process that has imported torch and transformers."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from queue import Empty
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "transformers",
        "shardwise.worker",
    ]
)


def on_ranks(
    world_size: int, function: Callable[..., T], *arguments: object, seconds: float = 300
) -> list[T]:
    """``function(*arguments)`` on each rank; results by rank. Raises the first rank's error, or TimeoutError."""
    answers = _FORKS.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        ranks = [
            _FORKS.Process(target=_rank, args=(rank, world_size, store, answers, function, arguments))
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        try:
            results: dict[int, T] = {}
            while len(results) < world_size:
                number, result, error = pickle.loads(answers.get(timeout=seconds))  # noqa: S301 - of our forks
                if error is not None:
                    raise error
                results[number] = result
            for rank in ranks:
                rank.join()
        except Empty:
            raise TimeoutError(f"no answer after {seconds:g} s") from None
        finally:
            for rank in ranks:
                rank.kill()
    return [results[number] for number in range(world_size)]


def _rank(
    rank: int,
    world_size: int,
    store: str,
    answers: Any,
    function: Callable[..., T],
    arguments: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        answer = pickle.dumps((rank, function(*arguments), None))
        dist.barrier()  # rank 0 has the store
    except Exception as error:
        answer = pickle.dumps((rank, None, _sendable(error)))
    answers.put(answer)


def _sendable(error: Exception) -> Exception:
    """The error, or its words where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
