"""The plan and the runs of the core's tests of reports."""

from __future__ import annotations

from tests.report.conftest import make_run, plan

__all__ = ["make_run", "plan"]
