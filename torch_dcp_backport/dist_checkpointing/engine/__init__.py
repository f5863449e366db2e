"""Planning, writing, reading and committing sharded checkpoints.

Knows tables, boxes, files and ranks. Must never know a state dict: its callers flatten that.
"""
