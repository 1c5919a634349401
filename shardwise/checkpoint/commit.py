"""Commit a checkpoint atomically: stage, publish, retire.

    tmp-<step>-<nonce>/           every rank writes and syncs its files here
    tmp-<step>-<nonce>/manifest   written after all ranks have succeeded; the file and the folder are synced
    rename to step-<step>         the commit; then the parent folder is synced
    only now                      older checkpoints beyond ``keep`` are renamed to tmp-retired-… and deleted

A run also keeps its best checkpoint (``checkpoint.best``). While the guard suspects a loss spike, no older
checkpoint is deleted, because a resumed run may rewind to it. (A run that is asked to stop saves even then.)

There is always a complete checkpoint once there was one. A crash leaves folders named tmp-*, which no reader opens. The
next start publishes a complete one (a crash just before the rename) and deletes the rest. Foreign folders, which have
neither a manifest nor shards, are neither counted nor deleted.

Checkpoints newer than the one just saved are retired too. They belong to a branch that the run left, because the newer
checkpoint was damaged or the run rewound after a loss spike.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from shardwise.checkpoint import manifest as manifests
from shardwise.checkpoint.manifest import Damaged, Manifest
from shardwise.core.atomic_file import make_folder, more_room, sync_folder
from shardwise.core.errors import ResourceError
from shardwise.core.units import format_bytes
from shardwise.engine.train_state import TrainState

_STAGED = re.compile(r"tmp-(\d+)-[0-9a-f]+")


def prepare_folder(folder: Path) -> None:
    """Prepare ``folder`` for saving: create it, check that it is writable, clean up after a crash.

    One process per run calls it, at the start, under the run's lock. Raises ResourceError.
    """
    try:
        make_folder(folder)
        probe = folder / f"tmp-probe-{secrets.token_hex(4)}"
        probe.write_bytes(b"x" * 4096)
        sync_folder(folder)
        _clean_up(folder)  # with the probe
    except OSError as error:
        raise unwritable(error, folder) from error


def _clean_up(folder: Path) -> None:
    for path in sorted(folder.glob("tmp-*"), reverse=True):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        elif not _publish_staged(path):
            shutil.rmtree(path)


def _publish_staged(staged: Path) -> bool:
    """Publish a staged checkpoint if only the rename is missing; return whether it did."""
    match = _STAGED.fullmatch(staged.name)
    final = staged.parent / f"step-{match[1]}" if match else staged
    if final.exists() or not (staged / manifests.MANIFEST).exists():
        return False
    try:
        content = manifests.read_manifest(staged)
        for name, entry in content.files.items():
            manifests.verify_file(staged, name, entry)
    except Damaged:
        return False
    if f"step-{content.state.step}" != final.name:
        return False
    staged.rename(final)
    sync_folder(staged.parent)
    return True


def stage(folder: Path, step: int, needed: int) -> Path:
    """Create a folder for a checkpoint of about ``needed`` bytes. Raises ResourceError, OSError."""
    make_folder(folder)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise unwritable(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder, needed)
    staged = folder / f"tmp-{step}-{secrets.token_hex(8)}"
    staged.mkdir()
    return staged


def publish(staged: Path, content: Manifest, keep: int) -> Path:
    """Commit a staged checkpoint, after all files are written and synced; return its final path."""
    folder = staged.parent
    with (staged / manifests.MANIFEST).open("xb") as file:
        file.write(content.to_bytes())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(staged)
    final = folder / f"step-{content.state.step}"
    # A rename does not replace a folder with files.
    replaced = _rename_retired(final) if final.exists() else None
    try:
        staged.rename(final)
    except OSError:
        if replaced is not None:
            replaced.rename(final)
        raise
    sync_folder(folder)
    suspected = content.state.guard.burst is not None
    _retire(folder, content.state, None if suspected else max(1, keep))
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def _retire(folder: Path, state: TrainState, keep: int | None) -> None:
    """Delete all but the best and the ``keep`` (None: all) newest up to the step of ``state``.

    A failure does not affect the new checkpoint.
    """
    committed = manifests.committed(folder)
    retained = [path for path in committed if (manifests.step_of(path) or 0) <= state.step][:keep]
    if state.best is not None:
        retained.append(folder / f"step-{state.best.step}")
    _delete(path for path in committed if path not in retained)


def retire_after(folder: Path, step: int) -> None:
    """Delete the checkpoints after ``step``, after a rewind to it."""
    _delete(path for path in manifests.committed(folder) if (manifests.step_of(path) or 0) > step)


def _delete(checkpoints: Iterable[Path]) -> None:
    for path in checkpoints:
        with contextlib.suppress(OSError):
            shutil.rmtree(_rename_retired(path))


def _rename_retired(checkpoint: Path) -> Path:
    """Rename a checkpoint before its deletion, so that a half-deleted one is never read."""
    retired = checkpoint.parent / f"tmp-retired-{checkpoint.name}-{secrets.token_hex(8)}"
    checkpoint.rename(retired)
    return retired


def unwritable(error: OSError, folder: Path, needed: int = 0) -> ResourceError:
    """The error for a checkpoint that could not be written: folder, bytes needed, bytes free."""
    why = error.strerror or str(error)
    if needed:
        why += f", {format_bytes(needed)} needed"
    if error.errno != errno.EFBIG:
        with contextlib.suppress(OSError):
            why += f", {format_bytes(shutil.disk_usage(_existing(folder)).free)} free"
    fix = more_room(error) or "make the folder writable"
    return ResourceError(
        "cannot write the checkpoint",
        where=str(folder),
        why=why,
        fix=f"{fix}, or train into another folder; earlier checkpoints are intact",
    )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
