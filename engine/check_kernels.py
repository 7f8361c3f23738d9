"""Guards the name `kernels`: Hugging Face publishes a package of that name, which would hide our folder of it."""

import importlib
from pathlib import Path


class ForeignKernelsError(RuntimeError):
    """Another package called `kernels` is imported in place of Baton's folder."""


def require_own_kernels() -> None:
    """Raises ForeignKernelsError unless `import kernels` finds the folder beside this package. Call it at start."""
    own = Path(__file__).resolve().parent.parent / "kernels"
    package = importlib.import_module("kernels")
    found = [Path(entry).resolve() for entry in package.__path__]
    if own in found:
        return
    where = ", ".join(map(str, found))
    raise ForeignKernelsError(
        f"the package `kernels` at {where} hides Baton's own at {own}: run `pip uninstall kernels` in this environment"
    )
