"""What the host makes of a post-mortem and of findings. The page is ordinary memory here."""

from __future__ import annotations

import pytest
import torch

from ep_kernels.errors import AbortedError, CapacityError, HandleError, PeerTimeout, TransportError
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.memory.host_page import HostPage


@pytest.fixture
def host() -> HostPage:
    made = HostPage.__new__(HostPage)  # without the pinned memory
    made._page, made.reason, made._num_reported = abi.HostPage(), "", 0
    made.none_dropped = True
    made._raw = memoryview(made._page).cast("B").cast("Q")
    made._gone = torch.zeros(4, dtype=torch.int64)
    made._fence, made._failure = (lambda: None), None
    return made


def stop(host: HostPage, why: str, op: str = "dispatch", phase: str = "payload", seen: int = 0) -> None:
    record = host._page.postmortem
    record.op, record.phase, record.peer = abi.OPS.index(op), abi.PHASES.index(phase), 3
    record.expected, record.seen, record.waited_ns, record.block = seen + 1, seen, 2_500_000_000, 17
    record.status = abi.STOPS.index(why)


@pytest.mark.parametrize("seen", [0, 6, abi.ARRIVAL_TOTAL - 1, abi.ARRIVAL_TOTAL, 1 << 33])
@pytest.mark.parametrize("phase", abi.PHASES)
@pytest.mark.parametrize("op", abi.OPS)
@pytest.mark.parametrize("gone", [False, True])
def test_a_failed_wait_is_told_in_operations(host: HostPage, gone: bool, op: str, phase: str, seen: int) -> None:
    """Whatever the kernel counted in, and however many there have been."""
    assert host.fault() is None
    if gone:
        host.mark_gone(3)
    stop(host, "GONE" if gone else "TIMED_OUT", op, phase, seen)
    found = host.fault()
    assert isinstance(found, PeerTimeout)
    assert (found.peer, found.op, found.phase, found.gone) == (3, op, phase, gone)
    assert (found.expected, found.seen, found.waited_s, found.block) == (seen + 1, seen, 2.5, 17)
    host.clear()
    assert host.fault() is None


def test_who_is_given_up_is_not_called_dead_before_it_is(host: HostPage) -> None:
    host.give_up(3)
    stop(host, "GONE")
    for gone in (False, True):
        found = host.fault()
        assert isinstance(found, PeerTimeout)
        assert (found.gone, found.given_up, host.is_gone(3)) == (gone, not gone, gone)
        host.mark_gone(3)
        host.give_up(3)


def test_a_post_mortem_is_read_behind_a_fence(host: HostPage) -> None:
    """The status is written last; a processor that reorders loads finds a fence between it and the rest."""
    host._fence = lambda: stop(host, "TIMED_OUT", "combine", seen=4)  # what was written before the status is seen now
    host._page.postmortem.status = abi.STOPS.index("TIMED_OUT")
    found = host.fault()
    assert isinstance(found, PeerTimeout)
    assert (found.op, found.peer, found.seen) == ("combine", 3, 4)

    def differ() -> None:
        host._page.mismatch.peer = 2

    host._fence = differ
    host._page.mismatch.status = 1
    assert "rank 2 that of" in str(host.finding())


def test_other_ends(host: HostPage) -> None:
    stop(host, "LEFT_OUT", "combine", seen=7)
    said = host.fault()
    assert type(said) is TransportError
    assert str(said) == "combine: rank 3 has gone on in epoch 7 without this rank"
    stop(host, "LEFT_OUT", "combine", seen=7 | abi.ALSO_LEFT_OUT)
    assert str(host.fault()) == "combine: the group has gone on in epoch 7 without this rank and rank 3"
    stop(host, "ABORTED")
    assert isinstance(host.fault(), AbortedError)
    host.clear()
    host.abort("first")
    host.abort("second")
    assert str(host.fault()) == str(AbortedError("first"))


def test_a_wait_that_no_kernel_made(host: HostPage) -> None:
    first = PeerTimeout(peer=1, op="all_gather", phase="shards", expected=3, seen=2, waited_s=1.0)
    host.fail(first)
    host.fail(PeerTimeout(peer=2, op="all_gather", phase="shards", expected=3, seen=2, waited_s=1.0))
    stop(host, "ABORTED")  # a kernel that was told to stop because of it
    assert host.fault() is first
    assert host._page.abort == 1
    host.clear()
    assert host.fault() is None
    assert host._page.abort == 0
    host.fail(first)
    host.abort("for a test")
    assert isinstance(host.fault(), AbortedError)
    host.clear()
    assert host._page.abort == 1, "an abort stays"


def test_findings_are_told_once(host: HostPage) -> None:
    mismatch = host._page.mismatch
    mismatch.op, mismatch.peer, mismatch.mine, mismatch.theirs = abi.OPS.index("combine"), 2, 8, 9
    mismatch.status = 1
    said = host.finding()
    assert isinstance(said, HandleError)
    assert "combine: this rank brought the routing of dispatch 8, rank 2 that of dispatch 9" in str(said)
    assert host.finding() is None
    for dropped, more in ((5, 5), (12, 7)):
        host._page.dropped = dropped
        said = host.finding()
        assert isinstance(said, CapacityError)
        assert said.num_dropped == more
        assert host.finding() is None
    host.none_dropped = False
    host._page.dropped = 20
    assert host.finding() is None
    assert host.num_dropped == 20
