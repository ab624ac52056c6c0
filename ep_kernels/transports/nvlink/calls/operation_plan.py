"""Operations of one kind by native calls (native/operation.cpp): look at arguments, fill the record, launch the kernel.

A plan holds what no call of its kind changes. `call` does all of it at once, and begins nothing where anything is
unlike the plan: an argument that is not what it must be, a fault, another stream than before, another thread's context,
a graph's capture where the host has to read, a torch without DLPack exchange. It then says None: Python names what is
wrong, or makes it right and calls `fill` and `launch`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch

from ep_kernels.errors import TransportError
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.calls.streams import StreamOrder
from ep_kernels.transports.nvlink.gpu import launch
from ep_kernels.transports.nvlink.gpu.launch import Quiet

_MOST_DIMS, _MOST_TENSORS, _MOST_ADDRESSES, _MOST_RECORD_BYTES = 3, 7, 24, 4096
TOKENS, ROWS = -1, -2
"""Instead of a length: T of the operation, its received rows."""
_OPTIONAL, _ALIGNED, _MAY_BE_WIDE = 1, 2, 4
_MARK = 48
"""Bits of an offset below the number of its base."""
STATE_BASES = ("routing", "routing_id", "carried", "weights")
"""What a dispatch leaves to later operations: these addresses, then T and rows (`State` of operation.cpp)."""
_FIRST_TENSOR = 1 + len(STATE_BASES)
STATE_BYTES = 8 * (len(STATE_BASES) + 2)
"""Bytes of a state; behind it is the record of the second half of the operation."""
_CUDA, _CPU = 2, 1
_CODES = {
    torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32), torch.float8_e4m3fn: (10, 8),
    torch.uint8: (1, 8), torch.int8: (0, 8), torch.int32: (0, 32), torch.int64: (0, 64), torch.float8_e8m0fnu: (14, 8),
}  # fmt: skip
"""DLPack's code and bits."""


Marks = Mapping[str, int]
"""A number that stands for an address, by name of a tensor or of STATE_BASES."""


class ExpectedTensor(NamedTuple):
    """What a tensor must be: dtype, shape (lengths, TOKENS or ROWS), whether None will do, whether 16-byte aligned,
    whether int64 will do instead of int32."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    optional: bool = False
    aligned: bool = False
    may_be_wide: bool = False


class _ExpectedWords(ctypes.Structure):
    _fields_ = (
        ("dtype", c_uint32),
        ("flags", c_uint32),
        ("ndim", c_int32),
        ("pad", c_int32),
        ("shape", c_int64 * _MOST_DIMS),
    )


class _PlaceWords(ctypes.Structure):
    _fields_ = (("base", c_uint32), ("pad", c_uint32), ("offset", c_uint64))


class _PlanWords(ctypes.Structure):
    """`Plan` of native/operation.cpp."""

    _fields_ = (
        ("launch", launch.Prepared),
        ("record", c_void_p),
        ("record_bytes", c_uint64),
        ("num_tokens_at", c_uint64),
        ("addresses_at", c_uint64),
        ("phases_at", c_uint64),
        ("num_rows_at", c_uint64),
        ("num_addresses", c_uint32),
        ("num_tensors", c_uint32),
        ("addresses", _PlaceWords * _MOST_ADDRESSES),
        ("tensors", _ExpectedWords * _MOST_TENSORS),
        ("state", _PlaceWords * len(STATE_BASES)),
        ("makes_state", c_uint32),
        ("takes_state", c_uint32),
        ("most_tokens", c_int64),
        ("rows", c_int64),
        ("quiet", c_void_p),
        ("context", c_void_p),
        ("stream", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("not_captured", c_uint32),
        ("was_captured", c_uint32),
        ("numbers", c_void_p),
        ("copy_from", _PlaceWords),
        ("copy_to", _PlaceWords),
        ("narrow", launch.Prepared),
        ("narrow_to", _PlaceWords),
        ("token_words", c_uint64),
    )


PLAN_BYTES = ctypes.sizeof(_PlanWords)


class Surroundings(NamedTuple):
    """What the plans of one rank share.

    Attributes:
        order: of the rank's launches.
        quiet: what a call looks at first.
        keep: what those addresses lie in.
        context: CUDA context that must be current, as an address.
    """

    device: torch.device
    order: StreamOrder
    quiet: Quiet
    keep: Any
    context: int
    library: ctypes.CDLL


class OperationPlan:
    """One kind of operation.

    Attributes:
        trims: whether shapes follow from the rows that are received.
        numbers: int32 [2], pinned: num_rows and num_dropped, where they are waited for; or None.

    Args:
        record: its argument record, filled but for the words below.
        numbers, addresses: names of the first of the two runs of words that a call sets; of the numbers, a call sets
            two: T and the slot.
        tensors: by name, in the order in which `call` takes them: what each must be.
        places: gives the run of addresses, from the addresses of tensors and of STATE_BASES by name.
        most_tokens: T at most.
        rows: received, -1: the numbers say, or the former state.
        state: gives the addresses of the state that the call makes, as `places`; None: makes none.
        takes_state: a former state is given, whose T and rows hold.
        reads: num_rows and num_dropped are waited for.
        split: two launches, one that sends and one that receives.
        not_captured: no `call` while a CUDA graph captures the stream.
        routed: numbers of each token in what follows.
        narrowed: launch of the kernel `narrow`, and where it writes, as `places`.
        copied: (from, to) as `places`: float32 that are copied, by that kernel where it is launched.
    """

    def __init__(
        self, around: Surroundings, prepared: Any, record: Any, runs: tuple[str, str],
        tensors: Mapping[str, ExpectedTensor], places: Callable[[Marks], Sequence[int]], most_tokens: int, rows: int,
        state: Callable[[Marks], Sequence[int]] | None = None, takes_state: bool = False, reads: bool = False,
        split: bool = False, not_captured: bool = False, routed: int = 0,
        narrowed: tuple[launch.Prepared, Callable[[Marks], int]] | None = None,
        copied: Callable[[Marks], tuple[int, int]] | None = None,
    ) -> None:  # fmt: skip
        assert ctypes.sizeof(record) <= _MOST_RECORD_BYTES
        # Which word of the record is the address of which tensor: a call with marks in place of addresses.
        marks = {name: (1 + i) << _MARK for i, name in enumerate(STATE_BASES)}
        marks |= {name: (_FIRST_TENSOR + i) << _MARK for i, name in enumerate(tensors)}
        found, left = places(marks), () if state is None else state(marks)
        # The plan as the native library reads it.
        self._plan = _PlanWords(
            launch=prepared, record=addressof(record), record_bytes=ctypes.sizeof(record),
            num_tokens_at=getattr(type(record), runs[0]).offset,
            addresses_at=getattr(type(record), runs[1]).offset, num_addresses=len(found), num_tensors=len(tensors),
            addresses=tuple(map(_place, found)), tensors=tuple(map(_expected, tensors.values())),
            state=tuple(map(_place, left)), makes_state=state is not None, takes_state=takes_state,
            most_tokens=most_tokens, rows=rows, quiet=around.quiet.address,
            context=around.context, stream=addressof(around.order.current), not_captured=not_captured,
            device_type=_CUDA if around.device.type == "cuda" else _CPU, device_id=around.device.index or 0,
        )  # fmt: skip
        self._plan.token_words = routed
        if narrowed is not None:
            self._plan.narrow, self._plan.narrow_to = narrowed[0], _place(narrowed[1](marks))
        if copied is not None:
            self._plan.copy_from, self._plan.copy_to = map(_place, copied(marks))
        if split:
            self._plan.phases_at = type(record).work.offset + abi.Work.phases.offset
        # The functions that a call needs.
        self.trims = rows < 0
        self.numbers = self._read_numbers(type(record).num_rows.offset) if reads else None
        self._kept = around, record
        make, at = _maker(around.library), addressof(self._plan)
        self.call, self.fill, self.launch = make(at, 0), make(at, 1), make(at, 2)
        """call(slot, former state or None, *tensors): the state (and the record, where the second phase is another
        launch), or 0 where there is neither; the driver's status, which is greater; None: nothing has begun.
        fill(slot, former state or None, T, *addresses of tensors): the state and the record; nothing is launched.
        launch(what `fill` or `call` gave, phases, CUstream): the state; the driver's status; with no CUstream the
        current one, and None: nothing was launched."""

    def _read_numbers(self, at: int) -> torch.Tensor:
        with torch.inference_mode(False):  # written later, in whatever mode
            numbers = torch.zeros(2, dtype=torch.int32, pin_memory=True, device="cpu")
        self._plan.numbers, self._plan.num_rows_at = numbers.data_ptr(), at
        return numbers

    @property
    def was_captured(self) -> bool:
        """Whether a CUDA graph took one of its launches."""
        return bool(self._plan.was_captured)


def _place(mark: int) -> _PlaceWords:
    return _PlaceWords(mark >> _MARK, 0, mark & ((1 << _MARK) - 1))


def _expected(want: ExpectedTensor) -> _ExpectedWords:
    code, bits = _CODES[want.dtype]
    flags = want.optional * _OPTIONAL | want.aligned * _ALIGNED | want.may_be_wide * _MAY_BE_WIDE
    return _ExpectedWords(code | bits << 8 | 1 << 16, flags, len(want.shape), 0, want.shape)


@functools.cache
def _maker(library: ctypes.CDLL) -> Any:
    """cd_operation. Raises TransportError."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        exchange = get(capsule, b"dlpack_exchange_api")
    except (ValueError, TypeError):
        exchange = None
    if library.cd_operation_open(exchange, id(torch.Tensor)) != 0:
        raise TransportError("nvlink: needs CPython's stable ABI in the running process")
    return ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_int)(("cd_operation", library))
