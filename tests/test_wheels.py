"""The two distributions: what each installs, and that they make one package together."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD_TIMEOUT_S = 300


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each distribution, by the distribution's name."""
    built, copy = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("copy") / "baton"
    # setuptools writes beside the sources, and reads there what an earlier build has left.
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "node_modules", "runtime", "results", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
    for source in (copy, copy / "packaging" / "client"):
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(built), str(source)]
        subprocess.run(command, check=True, timeout=BUILD_TIMEOUT_S)
    return {path.name.partition("-")[0].replace("_", "-"): path for path in built.glob("*.whl")}


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_nothing_but_baton_is_installed_at_the_top(wheels: dict[str, Path]) -> None:
    assert set(wheels) == {"baton-client", "baton-serve"}
    for wheel in wheels.values():
        tops = {name.partition("/")[0] for name in names(wheel)}
        assert {top for top in tops if not top.endswith(".dist-info")} == {"baton"}


def test_no_file_is_in_both(wheels: dict[str, Path]) -> None:
    assert not names(wheels["baton-client"]) & names(wheels["baton-serve"])


def test_every_module_of_a_distributed_folder_is_in_a_wheel(wheels: dict[str, Path]) -> None:
    shipped = names(wheels["baton-client"]) | names(wheels["baton-serve"])
    folders = {name.split("/")[1] for name in shipped if name.count("/") > 1}
    sources = {f"baton/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in sources if "/node_modules/" not in name} <= shipped
    assert "baton/gateway/page/static/index.html" in shipped


def test_the_client_alone_names_the_package_that_has_the_engine(wheels: dict[str, Path], tmp_path: Path) -> None:
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
