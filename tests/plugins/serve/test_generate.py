"""``shardwise generate``: prompts, adapters and files of requests, and their output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli.main import run
from shardwise.core.errors import CheckpointError
from shardwise.model.adapted import AdaptedModel
from shardwise.model.files.peft import TENSORS, write_adapter
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.lora import is_adapter
from shardwise.plugins.serve.commands.generate import named_adapters
from shardwise.recipe.sections import AdapterSpec
from shardwise.runtime.parallel.shard_slices import named_parameters

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

GREEDY = ["--temperature", "0", "--tokens", "6", "--tokenizer", "bytes", "--past-end"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a small model in ``base`` and two adapters of it, ``one`` and ``two``."""
    folder = tmp_path_factory.mktemp("generate")
    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4)
    model.save_pretrained(folder / "base")
    adapted = AdaptedModel(HuggingFaceModel(str(folder / "base"), 8), AdapterSpec(rank=2, alpha=8.0))
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in named_parameters(adapted.build()) if is_adapter(n)}
    for name in ("one", "two"):
        tensors = {n: torch.randn(shape) * 0.6 for n, shape in shapes.items()}
        write_adapter(folder / name, tensors, adapted.config(), None)
    return folder


def generated(*words: str, capfd: pytest.CaptureFixture[str]) -> str:
    code = run(["generate", *words])
    said = capfd.readouterr()
    assert code == 0, said.err
    return said.out


def json_lines(*words: str, capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in generated(*words, "--json", capfd=capfd).splitlines()]
    return sorted(lines, key=lambda line: line["request"])


def test_every_prompt_with_every_adapter(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = str(folder / "base")
    adapters = ["--adapter", str(folder / "one"), "--adapter", f"b={folder / 'two'}", "--adapter", "base"]
    prompts = ["--prompt", "def ", "--prompt", "import os"]
    found = json_lines(base, *prompts, *adapters, *GREEDY, capfd=capfd)
    names = [(line["prompt"], line["adapter"]) for line in found]
    assert names == [(prompt, name) for prompt in ("def ", "import os") for name in ("one", "b", "base")]
    assert {line["end"] for line in found} == {"length"}
    assert len({line["text"] for line in found[:3]}) == 3
    # One alone, as it comes: the prompt and its text.
    alone = generated(base, "--prompt", "import os", *adapters[:2], *GREEDY, capfd=capfd)
    assert alone == f"import os{found[3]['text']}\n"
    shown = generated(base, *prompts, *adapters, *GREEDY, capfd=capfd)
    for line in found:
        assert f"── {line['request']} · {line['adapter']} ──\n{line['prompt']}{line['text']}\n" in shown


def test_a_file_of_requests(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "x", "adapter": "two"},
        {"prompt": "x", "adapter": None, "tokens": 3},
        {"prompt": "x", "adapter": "one", "stop": "a", "top_k": None, "seed": 4, "temperature": 1.0},
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
    words = [str(folder / "base"), *GREEDY, "--requests", str(path)]
    for name in ("one", "two"):
        words += ["--adapter", str(folder / name)]
    found = json_lines(*words, capfd=capfd)
    assert [line["adapter"] for line in found] == ["two", None, "one"]
    assert len(found[1]["text"].encode()) <= 9 and "a" not in found[2]["text"]
    alone = json_lines(str(folder / "base"), "--prompt", "x", *GREEDY, "--tokens", "3", capfd=capfd)
    assert alone[0]["text"] == found[1]["text"]


def test_the_runs_own_adapter_is_named_like_base(tmp_path: Path) -> None:
    """As docs/how-to/serve-adapters.md says, and as a file of requests takes it."""
    assert named_adapters(["own", "base", f"x={tmp_path}"]) == ({"x": tmp_path}, ["own", "base", "x"])


def test_an_adapter_that_is_not_there_is_refused_before_the_model_is_read() -> None:
    with pytest.raises(CheckpointError, match="no such adapter"):
        named_adapters(["x=missing"])


CASES: list[tuple[list[str], str, int, str]] = [
    (["--adapter", "{}/no"], "", 4, "no such adapter"),
    (["--adapter", "{}/cut"], "", 4, "damaged"),
    (["--adapter", "base={}/one"], "", 2, "base is the model without any"),
    (["--adapter", "own={}/one"], "", 2, "own is the adapter that the run trained"),
    (["--adapter", "own"], "", 2, "no adapter is named 'own'"),
    (["--adapter", "{}/one", "--adapter", "one={}/two"], "", 2, "two adapters are named 'one'"),
    (["--prompt", "y" * 33], "", 2, "it has 33 tokens, and the context has 32"),
    (["--top-p", "0"], "", 2, "top_p"),
    (["--precision", "fp4"], "", 2, "precision"),
    (["--requests", "{}/absent.jsonl"], "", 3, "absent.jsonl"),
    (["--requests", "{}/r"], "\n", 3, "there are no requests"),
    (["--requests", "{}/r", "--prompt", "x"], '{"prompt": ""}', 2, "give one of the two"),
    (["--requests", "{}/r"], '{"prompt": ""}\n{"prompt"', 3, "r:2"),
    (["--requests", "{}/r"], '{"text": ""}', 3, "no prompt"),
    (["--requests", "{}/r"], '{"prompt": "", "temprature": 1}', 3, "temprature"),
    (["--requests", "{}/r"], '{"prompt": "", "top_k": -1}', 3, "r:1"),
    (["--requests", "{}/r"], '{"prompt": "\\ud800"}', 3, "r:1: character 0 of"),
    (
        ["--prompt", "a\udcff"],
        "",
        3,
        "request 1: character 1 of 'a\\udcff'): surrogates not allowed; write it in UTF-8",
    ),
    (["--device", "meta"], "", 2, "no device 'meta'"),
    (["--requests", "{}/r"], '{"prompt": "", "adapter": "who"}', 2, "no adapter is named 'who'"),
]


@pytest.mark.parametrize(("words", "lines", "code", "message"), CASES, ids=[case[-1] for case in CASES])
def test_one_line_and_the_right_code(
    words: list[str], lines: str, code: int, message: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "r").write_text(lines, encoding="utf-8")
    (folder / "cut").mkdir(exist_ok=True)
    for path in (folder / "one").iterdir():
        short = path.read_bytes()[: -5 if path.name == TENSORS else None]
        (folder / "cut" / path.name).write_bytes(short)
    given = [word.replace("{}", str(folder)) for word in words]
    assert run(["generate", str(folder / "base"), *GREEDY, *given]) == code
    shown = capfd.readouterr()
    said = shown.err.splitlines()
    assert len(said) == 1 and message in said[0] and len(said[0]) <= 300 and not shown.out


def test_a_model_without_a_tokenizer(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(folder / "base")]) == 3
    assert len(capfd.readouterr().err.splitlines()) == 1
