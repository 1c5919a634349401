"""The public interface for Python: what the commands do, without printing.

``train`` and ``verify`` start one process per device of this machine and return when these have ended. The output of
the processes is in their logs, and the reason of a failure is in the error. Names listed in ``shardwise.__all__`` are
public; everything else may change between versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwise.core.errors import Preempted, RankError
from shardwise.core.plan import Plan as Plan
from shardwise.export.export_run import export_run
from shardwise.hardware.cluster import Cluster as Cluster
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs import quantizing, training, verifying
from shardwise.jobs.planning import make_plan
from shardwise.launch.launcher import run_ranks
from shardwise.quantize.report import Quantized
from shardwise.quantize.settings import Settings
from shardwise.recipe.load import load_recipe
from shardwise.recipe.sections import Recipe as Recipe
from shardwise.report.run import RunRecord, read_run
from shardwise.serve.requests import Request as Request
from shardwise.serve.sampling import Sampling as Sampling
from shardwise.serve.serving import Piece as Piece
from shardwise.serve.serving import ServedModel as ServedModel
from shardwise.serve.serving import load_model as load_model
from shardwise.technique import SETTINGS
from shardwise.verify.verdict import Verdict


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        overrides: ``section.key=value``, applied in order.

    Raises:
        RecipeError: the recipe has a fault; the error names the file, the line and the key.
    """
    return load_recipe(Path(path), list(overrides), SETTINGS)


def plan(recipe: Recipe, cluster: Cluster | None = None) -> Plan:
    """Choose the strategy settings that the recipe does not pin, and predict memory and time.

    A plan that does not fit is returned too: ``plan.fits`` is False then.

    Args:
        cluster: plan for this cluster instead of the recipe's.

    Raises:
        RecipeError: the pinned strategy breaks a rule.
    """
    return make_plan(recipe, cluster or cluster_of(recipe.cluster), compare=True)


def train(recipe: Recipe, plan: Plan, out: str | Path, *, exact_memory: bool = False) -> RunRecord:
    """Train exactly ``plan`` on this machine; resumes when ``out`` holds a checkpoint.

    After an OOM the run goes on with half the micro-batch, now or when it is resumed. A finished run is left as it is.

    Args:
        out: the folder of the run.
        exact_memory: measure memory over the whole run (slower on the CPU).

    Raises:
        DataError: the data cannot be read.
        ResourceError: the plan does not fit, the folder cannot be written, or an OOM happened with a micro-batch of 1.
        CheckpointError: the folder holds a checkpoint of another run.
        RankError: the run failed or was stopped, with the reason; ``out``/logs has more.
    """
    training.train(
        recipe, cluster_of(recipe.cluster), Path(out), _run_workers, plan=plan, exact_memory=exact_memory
    )
    return read_run(Path(out))


def export(run: str | Path, out: str | Path, *, dtype: str | None = None, base: bool = False) -> Path:
    """Write the newest checkpoint of a run as a folder that transformers loads; returns that folder.

    Args:
        run: the folder of the run.
        dtype: fp32, bf16 or fp16; None takes the precision that the run computed in.
        base: write the frozen base of the run's adapters, dequantized, without them.
    """
    return export_run(Path(run), Path(out), dtype, base)[0].folder


def merge(
    base: str | Path, adapter: str | Path, out: str | Path, *, dtype: str | None = None, undo: bool = False
) -> Path:
    """Add an adapter into the weights of its base model and write the result; returns its folder.

    Args:
        base: the folder or hub id of a model.
        adapter: the folder of an adapter in PEFT's format.
        dtype: fp32, bf16 or fp16; None keeps the dtype of the base.
        undo: take the adapter out of a merged model instead.
    """
    from shardwise.export.merge import merge, unmerge  # transformers takes seconds

    if undo:
        return unmerge(str(base), Path(adapter), Path(out), dtype).folder
    return merge(str(base), Path(adapter), Path(out), dtype)[0].folder


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    scheme: str = "w4a16-g128",
    method: str = "gptq",
    rotate: str | None = None,
    calibrate: str | None = None,
    evaluate: str | None = None,
    sequences: int = 128,
    sequence_length: int | None = None,
    tokenizer: str | None = None,
    max_kl: float | None = None,
) -> Quantized:
    """Quantize the linear layers of a model in this process, block by block, and write a folder.

    A result above ``max_kl`` is returned too, but not written: its ``folder`` is None then. The same call goes on with
    the finished blocks of an interrupted one.

    Args:
        model: the folder of a run or of a model, or a hub id.
        scheme: w8a16, w8a8, w4a16-g128, w4a16-channel (2 to 8 bits), fp8 or nf4.
        method: rtn, hqq, gptq, awq or kashin.
        rotate: hadamard folds a rotation into the weights first.
        calibrate, evaluate: stdlib, files or a hub id; None for the run's data, or stdlib, and for its held-out part.
        sequences: number of calibration sequences.
        sequence_length: their tokens; None for the run's, or the context up to 2048.
        tokenizer: bytes, a folder or a hub id; None for the model's.
        max_kl: the largest KL divergence from the model, in nats per token.

    Raises:
        RecipeError: a wrong name, a folder that exists, or other settings than those of the interrupted call.
        DataError: the text cannot be read.
        CheckpointError: the model cannot be read.
        ResourceError: the pass does not fit this machine, or the folder cannot be written.
    """
    texts = (calibrate, evaluate, tokenizer, sequences, sequence_length)
    return quantizing.quantize(Settings(str(model), Path(out), scheme, method, *texts, max_kl, rotate))


def verify(recipe: Recipe, plan: Plan, *, steps: int = 20) -> Verdict:
    """Train ``plan`` and one plain process on the same data and compare them step by step.

    Args:
        steps: optimizer steps to compare.

    Raises:
        DataError: the data cannot be read.
        ResourceError: the plan does not fit.
        RankError: a process failed, with the reason; its logs are kept.
    """
    return verifying.verify(recipe, cluster_of(recipe.cluster), _run_workers, plan=plan, steps=steps)[1]


def _run_workers(processes: int, arguments: Sequence[str], logs: Path, *, saves: bool = True) -> None:
    code, line = run_ranks(processes, arguments, logs, saves=saves)
    if code == Preempted.exit_code:
        why = "it was asked to stop, and has saved: the same call goes on from there"
        raise RankError("the run stopped", where=str(logs), why=why)
    if code != 0:
        raise RankError("the run failed", where=str(logs), why=line.removeprefix("error: "))
