"""Megatron's place for saves in the background. There is one format, and no strategy to choose."""
