"""The page at `/`: its files, and what it does in a real browser."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx2
import pytest
from conftest import Running, letters_model, running
from fake_engine import fake_engine

from foretell import Engine
from foretell.drafters import Recycling, Suffix

ROOT = Path(__file__).resolve().parent.parent.parent
SCREENSHOTS = ROOT / "build" / "screenshots"  # git ignores it
STATIC = files("foretell.server") / "static"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
ORIGINS = ("draft", "correction", "bonus", "plain")
WAIT = 30_000  # milliseconds: for a machine that has other things to do


# --- The files: no browser needed ------------------------------------------------------------


def sources() -> dict[str, str]:
    return {file.name: file.read_text("utf-8") for file in STATIC.iterdir()}


def test_the_files_are_in_the_package_and_name_one_another():
    named = sources()
    assert {"index.html", "style.css", "app.js", "icon.svg"} <= set(named)
    linked = re.findall(r'(?:href|src)="static/([^"]+)"', named["index.html"])
    for text in named.values():
        linked += re.findall(r'from "\./([^"]+)"', text)
    assert set(linked) == set(named) - {"index.html"}


def test_nothing_is_loaded_from_elsewhere():
    for name, text in sources().items():
        text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(
            r"(?i)\b(?:https?:|wss?:|data:\w+/|blob:|javascript:)|//\w+\.\w+", text
        ), name
        assert not re.search(r"@import|url\(|import\(|importScripts", text), name


def test_nothing_is_inline_and_text_is_never_markup():
    named = sources()
    page = named["index.html"]
    assert not re.search(r"(?i)\s(?:on\w+|style)\s*=|<style", page)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]
    for name, text in named.items():
        forbidden = (
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|setHTML|srcdoc"
            r"|createContextualFragment|\beval\b|new Function|setAttribute\(\"(?:on|style)"
        )
        assert not re.search(forbidden, text), name
        assert not re.search(r"localStorage|sessionStorage|indexedDB|\.cookie", text), name


def test_every_control_has_a_name():
    page = sources()["index.html"]
    labelled = set(re.findall(r'<label for="(\w+)"', page))
    controls = re.findall(r'<(?:input|select|textarea) id="(\w+)"', page)
    assert controls
    assert set(controls) == labelled


def test_the_server_hands_the_files_out(shared):
    kinds = {"html": "text/html", "css": "text/css", "js": "javascript", "svg": "image/svg"}
    for path in ("/", *(f"/static/{name}" for name in sources())):
        response = shared.http.get(path)
        assert response.status_code == 200, path
        assert (
            kinds[path.rpartition(".")[2] if "." in path else "html"]
            in response.headers["content-type"]
        )
        assert "default-src 'none'" in response.headers["content-security-policy"]


# --- In Chromium ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="the page's tests need Playwright (pip install playwright)"
    )
    if CHROMIUM is None:
        pytest.skip("the page's tests need Chromium (on Debian: apt install chromium)")
    api.expect.set_options(timeout=WAIT)
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM)
        yield chromium
        chromium.close()


class Page:
    """The page in a tab of its own, and the words for what people do there."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        from playwright.sync_api import expect

        self.expect = expect
        self.address = address
        self.failures: list[str] = []
        self.urls: list[str] = []
        self.asked: list[dict[str, Any]] = []
        options.setdefault("viewport", {"width": 1280, "height": 900})
        self.context = browser.new_context(**options)
        self.tab = tab = self.context.new_page()
        tab.set_default_timeout(WAIT)
        tab.on("pageerror", lambda error: self.failures.append(str(error)))
        tab.on("console", self._hear)
        tab.on("request", self._see)
        tab.goto(address + "/")

    def _hear(self, message: Any) -> None:
        expected = message.text.startswith("Failed to load resource")  # a status that is tested
        if message.type == "error" and not expected:
            self.failures.append(message.text)

    def _see(self, request: Any) -> None:
        self.urls.append(request.url)
        if request.method == "POST":
            self.asked.append(json.loads(request.post_data))

    def at(self, selector: str) -> Any:
        return self.tab.locator(selector)

    def button(self, name: str) -> Any:
        return self.tab.get_by_role("button", name=name, exact=True)

    def ready(self) -> Page:
        self.expect(self.at("#model")).not_to_have_text("…")
        return self

    def set(self, **values: Any) -> Page:
        """Settings by the ids of their fields."""
        self.ready()
        for name, value in values.items():
            if name == "length":
                self.at("#length").select_option(str(value))
            else:
                self.at(f"#{name}").fill(str(value))
        return self

    def send(self, text: str = "abc", *, wait: bool = True) -> None:
        self.at("#prompt").fill(text)
        self.button("Send").click()
        if wait:
            self.says("Done")

    def compare(self, text: str = "abc", told: str = "The same") -> None:
        self.at("#prompt").fill(text)
        self.button("Compare").click()
        self.says(told)

    def says(self, text: str) -> None:
        self.expect(self.at("#status")).to_contain_text(text)

    def problem(self, text: str) -> None:
        self.expect(self.tab.get_by_role("alert")).to_contain_text(text)

    def text(self, number: int = 0) -> str:
        """The words of an answer as they are in the document."""
        return self.at(".answer").nth(number).evaluate("(answer) => answer.textContent")

    def origins(self) -> list[str]:
        """By the classes of the last answer's tokens."""
        classes = (
            self.at(".answer")
            .last.locator(".token")
            .evaluate_all("(tokens) => tokens.map((token) => [...token.classList])")
        )
        return [next(name for name in one if name in ORIGINS) for one in classes]

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return self.tab.evaluate("document.documentElement.scrollWidth - innerWidth")

    def picture(self, name: str, **options: Any) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        self.tab.screenshot(path=path, **options)
        assert path.stat().st_size > 5000


@pytest.fixture
def open_page(browser) -> Iterator[Callable[..., Page]]:
    """`open_page(address, color_scheme="dark")`; nothing may fail in it or be asked elsewhere."""
    pages: list[Page] = []

    def open_page(server: Running | str, **options: Any) -> Page:
        address = server if isinstance(server, str) else server.address
        pages.append(Page(browser, address, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.context.close()
        assert page.failures == []
        assert [url for url in page.urls if not url.startswith(page.address + "/")] == []


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own, slow enough to be stopped in the middle of an answer."""
    command = [sys.executable, str(ROOT / "tests" / "fake_engine.py"), '{"seconds": 0.05}']
    started = subprocess.Popen(
        [*command, "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    yield started
    started.kill()
    started.communicate()


def address_of(process: subprocess.Popen[str]) -> str:
    found = re.search(r"http://\S+?:\d+", process.stdout.readline())
    assert found
    return found[0]


def answer_of(server: Running, body: dict[str, Any]) -> dict[str, Any]:
    """What the API says to the page's own request."""
    body = {**body, "stream": False, "foretell": {**body["foretell"], "steps": None}}
    response = server.post(body, "/v1/chat/completions")
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.fixture(scope="module")
def letters() -> Iterator[Running]:
    """Random letters, without memory of earlier answers: the same request drafts the same."""
    with running(Engine(letters_model(), drafters=[Suffix(), Recycling()])) as here:
        yield here


MIXED = {"length": 4, "temperature": 0.6, "seed": 5, "most": 120}
"""Settings with which random letters have tokens of every origin."""


def test_each_token_shows_where_it_came_from(open_page, letters):
    page = open_page(letters).set(**MIXED)
    page.send("hello")
    (body,) = page.asked
    answer = answer_of(letters, body)
    assert page.origins() == answer["foretell"]["origins"]
    assert set(page.origins()) == set(ORIGINS)
    assert page.text() == answer["message"]["content"]
    looks = {
        origin: page.at(f".answer .token.{origin}").first.evaluate(
            "(token) => [getComputedStyle(token).backgroundColor,"
            " getComputedStyle(token).textDecorationStyle]"
        )
        for origin in ORIGINS
    }
    assert len({colour for colour, _ in looks.values()}) == 4
    assert len({underline for _, underline in looks.values()}) == 4
    for origin in ORIGINS:
        assert page.at(f".legend .token.{origin}").is_visible()
    page.picture("answer-light")


def test_an_answer_appears_while_it_is_made(open_page, serve):
    page = open_page(serve(letters_model(seconds=0.05))).set(length=0, most=60)
    page.send("hello", wait=False)
    page.expect(page.at(".answer .token").nth(3)).to_be_attached()
    assert page.at(".answer .token").count() < 50
    assert page.button("Stop").is_visible()
    page.expect(page.at("#rate")).to_have_text(re.compile(r"^\d+\.\d$"))
    page.says("Done: 60 tokens in")
    assert page.at(".answer .token").count() == 60


def test_pointing_at_a_step_shows_its_draft_and_what_was_cut(open_page, letters):
    page = open_page(letters).set(**MIXED)
    page.send("hello")
    step = page.at(".step").filter(has=page.at(".token.correction")).first
    step.hover()
    told = re.search(r"(\d+) drafted, (\d+) accepted, (\d+) cut", page.at("#summary").inner_text())
    assert told
    drafted, accepted, cut = map(int, told.groups())
    assert accepted == step.locator(".token.draft").count()
    assert page.at("#tree .token.draft").count() == accepted
    assert page.at("#tree s.token.cut").count() == cut == drafted - accepted > 0
    assert page.at("#tree .token.correction").inner_text() == step.locator(
        ".token.correction"
    ).evaluate("(token) => token.textContent").replace(" ", "␣").replace("\n", "↵")
    page.expect(page.at("#inspector")).to_be_in_viewport(ratio=0.99)  # wherever the panel was
    page.at("#key").scroll_into_view_if_needed()
    page.at(".step").filter(has=page.at(".token.correction")).nth(1).hover()
    page.expect(page.at("#inspector")).to_be_in_viewport(ratio=0.99)
    page.picture("draft-of-a-step")
    plain = page.at(".step").filter(has=page.at(".token.plain")).last
    plain.hover()
    page.expect(page.at("#summary")).to_contain_text("No draft")
    assert page.at("#tree .node").count() == 0


def test_the_panel_says_what_the_server_measured(open_page, letters):
    page = open_page(letters).set(**MIXED)
    page.send("hello")
    stats = answer_of(letters, page.asked[0])["foretell"]["stats"]
    assert page.at("#per-step").inner_text() == f"{stats['tokens_per_step']:.2f}"
    counts = stats["num_accepted_tokens_per_pos"]
    assert (
        page.at("#accepted")
        .inner_text()
        .startswith(f"{stats['num_accepted_tokens']} of {stats['num_draft_tokens']} tokens")
    )
    shares = [int(text.rstrip("%")) for text in page.at("#positions .share").all_inner_texts()]
    assert len(shares) == len(counts) > 1
    widths = page.at("#positions .fill").evaluate_all(
        "(fills) => fills.map((one) => 100 * one.offsetWidth / one.parentElement.offsetWidth)"
    )
    for share, width, count in zip(shares, widths, counts, strict=True):
        assert share == pytest.approx(100 * count / stats["num_drafts"], abs=0.51)
        assert width == pytest.approx(share, abs=2)
    page.expect(page.at("#plain-cost")).to_contain_text("tokens/s")
    page.expect(page.at("#ratio")).to_contain_text("times the speed of plain")


def test_settings_are_what_is_asked_for(open_page, letters):
    page = open_page(letters)
    page.set(length=16, temperature=0.5, most=7, seed=11)
    assert page.at("#length option").all_inner_texts()[:3] == [
        "automatic",
        "0: plain decoding",
        "at most 1",
    ]
    assert page.at("#length option").count() == 18
    page.tab.get_by_label("suffix").uncheck()
    page.send("hello")
    body = page.asked[0]
    assert body["foretell"] == {"num_draft_tokens": 16, "drafters": ["recycling"], "steps": True}
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0.5, 7, 11)
    page.tab.get_by_label("suffix").check()
    page.set(length="auto", seed="")
    page.send("again")
    assert page.asked[1]["foretell"] == {"num_draft_tokens": "auto", "steps": True}
    assert "seed" not in page.asked[1]
    assert [one["role"] for one in page.asked[1]["messages"]] == ["user", "assistant", "user"]
    assert page.asked[1]["messages"][1]["content"] == page.text(0)
    page.button("New chat").click()
    assert page.at(".answer").count() == 0
    for name in ("suffix", "recycling"):
        page.tab.get_by_label(name).uncheck()
    page.send("afresh")
    assert page.asked[2]["foretell"]["num_draft_tokens"] == 0
    assert [one["role"] for one in page.asked[2]["messages"]] == ["user"]


def test_compare_runs_both_ways_and_finds_them_equal(open_page, letters):
    page = open_page(letters).set(**{**MIXED, "seed": ""})
    page.compare("hello")
    quick, plain = page.asked
    assert quick["foretell"]["num_draft_tokens"] == 4
    assert plain["foretell"]["num_draft_tokens"] == 0
    assert quick["seed"] == plain["seed"] is not None
    assert quick["messages"] == plain["messages"]
    card = page.at(".comparison.equal")
    count = int(re.search(r"The same (\d+) tokens, every one", card.inner_text())[1])
    assert count == page.at(".answer .token").count() > 5
    speeds = re.findall(r"([\d.]+) tokens/s, (\d+) steps", card.inner_text())
    assert len(speeds) == 2
    assert int(speeds[1][1]) == count - 1  # the first token is of the prompt's pass
    assert int(speeds[0][1]) < count - 1
    ratio = float(re.search(r"([\d.]+) times the speed of plain", card.inner_text())[1])
    assert ratio == pytest.approx(float(speeds[0][0]) / float(speeds[1][0]), abs=0.02)
    page.picture("compare-light")
    page.at("#prompt").fill("")
    page.button("Compare").click()  # the last message again
    page.expect(page.at(".comparison.equal")).to_have_count(2)
    assert page.asked[2]["messages"] == quick["messages"]
    page.expect(page.at(".comparison").last).to_contain_text("was asked before")


def test_compare_tells_when_tokens_differ(open_page, serve):
    """A model that is wrong in passes of several rows: the page must not take equality as given."""
    page = open_page(serve(fake_engine(says="abcdefgh", faulty=True))).set(length=4, most=60)
    page.compare("abc", "Not the same: the answers differ from token")
    assert page.at(".comparison.unequal").is_visible()
    assert page.at(".answer").count() == 2
    at = int(re.search(r"from token (\d+)", page.at(".comparison h3").inner_text())[1]) - 1
    assert page.text(0)[:at] == page.text(1)[:at]
    assert page.text(0)[at] != page.text(1)[at]
    page.picture("compare-unequal")


def test_text_of_a_model_is_never_markup(open_page, serve):
    says = "<img src=qé>"  # é is two tokens, the first of them without text
    page = open_page(serve(fake_engine(says=says))).set(length=4, most=40)
    page.send('<b onclick="x">hi</b>')
    assert page.text() == (says * 4)[: len(page.text())]
    assert len(page.text()) > 30
    assert page.at("img").count() == page.at("#transcript b").count() == 0
    assert page.at(".asked").inner_text().endswith('<b onclick="x">hi</b>')
    page.at(".step").filter(has=page.at(".token.draft")).last.hover()
    assert page.at("#tree .node").count() > 1
    assert page.at("img").count() == 0


def test_stopping_keeps_what_there_is_and_frees_the_server(open_page, serve):
    server = serve(letters_model(seconds=0.05))
    page = open_page(server).set(most=2000, length=0)
    page.send("hello", wait=False)
    page.expect(page.at(".answer .token").nth(3)).to_be_attached()
    page.button("Stop").click()
    page.says("Stopped")
    server.wait_idle(5)
    count = page.at(".answer .token").count()
    assert 3 < count < 1000
    page.set(most=3)
    page.send("on")  # the conversation goes on with what there was
    assert page.asked[1]["messages"][1]["content"] == page.text(0)


# --- What goes wrong ----------------------------------------------------------------------------


def test_a_server_that_stops_is_told_of(open_page, process):
    page = open_page(address_of(process)).set(most=500, length=0)
    page.send("hello", wait=False)
    page.expect(page.at(".answer .token").nth(3)).to_be_attached()
    process.kill()
    page.problem("The connection ended in the middle of the answer")
    assert page.at(".answer .token").count() > 3
    page.expect(page.button("Send")).to_be_visible()
    page.at("#prompt").fill("still here")
    page.button("Send").click()
    page.problem("The server cannot be reached")
    page.problem("foretell serve")
    assert page.at("#prompt").input_value() == "still here"
    page.picture("server-stopped")


def test_a_request_that_cannot_be_carried_out(open_page, letters):
    page = open_page(letters).set(most=10**6)
    page.send("hello", wait=False)
    page.problem("ask for at most")
    page.problem("Change the message or the settings")
    assert page.at(".turn").count() == 0
    assert page.at("#prompt").input_value() == "hello"
    page.set(most=5)
    page.send("hello")
    assert page.at("#problems").inner_text() == ""


def test_a_key_is_asked_for_and_forgotten(open_page, serve):
    page = open_page(serve(api_keys=("open-sesame",)))
    page.problem("An API key is needed")
    page.expect(page.at("#key")).to_be_focused()
    page.at("#key").fill("wrong")
    page.at("#key").press("Tab")
    page.problem("not among them")
    page.at("#key").fill("open-sesame")
    page.at("#key").press("Tab")
    page.set(most=5).send("hello")
    kept = page.tab.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
    assert kept == [0, 0, ""]
    assert not any("open-sesame" in url for url in page.urls)
    page.tab.reload()
    page.problem("An API key is needed")
    assert page.at("#key").input_value() == ""


def test_a_full_queue(open_page, serve):
    server = serve(letters_model(seconds=0.05), max_running=1, max_queue=1)
    page = open_page(server).ready()

    def occupy() -> None:
        with contextlib.suppress(httpx2.HTTPError):
            server.post({"model": "table", "prompt": "a", "max_tokens": 400, "ignore_eos": True})

    def until(is_true: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not is_true():
            assert time.monotonic() < end
            time.sleep(0.01)

    scheduler = server.server.scheduler
    for number in ("num_running", "num_waiting"):  # the second only once the first is let in
        threading.Thread(target=occupy, daemon=True).start()
        until(lambda number=number: getattr(scheduler, number) == 1)
    page.send("hello", wait=False)
    page.problem("waiting already")
    page.expect(page.tab.get_by_role("alert")).to_contain_text(re.compile(r"Try again in \d+ s"))


# --- Everybody ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [320, 390, 800])
def test_small_screens_need_no_sideways_scrolling(open_page, serve, width):
    says = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"  # one long word
    page = open_page(
        serve(fake_engine(says=says)), viewport={"width": width, "height": 700}, has_touch=True
    ).set(length=8, most=300)
    assert page.overflow() <= 0
    page.send("x" * 200)
    assert page.overflow() <= 0
    assert not page.at("#inspector").is_visible()
    page.at(".step").filter(has=page.at(".token.draft")).nth(2).tap()
    page.expect(page.at("#inspector")).to_be_visible()
    page.expect(page.at("#inspector")).to_be_in_viewport(ratio=0.99)
    assert page.overflow() <= 0
    page.picture(f"phone-{width}-draft")
    page.button("Close the draft of this step").tap()
    assert not page.at("#inspector").is_visible()
    page.compare("y" * 200)
    assert page.overflow() <= 0
    page.picture(f"phone-{width}", full_page=True)


def test_everything_can_be_done_with_the_keyboard(open_page, serve):
    page = open_page(serve(letters_model(seconds=0.01))).set(**MIXED)
    tab, press = page.tab, page.tab.keyboard.press
    page.at("#model").click()
    press("Shift+Tab")  # the first of all
    page.expect(page.at(".skip")).to_be_focused()
    press("Enter")
    page.expect(page.at("#prompt")).to_be_focused()
    tab.keyboard.type("two")
    press("Shift+Enter")
    tab.keyboard.type("lines")
    press("Enter")
    page.says("Done")
    assert page.asked[0]["messages"][0]["content"] == "two\nlines"
    page.expect(page.at("#prompt")).to_be_focused()

    press("Shift+Tab")  # back to the answer: one stop, its first step
    page.expect(page.at(".step").first).to_be_focused()
    press("End")
    page.expect(page.at(".step").last).to_be_focused()
    press("Home")
    for number in range(1, 4):
        press("ArrowRight")
        page.expect(page.at(".step").nth(number)).to_be_focused()
        page.expect(page.at("#inspector-title")).to_have_text(f"Draft of step {number}")
    press("ArrowLeft")
    page.expect(page.at("#inspector-title")).to_have_text("Draft of step 2")
    outline = page.at(".step").nth(2).evaluate("(step) => getComputedStyle(step).outlineStyle")
    assert outline == "solid"
    page.picture("keyboard")

    press("Tab")
    page.expect(page.at("#prompt")).to_be_focused()
    for name in ("#send", "#compare", "#fresh"):
        press("Tab")
        page.expect(page.at(name)).to_be_focused()
    reached = set()
    for _ in range(20):
        press("Tab")
        reached.add(tab.evaluate("document.activeElement.id || document.activeElement.value"))
    assert {"length", "suffix", "recycling", "temperature", "most", "seed", "key"} <= reached

    page.set(most=3000)
    page.at("#prompt").focus()
    tab.keyboard.type("long")
    press("Enter")
    page.expect(page.at(".answer").last.locator(".token").nth(3)).to_be_attached()
    press("Escape")
    page.says("Stopped")
    page.expect(page.at("#prompt")).to_be_focused()


CONTRASTS = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (rgb) => [0.2126, 0.7152, 0.0722]
    .reduce((sum, share, at) => sum + share * linear(rgb[at]), 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    if (element.closest(".unseen, .skip, option, noscript, :disabled")) continue;
    const [one, other] = [light(numbers(getComputedStyle(element).color)), light(behind(element))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    found.push([ratio, walker.currentNode.textContent.trim().slice(0, 30)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_easy_to_read(open_page, letters, scheme):
    page = open_page(letters, color_scheme=scheme).set(**MIXED)
    page.compare("hello")
    page.at(".step").filter(has=page.at(".token.correction")).first.hover()
    page.at("#most").fill(str(10**6))
    page.send("too much", wait=False)
    page.problem("ask for at most")
    page.at("#most").fill("20")
    page.at(".step").filter(has=page.at(".token.correction")).first.hover()
    contrasts = page.tab.evaluate(CONTRASTS)
    assert len(contrasts) > 100
    assert [one for one in contrasts if one[0] < 4.5] == []
    ground = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", ground)[:3])) / 3
    assert (brightness > 200) if scheme == "light" else (brightness < 60)
    page.picture(f"everything-{scheme}")


def test_what_is_read_out(open_page, letters):
    """The line of what happens is polite, and an answer is read once, whole."""
    page = open_page(letters).set(most=20)
    assert page.at("#status").get_attribute("role") == "status"
    page.tab.evaluate(
        "() => { window.spoken = []; new MutationObserver(() =>"
        " window.spoken.push(document.getElementById('spoken').textContent))"
        ".observe(document.getElementById('spoken'), {childList: true}); }"
    )
    page.send("hello")
    assert page.at("#spoken").get_attribute("aria-live") == "polite"
    assert page.tab.evaluate("window.spoken")[0] == page.text()
    assert page.at("#status").get_attribute("aria-live") == "polite"
    step = page.at(".step").first
    assert step.get_attribute("role") == "button"
    assert step.get_attribute("aria-describedby") == "summary"
