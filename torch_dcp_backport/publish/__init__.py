"""The one way from bytes to something that readers see: draft, lock, sync, rename, discard.

`disk` writes, syncs and removes; `drafts` are folders that readers do not see yet. A lock keeps others from a
draft: `Room` has one for all drafts of a target, a `Hidden` draft the mark of its process. A folder without
a draft is marked once it is complete. All of them are in `drafts`.
Knows no tensors and no ranks; must never import torch.
"""
