"""``shardwise eval``: the loss that a plain pass over the same text gives, with the adapter and without."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from shardwise.cli.main import run

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4)
    model.save_pretrained(folder / "model")
    (folder / "text.txt").write_text("all work and no play makes a dull day\n" * 11, encoding="utf-8")
    return folder


def test_the_loss_is_that_of_a_plain_pass(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [
        str(folder / "model"),
        str(folder / "text.txt"),
        "--tokenizer",
        "bytes",
        "--sequence-length",
        "16",
    ]
    assert run(["eval", *words, "--batch", "4", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    text = torch.tensor([*(folder / "text.txt").read_bytes(), 0])
    model = transformers.GPT2LMHeadModel.from_pretrained(folder / "model")
    whole = text[: (len(text) - 1) // 16 * 16 + 1]
    inputs, labels = whole[:-1].view(-1, 16), whole[1:].view(-1, 16)
    with torch.no_grad():
        logits = model(input_ids=inputs).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert found["sequences"] == len(inputs) and found["targets"] == labels.numel()
    assert found["loss"] == pytest.approx(float(expected), abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert run(["eval", *words, "--sequences", "2"]) == 0
    assert "of 32 targets in 2 sequences of 16 tokens" in capfd.readouterr().out


def plain_loss(model: Path, records: list[tuple[str, str]]) -> tuple[float, int, int]:
    """(mean loss of the completions and their ends, targets, tokens) of records, each in a pass of its own."""
    loaded = transformers.GPT2LMHeadModel.from_pretrained(model)
    total, targets, tokens = 0.0, 0, 0
    for prompt, completion in records:
        ids = torch.tensor([*(prompt + completion).encode(), 0])
        with torch.no_grad():
            logits = loaded(input_ids=ids[None, :-1]).logits[0, len(prompt.encode()) - 1 :]
        labels = ids[len(prompt.encode()) :]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        total, targets = total + float(losses.double().sum()), targets + len(labels)
        tokens += len(ids) - 1
    return total / targets, targets, tokens


def test_records_cost_what_they_are_long_and_have_the_loss_of_each_alone(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Records of 5 to 30 tokens in a context of 32. The loss has 8 digits, and does not depend on the batch."""
    records = [("ab" * (1 + n % 7), "x" * (2 + n % 5) + "yz" * (n % 4)) for n in range(45)]
    lines = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in records]
    (tmp_path / "records.jsonl").write_text("\n".join(lines), encoding="utf-8")
    expected, targets, tokens = plain_loss(folder / "model", records)
    words = ["eval", str(folder / "model"), str(tmp_path / "records.jsonl"), "--tokenizer", "bytes"]
    read: list[int] = []

    def note(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings == 256:
            read.append(given[0].numel())

    count = torch.nn.modules.module.register_module_forward_pre_hook(note)
    for batch in ("4", "45"):
        assert run([*words, "--batch", batch, "--json"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert found["loss"] == pytest.approx(expected, rel=1e-8)
        assert (found["targets"], found["sequences"], found["tokens"]) == (targets, 45, tokens)
        assert sum(read) < (1.1 if batch == "4" else 2.0) * tokens
        read.clear()
    count.remove()
    longest = max(len(prompt + completion) for prompt, completion in records)
    assert found["sequence_length"] == longest
    assert run([*words, "--sequences", "3"]) == 0
    first, short, _ = plain_loss(folder / "model", records[:3])
    assert f"loss {first:.4f} nats per target" in (said := capfd.readouterr().out)
    assert f"of {short} targets in 3 sequences of up to" in said


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--sequence-length", "33"], 2, "the model's context is 32"),
        (["--precision", "fp4"], 2, "precision is 'fp4'"),
        (["--device", "tpu"], 2, "no device 'tpu'"),
    ],
)
def test_one_line_and_the_right_code(
    words: list[str], code: int, says: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [str(folder / "model"), str(folder / "text.txt"), "--tokenizer", "bytes"]
    assert run(["eval", *given, *words]) == code
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and says in said[0]


PAIRS = [("ab" * (1 + n % 4), "x" * (2 + n % 5), "yz" * (1 + n % 3)) for n in range(11)]


def write_pairs(path: Path) -> None:
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in PAIRS]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def test_preferences_are_the_log_probabilities_of_a_plain_pass(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_pairs(tmp_path / "pairs.jsonl")
    words = [
        "eval",
        str(folder / "model"),
        "--preferences",
        str(tmp_path / "pairs.jsonl"),
        "--tokenizer",
        "bytes",
    ]
    assert run([*words, "--batch", "4", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    sums = []
    for prompt, *answers in PAIRS:
        losses = (plain_loss(folder / "model", [(prompt, answer)]) for answer in answers)
        sums.append([-mean * targets for mean, targets, _ in losses])
    chosen, rejected = (torch.tensor(column) for column in zip(*sums, strict=True))
    measures = found["measures"]
    assert measures["chosen_log_probability"] == pytest.approx(float(chosen.mean()), rel=1e-5)
    assert measures["reward_margin"] == pytest.approx(float((chosen - rejected).mean()), rel=1e-5)
    assert measures["accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))
    assert (found["pairs"], found["reference"]) == (len(PAIRS), "")
    assert run([*words, "--sequences", "2"]) == 0
    assert "of 2 pairs scored by log-probability" in capfd.readouterr().out


def test_preferences_of_a_reward_model_are_its_scores_at_the_last_token(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_pairs(tmp_path / "pairs.jsonl")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=256, num_labels=1, pad_token_id=0, **sizes)
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    words = [str(tmp_path / "model"), "--preferences", str(tmp_path / "pairs.jsonl"), "--tokenizer", "bytes"]
    assert run(["eval", *words, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["measures"]

    def score(text: str) -> float:  # the token that ends a document is read too
        hidden = model.model(torch.tensor([[*text.encode(), 0]])).last_hidden_state[0, -1]
        return float(model.score(hidden))

    with torch.no_grad():
        sides = [[score(prompt + answers[side]) for prompt, *answers in PAIRS] for side in (0, 1)]
    chosen, rejected = (torch.tensor(side) for side in sides)
    assert found["chosen_reward"] == pytest.approx(float(chosen.mean()), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))


def test_a_reward_model_reads_no_more_than_its_context(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Positions of GPT-2 are rows of a table, so that longer texts ended with an IndexError."""
    write_pairs(tmp_path / "pairs.jsonl")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 256, "pad_token_id": 0, "num_labels": 1}
    config = transformers.GPT2Config(n_positions=10, **sizes)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "model")
    words = [str(tmp_path / "model"), "--preferences", str(tmp_path / "pairs.jsonl"), "--tokenizer", "bytes"]
    assert run(["eval", *words, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["sequence_length"] == 10 and found["cut"] > 0
    assert run(["eval", *words, "--sequence-length", "11"]) == 2
    assert "the model's context is 10" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "words", "code", "says"),
    [
        ('{"text": "no pair"}', [], 3, "pairs.jsonl:1"),
        (
            '{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "chosen": 3, "rejected": "c"}',
            [],
            3,
            ":2",
        ),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}', ["--tasks", "one"], 2, "give one of data"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}', ["--adapter", "none"], 4, "no such adapter"),
    ],
)
def test_pairs_that_cannot_be_read_are_one_line(
    text: str,
    words: list[str],
    code: int,
    says: str,
    folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pairs.jsonl").write_text(text, encoding="utf-8")
    given = [str(folder / "model"), "--preferences", str(tmp_path / "pairs.jsonl"), "--tokenizer", "bytes"]
    assert run(["eval", *given, *words]) == code
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and says in said[0]
