"""Bounded movement of boxes of global tensors between ranks.

Knows tensors, layouts and process groups. Must never know what a model or an optimizer is.
"""

from torch_dcp_backport.private_members import require

require("transfer")

from torch_dcp_backport.transfer._src.errors import TransferError
from torch_dcp_backport.transfer._src.report import Report, last_report
from torch_dcp_backport.transfer._src.reshard import reshard
from torch_dcp_backport.transfer._src.settings import Progress, configure

# For the rooms beside it, and not public: each as itself, so that type checkers see it here.
# isort: off
from torch_dcp_backport.transfer._src import settings as settings
from torch_dcp_backport.transfer._src.attempt import Attempt as Attempt
from torch_dcp_backport.transfer._src.chunks import (
    Key as Key,
    Piece as Piece,
    chunk_bytes as chunk_bytes,
    chunks as chunks,
    moved as moved,
)
from torch_dcp_backport.transfer._src.call import Call as Call, gc_context as gc_context
from torch_dcp_backport.transfer._src.errors import (
    CollectiveError as CollectiveError,
    Common as Common,
    DOUBTFUL as DOUBTFUL,
    Failure as Failure,
    Findings as Findings,
    NOTHING as NOTHING,
    Problem as Problem,
    SHOWN as SHOWN,
    UNCHANGED as UNCHANGED,
    as_transfer_error as as_transfer_error,
    out_of_order as out_of_order,
    problem_of as problem_of,
    raise_together as raise_together,
    spell as spell,
    spell_broken_off as spell_broken_off,
    spell_key as spell_key,
)
from torch_dcp_backport.transfer._src.exchange import Route as Route
from torch_dcp_backport.transfer._src.gather import describe as describe, gather as gather
from torch_dcp_backport.transfer._src.groups import (
    Group as Group,
    backend_of as backend_of,
    comm_device_type as comm_device_type,
    device_in as device_in,
    device_types as device_types,
    group_ranks as group_ranks,
    groups_of as groups_of,
    is_first as is_first,
    members as members,
    note_device as note_device,
    source_of as source_of,
    warn_on_first as warn_on_first,
)
from torch_dcp_backport.transfer._src.lanes import Lane as Lane, lane_of as lane_of
from torch_dcp_backport.transfer._src.layout import (
    Box as Box,
    Layout as Layout,
    Mesh as Mesh,
    Placement as Placement,
    layout_at as layout_at,
    layout_of as layout_of,
    mesh_of as mesh_of,
    misfit as misfit,
    row_major as row_major,
    whole as whole,
)
from torch_dcp_backport.transfer._src.link import BrokenLink as BrokenLink, Link as Link
from torch_dcp_backport.transfer._src.memories import Memories as Memories, Memory as Memory, move as move
from torch_dcp_backport.transfer._src.memory import (
    as_bytes as as_bytes,
    has_slices as has_slices,
    has_values as has_values,
    is_dense as is_dense,
    is_freed as is_freed,
    is_same_view as is_same_view,
    layout_text as layout_text,
    part_of as part_of,
    span_of as span_of,
    why_not_writable as why_not_writable,
)
from torch_dcp_backport.transfer._src.object_collectives import (
    Refusal as Refusal,
    largest_answer as largest_answer,
    fail as fail,
    describing_files as describing_files,
)
from torch_dcp_backport.transfer._src.once import warn_once as warn_once
from torch_dcp_backport.transfer._src.plan import (
    Agreement as Agreement,
    TensorInfo as TensorInfo,
    Terms as Terms,
    Want as Want,
    WantTable as WantTable,
)
from torch_dcp_backport.transfer._src.settings import Bar as Bar, Line as Line, Meter as Meter
from torch_dcp_backport.transfer._src.report import Phase as Phase, Tally as Tally
from torch_dcp_backport.transfer._src.scatter import (
    Offer as Offer,
    Reader as Reader,
    Target as Target,
    scatter as scatter,
)
from torch_dcp_backport.transfer._src.spread import (
    Along as Along,
    Boxes as Boxes,
    holders_of as holders_of,
    intersection as intersection,
    overlaps as overlaps,
    spread_of as spread_of,
)
from torch_dcp_backport.transfer._src.staging import (
    Staging as Staging,
    Views as Views,
    copy_to as copy_to,
)
from torch_dcp_backport.transfer._src.wire import (
    LENGTH as LENGTH,
    bytes_of as bytes_of,
    device_for as device_for,
    tensor_of as tensor_of,
)
from torch_dcp_backport.transfer._src.allgather import Held as Held
# isort: on

__all__ = [
    "Progress",
    "Report",
    "TransferError",
    "configure",
    "last_report",
    "reshard",
]
