"""The address and the token with which kinetic reaches the dashboard of a Ray cluster."""

from __future__ import annotations

import pytest

from kinetic._config import settings
from kinetic._ray.address import LOCAL_URL, find_token, resolve_address
from kinetic.errors import PreflightError, UsageError


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("http://head:8265", "http://head:8265"),
        ("http://head:8265/", "http://head:8265"),
        ("https://head/path/to/ray/", "https://head/path/to/ray"),
        ("http://[::1]:80", "http://[::1]:80"),
        ("head:9999", "http://head:9999"),
        ("head", "http://head:8265"),
        ("head:6379", "http://head:8265"),
        ("ray://head:10001", "http://head:8265"),
        ("auto", LOCAL_URL),
    ],
)
def test_an_address_is_understood_as_ray_understands_it(address, expected):
    assert resolve_address(address, {"RAY_ADDRESS": "http://other"}) == expected
    assert resolve_address("", {"RAY_ADDRESS": address}) == expected
    both = {"RAY_API_SERVER_ADDRESS": address, "RAY_ADDRESS": "http://other"}
    assert resolve_address("", both) == expected


def test_without_any_it_is_the_cluster_of_this_machine():
    assert resolve_address("", {"RAY_ADDRESS": ""}) == LOCAL_URL


@pytest.mark.parametrize(
    "address",
    ["ftp://head", "http://", "head:port", "http://me:secret@head", "http://[bad", "my head"],
)
def test_what_is_no_address_is_said(address):
    with pytest.raises(UsageError, match=r"RAY_ADDRESS=.* is not the address"):
        resolve_address("", {"RAY_ADDRESS": address})


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


@pytest.mark.parametrize(
    ("variables", "store"),
    [
        ({"KINETIC_BACKEND": "ray", "RAY_ADDRESS": "ray://head:10001"}, "ray+http://head:8265"),
        ({"KINETIC_BACKEND": "ray"}, f"ray+{LOCAL_URL}"),
        ({"KINETIC_ADDRESS": "https://head/ray"}, "ray+https://head/ray"),
        ({"KINETIC_ADDRESS": "head", "KINETIC_STORE": "gs://bucket"}, "gs://bucket"),
        ({"KINETIC_ADDRESS": "head", "KINETIC_POD_STORE": "file:///mnt"}, "/home/me/kinetic"),
        ({"KINETIC_ADDRESS": "head", "KINETIC_BACKEND": "local"}, "/home/me/kinetic"),
        ({"RAY_ADDRESS": "head"}, "/home/me/kinetic"),
    ],
)
def test_the_cluster_keeps_the_store_where_no_other_is_named(variables, store):
    home = {"HOME": "/home/me", "KINETIC_HOME": "/home/me/kinetic"}
    chosen = settings.load(home | variables, profile={})
    assert chosen.store == store
    assert chosen.folder.as_posix() == "/home/me/kinetic"
    named = settings.load(home | variables, flags={"backend": "local"}, profile={})
    assert not named.store.startswith("ray+")


@pytest.mark.parametrize("token", ["s3cret\nanother", "s3cr\u00e9t"])
def test_what_cannot_be_a_token_is_refused_without_being_shown(token):
    with pytest.raises(PreflightError, match="several lines") as raised:
        find_token({"RAY_AUTH_TOKEN": token})
    assert "s3cr" not in str(raised.value)


@pytest.mark.parametrize("address", ["http://me:s3cret@head:8265", "me:s3cret@head:8265"])
def test_a_password_in_an_address_is_not_shown(address):
    with pytest.raises(UsageError, match=r"\*\*\*@head:8265") as raised:
        resolve_address(address, {})
    assert "s3cret" not in str(raised.value)
