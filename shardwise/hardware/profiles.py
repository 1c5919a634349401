"""Accelerator profiles, read from ``hardware/profiles/*.toml``: one file per device, each figure with its source.

To add a device, copy a file and change its figures; the file's name is the device's name. Units are part of the keys.
Where several reports of a figure differ, the file has the lowest. A figure without a public source says "assumed".
Figures measured on the machine itself are better: ``shardwise doctor --calibrate``.

A user's own file has the same tables. With ``like = "NAME"`` it takes those that it leaves out from that device.

Refused: PyTorch's own tables. ``torch._inductor.analysis.device_info`` lists eleven times the L4's memory bandwidth and
lacks most of these devices; ``torch.utils._runtime_estimation`` assumes 150 % of peak.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.core.paths import missing
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

OWN = ".toml"
"""How the name of a user's own profile ends."""

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "kind": tuple(name for name, kind in DEVICE_KINDS.items() if not kind.is_host),
    "topology": ("switch", "mesh", "host"),
}
_NAME_LISTS = ("short_names", "reported")
_ATTENTION = "attention"
ATTENTION_BACKENDS = ("cudnn", "flash", "flash3", "flash4", "efficient")
"""What ``attention`` may list, the preferred one first. Files that do not have it mean the second and the last."""
_SMALLEST, _LARGEST = 1e-12, 1e12
_MOST_DEVICES = 10**6
"""Of a node."""
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

_OUTER = ("efficiency", "overhead")
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
    **{f"overhead.{overhead}": (f"overhead.{overhead}_bytes", ("mib",)) for overhead in _OVERHEADS},
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
        ValueError: for a file that cannot be read, or a missing, unknown or malformed key. It names file and key.
    """
    try:
        tables = _completed(tomllib.loads(path.read_text(encoding="utf-8-sig")))
        words = {key: tables.pop(key) for key in (*_CHOICES, "node_devices", *_NAME_LISTS)}
        words[_ATTENTION] = tables.pop(_ATTENTION, ["flash", "efficient"])
        _check_words(words)
        numbers, sources = _flattened(tables)
        return _profile(path.stem, words, numbers, sources), tuple(words["short_names"])
    except KeyError as key:
        raise ValueError(f"{path}: {key.args[0]} is missing") from None
    except FileNotFoundError:
        raise ValueError(f"{path}: {missing(str(path))}") from None
    except OSError as problem:
        raise ValueError(f"{path}: {problem.strerror}") from None
    except RecursionError:
        raise ValueError(f"{path}: lists or tables are nested too deep") from None
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from problem


def read_own_profile(path: Path) -> DeviceProfile:
    """The profile in a user's file; its name is that of the file. Raises ValueError as ``read_profile``."""
    return replace(read_profile(path)[0], name=path.name, file=str(path))


def _completed(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of a file, with those of the device that it is ``like``. Raises ValueError."""
    if (name := tables.pop("like", None)) is None:
        return tables
    if name not in list(PROFILES):
        raise ValueError(f"like must be one of {', '.join(PROFILES)}, found {name!r}")
    base = tomllib.loads((PROFILES_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    for outer in _OUTER:
        base[outer] = _as_on(name, base[outer]) | _table(outer, tables.pop(outer, {}))
    return _as_on(name, base) | dict.fromkeys(_NAME_LISTS, ()) | tables


def _as_on(name: str, tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of another device, which their sources say."""
    sourced = {key for key, table in tables.items() if isinstance(table, dict) and "source" in table}
    return {
        key: {**table, "source": f"as on {name}: {table['source']}"} if key in sourced else table
        for key, table in tables.items()
    }


def _check_words(words: Mapping[str, Any]) -> None:
    """Raise ValueError for a malformed word at the head of a file."""
    for key, choices in _CHOICES.items():
        if words[key] not in choices:
            raise ValueError(f"{key} must be one of {', '.join(choices)}, found {words[key]!r}")
    devices = words["node_devices"]
    if type(devices) is not int or not 1 <= devices <= _MOST_DEVICES:
        raise ValueError(
            f"node_devices must be a whole number from 1 to {_MOST_DEVICES}, found {devices!r:.40}"
        )
    if words["topology"] == "mesh" and devices == 1:
        raise ValueError("node_devices must be at least 2 in a mesh, whose links it divides, found 1")
    for key in _NAME_LISTS:
        names = words[key]
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{key} must be a list of names, found {names!r}")
    order = words[_ATTENTION]
    if not isinstance(order, list) or not all(name in ATTENTION_BACKENDS for name in order):
        raise ValueError(f"{_ATTENTION} must list some of {', '.join(ATTENTION_BACKENDS)}, found {order!r}")


def _flattened(tables: dict[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Numbers by ``table.key``, and sources by figure. Raises KeyError or ValueError."""
    for outer in _OUTER:
        tables |= {f"{outer}.{inner}": table for inner, table in _table(outer, tables.pop(outer)).items()}
    numbers, sources = dict[str, float](), dict[str, str]()
    if unknown := tables.keys() - _TABLES.keys():
        raise ValueError(f"{min(unknown)} is unknown")
    for name, (figure, keys) in _TABLES.items():
        table = _table(name, tables[name])
        if "source" not in table:
            raise KeyError(f"{name}.source")
        sources[figure] = source = table.pop("source")
        if not isinstance(source, str) or not source.strip():
            raise ValueError(
                f"{name}.source must be text that says where its figures are from, found {source!r:.40}"
            )
        for key, value in table.items():
            if key not in keys:
                raise ValueError(f"{name}.{key} is unknown; expected {', '.join(keys)}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name}.{key} must be a positive number, found {value!r}")
            if value > (most := 1 if key.endswith("fraction") else _LARGEST):
                raise ValueError(f"{name}.{key} must be at most {most:g}, found {value!r:.40}")
            if value < _SMALLEST:
                raise ValueError(f"{name}.{key} must be at least {_SMALLEST:g}, found {value!r}")
            if key == "units" and value % 1:
                raise ValueError(f"{name}.{key} must be a whole number, found {value!r}")
            numbers[f"{name}.{key}"] = value
    return numbers, sources


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a table, found {value!r}")
    return value


def _profile(
    name: str, words: Mapping[str, Any], numbers: Mapping[str, float], sources: Mapping[str, str]
) -> DeviceProfile:
    """The profile in bytes, FLOP/s and seconds. Raises KeyError for a number that is missing."""
    if "flops.fp32_tera_per_s" not in numbers:  # the dtype that the others fall back on
        raise KeyError("flops.fp32_tera_per_s")
    flops = {dtype: numbers.get(f"flops.{dtype}_tera_per_s") for dtype in RATED_DTYPES}
    overhead = {
        f"{consumer}_bytes": int(MiB * numbers[f"overhead.{consumer}.mib"]) for consumer in _OVERHEADS
    }
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
        reported=tuple(words["reported"]),
        attention=tuple(words[_ATTENTION]),
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
