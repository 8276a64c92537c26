"""The explorer in a real browser: type, run, switch, download, stop, hostile and long text, keyboard, a phone."""

import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("gradio", reason="gradio is not installed: pip install 'support-tokens[explore]'")

import uvicorn

from command import make_run
from margin_samples import HOSTILE
from support_tokens.explorer import Explorer, Limits, ModelChoice, explorer_app, serve_explorer
from support_tokens.report.records import MarginRecord


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The address of an explorer with two models, and the explorer."""
    runs = tmp_path_factory.mktemp("runs")
    sources = [ModelChoice(name, str(make_run(runs / name, layers=n))) for name, n in (("deep", 3), ("<b>flat</b>", 1))]
    explorer = Explorer(sources, Limits(characters=300, tokens=200, layers=2, per_minute=1000))
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(explorer_app(explorer), log_level="warning", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}", explorer
    server.should_exit = True
    thread.join(20)
    listening.close()


@pytest.fixture
def visit(watch, served):
    def visited(width: int = 1280, **options):
        watched = watch(width, **options)
        watched.page.goto(served[0])
        watched.page.wait_for_selector("#ask-run")
        # The layers of the first model are there when the page can be used.
        watched.page.locator("#ask-layers").get_by_text("0", exact=True).first.wait_for()
        return watched

    return visited


def type_and_run(page, text: str) -> None:
    page.fill("#ask-text textarea", text)
    page.click("#ask-run")


def views_of(page):
    """The page of the record inside of the explorer's."""
    page.wait_for_selector("#result iframe")
    frame = page.frame_locator("#result iframe")
    frame.locator("html.ready").wait_for()
    return frame


def test_type_run_hover_and_switch_layer(visit, served) -> None:
    watched = visit()
    page = watched.page
    type_and_run(page, "the cat sat")
    frame = views_of(page)
    assert frame.locator("#tokens [role=option]").count() == 11
    frame.locator("#t4").hover()
    assert "position 4" in frame.locator("#details").inner_text()
    first = frame.locator("#ranking").inner_text()
    frame.locator("#next").click()
    assert frame.locator("#layer").input_value() == "1"
    assert frame.locator("#ranking").inner_text() != first
    assert "11 tokens of deep" in page.locator("#status").inner_text()
    assert [url for url in watched.requests if not url.startswith((served[0], "data:", "blob:"))] == []
    assert watched.complaints == []


def test_json_and_page_are_downloaded(visit, tmp_path) -> None:
    page = visit().page
    type_and_run(page, "a cat")
    views_of(page)
    for name in ("JSON", "page"):
        with page.expect_download() as waiting:
            page.get_by_text(f"Download {name}").click()
        waiting.value.save_as(tmp_path / name)
    record = MarginRecord.from_json(tmp_path / "JSON")
    assert "".join(token.token for token in record.select().tokens) == "a cat"
    assert "Content-Security-Policy" in (tmp_path / "page").read_text(encoding="utf-8")


def test_another_model_has_its_own_layers(visit) -> None:
    page = visit().page
    page.click("#ask-model input")
    page.get_by_role("option", name="<b>flat</b>").click()
    page.wait_for_function("document.querySelectorAll('#ask-layers .token').length === 1")
    type_and_run(page, "the cat")
    frame = views_of(page)
    assert frame.locator("h1").inner_text() == "<b>flat</b>"
    assert frame.locator("#layer option").count() == 1


def test_layers_of_the_model_before_are_refused_in_a_sentence(visit, served) -> None:
    page = visit().page
    with served[1]._working:  # the layers of the other model stay unknown until both questions are asked
        page.click("#ask-model input")
        page.get_by_role("option", name="<b>flat</b>").click()
        type_and_run(page, "the cat")
        page.wait_for_timeout(500)
    page.locator("#status [role=alert]").get_by_text("Layers must be integers").wait_for()
    page.wait_for_function("document.querySelectorAll('#ask-layers .token').length === 1")
    page.click("#ask-run")
    assert views_of(page).locator("#layer option").count() == 1


@pytest.mark.parametrize("text", HOSTILE[:8])
def test_hostile_text_never_acts(visit, text) -> None:
    watched = visit()
    dialogs = []
    watched.page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    type_and_run(watched.page, text + " end")
    frame = views_of(watched.page)
    assert frame.locator("img, iframe").count() == 0
    assert watched.page.title() == "Support tokens"
    assert dialogs == []
    assert watched.complaints == []


@pytest.mark.parametrize(("text", "said"), [(" ", "There is no text"), ("a" * 201, "201 tokens and at most 200")])
def test_errors_are_sentences(visit, text, said) -> None:
    page = visit().page
    type_and_run(page, text)
    problem = page.locator("#status [role=alert]")
    problem.wait_for()
    assert said in problem.inner_text()
    assert page.locator("#result iframe").count() == 0


def test_text_is_no_longer_than_allowed(visit) -> None:
    page = visit().page
    page.locator("#ask-text textarea").press_sequentially("")
    page.fill("#ask-text textarea", "a" * 299)
    page.locator("#ask-text textarea").press("End")
    page.keyboard.type("bcd")
    assert page.input_value("#ask-text textarea") == "a" * 299 + "b"


def test_stop_ends_an_analysis(visit, served, monkeypatch) -> None:
    from support_tokens.analysis import texts

    measure = texts.measure_windows

    def slow(*arguments):
        for _ in range(300):
            time.sleep(0.1)
            arguments[-1](0.0)
        return measure(*arguments)

    monkeypatch.setattr(texts, "measure_windows", slow)
    page = visit().page
    type_and_run(page, "the cat")
    deadline = time.monotonic() + 20
    while not served[1]._stops and time.monotonic() < deadline:
        page.wait_for_timeout(100)
    page.click("#ask-stop")
    page.get_by_text("Stopped; nothing of this text is shown.").wait_for()


def test_keyboard_alone_is_enough(visit) -> None:
    page = visit().page
    page.locator("#ask-text textarea").focus()
    page.keyboard.press("Control+a")
    page.keyboard.type("cats")
    for _ in range(25):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "ask-run":
            break
    assert page.evaluate("document.activeElement.id") == "ask-run"
    page.keyboard.press("Enter")
    frame = views_of(page)
    assert frame.locator("#tokens [role=option]").count() == 4


def test_phone(visit) -> None:
    page = visit(390).page
    type_and_run(page, "the cat sat on the mat")
    frame = views_of(page)
    page.locator("#result iframe").evaluate("frame => frame.scrollIntoView()")
    frame.locator("#t3").tap()
    frame.locator("#details", has_text="position 3").wait_for(timeout=10_000)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert frame.locator("html").evaluate("node => node.scrollWidth <= node.clientWidth")


def fetched(url: str, **options) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, **options), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_what_the_page_does_not_need_is_not_there(served) -> None:
    address = served[0]
    assert fetched(f"{address}/")[0] == 200
    for path in (
        "gradio_api/file=pyproject.toml",
        "gradio_api/file=/etc/hostname",
        "docs",
        "openapi.json",
        "monitoring",
    ):
        assert fetched(f"{address}/{path}")[0] == 404
    assert fetched(f"{address}/record/unknown.json")[0] == 404
    assert fetched(f"{address}/gradio_api/upload", data=b"x", method="POST")[0] == 404
    assert fetched(f"{address}/", headers={"Host": "evil.example"})[0] == 421


def test_a_port_in_use_is_named(served) -> None:
    port = int(served[0].rpartition(":")[2])
    with pytest.raises(ValueError, match=f"127.0.0.1:{port} cannot be listened on"):
        serve_explorer(served[1], port=port)
