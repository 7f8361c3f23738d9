"""The two distributions: what each installs, that they make one package together, and that it serves.

Environments here are new, with nothing of ours but the wheels. They see the libraries of the one that runs the tests,
which are not installed again: that all of them are named is checked by name.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from baton.client import AdminClient, BatonClientError
from baton.client.channel import admin_token_file
from baton.versions import RELEASE
from tests.e2e.stack import free_ports

ROOT = Path(__file__).parents[1]
BUILD_TIMEOUT_S = 300
INSTALL_S = 240
READY_S = 120.0
STOP_S = 45.0
POLL_S = 0.1
ASK = """
import sys
from baton import BatonClient
with BatonClient(sys.argv[1], timeout_s=60) as baton:
    print(list(baton.complete([5, 6, 7], max_tokens=4, ignore_eos=True).choices[0].token_ids))
print(sorted({"torch", "transformers", "redis"} & sys.modules.keys()))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each distribution, by the distribution's name."""
    built, copy = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("copy") / "baton"
    # setuptools writes beside the sources, and reads there what an earlier build has left.
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "node_modules", "runtime", "results", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
    for source in (copy, copy / "deploy" / "packaging" / "client", copy / "deploy" / "packaging" / "lab"):
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(built), str(source)]
        command += ["--no-build-isolation", "--check-build-dependencies"]  # setuptools is here, since torch needs it
        subprocess.run(command, check=True, timeout=BUILD_TIMEOUT_S)
    return {path.name.partition("-")[0].replace("_", "-"): path for path in built.glob("*.whl")}


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheels_install_only_baton_at_the_top(wheels: dict[str, Path]) -> None:
    assert set(wheels) == {"baton-client", "baton-lab", "baton-serve"}
    for wheel in wheels.values():
        tops = {name.partition("/")[0] for name in names(wheel)}
        assert {top for top in tops if not top.endswith(".dist-info")} == {"baton"}


def test_wheels_share_no_file(wheels: dict[str, Path]) -> None:
    files = [name for wheel in wheels.values() for name in names(wheel)]
    assert len(files) == len(set(files))


def test_wheels_contain_every_module(wheels: dict[str, Path]) -> None:
    shipped = set[str]().union(*map(names, wheels.values()))
    folders = {name.split("/")[1] for name in shipped if name.count("/") > 1}
    sources = {f"baton/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in sources if "/node_modules/" not in name} <= shipped
    assert "baton/router/http/page/static/index.html" in shipped


TYPED = """
from baton import AsyncBatonClient, BatonClient, LLM, SamplingParams
from baton.client import Completion
from baton.protos import baton_pb2

def first(client: BatonClient) -> str:
    completion: Completion = client.complete([5, 6, 7], max_tokens=4)
    return completion.choices[0].text

def texts(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(["a"], SamplingParams(temperature=0))]

message: baton_pb2.SamplingParams = baton_pb2.SamplingParams(max_tokens="four")
"""


def test_type_checker_reads_the_hints_of_both_wheels(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(TYPED)
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,transformers.*,numpy.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(installed / "python"), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, env=plain(), capture_output=True, text=True, timeout=240)
    assert done.stdout.startswith('user.py:13: error: Argument "max_tokens"'), done.stdout + done.stderr
    assert done.stdout.count("error:") == 1


def test_client_wheel_names_the_engine_package(wheels: dict[str, Path], tmp_path: Path) -> None:
    zipfile.ZipFile(wheels["baton-client"]).extractall(tmp_path)
    code = (
        "import sys; from baton import BatonClient\n"
        "assert not {'torch', 'transformers', 'redis'} & sys.modules.keys()\n"
        f"import baton; assert baton.__file__.startswith({str(tmp_path)!r}), baton.__file__\n"
        "try: from baton import LLM\n"
        "except ImportError as error: print(error)"
    )
    # -S and an explicit path: an editable install of this repository must not help.
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    environment = {"PYTHONPATH": ":".join([str(tmp_path), *libraries])}
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "LLM needs baton.engine: pip install baton-serve\n"), done.stderr


def environment(folder: Path, *installed: Path) -> Path:
    """A new environment with these wheels; returns its folder of programs. It sees libraries, no editable install."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=INSTALL_S)
    [packages] = folder.glob("lib/python*/site-packages")
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "libraries.pth").write_text("\n".join(libraries))  # of theirs, links to sources are not followed
    programs = folder / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--quiet", "--no-deps"]
    pip.append("--no-compile")  # most modules are never imported here
    command = [*pip, "--ignore-installed", *map(str, installed)]
    subprocess.run(command, check=True, timeout=INSTALL_S, env=plain())
    return programs


def plain() -> dict[str, str]:
    """Variables without ways to the sources of this repository."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "BATON_TARGET")}


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment with both."""
    return environment(tmp_path_factory.mktemp("both") / "venv", wheels["baton-client"], wheels["baton-serve"])


@pytest.fixture(scope="module")
def served(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a service that the wheels started."""
    folder = tmp_path_factory.mktemp("service")
    port, http_port, admin_port = free_ports(3)
    flags = ["--colocated", "--model", str(ROOT / "models" / "tableqa"), "--kv-memory", "16MiB"]
    flags += ["--port", str(port), "--http-port", str(http_port), "--admin-port", str(admin_port)]
    with (folder / "up.log").open("w") as log:
        command = [str(installed / "baton"), "up", *flags]
        # Its token of the admin port is where this process looks for it.
        cache = admin_token_file(admin_port).parents[1]
        environment = {**plain(), "HOME": str(folder), "XDG_CACHE_HOME": str(cache)}
        up = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        wait_ready(up, admin_port, folder / "up.log")
        yield f"127.0.0.1:{port}"
    finally:
        up.send_signal(signal.SIGTERM)
        assert up.wait(STOP_S) == 0, (folder / "up.log").read_text()


def wait_ready(up: subprocess.Popen[bytes], admin_port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    with AdminClient(f"127.0.0.1:{admin_port}", timeout_s=2.0) as admin:
        while time.monotonic() < deadline and up.poll() is None:
            try:
                if admin.status().ready:
                    return
            except BatonClientError:
                time.sleep(POLL_S)  # between two looks, bounded above
    up.kill()
    pytest.fail(f"no service within {READY_S:g} s:\n{log.read_text()[-3000:]}")


def test_wheel_command_names_the_release(installed: Path, tmp_path: Path) -> None:
    command = [str(installed / "baton"), "version", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=plain(), capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert (found["release"], found["commit"]) == (RELEASE, None)


def test_wheels_contain_kernel_sources(wheels: dict[str, Path]) -> None:
    sources = {f"baton/{path.relative_to(ROOT)}" for path in (ROOT / "kernels" / "native").glob("*.[ch]*")}
    assert sources and sources <= names(wheels["baton-serve"])


def test_client_wheel_gets_answer_from_service_wheel(wheels: dict[str, Path], served: str, tmp_path: Path) -> None:
    client = environment(tmp_path / "venv", wheels["baton-client"])
    command = [str(client / "python"), "-c", ASK, served]
    done = subprocess.run(command, cwd=tmp_path, env=plain(), capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    tokens, loaded = map(json.loads, done.stdout.replace("'", '"').splitlines())
    assert len(tokens) == 4 and loaded == []


def test_wheel_process_writes_outside_of_packages(installed: Path, served: str) -> None:
    assert not list(installed.parent.glob("lib/python*/site-packages/baton/runtime"))


def test_wheels_are_of_this_release_and_name_all_that_they_need(wheels: dict[str, Path]) -> None:
    for name, wheel in wheels.items():
        [metadata] = [entry for entry in names(wheel) if entry.endswith(".dist-info/METADATA")]
        lines = zipfile.ZipFile(wheel).read(metadata).decode().partition("\n\n")[0].splitlines()
        assert f"Version: {RELEASE}" in lines and f"Name: {name}" in lines
        assert "License-Expression: Apache-2.0" in lines
        for line in lines:
            needed = re.match(r"Requires-Dist: ([\w.-]+)(?!.*extra ==)", line)
            if needed is not None and not needed[1].startswith("baton-"):
                assert is_installed(needed[1]), needed[1]


def is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False
