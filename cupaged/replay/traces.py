"""Logs of LLM requests: Azure's CSV, Mooncake's JSONL, a plain ``prompt,output`` CSV, each also gzipped."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

MAX_TOKENS = 2**31 - 1
MAX_LINE = 1 << 20
MAX_SECONDS = 1e13

AZURE = {"prompt": "ContextTokens", "output": "GeneratedTokens", "arrival": "TIMESTAMP"}
PLAIN = {"prompt": "prompt", "output": "output"}
COLUMNS = {name.lower(): what for what, name in [*AZURE.items(), *PLAIN.items(), ("arrival", "arrival")]}


class TraceError(ValueError):
    """A trace that cannot be read. Its message is one line that names the file, the line and the column."""


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival.

    Attributes
    ----------
    name : str
        Where they come from, for reports.
    arrival : numpy.ndarray
        float64 ``[n]``, seconds after the first request.
    prompt, output : numpy.ndarray
        int64 ``[n]``, tokens to prefill and tokens to generate. Either may be 0: a request without a prompt
        starts with its first decode, one without output ends with its prefill.
    lines : numpy.ndarray
        int64 ``[n]``, the line of the file that each request stands in.
    hash_ids : list of numpy.ndarray or None
        Mooncake's ids of 512-token prompt blocks, one int64 array a request; equal ids mean equal prefixes.
    notes : tuple of str
        What a reader of a report should know, for example that the log was out of time order.
    """

    name: str
    arrival: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    lines: np.ndarray
    hash_ids: list[np.ndarray] | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def tokens(self) -> int:
        """Prompt and output tokens of all requests."""
        return int(self.prompt.sum() + self.output.sum())


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a log of requests, whose format is recognised by its content.

    Parameters
    ----------
    path : str or os.PathLike
        One of these, plain or gzipped:

        - a CSV with a header that names ``ContextTokens``, ``GeneratedTokens`` and ``TIMESTAMP`` (Azure), or
          ``prompt``, ``output`` and, if there is one, ``arrival`` (dates, or seconds), in any order and case;
        - a CSV of two numbers a line, ``prompt,output``, without a header;
        - JSON lines with ``timestamp`` (milliseconds), ``input_length``, ``output_length`` and, if there are
          any, ``hash_ids`` (Mooncake).

    Returns
    -------
    Trace
        Sorted by arrival, requests of the same moment in the order of the file. Without arrival times all
        requests arrive at time 0.

    Raises
    ------
    TraceError
        If the file cannot be opened or anything in it is not as it should be.
    """
    try:
        with open(path, "rb") as file:
            lines = _Lines(path, file)
            first = next(lines, None)
            if first is None:
                raise lines.error(1, "the file is empty")
            log = _read_jsonl(lines, first) if first.lstrip().startswith("{") else _read_csv(lines, first)
    except OSError as error:
        raise TraceError(f"{os.fspath(path)}: {error.strerror or error}") from None
    return log.trace(Path(path).name)


def synthetic(requests: int = 3000, *, seed: int = 0, per_second: float = 12.0) -> Trace:
    """Make the built-in workload: log-normal lengths as chat services see them, arrivals at random.

    Parameters
    ----------
    requests : int
        How many.
    seed : int
        The same seed makes the same requests.
    per_second : float
        Mean rate of the Poisson arrivals.
    """
    if requests < 1:
        raise ValueError(f"requests must be at least 1, got {requests}")
    if not per_second > 0:
        raise ValueError(f"per_second must be positive, got {per_second}")
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / per_second, requests)
    return Trace(
        name="synthetic",
        arrival=np.cumsum(gaps) - gaps[0],
        prompt=np.clip(rng.lognormal(6.5, 1.0, requests), 1, 8192).astype(np.int64),
        output=np.clip(rng.lognormal(5.0, 0.9, requests), 1, 2048).astype(np.int64),
        lines=np.arange(1, requests + 1),
    )


class _Lines(Iterator[str]):
    """The lines of a file that are not blank, as text, and the place to blame when one is wrong."""

    def __init__(self, path: str | os.PathLike[str], file: BufferedReader):
        self.path = os.fspath(path)
        zipped = file.peek(2).startswith(b"\x1f\x8b")
        self._readline = gzip.GzipFile(fileobj=file).readline if zipped else file.readline
        self.number = 0
        self.ends = True  # with a newline: only a file's last line may lack it

    def __next__(self) -> str:
        while True:
            text = self._next_text()
            if not text.isspace():
                return text

    def _next_text(self) -> str:
        self.number += 1
        try:
            raw = self._readline(MAX_LINE + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self.error(1, f"the gzip data are cut or damaged ({error})") from None
        if not raw:
            raise StopIteration
        if len(raw) > MAX_LINE:
            raise self.error(MAX_LINE + 1, f"the line is longer than {MAX_LINE} bytes, so this is no trace")
        self.ends = raw.endswith(b"\n")
        try:
            text = raw.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(error.start + 1, f"byte {raw[error.start]:#04x} is not text") from None
        if "\0" in text:
            raise self.error(text.index("\0") + 1, "byte 0x00 is not text")
        return text

    def error(self, column: int | str, what: str) -> TraceError:
        return TraceError(f"{self.path}, line {self.number}, column {column}: {what}")


class _Log:
    """The requests read so far."""

    def __init__(self) -> None:
        self.arrival: list[float] = []
        self.prompt: list[int] = []
        self.output: list[int] = []
        self.lines: list[int] = []
        self.hash_ids: list[list[int]] = []

    def trace(self, name: str) -> Trace:
        notes = []
        arrival = np.array(self.arrival, np.float64) if self.arrival else np.zeros(len(self.prompt))
        if not self.arrival:
            notes.append("the log has no arrival times: all requests arrive at time 0")
        early = int(np.count_nonzero(np.diff(arrival) < 0))
        order = np.argsort(arrival, kind="stable")
        if early:
            notes.append(f"{early} requests came before the one ahead of them in the log: sorted by time")
        prompt, output, lines = (np.array(c, np.int64)[order] for c in (self.prompt, self.output, self.lines))
        hash_ids = [np.array(self.hash_ids[i], np.int64) for i in order] if any(self.hash_ids) else None
        return Trace(name, arrival[order] - arrival.min(), prompt, output, lines, hash_ids, tuple(notes))


def _read_csv(lines: _Lines, first: str) -> _Log:
    header = [name.strip(" \t\r\n\"'") for name in first.split(",")]
    places = _places(lines, header)
    has_header = bool(places)
    if not has_header:
        header, places = ["prompt", "output"], {"prompt": 0, "output": 1}
    prompt_at, output_at, arrival_at = places["prompt"], places["output"], places.get("arrival")
    names = [f"{i + 1} ({_show(name)[1:-1]})" for i, name in enumerate(header)]
    log, moment = _Log(), _Moments(lines)
    for text in lines if has_header else chain([first], lines):
        fields = [field.strip() for field in text.split(",")]
        _check_fields(lines, fields, names)
        prompt = _length(lines, fields[prompt_at], names[prompt_at])
        output = _length(lines, fields[output_at], names[output_at])
        _check_total(lines, prompt + output, names[output_at])
        if arrival_at is not None:
            log.arrival.append(moment(fields[arrival_at], names[arrival_at]))
        log.prompt.append(prompt)
        log.output.append(output)
        log.lines.append(lines.number)
    if not log.prompt:
        raise lines.error(1, "no request follows the header")
    return log


def _places(lines: _Lines, header: list[str]) -> dict[str, int]:
    """Find the columns that the header names; none if the first line is a request already."""
    places: dict[str, int] = {}
    for i, name in enumerate(header):
        what = COLUMNS.get(name.lower())
        if what in places:
            raise lines.error(i + 1, f"{_show(name)} names the {what} a second time")
        if what:
            places[what] = i
    if not places:
        if len(header) == 2 and any(name.lstrip("-").isdecimal() for name in header):
            return {}
        raise lines.error(
            1,
            f"{_show(header[0])} starts none of the known formats: a CSV whose header names TIMESTAMP, "
            "ContextTokens and GeneratedTokens, or prompt and output; two numbers a line; Mooncake's JSON",
        )
    azure = any(name.lower() in ("contexttokens", "generatedtokens") for name in header)
    for what, name in (AZURE if azure else PLAIN).items():
        if what not in places:
            raise lines.error(name, "the header has no such column")
    return places


def _check_fields(lines: _Lines, fields: list[str], names: list[str]) -> None:
    if len(fields) == len(names):
        if fields[-1] or lines.ends:
            return
        raise lines.error(names[-1], "the last line is cut: the value is missing")
    if len(fields) > len(names):
        raise lines.error(len(names) + 1, f"{len(fields)} fields where {len(names)} are expected")
    cut = "" if lines.ends else "the last line is cut: "
    raise lines.error(names[len(fields)], f"{cut}{len(fields)} of {len(names)} fields are there")


def _length(lines: _Lines, text: str, column: str) -> int:
    if text.isdecimal() and text.isascii() and len(text) <= 20:
        value = int(text)
        if value <= MAX_TOKENS:
            return value
    digits = text.removeprefix("-")
    if not (digits.isdecimal() and digits.isascii()):
        raise lines.error(column, f"{_show(text)} is not a whole number of tokens")
    if text.startswith("-"):
        raise lines.error(column, f"{_show(text)} is negative: a length is 0 or more tokens")
    raise lines.error(column, f"{_show(text)} tokens are too many: a request can have {MAX_TOKENS}")


def _check_total(lines: _Lines, total: int, column: str) -> None:
    if total > MAX_TOKENS:
        raise lines.error(column, f"prompt and output, {total} tokens, are too many: a request can have {MAX_TOKENS}")


class _Moments:
    """Turns time stamps into seconds: all dates, or all numbers, as the first one is."""

    def __init__(self, lines: _Lines):
        self._lines = lines
        self._parse: Callable[[str], float] | None = None
        self._origin: datetime | None = None

    def __call__(self, text: str, column: str) -> float:
        if self._parse is None:
            self._parse = self._date if "-" in text[1:] else self._number
        try:
            return self._parse(text)
        except ValueError:
            kind = "date" if self._parse == self._date else "number of seconds"
            raise self._lines.error(column, f"{_show(text)} is not a time stamp (a {kind})") from None

    def _date(self, text: str) -> float:
        date = datetime.fromisoformat(text)
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        if self._origin is None:
            self._origin = date
        return (date - self._origin).total_seconds()

    def _number(self, text: str) -> float:
        value = float(text)
        if not abs(value) <= MAX_SECONDS:
            raise ValueError
        return value


def _read_jsonl(lines: _Lines, first: str) -> _Log:
    log = _Log()
    for text in chain([first], lines):
        entry = _entry(lines, text)
        prompt, output = (_json_length(lines, entry, key) for key in ("input_length", "output_length"))
        _check_total(lines, prompt + output, "output_length")
        log.arrival.append(_json_seconds(lines, entry))
        log.prompt.append(prompt)
        log.output.append(output)
        log.hash_ids.append(_hash_ids(lines, entry))
        log.lines.append(lines.number)
    return log


def _entry(lines: _Lines, text: str) -> dict[str, Any]:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = "not JSON" if lines.ends else "the last line is cut"
        raise lines.error(getattr(error, "colno", 1), f"{what} ({getattr(error, 'msg', error)})") from None
    if not isinstance(entry, dict):
        raise lines.error(1, "each line must be a JSON object, {...}")
    return entry


def _value(lines: _Lines, entry: dict[str, Any], key: str) -> Any:
    if key not in entry:
        raise lines.error(key, "the object has no such key")
    return entry[key]


def _json_length(lines: _Lines, entry: dict[str, Any], key: str) -> int:
    value = _value(lines, entry, key)
    if type(value) is int and 0 <= value <= MAX_TOKENS:
        return value
    return _length(lines, json.dumps(value), key)


def _json_seconds(lines: _Lines, entry: dict[str, Any]) -> float:
    value = _value(lines, entry, "timestamp")
    if type(value) not in (int, float) or not abs(value) <= 1000 * MAX_SECONDS:
        raise lines.error("timestamp", f"{_show(value)} is not a time stamp (a number of milliseconds)")
    return value / 1000


def _hash_ids(lines: _Lines, entry: dict[str, Any]) -> list[int]:
    ids = entry.get("hash_ids", [])
    if not isinstance(ids, list):
        raise lines.error("hash_ids", f"{_show(ids)} is not a list")
    for value in ids:
        if type(value) is not int or not 0 <= value < 2**63:
            raise lines.error("hash_ids", f"{_show(value)} is not an id (a whole number from 0 on)")
    return ids


def _show(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return ascii(text if len(text) <= 40 else text[:40] + "...")
