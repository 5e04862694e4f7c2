"""Runs `kvferry` where the system does not permit process_vm_readv and process_vm_writev.

    python tests/support/without_vm.py bench transport --carriers local

It is the system that says no, as containers do it: a filter (seccomp) that answers EPERM, which all
processes that are started from here inherit.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys

CALLS = {"x86_64": (310, 311), "aarch64": (270, 271)}  # readv, writev
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # of classic BPF
ALLOW, FAIL_WITH = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_void_p))


def forbid() -> None:
    """For this process and all that it starts, for good."""
    read, write = CALLS[platform.machine()]
    code = b"".join(
        struct.pack("HBBI", *one)
        for one in (
            (LOAD, 0, 0, 0),  # the number of the call
            (JUMP_IF_EQUAL, 1, 0, read),
            (JUMP_IF_EQUAL, 0, 1, write),
            (RETURN, 0, 0, FAIL_WITH | errno.EPERM),
            (RETURN, 0, 0, ALLOW),
        )
    )
    kept = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(kept))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if libc.prctl(PR_SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


if __name__ == "__main__":
    forbid()
    from kvferry.cli.main import app

    app(sys.argv[1:], prog_name="kvferry")
