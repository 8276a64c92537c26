"""The explorer without its page: models, limits, results in memory, and what is let through."""

import json
import sys
import threading

import pytest

from command import failed, make_run
from command import run as call
from support_tokens.errors import ArgumentError, DataError, RunFolderError
from support_tokens.explorer import Explorer, Limits, ModelChoice, Results, find_models, service


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "demo" / "ce")


@pytest.fixture
def explorer(run):
    sources = [ModelChoice("ce", str(run)), ModelChoice("gone", "no such folder")]
    return Explorer(sources, Limits(tokens=40, per_minute=4))


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


HERE = "http://127.0.0.1:7860"


@pytest.fixture
def client(explorer):
    testing = pytest.importorskip("starlette.testclient", reason="pip install 'support-tokens[explore]'")
    from support_tokens.explorer import explorer_app

    return testing.TestClient(explorer_app(explorer), base_url=HERE)


def asked(client, **changes) -> list[dict]:
    """What an analysis says, event by event."""
    question = {"text": "a cat", "model": "ce", "layers": [0], "views": ["noise"], "client": "one"}
    answer = client.post("/analyze", json=question | changes)
    assert answer.status_code == 200
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.strip().split("\n\n")]


def test_an_analysis_tells_its_progress_and_leads_to_its_page(client, explorer) -> None:
    *progress, end = asked(client)
    assert progress[-1] == {"done": 5, "total": 5}
    name = end["name"]
    page, json_page = client.get(f"/result/{name}"), client.get(f"/record/{name}.json")
    assert json_page.json()["model"] == "ce"
    for part in ('id="ask-text"', 'id="tokens"', f"/record/{name}.html"):
        assert part in page.text
    assert "'unsafe-inline'" not in page.text
    assert client.get(f"/record/{name}.html").headers["content-security-policy"] == "sandbox allow-scripts"
    assert "connect-src" not in client.get(f"/record/{name}.html").text
    (*_, other) = asked(client, text="a bat")
    assert "Support tokens compared" in client.get(f"/changes/{name}/{other['name']}").text
    assert client.get(f"/changes/{name}/unknown").status_code == 404
    (*_, deeper) = asked(client, layers=[1])
    assert client.get(f"/changes/{name}/{deeper['name']}").status_code == 400


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text": " "}, "there is no text"),
        ({"layers": ["0; rm"]}, "layers must be integers"),
        ({"layers": None}, "received 0"),
        ({"model": "../../etc"}, "no such model here"),
        ({"views": "noise"}, "views must name"),
    ],
)
def test_what_cannot_be_done_is_an_event(client, changes, said) -> None:
    (event,) = asked(client, **changes)
    assert said in event["error"]


def test_depth_and_stop(client) -> None:
    assert client.post("/depth", json={"model": "ce"}).json() == {"depth": 3}
    assert "cannot be read" in client.post("/depth", json={"model": "gone"}).json()["error"]
    assert client.post("/stop", json={"client": "one"}).json() == {"stopped": False}


@pytest.mark.parametrize("path", ["/", "/explorer.js", "/explorer.css", "/record/none.html"])
def test_every_answer_has_strict_headers(client, path) -> None:
    headers = client.get(path).headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/explorer.py", 404),
        ("GET", "/record/../x.html", 404),
        ("GET", "/record/none.exe", 404),
        ("GET", "/assets/../../etc/passwd", 404),
        ("GET", "/analyze", 405),
        ("POST", "/", 405),
        ("PUT", "/", 405),
    ],
)
def test_there_is_no_other_path(client, method, path, status) -> None:
    assert client.request(method, path).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "[::1]:7860"}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "evil.example"}, 400),
        ({"host": "127.0.0.1.evil.example"}, 400),
        ({"host": ""}, 400),
        ({"origin": HERE}, 200),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_known_hosts_are_answered_and_no_other_site(client, headers, status) -> None:
    assert client.post("/stop", json={}, headers=headers).status_code == status


def test_any_name_is_answered_when_told_to(explorer) -> None:
    testing = pytest.importorskip("starlette.testclient", reason="pip install 'support-tokens[explore]'")
    from support_tokens.explorer import explorer_app

    assert testing.TestClient(explorer_app(explorer, None), base_url="http://my-machine").get("/").status_code == 200


@pytest.mark.parametrize("body", [b"x" * 100_000, iter([b"x" * 4096] * 30)], ids=["said", "hidden"])
def test_a_body_that_is_too_large_is_refused(client, body) -> None:
    assert client.post("/analyze", content=body).status_code == 413


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff"])
def test_a_body_that_is_no_object_is_refused(client, body) -> None:
    assert client.post("/analyze", content=body).status_code == 400


def test_command_says_what_is_missing(monkeypatch, capsys, tmp_path, run) -> None:
    folders = ["--runs", tmp_path, "--models", tmp_path]
    failed(call(monkeypatch, "explore", *folders), capsys.readouterr(), "needs one model or more")
    words = ["--model", run, "--model", tmp_path, "--gguf-file", "x.gguf"]
    failed(call(monkeypatch, "explore", *words), capsys.readouterr(), "--gguf-file goes with one --model, received 2")
    monkeypatch.delattr("support_tokens.explorer.serve_explorer", raising=False)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    monkeypatch.delitem(sys.modules, "support_tokens.explorer.server", raising=False)
    code = call(monkeypatch, "explore", "--model", run)
    failed(code, capsys.readouterr(), "not installed; run `pip install 'support-tokens[explore]'`")
