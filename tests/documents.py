"""What documents hold, blocks of code, commands and links, and what must be true of them."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

import typer.main

import cupaged
from cupaged import cli

ROOT = Path(__file__).parent.parent


class Block(NamedTuple):
    """Code between fences, and the second-level heading above it."""

    section: str
    language: str
    code: str


def blocks(text: str) -> list[Block]:
    found, section = [], ""
    for match in re.finditer(r"^## ([^\n]+)$|^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if match[1]:
            section = match[1]
        else:
            found.append(Block(section, match[2], match[3]))
    return found


def command_lines(text: str) -> list[str]:
    return [line for block in blocks(text) if block.language == "sh" for line in block.code.splitlines()]


def our_commands(lines: list[str]) -> list[list[str]]:
    """Calls of ``cupaged`` in them, as words."""
    parts = [shlex.split(part) for line in lines for part in line.split("&&")]
    return [words for words in parts if words and words[0].rpartition("/")[2] == "cupaged"]


def check_commands(lines: list[str]) -> None:
    """Each command exists and has these options; each example is there."""
    commands = typer.main.get_command(cli.app).commands
    for words in our_commands(lines):
        options = {name for parameter in commands[words[1]].params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, words
    for line in lines:
        for path in re.findall(r"^python (\S+\.py)$", line):
            assert (ROOT / path).is_file(), line


def check_extras(text: str) -> int:
    """Extras that are named, as ``.[cuda13,torch]``, exist; how many are named."""
    there = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for group in re.findall(r"\.\[([\w,]+)\]", text) for extra in group.split(",")}
    assert named <= set(there), named
    return len(named)


def check_names(code: str) -> int:
    """What code asks of cupaged, ``pool`` and ``kv`` is there and takes these arguments; how often it asks."""
    pool = cupaged.PagedTokenToKVPoolAllocator(64, 16, backend="reference", device="cpu")
    kv = cupaged.KVAllocator(64, "cpu", 2, 32, 16, backend="reference")
    homes = {"cupaged": cupaged, "pool": pool, "kv": kv}
    seen = 0
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in homes:
            assert hasattr(homes[node.value.id], node.attr), ast.unparse(node)
            seen += 1
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("pool.", "kv.", "cupaged.")):
            owner, _, name = ast.unparse(node.func).partition(".")
            signature = inspect.signature(getattr(homes[owner], name))
            signature.bind(*node.args, **{word.arg: None for word in node.keywords})
    return seen


def imported(code: str) -> set[str]:
    """Packages that code imports."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", text)


def anchors(text: str) -> set[str]:
    """What GitHub names the headings of a document."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(document: Path, target: str) -> bool:
    """Whether a link of a document, to a file or a heading, leads to one that is there."""
    path, _, heading = target.partition("#")
    file = document.parent / path if path else document
    return file.exists() and (not heading or heading in anchors(file.read_text()))
