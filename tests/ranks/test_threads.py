"""Two threads of one process: one after the other, or the second one is refused."""

from __future__ import annotations

import threading
from typing import Any, Callable

import torch.distributed as dist
from models import build, check_values, full_state
from pool import on_ranks
from test_bad_input import error_of

from torch_dcp_backport.transfer._src.staging import Staging


def in_thread(call: Callable[[], object]) -> tuple[str, str]:
    """The error of a call in another thread, if any."""
    found = []
    thread = threading.Thread(target=lambda: found.append(error_of(call)))
    thread.start()
    thread.join()
    return found[0]


def load(api: Any, model: Any, state: dict[str, Any]) -> None:
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    api.set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)


def both_at_once(api: Any, second: str) -> tuple[str, str]:
    """A load, and in the middle of it another call from another thread."""
    first, other, state = build(), build(), full_state()
    refused: list[tuple[str, str]] = []

    def call() -> None:
        if second == "load":
            load(api, other, state)
        else:
            api.get_model_state_dict(other, options=api.StateDictOptions(full_state_dict=True))

    def watched(real: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            if not refused:
                refused.append(in_thread(call))
            real(*args)

        return run

    real = Staging.pack, Staging.unpack
    Staging.pack, Staging.unpack = map(watched, real)
    try:
        load(api, first, state)
    finally:
        Staging.pack, Staging.unpack = real
    check_values(first, state)
    assert not any(param.full_tensor().any() for param in other.parameters())
    return refused[0]


def test_a_second_transfer_at_the_same_time_is_refused(ranks):
    for second in ("load", "get"):
        for kind, text in ranks(both_at_once, second):
            assert kind == "RuntimeError"
            assert (
                "nothing was changed; another thread of this process is in the middle of a transfer" in text
            )
            assert "(cannot load this model state dict)" in text


@on_ranks()
def test_threads_may_take_turns(api: Any) -> None:
    state = full_state()
    for _ in range(3):
        model = build()
        assert in_thread(lambda: load(api, model, state)) == ("", "")  # noqa: B023
        check_values(model, state)
