"""llama.cpp's architectures: the families that become a GGUF file, their metadata, and the form of their tensors.

    plus_one      Gemma's norms multiply by 1 + weight, llama.cpp's by the stored value
    permuted      transformers rotates the halves of a head, llama.cpp's ``llama`` rotates neighbouring channels
    factors       rotary frequencies of Llama 3.1 and Phi-3, which are scaled one by one, are tensors
    Conv1D        GPT-2 stores matrices as [i, o]

The keys are those that llama.cpp's convert_hf_to_gguf.py writes. llama.cpp decides some things by itself: activations,
the scale of attention, the windows of Mistral. A model is refused where its weights would mean something else there.
Where only long texts differ, or sizes that no published model has, a sentence says so (``differences``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.model.files.folder_layout import TensorShape
from shardwise.plugins.gguf.rope import Config, Rope


@dataclass(frozen=True)
class GgufFamily:
    """An architecture of llama.cpp.

    Attributes:
        name: as in a file.
        activations: names of the activation that it computes.
        biases: ends of the names of layers that have biases.
        scalings: kinds of scaled rotary frequencies that it computes.
        period: every how many blocks one has full attention, and the others a window; 0 if all have.
        largest: number of blocks of the size whose attention has another scale.
        own_output: whether the output layer may differ from the embedding.
    """

    name: str
    activations: tuple[str, ...] = ("silu",)
    biases: tuple[str, ...] = ()
    scalings: tuple[str, ...] = ("default", "linear", "yarn")
    plus_one: bool = False
    permuted: bool = False
    period: int = 0
    largest: int = 0
    own_output: bool = True


_ATTENTION_LAYERS, _FEED_FORWARD_LAYERS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj", "down_proj"),
)
_CONV1D = ("c_attn", "c_proj", "c_fc")
_TANH = ("gelu_pytorch_tanh", "gelu_new")
_PLAIN_ROPE = ("default", "linear")
_LLAMA = GgufFamily(
    "llama",
    biases=(*_ATTENTION_LAYERS, "o_proj", *_FEED_FORWARD_LAYERS),
    scalings=(*_PLAIN_ROPE, "yarn", "llama3"),
    permuted=True,
)
FAMILIES: Mapping[str, GgufFamily] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": GgufFamily("qwen2", biases=_ATTENTION_LAYERS),
    "qwen3": GgufFamily("qwen3"),
    "gemma": GgufFamily("gemma", _TANH, plus_one=True, own_output=False),
    "gemma2": GgufFamily(
        "gemma2", _TANH, scalings=_PLAIN_ROPE, plus_one=True, period=2, largest=46, own_output=False
    ),
    "gemma3_text": GgufFamily("gemma3", _TANH, scalings=_PLAIN_ROPE, plus_one=True, period=6, largest=62),
    "phi3": GgufFamily("phi3", scalings=("default", "longrope")),
    "gpt2": GgufFamily("gpt2", _TANH, (*_CONV1D, "ln_1", "ln_2", "ln_f"), ("default",)),
}
"""By ``model_type`` of a config."""
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_FIXED: Mapping[str, object] = {
    "use_bidirectional_attention": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
"""Settings of a config that llama.cpp cannot vary."""


class Architecture:
    """A model of Hugging Face as llama.cpp reads it.

    Args:
        config: of its folder.

    Attributes:
        family: None if llama.cpp's architecture of this model is not written here.
    """

    def __init__(self, config: Config) -> None:
        self._config = _with_defaults(config)
        self.family = FAMILIES.get(str(config.get("model_type")))
        self._rope = Rope(self._config)

    def obstacle(self, stored: Sequence[str]) -> str:
        """Why a model with these tensors cannot be written; "" if it can."""
        family, config = self.family, self._config
        if family is None:
            return f"its model_type is {config.get('model_type')}; {', '.join(FAMILIES)} are written"
        activation = next((config[key] for key in _ACTIVATIONS if config.get(key)), family.activations[0])
        if activation not in family.activations:
            return f"its activation is {activation}, and llama.cpp computes {family.activations[0]}"
        if scaling := self._rope.obstacle(family.scalings):
            return f"its rotary angles are scaled ({scaling})"
        if self._rope.part != 1 and family.name != "phi3":
            return "it rotates a part of every head"
        layers = [
            name.removesuffix(".bias") for name in stored if name.endswith(".bias") and self.keeps(name)
        ]
        if odd := next((name for name in layers if not name.endswith(family.biases or "*")), ""):
            return f"its layer {odd} has a bias"
        if not family.own_output and not self._tied:
            return "its output layer is not its embedding"
        for key, usual in _FIXED.items():
            if (value := config.get(key)) not in (None, usual):
                return f"its {key} is {value}"
        if family.period and self._period is None:
            return "its blocks with full attention are not every N-th"
        return self._caps()

    def _caps(self) -> str:
        scores, logits = (self._config.get(f"{part}_logit_softcapping") for part in ("attn", "final"))
        if self.family is FAMILIES["gemma2"] and not (scores and logits):
            return "llama.cpp caps the logits of gemma2, and this model does not"
        return "it caps the scores of attention" if self.family is FAMILIES["gemma3_text"] and scores else ""

    def differences(self) -> Iterator[str]:
        """Where llama.cpp computes something else than the model, in sentences."""
        config, family = self._config, self._known
        window = config.get("sliding_window")
        if not family.period and window and window < config["max_position_embeddings"]:
            yield f"llama.cpp ignores sliding_window: texts longer than {window:,} tokens get other answers there"
        yield from self._rope.differences()
        if family.largest and (scalar := config["query_pre_attn_scalar"]) != self._scalar:
            yield f"llama.cpp ignores query_pre_attn_scalar {scalar} and computes with {self._scalar}: answers differ"

    def describe(self, writer: Any) -> None:
        """Write the sizes of the model under the architecture's name."""
        config, family = self._config, self._known
        writer.add_vocab_size(config["vocab_size"])
        if family.name == "gpt2":
            writer.add_context_length(config["n_positions"])
            writer.add_embedding_length(config["n_embd"])
            writer.add_block_count(config["n_layer"])
            writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
            writer.add_head_count(config["n_head"])
            writer.add_layer_norm_eps(config["layer_norm_epsilon"])
            return
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(self.blocks)
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
        writer.add_key_length(self._rope.head)
        writer.add_value_length(self._rope.head)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        self._rope.describe(writer)
        self._describe_attention(writer)

    def _describe_attention(self, writer: Any) -> None:
        config, family = self._config, self._known
        if window := config.get("sliding_window"):
            writer.add_sliding_window(window)
        elif family.name == "phi3":
            writer.add_sliding_window(0)  # llama.cpp tells Phi-4 by it
        if family.period and self._period != family.period:
            writer.add_uint32(f"{family.name}.attention.sliding_window_pattern", self._period)
        if scores := config.get("attn_logit_softcapping"):
            writer.add_attn_logit_softcapping(scores)
        if logits := config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(logits)

    def factors(self) -> dict[str, Tensor]:
        """Tensors that divide the rotary frequencies, by name in a file."""
        return self._rope.factors()

    def keeps(self, stored: str) -> bool:
        """Whether a tensor of the folder is in the file: a tied output layer and GPT-2's causal mask are not."""
        if stored == "lm_head.weight":
            return not self._tied
        return not stored.endswith((".attn.bias", ".attn.masked_bias"))

    def shape(self, stored: str, shape: TensorShape) -> TensorShape:
        """The shape of a tensor in the file."""
        return tuple(reversed(shape)) if self._is_conv1d(stored) else tuple(shape)

    def value(self, weight: Tensor, stored: str) -> Tensor:
        """A tensor of the folder, in fp32, as it is in the file."""
        path = stored.rpartition(".")[0]
        if self._known.plus_one and stored.endswith("norm.weight"):
            return weight + 1
        if self._is_conv1d(stored):
            return weight.t()
        if self._known.permuted and path.endswith(("q_proj", "k_proj")):
            key = "num_attention_heads" if path.endswith("q_proj") else "num_key_value_heads"
            heads = self._config.get(key) or self._config["num_attention_heads"]
            # channel i + d/2 of a head after channel i
            return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        return weight

    @property
    def name(self) -> str:
        """llama.cpp's name of the architecture."""
        return self._known.name

    @property
    def blocks(self) -> int:
        return int(self._config["n_layer" if self._known.name == "gpt2" else "num_hidden_layers"])

    @property
    def vocab(self) -> int:
        return int(self._config["vocab_size"])

    @property
    def _known(self) -> GgufFamily:
        assert self.family is not None
        return self.family

    @property
    def _tied(self) -> bool:
        return bool(self._config.get("tie_word_embeddings"))

    @property
    def _scalar(self) -> int:
        """The number by whose root llama.cpp divides the scores of Gemma's attention."""
        if self.blocks == self._known.largest:
            return int(self._config["hidden_size"] // self._config["num_attention_heads"])
        return self._rope.head

    @property
    def _period(self) -> int | None:
        """Every how many blocks one has full attention; None if there is no such number."""
        kinds = self._config.get("layer_types")
        for period in (self._known.period, *range(1, self.blocks + 2)):
            full = [(block + 1) % period == 0 for block in range(self.blocks)]
            if not kinds or full == [kind == "full_attention" for kind in kinds]:
                return period
        return None

    def _is_conv1d(self, stored: str) -> bool:
        return self._known.name == "gpt2" and stored.removesuffix(".weight").endswith(_CONV1D)


def _with_defaults(config: Config) -> Config:
    """A config with the defaults of its class, under the keys of transformers 5; as it is without transformers."""
    try:
        from transformers import AutoConfig
    except ImportError:
        return config
    rest = {key: value for key, value in config.items() if key != "model_type"}
    try:
        return dict(AutoConfig.for_model(config.get("model_type"), **rest).to_dict())
    except Exception:  # a family that transformers does not know, or a value that it refuses
        return config
