"""The boxes of a scatter and their ways, derived without any rank."""

from __future__ import annotations

import torch

from torch_dcp_backport.transfer import Agreement, Layout, Mesh, TensorInfo, Want
from torch_dcp_backport.transfer._src.delivery import Delivery, Relay
from torch_dcp_backport.transfer._src.plan import WantTable, packed, unpacked

RANKS = tuple(range(8))
#: Two pipeline stages of two replicas of two shards each.
STAGES = (Mesh((2, 2), (0, 1, 2, 3)), Mesh((2, 2), (4, 5, 6, 7)))
SHAPE = (6, 4)


def wants_of(stage: int, names: tuple[str, ...] = ("a", "b")) -> dict[str, Want]:
    layout = Layout(SHAPE, STAGES[stage], (None, (0, 1)))
    return {f"{stage}.{name}": Want(layout, torch.float32) for name in names}


def delivery(rank: int, *tables: WantTable) -> Delivery:
    inventory = {key: TensorInfo(SHAPE, torch.float32) for table in tables for key in table.wants}
    return Delivery(RANKS, rank, inventory, Agreement(tables, 2**20, "cpu"), False)


def stages(relays: tuple[bool, bool] = (True, True)) -> list[WantTable]:
    return [WantTable(wants_of(number), STAGES[number].ranks, relays[number]) for number in (0, 1)]


def test_every_stage_relays_to_its_own_replicas() -> None:
    ways = [Relay(mesh, (0,)) for mesh in STAGES]
    keys = [["0.a", "0.b"], ["1.a", "1.b"]]
    for rank in RANKS:
        found, own = delivery(rank, *stages()), rank // 4
        (window,) = found.windows
        assert window.common == []
        # The source sees all ways, the others their own.
        assert list(window.ways.items()) == (list(zip(ways, keys)) if rank == 0 else [(ways[own], keys[own])])
        assert [found.receivers(way) for way in ways] == [[1], [4, 5]]
        assert [found.takes_part(way) for way in ways] == [own == 0, own == 1]
        boxes = list(found.boxes_of(rank, window.ways[ways[own]]))
        assert [key for key, *_ in boxes] == keys[own]
        assert {box.size for _, box, _ in boxes} == {(3, 4)}


def test_a_stage_that_cannot_relay_gets_everything_from_the_source() -> None:
    (window,) = delivery(0, *stages(relays=(True, False))).windows
    assert window.ways == {None: ["1.a", "1.b"], Relay(STAGES[0], (0,)): ["0.a", "0.b"]}


def test_a_tensor_of_two_stages_is_sent_by_the_source() -> None:
    # In the very layout of the stage's others, whose way it does not take.
    both = [
        table._replace(wants={**table.wants, "tied": table.wants[f"{number}.a"]})
        for number, table in enumerate(stages())
    ]
    found = delivery(3, *both)
    (window,) = found.windows
    assert window.ways[None] == ["tied"]
    assert found.receivers(None) == [1, 2, 3, 4, 5, 6, 7]
    assert [box.size for _, box, _ in found.boxes_of(6, window.ways[None])] == [(3, 4)]


def test_ranks_that_differ_in_what_is_no_want_share_what_all_want_whole() -> None:
    whole = {"w": Want(Layout(SHAPE), torch.float32)}
    found = delivery(
        0, WantTable(whole, (0, 1), True, ["a stage"]), WantTable(whole, (2, 3, 4, 5, 6, 7), True, [])
    )
    assert found.windows[0].common == ["w"]


def test_a_table_travels_as_rows() -> None:
    names = tuple(f"layers.{number}.weight" for number in range(1000))
    table = WantTable(wants_of(1, names), (4, 5, 6, 7), True, ["a stage"])
    assert unpacked(packed(table)) == table._replace(ranks=())
    assert len(packed(table)) < 20 * len(names)


def test_who_waits_for_a_replica_is_served_by_it() -> None:
    for dims in ((0,), (0, 1), (0, 2), (0, 1, 2)):
        relay = Relay(Mesh((2, 2, 2), RANKS), dims)
        for rank in RANKS:
            before, _ = relay.neighbours(rank)
            assert (before is None) == relay.starts_at(rank)
            if before is not None:
                dim, peer = before
                assert dim in relay.neighbours(peer)[1]


def test_a_tensor_without_elements_may_come_first_of_those_that_are_made() -> None:
    inventory = {"none": TensorInfo((0, 4), torch.float32), "some": TensorInfo(SHAPE, torch.float32)}
    wants = {key: Want(Layout(info.shape, None, ()), info.dtype) for key, info in inventory.items()}
    agreement = Agreement([WantTable(wants, RANKS)], 2**20, "cpu")
    windows = Delivery(RANKS, 0, inventory, agreement, by_window=True).windows
    assert [key for window in windows for key in window.common] == ["none", "some"]
