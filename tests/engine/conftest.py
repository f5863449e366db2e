"""Rank processes, started once for all tests of this folder."""

from __future__ import annotations

import pool

pools, ranks = pool.fixtures("torch_dcp_backport.engine", timeout=20.0, limit=120.0)
