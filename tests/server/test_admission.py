"""Admission and fairness: limits on sequences and tokens, bounded queues for slow readers, turns between clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from paceline.config import ServerConfig
from paceline.core.outputs import CompletionOutput, RequestOutput, TokenLogprob
from paceline.server import errors, replies
from paceline.server.admission import Admission, AdmissionLimits, AdmissionTicket
from paceline.server.completions import CompletionJob
from paceline.server.delta import MAX_UNREAD, Mailbox, OutputCursor, Update
from paceline.server.documents import written, written_in_pieces
from paceline.server.protocol import CompletionRequest
from paceline.server.service import Submission
from paceline.server.streaming import EventStream
from polling import PATIENCE, wait_until
from server_support import Live, start
from web import client

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = AdmissionLimits(answers=4, tokens=400)


def enter(admission: Admission, client: str, answers: int = 1, made: int = 10, read: int = 10) -> AdmissionTicket:
    ticket = AdmissionTicket(answers, made, read)
    admission.enter(client, [ticket], LIMITS)
    return ticket


def refused(admission: Admission, client: str, *numbers: int) -> int:
    with pytest.raises(errors.ApiError) as caught:
        enter(admission, client, *numbers)
    return caught.value.status


# --- admission --------------------------------------------------------------------------------------------------------


def test_one_client_can_fill_the_queue_but_cannot_lock_others_out() -> None:
    admission = Admission(max_waiting=12)
    held = [enter(admission, "greedy") for _ in range(16)]
    assert refused(admission, "greedy") == 429
    held += [enter(admission, "modest") for _ in range(3)]  # a quarter of 12 more
    assert refused(admission, "modest") == refused(admission, "third") == 429
    for ticket in held[:3]:
        ticket.close()
    assert refused(admission, "greedy") == 429, "what it released is reserved for clients with less"
    enter(admission, "modest")


def test_admissions_are_released_sequence_by_sequence_and_only_once() -> None:
    admission = Admission(max_waiting=0)
    ticket = enter(admission, "a", 4)
    ticket.end(3)
    assert admission.inside == 1
    enter(admission, "a", 3).close()
    for _ in range(3):
        ticket.end(5)
        ticket.close()
    assert admission.inside == 0
    assert refused(admission, "a", 5) == 400, "more than this server can ever admit"
    enter(admission, "a", 4)


def test_tokens_are_limited_like_sequences() -> None:
    admission = Admission(max_waiting=12, max_waiting_tokens=100)
    enter(admission, "a", 4, 100, 40)
    assert refused(admission, "a", 1, 60, 1) == 429
    assert refused(admission, "a", 1, 400, 101) == 400
    ticket = enter(admission, "a", 2, 10, 40)
    ticket.end(1)
    assert refused(admission, "a", 1, 5, 10) == 429, "the prompt counts until its last sequence ends"
    ticket.end(1)
    enter(admission, "a", 1, 5, 10)


# --- requests ---------------------------------------------------------------------------------------------------------

HUGE = 10**9


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "echo": True, "max_tokens": 0, "n": HUGE},
        {"prompt": "a", "echo": True, "max_tokens": 0, "n": HUGE, "stream": True},
        {"prompt": "a", "echo": True, "max_tokens": 0, "n": 17},
        {"prompt": ["a"] * 17, "echo": True, "max_tokens": 0, "logprobs": 1},
        {"prompt": ["a"] * 4000, "max_tokens": 1},
        {"prompt": ["a"] * 9, "n": 2},
        {"prompt": "a", "best_of": HUGE},
        {"messages": [{"role": "user", "content": "a"}], "n": HUGE},
        {"messages": [{"role": "user", "content": "a"}], "n": 17},
    ],
)
def test_more_sequences_than_the_server_can_admit_are_refused(live: Live, body: Any) -> None:
    reply = live.post("/v1/chat/completions" if "messages" in body else "/v1/completions", body)
    assert reply.status_code == 400
    assert len(reply.content) < 1000
    live.wait_until_idle()


def test_scored_prompts_queue_like_others_and_use_no_cache_while_waiting(live: Live) -> None:
    body = {"prompt": ["some prompt"] * 8, "echo": True, "max_tokens": 0, "logprobs": 1}
    admission, service = live.context.dispatcher.admission, live.context.service
    with ThreadPoolExecutor(2) as pool:
        with live.held():
            first = [pool.submit(live.post, "/v1/completions", body) for _ in range(2)]
            wait_until(lambda: admission.inside == 16)
            assert live.post("/v1/completions", body).status_code == 429
        assert [each.result().status_code for each in first] == [200, 200]
    assert not service._live
    with live.held():
        with live.asking("/v1/completions", body):
            wait_until(lambda: admission.inside == 8 and live.waiting)
        wait_until(lambda: admission.inside == 0)
        assert live.waiting, "the engine still has the request"
    live.wait_until_idle()
    wait_until(lambda: not service._live)


def test_too_many_log_probabilities_and_too_long_texts_are_refused(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.dispatch.MAX_LOGPROB_ENTRIES", 1000)
    asked = {"prompt": "a", "logprobs": 20, "n": 4, "max_tokens": 12}
    assert "log-probabilities" in live.post("/v1/completions", asked).json()["error"]["message"]
    assert live.post("/v1/completions", {**asked, "n": 3}).status_code == 200
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    assert live.post("/v1/chat/completions", chat).status_code == 400

    def never(*_: Any) -> list[int]:
        raise AssertionError("was tokenized")

    monkeypatch.setattr(live.context.texts.tokenizer, "encode", never)
    monkeypatch.setattr(live.context.texts.tokenizer, "chat", never)
    text = "a" * 200_000
    for path, long in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"prompt": text}),
    ):
        reply = live.post(path, long)
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert live.post("/detokenize", {"tokens": [1] * 100_000}).status_code == 400


LONG: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/completions prompt": lambda text: {"prompt": text},
    "/v1/chat/completions messages": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/responses input": lambda text: {"input": text},
    "/v1/embeddings input": lambda text: {"input": text},
    "/tokenize prompt": lambda text: {"prompt": text},
    "/tokenize messages": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/chat/completions prediction": lambda text: {
        "messages": [{"role": "user", "content": "a"}], "prediction": {"type": "content", "content": text},
    },
}  # fmt: skip


@pytest.mark.parametrize("size", [600, 200_000], ids=["tokens", "characters"])
@pytest.mark.parametrize("where", LONG)
def test_a_text_that_is_too_long_is_named_by_the_field_that_has_it(live: Live, where: str, size: int) -> None:
    path, param = where.split()
    reply = live.post(path, LONG[where]("a" * size))
    if size == 600 and (path == "/tokenize" or param == "prediction"):
        assert reply.status_code == 200, "only as long as no prompt could be"
        return
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


# --- clients that do not read -----------------------------------------------------------------------------------------


def test_admission_ends_with_the_engine_even_if_the_client_does_not_read(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream's first event is never sent; the 64 + 1 updates behind it are merged."""
    context, lengths, inboxes, submit = live.context, list[int](), list[Mailbox](), live.context.service.submit
    body = CompletionRequest(prompt="abc", max_tokens=300, n=2, ignore_eos=True, stream=True, num_speculative_tokens=0)  # type: ignore[call-arg]

    def noted(submission: Submission) -> None:
        inboxes.append(submission.inbox)
        submit(submission)

    async def never_read() -> None:
        job = await CompletionJob.prepare(context, body, "client")
        sent = asyncio.Event()

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                sent.set()
                await asyncio.Event().wait()

        stream = asyncio.ensure_future(EventStream(job.stream(), context.meter)({}, receive, send))
        await asyncio.wait_for(sent.wait(), PATIENCE)
        (inbox,) = inboxes
        while context.dispatcher.admission.inside:
            lengths.append(len(inbox))
            await asyncio.sleep(0.002)
        lengths.append(len(inbox))
        stream.cancel()

    monkeypatch.setattr(context.service, "submit", noted)
    asyncio.run_coroutine_threadsafe(never_read(), context.service._loop).result(2 * PATIENCE)
    assert 0 < max(lengths) <= MAX_UNREAD
    live.wait_until_idle()


def test_unread_updates_are_merged_without_loss() -> None:
    async def scenario() -> None:
        box, outputs = Mailbox(), [_output(f"{n}") for n in range(2)]
        cursors = [OutputCursor(output) for output in outputs]
        for token in range(1000):
            for number, output in enumerate(outputs):
                for answer in output.outputs:
                    _gain(answer, token, last=token == 999)
                box.put(Update(number, cursors[number].take_new(), output if token == 999 else None))
            assert len(box) <= MAX_UNREAD
        box.put(errors.round_failed())
        found: dict[tuple[int, int], list[int]] = {}
        texts: Counter[str] = Counter()
        while not isinstance(news := await box.get(), errors.ApiError):
            for delta in news.deltas:
                found.setdefault((news.number, delta.index), []).extend(delta.token_ids)
                assert len(delta.token_ids) == len(delta.pieces) == len(delta.kinds) == len(delta.logprobs)
                texts[f"{news.number} {delta.index}"] += len(delta.text)
        assert set(map(tuple, found.values())) == {tuple(range(1000))}
        assert len(found) == 4
        assert set(texts.values()) == {2000}

    asyncio.run(scenario())


def _output(name: str) -> RequestOutput:
    return RequestOutput(name, None, [1], [CompletionOutput(index, logprobs=[]) for index in range(2)])


def _gain(answer: CompletionOutput, token: int, last: bool) -> None:
    answer.token_ids.append(token)
    answer.token_kinds.append("plain")
    answer.pieces.append("ab")
    answer.text += "ab"
    assert answer.logprobs is not None
    answer.logprobs.append(TokenLogprob(token, -1.0, ((token, -1.0),)))
    answer.finish_reason = "length" if last else None


def test_serializing_in_pieces_gives_the_same_bytes() -> None:
    logprobs = replies.CompletionLogprobs(
        tokens=["a", '"\u2028é'], token_logprobs=[None, -0.5], top_logprobs=[None, {'"': -1e-7}], text_offset=[0, 1]
    )
    top = replies.TopLogprob(token="x", logprob=-9999.0, bytes=[1, 2])
    spelled = replies.ChatLogprob(token="x", logprob=-0.25, bytes=[], top_logprobs=[top, top])
    choice = replies.CompletionChoice(index=0, text="a\n\x00", logprobs=logprobs, finish_reason=None)
    choice.stop_reason = None
    choice.paceline = replies.Extras(
        token_ids=[1], kinds=["plain"], pieces=["a"], metrics=replies.AnswerMetrics.of(CompletionOutput(0))
    )
    whole = replies.Completion(id="1", object="text_completion", created=1, model="m", choices=[choice, choice])
    message = replies.ChatMessage(role="assistant", content="a", refusal=None)
    said = replies.ChatChoice(
        index=0, message=message, logprobs=replies.ChatLogprobs(content=[spelled] * 3), finish_reason="stop"
    )
    usage = replies.Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    chat = replies.Chat(id="1", object="chat.completion", created=1, model="m", choices=[said], usage=usage)
    none = replies.Completion(id="1", object="text_completion", created=1, model="m", choices=[])
    for document in (whole, chat, none, replies.TokenizedText(count=2, max_model_len=3, tokens=[1, 2], token_strs=[])):
        assert written_in_pieces(document) == written(document)


def test_long_replies_equal_short_ones(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "once upon", "max_tokens": 60, "n": 3, "seed": 1, "logprobs": 5, "echo": True, "metrics": True}
    body["keep_prefix"] = False  # no reply drafts from another

    def choices(stream: bool) -> Any:
        reply = live.post("/v1/completions", {**body, "stream": stream})
        if stream:
            return sorted(line.split('"choices"')[1] for line in reply.text.splitlines() if '"text"' in line)
        found = reply.json()["choices"]
        for choice in found:
            del choice["paceline"]["metrics"]
        return found

    whole = choices(False)
    monkeypatch.setattr("paceline.server.documents._SHORT_REPLY", 0)
    assert choices(False) == whole
    assert choices(True)


# --- fairness ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(tiny: str) -> Iterator[Live]:
    yield from start(ServerConfig(port=0, api_keys=("greedy", "modest"), max_waiting=120), tiny)


@pytest.fixture
def ask(keyed: Live) -> Callable[..., httpx.Response]:
    def post(key: str, **body: Any) -> httpx.Response:
        whole = {"prompt": "abc", "max_tokens": 8, "ignore_eos": True, "seed": 1, **body}
        return client.post(f"{keyed.url}/v1/completions", json=whole, headers={"Authorization": f"Bearer {key}"})

    return post


@pytest.fixture
def begun(keyed: Live, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sequences in the order in which they got a row."""
    scheduler, order = keyed.context.llm.engine.scheduler, list[str]()
    original = scheduler._start

    def noted(sequence: Any, *rest: Any) -> None:
        order.append(f"{sequence.client} {sequence.params.seed}")
        original(sequence, *rest)

    monkeypatch.setattr(scheduler, "_start", noted)
    return order


def test_a_hundred_requests_of_one_key_delay_another_key_by_one_turn(
    keyed: Live, ask: Callable[..., httpx.Response], begun: list[str]
) -> None:
    with ThreadPoolExecutor(101) as pool:
        with keyed.held():
            many = [pool.submit(ask, "greedy", seed=1) for _ in range(100)]
            wait_until(lambda: keyed.waiting == 100)
            single = pool.submit(ask, "modest", seed=2)
            wait_until(lambda: keyed.waiting == 101)
            assert keyed.context.dispatcher.admission.inside == 101
        assert {each.result().status_code for each in (*many, single)} == {200}
    assert [name.split()[-1] for name in begun].index("2") <= 1, "at most one turn of the other key"
    assert len({name.split()[1] for name in begun}) == 2
    keyed.wait_until_idle()


def test_priority_can_delay_a_request_but_not_advance_it(
    keyed: Live, ask: Callable[..., httpx.Response], begun: list[str]
) -> None:
    with ThreadPoolExecutor(9) as pool:
        with keyed.held():
            polite = [pool.submit(ask, "modest", seed=1, priority=5) for _ in range(6)]
            wait_until(lambda: keyed.waiting == 6)
            others = [pool.submit(ask, "modest", seed=2) for _ in range(2)]
            wait_until(lambda: keyed.waiting == 8)
        assert {each.result().status_code for each in (*polite, *others)} == {200}
    assert [name.split()[-1] for name in begun][:2] == ["2", "2"]
    refused = ask("modest", priority=-1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
