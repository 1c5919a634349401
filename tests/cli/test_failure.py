"""Foreign errors outside of training: one line, and the matching exit code."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from shardwise.checkpoint import run_folder as folders
from shardwise.cli import data, planner
from shardwise.cli.main import run
from shardwise.core.errors import ResourceError
from shardwise.core.plan import Plan
from shardwise.plugins.serve import serving
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from tests.harness.families import save_tiny


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def raises(*arguments: Any, **options: Any) -> NoReturn:
        raise error

    return raises


def line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one that was written to standard error."""
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.startswith("error: "), told
    return told.rstrip("\n")


def test_an_interruption_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(data, "read_request", raising(KeyboardInterrupt()))
    assert run(["data", "recipe.yaml"]) == 130
    assert line(capsys) == "error: interrupted"


CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB"
UNEXPECTED: list[tuple[Exception, int, str]] = [
    (
        torch.OutOfMemoryError(CUDA),
        7,
        "error: out of memory (this process): CUDA out of memory; ask for less",
    ),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 7, "error: out of memory"),
    (MemoryError(), 7, "error: out of memory (this process): ask for less"),
    (
        OSError(errno.ENOSPC, "No space left on device", "here"),
        7,
        "error: cannot write (here): No space left",
    ),
    (OSError(errno.EROFS, "Read-only file system", "here"), 7, "write elsewhere"),
    (FileNotFoundError(errno.ENOENT, "No such file", "here"), 1, "error: unexpected failure: FileNotFound"),
    (ValueError("a fault"), 1, "error: unexpected failure: ValueError: a fault; "),
]


@pytest.mark.parametrize(("error", "code", "says"), UNEXPECTED, ids=lambda value: str(value)[:20])
def test_memory_and_disks_that_run_out_are_no_faults(
    error: Exception,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a verb, and in the processes that plan for ranks which torchrun started."""
    monkeypatch.setattr(serving, "load_model", raising(error))
    assert run(["generate", "run"]) == code
    assert says in line(capsys)
    monkeypatch.setattr(planner, "read_request", raising(error))
    for step in planner.PLANNING_STEPS:
        assert planner.main(step, "recipe.yaml", "run") == code
        assert says in line(capsys)


# ---- the folder of a run ----------------------------------------------------------------------------------


def recipe(steps: int) -> Recipe:
    return recipe_of({"model": {"preset": "tiny"}, "steps": steps, "batch_size": 4})


def test_a_folder_that_cannot_be_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", raising(full))
        with pytest.raises(ResourceError, match="cannot write the run's folder"), folders.claim(tmp_path):
            pass
    with folders.claim(tmp_path):
        assert (tmp_path / folders.HOLDER).read_text(encoding="utf-8").startswith("process ")
    assert not (tmp_path / folders.HOLDER).exists()


def test_a_full_disk_leaves_recipe_and_plan_as_they_were(tmp_path: Path, plan: Plan) -> None:
    """A limit on file sizes stands in for a full disk."""
    folders.write_job(tmp_path, recipe(1), plan)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.*")}
    assert before.keys() == {folders.RECIPE, folders.PLAN}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(ResourceError, match=r"cannot write recipe\.yaml .*File too large"):
            folders.write_job(tmp_path, recipe(2), plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.*")} == before


def test_an_error_of_a_models_own_code_names_the_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT's attention multiplies fp32 by bf16. PyTorch would also log a trace of the operation."""
    pytest.importorskip("transformers")
    save_tiny("openai-gpt", tmp_path / "gpt", vocab_size=264)
    recipe = tmp_path / "recipe.yaml"
    pinned = "{precision: bf16, zero_stage: 0, micro_batch_size: 1}"
    cluster = "{device: cpu, devices_per_node: 1}"
    recipe.write_text(
        f"model: {{hf: {tmp_path / 'gpt'}}}\ndata: {{sequence_length: 16}}\nsteps: 1\nbatch_size: 1\n"
        f"cluster: {cluster}\nstrategy: {pinned}\n"
    )
    capsys.readouterr()
    assert run(["plan", str(recipe)]) == 1
    error = line(capsys)
    assert "found torch.bfloat16" in error or "BFloat16" in error
    assert "aten::bmm in transformer.h.0.attn" in error
