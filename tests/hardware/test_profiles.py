"""Device profile files: reading, refusals, and that wheels contain them."""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path

import pytest

from shardwise.core.errors import RecipeError
from shardwise.hardware.measured import IN_PLACE, NEW, MeasuredSpeeds
from shardwise.hardware.measured_gpu import GpuCalibration, with_measured, write_gpu
from shardwise.hardware.profiles import (
    PROFILES,
    PROFILES_FOLDER,
    ProfileFolder,
    read_own_profile,
    read_profile,
)
from shardwise.hardware.this_machine import torch_version
from shardwise.jobs.request import read_request
from shardwise.recipe.load import dump_recipe

ROOT = Path(__file__).parents[2]
H100 = (PROFILES_FOLDER / "H100-80GB.toml").read_text(encoding="utf-8")


def test_units_of_the_keys() -> None:
    profile = PROFILES["H100-80GB"]
    assert profile.memory_bytes == int(79.10 * 2**30)
    assert profile.flops["bf16"] == 989e12
    assert profile.memory_bandwidth == 3350e9
    assert profile.host_memory_bytes == 2048 * 2**30 // 8
    assert profile.host_memory_bandwidth == 614.4e9 / 8
    assert profile.latency.hop == 6e-7
    assert profile.overhead.context_bytes == 600 * 2**20


def test_short_names_are_unique_and_name_no_device() -> None:
    listed = [short for name in PROFILES for short in read_profile(PROFILES_FOLDER / f"{name}.toml")[1]]
    assert len(listed) == len(set(listed)) == len(PROFILES.short_names())
    assert not {name.lower() for name in PROFILES} & set(listed)


def test_a_file_is_read_on_first_access(tmp_path: Path) -> None:
    (tmp_path / "Good.toml").write_text(H100)
    (tmp_path / "Bad.toml").write_text("not TOML")
    folder = ProfileFolder(tmp_path)
    assert list(folder) == ["Bad", "Good"]
    assert folder["Good"].name == "Good"
    with pytest.raises(ValueError, match=r"Bad\.toml"):
        folder["Bad"]
    with pytest.raises(KeyError):
        folder["H100-80GB"]


@pytest.mark.parametrize(
    ("line", "instead", "says"),
    [
        ("gib = 79.10", "gib = 0", r"memory\.gib must be a positive number, found 0"),
        ("gib = 79.10", "gib = inf", r"memory\.gib must be a positive number"),
        ("gib = 79.10", "gib = true", r"memory\.gib must be a positive number"),
        ("gib = 79.10", 'gib = "79"', r"memory\.gib must be a positive number"),
        ("gib = 79.10", "gb = 79.10", r"memory\.gb is unknown; expected gib"),
        ("gib = 79.10\n", "", r"memory\.gib is missing"),
        ("bf16_tera_per_s", "int8_tera_per_s", r"flops\.int8_tera_per_s is unknown"),
        ("[memory_bandwidth]", "[bandwidth]", "bandwidth is unknown"),
        ("[efficiency.link]", "[efficiency.links]", r"efficiency\.links is unknown"),
        ('kind = "cuda"', 'kind = "tpu"', "kind must be one of cuda, rocm, mps, found 'tpu'"),
        ('topology = "switch"', 'topology = "ring"', "topology must be one of switch, mesh, host"),
        ("node_devices = 8\n", "", "node_devices is missing"),
        (
            "node_devices = 8",
            "node_devices = 0",
            "node_devices must be a whole number from 1 to 1000000, found 0",
        ),
        ("node_devices = 8", "node_devices = true", "node_devices must be a whole number from 1"),
        ("node_devices = 8", f"node_devices = 1{'0' * 400}", "node_devices must be a whole number from 1"),
        (
            'topology = "switch"  # switch | mesh | host\nnode_devices = 8',
            'topology = "mesh"\nnode_devices = 1',
            "node_devices must be at least 2 in a mesh",
        ),
        ('["h100"]', '"h100"', "short_names must be a list of names, found 'h100'"),
        ("gib = 79.10", "gib = 1e300", r"memory\.gib must be at most 1e\+12, found 1e\+300"),
        ("gib = 79.10", f"gib = 1{'0' * 400}", r"memory\.gib must be at most 1e\+12"),
        ("units = 132", "units = 0.5", r"tiles\.units must be a whole number, found 0\.5"),
        ("gib = 79.10", "gib = 5e-324", r"memory\.gib must be at least 1e-12, found 5e-324"),
        ("gib = 79.10", "gib = " + "[" * 5000 + "]" * 5000, "lists or tables are nested too deep"),
        ("fraction = 0.65", "fraction = 65", r"efficiency\.matmul\.fraction must be at most 1, found 65"),
        ("fp32_tera_per_s = 67\n", "", r"flops\.fp32_tera_per_s is missing"),
        ("[efficiency.link]", "[overhead.disk]", r"overhead\.disk is unknown"),
        ("[memory]", "[[memory]]", r"memory must be a table, found \["),
        ('kind = "cuda"', "kind = cuda", r"Invalid value \(at line 3, column 8\)"),
        ('kind = "cuda"', 'like = "H10"\nkind = "cuda"', "like must be one of A100-40GB, .* found 'H10'"),
        ('kind = "cuda"', 'like = []\nkind = "cuda"', r"like must be one of A100-40GB, .* found \[\]"),
        ('source = "DGX H100: a 400 Gb/s adapter per device"\n', "", "source is missing"),
        (
            'source = "DGX H100: a 400 Gb/s adapter per device"',
            'source = " "',
            r"network_bandwidth\.source must be text",
        ),
        (
            'source = "DGX H100: a 400 Gb/s adapter per device"',
            "source = 3",
            r"network_bandwidth\.source .* found 3",
        ),
    ],
)
def test_a_malformed_file_is_refused_with_its_key(tmp_path: Path, line: str, instead: str, says: str) -> None:
    assert line in H100
    path = tmp_path / "H100-80GB.toml"
    path.write_text(H100.replace(line, instead, 1))
    with pytest.raises(ValueError, match=says) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


def test_wheels_contain_every_file_that_is_not_python() -> None:
    package = ROOT / "shardwise"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for path in package.rglob("*.*"):
        name = path.relative_to(package).as_posix()
        if path.suffix not in (".py", ".pyc"):
            assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns["shardwise"]), name


OWN = """like = "RTX4090-24GB"
node_devices = 2

[memory]
gib = 15.5
source = "nvidia-smi"

[efficiency.link]
fraction = 0.5
source = "measured"
"""
RECIPE = """model: {preset: tiny}
steps: 1
batch_size: 8
cluster:
  device: cards/my-card.toml
  devices_per_node: 8
"""


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "my-card.toml"
    path.write_text(OWN, encoding="utf-8-sig")
    assert read_own_profile(path).name == "my-card.toml"


def test_a_file_that_is_like_a_device_says_only_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "my-card.toml"
    path.write_text(OWN)
    own, base = read_own_profile(path), PROFILES["RTX4090-24GB"]
    assert (own.name, own.file, own.kind, own.node_devices) == ("my-card.toml", str(path), "cuda", 2)
    assert own.memory_bytes == int(15.5 * 2**30) and own.flops == base.flops
    assert (own.efficiency.link, own.efficiency.matmul) == (0.5, base.efficiency.matmul)
    assert own.source["flops"] == f"as on RTX4090-24GB: {base.source['flops']}"
    assert own.source["efficiency.link"] == "measured" and own.source.keys() == base.source.keys()
    assert own.reported == (), "it would take the speeds that were measured on an RTX 4090"


def test_a_recipe_names_a_file_from_its_folder_and_its_run_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "my-card.toml").write_text(OWN)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe, cluster = read_request(tmp_path / "recipe.yaml", ())
    assert cluster.name == "8xmy-card.toml" and cluster.capacity_bytes == int(15.5 * 2**30)
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run, elsewhere):
        folder.mkdir()
    (run / "recipe.yaml").write_text(dump_recipe(recipe))
    monkeypatch.chdir(elsewhere)
    again, same = read_request(run / "recipe.yaml", ())
    assert again == recipe and same == cluster
    overrides = ("cluster.device=../cards/my-card.toml", "cluster.devices_per_node=2")
    _, small = read_request(tmp_path / "recipe.yaml", overrides)
    assert small.name == "2xmy-card.toml"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            OWN.replace("gib = 15.5", "gib = -1"),
            "my-card.toml: memory.gib must be a positive number, found -1 (",
        ),
        (OWN.replace("gib", "gb"), "my-card.toml: memory.gb is unknown (/"),
        (OWN.replace("gib = 15.5", "gib = "), "my-card.toml: Invalid value (at line 5, column 7) (/"),
        (OWN.replace('source = "nvidia-smi"', ""), "my-card.toml: memory.source is missing (/"),
        ("\xff", "my-card.toml: 'utf-8' codec can't decode byte 0xff"),
        (None, "no file or folder of this name is next to the recipe or in "),
    ],
)
def test_a_wrong_file_is_one_line_with_the_file_and_the_key(
    tmp_path: Path, text: str | None, says: str
) -> None:
    (tmp_path / "cards").mkdir()
    if text is not None:
        (tmp_path / "cards" / "my-card.toml").write_bytes(text.encode("latin-1"))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    with pytest.raises(RecipeError) as caught:
        read_request(tmp_path / "recipe.yaml", ())
    line = caught.value.line()
    assert says in line and "\n" not in line and "recipe.yaml:5: cluster.device)" in line


def test_two_files_of_one_name_do_not_share_measured_speeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    profiles = []
    for reported in ("rtx 5060 ti", "rx 7900 xt/7900 xtx"):
        path = tmp_path / reported[:2] / "gpu.toml"
        path.parent.mkdir()
        path.write_text(OWN.replace("\n\n", f'\nreported = ["{reported}"]\n\n', 1))
        profiles.append(read_own_profile(path))
    speeds = MeasuredSpeeds(1, 1, {}, {}, {NEW: ((1e3, 1e-6),), IN_PLACE: ((1e3, 1e-6),)})
    written = write_gpu(GpuCalibration(profiles[1].calibrated_as, torch_version(), "2026-11-28", speeds))
    assert written.parent == tmp_path / "cache"
    assert [with_measured(profile).measured is not None for profile in profiles] == [False, True]
    path.write_text(OWN)
    assert with_measured(read_own_profile(path)).measured is None, "its driver's name is not known"


def test_the_file_in_the_docs_is_a_profile(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "plan-for-your-own-card.md").read_text(encoding="utf-8")
    path = tmp_path / "my-card.toml"
    path.write_text(page.partition("```toml\n")[2].partition("```")[0])
    own = read_own_profile(path)
    assert (own.flops["bf16"], own.memory_bandwidth, own.supports("tf32")) == (88.2e12, 672e9, False)
