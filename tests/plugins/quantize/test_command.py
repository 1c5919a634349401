"""``shardwise quantize``: what it writes, prints and refuses; models and runs; the gate."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.cli.main import run
from shardwise.core.cache_folder import default_root
from shardwise.model.hf import HuggingFaceModel
from tests.exporter.test_export_run import LLAMA, leave_run
from tests.harness.commands import Shell
from tests.harness.corpora import write_words
from tests.harness.pool import LostRank, Pool
from tests.plugins.quantize.stubs import PREDICTED, KillPoint, saved_model, unpredicted

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

SHORT = ["--tokenizer", "bytes", "--sequences", "4", "--sequence-length", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a small model in ``base`` and text in ``words.txt``."""
    folder = tmp_path_factory.mktemp("quantize")
    saved_model(
        folder / "base",
        vocab_size=256,
        num_hidden_layers=1,
        hidden_size=64,
        head_dim=16,
        intermediate_size=64,
    )
    write_words(folder / "words.txt", 2000)
    return folder


@pytest.fixture
def no_prediction() -> Iterator[None]:
    with unpredicted():
        yield


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    assert default_root() == tmp_path / "cache"


def said(words: list[str], capfd: pytest.CaptureFixture[str], code: int = 0) -> Any:
    assert run(["quantize", *words]) == code
    out, err = capfd.readouterr()
    assert (err == "") == (code == 0)
    return out if "--json" not in words else json.loads(out)


def test_a_model_is_quantized_written_and_loaded(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The object of --json, and a folder whose logits give the reported perplexity."""
    words = [str(folder / "base"), str(tmp_path / "out"), "--scheme", "w4a16-g16", "--method", "rtn", *SHORT]
    words += ["--calibrate", str(folder / "words.txt")]
    found = said([*words, "--json"], capfd)
    assert found["block_bits"] == pytest.approx(4 + 32 / 16)
    assert found["perplexity"]["quantized"] > 0 and found["kl"] > 0
    assert len(found["layers"]) == 7
    assert {row["method"] for row in found["layers"]} == {"rtn"}
    assert all(0 < row["error"] < 0.5 for row in found["layers"])
    assert found["predicted_peak_bytes"] > 0 and found["measured_peak_bytes"] > 0
    assert json.loads((tmp_path / "out" / "quantization.json").read_text())["kl"] == found["kl"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    dense = sum(each.numel() for each in load_file(folder / "base" / "model.safetensors").values())
    whole = sum(8 * each.nbytes for name, each in stored.items() if not name.endswith("_shape"))
    assert found["bits"] == pytest.approx(whole / dense)
    assert stored["model.layers.0.mlp.up_proj.weight_packed"].dtype == torch.int32
    assert not list(tmp_path.glob("*.quantizing"))
    assert run(["quantize", *words]) == 2
    assert "the folder exists already" in capfd.readouterr().err


@pytest.mark.usefixtures("no_prediction")
def test_the_table_names_layers_and_what_was_lost(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [str(folder / "base"), str(tmp_path / "out"), "--scheme", "w8a16", "--method", "rtn", *SHORT]
    shown = said([*words, "--calibrate", str(folder / "words.txt")], capfd)
    assert "model.layers.0.self_attn.o_proj" in shown and "perplexity" in shown and "predicted" in shown


@pytest.mark.usefixtures("no_prediction")
@pytest.mark.parametrize(
    ("family", "dtype", "packed"), [("qwen3_moe", "float32", True), ("gpt_oss", "bfloat16", False)]
)
def test_experts_are_named_and_counted(
    family: str, dtype: str, packed: bool, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Packed, or left as they are with the reason: in the table, in bits per weight, and in the config."""
    base = saved_model(tmp_path / "base", family, vocab_size=256)
    transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype).save_pretrained(tmp_path / "typed")
    capfd.readouterr()
    words = [str(tmp_path / "typed"), str(tmp_path / "out"), "--scheme", "w4a16-g16", "--method", "rtn"]
    shown = said([*words, *SHORT, "--calibrate", str(folder / "words.txt")], capfd)
    bits = 8 * getattr(torch, dtype).itemsize
    report = json.loads((tmp_path / "out" / "quantization.json").read_text())
    stored = load_file(tmp_path / "base" / "model.safetensors")
    whole = sum(each.numel() for each in stored.values())
    experts = sum(each.numel() for name, each in stored.items() if ".experts." in name and each.dim() > 1)
    kept = sum(value for name, value in report["kept"].items() if ".experts" in name)
    assert kept == (0 if packed else pytest.approx(experts / whole, rel=0.05)) and experts > 0.3 * whole
    assert report["experts"]["matrices"] == (24 if packed else 0)
    assert ("GptOssExperts is no linear layer, and its experts are stored with has_bias" in shown) != packed
    assert ("4 of 32×16" in shown) == packed
    assert f" stay in {bits} bits: " in shown and f"{bits}.000" in shown
    written = load_file(tmp_path / "out" / "model.safetensors")
    size = sum(8 * each.nbytes for name, each in written.items() if not name.endswith("_shape"))
    assert report["bits"] == pytest.approx(size / whole, rel=1e-6)
    assert f"{report['bits']:.3f} bits per weight, {report['block_bits']:.3f} in the blocks" in shown
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    paths = {f"model.layers.{index}.mlp.experts" for index in range(2)}
    assert paths & {*config["ignore"]} == (set() if packed else paths)


@pytest.mark.usefixtures("no_prediction")
@pytest.mark.parametrize("family", ["mixtral", "nemotron_h"])
def test_a_quantized_mixture_is_read_exported_and_merged(
    family: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The dense folder has the same logits as the packed experts."""
    base = saved_model(tmp_path / "base", family, vocab_size=256)
    capfd.readouterr()
    words = [str(base), str(tmp_path / "out"), "--scheme", "w4a16-g16", "--method", "rtn", *SHORT]
    said([*words, "--calibrate", str(folder / "words.txt")], capfd)
    assert run(["export", str(tmp_path / "out"), str(tmp_path / "dense")]) == 0
    ids = torch.arange(24).view(2, 12) + 3
    logits = []
    for name in ("out", "dense"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        with torch.no_grad():
            logits.append(model(ids, use_cache=False).logits)
    assert float((logits[1] - logits[0]).norm()) <= 1e-6 * float(logits[0].norm())


@pytest.mark.usefixtures("no_prediction")
def test_a_line_says_what_transformers_needs(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And 8-bit activations say whose rounding the loss is of."""
    base = saved_model(tmp_path / "base", "mamba", vocab_size=256)
    capfd.readouterr()
    words = [str(base), "OUT", "--scheme", "w4a16-g16", "--method", "rtn", *SHORT]
    words += ["--calibrate", str(folder / "words.txt")]
    needs = "quantization_config=CompressedTensorsConfig(dequantize=True) only: MambaForCausalLM"
    rounded = "with activations in 8 bits as transformers rounds them"
    for scheme, there in (("w4a16-g16", needs), ("w8a8", rounded), ("fp8", rounded)):
        words[1], words[3] = str(tmp_path / scheme), scheme
        shown = said(words, capfd)
        assert [text in shown for text in (needs, rounded)] == [text == there for text in (needs, rounded)]


GATED = {"w4a16-g16": (6, 0.07), "w8a8": (8.5, 0.0055), "fp8": (8.5, 0.0265), "nf4": (4.135, 0.0916)}
"""Bits per weight, and the relative error of normal weights: a step's by the root of 12; for nf4 QLoRA's figure."""


@pytest.mark.usefixtures("no_prediction")
@pytest.mark.parametrize(
    "scheme", ["w4a16-g16", *(pytest.param(s, marks=pytest.mark.long) for s in ("w8a8", "fp8", "nf4"))]
)
def test_the_gate_writes_nothing_above_the_limit(
    scheme: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 6, and the result all the same; with a higher limit the command goes on with the finished blocks."""
    bits, error = GATED[scheme]
    words = [str(folder / "base"), str(tmp_path / "out"), "--scheme", scheme, "--method", "rtn", *SHORT]
    words += ["--calibrate", str(folder / "words.txt"), "--json"]
    assert run(["quantize", *words, "--max-kl", "1e-9"]) == 6
    out, err = capfd.readouterr()
    assert err.count("\n") == 1 and "quantization lost too much" in err
    assert not (tmp_path / "out").exists() and (tmp_path / "out.quantizing").is_dir()
    refused = json.loads(out)
    assert refused["block_bits"] == pytest.approx(bits, rel=2e-3) and refused["folder"] is None
    assert [row["error"] for row in refused["layers"]] == pytest.approx([error] * 7, rel=0.4)
    passed = said([*words, "--max-kl", str(1.01 * refused["kl"])], capfd)
    assert (passed["kl"], passed["layers"]) == (refused["kl"], refused["layers"]) and refused["kl"] > 1e-9
    assert (tmp_path / "out" / "config.json").is_file() and not (tmp_path / "out.quantizing").exists()


@pytest.mark.usefixtures("no_prediction")
def test_logits_that_are_not_finite_are_no_result(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Their KL divergence is undefined, and not 0."""
    base = saved_model(
        tmp_path / "base", vocab_size=256, num_hidden_layers=3
    )  # the walk's check runs two blocks
    stored = load_file(base / "model.safetensors")
    stored["model.layers.2.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    capfd.readouterr()
    words = [str(base), str(tmp_path / "out"), "--scheme", "w4a16-g16", "--method", "rtn", *SHORT]
    assert run(["quantize", *words, "--calibrate", str(folder / "words.txt")]) == 6
    err = capfd.readouterr().err
    assert "logits are not finite" in err and "the weight has infinite or undefined values" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_prediction")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ["--scheme", "w4a16-g128", "--method", "rtn"],
            "64 input channels are no multiple of the group of 128",
        ),
        (
            ["--scheme", "w4a16-g16", "--method", "gptq", "--sequences", "0"],
            "no calibration token reaches it",
        ),
    ],
    ids=["group", "calibration"],
)
def test_a_folder_without_quantized_weights_is_not_written(
    options: list[str], why: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [str(folder / "base"), str(tmp_path / "out"), *SHORT, "--calibrate", str(folder / "words.txt")]
    assert run(["quantize", *words, *options]) == 2
    err = capfd.readouterr().err
    assert "no weight was quantized" in err and why in err
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.quantizing").exists()


@pytest.mark.usefixtures("no_prediction")
def test_fewer_calibration_sequences_than_asked_for_are_named(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [str(folder / "base"), str(tmp_path / "out"), "--scheme", "w8a16", "--method", "rtn", *SHORT]
    words += ["--calibrate", str(folder / "words.txt"), "--sequences", "5000", "--json"]
    (note,) = said(words, capfd)["notes"]
    assert re.fullmatch(r"the calibration text has \d+ sequences of 16 tokens, not 5000", note)


@pytest.mark.usefixtures("no_prediction")
def test_a_pass_that_does_not_fit_is_refused_before_it_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardwise.plugins.quantize.run.usable_memory", lambda: PREDICTED - 1)
    words = [str(folder / "base"), str(tmp_path / "out"), "--scheme", "w8a16", "--method", "rtn", *SHORT]
    assert run(["quantize", *words, "--calibrate", str(folder / "words.txt")]) == 7
    out, err = capfd.readouterr()
    assert "at the peak, predicted" in out
    assert err.count("\n") == 1 and "does not fit this machine" in err
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.usefixtures("no_prediction")
def test_a_run_is_quantized_on_its_own_data(
    folder: Path, tmp_path: Path, pool: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The newest checkpoint, its recipe's text and length; weights in the dtype that the run computes in."""
    data = {"source": str(folder / "words.txt"), "sequence_length": 16}
    values = {"model": {**LLAMA, "layers": 1, "width": 16, "ffn": 16}, "data": data}
    pool.run(1, leave_run, tmp_path / "run", values, {"precision": "bf16"})
    capfd.readouterr()
    words = [str(tmp_path / "run"), str(tmp_path / "out"), "--scheme", "w4a16-g16", "--method", "gptq"]
    found = said([*words, "--sequences", "4", "--json"], capfd)
    assert found["block_bits"] == pytest.approx(4 + 16 / 16)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.bfloat16
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16


@pytest.mark.usefixtures("no_prediction")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_run_of_a_native_mixture_is_quantized(
    family: str, folder: Path, tmp_path: Path, pool: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its experts are packed under transformers' names: its weights are close to the run's, its logits ours."""
    data = {"source": str(folder / "words.txt"), "sequence_length": 16}
    sizes = {"family": family, "layers": 2, "width": 16, "ffn": 16, "experts": 3, "experts_per_token": 2}
    pool.run(1, leave_run, tmp_path / "run", {"model": {**LLAMA, **sizes}, "data": data}, {})
    capfd.readouterr()
    words = [str(tmp_path / "run"), str(tmp_path / "out"), "--scheme", "w4a16-g16", "--method", "gptq"]
    found = said([*words, "--sequences", "8", "--json"], capfd)
    assert found["experts"]["matrices"] == 2 * 3 * 3 and found["block_bits"] < 6.5
    assert not any("experts" in name for name in found["kept"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    blueprint = HuggingFaceModel(str(tmp_path / "out"), 16, objective=None)
    own = blueprint.build().eval()
    blueprint.fill(own, 0)
    ids = torch.arange(32).view(2, 16) + 3
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert float((blueprint.logits(own, ids) - expected).norm() / expected.norm()) < 1e-6
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "dense")]) == 0
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    for name, weight in dense.model.named_parameters():
        if "experts" in name:
            error = model.model.get_parameter(name).detach() - weight.detach()
            assert 0 < float(error.norm() / weight.detach().norm()) < 0.15


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three blocks."""
    folder = tmp_path_factory.mktemp("deep")
    return saved_model(folder / "base", vocab_size=256, num_hidden_layers=3)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def killed_command(words: list[str], killed_at: KillPoint) -> None:
    """A command that a SIGKILL ends; called in a process of its own."""
    killed_at.set()
    with unpredicted():
        run(words)


LAYERS, TENSORS = 7, 3
"""Linear layers of a block, and stored tensors of each."""
POINTS = {
    KillPoint("shardwise.plugins.quantize.methods.gptq:GPTQ.quantize", 1 + LAYERS + 4): 1,
    KillPoint("shardwise.exporter.hf_writer:_tensor_content", 3 * LAYERS * TENSORS + 5): 3,
}
"""In the second block, after a first call that warms up; while the folder is written. The blocks that are finished."""


@pytest.mark.long
@pytest.mark.usefixtures("no_prediction")
def test_a_killed_command_goes_on_and_writes_the_same_folder(
    deep: Path, folder: Path, tmp_path: Path, pool: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Byte by byte that of an undisturbed command, after a real SIGKILL; nothing else is left."""
    named = ["--scheme", "w4a16-g16", "--method", "gptq", *SHORT, "--calibrate", str(folder / "words.txt")]
    assert run(["quantize", str(deep), str(tmp_path / "whole"), *named]) == 0
    for point, done in POINTS.items():
        words = ["quantize", str(deep), str(tmp_path / "killed"), *named]
        with pytest.raises(LostRank):
            pool.run(1, killed_command, words, point)
        assert not (tmp_path / "killed").exists()
        capfd.readouterr()
        assert run(words) == 0
        assert f"going on after block {done} of 3" in capfd.readouterr().out
        assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
        shutil.rmtree(tmp_path / "killed")
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "cache"}


@pytest.mark.long
@pytest.mark.parametrize("method", ["gptq", "awq", "kashin"])
def test_a_process_that_is_killed_goes_on_at_its_block(
    method: str, folder: Path, tmp_path: Path, shell: Shell
) -> None:
    """SIGKILL from outside, once one of four blocks is finished."""
    base = saved_model(tmp_path / "base", vocab_size=256, num_hidden_layers=4, hidden_size=64)
    named = ["--scheme", "w4a16-channel", "--method", method, *SHORT]
    named += ["--calibrate", str(folder / "words.txt")]
    done = shell.run("quantize", str(base), str(tmp_path / "whole"), *named)
    assert done.returncode == 0, done.stderr
    words = ["quantize", str(base), str(tmp_path / "killed"), *named]
    with shell.start(*words) as running:
        while not (tmp_path / "killed.quantizing" / "block-00000.safetensors").exists():
            assert running.poll() is None, running.stderr
            time.sleep(0.001)
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
    after = shell.run(*words)
    assert after.returncode == 0, after.stderr
    assert re.search("going on after block [123] of 4", after.stdout)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.long
def test_a_rotated_model_is_written_untied_and_reads_as_the_base(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The folder of a tied model gets an output layer, its norms are ones, and its logits are the base's in 8 bits."""
    base = saved_model(tmp_path / "base", vocab_size=256, num_hidden_layers=1, tie_word_embeddings=True)
    write_words(tmp_path / "words.txt", 2000)
    capfd.readouterr()
    words = [str(base), str(tmp_path / "out"), "--scheme", "w8a16", "--method", "rtn", "--rotate", "hadamard"]
    found = said([*words, *SHORT, "--calibrate", str(tmp_path / "words.txt"), "--json"], capfd)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert (stored["model.norm.weight"] == 1).all() and stored["lm_head.weight"].shape == (256, 32)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    ids = torch.arange(24).view(2, 12)
    logits = []
    for folder in (base, tmp_path / "out"):
        blueprint = HuggingFaceModel(str(folder), 16)
        model = blueprint.build()
        blueprint.fill(model, 0)
        with torch.no_grad():
            logits.append(blueprint.logits(model, ids))
    assert 0 < float((logits[1] - logits[0]).norm() / logits[0].norm()) < 0.03
    assert found["kl"] < 0.01
    assert found["measured_peak_bytes"] > 0


CASES: tuple[tuple[list[str], int, str], ...] = (
    (["{}/base", "{}/o", "--scheme", "w9a16"], 2, "no scheme is called w9a16"),
    (["{}/base", "{}/o", "--scheme", "w4a16"], 2, "w4a16-g128"),
    (["{}/base", "{}/o", "--scheme", "w4a16-g48"], 2, "groups of 48"),
    (["{}/base", "{}/o", "--scheme", "w8a16", "--method", "gtpq"], 2, "no method is called gtpq"),
    (["{}/base", "{}/o", "--scheme", "nf4", "--method", "gptq"], 2, "gptq cannot make nf4"),
    (["{}/base", "{}/o", "--scheme", "w8a16", "--rotate", "givens"], 2, "no rotation is called givens"),
    (["{}/gemma2", "{}/o", "--scheme", "w8a16", "--rotate", "hadamard"], 2, "post_feedforward_layernorm"),
    (["{}/base", "{}", "--scheme", "w8a16"], 2, "exists already"),
    (["{}", "{}/o", "--scheme", "w8a16"], 2, "not the folder of a run or of a model"),
    (["{}/none/at/all", "{}/o", "--scheme", "w8a16"], 2, "not the folder of a run or of a model"),
    (["{}/base", "{}/o", "--scheme", "w8a16", "--sequences", "-1"], 2, "--sequences"),
    (["{}/base", "{}/o", "--scheme", "w8a16", "--max-kl", "-1"], 2, "--max-kl"),
    (["{}/base", "{}/o", "--scheme", "w8a16"], 3, "has no tokenizer"),
    (
        ["{}/base", "{}/o", "--scheme", "w8a16", "--tokenizer", "bytes", "--calibrate", "{}/no.txt"],
        3,
        "no.txt",
    ),
    (
        ["{}/base", "{}/o", "--scheme", "w8a16", "--sequence-length", "999"],
        2,
        "longer than the model's context",
    ),
    (["{}/gpt2", "{}/o", "--scheme", "w8a16"], 2, "stored transposed"),
    (["{}/llama4_text", "{}/o", "--scheme", "w8a16"], 2, "it replaces Llama4TextExperts by linear layers"),
    (["{}/ctrl", "{}/o", "--scheme", "w8a16"], 2, "the blocks of this model are not known"),
    (["{}/zamba2", "{}/o", "--scheme", "w8a16"], 2, "so run, its logits differ"),
    (["{}/bert", "{}/o", "--scheme", "w8a16"], 2, "the model is not causal"),
)


@pytest.mark.parametrize(("words", "code", "message"), CASES, ids=[case[-1] for case in CASES])
def test_one_line_and_the_right_code(
    words: list[str], code: int, message: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for family in ("gpt2", "bert", "gemma2", "llama4_text", "ctrl", "zamba2"):
        if words[0].endswith(family):
            saved_model(folder / family, family)
            capfd.readouterr()
    assert run(["quantize", *(word.format(folder) for word in words)]) == code
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert not (folder / "o").exists() and not (folder / "o.quantizing").exists()
