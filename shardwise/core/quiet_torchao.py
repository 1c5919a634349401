"""Import torchao without its warnings.

transformers imports torchao wherever it is installed, and torchao warns when its C++ extensions were built for another
Python or another PyTorch. Nothing here uses them. A command has one line on standard error, and only if it fails.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

_FLAG = "TORCHAO_FORCE_SKIP_LOADING_SO_FILES"
_LOGGERS = ("torchao", "torch.utils._pytree")


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Within it torchao is imported without its C++ extensions, and its import logs errors only."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    before = os.environ.get(_FLAG)
    os.environ[_FLAG] = "1"
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if before is None:
            del os.environ[_FLAG]
        else:
            os.environ[_FLAG] = before
