"""``shardwise watch``: the page of a run while it trains."""
