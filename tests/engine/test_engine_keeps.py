"""What an engine holds can be moved, exported, saved and loaded, and stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small
import torch
import torch.distributed as dist
from heard import heard

from torch_dcp_backport import compat, engine
from torch_dcp_backport.engine._src import export as exports
from torch_dcp_backport.engine._src import mesh


def there_and_back(api: Any, folder: Path, source: dict[str, Any], target: dict[str, Any]) -> Any:
    """Two steps, saved, one more; and that step once more after a load into an engine of another mesh."""
    made = small.made(folder, "AdamW", **source)
    small.trained(made, range(2))
    path = folder.parent / "global_step_2"
    made.save_checkpoint(path, global_step=2)
    last = small.trained(made, range(2, 3))
    again = small.made(folder, "AdamW", **target)
    again.load_checkpoint(path)
    return last, small.trained(again, range(2, 3))


@pytest.mark.parametrize(
    ("source", "target"),
    [({}, {}), ({"fsdp_size": 2}, {"fsdp_size": 2}), ({}, {"fsdp_size": 1}), ({"fsdp_size": 2}, {})],
    ids=str,
)
def test_the_next_step_after_a_load(ranks, tmp_path: Path, source: Any, target: Any) -> None:
    if small.cpu_fsdp.RELEASE < (2, 5) and (source or target):
        pytest.skip("FSDP2 of torch 2.4 has no state dict on a mesh of two dimensions")
    small.write(tmp_path / "m")
    for last, again in ranks(there_and_back, tmp_path / "m", source, target):
        if source == target:
            assert last["norms"] == again["norms"]
            assert all(torch.equal(value, again["weights"][name]) for name, value in last["weights"].items())
        small.same(again, last, 1e-6)


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def made_again(api: Any, folder: Path, sizes: list[int]) -> tuple[int, int, list[float]]:
    """Process groups after an engine of each size, and after more of them; the norms of the last ones."""
    for size in sizes:
        small.made(folder, fsdp_size=size)
    before = groups()
    for size in sizes * 3:
        made = small.made(folder, fsdp_size=size)
    after = groups()
    if dist.get_rank() == 1:
        mesh.meshes_of(dist.group.WORLD).clear()  # as if it had failed there
    made = small.made(folder, fsdp_size=sizes[0])
    return before, after, small.trained(made, range(1))["norms"]


def test_engines_leave_no_process_groups_behind(ranks, tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    for before, after, norms in ranks(made_again, tmp_path / "m", [2, 1, -1]):
        assert before == after
        assert norms == pytest.approx(small.alone(steps=1)["norms"], rel=1e-5)


def of_another_group(api: Any, folder: str) -> list[bool]:
    """A program may end its process group and begin another one."""
    grids = []
    for number in range(2):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=0, world_size=1)
        grids += [engine.arrange("cpu"), engine.arrange("cpu")]
        value = torch.ones(1)
        dist.all_reduce(value, group=grids[-1].data.get_group())
        dist.destroy_process_group()
    return [grids[place].mesh is grids[place + 1].mesh for place in range(3)]


def test_a_mesh_goes_with_its_process_group(pools, tmp_path: Path) -> None:
    assert pools.run(of_another_group, str(tmp_path), world=0) == [[True, False, True]]


def exported(api: Any, folder: Path, options: dict[str, Any], asked: dict[str, Any]) -> Any:
    made = small.made(folder, **options)
    found, adapter = made.get_per_tensor_param(**asked)
    assert adapter is None
    return [(name, tensor.dtype, tensor) for name, tensor in found]


@pytest.mark.parametrize(
    "options", [{}, {"fsdp_size": 2}, {"offload_policy": True}, {"param_offload": True}], ids=str
)
@pytest.mark.parametrize("to", [None, 2])
def test_an_export_has_every_name_once_and_whole_values(ranks, tmp_path: Path, options: Any, to: Any) -> None:
    small.write(tmp_path / "m")
    expected = dict(small.model().named_parameters(remove_duplicate=False))
    for rank, found in enumerate(ranks(exported, tmp_path / "m", options, {"to": to})):
        if to not in (None, rank):
            assert found == []
            continue
        assert sorted(name for name, *_ in found) == sorted(expected)
        assert {dtype for _, dtype, _ in found} == {torch.bfloat16}
        assert all(torch.equal(value, expected[name].bfloat16()) for name, _, value in found)
        values = {name: value for name, _, value in found}
        assert values["embed.weight"].data_ptr() == values["head.weight"].data_ptr()


def with_more(api: Any, folder: Path) -> list[str]:
    asked = {"lora": {"alpha": 32}, "tiled_mlp": {"enabled": True}, "enable_activation_offload": True}
    with heard("engine") as said:
        for _ in range(2):
            made = small.made(folder, model_config=asked, grad_offload=True)
            made.save_checkpoint(folder.parent / "global_step_1", global_step=1, max_ckpts_to_keep=1)
            made.load_checkpoint(folder.parent / "global_step_1", strict=True)
            dict(made.get_per_tensor_param(layered_summon=True, shards=2)[0])
    return list(said)


def test_what_has_no_effect_is_said_once_by_the_first_rank(pools, tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    assert pools.run(with_more, tmp_path / "m", world=2) == [
        [
            "grad_offload=True has no effect here: gradients go with their parameters",
            "no effect here: lora.alpha=32; they are Megatron's",
            "tiled_mlp.enabled=True has no effect here: saves memory in verl; not here",
            "enable_activation_offload=True has no effect here: the device is the CPU",
            "save_checkpoint: max_ckpts_to_keep=1 is not known, and has no effect here",
            "load_checkpoint: strict=True is not known, and has no effect here",
            "get_per_tensor_param: shards=2 is not known, and has no effect here",
        ],
        [],
    ]


def without_backward(api: Any, folder: Path) -> list[str]:
    with heard("engine") as said:
        small.made(folder, model_config={"enable_activation_offload": True}, forward_only=True)
    return list(said)


def test_activations_on_the_host_without_a_backward_pass_are_said_to_have_no_effect(
    pools, tmp_path: Path
) -> None:
    small.write(tmp_path / "m")
    why = "forward_only=True has no backward pass"
    says = f"enable_activation_offload=True has no effect here: {why}"
    assert pools.run(without_backward, tmp_path / "m", world=2) == [[says], []]


def in_buckets(api: Any, nbytes: int, first: int = 3) -> Any:
    """The names of each gather; whether the values are right. The first of the tensors may be larger."""
    mesh = engine.arrange("cpu").mesh
    tensors = {}
    for number in range(5):
        local = torch.full((3 if number else first, 4), float(number)) + dist.get_rank()
        size = torch.Size((4 * len(local), 4))
        tensors[f"t{number}"] = compat.as_dtensor(local, mesh, [compat.Shard(0)], size, (4, 1))
    tensors["plain"] = torch.arange(6)
    calls = []
    gather = exports.gather

    def counted(held: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(list(held))
        return gather(held, *args, **kwargs)

    exports.gather = counted
    try:
        found = dict(engine.whole_tensors(tensors, bucket_bytes=nbytes, dtype=torch.float64))
    finally:
        exports.gather = gather
    plain = torch.equal(found.pop("plain"), torch.arange(6))
    same = True
    for name, value in found.items():
        ranks = torch.arange(4.0, dtype=torch.float64).repeat_interleave(len(value) // 4)[:, None]
        same = same and torch.equal(value, ranks.expand(-1, 4) + int(name[1]))
    return calls, same and len(found) == 5, plain


def test_buckets_have_the_bytes_that_travel(ranks) -> None:
    for calls, same, plain in ranks(in_buckets, 2 * 12 * 4 * 8):
        assert [len(call) for call in calls] == [2, 2, 2]
        assert same
        assert plain
    for calls, same, _ in ranks(in_buckets, 800, first=9):
        # The loop that reads them holds the large one until it has the next.
        assert calls == [["t0"], ["t1"], ["t2", "t3"], ["t4", "plain"]]
        assert same
    for calls, same, _ in ranks(in_buckets, 1):
        assert [len(call) for call in calls] == [1] * 6
        assert same


def inferred(api: Any, folder: Path, is_jagged: bool, limit: dict[str, Any]) -> Any:
    made = small.made(folder, **limit)
    data: Any = {**small.own_rows(small.batch(0), made), "calculate_entropy": True}
    asked = small.jagged(small.own_rows(small.batch(0), made)) if is_jagged else data
    if is_jagged:
        asked["calculate_entropy"] = True
    with made.eval_mode():
        output = made.infer_batch(asked)["model_output"]
    if is_jagged:
        output = {name: [row.clone() for row in value.unbind()] for name, value in output.items()}
    with torch.no_grad():
        positions = (data["attention_mask"].cumsum(1) - 1).clamp_min(0)
        logits = small.model()(data["input_ids"], data["attention_mask"], positions).logits.log_softmax(-1)
    logs = logits[:, :-1].gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    return data, output, torch.nn.functional.pad(logs, (0, 1)), -(logits.exp() * logits).sum(-1)


@pytest.mark.parametrize("is_jagged", [False, True])
@pytest.mark.parametrize("limit", [{}, {"max_token_len_per_gpu": 30}], ids=str)
def test_outputs_are_in_the_order_of_the_rows(ranks, tmp_path: Path, is_jagged: bool, limit: Any) -> None:
    small.write(tmp_path / "m")
    for data, output, logs, entropy in ranks(inferred, tmp_path / "m", is_jagged, limit):
        for row, there in enumerate(data["attention_mask"].bool()):
            columns = there.nonzero()[:, 0]
            for name, expected in (("log_probs", logs), ("entropy", entropy)):
                got = output[name][row] if is_jagged else output[name][row][columns]
                want = expected[row][columns]
                if name == "log_probs":
                    assert got[-1] == 0  # nothing comes after it
                    got, want = got[:-1], want[:-1]
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_jagged_rows_train_as_padded_ones(ranks, tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    for found in ranks(trained_jagged, tmp_path / "m"):
        small.same(found, small.alone())


def trained_jagged(api: Any, folder: Path) -> Any:
    made = small.made(folder, max_token_len_per_gpu=24)
    return small.trained(made, rows=lambda data, made: small.jagged(small.own_rows(data, made)))
