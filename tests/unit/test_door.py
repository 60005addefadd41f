"""Keys and the door in front of the routes."""

import asyncio
import hashlib

import pytest

from paceline.errors import ParameterError
from paceline.server.door import Door, Keys, Life, read_keys

KEY = "sk-0123456789abcdef"


def knock(
    path="/v1/completions", method="POST", *, life=None, keys=None, authorization=None, **others
):
    """Return the status, the headers and the body of a reply; whoever gets in finds a 200."""
    sent = []
    life = life or Life()
    seen = []

    async def room(scope, receive, send):
        seen.append(life.num_calls)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        sent.append(message)

    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    headers += [(k.replace("_", "-").encode(), v.encode()) for k, v in others.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    door = Door(room, life=life, keys=keys, counted=frozenset({"/v1/completions"}))
    asyncio.run(door(scope, None, send))
    assert life.num_calls == 0
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, sent[1]["body"], seen


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    hashed = hashlib.sha256(b"another key of ours").hexdigest().upper()
    path.write_text(f"# ours\n{KEY}  # the first\n\nsha256:{hashed}\n")
    return read_keys(str(path))


def test_a_key_opens_the_door_and_nothing_else_does(keys):
    for key in (KEY, "another key of ours"):
        assert knock(keys=keys, authorization=f"Bearer {key}")[0] == 200
    for authorization in (None, KEY, f"Basic {KEY}", "Bearer ", f"Bearer {KEY}x", "Bearer é", "x"):
        status, headers, body, seen = knock(keys=keys, authorization=authorization)
        assert (status, headers["www-authenticate"], seen) == (401, "Bearer", [])
        assert b"invalid_api_key" in body
        assert KEY.encode() not in body


def test_a_key_may_come_as_anthropics_clients_send_it(keys):
    assert knock(keys=keys, x_api_key=KEY)[0] == 200
    assert knock(keys=keys, x_api_key=f"{KEY}x")[0] == 401
    assert knock(keys=keys, x_api_key=KEY, authorization="Bearer wrong")[0] == 401
    body = knock("/v1/messages", keys=keys, x_api_key="wrong")[2]
    assert b'"type":"authentication_error"' in body


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/", "/page/app.js"])
def test_probes_need_no_key(keys, path):
    assert knock(path, "GET", keys=keys)[0] == 200


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/tokenize", "/v1/trace", "/else"])
def test_all_else_needs_one(keys, path):
    assert knock(path, "GET", keys=keys)[0] == 401
    assert knock(path, "GET")[0] == 200


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no key"),
        ("# none\n", "no key"),
        ("short\n", "line 1"),
        ("sha256:12\n", "line 1"),
        ("ключ-ключ-ключ-ключ\n", "ASCII"),
    ],
)
def test_a_file_without_good_keys_is_refused(tmp_path, text, says):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ParameterError, match=says):
        read_keys(str(path))
    with pytest.raises(ParameterError, match="cannot be read"):
        read_keys(str(tmp_path / "none"))


def test_a_server_that_ends_takes_no_new_calls_but_tells_how_it_is():
    life = Life(is_draining=True)
    status, headers, body, seen = knock(life=life)
    assert (status, headers["retry-after"], seen) == (503, "1", [])
    assert b"shutting down" in body
    assert headers["x-request-id"]
    assert knock("/health", "GET", life=life)[0] == 200


def test_calls_inside_are_counted_and_other_requests_are_not():
    assert knock()[3] == [1]
    assert knock("/v1/models", "GET")[3] == [0]
    assert knock(method="GET")[3] == [0]


def test_keys_are_kept_as_sums_only(keys):
    assert isinstance(keys, Keys)
    assert KEY not in repr(vars(keys))
