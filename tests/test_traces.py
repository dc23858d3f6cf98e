"""Reading logs: what each format means, and the one line that each kind of bad file gets."""

import gzip
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupaged.replay import Trace, TraceError, read_trace, synthetic

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
FIRST = "2023-11-16 18:15:46.6805900,374,44\r\n"
SHARED = Path(__file__).parents[2] / "shared" / "traces"


def read(tmp_path: Path, content: str | bytes, name: str = "log") -> Trace:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_trace(path)


def complaint(tmp_path: Path, content: str | bytes) -> str:
    """The error's message, without the path that it starts with."""
    with pytest.raises(TraceError) as caught:
        read(tmp_path, content)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'log'}, line ")
    assert message.isprintable(), "one line, and safe on a terminal"
    return message.removeprefix(f"{tmp_path / 'log'}, ")


def test_azure_csv(tmp_path):
    trace = read(tmp_path, AZURE + FIRST + "2023-11-16 18:15:50.9951690,396,109")
    assert trace.prompt.tolist() == [374, 396]
    assert trace.output.tolist() == [44, 109]
    assert trace.arrival.tolist() == pytest.approx([0, 4.314579], abs=1e-9)
    assert trace.lines.tolist() == [2, 3]
    assert (trace.name, len(trace), trace.tokens, trace.notes) == ("log", 2, 923, ())
    assert (trace.arrival.dtype, trace.prompt.dtype, trace.output.dtype) == (np.float64, np.int64, np.int64)


def test_azure_csv_with_time_zones_and_other_column_order(tmp_path):
    content = "generatedtokens, contexttokens ,model,timestamp\n5,6,x,2024-05-10 00:00:00.5+00:00\n"
    trace = read(tmp_path, content + "7,8,y,2024-05-10T02:00:01+02:00\n")
    assert (trace.prompt.tolist(), trace.output.tolist()) == ([6, 8], [5, 7])
    assert trace.arrival.tolist() == [0, 0.5]


def test_mooncake_jsonl(tmp_path):
    lines = [
        {"timestamp": 27000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 7]},
        {"timestamp": 27500, "input_length": 600, "output_length": 6, "hash_ids": [0, 8]},
    ]
    trace = read(tmp_path, "".join(json.dumps(line) + "\n" for line in lines))
    assert trace.arrival.tolist() == [0, 0.5]
    assert (trace.prompt.tolist(), trace.output.tolist()) == ([1000, 600], [5, 6])
    assert [ids.tolist() for ids in trace.hash_ids] == [[0, 7], [0, 8]]


def test_mooncake_without_hash_ids(tmp_path):
    assert read(tmp_path, '{"timestamp": 0.5, "input_length": 1, "output_length": 2}').hash_ids is None


@pytest.mark.parametrize("header", ["", "prompt,output\n", "\ufeffprompt,output\n", "\"Prompt\", 'OUTPUT'\n"])
def test_plain_csv(tmp_path, header):
    trace = read(tmp_path, header + "10,20\n\n 0 , 0 \n")
    assert (trace.prompt.tolist(), trace.output.tolist()) == ([10, 0], [20, 0])
    assert trace.arrival.tolist() == [0, 0]
    assert trace.notes == ("the log has no arrival times: all requests arrive at time 0",)


def test_plain_csv_with_seconds(tmp_path):
    trace = read(tmp_path, "prompt,output,arrival\n1,2,100.5\n3,4,101\n")
    assert trace.arrival.tolist() == [0, 0.5]
    assert trace.notes == ()


def test_out_of_order_is_sorted_and_said(tmp_path):
    trace = read(tmp_path, "arrival,prompt,output\n5,50,1\n1,10,1\n5,51,1\n2,20,1\n")
    assert trace.arrival.tolist() == [0, 1, 4, 4]
    assert trace.prompt.tolist() == [10, 20, 50, 51], "equal moments stay in the order of the file"
    assert trace.lines.tolist() == [3, 5, 2, 4]
    assert trace.notes == ("2 requests came before the one ahead of them in the log: sorted by time",)


def test_hash_ids_are_sorted_with_their_requests(tmp_path):
    line = '{{"timestamp": {}, "input_length": 1, "output_length": 1, "hash_ids": [{}]}}\n'
    trace = read(tmp_path, line.format(9, 9) + line.format(3, 3))
    assert [ids.tolist() for ids in trace.hash_ids] == [[3], [9]]


@pytest.mark.parametrize("content", [AZURE + FIRST, "1,2\n", '{"timestamp":0,"input_length":1,"output_length":1}'])
def test_gzip_reads_the_same(tmp_path, content):
    plain, zipped = read(tmp_path, content), read(tmp_path, gzip.compress(content.encode()))
    assert plain.prompt.tolist() == zipped.prompt.tolist()
    assert plain.lines.tolist() == zipped.lines.tolist()


TOO_LONG = "is longer than 1048576 bytes, so this is no trace"

BAD_FILES = {
    "empty": ("", "line 1, column 1: the file is empty"),
    "only blank lines": ("\n \n\n", "line 4, column 1: the file is empty"),
    "only a header": (AZURE, "line 2, column 1: no request follows the header"),
    "missing prompt": ("TIMESTAMP,GeneratedTokens\n", "line 1, column ContextTokens: the header has no such column"),
    "missing output": ("TIMESTAMP,ContextTokens\n", "line 1, column GeneratedTokens: the header has no such column"),
    "missing time": ("ContextTokens,GeneratedTokens\n", "line 1, column TIMESTAMP: the header has no such column"),
    "missing plain": ("prompt,arrival\n", "line 1, column output: the header has no such column"),
    "column twice": ("prompt,output,Prompt\n", "line 1, column 3: 'Prompt' names the prompt a second time"),
    "unknown": (
        "hello world\n",
        "line 1, column 1: 'hello world' starts none of the known formats: a CSV whose header names TIMESTAMP, "
        "ContextTokens and GeneratedTokens, or prompt and output; two numbers a line; Mooncake's JSON",
    ),
    "no number": (
        AZURE + FIRST + FIRST.replace("374", "3x4"),
        "line 3, column 2 (ContextTokens): '3x4' is not a whole number of tokens",
    ),
    "fraction": ("1,2\n3,4.5\n", "line 2, column 2 (output): '4.5' is not a whole number of tokens"),
    "underscores": ("1,2\n3,4_5\n", "line 2, column 2 (output): '4_5' is not a whole number of tokens"),
    "other digits": ("1,2\n3,²\n", "line 2, column 2 (output): '\\xb2' is not a whole number of tokens"),
    "no number at once": ("1,x\n", "line 1, column 2 (output): 'x' is not a whole number of tokens"),
    "no value": ("1,2\n,4\n", "line 2, column 1 (prompt): '' is not a whole number of tokens"),
    "negative": ("1,2\n-3,4\n", "line 2, column 1 (prompt): '-3' is negative: a length is 0 or more tokens"),
    "absurd": (
        "1,2\n3,2147483648\n",
        "line 2, column 2 (output): '2147483648' tokens are too many: a request can have 2147483647",
    ),
    "very absurd": (
        f"1,2\n3,{'9' * 5000}\n",
        f"line 2, column 2 (output): '{'9' * 40}...' tokens are too many: a request can have 2147483647",
    ),
    "absurd sum": (
        "2147483647,1\n",
        "line 1, column 2 (output): prompt and output, 2147483648 tokens, are too many: "
        "a request can have 2147483647",
    ),
    "no time stamp": (
        AZURE + FIRST + "yesterday,1,2\n",
        "line 3, column 1 (TIMESTAMP): 'yesterday' is not a time stamp (a date)",
    ),
    "no such date": (
        AZURE + "2023-13-16 18:15:46,1,2\n",
        "line 2, column 1 (TIMESTAMP): '2023-13-16 18:15:46' is not a time stamp (a date)",
    ),
    "seconds among dates": (
        AZURE + FIRST + "5,1,2\n",
        "line 3, column 1 (TIMESTAMP): '5' is not a time stamp (a date)",
    ),
    "nan": (
        "prompt,output,arrival\n1,2,nan\n",
        "line 2, column 3 (arrival): 'nan' is not a time stamp (a number of seconds)",
    ),
    "late": (
        "prompt,output,arrival\n1,2,1e300\n",
        "line 2, column 3 (arrival): '1e300' is not a time stamp (a number of seconds)",
    ),
    "too few fields": (
        AZURE + "2023-11-16 18:15:46,1\n" + FIRST,
        "line 2, column 3 (GeneratedTokens): 2 of 3 fields are there",
    ),
    "strange header": (
        "prompt,output,\x1b[31m\n1,2\n",
        "line 2, column 3 (\\x1b[31m): 2 of 3 fields are there",
    ),
    "too many fields": ("1,2\n3,4,5\n", "line 2, column 3: 3 fields where 2 are expected"),
    "cut line": (
        AZURE + FIRST + "2023-11-16 18:15:4",
        "line 3, column 2 (ContextTokens): the last line is cut: 1 of 3 fields are there",
    ),
    "cut after the comma": (
        AZURE + FIRST + "2023-11-16 18:15:46,5,",
        "line 3, column 3 (GeneratedTokens): the last line is cut: the value is missing",
    ),
    "huge line": (b"1,2\n3," + b"4" * 2_000_000, f"line 2, column 1048577: the line {TOO_LONG}"),
    "huge zipped line": (gzip.compress(b"x" * 2_000_000), f"line 1, column 1048577: the line {TOO_LONG}"),
    "binary": (b"1,2\n\x93NUMPY\x01", "line 2, column 1: byte 0x93 is not text"),
    "zero bytes": (b"1,2\n3,\0\0\0\0", "line 2, column 3: byte 0x00 is not text"),
    "utf-16": ("prompt,output\n".encode("utf-16"), "line 1, column 1: byte 0xff is not text"),
    "cut json": (
        '{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 1, "inp',
        "line 2, column 18: the last line is cut (Unterminated string starting at)",
    ),
    "no json": ('{"timestamp": 0,}\n', "line 1, column 17: not JSON (Illegal trailing comma before end of object)"),
    "no object": (
        '{"timestamp": 0, "input_length": 1, "output_length": 1}\n[1, 2]\n',
        "line 2, column 1: each line must be a JSON object, {...}",
    ),
    "deep json": ('{"timestamp": ' + "[" * 100_000 + "\n", None),
    "long json number": ('{"timestamp": ' + "1" * 5000 + "}\n", None),
    "missing key": (
        '{"timestamp": 0, "input_length": 1}\n',
        "line 1, column output_length: the object has no such key",
    ),
    "json text": (
        '{"timestamp": 0, "input_length": "1", "output_length": 1}\n',
        "line 1, column input_length: '\"1\"' is not a whole number of tokens",
    ),
    "json true": (
        '{"timestamp": 0, "input_length": true, "output_length": 1}\n',
        "line 1, column input_length: 'true' is not a whole number of tokens",
    ),
    "json negative": (
        '{"timestamp": 0, "input_length": 1, "output_length": -1}\n',
        "line 1, column output_length: '-1' is negative: a length is 0 or more tokens",
    ),
    "json no time": (
        '{"timestamp": "now", "input_length": 1, "output_length": 1}\n',
        "line 1, column timestamp: 'now' is not a time stamp (a number of milliseconds)",
    ),
    "json nan": (
        '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n',
        "line 1, column timestamp: 'NaN' is not a time stamp (a number of milliseconds)",
    ),
    "no list": (
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": 5}\n',
        "line 1, column hash_ids: '5' is not a list",
    ),
    "no id": (
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [5, -6]}\n',
        "line 1, column hash_ids: '-6' is not an id (a whole number from 0 on)",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file(tmp_path, name):
    content, expected = BAD_FILES[name]
    found = complaint(tmp_path, content)
    if name == "no json":  # Python words it differently from version to version
        assert found.startswith("line 1, column ")
        assert "not JSON (" in found
    elif expected:
        assert found == expected
    else:
        assert found.startswith("line 1, column 1: not JSON (")


def test_cut_gzip(tmp_path):
    whole = gzip.compress("".join(f"{i},{i}\n" for i in range(5000)).encode())
    assert "the gzip data are cut or damaged" in complaint(tmp_path, whole[: len(whole) // 2])
    assert "the gzip data are cut or damaged" in complaint(tmp_path, whole + b"junk")
    assert "the gzip data are cut or damaged" in complaint(tmp_path, whole[:10] + b"\xff" + whole[11:])


def test_files_that_do_not_open(tmp_path):
    for path, why in ((tmp_path / "none.csv", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(TraceError, match=why):
            read_trace(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_read_or_refused_in_one_line(tmp_path, data):
    good = data.draw(st.sampled_from([AZURE + FIRST * 2, "1,2\n3,4\n", '{"timestamp":1,"input_length":2}\n']))
    content = bytearray(data.draw(st.sampled_from([good.encode(), gzip.compress(good.encode())])))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    complaint = ", line "
    try:
        requests = len(read(tmp_path, bytes(content)))
    except TraceError as error:
        requests, complaint = 1, str(error)
    assert requests > 0
    assert ", line " in complaint
    assert complaint.isprintable()


def test_synthetic():
    trace, again, other = synthetic(500), synthetic(500), synthetic(500, seed=1)
    assert len(trace) == 500
    assert trace.prompt.tolist() == again.prompt.tolist() != other.prompt.tolist()
    assert trace.arrival[0] == 0
    assert (np.diff(trace.arrival) >= 0).all()
    assert min(trace.prompt.min(), trace.output.min()) >= 1


@pytest.mark.parametrize("arguments", [{"requests": 0}, {"per_second": 0}, {"per_second": float("nan")}])
def test_synthetic_refuses(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        synthetic(**arguments)


@pytest.mark.skipif(not SHARED.exists(), reason="the real traces are not beside this checkout")
@pytest.mark.parametrize(
    ("name", "requests", "tokens"),
    [
        ("AzureLLMInferenceTrace_conv.csv", 19_366, 26_450_535),
        ("AzureLLMInferenceTrace_code.csv", 8_819, 18_305_870),
        ("mooncake_conversation_trace.jsonl", 12_031, 148_915_871),
    ],
)
def test_real_traces(name, requests, tokens):
    start = time.process_time()
    trace = read_trace(SHARED / name)
    assert time.process_time() - start < 1.5
    assert (len(trace), trace.tokens, trace.notes) == (requests, tokens, ())
