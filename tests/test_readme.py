"""Every block of code in README.md: Python runs, commands exist, and the picture is what the allocator says."""

from __future__ import annotations

import re

import pytest
import typer.main

import cupaged
from cupaged import backends, cli
from cupaged.demo import run as run_demo
from tests.documents import (
    ROOT,
    blocks,
    check_commands,
    check_extras,
    check_names,
    command_lines,
    leads_somewhere,
    links,
    our_commands,
)

README = (ROOT / "README.md").read_text()
PYTHON = [block.code for block in blocks(README) if block.language == "python"]
NAMES = ("torch", "cupy", "kv")  # of these blocks
COMMANDS = command_lines(README)


def test_there_is_one_block_for_each_library_and_one_for_tables():
    assert len(PYTHON) == len(NAMES)
    assert "import torch" in PYTHON[0]
    assert "import cupy" in PYTHON[1]
    assert "KVAllocator" in PYTHON[2]


@pytest.mark.parametrize("block", PYTHON, ids=NAMES)
def test_names_and_arguments_exist(block):
    """Also where the block cannot run: what it calls is there, and takes these arguments."""
    assert check_names(block) >= 6


def test_torch_block_runs():
    pytest.importorskip("torch")
    exec(compile(PYTHON[0], "README.md", "exec"), {})


def test_kv_block_runs():
    exec(compile(PYTHON[2], "README.md", "exec"), {})


@pytest.mark.gpu
@pytest.mark.skipif(not backends.probe("cupy").works, reason="needs CuPy and a GPU")
def test_cupy_block_runs():
    exec(compile(PYTHON[1], "README.md", "exec"), {})


@pytest.mark.parametrize("allocator", [cupaged.PagedTokenToKVPoolAllocator, cupaged.KVAllocator])
@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+_(?:step|tables?|mapping)|trim|release)`", README))))
def test_both_allocators_have_what_the_text_says_they_share(allocator, name):
    assert callable(getattr(allocator, name))


def test_commands_and_options_exist():
    assert {words[1] for words in our_commands(COMMANDS)} == set(typer.main.get_command(cli.app).commands)
    check_commands(COMMANDS)


def test_set_up_commands_use_extras_that_exist():
    assert check_extras(README) == 6


def test_the_picture_is_what_the_allocator_says():
    demo = run_demo("reference")
    for page in range(1, 9):
        assert f" page {page}  |{demo.cells[page][3::4]}|" in README
    for part in demo.parts:
        assert f"{part.request} {part.count}" in README
        assert f"{part.first} .. {part.last}" in README


def test_every_backend_is_in_the_table():
    assert re.findall(r"^\| `([\w-]+)` \|", README, re.MULTILINE) == list(backends.NAMES)


@pytest.mark.parametrize("target", links(README))
def test_links_lead_somewhere(target):
    assert leads_somewhere(ROOT / "README.md", target)
