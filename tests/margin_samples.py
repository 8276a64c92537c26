"""Records of margins made by hand, with texts that would act if anything let them."""

from support_tokens.report.records import AnalyzedText, LayerMargins, MarginRecord, TokenMargin, Window

__all__ = ["HOSTILE", "layer_of", "record_of", "sample_record"]

HOSTILE = [
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=1">',
    "</script><!--",
    "' onmouseover='alert(1)",
    "[bold]markup[/bold]",
    "{{ 7 * 7 }}",
    "$\\mathrm{x}$",
    "\u202eevil",
    "\x1b[31mred",
    "مرحبا",
    "\n",
    " ",
    "\u2028",
    "&lt;b&gt;",
    "👩\u200d👧",
]


def layer_of(tokens, *, layer=0, view="noise", text=0, shift=0.0) -> LayerMargins:
    """A layer whose margins fall and rise along the text, every third determinant negative."""
    made = tuple(
        TokenMargin(
            position=i,
            id=100 + i,
            token=token,
            sign=-1 if i % 3 == 2 else 1,
            log_abs_det=shift + ((7 * i) % 11 - 5) / 2,
            sigma_min=0.01 + ((5 * i) % 7) / 10,
            rankable=i > 0,
            sanitized="🙂⟨1/2⟩" if token == "<0xF0><0x9F>" else None,
            surprisal_nats=None if i == 0 else ((3 * i) % 5) / 2,
            gradient_share=None if i == 0 else 1 / (len(tokens) - 1),
            coupling_sign=1 if i % 2 else -1,
            per_head=((i % 4) - 1.5, 0.25),
        )
        for i, token in enumerate(tokens)
    )
    return LayerMargins(layer, view, made, text)


def record_of(*layers: LayerMargins, name: str = "text", model: str = "tiny", **options) -> MarginRecord:
    count = max(entry.text for entry in layers) + 1
    texts = []
    for text in range(count):
        tokens = next(entry.tokens for entry in layers if entry.text == text)
        said = "".join(token.token for token in tokens)
        label = name if count == 1 else f"{name} {text + 1}"
        texts.append(AnalyzedText(label, said, len(tokens), (Window(0, 0, len(tokens)),)))
    return MarginRecord(model, layers, tuple(texts), window=64, overlap=16, dtype="float64", **options)


def sample_record(tokens=None, *, layers=(0, 1, 2), views=("noise", "block"), **options) -> MarginRecord:
    """Two views of three layers over hostile tokens, or over `tokens`."""
    tokens = [*"The quick ", "<0xF0><0x9F>", *HOSTILE] if tokens is None else list(tokens)
    entries = [
        layer_of(tokens, layer=layer, view=view, shift=layer - 2 * (view == "block"))
        for layer in layers
        for view in views
    ]
    return record_of(*entries, **options)
