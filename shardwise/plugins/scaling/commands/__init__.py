"""The commands of scaling laws."""
