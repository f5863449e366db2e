"""The choice of the ranks' device type and backend in `verify`. Data in, decision out.

Must not import torch: a rank reports the devices and backends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional


class CannotRun(RuntimeError):
    """The reason why there is nothing to compare."""


@dataclass(frozen=True)
class Seen:
    """The devices and backends of this machine, as torch sees them."""

    torch: str  # its version
    devices: Mapping[str, int]  # accelerator type -> how many; a type that torch does not know is not here
    backends: Mapping[str, Sequence[str]]  # name -> device types that it serves
    defaults: Mapping[str, str]  # device type -> torch's own choice of a backend, which may be missing


@dataclass(frozen=True)
class Place:
    """The place of the ranks, and the reason for it."""

    device: str
    backend: str
    reason: str


def choose(seen: Seen, world: int, device: Optional[str] = None, backend: Optional[str] = None) -> Place:
    """Choose the device and the backend that were asked for, or the best of this machine.

    Raises:
        CannotRun: this machine does not have them.
    """
    if backend is not None:
        backend = backend.lower()  # as torch does
        _check_backend(seen, backend)
    if device is None:
        device, reason = _best(seen, world, backend)
    else:
        _check(seen, world, device)
        reason = "as asked"
    chosen = _backend(seen, device, backend)
    if chosen is None and backend is not None:
        why = "" if reason == "as asked" else f", where the ranks would be ({reason})"
        raise CannotRun(f"--backend {backend} does not serve {device}{why}")
    if chosen is None:
        raise CannotRun(
            f"torch {seen.torch} has no own backend for {device}: give --backend; "
            f"it has {_listed(seen.backends)} here"
        )
    return Place(device, chosen, reason)


def _check_backend(seen: Seen, backend: str) -> None:
    """Refuse all but a known name, or a name per device type as in cpu:gloo,cuda:nccl."""
    pairs = _pairs(backend)
    if "," in backend and any(not kind for kind, _ in pairs):
        raise CannotRun(
            f"--backend {backend}: give one name, or one per device type as in cpu:gloo,cuda:nccl"
        )
    for kind, name in pairs:
        if name not in seen.backends:
            raise CannotRun(f"--backend {backend}: torch {seen.torch} has {_listed(seen.backends)} here")
        if kind and kind not in seen.backends[name]:
            served = _listed(seen.backends[name])
            raise CannotRun(f"--backend {backend}: {name} does not serve {kind}, but {served}")


def _pairs(backend: str) -> list[tuple[str, str]]:
    """Return (device type or an empty string, name) of each part."""
    parts = [part.rpartition(":") for part in backend.split(",")]
    return [(kind, name) for kind, _, name in parts]


def _check(seen: Seen, world: int, device: str) -> None:
    if device == "cpu":
        return
    if device not in seen.devices:
        known = _listed(("cpu", *seen.devices))
        raise CannotRun(
            f"--device {device}: torch {seen.torch} knows no such device type here; it knows {known}"
        )
    if seen.devices[device] < world:
        raise CannotRun(f"--device {device}: {_too_few(device, seen.devices[device], world)}")


def _best(seen: Seen, world: int, backend: Optional[str]) -> tuple[str, str]:
    """Return the first accelerator that the backend serves with a device per rank, else "cpu"; the reason."""
    against = []
    for kind, count in seen.devices.items():
        if count == 0:
            continue
        if count < world:
            against.append(_too_few(kind, count, world))
        elif _backend(seen, kind, backend) is None:
            lacks = f"--backend {backend} does not serve" if backend else "torch has no own backend for"
            against.append(f"{lacks} {kind}")
        else:
            return kind, f"torch sees {_devices(kind, count)}"
    return "cpu", "; ".join(against) or "torch sees no accelerator"


def _backend(seen: Seen, device: str, asked: Optional[str]) -> Optional[str]:
    """Return the backend for a device type; None where the asked backend, or torch's own, cannot serve it."""
    if asked is None:
        own = seen.defaults.get(device)
        return own if own in seen.backends else None
    served = {served for kind, name in _pairs(asked) for served in ([kind] if kind else seen.backends[name])}
    return asked if device in served else None


def _too_few(kind: str, count: int, world: int) -> str:
    return f"{world} ranks need {world} devices, and torch sees {_devices(kind, count)}"


def _devices(kind: str, count: int) -> str:
    return f"{count or 'no'} {kind} device{'' if count == 1 else 's'}"


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "none"
