"""All torture tools, one after the other: ``python -m tests.torture --out torture.json``; about an hour.

Each tool runs in a process of its own. The report holds their reports and the seconds that each took. The exit code
is 1 when a tool found a broken promise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

TOOLS: dict[str, tuple[str, ...]] = {
    "recipes": ("tests.torture.recipes", "--count", "5000"),
    "files": ("tests.torture.files", "--count", "2000"),
    "bitflips": ("tests.torture.bitflips", "--count", "1000"),
    "hangs": ("tests.torture.hangs", "--trials", "30"),
    "kills": ("tests.torture.kills", "--trials", "300"),
    "layouts": ("tests.torture.kills", "--pairs"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    given = parser.parse_args()
    report = json.loads(given.out.read_text()) if given.out.exists() else {}
    for name in given.only:
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-m", *TOOLS[name]], stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        found.pop("results", None)
        report[name] = {"passed": done.returncode == 0, "seconds": round(time.monotonic() - began), **found}
        given.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{name}: {'passed' if done.returncode == 0 else 'FAILED'}", flush=True)
    return 0 if all(report[name]["passed"] for name in given.only) else 1


if __name__ == "__main__":
    sys.exit(main())
