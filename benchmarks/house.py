"""Size and structure of the package at one or more git revisions: ``python benchmarks/house.py REVISION ...``.

Counts files, lines of code (without docstrings, comments and blank lines), docstring words per line of code, the
largest room, import circles between modules, names with several definitions, comments, devices compared by name, and
the lines to read to follow one training step. Prints a Markdown table with one column per revision. ``.`` is the
working tree.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "shardwise"
_TOOL = re.compile(r"#\s*(noqa|type:|ruff|mypy)")
_KIND_BY_NAME = re.compile(r"""[=!]= "(?:cpu|cuda|mps|rocm|xpu)"|\bin \("(?:cpu|cuda)\"""")
"""A comparison of a device's kind with its name."""

STEP = {
    "trainer/loop.py": "Trainer._steps Trainer._issue",
    "trainer/issued_step.py": "IssuedStep.of StepFlags.add StepFlags.skip",
    "engine/seeding.py": "seed_step",
    "engine/schedule.py": "learning_rate multiplier",
    "engine/step.py": "step end_step _expert_load",
    "engine/forward_backward.py": "Sequential.forward_backward Sequential._share_buffers",
    "engine/run.py": "LiveModel.local_batch LiveModel.local_batches LiveModel.count_targets LiveModel.own_parameters"
    " LiveModel.ranks_of ForwardBackward._measured"
    " LiveModel.verdict_group LiveModel.random_rank LiveModel.blueprint LiveModel.layout LiveModel.loss"
    " LiveModel.count LiveModel.begin_pass OptimizerStep.or_left_out",
    "engine/targets.py": "targets_of LabelledTargets.__init__ LabelledTargets.passed",
    "engine/optimizer_step.py": "AfterBackward.before_backward AfterBackward.after_backward AfterBackward.finish"
    " AfterBackward.clip",
    "engine/loss_scale.py": "NormLimit.value NormLimit.update LossScale.update",
    "engine/optim/norm.py": "square_sum shards_of local scale_gradients",
    "engine/optim/optimizer.py": "Optimizer.step Optimizer.update Optimizer.rate_of",
    "engine/optim/chunk.py": "whole",
    "engine/optim/fused.py": "FusedAdamW.update",
}
"""The functions of the engine and of the loop that run in a step of the default strategy, by file.

Not in the list: MONITORS, the model and the data. tests/trainer/test_loop.py traces a step to check it.
"""

FEWEST_STEP_FUNCTIONS = 25
"""With fewer of them found, a revision names them otherwise."""

MONITORS = {
    "trainer/loop.py": "Trainer._monitored Trainer._agreed",
    "trainer/hooks.py": "Hooks.asked",
    "trainer/run_log.py": "RunLog.lap",
    "trainer/pass_stopwatch.py": "Stopwatch.over",
    "trainer/phase_stopwatch.py": "PhaseStopwatch.over",
    "trainer/gradient_histogram.py": "GradientWatch.over",
    "trainer/profiling.py": "Profiling.over",
    "trainer/batches.py": "StepBatches.micro_batches RankBatches.at RankBatches._on_device",
    "engine/train_state.py": "TrainState.position",
    "engine/run.py": "LiveModel.synchronous",
    "engine/phase.py": "phase micro_batch",
}
"""Other functions of the engine and of the loop in a step: they read batches, note what runs, or listen for a stop."""

STEP_66C17CB = {
    "trainer/loop.py": "Trainer._steps seed_step Trainer._asked_to_stop",
    "engine/schedule.py": "learning_rate multiplier",
    "engine/step.py": "step forward_backward",
    "engine/passes.py": "Sequential.forward_backward Passes.reads counted",
    "engine/build.py": "Run.part_of Run.own_parameters Run.stage_ranks Run.verdict_group Run.random_rank",
    "engine/update.py": "AfterBackward.before_backward AfterBackward.finish AfterBackward.clip",
    "engine/control.py": "NormLimit.value NormLimit.update LossScale.update",
    "engine/optim/norm.py": "square_sum holders local gradient global_norm scale_gradients",
    "engine/optim/optimizer.py": "Optimizer.step Optimizer.update Optimizer.rate_of Optimizer.set_learning_rate",
    "engine/optim/fused.py": "FusedAdamW.update FusedAdamW._kernel",
}
"""The same at 66c17cb, the revision that tables of growth start from."""


def sources(revision: str) -> dict[str, str]:
    """Text of every module of the package, by its path within the package."""
    if revision == ".":
        files = sorted((ROOT / PACKAGE).rglob("*.py"))
        return {
            path.relative_to(ROOT / PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in files
        }
    names = _git("ls-tree", "-r", "--name-only", revision, f"{PACKAGE}/").splitlines()
    return {
        name.removeprefix(f"{PACKAGE}/"): _git("show", f"{revision}:{name}")
        for name in names
        if name.endswith(".py")
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Every string that stands alone: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def code_lines(text: str) -> int:
    """Lines with at least one token that is neither a comment nor part of a docstring."""
    left_out = {
        line
        for string in docstrings(ast.parse(text))
        for line in range(string.lineno, (string.end_lineno or string.lineno) + 1)
    }
    ignored = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - left_out)


def functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Functions of a module and methods of its classes, by qualified name."""
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            found |= {f"{owner.name}.{n.name}": n for n in owner.body if isinstance(n, ast.FunctionDef)}
    return found


def step_lines(files: dict[str, str]) -> tuple[int, int, int]:
    """(lines of code, functions, files) of one training step."""
    lines = count = 0
    path = STEP_66C17CB if "engine/passes.py" in files else STEP
    for file, names in path.items():
        known = functions(ast.parse(files.get(file, "")))
        for name in names.split():
            if name in known:
                lines += code_lines(textwrap.dedent(_source(files[file], known[name])))
                count += 1
    return lines, count, len(path)


def names_defined_twice(trees: dict[str, ast.Module]) -> int:
    """Names that several modules define at their top level: functions, classes, constants and aliases."""
    owners: dict[str, set[str]] = {}
    for module, tree in trees.items():
        for node in tree.body:
            for name in _defined(node):
                owners.setdefault(name, set()).add(module)
    return sum(len(modules) > 1 for modules in owners.values())


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def comments(text: str) -> int:
    """Lines with a comment that is not for a tool."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and not _TOOL.match(token.string) for token in tokens)


def test_lines(revision: str) -> int:
    """Lines of all Python files of the tests."""
    if revision == ".":
        return sum(
            len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py")
        )
    names = _git("ls-tree", "-r", "--name-only", revision, "tests/").splitlines()
    return sum(len(_git("show", f"{revision}:{name}").splitlines()) for name in names if name.endswith(".py"))


def _source(text: str, node: ast.FunctionDef) -> str:
    return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]) + "\n"


def imports(files: dict[str, str]) -> dict[str, set[str]]:
    """Modules of the package that each module imports, also within functions and for type checking."""
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): text
        for name, text in files.items()
    }
    graph: dict[str, set[str]] = {}
    for module, text in modules.items():
        found = graph.setdefault(module, set())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{PACKAGE}."):
                origin = node.module.removeprefix(f"{PACKAGE}.")
                for alias in node.names:
                    inner = f"{origin}.{alias.name}"
                    found.add(inner if inner in modules else origin)
    return graph


def circles(graph: dict[str, set[str]]) -> int:
    """Number of strongly connected components with more than one module."""
    reach: dict[str, set[str]] = {}
    for module in graph:
        seen, queue = set[str](), [module]
        while queue:
            for target in graph.get(queue.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    queue.append(target)
        reach[module] = seen
    together = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in graph}
    return len([group for group in together if len(group) > 1])


def measures(files: dict[str, str]) -> dict[str, str]:
    """The rows of the table for one revision."""
    trees = {name: ast.parse(text) for name, text in files.items()}
    code = {name: code_lines(text) for name, text in files.items()}
    words = sum(len(str(s.value).split()) for tree in trees.values() for s in docstrings(tree))
    sizes = {name: len(text.splitlines()) for name, text in files.items()}
    of_all = sum(sizes.values())
    of_core = sum(size for name, size in sizes.items() if not name.startswith("plugins/"))
    rooms = Counter[str]()
    for name, lines in code.items():
        rooms[name.split("/")[0] if "/" in name else "top level"] += lines
    room, largest = rooms.most_common(1)[0]
    total = sum(code.values())
    classes = Counter(
        n.name for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)
    )
    every = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    longest = max((n.end_lineno or 0) - n.lineno + 1 for n in every)
    lines, step_functions, step_files = step_lines(files)
    return {
        "files": str(len(files)),
        "lines of the core": f"{of_core:,}",
        "lines of plugins": f"{of_all - of_core:,}",
        "lines of code": f"{total:,}",
        "docstring words per line of code": f"{words / total:.2f}",
        "rooms": str(len(rooms)),
        "largest room": f"{room}, {100 * largest / total:.0f} %",
        "longest file, longest function": f"{max(len(t.splitlines()) for t in files.values())}, {longest}",
        "import circles between modules": str(circles(imports(files))),
        "class names with several definitions": str(sum(count > 1 for count in classes.values())),
        "names defined in several modules": str(names_defined_twice(trees)),
        "comments per 100 lines of code": f"{100 * sum(map(comments, files.values())) / total:.1f}",
        "device kinds compared by name": str(
            sum(len(_KIND_BY_NAME.findall(text)) for text in files.values())
        ),
        # Between 66c17cb and the working tree, functions of the step had other names.
        "lines to follow one training step": f"{lines} in {step_functions} functions, {step_files} files"
        if step_functions >= FEWEST_STEP_FUNCTIONS
        else "–",
    }


def main() -> None:
    """Print the table."""
    revisions = sys.argv[1:] or ["."]
    columns = [
        {**measures(sources(revision)), "lines of tests": f"{test_lines(revision):,}"}
        for revision in revisions
    ]
    print("| | " + " | ".join(revisions) + " |")
    print("|---|" + "---:|" * len(revisions))
    for row in columns[0]:
        print(f"| {row} | " + " | ".join(column[row] for column in columns) + " |")


if __name__ == "__main__":
    main()
