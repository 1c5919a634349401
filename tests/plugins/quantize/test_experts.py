"""Experts of mixtures: their inputs, their matrices, those that no token reaches, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwise.core.scheme import scheme_of
from shardwise.model.hf import HuggingFaceModel
from shardwise.plugins.quantize import experts
from shardwise.plugins.quantize.calibration import Texts, open_batches
from shardwise.plugins.quantize.job import quantize_model
from shardwise.plugins.quantize.methods import method_of
from shardwise.plugins.quantize.methods.base import InputStatistics
from shardwise.plugins.quantize.methods.rtn import RoundToNearest
from shardwise.plugins.quantize.quantizer import Quantizer
from shardwise.plugins.quantize.report import Quantized
from shardwise.plugins.quantize.settings import Settings
from shardwise.plugins.quantize.source import open_source_model
from shardwise.plugins.quantize.statistics import shrunk
from shardwise.runtime.quantization.stored import weight_of
from shardwise.runtime.quantization.weights import QuantizedWeight
from tests.harness.corpora import write_words
from tests.harness.pool import Pool
from tests.harness.tiers import quick
from tests.plugins.quantize.stubs import saved_model, unpredicted
from tests.plugins.quantize.test_run import pass_here

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

LENGTH, SEQUENCES = 16, 16
NAMES = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}
"""Gate, up and down of an expert in the files."""
STACKS = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}
FEW = ("rtn", "hqq", "gptq", "awq")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


def base_of(folder: Path, family: str = "qwen3_moe", **changes: Any) -> Path:
    write_words(folder / "words.txt", 3000)
    return saved_model(folder / "base", family, vocab_size=256, num_hidden_layers=1, **changes)


def settings_of(folder: Path, scheme: str, method: str, out: str = "out", **changes: Any) -> Settings:
    names = {"calibrate": str(folder / "words.txt"), "tokenizer": "bytes", "sequences": SEQUENCES}
    names |= {"length": LENGTH, **changes}
    return Settings(str(folder / "base"), folder / out, scheme, method, **names)


def quantized(folder: Path, scheme: str, method: str, out: str = "out", **changes: Any) -> Quantized:
    with unpredicted():
        return quantize_model(settings_of(folder, scheme, method, out, **changes))


@torch.no_grad()
def rows_of_experts(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """What gate and up, and what down of every expert of the first block read, from a plain loop over tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    block = model.model.layers[0].mlp
    calls: list[tuple[Tensor, Tensor]] = []
    block.experts.register_forward_pre_hook(lambda _, given: calls.append((given[0], given[1])))
    texts = Texts(str(folder / "words.txt"), None, "bytes", SEQUENCES)
    base = str(folder / "base")
    for ids in open_batches(open_source_model(base, LENGTH), base, texts).batches.calibration:
        model(ids)
    found = []
    for index in range(block.experts.num_experts):
        rows = [
            hidden[token]
            for hidden, chosen in calls
            for token in range(len(hidden))
            if index in chosen[token].tolist()
        ]
        read = torch.stack(rows) if rows else torch.empty(0, block.experts.gate_up_proj.shape[2])
        gate, up = (read @ block.experts.gate_up_proj[index].T).chunk(2, 1)
        found.append((read, F.silu(gate) * up))
    return found


class Recorder(RoundToNearest):
    """Rounds to nearest, and keeps what it is given by the shape and sum of the weight."""

    calibrated = True
    seen: list[tuple[Tensor, InputStatistics]] = []

    def quantize(self, weight: Tensor, scheme: Any, statistics: InputStatistics | None) -> QuantizedWeight:
        if statistics is not None:
            copied = InputStatistics(
                statistics.hessian.clone(), statistics.magnitude.clone(), statistics.tokens
            )
            self.seen.append((weight.clone(), copied))
        return super().quantize(weight, scheme, statistics)


@pytest.mark.parametrize("family", quick(["mixtral", "qwen3_moe"], "qwen3_moe"))
@pytest.mark.parametrize("together", quick([1, 3, 4], 3))
def test_the_inputs_are_those_of_the_tokens_that_the_router_sends(
    family: str, together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For experts one by one, in groups of unequal size, and all at once."""
    base_of(tmp_path, family)
    monkeypatch.setattr(Recorder, "seen", [])
    monkeypatch.setattr("shardwise.plugins.quantize.run.method_of", lambda _: Recorder())
    starts = range(0, 4, together)
    monkeypatch.setattr(
        experts.BlockExperts,
        "_groups",
        lambda *_: iter([range(at, min(at + together, 4)) for at in starts]),
    )
    monkeypatch.setattr(experts, "shrunk", lambda given: given)
    quantized(tmp_path, "w8a16", "rtn")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    expected = rows_of_experts(tmp_path)
    for index, (read, activations) in enumerate(expected):
        for name, rows in zip(NAMES[family], (read, read, activations), strict=True):
            weight = stored[f"model.layers.0.{STACKS[family]}.experts.{index}.{name}.weight"]
            (given,) = (each for one, each in Recorder.seen if torch.equal(one, weight))
            assert given.tokens == len(rows) > 0
            assert torch.allclose(given.hessian, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-5)
            assert torch.allclose(given.magnitude, rows.abs().mean(0), rtol=1e-4, atol=1e-6)
    assert sum(len(read) for read, _ in expected) == 2 * SEQUENCES * LENGTH


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    ("scheme", "suffix", "read_as"),
    [
        ("w4a16-g16", "weight_packed", "w4a16-g16"),
        ("w8a8", "weight_packed", "w8a16"),
        ("fp8", "weight", "fp8"),
    ],
)
def test_each_matrix_is_rounded_as_a_linear_layer(
    family: str, scheme: str, suffix: str, read_as: str, tmp_path: Path
) -> None:
    """The stored tensors are those of the method on the matrix alone; the model reads them back as its stacks."""
    base_of(tmp_path, family)
    quantized(tmp_path, scheme, "rtn")
    source, files = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    blueprint = HuggingFaceModel(str(tmp_path / "out"), LENGTH, objective=None)
    model: Any = blueprint.build()
    blueprint.fill(model, 0)
    loaded = model.model.layers[0].mlp.experts
    as_experts = scheme_of(read_as)
    for index in range(4):
        path = f"model.layers.0.{STACKS[family]}.experts.{index}"
        own = []
        for name in NAMES[family]:
            weight = source[f"{path}.{name}.weight"]
            made = RoundToNearest().quantize(weight, as_experts, None)
            for part, tensor in made.tensors().items():
                assert torch.equal(files[f"{path}.{name}.{part}"], tensor)
            assert suffix in made.tensors()
            step = 32 if scheme == "fp8" else 1  # between the largest numbers of e4m3
            scale = made.tensors()["weight_scale"].repeat_interleave(
                weight.shape[1] // made.tensors()["weight_scale"].shape[1], 1
            )
            inside = weight.abs() <= scale * (448 if scheme == "fp8" else 2 ** (as_experts.bits - 1) - 1)
            error = (made.dequantize() - weight).abs()
            assert bool((error <= scale * step / 2 * 1.001)[inside].all()) and bool(
                inside.float().mean() > 0.9
            )
            own.append(made.dequantize())
        assert torch.equal(loaded.gate_up_proj[index], torch.cat(own[:2]))
        assert torch.equal(loaded.down_proj[index], own[2])


def test_gptq_loses_less_than_rounding_to_nearest_on_what_experts_read(tmp_path: Path) -> None:
    """On the calibration rows themselves, for every matrix; the rows are computed without the pass."""
    base_of(tmp_path)
    found = {
        method: quantized(tmp_path, "w4a16-channel", method, method, sequences=SEQUENCES)
        for method in ("rtn", "gptq")
    }
    rows = rows_of_experts(tmp_path)
    source = load_file(tmp_path / "base" / "model.safetensors")
    lost = {method: [] for method in found}
    for method, each in found.items():
        stored = load_file(tmp_path / method / "model.safetensors")
        for row in each.layers:
            if not row.stack:
                continue
            parts = {
                name.removeprefix(f"{row.name}."): value
                for name, value in stored.items()
                if name.startswith(f"{row.name}.")
            }
            index = int(row.name.split(".")[-2])
            read = rows[index][row.name.endswith("down_proj")]
            assert row.tokens == len(read) and row.method == method
            error = weight_of(parts, 4, row.shape).dequantize() - source[f"{row.name}.weight"]
            lost[method].append(float((read @ error.T).norm()))
    assert len(lost["gptq"]) == 12
    assert all(gptq < 0.9 * rtn for gptq, rtn in zip(lost["gptq"], lost["rtn"], strict=True))


def never_chosen(model: Any) -> None:
    """Two pairs of opposite rows of a router of 5: two experts always have a positive logit, and the last has 0."""
    for block in model.model.layers:
        with torch.no_grad():
            weight = block.mlp.gate.weight
            weight[1], weight[3], weight[4] = -weight[0], -weight[2], 0.0


@pytest.mark.parametrize("method", quick(FEW, "gptq"))
def test_experts_without_tokens_are_named_and_rounded_to_nearest(method: str, tmp_path: Path) -> None:
    """A pass without calibration names all of them."""
    base_of(tmp_path, "mixtral", num_local_experts=5)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    never_chosen(model)
    model.save_pretrained(tmp_path / "base")
    found = quantized(tmp_path, "w4a16-g16", method)
    path = "model.layers.0.block_sparse_moe.experts.4"
    unseen = {f"{path}.{name}" for name in NAMES["mixtral"]}
    said, calibrated = found.result()["experts"], method_of(method).calibrated
    assert said["matrices"] == 15 and {*said["unseen"]} == unseen
    rows = {row.name: row for row in found.layers if row.stack}
    assert {name for name, row in rows.items() if row.tokens == 0} == unseen
    assert {rows[name].method for name in unseen} == {"rtn" if calibrated else method}
    sentences = " ".join(found.expert_sentences)
    assert (
        f"3 of 15 matrices of experts got no calibration token and are rounded to nearest: {path}"
        in sentences
    ) == (calibrated)
    without = quantized(tmp_path, "w4a16-g16", method, "without", sequences=0)
    assert len(without.result()["experts"]["unseen"]) == 15
    assert {row.method for row in without.layers if row.stack} == {"rtn" if calibrated else method}


def test_experts_with_few_tokens_are_named(tmp_path: Path) -> None:
    base_of(tmp_path)
    found = quantized(tmp_path, "w4a16-g16", "gptq", sequences=2)
    rows = [row for row in found.layers if row.stack]
    few = [row.name for row in rows if row.tokens is not None and 0 < row.tokens < row.shape[1]]
    assert found.result()["experts"]["few"] == few and 4 <= len(few) < 12
    assert {row.method for row in rows} == {"gptq"}
    assert f"{len(few)} of 12 matrices of experts got fewer calibration tokens" in found.expert_sentences[0]


@pytest.mark.parametrize("count", [1, 8, 48, 96, 192])
@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_a_shrunk_hessian_never_loses_against_rounding_to_nearest(count: int, decay: float) -> None:
    """On new rows, for any number of rows and any spectrum; unshrunk, 96 white rows lose half as much again."""
    size, draw = 96, torch.Generator().manual_seed(0)
    mixed = torch.arange(1, size + 1).float().pow(-decay).unsqueeze(1) * torch.eye(size)
    rows = torch.randn(count, size, generator=draw) @ mixed
    weight, new = torch.randn(256, size, generator=draw), mixed.square()
    scheme = scheme_of("w4a16-channel")

    def lost(made: QuantizedWeight) -> float:
        error = made.dequantize() - weight
        return float((error @ new * error).sum().sqrt())

    def statistics() -> InputStatistics:
        return InputStatistics(rows.T @ rows / count, rows.abs().mean(0), count)

    nearest = lost(RoundToNearest().quantize(weight, scheme, None))
    for name in ("gptq", "awq"):
        method = method_of(name).without_zero_points()
        assert lost(method.quantize(weight, scheme, shrunk(statistics()))) <= 1.02 * nearest
    if decay == 0.0 and count == size:
        assert lost(method_of("gptq").quantize(weight, scheme, statistics())) > 1.4 * nearest


@torch.no_grad()
def test_a_stack_that_cannot_be_rounded_stays_whole(tmp_path: Path) -> None:
    """Readers take all matrices of a stack packed, or none; transformers reads a folder with both."""
    base_of(tmp_path)
    found = quantized(tmp_path, "w4a16-g32", "rtn")
    kept = {row.name: row.why for row in found.layers if "experts" in row.name and row.why}
    why = "16 input channels are no multiple of the group of 32"
    assert kept == {"model.layers.0.mlp.experts.down_proj": why}
    names = {name for name in load_file(tmp_path / "out" / "model.safetensors") if ".experts." in name}
    assert "model.layers.0.mlp.experts.down_proj" in names
    assert "model.layers.0.mlp.experts.3.gate_proj.weight_packed" in names
    assert len(names) == 1 + 8 * 3
    blueprint = HuggingFaceModel(str(tmp_path / "out"), LENGTH, objective=None)
    model = blueprint.build().eval()
    blueprint.fill(model, 0)
    ids = torch.arange(12).view(1, 12)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(ids).logits
    assert float((theirs - blueprint.logits(model, ids)).norm() / theirs.norm()) < 1e-6


def test_experts_of_another_form_stay_with_the_reason() -> None:
    class Interleaved(nn.Module):
        has_gate, has_bias, is_transposed, has_post_expert_norm = True, False, False, False
        is_concatenated = False

    assert experts.kept_reason(nn.Conv1d(2, 2, 2)) == "Conv1d is no linear layer"
    assert "its gates and ups are interleaved" in experts.kept_reason(Interleaved())


def trained(folder: Path, build: Callable[[], Any]) -> None:
    """Train a model for a few steps on the text of the folder."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    text = torch.tensor([*(folder / "words.txt").read_bytes()])
    draw = torch.Generator().manual_seed(1)
    for _ in range(80):
        starts = torch.randint(len(text) - 64, (8,), generator=draw)
        ids = torch.stack([text[start : start + 64] for start in starts])
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "base")


@pytest.mark.long
def test_more_bits_lose_less(tmp_path: Path) -> None:
    """Perplexity and KL of a trained mixture in 8, 4 and 2 bits."""
    write_words(tmp_path / "words.txt", 3000)
    base_of(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "base")
    trained(tmp_path, lambda: transformers.AutoModelForCausalLM.from_config(config))
    found = [quantized(tmp_path, f"w{bits}a16-g16", "gptq", f"w{bits}") for bits in (8, 4, 2)]
    perplexities = [each.lost.perplexity["quantized"] for each in found]
    base = found[0].lost.perplexity["base"]
    assert base < 60 and perplexities[0] == pytest.approx(base, rel=1e-3)
    assert perplexities[1] == pytest.approx(base, rel=0.02) and perplexities[2] > 1.01 * perplexities[1]
    assert found[0].lost.kl < 0.1 * found[1].lost.kl < 0.1 * found[2].lost.kl
    assert [each.block_bits for each in found] == pytest.approx([10, 6, 4], abs=0.6)


@pytest.mark.parametrize("method", quick(["gptq", "awq"], "gptq"))
def test_ranks_share_the_experts(method: str, tmp_path: Path, pool: Pool) -> None:
    """An expert that the tokens of one rank never reach has the sums of the other."""
    base_of(tmp_path)
    alone = quantized(tmp_path, "w4a16-g16", method, "alone", sequences=4)
    pool.run(2, pass_here, settings_of(tmp_path, "w4a16-g16", method, "shared", sequences=4))
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "shared"))
    assert first.keys() == second.keys() and any(row.stack for row in alone.layers)
    same = [torch.equal(first[name], second[name]) for name in first]
    assert sum(same) >= 0.9 * len(same)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_padding_is_not_counted(padded: bool, tmp_path: Path) -> None:
    base = base_of(tmp_path)
    source = open_source_model(str(base), LENGTH)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base)
    (layer,) = experts.expert_layers(model, source.contents.layout.groups)
    assert layer.count == 4 and len(layer.matrices) == 12
    module = model.model.layers[0].mlp.experts
    draw = torch.Generator().manual_seed(0)
    hidden, chosen = torch.randn(40, 32, generator=draw), torch.randint(4, (40, 2), generator=draw)
    real = torch.arange(40) < 25
    inputs = experts._Inputs.of(module, range(1, 3), layer)
    inputs.counted = real if padded else None
    inputs.add(hidden, chosen)
    inputs.add(hidden, chosen)
    for index, sums in zip((1, 2), inputs.hidden, strict=True):
        rows = torch.cat([hidden[(chosen[:, k] == index) & (real | (not padded))] for k in range(2)])
        assert sums.tokens == 2 * len(rows) and sums.hessian is not None
        assert torch.allclose(sums.hessian, 2 * rows.T @ rows, rtol=1e-5, atol=1e-5)


def test_hessians_of_experts_take_no_more_than_the_block(tmp_path: Path) -> None:
    base = base_of(tmp_path, num_local_experts=16, moe_intermediate_size=32)
    source = open_source_model(str(base), LENGTH)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base)
    (layer,) = experts.expert_layers(model, source.contents.layout.groups)
    block = model.model.layers[0]
    room = sum(parameter.nbytes for parameter in block.parameters())
    found = experts.BlockExperts(
        block, "model.layers.0", [layer], Quantizer(RoundToNearest(), scheme_of("w8a16"), {})
    )
    one = 2 * 4 * 32**2
    groups = list(found._groups(layer, calibrated=True))
    assert [index for group in groups for index in group] == [*range(layer.count)]
    assert max(len(group) for group in groups) == min(layer.count, room // one)
    assert list(found._groups(layer, calibrated=False)) == [range(layer.count)]
    for parameter in block.mlp.experts.parameters():
        parameter.data = parameter.data[:, :8].clone()  # a smaller block
    assert {len(group) for group in found._groups(layer, calibrated=True)} != {layer.count}


@pytest.mark.long
def test_a_refused_pass_goes_on_with_its_experts(tmp_path: Path) -> None:
    """The finished blocks are read back, and the folder is that of a pass without interruption."""
    base_of(tmp_path)
    assert quantized(tmp_path, "w4a16-g16", "gptq", max_kl=1e-12).folder is None
    again = quantized(tmp_path, "w4a16-g16", "gptq")
    fresh = quantized(tmp_path, "w4a16-g16", "gptq", "fresh")
    assert again.result() == fresh.result() and again.result()["experts"]["matrices"] == 12
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "fresh"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
