"""The `baton` script: what it does before Python runs. Nothing is installed here; stand-ins record the calls."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["baton", ".ci/run"]
TOOLS = ["bash", "cat", "cp", "cut", "dirname", "flock", "mkdir", "readlink", "rm", "sed", "sha256sum", "tail"]

# Stands for `python3`: knows the questions that the script asks, and makes an environment of itself.
PYTHON = """#!/bin/bash
case "$*" in
  *"version_info < (3, 11)"*) [ "${FAKE_OLD:-}" ] && exit 1 ;;
  *"import ensurepip, venv"*) [ "${FAKE_NO_VENV:-}" ] && exit 1 ;;
  *"print("*) echo 3.11 ;;
  "-m venv"*) echo venv >>"$JOURNAL"; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m virtualenv --version") exit 1 ;;
  *"-m pip"*" -e "*) all="$*"; echo "pip ${all#* -e }" >>"$JOURNAL" ;;
  *"-m pip"*) echo "pip ${*: -1}" >>"$JOURNAL"; [[ "${FAKE_NO_CPU_BUILD:-}" && "${*: -1}" == *+cpu ]] && exit 1 ;;
  *"-m baton.cli"*) echo "cli ${*: 4}"; [ -n "${HOLD:-}" ] && cat "$HOLD" ;;
esac
exit 0
"""


class Machine:
    """A copy of what the script reads, and a PATH that holds only stand-ins and plain tools."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.journal.touch()
        self.bin = folder / "bin"
        self.bin.mkdir()
        packages = [f"deploy/packaging/{name}/pyproject.toml" for name in ("client", "lab")]
        for name in ("baton", "pyproject.toml", "constraints.txt", *packages):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))

    def add_python(self) -> None:
        (self.bin / "python3").write_text(PYTHON)
        (self.bin / "python3").chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.folder / "baton"), *arguments],
            env={"PATH": str(self.bin), "JOURNAL": str(self.journal), **environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def packages(self, extra: str = "") -> str:
        """Call of pip that installs the repository: the lab last, since pip finds no requirement behind an extra."""
        packages = self.folder / "deploy" / "packaging"
        return f"pip {packages}/client -e {self.folder}{extra} -e {packages}/lab"

    @property
    def calls(self) -> list[str]:
        return self.journal.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_executable_and_parses(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def test_script_first_call_installs_and_second_runs(machine: Machine) -> None:
    machine.add_python()
    first = machine.run("--help")
    assert (first.returncode, first.stdout) == (0, "cli --help\n")
    assert machine.calls == ["venv", "pip torch==2.13.0+cpu", machine.packages()]
    second = machine.run("status", "--json")
    assert (second.returncode, second.stdout, second.stderr) == (0, "cli status --json\n", "")
    assert len(machine.calls) == 3


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt"])
def test_script_changed_dependencies_are_installed(machine: Machine, file: str) -> None:
    machine.add_python()
    machine.run("version")
    with (machine.folder / file).open("a") as lines:
        lines.write("\n# changed\n")
    machine.run("version")
    assert [call.split()[0] for call in machine.calls] == ["venv", "pip", "pip", "pip", "pip"]


def test_script_test_installs_tools_once(machine: Machine) -> None:
    machine.add_python()
    machine.run("version")
    assert machine.run("test", "-q").stdout == "cli test -q\n"
    assert machine.run("test").returncode == 0
    assert machine.calls[3:] == [machine.packages("[test]")]


def test_script_first_test_installs_everything(machine: Machine) -> None:
    machine.add_python()
    machine.run("test")
    machine.run("version")
    assert machine.calls == ["venv", "pip torch==2.13.0+cpu", machine.packages("[test]")]


def test_script_without_cpu_build_installs_general_build(machine: Machine) -> None:
    machine.add_python()
    done = machine.run("version", FAKE_NO_CPU_BUILD="1")
    assert done.returncode == 0
    assert machine.calls[1:4] == ["pip torch==2.13.0+cpu", "pip torch==2.13.0+cpu", "pip torch==2.13.0"]
    assert "several GB" in done.stderr


def test_script_with_nvidia_driver_installs_cuda_build(machine: Machine) -> None:
    machine.add_python()
    (machine.bin / "nvidia-smi").symlink_to(str(shutil.which("true")))
    machine.run("version")
    assert machine.calls[1] == "pip torch==2.13.0"


def test_script_without_python_names_packages(machine: Machine) -> None:
    done = machine.run("--help")
    assert done.returncode == 1
    assert "Python 3.11 or newer" in done.stderr and "apt install" in done.stderr


def test_script_with_old_python_fails(machine: Machine) -> None:
    machine.add_python()
    assert machine.run("--help", FAKE_OLD="1").returncode == 1
    assert machine.calls == []


def test_script_without_venv_names_packages(machine: Machine) -> None:
    machine.add_python()
    done = machine.run("--help", FAKE_NO_VENV="1")
    assert done.returncode == 1
    assert "apt install python3.11-venv" in done.stderr


def test_script_concurrent_calls_install_once(machine: Machine) -> None:
    machine.add_python()
    environment = {"PATH": str(machine.bin), "JOURNAL": str(machine.journal)}
    calls = [
        subprocess.Popen([str(machine.folder / "baton"), "version"], env=environment, stdout=subprocess.DEVNULL)
        for _ in range(4)
    ]
    assert [call.wait(60) for call in calls] == [0, 0, 0, 0]
    assert machine.calls.count("venv") == 1
    assert len(machine.calls) == 3
