"""The sections of a recipe: every key with its type, its limits, its default and its documentation.

One pydantic model a section, and nothing else: what keys mean together is in ``consistency.py``, how a file is
read in ``recipe.py``.
"""

import ast
import inspect
import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation

Quantize: TypeAlias = Literal["none", "nf4", "int8"]
Scalar: TypeAlias = str | int | float | bool | None
Count: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000_000)]
Dimension: TypeAlias = Annotated[int, Field(ge=1, le=10_000_000)]
Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Text: TypeAlias = Annotated[str, Field(min_length=1, max_length=4096)]


def _pair(value: object) -> object:
    """A list of YAML as the tuple it stands for. Raises ValueError unless it has two items."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("a list of two numbers, such as [0.9, 0.95]")
    return tuple(value)


def _share(value: object) -> object:
    """Raises ValueError unless `value` is a number of steps (int) or a fraction of them (float below 1)."""
    steps = type(value) is int and 0 <= value <= 1_000_000_000
    if not steps and not (type(value) is float and 0 <= value < 1):
        raise ValueError("a whole number of steps or a fraction from 0 to below 1")
    return value


def _targets(value: object) -> object:
    """A word, a regular expression, or a list of names as a tuple. Raises ValueError for anything else."""
    names = value if isinstance(value, list | tuple) else [value]
    if not names or not all(isinstance(name, str) and 0 < len(name) <= 4096 for name in names):
        raise ValueError("attention, mlp, all, a list of names of layers, or a regular expression")
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"attention, mlp, all, or a regular expression: {error}") from error
    return value if isinstance(value, str) else tuple(names)


def steps_of(share: float, steps: int) -> int:
    """A whole number is steps; a fraction, of ``steps``, rounded up (0.07 of 100 is 7, though not in binary)."""
    return math.ceil(round(share * steps, 6)) if share < 1 else int(share)


class Section(BaseModel):
    """What all sections share: immutable, no unknown keys, no coercion, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """What each key is for: the text below it, read from the source when asked for.

        pydantic reads it when a class is made (``use_attribute_docstrings``), an eighth of the time to a first error.
        """
        (made,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(made, ast.ClassDef)
        return {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in pairwise(made.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(text.value.value, str)
        }


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
    format: Literal["auto", "text", "prompt", "messages", "sharegpt", "alpaca"] = "auto"
    """what a record is: text; prompt and completion; messages of a chat; ShareGPT's conversations; Alpaca's
    instruction, input and output. auto looks at the fields of the first record"""
    train_on: Literal["completion", "all"] | None = None
    """what of a record is trained on: the completion (of a chat, what the assistant says) or all of it; null is all
    of a text and the completion of any other record"""
    packing: bool = False
    """whether a sequence holds several records, none of which sees another; false pads each to a sequence. Plain text
    is end to end, and needs none"""


class ScalingSpec(Section):
    """How the optimizer follows the batch size: what it was tuned for, and by which rule it moves."""

    from_batch: Count
    """the batch_size that the optimizer's values were tuned for; k is batch_size over it"""
    rule: Literal["linear", "sqrt"]
    """linear (for SGD): rate × k; sqrt (for Adam): rate × √k, 1 - betas × k, epsilon / √k"""


class OptimizerSpec(Section):
    """How gradients become updates."""

    name: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    """update rule; adamw_8bit keeps its moments in 8 bits, sgd has momentum"""
    learning_rate: Annotated[float, Field(gt=0, le=100)] = 3e-4
    """peak learning rate"""
    scale_learning_rate: ScalingSpec | None = None
    """from_batch and rule: the values here were tuned for a batch of from_batch, and follow batch_size"""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    """decoupled weight decay, applied to matrices"""
    betas: Annotated[tuple[Decay, Decay], BeforeValidator(_pair)] = (0.9, 0.95)
    """decay of the first and the second moment"""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """added to the root of the second moment"""
    momentum: Decay = 0.9
    """of sgd: decay of the velocity; 0 for none"""
    clip_norm: Annotated[float, Field(gt=0, le=1e9)] | None = 1.0
    """largest global norm of the gradient; null for no clipping"""
    adaptive_clip: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """clip norms that lie more than so many standard deviations above their running mean, to that height (ZClip)"""


class ScheduleSpec(Section):
    """How the learning rate moves over the run."""

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """shape after the warmup"""
    warmup: Annotated[int | float, BeforeValidator(_share)] = 0.03
    """steps (a whole number) or fraction of all steps (below 1) over which the rate rises from 0"""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """fraction of the peak rate at the last step"""
    decay: Annotated[int | float, BeforeValidator(_share)] | None = None
    """steps or fraction of all steps, at the end, over which wsd falls to the floor; null is 0.1"""

    def warmup_steps(self, steps: int) -> int:
        """The warmup of a run of ``steps`` steps, in steps."""
        return steps_of(self.warmup, steps)

    def decay_steps(self, steps: int) -> int:
        """The decay of a run of ``steps`` steps by wsd, in steps."""
        return steps_of(0.1 if self.decay is None else self.decay, steps)


class LossScaleSpec(Section):
    """How the loss is scaled in fp16; other precisions need none."""

    dynamic: bool = True
    """whether the scale follows overflows; false keeps the initial one"""
    initial: Annotated[float, Field(gt=0, le=2.0**60)] = 65536.0
    """scale of the first step"""
    growth_interval: Count = 2000
    """steps without an overflow after which the scale grows"""
    growth: Annotated[float, Field(ge=1, le=1e6)] = 2.0
    """factor by which it grows"""
    backoff: Annotated[float, Field(gt=0, le=1)] = 0.5
    """factor by which it shrinks at an overflow"""
    floor: Annotated[float, Field(gt=0, le=2.0**60)] = 1.0
    """smallest scale"""
    hysteresis: Count = 2
    """overflows since the scale last grew before it shrinks"""


class GuardSpec(Section):
    """What is done about bad batches and loss spikes."""

    threshold: Annotated[float, Field(gt=0, le=1e6)] = 8.0
    """robust standard deviations (of the median) by which a loss or norm must exceed recent ones to be a spike"""
    window: Annotated[int, Field(ge=8, le=100_000)] = 64
    """recent steps it is compared with; none is called a spike before so many have been seen"""
    snapshot_every: Count | None = None
    """optimizer steps between copies of weights and optimizer state in host memory, of which two are kept, to
    rewind to after a spike; null takes none, and a spike rewinds to the last checkpoint, if there is one"""
    rewinds: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    """times that the run may rewind; at a further spike it gives up"""
    skips: Count = 5
    """skipped updates in a row that it bears; overflows by which fp16's loss scale finds its height do not count"""


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
    host_memory_gib: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """host memory for each device in GiB, in place of its profile's"""


class AdapterSpec(Section):
    """Which few weights are trained beside a frozen model; without this section all of its own are."""

    name: Literal["lora", "dora"] = "lora"
    """h = Wx + scale·B·A·x (lora), or the same with the magnitude of every row of the sum trained too (dora)"""
    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """rows of A, columns of B"""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """scale is alpha / rank"""
    targets: Annotated[str | tuple[str, ...], BeforeValidator(_targets)] = "all"
    """linear layers of the blocks: attention, mlp, all; a list of names, each the last parts of a path; or a
    regular expression that is all of a path"""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """share of the inputs of A that are dropped"""
    rank_stabilized: bool = False
    """scale is alpha / √rank (rsLoRA)"""
    learning_rate_ratio: Annotated[float, Field(gt=0, le=1e4)] = 1.0
    """learning rate of B over that of A (LoRA+)"""
    quantize: Quantize = "none"
    """how the blocks' frozen linear layers are stored: as they are, in NF4 with double quantization (QLoRA), in int8"""
    start_from: Text | None = None
    """folder of an adapter in PEFT's format to start from; null starts with B = 0"""


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
    adapter: AdapterSpec | None = None
    """which few weights are trained beside the frozen model (LoRA, DoRA); null trains every weight"""
    optimizer: OptimizerSpec = OptimizerSpec()
    """the optimizer"""
    schedule: ScheduleSpec = ScheduleSpec()
    """the learning-rate schedule"""
    loss_scale: LossScaleSpec = LossScaleSpec()
    """loss scaling, in fp16"""
    guard: GuardSpec = GuardSpec()
    """bad batches and loss spikes"""
    cluster: ClusterSpec = ClusterSpec()
    """the hardware"""
    strategy: Mapping[str, Any] = Field(default_factory=dict)
    """settings that are pinned, parsed; what is left out, the planner chooses"""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """checkpoints"""
    evaluation: EvaluationSpec = EvaluationSpec()
    """evaluation on held-out data"""
