"""What a model may declare, and the one clear error for everything that it may not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unimem_jax.errors import UsageError
from unimem_jax.spec import CONTEXT, REQUEST, STORED_DTYPES, Lifetime, Part, Site, request, window

PART = {
    "site": Site(3, 1, "draft"), "name": "key", "shape": (2, 5), "dtype": "bfloat16",
    "lifetime": CONTEXT,
}  # fmt: skip
WRONG_PARTS = [
    ("site", 3, "3"),
    ("site", None, "None"),
    ("name", "", "''"),
    ("name", "two words", "'two words'"),
    ("name", 7, "7"),
    ("shape", (), "()"),
    ("shape", (2, 0), "(2, 0)"),
    ("shape", (-1,), "(-1,)"),
    ("shape", (2.0,), "(2.0,)"),
    ("shape", (True,), "(True,)"),
    ("shape", [2, 5], "[2, 5]"),
    ("shape", 10, "10"),
    ("dtype", "float64", "'float64'"),
    ("dtype", "int2", "'int2'"),
    ("dtype", "", "''"),
    ("dtype", ["float32"], "['float32']"),
    ("dtype", np.float32, "float32"),
    ("lifetime", "context", "'context'"),
    ("lifetime", 64, "64"),
    ("stride", 0, "0"),
    ("stride", 2.0, "2.0"),
    ("stride", True, "True"),
    ("draft", 1, "1"),
    ("draft", None, "None"),
]
WRONG_WINDOWS = [0, -3, 2.0, True, "8", None, np.float32(4), np.True_, 1 << 31]


@pytest.mark.parametrize("field, value, seen", WRONG_PARTS)
def test_a_wrong_part_is_refused_with_the_value_seen(field, value, seen):
    with pytest.raises(UsageError) as caught:
        Part(**PART | {field: value})
    assert seen in str(caught.value)


@pytest.mark.parametrize(
    "site, seen",
    [((-1,), "-1"), ((1.5,), "1.5"), (("3",), "'3'"), ((True,), "True"), ((0, -2), "-2"),
     ((0, 0, 7), "7"), ((0, 0, None), "None")],
)  # fmt: skip
def test_a_wrong_site_is_refused_with_the_value_seen(site, seen):
    with pytest.raises(UsageError) as caught:
        Site(*site)
    assert seen in str(caught.value)
    assert Site(np.int64(2), np.int8(1)) == Site(2, 1)


@pytest.mark.parametrize("field", ["shape", "dtype", "lifetime", "site", "stride", "draft"])
def test_the_error_names_the_part(field):
    with pytest.raises(UsageError, match="key"):
        Part(**PART | {field: ""})


def test_an_unknown_dtype_names_those_that_are_stored():
    with pytest.raises(UsageError) as caught:
        Part(**PART | {"dtype": "complex64"})
    assert all(name in str(caught.value) for name in STORED_DTYPES)


@pytest.mark.parametrize("tokens", WRONG_WINDOWS)
def test_a_wrong_window_is_refused_however_it_is_made(tokens):
    for make in (window, lambda tokens: Lifetime("window", tokens)):
        with pytest.raises(UsageError) as caught:
            make(tokens)
        assert repr(tokens) in str(caught.value)


@pytest.mark.parametrize("kind, tokens", [("context", 4), ("request", 1), ("forever", 0)])
def test_a_lifetime_of_another_kind_is_refused(kind, tokens):
    with pytest.raises(UsageError, match=kind):
        Lifetime(kind, tokens)


def test_request_state_has_no_stride():
    with pytest.raises(UsageError, match=r"L3v1\.draft\.key: request state has no tokens"):
        Part(**PART | {"lifetime": REQUEST, "stride": 2})


@pytest.mark.parametrize("name", ["", "two words", 7, None])
def test_named_request_state_has_an_identifier_for_a_name(name):
    with pytest.raises(UsageError, match="identifier") as caught:
        request(name)
    assert repr(name) in str(caught.value)


def test_a_name_belongs_to_request_state_alone():
    for kind, tokens in (("context", 0), ("window", 8)):
        with pytest.raises(UsageError, match="only request state has a name"):
            Lifetime(kind, tokens, "checkpoint")
    assert request("checkpoint") == Lifetime("request", name="checkpoint") != REQUEST
    assert request("checkpoint").is_request


@given(tokens=st.integers(1, 40), length=st.integers(0, 100))
def test_a_query_sees_the_last_tokens_of_its_window_and_itself(tokens, length):
    seen = [at for at in range(length + 1) if length - at < tokens]
    assert window(tokens).first_kept(length) == seen[0]
    assert CONTEXT.first_kept(length) == REQUEST.first_kept(length) == 0


@pytest.mark.parametrize("dtype", STORED_DTYPES)
def test_bytes_of_a_part_are_elements_times_their_size(dtype):
    part = Part(**PART | {"shape": (3, 7, 22), "dtype": dtype})
    is_paired = dtype in ("int4", "uint4", "float4_e2m1fn")
    assert part.byte_count == (231 if is_paired else 462 * STORED_DTYPES[dtype].itemsize)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float4_e2m1fn"])
def test_half_a_byte_is_refused(dtype):
    with pytest.raises(UsageError, match="35 elements; pad it to an even number"):
        Part(**PART | {"shape": (5, 7), "dtype": dtype})


def test_bytes_of_a_huge_part_do_not_wrap():
    part = Part(**PART | {"shape": (1 << 20, 1 << 20), "dtype": "float32"})
    assert part.byte_count == 1 << 42


def test_sites_sort_by_layer_then_visit_then_stream():
    sites = [Site(1), Site(0, 1), Site(0, 0, "b"), Site(0), Site(0, 0, "a")]
    assert sorted(sites) == [Site(0), Site(0, 0, "a"), Site(0, 0, "b"), Site(0, 1), Site(1)]
    assert [str(site) for site in sorted(sites)] == ["L0", "L0.a", "L0.b", "L0v1", "L1"]
