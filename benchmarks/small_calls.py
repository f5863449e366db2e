#!/usr/bin/env python3
"""The cost of a call on a small model in one process, over that of stock torch.

    python3 tools/lanes.py run 2.6 -- python benchmarks/small_calls.py

Programs that load one parameter at a time make many such calls. Both run in fresh processes that take turns;
a figure is the median of all turns' ratios of processor time, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

CALLS = {
    "get_model_state_dict": lambda api, m, o, full, ms, os_: api.get_model_state_dict(m, options=full),
    "get_optimizer_state_dict": lambda api, m, o, full, ms, os_: api.get_optimizer_state_dict(
        m, o, options=full
    ),
    "set_model_state_dict": lambda api, m, o, full, ms, os_: api.set_model_state_dict(m, ms, options=full),
    "set_optimizer_state_dict": lambda api, m, o, full, ms, os_: api.set_optimizer_state_dict(
        m, o, os_, options=full
    ),
    "set_state_dict": lambda api, m, o, full, ms, os_: api.set_state_dict(
        m, o, model_state_dict=ms, optim_state_dict=os_, options=full
    ),
}


def seconds(call: Callable[[], Any], times: int = 200) -> float:
    """The processor time of a call: the second best of seven rounds."""
    rounds = []
    for _ in range(7):
        start = time.process_time()
        for _ in range(times):
            call()
        rounds.append((time.process_time() - start) / times)
    return sorted(rounds)[1]


def measure() -> dict[str, float]:
    """Every call's seconds in this process, for a linear layer with a parameter beside it, and AdamW."""
    import torch

    if os.environ["TORCH_DCP_BACKPORT"] != "off":
        import torch_dcp_backport  # noqa: F401
    import torch.distributed.checkpoint.state_dict as api

    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 4)
    model.beside = torch.nn.Parameter(torch.ones(4, 4))
    optim = torch.optim.AdamW(model.parameters())
    (model(torch.ones(4)) @ model.beside).sum().backward()
    optim.step()
    full = api.StateDictOptions(full_state_dict=True)
    states = api.get_state_dict(model, optim, options=full)
    return {
        name: seconds(lambda call=call: call(api, model, optim, full, *states))
        for name, call in CALLS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure()))
        return
    turns = [{switch: child(switch) for switch in ("off", "auto")} for _ in range(args.turns)]
    for name in CALLS:
        ratios = [turn["auto"][name] / turn["off"][name] for turn in turns]
        stock = statistics.median(turn["off"][name] for turn in turns)
        print(
            f"{name:26} {statistics.median(ratios):.2f} of stock's {stock * 1e6:.0f} us "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


def child(switch: str) -> dict[str, float]:
    answer = subprocess.run(
        [sys.executable, __file__, "--child"],
        env={**os.environ, "TORCH_DCP_BACKPORT": switch},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return dict(json.loads(answer.splitlines()[-1]))


if __name__ == "__main__":
    main()
