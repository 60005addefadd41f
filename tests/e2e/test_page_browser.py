"""The page in a real browser: a chat, its tokens' latency, keyboard, both colour schemes."""

import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.live import TOKENIZER, ServeProcess
from tests.e2e.several import spelling_model
from tests.tiny import CONTROL, TinyTokenizer, successor_model, write_gguf

pytestmark = pytest.mark.browser

SCRIPT = Path(__file__).with_name("page.cjs")
HOSTILE_ID = "<img src=x onerror=a()>"


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    node = shutil.which("node")
    if chromium is None or node is None:
        pytest.skip("chromium or node is not here: apt-get install chromium nodejs")
    command = [node, "-e", f"require('module').createRequire({str(SCRIPT)!r})('playwright-core')"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(
            "playwright-core is not here: npm install playwright-core, and set NODE_PATH to its "
            "node_modules"
        )
    return node, chromium


@pytest.fixture(scope="module")
def markup_path(tmp_path_factory):
    """A model that answers with markup for ever."""
    ids = TOKENIZER.byte_ids
    model = successor_model(ids("\n<i>&\n"), ids("00"), max_position_embeddings=16384)
    return write_gguf(model, tmp_path_factory.mktemp("page") / "markup.gguf")


def use(browser, server, *arguments, script=SCRIPT):
    node, chromium = browser
    result = subprocess.run(
        [node, str(script), f"http://127.0.0.1:{server.port}", *arguments],
        capture_output=True, text=True, timeout=400, env={**os.environ, "CHROMIUM": chromium},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def seen(browser, markup_path):
    """What the browser saw, and what the server says of the answer that it got."""
    with ServeProcess(markup_path, "--kv-memory", "64M") as server:
        server.client.post(
            "/v1/completions",
            json={"model": server.name, "prompt": "0" * 200, "max_tokens": 2000},
            headers={"x-request-id": HOSTILE_ID},
        )
        seen = use(browser, server, HOSTILE_ID)
        seen["timeline"] = server.client.get(f"/v1/requests/{seen['id']}/timeline").json()
    return seen


def test_nothing_is_logged_and_nothing_is_asked_of_others(seen):
    assert seen["errors"] == []
    assert seen["console"] == []
    assert seen["outside"] == []


def test_markup_in_a_message_an_answer_and_an_id_is_text(seen):
    assert seen["question"] == "<img src=x onerror=alert(1)>"
    assert "".join(seen["answer"]) == "<i>&\n<i>&\n<i"
    assert seen["who"].startswith(HOSTILE_ID)
    assert seen["markup"] == 0


def test_each_token_tells_what_it_cost(seen):
    assert len(seen["answer"]) == 12
    [choice] = seen["timeline"]["choices"]
    step = [each for each in choice["steps"] if each["new_tokens"]][2]
    took_ms = step["end_ms"] - step["begin_ms"]
    title, *lines = seen["tip"]
    assert title == "Token 3: “>”"
    assert f"Step {step['step']} took {shown_ms(took_ms)}" in lines
    assert any("after the token before" in line for line in lines)
    assert "In the step: this token alone" in lines
    assert "Chosen by the model, not drafted" in lines


def test_the_waterfall_has_every_part_and_sums_to_the_wall_time(seen):
    call = seen["timeline"]
    rows = dict(seen["waterfall"])
    assert sum(rows.values()) == pytest.approx(call["wall_ms"])
    for part, value in call["parts_ms"].items():
        if value >= 0.005 * call["wall_ms"]:
            assert rows[part] == pytest.approx(value)
    assert seen["sum"] == shown_ms(call["wall_ms"])
    assert seen["sumFirst"] == shown_ms(call["ttft_ms"])


def shown_ms(value):
    """The page's way to write milliseconds, with a space that does not break."""
    if value >= 1000:
        return f"{value / 1000:.{1 if value >= 10000 else 2}f}\u00a0s"
    return f"{value:.{0 if value >= 100 else 1 if value >= 1 else 2}f}\u00a0ms"


def test_tab_goes_through_the_controls_in_the_order_of_the_page(seen):
    assert seen["tabs"] == [
        "skip", "pause", "message", "temperature", "top_p", "max_tokens", "send", "wall", "link",
    ]  # fmt: skip
    assert seen["unnamed"] == 0


def test_an_answer_is_one_tab_stop_and_the_arrow_keys_walk_in_it(seen):
    assert seen["tabStops"] == 1
    assert seen["described"] == "tip"
    assert seen["tipAfterEscape"] is False


def test_stop_ends_the_answer(seen):
    assert seen["stopped"].endswith("aborted")


def test_a_slow_request_opens_in_the_panel_which_gets_the_focus(seen):
    assert "200 tokens in, 2000 out" in seen["who"]
    assert seen["focusAfterOpen"] == "inspect-title"


def test_the_live_figures_are_drawn_and_stop_when_paused(seen):
    assert seen["charts"] == 4
    assert {"First token", "Next token", "Running", "KV memory"} <= seen["tiles"].keys()
    assert "ms" in seen["tiles"]["Next token"]
    assert (seen["pressed"], seen["askedWhilePaused"]) == ("true", 0)


def test_the_page_fits_a_phone_and_follows_the_colour_scheme_and_the_wish_for_calm(seen):
    light, dark = seen["light"], seen["dark"]
    assert light["width"] == dark["width"] == 360
    assert light["background"] != dark["background"]
    assert (light["moves"], dark["moves"]) == ("0.4s", "0s")


def test_charts_and_their_legends_follow_the_scheme_while_the_page_is_open(seen):
    light, dark, again = seen["schemes"]
    assert len(light["legend"]) == 11
    assert all(a != b for a, b in zip(light["legend"], dark["legend"], strict=True))
    assert again == light
    for look, (own, others) in ((light, (0, 1)), (dark, (1, 0))):
        assert look["drawn"][own] > 20
        assert look["drawn"][others] == 0


@pytest.fixture(scope="module")
def access(browser, markup_path, tmp_path_factory):
    """What `page_access.cjs` measured, of a page that shows all kinds of things at once."""
    with ServeProcess(markup_path, "--kv-memory", "64M") as server:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda n: server.complete("0" * n, max_tokens=400), (9, 3000, 200)))
        folder = tmp_path_factory.mktemp("looks")
        seen = use(browser, server, str(folder), script=SCRIPT.with_name("page_access.cjs"))
        assert len(list(folder.iterdir())) == 4  # for whoever wants to look: pytest keeps them
    assert seen["errors"] == []
    return seen


@pytest.mark.parametrize("size", ["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_graphics_have_the_contrast_that_wcag_aa_asks(access, scheme, size):
    look = access["looks"][f"{scheme}-{size}"]
    assert look["faint"] == []
    assert look["numTexts"] > 100
    assert look["numBars"] > 20
    assert look["width"] == (1280 if size == "wide" else 400)  # nothing sticks out


def test_a_keyboard_alone_asks_walks_the_answer_and_opens_its_time_and_sees_where_it_is(access):
    assert access["afterSkip"] == "message"
    assert access["tip"] == "Token 12: “i”"
    assert access["afterOpen"] == "inspect-title"
    assert access["mode"] == "ttft"
    assert access["unmarked"] == []


def test_a_screen_reader_has_a_name_for_all_that_can_be_used_or_seen(access):
    assert access["nameless"] == []
    assert access["numNamed"] > 40
    wanted = {"button", "heading", "image", "radiogroup", "spinbutton", "table", "textbox"}
    assert wanted <= set(access["roles"])


def test_a_server_with_keys_is_used_with_the_one_that_is_typed_in(browser, markup_path, tmp_path):
    key = "a-key-of-some-length"
    keys = tmp_path / "keys"
    keys.write_text(key)
    with ServeProcess(markup_path, "--kv-memory", "64M", "--api-keys", str(keys)) as server:
        seen = use(browser, server, HOSTILE_ID, key)
    assert seen["state"] == "waiting for an API key"
    assert seen["formAfterKey"] is False
    assert seen["answer"] == "<i>&\n"
    assert (seen["errors"], seen["outside"]) == ([], [])


def test_of_several_models_one_is_chosen_and_asked(browser, tmp_path):
    script = SCRIPT.with_name("page_models.cjs")
    paths = [spelling_model(tmp_path, name) for name in ("up", "down")]
    with ServeProcess(paths[0], str(paths[1]), "--kv-memory", "8M") as server:
        seen = use(browser, server, script=script)
        asked = server.client.get("/health").json()["models"]["down"]["engine"]
    assert (seen["errors"], seen["choices"], seen["isHidden"]) == ([], ["up", "down"], False)
    assert seen["first"].startswith("up")
    assert "not in memory" in seen["second"]
    assert asked["num_generated_tokens"] == 4
    with ServeProcess(paths[0], "--kv-memory", "8M") as server:
        seen = use(browser, server, script=script)
    assert (seen["choices"], seen["isHidden"]) == (["up"], True)


def test_what_a_model_thinks_is_shown_apart_and_not_sent_back(browser, tmp_path):
    tokenizer = TinyTokenizer(control=(*CONTROL, "<think>", "</think>"))
    text, think, end = tokenizer.byte_ids, tokenizer.id("<think>"), tokenizer.id("</think>")
    chain = [*text("\n"), think, *text("abc"), end, *text("HELO"), tokenizer.eot_id]
    path = write_gguf(successor_model(chain, tokenizer=tokenizer), tmp_path / "thinks.gguf")
    template = tmp_path / "thinks.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ '\\n' }}{# </think> #}"
    )
    options = ("--kv-memory", "8M", "--chat-template", str(template))
    with ServeProcess(path, *options) as server:
        seen = use(browser, server, script=SCRIPT.with_name("page_thinking.cjs"))
    assert (seen["errors"], seen["thought"], seen["said"]) == ([], "abc", "HELO")
    assert [turn["content"] for turn in seen["sent"]] == ["Hi", "HELO", "Hi"]
    assert {name for turn in seen["sent"] for name in turn} == {"role", "content"}
