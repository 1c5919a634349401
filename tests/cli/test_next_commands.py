"""What `finetune` and `train` name as next commands: every line is run as it is printed, with sensible answers."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from shardwise.cli.main import run
from tests.harness.commands import Shell
from tests.harness.small_models import TAGS, write_model

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

CAPITALS = {"Peru": "Lima", "Italy": "Rome"}
FAST = ("optimizer.learning_rate=1e-2", "batch_size=4")
BRIEF = ("steps=2", "batch_size=2")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_chats(path: Path, cities: Sequence[str] = tuple(CAPITALS.values())) -> None:
    """Chats of one or two questions; the second has the same answer everywhere."""
    chats = []
    for number, (country, city) in enumerate(list(zip(CAPITALS, cities, strict=True)) * 8):
        chat = [
            {"role": "user", "content": f"The capital of {country}?"},
            {"role": "assistant", "content": f"It is {city}."},
        ]
        if number % 4 < 2:
            chat += [{"role": "user", "content": "Thanks!"}, {"role": "assistant", "content": "Welcome."}]
        chats.append({"messages": chat})
    path.write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")


def write_pairs(path: Path) -> None:
    pairs = [
        {"prompt": f"The capital of {country} is", "completion": f" {city}."}
        for country, city in CAPITALS.items()
    ]
    path.write_text("\n".join(map(json.dumps, pairs * 8)), encoding="utf-8")


def commands_in(output: str) -> list[list[str]]:
    """The words of each command in the block of next commands. There is one block, at the end."""
    assert output.count("next:") == 1
    lines = output.rpartition("next:\n")[2].splitlines()
    assert lines and all(line.startswith("  shardwise ") for line in lines)
    return [shlex.split(line, comments=True) for line in lines]


def ran(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str = ""
) -> str:
    """The output of a printed command, which reads ``said`` line by line."""
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    capsys.readouterr()
    assert run(words[1:]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_chats_are_answered_as_they_were_trained(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `chat`, by transformers in the exported folder, and by transformers in the GGUF file; each answer ends.

    First with all weights. Then an adapter of the result learns the opposite.
    """
    write_model(Path("base"), "qwen3", "qwen2", head_dim=128)
    base = "base"
    for method, cities in (("full", ["Lima", "Rome"]), ("lora", ["Rome", "Lima"])):
        out = f"by {method}"
        write_chats(Path(f"{method}.jsonl"), cities)
        words = (
            "finetune",
            base,
            f"{method}.jsonl",
            *FAST,
            "--epochs",
            "40",
            "--method",
            method,
            "--out",
            out,
        )
        done = shell.run(*words, timeout=600)
        assert done.returncode == 0, done.stderr
        sample = r"\nprompt    The capital of (\w+)\?\nanswer    It is (\w+)\.\nexpected  It is \2\.\n"
        assert re.search(sample, done.stdout)
        steps = [line for line in done.stdout.splitlines() if line.startswith("step ")]
        assert len(done.stdout.splitlines()) - len(steps) <= 25
        commands = commands_in(done.stdout)
        exports = [["shardwise", "export", out, f"{out}/{name}"] for name in ("model", "model.gguf")]
        assert commands == [["shardwise", "chat", out], *exports[method == "full" :]]

        chat = "The capital of Peru?\nThanks!\n/clear\nThe capital of Italy?\n"
        said = ran(commands[0], monkeypatch, capsys, chat)
        first, second = (f"It is {city}.\n" for city in cities)
        assert said == f"{first}Welcome.\nthe conversation starts anew\n{second}"
        for command in commands[1:]:
            ran(command, monkeypatch, capsys)
        for folder, options in ((f"{out}/model", {}), (out, {"gguf_file": "model.gguf"})):
            assert answered(folder, "The capital of Italy?", options) == second.strip()
        base = f"{out}/model"


def answered(folder: str, question: str, options: dict[str, str]) -> str:
    """The answer of transformers, which must end."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    asked = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(TAGS[1])]
    found = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=ends)[0, ids.shape[1] :]
    assert int(found[-1]) in ends
    return str(tokenizer.decode(found, skip_special_tokens=True)).strip()


@pytest.mark.long
def test_completions_and_text_are_continued(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(Path("base"), "llama")
    write_pairs(Path("pairs.jsonl"))
    Path("text.txt").write_text("The capital of Peru is Lima. " * 60, encoding="utf-8")
    for data in ("pairs.jsonl", "text.txt"):
        assert (
            run(["init", "base", data, "--out", f"{data}.yaml", "--method", "full", "--device", "cpu"]) == 0
        )
        trained = shell.run("train", f"{data}.yaml", "epochs=20", *FAST, "--out", data[:5], timeout=600)
        assert trained.returncode == 0, trained.stderr
        generate, *exports = commands_in(trained.stdout)
        assert generate == ["shardwise", "generate", data[:5], "--prompt", "TEXT"]
        assert ran(generate, monkeypatch, capsys).startswith("TEXT")
        generate[-1] = "The capital of Peru is"
        said = ran([*generate, "--temperature", "0", "--tokens", "6"], monkeypatch, capsys)
        assert said.startswith("The capital of Peru is Lima.")
        assert said == "The capital of Peru is Lima.\n" or data == "text.txt", "a completion ends"
        assert [words[1] for words in exports] == ["export", "export"]
        for words in exports:
            ran(words, monkeypatch, capsys)
        again = shell.run("train", f"{data}.yaml", "epochs=20", *FAST, "--out", data[:5])
        assert "nothing to do" in again.stdout and "next:" not in again.stdout


@pytest.mark.parametrize("family", ["bert", pytest.param("t5", marks=pytest.mark.long)])
def test_models_that_write_no_text_are_exported_alone(
    family: str, shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"bert": "text.txt", "t5": "pairs.jsonl"}[family]
    write_model(
        Path("base"), family, **({"decoder_start_token_id": 0, "pad_token_id": 0} if family == "t5" else {})
    )
    write_pairs(Path("pairs.jsonl"))
    Path("text.txt").write_text("The capital of Peru is Lima. " * 60, encoding="utf-8")
    if family == "bert":  # the tokenizer of a masked model has a mask
        tokenizer = transformers.AutoTokenizer.from_pretrained("base")
        tokenizer.add_special_tokens({"mask_token": "[MASK]"})
        tokenizer.save_pretrained("base")
    done = shell.run("finetune", "base", data, *BRIEF, "--method", "lora", "--out", "out", timeout=300)
    assert done.returncode == 0, done.stderr
    assert "prompt " not in done.stdout
    [words] = commands_in(done.stdout)
    assert words == ["shardwise", "export", "out", "out/model"]
    ran(words, monkeypatch, capsys)
    auto = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}[family]
    auto.from_pretrained("out/model")
    tag = {"bert": "fill-mask", "t5": "text2text-generation"}[family]
    assert tag in Path("out/adapter/README.md").read_text(encoding="utf-8")


def test_a_family_without_gguf_is_not_offered_it(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(Path("base"), "gpt_neox")
    write_chats(Path("chats.jsonl"))
    done = shell.run(
        "finetune", "base", "chats.jsonl", *BRIEF, "--method", "full", "--out", "out", timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert commands_in(done.stdout) == [["shardwise", "chat", "out"]]
    ran(["shardwise", "chat", "out"], monkeypatch, capsys, "Hi\n")


@pytest.mark.long
def test_a_quantized_base(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(Path("base"), "gemma3_text", "gemma", head_dim=16, query_pre_attn_scalar=16)
    write_chats(Path("chats.jsonl"))
    done = shell.run(
        "finetune", "base", "chats.jsonl", *BRIEF, "--method", "qlora", "--out", "out", timeout=300
    )
    assert done.returncode == 0, done.stderr
    commands = commands_in(done.stdout)
    assert [words[1] for words in commands] == ["chat", "export", "export"]
    ran([*commands[0], "--tokens", "3"], monkeypatch, capsys, "Hi\n")
    assert "unpacked for good" in ran(commands[1], monkeypatch, capsys)
    ran(commands[2], monkeypatch, capsys)


FACTORY = """
import torch
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {"x": torch.ones(4), "labels": torch.zeros(1, dtype=torch.long)}

def make():
    return nn.Linear(4, 2), loss, Data()

def loss(model, batch):
    logits, labels = model(batch["x"]), batch["labels"][:, 0]
    return nn.functional.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()
"""


def test_a_native_model_and_a_factory(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("All work and no play. " * 40, encoding="utf-8")
    sizes = "{layers: 1, width: 32, heads: 2, kv_heads: 1, ffn: 32, vocab: 256, context: 32, family: llama}"
    Path("native.yaml").write_text(
        f"model: {sizes}\ndata: {{source: text.txt, sequence_length: 32}}\nsteps: 2\nbatch_size: 2\n"
    )
    done = shell.run("train", "native.yaml", "--out", "native")
    assert done.returncode == 0, done.stderr
    commands = commands_in(done.stdout)
    assert [words[1] for words in commands] == ["generate", "export"], "GGUF has no tokenizer of bytes"
    for words in commands:
        ran(words, monkeypatch, capsys)

    Path("own_code.py").write_text(FACTORY)
    Path("own.yaml").write_text("model: {factory: 'own_code:make'}\nsteps: 2\nbatch_size: 2\n")
    done = shell.run("train", "own.yaml", "--out", "own")
    assert done.returncode == 0, done.stderr
    assert "report: own/report.html" in done.stdout
    (words,) = commands_in(done.stdout)
    assert words[1] == "export"
    ran(words, monkeypatch, capsys)


def test_generate_asks_through_the_template_or_says_that_it_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--chat` gives the answer of a turn; without it, a hint stands on standard error, once and not in JSON."""
    _, tokenizer = write_model(Path("base"), "llama")
    words = ["generate", "base", "--temperature", "0", "--tokens", "4", "--past-end", "--prompt", "Hi"]
    assert run([*words, "--prompt", "Ho"]) == 0
    hint = capsys.readouterr()
    assert hint.err.count("--chat asks them as turns of a chat") == 1 and "Hi" in hint.out
    assert run([*words, "--chat", "--json"]) == 0
    said, asked = capsys.readouterr(), [{"role": "user", "content": "Hi"}]
    found = json.loads(said.out)
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert run([*words[:-1], prompt, "--json"]) == 0
    tagged = capsys.readouterr()
    assert found["text"] == json.loads(tagged.out)["text"] and found["prompt"] == "Hi"
    assert run([*words[:-1], prompt]) == 0
    assert not any("--chat" in each.err for each in (said, tagged, capsys.readouterr()))
