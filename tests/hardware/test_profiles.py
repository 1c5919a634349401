"""Device profile files: reading, refusals, and that wheels contain them."""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path

import pytest

from shardwise.hardware.profiles import PROFILES, PROFILES_FOLDER, ProfileFolder, read_profile

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
        ('kind = "cuda"', 'kind = "tpu"', "kind must be one of cuda, rocm, found 'tpu'"),
        ('topology = "switch"', 'topology = "ring"', "topology must be one of switch, mesh, host"),
        ("node_devices = 8\n", "", "node_devices is missing"),
        ('source = "DGX H100: a 400 Gb/s adapter per device"\n', "", "source is missing"),
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
