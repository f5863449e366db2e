"""The methods that trainers call on an engine, under verl 0.7's names; the registry of engines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar, Optional, TypeVar, Union

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.engine.mesh import Grid
from torch_dcp_backport.transfer.groups import Group

Engine = TypeVar("Engine", bound=type)


def default_device() -> str:
    """Return the type of this machine's accelerator, or "cpu"."""
    return next((kind for kind, count in compat.device_counts().items() if count), "cpu")


class BaseEngine:
    """The parts of an engine that do not depend on its way of training; subclasses add the rest."""

    grid: Grid
    #: None where nothing is trained, or before it is made.
    optimizer: Optional[torch.optim.Optimizer] = None
    #: "train" or "eval" inside of the contexts.
    mode: Optional[str] = None
    #: Whether the contexts bring them to the device, and back to the host.
    is_param_offload_enabled = False
    is_optimizer_offload_enabled = False

    def train_mode(self, **options: Any) -> EngineContext:
        """A context: training, with everything on the device."""
        return EngineContext(self, "train", **options)

    def eval_mode(self, **options: Any) -> EngineContext:
        """A context: inference, with the parameters on the device."""
        return EngineContext(self, "eval", **options)

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> dict[str, Any]:
        """Take a step of the optimizer on a batch. Collective."""
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        outputs["metrics"]["grad_norm"] = self.optimizer_step()
        return outputs

    def infer_batch(self, data: Any, loss_function: Optional[Callable[..., Any]] = None) -> dict[str, Any]:
        """Return the model's outputs for a batch, without gradients. Collective."""
        with torch.no_grad():
            return self.forward_backward_batch(data, loss_function, forward_only=True)

    def forward_backward_batch(
        self, data: Any, loss_function: Optional[Callable[..., Any]], forward_only: bool = False
    ) -> dict[str, Any]:
        raise NotImplementedError

    def optimizer_zero_grad(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        raise NotImplementedError

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        raise NotImplementedError

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.grid.dp_group)

    def get_data_parallel_size(self) -> int:
        return self.grid.dp_size

    def get_data_parallel_group(self) -> Group:
        return self.grid.dp_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether this rank's outputs count: it is the first of those that compute the same."""
        return self.grid.tp is None or self.grid.tp.get_local_rank() == 0


class EngineContext(contextlib.AbstractContextManager["EngineContext"]):
    """A context that brings parameters and states from the host to the device, and back at its end."""

    def __init__(self, engine: Any, mode: str, *, disable_auto_offload: bool = False) -> None:
        self.engine = engine
        self.mode = mode
        self.is_moving = not disable_auto_offload

    def __enter__(self) -> EngineContext:
        self.outer = self.engine.mode
        self.move(self.engine.grid.mesh.device_type)
        self.engine.mode = self.mode
        self.engine.module.train(self.mode == "train")
        return self

    def __exit__(self, *error: object) -> None:
        compat.reshard(self.engine.module)
        if self.mode == "train":
            self.engine.optimizer_zero_grad()
        self.move("cpu")
        self.engine.mode = self.outer
        if self.outer is not None:
            self.engine.module.train(self.outer == "train")

    def move(self, device: str) -> None:
        # What the outer context has on the device stays there.
        model = self.engine.is_param_offload_enabled and self.outer is None
        optimizer = self.engine.is_optimizer_offload_enabled and self.mode == "train" != self.outer
        if self.is_moving and (model or optimizer):
            self.engine.to(device, model=model, optimizer=optimizer, grad=model)


class EngineRegistry:
    """Engines by type of model, backend and device."""

    _engines: ClassVar[dict[tuple[str, str, str], type[BaseEngine]]] = {}

    @classmethod
    def register(
        cls, model_type: str, backend: Union[str, list[str]], device: Union[str, list[str]] = "cuda"
    ) -> Callable[[Engine], Engine]:
        """Return a decorator that registers an engine class; the first of a kind stays."""

        def registered(engine: Engine) -> Engine:
            if not issubclass(engine, BaseEngine):
                raise TypeError(f"{engine.__name__} is no BaseEngine")
            for name in [backend] if isinstance(backend, str) else backend:
                for kind in [device] if isinstance(device, str) else device:
                    cls._engines.setdefault((model_type, name, kind), engine)
            return engine

        return registered

    @classmethod
    def get_engine_cls(cls, model_type: str, backend: str, device: Optional[str] = None) -> type[BaseEngine]:
        """Return the engine for this machine's device.

        Raises:
            KeyError: no such engine; the text lists those that there are.
        """
        asked = (model_type, backend, device or default_device())
        if asked not in cls._engines:
            raise KeyError(f"no engine for {asked}; there are {sorted(cls._engines)}")
        return cls._engines[asked]

    @classmethod
    def new(cls, model_type: str, backend: str, *args: Any, **kwargs: Any) -> BaseEngine:
        """Make an engine with the arguments behind the first two."""
        return cls.get_engine_cls(model_type, backend)(*args, **kwargs)
