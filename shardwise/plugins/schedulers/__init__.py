"""Files with which schedulers start ``shardwise train`` on all nodes of a recipe, and start it again."""
