"""Log-probabilities, entropy and values from logits; in chunks, since logits are large.

A chunk in float32 is all that is there beside the logits, in the backward pass too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from torch.utils.checkpoint import checkpoint

#: Elements of a chunk: 64 MiB in float32.
CHUNK = 16 * 2**20
#: In the place of a label: there is none, and its log-probability is 0.
NO_LABEL = -100


def log_probs(logits: torch.Tensor, labels: torch.Tensor, *, chunk: int = CHUNK) -> torch.Tensor:
    """Return the log-probability of each label, float32, of the labels' shape.

    Args:
        logits: floating tensor (..., vocabulary).
        labels: integer tensor (...); -100 where there is none, whose log-probability is 0.
        chunk: elements of the logits that are in float32 at once.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> engine.log_probs(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor([-1.3863, -1.3863])
    """
    return _in_chunks(_log_probs, chunk, logits, labels)


def entropy(logits: torch.Tensor, *, chunk: int = CHUNK) -> torch.Tensor:
    """Return the entropy of each distribution in nats, float32, of shape `logits.shape[:-1]`.

    Args:
        logits: floating tensor (..., vocabulary).
        chunk: elements of the logits that are in float32 at once.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> engine.entropy(torch.zeros(1, 4))
        tensor([1.3863])
    """
    return _in_chunks(_entropy, chunk, logits)


def values(logits: torch.Tensor) -> torch.Tensor:
    """Return the number that a value head gives each token, float32.

    Args:
        logits: floating tensor (rows, columns, 1).

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> engine.values(torch.ones(1, 2, 1, dtype=torch.bfloat16))
        tensor([[1., 1.]])
    """
    return logits.squeeze(-1).float()


def next_log_probs(
    logits: torch.Tensor, ids: torch.Tensor, mask: Optional[torch.Tensor] = None, *, chunk: int = CHUNK
) -> torch.Tensor:
    """Return each position's log-probability of the token after it; 0 where there is none, or padding.

    Args:
        logits: floating tensor (rows, columns, vocabulary).
        ids: integer tensor (rows, columns).
        mask: (rows, columns), 0 where a column is padding; None is no padding.
        chunk: elements of the logits that are in float32 at once.

    Returns:
        float32, (rows, columns).

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> ids, mask = torch.tensor([[1, 2, 3, 0]]), torch.tensor([[1, 1, 1, 0]])
        >>> engine.next_log_probs(torch.zeros(1, 4, 4), ids, mask)
        tensor([[-1.3863, -1.3863,  0.0000,  0.0000]])
    """
    # Of the last column too, of which nothing is kept: a part of the logits would be flattened as a copy.
    return log_probs(logits, next_labels(ids, mask), chunk=chunk)


def next_labels(ids: torch.Tensor, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Return the token after each position; -100 where there is none, or padding."""
    is_token = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    # From a token to a token: a value from padding to a row's first token depends on how rows are cut.
    is_token = is_token & is_token.roll(-1, 1)
    is_token[:, -1:] = False
    return ids.roll(-1, 1).where(is_token, NO_LABEL)


def sft_loss(
    model_output: Mapping[str, torch.Tensor], data: Mapping[str, Any], dp_group: object = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the mean over tokens that `loss_mask` marks, on all ranks; a loss function as verl's are.

    Args:
        model_output: the engine's outputs, with `log_probs`: (rows, columns) or jagged.
        data: the micro-batch's data, with `loss_mask` of the tokens (of the same shape), `batch_num_tokens`
            (the number of tokens with a loss on all ranks) and `dp_size`.
        dp_group: not used; engines hand it to each loss function.

    Returns:
        The loss, a scalar, and no metrics.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> data = {"loss_mask": torch.tensor([[0, 1, 1]]), "batch_num_tokens": 2, "dp_size": 1}
        >>> engine.sft_loss({"log_probs": torch.tensor([[-1.0, -3.0, 0.0]])}, data)
        (tensor(2.), {})
    """
    token_log_probs, mask = model_output["log_probs"], data["loss_mask"]
    # The mask marks tokens, a log-probability stands right before its token; the last of a row is 0.
    if token_log_probs.is_nested:
        token_log_probs, mask = token_log_probs.values(), mask.values()
    weights = mask.roll(-1, -1).to(token_log_probs)
    # Not by the product alone: 0 times -inf, of a token that cannot occur, is not a number.
    total = (token_log_probs.where(weights != 0, 0.0) * weights).sum()
    return -total / data["batch_num_tokens"] * data["dp_size"], {}


def _in_chunks(function: Callable[..., torch.Tensor], chunk: int, *tensors: torch.Tensor) -> torch.Tensor:
    logits = tensors[0]
    rows = max(1, chunk // max(1, logits.shape[-1]))
    flat = [tensor.flatten(0, logits.dim() - 2) for tensor in tensors]
    parts = []
    is_large = logits.requires_grad and torch.is_grad_enabled() and flat[0].shape[0] > rows
    for pieces in zip(*(torch.split(tensor, rows) for tensor in flat)):
        if is_large:
            # Computed again in the backward pass: what it keeps would be the logits once more, in float32.
            parts.append(checkpoint(function, *pieces, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(function(*pieces))
    result = torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float32)
    return result.view(logits.shape[:-1])


def _log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = torch.nn.functional.cross_entropy(
        logits.float(), labels.long(), reduction="none", ignore_index=NO_LABEL
    )
    return (-losses).where(labels != NO_LABEL, 0.0)


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    log_shares = logits.float().log_softmax(-1)
    shares = log_shares.exp()
    return -(shares * log_shares.where(shares != 0, 0.0)).sum(-1)
