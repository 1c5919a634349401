"""The commands of serving."""
