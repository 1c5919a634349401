"""``shardwise plan --for devices``: the fewest devices on which a recipe fits."""
