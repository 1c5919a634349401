"""Puts one deliberate fault into each technique and shows which test of `make test` finds it.

    python -m tests.mutation_check [WORDS]     # faults whose name has one of the words; all by default

The faults are made in a copy of the repository, one at a time. Each runs only tests of its technique, up to the first
failure. Exit code 1: no test finds a fault. test_mutation_check.py shows that the code still has every fault's line.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRAINS = "test_trains_as_one_plain_process"


@dataclass(frozen=True)
class Fault:
    """One change of one line, and the arguments of pytest that select the tests that have to find it."""

    name: str
    file: str
    line: str
    instead: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "ZeRO: the reduction divides gradients by two",
        "technique/zero.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
        ("tests/test_agreement.py", "-k", f"{TRAINS} and grouped and not lora and not dora"),
    ),
    Fault(
        "tensor parallel: no all-reduce of the gradients of a column-parallel input",
        "runtime/parallel/tp_collectives.py",
        "return exchanged(x, _as_it_is, ranks.all_reduce)",
        "return exchanged(x, _as_it_is, _as_it_is)",
        (f"tests/technique/test_tensor.py::{TRAINS}",),
    ),
    Fault(
        "ring attention: a rank takes one block too few for earlier tokens",
        "runtime/parallel/ring.py",
        "if step <= rank:  #",
        "if step < rank:  #",
        (f"tests/technique/test_sequence.py::{TRAINS}",),
    ),
    Fault(
        "pipeline: gradients of a shared embedding are not summed over the first and last stage",
        "engine/pipeline/executor.py",
        "        self._sum_tied()\n",
        "",
        (f"tests/technique/test_pipeline.py::{TRAINS}",),
    ),
    Fault(
        "fp16: gradients keep the loss scale",
        "engine/optimizer_step.py",
        ".clamp(max=1.0) / scale.value",
        ".clamp(max=1.0)",
        ("tests/test_agreement.py", "-k", f"{TRAINS} and fp16"),
    ),
    Fault(
        "fp8: a product keeps the scale of one operand",
        "runtime/float8.py",
        ".mul_(a_inverse).mul_(b_inverse).to(dtype)",
        ".mul_(a_inverse).to(dtype)",
        ("tests/technique/test_float8.py",),
    ),
    Fault(
        "activation checkpointing: a segment runs again with another dropout mask",
        "runtime/recompute/calls.py",
        "        self.restore_generators()",
        "        pass",
        ("tests/technique/test_checkpointing.py::test_gradients_are_bit_identical_with_dropout",),
    ),
    Fault(
        "activation offload: the copy back to the device is left out",
        "runtime/offload/activations.py",
        "room.copy_(self._in_host[: self.size], non_blocking=True)",
        "room.zero_()",
        ("tests/technique/test_activation_offload.py::test_gradients_are_bit_identical_with_dropout",),
    ),
    Fault(
        "optimizer offload: updated weights do not come back",
        "engine/optim/host_staging.py",
        "weight.copy_(buffer, non_blocking=True)",
        "pass",
        ("tests/technique/test_state_offload.py::test_trains_as_without_offload",),
    ),
    Fault(
        "optimizer in the backward pass: it updates at every micro-batch",
        "engine/optimizer_step.py",
        "self._last = last and not self._suspended",
        "self._last = not self._suspended",
        ("tests/engine/test_optim.py::test_optimizer_in_backward_gives_the_same_bits",),
    ),
    Fault(
        "chunked loss: the last token of every chunk is left out",
        "runtime/chunked_cross_entropy.py",
        "chunk = slice(start, start + size)",
        "chunk = slice(start, start + size - 1)",
        ("tests/runtime/test_chunked_cross_entropy.py",),
    ),
    Fault(
        "LoRA: the update is scaled twice",
        "recipe/sections.py",
        "return alpha / (math.sqrt(rank)",
        "return 2 * alpha / (math.sqrt(rank)",
        ("tests/model/test_lora.py",),
    ),
)


def main(words: list[str]) -> int:
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "copy"
        ignored = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
        found = []
        for fault in chosen:
            found.append(found_by(fault, copy))
            print(f"{fault.name}\n    -> {found[-1] or 'NOT FOUND'}", flush=True)
    return 0 if all(found) else 1


def found_by(fault: Fault, copy: Path) -> str:
    """The first test that fails with the fault; "" where none does."""
    path = copy / "shardwise" / fault.file
    sound = path.read_text(encoding="utf-8")
    path.write_text(sound.replace(fault.line, fault.instead), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", *fault.tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    path.write_text(sound, encoding="utf-8")
    failed = re.search(r"^FAILED (\S+::.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed.group(1) if failed else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
