"""The message for a plan that does not fit; recipes that are installed with the package."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli.common import recipe_file
from shardwise.cli.main import run
from shardwise.core.errors import ResourceError
from shardwise.core.ledger import Ledger
from shardwise.core.plan import HostMemory, Plan
from shardwise.core.units import GiB
from shardwise.hardware.allocator_options import VARIABLES
from shardwise.jobs.planning import refuse_unfit
from shardwise.recipe.installed import RECIPES
from tests.harness.plans import with_rows


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def refused(plan: Plan) -> ResourceError:
    with pytest.raises(ResourceError) as caught:
        refuse_unfit(plan)
    return caught.value


def on_cuda(plan: Plan, **rows: int) -> Plan:
    """On 80 GiB, of which 2 are kept free."""
    sizes = {"capacity_bytes": 80 * GiB, "reserve_bytes": 2 * GiB}
    return replace(with_rows(plan, **rows), device="H100-80GB", **sizes)


def test_what_fits_is_not_refused(plan: Plan) -> None:
    refuse_unfit(plan)
    refuse_unfit(on_cuda(plan, activations=78 * GiB))


def test_a_host_that_is_too_small_is_named_alone(plan: Plan) -> None:
    host = {"host": HostMemory(Ledger(optimizer_state=3 * GiB), 2 * GiB)}
    error = refused(replace(plan, **host))
    assert error.why == "a rank needs 3.00 GiB of 2.00 GiB of host memory"
    assert error.fix == "see what fits: shardwise plan RECIPE --explain"
    both = refused(replace(on_cuda(plan, activations=79 * GiB), **host)).why
    assert both.startswith("rank 0 needs 79.00 GiB of 80.00 GiB") and both.endswith("2.00 GiB of host memory")


def test_what_is_kept_free_is_named(plan: Plan) -> None:
    assert refused(on_cuda(plan, activations=79 * GiB)).why == (
        "rank 0 needs 79.00 GiB of 80.00 GiB with a reserve of 2.00 GiB, most in the forward phase"
    )
    unreserved = refused(replace(plan, capacity_bytes=GiB))
    assert unreserved.why == "rank 0 needs 2.00 GiB of 1.00 GiB, most in the backward phase"


def test_a_setting_is_advised_where_the_run_does_not_have_it(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for all tensors, not for the pieces between them."""
    torn = on_cuda(plan, activations=77 * GiB, fragmentation=2 * GiB)
    error = refused(torn)
    assert "2.00 GiB of it lost to fragmentation" in error.why
    assert "expandable_segments" not in error.fix, "a run on CUDA asks for them by itself"
    monkeypatch.setenv(VARIABLES[0], "expandable_segments:False")
    assert refused(torn).fix.startswith("set PYTORCH_ALLOC_CONF=expandable_segments:True, or see ")


def test_installed_recipes_are_found_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of the repository; a file of the user's own has priority."""
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "quickstart.yaml", "recipes/quickstart.yaml"):
        assert recipe_file(name) == RECIPES / "quickstart.yaml" and recipe_file(name).is_file()
    (tmp_path / "quickstart.yaml").touch()
    assert recipe_file("quickstart.yaml") == Path("quickstart.yaml")
    assert recipe_file("other/quickstart.yaml") == Path("other/quickstart.yaml")
    assert recipe_file("nothing.yaml") == Path("nothing.yaml")
    assert run(["plan", "nothing.yaml"]) == 2


def test_the_wheel_has_what_the_package_reads() -> None:
    """Every file that is no module is in the package data of pyproject.toml, recipes among them."""
    root = Path(__file__).parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = data["package-data"]["shardwise"]
    files = [path for path in (root / "shardwise").rglob("*") if path.suffix in (".toml", ".html", ".typed")]
    files += [RECIPES / path.name for path in (root / "recipes").glob("*.yaml")]
    for path in files:
        name = path.relative_to(root / "shardwise")
        assert any(
            name.match(pattern) and len(name.parts) == pattern.count("/") + 1 for pattern in patterns
        ), name
