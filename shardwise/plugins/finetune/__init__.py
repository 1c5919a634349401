"""``shardwise finetune`` and ``init``: from a model and data to a recipe, its plan, and a trained model."""
