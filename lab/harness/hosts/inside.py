"""Run a command on a host: `inside.py PID COMMAND...`; PID: the host's first process. Exits as the command exits.

Only a child can enter another PID namespace, so there are two processes. The parent forwards signals to the command; if
it is killed, the command is killed too. Standard library only: run with `-I -S`.
"""

import contextlib
import ctypes
import os
import signal
import sys
from types import FrameType

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 29, 1 << 30
ALL = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
PR_SET_PDEATHSIG = 1
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def go_inside(pid: int) -> None:
    """Fork a child on the host and return in it. The parent forwards signals and exits as the child exits.

    Raises: OSError if the host does not exist.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    folder = os.getcwd()  # noqa: PTH109
    if libc.setns(os.pidfd_open(pid), ALL) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with contextlib.suppress(OSError):  # a folder in /tmp may not exist on the host
        os.chdir(folder)
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # signals wait until the child exists
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main(arguments: list[str]) -> None:
    pid, command = int(arguments[0]), arguments[1:]
    try:
        go_inside(pid)
    except OSError as error:
        sys.exit(f"host of process {pid}: {error.strerror}")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
