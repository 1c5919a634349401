"""GGUF files: read back by llama.cpp's own reader, with its rounding and its order of channels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.cli.main import run as run_cli
from shardwise.core.errors import NumericsError
from shardwise.core.scheme import scheme_of
from shardwise.exporter.export_run import export_model, export_run
from shardwise.plugins.gguf.export import export_gguf
from shardwise.plugins.gguf.tokenizer import LLAMA_3
from tests.exporter.test_export_run import leave_run
from tests.harness.pool import Pool
from tests.harness.quantized import SMALL, write_quantized_folder
from tests.harness.small_models import CHATML, write_model, write_tokenizer

transformers = pytest.importorskip("transformers")
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


@pytest.mark.parametrize(("kind", "largest"), [("fp16", 6e4), ("q8_0", 8e6), ("q4_0", 5e5)])
def test_weights_beyond_the_range_of_a_type_are_refused(kind: str, largest: float, tmp_path: Path) -> None:
    """They were infinite in the file."""
    model = tmp_path / "model"
    write_model(model, "llama", hidden_size=32)
    weight = load_file(model / "model.safetensors")
    for factor in (1.0, 2.0):
        weight["model.layers.0.mlp.up_proj.weight"][0, 0] = factor * largest
        save_file(weight, model / "model.safetensors", metadata={"format": "pt"})
        if factor == 1:
            assert export_gguf(model, tmp_path / "model.gguf", kind).path.is_file()
            continue
        with pytest.raises(NumericsError, match="too large") as caught:
            export_gguf(model, tmp_path / "other.gguf", kind)
        assert "ffn_up" in caught.value.line() and not list(tmp_path.glob("*other*"))
    if kind == "fp16":
        with pytest.raises(NumericsError, match="too large"):
            export_model(model, tmp_path / "out", "fp16")
        assert not (tmp_path / "out").exists()


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
    settings = {"added_tokens_decoder": {"29": {"content": "<tag>", "special": True}}}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
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
    assert (tokens[29], kinds[29]) == ("<tag>", 3)  # which only the file next to it names


# ---- families ---------------------------------------------------------------------------------------------

PROBE = "I've been told: 1234 models don't fit,  ünïcode 日本 <|im_start|>user\n  Hi<|im_end|>\n<think>x"


def written(
    folder: Path, family: str, kind: str, capsys: pytest.CaptureFixture[str], **values: Any
) -> tuple[Any, Any, Path, str]:
    """A model and its tokenizer, the file that the command writes, and what the command says."""
    model, tokenizer = write_model(folder / "model", family, kind, **values)
    out = folder / "out.gguf"
    assert run_cli(["export", str(folder / "model"), str(out), "--gguf", "fp32"]) == 0
    return model, tokenizer, out, capsys.readouterr().out


READ_BY_TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "gpt2", {}),
    "llama, tied, wide heads": ("llama", "llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "mistral": ("mistral", "llama", {"sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen2, tied": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    # transformers' reader takes the config's default for the width of heads.
    "qwen3": (
        "qwen3",
        "qwen2",
        {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "gemma2": ("gemma2", "gemma", {"head_dim": 256, "sliding_window": 8}),
    "gemma3": ("gemma3_text", "gemma", {"head_dim": 256, "sliding_window": 8, "num_hidden_layers": 7}),
    "phi3": ("phi3", "gpt2", {"pad_token_id": 0, "num_key_value_heads": 1}),
    "gpt2": ("gpt2", "gpt2", {"max_position_embeddings": 1024}),
}


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_model(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, kind, values = READ_BY_TRANSFORMERS[name]
    model, tokenizer, out, said = written(tmp_path, family, kind, capsys, **values)
    auto = transformers.AutoModelForCausalLM
    read = auto.from_pretrained(
        tmp_path, gguf_file=out.name, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor([tokenizer(PROBE).input_ids])
    with torch.no_grad():
        expected, found = model(ids).logits, read.eval()(ids).logits
    assert (found - expected).abs().max() <= 1e-5
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=out.name)
    assert theirs(PROBE).input_ids == ids[0].tolist()
    asked = [{"role": "user", "content": "Hi"}]
    texts = [each.apply_chat_template(asked, tokenize=False) for each in (theirs, tokenizer)]
    assert texts[0] == texts[1]
    assert "with its tokenizer" in said


def test_gemma_is_written_with_the_names_and_keys_of_llama_cpp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers does not read the first Gemma: its names and values, as llama.cpp's converter has them."""
    model, _, out, _ = written(tmp_path, "gemma", "gemma", capsys, head_dim=32)
    reader = gguf.GGUFReader(out)
    found = {t.name: torch.tensor(t.data) for t in reader.tensors}
    weights = model.state_dict()
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for block in range(2):
        here, there = f"blk.{block}.", f"model.layers.{block}."
        names |= {
            f"{here}attn_norm.weight": f"{there}input_layernorm.weight",
            f"{here}ffn_norm.weight": f"{there}post_attention_layernorm.weight",
            f"{here}attn_output.weight": f"{there}self_attn.o_proj.weight",
        }
        names |= {f"{here}attn_{part}.weight": f"{there}self_attn.{part}_proj.weight" for part in "qkv"}
        parts = ("gate", "up", "down")
        names |= {f"{here}ffn_{part}.weight": f"{there}mlp.{part}_proj.weight" for part in parts}
    assert found.keys() == names.keys()
    for name, stored in names.items():
        shift = 1 if "norm" in name else 0
        assert torch.equal(found[name].view_as(weights[stored]), weights[stored] + shift), name
    sizes = {"attention.key_length": 32, "attention.head_count_kv": 2, "feed_forward_length": 96}
    assert {key: value(reader, f"gemma.{key}") for key in sizes} == sizes
    ids = {"bos": 2, "eos": 1, "unknown": 3, "padding": 0}
    assert {key: value(reader, f"tokenizer.ggml.{key}_token_id") for key in ids} == ids
    assert value(reader, "tokenizer.ggml.add_bos_token") and not value(
        reader, "tokenizer.ggml.add_space_prefix"
    )


def inverse_frequencies(config: Any, length: int) -> tuple[Tensor, float]:
    """transformers' rotary frequencies for texts of a length, and its factor of the rotated channels."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](
        config, torch.device("cpu"), seq_len=length
    )


def test_the_factors_of_llama_3_are_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    model, _, out, _ = written(tmp_path, "llama", "gpt2", capsys, rope_parameters=rope)
    reader = gguf.GGUFReader(out)
    [found] = [torch.tensor(t.data) for t in reader.tensors if t.name == "rope_freqs.weight"]
    plain = 5e5 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(plain / found, inverse_frequencies(model.config, 128)[0])
    assert 1.0 in found and 8.0 in found and value(reader, "llama.rope.freq_base") == 5e5


def test_the_factors_of_phi_3_are_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    model, _, out, said = written(
        tmp_path,
        "phi3",
        "gpt2",
        capsys,
        rope_parameters=rope,
        original_max_position_embeddings=32,
        pad_token_id=0,
    )
    reader = gguf.GGUFReader(out)
    read = {t.name: torch.tensor(t.data) for t in reader.tensors}
    plain = 1e4 ** -(torch.arange(0, 8, 2) / 8)
    for kind, length in (("short", 32), ("long", 33)):
        expected, factor = inverse_frequencies(model.config, length)
        torch.testing.assert_close(plain / read[f"rope_factors_{kind}.weight"], expected)
    assert value(reader, "phi3.rope.scaling.attn_factor") == pytest.approx(factor)
    assert value(reader, "phi3.rope.scaling.original_context_length") == 32
    assert value(reader, "phi3.rope.dimension_count") == 8
    assert "whenever its context (-c) is above 32" in said


def test_keys_that_transformers_does_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scaled angles, windows, caps: the keys of llama.cpp's converter."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    local = {"rope_type": "default", "rope_theta": 1e4}
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    ropes = {"full_attention": scaled, "sliding_attention": local}
    cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("qwen3", "qwen3", {"rope_parameters": yarn, "head_dim": 32},
         {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
          "attention.key_length": 32}),
        ("llama", "llama", {"rope_parameters": scaled}, {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
        ("gemma2", "gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
         {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 8}),
        ("gemma3_text", "gemma3",
         {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "rope_parameters": ropes,
          "layer_types": ["sliding_attention", "full_attention"]},
         {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "rope.scaling.type": "linear",
          "attention.sliding_window": 8, "attention.sliding_window_pattern": 2}),
        ("phi3", "phi3", {"pad_token_id": 0}, {"attention.sliding_window": 0}),
    ]  # fmt: skip
    for number, (family, name, values, keys) in enumerate(cases):
        _, _, out, said = written(tmp_path / str(number), family, "gpt2", capsys, **values)
        reader = gguf.GGUFReader(out)
        assert {key: value(reader, f"{name}.{key}") for key in keys} == pytest.approx(keys), family
        assert "ignores" not in said


@pytest.mark.parametrize(
    ("family", "kind", "values", "said"),
    [
        ("mistral", "gpt2", {"sliding_window": 64}, "ignores sliding_window: texts longer than 64 tokens"),
        ("gemma2", "gemma", {"head_dim": 16}, "ignores query_pre_attn_scalar 256 and computes with 16"),
        ("llama", "llama", {}, "puts a blank after every added token"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_said(
    family: str,
    kind: str,
    values: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said in written(tmp_path, family, kind, capsys, **values)[3]


def test_biases_of_queries_and_keys_turn_with_their_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bias is the product of the weight with one more input that is 1: their order in the file is the same."""
    model, _, out, _ = written(tmp_path, "llama", "gpt2", capsys, attention_bias=True, mlp_bias=True)
    read = {t.name: torch.tensor(t.data) for t in gguf.GGUFReader(out).tensors}
    layer = model.model.layers[1].self_attn
    for part, linear in (("q", layer.q_proj), ("k", layer.k_proj), ("v", layer.v_proj)):
        rows = [linear.weight.tolist().index(row) for row in read[f"blk.1.attn_{part}.weight"].tolist()]
        assert torch.equal(read[f"blk.1.attn_{part}.bias"], linear.bias[rows]), part
        assert rows == sorted(rows) or part != "v"
    assert torch.equal(read["blk.1.ffn_down.bias"], model.model.layers[1].mlp.down_proj.bias)


@pytest.mark.parametrize("model", ["qwen3", "gpt2"])
def test_a_native_run_is_read_by_transformers(model: str, pool: Pool, tmp_path: Path) -> None:
    """With the tokenizer of its recipe, whose chats end with another token than its texts."""
    write_tokenizer(tmp_path / "tokenizer", "qwen2")
    sizes = {"family": model, "layers": 2, "width": 64, "heads": 2, "kv_heads": 2, "ffn": 256, "vocab": 400}
    sizes |= {"context": 1024} | ({"head_dim": 128} if model == "qwen3" else {})
    values = {"model": sizes, "data": {"tokenizer": str(tmp_path / "tokenizer"), "sequence_length": 16}}
    pool.run(1, leave_run, tmp_path / "run", values, {"zero_stage": 0})
    export_run(tmp_path / "run", tmp_path / "folder")
    export_gguf(tmp_path / "run", tmp_path / "out.gguf", "fp32")
    auto, tokenizer = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
    ids = torch.tensor([tokenizer.from_pretrained(tmp_path / "folder")(PROBE).input_ids])
    assert tokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")(PROBE).input_ids == ids[0].tolist()
    folder = auto.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    read = auto.from_pretrained(tmp_path, gguf_file="out.gguf", dtype=torch.float32)
    with torch.no_grad():
        assert (folder.eval()(ids).logits - read.eval()(ids).logits).abs().max() <= 1e-5
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    ends = {fields[f"tokenizer.ggml.{key}_token_id"].contents() for key in ("eos", "eot")}
    assert ends == {folder.config.eos_token_id, *folder.generation_config.eos_token_id}


def test_a_template_loses_the_marks_that_llama_cpp_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marked = CHATML.replace("{{ m.content }}", "{%- generation -%}  {{ m.content }}{% endgeneration %}  ")
    _, tokenizer, out, _ = written(tmp_path, "llama", "gpt2", capsys, template=marked)
    found = value(gguf.GGUFReader(out), "tokenizer.chat_template")
    assert "generation" not in found.replace("add_generation_prompt", "")
    asked = [{"role": "user", "content": "Hi"}]
    texts = [
        tokenizer.apply_chat_template(asked, chat_template=each, tokenize=False) for each in (found, marked)
    ]
    assert texts[0] == texts[1]


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("family", "values", "why"),
    [
        (
            "olmo2",
            {},
            "its model_type is olmo2; llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text, phi3, gpt2",
        ),
        ("llama", {"rope_parameters": DYNAMIC}, "scaled (dynamic)"),
        ("qwen3", {"attention_bias": True}, "q_proj has a bias"),
        ("gemma2", {"tie_word_embeddings": False}, "output layer is not its embedding"),
        ("gemma2", {"attn_logit_softcapping": None}, "caps the logits of gemma2"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ],
)
def test_others_are_refused_in_one_line(
    family: str, values: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "model", family, **values)
    capsys.readouterr()
    assert run_cli(["export", str(tmp_path / "model"), str(tmp_path / "out.gguf")]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "cannot be written as GGUF" in line and why in line
    assert not list(tmp_path.glob("*gguf"))
