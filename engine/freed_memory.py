"""Returns memory that a process no longer uses to the system."""

import ctypes


def return_freed_memory() -> None:
    """Reading a checkpoint frees about as much as it keeps; glibc holds on to it, in case it were needed again.

    Milliseconds. Does nothing with another C library.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
