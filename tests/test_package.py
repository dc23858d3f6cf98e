"""The package as a whole: cheap to import, names that exist, one command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cupaged

# Measured without the tracer that a coverage run would start in every child.
QUIET = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "COVERAGE"))}


def python(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, env=QUIET, **options
    )


def test_import_is_cheap():
    code = "from time import perf_counter as t; a = t(); import cupaged; print(t() - a)"
    assert min(float(python("-c", code).stdout) for _ in range(3)) < 0.2


@pytest.mark.parametrize("module", ["cupaged", "cupaged.cli", "cupaged.errors"])
def test_import_brings_in_nothing_heavy(module):
    code = f"import sys, {module}; print(*sys.modules)"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert module in loaded
    assert not loaded & {"cupy", "torch", "numba", "matplotlib"}


@pytest.mark.parametrize("name", cupaged.__all__)
def test_every_public_name_can_be_the_first_one_used(name):
    done = python("-c", f"import cupaged; print(cupaged.{name}.__name__)")
    assert done.stdout.strip() == name, done.stderr


def test_public_names_are_listed_and_documented():
    assert set(cupaged.__all__) <= set(dir(cupaged))
    for name in cupaged.__all__:
        assert getattr(cupaged, name).__doc__


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = cupaged.nonsense


def test_runs_as_a_module_from_any_folder(tmp_path):
    done = python("-m", "cupaged", "--version", cwd=tmp_path)
    assert done.stdout == f"cupaged {cupaged.__version__}\n"


def test_the_cuda_sources_are_data_of_the_package():
    from cupaged.backends.cupy_raw import KERNELS, source

    assert all(f" {kernel}(" in source() for kernel in KERNELS)


def test_is_typed():
    assert (Path(cupaged.__file__).parent / "py.typed").is_file()


@pytest.mark.slow
def test_compiled_host_kernels_stay_in_range_as_plain_python():
    """Compiled code does not check its indices; the same code, not compiled, does."""
    code = "from cupaged.selfcheck import check; print(check(['numba'], cases=60, seconds=60, seed=5).difference)"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert done.stdout == "None\n", done.stdout + done.stderr
    tables = [sys.executable, "-m", "tests.play_uncompiled"]
    root = Path(__file__).parents[1]
    done = subprocess.run(tables, capture_output=True, text=True, timeout=300, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr


def test_cache_that_cannot_be_written_is_no_error(tmp_path):
    """As for a package in a folder of root's, used by somebody without a home."""
    package = tmp_path / "site"
    source = Path(cupaged.__file__).parent
    (package / "cupaged" / "backends").mkdir(parents=True)
    for path in [*source.glob("*.py"), *source.glob("backends/*.py")]:
        (package / "cupaged" / path.relative_to(source)).write_bytes(path.read_bytes())
    # A file where the folder should be stops root, too.
    (package / "cupaged" / "backends" / "__pycache__").touch()
    (tmp_path / "home").touch()
    code = (
        "import cupaged; pool = cupaged.PagedTokenToKVPoolAllocator(8, 4, backend='numba', device='cpu'); "
        "print(cupaged.__file__, pool.alloc_decode([1], [-1]))"
    )
    home = str(tmp_path / "home")
    environment = {**QUIET, "PYTHONPATH": str(package), "HOME": home, "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{package}/cupaged/__init__.py [4]\n"
