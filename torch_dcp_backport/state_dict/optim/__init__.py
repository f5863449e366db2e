"""Get and load optimizer states: name them by FQN, flatten, split, initialise.

The caller's dict is never changed.
"""
