"""One rank's shared memory, and how peers of the same host find it. For the others, a ticket says how the rank is
reached over a network, if it is.

A region is a memfd: memory with a file descriptor and no name, so it vanishes with the last process that holds it,
after kill -9 too, and is not bounded by the size of /dev/shm. Its ticket says where to find the descriptor
(/proc/<pid>/fd/<fd>) and how to tell that it is still the right process. A peer maps the region read-only, apart from
the page with the event count. Redeeming needs the same host, PID namespace and user, and a memfd that is sealed against
truncation; what is missing is said with its cure.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
from pathlib import Path

import msgspec
import torch

from ep_kernels.errors import TransportError
from ep_kernels.network.greeting import NetworkTicket

_PROC = Path("/proc")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Of every region: nobody can take the pages away under a reader's mapping, which would end the reader by SIGBUS."""
_NETWORK = "set `network` to join hosts"
MAP_NORESERVE = 0x4000
"""Linux: memory is counted when touched. Regions are sized for the worst case and mostly never touched."""


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a peer finds a region.

    Attributes:
        kind: always "crossdock-cpu".
        abi: hash of the region's byte map.
        boot_id: which boot of which host.
        pid_namespace: inode of the owner's PID namespace.
        uid: effective user of the owner.
        pid, start_ticks: the owner's process, and when it began (kernel clock ticks), since ids are reused.
        fd: descriptor of the memfd in that process.
        num_bytes: size of the region.
        nonce: random; the region's header has it too.
        domain: ranks of one domain map each other's regions.
        landing_fd, landing_bytes: descriptor and size of the mirrors of ranks of other hosts; -1: there are none.
        network: how ranks of other domains reach it; None: they do not.
    """

    kind: str
    abi: int
    boot_id: str
    pid_namespace: int
    uid: int
    pid: int
    start_ticks: int
    fd: int
    num_bytes: int
    nonce: int
    domain: str
    landing_fd: int
    landing_bytes: int
    network: NetworkTicket | None


def start_ticks(pid: int) -> int:
    """When a process began, in kernel clock ticks since boot. Raises OSError if it is gone."""
    line = (_PROC / str(pid) / "stat").read_text()
    return int(line.rpartition(")")[2].split()[19])


def boot_id() -> str:
    """Identity of this boot of this host."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> int:
    """Inode of this process's PID namespace."""
    return (_PROC / "self/ns/pid").stat().st_ino


def own_domain() -> str:
    """Name of the ranks with which this process can share memory, where the configuration names none."""
    return f"{boot_id()}/{pid_namespace()}/{os.geteuid()}"


class OwnRegion:
    """This rank's region, or its mirrors: a memfd and its mapping, which lives until the last tensor made of it dies.

    Raises TransportError when the memory cannot be had.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.nonce = secrets.randbits(63)
        try:
            self.fd = os.memfd_create("crossdock-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise TransportError(f"cpu transport: memfd_create failed: {error}") from error
        try:
            os.ftruncate(self.fd, num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            mapping = mmap.mmap(self.fd, num_bytes, flags=mmap.MAP_SHARED | MAP_NORESERVE)
        except (OSError, ValueError, OverflowError) as error:
            self.close()
            raise TransportError(f"cpu transport: a region of {num_bytes} bytes cannot be mapped: {error}") from error
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)

    def ticket(
        self, abi: int, domain: str = "", landing: OwnRegion | None = None, network: NetworkTicket | None = None
    ) -> bytes:
        """What peers need to map this region, or to reach its owner over a network, as JSON."""
        pid = os.getpid()
        ticket = Ticket(
            kind="crossdock-cpu",
            abi=abi,
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
            uid=os.geteuid(),
            pid=pid,
            start_ticks=start_ticks(pid),
            fd=self.fd,
            num_bytes=self.num_bytes,
            nonce=self.nonce,
            domain=domain or own_domain(),
            landing_fd=-1 if landing is None else landing.fd,
            landing_bytes=0 if landing is None else landing.num_bytes,
            network=network,
        )
        return msgspec.json.encode(ticket)

    def close(self) -> None:
        """Give the descriptor back: the ticket cannot be redeemed any more. Mappings stay. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def private_bytes(num_bytes: int) -> torch.Tensor:
    """Zeroed uint8 [num_bytes] of this process alone, counted when touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        mapping = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=flags)
    except (OSError, ValueError, OverflowError) as error:
        raise TransportError(f"cpu transport: a buffer of {num_bytes} bytes cannot be mapped: {error}") from error
    return torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes]


def read_ticket(
    rank: int, raw: bytes, *, abi: int, num_bytes: int, domain: str | None = None, cure: str = _NETWORK
) -> Ticket:
    """Decode and judge a peer's ticket. `domain`: this rank's, if it reaches those of others over a network; `cure`:
    what joins ranks of several hosts.

    Raises TransportError naming the rank, what is wrong and the cure."""
    try:
        ticket = msgspec.json.decode(raw, type=Ticket)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise _refused(rank, f"its ticket cannot be read ({error}); use transport cpu on every rank") from error
    if ticket.kind != "crossdock-cpu":
        raise _refused(rank, f"its ticket is of kind {ticket.kind!r}; use transport cpu on every rank")
    if ticket.abi != abi:
        raise _refused(rank, f"region ABI {ticket.abi:x}, expected {abi:x}; install one version on every rank")
    if ticket.num_bytes != num_bytes:
        raise _refused(rank, f"region of {ticket.num_bytes} bytes, expected {num_bytes}; give every rank one config")
    if domain is not None and ticket.network is not None and ticket.domain != domain:
        return ticket
    if ticket.boot_id != boot_id():
        raise _refused(rank, f"it runs on another host; {cure}")
    if ticket.pid_namespace != pid_namespace():
        raise _refused(
            rank, "it runs in another PID namespace; share one (one container, shareProcessNamespace, --pid=host)"
        )
    return ticket


def open_peer(rank: int, ticket: Ticket) -> tuple[int, int, int]:
    """(descriptor of the region, that of the mirrors or -1, pidfd of their owner), all the caller's to close. The files
    are memfds of this user that nobody can truncate; they are opened for writing only once that is known. Raises
    TransportError."""
    try:
        process = os.pidfd_open(ticket.pid)
    except (OSError, ValueError, OverflowError) as error:
        whose = f"its process {ticket.pid}"
        if isinstance(error, OSError) and error.errno not in (errno.ESRCH, errno.EINVAL):
            # no descriptor is left; a container's seccomp profile; a kernel without the call
            raise _refused(rank, f"this one cannot watch {whose} (pidfd_open: {error})") from error
        raise _refused(rank, f"{whose} is gone ({error})") from error
    try:
        if start_ticks(ticket.pid) != ticket.start_ticks:
            raise _refused(rank, f"its process {ticket.pid} is gone (the id was given to another)")
        _check_user(rank, f"its process {ticket.pid}", (_PROC / str(ticket.pid)).stat().st_uid)
        region = _open_region(rank, ticket.pid, ticket.fd, ticket.num_bytes)
        if ticket.landing_fd < 0:
            return region, -1, process
        try:
            return region, _open_region(rank, ticket.pid, ticket.landing_fd, ticket.landing_bytes), process
        except (TransportError, OSError):
            os.close(region)
            raise
    except TransportError:
        os.close(process)
        raise
    except OSError as error:
        os.close(process)
        if error.errno in (errno.EACCES, errno.EPERM):
            users = f"user {ticket.uid}, this rank as user {os.geteuid()}"
            raise _refused(rank, f"no permission to open its region (it runs as {users}); run both as one") from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise _refused(rank, f"this process has no descriptor left for it ({error.strerror})") from error
        raise _refused(rank, f"its region is closed ({error.strerror})") from error


def _open_region(rank: int, pid: int, fd: int, num_bytes: int) -> int:
    """The descriptor. A file that is not the owner's region is neither written nor read, whatever kind it is."""
    path = os.open(_PROC / str(pid) / "fd" / str(fd), os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
            raise _refused(rank, "its region is closed (the descriptor is another file)")
        _check_user(rank, "its region", found.st_uid)
        if _seals(path) & SEALS != SEALS:
            raise _refused(rank, "its region is no sealed memfd, so its owner could truncate it while it is mapped")
        return os.open(f"/proc/self/fd/{path}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(path)


def _check_user(rank: int, what: str, uid: int) -> None:
    if uid != os.geteuid():
        raise _refused(rank, f"{what} belongs to user {uid}, this rank runs as user {os.geteuid()}; run both as one")


def _seals(path: int) -> int:
    """Seals of the regular file that an O_PATH descriptor names; 0 for one on a file system without seals."""
    readable = os.open(f"/proc/self/fd/{path}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return fcntl.fcntl(readable, fcntl.F_GET_SEALS)
    except OSError:
        return 0
    finally:
        os.close(readable)


def _refused(rank: int, why: str) -> TransportError:
    return TransportError(f"cpu transport: cannot map the region of rank {rank}: {why}")
