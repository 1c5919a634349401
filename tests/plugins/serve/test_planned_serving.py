"""The planned memory of serving, against what real requests take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwise.cli.main import run as run_cli
from shardwise.core.errors import ResourceError
from shardwise.core.scheme import scheme_of
from shardwise.hardware.cluster import cluster_of
from shardwise.plugins.serve.planning import plan_serving, refuse_unfit_serving, served_recipe
from shardwise.plugins.serve.requests import Request
from shardwise.plugins.serve.sampling import Sampling
from shardwise.plugins.serve.serving import load_model
from shardwise.recipe.dimensions import Dimensions
from shardwise.recipe.load import recipe_of
from shardwise.trainer.meter import MemoryMeter, return_large_frees
from tests.harness.pool import Pool
from tests.harness.quantized import write_quantized_folder
from tests.harness.tiers import quick

pytest.importorskip("transformers")

WIDE = Dimensions(3, 512, 8, 8, 1024, vocab=256, context=264)
BATCH, PROMPT, TOKENS = 4, 256, 8


def measured_rank(folder: str, small: str) -> int:
    """Peak bytes of a process that loads a model and answers requests."""
    how = Sampling(tokens=TOKENS, temperature=0.0, past_end=True)
    load_model(small, tokenizer="bytes").complete([Request("x", None, how)])
    meter = MemoryMeter(torch.device("cpu"), exact=True)
    served = load_model(folder, tokenizer="bytes")
    served.complete([Request("y" * PROMPT, None, how)] * BATCH, batch=BATCH)
    meter.sample()
    return_large_frees(False)
    return meter.peak.allocated


@pytest.mark.parametrize("scheme", [pytest.param(None, marks=pytest.mark.long), "w4a16-g128"])
def test_the_peak_is_that_of_real_requests(scheme: str | None, pool: Pool, tmp_path: Path) -> None:
    small, folder = tmp_path / "small", tmp_path / "model"
    write_quantized_folder(small, scheme_of("w8a16"))
    write_quantized_folder(folder, None if scheme is None else scheme_of(scheme), size=WIDE)
    (found,) = pool.run(1, measured_rank, str(folder), str(small))
    plan = plan_serving(*served_recipe(folder, []), context=PROMPT + TOKENS, prompt=PROMPT, batch=BATCH)
    assert found == pytest.approx(plan.peak_bytes, rel=0.05)


@pytest.mark.long
def test_the_parts_are_counted(tmp_path: Path) -> None:
    """Keys and values by their formula, packed weights by their bits, for both kinds of model."""
    write_quantized_folder(tmp_path / "model", scheme_of("w4a16-g16"), size=WIDE)
    dense, packed = 3 * (4 * 512 * 512 + 3 * 512 * 1024), 2 * 256 * 512 + 7 * 512
    plan = plan_serving(*served_recipe(tmp_path / "model", []), precision="bf16", context=64, batch=2)
    assert plan.cache == 2 * 3 * 2 * 64 * 512 * 2
    assert plan.weights == pytest.approx(dense * (4 + 32 / 16) / 8 + 2 * packed, rel=1e-3)
    values = {"layers": 3, "width": 512, "heads": 8, "kv_heads": 8, "ffn": 1024, "vocab": 256}
    recipe = recipe_of({"model": values, "data": {"sequence_length": 16}, "steps": 1, "batch_size": 1})
    native = plan_serving(recipe, cluster_of(recipe.cluster), precision="bf16", context=64, batch=2)
    assert native.cache == plan.cache
    assert native.weights == pytest.approx(2 * (dense + packed), rel=1e-3)
    # A longer prompt needs more at once; the cache depends on the context.
    short, long = (
        plan_serving(recipe, cluster_of(recipe.cluster), context=256, prompt=prompt, batch=2)
        for prompt in (4, 255)
    )
    assert short.cache == long.cache
    assert short.peak_bytes < long.peak_bytes


@pytest.mark.parametrize(
    ("batch", "room"), quick([(1, 200), (2, 200), (8, 100), (64, 0.01)], (8, 100), (64, 0.01))
)
def test_the_most_requests_that_fit_are_counted(batch: int, room: float) -> None:
    """One more does not fit, and the advice names the number; whatever number was asked for."""
    values = {"layers": 3, "width": 512, "heads": 8, "kv_heads": 8, "ffn": 1024, "vocab": 256}
    cluster = {"device": "h100", "memory_gib": 0.65 + room / 1024}
    recipe = recipe_of(
        {"model": values, "data": {"sequence_length": 16}, "steps": 1, "batch_size": 1, "cluster": cluster}
    )
    asked = {"precision": "bf16", "context": 256}
    plan = plan_serving(recipe, cluster_of(recipe.cluster), batch=batch, **asked)  # type: ignore[arg-type]
    most = plan.most_requests
    if room < 1:
        assert most == 0
        with pytest.raises(ResourceError, match="not even one request of this context fits"):
            refuse_unfit_serving(plan)
        return
    fits = [
        plan_serving(recipe, cluster_of(recipe.cluster), batch=n, **asked).fits  # type: ignore[arg-type]
        for n in (most, most + 1)
    ]
    assert most > 1 and fits == [True, False]
    if not plan.fits:
        with pytest.raises(ResourceError, match=f"--batch {most}: at most so many requests"):
            refuse_unfit_serving(plan)


@pytest.mark.long
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_quantized_folder(tmp_path / "model", scheme_of("w4a16-g16"))
    asked = ["plan", str(tmp_path / "model"), "--serve", "--context", "32", "--batch", "2"]
    assert run_cli([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    parts = ("weights", "cache", "activations", "overhead")
    assert said["peak_bytes"] == sum(said[part] for part in parts)
    assert (said["batch"], said["context"], said["prompt"], said["fits"]) == (2, 32, 31, True)
    assert run_cli(asked) == 0
    assert "key-value cache" in capsys.readouterr().out
    assert run_cli([*asked, "cluster.preset=1xH100-80GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "H100-80GB"


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (["--serve", "--context", "65"], 2, "context has 64 tokens"),
        (["--serve", "--context", "8", "--prompt", "8"], 2, "no room for an answer"),
        (["--context", "8"], 2, "--context only with --serve"),
        (["--batch", "4", "--precision", "bf16"], 2, "--batch, --precision only with --serve"),
        (
            ["--serve", "--limits", "--html", "x.html", "--for", "devices"],
            2,
            "--limits, --html, --for not with",
        ),
        (["--serve", "--within", "0", "--vs", "steps=5"], 2, "--within, --vs not with --serve"),
        (["--serve", "cluster.memory_gib=0.001"], 7, "does not fit"),
    ],
)
def test_refusals_are_one_line(
    more: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_quantized_folder(tmp_path / "model", scheme_of("w8a16"))
    assert run_cli(["plan", str(tmp_path / "model"), *more]) == code
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line
