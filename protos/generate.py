"""Generate `services/crossdock/protocol/v1` from `protos/`, or with --check fail where they differ.

Runs in an environment that has grpcio-tools 1.76.0 and nothing else of ours (`make proto`, `make proto-check`): the
generated code then asks for no newer grpcio and protobuf than users can be expected to have.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("crossdock/v1")
PYTHON = "crossdock.protocol.v1"
"""Where Python imports them; on the wire, and in other languages, the package is `crossdock.v1`."""


def generate(out: Path) -> list[str]:
    """Write the generated files below `out`; their names."""
    sources = sorted(str(path) for path in (ROOT / "protos" / PACKAGE).glob("*.proto"))
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    includes = [f"-I{ROOT / 'protos'}", f"-I{files('grpc_tools') / '_proto'}"]
    if protoc.main(["protoc", *includes, *flags, *sources]) != 0:
        sys.exit("protoc failed")
    made = sorted((out / PACKAGE).iterdir())
    for path in made:
        path.write_text(moved(path.read_text(encoding="utf-8")), encoding="utf-8")
    return [path.name for path in made]


def moved(text: str) -> str:
    """The code with our modules where they are imported from, which protoc takes from the place of the .proto."""
    text = re.sub(r"^from crossdock\.v1 import", f"from {PYTHON} import", text, flags=re.MULTILINE)
    return re.sub(r"'crossdock\.v1\.(\w+_pb2)'", rf"'{PYTHON}.\1'", text)


def main() -> None:
    """Write into the tree, or compare with it."""
    here = ROOT / "services" / PYTHON.replace(".", "/")
    with tempfile.TemporaryDirectory() as folder:
        names = generate(Path(folder))
        made = Path(folder) / PACKAGE
        kept = sorted(path.name for path in here.glob("*_pb2*"))
        changed = [
            name for name in names if name not in kept or (here / name).read_bytes() != (made / name).read_bytes()
        ]
        stale = sorted(set(kept) - set(names))
        if "--check" not in sys.argv:
            for name in names:
                shutil.copy(made / name, here / name)
            for name in stale:
                (here / name).unlink()
        elif changed or stale:
            sys.exit(f"{here.relative_to(ROOT)}: not what protos/ generates: {changed + stale}; run `make proto`")
    print(f"{here.relative_to(ROOT)}: {len(names)} files, {len(changed) + len(stale)} changed")


if __name__ == "__main__":
    main()
