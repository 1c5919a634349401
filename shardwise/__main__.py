"""``python -m shardwise``."""

from shardwise.cli.main import main

main()
