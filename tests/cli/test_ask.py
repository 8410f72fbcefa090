"""Questions of the command line, samples and fits under rules."""

import json

import numpy as np
import pandas as pd
import pytest

from selfnorm.cli.ask import Question
from selfnorm.errors import SelfnormError
from selfnorm.tables import questions
from tests.cli.test_app import Selfnorm


def write_table(path, n=200):
    rng = np.random.default_rng(0)
    columns = {
        "sort": rng.choice(["red|blue", "a, b", "plain"], n),
        "net": rng.gamma(2, 10, n).round(2),
        "hours-per-week": rng.poisson(40, n),
    }
    table = pd.DataFrame(columns)
    table["gross"] = (table["net"] + rng.gamma(2, 5, n)).round(2)
    table.to_csv(path, index=False)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A table and a model of it, to which a rule belongs."""
    folder = tmp_path_factory.mktemp("ask")
    write_table(folder / "train.csv")
    with pytest.MonkeyPatch.context() as patch:
        selfnorm = Selfnorm(patch, _Unread())
        fit = ("fit", folder / "train.csv", "-o", folder / "model", "--max-steps", 20)
        selfnorm.done(*fit, "--no-progress", "--rule", "net <= gross")
    return folder


class _Unread:
    """Where nobody reads what is said."""

    def readouterr(self):
        return self

    out = err = ""


@pytest.fixture
def selfnorm(monkeypatch, capsys):
    """The command, whose answers take few draws."""
    monkeypatch.setattr(questions, "COUNTED", 200)
    monkeypatch.setattr(questions, "TRIES", 4)
    return Selfnorm(monkeypatch, capsys)


@pytest.mark.parametrize(
    ("text", "subject", "given"),
    [
        ("P(a > 1)", "a > 1", None),
        (" E ( `a|b` | c == 'x|y', d in [1, 2] ) ", "`a|b`", "(c == 'x|y') and (d in [1, 2])"),
        ('P(a == "x, | y" | b > (1, 2))', 'a == "x, | y"', "(b > (1, 2))"),
        (r"P(a == 'it\'s | so' | b)", r"a == 'it\'s | so'", "(b)"),
        ("P(a or b | (c or d), e)", "a or b", "((c or d)) and (e)"),
    ],
)
def test_signs_within_quotes_and_brackets_split_nothing(text, subject, given):
    question = Question.read(text)
    assert (question.subject, question.given) == (subject, given)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no question"),
        ("size > 0", "is no question"),
        ("Q(a > 0)", "is no question"),
        ("P(a > 0", "is no question"),
        ("P()", "lacks an event"),
        ("P(a > 0 |)", "lacks an event"),
        ("P(a > 0 | b > 0,, c > 0)", "lacks an event"),
        ("P(a | b | c)", "more than one '|'"),
        ("P(a > 0 | b > 0) or (c > 0)", "closes a bracket"),
        ("P(" + "a" * 10_000 + ")", "10,003 characters"),
    ],
)
def test_what_is_no_question_is_refused(text, words):
    with pytest.raises(SelfnormError, match=words.replace("|", r"\|")):
        Question.read(text)


def test_several_questions_are_answered_in_one_call(selfnorm, places):
    texts = (
        "P(sort == 'red|blue' | net > 10, `hours-per-week` < 45)",
        "E(net | sort == 'a, b')",
        "E(`hours-per-week`)",
        "P(net > gross)",
    )
    out = selfnorm.done("ask", places / "model", *texts)
    shown = [line for line in out.splitlines() if not line.startswith("  ")]
    assert [line.partition("  ")[0] for line in shown] == [*texts]
    assert all("(95 % interval " in line for line in shown)
    assert "\n  NOT RELIABLE: No draw obeys the event" in out
    answers = json.loads(selfnorm.done("ask", places / "model", *texts, "--json"))["answers"]
    assert [answer["question"] for answer in answers] == [*texts]
    assert all(answer["low"] <= answer["value"] <= answer["high"] for answer in answers)
    assert 0 < answers[0]["value"] < 1
    assert 35 < answers[2]["value"] < 45
    assert answers[3]["value"] == 0 < answers[3]["high"] < 0.1
    assert answers[3]["reasons"]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("P(nett > 5)", "there is no column 'nett'"),
        ("E(nett)", "there is no column 'nett'; there is 'sort', 'net'"),
        ("E(sort)", "'sort' is no column of numbers"),
        ("P(net > 'many')", "'net' holds numbers"),
        ("P(sort > 5)", "'sort' holds labels"),
        ("E(net | net > gross)", "no draw obeys"),
        ("P(net > 5 | gross == 20, net == 30)", "no draw obeys"),
        ("P(net > 0" + " and net > 0" * 700 + ")", "4,000 are the most"),
        ("P(__import__('os').system('touch hacked') == 0)", "no part of the language"),
        ("E(__import__('os').system('touch hacked'))", "there is no column"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(
    selfnorm, places, tmp_path, monkeypatch, question, words
):
    monkeypatch.chdir(tmp_path)
    assert words in selfnorm.refused("ask", places / "model", question)
    assert list(tmp_path.iterdir()) == []


def test_samples_obey_what_is_given_and_the_rules(selfnorm, places, tmp_path):
    out = tmp_path / "s.csv"
    sample = ("sample", places / "model", "-o", out, "-n", 40)
    selfnorm.done(*sample, "--where", "net > 10 and sort != 'plain'")
    drawn = pd.read_csv(out)
    assert len(drawn) == 40
    assert ((drawn["net"] > 10) & (drawn["sort"] != "plain")).all()
    assert (drawn["net"] <= drawn["gross"]).all()
    selfnorm.done(*sample, "--given", "sort=a, b", "--given", "hours-per-week=40")
    drawn = pd.read_csv(out)
    assert (drawn["sort"] == "a, b").all()
    assert (drawn["hours-per-week"] == 40).all()
    assert (drawn["net"] <= drawn["gross"]).all()
    selfnorm.done(*sample, "--given", "sort=plain", "--where", "net > 10")
    drawn = pd.read_csv(out)
    assert ((drawn["net"] > 10) & (drawn["sort"] == "plain")).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--where", "nett > 5"), "there is no column 'nett'"),
        (("--where", "net > gross"), "too few obey"),
        (("--where", "net >"), "cannot be read"),
        (("--given", "net"), "--given must be such as"),
        (("--given", "nett=5"), "there is no column 'nett'"),
        (("--given", "net=5", "--given", "net=6"), "twice"),
        (("--given", "net=many"), "'net' holds numbers"),
        (("--given", "net=30", "--given", "gross=20"), "contradicts 'net <= gross'"),
    ],
)
def test_samples_that_cannot_be_are_refused(selfnorm, places, tmp_path, options, words):
    out = tmp_path / "s.csv"
    assert words in selfnorm.refused("sample", places / "model", "-n", 5, "-o", out, *options)
    assert not out.exists()


def test_a_rule_that_rows_break_is_refused_by_their_line(selfnorm, places, tmp_path):
    fit = ("fit", places / "train.csv", "-o", tmp_path / "m", "--no-progress")
    said = selfnorm.refused(*fit, "--rule", "net <= gross", "--rule", "net != gross and net < 40")
    assert "break the rule 'net != gross and net < 40'" in said
    assert "line" in said
    assert "no column" in selfnorm.refused(*fit, "--rule", "nett > 0")
    assert "--rule is for densities" in selfnorm.refused(
        *fit, "--target", "net", "--rule", "net > 0"
    )
    assert not (tmp_path / "m").exists()
