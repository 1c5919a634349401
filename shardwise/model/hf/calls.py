"""Calls of transformers' models without a look at values, which would wait for the device and stop a dry run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_guessing() -> Iterator[None]:
    """Stop transformers from reading values: packed sequences in position ids, masks without padding."""
    from transformers import masking_utils

    guesses = masking_utils.find_packed_sequence_indices, masking_utils._ignore_bidirectional_mask_sdpa
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    masking_utils._ignore_bidirectional_mask_sdpa = lambda padding_mask, *rest, **named: (
        padding_mask is None and guesses[1](padding_mask, *rest, **named)
    )
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices, masking_utils._ignore_bidirectional_mask_sdpa = guesses
