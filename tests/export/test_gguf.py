"""GGUF files: read back by llama.cpp's own reader, with its rounding and its order of channels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.cli.main import run as run_cli
from shardwise.core.scheme import scheme_of
from shardwise.export.gguf_file import LLAMA_3
from tests.harness.quantized import SMALL, write_quantized_folder

pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

HEAD = SMALL.head_width


def exported(folder: Path, kind: str) -> tuple[dict[str, Tensor], Any]:
    out = folder.with_name("out.gguf")
    assert run_cli(["export", str(folder), str(out), "--gguf", kind]) == 0
    reader = gguf.GGUFReader(out)
    read = {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    return read, reader


def value(reader: Any, key: str) -> Any:
    return reader.get_field(key).contents()


def rotated_halves(x: Tensor, position: int) -> Tensor:
    """transformers: channel i turns with channel i + d/2."""
    angle = position * 10000 ** -(torch.arange(0, HEAD, 2) / HEAD)
    first, second = x.chunk(2)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()])


def rotated_neighbours(x: Tensor, position: int) -> Tensor:
    """llama.cpp: channel 2i turns with channel 2i + 1."""
    angle = position * 10000 ** -(torch.arange(0, HEAD, 2) / HEAD)
    first, second = x[::2], x[1::2]
    pairs = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
    return torch.stack(pairs, 1).flatten()


def test_tensors_and_sizes_are_read_back(tmp_path: Path) -> None:
    """From a quantized folder, so the weights are the dequantized ones."""
    tensors = write_quantized_folder(tmp_path / "model", scheme_of("w4a16-g16"))
    read, reader = exported(tmp_path / "model", "fp32")
    assert len(read) == len(tensors)
    assert torch.equal(read["blk.1.ffn_down.weight"], tensors["layers.1.mlp.down_proj.weight"])
    assert torch.equal(read["token_embd.weight"], tensors["embed_tokens.weight"])
    assert torch.equal(read["output_norm.weight"], tensors["norm.weight"])
    sizes = {"block_count": 2, "embedding_length": 64, "feed_forward_length": 128, "context_length": 64}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": HEAD}
    assert {key: value(reader, f"llama.{key}") for key in sizes} == sizes
    assert value(reader, "tokenizer.ggml.model") == "none"


def test_scores_of_attention_are_the_same(tmp_path: Path) -> None:
    tensors = write_quantized_folder(tmp_path / "model", None)
    read, _ = exported(tmp_path / "model", "fp32")
    x, y = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    names = ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight")
    q, k = (tensors[name][:HEAD] @ each for name, each in zip(names, (x, y), strict=True))
    expected = rotated_halves(q, 5) @ rotated_halves(k, 2)
    q, k = (read[f"blk.0.attn_{part}.weight"][:HEAD] @ each for part, each in (("q", x), ("k", y)))
    found = rotated_neighbours(q, 5) @ rotated_neighbours(k, 2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "steps"), [("q8_0", 127), ("q4_0", 8)])
def test_rounding_is_llama_cpps(kind: str, steps: int, tmp_path: Path) -> None:
    """Blocks of 32 with a scale in fp16: q8_0 rounds within half a step, q4_0 within one at the far end.

    The scale's own rounding, 2⁻¹¹, moves the largest code by ``steps`` times as much.
    """
    tensors = write_quantized_folder(tmp_path / "model", None)
    read, reader = exported(tmp_path / "model", kind)
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert kinds["blk.0.ffn_up.weight"] == kind.upper() and kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["output.weight"] == "Q8_0"
    blocks = tensors["layers.0.mlp.up_proj.weight"].view(-1, 32)
    error = (read["blk.0.ffn_up.weight"].view(-1, 32) - blocks).abs()
    room = (0.5 if kind == "q8_0" else 1) + steps * 2**-11
    assert (error <= room * blocks.abs().amax(1, keepdim=True) / steps + 1e-6).all()


BPE = {"type": "BPE", "vocab": {chr(97 + n): n for n in range(26)} | {"ab": 26}, "merges": [["a", "b"]]}
SPLIT = [{"type": "Split", "pattern": {"Regex": LLAMA_3}}, {"type": "ByteLevel", "use_regex": False}]


@pytest.mark.parametrize(
    ("before", "rule"),
    [
        ({"type": "ByteLevel", "add_prefix_space": False}, "gpt-2"),
        ({"type": "Sequence", "pretokenizers": SPLIT}, "llama-bpe"),
        ({"type": "Whitespace"}, None),
    ],
)
def test_known_tokenizers_are_written(before: Any, rule: str | None, tmp_path: Path) -> None:
    write_quantized_folder(tmp_path / "model", None)
    added = [{"id": 27, "content": "<end>", "special": True}]
    text = json.dumps({"model": BPE, "pre_tokenizer": before, "added_tokens": added})
    (tmp_path / "model" / "tokenizer.json").write_text(text)
    _, reader = exported(tmp_path / "model", "fp16")
    if rule is None:
        assert value(reader, "tokenizer.ggml.model") == "none"
        return
    assert value(reader, "tokenizer.ggml.pre") == rule
    assert value(reader, "tokenizer.ggml.merges") == ["a b"]
    tokens, kinds = (value(reader, f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    assert len(tokens) == len(kinds) == 257
    assert (tokens[0], tokens[26], tokens[27], tokens[28]) == ("a", "ab", "<end>", "[PAD28]")
    assert (kinds[0], kinds[27], kinds[28]) == (1, 3, 5)


def test_other_families_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_quantized_folder(tmp_path / "model", None)
    path = tmp_path / "model" / "config.json"
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": scaled}))
    assert run_cli(["export", str(tmp_path / "model"), str(tmp_path / "out.gguf")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "cannot be written as GGUF" in line and "linear" in line
    assert not list(tmp_path.glob("*gguf"))
