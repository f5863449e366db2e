"""FSDP2's own record of a parameter, whose shard stays where it is as long as it may.

Must never copy a shard that is padded already: a state dict that the user keeps has it.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_dcp_backport.compat import local_part


class FSDPParam:
    def reset_sharded_param(self: Any) -> None:
        """Note the module's parameter, which may be another by now; pad its shard where it is not padded.

        https://github.com/pytorch/pytorch/pull/163130

        Raises:
            AssertionError: the parameter was replaced where torch swaps tensors instead.
        """
        owner = self._module_info
        param = getattr(owner.module, owner.param_name)
        if param is not self.sharded_param:
            if torch.__future__.get_swap_module_params_on_conversion():
                raise AssertionError(f"{owner.param_name} was replaced, though tensors are swapped: {param}")
            self.sharded_param = param
        local = local_part(param)
        if local.is_meta:
            return
        if not is_in_place(self, local):
            whole, length = padded(self, local)
            self._sharded_param_data = whole.view(-1)
            if whole is not local:
                param._local_tensor = whole.narrow(dim_of(self), 0, length)
        self._sharding_spec = param._spec


def is_in_place(record: Any, local: torch.Tensor) -> bool:
    """Return whether a shard is the beginning of the padded memory that FSDP2 gathers."""
    data = record._sharded_param_data
    if type(data) is not torch.Tensor or type(local) is not torch.Tensor:
        return False
    mine, theirs = data.untyped_storage().data_ptr(), local.untyped_storage().data_ptr()
    return (
        mine == theirs > 0
        and data.storage_offset() == local.storage_offset()
        and data.dtype == local.dtype
        and local.numel() <= data.numel() == record.padded_sharded_param_size.numel()
        and (local.is_pinned() or not record.pin_memory)
    )


def padded(record: Any, local: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a shard with its padding, pinned where FSDP2 offloads it so, and the shard's length in it."""
    dim, size = dim_of(record), record.padded_sharded_param_size
    length = local.size(dim) if local.numel() else 0
    whole = local
    if local.size() != size:
        if dim != 0:
            raise AssertionError(f"Shard({dim}) requires even sharding, and a shard has {local.size()}")
        whole = local.new_zeros(size)
        whole.narrow(dim, 0, length).copy_(local)
    if record.pin_memory and not whole.is_pinned():
        whole = whole.cpu().pin_memory()
    return whole, length


def dim_of(record: Any) -> int:
    """Return the dimension that is sharded; torch 2.4 and 2.5 shard the first."""
    placement = getattr(record, "fsdp_placement", None)
    return 0 if placement is None else int(placement.dim)
