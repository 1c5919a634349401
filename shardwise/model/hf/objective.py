"""What a transformers model is trained for: the class of each objective, and a probe that finds the wrong one.

    causal    AutoModelForCausalLM    the next token, from the tokens before it; else AutoModelForImageTextToText
    masked    AutoModelForMaskedLM    hidden tokens, from the tokens on both sides (BERT)
    seq2seq   AutoModelForSeq2SeqLM   a completion, from itself so far and the whole prompt (T5)

transformers maps many encoders to a causal class, whose attention still sees both sides unless ``is_decoder`` is set.
Such a model reads the answer in its input. So a small random model of the same config runs twice, with another last
token: under a causal objective no earlier logit may move, under a masked one some must.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.model.hf.attention import use_local_attention
from shardwise.model.hf.experts import adds_router_loss, experts_implementation
from shardwise.runtime.parallel.vocabulary import IGNORED

_AUTO_CLASSES = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
_OBJECTIVE_NAMES = {"causal": "a causal", "masked": "a masked", "seq2seq": "an encoder-decoder"}
_PROBE_TOKENS = 8
_PROBE_VOCABULARY = 64
_PROBE_BLOCKS = 2
_LARGEST_PROBE = 100_000_000
"""Most parameters of a probe: where a config cannot be narrowed, two blocks in full width."""
_DEPTH_KEYS = ("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_MOVED = 1e-4
"""Of the largest change of a logit; rounding moves 1e-6."""

_DRAWING = ("PhimoeTopKRouter",)
"""Classes of routers that draw experts at random in training."""

_verdicts: dict[tuple[str, str], bool | None] = {}
"""Result of the probe by config and objective."""


def auto_class(objective: str, config: Any) -> str:
    """The name of transformers' class. Models that read images may have no causal one, such as Qwen3-VL."""
    import transformers

    if objective == "causal" and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return "AutoModelForImageTextToText"
    return _AUTO_CLASSES[objective]


def build_for(objective: str, config: Any, source: str) -> nn.Module:
    """The model with undefined values, in fp32. Raises RecipeError if transformers has none for the objective."""
    import transformers

    where = f"model.hf: {source}"
    _require_class(objective, config, where)
    try:
        model: nn.Module = getattr(transformers, auto_class(objective, config)).from_config(
            config,
            dtype=torch.float32,
            trust_remote_code=False,
            experts_implementation=experts_implementation(),
        )
    except MemoryError:
        raise
    except Exception as error:  # each class checks its config in its own way, or not at all
        plain = isinstance(error, ValueError | ImportError)
        why = str(error) if plain else f"{type(error).__name__}: {error}"
        raise RecipeError("transformers does not build the model", where=where, why=why) from error
    if torch.get_default_device().type == "meta":
        _leave_the_host(model)
    for module in model.modules():
        if type(module).__name__ in _DRAWING:
            module.train = MethodType(_as_evaluated, module)  # type: ignore[method-assign]
    if objective == "causal":
        _require_text_alone(model, where)
        _keep_language_model(model, config)
        use_local_attention(model)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None  # no token is padding, so all rows get gradients
    return model


def _require_text_alone(model: nn.Module, where: str) -> None:
    """Raise RecipeError if the model's ``forward`` has other required arguments than ``input_ids``."""
    needed = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if others := [name for name in needed if name != "input_ids"]:
        kind = type(model).__name__
        raise RecipeError(
            "the model does not run on text alone", where=where, why=f"{kind} needs {', '.join(others)}"
        )


def _keep_language_model(model: Any, config: Any) -> None:
    """Remove the parts of a larger model that text does not reach, such as towers of images and their projections."""
    if config.get_text_config() is config or type(model.config) is not type(config):
        return  # the class is that of the language model
    parts = (model.get_decoder(), model.get_output_embeddings())
    if None in parts:
        return
    language_model = {module for part in parts for module in part.modules()}
    for module in list(model.modules()):
        if module in language_model:
            continue
        for name, child in list(module.named_children()):
            if language_model.isdisjoint(child.modules()):
                delattr(module, name)


def _as_evaluated(module: nn.Module, mode: bool = True) -> nn.Module:
    """``train`` of a router that draws experts in training: it always chooses as in inference."""
    return nn.Module.train(module, False)


def _leave_the_host(model: nn.Module) -> None:
    """Put parameters and buffers on the meta device that were made by functions such as ``torch.normal``, which do not
    heed the default device.
    """
    moved: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in cast("list[dict[str, Tensor | None]]", [module._parameters, module._buffers]):
            for name, tensor in tensors.items():
                if tensor is None or tensor.is_meta:
                    continue
                if tensor not in moved:
                    empty = torch.empty_like(tensor, device="meta")
                    is_weight = isinstance(tensor, nn.Parameter)
                    moved[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
                tensors[name] = moved[tensor]


def _require_class(objective: str, config: Any, where: str) -> None:
    fits = objectives_of(config)
    if objective not in fits:
        raise RecipeError(
            f"not {_OBJECTIVE_NAMES[objective]} language model",
            where=where,
            why=f"transformers maps {config.model_type} to no {_AUTO_CLASSES[objective]}",
            fix=f"set model.objective: {fits[0]}" if fits else "",
        )


def objectives_of(config: Any) -> list[str]:
    """The objectives for which transformers has a class of this config.

    It maps encoder-decoder models to causal classes of their decoder alone, which do not fit their weights.
    """
    import transformers

    mappings = {
        "causal": (
            transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
            transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        ),
        "masked": (transformers.MODEL_FOR_MASKED_LM_MAPPING,),
        "seq2seq": (transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,),
    }
    names = [name for name, known in mappings.items() if any(type(config) in mapping for mapping in known)]
    return [name for name in names if (name == "seq2seq") == bool(config.is_encoder_decoder)]


def stored_objective(config: Any) -> str:
    """The objective of the class that saved the weights of this config."""
    if config.is_encoder_decoder:
        return "seq2seq"
    architectures = config.architectures or [""]
    return "masked" if architectures[0].endswith("ForMaskedLM") else "causal"


def decoder_inputs(labels: Tensor, config: Any) -> Tensor:
    """The labels [b, t] shifted right by one, after the token that starts a decoder; ignored ones become padding."""
    padding = getattr(config, "pad_token_id", None) or 0
    first = torch.full_like(labels[:, :1], config.decoder_start_token_id)
    shifted = torch.cat([first, labels[:, :-1]], 1)
    return shifted.masked_fill(shifted == IGNORED, padding)


def require_objective(objective: str, config: Any, source: str) -> None:
    """Raise RecipeError if the model's attention does not fit the objective. Takes a few tenths of a second."""
    where = f"model.hf: {source}"
    _require_class(objective, config, where)
    if objective == "seq2seq":
        _require_trainable_decoder(config, where)
    key = (objective, config.to_json_string(use_diff=False))
    if key not in _verdicts:
        _verdicts[key] = _looks_ahead(objective, config, source)
    looks_ahead = _verdicts[key]
    if looks_ahead is None:
        return
    if looks_ahead and objective != "masked":
        masked = "masked" in objectives_of(config)
        raise RecipeError(
            "the model is not causal",
            where=where,
            why="its logits change with tokens that come later, so next-token training would read the answer",
            fix="set model.objective: masked" if masked else "use a model with causal attention",
        )
    if not looks_ahead and objective == "masked":
        raise RecipeError(
            "the model does not see the tokens after a masked one",
            where=where,
            why="its attention is causal (is_decoder in config.json)",
            fix="set model.objective: causal",
        )


def _require_trainable_decoder(config: Any, where: str) -> None:
    if getattr(config, "decoder_start_token_id", None) is None:
        raise RecipeError(
            "the decoder has no start token",
            where=where,
            why="config.json has no decoder_start_token_id",
            fix="add it: T5 starts with its pad token, BART with its end-of-text token",
        )
    if adds_router_loss(config):
        raise RecipeError(
            "the router's auxiliary loss of an encoder-decoder is not computed",
            where=where,
            why="config.json sets output_router_logits",
            fix="set it to false",
        )


def _looks_ahead(objective: str, config: Any, source: str) -> bool | None:
    """Whether a logit changes with a later token; None if no small model of this config can be run."""
    for small in _small(config):
        try:
            # On the meta device first: a config that could not be narrowed may be of a large model.
            with torch.device("meta"):
                size = sum(p.numel() for p in build_for(objective, small, source).parameters())
            if size <= _LARGEST_PROBE:
                # Constructors draw initial values, which must not move the run's generator.
                with torch.random.fork_rng(devices=[]):
                    return _sees_later_tokens(build_for(objective, small, source), objective)
        except Exception:  # a narrowed config may contradict itself in any way
            continue
    return None


def _small(config: Any) -> Iterator[Any]:
    """Configs of two blocks and few token ids: two narrow heads, then the full width."""
    for narrow in (True, False):
        small = copy.deepcopy(config)
        try:
            for part in {id(c): c for c in (small, small.get_text_config())}.values():
                _shrink(part, narrow)
        except Exception:  # a config whose values vary from layer to layer refuses to be read as a whole
            continue
        yield small


def _shrink(config: Any, narrow: bool) -> None:
    layers = getattr(config, "num_hidden_layers", 1)
    lists = {k: v for k, v in config.to_dict().items() if isinstance(v, list) and len(v) == layers}
    for key in _DEPTH_KEYS:
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, min(_PROBE_BLOCKS, layers))
    for key, values in lists.items():
        if not key.endswith(("_token_id", "architectures")):
            setattr(config, key, values[:_PROBE_BLOCKS])
    config.vocab_size = _PROBE_VOCABULARY
    for key in ("pad_token_id", "decoder_start_token_id"):
        if (getattr(config, key, None) or 0) >= _PROBE_VOCABULARY:
            setattr(config, key, 0)
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    if not narrow or not isinstance(heads, int) or not isinstance(width, int):
        return
    if width % heads or heads <= 2:
        return
    # The width of a head stays, and so does whether heads share keys: both may decide what a class builds.
    shared = getattr(config, "num_key_value_heads", heads) != heads
    changes = {"num_attention_heads": 2, "hidden_size": 2 * (width // heads), "intermediate_size": 64}
    changes |= {"num_key_value_heads": 1 if shared else 2, "moe_intermediate_size": 32}
    for key, value in changes.items():
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, value)


@torch.no_grad()
def _sees_later_tokens(model: nn.Module, objective: str) -> bool:
    """Whether logits before the last token move with it."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        # Not the initial values of the class: zeros among them would hide what attention sees.
        spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
        parameter.normal_(0.0, spread, generator=generator)
    model.eval()
    ids = torch.randint(3, _PROBE_VOCABULARY, (1, _PROBE_TOKENS), generator=generator)
    other = ids.clone()
    # The next id, never one of the special ids 0 to 2.
    other[0, -1] = 3 + (ids[0, -1] - 2) % (_PROBE_VOCABULARY - 3)
    change = (_logits(model, objective, ids) - _logits(model, objective, other)).abs().amax(-1)[0]
    return bool(change[:-1].max() > _MOVED * change.max())


def _logits(model: nn.Module, objective: str, ids: Tensor) -> Tensor:
    inputs = {"input_ids": ids, "use_cache": False}
    if objective == "seq2seq":
        # The encoder may see all of its tokens, so only the decoder's vary.
        inputs = {**inputs, "input_ids": torch.full_like(ids, 3), "decoder_input_ids": ids}
    logits: Tensor = model(**inputs).logits
    return logits
