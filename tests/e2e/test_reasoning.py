"""Thinking over real HTTP: apart from the answer in every API, streamed or not."""

import json

import pytest

from tests.e2e.live import LiveServer
from tests.tiny import CONTROL, WORDS, TinyTokenizer, successor_model, write_gguf

CLIENTS = "pip install '.[clients]' to test with the real package"
HI = [{"role": "user", "content": "Hi"}]
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}|{{ m.reasoning_content }}|{{ m.content }}"
    "<|im_end|>{% endfor %}{% if tools %}{{ tools }}{% endif %}<|im_start|>{# </think> #}"
)
SWITCHED = (
    TURNS + "{% if enable_thinking is false %}<think></think>\t{% else %}{{ '\\n' }}{% endif %}"
)
OPENED = TURNS + "<think> "


def model(folder, tokenizer, begin, end):
    """Write a model that thinks "abc" and says "HELO"; without thinking it says "Q"."""
    text = tokenizer.byte_ids
    chains = [
        [*text("\n"), *begin, *text("abc"), *end, *text("HELO"), tokenizer.eot_id],
        [*text(" abc")],
        [*text("\tQ"), tokenizer.eot_id],
    ]
    return write_gguf(successor_model(*chains, tokenizer=tokenizer), folder / "script.gguf")


@pytest.fixture(scope="module")
def whole_path(tmp_path_factory):
    """A vocabulary with a token for each marker, control tokens at that."""
    tokenizer = TinyTokenizer(control=(*CONTROL, "<think>", "</think>"))
    marks = [tokenizer.id("<think>")], [tokenizer.id("</think>")]
    return model(tmp_path_factory.mktemp("whole"), tokenizer, *marks)


@pytest.fixture(scope="module")
def split_path(tmp_path_factory):
    """A vocabulary that spells each marker by two tokens."""
    tokenizer = TinyTokenizer(words=(*WORDS, "<thi", "nk>", "</t", "hink>"))
    begin, end = (["<thi", "nk>"], ["</t", "hink>"])
    marks = [tokenizer.id(t) for t in begin], [tokenizer.id(t) for t in end]
    return model(tmp_path_factory.mktemp("split"), tokenizer, *marks)


def serve(path, template):
    return LiveServer(path, chat_template=template, kv_memory_bytes=8 * 2**20, num_threads=1)


@pytest.fixture(scope="module")
def thinker(whole_path):
    live = serve(whole_path, SWITCHED)
    yield live
    live.close()


@pytest.fixture(scope="module", params=["whole", "split", "opened"])
def live(request, whole_path, split_path):
    path = split_path if request.param == "split" else whole_path
    server = serve(path, OPENED if request.param == "opened" else SWITCHED)
    yield server
    server.close()


@pytest.fixture
def client(live):
    openai = pytest.importorskip("openai", reason=CLIENTS)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{live.port}/v1", api_key="none") as made:
        yield made


@pytest.fixture
def claude(live):
    anthropic = pytest.importorskip("anthropic", reason=CLIENTS)
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{live.port}", api_key="none") as made:
        yield made


def num_thought(live):
    """Tokens of "abc" with the markers that the model writes itself."""
    num_spelled = 1 if "</think>" in live.loaded.tokenizer.special_tokens else 2
    is_opened = live.loaded.template.source == OPENED
    return 3 + num_spelled * (1 if is_opened else 2)


def test_a_chat_has_its_thinking_beside_its_content(live, client):
    answer = client.chat.completions.create(
        model="script", messages=HI, temperature=0, n=2, logprobs=True
    )
    for choice in answer.choices:
        assert choice.message.content == "HELO"
        assert choice.message.reasoning_content == choice.message.reasoning == "abc"
        assert choice.finish_reason == "stop"
    usage = answer.usage
    assert usage.completion_tokens_details.reasoning_tokens == 2 * num_thought(live)
    num_scored = sum(len(choice.logprobs.content) for choice in answer.choices)
    assert num_scored == usage.completion_tokens


def test_a_streamed_chat_tells_of_thinking_and_then_of_words(live, client):
    stream = client.chat.completions.create(
        model="script", messages=HI, temperature=0, stream=True, logprobs=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    told, num_scored = [], 0
    for chunk in stream:
        for choice in chunk.choices:
            num_scored += len(choice.logprobs.content) if choice.logprobs else 0
            if thought := getattr(choice.delta, "reasoning_content", None):
                assert choice.delta.reasoning == thought
                told.append(("thought", thought))
            if choice.delta.content:
                told.append(("said", choice.delta.content))
        usage = chunk.usage
    assert told == [("thought", c) for c in "abc"] + [("said", c) for c in "HELO"]
    assert usage.completion_tokens_details.reasoning_tokens == num_thought(live)
    assert num_scored == usage.completion_tokens


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_response_has_a_reasoning_item_before_its_message(live, client, is_streamed):
    asked = {"model": "script", "input": "Hi", "temperature": 0}
    if is_streamed:
        with client.responses.stream(**asked) as stream:
            events = list(stream)
            response = stream.get_final_response()
        kinds = [event.type for event in events]
        thought = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
        assert "".join(thought) == "abc"
        assert kinds.index("response.reasoning_text.done") < kinds.index(
            "response.output_text.delta"
        )
        assert [e.sequence_number for e in events] == list(range(len(events)))
    else:
        response = client.responses.create(**asked)
    thinking, message = response.output
    assert (thinking.type, thinking.status, thinking.summary) == ("reasoning", "completed", [])
    assert [(part.type, part.text) for part in thinking.content] == [("reasoning_text", "abc")]
    assert (message.type, response.output_text) == ("message", "HELO")
    assert response.usage.output_tokens_details.reasoning_tokens == num_thought(live)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_message_has_a_thinking_block_before_its_text(live, claude, is_streamed):
    asked = {"model": "script", "messages": HI, "max_tokens": 50, "extra_body": {"temperature": 0}}
    if is_streamed:
        with claude.messages.stream(**asked, thinking={"type": "adaptive"}) as stream:
            deltas = [e.delta.type for e in stream if e.type == "content_block_delta"]
            message = stream.get_final_message()
        thinking = ["thinking_delta"] * 3 + ["signature_delta"]
        assert deltas == [*thinking, *["text_delta"] * 4]
    else:
        message = claude.messages.create(**asked)
    thinking, text = message.content
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "abc", "unsigned")
    assert (text.type, text.text) == ("text", "HELO")


def test_thinking_that_max_tokens_cuts_is_all_that_there_is(live):
    length = num_thought(live) - 1
    answer = live.chat(temperature=0, max_tokens=length)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["message"]["reasoning_content"] == "abc"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": length}
    response = live.post("/v1/responses", input="Hi", temperature=0, max_output_tokens=length)
    (item,) = response.json()["output"]
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")


def test_a_stop_string_ends_thinking_and_words(live):
    (choice,) = live.chat(temperature=0, stop="c")["choices"]
    assert choice["message"]["reasoning_content"] == "ab"
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    (choice,) = live.chat(temperature=0, stop="L")["choices"]
    assert choice["message"]["reasoning_content"] == "abc"
    assert choice["message"]["content"] == "HE"


@pytest.mark.parametrize(
    "off",
    [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}],
)
def test_thinking_can_be_switched_off(thinker, off):
    answer = thinker.chat(temperature=0, **off)
    message = answer["choices"][0]["message"]
    assert message["content"] == "Q"
    assert "reasoning_content" not in message
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_thinking_is_switched_off_in_the_words_of_each_api(thinker):
    response = thinker.post("/v1/responses", input="Hi", temperature=0,
                            reasoning={"effort": "none"}).json()  # fmt: skip
    assert [item["type"] for item in response["output"]] == ["message"]
    assert response["reasoning"] == {"effort": "none", "summary": None}
    asked = {"messages": HI, "thinking": {"type": "disabled"}}
    message = thinker.post("/v1/messages", temperature=0, max_tokens=9, **asked).json()
    assert message["content"] == [{"type": "text", "text": "Q"}]
    count = thinker.post("/v1/messages/count_tokens", **asked).json()["input_tokens"]
    assert count == message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    tokens = thinker.post("/tokenize", messages=HI,
                          chat_template_kwargs={"enable_thinking": False}).json()  # fmt: skip
    assert tokens["count"] == count


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": HI, "reasoning_effort": "high"}, "reasoning_effort"),
        ("/v1/responses", {"input": "Hi", "reasoning": {"effort": "low"}}, "reasoning.effort"),
    ],
)
def test_degrees_that_the_template_does_not_know_are_refused(thinker, path, fields, param):
    response = thinker.post(path, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_model_that_does_not_reason_refuses_to_be_asked_for_it(server):
    for path, fields, named in (
        ("/v1/messages", {"messages": HI, "max_tokens": 5, "thinking": {"type": "adaptive"}},
         "thinking"),
        ("/v1/messages", {"messages": HI, "max_tokens": 5,
                          "thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ("/v1/responses", {"input": "Hi", "reasoning": {"effort": "high"}}, "reasoning.effort"),
    ):  # fmt: skip
        response = server.post(path, **fields)
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(named)
    assert "completion_tokens_details" not in server.chat(temperature=0)["usage"]


def test_a_budget_ends_the_thinking(thinker):
    answer = thinker.chat(temperature=0, thinking_token_budget=2)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("ab", "HELO")
    message = thinker.post(
        "/v1/messages", messages=HI, max_tokens=30, temperature=0,
        thinking={"type": "enabled", "budget_tokens": 1},
    ).json()  # fmt: skip
    assert message["content"][0]["thinking"] == "a"


@pytest.mark.parametrize("template", [SWITCHED, OPENED])
def test_a_structure_binds_the_words_and_not_the_thinking(whole_path, template):
    with serve(whole_path, template) as live:
        wanted = {"structured_outputs": {"choice": ["yes", "no"]}}
        message = live.chat(temperature=0, **wanted)["choices"][0]["message"]
        assert message["reasoning_content"] == "abc"
        assert message["content"] in ("yes", "no")
        tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
            "type": "object", "properties": {}, "additionalProperties": False}}}  # fmt: skip
        choice = live.chat(temperature=0, tools=[tool], tool_choice="required")["choices"][0]
        assert choice["message"]["reasoning_content"] == "abc"
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {}


def test_without_a_token_for_the_markers_a_structure_leaves_no_thinking(split_path):
    wanted = {"structured_outputs": {"choice": ["yes", "no"]}}
    with serve(split_path, SWITCHED) as live:
        message = live.chat(temperature=0, **wanted)["choices"][0]["message"]
        assert message["content"] in ("yes", "no")
        assert "reasoning_content" not in message
    with serve(split_path, OPENED) as live:
        for fields, param in ((wanted, "structured_outputs"), ({"thinking_token_budget": 5},) * 2):
            refused = live.post("/v1/chat/completions", messages=HI, **fields)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] in (param, *fields)


def test_thinking_of_earlier_turns_reaches_the_template(thinker):
    def prompt(**fields):
        turn = {"role": "assistant", "content": "HELO", **fields}
        text = thinker.post("/tokenize", messages=[*HI, turn, *HI]).json()["tokens"]
        return thinker.post("/detokenize", tokens=text).json()["prompt"]

    assert "assistant|abc|HELO" in prompt(reasoning_content="abc")
    assert prompt(reasoning="abc") == prompt(reasoning="abc", reasoning_content="abc")
    assert prompt(reasoning="abc") == prompt(reasoning_content="abc")

    first = thinker.post("/v1/responses", input="Hi", temperature=0).json()
    again = {"temperature": 0, "max_output_tokens": 1}
    kept = thinker.post("/v1/responses", input="Hi", previous_response_id=first["id"], **again)
    sent = [*HI, *first["output"], *HI]
    told = thinker.post("/v1/responses", input=sent, **again)
    assert kept.json()["usage"]["input_tokens"] == told.json()["usage"]["input_tokens"]

    message = thinker.post("/v1/messages", messages=HI, max_tokens=50, temperature=0).json()
    turn = {"role": "assistant", "content": message["content"]}
    counted = thinker.post("/v1/messages/count_tokens", messages=[*HI, turn, *HI]).json()
    assert counted["input_tokens"] == told.json()["usage"]["input_tokens"]
