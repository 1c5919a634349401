"""``shardwise explain``: ZeRO, training memory and activation checkpointing, by arithmetic and by dry runs."""
