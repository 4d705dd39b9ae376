"""The inspector in headless Chromium against a live server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from browser_support import LAPTOP, PHONE, opened
from chat_support import ADD, PING
from paceline.config import SamplingParams, ServerConfig
from paceline.config.sampling import RECOMMENDED_FIELDS
from paceline.server.protocol import SamplingFields
from server_support import Live, start

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {"accepted", "recovered", "bonus", "plain"}


@pytest.fixture
def page(browser: Browser, live: Live) -> Iterator[Page]:
    yield from opened(browser, live)


def fill(page: Page, prompt: str = "hello", n: int = 3, tokens: int = 60) -> None:
    page.get_by_role("textbox", name="Message", exact=True).fill(prompt)
    page.get_by_label("Answers", exact=True).fill(str(n))
    page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Seed").fill("7")


def kinds(page: Page) -> set[str]:
    return set(page.locator(".answer mark").evaluate_all("marks => marks.map(mark => mark.dataset.kind)"))


def test_three_answers_stream_side_by_side_with_coloured_tokens(page: Page, live: Live) -> None:
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text("tiny")
    fill(page)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".answer.ended")).to_have_count(3)
    assert {"accepted", "recovered"} <= kinds(page) <= KINDS
    body = {"messages": [{"role": "user", "content": "hello"}], "n": 3, "temperature": 0, "seed": 7}
    reply = live.post("/v1/chat/completions", {**body, "max_tokens": 60}).json()
    shown = [answer.text_content() for answer in page.locator(".answer .text").all()]
    assert shown == [choice["message"]["content"] for choice in reply["choices"]]
    expect(page.locator(".answer .figures").first).to_contain_text("acceptance length")
    expect(page.locator("#total")).to_contain_text("180 tokens in")
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()


def test_the_page_sends_what_was_chosen_and_shows_what_the_server_chooses(page: Page) -> None:
    bodies = list[dict[str, object]]()
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
    expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "0.8")
    expect(page.get_by_label("Top-p")).to_have_attribute("placeholder", "0.95")
    page.get_by_role("textbox", name="Message", exact=True).fill("hello")
    page.get_by_label("Answers", exact=True).fill("1")
    with page.expect_request("**/v1/chat/completions"):
        page.get_by_role("button", name="Generate").click()
    page.keyboard.press("Escape")  # nobody waits for an answer that fills the context; it may have ended by itself
    expect(page.locator(".answer.ended")).to_have_count(1)
    page.locator(".segments label", has_text="Completion").click()
    expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "1")
    page.get_by_label("Top-p").fill("0.5")
    with page.expect_request("**/v1/completions"):
        page.get_by_role("button", name="Generate").click()
    expect(page.locator(".answer.ended")).to_have_count(1)
    chat, completion = bodies
    assert chat.keys() == {"n", "stream", "metrics", "messages"}
    assert completion.keys() == {"n", "stream", "metrics", "prompt", "top_p"}


def test_every_setting_of_the_server_is_there_with_its_default(page: Page) -> None:
    fields = page.evaluate("import('/playground/settings.js').then(({ FIELDS }) => FIELDS)")
    assert SamplingFields.model_fields.keys() - fields.keys() == {"n", "best_of", "rank_by"}, "of several answers"
    assert {name for name, field in fields.items() if field.get("recommended")} == set(RECOMMENDED_FIELDS)
    defaults = {name: getattr(SamplingParams, name) for name, field in fields.items() if field["empty"] in (0, 1)}
    assert defaults == {name: fields[name]["empty"] for name in defaults}
    flags = {name: getattr(SamplingParams(), name, True) for name, field in fields.items() if field["kind"] == "flag"}
    assert flags == {name: fields[name]["empty"] == "yes" for name in flags}
    marks = page.locator(".legend mark").all()
    lines = [mark.evaluate("mark => getComputedStyle(mark).textDecoration.replace(/rgb.*/, '')") for mark in marks]
    assert len(lines) == len(set(lines)) == len(KINDS), "kinds of tokens differ by more than their colour"


def test_a_chosen_setting_changes_what_the_others_are_by_default(page: Page) -> None:
    expect(page.get_by_label("Top-p")).to_have_attribute("placeholder", "0.95")
    page.get_by_label("Temperature").fill("0.5")
    expect(page.get_by_label("Top-p")).to_have_attribute("placeholder", "1")
    bodies = list[dict[str, object]]()
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
    page.get_by_text("More settings").click()
    page.get_by_label("Ends at these texts").fill("a b\n\\n\\n")
    page.get_by_label("Token ids that end it").fill("1, 2")
    page.get_by_label("Logit bias").fill('{"3": -5}')
    page.get_by_label("Goes on after the end of text").select_option("yes")
    page.get_by_label("Max tokens").fill("2")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".answer.ended")).to_have_count(3)
    chosen = {"stop": ["a b", "\n\n"], "stop_token_ids": [1, 2], "logit_bias": {"3": -5}, "ignore_eos": True}
    assert {**bodies[0], **chosen, "temperature": 0.5, "max_tokens": 2} == bodies[0]


@pytest.mark.usefixtures("unhurried")
def test_the_charts_follow_the_server_and_stop_frees_rows(page: Page, live: Live) -> None:
    ended = live.metric("request_success_total")
    fill(page, tokens=480)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#chart-batch .value")).to_have_text("3")
    expect(page.locator("#chart-batch .scale")).to_contain_text("of 4")
    expect(page.locator("#chart-acceptance .value")).to_have_text(re.compile(r"\d+ %"))
    expect(page.locator("#chart-k .line")).to_have_attribute("d", re.compile("M.*H"))
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".progress").first).to_contain_text("stopped")
    live.wait_until_idle()
    assert live.metric("request_success_total") == ended, "no answer finished by itself"
    expect(page.locator("#error")).to_be_hidden()


@pytest.mark.usefixtures("unhurried")
def test_the_page_works_with_the_keyboard_only(page: Page, live: Live) -> None:
    fill(page, prompt="abababababab", n=1, tokens=480)
    page.get_by_label("Chat").press("ArrowRight")  # to "Completion"
    expect(page.get_by_label("Text to continue")).to_be_visible()
    page.get_by_label("Text to continue").press("Control+Enter")
    expect(page.locator(".answer mark").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".progress")).to_contain_text("stopped")
    page.get_by_label("Text to continue").focus()
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "send":
            break
    assert page.evaluate("document.activeElement.id") == "send"


def test_the_form_sets_num_speculative_tokens(page: Page) -> None:
    fill(page, n=1)
    for choice, k in (("Off", None), ("At most k", "2")):
        page.locator(".segments label", has_text=choice).click()
        if k is not None:
            page.get_by_label("k, draft tokens per round").fill(k)
        with page.expect_response("**/v1/chat/completions"):  # whose answer takes the place of the one before
            page.get_by_role("button", name="Generate").click()
        expect(page.locator(".answer.ended")).to_have_count(1)
        assert (kinds(page) != {"plain"}) == (k is not None), choice


def test_calls_and_thoughts_are_shown_apart_from_the_text(browser: Browser, talker: Live) -> None:
    pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "max_thinking_tokens": 9}
    for page in opened(browser, talker):
        page.route(
            "**/v1/chat/completions",
            lambda route, request: route.continue_(post_data=json.dumps({**request.post_data_json, **thinking})),
        )
        with page.expect_request("**/v1/chat/completions") as sent:
            fill(page, n=2)
            page.get_by_label("Tools").fill(json.dumps([ADD, PING]))
            page.get_by_label("Calls").select_option("required")
            page.get_by_role("button", name="Generate").click()
        expect(page.locator(".answer.ended")).to_have_count(2)
        body = {**sent.value.post_data_json, **thinking, "stream": False, "metrics": False}
        assert (body["tools"], body["tool_choice"]) == ([ADD, PING], "required")
        for answer, choice in zip(
            page.locator(".answer").all(), talker.post("/v1/chat/completions", body).json()["choices"], strict=True
        ):
            message, calls = choice["message"], answer.locator(".call").all()
            shown = [(call.locator("strong").text_content(), call.locator("code").text_content()) for call in calls]
            assert shown == [
                (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
            ]
            assert answer.locator(".thoughts p").text_content() == message["reasoning_content"]
            answer.locator("summary").click()
            expect(answer.locator(".thoughts p")).to_be_visible()


def test_tools_that_are_no_json_are_not_sent(page: Page) -> None:
    fill(page, n=1)
    page.get_by_label("Tools").fill("[{]")
    page.get_by_role("button", name="Generate").click()
    assert "JSON" in page.get_by_label("Tools").evaluate("field => field.validationMessage")
    expect(page.locator(".answer")).to_have_count(0)
    page.get_by_label("Tools").fill("")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".answer.ended")).to_have_count(1)


def test_errors_of_the_server_are_shown(browser: Browser, live: Live) -> None:
    for page in opened(browser, live, refusals="400"):
        fill(page, prompt="x" * 600)
        page.get_by_role("button", name="Generate").click()
        expect(page.get_by_role("alert")).to_contain_text("tokens")
        expect(page.locator(".answer")).to_have_count(0)  # no empty boxes
        expect(page.locator("#empty")).to_be_visible()
        expect(page.get_by_role("button", name="Generate")).to_be_enabled()


def test_it_fits_a_phone_in_the_light_and_in_the_dark(browser: Browser, live: Live) -> None:
    for page in opened(browser, live, viewport=PHONE, has_touch=True):
        fill(page, prompt="a" * 90)
        page.get_by_role("button", name="Generate").click()
        expect(page.locator(".answer.ended")).to_have_count(3)
        schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
        for scheme in schemes:
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
            ink, paper = (brightness(page, name) for name in ("color", "background-color"))
            assert (ink > paper) == (scheme == "dark")


def brightness(page: Page, name: str) -> int:
    colour = page.evaluate("name => getComputedStyle(document.body).getPropertyValue(name)", name)
    return sum(map(int, re.findall(r"\d+", colour)))


def test_a_key_is_asked_for_and_never_stored(browser: Browser, tiny: str) -> None:
    for live in start(ServerConfig(port=0, served_model_name="tiny", api_keys=["secret"]), tiny):
        for page in opened(browser, live, refusals="401"):
            expect(page.locator("#state")).to_have_text("needs an API key")
            page.get_by_label("API key").fill("secret")
            expect(page.locator("#state")).to_have_text("ready")
            fill(page, n=1)
            page.get_by_role("button", name="Generate").click()
            expect(page.locator(".answer.ended")).to_have_count(1)
            assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_generate_and_stop_are_in_sight_and_keep_the_focus(browser: Browser, live: Live, size: dict[str, int]) -> None:
    for page in opened(browser, live, viewport=size):
        generate, stop = (page.get_by_role("button", name=name) for name in ("Generate", "Stop"))
        for button in (generate, stop):
            expect(button).to_be_in_viewport(ratio=1)
        fill(page, n=1, tokens=480)
        generate.focus()
        page.keyboard.press("Enter")
        expect(page.locator(".answer mark").first).to_be_in_viewport()
        expect(generate).to_be_focused()
        expect(generate).to_be_disabled()
        expect(stop).to_be_in_viewport(ratio=1)
        stop.focus()
        page.keyboard.press("Enter")
        expect(generate).to_be_enabled()
        expect(stop).to_be_focused()
        roles = page.locator("#charts [role], #charts output, #charts [aria-live]")
        expect(roles).to_have_count(0)  # figures that change four times a second are not read out


def test_the_reference_has_every_path_and_no_scripts(browser: Browser, live: Live) -> None:
    for page in opened(browser, live):
        page.get_by_role("link", name="API").click()
        headings = page.get_by_role("heading", level=2).all_text_contents()
        assert {"POST /v1/chat/completions", "POST /api/chat", "GET /stats"} <= set(headings)
        assert page.locator("script").count() == 0
        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
