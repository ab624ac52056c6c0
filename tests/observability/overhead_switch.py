"""The native half of `cpu` with a switch, made from its sources: at 0 its operations read no clock for a record and
keep none. And the records of many dispatches in a loop, to be timed."""

from __future__ import annotations

import shutil
from pathlib import Path

from ep_kernels.transports.build import Native, native_of

SWITCH, LOOP = "crossdock_test_records", "crossdock_test_dispatch_records"
_EXPORT = 'extern "C" __attribute__((visibility("default")))'
_NAMESPACE = "\nnamespace cd {\n"
_HEADER = f"""
{_EXPORT} int {SWITCH};
namespace cd {{
inline int64_t record_ns() {{ return {SWITCH} ? now_ns() : 0; }}
}}
"""
_LOOP = f"""
extern "C" {{ int {SWITCH} = 1; }}
// Nanoseconds of `n` records of a dispatch: the clock, the waits for peers, the ring.
{_EXPORT} int64_t {LOOP}(cd::Comm* c, int64_t n) {{
  cd::DispatchOp op{{}};
  const int slot = c->slot_of(1);
  const int64_t began = cd::now_ns();
  for (int64_t i = 0; i < n; ++i) {{
    op.clock.start_ns = cd::record_ns();
    c->own.dispatch_meta(slot)->published_ns = cd::record_ns();
    op.clock.send_ns = cd::record_ns() - op.clock.start_ns;
    cd::record(*c, op, slot);
  }}
  return cd::now_ns() - began;
}}
"""
_CLOCKS = tuple(f"{field} = now_ns()" for field in ("op.clock.start_ns", "published_ns", "op.clock.send_ns"))
"""What only records need; the receive half's beginning is where its deadline counts from."""
_RECORDS = {
    "dispatch.cpp": "void record(Comm& c, const DispatchOp& op, int slot) {\n",
    "combine.cpp": "void record(Comm& c, const CombineOp& op, int slot, int64_t receive_ns) {\n",
}


def library_with_switch(folder: Path) -> Native:
    """Builds it."""
    ours = native_of("cpu")
    sources = folder / "native"
    shutil.copytree(ours.sources, sources)
    _edit(sources / "member.hpp", {_NAMESPACE: _HEADER + _NAMESPACE})
    for name in ("dispatch.cpp", "combine_send.cpp"):
        _edit(sources / name, {clock: clock.replace("now_ns()", "record_ns()") for clock in _CLOCKS})
    for name, begin in _RECORDS.items():
        _edit(sources / name, {begin: f"{begin}  if (!{SWITCH}) return;\n"})
    dispatch = sources / "dispatch.cpp"
    dispatch.write_text(dispatch.read_text() + _LOOP)
    made = Native(sources, folder / "_native.so", ours.included)
    made.build()
    return made


def _edit(path: Path, changes: dict[str, str]) -> None:
    text = path.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, f"{path.name}: expected one {old!r}"
        text = text.replace(old, new)
    path.write_text(text)
