"""The last import of the server that ranks are forked from: the collector passes over all that came before.

Else the passes of each rank walk torch, and write to pages that the ranks share; and where torch was imported
before ours, each rank looks for early bindings among all of torch's objects. Tests of that search are in
tests/imports, whose interpreters are not forked from this server.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
