"""One peer trains the model of peers.py: ``python benchmarks/peer_steps.py PEER MODEL TOKENS FOLDER``.

peers.py starts it, by itself for one process and by torchrun for two. Every peer trains the same transformers model
on the same blocks of tokens with fused AdamW and clipped gradients, as its own documentation says. Rank 0 appends the
seconds of each step to FOLDER/steps.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

RATE, CLIP = 1e-4, 1.0
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
TRACE = "trace.json.gz"
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


class Blocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Blocks of LENGTH tokens from a file of 16-bit numbers."""

    def __init__(self, path: Path, length: int) -> None:
        self._tokens, self._length = np.memmap(path, dtype=np.uint16, mode="r"), length

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        start = number * self._length
        tokens = torch.from_numpy(self._tokens[start : start + self._length].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens.clone()}


class Clock:
    """Writes the seconds between the ends of two steps; those of the first are since this process began.

    Args:
        profiled: the step that rank 0 profiles; 0 for none.
    """

    def __init__(self, folder: Path, profiled: int = 0) -> None:
        self._path, self._last = folder / "steps.jsonl", time.perf_counter()
        self._trace, self._profiled, self._steps = folder / TRACE, profiled, 0
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def step(self) -> None:
        now = time.perf_counter()
        if RANK == 0:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"seconds": now - self._last}) + "\n")
            self._steps += 1
            if self._steps == self._profiled - 1:
                self._profile.start()
            elif self._steps == self._profiled:
                self._profile.stop()
                self._profile.export_chrome_trace(str(self._trace))
        self._last = now


Given = argparse.Namespace
"""model, blocks, batch (sequences of one rank), steps, clock, lora, precision."""


def opened(given: Given) -> nn.Module:
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    if given.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**LORA))
    return model


def loader(given: Given) -> Any:
    sampler = torch.utils.data.DistributedSampler(given.blocks, WORLD, RANK) if WORLD > 1 else None
    return torch.utils.data.DataLoader(given.blocks, given.batch, shuffle=sampler is None, sampler=sampler)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=RATE, fused=True)


def pytorch(given: Given, compiled: bool = False) -> None:
    model = opened(given)
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    if compiled:
        model.compile()
    optimizer, batches = adamw(model), iter(loader(given))
    for _ in range(given.steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=given.precision == "bf16"):
            loss = model(**next(batches)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        given.clock.step()


def compiled_pytorch(given: Given) -> None:
    pytorch(given, compiled=True)


def trainer(given: Given) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Told(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            given.clock.step()

    arguments = TrainingArguments(
        output_dir=str(given.folder), max_steps=given.steps, per_device_train_batch_size=given.batch,
        learning_rate=RATE, max_grad_norm=CLIP, optim="adamw_torch_fused", use_cpu=True, report_to="none",
        bf16=given.precision == "bf16",
        save_strategy="no", logging_steps=1, disable_tqdm=True, ddp_backend="gloo" if WORLD > 1 else None,
    )  # fmt: skip
    Trainer(opened(given), arguments, train_dataset=given.blocks, callbacks=[Told()]).train()


def accelerated(given: Given) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if given.precision == "bf16" else "no")
    model = opened(given)
    plain = torch.utils.data.DataLoader(given.blocks, given.batch, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, adamw(model), plain)
    rest: Iterator[Any] = iter(batches)
    for _ in range(given.steps):
        accelerator.backward(model(**next(rest)).loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        given.clock.step()


def lightning(given: Given) -> None:
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = opened(given)

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

        def on_train_batch_end(self, *_: Any) -> None:
            given.clock.step()

    # Lightning refuses to clip gradients of a fused optimizer: it does not clip here.
    pl.Trainer(
        precision="bf16-mixed" if given.precision == "bf16" else "32-true",
        accelerator="cpu", devices=WORLD if WORLD > 1 else 1, strategy="ddp" if WORLD > 1 else "auto",
        max_steps=given.steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), loader(given))  # fmt: skip


def deepspeed(given: Given) -> None:
    import deepspeed as ds

    config = {
        "train_micro_batch_size_per_gpu": given.batch,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
        "bf16": {"enabled": given.precision == "bf16"},
    }
    model = opened(given)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    batches = iter(loader(given))
    for _ in range(given.steps):
        engine.backward(engine(**next(batches)).loss)
        engine.step()
        given.clock.step()


PEERS: dict[str, Callable[[Given], None]] = {
    "plain PyTorch": pytorch,
    "torch.compile": compiled_pytorch,
    "HF Trainer": trainer,
    "Accelerate": accelerated,
    "Lightning": lightning,
    "DeepSpeed": deepspeed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="sequences of one rank")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--profiled", type=int, default=0, help="step to profile, from 2 on")
    given = parser.parse_args()
    given.clock, given.blocks = Clock(given.folder, given.profiled), Blocks(given.tokens, given.length)
    PEERS[given.peer](given)


if __name__ == "__main__":
    main()
