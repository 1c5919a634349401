"""Which causal families of transformers plan and train: ``python -m tests.families [--again] [FAMILY ...]``.

The families are all causal text models in transformers' own mapping. Of each family

- the config of its class, in full size, is saved as ``config.json`` alone and planned for 8 × H100, bf16 and ZeRO 3;
- a tiny model (tests/harness/families.py) with random weights is saved; its logits must be those of transformers;
- it is planned and trained on two CPU processes or one: all weights, LoRA on all linear layers and experts, ZeRO 3,
  tensor parallelism, pipeline parallelism; expert parallelism if it has experts. Four steps in fp64 on text,
  whose losses, gradient norms and weights must be those of one plain process, as ``shardwise verify`` compares them:
  to 1e-10, or 1e-5 where the model's own code rounds to fp32 or needs it.

A cell is ``yes``, or the reason of the refusal or the failure. Results are written after every family to
benchmarks/results/families.json: an interrupted run goes on, with the same versions of transformers and torch. About an
hour on two cores; ``--ways NAME`` trains that way alone. ``docs/generate.py`` makes docs/reference/families.md of them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.machine import described
from shardwise.core.errors import ShardwiseError
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS
from shardwise.verifier.verify import TOLERANCES
from tests.families.ranks import dry, logit_difference, plan
from tests.harness.corpora import EVEN
from tests.harness.families import causal_families, save_tiny
from tests.harness.parity import Parity, Trial
from tests.harness.pool import Pool

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "families.json"
VOCABULARY, LENGTH, STEPS = 264, 16, 4
"""Token ids of the tiny models (bytes and some more), tokens of a sequence, optimizer steps."""
PATIENCE = 900
"""Seconds for a plan."""
YES = "yes"
COMPLETED: Mapping[str, Mapping[str, Any]] = {
    "dbrx": {
        "attn_config": {"rope_theta": 5e5, "clip_qkv": 8.0, "kv_n_heads": 8},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16},
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "n_routed_experts": 160, "topk_group": 3, "n_group": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": [*["conv", "conv", "full_attention"] * 10, "conv", "conv"]},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
}
"""What the config classes of some families leave out, without which their own models do not run."""


@dataclass(frozen=True)
class Way:
    """A way to train: number of processes, settings of the strategy, sections of the recipe, whether for mixtures."""

    world: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)
    of_experts: bool = False


WAYS: Mapping[str, Way] = {
    "all weights": Way(1),
    "LoRA": Way(2, {"zero_stage": 2}, {"adapter": {"rank": 2, "alpha": 4, "targets": "all"}}),
    "ZeRO 3": Way(2, {"zero_stage": 3}),
    "tensor": Way(2, {"tensor_parallel": 2}),
    "pipeline": Way(2, {"pipeline_parallel": 2}),
    "experts": Way(2, {"zero_stage": 1, "expert_parallel": 2}, of_experts=True),
}


def planned(family: str, pool: Pool, folder: Path) -> dict[str, Any] | str:
    """The plan of the family's own config, or the reason why there is none."""
    try:
        config = transformers.CONFIG_MAPPING[family](**COMPLETED.get(family, {}))
        config.architectures = [class_of(family)]
        config.save_pretrained(folder)
        found: dict[str, Any] = answer(pool, plan, str(folder))
        return found
    except Exception as error:
        return reason(error)


def answer(pool: Pool, function: Callable[..., Any], *arguments: object) -> Any:
    """What a function returns or raises in a process of its own."""
    pid, connection = pool.start(function, *arguments, files=[])
    if not connection.poll(PATIENCE):
        os.kill(pid, signal.SIGKILL)
        raise TimeoutError(f"no answer after {PATIENCE} s")
    return Pool.answer(connection)


def class_of(family: str) -> str:
    """The name of the model class."""
    return str(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])


def trained(way: Way, model: Path, parity: Parity, pool: Pool) -> str:
    """``yes`` if the tiny model is planned and trains, or why not."""
    values = {
        "model": {"hf": str(model)},
        "data": {"source": EVEN, "sequence_length": LENGTH},
        "steps": STEPS,
        "batch_size": 4,
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        "cluster": {"device": "cpu", "devices_per_node": way.world},
    }
    recipe = recipe_of({**values, **way.sections}, SETTINGS)
    failed = ""
    for precision in ("fp64", "fp32"):
        settings = {"precision": precision, "micro_batch_size": 2, **way.settings}
        try:
            answer(pool, dry, recipe, settings)
            verdict = parity.verdict(Trial(recipe, way.world, settings))
        except ShardwiseError as error:
            return reason(error)
        except Exception as error:  # the model's own code may know fp32 alone
            failed = reason(error)
            continue
        name, apart, _ = max(verdict.rows, key=lambda row: row[1])
        rounds = precision == "fp32" or any("rounds to fp32" in note for note in verdict.notes)
        return (
            YES
            if apart <= TOLERANCES["fp32" if rounds else "fp64"]
            else f"trains; its {name} differs by {apart:.1e}"
        )
    return failed


def compared(model: Path, pool: Pool) -> str:
    """Whether the logits are those of transformers."""
    try:
        (apart,) = pool.run(1, logit_difference, str(model), VOCABULARY, LENGTH)
    except Exception as error:
        return reason(error)
    return YES if apart <= TOLERANCES["fp32"] else f"logits differ by {apart:.1e}"


def has_experts(folder: Path) -> bool:
    """Whether a model has modules that are called experts."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    return any(name.endswith("experts") for name, _ in model.named_modules())


def reason(error: Exception) -> str:
    """One line: of a refusal its reason, of another error its type too."""
    if isinstance(error, ShardwiseError):
        return error.why or error.what
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def examined(family: str, pool: Pool) -> dict[str, Any]:
    """The row of a family."""
    with tempfile.TemporaryDirectory() as scratch:
        row: dict[str, Any] = {"class": class_of(family)}
        row["plan"] = planned(family, pool, Path(scratch) / "config")
        row["trained_parameters"] = save_tiny(family, Path(scratch) / "model", vocab_size=VOCABULARY)
        row["logits"] = compared(Path(scratch) / "model", pool)
    return row | ways_of(family, tuple(WAYS), pool)


def ways_of(family: str, names: Sequence[str], pool: Pool) -> dict[str, str]:
    """The cells of these ways; none of ways for experts in a model without."""
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        save_tiny(family, model, vocab_size=VOCABULARY)
        parity, mixture = Parity(pool, Path(scratch), STEPS, []), has_experts(model)
        ways = {name: WAYS[name] for name in names if mixture or not WAYS[name].of_experts}
        return {name: trained(way, model, parity, pool) for name, way in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="these; default: all that are not in the results")
    parser.add_argument("--again", action="store_true", help="also those in the results")
    parser.add_argument(
        "--ways", action="append", choices=tuple(WAYS), help="these cells of rows in the results"
    )
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    rows = found["families"] if found.get("versions") == versions else {}
    names = options.families or [name for name in causal_families() if options.again or name not in rows]
    pool = Pool(max(way.world for way in WAYS.values()))
    for name in names:
        rows[name] = rows[name] | ways_of(name, options.ways, pool) if options.ways else examined(name, pool)
        print(name, json.dumps(rows[name]), flush=True)
        ordered = {each: rows[each] for each in causal_families() if each in rows}
        machine = found["machine"] if options.ways else described()
        results = {"machine": machine, "versions": versions, "families": ordered}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    pool.close()


if __name__ == "__main__":
    main()
