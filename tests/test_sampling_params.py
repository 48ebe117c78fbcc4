"""Parameters are checked when they are made, and unknown ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from foretell import InputError, OptionError, SamplingParams


def test_the_defaults():
    params = SamplingParams()
    assert params.max_tokens == 256
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == ((), (), False)
    assert params.temperature == 0
    assert (params.top_p, params.top_k, params.min_p) == (1, 0, 0)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    assert penalties == (1, 0, 0)
    assert (params.logit_bias, params.min_tokens, params.n) == ((), 0, 1)
    assert (params.seed, params.logprobs, params.prompt_logprobs) == (None, None, None)


def test_a_bias_is_a_mapping_or_pairs_and_becomes_sorted_pairs():
    params = SamplingParams(logit_bias={np.int64(5): 1, 2: float("-inf")})
    assert params.logit_bias == ((2, float("-inf")), (5, 1.0))
    assert SamplingParams(logit_bias=params.logit_bias) == params
    assert params.banned == (2,)
    hash(params)


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int32(3), seed=np.uint64(2**63))
    assert (params.temperature, params.top_k, params.seed) == (0.5, 3, 2**63)
    assert [type(v) for v in (params.temperature, params.top_k, params.seed)] == [float, int, int]


def test_lists_become_tuples_and_a_string_a_tuple_of_one():
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1, np.int64(2)])
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1, 2))
    assert SamplingParams(stop="ab").stop == ("ab",)
    hash(params)


@pytest.mark.parametrize("value", [1, 10**9, None, np.int32(7)])
def test_max_tokens(value):
    assert SamplingParams(max_tokens=value).max_tokens == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", 3.0),
        ("max_tokens", "3"),
        ("max_tokens", True),
        ("max_tokens", float("inf")),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 1]),
        ("stop", b"a"),
        ("stop", 3),
        ("stop", {"a"}),
        ("stop", None),
        ("stop_token_ids", 3),
        ("stop_token_ids", "3"),
        ("stop_token_ids", ["3"]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", None),
        ("ignore_eos", 1),
        ("ignore_eos", None),
        ("temperature", True),
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("repetition_penalty", 10**400),
        ("stop", "\ud800"),
        ("stop", ["a", "b\udcff"]),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_p", "0.5"),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_k", True),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("logit_bias", 3),
        ("logit_bias", [1]),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: "1"}),
        ("min_tokens", -1),
        ("min_tokens", 1.0),
        ("min_tokens", 257),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("seed", True),
        ("n", 0),
        ("n", 1.5),
        ("n", None),
        ("logprobs", -2),
        ("logprobs", True),
        ("logprobs", 1.0),
        ("prompt_logprobs", -2),
    ],
)
def test_impossible_values_are_refused_with_what_was_given(name, value):
    with pytest.raises(OptionError, match=name):
        SamplingParams(**{name: value})


def test_an_error_shows_what_was_given_and_what_to_use():
    with pytest.raises(OptionError, match=r"max_tokens is '3'; use a whole number from 1, or None"):
        SamplingParams(max_tokens="3")
    with pytest.raises(OptionError, match=r"stop_token_ids holds 1\.5; use a list of token ids"):
        SamplingParams(stop_token_ids=[1, 1.5])
    assert issubclass(OptionError, ValueError)
    assert issubclass(OptionError, InputError)


def test_unknown_options_are_refused_with_the_known_ones():
    with pytest.raises(OptionError, match=r"unknown option 'max_token'; .*max_tokens, stop"):
        SamplingParams.from_options(None, {"max_token": 3})


def test_options_go_on_top_of_a_base():
    base = SamplingParams(max_tokens=3, stop="x")
    params = SamplingParams.from_options(base, {"max_tokens": 4})
    assert (params.max_tokens, params.stop) == (4, ("x",))
    assert base.max_tokens == 3
    assert SamplingParams.from_options(None, {}) == SamplingParams()
    with pytest.raises(OptionError, match="max_tokens"):
        SamplingParams.from_options(base, {"max_tokens": 0})
    with pytest.raises(OptionError, match="pass a SamplingParams"):
        SamplingParams.from_options({"max_tokens": 3}, {})


def test_params_cannot_be_changed():
    with pytest.raises(AttributeError):
        SamplingParams().max_tokens = 3
