"""Reports: a verdict that follows from the figures, and pages that stay whole whatever names they are given."""

import dataclasses
import html.parser
import io
import json
import re
import warnings
from pathlib import Path

import matplotlib.image
import pytest
from rich.console import Console

from support_tokens.errors import RunFolderError
from support_tokens.report import visible
from support_tokens.report.records import Estimate, RobustnessReport
from support_tokens.report.robustness import (
    caveat,
    conditions,
    degradation_png,
    headline,
    leaders,
    print_report,
    render_html,
    render_text,
    sentence_texts,
    verdict,
)
from support_tokens.robustness.perturbations import PerturbationSet, standard_perturbations
from synthetic_reports import ABSOLUTE, CE, HOSTILE, MATCHED, synthetic

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def finding(report: RobustnessReport, topic: str, arm: str = "other"):
    return next(f for f in verdict(report).findings if (f.topic, f.arm) == (topic, arm))


@pytest.mark.parametrize(
    ("clean", "tone", "says"),
    [
        (2.05, "worse", "clean BPC is higher than the baseline’s"),
        (1.95, "better", "clean BPC is lower than the baseline’s"),
        (2.0, "open", "no clear difference in clean BPC"),
    ],
)
def test_clean_cost_follows_from_the_paired_difference(clean, tone, says):
    report = finding(synthetic(ce=CE, other=(clean, 2.0, 2.0, 1.0)), "Clean text")
    assert report.tone == tone and says in report.text
    assert re.match(r"[+−]?\d\.\d\s%; difference [+−]?\d\.\d{3}, 95\s% interval", report.figures)


@pytest.mark.parametrize("family", [ABSOLUTE, MATCHED])
@pytest.mark.parametrize(
    ("slope", "clean", "tone", "says"),
    [
        (1.0, 2.0, "better", "has lower BPC than the baseline under {}, and degrades less."),
        (3.0, 2.0, "worse", "has higher BPC than the baseline under {}, and degrades more."),
        (2.0, 2.0, "open", "no clear difference in BPC under {}."),
        # Fewer bits under noise are better, even where the ratio rises because clean bits fell more.
        (
            2.0,
            1.5,
            "better",
            "has lower BPC than the baseline under {}; its higher ratio to clean follows from",
        ),
        (
            2.0,
            2.5,
            "worse",
            "has higher BPC than the baseline under {}; its lower ratio to clean follows from",
        ),
    ],
)
def test_bits_lead_and_a_ratio_alone_is_no_loss_and_no_gain(family, slope, clean, tone, says):
    slopes = (slope, 2.0) if family == ABSOLUTE else (2.0, slope)
    name = "absolute noise" if family == ABSOLUTE else "scale-matched noise"
    found = finding(synthetic(ce=CE, other=(clean, *slopes, 1.0)), f"Under {name}")
    assert found.tone == tone and says.format(name) in found.text


def test_equal_bits_under_noise_are_open_whatever_the_ratio():
    # Mean bits over 0 ... 1 are clean + slope / 2: 1.8 + 2.4 / 2 = 2 + 2 / 2, while the ratio rises.
    found = finding(synthetic(ce=CE, other=(1.8, 2.4, 2.0, 1.0)), "Under absolute noise")
    assert found.tone == "open" and "its ratio to clean is higher, which alone is no loss" in found.text


@pytest.mark.parametrize(
    ("arm", "says"),
    [
        ((2.0, 1.0, 2.0, 3.0), "its gain under absolute noise may be one of scale, not of robustness"),
        ((2.0, 1.0, 3.0, 3.0), "its gain under absolute noise may be one of scale, not of robustness"),
        ((2.0, 1.0, 1.0, 3.0), "gains under scale-matched noise too"),
        ((2.0, 2.0, 2.0, 3.0), "embeddings grew."),
        ((2.0, 2.0, 2.0, 1.05), "embeddings keep their size"),
        ((2.0, 2.0, 2.0, 0.5), "embeddings shrank"),
    ],
)
def test_growth_of_embeddings_is_told_from_robustness(arm, says):
    found = finding(synthetic(ce=CE, other=arm), "Size of the embeddings")
    assert found.tone == "note" and says in found.text


def test_growth_without_scale_matched_noise_stays_open():
    absolute = PerturbationSet(tuple(p for p in standard_perturbations().items if p.family != MATCHED))
    found = finding(synthetic(perturbations=absolute, ce=CE, other=(2.0, 1.0, 0.0, 3.0)), "Size of the embeddings")
    assert "scale-matched noise was not tried" in found.text


@pytest.mark.parametrize(
    ("seeds", "front", "says"),
    [
        (
            1,
            "One seed, so no claim about training: here, use OTHER for absolute noise",
            "One seed: the intervals cover the choice of sequences only",
        ),
        (3, "Tentative: use OTHER for absolute noise", "3 seeds: tentative"),
        (5, "Use OTHER for absolute noise", "5 seeds. The intervals cover sequences and seeds."),
    ],
)
def test_seeds_set_what_may_be_claimed_of_training(seeds, front, says):
    report = synthetic(seeds=seeds, ce=CE, other=(2.0, 1.0, 1.0, 1.0))
    report = dataclasses.replace(report, config={"plan": {}})
    assert headline(report).startswith(front) and says in caveat(report)


def test_models_that_were_not_trained_here_have_no_seeds_of_training():
    report = synthetic(ce=CE, other=(2.0, 1.0, 1.0, 1.0))
    assert "seed" not in headline(report) + caveat(report) + report.status
    text = "".join(Reader(render_html(report)).text).split("Verdict", 1)[1].rsplit("How this was made", 1)[0]
    assert "seed" not in text and not re.search(r"\barms?\b", text)
    assert headline(report) == "Use OTHER for absolute noise and scale-matched noise; no clear difference elsewhere."


def test_few_sequences_mark_nothing_as_significant():
    report = synthetic(sequences=19, ce=CE, other=(2.5, 1.0, 3.0, 1.0))
    assert report.difference("other", "clean").bits.excludes(0)
    assert {f.tone for f in verdict(report).findings} <= {"open", "note"}
    assert headline(report) == "No claim: 19 sequences are too few."
    assert caveat(report).startswith("Only 19 sequences")
    page, text = render_html(report), render_text(report)
    assert "▼</span><span" not in page and "▲</span><span" not in page
    assert "✓" not in text and "✗" not in text
    enough = synthetic(sequences=20, ce=CE, other=(2.5, 1.0, 3.0, 1.0))
    assert finding(enough, "Clean text").tone == "worse"


def test_headline_names_leaders_and_ties():
    report = synthetic(ce=CE, a=(2.0, 1.0, 2.0, 1.0), b=(2.0, 1.5, 1.0, 1.0))
    assert headline(report) == "Use A for absolute noise; B for scale-matched noise; no clear difference elsewhere."
    tied = synthetic(ce=CE, a=(2.0, 1.0, 1.0, 1.0), b=(2.0, 1.0, 1.0, 1.0))
    assert set(leaders(tied, conditions(tied)[0])) == {"a", "b"}
    assert headline(tied) == "No model is clearly ahead under any condition."
    assert headline(synthetic(ce=CE, a=(2.5, 3.0, 3.0, 1.0))) == "Use CE for everything."
    assert headline(synthetic(ce=CE)) == "One model: nothing is compared."


def test_settings_without_a_curve_are_conditions_of_their_own():
    report = RobustnessReport.from_json(EXPERIMENTS / "lab" / "quick" / "report.json")
    assert [c.name for c in conditions(report)] == [
        "absolute noise", "scale-matched noise", "typos", "weights in 8 bits", "weights in 4 bits"
    ]  # fmt: skip
    page = render_html(report)
    assert page.count("mean of the curve") == 3 and render_text(report).count("mean of curve") == 3


def test_differences_too_small_to_matter_are_not_named():
    report = synthetic(spread=1e-5, ce=CE, other=(2.001, 1.996, 1.996, 1.0))
    assert report.difference("other", "clean").bits.excludes(0)
    assert {f.tone for f in verdict(report).findings} <= {"open", "note"}
    assert "clearly ahead" in headline(report)
    assert "0.1\u00a0%" in render_html(report) and "0.005 of a ratio" in render_html(report)


def test_no_interval_no_claim():
    report = synthetic(ce=CE, other=(2.5, 1.0, 2.0, 3.0))
    bare = {
        field: tuple(
            dataclasses.replace(d, bits=Estimate(d.bits.value), degradation=Estimate(d.degradation.value))
            for d in getattr(report, field)
        )
        for field in ("differences", "area_differences")
    }
    blind = dataclasses.replace(report, **bare)
    assert {f.tone for f in verdict(blind).findings} <= {"open", "note"}
    assert "clearly ahead" in headline(blind) and "no interval" in finding(blind, "Clean text").figures


def test_bits_per_token_are_called_so():
    report = synthetic(characters=None, ce=CE, other=(2.5, 2.0, 2.0, 1.0))
    assert "bits per token" in finding(report, "Clean text").text
    assert "BPC" not in render_html(report)


def test_pictures_point_the_right_way():
    report = synthetic(ce=CE, other=(2.0, 1.0, 3.0, 1.0))
    page = render_html(report)
    rows = dict(re.findall(r'<tr><th scope="row">([^<]+)</th><td class="(\w+)"', page))
    assert rows == {"Clean text": "open", "Absolute noise": "better", "Scale-matched noise": "worse"}
    # Bits per character by hand: 2 + 1 * 0.5 and 2 + 3 * 0.5, beside 2 + 2 * 0.5 of the baseline.
    lower, higher = (report.result("other", p).bits.value for p in ("noise 0.5", "noise 0.5 x RMS"))
    assert lower == pytest.approx(2.5, abs=0.02) and higher == pytest.approx(3.5, abs=0.02)
    for bits, arrow in ((lower, "▼"), (higher, "▲")):
        assert re.search(rf"<b>{bits:.3f}</b>\s*<span class=\"mark \w+\"[^>]*><span aria-hidden=\"true\">{arrow}", page)
        assert f"{bits:.3f} {arrow}" in render_text(report, width=200)


@pytest.fixture(scope="module")
def hostile() -> RobustnessReport:
    tokens = [HOSTILE, "\n", "", " ", "<b>", "\u2028", "\ud800", "&amp;", "a"]
    labels = {"ce": HOSTILE, "a": "_under $x$", "b": "שלום"}
    return synthetic(labels=labels, tokens=tokens, ce=CE, a=(2.1, 1.0, 2.0, 2.0), b=(2.0, 2.0, 1.0, 1.0))


class Reader(html.parser.HTMLParser):
    """Collects elements, attributes, ids and text, and holds that elements are closed in order."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_one_file_without_script_or_network(hostile):
    page = render_html(hostile)
    page.encode("utf-8")
    reader = Reader(page)
    names = {tag for tag, _ in reader.tags}
    assert not names & {"script", "link", "iframe", "img", "object", "embed", "form", "base"}
    policy = next(a["content"] for t, a in reader.tags if t == "meta" and a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    for _, attributes in reader.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name, value in attributes.items():
            if name in ("href", "src", "xlink:href"):
                assert value.startswith("#")
    assert not re.search(r"@import|url\((?!#)", page)
    assert set(re.findall(r"https?://[\w./]+", page)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_ids_are_unique_and_references_lead_to_them(hostile):
    page = render_html(hostile)
    reader = Reader(page)
    ids = [a["id"] for _, a in reader.tags if "id" in a]
    assert len(ids) == len(set(ids))
    wanted = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)
    wanted += [
        (i, "") for _, a in reader.tags for k in ("aria-labelledby", "aria-describedby") for i in a.get(k, "").split()
    ]
    assert {one or other for one, other in wanted} <= set(ids)


def test_names_and_tokens_are_text(hostile):
    page = render_html(hostile)
    shown = "".join(Reader(page).text)
    assert visible(HOSTILE) in shown and "<script>alert('x')</script>" in shown
    assert "<script" not in page and "<b><bdi>" in page
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u2028\x1b\ud800-\udfff]", page)
    assert "↵" in shown and "∅" in shown and "[U+D800]" in shown and "&amp;amp;" in page


def test_page_holds_its_parts_in_order(hostile):
    reader = Reader(render_html(hostile))
    text = "".join(reader.text)
    heads = ["Verdict", "Figures", "Degradation", "Log margins", "Along a held-out text", "How this was made"]
    places = [re.search(rf"\n{head}\n", text).start() for head in heads]
    assert places == sorted(places)
    assert sum(tag == "svg" and a.get("class") == "plot" for tag, a in reader.tags) == 2 + 3 + 1
    assert all(a.get("aria-label") for tag, a in reader.tags if tag == "svg" and a.get("role") == "img")
    assert all("scope" in a for tag, a in reader.tags if tag == "th")
    assert "corpus.name" in text and "runs[0].steps" in text and hostile.perturbation_checksum in text
    for result in hostile.results:
        assert f"{result.bits.value:.3f}" in text


def test_page_is_made_of_the_json_alone_and_always_the_same(hostile):
    record = json.loads(json.dumps(hostile.record()))
    assert render_html(record) == render_html(hostile)
    assert render_text(record) == render_text(hostile)
    with pytest.raises(RunFolderError, match="kind must be 'support-tokens/robustness', received 'None'"):
        render_html({"schema_version": 1})


def test_page_without_margins_or_noise_or_rivals():
    clean = PerturbationSet(standard_perturbations().items[:1])
    report = dataclasses.replace(synthetic(perturbations=clean, ce=CE), margins=(), sentence=(), config={})
    text = "".join(Reader(render_html(report)).text)
    assert (
        "One model: nothing is compared." in text and "Along a held-out text" not in text and "Degradation" not in text
    )
    assert "clean" in render_text(report)


def test_support_tokens_are_framed_and_listed_smallest_first(hostile):
    texts, _ = sentence_texts(hostile)
    page = render_html(hostile)
    assert page.count('class="t m') + page.count('class="t"') + page.count('class="t negative"') >= 3 * 9
    for text, record in zip(texts, hostile.sentence, strict=True):
        margins = [token.log_abs_det for token in record.layers[0].tokens]
        weakest = sorted(range(1, 9), key=lambda t, margins=margins: margins[t])[:5]
        assert [s.position for s in text.support] == weakest
        assert [text.tokens[t].rank for t in weakest] == [1, 2, 3, 4, 5]
        assert sum(token.rank is not None for token in text.tokens) == 5
        assert text.tokens[0].band is None  # not ranked
        assert text.tokens[weakest[0]].band == max(token.band for token in text.tokens[1:])


def test_many_arms_fit():
    report = synthetic(ce=CE, **{f"a{i}": (2.0, 1.0 + 0.1 * i, 1.0, 1.0) for i in range(10)})
    Reader(render_html(report))
    assert degradation_png(report).startswith(b"\x89PNG")


def test_terminal_shows_names_as_text(hostile):
    text = render_text(hostile, width=200)
    assert "[bold]" in text and "\x1b" not in text and "\u202e" not in text
    coloured = Console(width=200, record=True, file=io.StringIO())
    print_report(hostile, coloured)
    shown = coloured.export_text()
    assert "σ = 0.5 × RMS" in shown and "▼" in shown
    for result in hostile.results:
        assert f"{result.bits.value:.3f}" in shown


def test_png_draws_any_name(hostile):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = degradation_png(hostile)
    assert image.startswith(b"\x89PNG") and image == degradation_png(hostile)


def test_a_legend_of_long_names_stays_inside_of_the_figure():
    names = [f"arm{place}" for place in range(6)]
    labels = {name: f"scale, factor 10 + noise, scale 0.1 + condition, weight {name}" for name in names}
    report = synthetic(seeds=1, labels=labels, ce=CE, **dict.fromkeys(names, CE))
    pixels = matplotlib.image.imread(io.BytesIO(degradation_png(report)), format="png")
    for edge in (pixels[:, :2], pixels[:, -2:], pixels[:2], pixels[-2:]):
        assert (edge == 1.0).all()
