"""``shardwise chat``: prompts are the chat template's, adapters change in between, old turns leave the context."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli.main import run
from shardwise.core.errors import DataError, NumericsError, RecipeError
from shardwise.data.chat import ChatTemplate
from shardwise.data.turns import Turn
from shardwise.model.adapted import AdaptedModel
from shardwise.model.files.peft import write_adapter
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.lora import is_adapter
from shardwise.plugins.serve.chat import Conversation
from shardwise.plugins.serve.requests import Request
from shardwise.plugins.serve.sampling import Sampling
from shardwise.plugins.serve.serving import ServedModel, load_model
from shardwise.recipe.sections import AdapterSpec
from shardwise.runtime.parallel.shard_slices import named_parameters

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

GREEDY = Sampling(tokens=6, temperature=0.0, past_end=True)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a small model in ``base`` and an adapter of it, ``one``."""
    folder = tmp_path_factory.mktemp("chat")
    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 1, "n_head": 2, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4)
    model.save_pretrained(folder / "base")
    adapted = AdaptedModel(HuggingFaceModel(str(folder / "base"), 8), AdapterSpec(rank=2, alpha=8.0))
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in named_parameters(adapted.build()) if is_adapter(n)}
    write_adapter(
        folder / "one", {n: torch.randn(shape) * 0.6 for n, shape in shapes.items()}, adapted.config(), None
    )
    return folder


@pytest.fixture
def served(folder: Path) -> ServedModel:
    return load_model(folder / "base", {"one": folder / "one"}, tokenizer="bytes")


def said(conversation: Conversation, text: str) -> str:
    return "".join(conversation.say(text))


def test_prompts_hold_the_turns_so_far(served: ServedModel) -> None:
    talk = Conversation(served, GREEDY, system="Short.")
    first = said(talk, "Hi")
    assert [turn.role for turn in talk.turns] == ["system", "user", "assistant"]
    assert talk.turns[2].text == first.strip()
    prompt = "System: Short.\n\nUser: Hi\n\nAssistant:"
    assert served.complete([Request(prompt, None, GREEDY)]) == [first]


def test_another_adapter_answers(served: ServedModel) -> None:
    talk = Conversation(served, GREEDY)
    prompt = "User: Hi\n\nAssistant:"
    for name in ("one", "base"):
        talk.clear()
        talk.use(name)
        assert said(talk, "Hi") == served.complete([Request(prompt, name, GREEDY)])[0]


def test_the_oldest_exchange_leaves_the_context(served: ServedModel) -> None:
    """A context of 64 bytes; the system's turn and the newest question stay."""
    talk = Conversation(served, GREEDY, system="Be.")
    talk.turns += [Turn("user", "x" * 20), Turn("assistant", "y" * 20), Turn("user", "new")]
    assert talk.prompt() == "System: Be.\n\nUser: new\n\nAssistant:"
    endless = Conversation(served, Sampling(tokens=400, temperature=0.0))
    endless.turns += [Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c")]
    assert endless.prompt().startswith("User: a"), (
        "a limit above the context does not leave out every exchange"
    )
    with pytest.raises(Exception, match="longer than the model's context"):
        said(Conversation(served, GREEDY), "z" * 100)


def test_a_turn_without_an_answer_changes_nothing(served: ServedModel) -> None:
    """Refused, broken off, or failed while it was generated."""
    talk = Conversation(served, GREEDY, system="Be.")
    said(talk, "Hi")
    before = list(talk.turns)
    with pytest.raises(RecipeError, match="longer than the model's context"):
        said(talk, "z" * 100)
    assert talk.turns == before
    answer = talk.say("Go")
    next(answer)
    answer.close()
    assert talk.turns == before
    with torch.no_grad():
        next(served.model.parameters()).fill_(torch.nan)
    with pytest.raises(NumericsError, match="logits are not finite"):
        said(talk, "Go")
    assert talk.turns == before


def test_a_system_turn_that_the_template_rejects(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    monkeypatch.setattr(served.tokenizer, "chat", ChatTemplate({"default": refusing}, {}))
    Conversation(served, GREEDY)
    with pytest.raises(DataError, match="no system"):
        Conversation(served, GREEDY, system="Be.")


def test_the_opening_is_that_of_transformers() -> None:
    turns = [Turn("user", "Hi"), Turn("assistant", "Yes?"), Turn("user", "Go")]
    found = ChatTemplate({"default": CHATML}, {}).opened(turns, "here")
    asked: list[dict[str, Any]] = [{"role": turn.role, "content": turn.text} for turn in turns]
    from transformers.utils.chat_template_utils import render_jinja_template

    [[theirs], _] = render_jinja_template([asked], chat_template=CHATML, add_generation_prompt=True)
    assert found == theirs and found.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # UTF-8 and C locales
def test_a_line_that_is_not_utf8_is_refused(
    errors: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = io.BytesIO(b"/help\na\xff\xfeb\n/adapters\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(lines, encoding="utf-8", errors=errors))
    assert run(["chat", str(folder / "base"), "--tokenizer", "bytes", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert "/clear" in shown.out and shown.out.endswith("base\n")
    told = "error: a line is not text (standard input:2): it is not UTF-8; write it in UTF-8"
    assert told in shown.err.splitlines()


def test_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "Hi\n/help\n/adapters\n/adapter base\n/adapter two\n/clear\n/what\nHi\n/exit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    words = ["chat", str(folder / "base"), "--adapter", str(folder / "one"), "--tokenizer", "bytes"]
    assert run([*words, "--temperature", "0", "--tokens", "4", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert all(f"\n{command}" in shown.out for command in ("/adapter NAME ", "/clear ", "/help ", "/exit "))
    assert "one, base" in shown.out and "base answers from now on" in shown.out
    mistakes = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert len(mistakes) == 2 and "no command /what" in mistakes[1]
