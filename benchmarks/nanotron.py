"""How nanotron ran the sweeps of the Ultra-Scale Playbook, from its source code (github.com/huggingface/nanotron).

- **Stages** (models/base.py, build_model): a block belongs to the stage in which the sum of costs before it ends, so
  early stages take more than their share, and the last ones may take nothing. The head counts as its product.
- **Gradients** (optim/gradient_accumulator.py): an fp32 all-reduce during the last backward pass, for ZeRO 1 too.
- **Weights** of ZeRO 1 (optim/zero.py): one all-gather after the update.
- **Norms** of tensor parallelism and tied embeddings: their gradients are all-reduced once a step (trainer.py).
- **Devices**: Amazon's p5 nodes (the partition of run_multinode.sh).

Two things are not in the source code, and constants stand for them (calibrate.py fits them to the runs of FITTED):

- **The host** takes longer to launch a kernel: on 8 GPUs, small micro-batches take 4.5 ms per block, whatever their
  size.
- **Waits**: with stages and on several nodes, a block takes longer with the tensor degree, from 10 to 128 ms, whatever
  the micro-batch; on one node, and without stages, it does not. Nothing published says why. The checks of
  TORCH_DISTRIBUTED_DEBUG=DETAIL would take such a time, but run_multinode.sh did not set it when the sweeps were run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from published import NODE, Published

from shardwise.core.cost import Collective, StepCost

DEVICE = "P5-H100-80GB"
FITTED = "Llama-style 3B"
"""The model whose runs both constants are fitted to; those of other sizes test them."""
LAUNCH_SECONDS = 4.7e-5
"""Of the host, to launch a kernel."""
WAIT_SECONDS = 3.2e-4
"""Before a collective, for each wait."""


def waits(run: Published) -> int:
    """Waits before each collective: one for each other rank of the tensor group."""
    return run.tensor - 1 if run.stack == "nanotron" and run.pipeline > 1 and run.gpus > NODE else 0


@dataclass(frozen=True)
class Stage:
    """Blocks of one stage, and whether it has the head."""

    blocks: int
    head: bool


def stages(run: Published) -> list[Stage]:
    """The stages that do anything."""
    width, ffn, vocab = (int(str(run.model[key])) for key in ("width", "ffn", "vocab"))
    block, head = 4 * width * width + 3 * width * ffn, vocab * width
    whole = run.layers * block + head
    found, rank, done = [0] * run.pipeline, 0, 0
    for _ in range(run.layers):
        found[rank] += 1
        done += block
        if done > whole * (rank + 1) / run.pipeline:
            rank += 1
    return [Stage(blocks, number == rank) for number, blocks in enumerate(found[: rank + 1])]


def synchronised(cost: StepCost, run: Published, tied: bool) -> StepCost:
    """A cost with nanotron's collectives over the data; ``tied``: the rank has a copy of a tied embedding."""
    collectives = tuple(_collectives(cost, run))
    if tied:
        elements = int(str(run.model["vocab"])) * int(str(run.model["width"])) // run.tensor
        copies = Collective("all_reduce", "pipeline", 2, 1, elements, 4 * elements, "clip")
        collectives += (copies,)
    return replace(cost, collectives=collectives)


def _collectives(cost: StepCost, run: Published) -> Iterator[Collective]:
    for each in cost.collectives:
        over_data = each.axis in ("shard", "replicate")
        if over_data and each.kind == "reduce_scatter":
            yield replace(each, kind="all_reduce")
        elif over_data and each.kind == "all_gather":
            yield replace(each, phase="optimizer")
        elif each.axis == "tensor" and each.kind == "all_reduce" and each.phase == "backward":
            yield replace(each, phase="clip", calls=each.calls // run.passes, passes=1)
        else:
            yield each
