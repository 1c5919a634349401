"""Plans and runs made by hand."""

from tests.report.conftest import make_run, plan

__all__ = ["make_run", "plan"]
