"""The batches of a run that trains on its own samples: prompts, completions, rewards, advantages.

A *rollout* is ``size`` completions, ``group`` per prompt, sampled by the weights of the moment. It is trained on in
``epochs`` times ``minibatches`` optimizer steps, of ``batch_size`` completions each. Its prompts follow from the order
of the data, and all of its random numbers from (seed, rollout, prompt, sample). So a run that is resumed from the
weights before a rollout repeats it bitwise.

Every rank generates a share of the completions. All ranks then have the tables of the whole rollout, in host memory:
advantages need whole groups, and a mini-batch takes rows from everywhere.

Training reads the sampled ids themselves; no text is tokenized again. A row is a prompt, its completion, and padding to
``data.sequence_length``. Labels are the completion's tokens; a truncated completion has none if ``mask_truncated``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.data.batches import deal
from shardwise.engine.phase import phase
from shardwise.engine.sampling import Prompts, Sampler
from shardwise.model.blueprint import Batch, ForwardOnly
from shardwise.plugins.rollouts.endpoint import Endpoint
from shardwise.plugins.rollouts.generation import Completion, generate
from shardwise.plugins.rollouts.rewards import RewardInput, Rewards
from shardwise.plugins.serve.sampling import uniforms
from shardwise.runtime.offload.host import to_device
from shardwise.runtime.parallel.vocabulary import IGNORED
from shardwise.technique import MICRO_BATCH_SIZE
from shardwise.trainer.run_log import warn

KEPT = 2
"""Rollouts that are kept: that of the running step, and that of the step whose results are being read."""

ROW, COLUMN = "row", "column"
"""Where the tokens of a micro-batch are in the tables of its rollout."""

EVALUATION_NUMBER = 2**62
"""In the place of the number of a rollout: every evaluation has the same random numbers."""


@dataclass(frozen=True)
class RolloutSpec:
    """How a rollout is made, and how often it is trained on.

    Attributes:
        batch_size: completions of one optimizer step.
        length: of a row; a prompt has at most ``length - completion`` tokens.
        group: completions per prompt.
    """

    seed: int
    batch_size: int
    length: int
    completion: int
    group: int
    temperature: float
    mask_truncated: bool
    epochs: int
    minibatches: int

    @property
    def size(self) -> int:
        """Completions of a rollout."""
        return self.batch_size * self.minibatches

    @property
    def steps(self) -> int:
        """Optimizer steps per rollout."""
        return self.epochs * self.minibatches

    def rows(self, part: int, rollout: int) -> list[int]:
        """The completions of one of the steps of a rollout; every epoch visits all of them, in an order of its own."""
        if self.minibatches == 1:
            return list(range(self.size))
        epoch, minibatch = divmod(part, self.minibatches)
        seed = ((self.seed * 1_000_003 + rollout) * 65_537 + epoch) % 2**63
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(seed)).tolist()
        return order[minibatch * self.batch_size : (minibatch + 1) * self.batch_size]


OverBatches = Callable[[ForwardOnly, Sequence[Batch]], list[Tensor | None]]
"""Runs a model over micro-batches without gradients."""

Tables = dict[str, Tensor]
"""Tensors of a rollout by name, with a row per completion, in host memory: what micro-batches are made of.

    input_ids, labels   int64 [n, s]
    sampled             [n, s]: log-probabilities of the labels when they were sampled, 0 elsewhere
    lengths, ended      int64 [n]: tokens of the completions; 0 for truncated ones
    rewards             fp64 [n, 1 + rewards]: the weighted sum, and every reward
    deviation           fp64 [n]: standard deviation of the sums of its group
"""


@dataclass
class Rollouts:
    """The micro-batches of this rank, by position in the order of the data.

    Attributes:
        added: further tables of the objective, such as ``advantages`` [n, s]. All ranks call it together.
        folder: of files of rollouts that several runs train on; without what ``added`` adds.
        unit: steps that train on the same rollout.
    """

    run: Sampler
    spec: RolloutSpec
    prompts: Prompts
    rewards: Rewards
    added: Callable[[Rollouts, Tables], Tables]
    endpoint: Endpoint | None = None
    folder: Path | None = None
    _kept: dict[int, Tables] = field(default_factory=dict, init=False)
    _warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.unit = self.spec.steps

    def at(self, position: int) -> list[Batch]:
        """The micro-batches at a position; a rollout is made for the first of its positions that is asked for."""
        number, part = divmod(position, self.unit)
        self._kept = {n: tables for n, tables in self._kept.items() if number - KEPT < n <= number}
        if number not in self._kept:
            with phase("rollout"):
                self._kept[number] = self._made(number)
        return self.micro_batches(self._kept[number], self.spec.rows(part, number))

    def forget(self) -> None:
        """Make rollouts again: the weights are no longer those that made them."""
        self._kept.clear()

    @property
    def validation_sets(self) -> list[str]:
        """Sets of held-out prompts; none for an endpoint, whose weights do not follow training."""
        return self.prompts.validation_sets if self.endpoint is None else []

    def validation(self, name: str = "") -> list[Batch]:
        """Completions of held-out prompts by the weights of the moment, sampled as in training."""
        records = self.prompts.held_out_records(name)
        most = self.spec.size // self.spec.group
        batches = []
        for first in range(0, len(records), most):  # no more completions at once than in a rollout
            tables = self._completed(records[first : first + most], EVALUATION_NUMBER + first)
            tables |= self.added(self, tables)
            batches += self.micro_batches(tables, range(len(tables["labels"])))
        return batches

    def micro_batches(self, tables: Tables, rows: Sequence[int]) -> list[Batch]:
        """The share of this rank in these rows of a rollout, on its device; rows of padding have no labels."""
        run = self.run
        batches = []
        for slots in deal(len(rows), run.data_rank, run.data_degree, run.strategy[MICRO_BATCH_SIZE]):
            index = torch.tensor([0 if slot is None else rows[slot] for slot in slots])
            batch = {name: table[index] for name, table in tables.items()}
            batch["present"] = torch.tensor([int(slot is not None) for slot in slots])
            batch["labels"][batch["present"] == 0] = IGNORED
            batches.append({name: to_device(value, run.device) for name, value in batch.items()})
        return batches

    def computed(self, tables: Tables, compute: OverBatches) -> Tensor:
        """A table of the results of ``compute``, [m, ..., tokens], for the micro-batches of the whole rollout."""
        size, length = tables["labels"].shape
        numbers = {ROW: torch.arange(size), COLUMN: torch.arange(length).expand(size, length)}
        batches = self.micro_batches(tables | numbers, range(size))
        local = [self.run.local_batch(batch) for batch in batches]  # a part of each row, if ranks divide them
        present, rows, columns = (torch.cat([part[n] for part in local]) for n in ("present", ROW, COLUMN))
        results = compute(self.run.passes, local)
        while self.run.exceeded():
            results = compute(self.run.passes, local)
        values = torch.cat([result for result in results if result is not None]).movedim(-1, 1)
        own = present.bool()
        index = (rows.unsqueeze(1) * length + columns)[own].flatten()
        whole = self._shared(values[own].flatten(0, 1), index, size * length)
        return whole.unflatten(0, (size, length)).movedim(1, -1)

    # ---- making a rollout ---------------------------------------------------------------------------------

    def _made(self, number: int) -> Tables:
        file = self.folder and self.folder / f"rollout-{number}.safetensors"
        if file is not None and file.exists():
            tables = load_file(file)
        else:
            tables = self._completed(self.prompts.records(number * self.unit), number)
            if file is not None:
                save_file(tables, file)
            elif not self._warned and bool((tables["labels"] == IGNORED).all()):
                self._warned = True
                why = f"every completion was cut at objective.completion_length = {self.spec.completion}"
                fix = "raise it, or set objective.mask_truncated: false"
                warn(f"{why} and trains nothing; {fix}")
        return {**tables, **self.added(self, tables)}

    def _completed(self, prompts: Sequence[Mapping[str, Any]], number: int) -> Tables:
        """The tables of completions of prompts; ``number`` of the rollout is for random numbers."""
        run, spec = self.run, self.spec
        size = len(prompts) * spec.group
        share = -(-size // run.data_degree)
        first = run.data_rank * share
        # Every rank generates as many completions; the last one stands in for those that are not there.
        own = [min(row, size - 1) for row in range(first, first + share)]
        asked = [prompts[row // spec.group] for row in own]
        texts = [list(map(int, prompt["prompt"])) for prompt in asked]
        samples = [divmod(row, spec.group) for row in own]
        cuts = self.prompts.tokenizer
        count = len(own) if run.leads else 0  # the other ranks of this share have the same completions
        if self.endpoint is None:
            noise = uniforms(spec.seed, number, samples, spec.completion)
            done = generate(run, texts, noise, sorted(cuts.ends), spec.temperature)
        else:
            seeds = [(spec.seed, number, *sample) for sample in samples[:count]]
            done = self.endpoint.completions(texts[:count], seeds, cuts)
        own = own[:count]
        rewards = self._rewarded(asked[:count], done)
        tables = {**laid_out(texts[:count], done, cuts.ends, spec.length), "rewards": rewards}
        tables = {name: self._shared(table, own, size) for name, table in tables.items()}
        groups = tables["rewards"][:, 0].unflatten(0, (-1, spec.group))
        tables["deviation"] = groups.std(1, correction=0).repeat_interleave(spec.group)
        if spec.mask_truncated:
            tables["labels"][tables["ended"] == 0] = IGNORED
        return tables

    def _rewarded(self, prompts: Sequence[Mapping[str, Any]], done: Sequence[Completion]) -> Tensor:
        """The rewards of the first completions, to these prompts."""
        names = dict.fromkeys(name for prompt in prompts for name in prompt["fields"] if name != "prompt")
        fields = {name: [prompt["fields"].get(name) for prompt in prompts] for name in names}
        prompt_ids = [prompt["prompt"] for prompt in prompts]
        completion_ids = [completion.tokens for completion in done[: len(prompts)]]
        closings = [prompt["closing"] for prompt in prompts]
        inputs = RewardInput(prompt_ids, completion_ids, fields, self.prompts.tokenizer, closings)
        return self.rewards.of(inputs)

    def _shared(self, own: Tensor, rows: Sequence[int] | Tensor, size: int) -> Tensor:
        """The table of all ``size`` rows, in host memory, from every rank's ``rows`` of it."""
        kind = torch.finfo(own.dtype) if own.is_floating_point() else torch.iinfo(own.dtype)
        device = self.run.device
        whole = torch.full((size, *own.shape[1:]), kind.min, dtype=own.dtype, device=device)
        whole[torch.as_tensor(rows, dtype=torch.int64, device=device)] = own.to(device)
        dist.all_reduce(whole, dist.ReduceOp.MAX)
        return whole.cpu()


def laid_out(
    prompts: Sequence[list[int]], done: Sequence[Completion], ends: Collection[int], length: int
) -> Tables:
    """Rows of prompts and their completions, the first ones: the first five of ``Tables``."""
    n = len(prompts)
    kind = done[0].log_probabilities.dtype if done else torch.float32
    ids = torch.zeros(n, length, dtype=torch.int64)
    labels = torch.full((n, length), IGNORED)
    sampled = torch.zeros(n, length, dtype=kind)
    lengths, ended = torch.zeros(2, n, dtype=torch.int64)
    for row, (prompt, (tokens, logs)) in enumerate(zip(prompts, done, strict=False)):
        targets = slice(len(prompt) - 1, len(prompt) - 1 + len(tokens))
        ids[row, : targets.stop + 1] = torch.tensor([*prompt, *tokens])
        labels[row, targets], sampled[row, targets] = torch.tensor(tokens), logs
        lengths[row], ended[row] = len(tokens), tokens[-1] in ends
    return {"input_ids": ids, "labels": labels, "sampled": sampled, "lengths": lengths, "ended": ended}
