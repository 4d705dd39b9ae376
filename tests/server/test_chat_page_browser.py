"""The chat page in headless Chromium: against a live server, and with written answers where their text matters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from browser_support import LAPTOP, PHONE, opened
from chat_support import ADD, PING
from paceline.config import SamplingParams
from paceline.llm import LLM
from paceline.tools.bench.trace import TracedRound
from paceline.tools.bench.trace import page as trace_page
from server_support import Live

pytestmark = pytest.mark.usefixtures("one_thread")

METRICS = {"output_tokens": 1, "ttft_ms": 1.0, "ms_per_token": None, "mean_acceptance_length": None, "drafted": 0}
STORE = "import('/playground/store.js')"
MARKDOWN = """\
# Title

Some **bold** text, `code` and [a link](https://example.com/a?b=1&c=2 "t"). Bare: https://example.org/x.

| left | right |
|:-----|------:|
| 1    | 2     |

```python
def f(x):
    return x < 1
```

3. three
4. four
   - inner
"""
HOSTILE = (
    """\
<script>window.pwned = 1</script><img src="https://evil.example/a.png" onerror="window.pwned = 1">
<iframe src="https://evil.example/b"></iframe><style>body { display: none }</style>

[one](javascript:window.pwned=1) [two](JaVaScRiPt&#58;window.pwned=1) [three](data:text/html,<script>1</script>)
[four](/v1/models) [five](//evil.example/c) ![six](https://evil.example/d.png) ![seven](/stats)
![eight](data:image/svg+xml,<svg/onload=alert(1)>) <https://evil.example/e> <a href="https://evil.example/f">nine</a>

[ref]: javascript:window.pwned=1
[ref] &lt;b onclick="window.pwned=1"&gt;ten&lt;/b&gt;

```"><script>window.pwned=1</script>
</code></pre><script>window.pwned = 1</script>
```

| a |
|---|
| <svg onload="window.pwned=1"> |
"""
    + "> " * 3000
)


@pytest.fixture
def page(browser: Browser, live: Live) -> Iterator[Page]:
    yield from opened(browser, live, "/chat")


def write_answers(page: Page, *texts: str) -> list[Any]:
    """Let the server's next answers have these texts. Returns a list that gets the bodies of the requests."""
    bodies, left = list[Any](), iter(texts)
    call = {"index": 0, "id": "c", "function": {"name": "add", "arguments": "{}"}}

    def answer(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        extras = {"token_ids": [1], "kinds": ["plain"], "pieces": ["x"], "metrics": METRICS}
        delta = {"content": next(left), "reasoning_content": "Hm.", "tool_calls": [call]}
        choice = {"index": 0, "delta": delta, "finish_reason": "stop", "paceline": extras}
        events = [json.dumps({"choices": [choice]}), "[DONE]"]
        body = "".join(f"data: {event}\n\n" for event in events)
        route.fulfill(status=200, headers={"Content-Type": "text/event-stream"}, body=body)

    page.route("**/v1/chat/completions", answer)
    return bodies


def sent_by(page: Page) -> list[Any]:
    """A list that gets the bodies of the page's requests."""
    bodies = list[Any]()
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
    return bodies


def say(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Message", exact=True).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def said(page: Page) -> list[str | None]:
    return page.locator(".turn .said").all_text_contents()


def ended(page: Page, count: int) -> None:
    expect(page.locator(".turn.assistant.ended")).to_have_count(count)


def settle(page: Page, tokens: int = 12) -> None:
    """Choose short answers that are always the same."""
    page.get_by_role("button", name="Settings").click()
    for label, value in (("Max tokens", tokens), ("Temperature", 0), ("Seed", 7)):
        page.get_by_label(label, exact=True).fill(str(value))


def kept(page: Page) -> list[dict[str, Any]]:
    """The conversations that the browser keeps, as values."""
    return page.evaluate(f"{STORE}.then(({{ all }}) => all())")  # type: ignore[no-any-return]


def test_only_what_was_chosen_is_sent(page: Page) -> None:
    bodies = sent_by(page)
    expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "0.8")
    with page.expect_request("**/v1/chat/completions"):
        say(page, "a")
    page.keyboard.press("Escape")  # nobody waits for an answer that fills the context; it may have ended by itself
    ended(page, 1)
    assert bodies == [{"stream": True, "metrics": True, "messages": [{"role": "user", "content": "a"}]}]


def test_a_conversation_goes_on_and_is_kept(page: Page, live: Live) -> None:
    bodies = sent_by(page)
    settle(page)
    page.get_by_label("System message").fill("Be brief.")
    say(page, "a")
    ended(page, 1)
    say(page, "and **then**?")
    ended(page, 2)
    _, first, _, second = kept(page)[0]["turns"]
    assert bodies[1] == {
        "stream": True,
        "metrics": True,
        "max_tokens": 12,
        "temperature": 0,
        "seed": 7,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": first["text"]},
            {"role": "user", "content": "and **then**?"},
        ],
    }
    alone = live.post("/v1/chat/completions", {**bodies[1], "stream": False}).json()["choices"][0]
    assert second["text"] == alone["message"]["content"]
    expect(page.locator(".turn .figures").last).to_contain_text("12 tokens")
    shown = said(page)
    assert shown[2] == "and **then**?", "what a person writes is no Markdown"
    page.reload()
    ended(page, 2)
    assert said(page) == shown
    expect(page.get_by_label("Temperature")).to_have_value("0")
    expect(page.get_by_role("button", name="Settings")).to_have_text("Settings (4)")


def test_versions_of_messages_and_answers_stand_beside_each_other(page: Page) -> None:
    bodies = write_answers(page, "one", "two", "three", "four", "five")
    say(page, "A")
    ended(page, 1)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".said").last).to_have_text("two")
    say(page, "B")
    ended(page, 2)
    page.get_by_role("button", name="Edit").first.click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("A")
    say(page, "A, again")
    expect(page.locator(".said").last).to_have_text("four")
    assert said(page) == ["A, again", "four"]
    words = [[message["content"] for message in body["messages"]] for body in bodies]
    assert words == [["A"], ["A"], ["A", "two", "B"], ["A, again"]]
    expect(page.locator(".versions").first).to_contain_text("2 of 2")
    page.get_by_role("button", name="Version before").press("Enter")
    assert said(page) == ["A", "two", "B", "three"]
    expect(page.get_by_role("button", name="Version before").first).to_be_focused()
    page.get_by_role("button", name="Send results").first.click()
    expect(page.locator(".said").last).to_have_text("five")
    assert said(page) == ["A", "two", "five"], "beside the message that followed the answer"
    page.get_by_role("button", name="Version before").last.click()
    assert said(page) == ["A", "two", "B", "three"]
    page.get_by_role("button", name="Version before").nth(1).click()
    assert said(page) == ["A", "one"]
    page.reload()
    expect(page.locator(".turn")).to_have_count(2)
    assert said(page) == ["A", "one"]


def test_markdown_becomes_elements_and_code_can_be_copied(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    write_answers(page, MARKDOWN)
    say(page, "?")
    ended(page, 1)
    answer = page.locator(".turn.assistant")
    expect(answer.get_by_role("heading", name="Title", level=3)).to_be_visible()
    assert [link.get_attribute("href") for link in answer.locator(".said a").all()] == [
        "https://example.com/a?b=1&c=2",
        "https://example.org/x",
    ]
    cells = answer.locator("td")
    assert cells.all_text_contents() == ["1", "2"]
    assert cells.last.evaluate("cell => getComputedStyle(cell).textAlign") == "right"
    assert answer.locator("ol").get_attribute("start") == "3"
    assert answer.locator("ol ul li").all_text_contents() == ["inner"]
    answer.get_by_role("button", name="Copy the code").click()
    expect(answer.get_by_role("button", name="Copy the code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "def f(x):\n    return x < 1"
    answer.locator(".tools").get_by_role("button", name="Copy").click()
    expect(answer.locator(".tools")).to_contain_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN


def test_a_hostile_answer_does_nothing(page: Page, live: Live) -> None:
    write_answers(page, HOSTILE, "second")
    page.get_by_text("ready").wait_for()
    addresses, dialogs = list[str](), list[str]()
    page.on("request", lambda request: addresses.append(request.url))
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    say(page, HOSTILE)
    ended(page, 1)
    turns = page.locator("#turns")
    allowed = "p blockquote ul ol li em strong s span br hr code table thead tbody tr th td a h3 h4 h5 h6"
    inside = turns.locator(".said *").evaluate_all("all => [...new Set(all.map(one => one.localName))]")
    assert set(inside) <= {*allowed.split(), "div", "figure", "figcaption", "button", "pre"}
    attributes = turns.locator(".said *").evaluate_all("all => all.flatMap(one => one.getAttributeNames())")
    assert set(attributes) <= {
        *("class", "tabindex", "type", "aria-label", "href", "title", "target", "rel", "start", "style")
    }
    links = [link.get_attribute("href") for link in turns.locator(".said a").all()]
    assert len(links) > 3
    assert {str(link)[:21] for link in links} == {"https://evil.example/"}, "what a person may choose to follow"
    for text in ("one", "two", "three", "four", "five", "seven", "nine", "ten"):
        turns.get_by_text(text).last.dispatch_event("click")
    say(page, "and now?")
    ended(page, 2)
    page.reload()
    ended(page, 2)
    assert page.evaluate("window.pwned") is None
    assert (dialogs, page.url.split("#")[0]) == ([], f"{live.url}/chat")
    assert [address for address in addresses if not address.startswith(live.url)] == []
    assert [address for address in addresses if address.endswith(("/stats", "/v1/models"))][1:] == []


def test_thoughts_calls_and_their_results(browser: Browser, talker: Live) -> None:
    pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")
    for page in opened(browser, talker, "/chat"):
        bodies = sent_by(page)
        settle(page, tokens=120)
        page.get_by_text("More settings").click()
        page.get_by_label("Thoughts", exact=True).select_option("high")
        page.get_by_label("Thought tokens, at most").fill("9")
        page.locator("summary", has_text="Tools").click()
        page.get_by_label("Tools as JSON").fill(json.dumps([ADD, PING]))
        page.get_by_label("Calls", exact=True).select_option("required")
        say(page, "call")
        ended(page, 1)
        answer = page.locator(".turn.assistant")
        turn = kept(page)[0]["turns"][1]
        alone = talker.post("/v1/chat/completions", {**bodies[0], "stream": False}).json()["choices"][0]["message"]
        assert turn["thoughts"] == alone["reasoning_content"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in alone["tool_calls"]]
        shown = [(call.locator("strong"), call.locator("code")) for call in answer.locator(".call").all()]
        assert [(name.text_content(), text.text_content()) for name, text in shown] == calls
        answer.locator("summary").click()
        expect(answer.locator(".thoughts p")).to_have_text(turn["thoughts"])
        page.get_by_label("Calls", exact=True).select_option("none")
        fields = answer.locator(".calls textarea").all()
        for place, field in enumerate(fields):
            field.fill(f"result {place}")
        page.get_by_role("button", name="Send results").click()
        ended(page, 2)
        sent = bodies[1]["messages"][1:]
        assert sent[0]["tool_calls"] == [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in turn["calls"]
        ]
        assert [(message["role"], message["tool_call_id"], message["content"]) for message in sent[1:]] == [
            ("tool", call["id"], f"result {place}") for place, call in enumerate(turn["calls"])
        ]
        expect(answer.first.locator("textarea").first).not_to_be_editable()


def test_text_files_are_attached_and_others_refused(page: Page) -> None:
    bodies = write_answers(page, "ok")
    text = {"name": "notes.md", "mimeType": "text/markdown", "buffer": "a ```` fence\nß\n".encode()}
    picture = {"name": "cat.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\x1a\n\0\0"}
    large = {"name": "large.txt", "mimeType": "text/plain", "buffer": b"x" * 1_000_001}
    page.locator("#file").set_input_files([text, picture, large])  # type: ignore[list-item]
    expect(page.get_by_role("alert")).to_contain_text("large.txt has 1000001 bytes")
    expect(page.locator("#files li")).to_have_count(1)
    say(page, "Sum it up.")
    ended(page, 1)
    fence = "`" * 5
    assert bodies[0]["messages"][0]["content"] == f"Sum it up.\n\nnotes.md:\n{fence}\na ```` fence\nß\n{fence}"
    expect(page.locator(".turn.user .file summary")).to_contain_text("notes.md")
    expect(page.locator("#files li")).to_have_count(0)


def test_conversations_are_searched_deleted_and_bounded(page: Page) -> None:
    write_answers(page, "about rivers", "about stars")
    entries = page.locator("#conversations li")
    say(page, "Question one")
    ended(page, 1)
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    say(page, "Question two")
    ended(page, 1)
    assert entries.locator("a").all_text_contents() == ["Question two", "Question one"]
    page.get_by_label("Search").fill("rivers QUESTION")
    expect(entries).to_have_count(1)
    page.get_by_role("link", name="Question one").click()
    expect(page.locator(".said").last).to_have_text("about rivers")
    page.get_by_label("Search").fill("")
    page.get_by_role("button", name="Delete Question one").press("Enter")
    expect(entries).to_have_count(1)
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_role("button", name="Undo")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".said").last).to_have_text("about rivers")
    script = """({ save, LIMIT, StorageError }) => {
      const large = (id, changed, share) => ({ id, changed, turns: [], filling: "x".repeat(share * LIMIT) });
      const dropped = [save(large("aa", Date.now() + 1, 0.6)), save(large("bb", Date.now() + 2, 0.6))];
      try { save(large("cc", Date.now() + 3, 1.1)); } catch (error) { dropped.push(error instanceof StorageError); }
      return dropped;
    }"""
    assert page.evaluate(f"{STORE}.then({script})") == [0, 3, True], "the oldest go, and nothing for what never fits"
    assert [one["id"] for one in kept(page)] == ["bb"]


def test_what_the_server_refuses_can_be_sent_again(browser: Browser, live: Live) -> None:
    for page in opened(browser, live, "/chat", refusals="400"):
        say(page, "x" * 600)
        expect(page.get_by_role("alert")).to_contain_text("tokens")
        expect(page.get_by_label("Message", exact=True)).to_have_value("x" * 600)
        expect(page.locator(".turn")).to_have_count(0)
        assert kept(page) == []
        settle(page)
        say(page, "short")
        ended(page, 1)
        expect(page.get_by_role("alert")).to_be_hidden()


def test_a_key_is_asked_for_and_never_kept(browser: Browser, keyed: Live) -> None:
    for page in opened(browser, keyed, "/chat", refusals="401"):
        expect(page.locator("#state")).to_have_text("needs an API key")
        page.get_by_label("API key").fill("free")
        expect(page.locator("#state")).to_have_text("ready")
        settle(page)
        say(page, "hello")
        ended(page, 1)
        assert "free" not in page.evaluate("JSON.stringify(localStorage) + document.cookie")


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_it_works_by_keyboard_and_fits_the_window(browser: Browser, live: Live, size: dict[str, int]) -> None:
    for page in opened(browser, live, "/chat", viewport=size):
        message, stop = page.get_by_label("Message", exact=True), page.get_by_role("button", name="Stop")
        for visible in (message, stop, page.get_by_role("button", name="Send", exact=True)):
            expect(visible).to_be_in_viewport(ratio=1)
        message.focus()
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        expect(page.locator(".turn.user .said")).to_have_text("one\ntwo")
        expect(page.locator(".turn.assistant .said")).to_be_in_viewport()
        expect(stop).to_be_enabled()
        expect(message).to_be_focused()
        page.keyboard.press("Escape")
        ended(page, 1)
        expect(page.locator(".turn .figures")).to_contain_text("stopped")
        page.get_by_role("button", name="Regenerate").press("Enter")
        expect(stop).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator(".versions").last).to_contain_text("2 of 2")
        ended(page, 1)
        page.get_by_role("button", name="Settings").press("Enter")
        page.get_by_label("Temperature").focus()
        page.keyboard.press("Escape")
        expect(page.get_by_label("Temperature")).to_be_hidden()
        expect(page.get_by_role("button", name="Settings")).to_be_focused()
        say(page, "again")
        expect(stop).to_be_enabled()
        if size == PHONE:
            page.get_by_role("button", name="Conversations").press("Enter")
        expect(page.get_by_role("link", name="one")).to_be_in_viewport()
        page.get_by_role("button", name="Delete one").press("Enter")
        live.wait_until_idle()
        expect(page.locator("#conversations li")).to_have_count(0)
        assert kept(page) == [], "an answer under way ends with its conversation"
        assert page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]") == [
            size["width"],
            size["height"],
        ]


def test_the_inspector_opens_an_answer_and_asks_again(page: Page) -> None:
    settle(page)
    say(page, "abababab")
    ended(page, 1)
    say(page, "cdcdcd")
    ended(page, 2)
    first, _, _, last = turns = kept(page)[0]["turns"]
    bodies = sent_by(page)
    page.get_by_role("link", name="Inspect", exact=True).last.click()
    expect(page.locator(".answer.ended")).to_have_count(1)
    marks = page.locator(".answer mark")
    assert [mark.text_content() for mark in marks.all()] == [piece for piece in last["pieces"] if piece]
    expect(page.locator(".answer .figures")).to_contain_text("acceptance length")
    expect(page.get_by_role("textbox", name="Message", exact=True)).to_have_value("cdcdcd")
    expect(page.get_by_label("Temperature")).to_have_value("0")
    expect(page.locator("#earlier")).to_contain_text("Messages before it: 2")
    page.get_by_label("Answers", exact=True).fill("1")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#total")).to_contain_text("12 tokens in")
    assert bodies[0]["messages"] == [
        {"role": "user", "content": first["text"]},
        {"role": "assistant", "content": turns[1]["text"]},
        {"role": "user", "content": "cdcdcd"},
    ]
    assert [mark.text_content() for mark in marks.all()] == [piece for piece in last["pieces"] if piece]


def check(page: Page) -> None:
    """Fail for what axe-core finds: by all of its rules, and by that of contrast in the dark, too."""
    schemes: dict[Literal["light", "dark"], dict[str, Any]] = {"light": {}, "dark": {"runOnly": ["color-contrast"]}}
    for scheme, rules in schemes.items():
        page.emulate_media(color_scheme=scheme)
        found = Axe().run(page, options={"resultTypes": ["violations"], **rules}).response["violations"]
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []


def test_axe_finds_nothing_on_any_page(browser: Browser, live: Live) -> None:
    for page in opened(browser, live, "/chat", viewport=LAPTOP):
        page.get_by_text("ready").wait_for()
        check(page)
        settle(page)
        page.get_by_text("More settings").click()
        write_answers(page, MARKDOWN)
        say(page, "Show all of Markdown.")
        ended(page, 1)
        check(page)
        page.get_by_role("link", name="Inspect", exact=True).click()
        expect(page.locator(".answer.ended")).to_have_count(1)
        page.get_by_text("More settings").click()
        check(page)
        page.get_by_role("link", name="API").click()
        cut = "sections => sections.slice(4).forEach(section => section.remove())"
        page.locator("section").evaluate_all(cut)  # all are made alike, and all take axe seconds
        check(page)


def test_axe_finds_nothing_on_the_page_of_a_trace(browser: Browser, offline: LLM) -> None:
    (answer,) = offline.generate("abcabc", SamplingParams(max_tokens=8), use_tqdm=False)[0].outputs
    rounds = [TracedRound([1, 2, 3], [-1, 0, 0], [0, 2], [1, 3, 4], ["ngram"] * 3)]
    with browser.new_page() as page:
        page.set_content(trace_page("tiny", answer, rounds, str))
        check(page)
