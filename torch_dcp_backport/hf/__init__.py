"""HF safetensors and ranks: the tensors of files, the blocks of each rank, and the way between them.

Knows tensors, files and process groups; must never know a model's layers.
"""

from torch_dcp_backport.hf._src.export import Export, Saved
from torch_dcp_backport.hf._src.opening import opened
from torch_dcp_backport.hf._src.state import Filled, load_state_dict, save_adapter, save_state_dict

# For the rooms beside it, and not public: each as itself, so that type checkers see it here.
# isort: off
from torch_dcp_backport.hf._src import adapters as adapters
from torch_dcp_backport.hf._src.adapters import (
    PREFIX as PREFIX,
    as_settings as as_settings,
    is_wrapped as is_wrapped,
    scale_of as scale_of,
)
from torch_dcp_backport.hf._src.apart import Cutout as Cutout
from torch_dcp_backport.hf._src.blocks import (
    Part as Part,
    Share as Share,
    Window as Window,
    gaps as gaps,
    nbytes_of_window as nbytes_of_window,
    windows as windows,
)
from torch_dcp_backport.hf._src.companions import (
    ADAPTER_CONFIG as ADAPTER_CONFIG,
    CHOSEN as CHOSEN,
    OF_QUANTISED as OF_QUANTISED,
    TEMPLATES as TEMPLATES,
    as_config as as_config,
    companions_of as companions_of,
    names_in as names_in,
)
from torch_dcp_backport.hf._src.comparing import differ as differ, equal_in as equal_in
from torch_dcp_backport.hf._src.dequantised import block_size_of as block_size_of, dequantised as dequantised
from torch_dcp_backport.hf._src.export import (
    BUFFERS as BUFFERS,
    BUFFER_BYTES as BUFFER_BYTES,
    ExportTarget as ExportTarget,
    checked as checked,
    collect as collect,
    examined as examined,
    export as export,
    exported as exported,
    not_one as not_one,
    target_of as target_of,
    write_files as write_files,
)
from torch_dcp_backport.hf._src.files import (
    ADAPTER as ADAPTER,
    ADAPTER_FILES as ADAPTER_FILES,
    replaced as replaced,
)
from torch_dcp_backport.hf._src.filling import fill_from_first as fill_from_first, fill_here as fill_here
from torch_dcp_backport.hf._src.format import is_plain as is_plain, nbytes_of as nbytes_of
from torch_dcp_backport.hf._src.opening import (
    renamed as renamed,
    turned as turned,
    viewed as viewed,
    with_prefix as with_prefix,
)
from torch_dcp_backport.hf._src.visibility import (
    Visibility as Visibility,
    look as look,
    opened_together as opened_together,
)
from torch_dcp_backport.hf._src.source import (
    CONFIG as CONFIG,
    Configuration as Configuration,
    Folder as Folder,
    Given as Given,
    Source as Source,
    copied_of as copied_of,
)
from torch_dcp_backport.hf._src.state import (
    HeldPart as HeldPart,
    LOAD as LOAD,
    names_of as names_of,
    config_text as config_text,
    tied_names as tied_names,
    unchecked as unchecked,
)
from torch_dcp_backport.hf._src.writing import planned as planned
# isort: on

__all__ = [
    "Export",
    "Filled",
    "Saved",
    "load_state_dict",
    "opened",
    "save_adapter",
    "save_state_dict",
]
