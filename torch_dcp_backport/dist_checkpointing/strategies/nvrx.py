"""What Megatron's programs ask about nvidia-resiliency-ext (NVRx)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Optional

from packaging.version import Version

NVRX_MIN_VERSION = "0.6.0"
#: Module of NVRx -> names that Megatron's programs use.
NEEDED = {
    "core": "AsyncCallsQueue AsyncRequest",
    "cached_metadata_filesystem_reader": "CachedMetadataFileSystemReader",
    "filesystem_async": "FileSystemWriterAsync _results_queue get_write_results_queue",
    "state_dict_saver": "CheckpointMetadataCache save_state_dict_async_finalize save_state_dict_async_plan",
}


def has_nvrx_async_support() -> bool:
    """Return whether NVRx is installed, with all that Megatron's programs use of it.

    Raises:
        AssertionError: its release is older than `NVRX_MIN_VERSION`.
    """
    try:
        modules = {
            name: import_module(f"nvidia_resiliency_ext.checkpointing.async_ckpt.{name}") for name in NEEDED
        }
    except ImportError:
        return False
    if not is_nvrx_min_version():
        raise AssertionError(f"Minimum required nvidia-resiliency-ext is {NVRX_MIN_VERSION}: it is older")
    return all(hasattr(module, name) for key, module in modules.items() for name in NEEDED[key].split())


def is_nvrx_min_version(version: str = NVRX_MIN_VERSION) -> bool:
    """Return whether NVRx is installed in this release or a later one."""
    try:
        found = str(import_module("nvidia_resiliency_ext").__version__)
    except (ImportError, AttributeError):
        return False
    return Version(found) >= Version(version)


def make_nvrx_async_request(
    async_request_cls: Any,
    async_fn: Optional[Callable[..., Any]],
    async_fn_args: Any,
    finalize_fns: list[Callable[..., Any]],
    async_fn_kwargs: Optional[Mapping[str, Any]] = None,
    preload_fn: Optional[Callable[..., Any]] = None,
) -> Any:
    """Return a request of a class of NVRx or of this package."""
    kwargs = {} if async_fn_kwargs is None else dict(async_fn_kwargs)
    return async_request_cls(
        async_fn, async_fn_args, finalize_fns, async_fn_kwargs=kwargs, preload_fn=preload_fn
    )
