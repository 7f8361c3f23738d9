"""Create the namespaces of one host and keep them: `holder.py HOST_NAME HOSTS_FILE VISIBLE...`.

Prints the PID of the host's first process; when it exits, the kernel kills all processes of the host. HOSTS_FILE is the
text of /etc/hosts. The host can read the machine's files. Its /tmp and /dev/shm are empty except for VISIBLE, paths of
the machine. Standard library only: run with `-I -S`.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 29, 1 << 30
ALL = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MS_BIND, MS_PRIVATE = 1 << 12, 1 << 18
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG = 1
OWN = ("/tmp", "/dev/shm")

libc = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def done(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    done(libc.mount(source.encode(), target.encode(), kind.encode(), flags, None), f"mounting {target}")


def make_read_only() -> None:
    """Mount everything read-only, without effect outside the host."""
    attributes = MountAttributes(set=MOUNT_ATTR_RDONLY, propagation=MS_PRIVATE)
    size_bytes = ctypes.sizeof(attributes)
    wanted = (AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes), size_bytes)
    done(libc.syscall(SYS_MOUNT_SETATTR, *wanted), "making files read-only")


def own_files(hosts_file: str, visible: list[str]) -> None:
    make_read_only()
    opened = [(path, os.open(path, os.O_PATH)) for path in visible]
    for folder in OWN:
        mount("tmpfs", folder, "tmpfs")
    for path, fd in opened:
        place = Path(path)
        if Path(f"/proc/self/fd/{fd}").is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        mount(f"/proc/self/fd/{fd}", path, flags=MS_BIND)
        os.close(fd)
    names = Path(OWN[0]) / "hosts"
    names.write_text(hosts_file)
    mount(str(names), "/etc/hosts", flags=MS_BIND)
    mount("proc", "/proc", "proc")


def reap_for_ever() -> None:
    """Reap orphans, the duty of the first process of a PID namespace."""
    while True:
        signal.sigwait({signal.SIGCHLD})
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def main(arguments: list[str]) -> None:
    host_name, hosts_file, *visible = arguments
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    done(libc.unshare(ALL), "making namespaces")
    socket.sethostname(host_name)
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        done(libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
        own_files(hosts_file, visible)
        os.write(writer, b"ready")
        os.close(writer)
        reap_for_ever()
    os.close(writer)
    if not os.read(reader, 5):
        sys.exit(1)  # the child has printed the reason
    sys.stdout.write(f"{first}\n")
    sys.stdout.flush()
    os.waitpid(first, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
