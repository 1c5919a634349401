"""Wrong command lines and folders: one line on standard error, the contract's exit code, no trace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import run

RECIPE = "model: {preset: tiny}\nsteps: 2\nbatch_size: 2\nstrategy: {zero_stage: 3}\n"

PINNED = ["model.layers=1", "strategy.micro_batch_size=1", "strategy.loss=logits"]
PINNED += ["strategy.activation_checkpointing=none", "strategy.offload=none"]
"""Settings that leave a planner little to search."""

CASES: tuple[tuple[list[str], int, str], ...] = (
    (["pln", "{recipe}"], 2, "No such command 'pln'"),
    (["plan"], 2, "Missing argument 'RECIPE'"),
    (["plan", "{recipe}", "--jsn"], 2, "--jsn"),
    (["plan", "{recipe}", "--top", "many"], 2, "--top"),
    (["plan", "{recipe}", "--top", "0"], 2, "--top"),
    (["plan", "{folder}/absent.yaml"], 2, "absent.yaml"),
    (["plan", "{folder}"], 2, "{folder}"),
    (["plan", "{recipe}", "steps"], 2, "steps"),
    (["plan", "{recipe}", "steps=none of it"], 2, "steps"),
    (["plan", "{recipe}", "stteps=3"], 2, "did you mean"),
    (["plan", "{recipe}", "trackers=wandb"], 2, "trackers must be a list (command line: trackers)"),
    (["plan", "{recipe}", "trackers=wandb"], 2, "write [wandb]"),
    (["finetune", "m", "d", "--objective", "grpo"], 2, "see `shardwise finetune --help`"),
    (["finetune", "m", "d", "--objective", "grpo"], 2, "Invalid value for '--objective': 'grpo' is not"),
    (["finetune", "m", "d", "--objective", "dpp"], 2, "did you mean 'dpo'? see `shardwise finetune"),
    (["plan", "{recipe}", "--for", "secnds"], 2, "did you mean 'seconds'?"),
    (["launch", "slrum", "{recipe}"], 2, "did you mean 'slurm'?"),
    (["export", "{folder}", "{folder}/out", "--dtype", "bf61"], 2, "did you mean 'bf16'?"),
    (["export", "{folder}", "{folder}/out", "--gguf", "q80"], 2, "did you mean 'q8_0'?"),
    (["quantize", "{folder}", "{folder}/out", "--method", "gtpq"], 2, "did you mean 'gptq'? give one of rtn"),
    (["from", "{recipe}", "--format", "acelerate"], 2, "did you mean 'accelerate'?"),
    (["plan", "{recipe}", "schedule.name=cosin"], 2, "did you mean 'cosine'?"),
    (["plan", "{recipe}", "strategy.zero_stage=4"], 2, "strategy.zero_stage"),
    (["plan", "{recipe}", "strategy.zero=3"], 2, "strategy.zero"),
    (["plan", "{recipe}", "strategy.replicate=3", "cluster.devices_per_node=4"], 2, "strategy.replicate"),
    (["plan", "{recipe}", "strategy.tensor_parallel=2"], 2, "strategy.tensor_parallel"),
    (["plan", "{recipe}", "strategy.sequence_parallel=3"], 2, "is sequence_parallel: 1"),
    (
        ["plan", "{recipe}", "strategy.sequence_parallel=8", "cluster.devices_per_node=8"],
        2,
        "is sequence_parallel: 4",
    ),
    (["plan", "{recipe}", "strategy.precision=fp4"], 2, "is not one of fp32, bf16"),
    (["plan", "{recipe}", "cluster.preset=8xH1000"], 2, "cluster.preset"),
    (["plan", "{recipe}", "model.preset=lama-3-8b"], 2, "model.preset"),
    (["plan", "{recipe}", "model.hf={folder}/no-model"], 2, "no-model"),
    (["plan", "{recipe}", "model.factory=no_such_module:make"], 2, "no_such_module"),
    (["train", "{recipe}"], 2, "--out"),
    (["train", "{recipe}", "--out"], 2, "--out"),
    (["train", "{recipe}", "--out", ""], 2, "the name of the file or folder is empty"),
    (["plan", "{recipe}", "--html", "."], 2, ". is a folder; name a file"),
    (["plan", "{recipe}", "--html", "/"], 2, "/ is a folder; name a file"),
    (["export", "{folder}", ""], 2, "the name of the file or folder is empty"),
    (["merge", "{folder}", "{folder}", ""], 2, "the name of the file or folder is empty"),
    (["train", "{recipe}", "--out", "{recipe}"], 7, "{recipe}"),
    (["train", "{recipe}", "--out", "{folder}/r", "cluster.preset=1xH100-80GB", *PINNED], 7, "GPU"),
    (["train", "{recipe}", "--out", "{folder}/r", "data.source={folder}/nowhere.txt"], 3, "nowhere.txt"),
    (["verify", "{recipe}", "--steps", "0"], 2, "--steps"),
    (["verify", "{recipe}", "--steps", "-1"], 2, "--steps"),
    (["generate"], 2, "DIR"),
    (["generate", "{folder}/nothing"], 4, "nothing"),
    (["generate", "{folder}", "--tokens", "0"], 2, "--tokens"),
    (["generate", "{folder}", "--temperature", "-1"], 2, "--temperature"),
    (["report"], 2, "DIR"),
    (["report", "{folder}/nothing"], 3, "nothing"),
    (["report", "{folder}"], 3, "{folder}"),
    (["train", "{recipe}", "--out", "{folder}/r", "cluster.memory_gib=0.001", *PINNED], 7, "does not fit"),
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("arguments", "code", "named"), CASES, ids=lambda v: " ".join(v) if isinstance(v, list) else ""
)
def test_one_line_and_the_right_code(
    arguments: list[str], code: int, named: str, recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = {"recipe": str(recipe), "folder": str(recipe.parent)}
    assert run([argument.format(**places) for argument in arguments]) == code
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    # Long paths are shortened in the middle.
    assert named.format(**places)[-24:] in lines[0]
    assert len(lines[0]) <= 300


def test_from_the_shell_little_is_loaded(recipe: Path) -> None:
    """The whole command, started cold: exit code, one line, nothing of torch and not 600 modules in all."""
    code = (
        "import sys\n"
        "from shardwise.cli.main import run\n"
        f"code = run(['plan', {str(recipe)!r}, 'modl.layers=3'])\n"
        "assert 'torch' not in sys.modules\n"
        "assert len(sys.modules) < 600, sorted(sys.modules)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and "did you mean" in done.stderr


def test_bad_data_is_found_before_torch_is_loaded(recipe: Path) -> None:
    broken = recipe.parent / "broken.jsonl"
    broken.write_text('{"text": "fine"}\n{"text": \n', encoding="utf-8")
    code = (
        "import sys\n"
        "from shardwise.cli.main import run\n"
        f"code = run(['train', {str(recipe)!r}, 'data.source={broken}', '--out', {str(recipe.parent / 'run')!r}])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("\n") == 1 and "broken.jsonl:2" in done.stderr


def test_no_arguments_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert "Usage" in capsys.readouterr().out
