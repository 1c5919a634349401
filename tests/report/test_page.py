"""The page: what it says, that it stands alone, and that nothing from a run gets out of its place."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import shardwise.report.page_parts as parts_module
from shardwise.core.errors import ResourceError
from shardwise.core.plan import AllocationSite, Plan
from shardwise.core.run_files import PhasesRecord, RankMemory
from shardwise.core.units import GiB, MiB, format_bytes
from shardwise.report.notation import COLOURS, by_size, row_label
from shardwise.report.page import TABLE_RANKS, render_page
from shardwise.report.record import RunRecord, read_run
from shardwise.report.run import write_plan_page, write_report
from shardwise.report.template import data_block, script, without_control

MakeRun = Callable[..., Path]
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Reader(HTMLParser):
    """Collects the text that is read, and every tag that is left open or closed by another."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.faults: list[str] = []
        self.feed(page)
        self.close()
        self.faults += self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"/{tag}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).replace("\u00a0", " ").split())


@pytest.fixture
def run(plan: Plan, make_run: MakeRun) -> RunRecord:
    return read_run(make_run(plan, sample="def f():\n    return 1 < 2 & 3"))


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the drawing out, which takes nearly all of a page's time."""
    monkeypatch.setattr(parts_module, "svg", lambda figure, name: f"<svg aria-label='{name}'></svg>")


@pytest.mark.usefixtures("no_pictures")
def test_says_what_was_predicted_and_what_was_seen(run: RunRecord) -> None:
    text = Reader(render_page(run)).text
    assert (
        "example bf16 · zero3×8 · mb1×ga2 8.03B parameters · 8xH100-80GB · 30 steps · 1 skipped update"
        " · 3.93M tokens · 54.00 s in steps Measured peak" in text
    )
    assert "Measured peak 70.38 GiB of rank 7 predicted 66.86 GiB, 5.0 % too low" in text
    assert "Throughput 73.2 k tokens/s 1.79 s per step predicted 1.65 s, 8.1 % too low Held" in text
    assert "Held-out loss 1.5213 nats per token perplexity 4.58" in text
    assert "MFU 54 % predicted 58 %" in text
    assert "predicted 1.65 s measured 1.79 s −8.1 %" in text
    assert "7 66.86 GiB 70.38 GiB −5.0 % 71.79 GiB" in text
    assert "def f(): return 1 < 2 & 3" in text
    assert "model: preset: llama-3-8b steps: 30" in text
    assert "does not fit : weights alone: 90 GiB" in text
    assert run.plan.reasons[0] in text
    assert run.plan.assumptions[0] in text


@pytest.mark.usefixtures("no_pictures")
def test_phases_of_a_step_are_compared(run: RunRecord) -> None:
    assert run.outcome is not None and "forward 500.0 ms" not in Reader(render_page(run)).text
    planned = replace(run.plan, step=replace(run.plan.step, phases={"forward": 0.5, "backward": 1.0}))
    phases = PhasesRecord(4, {"forward": 0.4, "backward": 1.25})
    page = render_page(replace(run, plan=planned, outcome=replace(run.outcome, phases=phases)))
    text = Reader(page).text
    assert "phase, rank 0 predicted measured error forward 500.0 ms 400.0 ms +25.0 %" in text
    assert "backward 1.00 s 1.25 s −20.0 %" in text


@pytest.mark.usefixtures("no_pictures")
def test_every_row_of_the_ledger_is_there_in_its_colour(run: RunRecord) -> None:
    page = render_page(run)
    for row, size in by_size(run.plan.ledger):
        assert re.search(
            rf'<th scope="row">{row_label(row)}</th>\s*'
            rf'<td class="bar"><i style="[^"]*background:{COLOURS[row]}"></i></td>\s*'
            rf'<td class="n">{size / 2**30:.2f} GiB</td>',
            page,
        )


def test_stands_alone(run: RunRecord) -> None:
    page = render_page(run)
    reader = Reader(page)
    assert len(page.encode()) < 400 * 1024 and not reader.faults
    assert not reader.tags & {"iframe", "object", "embed", "form", "base", "img"}
    assert scripts(page) == [script()]
    assert not re.search(r"https?:|//|@import|\ssrc=|\son\w+=", page)
    assert set(re.findall(r"url\((.)", page)) == {"#"}
    assert set(re.findall(r'\bhref="(.)', page)) == {"#", "d"}
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    identifiers = re.findall(r'\sid="([^"]*)"', page)
    assert len(identifiers) == len(set(identifiers))


def scripts(page: str) -> list[str]:
    """The scripts that a browser would look at; blocks of JSON data are none."""
    for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL):
        json.loads(text)
    return re.findall(r"<script>(.*?)</script>", page, re.DOTALL)


@pytest.mark.usefixtures("no_pictures")
def test_the_policy_allows_the_script_of_the_page_alone(run: RunRecord) -> None:
    page = render_page(run)
    [found] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    digest = base64.b64encode(hashlib.sha256(scripts(page)[0].encode()).digest()).decode()
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'" in found
    assert found.endswith(f" script-src 'sha256-{digest}'")
    assert "innerHTML = data" not in page and "eval(" not in page


def test_nothing_from_a_run_becomes_markup(plan: Plan, make_run: MakeRun) -> None:
    bad = "</pre></style><script>alert(1)</script>\"'&lt; \x1b[0m \u202e"
    strange = replace(
        plan,
        line=bad,
        cluster=bad,
        peak=replace(plan.peak, phase=bad, where=bad),
        step=replace(plan.step, traffic_bytes={bad: 1}, split={bad: 1.0}),
        candidates=tuple(replace(c, line=bad, verdict=bad, reason=bad) for c in plan.candidates[:2]),
        reasons=(bad,),
        assumptions=(bad,),
    )
    folder = make_run(strange, name="<b>'\"&", sample=bad)
    (folder / "recipe.yaml").write_text("model: </pre><script>alert(1)</script>\n", encoding="utf-8")
    page = write_report(folder).read_text(encoding="utf-8")
    reader = Reader(page)
    assert scripts(page) == [script()]
    assert not reader.faults
    assert reader.text.count("<script>alert(1)</script>") == 16
    page += render_page(replace(read_run(folder), plan=replace(strange, line=f"{bad}\ud800")))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e\ud800-\udfff]", page)


def test_json_in_a_page_cannot_end_its_element() -> None:
    said = {"words": "</script><!-- \u2028 \ud800 &amp;"}
    block = data_block(said)
    assert json.loads(block) == said and not set("<>/") & set(block) - {">"}
    assert block.isascii()


def test_what_cannot_be_printed_is_shown_as_such() -> None:
    assert without_control("a\x00b\u202ec\td\ne \ud800 é") == "a\ufffdb\ufffdc\td\ne \ufffd é"


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_trains(plan: Plan, make_run: MakeRun) -> None:
    text = Reader(render_page(read_run(make_run(plan, finished=False)))).text
    assert "Read after step 30: the run is in progress, or ended early." in text
    assert "Predicted peak 66.86 GiB" in text
    assert "Throughput 72.8 k tokens/s" in text
    assert "Held-out loss 1.6000" in text
    assert "Predicted and measured" not in text


@pytest.mark.parametrize("finished", [True, False])
def test_the_loss_is_above_memory_and_time(finished: bool, plan: Plan, make_run: MakeRun) -> None:
    """Who follows a run looks at its loss; memory and time are planned, and change no more."""
    page = render_page(read_run(make_run(plan, finished=finished)))
    titles = re.findall(r"<h2>([^<]+)</h2>", page)
    assert titles[:3] == ["Over the steps", "Memory", "Time of a step"]


def test_sites_name_operations_without_overloads(run: RunRecord) -> None:
    """`empty_strided ×384` owned 44 % of a peak: it is how inductor allocates, and says nothing to a reader."""
    sites = [
        AllocationSite("activations", "forward", "layers.*", "aten::empty_strided", 384, 32 * GiB),
        AllocationSite("temporaries", "backward", "", "aten::sub.Tensor", 2, GiB // 2),
        AllocationSite("activations", "forward", "norm", "shardwise::rms_norm", 2, GiB // 4),
    ]
    text = Reader(render_page(replace(run, plan=replace(run.plan, sites=tuple(sites))))).text
    assert "layers.* outputs of kernels ×384 32.00 GiB" in text
    assert "outside of modules, backward sub ×2" in text and "shardwise::rms_norm ×2" in text
    assert "empty" not in text and "sub.Tensor" not in text


def test_a_run_before_its_first_step(plan: Plan, make_run: MakeRun) -> None:
    text = Reader(render_page(read_run(make_run(plan, finished=False, steps=0)))).text
    assert "before its first step has finished" in text
    assert "no step has finished yet" in text
    assert "Throughput 79.7 k tokens/s predicted" in text


@pytest.mark.usefixtures("no_pictures")
def test_throughput_is_of_all_that_is_computed_and_of_what_is_trained_on(run: RunRecord) -> None:
    """The first compares with the plan, which counts padding and prompts; neither counts the first, slower steps."""
    rates = (200.0, 200.0, 200.0, 7322.0, 7322.0)
    steps = tuple(
        replace(step, tokens=13_106, tokens_per_second=rate)
        for step, rate in zip(run.steps, rates, strict=False)
    )
    finished = Reader(render_page(replace(run, steps=steps))).text
    both = "1.79 s per step predicted 1.65 s, 8.1 % too low 7.32 k tokens/s trained on"
    assert f"Throughput 73.2 k tokens/s {both}" in finished
    training = Reader(render_page(replace(run, steps=steps, outcome=None))).text
    assert "Throughput 72.8 k tokens/s 1.80 s per step" in training and "7.32 k tokens/s trained" in training
    without = Reader(render_page(replace(run, steps=()))).text
    assert "Throughput 73.2 k tokens/s 1.79 s per step" in without
    assert "trained on Held" not in without, "the number of targets is unknown"


@pytest.mark.usefixtures("no_pictures")
def test_no_mfu_of_an_assumed_cpu(run: RunRecord) -> None:
    """The assumed peak is low on purpose: MFU would be above 100 %."""
    assumed = replace(run, plan=replace(run.plan, device="cpu"))
    assert "MFU" not in page_text(assumed)
    measured = replace(assumed.plan, assumptions=("seconds come from kernels measured on 2026-11-23",))
    assert "MFU 54 %" in page_text(replace(assumed, plan=measured))


@pytest.mark.usefixtures("no_pictures")
def test_frozen_parameters_are_told_apart(run: RunRecord) -> None:
    assert run.outcome is not None
    adapter = replace(run, outcome=replace(run.outcome, trained_parameters=41_900_000))
    assert "8.03B parameters, 41.90M trained · 8xH100" in page_text(adapter)
    everything = replace(run.outcome, trained_parameters=run.plan.parameters)
    assert "trained ·" not in page_text(replace(run, outcome=everything))


def page_text(run: RunRecord) -> str:
    return Reader(render_page(run)).text


@pytest.mark.usefixtures("no_pictures")
def test_a_run_with_a_rewind(plan: Plan, make_run: MakeRun) -> None:
    """Undone steps are in none of the figures."""
    folder = make_run(plan, steps=6, finished=False)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    again = [json.dumps(json.loads(line) | {"loss": 1.25, "rewinds": 1}) for line in lines[3:5]]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, *again, ""]), encoding="utf-8")
    text = Reader(render_page(read_run(folder))).text
    assert " · 5 steps · 1 rewind · 655.4K tokens · 9.00 s in steps " in text
    assert "Read after step 5: " in text
    assert "Training loss 1.2500" in text


@pytest.mark.usefixtures("no_pictures")
def test_a_resumed_run_is_told_as_a_whole(run: RunRecord) -> None:
    """The outcome's seconds are of the last process alone, its tokens also of the run that this one started from."""
    assert run.outcome is not None
    outcome = replace(run.outcome, seconds=6.125, tokens=2 * run.outcome.tokens)
    text = Reader(render_page(replace(run, outcome=outcome))).text
    assert " · 30 steps · 1 skipped update · 3.93M tokens · 54.00 s in steps " in text
    assert "6.12 s" not in text and "6.13 s" not in text and "7.86M" not in text
    bare = Reader(render_page(replace(run, outcome=outcome, steps=()))).text
    assert re.search(r" · 7\.86M tokens · 6\.1[23] s ", bare), "without metrics, what the report says"


@pytest.mark.usefixtures("no_pictures")
def test_a_plan_that_does_not_fit(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "short.html"
    for capacity, said in (
        (plan.peak.bytes + 200 * MiB, "It does not fit: 312.0 MiB too much with a reserve of 512.0 MiB."),
        (plan.peak.bytes - 100 * MiB, "It does not fit: 612.0 MiB too much with a reserve of 512.0 MiB."),
        (plan.capacity_bytes, ""),
    ):
        write_plan_page(replace(plan, capacity_bytes=capacity, reserve_bytes=512 * MiB), "model: {}\n", path)
        reader = Reader(path.read_text(encoding="utf-8"))
        assert not reader.faults
        assert f"Every figure is predicted. {said}" in reader.text
        assert ("It does not fit" in reader.text) == bool(said)
        assert "Throughput 79.7 k tokens/s predicted" in reader.text
        assert "What the model writes" not in reader.text and "0 tokens" not in reader.text
        assert f"Predicted peak {format_bytes(plan.peak.bytes)} of {format_bytes(capacity)}" in reader.text


@pytest.mark.usefixtures("no_pictures")
def test_a_name_that_is_markup_stays_a_name(plan: Plan, tmp_path: Path) -> None:
    name = "<script>alert(1)<b onload=x>&lt;"
    path = tmp_path / f"{name}.html"
    write_plan_page(replace(plan, line=name), f"model: {{factory: {name}}}\n", path)
    page = path.read_text(encoding="utf-8")
    reader = Reader(page)
    assert not reader.faults
    assert "b" not in reader.tags and scripts(page) == [script()]
    # In the title of the window, the headline, below it as the strategy, and in the recipe.
    assert page.count("&lt;script&gt;alert(1)&lt;b onload=x&gt;&amp;lt;") == 4
    assert "<script>alert" not in page


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_failed_or_was_not_measured(run: RunRecord) -> None:
    assert run.outcome is not None
    outcome = replace(
        run.outcome, ranks=(RankMemory(0, 5, 0),), measured_step_seconds=None, held_out_loss=float("nan")
    )
    bare = replace(run.plan, candidates=(), reasons=(), assumptions=(), timeline=())
    page = Reader(render_page(replace(run, plan=bare, steps=(), outcome=outcome)))
    assert not page.faults
    assert "the only rank" in page.text
    assert "Held-out loss nan not a number" in page.text
    assert "Candidates" not in page.text


@pytest.mark.usefixtures("no_pictures")
def test_of_many_ranks_the_table_keeps_those_that_hold_most(run: RunRecord) -> None:
    assert run.outcome is not None
    ranks = tuple(RankMemory(rank, 100, rank + 1) for rank in range(1024))
    text = Reader(render_page(replace(run, outcome=replace(run.outcome, ranks=ranks)))).text
    assert f"The {TABLE_RANKS} of 1024 ranks that held most" in text


@pytest.mark.usefixtures("no_pictures")
def test_writes_page_and_pictures_and_nothing_else(plan: Plan, make_run: MakeRun) -> None:
    folder = make_run(plan)
    before = {path.name for path in folder.iterdir()}
    for _ in range(2):
        assert write_report(folder) == folder / "report.html"
        pictures = {"loss.png", "memory.png", "mesh.png", "trace.json"}
        assert {path.name for path in folder.iterdir()} - before == {"report.html", *pictures}
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("no_pictures")
def test_a_place_that_cannot_be_written(plan: Plan, make_run: MakeRun) -> None:
    folder = make_run(plan)
    (folder / "loss.png").mkdir()
    (folder / "loss.png" / "kept").touch()
    with pytest.raises(ResourceError, match=r"cannot write loss\.png"):
        write_report(folder)
    assert not list(folder.glob(".loss*"))


def test_the_template_travels_with_the_package() -> None:
    """The wheel takes `report/*.html` and what these include."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert all(json.dumps(f"report/*.{kind}") in project for kind in ("html", "css", "js"))


@pytest.mark.usefixtures("no_pictures")
def test_interruptions_are_listed_with_their_cost(make_run: MakeRun, plan: Plan) -> None:
    folder = make_run(plan)
    lines: list[dict[str, object]] = [
        {"event": "began", "time": 10.0, "reached": 0, "last": None},
        {"event": "training", "time": 12.0, "step": 0},
        {"event": "ended", "time": 50.0, "error": "rank 1 was lost <b>"},
        {"event": "began", "time": 60.0, "reached": 7, "last": 49.0},
        {"event": "training", "time": 81.0, "step": 5},
    ]
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = render_page(read_run(folder))
    assert "Interruptions" in page and "rank 1 was lost &lt;b&gt;" in page
    assert "1 interruption" in Reader(page).text
    [row] = re.findall(r"<tr><td class=\"n\">7</td>.*?</tr>", page)
    assert re.findall(r">([0-9]+)</td>", row) == ["7", "5", "2"]
    assert "Interruptions" not in render_page(read_run(make_run(plan, name="other")))
