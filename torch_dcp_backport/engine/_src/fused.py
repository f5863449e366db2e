"""Log-probabilities and entropies from hidden states: the logits of a chunk of tokens alone are ever there.

Knows one linear layer, the head; must never keep logits for the backward pass, which computes them again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import nn

from torch_dcp_backport import compat
from torch_dcp_backport.engine._src.heads import CHUNK, NO_LABEL
from torch_dcp_backport.transfer import Call, groups_of

#: Settings of a model's configuration by which its forward pass changes the logits behind the head.
CHANGES = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
)


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: Optional[torch.Tensor] = None,
    temperature: Optional[torch.Tensor] = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Return the log-probability of each label under `hidden @ weight.T`, which is never whole.

    Chunks of tokens follow each other, in the backward pass too, which computes their logits again. Beside
    the results and gradients there are about three chunks in float32. Logits have the dtype of `hidden`, or
    that of autocast, as those of a linear layer; what follows is in float32.

    Args:
        hidden: floating tensor (..., features): the input of the head.
        weight: floating tensor (vocabulary, features); a tied one gets its gradient as from any layer.
        labels: integer tensor (...); -100 where there is none, whose log-probability is 0.
        bias: floating tensor (vocabulary); None is no bias.
        temperature: positive floating tensor (...) by which the logits of each token are divided; None
            divides by nothing.
        chunk: elements of the logits that are there at once; at least those of a single token.

    Returns:
        float32, of the labels' shape.

    Raises:
        ValueError: shapes that do not fit, tensors of different dtypes outside of autocast, or a DTensor: the
            weight must be whole, as FSDP2 has it in the forward pass of its unit.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> hidden, weight = torch.ones(2, 3), torch.zeros(4, 3)
        >>> engine.linear_log_probs(hidden, weight, torch.tensor([0, 3]))
        tensor([-1.3863, -1.3863])
    """
    return log_probs_and_entropy(hidden, weight, labels, bias, temperature, chunk, has_entropy=False)[0]


def log_probs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    temperature: Optional[torch.Tensor] = None,
    chunk: int = CHUNK,
    *,
    has_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities as `linear_log_probs`, and the entropy of each distribution (else zeros)."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        # As autocast does for a linear layer; a custom function has to do it by itself.
        kind = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(kind), weight.to(kind)
        bias = None if bias is None else bias.to(kind)
    _check(hidden, weight, labels, bias, temperature)
    rows = max(1, chunk // max(1, len(weight)))
    factor = None if temperature is None else temperature.reshape(-1).float()
    found = _Head.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        labels.reshape(-1).long(),
        factor,
        rows,
        has_entropy,
    )
    return found[0].view(labels.shape), found[1].view(labels.shape)


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: Optional[torch.Tensor],
    temperature: Optional[torch.Tensor],
) -> None:
    given = {"hidden": hidden, "weight": weight, "bias": bias}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    for name, tensor in tensors.items():
        if isinstance(tensor, compat.DTensor):
            raise ValueError(
                f"linear_log_probs: {name} is a DTensor with {tensor.placements}: each rank needs the whole "
                "one, as in the forward pass of a unit of FSDP2 or from full_tensor(); a head that tensor "
                "parallelism cuts is not offered"
            )
        if tensor.dtype != hidden.dtype:
            raise ValueError(f"linear_log_probs: {name} is {tensor.dtype}, hidden is {hidden.dtype}")
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"linear_log_probs: hidden has the shape {tuple(hidden.shape)}, weight {tuple(weight.shape)}: "
            "expected (..., features) and (vocabulary, features)"
        )
    for name, own in (("labels", labels), ("temperature", temperature)):
        if own is not None and own.shape != hidden.shape[:-1]:
            raise ValueError(
                f"linear_log_probs: {name} has the shape {tuple(own.shape)}, hidden {tuple(hidden.shape)}: "
                "expected one for each token"
            )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_log_probs: bias has {tuple(bias.shape)}, weight {tuple(weight.shape)}")


class _Head(torch.autograd.Function):
    """Log-probabilities and entropies of tokens, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
        labels: torch.Tensor,
        factor: Optional[torch.Tensor],
        rows: int,
        has_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(hidden, weight, bias, labels, factor)
        ctx.rows, ctx.has_entropy = rows, has_entropy
        chosen = hidden.new_zeros(len(hidden), dtype=torch.float32)
        entropies = torch.zeros_like(chosen)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _parts(len(hidden), rows):
                logs = _logs(hidden[part], weight, bias, None if factor is None else factor[part])
                own = labels[part]
                picked = logs.gather(1, _numbers(own)[:, None])[:, 0]
                chosen[part] = picked.masked_fill(own == NO_LABEL, 0.0)
                if has_entropy:
                    shares = logs.exp()
                    entropies[part] = -logs.masked_fill_(shares == 0, 0.0).mul_(shares).sum(1)
                    del shares
                # Else the next chunk is made beside this one.
                del logs
        return chosen, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[misc, untyped-decorator, unused-ignore]
    def backward(ctx: Any, of_chosen: torch.Tensor, of_entropies: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, labels, factor = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Sums over all tokens: in half precision a sum of chunks would lose what the chunks have.
        kind = torch.float32 if weight.dtype.itemsize < 4 else weight.dtype
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=kind) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=kind) if bias is not None and needs_bias else None
        of_chosen = of_chosen.masked_fill(labels == NO_LABEL, 0.0)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _parts(len(hidden), ctx.rows):
                divisor = None if factor is None else factor[part][:, None]
                logs = _logs(hidden[part], weight, bias, None if factor is None else factor[part])
                grad = _of_logits(logs, labels[part], of_chosen[part], of_entropies[part], ctx.has_entropy)
                del logs
                if divisor is not None:
                    grad.div_(divisor)
                grad = grad.to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = grad @ weight
                if grad_weight is not None:
                    if grad.dtype == kind:
                        grad_weight.addmm_(grad.t(), hidden[part])
                    else:
                        grad_weight += grad.t() @ hidden[part]
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
                del grad
        ends = (weight.dtype, None if bias is None else bias.dtype)
        found = [None if own is None else own.to(end) for own, end in zip((grad_weight, grad_bias), ends)]
        return grad_hidden, *found, None, None, None, None


def _parts(count: int, rows: int) -> Iterator[slice]:
    for start in range(0, count, rows):
        yield slice(start, start + rows)


def _numbers(labels: torch.Tensor) -> torch.Tensor:
    """Return labels as numbers of tokens; of those that are negative only -100 is none, others are errors."""
    return labels.masked_fill(labels == NO_LABEL, 0)


def _logs(
    hidden: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], factor: Optional[torch.Tensor]
) -> torch.Tensor:
    """Return the log-probabilities of all labels for a chunk of tokens, float32."""
    logits = nn.functional.linear(hidden, weight, bias).float()
    if factor is not None:
        logits.div_(factor[:, None])
    return logits.sub_(logits.logsumexp(1, keepdim=True))


def _of_logits(
    logs: torch.Tensor,
    labels: torch.Tensor,
    of_chosen: torch.Tensor,
    of_entropies: torch.Tensor,
    has_entropy: bool,
) -> torch.Tensor:
    """Return the gradient of the logits; `logs` is written to."""
    shares = logs.exp()
    if has_entropy:
        # Of an entropy H it is -p (log p + H).
        logs.masked_fill_(shares == 0, 0.0)
        entropies = -(shares * logs).sum(1, keepdim=True)
        grad = logs.add_(entropies).mul_(-of_entropies[:, None]).mul_(shares)
        grad.addcmul_(shares, of_chosen[:, None], value=-1)
    else:
        grad = shares.mul_(-of_chosen[:, None])
    return grad.scatter_add_(1, _numbers(labels)[:, None], of_chosen[:, None])


class Asked(NamedTuple):
    """The results that a forward pass is run for, token by token."""

    labels: torch.Tensor
    temperature: Optional[torch.Tensor]
    has_entropy: bool


class FusedHead:
    """A model's head, which returns log-probabilities and entropies in the place of logits when it is asked.

    The head has to compute them itself: FSDP2 gathers its weight in the head's own forward pass, and frees
    it behind it. So what the model calls its logits are these results, (rows, columns, 1 or 2).
    """

    def __init__(self, head: nn.Module, chunk: int) -> None:
        """Take the place of the head's forward pass.

        Args:
            head: a linear layer.
            chunk: as of `linear_log_probs`.
        """
        self.head, self.chunk = head, chunk
        self.logits_of = head.forward
        self.asked: Optional[Asked] = None
        self.made: Optional[torch.Tensor] = None
        #: Whether a forward pass on any rank has shown that the model hands on what the head has made.
        self.is_checked = False
        head.forward = self.forward  # type: ignore[method-assign, assignment, unused-ignore]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what is asked for, or logits."""
        if self.asked is None:
            logits: torch.Tensor = self.logits_of(hidden)
            return logits
        head: Any = self.head
        found = log_probs_and_entropy(
            hidden,
            head.weight,
            self.asked.labels,
            head.bias,
            self.asked.temperature,
            self.chunk,
            has_entropy=self.asked.has_entropy,
        )
        self.made = torch.stack(found[: 1 + self.asked.has_entropy], -1)
        return self.made

    @contextlib.contextmanager
    def asking(self, asked: Asked) -> Iterator[None]:
        """Return a context for one forward pass of the model."""
        self.asked, self.made = asked, None
        try:
            yield
        finally:
            self.asked = self.made = None

    def results(self, logits: torch.Tensor, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the results in what the model calls its logits, within the context. Collective.

        Raises:
            RuntimeError: the model does not call the head, or changes what comes from it; on every rank.
        """
        assert self.asked is not None
        if not self.is_checked:
            # A rank without labels sees nothing wrong, and would wait for the others in the backward pass. So
            # all ranks compare what they saw, until one of them had labels: they run the same model.
            with Call("cannot run the model", "forward", groups_of(), plain=(RuntimeError,)) as call:
                has_labels = call.attempt(self._check, logits, model)
                self.is_checked = call.gather_object(
                    "checking the head", has_labels, lambda by_rank: any(by_rank.values())
                )
        found = {"log_probs": logits[..., 0]}
        if self.asked.has_entropy:
            found["entropy"] = logits[..., 1]
        return found

    def _check(self, logits: torch.Tensor, model: nn.Module) -> bool:
        """Return whether what the head has made shows that the model hands it on as it is.

        Raises:
            RuntimeError: the model does not.
        """
        made = self.made
        same = made is not None and made.shape == logits.shape
        if not (same and torch.equal(_whole(made), _whole(logits))):
            raise RuntimeError(
                f"a {type(model).__name__} changes the logits behind its head, or has other ones: "
                "use_fused_kernels=True would leave that out; take use_fused_kernels=False"
            )
        # Zeros, of tokens without labels, are alike under any factor.
        return bool(logits.detach().any())


def _whole(values: Optional[torch.Tensor]) -> torch.Tensor:
    assert values is not None
    return values.detach().float().nan_to_num()


def why_not(model: Any) -> str:
    """Return why a model's head cannot make log-probabilities by itself; "" where it can."""
    ask = getattr(model, "get_output_embeddings", None)
    head = None if ask is None else ask()
    if not isinstance(head, nn.Linear):
        return f"the head of a {type(model).__name__} is {'none' if head is None else type(head).__name__}"
    config: Any = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        for name in CHANGES:
            value = getattr(part, name, None)
            if value not in (None, 1, 1.0):
                return f"a {type(model).__name__} changes logits behind its head, by {name}={value}"
    return ""
