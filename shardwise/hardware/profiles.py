"""Accelerator profiles, read from ``hardware/profiles/*.toml``: one file per device, each figure with its source.

To add a device, copy a file and change its figures; the file's name is the device's name. Units are part of the keys.
Where several reports of a figure differ, the file has the lowest. A figure without a public source says "assumed".
Figures measured on the machine itself are better: ``shardwise doctor --calibrate``.

Refused: PyTorch's own tables. ``torch._inductor.analysis.device_info`` lists eleven times the L4's memory bandwidth and
lacks most of these devices; ``torch.utils._runtime_estimation`` assumes 150 % of peak.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.core.units import GiB, MiB
from shardwise.hardware.device import (
    RATED_DTYPES,
    DeviceProfile,
    Efficiency,
    Latency,
    Launch,
    Overhead,
    Tiles,
)
from shardwise.hardware.kinds import DEVICE_KINDS, DeviceKind

PROFILES_FOLDER = Path(__file__).with_name("profiles")

_WORD_KEYS = ("kind", "topology", "node_devices", "short_names", "reported")
_RATE_KEYS = ("memory_bandwidth", "link_bandwidth", "network_bandwidth", "host_bandwidth", "disk_bandwidth")
_EFFICIENCIES = tuple(Efficiency.__dataclass_fields__)
_OVERHEADS = ("context", "communicator", "workspace")
_LATENCIES = ("start", "hop", "network_hop")
_PROTOCOL = (
    *(f"{latency}_seconds" for latency in _LATENCIES),
    "fraction",
    "message_seconds",
    "tree_fraction",
)
_LAUNCHES = ("floor", "kernel", "collective")

_TABLES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "memory": ("memory_bytes", ("gib",)),
    "flops": ("flops", tuple(f"{dtype}_tera_per_s" for dtype in RATED_DTYPES)),
    **{rate: (rate, ("gb_per_s",)) for rate in _RATE_KEYS},
    "host_memory": ("host_memory_bytes", ("gib_per_node",)),
    "host_memory_bandwidth": ("host_memory_bandwidth", ("gb_per_s_per_node",)),
    "latency": ("latency", _PROTOCOL),
    "bulk": ("bulk", _PROTOCOL),
    "tiles": ("tiles", ("units", "inner")),
    "launch": ("launch", tuple(f"{launch}_seconds" for launch in _LAUNCHES)),
    "overlap": ("interference", ("interference",)),
    **{
        f"efficiency.{efficiency}": (f"efficiency.{efficiency}", ("fraction",))
        for efficiency in _EFFICIENCIES
    },
    **{f"overhead.{each}": (f"overhead.{each}_bytes", ("mib",)) for each in _OVERHEADS},
}
"""Tables of a file: the figure of DeviceProfile that its source is for, and the keys of its numbers."""


class ProfileFolder(Mapping[str, DeviceProfile]):
    """The profiles in a folder by device name. A file is read and checked on first access."""

    def __init__(self, folder: Path) -> None:
        self._files = {path.stem: path for path in sorted(folder.glob("*.toml"))}
        self._read: dict[str, tuple[DeviceProfile, tuple[str, ...]]] = {}

    def __getitem__(self, name: str) -> DeviceProfile:
        return self._entry(name)[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def short_names(self) -> dict[str, str]:
        """Lower-case short names and the device that each stands for. Reads every file."""
        return {short: name for name in self._files for short in self._entry(name)[1]}

    def _entry(self, name: str) -> tuple[DeviceProfile, tuple[str, ...]]:
        if name not in self._read:
            self._read[name] = read_profile(self._files[name])
        return self._read[name]


def read_profile(path: Path) -> tuple[DeviceProfile, tuple[str, ...]]:
    """The profile in a file, and the short names of the device.

    Raises:
        ValueError: for a missing, unknown or malformed key, naming the file and the key.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        words = {key: tables.pop(key) for key in _WORD_KEYS}
        numbers, sources = _flattened(tables)
        return _profile(path.stem, words, numbers, sources), tuple(map(str, words["short_names"]))
    except KeyError as missing:
        raise ValueError(f"{path}: {missing.args[0]} is missing") from None
    except (AttributeError, TypeError, ValueError) as problem:
        raise ValueError(f"{path}: {problem}") from problem


def _flattened(tables: dict[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Numbers by ``table.key``, and sources by figure. Raises KeyError or ValueError."""
    for outer in ("efficiency", "overhead"):
        tables |= {f"{outer}.{inner}": table for inner, table in tables.pop(outer).items()}
    numbers, sources = dict[str, float](), dict[str, str]()
    if unknown := tables.keys() - _TABLES.keys():
        raise ValueError(f"{min(unknown)} is unknown")
    for name, (figure, keys) in _TABLES.items():
        table = tables[name]
        sources[figure] = str(table.pop("source"))
        for key, value in table.items():
            if key not in keys:
                raise ValueError(f"{name}.{key} is unknown; expected {', '.join(keys)}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"{name}.{key} must be a positive number, found {value!r}")
            numbers[f"{name}.{key}"] = value
    return numbers, sources


def _profile(
    name: str, words: Mapping[str, Any], numbers: Mapping[str, float], sources: Mapping[str, str]
) -> DeviceProfile:
    """The profile in bytes, FLOP/s and seconds. Raises KeyError for a number that is missing."""
    for key, choices in (("kind", ("cuda", "rocm")), ("topology", ("switch", "mesh", "host"))):
        if words[key] not in choices:
            raise ValueError(f"{key} must be one of {', '.join(choices)}, found {words[key]!r}")
    flops = {dtype: numbers.get(f"flops.{dtype}_tera_per_s") for dtype in RATED_DTYPES}
    overhead = {f"{each}_bytes": int(MiB * numbers[f"overhead.{each}.mib"]) for each in _OVERHEADS}
    devices = words["node_devices"]
    rates: dict[str, Any] = {rate: 1e9 * numbers[f"{rate}.gb_per_s"] for rate in _RATE_KEYS}
    return DeviceProfile(
        name=name,
        kind=words["kind"],
        memory_bytes=int(GiB * numbers["memory.gib"]),
        flops={dtype: 1e12 * rate for dtype, rate in flops.items() if rate is not None},
        **rates,
        host_memory_bytes=int(GiB * numbers["host_memory.gib_per_node"]) // devices,
        host_memory_bandwidth=1e9 * numbers["host_memory_bandwidth.gb_per_s_per_node"] / devices,
        topology=words["topology"],
        node_devices=devices,
        latency=_protocol("latency", numbers),
        efficiency=Efficiency(
            **{efficiency: numbers[f"efficiency.{efficiency}.fraction"] for efficiency in _EFFICIENCIES}
        ),
        overhead=Overhead(**overhead),
        reported=tuple(map(str, words["reported"])),
        source=sources,
        tiles=Tiles(int(numbers["tiles.units"]), numbers["tiles.inner"]),
        launch=Launch(**{launch: numbers[f"launch.{launch}_seconds"] for launch in _LAUNCHES}),
        interference=numbers["overlap.interference"],
        bulk=_protocol("bulk", numbers),
    )


def _protocol(table: str, numbers: Mapping[str, float]) -> Latency:
    seconds = {latency: numbers[f"{table}.{latency}_seconds"] for latency in _LATENCIES}
    message, tree = numbers.get(f"{table}.message_seconds", 0.0), numbers.get(f"{table}.tree_fraction", 0.9)
    return Latency(**seconds, fraction=numbers[f"{table}.fraction"], message=message, tree=tree)


PROFILES = ProfileFolder(PROFILES_FOLDER)
"""Every known accelerator by its full name."""


def kind_named(device: str) -> DeviceKind:
    """The kind of a device by its name in a plan; of one without a profile, that of most GPUs."""
    return (
        DEVICE_KINDS[PROFILES[device].kind]
        if device in PROFILES
        else DEVICE_KINDS.get(device, DEVICE_KINDS["cuda"])
    )
