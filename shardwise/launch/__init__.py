"""Processes of a run: local launch, placement under torchrun or Slurm, process groups, signals."""
