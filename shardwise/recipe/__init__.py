"""Recipes: YAML with source positions, checked sections, overrides and presets."""
