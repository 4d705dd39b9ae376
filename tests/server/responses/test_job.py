"""``/v1/responses`` by OpenAI's client: streamed and whole, with and without speculation, errors, keys and quotas."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from server_support import Live

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TOOL: dict[str, Any] = {"type": "function", "name": "read", "parameters": SCHEMA, "strict": True}
FORCED: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


def ask(live: Live, **changes: Any) -> Any:
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 40, "extra_body": {"seed": 7}}
    return live.openai.responses.create(**{**body, **changes})  # type: ignore[call-overload]


def bare(item: Any) -> dict[str, Any]:
    """An item without its ids, which are new each time."""
    found: dict[str, Any] = item.model_dump(exclude={"id", "call_id"})
    return found


@pytest.mark.parametrize("changes", [{}, FORCED], ids=["text", "call"])
def test_a_stream_makes_the_whole_response_with_and_without_speculation(live: Live, changes: dict[str, Any]) -> None:
    whole = ask(live, **changes)
    assert (whole.store, whole.status) == (False, "incomplete" if whole.usage.output_tokens == 40 else "completed")
    for k in (0, 4):
        events = list(ask(live, **changes, stream=True, extra_body={"seed": 7, "num_speculative_tokens": k}))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        last = events[-1].response
        assert events[-1].type == f"response.{whole.status}"
        assert list(map(bare, last.output)) == list(map(bare, whole.output))
        assert (last.usage.output_tokens, last.output_text) == (whole.usage.output_tokens, whole.output_text)
        grown = "".join(event.delta for event in events if event.type.endswith(".delta"))
        item = whole.output[-1]
        assert grown == (item.arguments if item.type == "function_call" else whole.output_text)


@pytest.mark.parametrize("top", [None, 2])
def test_log_probabilities_of_the_text_are_those_of_a_chat(live: Live, top: int | None) -> None:
    changes = {"include": ["message.output_text.logprobs"], "top_logprobs": top}
    (item,) = (found := ask(live, **changes)).output
    said = live.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=40,
        seed=7,
        logprobs=True,
        top_logprobs=top or 0,
    )
    assert said.choices[0].logprobs is not None
    wanted = [entry.model_dump() for entry in said.choices[0].logprobs.content or () if entry.token != "<eos>"]
    found_ones = [entry.model_dump() for entry in item.content[0].logprobs]
    assert [(each["token"], each["bytes"]) for each in found_ones] == [
        (each["token"], each["bytes"]) for each in wanted
    ]
    # The second answer is drafted from the first: in torch the last bits depend on how many tokens share a pass.
    for each, other in zip(found_ones, wanted, strict=True):
        assert each["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        assert [top["token"] for top in each["top_logprobs"]] == [top["token"] for top in other["top_logprobs"]]
    assert found.top_logprobs == (top or 0)
    events = list(ask(live, **changes, stream=True))
    deltas = [entry.model_dump() for event in events if event.type.endswith("text.delta") for entry in event.logprobs]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    (part,) = (event.part for event in events if event.type == "response.content_part.done")
    for entries in (deltas, [entry.model_dump() for entry in done.logprobs]):
        assert [(entry["token"], entry["logprob"]) for entry in entries] == [
            (entry["token"], entry["logprob"]) for entry in wanted
        ]
    assert [entry.model_dump() for entry in part.logprobs] == wanted
    assert ask(live).output[0].content[0].logprobs == []


def test_metadata_comes_back_in_every_response(live: Live) -> None:
    assert ask(live, max_output_tokens=1).metadata == {}
    labels = {"run": "7", "": "ü" * 512} | {str(number): "" for number in range(14)}
    assert ask(live, max_output_tokens=1, metadata=labels).metadata == labels
    events = list(ask(live, max_output_tokens=1, metadata=labels, stream=True))
    assert [event.response.metadata for event in (events[0], events[-1])] == [labels, labels]


@pytest.mark.parametrize(
    ("metadata", "param", "says"),
    [
        ({str(number): "" for number in range(17)}, "metadata", "at most 16 entries"),
        ({"a": 1}, "metadata.a", "string"),
        ({"a": "x" * 513}, "metadata.a", "512"),
        ({"k" * 65: "x"}, "metadata." + "k" * 65, "64"),
        (["a"], "metadata", "dictionary"),
    ],
)
def test_metadata_that_is_no_small_map_of_strings_is_refused(live: Live, metadata: Any, param: str, says: str) -> None:
    reply = live.post("/v1/responses", {"model": "tiny", "input": "hi", "metadata": metadata})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"].startswith(param)
    assert says in error["message"]


def test_the_empty_probe_of_an_agent_is_answered(live: Live) -> None:
    reply = ask(live, max_output_tokens=1, input=[], instructions="You are helpful.")
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.usage.output_tokens == 1


def test_a_call_and_its_output_continue_the_conversation_from_the_cache(live: Live) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "read", "arguments": '{"n": 1}'}
    items: list[Any] = [{"role": "user", "content": "Read one."}, call]
    before = ask(live, input=items)
    after = ask(live, input=[*items, {"type": "function_call_output", "call_id": "c", "output": "one"}])
    assert after.usage.input_tokens > before.usage.input_tokens
    assert after.usage.input_tokens_details.cached_tokens > before.usage.input_tokens - 20
    hinted = ask(live, reasoning={"effort": "high", "summary": "auto"})
    assert hinted.reasoning.effort is None, "the chat template knows no such setting"


def test_text_follows_a_schema(live: Live) -> None:
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    reply = ask(live, text={"format": form}, max_output_tokens=60)
    assert reply.output_text.replace(" ", "").strip().startswith("{")
    assert reply.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id is not supported"),
        ({"model": "other"}, openai.NotFoundError, "'other' does not exist"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, openai.BadRequestError, "tool_choice"),
        ({"input": "x" * 600}, openai.BadRequestError, "tokens"),
        ({"temperature": -1.0}, openai.BadRequestError, "temperature"),
    ],
)
def test_refusals_name_the_field(live: Live, changes: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ask(live, **changes)


NOT: dict[str, Any] = {"type": "object", "not": {}}


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"tools": [{**TOOL, "name": "loose", "parameters": NOT}]}, "tools", "tool loose: "),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": NOT}}}, "text.format", "'not'"),
    ],
    ids=["tool", "text"],
)
def test_a_schema_that_cannot_be_enforced_is_named_by_its_field(
    live: Live, changes: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        ask(live, **changes)
    assert caught.value.param == param


def test_an_error_in_a_stream_is_a_failed_response(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(live.context.llm.engine.rounds, "step", broken)
    events = list(ask(live, stream=True))
    monkeypatch.undo()
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "engine_error"
    assert ask(live).status in ("completed", "incomplete")


def test_keys_and_quotas_hold(keyed: Live) -> None:
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 400, "temperature": 0.0}  # no short answer by chance
    headers = {"authorization": "Bearer few"}
    assert keyed.post("/v1/responses", body).status_code == 401
    assert [keyed.post("/v1/responses", body, headers=headers).status_code for _ in range(2)] == [200, 429]


def test_models_are_listed_under_both_names(live: Live) -> None:
    listed = live.get("/v1/models").json()
    assert listed["models"] == listed["data"]
