"""The public names are what users import, whatever was imported before."""

from __future__ import annotations

import subprocess
import sys


def test_functions_win_over_subpackages_of_the_same_name() -> None:
    code = (
        "import shardwise, shardwise.plan.search, shardwise.train.loop\n"
        "from shardwise.plan.search import plan_for\n"
        "assert callable(shardwise.plan) and callable(shardwise.train) and callable(plan_for)\n"
        "assert callable(shardwise.export) and callable(shardwise.merge)\n"
        "recipe = shardwise.load('recipes/quickstart.yaml', ['model.layers=1', 'steps=2'])\n"
        "plan = shardwise.plan(recipe)\n"
        "assert isinstance(recipe, shardwise.Recipe) and isinstance(plan, shardwise.Plan) and plan.fits\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_it_loads_nothing() -> None:
    code = "import sys, shardwise; assert 'torch' not in sys.modules and shardwise.__version__"
    subprocess.run([sys.executable, "-c", code], check=True)
