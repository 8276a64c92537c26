"""The explorer without its page: models, limits, results in memory, and what the guard lets through."""

import asyncio
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from command import failed, make_run
from command import run as call
from support_tokens.errors import ArgumentError, DataError, RunFolderError
from support_tokens.explorer import Explorer, Guard, Limits, ModelChoice, Results, find_models, service


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "demo" / "ce")


@pytest.fixture
def explorer(run):
    sources = [ModelChoice("ce", str(run)), ModelChoice("gone", "no such folder")]
    return Explorer(sources, Limits(tokens=40, per_minute=3))


def test_a_text_is_analyzed(explorer) -> None:
    seen = []
    report = explorer.analyze("ce", "a cat", [0, 2], ["noise", "block"], progress=lambda *said: seen.append(said))
    assert [(entry.layer, entry.view) for entry in report.record.layers] == [
        (0, "noise"), (0, "block"), (2, "noise"), (2, "block"),
    ]  # fmt: skip
    assert report.record.model == "ce"
    assert seen[-1] == (5, 5)
    assert explorer.depth("ce") == 3


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        (("ce", " \n", [0], ["noise"]), DataError, "there is no text"),
        (("ce", "a" * 2001, [0], ["noise"]), DataError, "2001 characters and at most 2000"),
        (("ce", "a" * 41, [0], ["noise"]), DataError, "41 tokens and at most 40"),
        (("ce", "a", [], ["noise"]), ArgumentError, "choose 1 to 4 layers, received 0"),
        (("ce", "a", [0] * 5, ["noise"]), ArgumentError, "received 5"),
        (("ce", "a", [7], ["noise"]), ArgumentError, "layers must be integers"),
        (("ce", "a", ["0; rm"], ["noise"]), ArgumentError, "layers must be integers"),
        (("ce", "a", [0], []), ArgumentError, "views must name"),
        (("ce", "a", [0], ["../x"]), ArgumentError, "view must be"),
        (("../../etc", "a", [0], ["noise"]), ArgumentError, "no such model here; choose one of ce, gone"),
        (("gone", "a", [0], ["noise"]), RunFolderError, "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_said(explorer, asked, error, said) -> None:
    with pytest.raises(error) as caught:
        explorer.analyze(*asked)
    assert said in str(caught.value)
    assert explorer.analyze("ce", "a", [0], ["noise"]), "the explorer goes on after an error"


def test_a_name_from_the_page_never_reaches_the_file_system(explorer, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(service, "load_model", lambda *given, **named: asked.append(given))
    with pytest.raises(ArgumentError):
        explorer.analyze("/etc/passwd", "a", [0], ["noise"])
    with pytest.raises(ArgumentError):
        explorer.depth("..")
    assert asked == []


def test_requests_are_limited_by_time_for_each_client(run) -> None:
    now = [100.0]
    explorer = Explorer([ModelChoice("ce", str(run))], Limits(per_minute=2), clock=lambda: now[0])
    ask = lambda client: explorer.analyze("ce", "a", [0], ["noise"], client=client)  # noqa: E731
    ask("one"), ask("one")
    with pytest.raises(ArgumentError, match="at most 2 texts a minute are read here; wait 60 s"):
        ask("one")
    ask("two")
    now[0] += 59
    with pytest.raises(ArgumentError, match="wait 1 s"):
        ask("one")
    now[0] += 1
    ask("one")


def test_an_analysis_is_stopped_by_its_own_client_only(explorer) -> None:
    entered, go = threading.Event(), threading.Event()
    ended = []

    def wait(done: int, total: int) -> None:
        entered.set()
        assert go.wait(30)

    def work() -> None:
        try:
            explorer.analyze("ce", "a cat", [0, 1], ["noise"], client="one", progress=wait)
        except KeyboardInterrupt:
            ended.append("stopped")

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(30)
    assert not explorer.stop("two")
    assert explorer.stop("one")
    go.set()
    thread.join(30)
    assert ended == ["stopped"]
    assert not explorer.stop("one")


def test_models_are_found_newest_run_first(tmp_path) -> None:
    import os

    for age, name in enumerate(("old", "demo/new")):
        path = make_run(tmp_path / "runs" / name, layers=1) / "model" / "config.json"
        os.utime(path, (1000 + age, 1000 + age))
    (tmp_path / "models" / "smol").mkdir(parents=True)
    (tmp_path / "models" / "smol" / "x.gguf").touch()
    for name, file in (("tuned", "config.json"), ("lora", "adapter_config.json"), ("empty", "notes.txt")):
        (tmp_path / "models" / name).mkdir()
        (tmp_path / "models" / name / file).touch()
    found = find_models(tmp_path / "runs", tmp_path / "models")
    assert [(source.label, source.gguf_file) for source in found] == [
        ("demo/new", None), ("old", None), ("lora", None), ("smol", "x.gguf"), ("tuned", None),
    ]  # fmt: skip


def test_two_files_in_one_folder_have_two_names(tmp_path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").touch()
    assert [source.label for source in find_models("none", tmp_path.parent) if source.path == str(tmp_path)] == [
        f"{tmp_path.name}/a", f"{tmp_path.name}/b",
    ]  # fmt: skip


def test_importing_the_page_sets_no_environment_variable() -> None:
    pytest.importorskip("gradio", reason="gradio is not installed: pip install 'support-tokens[explore]'")
    module = "support_tokens.explorer.server"
    script = f"import os, gradio; before = dict(os.environ); import {module}; print(before == os.environ)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "True"


def test_no_model_or_two_of_one_name_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"received \[\]; train one by"):
        Explorer([])
    with pytest.raises(ArgumentError, match="each of its own name"):
        Explorer([ModelChoice("a", "x"), ModelChoice("a", "y")])


def test_results_are_kept_and_forgotten(explorer) -> None:
    report = explorer.analyze("ce", "a <b>", [0], ["noise"])
    results = Results(most=2)
    names = [results.keep(report) for _ in range(3)]
    assert len(set(names)) == 3
    assert min(map(len, names)) >= 32
    assert results.get(names[0], "html") is None
    assert json.loads(results.get(names[2], "json"))["schema_version"] == 2
    assert b"Content-Security-Policy" in results.get(names[2], "html")
    assert results.get(names[2], "exe") is None


def ask(method="GET", path="/", headers=(("host", "127.0.0.1:7860"),), body=b"", hosts=("127.0.0.1", "[::1]")):
    """Status and headers of one request to a guard, and what the application behind it read."""
    sent, read = [], []

    async def app(scope, receive, send):
        while (message := await receive())["type"] == "http.request" and message.get("more_body"):
            read.append(message)
        read.append(message)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    parts = [body[begin : begin + 4096] for begin in range(0, max(1, len(body)), 4096)]
    queue = [
        {"type": "http.request", "body": part, "more_body": place + 1 < len(parts)} for place, part in enumerate(parts)
    ]

    async def receive():
        return queue.pop(0) if queue else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in headers],
    }  # fmt: skip
    # In a thread of its own: Playwright leaves a running loop in the one that other tests drove the browser from.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(Guard(app, hosts)(scope, receive, send))).result()
    return sent[0]["status"], dict(sent[0]["headers"]), read


@pytest.mark.parametrize(
    "path", ["/", "/config", "/theme.css", "/assets/index-a1.js", "/gradio_api/queue/data", "/record/aB3-_.html"]
)
def test_guard_lets_the_page_through_with_strict_headers(path) -> None:
    status, headers, read = ask(path=path)
    assert status == 200
    assert read
    assert b"frame-ancestors 'self'" in headers[b"content-security-policy"]
    assert headers[b"x-content-type-options"] == b"nosniff"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/gradio_api/file=/etc/passwd", 404),
        ("GET", "/gradio_api/file/etc/passwd", 404),
        ("GET", "/gradio_api/proxy=http://example.org", 404),
        ("GET", "/assets/../../etc/passwd%00", 404),
        ("GET", "/record/../x.html", 404),
        ("POST", "/gradio_api/upload", 404),
        ("POST", "/gradio_api/run/analyzed", 404),
        ("POST", "/gradio_api/vibe-edit/", 404),
        ("POST", "/gradio_api/queue/join", 200),
        ("PUT", "/", 404),
        ("DELETE", "/gradio_api/cancel", 404),
    ],
)
def test_guard_knows_no_other_path(method, path, status) -> None:
    found, _, read = ask(method, path)
    assert found == status
    assert bool(read) == (status == 200)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("host", "127.0.0.1:7860")], 200),
        ([("host", "[::1]:7860")], 200),
        ([("host", "evil.example")], 421),
        ([("host", "127.0.0.1.evil.example")], 421),
        ([], 421),
        ([("host", "127.0.0.1:7860"), ("origin", "http://127.0.0.1:7860")], 200),
        ([("host", "127.0.0.1:7860"), ("origin", "http://127.0.0.1:9999")], 403),
        ([("host", "127.0.0.1:7860"), ("origin", "https://evil.example")], 403),
        ([("host", "127.0.0.1:7860"), ("origin", "null")], 403),
        ([("host", "127.0.0.1:7860"), ("content-length", "70000")], 413),
        ([("host", "127.0.0.1:7860"), ("content-length", "-1")], 413),
    ],
)
def test_guard_answers_known_hosts_and_no_other_site(headers, status) -> None:
    assert ask("POST", "/gradio_api/queue/join", headers)[0] == status


def test_guard_serves_any_name_when_told_to() -> None:
    assert ask(headers=[("host", "my-machine:80")], hosts=None)[0] == 200


def test_guard_cuts_off_a_body_that_hides_its_length() -> None:
    _, _, read = ask("POST", "/gradio_api/queue/join", body=b"x" * 100_000)
    assert read[-1]["type"] == "http.disconnect"
    assert sum(len(message.get("body", b"")) for message in read) <= 64 * 1024


def test_command_says_what_is_missing(monkeypatch, capsys, tmp_path, run) -> None:
    folders = ["--runs", tmp_path, "--models", tmp_path]
    failed(call(monkeypatch, "explore", *folders), capsys.readouterr(), "needs one model or more")
    words = ["--model", run, "--model", tmp_path, "--gguf-file", "x.gguf"]
    failed(call(monkeypatch, "explore", *words), capsys.readouterr(), "--gguf-file goes with one --model, received 2")
    monkeypatch.delattr("support_tokens.explorer.serve_explorer", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "support_tokens.explorer.page", raising=False)
    monkeypatch.delitem(sys.modules, "support_tokens.explorer.server", raising=False)
    code = call(monkeypatch, "explore", "--model", run)
    failed(code, capsys.readouterr(), "not installed; run `pip install 'support-tokens[explore]'`")
