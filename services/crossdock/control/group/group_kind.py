"""What all members of a group have in common, how a worker differs from it, and what no two have in common. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from crossdock.control.group.group_state import Member, Worker


def difference(worker: Worker, members: Sequence[Member]) -> str | None:
    """The first field in which `worker` differs from `members`, which are equal to each other: field, expected, got.
    None: it fits."""
    return _first_difference(members[0], _kind(members[0].worker), _kind(worker)) if members else None


def is_other_host(worker: Worker, other: Worker) -> bool:
    """Whether two workers run under different kernels; those of an unknown boot id may be one."""
    return "" not in (worker.boot_id, other.boot_id) and worker.boot_id != other.boot_id


def name_taken(member: Member) -> str:
    """Why a process of another host is no successor of a live member of its uid, and what to do."""
    return (
        f"{member} is alive on another host of this name, at {member.worker.address}; "
        "set worker.uid on one of the two hosts, or wait for the lease to end if it is dead"
    )


def _first_difference(member: Member, expected: dict[str, str], got: dict[str, str]) -> str | None:
    for field in expected | got:  # in the order of `expected`
        if expected.get(field) != got.get(field):
            return f"{field}: expected {_shown(expected, field)} as {member} has, got {_shown(got, field)}"
    return None


def _shown(fields: dict[str, str], field: str) -> str:
    return repr(fields[field]) if field in fields else "nothing"


def _kind(worker: Worker) -> dict[str, str]:
    provider = worker.network.provider if worker.network else "none"
    settings = {f"communicator.{name}": value for name, value in worker.communicator}
    return {"abi": worker.abi, "model": worker.model, "transport": worker.transport, "network": provider, **settings}
