"""The regression suite that ships with the package, and the tools that it shares with `verify`.

Importing this room must import neither torch nor pytest: `python -m torch_dcp_backport status` passes by it.
"""
