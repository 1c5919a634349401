"""What ``shardwise from`` prints: groups by weight, in 80 columns, and a recipe that marks its pins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import run
from shardwise.core.plan import Candidate, Plan
from shardwise.jobs.request import read_request
from tests.plugins.importers.foreign import convert, written

FILES = Path(__file__).parent / "files"
GROUPS = ("no equivalent: ", " mapped\n", " left out, so ", " not needed\n", " assumed; give KEY=VALUE")
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}  # fmt: skip


@pytest.mark.parametrize("name", [path.name for path in sorted(FILES.iterdir())])
def test_groups_come_in_order_and_in_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--world", "16"] if name.startswith("torchtitan") or "long" in name else []
    for more in ([], ["--all"]):
        assert run(["from", str(FILES / name), *options, *more, "--out", str(tmp_path / "r.yaml")]) == 0
        said = capsys.readouterr().out
        listed, _, rest = said.partition(f"{tmp_path / 'r.yaml'}: next")
        assert rest and max(map(len, listed.splitlines())) <= 80
        places = [said.find(group) for group in GROUPS if group in said]
        assert places == sorted(places) and len(places) >= 3
        assert listed.rstrip().splitlines()[-1].startswith("  ") and " not needed\n" in listed
        if " assumed; " in listed:
            assert " mapped" not in listed[listed.index(" assumed; ") :]


def test_every_key_is_listed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    file = FILES / "trainer_full.json"
    assert run(["from", str(file)]) == 0
    short = capsys.readouterr().out
    assert run(["from", str(file), "--all"]) == 0
    long = capsys.readouterr().out
    keys = json.loads(file.read_text(encoding="utf-8"))
    assert all(f"\n  {key}" in long for key in keys if keys[key] != {})
    assert "label_smoothing" not in short and "neftune_noise_alpha: 5.0 →" in short
    assert run(["from", str(FILES / "trainer_run_clm.json")]) == 0
    counted = capsys.readouterr().out
    assert (
        "--all lists them" in counted and "learning_rate: 0.0001 →" not in counted and "schedule 3" in counted
    )


def test_keys_that_are_not_needed_are_named_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["from", str(FILES / "torchtitan_llama3_8b.toml"), "--world", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(index for index, line in enumerate(lines) if line.endswith(" keys not needed"))
    listed, _, more = lines[at + 1].strip().partition(" and ")
    text = (FILES / "torchtitan_llama3_8b.toml").read_text(encoding="utf-8")
    assert all(f"\n{key.rpartition('.')[2]} = " in text for key in listed.split(", "))
    assert int(lines[at].split()[0]) == len(listed.split(", ")) + int(more.split()[0])


def test_pins_that_cost_time_are_marked_and_can_be_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that the output gives is read as a recipe without the pin."""
    path, out = written(tmp_path, {"ds.json": CONFIG}), tmp_path / "recipe.yaml"
    assert run(["from", str(path), "--model", "llama-3-8b", "--world", "8", "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"without its pins that cost time: shardwise plan {out} strategy.offload=null"
    (line,) = [line for line in out.read_text(encoding="utf-8").splitlines() if "offload:" in line]
    assert line.startswith("  offload: optimizer ") and line.endswith("(saves memory, costs time)")
    pinned, _ = read_request(out, [])
    free, _ = read_request(out, ["strategy.offload=null"])
    assert pinned.strategy["offload"] == "optimizer" and "offload" not in free.strategy


def test_plan_names_the_pins_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwise.jobs import planning
    from shardwise.technique import strategy_from
    from tests.harness.plans import small_plan

    asked: list[Any] = []

    def make(recipe: Any, *_: Any, **__: Any) -> Plan:
        """Without offload, the step takes 62 % of the time."""
        asked.append(recipe)
        pinned, plan = strategy_from(recipe.strategy), small_plan()
        free = Candidate(pinned.with_values(offload="none"), "free", 2**30, 0.062, "fits", "")
        return replace(
            plan, strategy=pinned, candidates=(replace(free, strategy=pinned, verdict="chosen"), free)
        )

    monkeypatch.setattr(planning, "make_plan", make)
    path = written(tmp_path, {"ds.json": CONFIG})
    assert run(["plan", str(path), "--model", "tiny", "--world", "8"]) == 0
    said = "the recipe pins strategy.offload: without it fits, −38 % step time"
    assert capsys.readouterr().out.splitlines()[3] == said
    assert run(["plan", str(path), "--model", "tiny", "--world", "8", "strategy.offload=null"]) == 0
    assert "the recipe pins" not in capsys.readouterr().out
    assert asked[0].strategy["offload"] == "optimizer" and "offload" not in asked[1].strategy


def test_json_has_every_key_and_the_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["from", str(FILES / "llamafactory_qlora.yaml"), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["format"] == "llamafactory" and "finetuning_type" in values["recognised_by"]
    assert {"no equivalent", "mapped", "not needed", "default", "assumed"} == {
        key["status"] for key in values["keys"]
    }


def test_an_assumed_length_is_at_most_the_models_context(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    config = {"model_type": "llama", "max_position_embeddings": 512}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    made = convert(tmp_path, {"a.json": {"train_micro_batch_size_per_gpu": 1}}, model=str(tmp_path / "base"))
    assert made.values["data"]["sequence_length"] == 512
