"""The page to play with a density: what it answers, and whom it refuses."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import selfnorm as sn
from selfnorm.cli import Stopped, app, explore
from selfnorm.cli.app import _load
from selfnorm.errors import SelfnormError, SelfnormWarning

pytest.importorskip("starlette", reason="the extra 'explore' is not installed")
from starlette.testclient import TestClient

TOKEN, HOST = "t0ken", "127.0.0.1:8000"
KIND, SIZE, COUNT, SINCE, RATING = map(str, range(5))


def table(n=200):
    rng = np.random.default_rng(0)
    kind = rng.choice(["small", "big, or so"], n)
    size = rng.normal(size=n).round(2) + 10 * (kind != "small")
    count = rng.poisson(40, n)
    since = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 365, n), "D")
    rating = rng.integers(1, 6, n)
    columns = {"kind": kind, "size": size, "count": count, "since": since, "rating": rating}
    return pd.DataFrame(columns | {"id": [f"row {j}" for j in range(n)]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that the command line fitted to a CSV file."""
    place = tmp_path_factory.mktemp("explore")
    with pytest.warns(SelfnormWarning, match="identifiers"):
        schema = sn.Schema.detect(table())
    sn.EnergyDensity(schema=schema, max_steps=40, random_state=0).fit(table()).save(place / "model")
    return place / "model"


@pytest.fixture(scope="module")
def answers(folder):
    model = _load(folder)
    return explore.Answers(model.estimator, model.table)


@pytest.fixture
def client(answers):
    app = explore.app_of(answers, "<b>wine</b>", TOKEN, HOST)
    return TestClient(app, base_url=f"http://{HOST}", raise_server_exceptions=False)


@pytest.fixture
def ask(client):
    def asked(question, **body):
        answer = client.post(f"/{TOKEN}/{question}", json=body).json()
        assert "error" not in answer, answer
        return answer

    return asked


@pytest.fixture
def refused(client):
    def asked(question, **body):
        reply = client.post(f"/{TOKEN}/{question}", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["error"]

    return asked


def test_the_page_allows_nothing_but_itself(client):
    reply = client.get(f"/{TOKEN}/")
    assert reply.status_code == 200
    assert "&lt;b&gt;wine&lt;/b&gt;" in reply.text
    assert "<b>wine" not in reply.text
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    nonce = policy.split("'nonce-")[1].split("'")[0]
    assert reply.text.count(f'nonce="{nonce}"') == 2
    assert nonce not in client.get(f"/{TOKEN}/").headers["content-security-policy"]
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert reply.headers["cache-control"] == "no-store"


def test_the_page_names_no_other_host():
    text = explore._PAGE.read_text()
    assert [
        line for line in text.splitlines() if "://" in line.replace("http://www.w3.org/", "")
    ] == []


@pytest.mark.parametrize("path", ["/", "/draw", "/wrong/", "/wrong/draw", "//", "/t0ke", "/é/"])
def test_nothing_is_answered_without_the_secret(client, path):
    for reply in (client.get(path), client.post(path, json={"given": {}, "n": 5})):
        assert reply.status_code == 403
        assert TOKEN not in reply.text


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8000"},
        {"host": "127.0.0.1"},
        {"host": "127.0.0.1:8001"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
    ],
)
def test_other_hosts_and_pages_are_refused_with_the_secret_too(client, headers):
    for reply in (
        client.get(f"/{TOKEN}/", headers=headers),
        client.post(f"/{TOKEN}/draw", json={"given": {}, "n": 5}, headers=headers),
    ):
        assert reply.status_code == 403


def test_its_own_origin_is_welcome(client):
    reply = client.post(f"/{TOKEN}/about", json={}, headers={"origin": f"http://{HOST}"})
    assert reply.status_code == 200


def test_what_is_not_there_is_not_found(client):
    assert client.post(f"/{TOKEN}/density", json={}).status_code == 404
    assert client.get(f"/{TOKEN}/draw").status_code == 405


def test_the_page_is_told_the_columns_and_free_draws(ask):
    about = ask("about")
    columns = {column["name"]: column for column in about["columns"]}
    assert list(columns) == ["kind", "size", "count", "since", "rating"]
    assert sorted(columns["kind"]["levels"]) == ["big, or so", "small"]
    assert columns["rating"]["levels"] == [1, 2, 3, 4, 5]
    assert columns["since"]["holds"] == "date"
    first, last = np.array(columns["since"]["ends"]).astype("datetime64[s]")
    assert (first, last) == (table()["since"].min(), table()["since"].max())
    assert about["aside"] == ["id"]
    assert {len(values) for values in about["draws"]} == {1000}
    assert "200 rows" in about["facts"]["fitted to"]


def test_draws_have_what_is_given(ask, answers):
    small = answers.levels["kind"].index("small")
    given = {KIND: str(small), COUNT: "41", SINCE: "2024-03-05", RATING: "2"}
    kind, size, count, since, rating = ask("draw", given=given, n=50)["columns"]
    assert {*kind} == {small}
    assert ({*count}, {*rating}) == ({41.0}, {2.0})
    assert {*np.array(since).astype("datetime64[s]")} == {np.datetime64("2024-03-05")}
    assert len({*size}) > 10
    others = ask("draw", given={**given, KIND: str(1 - small)}, n=50)["columns"]
    assert np.median(size) < np.median(others[int(SIZE)]) - 2


def test_draws_are_those_of_the_density(ask, answers):
    drawn = answers.density.sample(20, random_state=3, given={"rating": 4})
    assert ask("draw", given={RATING: "4"}, n=20, seed=3)["columns"][1] == drawn["size"].tolist()


def test_a_sample_is_a_csv_file_with_the_columns_of_the_table(ask, tmp_path):
    text = ask("sample", given={RATING: "4"}, n=30)["csv"]
    (tmp_path / "s.csv").write_text(text)
    read = pd.read_csv(tmp_path / "s.csv")
    assert [*read] == ["kind", "size", "count", "since", "rating"]
    assert (read["rating"] == 4).all()
    assert {*read["kind"]} <= {"small", "big, or so"}
    assert read["since"].str.fullmatch(r"2024-\d\d-\d\d 00:00:00").all()


ROWS = {
    "a line": 'small,0.5,900,2024-03-05,3,"row 7"',
    "a header and a line": "rating,count,kind,size,since\n3,900,small,0.5,2024-03-05",
    "semicolons": "kind;size;count;since;rating\nsmall;0.5;900;2024-03-05;3",
    "JSON": '{"kind": "small", "size": 0.5, "count": 900, "since": "2024-03-05", "rating": 3}',
}


@pytest.mark.parametrize("text", ROWS.values(), ids=ROWS)
def test_a_row_is_explained_however_it_is_pasted(ask, answers, text):
    told = ask("explain", row=text)
    row = {"kind": ["small"], "size": [0.5], "count": [900], "since": ["2024-03-05"], "rating": [3]}
    assert told["score"] == pytest.approx(answers.density.score_samples(row)[0])
    assert told["margin"] == pytest.approx(answers.density.decision_function(row)[0])
    assert told["cells"][0]["column"] == int(COUNT)
    assert told["cells"][0]["tail"] < 0.01 < told["cells"][-1]["tail"]
    assert len(told["cells"]) == 5


def test_the_cells_of_a_row_can_be_given_again(ask):
    cells = {
        str(cell["column"]): cell["value"] for cell in ask("explain", row=ROWS["JSON"])["cells"]
    }
    cells[SINCE] = str(np.datetime64(int(cells[SINCE]), "s"))
    drawn = ask("draw", given={**cells, COUNT: 40}, n=3)["columns"]
    assert drawn[int(SIZE)] == [0.5] * 3


def test_gaps_of_a_row_are_left_out(ask):
    told = ask("explain", row="small,,NA,2024-03-05,3,")
    assert sorted(cell["column"] for cell in told["cells"]) == [0, 3, 4]
    assert len(ask("explain", row='{"size": 0.5}')["cells"]) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the row has 0 cells"),
        ("small,1", "the row has 2 cells, and there are 6 columns, 'kind', 'size'"),
        ("a,b\n1,2", "there is no column 'a', 'b'; there are 'kind'"),
        ("kind,size\nsmall", "the row has 1 cells, and there are 2 columns"),
        ("1\n2\n3", "the row has 3 cells"),
        ('{"size": [1, 2]}', "size"),
        ('{"size": {"a": 1}}', "size"),
        ('{"size": "twelve"}', "'size' holds numbers, but here text"),
        ('{"size": 1e999}', "infinite"),
        ('{"size": ', "Expecting value"),
        ("[" * 50_000, "the row has"),
        ('{"size":' * 5_000, "recursion"),
        ('{"since": "yesterday"}', "'since' holds dates"),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_in_a_sentence(refused, text, words):
    assert words in refused("explain", row=text)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({COUNT: "many"}, "count: 'many' is not a number"),
        ({KIND: "7"}, "kind: '7' is not a label"),
        ({KIND: "small"}, "kind: 'small' is not a label"),
        ({SINCE: "soon"}, "since: 'soon' is not a date"),
        ({SINCE: None}, "since: 'None' is not a date"),
        ({RATING: "9"}, "never seen in training"),
        ({COUNT: "inf"}, "infinite"),
        ({COUNT: 10**400}, "is not a number"),
    ],
)
def test_a_value_that_a_column_cannot_have_is_refused(refused, given, words):
    assert words in refused("draw", given=given, n=5)


def test_an_event_is_answered_given_what_is_set(ask, answers):
    small = answers.levels["kind"].index("small")
    given = {KIND: str(small), SINCE: "2024-03-05"}
    told = ask("probability", event="size > 0 or count < 40", given=given)
    values = {"kind": "small", "since": "2024-03-05"}
    estimate = answers.density.probability("size > 0 or count < 40", given=values)
    assert told["value"] == pytest.approx(estimate.value)
    assert (told["low"], told["high"]) == pytest.approx((estimate.low, estimate.high))
    assert told["reliable"] is estimate.reliable
    assert told["reasons"] == [*estimate.reasons]


def test_an_event_that_never_happens_has_a_limit(ask):
    told = ask("probability", event="size > count * 1000", given={})
    assert told["value"] == 0 < told["high"] < 0.1


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ("sizee > 5", "there is no column 'sizee'"),
        ("size >", "cannot be read"),
        ("__import__('os').system('true')", "__import__"),
        ("size > 0 and " * 2000 + "size > 0", "4,000 are the most"),
        ("kind > 5", "kind"),
        (7, "7"),
    ],
)
def test_an_event_that_cannot_be_read_is_refused_in_a_sentence(refused, event, words):
    assert words in refused("probability", event=event, given={})


@pytest.mark.parametrize("n", [0, -1, 1.5, "5", True + 0.0, 5001, 10**30])
def test_draws_are_limited(refused, n):
    assert "whole number from 1 to 5,000" in refused("draw", given={}, n=n)


def test_files_are_limited(refused):
    assert "from 1 to 100,000" in refused("sample", given={}, n=100_001)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"7", b"null", b"\xff", b"[" * 50_000, b'{"n": 5}'),
        b'{"given": {}, "n": 5, "more": 1}',
        *(b'{"given": %b, "n": 5}' % given for given in (b"7", b"null", b'{"99": 1}', b'{"x": 1}')),
    ],
)
def test_what_is_no_question_is_refused(client, body):
    reply = client.post(f"/{TOKEN}/draw", content=body)
    assert reply.status_code in (200, 400)
    assert reply.json()["error"]


def test_a_question_that_is_too_long_is_refused(client):
    assert client.post(f"/{TOKEN}/draw", content=b" " * 200_000).status_code == 413


def test_a_fault_is_told_and_the_page_lives(client, answers, monkeypatch, capfd):
    def broken(*_, **__):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(answers.density, "explain", broken)
    reply = client.post(f"/{TOKEN}/explain", json={"row": ROWS["JSON"]})
    assert reply.status_code == 500
    assert "ZeroDivisionError: by zero" in reply.json()["error"]
    assert "Traceback" in capfd.readouterr().err
    assert client.post(f"/{TOKEN}/about", json={}).status_code == 200


def test_questions_at_once_have_the_answers_of_each_alone(client, answers):
    bodies = [{"given": {RATING: str(1 + j % 5)}, "n": 40, "seed": j} for j in range(8)]
    alone = [answers.draw(**body) for body in bodies]

    def asked(body):
        return client.post(f"/{TOKEN}/draw", json=body).json()

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(asked, bodies)] == json.loads(json.dumps(alone))


def test_a_model_fitted_to_an_array_is_explored_by_place():
    X = np.random.default_rng(0).normal(size=(40, 2))
    density = sn.EnergyDensity(max_steps=10, random_state=0).fit(X)
    answers = explore.Answers(density, lambda rows: None)
    assert [column["name"] for column in answers.about()["columns"]] == ["x0", "x1"]
    first, second = answers.draw({"0": "0.5"}, 9)["columns"]
    assert {*first} == {0.5}
    assert len({*second}) > 4
    assert answers.explain("0.5,40")["cells"][0]["column"] == 1


def test_days_of_a_time_zone_are_those_of_its_clock():
    rng = np.random.default_rng(0)
    days = pd.Timestamp("2024-01-01", tz="Asia/Tokyo") + pd.to_timedelta(
        rng.integers(0, 60, 40), "D"
    )
    density = sn.EnergyDensity(max_steps=10, random_state=0)
    density.fit(pd.DataFrame({"day": days, "x": rng.normal(size=40)}))
    drawn = explore.Answers(density, lambda rows: None).draw({"0": "2024-02-03"}, 4)
    assert {*drawn["columns"][0]} == {np.datetime64("2024-02-03", "s").astype(int)}
    assert drawn["notes"] == []


def test_a_regressor_is_refused():
    folder = Path(__file__).parents[1] / "golden" / "folders" / "regressor"
    with pytest.raises(SelfnormError, match="EnergyRegressor; 'explore' is for densities"):
        _load(folder, "explore")


def test_the_command_shows_the_page_until_it_is_stopped(folder, monkeypatch):
    shown = []

    def serve(listener, answers, title, *, browser):
        shown.append((listener.getsockname()[0], len(answers.columns), title, browser))
        listener.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(explore, "serve", serve)
    with pytest.raises(Stopped, match="the page is closed"):
        app.explore(folder, browser=False)
    assert shown == [("127.0.0.1", 5, "model", False)]


def test_a_port_that_is_taken_is_refused():
    with explore.listen(0) as taken:
        port = taken.getsockname()[1]
        assert taken.getsockname()[0] == "127.0.0.1"
        with pytest.raises(SelfnormError, match=f"port {port}: .*without --port"):
            explore.listen(port)


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(explore, "find_spec", lambda name: None)
    with pytest.raises(SelfnormError, match=r"pip install 'selfnorm\[explore\]'"):
        explore.listen(0)
