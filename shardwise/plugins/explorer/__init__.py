"""``shardwise explore``: a page on which one changes devices, data and strategy, and reads what a plan says of it."""
