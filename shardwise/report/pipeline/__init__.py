"""Pictures of pipeline parallelism."""
