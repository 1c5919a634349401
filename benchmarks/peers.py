"""Shardwise against its peers: ``make benchmark-peers``, or ``python benchmarks/peers.py``.

Every contender trains the same model (a Llama of transformers with random weights) on the same blocks of tokens, in
fp32 on this machine's CPU: in one process, in two, and a LoRA adapter in one; and in bf16 mixed precision. A round
starts each contender once, in fresh processes, and rounds follow each other, so that all see the same state of the
machine. Figures are medians of the rounds:

- tokens/s: by the median step after the first WARM_UP;
- peak memory: the largest resident set of any of its processes (VmHWM);
- first step: seconds from the start of the command to the end of its first step. For Shardwise this includes the plan.

Peers run as their documentation shows, without settings that only a benchmark would use (peer_steps.py). Shardwise
runs as ``shardwise train`` with the strategy that its planner chooses, and with compiled blocks. A peer that is not
installed or that fails stays in the results with its reason. Losing rows stay in, too.

Writes benchmarks/results/peers-cpu.json and its picture, of which `make docs` fills docs/reference/peers.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from machine import described
from peer_picture import peer_picture
from peer_profiles import read
from peer_profiles import table as profile_table
from peer_steps import LORA, PEERS, TRACE

from shardwise.core.units import MiB
from shardwise.hardware.this_machine import usable_cores
from shardwise.report.pictures import png

RESULTS = Path(__file__).parent / "results" / "peers-cpu.json"
MODULES = {
    "HF Trainer": "accelerate",
    "Accelerate": "accelerate",
    "Lightning": "lightning",
    "DeepSpeed": "deepspeed",
}
"""Packages that peers need, in addition to torch and transformers."""
OWN = {"Shardwise": "none", "Shardwise, compile: block": "block"}
LENGTH, BATCH, STEPS, WARM_UP = 256, 8, 14, 4
CONFIG = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
PROFILED, PROFILED_STEP = (*OWN, "plain PyTorch", "torch.compile"), 8
"""Contenders that run once more with one step profiled. That step is slower, and is not in the table of speeds."""
LIMIT = 600.0
"""Seconds after which a contender is stopped."""


@dataclass(frozen=True)
class Task:
    """What all contenders train."""

    name: str
    processes: int
    lora: bool = False
    precision: str = "fp32"


TASKS = (
    Task("full, one process", 1),
    Task("full, two processes", 2),
    Task("full, one process, bf16 mixed precision", 1, precision="bf16"),
    Task("LoRA, one process", 1, lora=True),
)


@dataclass(frozen=True)
class Inputs:
    """Files that every contender reads."""

    model: Path
    tokens: Path
    corpus: Path


def inputs(folder: Path) -> Inputs:
    """A saved model of random weights, and the same bytes of this package as a text and as blocks of tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder / "model")
    source = Path(__file__).parent.parent / "shardwise"
    text = "\n".join(
        path.read_text(encoding="ascii", errors="ignore") for path in sorted(source.rglob("*.py"))
    )
    (folder / "corpus.txt").write_text(text, encoding="ascii")
    np.frombuffer(text.encode("ascii"), np.uint8).astype(np.uint16).tofile(folder / "tokens.bin")
    return Inputs(folder / "model", folder / "tokens.bin", folder / "corpus.txt")


def peer_command(peer: str, task: Task, given: Inputs, folder: Path, profiled: int = 0) -> list[str]:
    """A peer's processes, started by torchrun where it needs that; ``profiled``: the step to profile."""
    script = [
        str(Path(__file__).with_name("peer_steps.py")),
        peer,
        str(given.model),
        str(given.tokens),
        str(folder),
    ]
    sizes = ["--length", str(LENGTH), "--batch", str(BATCH // task.processes), "--steps", str(STEPS)]
    launcher = []
    if task.processes > 1 or peer == "DeepSpeed":  # which else asks mpi4py for its rank
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={task.processes}", "--standalone"]
        launcher += ["--local-addr=127.0.0.1"]
    sizes += ["--precision", task.precision, "--profiled", str(profiled)]
    return [sys.executable, *launcher, *script, *sizes, *(["--lora"] if task.lora else [])]


def own_command(compiled: str, task: Task, given: Inputs, folder: Path, profiled: int = 0) -> list[str]:
    """``shardwise train`` of a recipe that names the model, the data and the processes, and a step to profile."""
    recipe: dict[str, Any] = {
        "model": {"hf": str(given.model)},
        "data": {"source": str(given.corpus), "tokenizer": "bytes", "sequence_length": LENGTH},
        "steps": STEPS,
        "batch_size": BATCH,
        "optimizer": {"learning_rate": 1e-4},
        "cluster": {"device": "cpu", "devices_per_node": task.processes},
        "strategy": {"precision": task.precision, "compile": compiled},
        "profile": {"steps": [profiled] if profiled else [], "memory": False},
    }
    if task.lora:
        recipe["adapter"] = {"rank": LORA["r"], "alpha": float(str(LORA["lora_alpha"]))}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return [sys.executable, "-m", "shardwise", "train", str(path), "--out", str(folder / "run")]


def measured(command: Sequence[str], steps: Path, processes: int) -> dict[str, Any]:
    """Runs a contender and reads its steps and its memory. ``steps`` is the file that it appends them to."""
    threads = str(max(1, usable_cores() // processes))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "0",
    }
    began, first, peak = time.perf_counter(), None, 0
    with tempfile.TemporaryFile("w+") as said:
        running = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
        while running.poll() is None and time.perf_counter() - began < LIMIT:
            peak = max([peak, *map(resident, descendants(running.pid))])
            if first is None and steps.exists() and steps.stat().st_size:
                first = time.perf_counter() - began
            time.sleep(0.02)
        if running.poll() is None:
            running.kill()
        said.seek(0)
        last = said.read().strip().splitlines()[-1:]
    if running.wait() != 0 or first is None:
        return {"failed": (last or ["no output"])[0][:160]}
    seconds = [json.loads(line)["seconds"] for line in steps.read_text(encoding="utf-8").splitlines()]
    step = statistics.median(seconds[WARM_UP:])
    return {"tokens_per_second": BATCH * LENGTH / step, "peak_bytes": peak, "first_step_seconds": first}


def descendants(pid: int) -> Iterator[int]:
    """A process and all that it started."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return
    for child in children:
        yield from descendants(int(child))


def resident(pid: int) -> int:
    """The largest resident set of a process so far, in bytes; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def one(contender: str, task: Task, given: Inputs) -> dict[str, Any]:
    """One contender, once."""
    module = "peft" if task.lora and contender not in OWN else MODULES.get(contender, "torch")
    if importlib.util.find_spec(module) is None:
        return {"failed": f"{module} is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        if contender in OWN:
            command = own_command(OWN[contender], task, given, Path(folder))
            return measured(command, Path(folder) / "run" / "metrics.jsonl", task.processes)
        command = peer_command(contender, task, given, Path(folder))
        return measured(command, Path(folder) / "steps.jsonl", task.processes)


def profiled(contender: str, task: Task, given: Inputs) -> dict[str, float] | None:
    """Seconds of one step by kind of work; None where the contender does not run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if contender in OWN:
            command = own_command(OWN[contender], task, given, folder, PROFILED_STEP)
            steps = folder / "run" / "metrics.jsonl"
            trace = folder / "run" / "profile" / f"step-{PROFILED_STEP}" / "rank-0.trace.json.gz"
        else:
            command = peer_command(contender, task, given, folder, PROFILED_STEP)
            steps, trace = folder / "steps.jsonl", folder / TRACE
        return None if "failed" in measured(command, steps, task.processes) else read(trace)


def profiles(given: Inputs) -> Iterator[dict[str, Any]]:
    """One step of each task and of the contenders that are profiled."""
    for task in TASKS:
        for contender in (each for each in contenders(task) if each in PROFILED):
            if (seconds := profiled(contender, task, given)) is not None:
                print("profile", task.name, contender, seconds, file=sys.stderr, flush=True)
                yield {"task": task.name, "contender": contender, "seconds": seconds}


def versions() -> dict[str, str]:
    """Of the peers' packages that are installed."""
    names = ("torch", "transformers", "peft", *sorted(set(MODULES.values())))
    return {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)}


def contenders(task: Task) -> list[str]:
    """All, and for an adapter those whose users train adapters with PEFT."""
    return [*OWN, *(["plain PyTorch", "HF Trainer"] if task.lora else PEERS)]


def middle(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of the rounds that ended; the reason where none did."""
    ended = [found for found in rounds if "failed" not in found]
    if not ended:
        return dict(rounds[-1])
    return {key: statistics.median(found[key] for found in ended) for key in ended[0]} | {
        "rounds": len(ended)
    }


def rows(found: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    for (task, contender), rounds in found.items():
        yield {"task": task, "contender": contender, **middle(rounds)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: every contender, and Shardwise's speed over it."""
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        some = [row for row in rows if row["task"] == task]
        best = max(row.get("tokens_per_second", 0.0) for row in some if row["contender"] not in OWN)
        lines += [f"### {task[0].upper()}{task[1:]}", ""]
        lines += [
            "| contender | tokens/s | of the best peer | peak memory | first step |",
            "|---|---:|---:|---:|---:|",
        ]
        for row in some:
            if "failed" in row:
                lines.append(f"| {row['contender']} | {row['failed']} | | | |")
                continue
            speed, memory = row["tokens_per_second"], row["peak_bytes"] / MiB
            first = row["first_step_seconds"]
            lines.append(
                f"| {row['contender']} | {speed:,.0f} | {speed / best:.2f} | {memory:,.0f} MiB | {first:.1f} s |"
            )
        lines.append("")
    return "\n".join(lines).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="contenders to run, by name")
    parser.add_argument("--task", choices=[task.name for task in TASKS], help="one task alone")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        given = inputs(Path(folder))
        for number in range(options.rounds):
            for task in TASKS:
                for contender in contenders(task):
                    asked = options.task in (None, task.name) and (
                        not options.only or contender in options.only
                    )
                    before = found.setdefault((task.name, contender), []) if asked else []
                    if not asked or (number and all("failed" in each for each in before)):
                        continue
                    before.append(one(contender, task, given))
                    print(number + 1, task.name, contender, before[-1], file=sys.stderr, flush=True)
        steps = [] if options.only or options.task else list(profiles(given))
    made = list(rows(found))
    result = {
        "machine": described(),
        "versions": versions(),
        "model": CONFIG,
        "batch": [BATCH, LENGTH],
        "rounds": options.rounds,
        "rows": made,
        "table": table(made),
        "profiles": steps,
        "profile_table": profile_table(steps),
    }
    options.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    options.results.with_suffix(".png").write_bytes(png(peer_picture(made)))


if __name__ == "__main__":
    main()
