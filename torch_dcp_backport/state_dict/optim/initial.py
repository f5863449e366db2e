"""The states that an optimizer's first step would find, without that step for torch's own optimizers.

No parameter, gradient or hyperparameter is ever changed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch.optim import Optimizer

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.destination import local_of
from torch_dcp_backport.state_dict.form import PARAMS
from torch_dcp_backport.state_dict.load import normal_mode

#: Bytes of placeholders for parameters that may exist at a time while states are made.
PLACEHOLDER_BYTES = 16 * 2**20

LR = object()


class OptimizerKind(NamedTuple):
    """One of torch's own optimizers that makes states in the first step that finds a gradient."""

    #: State -> its value before that step, where the step leaves another one even without a gradient. LR
    #: in place of the group's learning rate.
    before: Mapping[str, Any]
    #: Whether every parameter of a group gets the same states: each of its shape, or a scalar.
    uniform: bool = True
    #: Whether a parameter with these states and one without any train alike.
    neutral: bool = True


#: By name, since not every release has them all.
KINDS: Mapping[str, OptimizerKind] = {
    "ASGD": OptimizerKind({"step": 0, "eta": LR, "mu": 1.0, "ax": 0.0}, neutral=False),
    "Adadelta": OptimizerKind({"step": 0, "acc_delta": 0.0}),
    "Adafactor": OptimizerKind({"step": 0}, uniform=False),
    "Adam": OptimizerKind({"step": 0}),
    "AdamW": OptimizerKind({"step": 0}),
    "Adamax": OptimizerKind({"step": 0, "exp_inf": 0.0}),
    "Muon": OptimizerKind({}),
    # A load casts the product to the parameter's dtype, which a first step would not.
    "NAdam": OptimizerKind({"step": 0, "mu_product": 1.0}, neutral=False),
    "RAdam": OptimizerKind({"step": 0}),
    "RMSprop": OptimizerKind({"step": 0, "momentum_buffer": 0.0}),
    # The first step sizes are the learning rate of the first step, which may be another one by then.
    "Rprop": OptimizerKind({"step": 0, "step_size": LR}, neutral=False),
    # Dampening spares the first gradient, where there is no momentum yet.
    "SGD": OptimizerKind({}, neutral=False),
}


class StatesUnknown(RuntimeError):
    """An optimizer that is not one of KINDS makes its states in a step alone, and that step failed."""


def kind_of(optim: Optimizer) -> Optional[OptimizerKind]:
    """The kind of an optimizer; None where its code is not torch's own: its states may be anything then."""
    name = type(optim).__name__
    return KINDS.get(name) if getattr(torch.optim, name, None) is type(optim) else None


def params_of(optim: Optimizer) -> list[torch.Tensor]:
    return [param for group in optim.param_groups for param in group[PARAMS]]


def is_fresh(optim: Optimizer) -> bool:
    return not optim.state and all(param.grad is None for param in params_of(optim))


def init_optim_state(optim: Optimizer) -> None:
    """Make the optimizer's states as its first step would find them.

    Nothing happens where states exist, or where gradients exist: a stateless optimizer such as SGD has
    no states after real steps either.

    Raises:
        StatesUnknown: a step makes them, and fails without a closure (LBFGS, SAM).
    """
    if not is_fresh(optim):
        return
    with normal_mode(params_of(optim)):
        if kind_of(optim) is None:
            step_without_effect(optim)
            return
        for param, states in first_states(optim, set(params_of(optim))).items():
            optim.state[param] = states


def step_without_effect(optim: Optimizer) -> None:
    """A step with zero gradients and zero learning rates, for an optimizer without states and gradients.

    The states stay as the step leaves them: a counter that an unknown optimizer starts at 1 must stay so.

    Raises:
        StatesUnknown: the step failed; the optimizer has no states.
    """
    groups = optim.param_groups
    params = params_of(optim)
    rates = [group.get("lr") for group in groups]
    try:
        for group, rate in zip(groups, rates):
            if rate is not None:
                # Some optimizers move parameters by lr alone.
                group["lr"] = zero_rate(rate)
        for param in params:
            if param.requires_grad:
                param.grad = torch.zeros_like(param)
        optim.step(closure=None)
    except Exception as error:
        optim.state.clear()
        if isinstance(error, MemoryError) or "memory" in str(error):
            raise
        name = type(optim).__name__
        raise StatesUnknown(
            f"the states of {name} are not known before its first step: step(closure=None) failed "
            f"({type(error).__name__}: {error}); call step() with a closure once before"
        ) from error
    finally:
        for group, rate in zip(groups, rates):
            if rate is not None:
                group["lr"] = rate
        for param in params:
            param.grad = None


def zero_rate(rate: Any) -> Any:
    return torch.zeros_like(rate) if torch.is_tensor(rate) else 0.0


# --- torch's own optimizers ------------------------------------------------------------------


@torch.no_grad()
def first_states(
    optim: Optimizer, params: Collection[torch.Tensor], frozen: bool = False
) -> dict[torch.Tensor, dict[str, Any]]:
    """parameter -> the states that the first step would find, of those of `params` that get any.

    The optimizer has to have a kind. It stays as it is: a twin makes a step, with placeholders for
    the parameters. Those without `requires_grad` are left out unless `frozen`.
    """
    kind = kind_of(optim)
    assert kind is not None
    states_of: dict[torch.Tensor, dict[str, Any]] = {}
    for group in optim.param_groups:
        chosen = [param for param in group[PARAMS] if param in params and (frozen or param.requires_grad)]
        for batch in batches(chosen):
            twin = twin_of(optim)
            placeholders = [placeholder_for(param, kind) for param in batch]
            lr = {} if group.get("lr") is None else {"lr": zero_rate(group["lr"])}
            twin.param_groups = [{**group, **lr, PARAMS: placeholders}]
            step_of(type(twin))(twin)
            for param, placeholder in zip(batch, placeholders):
                states = twin.state.get(placeholder)
                if states:
                    rewind(states, kind, group)
                    states_of[param] = as_of(param, placeholder, states)
    return states_of


def step_of(kind: type[Optimizer]) -> Callable[[Optimizer], object]:
    """The step of an optimizer's class without what torch and programs have put around it.

    torch's own wrapper runs the hooks of all optimizers of the process (`register_optimizer_step_pre_hook`).
    Ranks make different numbers of twins: a hook that communicates would wait for ever. To take the hooks out
    of torch's registries meanwhile would keep them from the steps of other threads.
    """
    step: Callable[[Optimizer], object] = inspect.unwrap(kind.step)
    return step


def twin_of(optim: Optimizer) -> Optimizer:
    """An optimizer of the same class and settings, without states and groups."""
    twin: Optimizer = object.__new__(type(optim))
    vars(twin).update(vars(optim))
    vars(twin).update(state=defaultdict(dict))
    return twin


def placeholder_for(param: torch.Tensor, kind: OptimizerKind) -> torch.Tensor:
    """Zeros like a parameter, with a gradient; the two share their memory, which stays zero.

    Local ones where states have the parameter's shape. Their step does not communicate (Muon's would, and not
    every rank makes the same states) or meet an operation that DTensors lack (Rprop's).
    """
    local = local_of(param)
    placeholder = torch.zeros_like(local if kind.uniform and local.dim() else param)
    placeholder.grad = placeholder.detach()
    return placeholder


def as_of(param: torch.Tensor, placeholder: torch.Tensor, states: dict[str, Any]) -> dict[str, Any]:
    """The states of a placeholder as those of its parameter."""
    if not isinstance(param, compat.DTensor) or isinstance(placeholder, compat.DTensor):
        return states
    return {
        name: compat.wrap_local(state, param) if torch.is_tensor(state) and state.dim() else state
        for name, state in states.items()
    }


def rewind(states: dict[str, Any], kind: OptimizerKind, group: Mapping[str, Any]) -> None:
    """Set the states of a first step to what they were before it (pytorch#164929).

    A counter that starts at 1 would make every later bias correction too small.
    """
    for name in kind.before.keys() & states.keys():
        state, value = states[name], kind.before[name]
        if value is LR:
            value = complex(group["lr"], group["lr"]) if state.is_complex() else group["lr"]
        state.fill_(value)


def batches(params: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The parameters in portions of at most PLACEHOLDER_BYTES."""
    batch: list[torch.Tensor] = []
    weight = 0
    for param in params:
        local = local_of(param)
        nbytes = local.numel() * local.element_size()
        if batch and weight + nbytes > PLACEHOLDER_BYTES:
            yield batch
            batch, weight = [], 0
        batch.append(param)
        weight += nbytes
    if batch:
        yield batch


#: Settings that choose an implementation of a step, and no state of it.
IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")


@torch.no_grad()
def names_of_states(optim: Optimizer, settings: Mapping[str, Any], dim: int) -> frozenset[str]:
    """The names of the states that the first step makes for a parameter; the optimizer has to have a kind.

    Args:
        settings: the param group's; those that choose between states are plain numbers.
        dim: the parameter's number of dimensions, by which Adafactor's states go.
    """
    twin = twin_of(optim)
    # Of one number, on the host, so that no setting asks for another device.
    placeholder = torch.zeros((1,) * dim)
    placeholder.grad = torch.zeros_like(placeholder)
    group = {name: without_tensors(value) for name, value in settings.items()}
    group.update({name: False for name in IMPLEMENTATIONS if name in group})
    twin.param_groups = [{**group, PARAMS: [placeholder]}]
    step_of(type(twin))(twin)
    return frozenset(twin.state.get(placeholder, ()))


def without_tensors(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(without_tensors, value))
    return 0.5 if torch.is_tensor(value) else value


class Expected(NamedTuple):
    """A state that an optimizer would make, or has: a loaded one has to be like it."""

    #: A tensor (plain or DTensor) with the shape, layout and memory format of the state.
    like: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.like.shape)


def expected_of(state: torch.Tensor) -> Expected:
    return Expected(state, state.dtype)


ExpectedStates = Mapping[torch.Tensor, Mapping[str, Expected]]


def expected_states(optim: Optimizer, params: Collection[torch.Tensor]) -> ExpectedStates:
    """parameter -> the states that the first step would make for it, for an optimizer that has a kind.

    A group whose parameters all get the same is judged by the states of one of them: nothing of the size of
    the model is made.
    """
    kind = kind_of(optim)
    assert kind is not None
    expected: dict[torch.Tensor, dict[str, Expected]] = {}
    for group in optim.param_groups:
        chosen = [param for param in group[PARAMS] if param in params]
        makers = [param for param in chosen if param.dim()] if kind.uniform else []
        if makers:
            maker = min(makers, key=torch.numel)
            states = first_states(optim, {maker}, frozen=True).get(maker, {})
            if all(is_uniform(state, maker) for state in states.values()):
                for param in chosen:
                    expected[param] = {
                        name: expected_of(param if state.dim() else state) for name, state in states.items()
                    }
                continue
        for param, states in first_states(optim, set(chosen), frozen=True).items():
            expected[param] = {name: expected_of(state) for name, state in states.items()}
    return expected


def is_uniform(state: torch.Tensor, maker: torch.Tensor) -> bool:
    sharded = isinstance(state, compat.DTensor)
    if state.dim() == 0:
        return not sharded
    return (state.shape, state.dtype, sharded) == (
        maker.shape,
        maker.dtype,
        isinstance(maker, compat.DTensor),
    )


# --- a load's beginning ----------------------------------------------------------------------


class Beginning:
    """An optimizer as a load finds it, and the way back for a load that fails."""

    def __init__(self, optim: Optimizer) -> None:
        self.optim = optim
        self.kind = kind_of(optim)
        self.was_fresh = is_fresh(optim)
        self.state = optim.state
        #: Why states are missing -> the FQNs of their parameters (`absent`).
        self.missing: dict[str, list[str]] = {}
        self._names: dict[Any, frozenset[str]] = {}
        #: Parameters without any state.
        self.bare = frozenset(param for param in params_of(optim) if not optim.state.get(param))

    def make_states(self, always: bool = False) -> None:
        """Make the states of a fresh optimizer where the code that loads it may look at them.

        The code of an optimizer that is not torch's own, of hooks, and (`always`) of FSDP1. An optimizer
        whose step fails without a closure gets the dict's states as they are, as by load_state_dict().
        """
        if always or self.kind is None or is_hooked(self.optim):
            with undone_if_failed([self]), contextlib.suppress(StatesUnknown):
                init_optim_state(self.optim)

    def undo(self) -> None:
        # load_state_dict() puts another object there: what it loaded stays.
        if self.was_fresh and self.optim.state is self.state:
            # With the states of some parameters alone, an optimizer would never make the others'.
            self.optim.state.clear()

    @functools.cached_property
    def expected(self) -> ExpectedStates:
        """The states that an optimizer that has a kind would make for its bare parameters."""
        return expected_states(self.optim, self.bare) if self.kind is not None and self.bare else {}

    def names_after_load(
        self, param: torch.Tensor, group: Mapping[str, Any], saved: Mapping[str, Any]
    ) -> frozenset[str]:
        """The states that a step needs of a parameter once its group has the saved settings.

        Of an optimizer that is not torch's own only those are known that were made for the load: later steps
        may have made others of them.
        """
        if type(self.optim) is torch.optim.Adagrad:
            # It makes them when it is made.
            return frozenset(("step", "sum"))
        if self.kind is None:
            return frozenset(self.optim.state.get(param, ())) if self.was_fresh else frozenset()
        # A dict without AMSGrad's maximum turns AMSGrad off, and the other way round.
        plain = {name: value for name, value in saved.items() if isinstance(value, (bool, int, float))}
        settings = {**group, **plain}
        key = param.dim(), tuple((name, settings[name]) for name in sorted(plain)), id(group)
        if key not in self._names:
            self._names[key] = names_of_states(self.optim, settings, param.dim())
        return self._names[key]

    def starts(self, param: torch.Tensor, strict: bool) -> bool:
        """Whether a parameter that the state dict has no state of starts from nothing.

        It does where the optimizer has made no step for it. With `strict`, also in an optimizer whose unused
        parameters a get leaves out: going back to such a state dict takes their states away.
        """
        if param in self.bare or (strict and self.kind is not None and not self.kind.neutral):
            return True
        # A get before the first step leaves such states.
        counts = self.kind is not None and "step" in self.kind.before
        step = self.optim.state[param].get("step") if counts else None
        return step is not None and not getattr(step, "is_meta", False) and float(step) == 0


@contextlib.contextmanager
def undone_if_failed(begun: Sequence[Beginning]) -> Iterator[None]:
    """A context that takes back the states that were made for loads, if it fails."""
    try:
        yield
    except BaseException:
        for beginning in begun:
            beginning.undo()
        raise


def is_hooked(optim: Optimizer) -> bool:
    """Whether hooks take part in the optimizer's load_state_dict()."""
    # Wrappers (accelerate's) may not have called Optimizer.__init__, and have no hooks then.
    hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return any(getattr(optim, name, None) for name in hooks)
