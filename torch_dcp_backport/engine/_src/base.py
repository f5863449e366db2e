"""The methods that trainers call on an engine, under verl's names (0.7 to 0.9); the registry of engines."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, ClassVar, Optional, TypeVar, Union

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.engine._src.batches import Batch
from torch_dcp_backport.engine._src.checks import cleaning_up
from torch_dcp_backport.engine._src.mesh import Grid
from torch_dcp_backport.transfer import Group

Engine = TypeVar("Engine", bound=type)


def default_device() -> str:
    """Return the type of this machine's accelerator, or "cpu"."""
    return next((kind for kind, count in compat.device_counts().items() if count), "cpu")


class BaseEngine:
    """The parts of an engine that do not depend on its way of training; subclasses add the rest.

    A subclass sets `module`, `grid` and `optimizer`, and defines `forward_backward_batch`, `optimizer_step`
    and `to`. `FSDPEngineWithLMHead` has an example.
    """

    grid: Grid
    #: None where nothing is trained, or before it is made.
    optimizer: Optional[torch.optim.Optimizer] = None
    #: "train" or "eval" inside of the contexts.
    mode: Optional[str] = None
    #: Whether the contexts bring them to the device, and back to the host.
    is_param_offload_enabled = False
    is_optimizer_offload_enabled = False

    def train_mode(self, **options: Any) -> EngineContext:
        """Return a context for training, with everything on the device.

        Args:
            options: options of `EngineContext`.
        """
        return EngineContext(self, "train", **options)

    def eval_mode(self, **options: Any) -> EngineContext:
        """Return a context for inference, with the parameters on the device.

        Args:
            options: options of `EngineContext`.
        """
        return EngineContext(self, "eval", **options)

    def train_batch(self, data: Batch, loss_function: Callable[..., Any]) -> dict[str, Any]:
        """Take a step of the optimizer on a batch. Collective.

        Args:
            data: rows of this rank, as `forward_backward_batch` takes them.
            loss_function: the loss, as `forward_backward_batch` calls it.

        Returns:
            The result of `forward_backward_batch`, with `grad_norm` among its metrics.
        """
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        outputs["metrics"]["grad_norm"] = self.optimizer_step()
        return outputs

    def infer_batch(self, data: Batch, loss_function: Optional[Callable[..., Any]] = None) -> dict[str, Any]:
        """Return the model's outputs for a batch, without gradients. Collective.

        Args:
            data: rows of this rank, as `forward_backward_batch` takes them.
            loss_function: the loss, as `forward_backward_batch` calls it; None computes none.

        Returns:
            The result of `forward_backward_batch`.
        """
        with torch.no_grad():
            return self.forward_backward_batch(data, loss_function, forward_only=True)

    def forward_backward_batch(
        self, data: Batch, loss_function: Optional[Callable[..., Any]], forward_only: bool = False
    ) -> dict[str, Any]:
        """Run the model on a batch, and the loss backwards. Collective; subclasses define it.

        Args:
            data: rows of this rank: a mapping of tensors with rows first.
            loss_function: computes the loss of a micro-batch; None computes none.
            forward_only: whether there is no backward pass.
        """
        raise NotImplementedError

    def optimizer_zero_grad(self) -> None:
        """Drop the gradients of the optimizer's parameters; do nothing without an optimizer."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        """Step the optimizer, and return the norm of the gradients. Collective; subclasses define it."""
        raise NotImplementedError

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parameters and optimizer states to a device; subclasses define it.

        Args:
            device: "cpu", or the type of the engine's device.
            model: whether the parameters are moved.
            optimizer: whether the optimizer's states are moved.
            grad: whether gradients are moved.
        """
        raise NotImplementedError

    def get_data_parallel_rank(self) -> int:
        """Return this rank's place among the ranks that have data of their own, from 0."""
        return dist.get_rank(self.grid.dp_group)

    def get_data_parallel_size(self) -> int:
        """Return the number of ranks that have data of their own."""
        return self.grid.dp_size

    def get_data_parallel_group(self) -> Group:
        """Return the process group of the ranks that have data of their own."""
        return self.grid.dp_group

    def get_model_parallel_group(self) -> Group:
        """Return the process group of the ranks that compute layers together; None where it is one rank."""
        return None if self.grid.tp is None else self.grid.tp.get_group()

    def get_context_parallel_group(self) -> Group:
        """Return the process group of the ranks that share a sequence; None where it is one rank."""
        return self.grid.sp_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether to use this rank's outputs: it is the first of the ranks that compute the same."""
        return self.grid.is_first_copy


class EngineContext(contextlib.AbstractContextManager["EngineContext"]):
    """A context that brings parameters and states from the host to the device, and back at its end.

    Engines make it in `train_mode()` and `eval_mode()`.
    """

    def __init__(
        self,
        engine: Any,
        mode: str,
        *,
        disable_auto_offload: bool = False,
        zero_grad_on_exit: bool = True,
    ) -> None:
        """Remember what is moved; nothing moves before the context is entered.

        Args:
            engine: the engine whose parameters and states are moved.
            mode: "train" or "eval".
            disable_auto_offload: whether everything stays where it is.
            zero_grad_on_exit: whether the end of a context for training drops the gradients.
        """
        self.engine = engine
        self.mode = mode
        self.is_moving = not disable_auto_offload
        self.zeroes = mode == "train" and zero_grad_on_exit

    def __enter__(self) -> EngineContext:
        self.outer = self.engine.mode
        self.move(self.engine.grid.mesh.device_type)
        self.engine.mode = self.mode
        self.engine.module.train(self.mode == "train")
        return self

    def __exit__(self, kind: object, error: Optional[BaseException], *traceback: object) -> None:
        with cleaning_up(error, "the engine was not put back; make a new one"):
            compat.reshard(self.engine.module)
            if self.zeroes:
                self.engine.optimizer_zero_grad()
            self.move("cpu")
        self.engine.mode = self.outer
        if self.outer is not None:
            self.engine.module.train(self.outer == "train")

    def move(self, device: str) -> None:
        """Move what the engine offloads, unless an outer context has it on the device.

        Args:
            device: "cpu", or the type of the engine's device.
        """
        # What the outer context has on the device stays there.
        model = self.engine.is_param_offload_enabled and self.outer is None
        optimizer = self.engine.is_optimizer_offload_enabled and self.mode == "train" != self.outer
        if self.is_moving and (model or optimizer):
            self.engine.to(device, model=model, optimizer=optimizer, grad=model)


class EngineRegistry:
    """Engines by type of model, backend and device.

    Example:
        >>> from torch_dcp_backport import engine
        >>> @engine.EngineRegistry.register("reward_model", backend=["mine"], device=["cpu"])
        ... class MyEngine(engine.BaseEngine):
        ...     pass
        >>> engine.EngineRegistry.get_engine_cls("reward_model", "mine", "cpu").__name__
        'MyEngine'
        >>> engine.EngineRegistry.get_engine_cls("language_model", "fsdp2", "cpu").__name__
        'FSDPEngineWithLMHead'
    """

    #: (type of model, backend, device, vendor) -> class; the vendor is None where it is for any.
    _engines: ClassVar[dict[tuple[str, str, str, Optional[str]], type[BaseEngine]]] = {}

    @classmethod
    def register(
        cls,
        model_type: str,
        backend: Union[str, list[str]],
        device: Union[str, list[str]] = "cuda",
        vendor: Union[str, list[str], None] = None,
    ) -> Callable[[Engine], Engine]:
        """Return a decorator that registers an engine class; the first of a kind stays.

        Args:
            model_type: "language_model", "value_model" or a name of your own.
            backend: the backend's name, or several.
            device: the type of device, or several.
            vendor: who makes the device ("nvidia", "amd", "huawei", ...), or several; None is any.

        Raises:
            TypeError: by the decorator, for a class that is no `BaseEngine`.
        """

        def registered(engine: Engine) -> Engine:
            if not issubclass(engine, BaseEngine):
                raise TypeError(f"{engine.__name__} is no BaseEngine")
            for kind in itertools.product(_listed(backend), _listed(device), _listed(vendor or [None])):
                cls._engines.setdefault((model_type, *kind), engine)
            return engine

        return registered

    @classmethod
    def get_engine_cls(
        cls, model_type: str, backend: str, device: Optional[str] = None, vendor: Optional[str] = None
    ) -> type[BaseEngine]:
        """Return the engine class of a kind: that of the vendor, or else that of any vendor.

        Args:
            model_type: as it was registered.
            backend: as it was registered.
            device: a type of device; None is this machine's accelerator, or the CPU.
            vendor: who makes the device; None is this machine's.

        Raises:
            KeyError: no such engine; the text lists those that there are.
        """
        asked = (model_type, backend, device or default_device())
        vendors = (vendor or compat.vendor_of(asked[2]), None)
        found = next((kind for maker in vendors if (kind := (*asked, maker)) in cls._engines), None)
        if found is None:
            there = sorted(str(kind) for kind in cls._engines)
            raise KeyError(f"no engine for {(*asked, vendors[0])}; there are {', '.join(there)}")
        return cls._engines[found]

    @classmethod
    def new(cls, model_type: str, backend: str, *args: Any, **kwargs: Any) -> BaseEngine:
        """Make an engine for this machine's device.

        Args:
            model_type: as it was registered.
            backend: as it was registered.
            args: positional arguments of the engine.
            kwargs: keyword arguments of the engine.

        Raises:
            KeyError: no such engine; the text lists those that there are.
        """
        return cls.get_engine_cls(model_type, backend)(*args, **kwargs)


def _listed(names: Any) -> list[Any]:
    return [names] if isinstance(names, str) else list(names)
