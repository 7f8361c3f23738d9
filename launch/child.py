"""Replace this process by a program that dies with its parent: `child.py PARENT_PID CORES COMMAND...`.

The kernel kills the process when the thread that started it exits (PR_SET_PDEATHSIG), so that nothing survives a
`kill -9` of the supervisor. A script does this instead of `preexec_fn`, because code between fork and exec is unsafe if
the parent has threads. It needs only the standard library: run it with `-I -S`.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent_pid, cores, command = int(arguments[0]), arguments[1], arguments[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit("the parent process has exited")
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    # Python ignores SIGPIPE, and an ignored signal stays ignored across exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
