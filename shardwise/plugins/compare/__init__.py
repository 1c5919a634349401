"""``shardwise report`` of several runs: one page that compares them."""
