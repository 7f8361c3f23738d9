"""Generator of the protos' Python code, in the same folder: `.venv/bin/python protos/generate.py [FOLDER]`.

grpcio-tools is pinned to the oldest generator whose code runs under every protobuf from 5.29 on. It conflicts with the
newer protobuf of Baton's environment, so it is installed in a separate folder, `.cache/proto-tools`, at first use.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("grpcio-tools==1.71.2", "grpcio==1.71.2", "protobuf==5.29.6", "setuptools==80.9.0")
TOOLS_FOLDER = ROOT / ".cache" / "proto-tools"


def install_tools() -> None:
    """Install the tools in their folder, unless a file there names these versions of the tools and of Python.

    The tools are in a plain folder, which needs no venv module. A lock admits one process at a time.
    """
    stamp = TOOLS_FOLDER / "installed.txt"
    wanted = "\n".join((*TOOLS, sys.version))
    TOOLS_FOLDER.parent.mkdir(exist_ok=True)
    with TOOLS_FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        shutil.rmtree(TOOLS_FOLDER, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--no-compile", "--target", str(TOOLS_FOLDER)]
        subprocess.run([*command, *TOOLS], check=True, timeout=300)
        stamp.write_text(wanted)


def generate(output: Path) -> None:
    """Write `protos/*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` under `output`."""
    install_tools()
    protos = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "protos").glob("*.proto"))]
    # Run in ROOT, so that descriptors name the files `protos/…`. -S hides the environment's newer protobuf.
    command = [sys.executable, "-S", "-m", "grpc_tools.protoc", "-I."]
    outputs = [f"--{kind}_out={output}" for kind in ("python", "pyi", "grpc_python")]
    environment = {**os.environ, "PYTHONPATH": str(TOOLS_FOLDER)}
    subprocess.run([*command, *outputs, *protos], cwd=ROOT, env=environment, check=True, timeout=120)
    for path in (output / "protos").glob("*_pb2*.py*"):
        path.write_text(re.sub("^from protos import", "from baton.protos import", path.read_text(), flags=re.M))


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
