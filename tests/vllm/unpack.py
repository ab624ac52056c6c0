"""Unpack the wheels in a folder there, without compiled libraries, and remove them: `python unpack.py FOLDER`."""

import sys
import zipfile
from pathlib import Path

if __name__ == "__main__":
    for wheel in Path(sys.argv[1]).glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(wheel.parent, [name for name in archive.namelist() if not name.endswith(".so")])
        wheel.unlink()
