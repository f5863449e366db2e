"""What is filled, and what it becomes, of tensors that know little more than to be copied into."""

from __future__ import annotations

from typing import Any

import torch

from torch_dcp_backport.state_dict.destination import Becomes, Destination, in_place, target_of, value_of
from torch_dcp_backport.transfer import Layout


class Coded(torch.Tensor):
    """As the states of early 8-bit optimizers: no `detach`."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=codes.dtype)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty_like.default:
            return cls(torch.empty_like(args[0].codes))
        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_(args[1].codes if isinstance(args[1], cls) else args[1])
            return args[0]
        raise NotImplementedError(func)


class Detached(Coded):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        if func is torch.ops.aten.view.default:
            return cls(args[0].codes.view(args[1]))
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_a_state_needs_no_detach() -> None:
    like = Coded(torch.zeros(2, 3))
    state = Destination(Layout((2, 3)), torch.float32, torch.device("cpu"), None, Becomes.STATE, like)
    target, _ = target_of(state, 0)
    target.fill_(2.0)
    value = value_of(state, target)
    assert type(value) is Coded
    assert value is not like
    assert value.codes.tolist() == [[2.0] * 3] * 2


def test_a_vector_of_one_element_fills_a_scalar() -> None:
    live = Detached(torch.zeros(()))
    with torch.no_grad():
        one = in_place(live, None, live.detach().view(1))
        target, _ = target_of(one, 0)
        assert value_of(one, target.fill_(2.0)) is live
    assert live.codes.item() == 2.0
