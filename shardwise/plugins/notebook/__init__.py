"""The bar of a run that ``train`` or ``fit`` started from Python."""
