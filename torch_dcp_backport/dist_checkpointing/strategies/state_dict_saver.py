"""The steps of Megatron's own saves in the background are not offered; an import of one says so."""

from __future__ import annotations

from torch_dcp_backport.dist_checkpointing.offers import refusing

__getattr__ = refusing(
    __name__, "save_state_dict_async_finalize save_state_dict_async_plan verify_global_md_reuse"
)
