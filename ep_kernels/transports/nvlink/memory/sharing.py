"""Hands file descriptors to peers of the same host: an abstract unix socket, SCM_RIGHTS, the same user only.

Needs no ptrace and no file system; needs a network namespace in common (containers of one pod have it).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

from ep_kernels.errors import TransportError

_NONCE_BYTES = 16
_PEER_CREDENTIALS = struct.Struct("3i")
_SHORT, _RETRY_S = (errno.EMFILE, errno.ENFILE, errno.ENOMEM), 0.01
"""Of descriptors or memory, which others may give back."""


class DescriptorServer:
    """Gives copies of `fds` to processes of the same user that send the nonce, until closed.

    Attributes:
        address: name of the abstract socket (without its leading NUL) and nonce, as bytes for the ticket.

    Args:
        fds: descriptors; they stay the caller's.
        lends: whether to keep the connections of the receivers open, for `is_lent`.
    """

    def __init__(self, fds: Sequence[int], lends: bool = False) -> None:
        self._fds, self._lends = list(fds), lends
        self._borrowers: list[socket.socket] = []
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        name = f"crossdock-{secrets.token_hex(16)}".encode()
        self.address = self._nonce + name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.bind(b"\0" + name)
        self._socket.listen(128)
        self._thread = threading.Thread(target=self._serve, name="crossdock-fd-server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError as error:
                if error.errno not in _SHORT:  # it was shut down
                    return
                time.sleep(_RETRY_S)
                continue
            if self._answer(peer) and self._lends:
                self._borrowers.append(peer)
            else:
                peer.close()

    def _answer(self, peer: socket.socket) -> bool:
        try:
            peer.settimeout(5)
            _, uid = _peer_of(peer)
            if uid != os.geteuid() or not secrets.compare_digest(peer.recv(_NONCE_BYTES), self._nonce):
                return False
            socket.send_fds(peer, [b"\1"], self._fds)
        except OSError:
            return False
        return True

    def is_lent(self) -> bool:
        """Whether a process still holds what this closed server gave: its connection ends when it is done or dead."""
        for borrower in list(self._borrowers):
            if _has_hung_up(borrower):
                borrower.close()
                self._borrowers.remove(borrower)
        return bool(self._borrowers)

    def close_in_child(self) -> None:
        """In a forked child: close its copies. A shutdown would reach the parent."""
        for connection in (self._socket, *self._borrowers):
            connection.close()

    def close(self) -> None:
        """Stop giving. Idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        self._thread.join()
        self._socket.close()


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """(process id as this process numbers processes, 0 = not in its PID namespace; user id) of the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, uid, _ = _PEER_CREDENTIALS.unpack(raw)
    return pid, uid


def _has_hung_up(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def fetch(rank: int, address: bytes, num_fds: int, timeout_s: float) -> tuple[list[int], int]:
    """(descriptors of a peer, which the caller owns; the peer's process id here, 0 = not visible).

    Raises TransportError naming the rank and the cure.
    """
    fds, pid, lease = borrow(rank, address, num_fds, timeout_s)
    lease.close()
    return fds, pid


def borrow(rank: int, address: bytes, num_fds: int, timeout_s: float) -> tuple[list[int], int, socket.socket]:
    """As `fetch`, and the connection: until its `give_back` the peer's server counts the descriptors as in use here."""
    nonce, name = address[:_NONCE_BYTES], address[_NONCE_BYTES:]
    cure = "its process is gone, or it runs in another network namespace or as another user"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        server.settimeout(timeout_s)
        server.connect(b"\0" + name)
        pid, uid = _peer_of(server)
        if uid != os.geteuid():
            raise PermissionError(f"it runs as user {uid}, this rank as user {os.geteuid()}")
        server.send(nonce)
        _, fds, _, _ = socket.recv_fds(server, 1, num_fds)
    except OSError as error:
        server.close()
        raise TransportError(f"nvlink: rank {rank} gave no memory handle ({error}): {cure}") from error
    if len(fds) != num_fds:
        for fd in (*fds, server.detach()):
            os.close(fd)
        raise TransportError(f"nvlink: rank {rank} refused its memory handle: {cure}")
    return fds, pid, server


def give_back(lease: socket.socket) -> None:
    """Hang up, for processes that were forked meanwhile and have copies of the connection too."""
    with contextlib.suppress(OSError):  # the server's process is gone
        lease.shutdown(socket.SHUT_RDWR)
    lease.close()
