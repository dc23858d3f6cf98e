"""docs/integrating.md: every block runs, section by section, and what it names exists."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from cupaged import backends
from tests.documents import (
    ROOT,
    blocks,
    check_commands,
    check_extras,
    check_names,
    command_lines,
    imported,
    leads_somewhere,
    links,
)

PATH = ROOT / "docs" / "integrating.md"
TEXT = PATH.read_text()
SECTIONS: dict[str, list[str]] = {}
for _block in blocks(TEXT):
    if _block.language == "python":
        SECTIONS.setdefault(_block.section, []).append(_block.code)
ELSEWHERE = {
    "SGLang": SECTIONS.pop("SGLang"),
    "Ranks in step": SECTIONS.pop("Ranks in step"),
}  # SGLang: its own tests


def _marked(section: str):
    on_gpu = "cupy" in imported("".join(SECTIONS[section]))
    no_gpu = pytest.mark.skipif(not backends.probe("cupy").works, reason="needs CuPy and a GPU")
    return pytest.param(section, marks=[pytest.mark.gpu, no_gpu] if on_gpu else [])


def test_no_block_is_left_out():
    assert len(blocks(TEXT)) == TEXT.count("\n```") // 2
    assert {block.language for block in blocks(TEXT)} <= {"python", "sh", "text"}
    assert {"A torch engine", "Without torch", "JAX", "Errors"} <= set(SECTIONS)


@pytest.mark.parametrize("section", [_marked(section) for section in SECTIONS])
def test_blocks_run_one_after_the_other(section, capsys):
    names: dict[str, object] = {}
    for code in SECTIONS[section]:
        for package in sorted(imported(code) - {"cupaged"}):
            pytest.importorskip(package)
        exec(compile(code, f"{PATH.name}, {section}", "exec"), names)
    for line in capsys.readouterr().out.splitlines():
        assert f"# {line}\n" in TEXT  # what is printed stands in a comment


def test_ranks_in_step_run_as_two_ranks(tmp_path):
    pytest.importorskip("torch")
    (code,) = ELSEWHERE["Ranks in step"]
    used = "    ...  # your engine"
    assert used.strip() in code
    program = tmp_path / "engine.py"
    program.write_text(code.replace(used.strip(), "print(pool.alloc(16)[0])  # your engine"))
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    settings = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, program], env=settings | {"RANK": str(rank)}, cwd=ROOT, text=True, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        assert [(rank.communicate(timeout=120)[0], rank.returncode) for rank in ranks] == [("16\n", 0)] * 2
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.gpu
@pytest.mark.skipif(not backends.probe("cupy").works, reason="needs CuPy and a GPU")
def test_the_torch_section_captures_a_graph_on_a_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs torch for CUDA")
    names: dict[str, object] = {}
    exec(compile("\n".join(SECTIONS["A torch engine"]), PATH.name, "exec"), names)
    assert isinstance(names["graph"], torch.cuda.CUDAGraph)
    assert names["out"].is_cuda


@pytest.mark.parametrize("section", SECTIONS)
def test_names_and_arguments_exist(section):
    """Also where a section cannot run."""
    assert sum(map(check_names, SECTIONS[section])) >= 1


def test_commands_files_and_extras_exist():
    check_commands(command_lines(TEXT))
    assert check_extras(TEXT) >= 3


@pytest.mark.parametrize("target", links(TEXT))
def test_links_lead_somewhere(target):
    assert leads_somewhere(PATH, target)
