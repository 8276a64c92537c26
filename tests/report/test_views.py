"""Views of margins: whole, inert, the same each time, and made from the record alone."""

import ast
import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from margin_samples import HOSTILE, layer_of, record_of, sample_record
from support_tokens.errors import ArgumentError
from support_tokens.report import band, band_css, limits_of
from support_tokens.report import tokens as views
from support_tokens.report.records import LayerMargins, MarginRecord, compare_records

PACKAGE = Path(views.__file__).parent


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text inside of each."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict]] = []
        self.inside: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_endtag(self, tag):
        if tag in self.inside:
            while self.inside.pop() != tag:
                pass

    def handle_data(self, data):
        self.text.setdefault(self.inside[-1] if self.inside else "", []).append(data)


def printed(renderable, **options) -> str:
    file = io.StringIO()
    Console(file=file, **{"width": 100, "color_system": None, "legacy_windows": False, **options}).print(
        renderable, highlight=False
    )
    return file.getvalue()


def pages():
    record = sample_record(model="</title><script>alert(1)</script>", name="<b>name</b>", notes=("<i>note</i>",))
    other = sample_record([*"The slow ", *HOSTILE], model='"><svg onload=alert(1)>')
    return {"margins": views.margins_html(record), "changes": views.changes_html(compare_records(record, other))}


@pytest.mark.parametrize("kind", ["margins", "changes"])
def test_page_has_no_element_but_its_own(kind) -> None:
    page = Elements(pages()[kind])
    tags = [tag for tag, _ in page.found]
    assert tags.count("script") == 2
    assert not {"img", "b", "i", "svg", "iframe", "object", "link", "base", "embed"} & set(tags)
    for tag, attributes in page.found:
        assert not [
            name for name in attributes if name.startswith("on") or name in ("src", "href", "style", "srcdoc")
        ], tag


@pytest.mark.parametrize("kind", ["margins", "changes"])
def test_policy_lets_only_the_pages_own_script_and_style_run(kind) -> None:
    text = pages()[kind]
    page = Elements(text)
    (policy,) = (a["content"] for tag, a in page.found if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
        checksum = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{checksum}'"
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


@pytest.mark.parametrize("kind", ["margins", "changes"])
def test_data_of_the_page_is_whole_and_cannot_end_its_element(kind) -> None:
    text = pages()[kind]
    (body,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert not set("<>&\u2028\u2029") & set(body)
    data = json.loads(body)
    rows = data["texts"][0]["rows"]
    assert any(row["s"] == HOSTILE[0] for row in rows)
    for panel in data["panels"]:
        assert {len(panel[name]) for name in ("sign", "ranked", "margin")} == {len(rows)}


def test_the_script_makes_no_markup_of_text() -> None:
    script = (PACKAGE / "page.js").read_text(encoding="utf-8")
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "fetch("):
        assert forbidden not in script


def test_page_is_the_same_each_time_and_from_json_alone() -> None:
    record = sample_record()
    again = MarginRecord.from_record(json.loads(json.dumps(record.record())))
    assert again == record
    assert views.margins_html(again) == views.margins_html(record)
    bare = {
        "schema_version": 1,
        "kind": "token_margins",
        "model": "m",
        "layers": [{"layer": 0, "view": "noise", "tokens": []}],
    }
    keys = {"position": 0, "id": 1, "token": "a", "sign": 1, "log_abs_det": 0.5, "sigma_min": 0.1, "valid": True}
    bare["layers"][0]["tokens"].append(keys)
    made = MarginRecord.from_record(bare)
    assert "<title>m" in views.margins_html(made)
    assert "a" in printed(views.margins_renderable(made))


def test_without_script_the_support_tokens_are_there() -> None:
    page = views.margins_html(sample_record(layers=(0,), views=("noise",)), k=2)
    (body,) = re.findall(r"<noscript>(.*?)</noscript>", page, flags=re.DOTALL)
    expected = sample_record().select().support_tokens(2)
    assert body.count("<tr><th><bdi>") == 2
    for token in expected:
        assert f"<td>{token.position}</td>" in body


def test_fragment_of_a_notebook_is_inert_and_runs_no_script() -> None:
    fragment = views.margins_fragment(sample_record(model="<script>", notes=("<i>note</i>",)))
    page = Elements(fragment)
    assert {tag for tag, _ in page.found} <= {
        "div", "p", "b", "details", "summary", "span", "sup", "table", "thead", "tbody", "tr", "th", "td", "bdi"
    }  # fmt: skip
    for _, attributes in page.found:
        assert set(attributes) <= {"style", "title", "dir", "open"}
    assert HOSTILE[0] in "".join(page.text["span"])
    assert [a for tag, a in page.found if tag == "details" and "open" in a] == [{"open": None}]


def test_fragment_says_what_it_leaves_out() -> None:
    many = record_of(*(layer_of("ab", layer=layer) for layer in range(30)))
    assert "6 more panels: to_html writes them all." in views.margins_fragment(many)
    long = record_of(layer_of("ab" * 1500))
    assert "1000 more tokens: to_html writes them all." in views.margins_fragment(long)


def test_terminal_shows_text_as_it_is_and_never_acts_on_it() -> None:
    said = printed(views.margins_renderable(sample_record(layers=(0,), views=("noise",))))
    assert "[bold]markup[/bold]" in said
    assert "\x1b" not in said
    assert "␛" in said
    assert "[U+202E]" in said
    for token in sample_record().select().support_tokens(1):
        assert re.search(r"\[[^\n]*\]¹", said), token


def test_terminal_colours_by_margin() -> None:
    said = printed(
        views.margins_renderable(sample_record("abc", layers=(0,))), color_system="truecolor", force_terminal=True
    )
    assert "\x1b[" in said
    assert printed(views.margins_renderable(sample_record("abc", layers=(0,)))).count("¹") == 4


def test_terminal_shows_changes() -> None:
    changes = compare_records(record_of(layer_of("abcdef")), record_of(layer_of("abXdef", shift=1.0)), k=1)
    said = printed(views.changes_renderable(changes))
    assert "From before to after, 1 support tokens" in said
    assert "mean change +1.000 nats over 6 tokens" in said
    assert "the same" in said


def test_figures_are_pictures_and_the_same_each_time() -> None:
    record = sample_record()
    png = views.margins_png(record, layer=1, view="block", dpi=50)
    assert png.startswith(b"\x89PNG")
    assert png == views.margins_png(record, layer=1, view="block", dpi=50)
    assert png != views.margins_png(record, layer=2, view="block", dpi=50)
    svg = views.margins_svg(record)
    assert svg == views.margins_svg(record)
    page = Elements(svg)
    assert not {"script", "foreignobject", "text", "a"} & {tag for tag, _ in page.found}
    assert all(a["xlink:href"].startswith("data:image/png;") for tag, a in page.found if tag == "image")
    with pytest.raises(ArgumentError, match="no margins of layer 9"):
        views.margins_png(record, layer=9)


def test_a_record_with_one_token_or_equal_margins_has_all_views() -> None:
    for record in (record_of(layer_of("a")), record_of(layer_of("ab")), sample_record("aaaaaaaaaaaa", layers=(0,))):
        assert views.margins_html(record)
        assert views.margins_fragment(record)
        assert printed(views.margins_renderable(record))
        assert views.margins_png(record, dpi=30)


def test_bands_follow_the_margin() -> None:
    limits = limits_of(range(101))
    assert limits == (98.0, 2.0)
    assert [band(value, limits) for value in (200, 98, 50, 2, -5)] == [0, 0, 3, 6, 6]
    assert limits_of([]) == (0.0, 0.0)


def test_bands_differ_in_lightness_on_light_and_dark_paper() -> None:
    alphas = [float(a) for a in re.findall(r"\.m\d\{background:rgba\(var\(--weak\),([.\d]+)\)", band_css())]
    assert len(alphas) == 7
    for paper, weak, ink in (((255,) * 3, (213, 94, 0), (27, 31, 36)), ((20, 23, 27), (226, 104, 20), (233, 236, 239))):
        mixed = [tuple(a * w + (1 - a) * p for w, p in zip(weak, paper, strict=True)) for a in alphas]
        steps = [contrast(one, other) for one, other in pairwise(mixed)]
        assert min(steps) > 1.08, "neighbouring steps must be told apart by lightness alone"
        assert min(contrast(ink, colour) for colour in mixed) > 4.5, "text must be readable on every step"


def contrast(one, other) -> float:
    def light(colour):
        parts = [c / 255 for c in colour]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_views_know_no_model() -> None:
    names = set()
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
    assert not names & {"torch", "transformers", "tokenizers"}


def test_the_sparkline_is_low_where_the_margin_is_low() -> None:
    entries = (LayerMargins.of_columns("abc", [0.0, 1.0, 2.0], [1, 1, 1], layer=layer) for layer in (0, 1))
    said = printed(views.margins_renderable(MarginRecord("m", tuple(entries))), width=120)
    assert said.count("▁▄▇") == 2
