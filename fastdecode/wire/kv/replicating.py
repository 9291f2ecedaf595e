"""Messages by which an R-worker's cache is kept a second time, at its neighbour.

==================  =========  ======================================================
message             direction  meaning, and the answer
==================  =========  ======================================================
``Replicate``       S → R      from now on a neighbour is to keep a replica of the
                               cache, or nobody any more; no answer
``Replicated``      R → S      unasked: the neighbour has all that was cached when a
                               lane's step had ended; before that, that it is there
``Unprotected``     R → S      unasked: nobody keeps the replica any more, and why
``Dropped``         R → S      ``DropCache`` is done
``Restore``         S → R      read a replica from its file, to be taken over; no
                               answer: what isn't there is missing (``TakenOver``)
==================  =========  ======================================================

The R-worker greets the neighbour itself, as a peer of the role ``neighbour``
under the same session, and tells it every change of its cache; K and V follow
behind the answers to the S-worker, never before them. A replica that can't be
kept costs protection, and nothing else.

A replica may also be in a file (``ON_DISK``), in the directory where the R-worker keeps
blocks. Any R-worker that reaches the directory may restore it.

An R-worker that is given up may live, and open its replica after the neighbour was
to drop it. So an S-worker's ``Hello`` that doesn't resume drops the replicas of its
session that neighbours have opened there.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from fastdecode.wire.traits import S_WORKERS, THE_ONLY, ForHolder, Int, Message, Text, Worded

ON_DISK: Final = "disk:"
"""In the place of a neighbour's address: the replica goes into a file."""

MOST_LINK_BYTES: Final = 1 << 30
"""That a link may be told to have under way; a peer that is busy takes in
twice as much before it gives a connection up."""
NO_STEP: Final = -1
"""In the place of a step's number: none has ended yet."""


class Replicate(ForHolder, frozen=True, tag=15):
    keeper: Text
    """Where the neighbour is that keeps the replica, as the transport calls it;
    empty: nobody keeps one any more."""
    guest: Text
    """Where the one is whose replica is to be kept here, for transports over
    which a peer has to be expected; empty: nobody new."""
    link_bytes: Int
    """The most K and V that the neighbour hasn't answered for."""
    link: Int
    """Number of the link, in what is said of it. The link of this number stays
    as it is, or over; another one begins anew."""
    timeout_s: float
    """How long the neighbour may stay silent while it owes an answer."""
    holder: Int = THE_ONLY
    line: Int = 0
    """Of the link to the neighbour, for transports over which two links between
    the same two R-workers couldn't be told apart: no other link of the run has
    it."""
    guest_line: Int = 0
    """Of the guest's."""

    said_by = S_WORKERS


class Restore(ForHolder, frozen=True, tag=21):
    session: Int
    link: Int
    """Of the replica that is in the file."""
    holder: Int = THE_ONLY

    said_by = S_WORKERS


class Replicated(Message, frozen=True, tag=74):
    holder: Int
    lane: Int
    step: Int
    """The last of the lane that the neighbour has in every layer; ``NO_STEP``:
    it has made room for a replica, and nothing else was said before."""
    link: Int
    """As ``Replicate`` has it."""


class Unprotected(Worded, frozen=True, tag=75):
    holder: Int
    reason: Text
    link: Int


class Dropped(Message, frozen=True, tag=76):
    holder: Int
    """As ``DropCache`` has it."""
    cache: Int


ReplicationNews: TypeAlias = Replicated | Unprotected | Dropped
