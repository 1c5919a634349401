"""After which steps a run evaluates, saves and takes snapshots."""

from __future__ import annotations

from shardwise.recipe.load import recipe_of
from shardwise.trainer.pauses import Pauses


def pauses() -> Pauses:
    sections = {"evaluation": {"every": 3}, "checkpoint": {"every": 2}, "guard": {"snapshot_every": 5}}
    return Pauses(recipe_of({"model": {"preset": "tiny"}, "steps": 7, "batch_size": 4, **sections}))


def numbers(happens: list[bool]) -> list[int]:
    return [index + 1 for index, it in enumerate(happens) if it]


def test_the_recipe_says_when_a_run_pauses() -> None:
    """Everything but snapshots also happens after the last step."""
    mine = pauses()
    assert numbers([mine.evaluates(index) for index in range(7)]) == [3, 6, 7]
    assert numbers([mine.snapshots(index) for index in range(7)]) == [5]
    assert numbers([mine.saves(index, stop=False, suspicious=False) for index in range(7)]) == [2, 4, 6, 7]
    assert numbers([mine.after(index) for index in range(7)]) == [2, 3, 4, 5, 6, 7]


def test_a_checkpoint_waits_while_the_guard_suspects_a_spike() -> None:
    mine = pauses()
    assert not mine.saves(1, stop=False, suspicious=True)
    assert mine.after(2) and not mine.saves(2, stop=False, suspicious=True)
    assert mine.saves(4, stop=False, suspicious=False)
    assert not mine.saves(4, stop=False, suspicious=False), "it was saved"


def test_a_stop_and_the_last_step_save_at_once() -> None:
    mine = pauses()
    assert mine.saves(0, stop=True, suspicious=True)
    assert mine.saves(6, stop=False, suspicious=True)


def test_a_rewind_forgets_a_delayed_checkpoint() -> None:
    mine = pauses()
    mine.saves(1, stop=False, suspicious=True)
    mine.rewind()
    assert not mine.saves(0, stop=False, suspicious=False)
