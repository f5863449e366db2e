"""The settings of a save and of a load, beside the state dict.

Every function between the public functions and the engine passes them on as one value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional, Union

from torch_dcp_backport.dist_checkpointing._src.body import Output
from torch_dcp_backport.dist_checkpointing._src.calls import begin
from torch_dcp_backport.dist_checkpointing._src.common import Values, values_of
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.dist_checkpointing.mapping import CommonStateDict, StateDict
from torch_dcp_backport.dist_checkpointing.utils import _clean_metadata_for_serialization
from torch_dcp_backport.dist_checkpointing.validation import StrictHandling
from torch_dcp_backport.transfer import Call, Group

#: For calls whose user passes `strict`.
LOADS_THE_REST = 'strict="raise_unexpected" loads the rest'
CANNOT_SAVE = "cannot save the checkpoint"
CONTENT_METADATA = "content_metadata"


class SaveOptions(NamedTuple):
    """The settings of a save, from the public functions to the disk; Megatron's have its names."""

    validate_access_integrity: bool = True
    #: Turns a common state into the state that is compared.
    preprocess_common_before_consistancy_check: Optional[Callable[[CommonStateDict], StateDict]] = None
    #: Saved beside the common state, as `load_content_metadata` returns it; None for none.
    content_metadata: Optional[dict[str, Any]] = None
    balanced: bool = True
    process_group: Group = None
    #: Whether the SHA-256 of every file is saved, too.
    verify_integrity: bool = False
    #: Whether ranks' common states are compared; and whether they have to be alike.
    compare_common: bool = False
    strict_common: bool = False
    #: Whether `.metadata` has torch's index beside ours; a caller's value, of any type.
    torch_metadata: Any = True
    #: Whether to refuse a common state or an object that a load without `trust` would refuse.
    must_load: bool = False
    #: Whether no other rank takes part, also where there is a process group.
    is_alone: bool = False
    #: Called with this rank's output, by the thread that wrote it.
    written: Callable[[Output], None] = lambda output: None

    def compared(self, common: CommonStateDict) -> Optional[Values]:
        """Return the values of a common state that are compared; None where they are not."""
        if self.is_alone or not self.compare_common:
            return None
        preprocess = self.preprocess_common_before_consistancy_check
        state = common if preprocess is None else preprocess(common)
        return values_of({**state, **self.beside()})

    def beside(self) -> StateDict:
        """Return what is saved beside the common state.

        Raises:
            CheckpointingException: content metadata that is no dict.
        """
        content = self.content_metadata
        if content is None:
            return {}
        if not isinstance(content, dict):
            raise CheckpointingException(
                f"content_metadata={content!r}: expected a dict, got a {type(content).__name__}"
            )
        return {CONTENT_METADATA: _clean_metadata_for_serialization(content)}

    def same(self) -> dict[str, str]:
        """Return the options that must be the same on every rank."""
        return {
            "verify_integrity": str(bool(self.verify_integrity)),
            "torch_metadata": str(self.torch_metadata),
        }

    def checked(self) -> SaveOptions:
        """Return the same options.

        Raises:
            CheckpointingException: one of them has no value that it may have.
        """
        try:
            checked_bool("torch_metadata", self.torch_metadata)
        except ValueError as error:
            raise CheckpointingException(str(error)) from None
        return self

    def begin(self) -> Call:
        """Begin the call of this save."""
        return begin(CANNOT_SAVE, "save", self.process_group, is_alone=self.is_alone)


def checked_bool(name: str, value: bool) -> bool:
    """Return an option that is on or off.

    Raises:
        ValueError: it is no bool: the text "False" would be true.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: expected a bool, got a {type(value).__name__}")
    return value


class LoadOptions(NamedTuple):
    """The settings of a load, from the public functions to the disk; Megatron's have its names."""

    validate_access_integrity: bool = True
    strict: Union[str, StrictHandling] = StrictHandling.ASSUME_OK_UNEXPECTED
    trust: bool = False
    process_group: Group = None
    #: The process group whose ranks read together; empty where each rank reads for itself.
    read_together_in: tuple[Group, ...] = ()
    #: Whether every file is compared with its SHA-256.
    verify_integrity: bool = False
    #: Whether no other rank takes part, also where there is a process group.
    is_alone: bool = False
    #: Whether the result has the checkpoint's common state.
    has_common: bool = True
    #: What the caller can do about keys that no rank loads; "" where the caller did not choose `strict`.
    advice: str = ""
