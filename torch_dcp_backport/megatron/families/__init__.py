"""The families of models that are known, each a table in a file of its own.

Tables and the look for one; must never look at a tensor.
"""

from __future__ import annotations

from typing import Optional

from torch_dcp_backport.megatron.families.deepseek import DEEPSEEK_V3
from torch_dcp_backport.megatron.families.gemma import GEMMA2, GEMMA3
from torch_dcp_backport.megatron.families.glm import GLM, GLM4
from torch_dcp_backport.megatron.families.gpt_oss import GPT_OSS
from torch_dcp_backport.megatron.families.llama import LLAMA, MISTRAL
from torch_dcp_backport.megatron.families.mixtral import MIXTRAL
from torch_dcp_backport.megatron.families.phi3 import PHI3
from torch_dcp_backport.megatron.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_VL_MOE_TEXT
from torch_dcp_backport.megatron.families.table import Family, problems_of

_BY_KIND: dict[str, Family] = {}
#: model_type -> why it is refused.
REFUSED = {
    "qwen3_next": "megatron-core's GPTModel has no layers of linear attention (GatedDeltaNet)",
}


def add_family(family: Family) -> None:
    """Make a family known in this process: `load_hf`, `save_hf`, `convert` then take its models.

    Call it on every rank, before the first load.

    Args:
        family: the table. It may not take the place of another one.

    Raises:
        ValueError: the table speaks of what it does not have, or its model_type is known already.

    Example:
        A Llama whose norms have other names in the files:

        >>> from torch_dcp_backport import megatron
        >>> llama = megatron.family_of("llama")
        >>> names = " ".join(llama.rows[0].names)
        >>> norm = megatron.row(names, "whole", "norm_1.weight: hidden")
        >>> megatron.add_family(megatron.Family(("llama_like",), (norm, *llama.rows[1:]), flags=llama.flags))
        >>> megatron.family_of("llama_like").kinds
        ('llama_like',)
    """
    problems = problems_of(family)
    problems += [f"{kind} is known already" for kind in family.kinds if _BY_KIND.get(kind, family) != family]
    if problems:
        raise ValueError(f"no table for {', '.join(family.kinds)}: {'; '.join(problems)}")
    _BY_KIND.update(dict.fromkeys(family.kinds, family))


def family_of(kind: Optional[str]) -> Family:
    """Return the table of a model_type.

    Args:
        kind: the `model_type` of config.json.

    Raises:
        ValueError: there is no such table; the error has those that there are.

    Example:
        >>> from torch_dcp_backport import megatron
        >>> len(megatron.family_of("mistral").rows)
        6
    """
    if kind in REFUSED:
        raise ValueError(f"config.json has the model_type {kind!r}, which is refused: {REFUSED[kind]}")
    family = _BY_KIND.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ValueError(f"config.json has the model_type {kind!r}; these are known: {', '.join(kinds())}")
    return family


def kinds() -> tuple[str, ...]:
    """Return every model_type that is known."""
    return tuple(_BY_KIND)


for _family in (
    *(QWEN2, QWEN3, LLAMA, QWEN2_MOE, QWEN3_MOE, MISTRAL, MIXTRAL, GEMMA2, GEMMA3, PHI3, GLM, GLM4),
    *(DEEPSEEK_V3, GPT_OSS, QWEN3_VL_MOE_TEXT),
):
    add_family(_family)
