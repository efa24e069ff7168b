"""Traces: three kinds of file, and lines that are refused by file and number."""

from pathlib import Path

import pytest

from unimem_jax.errors import UsageError
from unimem_jax.trace import Traced, read_trace

OURS = "arrival_s,prompt_tokens,new_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = '{"timestamp": 5000, "input_length": 600, "output_length": 7, "hash_ids": [3, 4]}\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_our_own_columns_are_read(tmp_path):
    path = written(tmp_path, OURS + "10,5,2\n10.5, 1 ,1\n")
    assert read_trace(path) == [Traced(0.0, 5, 2), Traced(0.5, 1, 1)]
    prefixed = OURS.replace("\n", ",prefix_blocks\n") + "0,513,2,7 8\n0,3,1,\n"
    found = read_trace(written(tmp_path, prefixed))
    assert found == [Traced(0.0, 513, 2, (7, 8)), Traced(0.0, 3, 1)]


def test_azure_rows_are_read_and_generate_at_least_one_token(tmp_path):
    rows = "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,0\r\n"
    first, second = read_trace(written(tmp_path, AZURE + rows))
    assert first == Traced(0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert (second.prompt_tokens, second.new_tokens) == (396, 1)


def test_mooncake_lines_keep_their_prefix_blocks(tmp_path):
    path = written(tmp_path, MOONCAKE + MOONCAKE.replace("5000", "5250").replace("600", "512.0"))
    with pytest.raises(UsageError, match=r"trace:2: input_length is a whole number"):
        read_trace(path)
    assert read_trace(path, limit=1) == [Traced(0.0, 600, 7, (3, 4))]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", r"trace:1: a trace begins with"),
        ("a,b,c\n1,2,3\n", r"trace:1: a trace begins with"),
        (OURS, "has no request"),
        (OURS + "0,5,2\n\n1,5,2\n", r"trace:3: the line is empty"),
        (OURS + "0,5\n", r"trace:2: 3 columns are needed, not 2"),
        (OURS + "0,5,2,9\n", r"trace:2: 3 columns are needed, not 4"),
        (OURS + "0,five,2\n", r"trace:2: prompt_tokens is a whole number from 1"),
        (OURS + "0,0,2\n", r"trace:2: prompt_tokens is a whole number from 1"),
        (OURS + "0,5,0\n", r"trace:2: new_tokens is a whole number from 1"),
        (OURS + f"0,5,{2**31}\n", r"trace:2: new_tokens is a whole number from 1"),
        (OURS + "0,5,2\nlater,5,2\n", r"trace:3: arrival_s is a number"),
        (OURS + "nan,5,2\n", r"trace:2: an arrival is a finite time"),
        (OURS + "0,5,2\ninf,5,2\n", r"trace:3: an arrival is a finite time"),
        (OURS + "1,5,2\n0.5,5,2\n", r"trace:3: it arrives before the line above it"),
        (AZURE + "yesterday,5,2\n", r"trace:2: a time is needed"),
        (AZURE + "2023-11-16 18:15:46,0,2\n", r"trace:2: ContextTokens is a whole number from 1"),
        ("{\n", r"trace:1: a line is one JSON object"),
        ("{}\n", r"trace:1: a line has timestamp"),
        (MOONCAKE + "[1]\n", r"trace:2: a line has timestamp"),
        (MOONCAKE.replace("5000", "true"), r"trace:1: timestamp is a number"),
        (MOONCAKE.replace("5000", "1" + "0" * 400), r"trace:1: timestamp is a number"),
        (MOONCAKE.replace("[3, 4]", "3"), r"trace:1: hash_ids is a list"),
        (MOONCAKE.replace("[3, 4]", "[3]"), r"trace:1: 600 prompt tokens are 2 blocks of 512"),
        (MOONCAKE.replace("[3, 4]", "[3, -1]"), r"trace:1: a hash id is a whole number from 0"),
    ],
)
def test_a_wrong_line_is_refused_by_file_and_number(tmp_path, text, message):
    with pytest.raises(UsageError, match=message) as refused:
        read_trace(written(tmp_path, text))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_or_is_no_text_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        read_trace(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_trace(tmp_path / "binary")
    with pytest.raises(UsageError, match="limit is a positive int"):
        read_trace(written(tmp_path, OURS + "0,1,1\n"), limit=0)
