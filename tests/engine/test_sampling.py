"""Sampling options: what is refused, and the words that travel to the device."""

import math

import numpy as np
import pytest

from unimem_jax.errors import UsageError
from unimem_jax.packet import OPTION_WORDS
from unimem_jax.sampling import Sampling

WRONG = [
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
    ("temperature", float("1e400")),
    ("temperature", 1e39),  # finite, but not in float32
    ("temperature", -0.5),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", None),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("top_p", math.nan),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_k", True),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("min_p", math.nan),
    ("max_tokens", 0),
    ("max_tokens", -3),
    ("max_tokens", 2.0),
    ("max_tokens", False),
    ("max_tokens", np.bool_(True)),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", 10**5000),  # Python itself refuses to print this one
    ("seed", 0.5),
    ("seed", "7"),
    ("stop", ""),
    ("stop", ("end", "")),
    ("stop", (b"end",)),
    ("stop", 3),
    ("stop_ids", (-1,)),
    ("stop_ids", (True,)),
    ("stop_ids", (1.0,)),
    ("stop_ids", 5),
    ("stop_ids", "5"),
]


# Counted ids, since pytest would print the values and Python refuses to print one of them.
@pytest.mark.parametrize("name, value", WRONG, ids=[f"{i}-{w[0]}" for i, w in enumerate(WRONG)])
def test_a_wrong_option_is_refused_by_name(name, value):
    with pytest.raises(UsageError) as error:
        Sampling(**{name: value})
    assert name.removesuffix("_ids") in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 150


def test_options_are_kept_as_plain_python_values():
    sampling = Sampling(
        max_tokens=np.int64(3), temperature=np.float32(0.5), top_k=np.int32(4), stop="end",
        stop_ids=np.arange(2),
    )  # fmt: skip
    assert sampling == Sampling(3, 0.5, 4, stop=("end",), stop_ids=(0, 1))
    assert type(sampling.max_tokens) is int
    assert type(sampling.temperature) is float


def test_words_are_float_bits_and_int32_in_the_order_of_a_packet():
    words = Sampling(temperature=0.7, top_p=0.9, min_p=0.05, top_k=40, seed=-5).words()
    assert len(words) == OPTION_WORDS
    floats = np.asarray(words[:3], np.int32).view(np.float32)
    np.testing.assert_array_equal(floats, np.asarray([0.7, 0.9, 0.05], np.float32))
    assert words[3:] == (40, -5)


def test_the_memory_without_options_is_the_default_sampling():
    from unimem_jax.memory import GREEDY_WORDS

    assert Sampling().words() == GREEDY_WORDS


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31 - 1, -(2**31)])
def test_a_seed_of_32_bits_travels_unchanged(seed):
    assert Sampling(seed=seed).words()[4] == seed


def test_a_longer_seed_is_folded_into_int32_and_both_halves_count():
    seeds = [2**31, 2**32, 2**63, 2**64 - 6, -(2**63), 3 << 32, (3 << 32) + 1]
    folded = [Sampling(seed=seed).words()[4] for seed in seeds]
    assert len(set(folded)) == len(seeds) - 2  # 2^31, 2^63 and -2^63 fold to the same
    assert all(-(2**31) <= word < 2**31 for word in folded)
    assert Sampling(seed=2**31).words()[4] == -(2**31)


def test_an_enormous_top_k_means_all():
    assert Sampling(top_k=10**12).words()[3] == 2**31 - 1
