"""Connections to an API server: proxies, certificates."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from api_server_fake import Reply, Script, serving

from kinetic._backends.kubernetes import credentials
from kinetic._backends.kubernetes.api import CallLimits
from kinetic._backends.kubernetes.connection import HttpApi
from kinetic._backends.kubernetes.google_calls import GoogleCalls
from kinetic._backends.kubernetes.kubeconfig import Access
from kinetic._backends.kubernetes.resources import JOBS
from kinetic._rpc import certificate
from kinetic.errors import BackendUnavailable, PreflightError

JOB = {"metadata": {"name": "a", "labels": {"kinetic.dev/job-id": "job-1"}}}


@pytest.fixture
def script() -> Iterator[Script]:
    pair = Script()
    with serving(pair) as pair.url:
        yield pair


def test_a_proxy_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "127.0.0.1:1")
    access = Access("https://no-such-host.invalid", user={"token": "t"})
    with (
        contextlib.closing(HttpApi(access, {}, patience=CallLimits(tries=1))) as api,
        pytest.raises(BackendUnavailable, match="NO_PROXY"),
    ):
        api.get(JOBS, "a")


def test_a_kubeconfig_names_a_proxy_with_its_password(script: Script) -> None:
    script.replies = [Reply(200, JOB)]
    proxy = script.url.replace("http://", "me:secret@")
    access = Access("http://no-such-host.invalid", context="lab", cluster={"proxy-url": proxy})
    with contextlib.closing(HttpApi(access, {})) as api:
        assert api.get(JOBS, "a") == JOB
    assert script.proxy_authorization == ["Basic bWU6c2VjcmV0"]
    access = Access(
        "http://no-such-host.invalid", context="lab", cluster={"proxy-url": "ftp://me:secret@p"}
    )
    with contextlib.closing(HttpApi(access, {})) as api:
        with pytest.raises(PreflightError, match=r"context 'lab' \(proxy-url\)") as caught:
            api.get(JOBS, "a")
        assert "secret" not in str(caught.value)


def inline(ca: bytes) -> dict[str, str]:
    return {"certificate-authority-data": base64.b64encode(ca).decode()}


def test_an_invalid_or_missing_certificate_authority_is_refused() -> None:
    for ca in (inline(b"no certificate"), {"certificate-authority": "/no/such/file"}):
        api = HttpApi(Access("https://127.0.0.1:1", cluster=ca), {})
        with pytest.raises(PreflightError, match="certificates of this pod cannot be used"):
            api.get(JOBS, "a")


@pytest.fixture
def tls(script: Script, tmp_path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the URL and the certificate of a server that gives the script's replies over TLS."""
    pair = certificate.make("localhost")
    chain = tmp_path / "chain.pem"
    chain.write_text(pair.certificate + pair.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    with serving(script, context) as url:
        yield url, pair.certificate.encode()


def test_a_server_is_trusted_by_its_certificate(script: Script, tls: tuple[str, bytes]) -> None:
    url, ca = tls
    limits = CallLimits(tries=1)
    script.replies = [Reply(200, JOB), Reply(200, JOB)]
    named = Access(url, cluster=inline(ca) | {"tls-server-name": "localhost"})
    api = HttpApi(named, {}, patience=limits)
    assert api.get(JOBS, "a") == JOB
    api.close()
    blind = Access(url, cluster={"insecure-skip-tls-verify": True})
    api = HttpApi(blind, {}, patience=limits)
    with pytest.warns(Warning, match="Unverified"):
        assert api.get(JOBS, "a") == JOB
    api.close()
    stranger = HttpApi(Access(url), {}, patience=CallLimits(tries=1))
    with pytest.raises(PreflightError, match="is not trusted"):
        stranger.get(JOBS, "a")


def test_a_caller_shows_a_certificate_and_leaves_no_key_behind(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = certificate.make("localhost")
    (tmp_path / "chain.pem").write_text(own.certificate + own.key)
    (tmp_path / "ca.pem").write_text(own.certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "ca.pem"))
    context.load_cert_chain(tmp_path / "chain.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    pair = {"client-certificate": own.certificate, "client-key": own.key}
    user = {f"{k}-data": base64.b64encode(v.encode()).decode() for k, v in pair.items()}
    ca = inline(own.certificate.encode()) | {"tls-server-name": "localhost"}
    script.replies = [Reply(200, JOB)] * 2
    with serving(script, context) as url:
        for _ in range(2):  # The client library caches paths of removed files.
            access = Access(url, cluster=ca, user=user)
            with contextlib.closing(HttpApi(access, {}, patience=CallLimits(tries=1))) as api:
                assert api.get(JOBS, "a") == JOB
            assert not list(temporary.iterdir())


def sign_old(folder: Path) -> tuple[Path, bytes]:
    """Return a server's chain file, and its authority's certificate, which has no key id."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def issue(name: str, key: Any, authority: Any, extension: Any) -> bytes:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(
            x509.Name.from_rfc4514_string("CN=kubernetes"),
            x509.Name.from_rfc4514_string(f"CN={name}"),
            key.public_key(),
            x509.random_serial_number(),
            now - timedelta(days=1),
            now + timedelta(days=1),
        )
        is_authority = isinstance(extension, x509.BasicConstraints)
        signed = builder.add_extension(extension, is_authority).sign(authority, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    place = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    chain = folder / "old.pem"
    chain.write_bytes(
        issue("server", key, authority, place)
        + key.private_bytes(*form, serialization.NoEncryption())
    )
    return chain, issue("kubernetes", authority, authority, x509.BasicConstraints(True, None))


def test_authorities_of_old_clusters_are_trusted_as_before_python_3_13(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def create_strictly(**options: Any) -> ssl.SSLContext:
        context = create(**options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    create = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", create_strictly)
    chain, ca = sign_old(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    script.replies = [Reply(200, JOB)]
    with (
        serving(script, context) as url,
        contextlib.closing(HttpApi(Access(url, cluster=inline(ca)), {})) as api,
    ):
        assert api.get(JOBS, "a") == JOB


def test_a_login_to_google_goes_by_the_proxy(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    user = {"type": "authorized_user", "client_id": "c", "client_secret": "s", "refresh_token": "r"}
    (tmp_path / "adc.json").write_text(json.dumps(user))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "adc.json"))
    monkeypatch.setenv("https_proxy", script.url.replace("http://", "me:secret@"))
    monkeypatch.setenv("no_proxy", "")
    script.replies = [Reply(407)]
    with pytest.raises(PreflightError, match=r"Logging in to Google .* Check the network"):
        credentials.ask_google()
    assert script.request_lines()[0] == "CONNECT oauth2.googleapis.com:443"
    assert script.proxy_authorization[0] == "Basic bWU6c2VjcmV0"


def test_without_credentials_the_login_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's interfaces need the login alone; a cluster's kubeconfig names the plugin, too."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nonexistent.json")
    login = "Log in with `gcloud auth application-default login`"
    with pytest.raises(PreflightError) as caught:
        GoogleCalls().call("GET", "https://no-such-host.invalid")
    assert str(caught.value).endswith(f'". {login}.')
    with pytest.raises(PreflightError) as caught:
        credentials.ask_google()
    assert str(caught.value).endswith(f'". {login}, or install gke-gcloud-auth-plugin.')
