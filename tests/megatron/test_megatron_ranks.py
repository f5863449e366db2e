"""Hugging Face files to Megatron layouts on four ranks, and back, against torch.cat and chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import Decoder, Spot, differences, expected, models_of, read_folder, spot_of, write_folder

from torch_dcp_backport import transfer

QWEN2, QWEN3, LLAMA = (
    Decoder(),
    Decoder("qwen3", head_dim=6),
    Decoder("llama", heads=8, kv_heads=4, head_dim=2),
)
TIED = Decoder(tied=True, vocab=30)
SPARSE = Decoder("qwen2_moe", experts=4, expert_rows=6, shared_rows=10)
MIXED = Decoder("qwen3_moe", experts=6, expert_rows=4, dense=(0, 3))
SIX = Decoder(layers=6, tied=True)


def rank_of(spot: Spot, api: Any) -> dict[str, Any]:
    """What the caller has to say of a rank."""
    said: dict[str, Any] = {"parallel": api.Parallel(spot.tp_rank, spot.tp_size, spot.ep_rank, spot.ep_size)}
    if spot.style == "verl":
        said["layers"] = spot.chunks
    return said


def there_and_back(api: Any, folder: str, decoder: Decoder, files: str, how: dict[str, Any]) -> int:
    rank = dist.get_rank()
    spot = spot_of(decoder, rank=rank, **how)
    hf = decoder.tensors()
    models = models_of(decoder, spot, hf)
    source = folder if files != "rank0" or rank == 0 else folder + "-not-here"
    report = api.load_hf(models, source, **rank_of(spot, api), files="auto")
    assert differences(models, expected(decoder, spot, hf)) == []
    assert not report.left
    assert not report.kept
    target = f"{folder}-saved"
    saved = api.save_hf(models, target, like=folder, **rank_of(spot, api), how=api.Export(file_bytes=4000))
    assert (
        list(saved.keys) == sorted(saved.keys, key=list(decoder.shapes()).index)
        or decoder.model_type != "llama"
    )
    got = read_folder(Path(target))
    assert set(got) == set(hf)
    assert all(torch.equal(got[key], hf[key]) for key in hf)
    again = models_of(decoder, spot, hf)
    api.load_hf(again, target, **rank_of(spot, api))
    assert differences(again, expected(decoder, spot, hf)) == []
    return report.bytes_read


CASES: dict[str, tuple[Decoder, dict[str, Any]]] = {
    "tp 4": (LLAMA, {"style": "mcore", "tp": 4, "pp": 1}),
    "tp 2, pp 2": (QWEN2, {"style": "mcore", "tp": 2, "pp": 2}),
    "tp 2, pp 2, verl": (QWEN2, {"style": "verl", "tp": 2, "pp": 2}),
    "pp 4": (QWEN3, {"style": "mcore", "tp": 1, "pp": 4}),
    "tp 2, dp 2": (QWEN3, {"style": "verl", "tp": 2, "pp": 1}),
    "vpp 2": (QWEN2, {"style": "mcore", "tp": 2, "pp": 2, "vpp": 2}),
    "vpp 3, tied": (SIX, {"style": "mcore", "tp": 2, "pp": 2, "vpp": 3}),
    "vpp 2, verl": (QWEN2, {"style": "verl", "tp": 2, "pp": 2, "vpp": 2}),
    "uneven": (QWEN3, {"style": "mcore", "tp": 2, "pp": 2, "uneven": True}),
    "uneven, verl": (QWEN2, {"style": "verl", "tp": 2, "pp": 2, "uneven": True}),
    "tied, padded": (TIED, {"style": "mcore", "tp": 2, "pp": 2, "rows": 24}),
    "tied, padded, verl": (TIED, {"style": "verl", "tp": 4, "pp": 1, "rows": 16}),
    "experts, tp 2, ep 2": (SPARSE, {"style": "mcore", "tp": 2, "pp": 1, "ep": 2}),
    "experts, pp 2, ep 2": (MIXED, {"style": "mcore", "tp": 1, "pp": 2, "ep": 2}),
    "experts, tp 2, pp 2": (SPARSE, {"style": "mcore", "tp": 2, "pp": 2}),
    "KV heads < TP": (QWEN2, {"style": "mcore", "tp": 4, "pp": 1}),
    "KV heads < TP, verl": (QWEN2, {"style": "verl", "tp": 4, "pp": 1}),
}


@pytest.mark.parametrize("files", ["shared", "rank0"])
@pytest.mark.parametrize("case", CASES)
def test_there_and_back(ranks, tmp_path, case, files):
    decoder, how = CASES[case]
    write_folder(tmp_path / "hf", decoder, decoder.tensors(), files=3)
    read = ranks(there_and_back, str(tmp_path / "hf"), decoder, files, how)
    if files == "rank0":
        assert read[1:] == [0, 0, 0]


def sent(api: Any, folder: str, decoder: Decoder, how: dict[str, Any]) -> tuple[int, int]:
    """Bytes that this rank sent, and received."""
    spot = spot_of(decoder, "mcore", dist.get_rank(), **how)
    hf = decoder.tensors()
    models = models_of(decoder, spot, hf, torch.float32 if how["tp"] == 2 else None)
    api.load_hf(models, folder, **rank_of(spot, api), files="rank0")
    assert differences(models, expected(decoder, spot, hf)) == []
    report = transfer.last_report()
    assert report is not None
    return report.bytes_sent, report.bytes_received


@pytest.mark.parametrize("how", [{"tp": 1, "pp": 1}, {"tp": 2, "pp": 1}, {"tp": 1, "pp": 2}])
def test_replicas_pass_on_what_rank_0_sends_once(ranks, tmp_path, how):
    """Four replicas; two of two halves; two of two stages."""
    write_folder(tmp_path, TIED, TIED.tensors())
    whole = sum(value.nbytes for value in TIED.tensors().values())
    moved = ranks(sent, str(tmp_path), TIED, how)
    assert moved[0][0] <= whole
    # Rank 0 does not receive; the others what they hold, in fp32 from a replica.
    assert moved[0][1] == 0
    assert sum(sent for sent, _ in moved) == sum(received for _, received in moved)
    assert sum(sent > 0 for sent, _ in moved) > 1
