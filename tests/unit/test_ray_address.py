"""Where the dashboard of a Ray cluster is, and its token."""

from __future__ import annotations

import pytest

from kinetic._ray.address import HERE, find_token, resolve_address
from kinetic.errors import PreflightError, UsageError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://head:8265", "http://head:8265"),
        ("http://head:8265/", "http://head:8265"),
        ("https://head/path/to/ray/", "https://head/path/to/ray"),
        ("http://[::1]:80", "http://[::1]:80"),
        ("head:9999", "http://head:9999"),
        ("head", "http://head:8265"),
        ("head:6379", "http://head:8265"),
        ("ray://head:10001", "http://head:8265"),
        ("auto", HERE),
    ],
)
def test_an_address_is_understood_as_ray_understands_it(given, expected):
    assert resolve_address(given, {"RAY_ADDRESS": "http://other"}) == expected
    assert resolve_address("", {"RAY_ADDRESS": given}) == expected
    both = {"RAY_API_SERVER_ADDRESS": given, "RAY_ADDRESS": "http://other"}
    assert resolve_address("", both) == expected


def test_without_any_it_is_the_cluster_of_this_machine():
    assert resolve_address("", {"RAY_ADDRESS": ""}) == HERE


@pytest.mark.parametrize(
    "given", ["ftp://head", "http://", "head:port", "http://me:secret@head", "http://[bad"]
)
def test_what_is_no_address_is_said(given):
    with pytest.raises(UsageError, match=r"RAY_ADDRESS=.* is not the address"):
        resolve_address("", {"RAY_ADDRESS": given})


def test_the_token_is_found_where_ray_looks_for_it(tmp_path):
    assert find_token({}) == ""
    assert find_token({"HOME": str(tmp_path)}) == ""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("from home\n")
    (tmp_path / "other").write_text("from file\n")
    variables = {"HOME": str(tmp_path)}
    assert find_token(variables) == "from home"
    variables |= {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "other")}
    assert find_token(variables) == "from file"
    variables |= {"RAY_AUTH_TOKEN": "from variable"}
    assert find_token(variables) == "from variable"
    assert find_token(variables | {"RAY_AUTH_MODE": "disabled"}) == ""


def test_a_token_file_that_cannot_be_read_is_said(tmp_path):
    with pytest.raises(PreflightError, match="RAY_AUTH_TOKEN_PATH"):
        find_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "missing")})
