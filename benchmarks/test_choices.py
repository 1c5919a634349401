"""The table of free choices: a runner-up is a plan that the planner may choose; published runs come from the table."""

from __future__ import annotations

from benchmarks.choices import CASES, is_allowed, published
from shardwise.core.plan import Candidate
from shardwise.technique import strategy_from


def test_only_the_same_mathematics_is_allowed() -> None:
    found = {
        kind: is_allowed(Candidate(strategy_from({"precision": kind}), kind, 1, 1.0, "fits", ""))
        for kind in ("bf16", "fp8", "fp32")
    }
    assert found == {"bf16": True, "fp8": False, "fp32": False}
    in_backward = strategy_from({"precision": "bf16", "optimizer_in_backward": True})
    assert not is_allowed(Candidate(in_backward, "", 1, 1.0, "fits", ""))


def test_the_fastest_published_runs_are_of_the_same_size_and_devices() -> None:
    """llm-foundry's 421 TFLOP/s in bf16, and Megatron's 780 in 8 bits, both on 64 H100."""
    case = next(case for case in CASES if case.name.startswith("llama-3-70b, 64xH100"))
    plain, narrow = published(case)
    assert "421 TFLOP/s" in plain and "FULL_SHARD" in plain
    assert "780 TFLOP/s" in narrow and "tensor 4, pipeline 8" in narrow
