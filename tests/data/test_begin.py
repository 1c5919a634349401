"""``data.begin``: the beginning-of-sequence token (BOS) stands where the tokenizer itself puts it, and only there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.resume_checks import _require_same_run
from shardwise.checkpoint.run_folder import RECIPE, load_run_recipe
from shardwise.core.errors import DataError
from shardwise.data import open_data
from shardwise.data.encoding import Encoder
from shardwise.data.readers import Record
from shardwise.data.tokenizer import open_tokenizer
from shardwise.recipe.load import dump_recipe, recipe_of
from shardwise.recipe.sections import DataSpec, Recipe
from shardwise.technique import SETTINGS
from tests.data.test_completions import tokenizer_folder

BOS, EOS = "<|im_start|>", "<|endoftext|>"


def folder_with(path: Path, processed: bool, **settings: Any) -> str:
    """A tokenizer whose post-processor puts BOS before a text, as Llama 3's does, and its settings."""
    import tokenizers

    folder = tokenizer_folder(path, None)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if processed:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
    backend.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings), encoding="utf-8")
    return str(folder)


@pytest.fixture
def adding(tmp_path: Path) -> str:
    return folder_with(tmp_path / "adding", processed=True)


@pytest.mark.parametrize("processed", [True, False])
@pytest.mark.parametrize("settings", [{}, {"add_bos_token": False}], ids=str)
def test_it_is_added_where_transformers_adds_it(
    processed: bool, settings: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_with(tmp_path / "t", processed, **settings)
    expected = transformers.AutoTokenizer.from_pretrained(folder)("the answer").input_ids
    tokenizer = open_tokenizer(folder)
    first = [] if tokenizer.begin is None else [tokenizer.begin]
    assert [*first, *tokenizer.encode("the answer")] == expected
    assert open_tokenizer(folder, "none").begin is None
    assert open_tokenizer("bytes").begin is None


@pytest.mark.parametrize("token", [BOS, {"content": BOS}, None, "<unknown>"], ids=str)
def test_add_bos_token_adds_it_where_the_file_has_no_post_processor(token: object, tmp_path: Path) -> None:
    """transformers 4 reads it so for LlamaTokenizer; transformers 5 does not read it next to a tokenizer.json."""
    folder = folder_with(tmp_path / "t", False, add_bos_token=True, bos_token=token)
    assert open_tokenizer(folder).begin == (None if token in (None, "<unknown>") else 1)


def recipe_with(source: Path, tokenizer: str, **data: Any) -> Recipe:
    values = {
        "model": {"layers": 1, "width": 8, "heads": 1, "ffn": 8, "vocab": 400},
        "data": {
            "source": str(source),
            "tokenizer": tokenizer,
            "sequence_length": 4,
            "held_out": 0.0,
            **data,
        },
        "steps": 1,
        "batch_size": 1,
    }
    return recipe_of(values, SETTINGS)


def test_every_document_of_plain_text_begins_with_it(adding: str, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("the", "", "answer is", "user")))
    tokenizer = open_tokenizer(adding)
    expected = [
        token
        for text in ("the", "answer is", "user")
        for token in (tokenizer.begin, *tokenizer.encode(text), tokenizer.separator)
    ]
    with_it = open_data(recipe_with(source, adding), cache=tmp_path / "cache")
    found = with_it.micro_batches(0, 0, 1, 1)[0]["input_ids"].flatten().tolist()
    assert found == expected[:4]
    without = open_data(recipe_with(source, adding, begin="none"), cache=tmp_path / "cache")
    assert without.fingerprint != with_it.fingerprint
    assert len(list((tmp_path / "cache").glob("*/header.json"))) == 2


def test_records_begin_with_it_untrained_and_chats_as_their_template_says(
    adding: str, tmp_path: Path
) -> None:
    tokenizer = open_tokenizer(adding)
    encoder = Encoder(DataSpec(), "prompt", tokenizer)
    tokens, trained = encoder.encode(Record({"prompt": "the answer is ", "completion": "user"}, "here"))
    assert tokens[0] == tokenizer.begin and not trained[0] and tokens.count(tokens[0]) == 1
    plain = Encoder(DataSpec(begin="none"), "prompt", open_tokenizer(adding, "none"))
    assert plain.encode(Record({"prompt": "the answer is ", "completion": "user"}, "here"))[0] == tokens[1:]
    assert plain.fingerprint != encoder.fingerprint
    template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    (Path(adding) / "chat_template.jinja").write_text(template, encoding="utf-8")
    chats = Encoder(DataSpec(), "messages", open_tokenizer(adding))
    said = {"messages": [{"role": "user", "content": "is"}, {"role": "assistant", "content": "the"}]}
    assert tokenizer.begin not in chats.encode(Record(said, "here"))[0]


@pytest.mark.parametrize("stream", [{}, {"stream_window": 3}])
def test_a_text_that_has_them_gets_no_second_ones(
    stream: dict[str, int], adding: str, tmp_path: Path
) -> None:
    """As when it is served: a rendered chat in a column of text begins with BOS and ends with end-of-text."""
    tokenizer = open_tokenizer(adding)
    assert tokenizer.begin is not None
    begin, end = (tokenizer.shown([token]) for token in (tokenizer.begin, tokenizer.separator))
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": t}) + "\n" for t in (f"{begin}the{end}", "the")))
    data = open_data(recipe_with(source, adding, **stream), cache=tmp_path / "cache")
    once = [tokenizer.begin, *tokenizer.encode("the"), tokenizer.separator]
    found = data.micro_batches(0, 0, 1, 1)[0]["input_ids"].flatten().tolist()
    assert found == (once * 2)[: len(found)] and len(found) > len(once)
    record = Record({"prompt": f"{begin}the", "completion": end}, "here")
    assert Encoder(DataSpec(), "prompt", tokenizer).encode(record) == (once, [False, False, True])


def test_a_run_of_an_earlier_version_keeps_its_documents(adding: str, tmp_path: Path) -> None:
    """Its recipe does not have the key. A tokenizer that adds no BOS makes no difference."""
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": "the answer"}) + "\n")
    silent = folder_with(tmp_path / "silent", processed=False)
    for tokenizer, differs in ((adding, True), (silent, False)):
        now = recipe_with(source, tokenizer)
        written = dump_recipe(now)
        assert "begin: auto" in written
        (tmp_path / RECIPE).write_text(written, encoding="utf-8")
        assert load_run_recipe(tmp_path).data.begin == "auto"
        (tmp_path / RECIPE).write_text(written.replace("  begin: auto\n", ""), encoding="utf-8")
        before = load_run_recipe(tmp_path)
        assert before.data.begin == "none"
        _require_same_run(before, recipe_with(source, tokenizer, begin="none"), tmp_path)
        if differs:
            with pytest.raises(DataError, match=r"data\.begin was none, now auto") as refused:
                _require_same_run(before, now, tmp_path)
            assert "set data.begin back" in refused.value.line()
        else:
            _require_same_run(before, now, tmp_path)
