"""The one way from bytes to something that readers see: draft, lock, sync, rename, discard.

`disk` writes, syncs and removes. Knows no tensors and no ranks; must never import torch.
"""
