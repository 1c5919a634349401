"""The batches of a run that trains on its own samples: prompts, completions, rewards, advantages.

A *rollout* is ``size`` completions, ``group`` per prompt, sampled by the weights of the moment. It is trained on in
``epochs`` times ``minibatches`` optimizer steps, of ``batch_size`` completions each. All of its random numbers follow
from (seed, rollout, prompt, sample), and its prompts from the order of the data. So a run that is resumed from the
weights before a rollout repeats it bitwise.

Every rank generates a share of the completions. All ranks then have the tables of the whole rollout, in host memory:
advantages need whole groups, and a mini-batch takes rows from everywhere.

Training reads the sampled ids themselves; no text is tokenized again. A row is a prompt, its completion, and padding to
``data.sequence_length``. Labels are the completion's tokens; a truncated completion has none if ``mask_truncated``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.errors import DataError
from shardwise.data.batches import deal
from shardwise.data.dataset import Sample
from shardwise.data.tokenizer import Tokenizer
from shardwise.engine.run import LiveModel
from shardwise.model.blueprint import Batch
from shardwise.plugins.rollouts.generation import Completions, generate, require_generation, uniforms
from shardwise.plugins.rollouts.rewards import Rewards
from shardwise.runtime.offload.host import to_device
from shardwise.runtime.parallel.vocabulary import IGNORED
from shardwise.technique import MICRO_BATCH_SIZE

KEPT = 2
"""Rollouts that are kept: that of the running step, and that of the step whose results are being read."""


@dataclass(frozen=True)
class RolloutSpec:
    """How a rollout is made, and how often it is trained on.

    Attributes:
        batch_size: completions of one optimizer step.
        length: of a row; a prompt has at most ``length - completion`` tokens.
        rows: completions that are generated at a time on a rank; None for all of its share.
    """

    seed: int
    batch_size: int
    length: int
    completion: int
    group: int = 1
    temperature: float = 1.0
    mask_truncated: bool = True
    rows: int | None = None
    epochs: int = 1
    minibatches: int = 1

    @property
    def size(self) -> int:
        """Completions of a rollout."""
        return self.batch_size * self.minibatches

    @property
    def steps(self) -> int:
        """Optimizer steps per rollout."""
        return self.epochs * self.minibatches

    def rows_of(self, part: int, rollout: int) -> list[int]:
        """The completions of one of the steps of a rollout; every epoch visits all of them, in an order of its own."""
        if self.minibatches == 1:
            return list(range(self.size))
        epoch, minibatch = divmod(part, self.minibatches)
        seed = ((self.seed * 1_000_003 + rollout) * 65_537 + epoch) % 2**63
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(seed)).tolist()
        return order[minibatch * self.batch_size : (minibatch + 1) * self.batch_size]


Tables = dict[str, Tensor]
"""Tensors of a rollout by name, with a row per completion, in host memory: what micro-batches are made of, and

    rewards     fp64 [n, 1 + rewards]: the weighted sum, and every reward
    deviation   fp64 [n]: standard deviation of the sums of the group
    lengths     int64 [n], of the completions
    ended       int64 [n]; 0 for truncated completions
"""


class Advantages(ABC):
    """What an objective adds to a rollout before it is trained on."""

    @abstractmethod
    def added(self, rollouts: Rollouts, tables: Tables) -> Tables:
        """``advantages`` [n, s], and what else the loss reads. All ranks call it together."""


@dataclass
class Rollouts:
    """The micro-batches of this rank, by position in the order of the data; in the place of ``RankBatches``.

    Attributes:
        records: the prompts of a rollout, ``spec.size / spec.group`` of them.
        advantages: of the objective.
    """

    live: LiveModel
    spec: RolloutSpec
    records: Callable[[int], Sequence[Sample]]
    tokenizer: Tokenizer
    rewards: Rewards
    advantages: Advantages
    _kept: dict[int, Tables] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        require_generation(self.live)
        self.unit = self.spec.steps

    def at(self, position: int) -> list[Batch]:
        """The micro-batches at a position; a rollout is made for the first of its positions that is asked for."""
        number, part = divmod(position, self.spec.steps)
        self._kept = {n: tables for n, tables in self._kept.items() if number - KEPT < n <= number}
        if number not in self._kept:
            self._kept[number] = self._made(number)
        return self.micro_batches(self._kept[number], self.spec.rows_of(part, number))

    def forget(self) -> None:
        """Make rollouts again: the weights are no longer those that made them."""
        self._kept.clear()

    def micro_batches(self, tables: Tables, rows: Sequence[int]) -> list[Batch]:
        """The share of this rank in these rows of a rollout, on its device; rows of padding have no labels."""
        batches = []
        for slots in self.slots(len(rows)):
            index = torch.tensor([0 if slot is None else rows[slot] for slot in slots])
            batch = {name: table[index] for name, table in tables.items()}
            batch["present"] = torch.tensor([int(slot is not None) for slot in slots])
            batch["labels"][batch["present"] == 0] = IGNORED
            batches.append({name: to_device(value, self.live.device) for name, value in batch.items()})
        return batches

    def slots(self, rows: int) -> list[list[int | None]]:
        """Which of so many rows are in this rank's micro-batches."""
        size = self.live.strategy[MICRO_BATCH_SIZE]
        return deal(rows, self.live.data_rank, self.live.data_degree, size)

    # ---- making a rollout ---------------------------------------------------------------------------------

    def _made(self, number: int) -> Tables:
        spec, prompts = self.spec, list(self.records(number))
        for prompt in prompts:
            self._require_room(prompt["prompt"])
        share = -(-spec.size // self.live.data_degree)
        first = self.live.data_rank * share
        # Every rank generates as many completions; the last ones stand in for those that are not there.
        own = [min(row, spec.size - 1) for row in range(first, first + share)]
        asked = [prompts[row // spec.group] for row in own]
        noise = uniforms(spec.seed, number, [divmod(row, spec.group) for row in own], spec.completion)
        texts = [list(map(int, prompt["prompt"])) for prompt in asked]
        ends = sorted(self.tokenizer.ends)
        done = generate(self.live, texts, noise, ends, spec.temperature, spec.rows)
        tables = laid_out(texts, done, spec.length)
        tables["rewards"] = self._rewarded(asked, done)
        tables = {name: self.shared(table, own, spec.size) for name, table in tables.items()}
        groups = tables["rewards"][:, 0].unflatten(0, (-1, spec.group))
        tables["deviation"] = groups.std(1, correction=0).repeat_interleave(spec.group)
        if spec.mask_truncated:
            tables["labels"][tables["ended"] == 0] = IGNORED
        return {**tables, **self.advantages.added(self, tables)}

    def _require_room(self, prompt: Sequence[int]) -> None:
        room = self.spec.length - self.spec.completion
        if not 0 < len(prompt) <= room:
            raise DataError(
                "a prompt leaves no room for its completion" if len(prompt) else "a prompt is empty",
                where="data.source",
                why=f"it has {len(prompt)} tokens, and {room} of {self.spec.length} are for prompts",
                fix="raise data.sequence_length, lower objective.completion_length, or leave the record out",
            )

    def _rewarded(self, prompts: Sequence[Sample], done: Completions) -> Tensor:
        """The rewards of this rank's completions. Of ranks with the same ones, the first calls the functions."""
        if self.live.layout.number(dist.get_rank(), lambda axis: not axis.samples) > 0:
            return torch.full((len(prompts), 1 + len(self.rewards.rewards)), -torch.inf, dtype=torch.float64)
        vocab, decode = self.tokenizer.vocab, self.tokenizer.decode
        lengths = done.lengths.tolist()
        completions = [
            decode([token for token in tokens[:length] if token < vocab])
            for tokens, length in zip(done.tokens.tolist(), lengths, strict=True)
        ]
        fields: Mapping[str, Any] = prompts[0]["fields"]
        return self.rewards.of(
            [decode(prompt["prompt"]) for prompt in prompts],
            completions,
            {name: [prompt["fields"].get(name) for prompt in prompts] for name in fields},
        )

    def shared(self, own: Tensor, rows: Sequence[int], count: int) -> Tensor:
        """The table of all ``count`` rows, in host memory, from every rank's ``rows`` of it."""
        kind = torch.finfo(own.dtype) if own.is_floating_point() else torch.iinfo(own.dtype)
        device = self.live.device
        whole = torch.full((count, *own.shape[1:]), kind.min, dtype=own.dtype, device=device)
        whole[torch.tensor(rows, device=device)] = own.to(device).clamp(min=kind.min)
        dist.all_reduce(whole, dist.ReduceOp.MAX)
        return whole.cpu()

    @property
    def validation_sets(self) -> list[str]:
        """None: the loss of a rollout says nothing about held-out prompts."""
        return []

    def validation(self, name: str = "") -> list[Batch]:
        return []


def laid_out(prompts: Sequence[list[int]], done: Completions, length: int) -> Tables:
    """Rows of prompts and completions: ``input_ids``, ``labels`` and ``sampled`` [n, length], lengths and ended.

    ``sampled`` are the log-probabilities of the labels when they were sampled, 0 elsewhere.
    """
    n = len(prompts)
    ids = torch.zeros(n, length, dtype=torch.int64)
    labels = torch.full((n, length), IGNORED)
    sampled = torch.zeros(n, length, dtype=done.log_probabilities.dtype)
    tokens, logs, lengths = done.tokens.cpu(), done.log_probabilities.cpu(), done.lengths.cpu()
    for row, prompt in enumerate(prompts):
        text, count, start = torch.tensor(prompt), int(lengths[row]), len(prompt)
        ids[row, :start] = text
        ids[row, start : start + count] = tokens[row, :count]
        labels[row, start - 1 : start - 1 + count] = tokens[row, :count]
        sampled[row, start - 1 : start - 1 + count] = logs[row, :count]
    return {
        "input_ids": ids,
        "labels": labels,
        "sampled": sampled,
        "lengths": lengths,
        "ended": done.ended.cpu().long(),
    }
