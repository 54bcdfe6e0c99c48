"""What is kept of a trace: in fitune's archive for the catalog's models, in a user's cache for others."""

from __future__ import annotations

from dataclasses import dataclass

from fitune.memory.replay import StepTerms
from fitune.memory.states import TrainedDims


@dataclass(frozen=True)
class Entry:
    """A traced step with AdamW.

    Attributes:
        script: `Script.to_json` of the script for every shape; None where there is none.
        dims: shapes of what is trained.
        granule: bytes to which the device's allocator rounds a block.
        terms: "rows,columns,chunk" to terms, of the shapes that were asked for where there is no such script.
    """

    script: str | None
    dims: TrainedDims
    granule: int
    terms: dict[str, StepTerms]
