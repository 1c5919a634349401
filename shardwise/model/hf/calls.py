"""Calls of transformers' models without a look at values, which would wait for the device and stop a dry run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_guessing() -> Iterator[None]:
    """Stop transformers from reading values: packed sequences in position ids, masks without padding."""
    from transformers import masking_utils

    find_packed = masking_utils.find_packed_sequence_indices
    ignore_mask = masking_utils._ignore_bidirectional_mask_sdpa
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    # With a padding mask the original asks whether it is all true, which is a value.
    masking_utils._ignore_bidirectional_mask_sdpa = lambda padding_mask, *rest, **named: (
        padding_mask is None and ignore_mask(padding_mask, *rest, **named)
    )
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find_packed
        masking_utils._ignore_bidirectional_mask_sdpa = ignore_mask
