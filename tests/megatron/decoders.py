"""Small decoders in verl's and in megatron-core's layout, and what their parameters must hold.

The oracle uses torch.cat and chunk, and nothing of ours. Modules imitate names and attributes alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from torch import nn
from values import value_of

CONFIG = "config.json"


class Decoder(NamedTuple):
    """A model, as config.json has it."""

    model_type: str = "qwen2"
    layers: int = 4
    hidden: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    intermediate: int = 24
    vocab: int = 32
    tied: bool = False
    #: Sparse models: experts of a layer, rows of each, rows of the shared one, and the dense layers.
    experts: int = 0
    expert_rows: int = 0
    shared_rows: int = 0
    dense: tuple[int, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": self.model_type,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            **(self.sparse_config if self.experts else {}),
        }

    @property
    def sparse_config(self) -> dict[str, Any]:
        config = {
            "num_experts": self.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": self.expert_rows,
            "mlp_only_layers": list(self.dense),
            "norm_topk_prob": True,
        }
        return {
            **config,
            **({"shared_expert_intermediate_size": self.shared_rows} if self.shared_rows else {}),
        }

    def mlps(self, layer: int) -> dict[str, int]:
        """Prefix -> rows of its gate."""
        if not self.experts or layer in self.dense:
            return {"mlp.": self.intermediate}
        mlps = {f"mlp.experts.{number}.": self.expert_rows for number in range(self.experts)}
        return {**mlps, **({"mlp.shared_expert.": self.shared_rows} if self.shared_rows else {})}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """HF key -> shape, in transformers' order."""
        q, kv, hidden = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, hidden)}
        for layer in range(self.layers):
            sizes: dict[str, tuple[int, ...]] = {
                "input_layernorm.weight": (hidden,),
                "self_attn.q_proj.weight": (q, hidden),
                "self_attn.k_proj.weight": (kv, hidden),
                "self_attn.v_proj.weight": (kv, hidden),
                "self_attn.o_proj.weight": (hidden, q),
                "post_attention_layernorm.weight": (hidden,),
            }
            for prefix, rows in self.mlps(layer).items():
                sizes[f"{prefix}gate_proj.weight"] = sizes[f"{prefix}up_proj.weight"] = (rows, hidden)
                sizes[f"{prefix}down_proj.weight"] = (hidden, rows)
            if self.experts and layer not in self.dense:
                sizes["mlp.gate.weight"] = (self.experts, hidden)
                if self.shared_rows:
                    sizes["mlp.shared_expert_gate.weight"] = (1, hidden)
            if self.model_type.startswith("qwen2"):
                sizes.update(
                    (f"self_attn.{name}_proj.bias", sizes[f"self_attn.{name}_proj.weight"][:1])
                    for name in "qkv"
                )
            if self.model_type.startswith("qwen3"):
                sizes.update((f"self_attn.{name}_norm.weight", (self.head_dim,)) for name in "qk")
            found.update((f"model.layers.{layer}.{name}", size) for name, size in sizes.items())
        found["model.norm.weight"] = (hidden,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocab, hidden)
        return found

    def tensors(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
        return {key: value_of(key, shape, dtype) for key, shape in self.shapes().items()}


class Spot(NamedTuple):
    """Where a rank is, and what it has there."""

    style: str
    tp_rank: int
    tp_size: int
    #: [chunk] -> layers.
    chunks: list[list[int]]
    has_embedding: bool
    has_head: bool
    #: Of the vocabulary, on each TP rank.
    rows: int
    value_head: bool = False
    #: megatron-core's names where TransformerEngine has the norms in the linear layers.
    te: bool = False
    #: Of experts.
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1


def spot_of(
    decoder: Decoder,
    style: str,
    rank: int,
    tp: int,
    pp: int,
    vpp: int = 1,
    uneven: bool = False,
    rows: int = 0,
    ep: int = 1,
) -> Spot:
    """Ranks count TP first, then PP; what is left over are DP replicas, among which EP deals out experts."""
    stage = rank // tp % pp
    counts = [decoder.layers // pp] * pp
    if uneven:
        counts[0] += 1
        counts[-1] -= 1
    numbers = iter(range(decoder.layers))
    dealt = [[[next(numbers) for _ in range(count // vpp)] for count in counts] for _ in range(vpp)]
    chunks = [one[stage] for one in dealt]
    rows = rows or -(-decoder.vocab // tp)
    spot = Spot(style, rank % tp, tp, chunks, stage == 0, stage == pp - 1, rows)
    return spot._replace(ep_rank=rank // (tp * pp) % ep, ep_size=ep, etp_rank=rank % tp, etp_size=tp)


def fused(decoder: Decoder, spot: Spot, hf: dict[str, torch.Tensor], layer: int, kind: str) -> torch.Tensor:
    q, k, v = (hf[f"model.layers.{layer}.self_attn.{name}_proj.{kind}"] for name in "qkv")
    rank, size = spot.tp_rank, spot.tp_size
    if spot.style == "verl":
        if decoder.kv_heads >= size:
            keys, values = (one.chunk(size)[rank] for one in (k, v))
        else:
            keys, values = (one.chunk(decoder.kv_heads)[rank * decoder.kv_heads // size] for one in (k, v))
        return torch.cat([q.chunk(size)[rank], keys, values])
    groups = [one.chunk(decoder.kv_heads) for one in (q, k, v)]
    rows = torch.cat([torch.cat(group) for group in zip(*groups)])
    return rows.chunk(size)[rank]


def mlp(hf: dict[str, torch.Tensor], prefix: str, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate and up, down) of a TP rank."""
    gate, up = (hf[f"{prefix}{name}_proj.weight"].chunk(size)[rank] for name in ("gate", "up"))
    return torch.cat([gate, up]), hf[f"{prefix}down_proj.weight"].chunk(size, 1)[rank]


def sparse(decoder: Decoder, spot: Spot, hf: dict[str, torch.Tensor], at: str) -> dict[str, torch.Tensor]:
    """A sparse layer's MLP of this rank, by megatron-core's names in the layer."""
    found = {"mlp.router.weight": hf[f"{at}mlp.gate.weight"]}
    if decoder.shared_rows:
        first, second = mlp(hf, f"{at}mlp.shared_expert.", spot.tp_rank, spot.tp_size)
        found["mlp.shared_experts.linear_fc1.weight"] = first
        found["mlp.shared_experts.linear_fc2.weight"] = second
        found["mlp.shared_experts.gate_weight"] = hf[f"{at}mlp.shared_expert_gate.weight"]
    mine = torch.arange(decoder.experts).chunk(spot.ep_size)[spot.ep_rank].tolist()
    for here, number in enumerate(mine):
        pair = mlp(hf, f"{at}mlp.experts.{number}.", spot.etp_rank, spot.etp_size)
        for name, value in zip(("linear_fc1", "linear_fc2"), pair):
            where = f"{name}.weight{here}" if spot.te else f"local_experts.{here}.{name}.weight"
            found[f"mlp.experts.{where}"] = value
    return found


def expected(decoder: Decoder, spot: Spot, hf: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """[chunk] -> parameter name -> what it must be."""
    rank, size, is_verl = spot.tp_rank, spot.tp_size, spot.style == "verl"

    def vocab(value: torch.Tensor) -> torch.Tensor:
        padded = torch.cat([value, value.new_zeros(spot.rows * size - len(value), decoder.hidden)])
        return padded.chunk(size)[rank]

    found: list[dict[str, torch.Tensor]] = []
    for layers in spot.chunks:
        chunk: dict[str, torch.Tensor] = {}
        for number, layer in enumerate(layers):
            at = f"model.layers.{layer}."
            prefix = f"model.layers.{number}." if is_verl else f"decoder.layers.{number}."
            norms = hf[at + "input_layernorm.weight"], hf[at + "post_attention_layernorm.weight"]
            parts = {
                "qkv": fused(decoder, spot, hf, layer, "weight"),
                "o": hf[at + "self_attn.o_proj.weight"].chunk(size, 1)[rank],
                "norm1": norms[0],
                "norm2": norms[1],
            }
            is_sparse = bool(decoder.experts) and layer not in decoder.dense
            if is_sparse:
                chunk.update((prefix + name, value) for name, value in sparse(decoder, spot, hf, at).items())
            else:
                parts["gate_up"], parts["down"] = mlp(hf, at + "mlp.", rank, size)
            if decoder.model_type.startswith("qwen2"):
                parts["qkv_bias"] = fused(decoder, spot, hf, layer, "bias")
            if decoder.model_type.startswith("qwen3"):
                parts["q_norm"] = hf[at + "self_attn.q_norm.weight"]
                parts["k_norm"] = hf[at + "self_attn.k_norm.weight"]
            names = VERL if is_verl else {**MCORE, **(TE if spot.te else {})}
            if is_sparse:
                names = {**names, "norm2": MCORE["norm2"]}
            chunk.update((prefix + names[part], value) for part, value in parts.items())
        found.append(chunk)
    embedding = hf["model.embed_tokens.weight"]
    if spot.has_embedding:
        name = "model.embed_tokens.weight" if is_verl else "embedding.word_embeddings.weight"
        found[0][name] = vocab(embedding)
    if spot.has_head:
        found[-1]["model.norm.weight" if is_verl else "decoder.final_layernorm.weight"] = hf[
            "model.norm.weight"
        ]
        name = "lm_head.weight" if is_verl else "output_layer.weight"
        if spot.value_head:
            found[-1][name] = hf["score.weight"]
        elif not decoder.tied:
            found[-1][name] = vocab(hf["lm_head.weight"])
        elif not spot.has_embedding:
            found[-1][name] = vocab(embedding)
    return found


VERL = {
    "qkv": "self_attn.qkv_proj.weight",
    "qkv_bias": "self_attn.qkv_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "gate_up": "mlp.gate_up_proj.weight",
    "down": "mlp.down_proj.weight",
    "norm1": "input_layernorm.weight",
    "norm2": "post_attention_layernorm.weight",
}
MCORE = {
    "qkv": "self_attention.linear_qkv.weight",
    "qkv_bias": "self_attention.linear_qkv.bias",
    "q_norm": "self_attention.q_layernorm.weight",
    "k_norm": "self_attention.k_layernorm.weight",
    "o": "self_attention.linear_proj.weight",
    "gate_up": "mlp.linear_fc1.weight",
    "down": "mlp.linear_fc2.weight",
    "norm1": "input_layernorm.weight",
    "norm2": "pre_mlp_layernorm.weight",
}
TE = {"norm1": "self_attention.linear_qkv.layer_norm_weight", "norm2": "mlp.linear_fc1.layer_norm_weight"}


class Wrapper(nn.Module):
    """As Float16Module and DistributedDataParallel have the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def module_of(
    params: dict[str, torch.Tensor], spot: Spot, layers: list[int], dtype: Optional[torch.dtype] = None
) -> nn.Module:
    """A chunk with parameters of these names and shapes, full of NaN."""
    root = nn.Module()
    path = "model.layers" if spot.style == "verl" else "decoder.layers"
    parent, name = path.split(".")
    root.add_module(parent, nn.Module())
    setattr(root.get_submodule(parent), name, nn.ModuleList(nn.Module() for _ in layers))
    if spot.style == "mcore":
        for module, layer in zip(root.get_submodule(path), layers):  # type: ignore[arg-type]
            module.layer_number = layer + 1
    for full, value in params.items():
        module, *names = root, *full.split(".")
        for part in names[:-1]:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        param = nn.Parameter(torch.full_like(value, torch.nan, dtype=dtype or value.dtype))
        setattr(module, names[-1], param)
    return Wrapper(Wrapper(root)) if spot.style == "mcore" else root


def models_of(
    decoder: Decoder, spot: Spot, hf: dict[str, torch.Tensor], dtype: Optional[torch.dtype] = None
) -> list[nn.Module]:
    return [
        module_of(params, spot, layers, dtype)
        for params, layers in zip(expected(decoder, spot, hf), spot.chunks)
    ]


def inner(model: nn.Module) -> nn.Module:
    while hasattr(model, "module"):
        model = model.module
    return model


def differences(models: list[nn.Module], wanted: list[dict[str, torch.Tensor]]) -> list[str]:
    """Names of parameters that are not bit for bit what they must be."""
    found = []
    for model, params in zip(models, wanted):
        actual = dict(inner(model).named_parameters())
        assert set(actual) == set(params)
        found += [
            name
            for name, value in params.items()
            if not torch.equal(actual[name], value.to(actual[name].dtype))
        ]
    return found


def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A safetensors file, written by what its documentation says."""
    codes = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.int8: "I8"}
    codes[torch.float8_e4m3fn] = "F8_E4M3"
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for key, value in tensors.items():
        raw = value.contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else b""
        offsets = [len(data), len(data) + len(raw)]
        header[key] = {"dtype": codes[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_file(path: Path) -> dict[str, torch.Tensor]:
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    found = {}
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        value = torch.frombuffer(bytearray(data[start:stop]), dtype=dtypes[entry["dtype"]])
        found[key] = value.view(entry["shape"])
    return found


def read_folder(path: Path) -> dict[str, torch.Tensor]:
    """What `from_pretrained` would read."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return read_file(single)
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found: dict[str, torch.Tensor] = {}
    for name in names:
        found.update(read_file(path / name))
    assert {key: name for name in names for key in read_file(path / name)} == json.loads(index.read_text())[
        "weight_map"
    ]
    return found


def write_folder(path: Path, decoder: Decoder, tensors: dict[str, torch.Tensor], files: int = 1) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_text(json.dumps(decoder.config))
    if files == 1:
        write_file(path / "model.safetensors", tensors)
        return
    index = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {
            key: value for position, (key, value) in enumerate(tensors.items()) if position % files == number
        }
        write_file(path / name, part)
        index.update(dict.fromkeys(part, name))
    text = json.dumps({"metadata": {}, "weight_map": index})
    (path / "model.safetensors.index.json").write_text(text)


def aligned(folder: Path, but: tuple[str, ...] = ()) -> None:
    """Let the tensors of files begin at a multiple of 8 bytes; those of the named files at an odd byte."""
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + length]
        header += b" " * (-length % 8 + (path.name in but))
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
