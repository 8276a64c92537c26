"""The page of the explorer, in gradio: a form, and the views of the record that it leads to."""

__all__ = ["build_page"]

from collections.abc import Sequence
from typing import Any

import gradio as gr  # type: ignore[import-not-found]  # an extra
from markupsafe import Markup, escape

from support_tokens.errors import SupportTokensError
from support_tokens.explorer.results import Results
from support_tokens.explorer.service import Explorer
from support_tokens.report import visible

_EXAMPLE = "The capital of France is Paris, and the river that runs through it is called the Seine."
_ABOUT = (
    "How far is each token from the point where attention degenerates? Type a text; its support tokens, the weak "
    "links, are those of smallest margin. Everything is computed on this machine."
)

STYLE = """
.gradio-container { max-width: 76rem !important; margin: 0 auto !important; }
#result, #status, #result > *, #status > * { padding: 0 !important; }
#ask-text .info-text { color: var(--body-text-color) !important; opacity: .75; }
#result iframe {
  width: 100%; height: 82vh; min-height: 34rem;
  border: 1px solid var(--border-color-primary); border-radius: 8px;
}
#result .downloads { display: flex; flex-wrap: wrap; gap: .6rem; margin: 0 0 .7rem; }
#result .downloads a {
  padding: .45rem .9rem; border: 1px solid var(--border-color-primary); border-radius: 8px;
  text-decoration: none; color: var(--body-text-color);
}
#status p { margin: .2rem 0; }
#status .problem { border-left: 4px solid #d55e00; padding-left: .7rem; }
:focus-visible { outline: 3px solid #0067a3 !important; outline-offset: 2px; }
@media (max-width: 640px) {
  .gradio-container main { padding: 1rem .6rem !important; }
  #result .downloads { gap: .4rem; }
  #result .downloads a { padding: .4rem .6rem; font-size: .85rem; }
}
"""


def build_page(explorer: Explorer, results: Results) -> gr.Blocks:
    """The page as gradio blocks, which talk to `explorer` and to nothing else."""
    limits, labels = explorer.limits, explorer.labels

    def layers_of(label: str) -> Any:
        try:
            depth = explorer.depth(label)
        except SupportTokensError as error:
            return gr.update(choices=[], value=[]), _problem(str(error))
        return gr.update(choices=list(range(depth)), value=list(range(min(2, depth)))), ""

    def analyzed(
        text: str, label: str, layers: Sequence[int], views: Sequence[str], request: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008  # gradio finds it by its default
    ) -> tuple[str, str]:  # fmt: skip
        client = request.session_hash or ""
        # What is typed into the list of layers comes as text.
        asked = [int(layer) if str(layer).isdecimal() else layer for layer in layers or []]

        def show(done: int, total: int) -> None:
            progress((done, total), desc="margins", unit="tokens")

        try:
            report = explorer.analyze(
                label, text or "", asked, views or [], client=client, progress=show,
            )  # fmt: skip
        except SupportTokensError as error:
            return _problem(str(error)), ""
        except KeyboardInterrupt:
            return _problem("stopped; nothing of this text is shown."), ""
        return _said(f"{len(report.select().tokens)} tokens of {label}."), _result(results.keep(report))

    def stopped(request: gr.Request) -> str:
        found = explorer.stop(request.session_hash or "")
        return _said("stopping …") if found else _said("nothing is running.")

    with gr.Blocks(title="Support tokens", analytics_enabled=False) as page:
        gr.Markdown(f"# Support tokens\n{_ABOUT}")
        text = gr.Textbox(
            _EXAMPLE, label="Text", info=f"At most {limits.characters} characters and {limits.tokens} tokens.",
            lines=3, max_lines=10, max_length=limits.characters, elem_id="ask-text",
        )  # fmt: skip
        with gr.Row():
            # So wide that on a phone each has a line of its own.
            model = gr.Dropdown(
                list(labels), value=labels[0], label="Model", filterable=False, min_width=240, elem_id="ask-model"
            )
            # Whoever changes the model and asks at once sends layers of the model before: gradio would refuse them
            # without a word, so any value passes here, and the explorer says in a sentence what it does not have.
            layers = gr.Dropdown(
                [], value=[], label=f"Layers, at most {limits.layers}", multiselect=True, max_choices=limits.layers,
                allow_custom_value=True, min_width=240, elem_id="ask-layers",
            )  # fmt: skip
            views = gr.CheckboxGroup(
                [("noise: x − μ(x)", "noise"), ("block: x + μ(x)", "block")], value=["noise", "block"], label="Views",
                elem_id="ask-views",
            )  # fmt: skip
        with gr.Row():
            run = gr.Button("Analyze", variant="primary", elem_id="ask-run", scale=3)
            stop = gr.Button("Stop", elem_id="ask-stop", scale=1)
        status = gr.HTML("", elem_id="status")
        result = gr.HTML("", elem_id="result")
        question: dict[str, Any] = {
            "fn": analyzed, "inputs": [text, model, layers, views], "outputs": [status, result],
            "concurrency_limit": 1, "concurrency_id": "model", "api_visibility": "private",
            "show_progress_on": status, "trigger_mode": "once",
        }  # fmt: skip
        run.click(**question)
        text.submit(**question)
        chosen: dict[str, Any] = {
            "fn": layers_of, "inputs": model, "outputs": [layers, status], "concurrency_id": "model",
            "concurrency_limit": 1, "api_visibility": "private",
        }  # fmt: skip
        page.load(**chosen)
        model.change(**chosen)
        stop.click(stopped, outputs=status, queue=True, concurrency_limit=None, api_visibility="private")
    page.queue(max_size=16, api_open=False)
    # The queue's own statistics, which nobody sees here, go through pandas, and where its warnings are errors they end
    # a request without an answer.
    page._queue.ANAYLTICS_CACHE_FREQUENCY = 10**12
    return page


def _said(sentence: str) -> str:
    return str(Markup('<p role="status">{}</p>').format(visible(sentence)))


def _problem(sentence: str) -> str:
    return str(Markup('<p role="alert" class="problem">{}</p>').format(visible(sentence[:1].upper() + sentence[1:])))


def _result(name: str) -> str:
    return str(
        Markup(
            '<p class="downloads"><a href="/record/{0}.json" download="support-tokens.json">Download JSON</a>'
            '<a href="/record/{0}.html" download="support-tokens.html">Download page</a>'
            '<a href="/record/{0}.html" target="_blank" rel="noopener">Open page alone</a></p>'
            '<iframe src="/record/{0}.html" sandbox="allow-scripts" title="Views of the margins"></iframe>'
        ).format(escape(name))
    )
