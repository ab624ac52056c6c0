"""Loads a native library and checks that it was built from the sources beside it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

from ep_kernels.errors import TransportError
from ep_kernels.transports.build import CURE, Native

Signature = tuple[object, Sequence[object]]
"""Result type and argument types, as ctypes spells them."""


def load(name: str, native: Native, signatures: Mapping[str, Signature]) -> ctypes.CDLL:
    """The library of what has that name; calls release the GIL. It must have `cd_build_id`.

    Raises:
        TransportError: missing, unloadable or stale, with the command that cures it.
    """
    what = f"{name}: native library {native.library}"
    if not native.library.is_file():
        raise TransportError(f"{what} is missing; {CURE}")
    try:
        library = ctypes.CDLL(str(native.library))
        for function, (result, arguments) in {"cd_build_id": (ctypes.c_char_p, ()), **signatures}.items():
            found = getattr(library, function)
            found.restype, found.argtypes = result, tuple(arguments)
    except (OSError, AttributeError) as error:
        raise TransportError(f"{what} does not load ({error}); {CURE}") from error
    if native.sources.is_dir() and library.cd_build_id().decode() != native.build_id():
        raise TransportError(f"{what} is older than its sources; {CURE}")
    return library
