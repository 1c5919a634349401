"""The recipe: what is wanted, typed and strict, from YAML and overrides to one frozen object and back.

A recipe is read before torch is imported, so that a typing mistake costs a fraction of a second and not a
job's place in a queue. It says nothing of how many processes there are or which rank this is: the same
recipe is the plan's input, the trainer's, and, resolved, the `recipe.yaml` of a run.

Chosen: pydantic models as the one declaration of keys, types, limits, defaults and documentation. The
`strategy:` section is the exception: its keys belong to the techniques, so it is checked against the
Settings passed in, and holds only what the recipe pins. Refused: coercion ("100" for 100, 1 for true),
because a recipe that means something other than it says is found out a week later; environment variables
and includes; the price is some repetition between recipes.

In overrides, naming the model or the cluster another way replaces how the file named it:
`model.preset=gpt2` on a recipe that gives dimensions drops those dimensions, and
`cluster.preset=8xH100-80GB` drops `device` and counts.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, SkipValidation, ValidationError

from shardwise.core.complaint import Complaint, explain, first_error, nearest, unknown_key
from shardwise.core.consistency import contradictions
from shardwise.core.document import (
    Document,
    KeyPath,
    Origin,
    parse_document,
    read_document,
    written,
)
from shardwise.core.override import overridden
from shardwise.core.section import Count, Decay, Dimension, Scalar, Section, Text, pair, share, steps_of
from shardwise.core.strategy import Setting


class ModelSpec(Section):
    """Which model: a preset, a Hugging Face model, a function that makes one, or dimensions alone."""

    preset: Text | None = None
    """a named set of dimensions of the native decoder; a dimension given beside it overrides the preset's"""
    hf: Text | None = None
    """folder or id of a causal language model in Hugging Face format"""
    factory: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", max_length=4096)] | None = None
    """package.module:function that returns a module and its loss"""
    arguments: Mapping[str, Annotated[Scalar, SkipValidation]] = Field(default_factory=dict)
    """keyword arguments of the factory"""
    family: Literal["llama", "gpt2"] | None = None
    """architecture of the native decoder"""
    layers: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """number of identical blocks"""
    width: Dimension | None = None
    """size of the residual stream"""
    heads: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """attention heads; they divide the width"""
    kv_heads: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """heads of keys and values; they divide the heads"""
    ffn: Dimension | None = None
    """inner size of the feed-forward network"""
    vocab: Dimension | None = None
    """size of the vocabulary"""
    context: Count | None = None
    """longest sequence the model has positions for"""
    tied: bool | None = None
    """whether the output head is the embedding, transposed"""
    rope_theta: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """base of the rotary position embedding"""


class DataSpec(Section):
    """Which data, and how text becomes sequences of tokens."""

    source: Text = "stdlib"
    """stdlib (the source of Python's standard library), a file, folder or glob of txt, jsonl or parquet, or
    the id of a Hugging Face dataset"""
    tokenizer: Text = "bytes"
    """bytes, or the path or id of a Hugging Face tokenizer"""
    sequence_length: Annotated[int, Field(ge=1, le=100_000_000)] = 256
    """tokens per sequence"""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """fraction of the documents kept for evaluation"""
    text_key: Text = "text"
    """field of a jsonl or parquet record that holds the text"""


class ScalingSpec(Section):
    """How the optimizer follows the batch size: what it was tuned for, and by which rule it moves."""

    from_batch: Count
    """the batch_size that the optimizer's values were tuned for; k is batch_size over it"""
    rule: Literal["linear", "sqrt"]
    """linear (for SGD): rate × k; sqrt (for Adam): rate × √k, 1 - betas × k, epsilon / √k"""


class OptimizerSpec(Section):
    """How gradients become updates."""

    name: Literal["adamw"] = "adamw"
    """update rule"""
    learning_rate: Annotated[float, Field(gt=0, le=100)] = 3e-4
    """peak learning rate"""
    scale_learning_rate: ScalingSpec | None = None
    """from_batch and rule: the values here were tuned for a batch of from_batch, and follow batch_size"""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    """decoupled weight decay, applied to matrices"""
    betas: Annotated[tuple[Decay, Decay], BeforeValidator(pair)] = (0.9, 0.95)
    """decay of the first and the second moment"""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """added to the root of the second moment"""
    clip_norm: Annotated[float, Field(gt=0, le=1e9)] | None = 1.0
    """largest global norm of the gradient; null for no clipping"""


class ScheduleSpec(Section):
    """How the learning rate moves over the run."""

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """shape after the warmup"""
    warmup: Annotated[int | float, BeforeValidator(share)] = 0.03
    """steps (a whole number) or fraction of all steps (below 1) over which the rate rises from 0"""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """fraction of the peak rate at the last step"""
    decay: Annotated[int | float, BeforeValidator(share)] | None = None
    """steps or fraction of all steps, at the end, over which wsd falls to the floor; null is 0.1"""

    def warmup_steps(self, steps: int) -> int:
        """The warmup of a run of ``steps`` steps, in steps."""
        return steps_of(self.warmup, steps)

    def decay_steps(self, steps: int) -> int:
        """The decay of a run of ``steps`` steps by wsd, in steps."""
        return steps_of(0.1 if self.decay is None else self.decay, steps)


class ClusterSpec(Section):
    """Which hardware: a preset such as 8xH100-80GB, or a device and counts."""

    preset: Text | None = None
    """COUNTxDEVICE, such as 8xH100-80GB; nodes, given beside it, multiplies it"""
    device: Text | None = None
    """cpu, or the name of a device such as h100; null, with no preset, is the CPU of this machine"""
    nodes: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """machines"""
    devices_per_node: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """devices, and so processes, of each machine"""
    memory_gib: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """memory of one device in GiB, in place of its profile's"""


class CheckpointSpec(Section):
    """When the state of the run is saved."""

    every: Count | None = None
    """optimizer steps between checkpoints; null for one at the end"""
    keep: Count = 2
    """newest checkpoints that are kept"""
    start_from: Text | None = None
    """another run's checkpoint (its step-N folder, or the folder of all, for the newest) to continue in a new
    folder; a run that has checkpoints of its own goes on from those"""


class EvaluationSpec(Section):
    """When the held-out loss is measured."""

    every: Count | None = None
    """optimizer steps between evaluations; null for one at the end"""
    sequences: Count = 32
    """held-out sequences per evaluation"""


class Recipe(Section):
    """What is wanted: a model, data, a number of steps, and the hardware to run on."""

    model: ModelSpec
    """the model"""
    data: DataSpec = DataSpec()
    """the data"""
    steps: Count
    """optimizer steps"""
    batch_size: Count
    """global: sequences per optimizer step, whatever the hardware"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """of the initial weights and the order of samples"""
    optimizer: OptimizerSpec = OptimizerSpec()
    """the optimizer"""
    schedule: ScheduleSpec = ScheduleSpec()
    """the learning-rate schedule"""
    cluster: ClusterSpec = ClusterSpec()
    """the hardware"""
    strategy: Mapping[str, Any] = Field(default_factory=dict)
    """settings that are pinned, parsed; what is left out, the planner chooses"""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """checkpoints"""
    evaluation: EvaluationSpec = EvaluationSpec()
    """evaluation on held-out data"""


SECTIONS: Mapping[str, type[Section]] = {
    name: field.annotation
    for name, field in Recipe.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
LATER: Mapping[str, str] = {"adapter": "adapters are not in this version yet"}
"""Top-level keys that are planned, and why they are refused now."""

_EXAMPLES = {"model": "model: {preset: ...}", "steps": "steps: 100", "batch_size": "batch_size: 16"}
_DIMENSIONS = (
    "family", "layers", "width", "heads", "kv_heads", "ffn", "vocab", "context", "tied", "rope_theta",
)  # fmt: skip
_REPLACES: Mapping[KeyPath, Sequence[str]] = {
    ("model", "preset"): ("hf", "factory", "arguments", *_DIMENSIONS),
    ("model", "hf"): ("preset", "factory", "arguments", *_DIMENSIONS),
    ("model", "factory"): ("preset", "hf", *_DIMENSIONS),
    ("cluster", "preset"): ("device", "nodes", "devices_per_node", "memory_gib"),
    ("cluster", "device"): ("preset",),
}


def load_recipe(path: Path, overrides: Sequence[str], settings: Sequence[Setting[Any]]) -> Recipe:
    """Read a recipe file, put `section.key=value` overrides over it, and check the whole.

    Args:
        path: a YAML 1.2 file, in UTF-8.
        overrides: applied in order; a value is text, a number, or YAML in brackets or quotes; null unsets.
        settings: the keys that `strategy:` may have (`shardwise.technique.SETTINGS`).

    Raises:
        RecipeError: for the first fault in reading order, naming file, line and key path.
    """
    return _checked(overridden(read_document(Path(path)), overrides, _REPLACES), settings)


def parse_recipe(text: str, settings: Sequence[Setting[Any]], name: str = "recipe") -> Recipe:
    """As `load_recipe`, from YAML text; `name` stands for the file in errors."""
    return _checked(parse_document(text, name), settings)


def recipe_of(values: Mapping[str, Any], settings: Sequence[Setting[Any]] = ()) -> Recipe:
    """A checked recipe from plain data (dicts, lists, scalars), for code that writes none down."""
    return _checked(Document("recipe", copy.deepcopy(dict(values)), {(): Origin(0, 0)}), settings)


def locate(path: Path, overrides: Sequence[str], key: KeyPath) -> str:
    """`FILE:LINE: key.path` of a key in a recipe that `load_recipe` accepts, for errors found later."""
    return overridden(read_document(Path(path)), overrides, _REPLACES).where(key)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every key, defaults too; reading it gives an equal recipe."""
    lines = list[str]()
    for name, value in recipe:
        if not isinstance(value, Section | Mapping):
            lines.append(f"{name}: {written(value)}")
            continue
        pairs = _said(value) if isinstance(value, Section) else list(value.items())
        if pairs:
            lines.append(f"{name}:")
            lines += [f"  {written(key)}: {written(inner)}" for key, inner in pairs]
    return "\n".join(lines) + "\n"


def _said(section: Section) -> list[tuple[str, Any]]:
    """The pairs to write: all that say something; beside a preset, which the defaults would contradict, only
    those that differ from the default.
    """
    fields = type(section).model_fields
    defaults = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
    brief = getattr(section, "preset", None) is not None
    said = [(k, v) for k, v in section if v != defaults[k] or not (brief or defaults[k] in (None, {}))]
    return [(k, dict(_said(v)) if isinstance(v, Section) else v) for k, v in said]


def _checked(document: Document, settings: Sequence[Setting[Any]]) -> Recipe:
    """The recipe in `document`. Raises RecipeError for its first fault."""
    values = {k: {} if v is None and k in (*SECTIONS, "strategy") else v for k, v in document.values.items()}
    strategy, complaints = _parse_strategy(values.pop("strategy", {}), settings)
    later = [key for key in LATER if values.pop(key, None) is not None]
    complaints += [Complaint((key,), f"cannot use {key}", LATER[key], "remove it") for key in later]
    try:
        recipe = Recipe.model_validate({**values, "strategy": strategy})
    except ValidationError as error:
        complaints += _complaints(error, settings)
    else:
        if not complaints:
            complaints += contradictions(recipe, document)
        if not complaints:
            return recipe
    raise first_error(complaints, document)


def _parse_strategy(pins: Any, settings: Sequence[Setting[Any]]) -> tuple[dict[str, object], list[Complaint]]:
    """The values of the pinned keys, parsed; null pins nothing."""
    if not isinstance(pins, Mapping):
        return {}, [_complaint_of_section("strategy", pins)]
    known = {setting.key: setting for setting in settings}
    parsed, complaints = dict[str, object](), list[Complaint]()
    for key, value in pins.items():
        path = ("strategy", str(key))
        if key not in known:
            complaints.append(unknown_key(path, list(known), _homes(settings)))
        elif value is not None:
            try:
                parsed[key] = known[key].parse(value)
            except ValueError as reason:
                # A note explains the refusal (`fp16 is not in this version yet`): then it was no misspelling.
                choices = [] if known[key].note else [str(choice) for choice in known[key].choices]
                near = nearest(value, choices) if isinstance(value, str) else None
                fix = f"did you mean '{near}'?" if near else ""
                complaints.append(Complaint(path, f"bad value for {key}", str(reason), fix))
    return parsed, complaints


def _complaint_of_section(name: str, found: object) -> Complaint:
    fault: Any = {"loc": (name,), "type": "mapping_type", "input": found, "msg": ""}
    return explain(fault)


def _complaints(error: ValidationError, settings: Sequence[Setting[Any]]) -> Iterator[Complaint]:
    """Pydantic's faults as complaints; a key is not missing where a misspelling of it was found."""
    faults = error.errors(include_url=False)
    meant = set[str]()
    for fault in faults:
        path = tuple(fault["loc"])
        if fault["type"] == "extra_forbidden":
            names = list(_section_at(path).model_fields)
            if len(path) == 1 and (near := nearest(str(path[0]), names)):
                meant.add(near)
            yield unknown_key(path, names, _homes(settings))
    for fault in faults:
        key = str(fault["loc"][-1])
        if fault["type"] == "missing" and len(fault["loc"]) == 1:
            if key not in meant:
                yield Complaint((key,), f"{key} is missing", fix=f"add `{_EXAMPLES[key]}`", absent=True)
        elif fault["type"] != "extra_forbidden":
            yield explain(fault)


def _section_at(path: KeyPath) -> type[Section]:
    """The section that holds the last key of `path`."""
    section: type[Section] = Recipe
    for key in path[:-1]:
        kinds = (
            section.model_fields[str(key)].annotation,
            *get_args(section.model_fields[str(key)].annotation),
        )
        section = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section))
    return section


def _homes(settings: Sequence[Setting[Any]]) -> dict[str, str]:
    """The section in which each key belongs, for hints; keys that several sections have are left out."""
    homes = {setting.key: "strategy" for setting in settings}
    seen = [(key, name) for name, section in SECTIONS.items() for key in section.model_fields]
    keys = [key for key, _ in seen]
    return homes | {key: name for key, name in seen if keys.count(key) == 1}
