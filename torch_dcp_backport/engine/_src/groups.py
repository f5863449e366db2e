"""Parameter groups of an optimizer: with and without weight decay.

Knows names and modules; must never look at values, so that every rank makes the same groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Union

from torch import nn

#: Name of a kind of parameters -> whether a parameter is one, by its module and its name in it.
KINDS: Mapping[str, Callable[[nn.Module, str], bool]] = {
    # By the class: transformers has a class of norms for each family.
    "norms": lambda module, name: "norm" in type(module).__name__.lower(),
    "biases": lambda module, name: name.rpartition("_")[2] == "bias",
    "embeddings": lambda module, name: isinstance(module, nn.Embedding),
}


class Parted(NamedTuple):
    """The parameters that are trained, with and without decay."""

    decayed: list[nn.Parameter]
    undecayed: list[nn.Parameter]
    #: Kinds of which the model trains no parameter.
    absent: list[str]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups for an optimizer, without an empty one."""
        groups: list[dict[str, Any]] = [
            {"params": self.decayed},
            {"params": self.undecayed, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]


def listed(names: Union[None, str, Iterable[str]]) -> tuple[str, ...]:
    """Return names as a tuple; a bare text is one name.

    Raises:
        ValueError: something else than text.
    """
    expected = f"expected {', '.join(KINDS)}, or a pattern of names"
    if not names and not isinstance(names, str):
        return ()
    # A mapping would lose its values in silence.
    if not isinstance(names, Iterable) or isinstance(names, (bytes, Mapping)):
        raise ValueError(f"no_decay={names!r}: {expected}; or a list of them")
    found = (names,) if isinstance(names, str) else tuple(names)
    for name in found:
        if not isinstance(name, str) or not name:
            raise ValueError(f"no_decay has {name!r}: {expected}")
    return found


def parted(
    model: nn.Module, no_decay: Union[None, str, Iterable[str]], file_name: Callable[[str], str] = str
) -> Parted:
    """Part the parameters that are trained into those with and those without decay.

    Args:
        model: the model; its parameters may be on meta or sharded.
        no_decay: as of `param_groups`.
        file_name: gives a parameter's name in the files, which patterns match too.

    Raises:
        ValueError: a pattern that matches no parameter that is trained.
    """
    asked = listed(no_decay)
    modules = dict(model.named_modules())
    trained: dict[int, nn.Parameter] = {}
    reasons: dict[int, set[str]] = {}
    names = []
    # Under all names: a tied parameter is without decay if any of its names is.
    for name, param in model.named_parameters(remove_duplicate=False):
        if not param.requires_grad:
            continue
        path, _, leaf = name.rpartition(".")
        known = name, file_name(name)
        names.append(known[1])
        trained[id(param)] = param
        reasons.setdefault(id(param), set()).update(
            each
            for each in asked
            if (
                KINDS[each](modules[path], leaf)
                if each in KINDS
                else any(fnmatchcase(own, each) for own in known)
            )
        )
    absent = [each for each in asked if not any(each in found for found in reasons.values())]
    wrong = [each for each in absent if each not in KINDS]
    if wrong:
        raise ValueError(
            f"no_decay={wrong[0]!r} matches no parameter that is trained: expected {', '.join(KINDS)}, "
            f"a name or a pattern such as '*.bias'; {len(names)} are trained: {', '.join(names[:3])}, ..."
        )
    return Parted(
        [param for key, param in trained.items() if not reasons[key]],
        [param for key, param in trained.items() if reasons[key]],
        absent,
    )


def param_groups(model: nn.Module, no_decay: Union[None, str, Iterable[str]] = ()) -> list[dict[str, Any]]:
    """Return the parameters that are trained as groups for an optimizer, with and without weight decay.

    Args:
        model: the model, before or after it is sharded.
        no_decay: what the optimizer does not decay: "norms" (parameters of modules whose class has "norm" in
            its name), "biases", "embeddings" (with heads that are tied to them), or names of parameters, as
            patterns of `fnmatch`. A bare text is one name. A model may have none of a kind.

    Returns:
        A group that takes the optimizer's weight decay, and one with a decay of 0; without the one that would
        be empty.

    Raises:
        ValueError: a pattern that matches no parameter that is trained.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> groups = engine.param_groups(model, no_decay=["norms", "biases"])
        >>> [len(group["params"]) for group in groups]
        [1, 3]
        >>> optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.1, 0.0]
    """
    return parted(model, no_decay).groups
