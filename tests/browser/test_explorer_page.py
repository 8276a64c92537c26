"""The explorer in a real browser: type, run, switch, download, stop, hostile and long text, keyboard, a phone."""

import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'support-tokens[explore]'")

import uvicorn

from command import make_run
from margin_samples import HOSTILE
from support_tokens.analysis import MarginReport
from support_tokens.explorer import Explorer, Limits, ModelChoice, explorer_app, serve_explorer


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
        # The layers of the first model are known when the page can be used.
        watched.page.locator("#ask-depth", has_text="of 0 to 2").wait_for()
        return watched

    return visited


def type_and_run(page, text: str) -> None:
    page.fill("#ask-text", text)
    page.click("#ask-run")


def shown(page):
    """The page, as soon as it shows a result and its form can be used again."""
    page.wait_for_url("**/result/*")
    page.locator("html.ready.asks").wait_for()
    return page


def test_type_run_hover_and_switch_layer(visit, served) -> None:
    watched = visit()
    page = watched.page
    page.fill("#ask-layers", "0-1")
    type_and_run(page, "the cat sat")
    shown(page)
    assert page.locator("#tokens [role=option]").count() == 11
    page.locator("#t4").hover()
    assert "position 4" in page.locator("#details").inner_text()
    first = page.locator("#ranking").inner_text()
    page.locator("#next").click()
    assert page.locator("#layer").input_value() == "1"
    assert page.locator("#ranking").inner_text() != first
    assert page.locator("h1").inner_text() == "deep"
    assert [url for url in watched.requests if not url.startswith((served[0], "data:", "blob:"))] == []
    assert watched.complaints == []


def test_a_result_takes_the_place_of_the_one_before_and_keeps_what_was_chosen(visit) -> None:
    watched = visit()
    page = watched.page
    page.fill("#ask-layers", "0, 1")
    type_and_run(page, "the cat")
    shown(page)
    page.select_option("#layer", "1")
    page.select_option("#view", "block")
    before = page.url
    type_and_run(page, "the bat")
    page.wait_for_function("before => location.href !== before", arg=before)
    shown(page)
    assert page.locator("#ask-text").input_value() == "the bat"
    assert (page.locator("#layer").input_value(), page.locator("#view").input_value()) == ("1", "block")
    page.click("#ask-compare")
    page.locator("html.ready").wait_for()
    assert page.locator("#tokens .replaced").count() == 1
    assert watched.complaints == []


def test_json_and_page_are_downloaded(visit, tmp_path) -> None:
    page = visit().page
    type_and_run(page, "a cat")
    shown(page)
    for name in ("JSON", "page"):
        with page.expect_download() as waiting:
            page.get_by_text(f"Download {name}").click()
        waiting.value.save_as(tmp_path / name)
    record = MarginReport.from_json(tmp_path / "JSON")
    assert "".join(token.token for token in record.select().tokens) == "a cat"
    assert "Content-Security-Policy" in (tmp_path / "page").read_text(encoding="utf-8")


def test_another_model_has_its_own_layers(visit) -> None:
    page = visit().page
    page.fill("#ask-layers", "2")
    page.select_option("#ask-model", "<b>flat</b>")
    page.locator("#ask-depth", has_text="of 0 to 0").wait_for()
    assert page.input_value("#ask-layers") == "0"
    type_and_run(page, "the cat")
    shown(page)
    assert page.locator("h1").inner_text() == "<b>flat</b>"
    assert page.locator("#layer option").count() == 1


@pytest.mark.parametrize("text", HOSTILE[:8])
def test_hostile_text_never_acts(visit, text) -> None:
    watched = visit()
    dialogs = []
    watched.page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    type_and_run(watched.page, text + " end")
    shown(watched.page)
    assert watched.page.locator("img, iframe").count() == 0
    assert watched.page.title().startswith("deep")
    assert dialogs == []
    assert watched.complaints == []


@pytest.mark.parametrize(
    ("layers", "text", "said"),
    [
        ("0", " ", "There is no text"),
        ("0", "a" * 201, "201 tokens and at most 200"),
        ("7", "a", "Layers must be integers"),
        ("0-2", "a", "Choose 1 to 2 layers"),
        ("<b>", "a", "Layers must be integers"),
    ],
)
def test_errors_are_sentences(visit, layers, text, said) -> None:
    page = visit().page
    page.fill("#ask-layers", layers)
    type_and_run(page, text)
    problem = page.locator("#ask-status[role=alert]")
    problem.wait_for()
    assert said in problem.inner_text()
    assert page.locator("#tokens").count() == 0


def test_text_is_no_longer_than_allowed(visit) -> None:
    page = visit().page
    page.fill("#ask-text", "a" * 299)
    page.locator("#ask-text").press("End")
    page.keyboard.type("bcd")
    assert page.input_value("#ask-text") == "a" * 299 + "b"


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
    page.locator("#ask-status", has_text="0 of 7 tokens").wait_for()
    page.click("#ask-stop")
    page.get_by_text("Stopped; nothing of this text is shown.").wait_for()


def test_keyboard_alone_is_enough(visit) -> None:
    page = visit().page
    page.locator("#ask-text").focus()
    page.keyboard.press("Control+a")
    page.keyboard.type("cats")
    for _ in range(25):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "ask-run":
            break
    assert page.evaluate("document.activeElement.id") == "ask-run"
    page.keyboard.press("Enter")
    assert shown(page).locator("#tokens [role=option]").count() == 4


@pytest.mark.parametrize("width", [320, 390])
def test_phone(visit, width) -> None:
    page = visit(width).page
    assert page.evaluate("document.documentElement.scrollWidth") == width
    type_and_run(page, "the cat sat on the mat")
    shown(page)
    page.wait_for_function("document.getElementById('controls').getBoundingClientRect().top < innerHeight / 2")
    page.locator("#t3").tap()
    page.locator("#details", has_text="position 3").wait_for(timeout=10_000)
    assert page.evaluate("document.documentElement.scrollWidth") == width


def fetched(url: str, **options) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, **options), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_what_the_page_does_not_need_is_not_there(served) -> None:
    address = served[0]
    assert fetched(f"{address}/")[0] == 200
    for path in ("explorer.py", "docs", "openapi.json", "record/unknown.json", "result/unknown"):
        assert fetched(f"{address}/{path}")[0] == 404
    assert fetched(f"{address}/", headers={"Host": "evil.example"})[0] == 400


def test_a_port_in_use_is_named(served) -> None:
    port = int(served[0].rpartition(":")[2])
    with pytest.raises(ValueError, match=f"127.0.0.1:{port} cannot be listened on"):
        serve_explorer(served[1], port=port)
