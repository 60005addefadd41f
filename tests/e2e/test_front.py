"""How a browser and a network reach the server: other sites' pages, and TLS."""

import hashlib
import shutil
import ssl
import subprocess
import sys

import httpx
import pytest
from fastapi.testclient import TestClient

from paceline.config import EngineConfig
from paceline.engine.build import load_model
from paceline.errors import ParameterError
from paceline.server.app import create_app
from paceline.server.cors import check_origins
from paceline.server.door import Keys
from paceline.server.tls import check_tls
from tests.e2e.live import ServeProcess, script_model

SITE = "https://example.org"
KEY = "sk-of-sixteen-and-more"
ASK = {"origin": SITE, "access-control-request-method": "POST",
       "access-control-request-headers": "authorization,content-type"}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return script_model(tmp_path_factory.mktemp("models"))


def app_client(model, **options):
    loaded = load_model(str(model), EngineConfig(num_threads=1, kv_memory_bytes=2**24))
    return TestClient(create_app(loaded, **options))


def test_no_page_of_another_site_may_call_unless_told(model):
    with app_client(model) as client:
        answer = client.get("/v1/models", headers={"origin": SITE})
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert client.options("/v1/completions", headers=ASK).status_code == 405


def test_pages_of_a_site_that_is_named_may_call_and_no_others(model):
    keys = Keys([hashlib.sha256(KEY.encode()).digest()])
    with app_client(model, cors_origins=(SITE,), keys=keys) as client:
        preflight = client.options("/v1/completions", headers=ASK)  # without a key, as browsers do
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == SITE
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        refused = client.get("/v1/models", headers={"origin": SITE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == SITE  # so that it can be read
        headers = {"origin": SITE, "authorization": f"Bearer {KEY}"}
        answer = client.get("/v1/models", headers=headers)
        assert answer.status_code == 200
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers
        other = {**ASK, "origin": "https://example.com"}
        assert client.options("/v1/completions", headers=other).status_code == 400
        answer = client.get("/v1/models", headers={**headers, "origin": other["origin"]})
        assert "access-control-allow-origin" not in answer.headers


def test_a_stream_goes_through_with_its_headers(model):
    with app_client(model, cors_origins=("*",)) as client:
        body = {"model": "script", "prompt": "a", "stream": True, "temperature": 0}
        answer = client.post("/v1/completions", json=body, headers={"origin": SITE})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "origin", ["example.org", "https://example.org/", "https://a b", "ftp://a", "null", ""]
)
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ParameterError, match="write it as browsers send it"):
        check_origins([origin])


@pytest.mark.parametrize("origin", [SITE, "http://localhost:3000", "http://[::1]:81", "*"])
def test_what_browsers_send_is_taken(origin):
    assert check_origins([origin]) == (origin,)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("https://a:443", "https://a"), ("http://a:80", "http://a"), ("http://A.org", "http://a.org"),
        ("http://[::1]:80", "http://[::1]"), ("http://a:443", "http://a:443"),
        ("https://a:80", "https://a:80"), ("https://a:8443", "https://a:8443"),
        ("http://a:8080", "http://a:8080"), ("http://[fe80::80]", "http://[fe80::80]"),
    ],
)  # fmt: skip
def test_an_origin_is_compared_as_browsers_write_it(given, sent):
    assert check_origins([given]) == (sent,)


# ---- TLS ----


def make_certificate(folder, name="cert"):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(cert), str(key)


def test_calls_and_streams_are_encrypted(model, tmp_path):
    cert, key = make_certificate(tmp_path)
    context = ssl.create_default_context(cafile=cert)
    with ServeProcess(model, "--tls-cert", cert, "--tls-key", key, "--threads", "1") as server:
        assert f"https://127.0.0.1:{server.port}/v1" in server.log
        url = f"https://127.0.0.1:{server.port}"
        with httpx.Client(base_url=url, verify=context) as client:
            body = {"model": "script", "prompt": "a", "temperature": 0, "stream": True}
            answer = client.post("/v1/completions", json=body)
            assert answer.text.endswith("data: [DONE]\n\n")
            assert answer.extensions["network_stream"].get_extra_info("ssl_object") is not None
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{server.port}/health")
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(cert)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert httpx.get(f"{url}/health", verify=old).status_code == 200


def test_files_that_serve_no_tls_are_refused(tmp_path):
    cert, key = make_certificate(tmp_path)
    _, other = make_certificate(tmp_path, "other")
    locked = str(tmp_path / "locked.key")
    command = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:word", "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    assert check_tls(None, None) is None
    for files, words in [
        ((cert, None), "--tls-cert needs --tls-key"),
        ((None, key), "--tls-key needs --tls-cert"),
        ((cert, "nowhere.key"), r"nowhere\.key cannot be read"),
        ((cert, other), "no certificate and its key"),
        ((key, key), "no certificate and its key"),
        ((cert, locked), "is encrypted"),
    ]:
        with pytest.raises(ParameterError, match=words):
            check_tls(*files)


def test_bad_files_are_told_before_the_model_is_loaded(tmp_path):
    command = [sys.executable, "-m", "paceline", "serve", "no-such-model", "--tls-cert", "a.pem"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "--tls-cert needs --tls-key" in done.stderr
