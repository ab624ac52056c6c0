"""What all members of a group have in common, how a worker differs from it, and what no two have in common. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from crossdock.control.group_state import Member, Worker


def difference(worker: Worker, members: Sequence[Member]) -> str | None:
    """The first field in which `worker` differs from `members`, which are equal to each other: field, expected, got.
    None: it fits. Communicator settings are compared with a member that has reported some."""
    for member in members[:1]:
        if (wrong := _first_difference(member, _kind(member.worker), _kind(worker))) is not None:
            return wrong
    reporting = next((member for member in members if member.worker.communicator), None)
    if reporting is None or not worker.communicator:
        return None
    return _first_difference(reporting, _settings(reporting.worker), _settings(worker))


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
    return {"abi": worker.abi, "model": worker.model, "transport": worker.transport, "network": provider}


def _settings(worker: Worker) -> dict[str, str]:
    return {f"communicator.{name}": value for name, value in worker.communicator}
