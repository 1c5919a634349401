"""Which causal families of transformers plan and train: ``python -m tests.families``."""
