"""Adapters of masked and encoder-decoder models: PEFT loads them, and merging gives what PEFT computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.model.adapted import AdaptedModel
from shardwise.model.files.peft import write_adapter
from shardwise.model.hf import HuggingFaceModel
from shardwise.plugins.merge.merging import merge_adapter
from shardwise.recipe.sections import AdapterSpec
from tests.harness.families import config_of

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

CLASSES = {"masked": "AutoModelForMaskedLM", "seq2seq": "AutoModelForSeq2SeqLM"}


@pytest.mark.parametrize(("family", "objective"), [("bert", "masked"), ("t5", "seq2seq")])
def test_a_merged_adapter_is_pefts(family: str, objective: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind: Any = getattr(transformers, CLASSES[objective])
    kind.from_config(config_of(family)).save_pretrained(tmp_path / "base")
    base = HuggingFaceModel(str(tmp_path / "base"), 8, objective)
    adapted = AdaptedModel(base, AdapterSpec(rank=4, alpha=8.0))
    tensors = {name: 0.1 * torch.randn(shape) for name, shape in adapted.adapter_shapes.items()}
    write_adapter(tmp_path / "adapter", tensors, adapted.config(), None)
    merge_adapter(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged")
    ids = torch.randint(6, 64, (2, 8))
    given = {"input_ids": ids} | ({"decoder_input_ids": ids} if objective == "seq2seq" else {})
    with torch.no_grad():
        merged = kind.from_pretrained(tmp_path / "merged").eval()(**given).logits
        plain = kind.from_pretrained(tmp_path / "base").eval()
        before = plain(**given).logits
        theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()(**given).logits
    assert (merged - before).abs().max() > 1e-2
    torch.testing.assert_close(merged, theirs, rtol=1e-4, atol=1e-5)
