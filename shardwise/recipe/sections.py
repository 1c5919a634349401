"""The sections of a recipe: every key with its type, limits, default and documentation.

One pydantic model per section. Checks across keys are in ``checks.py``, reading a file is in ``load.py``.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from shardwise.recipe.data_sections import DataSpec as DataSpec
from shardwise.recipe.data_sections import MixtureSpec as MixtureSpec
from shardwise.recipe.data_sections import brings_tokenizer
from shardwise.recipe.model_section import Dimension
from shardwise.recipe.model_section import ModelSpec as ModelSpec
from shardwise.recipe.objective import SAMPLES
from shardwise.recipe.objective import ObjectiveSpec as ObjectiveSpec
from shardwise.recipe.objective import PlanSpec as PlanSpec
from shardwise.recipe.observation import EvaluationSpec as EvaluationSpec
from shardwise.recipe.observation import ProfileSpec as ProfileSpec
from shardwise.recipe.section import (
    Arguments,
    Count,
    DeviceName,
    ObjectName,
    RecipeText,
    Section,
    TrackerName,
    steps_or_share,
    words,
)
from shardwise.recipe.stability import AdaptiveClipSpec as AdaptiveClipSpec
from shardwise.recipe.stability import GuardSpec as GuardSpec
from shardwise.recipe.stability import LossScaleSpec as LossScaleSpec

Quantize: TypeAlias = Literal["none", "nf4", "int8"]
Alpha: TypeAlias = Annotated[float, Field(gt=0, le=1e6)]
Index: TypeAlias = Annotated[int, Field(ge=0, le=10_000)]
V = TypeVar("V")
Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


def _two_items(value: object) -> object:
    """A list of two items as a tuple. Raises ValueError for anything else."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("a list of two numbers, such as [0.9, 0.95]")
    return tuple(value)


def _clip(value: object) -> object:
    """A number as the z of adaptive clipping."""
    return {"z": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


def _target_layers(value: object) -> object:
    """A keyword, a regular expression, or a list of names as a tuple. Raises ValueError for anything else."""
    names = value if isinstance(value, list | tuple) else [value]
    if not names or not all(isinstance(name, str) and 0 < len(name) <= 4096 for name in names):
        raise ValueError("attention, mlp, experts, all, a list of names of layers, or a regular expression")
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"attention, mlp, experts, all, or a regular expression: {error}") from error
    return value if isinstance(value, str) else tuple(names)


def _patterns(values: Mapping[str, Any]) -> Arguments:
    """Values by regular expression, hashable. Raises ValueError for one that cannot be read."""
    for pattern in values:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"regular expressions of layers: {pattern!r} has {error}") from error
    return Arguments(values)


def by_pattern(values: Mapping[str, V], path: str, default: V) -> V:
    """The value of the first pattern that matches the end of a layer's path, as PEFT's ``get_pattern_key``."""
    return next((v for key, v in values.items() if re.match(rf"(.*\.)?({key})$", path)), default)


def _number_list(value: object) -> object:
    """A list of numbers as a tuple, and a number as one of one."""
    return (value,) if type(value) is int else words(value)


def _initial(value: object) -> object:
    """``default``, ``loftq`` or ``loftq:ITERATIONS``. Raises ValueError for anything else."""
    if value != "default" and not re.fullmatch(r"loftq(:[1-9]\d{0,2})?", str(value)):
        raise ValueError("default, loftq, or loftq:ITERATIONS such as loftq:5")
    return value


def steps_of(share: float, steps: int) -> int:
    """``share`` in steps: a whole number as it is, a fraction of ``steps`` rounded up.

    The product is first rounded to 6 decimals: 0.07 of 100 is 7, but a little more in binary.
    """
    return math.ceil(round(share * steps, 6)) if share < 1 else int(share)


class ScalingSpec(Section):
    """How the learning rate scales with the batch size."""

    from_batch: Count
    """the batch size for which the optimizer's values were tuned; k = batch_size / from_batch"""
    rule: Literal["linear", "sqrt"]
    """linear (for SGD): learning rate × k; sqrt (for Adam): learning rate × √k, (1 - betas) × k, epsilon / √k"""


class OptimizerSpec(Section):
    """The optimizer and gradient clipping."""

    name: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    """update rule; adamw_8bit stores its moments in 8 bits, sgd has momentum"""
    factory: ObjectName | None = None
    """package.module:Class of any torch.optim.Optimizer instead, such as torch.optim:Adafactor, or a function of
    (name, parameter) pairs that returns one or several; learning_rate becomes its lr, weight_decay etc. arguments"""
    arguments: Annotated[Mapping[str, Any], AfterValidator(Arguments)] = Field(default_factory=Arguments)
    """keyword arguments of the factory"""
    learning_rate: Annotated[float, Field(gt=0, le=100)] = 3e-4
    """peak learning rate"""
    scale_learning_rate: ScalingSpec | None = None
    """scale the learning rate from the batch size for which it was tuned: {from_batch, rule}"""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    """decoupled weight decay, applied to matrices only; with an adapter the default is 0"""
    betas: Annotated[tuple[Decay, Decay], BeforeValidator(_two_items)] = (0.9, 0.95)
    """decay rates of the first and the second moment"""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """added to the square root of the second moment"""
    momentum: Decay = 0.9
    """momentum of sgd; 0 for none"""
    clip_norm: Annotated[float, Field(gt=0, le=1e9)] | None = 1.0
    """gradient clipping: maximum global gradient norm; null for no clipping"""
    adaptive_clip: Annotated[AdaptiveClipSpec | None, BeforeValidator(_clip)] = None
    """adaptive gradient clipping: {z, mode}, or z alone for mode zclip"""


class ScheduleSpec(Section):
    """The learning-rate schedule."""

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """shape after the warmup; wsd is warmup, stable, decay"""
    factory: ObjectName | None = None
    """package.module:function of (step from 0, steps) to a fraction of the peak; replaces name, warmup, floor, decay"""
    warmup: Annotated[int | float, BeforeValidator(steps_or_share)] = 0.03
    """warmup from 0: steps (a whole number) or a fraction of all steps (below 1)"""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """end of the decay as a fraction of the peak: the step after the last would have this learning rate"""
    decay: Annotated[int | float, BeforeValidator(steps_or_share)] | None = None
    """length of wsd's decay to the floor: steps or a fraction of all steps; null is 0.1"""
    decay_shape: Literal["sqrt", "linear", "cosine"] | None = None
    """shape of wsd's decay: 1 - sqrt(t), 1 - t, or half a cosine; null is sqrt"""

    def warmup_steps(self, steps: int) -> int:
        """Warmup steps of a run of ``steps`` steps."""
        return steps_of(self.warmup, steps)

    def decay_steps(self, steps: int) -> int:
        """Decay steps of a wsd run of ``steps`` steps."""
        return steps_of(0.1 if self.decay is None else self.decay, steps)

    def decay_start(self, steps: int) -> int:
        """The step that the decay of a run of ``steps`` steps begins with: that after the warmup, if not of wsd."""
        return steps - self.decay_steps(steps) if self.name == "wsd" else self.warmup_steps(steps)

    @property
    def shape(self) -> str:
        """The shape of the decay."""
        return self.decay_shape or "sqrt" if self.name == "wsd" else self.name


class ClusterSpec(Section):
    """The hardware: a preset such as 8xH100-80GB, or a device and counts."""

    preset: DeviceName | None = None
    """COUNTxDEVICE, such as 8xH100-80GB; multiplied by nodes"""
    device: DeviceName | None = None
    """cpu, a device such as h100, or a file such as my-card.toml; null without a preset is this machine's CPU"""
    nodes: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """number of nodes (machines)"""
    devices_per_node: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """devices per node; one process (rank) each"""
    memory_gib: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """memory of one device in GiB, instead of the profile's"""
    host_memory_gib: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """host memory per device in GiB, instead of the profile's"""
    price_per_device_hour: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """price of one device for one hour, in any currency: the plan then says what the run costs"""
    hours_between_failures: Annotated[float, Field(gt=0, le=1e9)] = 50_000.0
    """mean hours between failures of one device, for the advice how often to save. Llama 3 was interrupted every
    186 minutes on 16,384 GPUs (arXiv:2407.21783, section 3.3.4)"""


class AdapterSpec(Section):
    """Parameter-efficient fine-tuning of a frozen model; without this section all weights are trained."""

    name: Literal["lora", "dora"] = "lora"
    """lora: h = Wx + scale·B·A·x; dora also trains the magnitude of every row of W + scale·B·A"""
    rank: Dimension = 16
    """rank of the update: rows of A, columns of B; a rank of min(rows, columns) of a layer can express any update"""
    alpha: Alpha = 32.0
    """scale = alpha / rank"""
    rank_pattern: Annotated[Mapping[str, Dimension], AfterValidator(_patterns)] = Field(
        default_factory=Arguments
    )
    """ranks of single layers instead of rank: {"layers.0.self_attn.q_proj": 32}. A key is a regular expression for the
    end of a module path; the first that matches counts"""
    alpha_pattern: Annotated[Mapping[str, Alpha], AfterValidator(_patterns)] = Field(
        default_factory=Arguments
    )
    """alphas of single layers instead of alpha, as rank_pattern"""
    targets: Annotated[str | tuple[str, ...], BeforeValidator(_target_layers)] = "all"
    """linear layers and experts to adapt: attention, mlp, experts or all, of the blocks; a list of names (last parts of
    a path, such as q_proj or experts.down_proj), also lm_head; or a regular expression that matches a whole path"""
    layers_to_transform: Annotated[tuple[Index, ...], BeforeValidator(_number_list)] | None = None
    """numbers of the blocks whose layers are adapted, from 0; null adapts all"""
    modules_to_save: Annotated[tuple[RecipeText, ...], BeforeValidator(words)] = ()
    """modules to train in full instead of with an adapter, such as lm_head or embed_tokens: ends of module paths. Their
    weights are written into the adapter's files"""
    lora_bias: bool = False
    """also train a bias of B; only layers with a bias of their own can be merged then"""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """dropout on the inputs of the adapter"""
    rank_stabilized: bool = False
    """scale = alpha / √rank (rsLoRA)"""
    learning_rate_ratio: Annotated[float, Field(gt=0, le=1e4)] = 1.0
    """learning rate of B divided by the learning rate of A (LoRA+)"""
    quantize: Quantize = "none"
    """storage of frozen linear layers and experts: none (unchanged), nf4 (NF4, double quantization, QLoRA) or int8"""
    init: Annotated[str, BeforeValidator(_initial)] = "default"
    """first values: default (A uniform, B = 0), or loftq (A and B approximate what quantize takes from the weights);
    loftq:5 quantizes and approximates five times in turn, loftq once"""
    start_from: RecipeText | None = None
    """folder of an adapter in PEFT format to continue from; null starts with init"""

    def strength(self, path: str) -> tuple[int, float]:
        """Rank and alpha of the layer at ``path``."""
        rank, alpha = self.rank_pattern, self.alpha_pattern
        return by_pattern(rank, path, self.rank), by_pattern(alpha, path, self.alpha)

    def scale(self, path: str) -> float:
        """The factor of B A x of the layer at ``path``."""
        rank, alpha = self.strength(path)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    @property
    def loftq_iterations(self) -> int:
        """Iterations of LoftQ; 0 if it is not used."""
        return int(self.init.partition(":")[2] or 1) if self.init.startswith("loftq") else 0


class CheckpointSpec(Section):
    """When checkpoints are saved, and where a run starts from."""

    every: Count | None = None
    """optimizer steps between checkpoints; null saves one at the end"""
    keep: Count = 2
    """number of checkpoints to keep, the newest ones"""
    best: Annotated[str, Field(pattern=r"^((min|max):)?[A-Za-z0-9_][A-Za-z0-9_./-]{0,63}$")] | None = None
    """metric of the best checkpoint, which is saved after its evaluation and kept in addition: held_out_loss, the name
    of a validation set, or a metric of evaluation.metrics as max:NAME or min:NAME. For export --best and load_into"""
    background: bool = False
    """asynchronous checkpoints: training waits only for a copy to host memory, and a thread writes the files. The copy
    takes as much host memory as this rank's shards"""
    start_from: RecipeText | None = None
    """checkpoint of another run to continue in a new folder: a step-N folder, or the folder with all of them for the
    newest. A run with checkpoints of its own resumes from those"""

    @property
    def best_metric(self) -> tuple[str, bool] | None:
        """The name in ``best``, and whether greater is better; None without it."""
        if self.best is None:
            return None
        mode, _, name = self.best.rpartition(":")
        return name, mode == "max"


class Recipe(Section):
    """A training run: model, data, number of steps, hardware and strategy."""

    model: ModelSpec
    """the model"""
    data: DataSpec = DataSpec()
    """the data"""
    steps: Count = 0
    """optimizer steps; this or epochs is required"""
    epochs: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """passes over the training data, instead of steps, which are then counted from the data: 1.5 is a pass and a
    half. Epochs of a mixture of sources are passes over the sequences of all of them"""
    batch_size: Count
    """global batch size: sequences per optimizer step over all devices"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seeds initialisation and shuffling"""
    watchdog: Annotated[float, Field(ge=1, le=604_800)] | None = 600.0
    """seconds without progress on any rank after which the run ends and names the rank that hangs, from the end of
    the first step on; null for no watchdog"""
    law: RecipeText = "besiroglu"
    """scaling law of plan, report and budget: the name of a published one, or a file of shardwise fit"""
    adapter: AdapterSpec | None = None
    """LoRA, QLoRA or DoRA fine-tuning; null trains all weights"""
    objective: ObjectiveSpec | None = None
    """what training makes small; null is the model's own loss"""
    optimizer: OptimizerSpec = OptimizerSpec()
    """the optimizer"""
    schedule: ScheduleSpec = ScheduleSpec()
    """the learning-rate schedule"""
    loss_scale: LossScaleSpec = LossScaleSpec()
    """loss scaling in fp16"""
    guard: GuardSpec = GuardSpec()
    """loss spikes and bad batches"""
    cluster: ClusterSpec = ClusterSpec()
    """the hardware"""
    strategy: Mapping[str, Any] = Field(default_factory=dict)
    """settings to pin; the planner chooses the others"""
    plan: PlanSpec = PlanSpec()
    """what the planner chooses by"""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """checkpoints"""
    evaluation: EvaluationSpec = EvaluationSpec()
    """validation loss"""
    profile: ProfileSpec = ProfileSpec()
    """profiles of single steps"""
    callbacks: Annotated[tuple[ObjectName, ...], BeforeValidator(words)] = ()
    """a list of package.module:Class, called after steps, evaluations, checkpoints and events"""
    trackers: Annotated[tuple[TrackerName, ...], BeforeValidator(words)] = ()
    """experiment trackers that get every metric and event: a list of csv, tensorboard, wandb, mlflow, trackio"""

    @property
    def writes_text(self) -> bool:
        """Whether the trained model continues a text."""
        scores = self.objective is not None and self.objective.head == "score"
        return self.model.factory is None and self.model.objective == "causal" and not scores

    @property
    def samples(self) -> str:
        """The kind of samples that it is trained on (data/opening.py)."""
        named = self.objective.name if self.objective is not None else None
        return SAMPLES[named] if named is not None else self.model.objective

    @property
    def counted_samples(self) -> str:
        """What batch_size counts, in a word."""
        if self.samples in ("pairs", "scored") and not self.data.packing:
            return "pairs"
        return "completions" if self.samples == "prompts" else "sequences"

    @property
    def prompt_tokens(self) -> int:
        """Most tokens of a prompt that is completed during training: a sequence has room for its completion."""
        length = self.data.sequence_length
        completion = self.objective.completion_length if self.objective is not None else None
        return length - (completion or length // 2)

    @property
    def unit(self) -> int:
        """Optimizer steps that are trained on the same samples of the data."""
        return 1 if self.objective is None else self.objective.unit

    @property
    def unit_samples(self) -> int:
        """Samples of the data of these steps: of rollouts the prompts."""
        if self.objective is None or self.samples != "prompts":
            return self.batch_size
        return self.batch_size * (self.objective.minibatches or 1) // (self.objective.group or 1)

    @model_validator(mode="before")
    @classmethod
    def _without_decay(cls, values: Any) -> Any:
        """Adapters are trained without weight decay unless the recipe asks for it, as by PEFT's examples and TRL."""
        if not isinstance(values, Mapping) or values.get("adapter") is None:
            return values
        optimizer = values.get("optimizer", {})
        if not isinstance(optimizer, Mapping) or "weight_decay" in optimizer:
            return values
        return {**values, "optimizer": {**optimizer, "weight_decay": 0.0}}

    @model_validator(mode="before")
    @classmethod
    def _tokenizer_of_model(cls, values: Any) -> Any:
        """A model of Hugging Face reads the tokens of its own tokenizer unless the recipe names another."""
        model, data = (
            (values.get(key, {}) for key in ("model", "data")) if isinstance(values, Mapping) else (0, 0)
        )
        if not isinstance(model, Mapping) or not isinstance(data, Mapping) or "tokenizer" in data:
            return values
        named = model.get("hf")
        if not isinstance(named, str) or not brings_tokenizer(named):
            return values
        return {**values, "data": {**data, "tokenizer": named}}
