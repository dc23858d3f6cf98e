"""Runs CUDA C kernels on a machine without a GPU: g++, a header of CUDA's words, fibers as threads.

What sees which fault:

- every build: divergent or deadlocked barriers and warp collectives, a lane outside its own mask, a false
  `__builtin_assume`. Use of `__shared__` or of local variables before they are written gives garbage.
- comparison of results, in the three orders of threads: wrong arithmetic, and most missing barriers.
- "asan": a byte past a buffer (of `exact_empty`) or a `__shared__` array, shifts, overflow, misaligned vectors.
- clusters: their blocks run at the same time, in the order of the machine. One that looks into another's `__shared__`
  variables before that has begun finds garbage.
- "tsan": races between threads of a block and between blocks. Barriers and `__syncwarp` order memory, fences do
  with those of other threads; atomics and volatile accesses are no races but order nothing; shuffles and votes
  order nothing, as CUDA has it.

A sanitized build loads only in a process with `sanitizer_env`: start a child with `run_python`, and look at its
exit status. Nothing here sees a thread that spins for another one: the launch does not end.
"""

import ctypes
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

Mode = Literal["plain", "asan", "tsan"]
HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
KERNELS = REPOSITORY / "kernels_cu"

COMMON_FLAGS = ["-std=c++20", "-fPIC", "-g", "-fvisibility=hidden", "-ftrivial-auto-var-init=pattern"]
COMMON_FLAGS += ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-function"]
# What the kernels are compiled with; the runtime gets only the -D of these, and the link the -fsanitize.
MODE_FLAGS = {
    "plain": ["-O2"],
    "asan": [
        "-O1",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-fsanitize-sections=cuda_shared",
        "-fno-omit-frame-pointer",
        "-DCUDA_HOST_ASAN",
    ],
    "tsan": ["-O1", "-fsanitize=thread", "--param=tsan-distinguish-volatile=1", "-DCUDA_HOST_TSAN"],
}
KERNEL = re.compile(
    r"\b__global__\s+void\s+(?:__cluster_dims__\(([^,()]+)[^()]*\)\s+)?"
    r"(?:__launch_bounds__\(([^,()]+)[^()]*\)\s+)?(\w+)\s*\("
)
ORDERS = ("ascending", "descending", "random")


class HostCudaError(Exception):
    """A launch that CUDA leaves undefined, or refuses: divergence, deadlock, too many threads."""


def kernel_names(sources: Sequence[Path]) -> list[str]:
    """Names of the kernels in the sources, in order."""
    return [name for *_, name in _kernels(sources)]


def _kernels(sources: Sequence[Path]) -> list[tuple[str, str, str]]:
    """Blocks of its clusters and bound on the threads of a block, as C++ text, and name of each kernel."""
    found = []
    for source in sources:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source.read_text(), flags=re.S)
        found += [(cluster or "0", bound or "1024", name) for cluster, bound, name in KERNEL.findall(text)]
    return found


def _unit(sources: Sequence[Path]) -> str:
    """Text of the translation unit: the sources, unchanged, and a table of their kernels."""
    # In an unnamed namespace static variables of templates may share one section.
    includes = "".join(f'#include "{source}"\n' for source in sources)
    rows = "".join(f'    describe<{name}>("{name}", {bound}, {size}),\n' for size, bound, name in _kernels(sources))
    return (
        f"namespace {{\n{includes}}}\n"
        f"namespace cuda_host {{\nconst Kernel kernels[] = {{\n{rows}}};\n"
        "const int kernel_count = sizeof kernels / sizeof *kernels;\n}\n"
    )


def _compile(arguments: Sequence[object]) -> None:
    command = ["g++", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


@cache
def _compiler_version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def cache_folder() -> Path:
    """Where built libraries are kept: `CUPAGED_HOST_CUDA_CACHE`, or one of the user's under the temporary folder."""
    default = Path(tempfile.gettempdir()) / f"cupaged-host-cuda-{os.getuid()}"
    folder = Path(os.environ.get("CUPAGED_HOST_CUDA_CACHE", default))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _cached(suffix: str, key: Sequence[object], make) -> Path:
    """File with the content hash `key` in its name; `make(path)` writes it where it is missing."""
    digest = hashlib.sha256("\0".join([_compiler_version(), *map(str, key)]).encode()).hexdigest()[:24]
    path = cache_folder() / f"{digest}{suffix}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            make(made)
            made.replace(path)
    return path


def build(sources: Sequence[Path], mode: Mode = "plain", include_dirs: Sequence[Path] = ()) -> Path:
    """Compiles the sources, unchanged, into a shared library; cached by content.

    Parameters
    ----------
    sources
        The .cu files; they become one translation unit.
    mode
        "plain" (-O2), "asan" (with UBSan) or "tsan". The sanitized ones load only in a process started with
        `sanitizer_env`.
    include_dirs
        Folders of included files, besides those of the sources.
    """
    sources = [Path(source).resolve() for source in sources]
    folders = list(dict.fromkeys([*(source.parent for source in sources), *map(Path, include_dirs)]))
    flags = MODE_FLAGS[mode]
    defines = [flag for flag in flags if flag.startswith("-D")]
    links = [flag for flag in flags if flag.startswith("-fsanitize=")]
    header, runtime = HERE / "cuda_host.h", HERE / "runtime.cpp"

    def make_runtime(path: Path) -> None:
        _compile([*COMMON_FLAGS, "-O2", *defines, "-c", runtime, "-o", path])

    def make_library(path: Path) -> None:
        unit = path.with_suffix(".cpp")
        unit.write_text(_unit(sources))
        objects = _cached(".o", [header.read_text(), runtime.read_text(), *COMMON_FLAGS, *defines], make_runtime)
        includes = [f"-I{folder}" for folder in folders]
        kernels = path.with_suffix(".o")
        _compile([*COMMON_FLAGS, *flags, *includes, "-include", header, "-c", unit, "-o", kernels])
        _compile(["-shared", *links, kernels, objects, "-o", path])

    headers = sorted(file for folder in folders for file in folder.glob("*.cuh"))
    texts = [part for file in [*sources, *headers, header, runtime] for part in (file, file.read_text())]
    return _cached(".so", [*COMMON_FLAGS, *flags, *texts, _unit(sources)], make_library)


class HostModule:
    """The kernels of some .cu files, ready to be launched on the host.

    Parameters
    ----------
    sources
        The .cu files; all of `kernels_cu/` by default.
    mode
        As in `build`.
    """

    def __init__(self, sources: Sequence[Path] | None = None, mode: Mode = "plain"):
        self.sources = sorted(KERNELS.glob("*.cu")) if sources is None else list(sources)
        self.mode = mode
        self.names = kernel_names(self.sources)
        self._launch = ctypes.CDLL(str(build(self.sources, mode))).cuda_host_launch
        self._launch.restype = ctypes.c_char_p
        self._launch.argtypes = [
            ctypes.c_char_p,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_int,
        ]

    def launch(
        self,
        name: str,
        grid: int,
        block: int,
        args,
        *,
        order: str = "ascending",
        seed: int = 0,
        concurrent: bool = False,
    ) -> None:
        """Runs a kernel to its end.

        Parameters
        ----------
        name, grid, block
            The kernel, its blocks, and the threads of each.
        args
            Bytes of the one struct that it takes: an array, a structured scalar, any contiguous buffer.
        order
            In which order threads, and blocks, get their turn: "ascending", "descending" or "random".
        seed
            Of the random order.
        concurrent
            Blocks in up to four OS threads, not in any order. Under TSan they always are, in one each.

        Raises
        ------
        HostCudaError
            For what CUDA leaves undefined (divergence, deadlock) or refuses (too many threads).
        """
        if concurrent and self.mode == "asan":
            raise ValueError("an ASan build has one copy of each __shared__ variable: blocks run one by one")
        data = np.frombuffer(args, np.uint8)
        error = self._launch(
            name.encode(), grid, block, data.ctypes.data, data.size, ORDERS.index(order), seed, concurrent
        )
        if error:
            raise HostCudaError(error.decode())


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    return libc


def exact_empty(shape, dtype) -> np.ndarray:
    """Array of garbage in a malloc'ed buffer of exactly its size, so that ASan sees one byte too far."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    address = _libc().malloc(count * dtype.itemsize)
    if not address:
        raise MemoryError(f"malloc({count * dtype.itemsize})")
    buffer = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(address)
    weakref.finalize(buffer, _libc().free, address).atexit = False
    ctypes.memset(address, 0xA5, count * dtype.itemsize)
    return np.ndarray(shape, dtype, buffer=buffer)


def exact_copy(array) -> np.ndarray:
    """Contiguous copy of an array in a buffer from `exact_empty`."""
    array = np.asarray(array)
    copy = exact_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def sanitizer_env(mode: Mode) -> dict[str, str]:
    """Environment of a process that loads a build of this mode: the sanitizer must come before everything else."""
    environment = dict(os.environ, OPENBLAS_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    if mode == "plain":
        return environment
    names = [f"lib{mode}.so", "libstdc++.so"]
    found = [
        subprocess.run(["g++", f"-print-file-name={n}"], capture_output=True, text=True, check=True).stdout.strip()
        for n in names
    ]
    environment["LD_PRELOAD"] = " ".join(str(Path(file).resolve()) for file in found)
    environment["ASAN_OPTIONS"] = "detect_leaks=0:exitcode=66"
    environment["UBSAN_OPTIONS"] = "print_stacktrace=1"
    environment["TSAN_OPTIONS"] = "halt_on_error=1:exitcode=66:history_size=0:report_thread_leaks=0"
    return environment


def run_python(mode: Mode, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess:
    """Runs this Python with the arguments in a child process that can load builds of this mode."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=sanitizer_env(mode),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
