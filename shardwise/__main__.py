"""The program ``shardwise``, also as ``python -m shardwise``.

It imports the command line in a function. An interruption (Ctrl-C) while modules are imported ends the process at once,
because an exception may be lost in a module that is half imported.
"""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
    # No module comes from the working directory, which may be a run's folder of another person. Only a recipe's factory
    # does, when it is trained (model/factory.py).
    del sys.path[0]

import signal
from types import FrameType


def main() -> None:
    """Run the command line of this process."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, _end)
    from shardwise.core.collector import not_at_exit, paused

    not_at_exit()
    with paused():
        from shardwise.cli.main import main as run

    try:
        if signal.getsignal(signal.SIGINT) == _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        _end(signal.SIGINT, None)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(128 + number)  # as a shell reports a process that a signal ended


if __name__ == "__main__":
    main()
