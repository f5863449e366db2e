"""`declares` is `hasattr`, whatever a module does with its attributes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from torch_dcp_backport.state_dict.fqn import FQN_MODIFIERS, declares


class Method(nn.Module):
    def _fqn_modifiers(self) -> dict[str, str]:
        return {}


class Failing(nn.Module):
    @property
    def _fqn_modifiers(self) -> Any:
        raise AttributeError("not now")


class Slot(nn.Module):
    __slots__ = (FQN_MODIFIERS,)


class Meta(type):
    def _fqn_modifiers(cls) -> dict[str, str]:
        return {}


class OfMeta(nn.Module, metaclass=Meta):
    pass


class Getattribute(nn.Module):
    def __getattribute__(self, name: str) -> Any:
        return dict if name == FQN_MODIFIERS else super().__getattribute__(name)


class Getattr(nn.Module):
    def __getattr__(self, name: str) -> Any:
        return dict if name == FQN_MODIFIERS else super().__getattr__(name)


def with_child() -> nn.Module:
    module = nn.Module()
    module.add_module(FQN_MODIFIERS, nn.Module())
    return module


def with_attribute() -> nn.Module:
    module = nn.Module()
    vars(module)[FQN_MODIFIERS] = dict
    return module


@pytest.mark.parametrize(
    ("make", "declared"),
    [
        (nn.Module, False),
        (Method, True),
        (Failing, False),
        (Slot, False),
        (OfMeta, False),
        (Getattribute, True),
        (Getattr, True),
        (with_child, True),
        (with_attribute, True),
    ],
)
def test_a_module_declares_what_hasattr_finds(make: Any, declared: bool) -> None:
    module = make()
    assert declares(module, FQN_MODIFIERS) is hasattr(module, FQN_MODIFIERS) is declared
