"""What `import ikbo` says when something it needs is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ikbo

PACKAGE = Path(ikbo.__file__).resolve().parent


def run_import(tmp_path, library=None, torch_stub=None, beside=None):
    """Imports a copy of the package from an otherwise empty tree in a fresh interpreter; returns its output."""
    shutil.copytree(PACKAGE, tmp_path / "python" / "ikbo", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if beside:
        shutil.copy(beside, tmp_path / "python" / "ikbo" / "libikbo_ops.so")
    if torch_stub is not None:
        (tmp_path / "python" / "torch.py").write_text(torch_stub)
    environment = {k: v for k, v in os.environ.items() if k != "IKBO_LIBRARY"}
    environment["PYTHONPATH"] = str(tmp_path / "python")
    if library:
        environment["IKBO_LIBRARY"] = str(library)
    code = "import ikbo, torch; print(ikbo.library_path(), torch.ops.ikbo.linear.default)"
    return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)


def test_library_is_found_beside_the_package(tmp_path):
    result = run_import(tmp_path, beside=ikbo.library_path())
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[0] == str(tmp_path / "python" / "ikbo" / "libikbo_ops.so")


def test_library_is_found_through_the_environment(tmp_path):
    result = run_import(tmp_path, library=ikbo.library_path())
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [ikbo.library_path(), "ikbo.linear.default"]


def test_newest_library_of_the_source_tree_is_found(tmp_path):
    for age, preset in ((100, "old"), (0, "new"), (-100, "sanitize")):
        folder = tmp_path / "build" / preset / "ops"
        folder.mkdir(parents=True)
        copy = Path(shutil.copy(ikbo.library_path(), folder / "libikbo_ops.so"))
        os.utime(copy, (copy.stat().st_atime, copy.stat().st_mtime - age))
    result = run_import(tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[0] == str(tmp_path / "build" / "new" / "ops" / "libikbo_ops.so")


def test_missing_library(tmp_path):
    result = run_import(tmp_path)
    assert "ImportError: ikbo: libikbo_ops.so was not found" in result.stderr


def test_environment_that_names_no_file(tmp_path):
    result = run_import(tmp_path, library=tmp_path / "nowhere.so")
    assert f"ImportError: ikbo: IKBO_LIBRARY names {tmp_path / 'nowhere.so'}, which is not a file" in result.stderr


def test_library_that_is_none(tmp_path):
    (tmp_path / "broken.so").write_text("not a library")
    result = run_import(tmp_path, library=tmp_path / "broken.so")
    assert "ImportError: ikbo:" in result.stderr and "could not be loaded" in result.stderr


@pytest.mark.parametrize("version", ["2.10.0", "2.1.0+cpu", "3.0.0"])
def test_other_version_of_pytorch(tmp_path, version):
    result = run_import(tmp_path, torch_stub=f"__version__ = '{version}'")
    assert f"ImportError: ikbo is built for PyTorch 2.11, but PyTorch {version} is installed" in result.stderr


def test_no_pytorch(tmp_path):
    # an interpreter without site packages
    shutil.copytree(PACKAGE, tmp_path / "python" / "ikbo", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'python')!r}); import ikbo"
    result = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "ImportError: ikbo needs PyTorch 2.11, which is not installed" in result.stderr
