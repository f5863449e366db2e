"""A small decoder in the shape of transformers' models, its files and data, its training in one process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import cpu_fsdp
import torch
import torch.distributed as dist
from torch import nn

from torch_dcp_backport import engine, hf
from torch_dcp_backport.engine._src import offload

VOCABULARY, WIDTH, LENGTH, ROWS = 29, 12, 11, 9
STEPS = 5


class Block(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        # No bias of keys: its gradient is rounding alone, which AdamW makes as large as any.
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        if experts:
            self.experts = Experts(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, mask))
        return x + self.experts(x, ids) if hasattr(self, "experts") else x


class Experts(nn.ModuleList):
    """As transformers has them: of those that no token chooses nothing runs. A token's number chooses."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for number in (ids % len(self)).unique().tolist():
            rows, columns = torch.where(ids % len(self) == number)
            result = result.index_put((rows, columns), self[number](x[rows, columns]))
        return result


class Output(NamedTuple):
    #: FSDP2 looks for tensors in tuples and the like, and in what transformers has registered.
    logits: torch.Tensor


class Model(nn.Module):
    """Tied; its positions are a buffer that is in no file."""

    _no_split_modules = ("Block",)

    def __init__(self, is_tied: bool = True, experts: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        angles = torch.arange(LENGTH)[:, None] * 0.7 ** torch.arange(WIDTH)
        self.register_buffer("positions", angles.sin(), persistent=False)
        self.layers = nn.ModuleList([Block(experts) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(
        self, input_ids: Any, attention_mask: Any, position_ids: Any, use_cache: bool = False
    ) -> Output:
        x = self.embed(input_ids) + self.positions[position_ids]
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        # A token of the padding sees itself: a softmax over nothing is none.
        mask = causal & (attention_mask.bool()[:, None, :] | torch.eye(x.shape[1], dtype=torch.bool))
        for layer in self.layers:
            x = layer(x, mask, input_ids)
        return Output(self.head(x))


def model(is_tied: bool = True, seed: int = 0, experts: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(is_tied, experts)


def write(folder: Path, is_tied: bool = True, experts: int = 0) -> Path:
    """The files of `model()`, by this process alone."""
    params = dict(model(is_tied, experts=experts).named_parameters())
    hf.save_state_dict(params, folder, like={"model_type": "small"})
    return folder


class Offloading(engine.FSDPEngineWithLMHead):
    """As on an accelerator with `enable_activation_offload`: of the CPU's tensors there are copies."""

    #: Bytes that each forward pass has copied.
    copied = 0

    @contextlib.contextmanager
    def saving(self) -> Any:
        with offload.saved_on_host(self.module, "cpu", least=1) as saved:
            yield
            self.copied += sum(stored.host.nbytes for stored in saved.stored.values())


class Engine(engine.FSDPEngineWithLMHead):
    @staticmethod
    def make_model(asked: Any, dtype: Any) -> nn.Module:
        options = dict(asked.override_config)
        is_frozen = options.pop("is_frozen", False)
        return freeze(Model(**options)) if is_frozen else Model(**options)


def freeze(model: nn.Module) -> nn.Module:
    """A whole unit, and parts of others."""
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(("embed", "layers.0.norm", "layers.1.qkv")))
    return model


def made(
    folder: Path,
    optimizer: str = "SGD",
    *,
    average: bool = True,
    untied: bool = False,
    frozen: bool = False,
    model_config: Any = None,
    optimizer_config: Any = None,
    kind: type[Engine] = Engine,
    **options: Any,
) -> Engine:
    """An engine in float32, on the CPU; the release's own FSDP2 with what it lacks."""
    cpu_fsdp.install(average)
    config = {
        "path": str(folder),
        "override_config": {"is_tied": not untied, "is_frozen": frozen},
        **(model_config or {}),
    }
    plain = {"model_dtype": "fp32", "mixed_precision": {"param_dtype": None, "reduce_dtype": None}}
    if "max_token_len_per_gpu" not in options:
        plain.update(use_dynamic_bsz=False, micro_batch_size_per_gpu=2)  # type: ignore[dict-item]
    rate = {"SGD": 0.5, "AdamW": 0.01}[optimizer]
    asked = {"optimizer": optimizer, "lr": rate, "clip_grad": 0.3, **(optimizer_config or {})}
    found = kind(config, {**plain, **options}, asked, device="cpu")
    found.initialize()
    return found


def batch(step: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """All ranks' rows of a step: of different lengths, padded on both sides, with uneven masks."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=draw)
    starts = torch.randint(0, 3, (rows, 1), generator=draw)
    stops = torch.randint(5, LENGTH + 1, (rows, 1), generator=draw)
    places = torch.arange(LENGTH)
    there = (places >= starts) & (places < stops)
    marked = torch.rand(rows, LENGTH, generator=draw) < torch.linspace(0.1, 0.9, rows)[:, None]
    mask = there & marked & (places > starts)
    return {"input_ids": ids * there, "attention_mask": there.long(), "loss_mask": mask.long()}


def jagged(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same rows without padding."""
    there = data["attention_mask"].bool()
    picked = {name: [row[keep] for row, keep in zip(value, there)] for name, value in data.items()}
    picked.pop("attention_mask")
    return {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in picked.items()}


def share(data: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, torch.Tensor]:
    """A rank's rows: the first rank has most, by far."""
    cut = [0, *range(len(data["input_ids"]) - world + 1, len(data["input_ids"]) + 1)]
    return {name: value[cut[rank] : cut[rank + 1]] for name, value in data.items()}


def sparse_batch(step: int, world: int = 4) -> dict[str, torch.Tensor]:
    """As `batch`, without padding, for six experts: rank 0 has tokens of expert 1, rank 1 of expert 2, ..."""
    data = batch(step)
    ids = data["input_ids"] % 4 * 6
    for rank in range(world):
        share({"input_ids": ids}, rank, world)["input_ids"].add_(rank + 1)
    whole = torch.ones_like(ids)
    mask = whole.clone()
    mask[:, 0] = 0
    return {"input_ids": ids, "attention_mask": whole, "loss_mask": mask}


def model_inputs(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return engine.model_inputs(data, torch.device("cpu"))


def own_rows(data: dict[str, torch.Tensor], made: engine.BaseEngine) -> dict[str, torch.Tensor]:
    return share(data, made.get_data_parallel_rank(), made.get_data_parallel_size())


def loss_of(model: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over tokens, written down once more."""
    positions = (data["attention_mask"].cumsum(1) - 1).clamp_min(0)
    mask = data["attention_mask"]
    logits = model(data["input_ids"], attention_mask=mask, position_ids=positions).logits
    labels = data["input_ids"].where(data["loss_mask"].bool(), torch.tensor(-100))[:, 1:]
    summed = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
    return summed / data["loss_mask"].sum()


def alone(
    optimizer: str = "SGD",
    is_tied: bool = True,
    steps: int = STEPS,
    is_frozen: bool = False,
    *,
    plain: Any = None,
    rows: Any = batch,
) -> dict[str, Any]:
    """Losses, norms and weights of the training in one process, by torch alone."""
    if plain is None:
        plain = freeze(model(is_tied)) if is_frozen else model(is_tied)
    rate = {"SGD": 0.5, "AdamW": 0.01}[optimizer]
    made = getattr(torch.optim, optimizer)(plain.parameters(), lr=rate, weight_decay=0.01)
    losses, norms = [], []
    for step in range(steps):
        made.zero_grad()
        loss = loss_of(plain, rows(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.3)))
        made.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": dict(plain.named_parameters())}


def trained(
    made: engine.FSDPEngine, steps: range = range(STEPS), rows: Any = own_rows, drawn: Any = batch
) -> dict[str, Any]:
    """As `alone`, by an engine on all ranks."""
    losses, norms = [], []
    with made.train_mode():
        for step in steps:
            output = made.train_batch(rows(drawn(step), made), engine.sft_loss)
            total = torch.tensor(sum(output["loss"]), dtype=torch.float64)
            dist.all_reduce(total)
            # As losses are: what a rank has times the number of ranks with data of their own.
            losses.append(total.item() / dist.get_world_size())
            norms.append(output["metrics"]["grad_norm"])
    weights, _ = made.get_per_tensor_param(dtype=None)
    return {"losses": losses, "norms": norms, "weights": dict(weights)}


def same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    for name in ("losses", "norms"):
        torch.testing.assert_close(found[name], expected[name], atol=tolerance, rtol=tolerance)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value.detach(), atol=tolerance, rtol=tolerance)
