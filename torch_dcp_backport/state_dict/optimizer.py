"""Get and load optimizer state: initialise, name by FQN, flatten, split.

The caller's dict is never changed.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.optim import Optimizer

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.collect import Index, Path, full_or_cpu, leaves
from torch_dcp_backport.state_dict.fqn import Names
from torch_dcp_backport.state_dict.load import Destination, Load, run
from torch_dcp_backport.state_dict.model import own_method
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.transfer import Problem, TensorInfo, layout_of, misfit, spell_key

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
TITLE = "cannot load this optimizer state dict"
COMPILED = "_orig_mod."

logger = logging.getLogger(__name__)

LR = object()
#: What states of torch's own optimizers are before the first step, where that step leaves something else
#: even without a gradient. LR stands for the group's learning rate.
FIRST_VALUES: Mapping[type[Optimizer], Mapping[str, Any]] = {
    torch.optim.NAdam: {"mu_product": 1.0},
    torch.optim.Adamax: {"exp_inf": 0.0},
    torch.optim.ASGD: {"eta": LR, "mu": 1.0, "ax": 0.0},
    torch.optim.Rprop: {"step_size": LR},
}

#: Optimizers that make the same states for every parameter of a group, and nothing that depends on its shape.
UNIFORM = frozenset(
    (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    )
)

#: Temporary gradients that initialising the state of one of torch's own optimizers may hold at a time.
GRAD_BYTES = 16 * 2**20


# --- initialise ------------------------------------------------------------------------------


def init_optim_state(optim: Optimizer) -> None:
    """Make the optimizer create its states, by steps with zero gradients and zero learning rate.

    Nothing happens where states exist, or where gradients exist: a stateless optimizer such as SGD has
    no states after real steps either. A load makes states that are missing then from the checkpoint.
    """
    if is_fresh(optim):
        make_states(optim, {param for group in optim.param_groups for param in group[PARAMS]})


def is_fresh(optim: Optimizer) -> bool:
    return not optim.state and all(
        param.grad is None for group in optim.param_groups for param in group[PARAMS]
    )


def make_states(optim: Optimizer, params: Collection[torch.Tensor]) -> None:
    """The states of these parameters, which have neither states nor gradients."""
    groups = optim.param_groups
    rates = [group.get("lr") for group in groups]
    try:
        for group, rate in zip(groups, rates):
            if rate is not None:
                # Some optimizers move parameters by lr alone.
                group["lr"] = torch.zeros_like(rate) if torch.is_tensor(rate) else 0.0
        for batch in batches(optim, params):
            optim.param_groups = batch
            for group in batch:
                for param in group[PARAMS]:
                    if param.requires_grad and param in params:
                        param.grad = torch.zeros_like(param)
            optim.step(closure=None)
            for group in batch:
                for param in group[PARAMS]:
                    param.grad = None
        rewind(optim, groups, rates, params)
    finally:
        optim.param_groups = groups
        for group, rate in zip(groups, rates):
            if rate is not None:
                group["lr"] = rate
        for param in params:
            param.grad = None


def rewind(
    optim: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    rates: Sequence[Any],
    params: Collection[torch.Tensor],
) -> None:
    """The states of an optimizer's first step, as they were before that step (pytorch#164929).

    A counter that starts at 1 would make every bias correction of the training to come too small.
    """
    first: dict[str, Any] = {"step": 0}
    for kind, values in FIRST_VALUES.items():
        if isinstance(optim, kind):
            first.update(values)
    with torch.no_grad():
        for group, rate in zip(groups, rates):
            for param in group[PARAMS]:
                state = optim.state.get(param, {}) if param in params else {}
                for name in first.keys() & state.keys():
                    value = rate if first[name] is LR else first[name]
                    if torch.is_tensor(state[name]):
                        state[name].fill_(value)
                    elif isinstance(state[name], (int, float)):
                        state[name] = type(state[name])(value)


def batches(optim: Optimizer, params: Collection[torch.Tensor]) -> Iterator[list[dict[str, Any]]]:
    """The param groups with these parameters, in portions whose gradients weigh at most GRAD_BYTES.

    Only for torch's own optimizers, whose step() treats every parameter by itself; others may look
    at all their groups at once.
    """
    if not type(optim).__module__.startswith("torch.optim."):
        yield optim.param_groups
        return
    for group in optim.param_groups:
        batch: list[torch.Tensor] = []
        weight = 0
        for param in group[PARAMS]:
            if param not in params:
                continue
            local = local_of(param)
            nbytes = local.numel() * local.element_size()
            if batch and weight + nbytes > GRAD_BYTES:
                yield [{**group, PARAMS: batch}]
                batch, weight = [], 0
            batch.append(param)
            weight += nbytes
        if batch:
            yield [{**group, PARAMS: batch}]


def local_of(param: torch.Tensor) -> torch.Tensor:
    return compat.local_part(param) if isinstance(param, compat.DTensor) else param


Templates = Mapping[torch.Tensor, Mapping[str, torch.Tensor]]


def templates_of(optim: Optimizer) -> Templates:
    """parameter -> the states that a step would make for it, as those of another one of its group.

    For a fresh optimizer of a kind that makes the same states for every parameter: each of the
    parameter's shape, or a scalar. Such states are made of what is loaded; temporary gradients, and
    zeros that a load overwrites, are made for one parameter per group alone. Parameters that this cannot be
    said of get their states here.
    """
    found: dict[torch.Tensor, Mapping[str, torch.Tensor]] = {}
    if type(optim) not in UNIFORM or not is_fresh(optim):
        return found
    for group in optim.param_groups:
        params = [param for param in group[PARAMS] if param.requires_grad]
        maker = next((param for param in params if param.dim()), None)
        if maker is None:
            make_states(optim, set(params))
            continue
        make_states(optim, {maker})
        states = dict(optim.state.get(maker, {}))
        others = [param for param in params if param is not maker]
        if states and all(is_uniform(state, maker) for state in states.values()):
            found.update(dict.fromkeys(others, states))
        else:
            make_states(optim, set(others))
    return found


def is_uniform(state: Any, maker: torch.Tensor) -> bool:
    if not torch.is_tensor(state):
        return False
    sharded = isinstance(state, compat.DTensor)
    if state.dim() == 0:
        return not sharded
    return state.shape == maker.shape and sharded == isinstance(maker, compat.DTensor)


# --- get -------------------------------------------------------------------------------------


@torch.no_grad()
def get_optim_state(model: nn.Module, optimizers: Sequence[Optimizer], info: StateDictInfo) -> dict[str, Any]:
    if not info.handle_optim:
        return {}
    result: dict[str, Any] = {STATE: {}, GROUPS: []}
    for optim in optimizers:
        init_optim_state(optim)
        named = fsdp1_named_state(model, optim, info) if info.fsdp_modules else named_state(model, optim)
        if named:
            result[STATE].update(named[STATE])
            result[GROUPS].extend(named[GROUPS])
    if info.flatten_optimizer_state_dict:
        result = flatten_optim_state(result)
    return full_or_cpu(result, info)  # type: ignore[no-any-return]


def named_state(model: nn.Module, optim: Optimizer) -> dict[str, Any]:
    """`optim.state_dict()` with FQNs for parameter numbers."""
    state = own_method(optim, "state_dict")()
    number = {
        param: index
        for index, param in enumerate(param for group in optim.param_groups for param in group[PARAMS])
    }
    names: dict[int, str] = {}
    every = Names(model)
    for name, param in model.named_parameters():
        if param in number:
            (fqn,) = every.fqns(name)
            names[number[param]] = fqn

    def name_of(index: int) -> str:
        if index not in names:
            raise KeyError(f"parameter {index} of {type(optim).__name__} is not a parameter of the model")
        return names[index]

    return {
        **state,
        STATE: {name_of(index): value for index, value in state[STATE].items()},
        GROUPS: [{**group, PARAMS: [name_of(index) for index in group[PARAMS]]} for group in state[GROUPS]],
    }


def fsdp1_named_state(model: nn.Module, optim: Optimizer, info: StateDictInfo) -> dict[str, Any]:
    """FSDP1 names its states itself, but keeps the compiler's prefix."""
    state = own_method(optim, "state_dict")()
    with info.fsdp_context():
        state = FullyShardedDataParallel.optim_state_dict(model, optim, state, group=fsdp1_group(info))
    if not state:
        return {}
    return {
        **state,
        STATE: {fqn.replace(COMPILED, ""): value for fqn, value in state[STATE].items()},
        GROUPS: [
            {**group, PARAMS: [fqn.replace(COMPILED, "") for fqn in group[PARAMS]]} for group in state[GROUPS]
        ],
    }


def fsdp1_group(info: StateDictInfo) -> Optional[dist.ProcessGroup]:
    """The group that FSDP1 shards over: its ranks alone take part. None (the default group) for HSDP.

    And where a FlatParameter's states come from global rank 0, which has to be a member then.
    """
    module: Any = info.fsdp_modules[0]
    if module.sharding_strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        return None
    group: dist.ProcessGroup = module.process_group
    return group if module._use_orig_params or 0 in compat.group_ranks(group) else None


def complaint_about(state: Optional[Mapping[Any, Any]], info: StateDictInfo) -> Optional[str]:
    """Why an optimizer state dict cannot be one that this call gives or takes; None where it can."""
    # None is as good as an empty one: accelerate gives it where rank 0 alone has read the file.
    if state is not None and not isinstance(state, Mapping):
        return f"not a state dict but a {type(state).__name__}"
    may_be_empty = (info.cpu_offload and info.full_state_dict) or info.broadcast_from_rank0
    if info.handle_optim and not state and not may_be_empty:
        return "the optimizer state dict is empty"
    return None


# --- flatten ---------------------------------------------------------------------------------


def flatten_optim_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """{"state": ..., "param_groups": ...} as one flat dict.

    Keys are "state.FQN.name" and "param_groups.FQN.name"; every parameter carries its group's
    values, so that a reader with other groups finds them (pipeline parallel resharding). Lists,
    texts and None are values like any other.
    """
    flat: dict[str, Any] = {}
    for fqn, states in state_dict[STATE].items():
        for path, value in leaves(states, opens=lambda _: False).items():
            # A parameter without states has no path below it.
            if path:
                flat[".".join([STATE, fqn, *map(str, path)])] = value
    for group in state_dict[GROUPS]:
        for fqn in group[PARAMS]:
            for name, value in group.items():
                if name != PARAMS:
                    flat[f"{GROUPS}.{fqn}.{name}"] = value
    return flat


def unflatten_optim_state(
    optim: Optimizer,
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    templates: Optional[Templates] = None,
) -> dict[str, Any]:
    """The inverse of `flatten_optim_state`, for the groups and states that `optim` has, or will have.

    Raises:
        KeyError: a state or a group value that is not there.
        RuntimeError: a parameter without any state (strict); parameters of one group that were saved
            with different values.
    """
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    saved = FlatStates(state_dict, info.strict)
    for group in optim.param_groups:
        keys = [name for name in group if name != PARAMS]
        loaded: dict[str, Any] = {PARAMS: []}
        groups.append(loaded)
        for param in group[PARAMS]:
            for fqn in sorted(fqns_of(param, info)):
                if fqn in info.shared_params_mapping and not any(
                    f"{GROUPS}.{fqn}.{key}" in state_dict for key in keys
                ):
                    # Of a shared parameter's names, the state dict holds the one that was saved.
                    continue
                loaded[PARAMS].append(fqn)
                if param.requires_grad:
                    absent = templates.get(param, ()) if templates else ()
                    found = saved.below(f"{STATE}.{fqn}", optim.state.get(param, {}), absent)
                    if found:
                        state[fqn] = found
                    elif info.strict and saved.keys:
                        raise missing_state(fqn)
                for key in keys:
                    value = state_dict[f"{GROUPS}.{fqn}.{key}"]
                    if loaded.setdefault(key, value) != value:
                        raise RuntimeError(
                            f"parameters of one group must have been saved with the same {key}, but {fqn} "
                            f"has {value} and others have {loaded[key]}"
                        )
    return {STATE: state, GROUPS: groups}


class FlatStates:
    """The states of a flat state dict, given back nested."""

    def __init__(self, flat: Mapping[str, Any], strict: bool) -> None:
        self.flat = flat
        self.strict = strict
        self.keys = sorted(key for key in flat if key.startswith(f"{STATE}."))

    def below(self, prefix: str, held: Mapping[Any, Any], absent: Iterable[str] = ()) -> dict[Any, Any]:
        """The states below a prefix, in the form in which the optimizer holds its own.

        Args:
            absent: names of states that it does not hold yet, but would make.

        An optimizer that holds none (its parameter had no gradient so far) takes what is there.
        """
        if held:
            return {name: self.one(f"{prefix}.{name}", value) for name, value in held.items()}
        if self.strict and any(f"{prefix}.{name}" in self.flat for name in absent):
            for name in absent:
                self.one(f"{prefix}.{name}", None)
        found: dict[Any, Any] = {}
        index = bisect.bisect_left(self.keys, f"{prefix}.")
        while index < len(self.keys) and self.keys[index].startswith(f"{prefix}."):
            key = self.keys[index]
            place(found, tuple(key[len(prefix) + 1 :].split(".")), self.flat[key])
            index += 1
        return found

    def one(self, key: str, held: Any) -> Any:
        if key in self.flat:
            return self.flat[key]
        if isinstance(held, Mapping) and held:
            return self.below(key, held)
        if self.strict:
            raise KeyError(key)
        return held


def missing_state(fqn: str) -> RuntimeError:
    return RuntimeError(
        f"Missing optimizer state for parameter '{fqn}': it requires gradients but has no saved state. "
        "To load what is there, use StateDictOptions(strict=False)."
    )


def fqns_of(param: torch.Tensor, info: StateDictInfo) -> Iterable[str]:
    names = info.fqn_param_mapping.get(param)
    if not isinstance(names, (set, frozenset)):
        raise KeyError(
            f"a parameter of shape {tuple(param.shape)} of the optimizer is not one of the model's"
        )
    return names


# --- split -----------------------------------------------------------------------------------


def split_optim_state(optim: Optimizer, loaded: Mapping[str, Any], info: StateDictInfo) -> dict[str, Any]:
    """The part of a state dict (of several optimizers perhaps) that is `optim`'s, in its order.

    Raises:
        RuntimeError: no state for a parameter that requires gradients (strict).
    """
    states, saved = loaded[STATE], loaded[GROUPS]
    if states and all(isinstance(key, int) for key in states):
        return dict(loaded)
    group_of = {fqn: group for group in saved for fqn in group[PARAMS]}
    empty = [group for group in saved if not group[PARAMS]]
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    stateful = bool(states)
    for index, group in enumerate(optim.param_groups):
        result: dict[str, Any] = {PARAMS: []}
        sources: list[Mapping[str, Any]] = []
        for param in group[PARAMS]:
            for fqn in sorted(fqns_of(param, info)):
                if fqn in info.shared_params_mapping and fqn not in group_of:
                    # Of a shared parameter's names, the state dict holds the one that was saved.
                    continue
                result[PARAMS].append(fqn)
                source = group_of.get(fqn)
                # By identity: values may be tensors, which do not compare to one bool.
                if source is not None and all(source is not one for one in sources):
                    sources.append(source)
                if not param.requires_grad:
                    continue
                if fqn in states:
                    state[fqn] = states[fqn]
                elif info.strict and stateful:
                    raise missing_state(fqn)
        if not group[PARAMS] and empty:
            # Nothing names a group without parameters but its place.
            own_place = len(saved) == len(optim.param_groups) and not saved[index][PARAMS]
            sources.append(saved[index] if own_place else empty[0])
        for one in sources:
            result.update({key: value for key, value in one.items() if key != PARAMS})
        # A value that the state dict does not know stays as it is.
        for key, value in group.items():
            result.setdefault(key, value)
        groups.append(result)
    return {STATE: state, GROUPS: groups}


# --- load ------------------------------------------------------------------------------------


@torch.no_grad()
def load_optim_state(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    complaint: Optional[str] = None,
) -> None:
    """Load `state_dict` into the optimizers; `complaint` is what is already known to be wrong with it.

    Raises:
        RuntimeError: missing states (strict), wrong shapes, wrong types. With `full_state_dict`
            the same on every rank and before any state of that optimizer was written.
    """
    if not info.handle_optim:
        return
    for optim in optimizers:
        full = info.full_state_dict and not info.fsdp_modules
        if full:
            load_full_state(model, optim, state_dict, info, complaint)
            continue
        init_optim_state(optim)
        if complaint:
            raise RuntimeError(complaint)
        mine = own_part(optim, state_dict, info)
        if info.fsdp_modules:
            mine = fsdp1_to_load(model, optim, mine, info)
        own_method(optim, "load_state_dict")(state_dict=mine)


def load_full_state(
    model: nn.Module,
    optim: Optimizer,
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    complaint: Optional[str],
) -> None:
    """Load full tensors; what is wrong on one rank is heard by all, instead of raised by one."""
    was_fresh = is_fresh(optim)
    problems = [Problem(complaint)] if complaint else []
    load: Load = Unprepared(optim, problems)
    given: dict[Path, Any] = {}
    try:
        try:
            templates = templates_of(optim)
            if not templates:
                init_optim_state(optim)
            load = OptimizerLoad(model, optim, templates, problems)
        except (RuntimeError, MemoryError) as error:
            load.problems.append(Problem("could not make the optimizer's states", got=str(error)))
        if isinstance(load, OptimizerLoad) and not complaint and holds_source(info):
            try:
                given = paths_of(by_name(own_part(optim, state_dict, info, templates), load.names))
            except Exception as error:
                missing = isinstance(error, KeyError)
                load.problems.append(Problem(f"missing key {error}" if missing else str(error)))
        run(load, given, broadcast=info.broadcast_from_rank0)
    except BaseException:
        if was_fresh:
            # With the states of some parameters alone, it would never make the others'.
            optim.state.clear()
        raise


def holds_source(info: StateDictInfo) -> bool:
    return not info.broadcast_from_rank0 or dist.get_rank() == 0


def own_part(
    optim: Optimizer,
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    templates: Optional[Templates] = None,
) -> dict[str, Any]:
    if not state_dict:
        return {}
    if STATE in state_dict:
        return split_optim_state(optim, state_dict, info)
    return unflatten_optim_state(optim, state_dict, info, templates)


def by_name(state: dict[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A state dict with parameter numbers, by the FQNs that stand at the same places."""
    if not state or not all(isinstance(key, int) for key in state[STATE]):
        return state
    numbers = [number for group in state[GROUPS] for number in group[PARAMS]]
    flat = [name for group in names for name in group]
    if len(numbers) != len(flat):
        raise RuntimeError(
            f"the state dict numbers {len(numbers)} parameters, but the optimizer has {len(flat)}; use FQNs"
        )
    sizes, own_sizes = [len(group[PARAMS]) for group in state[GROUPS]], [len(group) for group in names]
    if sizes != own_sizes:
        raise RuntimeError(
            f"the state dict has groups of {sizes} numbered parameters, but the optimizer of {own_sizes}; "
            "use FQNs"
        )
    fqn_of = dict(zip(numbers, flat))
    return {**state, STATE: {fqn_of[number]: value for number, value in state[STATE].items()}}


def fsdp1_to_load(
    model: nn.Module, optim: Optimizer, state: dict[str, Any], info: StateDictInfo
) -> dict[str, Any]:
    """FSDP1 maps the states to its FlatParameters itself, under names with the compiler's prefix."""
    prefixed: dict[str, str] = {}
    every = Names(model)
    for name, _ in model.named_parameters():
        plain, compiled = every.fqns(name), every.fqns(name, skip_compiler_prefix=False)
        if plain != compiled:
            (fqn,), (with_prefix,) = plain, compiled
            prefixed[fqn] = with_prefix
    if state:
        state = {
            **state,
            STATE: {prefixed.get(fqn, fqn): value for fqn, value in state[STATE].items()},
            GROUPS: [
                {**group, PARAMS: [prefixed.get(fqn, fqn) for fqn in group[PARAMS]]}
                for group in state[GROUPS]
            ],
        }
    with info.fsdp_context():
        return FullyShardedDataParallel.optim_state_dict_to_load(model, optim, state, group=fsdp1_group(info))


def holds_tensors(values: Sequence[Any]) -> bool:
    return any(torch.is_tensor(value) for value in values)


def paths_of(state: Mapping[str, Any]) -> dict[Path, Any]:
    """path -> value: ("state", FQN, name, ...) and ("param_groups", index, name)."""
    if not state:
        return {}
    found: dict[Path, Any] = {}
    for fqn, states in state[STATE].items():
        found.update(
            {(STATE, fqn, *path): value for path, value in leaves(states, holds_tensors).items() if path}
        )
    for index, group in enumerate(state[GROUPS]):
        for name, value in group.items():
            if name != PARAMS:
                found[GROUPS, index, name] = Boxed(value)
    return found


class Boxed(NamedTuple):
    """A group's value. It travels with the inventory even if it is a tensor (a learning rate may be one)."""

    value: Any


class Absent(NamedTuple):
    """Stands for a state that the optimizer would make, as another parameter's of its group."""

    template: torch.Tensor


class Unprepared(Load):
    """An optimizer whose states could not be made: it takes part in the agreement, and wants nothing."""

    title = TITLE

    def __init__(self, optim: Optimizer, problems: list[Problem]) -> None:
        super().__init__(problems)
        self.optim = optim

    def live(self) -> Iterable[object]:
        return (param for group in self.optim.param_groups for param in group[PARAMS])


class OptimizerLoad(Load):
    """Where an optimizer wants the tensors of a full state dict, and its own dict once they are there."""

    title = TITLE

    def __init__(
        self, model: nn.Module, optim: Optimizer, templates: Templates, problems: list[Problem]
    ) -> None:
        super().__init__(problems)
        self.optim = optim
        local = named_state(model, optim)
        self.params = {
            fqn: param
            for packed, group in zip(local[GROUPS], optim.param_groups)
            for fqn, param in zip(packed[PARAMS], group[PARAMS])
        }
        self.names = [group[PARAMS] for group in local[GROUPS]]
        #: path -> value, of the optimizer as it is; overwritten by what is loaded.
        self.values = paths_of(local)
        for fqn, param in self.params.items():
            for name, template in templates.get(param, {}).items():
                self.values[STATE, fqn, name] = Absent(template)

    def live(self) -> Iterable[object]:
        yield from self.params.values()
        yield from (value for value in self.values.values() if isinstance(value, compat.DTensor))

    def plan(self, inventory: Mapping[Any, Any]) -> None:
        self.make_absent(path for path in self.values if path not in inventory)
        for path, offered in inventory.items():
            if path[0] == GROUPS:
                self.plan_group_value(path, offered)
            elif path[1] in self.params:
                self.plan_state(path, offered)
        untouched = [path for path in self.values if path[0] == STATE and path not in inventory]
        if untouched and len(untouched) < len(self.values):
            logger.warning(
                "%d optimizer states are not in the state dict and keep their values, for instance %s",
                len(untouched),
                spell_key(untouched[0]),
            )

    def make_absent(self, paths: Iterable[Path]) -> None:
        """States that the optimizer has to make after all: they are not in the checkpoint."""
        names = {str(path[1]) for path in paths if isinstance(self.values[path], Absent)}
        if names:
            make_states(self.optim, {self.params[name] for name in names})
        for fqn in names:
            for name, value in self.optim.state[self.params[fqn]].items():
                self.values[STATE, fqn, name] = value

    def want_as(
        self, path: Path, param: torch.Tensor, dtype: torch.dtype, settle: Callable[[torch.Tensor], None]
    ) -> None:
        """A new state with the layout and memory format of its parameter."""
        local, layout = local_of(param), layout_of(param)
        problem = misfit(path, local, layout)
        if problem:
            self.problems.append(problem)

        def finish(filled: torch.Tensor) -> None:
            settle(compat.wrap_local(filled, param) if isinstance(param, compat.DTensor) else filled)

        self.destinations[path] = Destination(
            layout, dtype, local.device, lambda _: torch.empty_like(local, dtype=dtype), finish, param
        )

    def plan_group_value(self, path: Path, offered: Boxed) -> None:
        live = self.values.get(path, Boxed(None)).value
        if torch.is_tensor(live) and torch.is_tensor(offered.value):
            offered = Boxed(offered.value.to(live.device))
        self.values[path] = offered

    def plan_state(self, path: Path, offered: Any) -> None:
        live = self.values.get(path)
        param = self.params[str(path[1])]

        def settle(value: Any) -> None:
            self.values[path] = value

        if isinstance(live, Absent):
            template = live.template
            if template.dim():
                if self.accepts(path, offered, tuple(param.shape)):
                    self.want_as(path, param, param.dtype, settle)
            elif isinstance(offered, (int, float)):
                settle(offered)
            elif self.accepts(path, offered, ()):
                self.want_whole(path, offered._replace(dtype=template.dtype), template.device, settle)
        elif torch.is_tensor(live):
            if live.dim() == 0 and isinstance(offered, (int, float)):
                settle(offered)
            elif self.accepts(path, offered, tuple(live.shape)):
                self.want_in_place(path, live, lambda: settle(live))
        elif isinstance(offered, TensorInfo):
            device = compat.local_part(param).device if isinstance(param, compat.DTensor) else param.device
            if offered.shape == tuple(param.shape):
                self.want_fresh(path, param, offered, device, settle)
            else:
                # As scalars are where an optimizer makes them itself.
                self.want_whole(path, offered, torch.device("cpu") if offered.shape == () else device, settle)
        elif self.usable(path, offered):
            settle(offered)

    @property
    def is_custom(self) -> bool:
        # Wrappers (accelerate's) may not have called Optimizer.__init__, and have no hooks then.
        hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
        hooked = any(getattr(self.optim, name, None) for name in hooks)
        return hooked or not type(self.optim).__module__.startswith("torch.")

    def apply(self, fetch: Callable[[str], None]) -> None:
        own_method(self.optim, "load_state_dict")(state_dict=self.result())

    def result(self) -> dict[str, Any]:
        """The state dict for the optimizer's own load_state_dict()."""
        # In the optimizer's own order.
        state: dict[str, Any] = {fqn: {} for names in self.names for fqn in names}
        groups: list[dict[str, Any]] = [{} for _ in self.names]
        for path, value in self.values.items():
            if path[0] == GROUPS:
                groups[int(str(path[1]))][str(path[2])] = value.value
            else:
                place(state, path[1:], value)
        for group, names in zip(groups, self.names):
            group[PARAMS] = names
        return {STATE: {fqn: relisted(states) for fqn, states in state.items() if states}, GROUPS: groups}


def relisted(tree: Any) -> Any:
    """Lists again, where `leaves` opened lists."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, Index) for key in tree):
        return [relisted(tree[key]) for key in sorted(tree)]
    return {key: relisted(value) for key, value in tree.items()}


def place(tree: dict[Any, Any], path: Path, value: Any) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value
