"""The sections `objective:` and `plan:` of a recipe: what training makes small, and what the planner does.

An objective has a name or is made by a user's function. Each named one reads its own keys: ``READ`` lists them with
their defaults, so a recipe is checked, and written with all values, before any objective is imported.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, SkipValidation, model_validator

from shardwise.core.plugins import OBJECTIVES
from shardwise.recipe.section import Count, ObjectName, RecipeText, Scalar, Section, words

if TYPE_CHECKING:
    ObjectiveNamed: TypeAlias = str
else:
    ObjectiveNamed = Literal[tuple(OBJECTIVES)]  # those of the table of plugins

Weight: TypeAlias = Annotated[float, Field(ge=0, le=1e6)]

_ROLLOUTS = {
    "rewards": (), "reward_weights": None, "reward_model": None, "group": 8, "completion_length": None,
    "temperature": 1.0, "mask_truncated": True, "beta": 0.0, "reference_quantize": "none", "endpoint": None,
    "endpoint_model": None,
}  # fmt: skip
READ: Mapping[str, Mapping[str, Any]] = {
    "dpo": {
        "beta": 0.1, "label_smoothing": 0.0, "nll_weight": 0.0, "length_normalised": False, "reference_free": False,
        "reference_quantize": "none",
    },
    "ipo": {"beta": 0.1, "reference_free": False, "reference_quantize": "none"},
    "orpo": {"beta": 0.1},
    "simpo": {"beta": 2.0, "margin": 1.0, "nll_weight": 0.0, "label_smoothing": 0.0},
    "cpo": {"beta": 0.1, "nll_weight": 1.0, "label_smoothing": 0.0},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "reference_quantize": "none"},
    "reward": {"center_weight": 0.0},
    "grpo": {**_ROLLOUTS, "scale_rewards": True, "normalise": "tokens"},
    "rloo": {**_ROLLOUTS, "normalise": "tokens"},
    "ppo": {
        **_ROLLOUTS, "group": 1, "beta": 0.05, "epsilon": 0.2, "epochs": 4, "minibatches": 1, "discount": 1.0,
        "trace_decay": 0.95, "value_weight": 0.1, "value_epsilon": 0.2, "whiten": True,
    },
}  # fmt: skip
"""The keys that each named objective reads, with their defaults."""

SAMPLES: Mapping[str, str] = {
    **dict.fromkeys(("dpo", "ipo", "orpo", "simpo", "cpo"), "pairs"),
    "reward": "scored",
    "kto": "unpaired",
    **dict.fromkeys(("grpo", "rloo", "ppo"), "prompts"),
}
"""The kind of samples that each named objective is trained on (data/opening.py)."""


class ObjectiveSpec(Section):
    """What training makes small in the place of the model's own loss. ``objective: dpo`` is short for its name."""

    name: ObjectiveNamed | None = None
    """preferences: dpo (Rafailov et al. 2023), ipo (Azar et al. 2023), orpo (Hong et al. 2024), simpo (Meng et al.
    2024), cpo (Xu et al. 2024), kto (Ethayarajh et al. 2024), reward (a reward model; Bradley and Terry 1952). Rewards
    of generated text: grpo (Shao et al. 2024), rloo (Ahmadian et al. 2024), ppo (Schulman et al. 2017)"""
    factory: ObjectName | None = None
    """package.module:function that takes the recipe and the arguments, and returns a TrainingObjective
    (docs/how-to/add-an-objective.md)"""
    arguments: Mapping[str, Annotated[Scalar, SkipValidation]] = Field(default_factory=dict)
    """keyword arguments of the factory"""
    beta: Weight | None = None
    """strength of the preference or of the reference: β of dpo, ipo (its τ), simpo, cpo and kto; λ of orpo's odds
    ratio; weight of the KL divergence from the reference in grpo, rloo and ppo, where 0 needs no reference"""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    """probability that a pair is labelled the wrong way round (conservative DPO, Mitchell 2023); of dpo, simpo and
    cpo"""
    nll_weight: Weight | None = None
    """weight of the negative log-likelihood of the chosen answer, per token: of dpo (RPO, Pang et al. 2024), simpo and
    cpo"""
    margin: Weight | None = None
    """γ of simpo: by how much the chosen answer's reward shall exceed the rejected one's"""
    length_normalised: bool | None = None
    """mean instead of summed log-probabilities of an answer in dpo. ipo, simpo and orpo always take the mean"""
    reference_free: bool | None = None
    """dpo and ipo without a reference, as if it found all answers equally likely"""
    reference_quantize: Literal["none", "nf4", "int8"] | None = None
    """storage of a reference that is a copy (strategy.reference): none (that of
    adapter.quantize, else the dtype of compute), nf4 or int8"""
    desirable_weight: Weight | None = None
    """weight of desirable answers in kto"""
    undesirable_weight: Weight | None = None
    """weight of undesirable answers in kto"""
    center_weight: Weight | None = None
    """weight of (chosen + rejected reward)² in reward, which centers rewards (Eisenstein et al. 2023)"""
    rewards: Annotated[tuple[ObjectName, ...] | None, BeforeValidator(words)] = None
    """a list of package.module:function of (prompts, completions, and the records' other fields by name) to a list of
    numbers"""
    reward_weights: Annotated[tuple[float, ...] | None, BeforeValidator(words)] = None
    """a weight of each of rewards; null is 1"""
    reward_model: RecipeText | None = None
    """folder of a reward model, whose score is one more reward of weight 1"""
    group: Count | None = None
    """completions of every prompt in a step: batch_size counts completions"""
    completion_length: Count | None = None
    """most tokens of a completion; null is half of data.sequence_length. Prompts get the rest"""
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    """of sampling; the trained probabilities have the same"""
    endpoint: RecipeText | None = None
    """URL of a server that speaks OpenAI's completions and returns token ids, such as http://localhost:8000/v1 of vLLM:
    it samples, and its weights do not follow training. null samples from the trained weights"""
    endpoint_model: RecipeText | None = None
    """name of the model that the endpoint serves; null is its only one"""
    mask_truncated: bool | None = None
    """whether a completion that has not ended within completion_length trains nothing"""
    scale_rewards: bool | None = None
    """divide the advantages of a group by the standard deviation of its rewards (grpo)"""
    normalise: Literal["tokens", "length"] | None = None
    """divide the loss by the tokens of the batch, or by its completions times completion_length (Liu et al. 2025)"""
    epsilon: Annotated[float, Field(gt=0, lt=1)] | None = None
    """how far ppo's ratio of probabilities counts from 1"""
    epochs: Count | None = None
    """passes of ppo over the completions of a rollout"""
    minibatches: Count | None = None
    """optimizer steps of a pass of ppo over a rollout"""
    discount: Annotated[float, Field(gt=0, le=1)] | None = None
    """γ of ppo's generalised advantage estimation"""
    trace_decay: Annotated[float, Field(ge=0, le=1)] | None = None
    """λ of ppo's generalised advantage estimation"""
    value_weight: Weight | None = None
    """weight of the value's squared error in ppo"""
    value_epsilon: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """how far ppo's values count from those of the rollout"""
    whiten: bool | None = None
    """shift and scale ppo's advantages to mean 0 and variance 1 over the tokens of a rollout"""

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, values: Any) -> Any:
        """The keys that the objective reads have its defaults."""
        if not isinstance(values, Mapping) or not isinstance(name := values.get("name"), str):
            return values
        given = {key: value for key, value in values.items() if value is not None}
        return {**READ.get(name, {}), **given}

    @property
    def reads_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        if self.name is None or "reference_quantize" not in READ[self.name]:
            return False
        return bool(self.beta) if SAMPLES[self.name] == "prompts" else not self.reference_free

    @property
    def head(self) -> Literal["score", "value", ""]:
        """What the model has instead of its output layer, or in addition: a number per token; "" for neither."""
        heads: dict[str | None, Literal["score", "value"]] = {"reward": "score", "ppo": "value"}
        return heads.get(self.name, "")

    @property
    def unit(self) -> int:
        """Optimizer steps on one rollout: completions that the same weights have sampled."""
        return (self.epochs or 1) * (self.minibatches or 1)

    @property
    def unread(self) -> list[str]:
        """Keys that are given and that this objective does not read."""
        read = {"name", *READ[self.name]} if self.name is not None else {"factory", "arguments"}
        fields = type(self).model_fields
        given = (key for key, value in self if value != fields[key].get_default(call_default_factory=True))
        return [key for key in given if key not in read]


class PlanSpec(Section):
    """What the planner chooses by."""

    objective: Literal["seconds", "memory"] = "seconds"
    """what the planner makes small among strategies that fit: the seconds of a step, or the memory of a device;
    shardwise plan --for sets it too"""
    allow: Annotated[tuple[Literal["fp8", "pipedream"], ...], BeforeValidator(words)] = ()
    """what the planner may choose although it changes the mathematics: fp8 (8-bit products, where precision is not
    pinned to another), pipedream (stale weights)"""
