"""How published runs become recipes, how counts are paired, and the measures of docs/reference/accuracy.md."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import agreement
import calibrate
import cases
import counted
import interpolated
import nanotron
import numpy as np
import published
import pytest
import regathered
import stacks

from shardwise.core.cost import Collective, Kernel, StepCost
from shardwise.core.units import GiB
from shardwise.hardware.profiles import PROFILES

ROWS, LEFT_OUT = published.read("published_runs.csv")


def test_every_published_run_is_expressed_or_left_out_with_a_reason() -> None:
    lines = (published.DATA / "published_runs.csv").read_text(encoding="utf-8").splitlines()
    assert len(ROWS) + sum(LEFT_OUT.values()) == len(lines) - 1
    assert all(run.gpus == run.tensor * run.pipeline * run.sequence * run.data for run in ROWS)
    assert all(run.passes * run.micro_batch * run.data == run.batch for run in ROWS)


def test_korthikanti_s_175_billion_take_the_seconds_of_their_paper() -> None:
    """Table 5 of arXiv:2205.05198: 13.75 s a step with selective recomputation and 18.13 s with full."""
    some = [r for r in ROWS if r.source.startswith("Korthikanti") and r.name == "GPT 175B"]
    seconds = {str(run.settings["activation_checkpointing"]): run.seconds for run in some}
    assert seconds == {"none": pytest.approx(13.75, rel=0.01), "full": pytest.approx(18.13, rel=0.01)}


def test_two_sizes_in_one_count_and_one_in_the_other_are_paired_by_size() -> None:
    small, large = (Kernel("forward", "aten::mm", "bf16", calls, 10 * calls, 8) for calls in (2, 4))
    both = replace(small, calls=6, flops=30)
    line = interpolated.between(StepCost((small, large), ()), StepCost((both,), ()), 1.0)
    assert sum(k.calls for k in line.kernels) == 6
    assert sum(k.calls * k.flops for k in line.kernels) == 6 * 30
    with pytest.raises(ValueError, match="differ"):
        interpolated.between(StepCost((small,), ()), StepCost((both,), ()), 1.0)


def case(seconds: float, **changes: object) -> cases.Case:
    run = replace(ROWS[0], seconds=seconds, **changes)  # type: ignore[arg-type]
    return cases.Case(run, None, None, None)  # type: ignore[arg-type]


def test_order_and_regret_of_a_group() -> None:
    runs = [case(second) for second in (1.0, 2.0, 3.0, 4.0, 5.0)]
    guessed = np.array([2.0, 1.0, 3.0, 4.0, 5.0])
    [group] = agreement.orders(runs, np.log(guessed / [1.0, 2.0, 3.0, 4.0, 5.0]))
    assert (group.pairs, group.right, group.regret) == (10, 9, 1.0)
    assert group.spearman == pytest.approx(1 - 6 * 2 / (5 * 24))
    assert agreement.orders(runs[:4], np.zeros(4)) == []


def test_a_factor_is_that_of_most_runs() -> None:
    errors = -np.log(np.array([1.2, 1.21, 1.22, 1.19, 1.2, 9.0, 12.0, 30.0]))
    assert agreement.factor_of(errors) == pytest.approx(1.2, rel=0.02)
    assert math.exp(-np.median(errors)) > 1.2


def test_a_run_that_its_source_shows_much_faster_is_dropped() -> None:
    assert cases.repeated([case(19.0), case(89.0), case(20.0)]) == {1}
    assert cases.repeated([case(19.0), case(89.0, micro_batch=2 * ROWS[0].micro_batch)]) == set()


def test_a_run_whose_passes_take_longer_than_those_of_larger_stages_is_stalled() -> None:
    shape = {"pipeline": 2, "micro_batch": 1, "data": 1, "batch": 8}
    quick, slow = case(9.0, **shape), case(40.0, **{**shape, "pipeline": 4})
    assert cases.stalled([quick, slow]) == {1}
    assert cases.stalled([quick, case(12.0, **{**shape, "pipeline": 4})]) == set()


def test_memory_tells_whether_gathered_inputs_were_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 ranks, each has a sixteenth of 16 GiB anyway: the other 15 are held only by a run that keeps them."""
    run = next(r for r in ROWS if r.stack == "nanotron" and (r.tensor, r.pipeline, r.gpus) == (16, 1, 512))
    each = 16 * GiB * run.passes // 64
    gathered = Collective("all_gather", "tensor", 16, 64, each // 2, each, "forward", run.passes)
    stages = counted.Stages((StepCost((), (gathered,), (), run.passes),), (0,))
    row = {"stack": "nanotron", "model": run.name, "gpus": 512, "tensor": 16, "pipeline": 1, "gib": 40.0}
    row |= {"micro_batch": run.micro_batch, "batch": run.batch, "settings": dict(run.settings)}
    monkeypatch.setattr(regathered, "RESULTS", tmp_path / "results.json")
    for published_gib, again in ((39.0, False), (33.5, False), (30.0, True), (24.0, True)):
        regathered.RESULTS.write_text(json.dumps({"rows": [{**row, "published_gib": published_gib}]}))
        found = cases.Case(replace(run, memory_gib=published_gib), stages, None, None)  # type: ignore[arg-type]
        assert [judged for _, judged in regathered.judged([found])] == [again], published_gib


def test_only_the_playbook_s_tensor_groups_with_stages_on_several_nodes_wait() -> None:
    playbook = next(
        r for r in ROWS if r.stack == "nanotron" and (r.tensor, r.pipeline, r.gpus) == (8, 2, 512)
    )
    assert nanotron.waits(playbook) == 7
    assert nanotron.waits(replace(playbook, pipeline=1)) == 0
    assert nanotron.waits(replace(playbook, stack="megatron")) == 0
    plain, own = (
        calibrate.changed(cases.Case(run, None, None, counted.cluster_for(run)), {}).device.launch  # type: ignore[arg-type]
        for run in (replace(playbook, stack="megatron"), playbook)
    )
    assert own.kernel == nanotron.LAUNCH_SECONDS > plain.kernel
    assert own.collective == pytest.approx(plain.collective + 7 * nanotron.WAIT_SECONDS)


def test_casts_to_eight_bits_are_as_each_software_makes_them() -> None:
    run = replace(ROWS[0], data=4, copies=1, micro_batch=1, batch=8)
    of_weight = Kernel("forward", f"shardwise::float8_cast{stacks.OF_WEIGHT}", "bf16", 6, 0, 400)
    other = replace(of_weight, operation="shardwise::float8_cast")
    made = {
        how: [stacks._cast(k, how, run) for k in (of_weight, other)]
        for how in ("every time", "gathered", "fused")
    }
    assert made["every time"] == [of_weight, other]
    assert made["gathered"] == [replace(of_weight, bytes=100), other]
    assert made["fused"] == [replace(of_weight, calls=3), None]


def test_profiles_have_the_constants_of_the_committed_fit() -> None:
    fit = json.loads(calibrate.RESULTS.read_text(encoding="utf-8"))["constants"]
    h100, wide, a100 = (PROFILES[name] for name in ("H100-80GB", "H100-96GB", "A100-80GB"))
    assert {
        "efficiency.matmul, H100-80GB and H200": h100.efficiency.matmul,
        "efficiency.matmul, H100-96GB": wide.efficiency.matmul,
        "efficiency.matmul, A100": a100.efficiency.matmul,
        "efficiency.attention, H100": h100.efficiency.attention,
        "efficiency.attention, A100": a100.efficiency.attention,
        "launch.kernel_seconds": h100.launch.kernel,
        "overlap.interference": h100.interference,
        "tiles.inner": h100.tiles.inner,
        calibrate.LAUNCH: nanotron.LAUNCH_SECONDS,
        calibrate.WAIT: nanotron.WAIT_SECONDS,
    } == pytest.approx(fit, rel=0.05)
