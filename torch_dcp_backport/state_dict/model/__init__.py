"""Get and load the state of a model."""
