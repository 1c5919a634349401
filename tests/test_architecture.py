"""The taste of the code, as tests: imports go one way, files and functions stay small, torch stays out of core."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from shardwise.core.strategy import Setting
from shardwise.technique import SETTINGS
from shardwise.technique.pipeline import technique as pipeline_technique

PACKAGE = Path(__file__).parent.parent / "shardwise"
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
# Each room may import from itself and from the rooms before it.
LAYERS = (
    *("core", "hardware", "recipe", "runtime", "model", "technique", "engine", "dryrun", "data", "launch"),
    *("checkpoint", "trainer", "planner", "verifier", "exporter", "report", "worker", "jobs", "api", "cli"),
    "plugins",
)
# Siblings: neither may import the other.
FORBIDDEN = {
    *((room, "dryrun") for room in ("data", "launch", "checkpoint", "trainer", "exporter", "report")),
    *(("planner", room) for room in ("data", "launch", "checkpoint", "trainer")),
    *(("report", room) for room in LAYERS[LAYERS.index("data") : LAYERS.index("report")]),
}
# Imports against the order that are to be removed; nothing may be added here.
PENDING = {("checkpoint/checkpoint.py", "trainer")}
WITHOUT_TECHNIQUES = ("core", "hardware", "recipe", "runtime", "model", "technique", None)
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def layer_of(path: Path) -> str | None:
    """The room: a subpackage, or a module of the top level; None for the package itself and its entry point."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py") if parts[0] not in ("__init__.py", "__main__.py") else None


def imported(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    for node in nodes_of(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            yield node.module, node


def test_imports_go_one_way() -> None:
    """Lists each import from a later room, or from a sibling."""
    wrong = []
    for path in FILES:
        own = layer_of(path)
        for name, node in imported(path) if own is not None else ():
            package, room, *_ = (*name.split("."), "")
            if package != "shardwise" or not room or (path.relative_to(PACKAGE).as_posix(), room) in PENDING:
                continue
            if LAYERS.index(room) > LAYERS.index(own) or (own, room) in FORBIDDEN:
                wrong.append(f"{path}:{node.lineno} imports {name}")
    assert not wrong


def test_no_class_name_is_used_twice() -> None:
    """A reader who searches for a class finds one."""
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes_of(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path.name)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_imports_have_no_circle() -> None:
    """Between modules, also within one room; an import inside a function counts."""
    modules = {_module(path): path for path in FILES}
    graph = {module: _imported_modules(path) & modules.keys() - {module} for module, path in modules.items()}
    while leaves := [module for module, targets in graph.items() if not targets & graph.keys()]:
        for leaf in leaves:
            del graph[leaf]
    assert not graph, f"modules in a circle, or above one: {sorted(graph)}"


def _module(path: Path) -> str:
    parts = ("shardwise", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(part for part in parts if part != "__init__")


def _imported_modules(path: Path) -> set[str]:
    found = {name for name, _ in imported(path)}
    for name, node in imported(path):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{name}.{alias.name}" for alias in node.names}
    return found


def test_models_know_no_ranks() -> None:
    """Process groups, meshes and DTensors belong to runtime/ and the rooms after it."""
    for path in FILES:
        if layer_of(path) == "model":
            for name, node in imported(path):
                assert not name.startswith("torch.distributed"), f"{path}:{node.lineno} imports {name}"


def test_files_and_functions_are_small_and_annotated() -> None:
    """Lists long files, files without a design note, long functions, and functions without a return type."""
    wrong = []
    for path in FILES:
        text, tree = path.read_text(encoding="utf-8"), tree_of(path)
        has_note = ast.get_docstring(tree) or (path.name == "__init__.py" and not text)
        if len(text.splitlines()) > LONGEST_FILE or not has_note:
            wrong.append(str(path))
        for node in nodes_of(tree):
            if isinstance(node, ast.FunctionDef):
                long = (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
                wrong += [f"{path}:{node.lineno} {node.name}"] if long or node.returns is None else []
    assert not wrong


def test_nothing_outside_tests_imports_them() -> None:
    """Also not the benchmarks, nor the generator of pages."""
    root = PACKAGE.parent
    outside = [*FILES, *(root / "benchmarks").glob("*.py"), *(root / "docs").glob("*.py")]
    assert not [path for path in outside for name, _ in imported(path) if name.split(".")[0] == "tests"]


def test_technique_names_stay_in_their_files() -> None:
    """The trainer and the planner know techniques only through their interface; a technique may have several rooms."""
    allowed = {f"shardwise.technique{module}" for module in ("", ".base", ".place", ".site")}
    for path in FILES:
        if layer_of(path) in WITHOUT_TECHNIQUES:
            continue
        for name, _ in imported(path):
            own = any(name.startswith(f"shardwise.technique.{room}.") for room in path.parts)
            assert not name.startswith("shardwise.technique") or name in allowed or own, (
                f"{path} imports {name}"
            )


def test_settings_of_pipelines_stay_in_their_room() -> None:
    """Other files ask the strategy's technique, never its settings: neither by name nor by their keys as strings."""
    settings = {
        name: value.key
        for name, value in vars(pipeline_technique).items()
        if name.startswith("PIPELINE_") and isinstance(value, Setting)
    }
    keys = set(settings.values())
    assert "pipeline_parallel" in keys
    order = PACKAGE / "technique" / "__init__.py"  # it lists the techniques
    for path in FILES:
        if path.is_relative_to(PACKAGE / "technique" / "pipeline"):
            continue
        tree = tree_of(path)
        read = {(name, line) for name, line in _read_by_name(tree) if name in keys}
        if path != order:
            read |= {(name, node.lineno) for name, node in _imported_names(tree) if name in settings}
        assert not read, f"{path.relative_to(PACKAGE)} reads settings of pipelines: {sorted(read)}"


def _read_by_name(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that are read as attributes, as keys in brackets, or as first strings of ``get`` and ``getattr``."""
    for node in nodes_of(tree):
        match node:
            case ast.Attribute(attr=name):
                yield name, node.lineno
            case ast.Subscript(slice=ast.Constant(value=str(name))):
                yield name, node.lineno
            case ast.Call(func=ast.Attribute(attr="get" | "pop"), args=[ast.Constant(value=str(name)), *_]):
                yield name, node.lineno
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                yield name, node.lineno


def _imported_names(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((alias.name, node) for alias in node.names)


def test_no_dumping_grounds() -> None:
    assert not [path for path in FILES if path.stem in ("utils", "helpers", "misc", "common_utils")]


def test_nothing_unpickles_or_evaluates() -> None:
    """One file writes pickles, for PyTorch's memory viewer."""
    banned = {"pickle", "marshal", "shelve"}
    writer = (PACKAGE / "core" / "memory_snapshot.py").read_text(encoding="utf-8")
    assert set(re.findall(r"pickle\.(\w+)", writer)) == {"dumps"}
    for path in FILES:
        for name, node in imported(path):
            writes = path == PACKAGE / "core" / "memory_snapshot.py"
            assert name.split(".")[0] not in banned or writes, f"{path}:{node.lineno}"
        for node in nodes_of(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{path}:{node.lineno}"


def test_recipes_are_checked_without_torch() -> None:
    """Reading and checking a recipe, its cluster and the rules must not load torch (it takes seconds)."""
    code = (
        "import sys; import shardwise.cli.main; from shardwise.jobs.request import read_request;"
        " from pathlib import Path; read_request(Path('recipes/quickstart.yaml'), []);"
        " assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_every_key_is_one_settings() -> None:
    """Of two settings of one key, a recipe would be read by the one and a technique by the other."""
    keys = [setting.key for setting in SETTINGS]
    assert len(keys) == len(set(keys))


TORCH_PRIVATE = set((PACKAGE / "runtime").glob("torch_private*.py"))
OTHERS_PRIVATE = {
    "_parameters": "torch.nn.Module's own dictionaries: torch's documentation of modules names them",
    "_buffers": "as _parameters",
    "_modules": "as _parameters",
    "_reset_parameters": "torch.nn.Transformer's counterpart of the public reset_parameters",
    "_exit": "os",
    "_fingerprint": "datasets: what a data set holds",
    "_init_weights": "transformers: documented for authors of models",
    "_apply_gate": "transformers: the activation of an experts module",
    "_is_expert_parallel": "transformers: an experts module that holds some of the experts",
    "_is_hf_initialized": "transformers: documented for authors of models",
    "_no_split_modules": "transformers: the blocks of a model",
    "_keep_in_fp32_modules_strict": "transformers: tensors that it never loads in 16 bits",
    "_attn_implementation": "transformers: which attention a model calls",
    "_supports_attention_backend": "transformers: whether a model calls the attention that it is told to",
    "_ignore_bidirectional_mask_sdpa": "transformers: leaves out a mask without padding, for which it reads values",
}
"""Private attributes that are not PyTorch's, or that it documents, with the library and the reason."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_attributes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Private attributes of anything but ``self`` and ``cls``, also those that are named by a string."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = node.func.id in ("getattr", "setattr", "hasattr")
            if named and isinstance(name := node.args[1], ast.Constant) and is_private(str(name.value)):
                yield str(name.value), node.lineno


def private_imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Imports from PyTorch by a private name, or from a private module."""
    for node in nodes_of(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "torch" and any(is_private(part) for part in name.split(".")):
                yield name, node.lineno


def test_private_names_of_torch_are_in_two_files() -> None:
    """A private attribute is allowed when the package itself defines it and those files do not read it."""
    trees = {path: tree_of(path) for path in FILES}
    of_torch = {name for path in TORCH_PRIVATE for name, _ in private_attributes(trees[path])}
    own: set[str] = set()
    for node in (node for tree in trees.values() for node in nodes_of(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path, tree in trees.items()
        if path not in TORCH_PRIVATE
        for name, line in (*private_imports(tree), *private_attributes(tree))
        if name in of_torch or (name not in own and name not in OTHERS_PRIVATE)
    ]
    assert not found, "move these into runtime/torch_private.py"


def test_every_private_name_is_used() -> None:
    """An entry of those files that nothing reads leaves."""
    tree = ast.Module([n for p in TORCH_PRIVATE for n in tree_of(p).body], [])
    entries = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            entries.add(node.target.id)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            entries |= {
                str(element.value) for element in node.value.elts if isinstance(element, ast.Constant)
            }
    used = {
        alias.name
        for path in FILES
        for node in nodes_of(tree_of(path))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("shardwise.runtime.torch_private")
        for alias in node.names
    }
    within = {
        node.id for node in nodes_of(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    assert not sorted(entries - used - within - {"CHECKED"})
