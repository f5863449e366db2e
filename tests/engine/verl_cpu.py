"""verl on the CPU: a platform for verl 0.9, which has none of its own for it. Imported before verl's modules.

verl 0.7 and 0.8 take the CPU where there is no accelerator.
"""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any


class Device:
    """What verl asks of a device's module: there is no memory of a device, and nothing to wait for."""

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: 0


def use() -> None:
    from verl.plugin.platform import platform_base, platform_manager

    def nothing(self: Any, *_: Any, **__: Any) -> None:
        return None

    answers = {
        "device_name": "cpu",
        "vendor_name": "cpu",
        "device_module": Device(),
        "is_available": lambda self: True,
        "current_device": lambda self: "cpu",
        "device_count": lambda self: 1,
        "communication_backend_name": lambda self: "gloo",
        "visible_devices_envvar": lambda self: "NO_DEVICES",
        "ray_resource_name": lambda self: "CPU",
        "ray_noset_envvars": lambda self: [],
        "nvtx_range": lambda self, *_: contextlib.nullcontext(),
        "is_ipc_supported": lambda self: False,
        "get_device_capability": lambda self, *_: (None, None),
    }
    base = platform_base.PlatformBase
    others = dict.fromkeys(base.__abstractmethods__, nothing)
    platform_manager.set_platform(type("Cpu", (base,), {**others, **answers})())


if importlib.util.find_spec("verl.plugin") and importlib.util.find_spec("verl.plugin.platform"):
    use()
