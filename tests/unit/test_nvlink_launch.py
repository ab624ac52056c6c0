"""Launches through the native library, with a driver that only writes down what it is asked: no GPU needed."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ep_kernels import jit
from ep_kernels.errors import TransportError
from ep_kernels.transports.build import Native, find_compiler, native_of
from ep_kernels.transports.nvlink.copy_engines.copy_times import TimedKind
from ep_kernels.transports.nvlink.copy_engines.repeat_records import DISTURBED, PushTemplate, Quiet
from ep_kernels.transports.nvlink.gpu import copy_schedule, launch
from ep_kernels.transports.nvlink.gpu.copy_schedule import (
    COPY,
    GRAPH,
    MARK,
    SMALL_BYTES,
    WAIT,
    WRITE,
    CopyMarks,
    CopyPart,
    CopyPlaces,
)
from tests import tools

FAKE_DRIVER = """
#include <cstdint>
#include <cstring>
struct Attribute { uint32_t id; char pad[4]; int32_t number; char rest[60]; };
struct Config {
  uint32_t gx, gy, gz, bx, by, bz, shared;
  void* stream;
  Attribute* attributes;
  uint32_t count;
};
extern "C" {
uint64_t notes[16];
double seen[2];
int answer = 0, num_arguments = 0;
int cuLaunchKernelEx(const Config* c, void* function, void** arguments, void** extra) {
  const uint64_t found[] = {(uint64_t)function, c->gx, c->gy * c->gz, c->bx, c->by * c->bz, c->shared,
                            (uint64_t)c->stream, c->count, (uint64_t)extra};
  memcpy(notes, found, sizeof(found));
  for (uint32_t i = 0; i < c->count; ++i) {
    notes[9 + 2 * i] = c->attributes[i].id;
    notes[10 + 2 * i] = c->attributes[i].number;
  }
  for (int i = 0; i < num_arguments; ++i) memcpy(&seen[i], arguments[i], sizeof(double));
  return answer;
}
uint64_t steps[200][4];
int num_steps = 0, refused = -1;
int note(uint64_t kind, uint64_t a, uint64_t b, uint64_t c) {
  if (num_steps == refused) return 719;
  const uint64_t found[] = {kind, a, b, c};
  memcpy(steps[num_steps++], found, sizeof(found));
  return 0;
}
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t num_bytes, void* stream) {
  return note((uint64_t)stream, to, from, num_bytes);
}
int cuStreamWaitValue64_v2(void* stream, uint64_t at, uint64_t value, unsigned flags) {
  return note((uint64_t)stream, 1, at + flags, value);
}
int cuStreamWriteValue64_v2(void* stream, uint64_t at, uint64_t value, unsigned flags) {
  return note((uint64_t)stream, 2, at + flags, value);
}
struct WordOp { uint32_t kind, pad; uint64_t at, value; uint32_t flags, pad2; uint64_t alias, rest; };
int cuStreamBatchMemOp_v2(void* stream, unsigned count, WordOp* ops, unsigned flags) {
  int status = note((uint64_t)stream, 1000 + count, flags, 0);
  for (unsigned i = 0; i < count && !status; ++i)
    status = note((uint64_t)stream, ops[i].kind - 3, ops[i].at + ops[i].flags, ops[i].value);
  return status;
}
uint64_t no_graph = 0, num_graphs = 0;
int cuStreamCreate(void** stream, unsigned flags) {
  *stream = (void*)500;
  return note(500, 4000, flags, 0);
}
int cuStreamDestroy_v2(void* stream) { return note((uint64_t)stream, 4001, 0, 0); }
int cuStreamBeginCapture_v2(void* stream, int mode) { return note((uint64_t)stream, 4002, mode, 0); }
int cuStreamEndCapture(void* stream, void** graph) {
  *graph = (void*)600;
  return note((uint64_t)stream, 4003, 0, 0);
}
int cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long flags) {
  if (no_graph) return 719;
  *exec = (void*)(700 + num_graphs++);
  return note(0, 4004, (uint64_t)graph, flags);
}
int cuGraphDestroy(void* graph) { return note(0, 4005, (uint64_t)graph, 0); }
int cuGraphExecDestroy(void* exec) { return note(0, 4006, (uint64_t)exec, 0); }
int cuGraphLaunch(void* exec, void* stream) { return note((uint64_t)stream, 4007, (uint64_t)exec, 0); }
int cuEventRecord(void* event, void* stream) { return note((uint64_t)stream, 3000, (uint64_t)event, 0); }
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  return note((uint64_t)stream, 3001, (uint64_t)event, flags);
}
int cuGetErrorName(int status, const char** text) {
  *text = status == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : nullptr;
  return 0;
}
int cuGetErrorString(int status, const char** text) {
  *text = status == 719 ? "it broke" : nullptr;
  return 0;
}
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver of our own, and a copy of the library that has opened no other."""
    place = tmp_path_factory.mktemp("driver")
    compiler = find_compiler()
    if compiler is None:
        tools.skip("g++", "no other compiler either")
    (place / "driver.cpp").write_text(FAKE_DRIVER)
    command = [*compiler, "-shared", "-fPIC", "-o", str(place / "driver.so"), str(place / "driver.cpp")]
    subprocess.run(command, check=True, timeout=120)
    shutil.copy(native_of("nvlink").library, place / "_native.so")
    return place


@pytest.fixture
def driver(folder: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(folder / "driver.so"))


@pytest.fixture
def library(folder: Path) -> ctypes.CDLL:
    copied = replace(native_of("nvlink"), library=folder / "_native.so")
    return launch.load(copied, str(folder / "driver.so"))


def asked(driver: ctypes.CDLL) -> list[list[int]]:
    """What the driver was asked to put on streams since the last call."""
    count, found = ctypes.c_int.in_dll(driver, "num_steps"), ((ctypes.c_uint64 * 4) * 200).in_dll(driver, "steps")
    noted = [list(found[i]) for i in range(count.value)]
    count.value = 0
    return noted


def notes(driver: ctypes.CDLL) -> list[int]:
    return list((ctypes.c_uint64 * 16).in_dll(driver, "notes"))


@pytest.mark.parametrize(
    ("flags", "attributes"),
    [
        ({}, [(6, 1)]),
        ({"overlapped": False}, []),
        ({"cooperative": True}, [(2, 1)]),
        ({"cooperative": True, "overlapped": True}, [(2, 1)]),
    ],
)
def test_what_the_driver_is_asked(
    library: ctypes.CDLL, driver: ctypes.CDLL, flags: dict[str, bool], attributes: list[tuple[int, int]]
) -> None:
    kernel = launch.Kernel(0x7FFF12345678, 231424, library)
    first, second = ctypes.c_double(1.5), ctypes.c_double(-2.5)
    ctypes.c_int.in_dll(driver, "num_arguments").value = 2
    kernel.launch(132, 256, 0x7FFFDEADBEE0, first, second, **flags)
    found = notes(driver)
    assert found[:9] == [0x7FFF12345678, 132, 1, 256, 1, 231424, 0x7FFFDEADBEE0, len(attributes), 0]
    assert [(found[9 + 2 * i], found[10 + 2 * i]) for i in range(len(attributes))] == attributes
    assert list((ctypes.c_double * 2).in_dll(driver, "seen")) == [1.5, -2.5]


def test_a_refused_launch_speaks_the_drivers_words(library: ctypes.CDLL, driver: ctypes.CDLL) -> None:
    ctypes.c_int.in_dll(driver, "num_arguments").value = 0
    kernel, answer = launch.Kernel(1, 0, library), ctypes.c_int.in_dll(driver, "answer")
    try:
        answer.value = 719
        with pytest.raises(TransportError, match="cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED: it broke"):
            kernel.launch(1, 1, 0)
        answer.value = 4711
        with pytest.raises(TransportError, match="cuLaunchKernelEx: 4711: unknown error"):
            kernel.launch(1, 1, 0)
    finally:
        answer.value = 0
    kernel.launch(1, 1, 0)
    assert notes(driver)[:2] == [1, 1]


def test_one_kernel_in_several_shapes(library: ctypes.CDLL, driver: ctypes.CDLL) -> None:
    kernel, number = launch.Kernel(5, 64, library), ctypes.c_double(3.0)
    ctypes.c_int.in_dll(driver, "num_arguments").value = 1
    for blocks, overlapped in [(1, True), (2, False), (1, False), (1, True), (2, True)]:
        kernel.launch(blocks, 32, blocks, number, overlapped=overlapped)
        found = notes(driver)
        assert (found[0], found[1], found[6], found[7]) == (5, blocks, blocks, int(overlapped))
        assert (ctypes.c_double * 2).in_dll(driver, "seen")[0] == 3.0


STEPS = [
    (WRITE, 0x1000, 0, 7),
    (COPY, 0x3000, 0x4000, 5 << 32),
    (MARK, 0x5000, 0, 0),
    (WAIT, 0x2000, 0, 1 << 63),
]
NOTED = [[9, 2, 0x1000, 7], [9, 0x3000, 0x4000, 5 << 32], [9, 3000, 0x5000, 0], [9, 1, 0x2000, 1 << 63]]


def test_copies_waits_and_writes(library: ctypes.CDLL, driver: ctypes.CDLL) -> None:
    """Of one call; those behind a refused one are not asked for."""
    refused = ctypes.c_int.in_dll(driver, "refused")
    asked(driver)
    try:
        launch.run_ops(STEPS, 9, library)
        assert asked(driver) == NOTED
        for refused.value in range(4):
            with pytest.raises(TransportError, match="copies on a stream: CUDA_ERROR_LAUNCH_FAILED: it broke"):
                launch.run_ops(STEPS, 9, library)
            assert asked(driver) == NOTED[: refused.value]
    finally:
        refused.value = -1
    launch.run_ops([], 9, library)
    launch.run_ops_behind(STEPS, 9, 5, 77, library)
    assert asked(driver) == [[5, 3000, 77, 0], [9, 3001, 77, 0], *NOTED]
    launch.run_ops_behind(STEPS, 9, 9, 77, library)
    assert asked(driver) == [[9, 3000, 77, 0], *NOTED]
    assert library.cd_await(5, 77) == 0
    assert asked(driver) == [[5, 3001, 77, 0]]


def row(kind: int, count: int) -> list[tuple[int, int, int, int]]:
    return [(kind, 100 + i, 200 + i, 300 + i) for i in range(count)]


def test_waits_and_writes_side_by_side_are_one_call(library: ctypes.CDLL, driver: ctypes.CDLL) -> None:
    """Of 64 at most."""
    asked(driver)
    launch.run_ops([*row(WRITE, 2), *row(WAIT, 1), *row(COPY, 2), *row(WAIT, 65), (GRAPH, 700, 0, 0)], 9, library)
    waits = [[9, 1, 100 + i, 300 + i] for i in range(65)]
    assert asked(driver) == [
        [9, 1003, 0, 0], [9, 2, 100, 300], [9, 2, 101, 301], waits[0], [9, 100, 200, 300], [9, 101, 201, 301],
        [9, 1064, 0, 0], *waits[:64], waits[64], [9, 4007, 700, 0],
    ]  # fmt: skip


def test_a_graph_of_copies(library: ctypes.CDLL, driver: ctypes.CDLL) -> None:
    """Nothing is left of its making, whatever the driver refuses."""
    refused, none = ctypes.c_int.in_dll(driver, "refused"), ctypes.c_uint64.in_dll(driver, "no_graph")
    made = [[500, 4000, 1, 0], [500, 4002, 2, 0], [500, 100, 200, 300], [500, 101, 201, 301], [500, 4003, 0, 0]]
    asked(driver)
    graph = launch.graph_of(row(COPY, 2), library)
    assert asked(driver) == [*made, [0, 4004, 600, 0], [0, 4005, 600, 0], [500, 4001, 0, 0]]
    launch.free_graph(graph, library)
    assert asked(driver) == [[0, 4006, graph, 0]]
    try:
        none.value = 1
        with pytest.raises(TransportError, match="a graph of copies: CUDA_ERROR_LAUNCH_FAILED"):
            launch.graph_of(row(COPY, 2), library)
        assert asked(driver) == [*made, [0, 4005, 600, 0], [500, 4001, 0, 0]]
        none.value, refused.value = 0, 1
        with pytest.raises(TransportError, match="a graph of copies: CUDA_ERROR_LAUNCH_FAILED"):
            launch.graph_of(row(COPY, 2), library)
        assert asked(driver) == made[:1]
    finally:
        none.value, refused.value = 0, -1


@pytest.mark.parametrize("active", [(True,) * 4, (True, True, False, True)])
@pytest.mark.parametrize("num_bytes", [320, SMALL_BYTES])
def test_a_template_is_a_push_of_any_number(
    library: ctypes.CDLL, driver: ctypes.CDLL, active: tuple[bool, ...], num_bytes: int
) -> None:
    """By one call, behind another stream, and not where a word is not quiet."""
    places = CopyPlaces(1, active, tuple(1 << (20 + r) for r in range(4)), 256, 512, 64, 8, 16, 1 << 30)
    parts = [CopyPart(4096, 8192, 0, num_bytes, num_bytes), CopyPart(1 << 40, 70000, 0, 48, 64)]
    kind = TimedKind("", 0, copy_schedule.marked(places, parts), ())
    words = (ctypes.c_int64 * 3)(0, 4, -1)
    quiet = Quiet((ctypes.addressof(words) + 8 * i, most) for i, most in enumerate((0, 4, 0)))
    steps_of = functools.partial(copy_schedule.push_by_graphs, places, signature=77, ready=701, shards=702)
    template = PushTemplate(places, kind, 77, steps_of, 9, quiet)
    arrivals = places.others(-1) if num_bytes == SMALL_BYTES else []
    assert list(kind.arrivals) == arrivals
    for seq in (1, 2, 63, 64, 65, 77, 4096, 1 << 33):
        events = (ctypes.c_uint64 * 6)(*(1000 * seq + i for i in range(6)))
        steps = copy_schedule.push_by_graphs(places, seq, 77, 701, 702, CopyMarks.of(events[1:], arrivals))
        asked(driver)
        launch.run_ops_behind(steps, 9, 5, events[0], library)
        want = asked(driver)
        assert len(want) > 10
        assert library.cd_repeat_copies(template.address, seq, 5, events) == 0
        assert asked(driver) == want
    for i in range(3):
        words[i] += 2
        assert library.cd_repeat_copies(template.address, seq, 5, events) == DISTURBED
        assert asked(driver) == []
        words[i] -= 2


def test_missing_and_old_drivers_are_named(folder: Path) -> None:
    copied = replace(native_of("nvlink"), library=folder / "_native.so")
    with pytest.raises(TransportError, match=r"cannot use the CUDA driver: libnothing\.so\.9.*is one installed"):
        launch.load(copied, "libnothing.so.9")
    with pytest.raises(TransportError, match=r"no cuLaunchKernelEx, so the driver is older than CUDA 12\.0"):
        launch.load(copied, "libc.so.6")


def test_a_missing_library_names_the_cure(tmp_path: Path) -> None:
    nothing = Native(tmp_path, tmp_path / "none.so")
    with pytest.raises(TransportError, match=r"nvlink transport: native library .*none\.so is missing.*build_backend"):
        launch.load(nothing)


@pytest.mark.parametrize("shipped", [True, False])
def test_a_packaged_kernel_that_the_driver_refuses_is_compiled(
    shipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from ep_kernels.transports.nvlink.gpu import driver

    barrier, asked = jit.Variant("barrier"), []
    compiler = jit.Compiler(tmp_path / "cache", tmp_path / "shipped")
    if shipped:
        monkeypatch.setattr(jit, "shipped_variants", lambda: iter([barrier]))
        (file,) = compiler.ship("sm_90a")
        file.write_bytes(b"of a compiler of the future")

    def refusing(cubin: bytes, name: str, shared_bytes: int) -> tuple[str, int]:
        asked.append(cubin)
        if len(asked) == 1:
            raise TransportError("cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU")
        return name, shared_bytes

    monkeypatch.setattr(driver, "Function", refusing)
    if not shipped:
        with pytest.raises(TransportError, match="cuModuleLoadData"):
            driver._load(compiler, barrier, "sm_90a", 5)
        return
    assert driver._load(compiler, barrier, "sm_90a", 5) == ("barrier", 5)
    assert asked[0] == b"of a compiler of the future"
    assert asked[1].startswith(b"\x7fELF")
    assert "the packaged kernel barrier is compiled here instead: cuModuleLoadData" in caplog.text
