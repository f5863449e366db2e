"""Loaders of other projects under the name of torch's function, for benchmarks/transfer.py --alternatives."""
