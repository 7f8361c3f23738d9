"""What `baton version` and a bundle say of the installation."""

from pathlib import Path

from baton.cli.installed import REVISION_FILE, installed, lines


def test_installed_without_git_and_kernels_says_so(tmp_path: Path) -> None:
    found = installed(["no-such-package"], tmp_path)
    assert (found.commit, found.changed_files, found.native_kernels) == (None, None, ())
    assert lines(found)[1:] == [
        "commit (unknown)", "native kernels (not built: PyTorch computes)", "no-such-package (not installed)"
    ]  # fmt: skip


def test_installed_image_names_its_commit(tmp_path: Path) -> None:
    (tmp_path / REVISION_FILE).write_text("0123abcd\n")
    assert installed([], tmp_path).commit == "0123abcd"


def test_installed_names_native_kernel_levels(tmp_path: Path) -> None:
    built = tmp_path / "kernels" / "native" / "built"
    built.mkdir(parents=True)
    for level in ("avx2", "avx512_bf16"):
        (built / f"kernels-{level}-0123456789abcdef.so").touch()
    assert installed([], tmp_path).native_kernels == ("avx2", "avx512_bf16")
