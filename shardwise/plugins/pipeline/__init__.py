"""Schedules of pipeline parallelism that few runs use: PipeDream."""
