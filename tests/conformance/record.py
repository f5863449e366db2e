#!/usr/bin/env python3
"""Record what torch, or ours, gives in every scenario, in the environment that runs this.

record.py native   torch's own results (torch >= 2.7): recorded/native-RELEASE.json
record.py stock    a broken torch's own, as verdicts only: recorded/stock-RELEASE.json
record.py ours     ours on a broken torch, where they differ from native: recorded/ours-RELEASE.json
record.py try      ours, printed and not written

More words choose scenarios by parts of their names; the others' records stay as they are.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import report  # noqa: E402
from canonical import same  # noqa: E402
from expected import AS_NATIVE, BASE, Expectations, load, save, sign, without_text  # noqa: E402
from runner import NATIVE, RELEASE, run_all  # noqa: E402
from scenario import all_scenarios  # noqa: E402


def run_chosen(way: str, words: list[str]) -> dict[str, Any]:
    keys = [key for key in all_scenarios() if not words or any(word in key for word in words)]
    results = run_all(way, keys)
    return {key: results[key] for key in keys}


def update(name: str, chosen: Mapping[str, Any], ran: Collection[str]) -> None:
    """Write a record anew where scenarios ran, in the order of all scenarios."""
    kept = {key: one for key, one in load(name).items() if key not in ran}
    found = {**kept, **chosen}
    save(name, {key: found[key] for key in all_scenarios() if key in found})


def main() -> int:
    verb, words = sys.argv[1], sys.argv[2:]
    logging.disable(logging.WARNING)
    expectations = Expectations(RELEASE)
    if verb == "native":
        assert NATIVE, f"torch {RELEASE} is not the standard"
        native = {key: without_text(one) for key, one in run_chosen("torch", words).items()}
        update(f"native-{RELEASE}", native, native)
        sign(RELEASE)
    elif verb == "stock":
        verdicts = {}
        for key, one in run_chosen("torch", words).items():
            equal = expectations.equals_native(key, without_text(one))
            verdicts[key] = "equal" if equal else "fails" if "error" in one else "differs"
        update(f"stock-{RELEASE}", verdicts, verdicts)
    elif verb == "ours":
        pinned = {} if RELEASE == BASE else Expectations(BASE).pinned
        found = {}
        results = run_chosen("shim", words)
        for key, one in results.items():
            got = without_text(one)
            if expectations.equals_native(key, got):
                if key in pinned:
                    found[key] = AS_NATIVE
            elif key not in pinned or not same(pinned[key], got):
                found[key] = got
        update(f"ours-{RELEASE}", found, results)
    elif verb == "docs":
        for path, text in report.files().items():
            path.write_text(text)
    elif verb == "try":
        for key, one in run_chosen("direct" if NATIVE else "shim", words).items():
            verdict = expectations.verdict(key, one)
            if verdict.kind == "wrong":
                print(f"* {key}\n{verdict.text}")
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
