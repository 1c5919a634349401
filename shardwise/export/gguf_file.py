"""Writes a Llama-family model as one GGUF file for llama.cpp: ``shardwise export MODEL OUT.gguf``.

The ``gguf`` library of the llama.cpp project writes the file and rounds to its types. Tensors pass through memory one
after the other; they are read back and compared before the file gets its name. llama.cpp rotates neighbouring channels
where transformers rotates halves, so the rows of queries and keys are permuted, as its own converter does.

A byte-level BPE tokenizer goes into the file if llama.cpp knows its way to split text. Otherwise the file has none and
takes token ids.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from shardwise.core.errors import CheckpointError, RecipeError, ResourceError
from shardwise.export.ends import ends_of
from shardwise.export.hf_writer import Contents
from shardwise.model.files.hf_folder import Shape

TYPES = {"fp32": "F32", "fp16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
"""GGUF's types of matrices, by their names in the command line."""
FAMILIES = ("llama", "mistral")
"""``model_type`` of models that are llama.cpp's architecture ``llama``."""

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class WrittenFile:
    """A finished file. ``tokenizer``: llama.cpp's name of the tokenizer's rule for splitting; None if it has none."""

    path: Path
    tensors: int
    bytes: int
    tokenizer: str | None


def write_gguf(target: Path, contents: Contents, kind: str) -> WrittenFile:
    """Write a model as a GGUF file.

    Args:
        kind: type of the matrices, a key of ``TYPES``. Vectors are fp32. Embedding and output of q4_0 are q8_0, and
            a matrix whose rows are no multiple of 32 is fp16.

    Raises:
        RecipeError: the file exists, gguf is not installed, or the model is of another family.
        ResourceError: the disk is full or not writable.
        CheckpointError: a tensor reads back with other values.
    """
    if target.exists():
        raise RecipeError("the file exists already", where=str(target), fix="give another name, or delete it")
    config, gguf = contents.layout.config, _library()
    _require_family(config)
    staged = target.absolute().with_name(f"tmp-{secrets.token_hex(8)}-{target.name}")
    try:
        staged.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(staged, "llama")
        _describe(writer, gguf, config, kind)
        tokenizer = _add_tokenizer(writer, contents, int(config["vocab_size"]))
        hashes = _write_tensors(writer, gguf, contents, kind)
        _require_same(gguf, staged, hashes)
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        size = staged.stat().st_size
        staged.rename(target)
    except OSError as error:
        raise ResourceError(
            "cannot write the file",
            where=str(target),
            why=error.strerror or str(error),
            fix="free some space",
        ) from error
    finally:
        staged.unlink(missing_ok=True)
    return WrittenFile(target, len(hashes), size, tokenizer)


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise RecipeError(
            "gguf is not installed", where="OUT.gguf", fix="pip install 'shardwise[gguf]'"
        ) from error
    return gguf


def _require_family(config: Mapping[str, Any]) -> None:
    rope = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("rope_type", "default")
    why = ""
    if config.get("model_type") not in FAMILIES:
        why = f"its model_type is {config.get('model_type')}, and {' and '.join(FAMILIES)} are written"
    elif rope != "default":
        why = f"its rotary angles are scaled ({rope})"
    elif config.get("attention_bias") or config.get("mlp_bias"):
        why = "its linear layers have biases"
    if why:
        raise RecipeError(
            "this model cannot be written as GGUF",
            where="model",
            why=why,
            fix="write a folder, and convert it with llama.cpp's convert_hf_to_gguf.py",
        )


def _describe(writer: Any, gguf: Any, config: Mapping[str, Any], kind: str) -> None:
    heads, width = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim") or width // heads
    theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(theta))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    names = {"fp32": "ALL_F32"} | {key: f"MOSTLY_{name}" for key, name in TYPES.items() if key != "fp32"}
    writer.add_file_type(gguf.LlamaFileType[names[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


# ---- tensors ----------------------------------------------------------------------------------------------


def _write_tensors(writer: Any, gguf: Any, contents: Contents, kind: str) -> dict[str, str]:
    """Write all tensors; return the hash of each."""
    config = contents.layout.config
    named = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    found: dict[str, str] = {}  # GGUF's name by the name in a folder
    for group in contents.layout.groups:
        for stored, shape in group.shapes.items():
            name = found[stored] = named.get_name(stored, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise RecipeError("GGUF has no name for a tensor", where=stored, fix="write a folder")
            to = gguf.GGMLQuantizationType[_type_of(name, shape, kind)]
            size = gguf.quant_shape_to_byte_shape(shape, to) if to.name[0] == "Q" else shape
            itemsize = 1 if to.name[0] == "Q" else {"F32": 4, "F16": 2}[to.name]
            dtype = {"F32": "float32", "F16": "float16"}.get(to.name, "uint8")
            nbytes = torch.Size(size).numel() * itemsize
            writer.add_tensor_info(name, size, _dtype(dtype), nbytes, raw_dtype=to)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file):
        write()
    hashes: dict[str, str] = {}
    for group in contents.layout.groups:
        made = group.make([contents.read(name) for name in group.sources])
        for stored, shape in group.shapes.items():
            to = gguf.GGMLQuantizationType[_type_of(found[stored], shape, kind)]
            values = _permuted(made[stored].float(), stored, config).contiguous().numpy()
            data = gguf.quants.quantize(values, to)
            hashes[found[stored]] = xxhash.xxh3_128_hexdigest(data.tobytes())
            writer.write_tensor_data(data)
    writer.close()
    return hashes


def _dtype(name: str) -> Any:
    import numpy

    return numpy.dtype(name)


def _type_of(name: str, shape: Shape, kind: str) -> str:
    if len(shape) < 2:
        return "F32"
    if kind in ("fp32", "fp16"):
        return TYPES[kind]
    if shape[-1] % 32:
        return "F16"
    return "Q8_0" if name in ("token_embd.weight", "output.weight") else TYPES[kind]


def _permuted(weight: Tensor, stored: str, config: Mapping[str, Any]) -> Tensor:
    """Queries and keys with channel i + d/2 of a head after channel i."""
    heads = config["num_attention_heads"]
    if stored.endswith(".k_proj.weight"):
        heads = config.get("num_key_value_heads") or heads
    elif not stored.endswith(".q_proj.weight"):
        return weight
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _require_same(gguf: Any, path: Path, hashes: Mapping[str, str]) -> None:
    found = {
        each.name: xxhash.xxh3_128_hexdigest(each.data.tobytes()) for each in gguf.GGUFReader(path).tensors
    }
    if found != hashes:
        raise CheckpointError(
            "the file was not written correctly", where=str(path), why="it reads back with other values"
        )


# ---- tokenizer --------------------------------------------------------------------------------------------


def _add_tokenizer(writer: Any, contents: Contents, vocab: int) -> str | None:
    """Add a byte-level BPE tokenizer; return llama.cpp's name of its rule for splitting text."""
    source = contents.extra_files.get("tokenizer.json")
    said = json.loads(source.read_text(encoding="utf-8")) if isinstance(source, Path) else {}
    rule = _rule_of(said)
    if rule is None:
        writer.add_tokenizer_model("none")
        return None
    model, added = said["model"], {each["id"]: each for each in said.get("added_tokens", ())}
    tokens = {number: token for token, number in model["vocab"].items()}
    tokens |= {number: each["content"] for number, each in added.items()}
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in range(vocab)])
    writer.add_token_types([_kind(number, tokens, added) for number in range(vocab)])
    writer.add_token_merges(merges)
    for key, add in (("bos_token_id", writer.add_bos_token_id), ("eos_token_id", writer.add_eos_token_id)):
        if isinstance(contents.layout.config.get(key), int):
            add(contents.layout.config[key])
    eos = contents.layout.config.get("eos_token_id")
    for end in ends_of(contents):
        if not isinstance(eos, int):
            eos = end
            writer.add_eos_token_id(end)
        elif end != eos:  # llama.cpp stops at both
            writer.add_eot_token_id(end)
            break
    return rule


def _rule_of(tokenizer: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for the pre-tokenizer of a byte-level BPE; None for one that is not known here."""
    before = tokenizer.get("pre_tokenizer") or {}
    if (tokenizer.get("model") or {}).get("type") != "BPE" or tokenizer.get("normalizer"):
        return None
    if before.get("type") == "ByteLevel":
        plain = before.get("use_regex", True) and not before.get("add_prefix_space")
        return "gpt-2" if plain else None
    parts: Sequence[Mapping[str, Any]] = before.get("pretokenizers") or ()
    if [each.get("type") for each in parts] != ["Split", "ByteLevel"] or parts[1].get("use_regex", True):
        return None
    return "llama-bpe" if (parts[0].get("pattern") or {}).get("Regex") == LLAMA_3 else None


def _kind(number: int, tokens: Mapping[int, str], added: Mapping[int, Any]) -> int:
    """llama.cpp's token types: 1 normal, 3 control, 4 user-defined, 5 unused."""
    if number in added:
        return 3 if added[number].get("special") else 4
    return 1 if number in tokens else 5
