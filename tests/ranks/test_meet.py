"""Collectives of objects: every value or every problem, on every rank, however a rank comes to them."""

from __future__ import annotations

import logging
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from heard import heard
from pool import Pool, RankError

from torch_dcp_backport.transfer import Call, Problem, TransferError, warn_on_first
from torch_dcp_backport.transfer._src import object_collectives, tree
from torch_dcp_backport.transfer._src.attempt import Attempt
from torch_dcp_backport.transfer._src.call import gc_context
from torch_dcp_backport.transfer._src.errors import CollectiveError
from torch_dcp_backport.transfer._src.object_collectives import Refusal, describing_files

WORLD = 4
#: Of the rank that is told as gone.
TIMEOUT = 8.0
SO_FAR = "files are as they were"


class Wrong(CollectiveError):
    """The errors of some room."""


class Lock:
    """A value that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("a lock stays where it is")


def begin(kind: type[Exception] = Wrong) -> Call:
    return Call("cannot count", "count", (None,) if dist.is_initialized() else (), kind=kind)


def failing(rank: int) -> int:
    raise ValueError(f"no count on {rank}")


def refusing(values: Mapping[int, Any]) -> Any:
    raise Refusal([(rank, Problem("too few", "w", str(own))) for rank, own in values.items() if own > 1])


def all_gather(call: Call, value: object = None, **options: Any) -> Any:
    return dict(call.all_gather_object("counting", value, so_far=SO_FAR, **options))


def gather(call: Call, value: object, decide: Callable[[Mapping[int, Any]], Any]) -> Any:
    return call.gather_object("counting", value, decide, so_far=SO_FAR)


def barrier(call: Call, **options: Any) -> None:
    call.barrier("counting", so_far=SO_FAR, **options)


# --- what the ranks do: each returns what a rank has at the end ---


def values(call: Call, rank: int) -> Any:
    return all_gather(call, call.attempt(lambda: 10 * rank))


def nothing(call: Call, rank: int) -> Any:
    return all_gather(call)


def no_value(call: Call, rank: int) -> Any:
    barrier(call, must_agree={"step": "1"})


def only_some(call: Call, rank: int) -> Any:
    return all_gather(call, rank if rank % 2 else None)


def decided(call: Call, rank: int) -> Any:
    def total(counts: Mapping[int, int]) -> int:
        assert rank == 0
        return sum(counts.values())

    return gather(call, rank, total)


def each(call: Call, rank: int) -> Any:
    def squares(numbers: Mapping[int, int]) -> Mapping[int, int]:
        return {other: own * own for other, own in numbers.items() if own != 1}

    return call.scatter_object("counting", rank, squares, so_far=SO_FAR)


def broadcast(call: Call, rank: int) -> Any:
    return call.broadcast_object("telling", {"w": rank + 7})


def broadcast_fails(call: Call, rank: int) -> Any:
    with call.guard():
        if rank == 0:
            failing(rank)
    return call.broadcast_object("telling", rank)


def broadcast_no_pickle(call: Call, rank: int) -> Any:
    return call.broadcast_object("telling", {"v": 1, "w": Lock()})


def one_fails(call: Call, rank: int) -> Any:
    own: Attempt[int] = call.attempt(failing if rank == 2 else abs, rank, key="w")
    # An attempt of what failed is no second problem.
    return all_gather(call, call.attempt(lambda value: value + 1, own))


def set_in_contexts(call: Call, rank: int) -> Any:
    with call.guard() as own:
        own.set(5 * rank)
    with call.guard() as twice:
        twice.set(2 * own.value)
    return all_gather(call, twice)


def one_context_fails(call: Call, rank: int) -> Any:
    with call.guard("w") as own:
        own.set(failing(rank) if rank == 2 else rank)
    with call.guard() as twice:
        # What failed is no second problem where its value is read.
        twice.set(2 * own.value)
    return all_gather(call, twice)


def one_sets_nothing(call: Call, rank: int) -> Any:
    with call.guard() as own:
        if rank != 2:
            own.set(None)
    return all_gather(call, own)


def one_stops(call: Call, rank: int) -> Any:
    own = call.attempt(next, iter([rank] if rank != 2 else []), key="w")
    # A StopIteration ends no list of arguments either: the function would be called without.
    return all_gather(call, call.attempt(lambda value=7: value, own))


def many_fail(call: Call, rank: int) -> Any:
    with call.guard():
        if rank:
            raise OSError("the disk is full")
    return gather(call, None, refusing)


def many_fail_without_value(call: Call, rank: int) -> Any:
    with call.guard():
        if rank:
            raise OSError("the disk is full")
    barrier(call)


def no_second_word(call: Call, rank: int) -> Any:
    with call.guard():
        if rank == 1:
            raise Wrong("the text stands alone")
    barrier(call)


def heard_before(call: Call, rank: int) -> Any:
    """An error that every rank has goes through, and no rank waits."""
    with call.guard():
        one_fails(call, rank)


def narrower(call: Call, rank: int) -> Any:
    """An error that a narrower group has is a problem of its ranks: the others wait."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with call.guard(), Call("cannot pair", "count", (pairs[rank // 2],), kind=Wrong) as pair:
        all_gather(pair, pair.attempt(failing if rank == 1 else abs, rank))
    barrier(call)


def the_first_fails(call: Call, rank: int) -> Any:
    gather(call, rank, lambda _: failing(rank))


def refused(call: Call, rank: int) -> Any:
    gather(call, rank, refusing)


def no_pickle(call: Call, rank: int) -> Any:
    all_gather(call, Lock() if rank == 3 else rank)


def no_pickle_back(call: Call, rank: int) -> Any:
    gather(call, None, lambda _: Lock())


def unlike(call: Call, rank: int) -> Any:
    all_gather(call, must_agree={"step": "2" if rank == 3 else "1", "folder": "f"})


def unlike_without_value(call: Call, rank: int) -> Any:
    barrier(call, must_agree={"step": "2" if rank == 3 else "1", "folder": "f"})


def unlike_attempts(call: Call, rank: int) -> Any:
    barrier(call, must_agree=call.attempt(lambda: {"step": str(rank // 2)}))


def elsewhere(call: Call, rank: int) -> Any:
    call.all_gather_object("leaving" if rank == 1 else "counting", so_far=SO_FAR)


def elsewhere_without_value(call: Call, rank: int) -> Any:
    call.barrier("leaving" if rank == 1 else "counting", so_far=SO_FAR)


def elsewhere_in_another_way(call: Call, rank: int) -> Any:
    if rank == 1:
        call.barrier("leaving", so_far=SO_FAR)
    else:
        gather(call, rank, len)


def of_another_kind(call: Call, rank: int) -> Any:
    with call.guard():
        if rank == 2:
            failing(rank)
    try:
        call.barrier("counting", kind=TransferError)
    except TransferError as error:
        return str(error)


def numbers(call: Call, rank: int) -> Any:
    return call.all_gather_numbers(call.attempt(lambda: [rank, 2**32 - 1]), 2)


def numbers_fail(call: Call, rank: int) -> Any:
    call.all_gather_numbers(call.attempt(lambda: [failing(rank) if rank == 2 else 0]), 1)


def said(call: Call, rank: int) -> Any:
    with describing_files("step 3 is there"):
        many_fail(call, rank)


HEAD = "cannot count: {} problem(s), files are as they were."
UNCHANGED = "cannot count: 1 problem(s), nothing was changed."


class Case(NamedTuple):
    run: Callable[[Call, int], Any]
    #: By rank; or one text for all.
    outcome: Any


CASES = [
    Case(values, [{0: 0, 1: 10, 2: 20, 3: 30}] * WORLD),
    Case(nothing, [dict.fromkeys(range(WORLD))] * WORLD),
    Case(no_value, [None] * WORLD),
    Case(broadcast, [{"w": 7}] * WORLD),
    Case(broadcast_fails, f"{UNCHANGED}\n  rank 0: ValueError: no count on 0"),
    Case(
        broadcast_no_pickle,
        f"{UNCHANGED}\n  rank 0: a value that cannot be pickled for the other ranks: w "
        "(a lock stays where it is)",
    ),
    Case(only_some, [{0: None, 1: 1, 2: None, 3: 3}] * WORLD),
    Case(decided, [6] * WORLD),
    Case(each, [0, None, 4, 9]),
    Case(one_fails, f"{HEAD.format(1)}\n  rank 2: ValueError: no count on 2: w"),
    Case(set_in_contexts, [{0: 0, 1: 10, 2: 20, 3: 30}] * WORLD),
    Case(one_context_fails, f"{HEAD.format(1)}\n  rank 2: ValueError: no count on 2: w"),
    Case(
        one_sets_nothing,
        f"{HEAD.format(1)}\n  rank 2: RuntimeError: nothing was set: "
        "the code within the context did not say what it made",
    ),
    Case(one_stops, f"{HEAD.format(1)}\n  rank 2: StopIteration: : w"),
    Case(many_fail, f"{HEAD.format(1)}\n  ranks 1-3: OSError: the disk is full"),
    Case(many_fail_without_value, f"{HEAD.format(1)}\n  ranks 1-3: OSError: the disk is full"),
    Case(no_second_word, f"{HEAD.format(1)}\n  rank 1: the text stands alone"),
    Case(heard_before, f"{HEAD.format(1)}\n  rank 2: ValueError: no count on 2: w"),
    Case(
        narrower,
        f"{HEAD.format(1)}\n  ranks 0-1: cannot pair: 1 problem(s), files are as they were.\n"
        "  rank 1: ValueError: no count on 1",
    ),
    Case(the_first_fails, f"{HEAD.format(1)}\n  rank 0: ValueError: no count on 0"),
    Case(refused, f"{HEAD.format(2)}\n  rank 2: too few: w (2)\n  rank 3: too few: w (3)"),
    Case(no_pickle, f"{HEAD.format(1)}\n  rank 3: TypeError: a lock stays where it is"),
    Case(no_pickle_back, f"{HEAD.format(1)}\n  rank 0: TypeError: a lock stays where it is"),
    Case(
        unlike,
        f"{HEAD.format(1)}\n  rank 3: not the same on every rank: step (expected 1 as on rank 0, got 2)",
    ),
    Case(
        unlike_without_value,
        f"{HEAD.format(1)}\n  rank 3: not the same on every rank: step (expected 1 as on rank 0, got 2)",
    ),
    Case(
        unlike_attempts,
        f"{HEAD.format(1)}\n  ranks 2-3: not the same on every rank: step (expected 0 as on rank 0, got 1)",
    ),
    Case(
        elsewhere,
        f"{HEAD.format(1)}\n  rank 1: the rank is somewhere else in its calls "
        "(expected counting, got leaving)",
    ),
    Case(
        elsewhere_without_value,
        f"{HEAD.format(1)}\n  rank 1: the rank is somewhere else in its calls "
        "(expected counting, got leaving)",
    ),
    Case(
        elsewhere_in_another_way,
        f"{HEAD.format(1)}\n  rank 1: the rank is somewhere else in its calls "
        "(expected counting, got leaving)",
    ),
    Case(of_another_kind, [f"{UNCHANGED}\n  rank 2: ValueError: no count on 2"] * WORLD),
    Case(numbers, [{rank: [rank, 2**32 - 1] for rank in range(WORLD)}] * WORLD),
    Case(numbers_fail, f"{UNCHANGED}\n  rank 2: ValueError: no count on 2"),
    Case(said, "cannot count: 1 problem(s), step 3 is there.\n  ranks 1-3: OSError: the disk is full"),
]


def outcome(_: Any, name: str) -> Any:
    """The result of a case on this rank; or the text of its error, which every rank has."""
    case = next(case for case in CASES if case.run.__name__ == name)
    with begin() as call:
        try:
            return case.run(call, call.rank)
        except Wrong as error:
            return str(error) if error.is_agreed else f"not agreed: {error}"
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.run.__name__)
def test_every_value_or_every_problem_on_every_rank(ranks: Any, case: Case) -> None:
    expected = [case.outcome] * WORLD if isinstance(case.outcome, str) else case.outcome
    got = ranks(outcome, case.run.__name__, world=WORLD)
    assert got == expected


def alone(_: Any) -> list[Any]:
    """A process without any group: the same calls."""
    with begin() as call:
        assert call.ranks == (0,)
        assert call.is_first
        results = [run(call, 0) for run in (values, nothing, no_value, decided, each, broadcast, numbers)]
    for run in (the_first_fails, no_pickle_back):
        with begin() as call:
            try:
                run(call, 0)
            except Wrong as error:
                results.append(str(error).splitlines()[1])
    return results


def warned(_: Any) -> list[str]:
    """Of a pair of ranks, in its call and without a call; of a call that no other rank takes part in."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    log = logging.getLogger("torch_dcp_backport.warned")
    with heard("warned") as said:
        with Call("cannot pair", "count", (pair,)) as call:
            call.warn_once(log, "in a call")
        warn_on_first(log, "of a group", pair)
        with Call("cannot do it alone", "count", ()) as call:
            call.warn_once(log, "alone")
    return said


def test_the_first_rank_of_a_group_warns_and_each_rank_without_one(ranks: Any) -> None:
    firsts = ["in a call", "of a group", "alone"]
    assert ranks(warned, world=WORLD) == [firsts, ["alone"], firsts, ["alone"]]


def test_a_process_without_a_group_meets_itself(pools: Any) -> None:
    fails = "  rank 0: ValueError: no count on 0", "  rank 0: TypeError: a lock stays where it is"
    assert pools.get(0).run(alone) == [[{0: 0}, {0: None}, None, 0, 0, {"w": 7}, {0: [0, 2**32 - 1]}, *fails]]


def kinds(_: Any) -> list[str]:
    """Of a room without an error of its own."""
    with begin(RuntimeError) as call:
        try:
            one_fails(call, call.rank)
        except RuntimeError as error:
            return [type(error).__name__, str(error.__cause__)]
    return []


def test_the_kind_of_error_is_the_calls_and_its_cause_is_this_ranks(ranks: Any) -> None:
    others = ["RuntimeError", "None"]
    assert ranks(kinds, world=WORLD) == [others, others, ["RuntimeError", "no count on 2"], others]


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(WORLD, "torch_dcp_backport.state_dict", timeout=TIMEOUT, limit=60.0)
    yield pool
    pool.close()


def told(_: Any, victim: int, kind: str, slow: tuple[int, ...] = ()) -> None:
    """A rank is killed before the meeting: the error of the others."""
    with begin({"Wrong": Wrong, "RuntimeError": RuntimeError}[kind]) as call:
        if call.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if call.rank in slow:
            time.sleep(1.5)
        try:
            all_gather(call, call.rank)
        except (Wrong, RuntimeError) as error:
            text = str(error).replace("\n", " ")
            raise AssertionError(f"TOLD {type(error).__name__} {text}") from None


TOLD = "cannot count: 1 problem(s), files are as they were.   rank 2: the rank is gone, or too late,"
UNHEARD = "cannot count: rank 0 is gone, or too late, while counting; files are as they were"


@pytest.mark.parametrize(
    ("victim", "kind", "text"),
    [
        (2, "Wrong", f"TOLD Wrong {TOLD}"),
        (2, "RuntimeError", f"TOLD RuntimeError {TOLD}"),
        (0, "Wrong", f"TOLD Wrong {UNHEARD}"),
        (0, "RuntimeError", f"TOLD TransferError {UNHEARD}"),
    ],
)
def test_a_rank_that_is_gone_is_named(pool: Pool, victim: int, kind: str, text: str) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(told, victim, kind)
    assert str(caught.value).count(text) == WORLD - 1, str(caught.value)


def told_within_a_save(_: Any) -> None:
    """The first rank is killed while it publishes, in a save whose errors say that nothing was saved."""
    with begin() as call, describing_files("step 3 was not saved"):
        if call.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            call.gather_object("publishing", None, len, unheard="list the steps")
        except Wrong as error:
            raise AssertionError(f"TOLD {error}") from None


def test_where_the_first_rank_is_gone_no_error_says_what_is_on_the_disk(pool: Pool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(told_within_a_save)
    text = "TOLD cannot count: rank 0 is gone, or too late, while publishing; list the steps"
    assert str(caught.value).count(text) == WORLD - 1, str(caught.value)


@pytest.mark.parametrize("slow", [(0,), (1, 3)])
def test_ranks_that_are_slow_are_not_named_beside_the_one_that_is_gone(
    pool: Pool, slow: tuple[int, ...]
) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(told, 2, "Wrong", slow)
    assert str(caught.value).count(f"TOLD Wrong {TOLD}") == WORLD - 1, str(caught.value)


def killed_on_the_way(_: Any, moment: str) -> None:
    """Rank 2, through which rank 3 hears, is killed within a meeting: the error of those that have one."""
    with begin() as call:
        if call.rank == 2:
            place, name = (
                (object_collectives.Round, "scatter") if moment == "before it answers" else (tree, "_send")
            )
            setattr(place, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        own = b"x" * (tree.LARGE + 1) if call.rank == 3 and moment != "before it answers" else b""
        try:
            answer = gather(call, own, lambda _: "all is well")
        except Wrong as error:
            text = str(error).replace("\n", " ")
            raise AssertionError(f"TOLD {error.is_agreed} {text}") from None
        assert answer == "all is well"


def test_an_error_of_one_rank_alone_is_not_taken_for_that_of_all(pool: Pool) -> None:
    """Others have their answers: what this rank wrote may be a part of a checkpoint."""
    with pytest.raises(RankError) as caught:
        pool.run(killed_on_the_way, "before it answers")
    assert str(caught.value).count("AssertionError: TOLD") == 1, str(caught.value)
    assert "TOLD False cannot count: rank 2 is gone, or too late, while counting;" in str(caught.value)


def test_a_rank_below_one_that_is_gone_hears_of_it(pool: Pool) -> None:
    """Also where it waits for the first rank, which has not heard of it."""
    with pytest.raises(RankError) as caught:
        pool.run(killed_on_the_way, "before it sends")
    assert str(caught.value).count(f"TOLD True {TOLD}") == WORLD - 1, str(caught.value)


def test_what_the_failed_keys_of_a_call_touched_is_let_go() -> None:
    touched: list[weakref.ref[Lock]] = []

    def failing_copy() -> None:
        held = Lock()
        touched.append(weakref.ref(held))
        raise OSError("no room")

    def alive() -> int:
        return sum(ref() is not None for ref in touched)

    with gc_context(), Call("cannot copy", "copy", ()) as call:
        for key in "abc":
            with call.guard(key):
                failing_copy()
            call.attempt(failing_copy, key=key)
        # That of the cause.
        assert (len(call.problems), alive()) == (6, 1)
