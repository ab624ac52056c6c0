"""The guest: Debian's kernel, unpacked and not installed, over this machine's files; two Soft-RoCE devices on a cable.

Nothing runs but what is asked for, so a guest starts in seconds. It has no torch: under an emulated processor its
import alone would take minutes.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.tools import path as program

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILT = ROOT / "build" / "rxe"
PACKAGES = (
    "qemu-system-x86 busybox-static cpio kmod rdma-core ibverbs-providers perftest libfabric-bin iproute2 apt dpkg"
)
_TOOLS = ("qemu-system-x86_64", "cpio", "rdma", "ib_write_bw", "apt-get", "dpkg")
_MODULES = "virtio_pci virtio_rng 9p 9pnet_virtio overlay rdma_rxe rdma_ucm ib_uverbs crc32_generic crc32_pclmul veth"
_KERNEL = "linux-image-amd64"
SBIN = "/sbin/{}"
_MACHINE = "-M q35 -accel tcg,thread=multi -cpu max -smp 2 -m 3G -nodefaults -no-reboot -nographic -serial stdio"


class GuestError(RuntimeError):
    """The guest could not be built, or did not end by itself; the message has its last words."""


def missing() -> str:
    """Why no guest can run on this machine; "" if one can."""
    absent = [tool for tool in _TOOLS if program(tool) is None]
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "the guest is an x86-64 Linux machine over the files of this one"
    return f"no {', '.join(absent)} (Debian: apt-get install {PACKAGES})" if absent else ""


def run(command: str, out: Path, timeout_s: float) -> tuple[int, str]:
    """Run a command of bash in a new guest.

    Args:
        command: runs as root, in the repository.
        out: folder of this machine that is /mnt there, and can be written.
        timeout_s: until the guest has ended.

    Returns:
        Status of the command, and what was printed.

    Raises:
        GuestError: the guest did not come up, or did not end in time.
    """
    kernel, initrd = build()
    out.mkdir(parents=True, exist_ok=True)
    script = f". {HERE}/cable.sh; cd {ROOT}; {command}"
    encoded = base64.b64encode(script.encode()).decode()
    words = f"console=ttyS0 quiet panic=-1 tsc=reliable clocksource=tsc guest_command={encoded}"
    shares = [
        *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
        *("-fsdev", f"local,id=out,path={out},security_model=none"),
        *("-device", "virtio-9p-pci,fsdev=out,mount_tag=out", "-device", "virtio-rng-pci"),
    ]
    started = ["qemu-system-x86_64", *_MACHINE.split(), "-kernel", str(kernel), "-initrd", str(initrd)]
    try:
        done = subprocess.run(
            [*started, "-append", words, *shares],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise GuestError(f"the guest did not end in {timeout_s:g} s:\n{_text(error.stdout or b'')[-4000:]}") from error
    printed = _text(done.stdout)
    status = re.search(r"GUEST_RC=(\d+)", printed)
    if status is None:
        raise GuestError(f"the guest did not come to its command:\n{printed[-4000:]}")
    return int(status.group(1)), printed[: status.start()]


def _text(raw: bytes) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1bc|\r", "", raw.decode(errors="replace"))


def build() -> tuple[Path, Path]:
    """Kernel and initial files, made once. Raises GuestError."""
    kernel, initrd = BUILT / "vmlinuz", BUILT / f"initrd-{(HERE / 'init.sh').stat().st_mtime_ns}.gz"
    if not kernel.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        _unpack(kernel)
    if not initrd.exists():
        _pack(initrd)
    return kernel, initrd


def _unpack(kernel: Path) -> None:
    package = re.search(r"Depends: (linux-image-\S+)", _run("apt-cache", "depends", _KERNEL))
    if package is None:
        raise GuestError(f"apt-cache knows no {_KERNEL}")
    _run("apt-get", "download", package.group(1), cwd=BUILT)
    (archive,) = BUILT.glob("linux-image-*.deb")
    _run("dpkg", "-x", str(archive), str(BUILT / "root"))
    archive.unlink()
    _run(SBIN.format("depmod"), "-b", str(BUILT / "root"), _version())
    (image,) = (BUILT / "root" / "boot").glob("vmlinuz-*")
    shutil.copyfile(image, kernel)


def _version() -> str:
    (folder,) = (BUILT / "root" / "lib" / "modules").iterdir()
    return folder.name


def _pack(initrd: Path) -> None:
    """busybox, the modules and the script that runs first."""
    modules = BUILT / "root" / "lib" / "modules" / _version()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        there = root / "lib" / "modules" / _version()
        for module in [*_MODULES.split(), "sch_netem"]:
            shown = _run(SBIN.format("modprobe"), "-d", str(BUILT / "root"), "-S", _version(), "--show-depends", module)
            for path in map(Path, re.findall(r"^insmod (\S+)", shown, re.MULTILINE)):
                copy = there / path.relative_to(modules)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        for name in ("modules.order", "modules.builtin", "modules.builtin.modinfo"):
            shutil.copyfile(modules / name, there / name)
        _run(SBIN.format("depmod"), "-b", folder, _version())
        (root / "bin").mkdir()
        shutil.copy("/bin/busybox", root / "bin" / "busybox")
        shutil.copy(HERE / "init.sh", root / "init")
        (root / "init").chmod(0o755)
        _run("bash", "-c", f"find . | cpio -o -H newc --quiet | gzip -1 > {initrd}", cwd=root)


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise GuestError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr.strip()[-2000:]}")
    return done.stdout
