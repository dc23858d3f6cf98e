"""Every block of code in README.md: Python runs, commands exist, and the picture is what the allocator says."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer.main

import cupaged
from cupaged import backends, cli
from cupaged.demo import run as run_demo

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
NAMES = ("torch", "cupy", "kv")  # of these blocks
COMMANDS = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]


def test_there_is_one_block_for_each_library_and_one_for_tables():
    assert len(PYTHON) == len(NAMES)
    assert "import torch" in PYTHON[0]
    assert "import cupy" in PYTHON[1]
    assert "KVAllocator" in PYTHON[2]


@pytest.mark.parametrize("block", PYTHON, ids=NAMES)
def test_names_and_arguments_exist(block):
    """Also where the block cannot run: what it calls is there, and takes these arguments."""
    pool = cupaged.PagedTokenToKVPoolAllocator(64, 16, backend="reference", device="cpu")
    kv = cupaged.KVAllocator(64, "cpu", 2, 32, 16, backend="reference")
    homes = {"cupaged": cupaged, "pool": pool, "kv": kv}
    seen = 0
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in homes:
            assert hasattr(homes[node.value.id], node.attr), ast.unparse(node)
            seen += 1
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("pool.", "kv.", "cupaged.")):
            owner, _, name = ast.unparse(node.func).partition(".")
            signature = inspect.signature(getattr(homes[owner], name))
            signature.bind(*node.args, **{word.arg: None for word in node.keywords})
    assert seen >= 6


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
    commands = typer.main.get_command(cli.app).commands
    lines = [shlex.split(part)[0:] for line in COMMANDS for part in line.split("&&")]
    ours = [words for words in lines if words[0].rpartition("/")[2] == "cupaged"]
    assert {words[1] for words in ours} == set(commands)
    for words in ours:
        options = {name for parameter in commands[words[1]].params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, words


def test_set_up_commands_use_extras_that_exist():
    import tomllib

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r"\.\[(\w+)\]", README):
        assert extra in project["optional-dependencies"]


def test_the_picture_is_what_the_allocator_says():
    demo = run_demo("reference")
    for page in range(1, 9):
        assert f" page {page}  |{demo.cells[page][3::4]}|" in README
    for part in demo.parts:
        assert f"{part.request} {part.count}" in README
        assert f"{part.first} .. {part.last}" in README


def test_every_backend_is_in_the_table():
    assert re.findall(r"^\| `([\w-]+)` \|", README, re.MULTILINE) == list(backends.NAMES)


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)]+)\)", README))
def test_links_lead_somewhere(target):
    assert (Path(__file__).parent.parent / target).exists()
