"""The last post-mortem records of the members, and the last changes of the group. Bounded; lost with the process."""

from __future__ import annotations

import time
from collections import deque

from crossdock.common.postmortem_record import MAX_CHARS, parse
from crossdock.control.group.group_state import Group
from crossdock.protocol.v1 import control_pb2 as pb

MAX_RECORDS = 256
MAX_CHANGES = 256


class Postmortems:
    """Records and changes of one group."""

    def __init__(self) -> None:
        self._records: deque[pb.Postmortem] = deque(maxlen=MAX_RECORDS)
        self._changes: deque[pb.GroupChange] = deque(maxlen=MAX_CHANGES)

    def record(self, request: pb.HeartbeatRequest) -> None:
        """Keep the record of a member's heartbeat; workers repeat it until there is a newer epoch. One that is too long
        or does not parse is dropped: the fault beside it counts."""
        uid, text = request.worker.uid, request.postmortem
        if not text or len(text) > MAX_CHARS or any(one.uid == uid and one.record == text for one in self._records):
            return
        if text.isprintable() and parse(text) is not None:
            self._records.append(pb.Postmortem(uid=uid, arrived_unix_s=time.time(), record=text))

    def changed(self, group: Group) -> None:
        """Keep a change of the group."""
        change = pb.GroupChange(unix_s=time.time(), epoch=group.epoch, state=group.phase.value, reason=group.why)
        self._changes.append(change)

    def message(self) -> pb.PostmortemsResponse:
        """All of them."""
        return pb.PostmortemsResponse(postmortems=self._records, changes=self._changes)
