"""How to install an optional dependency: a command that works in the environment that runs Shardwise."""

from __future__ import annotations

import shlex
import sys


def install(extra: str) -> str:
    """The command that adds the packages of an extra of pyproject.toml.

    It names this interpreter, because the first pip on the path may be of another environment. There Shardwise is
    missing, and no index has it. Here it is installed, and pip asks an index for the extra's packages alone.
    """
    return f"{shlex.quote(sys.executable)} -m pip install 'shardwise[{extra}]'"
