"""The kernels for every architecture, through NVRTC, which needs no GPU; and the argument struct, field by field."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cupaged import layout
from cupaged.backends.cupy_raw import ARGS, CLUSTER_KERNELS, KERNELS, source
from tests.host_cuda import build

COMMON = (Path(__file__).parents[1] / "kernels_cu" / "common.cuh").read_text()


def nvrtc_compile(code: str, architecture: str) -> bytes:
    """Machine code for an `sm_`, PTX for a `compute_`."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    program = _call(nvrtc, nvrtc.nvrtcCreateProgram(code.encode(), b"cupaged.cu", 0, [], []))
    options = [b"-std=c++17", f"-arch={architecture}".encode()]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    text = b" " * _call(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
    _call(nvrtc, nvrtc.nvrtcGetProgramLog(program, text))
    log = text.decode().strip("\0 \n")
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, log
    assert not log  # a warning is a failure too
    if architecture.startswith("compute"):
        ptx = b" " * _call(nvrtc, nvrtc.nvrtcGetPTXSize(program))
        _call(nvrtc, nvrtc.nvrtcGetPTX(program, ptx))
        return ptx
    cubin = b" " * _call(nvrtc, nvrtc.nvrtcGetCUBINSize(program))
    _call(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def _call(nvrtc, answer):
    assert answer[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, answer[0]
    return answer[1] if len(answer) > 1 else None


@pytest.mark.parametrize(
    "architecture", ["sm_90", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sm_80", "sm_100", "sm_120"))]
)
def test_every_kernel_compiles(architecture):
    cubin = nvrtc_compile(source(), architecture)
    for name in KERNELS if architecture == "sm_80" else KERNELS + CLUSTER_KERNELS:
        assert name.encode() in cubin


def test_what_only_a_gpu_orders():
    """The host harness has other words for it, so no run without a GPU would see a weaker one."""
    text = nvrtc_compile(source(), "compute_90").decode()
    kernels = dict(re.findall(r"\.entry (\w+)\((.*?)\n\}", text, re.S))
    adds = {name: re.findall(r"atom\.add\.(\w+\.\w+)\.u64", body) for name, body in kernels.items()}
    assert {name: found for name, found in adds.items() if found} == {
        "plan_requests": ["acq_rel.gpu"],  # the last block has behind it what the others wrote and read
        "extend_tiles": ["relaxed.gpu"],
        "extend_tiles_many": ["relaxed.gpu"],
    }
    assert kernels["plan_requests"].count("ld.volatile.global.u64") == 4  # past L1: the sums, the breach, the refusal
    for name in CLUSTER_KERNELS:
        body = kernels[name]
        blocks = re.findall(r"mov\.u32 \s*(%r\d+), %nctaid\.x", body)
        barrier, expected = re.search(r"mbarrier\.arrive\.expect_tx\S* _, \[(%r\d+)\], (%r\d+);", body).groups()
        assert re.search(rf"shl\.b32 \s*{expected}, (%r\d+), 2;", body).group(1) in blocks  # 4 bytes from each block
        assert f"mbarrier.init.shared::cta.b64 [{barrier}], 1;" in body
        assert "mbarrier.try_wait.parity.shared::cta.b64" in body
        order = "fence.mbarrier_init.release.cluster", "barrier.cluster.arrive.relaxed", "barrier.cluster.wait"
        places = [body.index(word) for word in (*order, "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes")]
        assert places == sorted(places)
        assert re.findall(r"barrier\.cluster\.(\S+);", body) == ["arrive.relaxed", "wait", *["arrive", "wait"] * 2]


def test_python_knows_every_kernel():
    declared = r"__global__ void (?:__cluster_dims__\([^)]*\) )?__launch_bounds__\([\w, ]+\)\s+(\w+)\("
    assert sorted(re.findall(declared, source())) == sorted(KERNELS + CLUSTER_KERNELS)


def offsets(dtype: np.dtype, prefix: str = "") -> dict[str, int]:
    found = {}
    for name, (field, offset, *_) in dtype.fields.items():
        found[prefix + name] = offset
        if field.fields:
            for inner, value in offsets(field, f"{prefix}{name}.").items():
                found[inner] = offset + value
    return found


def struct_asserts(offset_of: str) -> str:
    lines = [f"static_assert(sizeof(Args) == {ARGS.itemsize});"]
    for name, offset in offsets(ARGS).items():
        lines.append(f"static_assert({offset_of.format(name)} == {offset});")
    return "\n".join(lines)


def test_struct_fields_agree_with_numpy(tmp_path):
    declared = re.search(r"struct Args \{(.*?)\n\};", COMMON, re.S).group(1)
    names = re.findall(r"(\w+);", re.sub(r"//[^\n]*", "", declared))
    assert names == list(ARGS.names)
    nvrtc_compile(source() + "\n" + struct_asserts("__INTADDR__(&((Args*)0)->{})"), "sm_90")
    # and as the host compiler lays it out, for the tests that run the kernels there
    unit = tmp_path / "layout.cu"
    asserts = struct_asserts("__builtin_offsetof(Args, {})")
    unit.write_text(f'#include "common.cuh"\n{asserts}\nextern "C" __global__ void nothing(const Args) {{}}\n')
    build([unit], include_dirs=[Path(__file__).parents[1] / "kernels_cu"])


@pytest.mark.parametrize(
    ("enum", "python"),
    [("Word", layout.Word), ("Status", layout.Status), ("Kind", layout.Kind), ("Breach", layout.Breach)],
)
def test_enums_agree_with_python(enum, python):
    body = re.sub(r"//[^\n]*", "", re.search(rf"enum {enum} \{{(.*?)\}};", COMMON, re.S).group(1))
    value, found = -1, {}
    for entry in filter(None, (e.strip() for e in body.split(","))):
        name, _, given = entry.partition("=")
        if given.strip() and not given.strip().isdigit():
            break  # what follows the words that are posted
        value = int(given) if given.strip() else value + 1
        found[name.strip()] = value
    if enum == "Word":
        assert found.pop("NUM_WORDS") == layout.NUM_WORDS
        assert {w.name: int(w) for w in python} == found
    else:
        prefix = enum.upper() + "_"
        assert {prefix + m.name: int(m) for m in python} == found
