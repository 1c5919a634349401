"""Training: the loop, its data, checkpoints, the meter and the launch of processes."""
