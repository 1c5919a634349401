"""``shardwise merge``: an adapter into its base model, and out of it again."""
