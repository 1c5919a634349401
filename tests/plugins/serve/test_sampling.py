"""Sampling: most likely, at random but repeatable, within top-p; and text from tokens as it comes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers

from shardwise.core.errors import RecipeError
from shardwise.data.tokenizer import BackendTokenizer, ByteTokenizer
from shardwise.plugins.serve.detokenize import Writer
from shardwise.plugins.serve.sampling import Sampling, choose_token


def drawn(logits: list[float], times: int = 200, before: tuple[int, ...] = (), **how: Any) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    options = Sampling(**({"temperature": 1.0, "top_k": None} | how))
    return {choose_token(torch.tensor(logits), before, options, generator) for _ in range(times)}


def test_temperature_zero_and_top_k() -> None:
    logits = [0.0, 3.0, 2.9]
    assert drawn(logits, temperature=0.0) == {1}
    assert drawn(logits, temperature=10.0, top_k=2) == {1, 2}
    assert drawn(logits, temperature=10.0) == {0, 1, 2}


@pytest.mark.parametrize("top_k", [None, 1, 1000])
def test_any_top_k(top_k: int | None) -> None:
    assert drawn([0.0] * 5, top_k=top_k) <= set(range(5))


@pytest.mark.parametrize(
    ("top_p", "left"), [(0.4, {3}), (0.6, {3, 1}), (0.81, {3, 1, 0}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_takes_the_fewest_that_are_likely_enough(top_p: float, left: set[int]) -> None:
    logits = [math.log(share) for share in (0.2, 0.3, 0.05, 0.45)]
    assert drawn(logits, top_p=top_p) == left


@pytest.mark.parametrize(
    "how", [{"temperature": 1e-40}, {"temperature": 1e-320}, {"repetition_penalty": 1e-300}]
)
def test_extreme_options_choose_the_most_likely(how: dict[str, float]) -> None:
    assert drawn([0.5, 1.0, 2.0], before=(2,), **how) == {2}


def test_what_was_there_is_less_likely() -> None:
    logits = [2.0, 1.9, -1.0]
    assert drawn(logits, before=(0,), temperature=0.0) == {0}
    assert drawn(logits, before=(0, 7), temperature=0.0, repetition_penalty=1.5) == {1}
    # A negative logit becomes smaller too.
    assert drawn([-1.0, -1.2], before=(0,), temperature=0.0, repetition_penalty=1.5) == {1}


def test_draws_are_the_seeds_shares() -> None:
    logits, generator = torch.tensor([0.7, 0.3]).log(), torch.Generator().manual_seed(1)
    how = Sampling(temperature=1.0, top_k=None)
    ones = sum(choose_token(logits, (), how, generator) for _ in range(2000))
    assert ones / 2000 == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 0},
        {"temperature": -1},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"repetition_penalty": 0},
        {"stop": ("",)},
        {"temperature": float("nan")},
        {"seed": 1.5},
        {"seed": 1 << 64},
        {"past_end": "yes"},
    ],
    ids=str,
)
def test_options_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as caught:
        Sampling(**wrong)
    assert f"({next(iter(wrong))})" in caught.value.line()


def pieces(text: str, prompt: str = "", stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    tokenizer = ByteTokenizer()
    writer = Writer(tokenizer, tokenizer.encode(prompt), stop)
    found = []
    for token in tokenizer.encode(text):
        found.append(writer.push(token))
        if writer.stopped:
            break
    return [*found, writer.rest()], writer.stopped


def test_characters_come_whole() -> None:
    found, _ = pieces("aä€😀b", prompt="ü")
    assert [piece for piece in found if piece] == ["a", "ä", "€", "😀", "b"]


def test_bytes_that_are_no_text_do_not_hold_it_up() -> None:
    tokenizer = ByteTokenizer()
    writer = Writer(tokenizer, [], ())
    text = "".join(writer.push(token) for token in [0x80] * 40 + list(b"ok"))
    assert text.endswith("ok") and "\ufffd" in text


def falling_back_to_bytes() -> BackendTokenizer:
    """A tokenizer as Llama 2's: a character without a token is its bytes, and `▁` a space, not at the beginning."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b"]
    backend = Tokenizer(
        models.BPE(
            {name: number for number, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(["</s>"])
    return BackendTokenizer("tiny", backend, 1)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("字字字字", "好a"),  # the last tokens of the prompt begin in the middle of a character
        ("字", "好</s>好 a"),
        ("a b</s></s></s></s></s></s></s></s>", " a"),  # they have no text
        ("a", " a</s> b"),
    ],
)
def test_text_follows_as_in_the_whole(prompt: str, text: str) -> None:
    tokenizer = falling_back_to_bytes()
    before, after = tokenizer.encode(prompt), tokenizer.encode(text)
    writer = Writer(tokenizer, before, ())
    assert (
        "".join(writer.push(token) for token in after)
        == tokenizer.decode(before + after)[len(tokenizer.decode(before)) :]
    )


def test_text_before_an_incomplete_character_is_not_lost() -> None:
    backend = Tokenizer(models.BPE({"ok": 0, "Ġä½": 1, "</s>": 2}, []))
    backend.decoder = decoders.ByteLevel()
    writer = Writer(BackendTokenizer("tiny", backend, 2), [0], ())
    assert [writer.push(0), writer.push(1), writer.rest(), writer.rest()] == ["ok", "", " ", ""]


@pytest.mark.parametrize(
    ("text", "expected", "stopped"),
    [
        ("one\n\ntwo", "one", True),
        ("one\ntwo", "one\ntwo", False),
        ("one\n", "one\n", False),
        ("endless", "", True),
        ("enbend", "enb", True),
    ],
)
def test_nothing_of_a_stop_text_is_shown(text: str, expected: str, stopped: bool) -> None:
    found, met = pieces(text, stop=("\n\n", "end"))
    assert ("".join(found), met) == (expected, stopped)
