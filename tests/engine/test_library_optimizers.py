"""Optimizers of libraries train what a plain loop trains, under every layout and after a checkpoint, or are refused."""

from __future__ import annotations

import functools
import os
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor, nn

from shardwise.checkpoint.checkpoint import restore, save_checkpoint
from shardwise.core.errors import RecipeError
from shardwise.dryrun.run import dry_run
from shardwise.engine.build import build
from shardwise.engine.optim import trial
from shardwise.engine.optim.library_state import NUMBERS
from shardwise.engine.optim.norm import local
from shardwise.engine.optim.stepping import ELEMENTWISE
from shardwise.engine.optim.trial import library_optimizer, rounds, tried
from shardwise.engine.run import Run
from shardwise.engine.schedule import learning_rate
from shardwise.engine.snapshot import Snapshots, snapshots_of
from shardwise.engine.step import step
from shardwise.engine.train_state import TrainState
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs.planning import make_plan
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import OptimizerSpec, Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.verifier.reference import reference_model
from tests.harness import optimizers as own
from tests.harness.plans import NOTHING_TO_SEARCH
from tests.harness.pool import Pool
from tests.harness.tiers import quick
from tests.harness.tiny_run import VOCAB, batch

MODEL = {"width": 12, "heads": 2, "kv_heads": 2, "ffn": 13, "vocab": VOCAB}
STEPS, SAVED, SKIPPED, WARMUP, RATE = 8, 5, 3, 4, 0.05
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "zero 3": (2, {"zero_stage": 3}),
    "tensor": (2, {"tensor_parallel": 2}),
    "stages": (2, {"pipeline_parallel": 2}),
    "copies": (2, {"zero_stage": 0}),
    "zero 1": (2, {"zero_stage": 1}),
    "hybrid": (4, {"zero_stage": 2, "replicate": 2}),
    "both": (4, {"zero_stage": 3, "tensor_parallel": 2}),
}
EXACT = 1e-9
"""Relative difference of a loss from the plain loop's, in fp64."""
OF_TORCH = tuple(
    "tests.harness.optimizers:rmsprop" if kind is torch.optim.RMSprop else f"torch.optim:{kind.__name__}"
    for kind in ELEMENTWISE
)
ANYWHERE = (*map(own.name_of, own.TRAIN_ANYWHERE), *OF_TORCH, "torch.optim:Adafactor", own.FACTORIES["Muon"])
NEED_ALL = tuple(map(own.name_of, own.NEED_ALL))
HABITS = tuple(map(own.name_of, own.TRAIN_ANYWHERE))
WHOLE_MATRICES = ("torch.optim:Adafactor", own.FACTORIES["Muon"])
SOME = tuple(map(own.name_of, (own.CountsInGroup, own.ListsOfMatrices)))
COUNTING = tuple(map(own.name_of, (own.CountsInGroup, own.CountsInAttributes, own.CountsInState)))
READ_BY_HOST = "torch.optim:NAdam"
QUICK = {
    "zero 3": (*SOME, *COUNTING[1:], READ_BY_HOST),
    "tensor": SOME,
    "stages": SOME,
}
"""What `make test` trains by layout. Each place of a counter where parameters are cut; NAdam, whose numbers the host
reads.
"""


def recipe(factory: str, layers: int = 1, **sections: Any) -> Recipe:
    values = {
        "model": {"layers": layers, **MODEL},
        "steps": STEPS,
        "batch_size": 4,
        "optimizer": {"factory": factory, "learning_rate": RATE, "clip_norm": None},
        "schedule": {"name": "constant", "warmup": WARMUP},
    }
    return recipe_of(values | sections, SETTINGS)


# ---- a plain loop, and runs -------------------------------------------------------------------------------


def plain_loops(factories: Sequence[str], layers: int) -> dict[str, list[float]]:
    """Losses of loops that know nothing of the engine. One update is left out, as of a step with an overflow."""
    found = {}
    for name in factories:
        blueprint = blueprint_of(recipe(name, layers))
        model = reference_model(blueprint, 0, torch.float64)
        module, _, attribute = name.partition(":")
        factory = getattr(__import__(module, fromlist=[attribute]), attribute)
        named = list(model.named_parameters())
        made = factory([p for _, p in named] if isinstance(factory, type) else named, lr=RATE)
        losses = []
        for index in range(STEPS):
            total, count = blueprint.loss(model, batch(index % 2))
            (total / count).backward()
            for optimizer in made if isinstance(made, list) else [made]:
                for group in optimizer.param_groups:
                    group["lr"] = RATE * min(1.0, (index + 1) / WARMUP)
                if index != SKIPPED:
                    optimizer.step()
                optimizer.zero_grad()
            losses.append((total / count).item())
        found[name] = losses
    return found


def layers_of(settings: dict[str, Any]) -> int:
    """Fewest blocks of a layout."""
    return int(settings.get("pipeline_parallel", 1))


def built(factory: str, settings: dict[str, Any], layers: int = 0, **sections: Any) -> Run:
    trial._tried = remembered
    wanted = recipe(factory, layers or layers_of(settings), **sections)
    strategy = strategy_from({"precision": "fp64", **settings})
    return build(wanted, blueprint_of(wanted), strategy, torch.device("cpu"))


_tried = trial._tried


def remembered(factory: Any, spec: OptimizerSpec, small: Any) -> trial.Trial:
    """The trial of an optimizer by any of the ranks of these tests: it depends on these values alone."""
    name = xxhash.xxh3_64_hexdigest(repr((spec, small)).encode())
    file = Path(os.environ["SHARDWISE_CACHE"]) / f"trial-{name}"
    if not file.exists():
        written = file.with_suffix(f".{os.getpid()}")
        written.write_bytes(pickle.dumps(_tried(factory, spec, small)))
        written.rename(file)
    found: trial.Trial = pickle.loads(file.read_bytes())  # noqa: S301
    return found


@pytest.fixture
def remembered_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_tried", remembered)


def losses_of(run: Run, steps: range) -> list[float]:
    losses = []
    for index in steps:
        mine = {key: value[run.data_rank :: run.data_degree] for key, value in batch(index % 2).items()}
        skip = torch.tensor(float(index == SKIPPED))
        losses.append(float(step(run, [mine], learning_rate(run.recipe, index), skip).loss))
    return losses


def trained(factories: list[str], settings: dict[str, Any], folder: Path) -> dict[str, list[float] | str]:
    """Losses, or the refusal, by optimizer. Each run is saved, and continued by another one."""
    found: dict[str, list[float] | str] = {}
    for name in factories:
        try:
            run = built(name, settings)
        except RecipeError as error:
            found[name] = error.line()
            continue
        losses = losses_of(run, range(SAVED))
        save_checkpoint(run, TrainState(SAVED, 0), folder / name.replace(":", "-"), 1)
        losses += losses_of(run, range(SAVED, STEPS))
        found[name] = losses
        assert continued([name], settings, folder)[name] == losses[SAVED:], "bit by bit"
    return found


def saved(factories: list[str], settings: dict[str, Any], layers: int, folder: Path) -> None:
    for name in factories:
        run = built(name, settings, layers)
        losses_of(run, range(SAVED))
        save_checkpoint(run, TrainState(SAVED, 0), folder / name.replace(":", "-"), 1)


def continued(
    factories: list[str], settings: dict[str, Any], folder: Path, layers: int = 0
) -> dict[str, list[float]]:
    """Losses after a checkpoint, which may be of another layout."""
    found = {}
    for name in factories:
        run = built(name, settings, layers)
        state = restore(run, folder / name.replace(":", "-"))
        assert state is not None and state.step == SAVED
        found[name] = losses_of(run, range(SAVED, STEPS))
    return found


Expected = Callable[[tuple[str, ...], int], dict[str, list[float]]]


@pytest.fixture(scope="module")
def expected(pool: Pool) -> Expected:
    """Losses of the plain loops of some optimizers, for a number of blocks."""
    return functools.cache(lambda names, layers: pool.run(1, plain_loops, names, layers, timeout=300)[0])


def worst(losses: list[float] | str, plain: list[float]) -> float:
    assert not isinstance(losses, str), losses
    return max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True))


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        *(pytest.param(layout, names, id=layout) for layout, names in QUICK.items()),
        *(
            pytest.param(layout, names, id=f"{layout}, the others", marks=pytest.mark.long)
            for layout in LAYOUTS
            if (names := [name for name in ANYWHERE if name not in QUICK.get(layout, ())])
        ),
    ],
)
def test_a_library_s_optimizer_trains_what_it_trains_alone(
    layout: str, names: list[str], expected: Expected, pool: Pool, tmp_path: Path
) -> None:
    """Counters in groups, attributes and states; start values; lists; late state; a wrapped optimizer; torch's own."""
    world, settings = LAYOUTS[layout]
    plain = expected(tuple(names), layers_of(settings))
    ranks = pool.run(world, trained, list(names), settings, tmp_path, timeout=600)
    off = {name: worst(ranks[0][name], plain[name]) for name in names}
    assert {name: error for name, error in off.items() if error > EXACT} == {}
    assert ranks[0] == ranks[-1] and all(plain[name][-1] < plain[name][0] for name in names)


@pytest.mark.parametrize("layout", ["alone", "copies", "zero 3", "stages"])
def test_an_optimizer_that_needs_all_parameters_has_them_or_is_refused(
    layout: str, expected: Expected, pool: Pool, tmp_path: Path
) -> None:
    world, settings = LAYOUTS[layout]
    plain = expected(NEED_ALL, layers_of(settings))
    found = pool.run(world, trained, list(NEED_ALL), settings, tmp_path, timeout=300)[0]
    for name in NEED_ALL:
        if layout in ("alone", "copies"):
            assert worst(found[name], plain[name]) <= EXACT
        else:
            line = str(found[name])
            assert f"needs all parameters on every rank (optimizer.factory: {name})" in line
            assert "set strategy.zero_stage: 0" in line


@pytest.mark.parametrize("factories", quick([[*SOME], [*HABITS]], [*SOME]), ids=len)
def test_a_checkpoint_continues_under_another_layout(
    factories: list[str], expected: Expected, pool: Pool, tmp_path: Path
) -> None:
    names, plain = factories, expected(tuple(factories), 2)
    pool.run(2, saved, names, LAYOUTS["zero 3"][1], 2, tmp_path, timeout=300)
    for layout in ("alone", "stages"):
        world, settings = LAYOUTS[layout]
        found = pool.run(world, continued, names, settings, tmp_path, 2, timeout=300)[0]
        assert all(worst(found[name], plain[name][SAVED:]) <= EXACT for name in names)


def rewound(factories: list[str], settings: dict[str, Any]) -> list[str]:
    """Optimizers whose run goes on otherwise after a rewind to the start, or to a later step."""
    wrong = []
    for name in factories:
        run = built(name, settings, guard={"snapshot_every": 1})
        snapshots: Snapshots[int] | None = snapshots_of(run)
        assert snapshots is not None
        snapshots.begin(0)
        first = losses_of(run, range(STEPS))
        snapshots.restore(lambda step: True)
        again = losses_of(run, range(SAVED))
        snapshots.take(SAVED)
        again += losses_of(run, range(SAVED, STEPS))
        snapshots.restore(lambda step: step == SAVED)
        if again != first or losses_of(run, range(SAVED, STEPS)) != first[SAVED:]:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        pytest.param("alone", (*HABITS, "torch.optim:NAdam", "torch.optim:Rprop"), marks=pytest.mark.long),
        ("zero 3", COUNTING[1:]),
        pytest.param("zero 3", (*COUNTING, READ_BY_HOST), marks=pytest.mark.long),
    ],
)
def test_a_rewind_brings_the_counters_back(layout: str, names: tuple[str, ...], pool: Pool) -> None:
    world, settings = LAYOUTS[layout]
    assert pool.run(world, rewound, list(names), settings, timeout=300) == [[]] * world


def scaled_rates(settings: dict[str, Any]) -> list[float]:
    """Learning rates of the groups at the peak, for four times the batch that they are for."""
    scaling = {"from_batch": 1, "rule": "linear"}
    section = {"factory": "tests.harness.optimizers:own_rates", "scale_learning_rate": scaling}
    run = built("", settings, optimizer=section)
    losses_of(run, range(WARMUP + 1))
    return [group["lr"] for part in run.optimizer.parts for group in part.groups]  # type: ignore[attr-defined]


def test_rates_of_its_own_are_scaled_for_another_batch_size(pool: Pool) -> None:
    assert pool.run(1, scaled_rates, {})[0] == pytest.approx([0.08, 0.008])


# ---- refusals ---------------------------------------------------------------------------------------------

NAMED = {
    **{f"layers.{n}.{part}.weight": nn.Parameter(torch.zeros(20, 10)) for n in range(3) for part in "qv"},
    "norm.weight": nn.Parameter(torch.zeros(10)),
}


def spec_of(kind: type[torch.optim.Optimizer], **arguments: Any) -> OptimizerSpec:
    return OptimizerSpec(factory=own.name_of(kind), learning_rate=1e-2, arguments=arguments)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (own.Swaps, "other weights for evaluation than for training"),
        (own.OwnRate, "sets its own learning rate .*lr is 0.000825 after a step with 0.000833"),
        (own.Objects, "keeps objects that no checkpoint holds .*projector is of the type object"),
        (own.Growing, "state changes its form .*gradients has not the same length in all steps"),
        (own.KeepsGenerator, "a resumed run would not continue .*factor differs after saving and loading"),
        (own.NeedsClosure, "cannot begin .*missing 1 required positional argument: 'closure'"),
    ],
)
def test_an_optimizer_that_no_layout_can_train_is_refused_in_words(
    kind: type[torch.optim.Optimizer], says: str
) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        library_optimizer(NAMED, spec_of(kind))
    assert caught.value.where == f"optimizer.factory: {own.name_of(kind)}"
    assert "\n" not in caught.value.line()


def test_a_clipping_of_its_own_counts_where_gradients_are_not_clipped_before() -> None:
    named = {name: nn.Parameter(p.detach().double()) for name, p in NAMED.items()}
    spec = spec_of(own.ClipsItself)
    differs = tried(named, spec.model_copy(update={"clip_norm": None})).depends
    assert "differs where each parameter is updated alone" in differs
    assert tried(named, spec.model_copy(update={"clip_norm": 0.5})).depends == ""


def test_random_numbers_are_for_one_device() -> None:
    assert tried(NAMED, spec_of(own.Draws)).draws
    library_optimizer(NAMED, spec_of(own.Draws))
    with pytest.raises(RecipeError, match=r"draws random numbers .*each rank would draw others"):
        library_optimizer(NAMED, spec_of(own.Draws), ranks=2)


def test_fp64_is_for_optimizers_that_do_not_amplify_rounding() -> None:
    """In fp64 a difference is a fault, so one that rounding makes is refused; in fp32 it is ordinary noise."""
    wide = {name: nn.Parameter(p.detach().double()) for name, p in NAMED.items()}
    for named, ranks in ((NAMED, 2), (wide, 1)):
        library_optimizer(named, spec_of(own.Amplifies), ranks=ranks)
    with pytest.raises(RecipeError, match=r"in fp64 on several devices .*more than 1e-09 where .* by 1e-15"):
        library_optimizer(wide, spec_of(own.Amplifies), ranks=2)


@pytest.mark.parametrize(
    ("factory", "narrow"),
    [
        ("torch.optim:AdamW", False),
        (own.name_of(own.ListsOfMatrices), False),
        (own.name_of(own.Amplifies), True),
        (own.FACTORIES["Muon"], True),
    ],
)
def test_verify_knows_the_optimizers_that_round(factory: str, narrow: bool) -> None:
    assert rounds(NAMED, OptimizerSpec(factory=factory)) == narrow


def test_a_trial_disturbs_no_generator_and_no_parameter() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    weights = {name: p.detach().clone() for name, p in NAMED.items()}
    tried(NAMED, spec_of(own.Draws, lr=0.5))
    assert torch.equal(before[0], torch.get_rng_state()) and random.getstate() == before[1]
    assert np.array_equal(before[2], np.random.get_state()[1])
    assert all(torch.equal(p, weights[name]) and p.grad is None for name, p in NAMED.items())


# ---- numbers ----------------------------------------------------------------------------------------------


class WithDecay(own.CountsInGroup):
    """With a hyperparameter in its groups."""

    def __init__(self, params: Any, lr: float = 1e-2, decay: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.update(decay=decay, history=(1, None))

    def begin(self, group: dict[str, Any]) -> None:
        super().begin(group)
        group["history"] = (group["step"], group["step"] > 1)


def stepped(decay: float, steps: int, saved: dict[str, dict[str, Tensor]] | None = None) -> Any:
    torch.manual_seed(0)
    named = {"weight": nn.Parameter(torch.randn(4, 3))}
    spec = OptimizerSpec(factory=f"{__name__}:WithDecay", arguments={"decay": decay}, learning_rate=1e-2)
    optimizer = library_optimizer(named, spec)
    optimizer.start()
    for name, tensors in (saved or {}).items():
        for key, tensor in optimizer.stored(named[name]).items():
            tensor.copy_(tensors[key])
        optimizer.loaded()
    for _ in range(steps):
        named["weight"].grad = torch.ones(4, 3)
        optimizer.step(torch.zeros(()))
    tensors = {name: {k: t.clone() for k, t in optimizer.stored(p).items()} for name, p in named.items()}
    return optimizer.parts[0].groups[0], tensors


def test_counters_come_from_the_checkpoint_and_hyperparameters_from_the_recipe() -> None:
    group, saved = stepped(0.1, 3)
    assert group["step"] == 3 and saved["weight"].keys() == {"mean", NUMBERS}
    loaded, _ = stepped(0.2, 0, saved)
    assert (loaded["step"], loaded["history"], loaded["decay"]) == (3, (3, True), 0.2)
    assert type(loaded["step"]) is int and type(loaded["history"][1]) is bool
    fresh, start = stepped(0.1, 0)
    back, _ = stepped(0.1, 0, start)
    assert "step" not in back and back["history"] == fresh["history"] == (1, None)


# ---- plans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "preset", "names"),
    [
        pytest.param(3, "8xH100-80GB", (*SOME, READ_BY_HOST, *WHOLE_MATRICES), id="some"),
        *(
            pytest.param(stage, preset, ANYWHERE, marks=pytest.mark.long)
            for stage in (0, 3)
            for preset in (None, "8xH100-80GB")
        ),
    ],
)
def test_every_optimizer_is_planned(
    stage: int, preset: str | None, names: tuple[str, ...], remembered_trials: None
) -> None:
    """Also NAdam, which divides by one minus a product of betas that the host reads."""
    cluster = {"devices_per_node": 2} if preset is None else {"preset": preset}
    for name in names:
        wanted = recipe(name, cluster=cluster, batch_size=8)
        strategy = strategy_from({"zero_stage": stage})
        found = dry_run(wanted, blueprint_of(wanted), strategy, cluster_of(wanted.cluster))
        assert found.peak.bytes > 0


def state_bytes(factories: list[str], settings: dict[str, Any]) -> dict[str, int]:
    """Bytes of the tensors of a run's optimizer after its first steps."""
    found = {}
    for name in factories:
        run = built(name, {"precision": "fp32", **settings})
        losses_of(run, range(SAVED + 2))
        tensors = (local(t) for state in run.optimizer.state.values() for t in state.values())
        found[name] = sum(t.numel() * t.itemsize for t in tensors)
    return found


@pytest.mark.parametrize(
    "names",
    quick(
        [[*SOME, READ_BY_HOST], [*HABITS, READ_BY_HOST, *WHOLE_MATRICES]],
        [*SOME, READ_BY_HOST],
    ),
    ids=len,
)
@pytest.mark.parametrize("layout", quick(["alone", "zero 3"], "zero 3"))
def test_planned_state_is_the_state_that_a_run_has(
    layout: str, names: list[str], pool: Pool, remembered_trials: None
) -> None:
    world, settings = LAYOUTS[layout]
    real = pool.run(world, state_bytes, names, settings, timeout=300)[0]
    for name in names:
        wanted = recipe(name, cluster={"devices_per_node": world})
        strategy = strategy_from({"precision": "fp32", **settings})
        ledger = dry_run(wanted, blueprint_of(wanted), strategy, cluster_of(wanted.cluster)).peak.ledger
        assert ledger.optimizer_state == real[name], name


@pytest.mark.long
def test_the_planner_leaves_out_layouts_that_cannot_train(remembered_trials: None) -> None:
    """Memory speaks for ZeRO, but Prodigy and its kin need all parameters on every rank."""
    few_activations = {"activation_checkpointing": "full", "loss": "chunked"}
    others = {**NOTHING_TO_SEARCH, **few_activations}
    del others["zero_stage"]
    section = {
        "model": {"layers": 2, **MODEL, "width": 96, "ffn": 256},  # its state outweighs its activations
        "cluster": {"devices_per_node": 2},
        "plan": {"objective": "memory"},
        "strategy": others,
    }
    free = recipe(own.name_of(own.GlobalStepSize), **section)
    assert make_plan(free, cluster_of(free.cluster)).strategy.values["zero_stage"] == 0
    other = recipe(own.name_of(own.CountsInGroup), **section)
    assert make_plan(other, cluster_of(other.cluster)).strategy.values["zero_stage"] > 0
    pinned = recipe(own.name_of(own.GlobalStepSize), **section | {"strategy": {"zero_stage": 3}})
    with pytest.raises(RecipeError, match="needs all parameters on every rank"):
        make_plan(pinned, cluster_of(pinned.cluster))
