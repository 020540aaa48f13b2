"""The arguments with which a batch calls its function for each input."""

from __future__ import annotations

import pytest

from kinetic._client.batch.inputs import CallArguments, list_calls
from kinetic.errors import UsageError, UsageTypeError


@pytest.mark.parametrize(
    ("item", "mode", "call"),
    [
        ({"lr": 1}, "auto", CallArguments(kwargs={"lr": 1})),
        ({"not-a-name": 1}, "auto", CallArguments(({"not-a-name": 1},))),
        ({"class": 1}, "auto", CallArguments(({"class": 1},))),
        ({1: 2}, "auto", CallArguments(({1: 2},))),
        ({}, "auto", CallArguments()),
        ([1, 2], "auto", CallArguments((1, 2))),
        ((1, 2), "auto", CallArguments((1, 2))),
        ("ab", "auto", CallArguments(("ab",))),
        (None, "auto", CallArguments((None,))),
        ([1, 2], "single", CallArguments(([1, 2],))),
        ({"lr": 1}, "single", CallArguments(({"lr": 1},))),
        ([1, 2], "args", CallArguments((1, 2))),
        ({"class": 1}, "kwargs", CallArguments(kwargs={"class": 1})),
    ],
)
def test_input_modes(item, mode, call):
    assert list_calls([item], mode) == [call]


@pytest.mark.parametrize(
    ("inputs", "mode", "error", "words"),
    [
        ([1], "args", UsageTypeError, r"inputs\[0\] must be a list or tuple"),
        ([{}, 1], "kwargs", UsageTypeError, r"inputs\[1\] must be a dict"),
        ([{1: 2}], "kwargs", UsageTypeError, "cannot be the name"),
        ("abc", "auto", UsageTypeError, "inputs must be a list"),
        ({"a": 1}, "auto", UsageTypeError, "inputs must be a list"),
        (3, "auto", UsageTypeError, "inputs must be a list"),
        ([1], "splat", UsageError, "splat"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_at_once(inputs, mode, error, words):
    with pytest.raises(error, match=words):
        list_calls(inputs, mode)
