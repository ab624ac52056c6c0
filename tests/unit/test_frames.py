"""Frames as the native half reads them, in pieces of any size, beside the oracle that reads them in Python alone."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crossdock.protocol import frames, native, rows
from crossdock.protocol.frames import Answer, Error, FrameError, FrameKind, FrameSocket
from tests.services.frame_oracle import Found, answer_of, forward_of, frames_in

MOST = 200 << 10
NAMES = st.text(max_size=12)
DTYPES = st.sampled_from(list(frames.CODES))
NUMBERS = st.integers(0, (1 << 64) - 1)
both = pytest.mark.parametrize("tls", [False, True])


class Pair:
    """Both ends of a connection; tls: Python receives, as it does for TLS."""

    def __init__(self, tls: bool) -> None:
        here, self.there = socket.socketpair()
        here.setblocking(False)
        here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self.line = FrameSocket(here, MOST)
        self.line._is_tls = bool(tls)
        self.line.state.is_tls = tls
        self._kept: torch.Tensor | None = None

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.there.close()
        self.line.close()

    def read(self, keep: bool = True) -> Iterator[Found]:
        """What has come, as far as it is whole. keep: rows go to memory; else nowhere."""
        while (got := self.line.next()) != frames.NOTHING:
            if got != frames.ROWS:
                state = self.line.state
                about = self.line.frame()
                self._about = got, state.id, about.fields
                self._kept = torch.full((state.rows_bytes,), 0xAB, dtype=torch.uint8)
                if not self.line.rows_to(self._kept.data_ptr() if keep else 0, self._kept):
                    continue
            assert self._kept is not None
            yield Found(*self._about, self._kept.numpy().tobytes() if keep else b"")


def said(pair: Pair, data: bytes, cuts: Sequence[int], keep: bool = True) -> tuple[list[Found], str]:
    """What the native half finds in bytes that come in these pieces."""
    found, at = list[Found](), 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        pair.there.sendall(data[at:cut])
        at = cut
        try:
            for one in pair.read(keep):
                found.append(one)
        except FrameError:
            return found, "wrong"
    return found, "more"


def found_at_last(pair: Pair) -> list[Found]:
    """What comes at last."""
    while not (found := list(pair.read())):
        pass
    return found


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    tokens, hidden, topk = draw(st.integers(0, 5)), draw(st.sampled_from([0, 1, 8, 4096])), draw(st.integers(0, 4))
    dtype, place = draw(DTYPES), draw(st.sampled_from([frames.NOWHERE, 0, 64]))
    num_bytes = frames.request_bytes(tokens, hidden, topk, dtype)
    texts = draw(NAMES), draw(NAMES)
    head = frames.forward(draw(NUMBERS), 1, tokens, hidden, topk, dtype, 7, *texts, num_bytes, place)
    return head + (draw(st.binary(min_size=1, max_size=1)) * num_bytes if place == frames.NOWHERE else b"")


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    tokens, hidden, dtype, in_place = (
        draw(st.integers(0, 5)),
        draw(st.integers(0, 5000)),
        draw(DTYPES),
        draw(st.booleans()),
    )
    about = Answer(1, 2, 3, 4, 1, tokens, hidden, dtype, draw(NAMES), in_place)
    return frames.answer(draw(NUMBERS), about) + b"y" * (0 if in_place else tokens * hidden * dtype.itemsize)


OTHERS = st.sampled_from(
    [
        frames.plain(FrameKind.PING, 3),
        frames.memory(4096),
        frames.hello("t", "n"),
        frames.error(2, Error(3, 4, (5,), "why")),
    ]
)
STREAMS = st.lists(st.one_of(requests(), answers(), OTHERS), max_size=4).map(b"".join)


@both
@given(STREAMS, st.lists(st.integers(0, 1 << 20), max_size=6), st.booleans())
@settings(deadline=None, max_examples=60)
def test_frames_in_pieces_of_any_size(tls: bool, data: bytes, cuts: list[int], keep: bool) -> None:
    expected, ends = frames_in(data, MOST)
    with Pair(tls) as pair:
        found, how = said(pair, data, cuts, keep)
    assert (len(found), how) == (len(expected), ends) == (len(expected), "more")
    assert [one[:3] for one in found] == [one[:3] for one in expected]
    if keep:
        assert [one.rows for one in found] == [one.rows for one in expected]


@both
@given(
    STREAMS,
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 3), st.binary(max_size=3)), min_size=1, max_size=4),
    st.lists(st.integers(0, 1 << 20), max_size=3),
)
@settings(deadline=None, max_examples=150)
@example(b"\xff" * 5000, [(0, 0, b"")], [])
@example(frames.plain(FrameKind.PING)[:7], [(0, 0, b"")], [3])
def test_whatever_comes_is_what_the_oracle_says(
    tls: bool, data: bytes, changes: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    """Bytes changed, cut out, doubled: the same frames, and the same end."""
    changed = bytearray(data)
    for at, count, new in changes:
        begin = at % min(len(changed) + 1, 128)  # in the headers and fields, mostly
        changed[begin : begin + count] = new
    with Pair(tls) as pair:
        assert said(pair, bytes(changed), cuts) == frames_in(bytes(changed), MOST)


def test_every_cut_of_a_stream() -> None:
    dtype, x, ids, weights = torch.float32, torch.randn(2, 3), torch.arange(4).view(2, 2), torch.rand(2, 2)
    about = frames.request_bytes(2, 3, 2, dtype)
    request = frames.forward(5, 1, 2, 3, 2, dtype, 9, "model", "trace", about)
    call = rows.rows_of(x, ids, weights)
    whole = rows.packet(request, call.part(0, 2)) + frames.plain(FrameKind.PING, 6)
    expected, _ = frames_in(whole, MOST)
    assert expected[0].rows == x.numpy().tobytes() + ids.int().numpy().tobytes() + weights.numpy().tobytes()
    for cut in range(len(whole)):
        with Pair(False) as pair:
            assert said(pair, whole, [cut])[0] == expected
    with Pair(False) as pair:
        assert said(pair, whole, range(len(whole)))[0] == expected


def test_what_the_native_half_says_of_requests_and_answers() -> None:
    request = frames.Forward(1 << 63, 7, 3, 5, 2, torch.bfloat16, 11, "modèle", "tr", 3 * 26, 128)
    about = Answer(1, 2, 3, 4, 9, 3, 5, torch.float16, "é", True)
    with Pair(False) as pair:
        pair.there.sendall(frames.forward(*request) + frames.answer(4, about))
        assert pair.line.next() == FrameKind.FORWARD
        assert pair.line.forward() == request == forward_of(request.id, pair.line.frame().fields)
        assert pair.line.rows_to(0, None)
        assert pair.line.next() == FrameKind.ANSWER
        assert pair.line.answer() == about == answer_of(pair.line.frame().fields)


@pytest.mark.parametrize(("tokens", "hidden"), [((1 << 32) - 1, (1 << 32) - 1), (1 << 31, 1 << 31), (1 << 30, 4)])
def test_sizes_whose_product_is_too_large_for_any_integer_are_no_small_ones(tokens: int, hidden: int) -> None:
    """A product modulo 2^32 or 2^64 would fit the rows that are said to follow."""
    for num_rows in (0, (tokens * (2 * hidden + 8)) % (1 << 32) % MOST):
        head = frames.FORWARD.pack(num_rows, 28, 3, 0, 1, 1, tokens, hidden, 1, 2, 0, 0, 0, 0, frames.NOWHERE)
        with Pair(False) as pair:
            pair.there.sendall(head)
            with pytest.raises(FrameError):
                pair.line.next()


@both
@pytest.mark.parametrize("cut", [0, 1, 15, 16, 20, 60, 5000])
def test_an_end_in_the_middle_is_an_end(tls: bool, cut: int) -> None:
    num_bytes = frames.request_bytes(2, 3000, 2, torch.float32)
    whole = frames.forward(1, 1, 2, 3000, 2, torch.float32, 0, "", "", num_bytes) + bytes(num_bytes)
    with Pair(tls) as pair:
        pair.there.sendall(whole[:cut])
        pair.there.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError, match="closed by the other end"):
            found_at_last(pair)


def test_nothing_is_nothing_and_a_wait_ends() -> None:
    with Pair(False) as pair:
        assert pair.line.next() == frames.NOTHING
        assert pair.line.wait(0.01) == frames.NOTHING
        assert pair.line.wait(5.0, writes=True) == frames.NOTHING, "it can be written"
        pair.there.sendall(frames.plain(FrameKind.PONG))
        assert pair.line.wait(5.0) == FrameKind.PONG


def test_a_descriptor_beside_a_frame_is_kept_and_closed() -> None:
    with Pair(False) as pair:
        pair.line.state.takes_descriptor = True
        opened = os.memfd_create("one")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            socket.send_fds(pair.there, [frames.memory(4096)], [opened])
            assert pair.line.next() == FrameKind.MEMORY
        assert os.fstat(pair.line.state.descriptor).st_ino == os.fstat(opened).st_ino
        socket.send_fds(pair.there, [frames.memory(4096)], [opened, opened])
        assert pair.line.next() == FrameKind.MEMORY
        assert len(os.listdir("/proc/self/fd")) == before + 1, (
            "each takes the place of the one before, and none is lost"
        )
    os.close(opened)
    assert len(os.listdir("/proc/self/fd")) == before - 3


def test_the_structs_are_as_the_library_has_them() -> None:
    import ctypes

    assert native.load().cd_line_bytes() == ctypes.sizeof(native.Line)


@given(
    st.lists(st.integers(-(1 << 40), 1 << 40), min_size=1, max_size=8),
    st.sampled_from([0.0, 1e38, float("nan"), float("inf"), -float("inf")]),
)
@settings(deadline=None)
def test_what_is_wrong_with_a_routing(numbers: list[int], weight: float) -> None:
    ids = np.clip(np.array(numbers), -(1 << 31), (1 << 31) - 1).astype(np.int32)
    weights = np.full(len(numbers), 0.5, np.float32)
    weights[-1] = weight
    to_ids, to_weights = np.zeros_like(ids), np.zeros_like(weights)
    addresses = [array.ctypes.data for array in (to_ids, to_weights, ids, weights)]
    got = native.load_held().cd_copy_routing(*addresses, len(ids), 7)
    ids_fit, finite = bool(((ids >= -1) & (ids <= 7)).all()), bool(np.isfinite(weights).all())
    assert got == (native.WRONG_ID if not ids_fit else 0 if finite else 2)
    assert (to_ids == ids).all()
    assert to_weights.tobytes() == weights.tobytes()


def test_only_usual_tensors_are_described() -> None:
    x, ids, weights = torch.randn(3, 4).bfloat16(), torch.zeros(3, 2).long(), torch.rand(3, 2)
    found = rows.usual_rows(x, ids, weights)
    assert found == rows.rows_of(x, ids, weights)
    assert found is not None
    assert (found.num_tokens, found.hidden, found.topk, found.width, found.row_bytes) == (3, 4, 2, 8, 24)
    unusual = [
        (x.t().contiguous().t(), ids, weights), (x.double(), ids, weights), (x, ids.short(), weights),
        (x, ids, weights.double()), (x[:2], ids, weights), (x, ids[:, :1], weights), (torch._neg_view(x), ids, weights),
        (x, ids, torch._neg_view(weights)), (x[0], ids, weights), (x[:0], ids[:0], weights[:0]), (None, ids, weights),
        (x, [[1]], weights), (torch.nn.Parameter(x), ids, weights), (x.to_sparse(), ids, weights),
        (torch.empty(3, 4, dtype=x.dtype, device="meta"), ids, weights),
    ]  # fmt: skip
    assert [rows.usual_rows(*each) for each in unusual] == [None] * len(unusual)


def test_ids_that_no_int32_holds_become_no_others_that_are_right() -> None:
    ids = torch.tensor([[1 << 40, -(1 << 40)], [3, -1]])
    call = rows.rows_of(torch.zeros(2, 1), ids, torch.zeros(2, 2))
    packed = rows.packet(b"head", call.part(0, 2))
    assert struct.unpack_from("<4i", packed, 12) == ((1 << 31) - 1, -(1 << 31), 3, -1)
