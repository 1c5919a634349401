"""The program ``shardwise``, also as ``python -m shardwise``.

It imports the command line in a function. An interruption (Ctrl-C, SIGTERM) while modules are imported ends the process
at once, because an exception may be lost in a module that is half imported. torch loses it while it loads NumPy.
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
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
    from shardwise.core.collector import not_at_exit, paused

    not_at_exit()
    with paused():
        from shardwise.cli.failure import Terminated
        from shardwise.cli.main import main as run

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) == _end:
                signal.signal(number, _interrupt)
        run()
    except KeyboardInterrupt as interruption:
        _end(signal.SIGTERM if isinstance(interruption, Terminated) else signal.SIGINT, None)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise the interruption, which unwinds the stack. While a module is imported, end at once."""
    caller = frame
    while caller is not None:
        if caller.f_code.co_filename.startswith("<frozen importlib"):
            _end(number, frame)
        caller = caller.f_back
    from shardwise.cli.failure import Terminated

    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(128 + number)  # as a shell reports a process that a signal ended


if __name__ == "__main__":
    main()
