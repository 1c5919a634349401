"""The faults of mutation_check.py can be made: their lines are in the code, their tests exist."""

from __future__ import annotations

import pytest

from tests.mutation_check import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_one_line_of_the_code(fault: Fault) -> None:
    text = (ROOT / "shardwise" / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.line) == 1 and fault.line != fault.instead
    compile(text.replace(fault.line, fault.instead), fault.file, "exec")  # with the fault it is still Python
    file, _, test = fault.tests[0].partition("::")
    assert f"def {test}" in (ROOT / file).read_text(encoding="utf-8")
