"""Fills the generated blocks of README.md and docs/: ``make docs`` or ``PYTHONPATH=. python docs/generate.py``.

A block stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``; the prose around it is written by hand.
What a block says comes from the code: the recipe's schema, the techniques' settings, the command line, the
tables of models and devices, the results of benchmarks, and, for ``plan``, the planner itself.

Chosen: blocks inside pages that people edit, so that a table and the sentence that explains it stand together.
Refused: pages that are generated whole, whose prose would be strings in this file. ``--check`` writes nothing,
names the pages that are out of date, and leaves out ``plan`` and others that take some seconds; tests compare those.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import statistics
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import shardwise
from benchmarks import gpu_page, house
from docs import combinations as ways
from docs import picture
from shardwise.cli.main import ALL_VERBS
from shardwise.core.answer import Answer
from shardwise.core.errors import ShardwiseError
from shardwise.core.fit_advice import Remedy
from shardwise.core.ledger import Ledger
from shardwise.core.plan import Plan
from shardwise.core.strategy import Setting
from shardwise.core.units import MINUS, format_bytes, format_count, format_rate, format_seconds
from shardwise.hardware.device import RATED_DTYPES
from shardwise.hardware.profiles import PROFILES
from shardwise.plugins.checkpointing.recursive import passes
from shardwise.recipe.load import SECTIONS, recipe_of
from shardwise.recipe.objective import READ, ObjectiveSpec
from shardwise.recipe.presets import PRESETS
from shardwise.recipe.sections import AdaptiveClipSpec, MixtureSpec, Recipe, ScalingSpec
from shardwise.technique import MICRO_BATCH_SIZE, ORDER, Technique, case_of, strategy_from
from shardwise.technique.checkpointing import ACTIVATION_CHECKPOINTING
from shardwise.technique.fit_advice import REMEDIES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SHOWN_RECIPE = "recipes/llama-3-8b-8xh100.yaml"
SHOWN_WIDTH = 96
SHOWN_ROWS = 5
_BLOCK = re.compile(r"(<!-- ([a-z0-9_-]+):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Iterable[object]], align: str = "") -> str:
    """A Markdown table. ``align`` holds an ``r`` for each column that is aligned to the right."""
    sides = align.ljust(len(head), "l")
    lines = [head, ["---:" if side == "r" else "---" for side in sides]]
    lines += [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(value: object) -> str:
    """A value as YAML writes it, in code type."""
    words = {True: "true", False: "false", None: "null"}
    value = list(value) if isinstance(value, tuple) else value
    return f"`{words[value] if value is None or isinstance(value, bool) else value}`"


# -- the recipe -------------------------------------------------------------------------------------------


def kind_of(schema: Mapping[str, Any]) -> str:
    """What values a JSON schema accepts, in words."""
    if "anyOf" in schema:
        return " or ".join(kind_of(option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(code(value) for value in schema.get("enum", [schema.get("const")]))
    if "prefixItems" in schema:
        return f"a list of {len(schema['prefixItems'])}, each {kind_of(schema['prefixItems'][0])}"
    if schema.get("type") == "array" and "items" in schema:
        return f"a list of {kind_of(schema['items'])}"
    words = {"string": "text", "boolean": "true or false", "object": "mapping"}
    return " ".join([words.get(kind := schema.get("type", "object"), kind), *_limits(schema)])


def _limits(schema: Mapping[str, Any]) -> Iterator[str]:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {_short(schema[key])}" for key, sign in signs.items() if key in schema]
    if found:
        yield ", ".join(found)


def _short(number: float) -> str:
    """A limit, with powers of ten where they are shorter; 2^63 as such."""
    if number == 2**63:
        return "2^63"
    exponent = len(str(int(number))) - 1
    return f"10^{exponent}" if number == 10**exponent and exponent > 3 else f"{number:g}"


def keys_of(model: Any) -> str:
    """The keys of one section of the recipe, or those of the recipe that are no sections."""
    properties, meanings = model.model_json_schema()["properties"], model.meanings()

    def rows() -> Iterator[Sequence[object]]:
        for key, field in model.model_fields.items():
            if model is Recipe and key in (*SECTIONS, "strategy"):
                continue
            default = field.get_default(call_default_factory=True)
            given = "**required**" if field.is_required() else code(default)
            if model is ObjectiveSpec:
                given = _defaults_of_objectives(key) or given
            yield code(key), kind_of(properties[key]), given, meanings[key]

    return table(("key", "values", "default", "meaning"), rows())


def _defaults_of_objectives(key: str) -> str:
    """The defaults of a key by named objective, in the order of the first with each; "" if none reads it."""
    names: dict[str, list[str]] = {}
    for name, defaults in READ.items():
        if defaults.get(key) is not None:
            names.setdefault(code(defaults[key]), []).append(name)
    return "; ".join(f"{', '.join(objectives)}: {default}" for default, objectives in names.items())


def values_of(setting: Setting[Any]) -> str:
    """What a setting accepts, in words."""
    if setting.choices:
        forms = (f"{code(form)} ({form.limits})" for form in setting.forms)
        return ", ".join([*(code(choice) for choice in setting.choices), *forms])
    least = f" ≥ {setting.minimum}" if setting.minimum is not None else ""
    return {int: "integer", str: "text", bool: "true or false", float: "number"}[setting.kind] + least


def tried(technique: Technique, setting: Setting[Any]) -> str:
    """What the planner may choose on two nodes of eight devices, alone or with axes of two ranks."""
    recipe = recipe_of({"model": {"preset": "llama-3-8b"}, "steps": 1, "batch_size": 16})
    axes = ("pipeline_parallel", "tensor_parallel", "sequence_parallel")
    strategies = [strategy_from(values) for values in ({}, {"zero_stage": 3}, dict.fromkeys(axes, 2))]
    values = [v for s in strategies for v in technique.candidates(setting, case_of(s, 16, recipe, 8))]
    words = ", ".join(code(value) for value in dict.fromkeys(values))
    last = ", ".join(map(code, setting.last_resort))
    return "; ".join(
        filter(None, [words, f"where nothing else fits or a step gets 10 % faster: {last}" if last else ""])
    )


def settings() -> str:
    def rows() -> Iterator[Sequence[object]]:
        owned = [(setting, technique) for technique in ORDER for setting in technique.settings]
        for setting, technique in [*owned, (MICRO_BATCH_SIZE, None)]:
            owner = "the step" if technique is None else technique.name
            tries = "the rank's share of the batch in 1, 2, 4, … passes"
            if technique is not None:
                tries = tried(technique, setting)
            yield (
                code(setting.key),
                values_of(setting),
                code(setting.default),
                tries or "–",
                owner,
                setting.doc,
            )

    return table(
        ("key", "values", "default", "tried by the planner, on 2 × 8 devices", "read by", "meaning"), rows()
    )


def techniques() -> str:
    """The techniques in the order in which they are applied."""

    def rows() -> Iterator[Sequence[object]]:
        for technique in ORDER:
            file = Path(inspect.getfile(type(technique))).relative_to(ROOT)
            keys = ", ".join(code(setting.key) for setting in technique.settings)
            yield technique.name, f"[{file}](../../{file})", keys, len(technique.rules)

    return table(("technique", "file", "settings", "rules"), rows(), "lllr")


# -- the command line -------------------------------------------------------------------------------------


MANY_OPTIONS = 6
"""Beyond so many a line of the README names none."""


def parameters_of(command: Callable[..., Any]) -> Iterator[tuple[str, str, object]]:
    """(as it is written, help, default) of every argument and option of a verb."""
    hints = typing.get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        kind, info = typing.get_args(hint)
        is_option = type(info).__name__ == "OptionInfo"
        if not is_option:
            many = "list" in str(kind)
            one = f"[{info.metavar}]" if parameter.default is None else info.metavar
            yield f"[{info.metavar} …]" if many else one, info.help, None
            continue
        # In an Annotated hint typer takes the flag for the default's place.
        written = info.default if isinstance(info.default, str) else f"--{name.replace('_', '-')}"
        if kind is not bool:
            written = f"{written} {info.metavar or _placeholder(kind)}"
        yield written, info.help, parameter.default


def _placeholder(kind: Any) -> str:
    """A word for the value of an option, or all of its values, with dots where it may be repeated."""
    names = {int: "N", float: "X", str: "TEXT", Path: "DIR"}
    kinds = [kind, *typing.get_args(kind)]
    repeated = [inner for each in kinds if typing.get_origin(each) is list for inner in typing.get_args(each)]
    for each in kinds:
        if isinstance(each, type) and issubclass(each, Enum):
            return "|".join(str(member.value) for member in each)
    word = next(word for known, word in names.items() if known in [*kinds, *repeated])
    return f"{word} …" if repeated else word


def usage_of(verb: str) -> str:
    parts, module = [], ALL_VERBS[verb]
    for written, _, _ in parameters_of(module.command):
        required = written[0] not in "-[" or (verb == "train" and written.startswith("--out"))
        parts.append(written if required or written[0] == "[" else f"[{written}]")
    return " ".join(["shardwise", verb, *parts])


def short_usage(verb: str) -> str:
    """Without the options, where these are many."""
    module = ALL_VERBS[verb]
    arguments = [written for written, _, _ in parameters_of(module.command) if not written.startswith("-")]
    if len(list(parameters_of(module.command))) - len(arguments) <= MANY_OPTIONS:
        return usage_of(verb)
    return " ".join(["shardwise", verb, *arguments, "[OPTION …]"])


def verbs() -> str:
    rows = (
        (code(short_usage(verb)), str(inspect.getdoc(module.command)).splitlines()[0].rstrip("."))
        for verb, module in ALL_VERBS.items()
    )
    return table(("command", "does"), rows)


def commands() -> str:
    """A section per verb."""

    def section(verb: str, module: Any) -> str:
        def rows() -> Iterator[Sequence[object]]:
            for written, text, default in parameters_of(module.command):
                shown = "" if default is None or default is False or default == "" else code(default)
                yield code(written.strip("[]")), shown, text

        title = f"## {verb}\n\n```text\n{usage_of(verb)}\n```\n\n{inspect.getdoc(module.command)}\n\n"
        return title + table(("argument or option", "default", "meaning"), rows())

    return "\n\n".join(section(*verb) for verb in ALL_VERBS.items())


def exit_codes() -> str:
    kinds = sorted(ShardwiseError.__subclasses__(), key=lambda kind: kind.exit_code)
    told = [(kind.exit_code, str(kind.__doc__).splitlines()[0].rstrip(".")) for kind in kinds]
    return table(("code", "meaning"), iter([(0, "Done"), *told]), "r")


# -- tables of the code -----------------------------------------------------------------------------------


def ledger_rows() -> str:
    """The rows of the ledger with their meaning, from the class's docstring."""
    text = str(inspect.getdoc(Ledger)).partition("Attributes:")[2]
    found = {
        name: " ".join(words.split())
        for name, words in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.M)
    }
    return table(("row", "bytes of"), ((code(row), found[row]) for row in Ledger().as_dict()))


def models() -> str:
    sizes = ("layers", "width", "heads", "head_dim", "kv_heads", "ffn", "vocab", "context")

    def rows() -> Iterator[Sequence[object]]:
        for name, d in PRESETS.items():
            tied = "yes" if d.tied else "no"
            own = replace(d, head_dim=d.head_width)
            numbers = (f"{getattr(own, size):,}" for size in sizes)
            experts = f"{d.experts_per_token} of {d.experts}, {d.expert_width:,} wide" if d.experts else ""
            counts = format_count(d.parameters), format_count(d.active_parameters)
            yield code(name), d.family, *counts, *numbers, tied, experts

    head = ("preset", "family", "parameters", "active", *sizes, "tied", "experts")
    return table(head, rows(), "llrrrrrrrrrrll")


def devices() -> str:
    def rows() -> Iterator[Sequence[object]]:
        for name, p in PROFILES.items():
            flops = (f"{p.flops[dtype] / 1e12:g}" if dtype in p.flops else "–" for dtype in RATED_DTYPES)
            rates = (p.memory_bandwidth, p.link_bandwidth, p.network_bandwidth)
            sizes = (format_bytes(p.memory_bytes), *flops, *(format_rate(r, "B") for r in rates))
            yield code(name), p.kind, *sizes

    head = ("device", "kind", "memory", *RATED_DTYPES, "memory bandwidth", "link", "network")
    return table(head, rows(), "ll" + "r" * (len(head) - 2))


def overheads() -> str:
    def rows() -> Iterator[Sequence[object]]:
        for name, p in PROFILES.items():
            o, e = p.overhead, p.efficiency
            sizes = (o.context_bytes, o.communicator_bytes, o.workspace_bytes)
            yield code(name), *(format_bytes(size) for size in sizes), e.matmul, e.memory, e.link, e.network

    head = ("device", "context", "each communicator", "workspaces", "matmul", "memory", "link", "network")
    return table(head, rows(), "l" + "r" * (len(head) - 1))


def device_sources() -> str:
    def section(name: str) -> str:
        rows = ((code(figure), source) for figure, source in PROFILES[name].source.items())
        return f"### {name}\n\n{table(('figure', 'source'), rows)}"

    return "\n\n".join(section(name) for name in PROFILES)


def recipes() -> str:
    """Every file of recipes/ with the first sentence of its head."""

    def rows() -> Iterator[Sequence[object]]:
        for path in sorted((ROOT / "recipes").glob("*.yaml")):
            lines = path.read_text(encoding="utf-8").splitlines()
            head = " ".join(line[1:].strip() for line in lines if line.startswith("#"))
            sentence = re.split(r"(?<=[a-z0-9])[.:;](?= )", head)[0]
            yield f"[{path.name}](../../recipes/{path.name})", sentence

    return table(("recipe", "what it is"), rows())


# -- source --------------------------------------------------------------------------------------------------


def essential_lines(function: Callable[..., Any]) -> list[str]:
    """Source lines of a function without its docstring."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    body = ast.parse("\n".join(lines)).body[0]
    assert isinstance(body, ast.FunctionDef)
    first = body.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    end = first.end_lineno if documented else first.lineno - 1
    return lines[: first.lineno - 1] + lines[end or 0 :]


def essential_functions() -> dict[str, Callable[..., Any]]:
    """The functions of one training step, in order; each is a block of docs/concepts/how-one-step-runs.md."""
    from shardwise.engine.forward_backward import Sequential
    from shardwise.engine.optimizer_step import AfterBackward
    from shardwise.engine.step import step
    from shardwise.trainer.loop import Trainer

    return {
        "issue": Trainer._issue,
        "step": step,
        "forward-backward": Sequential.forward_backward,
        "finish": AfterBackward.finish,
        "clip": AfterBackward.clip,
    }


def source_of(name: str) -> str:
    return "```py\n" + "\n".join(essential_lines(essential_functions()[name])) + "\n```"


def step_length() -> str:
    """The length of the walk through one step."""
    counts = {name: len(essential_lines(function)) for name, function in essential_functions().items()}
    lines, functions, files = house.step_lines(house.sources("."))
    return (
        f"These are {len(counts)} functions and {sum(counts.values())} lines. With the functions that they call, a step"
        f" runs {functions} functions of the loop and the\nengine: {lines} lines in {files} files. `python"
        " benchmarks/house.py` counts them, and a test traces a step to check the list."
    )


# -- results ----------------------------------------------------------------------------------------------


def ledger() -> str:
    """Summaries of the committed benchmarks."""
    found = sorted(RESULTS.glob("ledger-*.json"))
    if not found:
        return "No results are committed yet; `make benchmark` measures (about 15 minutes on two cores)."
    return "\n\n".join(_summary(path) for path in found)


def guard() -> str:
    """What injected faults cost, of benchmarks/guard.py."""
    faults = json.loads((RESULTS / "guard.json").read_text(encoding="utf-8"))["faults"]

    def rows() -> Iterator[Sequence[object]]:
        for name, runs in faults.items():
            worst = max((run["loss_against_clean"] for run in runs), key=abs)
            yield (
                name,
                max(run["detected_after_steps"] for run in runs),
                max(run["rewinds"] for run in runs),
                max(run["steps_repeated"] for run in runs),
                max(run["batches_left_out"] for run in runs),
                f"{100 * worst:+.1f} %".replace("-", "−"),
            )

    head = (
        "fault",
        "steps to notice",
        "rewinds",
        "steps repeated",
        "batches left out",
        "held-out loss 50 steps later",
    )
    return table(head, rows(), "lrrrrr")


def _summary(path: Path) -> str:
    """One benchmark by number of processes."""
    results = json.loads(path.read_text(encoding="utf-8"))
    machine, runs = results["machine"], results["rows"]
    peaks = [rank["measured_peak_bytes"] for run in runs for rank in run["ranks"]]

    def rows() -> Iterator[Sequence[object]]:
        for world in sorted({run["world"] for run in runs}):
            errors = [abs(run["worst_error"]) for run in runs if run["world"] == world]
            yield world, len(errors), _percent(statistics.median(errors)), _percent(max(errors))
        yield "all", len(runs), _percent(results["median_error"]), _percent(results["worst_error"])

    where = ", ".join(machine["accelerators"]) or f"{machine['processor']}, {machine['cores']} cores"
    page = ROOT / "docs" / "reference" / f"{path.stem}.md"
    every = f"\n\nEvery run: [{page.name}](../reference/{page.name})." if page.exists() else ""
    return (
        f"{len(runs)} runs of {where}, with peaks of {format_bytes(min(peaks))} to {format_bytes(max(peaks))} a"
        f" process (torch {machine['torch']}, {machine['day']}); errors of the worst rank of each run:\n\n"
        + table(("processes", "runs", "median error", "worst error"), rows(), "lrrr")
        + every
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def measured(name: str, key: str = "table") -> str:
    """A table that a benchmark wrote with its figures."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "No results are committed yet."
    return str(json.loads(path.read_text(encoding="utf-8"))[key])


FAMILY_COLUMNS = ("logits", "all weights", "LoRA", "ZeRO 3", "tensor", "pipeline", "experts")


def families() -> str:
    """What tests/families found: a row per family, and the reasons that its cells refer to."""
    path = RESULTS / "families.json"
    if not path.exists():
        return "No results are committed yet."
    found = json.loads(path.read_text(encoding="utf-8"))
    machine, versions, rows = found["machine"], found["versions"], found["families"]
    reasons: dict[str, int] = {}

    def cell(answer: str) -> str:
        if answer in ("yes", ""):
            return answer
        number = reasons.setdefault(re.sub(r" for [\w-]+( shards|$)", r"\1", answer), len(reasons) + 1)
        return f"[no {number}](#why-not)"

    def plan(answer: Any) -> list[str]:
        if isinstance(answer, str):
            return ["", cell(answer)]
        return [format_count(answer["parameters"]), format_bytes(answer["peak_bytes"])]

    lines = [
        [code(name), *plan(row["plan"]), *(cell(row.get(column, "")) for column in FAMILY_COLUMNS)]
        for name, row in rows.items()
    ]
    counts = [sum(row.get(column) == "yes" for row in rows.values()) for column in FAMILY_COLUMNS]
    planned = sum(not isinstance(row["plan"], str) for row in rows.values())
    said = [
        f"{planned} plan in full size",
        *(f"{n} {c}" for n, c in zip(counts, FAMILY_COLUMNS, strict=True)),
    ]
    head = ("family", "parameters", "peak of a GPU", *FAMILY_COLUMNS)
    listed = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    return (
        f"{len(rows)} families on {machine['day']} (transformers {versions['transformers']}, torch"
        f" {versions['torch']}): {', '.join(said)}.\n\n{table(head, lines, 'lrr')}\n\n## Why not\n\n{listed}"
    )


def ladder() -> str:
    """The remedies as data: what each tries, in order, and what it does and costs."""

    def tried(remedy: Remedy) -> str:
        neutral = strategy_from({}).values
        tries = [
            ", ".join(code(f"{key}: {value}") for key, value in values.items() if value != neutral[key])
            for values in remedy.tries
        ]
        adapter = [code(f"adapter.{key}: {value}") for key, value in (remedy.adapter or {}).items()]
        optimizer = [code(f"optimizer.{key}: {value}") for key, value in (remedy.optimizer or {}).items()]
        return "; ".join([*adapter, *optimizer, *(found or code("zero_stage: 0") for found in tries)])

    return table(("remedy", "tried, in this order", ""), ((r.name, tried(r), r.why) for r in REMEDIES), "lll")


@cache
def answered() -> tuple[Plan, Answer]:
    """The plan that the README shows."""
    from shardwise.jobs.planning import make_plan
    from shardwise.jobs.request import read_request
    from shardwise.planner.answer import answer_of

    asked, cluster = read_request(ROOT / SHOWN_RECIPE, [])
    shown = make_plan(asked, cluster, compare=True)
    return shown, answer_of(asked, cluster, shown)


def shown_plan() -> str:
    """The output of ``shardwise plan``, as a terminal of SHOWN_WIDTH columns has it."""
    from shardwise.report.tables import plan_text

    shown, answer = answered()
    text = plan_text(shown, SHOWN_WIDTH, answer=answer, brief=True)
    return f"```console\n$ shardwise plan {SHOWN_RECIPE}\n{text}```"


def recomputation(kinds: Sequence[str] = ACTIVATION_CHECKPOINTING.examples) -> str:
    """What values of ``activation_checkpointing`` hold and cost, for the recipe that the README shows."""
    from shardwise.jobs.request import read_request
    from shardwise.model.open import blueprint_of
    from shardwise.planner.predict import predict

    asked, cluster = read_request(ROOT / SHOWN_RECIPE, [])
    blueprint = blueprint_of(asked)

    def rows() -> Iterator[Sequence[object]]:
        plain = 0
        for kind in kinds:
            pins = {**asked.strategy, "zero_stage": 3, "activation_checkpointing": kind}
            found = predict(asked, blueprint, strategy_from(pins), cluster)
            plain = plain or found.cost.flops
            held = (found.peak.ledger.activations, found.peak.bytes)
            extra = f"{found.cost.flops / plain - 1:.1%}"
            yield code(kind), *map(format_bytes, held), extra, format_seconds(found.step.seconds)

    columns = ("`activation_checkpointing`", "activations at the peak", "peak", "more FLOPs", "step")
    return table(columns, rows(), "lrrrr")


def binomial(blocks: int = 32) -> str:
    """Passes of the binomial schedule for numbers of kept inputs."""
    rows = (
        (kept, count := passes(blocks, kept), f"{count / blocks:.1f}") for kept in (1, 2, 3, 5, 8, blocks)
    )
    return table(("S", f"passes t({blocks}, S)", "per block"), rows, "rrr")


def activation_offload() -> str:
    """What moving activations to host memory holds and costs, for the recipe that the README shows."""
    from shardwise.jobs.request import read_request
    from shardwise.model.open import blueprint_of
    from shardwise.planner.predict import predict
    from shardwise.planner.timing import offload_phases

    asked, cluster = read_request(ROOT / SHOWN_RECIPE, [])
    blueprint = blueprint_of(asked)

    def rows() -> Iterator[Sequence[object]]:
        for kind in ("none", "selective", "budget:0.4", "full"):
            for offload in ("none", "activations"):
                pins = {
                    **asked.strategy,
                    "zero_stage": 3,
                    "activation_checkpointing": kind,
                    "offload": offload,
                }
                found = predict(asked, blueprint, strategy_from(pins), cluster)
                held = (found.peak.ledger.activations, found.peak.bytes, found.host.total)
                waits = [format_seconds(phase.exposed) for phase in offload_phases(found.cost, cluster)]
                seconds = format_seconds(found.step.seconds)
                yield code(kind), code(offload), *map(format_bytes, held), " + ".join(waits) or "–", seconds

    columns = ("`activation_checkpointing`", "`offload`", "activations at the peak", "peak", "in host memory")
    return table((*columns, "forward + backward wait", "step"), rows(), "llrrrrr")


# -- combinations -----------------------------------------------------------------------------------------


def combinations() -> str:
    """A table for every group of ways to train, whose columns are its own and whose rows are all."""
    number = {id(rule): index for index, rule in enumerate(ways.noted(), 1)}
    verdicts = ways.verdicts()

    def cell(one: str, other: str) -> str:
        pair = (one, other) if (one, other) in verdicts else (other, one)
        verdict = verdicts.get(pair)
        if verdict is None or not (verdict.example or verdict.rules):
            return "–"
        if verdict.rules:
            return " ".join(f"[no {number[id(rule)]}](#why-not)" for rule in verdict.rules)
        return "(yes)" if pair in ways.UNTRAINED else "yes"

    def section(group: str, title: str) -> str:
        columns = [way.name for way in ways.WAYS if way.group == group]
        rows = ([f"**{way.name}**", *(cell(way.name, each) for each in columns)] for way in ways.WAYS)
        return f"### {title}\n\n{table(('', *columns), rows)}"

    return "\n\n".join(section(group, title) for group, title in ways.GROUPS.items())


def exclusions() -> str:
    """The rules that the tables' numbers stand for."""

    def rows() -> Iterator[Sequence[object]]:
        for index, rule in enumerate(ways.noted(), 1):
            refused = next(v.refused for v in ways.verdicts().values() if rule in v.rules)
            near = rule.nearest(ways.case_of(refused))
            instead = ", ".join(f"{code(key)}: {code(value)}" for key, value in near.items())
            yield index, code(rule.key), rule.reason, instead or rule.fix

    return table(("", "key", "reason", "the nearest that works"), rows(), "r")


def further_rules() -> str:
    """The rules about numbers and about settings without a row in the tables."""
    rows = ((code(rule.key), rule.reason) for rule in ways.other_rules())
    return table(("key", "reason"), rows)


# -- Python ---------------------------------------------------------------------------------------------------


def public_names() -> str:
    """Every public name with its signature and its docstring."""
    return "\n\n".join(
        _public(name, getattr(shardwise, name)) for name in sorted(shardwise.__all__, key=str.lower)
    )


def _public(name: str, found: Any) -> str:
    parts = [f"### {name}", f"```text\n{_signature(name, found)}\n```", _prose(found)]
    if isinstance(found, type):
        methods = [
            (each, member)
            for each, member in vars(found).items()
            if not each.startswith("_") and inspect.isfunction(member) and member.__doc__
        ]
        parts += [f"`{_signature(each, member)}`\n\n{_prose(member)}" for each, member in methods]
    return "\n\n".join(part for part in parts if part)


def _signature(name: str, found: Any) -> str:
    if isinstance(found, type) and issubclass(found, BaseModel):
        return f"{name}({', '.join(found.model_fields)})"
    try:
        told = str(inspect.signature(found))
    except ValueError:
        return name
    told = re.sub(r"(?<![\w'.])([A-Za-z_]\w*\.)+(?=\w)", "", told)
    return f"{name}{told}".replace("'", "").replace("(self, ", "(").replace("(self)", "()")


_HEADINGS = ("Args:", "Returns:", "Raises:", "Attributes:")


def _prose(found: Any) -> str:
    """A docstring as Markdown: paragraphs, examples as code, and lists of arguments and errors."""
    lines = list[str]()
    for line in (inspect.getdoc(found) or "").replace("``", "`").split("\n"):
        indented = len(line) - len(line.lstrip())
        if line in _HEADINGS:
            lines += [f"**{line.removesuffix(':')}**", ""]
        elif indented == 4 and lines and lines[-1].startswith(("**", "- ", "  ")) | (lines[-1] == ""):
            name, colon, rest = line.strip().partition(": ")
            named = colon and re.fullmatch(r"[\w, ]+", name)
            lines.append(f"- `{name}`: {rest}" if named else f"    {line.strip()}")
        elif indented > 4:
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
    return "\n".join(lines).strip()


BLOCKS: Mapping[str, Callable[[], str]] = {
    "api": public_names,
    **{f"recipe-{name}": partial(keys_of, model) for name, model in SECTIONS.items()},
    "recipe-top": partial(keys_of, Recipe),
    "recipe-scaling": partial(keys_of, ScalingSpec),
    "recipe-adaptive-clip": partial(keys_of, AdaptiveClipSpec),
    "recipe-mixture": partial(keys_of, MixtureSpec),
    "settings": settings,
    "techniques": techniques,
    "verbs": verbs,
    "commands": commands,
    "exit-codes": exit_codes,
    "ledger-rows": ledger_rows,
    "models": models,
    "devices": devices,
    "overheads": overheads,
    "device-sources": device_sources,
    "short-names": lambda: table(
        ("short", "stands for"), (map(code, pair) for pair in PROFILES.short_names().items())
    ),
    "recipes": recipes,
    "ledger": ledger,
    "guard": guard,
    **{name: partial(measured, name) for name in ("wsd", "scaling-rule", "scaling-law")},
    **{name: partial(measured, name) for name in ("time-accuracy", "memory-accuracy", "scaling-curves")},
    "annotated-runs": partial(measured, "annotated-runs"),
    "activation-memory": partial(measured, "activation-memory-cpu"),
    "loss": partial(measured, "loss-cpu"),
    "clock": partial(measured, "clock-cpu"),
    "peers": partial(measured, "peers-cpu"),
    "peers-best": partial(measured, "peers-best-cpu"),
    "peer-profiles": partial(measured, "peers-cpu", "profile_table"),
    "pipelines": partial(measured, "pipelines-cpu"),
    "families": families,
    "gpu": gpu_page.page,
    "updates": partial(measured, "updates-cpu"),
    "largest-model": partial(measured, "largest-model-cpu"),
    "plan": shown_plan,
    "recomputation": recomputation,
    "binomial": binomial,
    "activation-offload": activation_offload,
    "combinations": combinations,
    "exclusions": exclusions,
    "further-rules": further_rules,
    "ladder": ladder,
    "choices": partial(measured, "choices"),
    "lora": partial(measured, "lora"),
    "lora-full-rank": partial(measured, "lora-full-rank"),
    "qlora-start": partial(measured, "qlora-start"),
    "quantization": partial(measured, "quantization"),
    "quantization-synthetic": partial(measured, "quantization-synthetic"),
    "recompute": partial(measured, "recompute-cpu"),
    "step-length": step_length,
    **{
        f"source-{name}": partial(source_of, name)
        for name in ("issue", "step", "forward-backward", "finish", "clip")
    },
}
SLOW = ("plan", "recomputation", "activation-offload", "combinations")


def pages() -> list[Path]:
    """Every Markdown file that may hold blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_in(text: str) -> list[str]:
    return [match[2] for match in _BLOCK.finditer(text)]


def in_style(block: str) -> str:
    """Percentages and negative numbers as the commands print them: ``62 %``, ``−9 %``; results are stored as before."""
    spaced = re.sub(r"(?<![\w.])([+-]?\d[\d.,]*)%(?!\w)", r"\1 %", block)
    return re.sub(r"(?<=[ |(])-(?=\d[\d.,]* ?[%|)])", MINUS, spaced)


def filled(text: str, keep: Sequence[str] = ()) -> str:
    """``text`` with every block but those in ``keep`` filled anew. Raises KeyError for an unknown block."""

    def fill(match: re.Match[str]) -> str:
        return match[0] if match[2] in keep else f"{match[1]}{in_style(BLOCKS[match[2]]())}\n{match[3]}"

    return _BLOCK.sub(fill, text)


def drawn() -> Iterator[Path]:
    """The README's pictures that changed, after they were written again."""
    for scheme, path in picture.files(ROOT / "docs").items():
        text = picture.drawn(answered()[0], scheme)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            yield path


def main() -> int:
    """Fill all pages, or name those that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a page is out of date"
    )
    check = parser.parse_args().check
    stale = [] if check else [str(path.relative_to(ROOT)) for path in drawn()]
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = filled(before, keep=SLOW if check else ())
        if after != before:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(after, encoding="utf-8")
    print("\n".join(f"{'out of date' if check else 'written'}: {name}" for name in stale) or "all up to date")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
