"""Open the sources of a recipe's ``data:``.

It needs no torch, so the command line checks and shows data before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.core.cache_folder import default_root
from shardwise.core.call_signatures import Call, require_callable
from shardwise.core.errors import DataError
from shardwise.core.user_objects import without_folder
from shardwise.data.completions import open_completions
from shardwise.data.dataset import OpenedSource, Splits, TokenDataset
from shardwise.data.formats import PROMPT_FIELDS, format_of, misspelt, needed_fields
from shardwise.data.pairs import open_pairs
from shardwise.data.preferences import open_preferences
from shardwise.data.prompts import PromptDataset, open_prompts
from shardwise.data.source import Source
from shardwise.data.sources import open_source
from shardwise.data.streaming import open_stream
from shardwise.data.text import open_text
from shardwise.data.tokenizer import Tokenizer, open_tokenizer
from shardwise.data.unpaired import open_unpaired
from shardwise.recipe.sections import DataSpec, Recipe

Opener = Callable[[OpenedSource], Splits[TokenDataset]]

OPENERS: Mapping[tuple[str, str], Opener] = {
    ("causal", "text"): open_text,
    ("masked", "text"): open_text,
    **{("causal", name): open_completions for name in ("messages", "sharegpt", "prompt", "alpaca")},
    **{("seq2seq", name): open_pairs for name in ("prompt", "alpaca")},
    **{(kind, "preference"): open_preferences for kind in ("pairs", "scored")},
    **{("unpaired", name): open_unpaired for name in ("unpaired", "preference")},
    **{("prompts", name): open_prompts for name in ("messages", "sharegpt", "prompt", "alpaca")},
}
"""What makes the samples of a kind from records of a format."""

STREAMED: Mapping[tuple[str, str], Opener] = {
    ("causal", "text"): open_stream,
    ("masked", "text"): open_stream,
}
"""The same under ``data.stream_window``."""


_NEEDS: Mapping[str, str] = {
    "pairs": "pairs: chosen and rejected, perhaps prompt",
    "scored": "pairs: chosen and rejected, perhaps prompt",
    "unpaired": "completions with a label, or pairs",
    "prompts": "prompts: prompt, messages, conversations or instruction",
}
"""What records must have for the kinds of samples of preferences and rollouts."""

_GIVE: Mapping[str, str] = {
    "prompts": "name the prompt's field 'prompt'",
    "unpaired": "give labelled completions, or pairs",
}
"""What to do about records without them, if not "give pairs"."""

_IN_A_RECIPE = ("the recipe's objective", "objective")
"""The objective and its key, as messages name them."""


def tokenizer_of(spec: DataSpec) -> Tokenizer:
    """The recipe's tokenizer. Raises DataError."""
    return open_tokenizer(spec.tokenizer, spec.begin)


def open_splits(
    spec: DataSpec,
    tokenizer: Tokenizer,
    root: Path,
    verify: bool = False,
    kind: str = "causal",
    prompt_tokens: int | None = None,
) -> Splits[TokenDataset]:
    """The training and held-out samples of a source.

    Args:
        kind: of samples: the recipe's ``samples``.
        root: the folder of token caches.
        verify: compare the content of the token cache with its digest.
        prompt_tokens: most tokens of a prompt without a completion.

    Raises:
        DataError: the source is malformed, does not suit the kind, or is shorter than one sequence.
        ResourceError: the cache cannot be written.
    """
    streamed = spec.stream_window is not None
    source = open_source(spec.source, spec.text_key, streamed)
    name = format_of(spec, source, kind)
    opener = opener_of(spec, source, name, kind)
    return opener(OpenedSource(spec, source, name, tokenizer, root, kind, verify, prompt_tokens))


def opener_of(
    spec: DataSpec, source: Source, name: str, kind: str, objective: tuple[str, str] = _IN_A_RECIPE
) -> Opener:
    """What makes the samples of a kind from records of the format `name`.

    Args:
        objective: the objective and its key, as messages name them.

    Raises:
        DataError: nothing does, or the records have no format.
    """
    streamed = spec.stream_window is not None
    opener = (STREAMED if streamed else OPENERS).get((kind, name))
    fields = source.fields()
    if opener is None:
        if not fields and not streamed:
            next(source.pieces(), None)  # raises the fault of malformed data
        raise _unsuitable(spec, name, kind, fields, objective)
    # Records without the text key were taken for text because no format fits them: perhaps one is misspelt.
    no_format = fields and name == "text" and spec.format == "auto" and spec.text_key not in fields
    if no_format and (meant := misspelt(sorted(fields), _needed(kind))):
        what = f"no '{spec.text_key}'"
        why = f"its first record has {', '.join(sorted(fields))}"
        fix = f"{meant} If not, set data.text_key to the field that holds the text"
        raise DataError(what, where=spec.source, why=why, fix=fix)
    return opener


def _needed(kind: str) -> list[str]:
    """The fields of the formats that have samples of a kind."""
    if kind == "prompts":
        return list(PROMPT_FIELDS.values())
    return needed_fields(name for other, name in OPENERS if other == kind)


def open_part(
    recipe: Recipe, spec: DataSpec, tokenizer: Tokenizer, root: Path | None = None, verify: bool = False
) -> Splits[TokenDataset]:
    """A source of a recipe, as its objective needs it. Raises as ``open_splits``."""
    return open_splits(spec, tokenizer, root or default_root(), verify, recipe.samples, recipe.prompt_tokens)


def _unsuitable(
    spec: DataSpec, name: str, kind: str, fields: Collection[str], objective: tuple[str, str]
) -> DataError:
    """The error for records of a format that a kind, or a stream, has no samples of."""
    why = f"its records are of the format {name}"
    fix = ""
    if spec.format == "auto" and spec.text_key not in fields and name == "text":
        why = "it has no records with fields"
        if fields:
            why = f"its first record has {', '.join(sorted(fields))}"
    if spec.stream_window is not None:
        what = "only plain text is streamed"
        fix = "remove data.stream_window, or write data.format: text"
    elif kind in _NEEDS:
        asker, key = objective
        what = f"{asker} needs {_NEEDS[kind]}"
        give = _GIVE.get(kind, "give pairs")
        fix = misspelt(sorted(fields), _needed(kind)) or f"{give}, or leave {key} out"
    elif name in ("preference", "unpaired"):
        what = f"the {kind} objective needs one text or completion per record"
        why = "these are preferences"
        fix = f"set objective: {'dpo' if name == 'preference' else 'kto'}"
    elif kind == "masked":
        what = "the masked objective needs plain text"
        fix = "give text, or name the field with it in data.text_key"
    else:
        what = f"the {kind} objective needs prompts and completions"
        fix = "give records with prompt and completion, or instruction and output"
    return DataError(what, where=spec.source, why=why, fix=fix)


@dataclass(frozen=True)
class OpenedSources:
    """All sources of a recipe.

    Attributes:
        parts: of ``data.source``, or of each item of ``data.mixture``.
        sets: of ``evaluation.sets``, by name: all samples, with nothing held out.
    """

    tokenizer: Tokenizer
    parts: list[Splits[TokenDataset]]
    sets: dict[str, Splits[TokenDataset]]


def open_sources(recipe: Recipe, root: Path, verify: bool = False) -> OpenedSources:
    """Open everything that a recipe reads. Raises as ``open_splits``."""
    tokenizer = tokenizer_of(recipe.data)

    def opened(spec: DataSpec) -> Splits[TokenDataset]:
        return open_part(recipe, spec, tokenizer, root, verify)

    parts = [opened(spec) for spec in recipe.data.parts]
    _require_alike(parts)
    # A stream has no end, and an evaluation reads samples of a whole set.
    alone = {"mixture": None, "held_out": 0.0, "format": "auto", "stream_window": None}
    sets = {
        name: opened(recipe.data.model_copy(update={**alone, "source": source}))
        for name, source in recipe.evaluation.sets.items()
    }
    return OpenedSources(tokenizer, parts, sets)


def _require_alike(parts: Sequence[Splits[TokenDataset]]) -> None:
    """Raises DataError if the samples of a mixture's sources do not stack."""
    names = [frozenset(part.train.padding()) for part in parts]  # it has the names of every sample
    for number, fields in enumerate(names):
        if fields != names[0]:
            raise DataError(
                "the sources of a mixture have different samples",
                where=f"data.mixture[{number}]",
                why=f"only some have {', '.join(sorted(fields ^ names[0]))}",
                fix="give all of them the same fields",
            )


def check_data(recipe: Recipe) -> list[str]:
    """Check a recipe's data before anything else starts, once per run; the tokens stay in the cache.

    Reads the whole cache, so that its ranks train on the tokens whose digest a checkpoint records.

    Returns a description of records with completions, in sentences. A factory opens its own data later.
    """
    if recipe.model.factory is not None:
        return []
    opened = open_sources(recipe, default_root(), verify=True)
    parts = opened.parts
    _require_rewards_of([*parts, *opened.sets.values()], recipe)
    shown = [part for part in parts if part.train.from_records or recipe.data.mixture]
    return [sentence for part in shown for sentence in part.sentences()]


def _require_rewards_of(parts: Sequence[Splits[TokenDataset]], recipe: Recipe) -> None:
    """Raise RecipeError if a reward function does not take the fields of the prompts."""
    sides = [side for part in parts for side in (part.train, part.held_out)]
    records = [record for side in sides if isinstance(side, PromptDataset) for record in side.fields]
    fields = dict.fromkeys(str(name) for record in records for name in record if name != "prompt")
    for target in (recipe.objective and recipe.objective.rewards) or ():
        call = Call(("prompts", "completions"), keywords=fields)
        require_callable(target, f"objective.rewards: {without_folder(target)}", call)
