"""Exports of trained models: Hugging Face folders and merged adapters."""
