"""The GPU benchmark runs on the CPU with tiny models, so that it works where there is a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu
import gpu_page
import pytest
import torch
from gpu_bench import Bench, Refused, Task, one
from gpu_checks import killed_and_resumed
from gpu_contenders import shardwise, task
from gpu_ladder import LARGE, PLAIN, SMALL, adapters, contenders
from gpu_machine import exact_attention
from gpu_store import FILE, Row, Store, is_measured, read
from gpu_techniques import large, with_and_without
from gpu_trace import breakdown, kind_of
from machine import described

from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
H100 = {
    "processor": "P",
    "cores": 4,
    "memory": "1 GiB",
    "accelerators": ["H100"],
    "python": "3.12",
    "torch": "2.11",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing by threads, and wait for them on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ran(folder: Path, *sections: str, most: int | None = None) -> list[Row]:
    """The rows of some sections, after a run with tiny models on the CPU."""
    gpu.run(Bench(CPU, tiny=True), Store(folder, described(), tiny=True), sections, most)
    return read(folder)


def checked(rows: list[Row]) -> None:
    assert not [row for row in rows if "error" in row and isinstance(row["error"], str)]
    assert all(row["tiny"] and row["took_seconds"] >= 0 for row in rows)
    assert all(row["passed"] for row in rows if row["section"] == "parity")
    assert all(row["correct"] for row in rows if "flops" in row)
    assert all(
        row["tokens_per_second"] > 0 for row in rows if row["section"] == "ladder" and is_measured(row)
    )


def test_a_row_of_each_part(tmp_path: Path) -> None:
    rows = ran(tmp_path, *gpu.SECTIONS, most=1)
    checked(rows)
    assert [row["section"] for row in rows] == list(gpu.SECTIONS)
    assert gpu_page.page(tmp_path) == "No results are committed yet."  # tiny rows are none


@pytest.mark.long  # each compiles blocks, or trains all values of all techniques
@pytest.mark.parametrize("section", [*gpu.SECTIONS])
def test_every_row(section: str, tmp_path: Path) -> None:
    rows = ran(tmp_path, section)
    checked(rows)
    names = [name for each in gpu.SECTIONS[section](Bench(CPU, tiny=True)) for name in each.names]
    assert sorted(row["row"] for row in rows) == sorted(names)
    missing = {row["row"]: row["reason"] for row in rows if "reason" in row}
    known = ("refused: ", "this kernel does not run here", "liger_kernel is not installed", "does not fit")
    assert all(reason.startswith(known) for reason in missing.values()), missing


@pytest.mark.long  # four commands; tests/cli/test_train.py resumes runs in `make test`
def test_a_killed_run_goes_on_as_if_nothing_had_happened() -> None:
    assert killed_and_resumed(Bench(CPU, tiny=True))["passed"]


def test_without_a_cuda_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", "machine"])
    with pytest.raises(SystemExit, match="error: no CUDA device was found"):
        gpu.main()


# -- rows: independent, resumable, within the time ---------------------------------------------------------


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Callable[[], Row]]], None]:
    """Makes functions, by the names of their rows, the rows of part ``some``; each is expected to take 20 seconds."""

    def of(functions: dict[str, Callable[[], Row]]) -> None:
        def tasks(bench: Bench) -> Iterator[Task]:
            return (one(name, function, 20.0) for name, function in functions.items())

        monkeypatch.setitem(gpu.SECTIONS, "some", tasks)

    return of


def names(rows: list[Row]) -> list[str]:
    return [row["row"] for row in rows]


def refused() -> Row:
    raise Refused("refused: for a reason")


def test_a_failing_row_stops_no_other_and_is_tried_again_last(part: Any, tmp_path: Path) -> None:
    part({"fails": lambda: {}["nothing"], "refused": refused, "works": lambda: {"figure": 1}})
    rows = ran(tmp_path, "some")
    assert names(rows) == ["fails", "refused", "works"]
    assert rows[0]["error"] == "KeyError: 'nothing'" and rows[1]["reason"] == "refused: for a reason"
    part({"fails": lambda: {"figure": 2}, "works": lambda: {"figure": 3}, "new": lambda: {"figure": 4}})
    assert names(ran(tmp_path, "some")[3:]) == ["new", "fails"]
    assert names(ran(tmp_path, "some")[5:]) == []


def test_rows_of_this_machine_and_day_are_left_out_unless_again(part: Any, tmp_path: Path) -> None:
    figures = iter(range(9))
    part({"a": lambda: {"figure": next(figures)}})

    def runs(day: str, machine: Row = H100, again: bool = False) -> int:
        before = len(read(tmp_path))
        gpu.run(Bench(CPU, tiny=False), Store(tmp_path, machine | {"day": day}), ["some"], again=again)
        return len(read(tmp_path)) - before

    assert [runs("2026-01-01"), runs("2026-01-01"), runs("2026-01-02")] == [1, 0, 1]
    assert [runs("2026-01-02", H100 | {"torch": "2.13"}), runs("2026-01-02", again=True)] == [1, 1]


def test_a_row_that_takes_longer_than_the_time_left_is_left_out(part: Any, tmp_path: Path) -> None:
    part({"long": lambda: {"figure": 1}, "short": lambda: {"figure": 1}})
    store = Store(tmp_path, H100 | {"day": "2026-01-01"})
    store.append("some", "long", {"figure": 0, "took_seconds": 70.0})
    store.append("some", "short", {"figure": 0, "took_seconds": 1.0})
    bench = Bench(CPU, tiny=False, end=gpu.time.monotonic() + 30)
    gpu.run(bench, store, ["some"], again=True)
    assert names(read(tmp_path)) == ["long", "short", "short"]


def test_a_row_that_ended_the_process_is_not_tried_first_again(part: Any, tmp_path: Path) -> None:
    def ends() -> Row:
        raise SystemExit

    part({"deadly": ends, "other": lambda: {"figure": 1}})
    with pytest.raises(SystemExit):
        ran(tmp_path, "some")
    part({"deadly": lambda: {"figure": 2}, "other": lambda: {"figure": 1}})
    rows = ran(tmp_path, "some")
    assert names(rows) == ["deadly", "other", "deadly"]
    assert rows[0]["error"] == "the process ended while it measured this row"


def test_of_contenders_the_others_are_measured_where_one_is_refused(tmp_path: Path) -> None:
    bench = Bench(CPU, tiny=True)
    alone = {**PLAIN, "micro_batch_size": 2}
    settings = {"refused": {"fp8_scaling": "row"}, "plain": {}}  # only precision fp8 reads it
    rows = dict(
        task(
            bench,
            [
                shardwise(bench, name, bench.values({}, 16, 2, {**alone, **more}))
                for name, more in settings.items()
            ],
            1.0,
        ).measure(list(settings))
    )
    assert rows["refused"]["reason"] == "refused: fp8_scaling: only precision fp8 reads it"
    assert rows["plain"]["tokens_per_second"] > 0


def test_predictions_are_added_to_rows_that_lack_them(tmp_path: Path) -> None:
    bench = Bench(CPU, tiny=True)
    values = bench.values({}, 16, 2, {**PLAIN, "precision": "fp32", "micro_batch_size": 2})
    store = Store(tmp_path, H100 | {"day": "2026-01-01"})
    store.append("ladder", "ours", {"own": True, "recipe": values})
    store.append("ladder", "wrong", {"own": True, "recipe": values | {"steps": 0}})
    store.append("ladder", "a peer", {"own": False, "recipe": values})
    gpu.predict(tmp_path)
    ours, wrong, peer = read(tmp_path)
    assert ours["predicted_seconds"] > 0 and ours["predicted_bytes"] > 0
    assert "steps" in wrong["prediction"] and is_measured(wrong) and "predicted_seconds" not in peer
    before = (tmp_path / FILE).read_bytes()
    gpu.predict(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize("gibibytes", [79, 139])
def test_no_row_is_refused_at_its_real_size_but_compiled_fp8(
    gibibytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "capacity", gibibytes * 2**30)
    bench = Bench(CPU, tiny=False)
    rungs = [rung for work in (SMALL, LARGE) for rung in contenders(bench, work)]
    own = [each for each in (*rungs, *adapters(bench), *with_and_without(bench), *large(bench)) if each.own]
    assert len({each.name for each in own}) == len(own) > 25
    for each in own:
        recipe = recipe_of(each.recipe, SETTINGS)
        assert ("master_weights" in recipe.strategy) == (gibibytes == 79 and each.name.startswith("7B")) or (
            "alone" in each.name
        )
        try:
            bench.pinned(recipe)
        except Refused as refusal:
            assert "fp8" in each.name and "compile" in str(refusal)


def test_the_page_and_the_makefile_name_the_parts() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"PART ?= {' '.join(gpu.SECTIONS)}\n" in makefile
    text = (ROOT / "docs/reference/gpu.md").read_text(encoding="utf-8")
    named = [word for parts in re.findall(r'PART="?([a-z ]+)', text) for word in parts.split()]
    assert list(dict.fromkeys(named)) == list(gpu.SECTIONS)
    line = [
        "make",
        "-n",
        "--no-print-directory",
        "-o",
        ".venv/.ready",
        "benchmark-gpu",
        "PART=parity memory",
        "AGAIN=1",
    ]
    said = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.endswith("benchmarks/gpu.py --minutes 9 --only parity memory --again\n")


# -- the page ---------------------------------------------------------------------------------


def test_the_page_shows_the_newest_figure_and_the_earlier_ones(tmp_path: Path) -> None:
    def line(row: str, day: str, speed: float | None, torch_version: str = "2.11", **more: Any) -> str:
        figures = {} if speed is None else {"tokens_per_second": speed, "median_seconds": 0.5}
        machine = H100 | {"torch": torch_version}
        return json.dumps({"section": "ladder", "row": row, "day": day, "machine": machine} | figures | more)

    lines = [
        line("eager", "2026-01-01", 1000.0),
        line("eager", "2026-02-01", 2000.0, "2.13", share_of_bf16_ceiling=0.5, predicted_seconds=0.4),
        line("eager", "2026-03-01", None, error="RuntimeError: out of memory"),
        line("fp8", "2026-02-01", None, "2.13", reason="refused: compile"),
        line("eager", "2026-03-01", 7.0, tiny=True),
    ]
    (tmp_path / FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert gpu_page.page(tmp_path).splitlines() == [
        "### ladder, H100",
        "",
        "4 cores of P, torch 2.13, 2026-02-01.",
        "",
        "| row | tokens/s | share of a bf16 product's speed | measured | predicted | error | allocated |"
        " error of memory | reserved | how | earlier |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| eager | 2,000 | 50 % | 0.500 s | 0.400 s | −20.0 % | – | – | – |  | 1,000 (torch 2.11, 2026-01-01) |",
        "",
        "Not measured: fp8 (refused: compile).",
    ]


def test_rows_that_are_committed_are_those_of_today() -> None:
    """A row that is renamed loses its history."""
    bench = Bench(CPU, tiny=False)
    for section in ("clock", "memory", "parity", "machine", "techniques"):
        own = {name for each in gpu.SECTIONS[section](bench) for name in each.names}
        assert {row["row"] for row in read(gpu.RESULTS) if row["section"] == section} <= own


def test_kernels_of_a_trace_by_kind() -> None:
    names = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "products",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
        "void pytorch_flash::flash_bwd_kernel<cutlass::bfloat16_t>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128": "attention",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
        "triton_poi_fused_mul_silu_3": "memory-bound kernels",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "collectives",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    }
    assert {name: kind_of(name) for name in names} == names
    kernels = [("gemm", 0, 100, 7), ("triton_a", 150, 50, 7), ("triton_a", 180, 40, 8), ("gemm", 300, 100, 7)]
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": 1000.0 * start, "dur": 1000.0 * long, "tid": stream}
        for name, start, long, stream in kernels
    ]
    events.append({"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 390e3, "dur": 20e3, "tid": 9})
    events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9e6, "tid": 1})
    found = breakdown(events, steps=2)
    assert found is not None
    # Of 410 ms none runs from 100 to 150 and from 220 to 300; all figures are of one of two steps.
    assert found["step_milliseconds"] == 205.0 and found["launches"] == 2.0
    assert found["milliseconds"] == {
        "products": 100.0, "idle": 65.0, "memory-bound kernels": 45.0, "copies": 10.0,
    }  # fmt: skip
    assert found["largest_others"] == [["idle", 65.0], ["triton_a", 45.0], ["Memcpy HtoD", 10.0]]
    assert breakdown(events[-1:], steps=2) is None


def test_exact_attention_is_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_machine._CHUNK", 8)
    torch.manual_seed(0)
    inputs = [torch.randn(20, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    others = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    gradient = torch.randn(20, 16, dtype=torch.float64)
    out = exact_attention(*inputs, gradient)
    mixed = torch.nn.functional.scaled_dot_product_attention(*(each[None] for each in others), is_causal=True)
    mixed.backward(gradient[None])
    torch.testing.assert_close(out, mixed[0].detach())
    for tensor, other in zip(inputs, others, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad)


@pytest.mark.long  # a second import of torch
def test_the_command_runs_one_part(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--only", "machine", "--rows", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert len(read(tmp_path)) == 2
