"""``shardwise doctor``: facts, checks and speeds of this machine."""
