"""The steps of Megatron's own saves in the background. Programs import them; here they say what to call."""

from __future__ import annotations

from typing import Any, NoReturn

from torch_dcp_backport.dist_checkpointing._src.offers import WHY, refusing

__getattr__ = refusing(__name__, "verify_global_md_reuse")


def save_state_dict_async_plan(*options: Any, **more: Any) -> NoReturn:
    """Refuse: a step of Megatron's own saves in the background.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(f"save_state_dict_async_plan{WHY}")


def save_state_dict_async_finalize(*options: Any, **more: Any) -> NoReturn:
    """Refuse: a step of Megatron's own saves in the background.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(f"save_state_dict_async_finalize{WHY}")
