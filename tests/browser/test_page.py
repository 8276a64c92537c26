"""The page of a record in a real browser: by mouse, by touch and by keyboard, wide and narrow, and inert."""

import re

import pytest

from margin_samples import HOSTILE, layer_of, record_of, sample_record
from support_tokens.report import number
from support_tokens.report import tokens as views
from support_tokens.report.records import compare_records
from support_tokens.report.tokens import in_text


@pytest.fixture
def show(watch, tmp_path):
    """Opens a page that was written to a file."""

    def shown(html: str, width: int = 1280, **options):
        path = tmp_path / "page.html"
        path.write_text(html, encoding="utf-8")
        watched = watch(width, **options)
        watched.page.goto(path.as_uri())
        watched.page.wait_for_selector("html.ready")
        return watched

    return shown


def details(page) -> str:
    return page.locator("#details").inner_text()


def test_hover_tells_the_figures_of_a_token(show) -> None:
    record = sample_record()
    page = show(views.margins_html(record)).page
    token = record.select().tokens[8]
    page.locator("#t8").hover()
    said = details(page)
    assert number(token.log_abs_det, 4) in said
    assert number(token.sigma_min, 4) in said
    assert "negative" in said
    assert "position 8" in said
    assert "diagnostic, not a sum" in said
    assert page.locator("#details svg rect").count() == 2


def test_layer_view_and_colour_are_switched(show) -> None:
    record = sample_record()
    page = show(views.margins_html(record)).page
    for layer in (0, 1, 2):
        for view in ("noise", "block"):
            page.select_option("#layer", str(layer))
            page.select_option("#view", view)
            first = record.select(layer, view).support_tokens(1)[0]
            row = page.locator("#ranking tbody tr").first.inner_text()
            assert number(first.log_abs_det) in row
            assert page.locator(f"#t{first.position}").get_attribute("class").count("support")
    page.select_option("#quantity", "surprise")
    assert page.locator("#t1").get_attribute("class") != page.locator("#t4").get_attribute("class")
    page.locator("#previous").click()
    assert page.input_value("#layer") == "1"


def test_more_support_tokens_can_be_marked(show) -> None:
    page = show(views.margins_html(sample_record(), k=3)).page
    assert page.locator("#ranking tbody tr").count() == 3
    page.fill("#k", "7")
    page.locator("#k").press("Enter")
    assert page.locator("#tokens .support").count() == 7
    page.fill("#k", "0")
    page.locator("#k").blur()
    assert page.locator("#tokens .support").count() == 1


def test_texts_are_switched(show) -> None:
    record = record_of(layer_of("abc"), layer_of("wxyz", text=1))
    page = show(views.margins_html(record)).page
    assert page.locator("#tokens [role=option]").count() == 3
    page.select_option("#text", "1")
    assert page.locator("#tokens [role=option]").count() == 4
    assert page.locator("#t3").inner_text().startswith("z")


def test_keyboard_reaches_and_moves_through_everything(show) -> None:
    page = show(views.margins_html(sample_record())).page
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"layer", "next", "view", "quantity", "k"} <= set(reached)
    assert any(re.fullmatch(r"t\d+", name) for name in reached), reached
    page.locator("#t3").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "t4"
    assert "position 4" in details(page)
    page.keyboard.press("End")
    last = len(sample_record().select().tokens) - 1
    assert page.evaluate("document.activeElement.id") == f"t{last}"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.id") == "t0"
    page.locator("#ranking button").first.press("Enter")
    assert page.evaluate("document.activeElement.id").startswith("t")


def test_plots_answer_to_the_mouse(show) -> None:
    page = show(views.margins_html(sample_record())).page
    box = page.locator("#along svg").bounding_box()
    page.locator("#along svg").hover(position={"x": box["width"] - 16, "y": 60})
    last = len(sample_record().select().tokens) - 1
    assert f"position {last}" in details(page)
    page.locator("#map canvas").click(position={"x": 52, "y": 40})
    assert page.input_value("#layer") == "1"
    assert "position 0" in details(page)


def test_hostile_text_is_shown_and_never_acts(show) -> None:
    record = sample_record(model="<img src=x onerror=alert(1)>", name="</title><script>document.title=1</script>")
    watched = show(views.margins_html(record))
    page = watched.page
    dialogs = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    for i, token in enumerate(record.select().tokens):
        shown = page.locator(f"#t{i}").evaluate("node => node.firstChild.textContent")
        assert shown == in_text(token)
        page.locator(f"#t{i}").click()
    assert HOSTILE[0] in page.locator("#tokens").inner_text()
    assert page.locator("img, iframe, #tokens script").count() == 0
    assert page.title().startswith("<img src=x")
    assert dialogs == []
    assert watched.complaints == []
    assert [url for url in watched.requests if not url.startswith("file:")] == []


def test_the_policy_stops_what_is_not_the_pages_own(show) -> None:
    html = views.margins_html(sample_record("abc")).replace("</main>", "<script>document.title='owned'</script></main>")
    watched = show(html)
    assert watched.page.title().startswith("tiny")
    assert any("Content Security Policy" in said for said in watched.complaints)


@pytest.mark.parametrize("dark", [False, True])
def test_narrow_screen_does_not_scroll_sideways_and_answers_to_touch(show, dark) -> None:
    page = show(views.margins_html(sample_record()), 390, dark=dark).page
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.locator("#t8").tap()
    assert "position 8" in details(page)
    box = page.locator("#details").bounding_box()
    assert box["y"] + box["height"] == pytest.approx(844, abs=1)
    assert box["height"] < 844 / 2
    page.locator("#details .close").tap()
    assert "Point at a token" in details(page)


def test_long_text_stays_quick_to_use(show) -> None:
    record = record_of(*(layer_of("word " * 1200, layer=layer) for layer in range(4)))
    watched = show(views.margins_html(record))
    page = watched.page
    assert page.locator("#tokens [role=option]").count() == 6000
    page.locator("#next").click()
    assert page.input_value("#layer") == "1"
    page.locator("#t5999").evaluate("node => node.focus()")
    assert "position 5999" in details(page)
    assert watched.complaints == []


def test_right_to_left_text_keeps_its_order(show) -> None:
    page = show(views.margins_html(record_of(layer_of(["مرحبا", " ", "بالعالم"])))).page
    first, last = (page.locator(f"#t{i}").bounding_box()["x"] for i in (0, 2))
    assert first > last


def test_lines_end_where_the_text_ends_them(show) -> None:
    page = show(views.margins_html(record_of(layer_of(["one", "\n", "two", "\n\n", "three"])))).page
    tops = [page.locator(f"#t{i}").bounding_box()["y"] for i in (0, 2, 4)]
    assert tops[0] < tops[1] < tops[2]
    assert tops[2] - tops[1] == pytest.approx(2 * (tops[1] - tops[0]), rel=0.05)


def test_comparison_shows_what_became_and_ceased(show) -> None:
    before = record_of(layer_of(["the", " cat", " sat"]), layer_of(["the", " cat", " sat"], layer=1), model="clean")
    other = ["the", " dog", " sat", " <b>"]
    after = record_of(layer_of(other, shift=2.0), layer_of(other, layer=1), model="</script><script>alert(1)")
    watched = show(views.changes_html(compare_records(before, after, k=1)))
    page = watched.page
    assert page.locator(".replaced").count() >= 1
    assert page.locator("#tokens .inserted").inner_text().strip().startswith("<b>")
    page.locator("#t1").hover()
    assert "was ␣cat" in details(page)
    assert "+2.0000" in details(page)
    page.locator("#next").click()
    assert "Now a support token" in page.locator("#ranking").inner_text()
    assert watched.complaints == []
    narrow = show(views.changes_html(compare_records(before, after, k=1)), 390)
    assert narrow.page.evaluate("document.documentElement.scrollWidth") == 390


def test_without_script_the_ranking_can_be_read(show, watch, tmp_path) -> None:
    path = tmp_path / "page.html"
    path.write_text(views.margins_html(sample_record("abcdef")), encoding="utf-8")
    page = watch(java_script_enabled=False).page
    page.goto(path.as_uri())
    assert page.locator("noscript table").count() == 6
    assert page.locator("#controls").is_hidden()
