"""What `baton version` and a bundle say of the installation."""

from pathlib import Path

from baton.cli.installed import REVISION_FILE, installed, lines


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    found = installed(["no-such-package"], tmp_path)
    assert (found.commit, found.changed_files, found.native_kernels) == (None, None, ())
    assert lines(found)[1:] == [
        "commit (unknown)", "native kernels (not built: PyTorch computes)", "no-such-package (not installed)"
    ]  # fmt: skip


def test_an_image_names_the_commit_that_it_was_built_from(tmp_path: Path) -> None:
    (tmp_path / REVISION_FILE).write_text("0123abcd\n")
    assert installed([], tmp_path).commit == "0123abcd"


def test_native_kernels_are_named_by_their_level(tmp_path: Path) -> None:
    built = tmp_path / "kernels" / "native" / "built"
    built.mkdir(parents=True)
    for level in ("avx2", "avx512_bf16"):
        (built / f"kernels-{level}-0123456789abcdef.so").touch()
    assert installed([], tmp_path).native_kernels == ("avx2", "avx512_bf16")
