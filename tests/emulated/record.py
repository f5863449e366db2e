"""Print the table of promises.py as it is now: python tests/emulated/record.py [CASE...], in a lane.

    python3 tools/lanes.py run 2.6 -- env PYTHONPATH=.:tests python tests/emulated/record.py

It judges nothing: errors and violations go to stderr.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from emulated.promises import ALONE, BESIDE, Promise
from emulated.runner import Seen, Setting, problems, run

CASES = Path(__file__).with_name("cases.py")


def functions_of_ranks(path: Path) -> list[str]:
    """The names of a module's functions of (rank, world), without importing it."""
    return [
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and [each.arg for each in node.args.args] == ["rank", "world"]
    ]


def promise_of(seen: list[Seen]) -> Promise:
    kinds = sorted({kind for each in seen for kind in each.sent})
    return Promise(
        tuple(each.communicators for each in seen),
        tuple(each.sends_to for each in seen),
        tuple(each.receives_from for each in seen),
        {kind: sum(each.sent.get(kind, 0) for each in seen) for kind in kinds},
    )


def setting_of(case: str, backend: str) -> Setting:
    return Setting(backend, sets_device="without_set_device" not in case)


def main() -> None:
    print("Promises = {")
    for case in sys.argv[1:] or functions_of_ranks(CASES):
        print(f'    "{case}": {{')
        for name, backend in (("ALONE", ALONE), ("BESIDE", BESIDE)):
            seen = run(f"emulated.cases.{case}", setting_of(case, backend))
            if problems(seen):
                print(f"{case}, {backend}:\n{problems(seen)}", file=sys.stderr)
            promise = promise_of(seen)
            values = (promise.communicators, promise.sends_to, promise.receives_from, promise.sent)
            print(f"        {name}: Promise({', '.join(map(str, values))}),".replace("'", '"'), flush=True)
        print("    },")
    print("}")


if __name__ == "__main__":
    main()
