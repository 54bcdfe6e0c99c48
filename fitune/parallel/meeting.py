"""Ranks that meet in the middle of a pass: each tells the others first, on the host, that it has come with what the
exchange takes. One that has failed tells that instead, once, and the others drop the pass too."""

from __future__ import annotations

from fitune.engine.ranks import Several
from fitune.parallel.world import Single


class PeerAway(Exception):
    """Another rank has failed: this pass is dropped, and told by who agrees on it (`fitune.train.ranks.Agreement`)."""


class Meeting(Several):
    """A view of other ranks that are met in a pass.

    Attributes:
        is_open: a pass is under way, in which the others count on this rank.
    """

    group: Single
    is_open = False

    def evaluations(self, num_passes: int) -> int:
        self.is_open = True
        return num_passes

    def meet(self) -> None:
        """Until every rank has come here.

        Raises:
            PeerAway: one has failed.
        """
        if self.group.largest([0.0])[0] > 0:
            self.is_open = False
            raise PeerAway

    def close(self) -> None:
        """The last meeting of a pass. Raises PeerAway where a rank has failed in it."""
        self.meet()
        self.is_open = False

    def drain(self) -> None:
        super().drain()
        if self.is_open:
            self.is_open = False
            self.group.largest([1.0])
