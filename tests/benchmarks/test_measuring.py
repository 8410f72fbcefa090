"""What the benchmarks share: the result file and its commit, steps of one model and of many."""

import json
import subprocess

import measuring
import selfnorm as sn
import steps


def test_a_result_file_says_where_it_comes_from(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["there/many.py", "--data", "../of mine/a b"])
    monkeypatch.delenv("SELFNORM_COMMIT", raising=False)
    measuring.write(tmp_path / "new" / "many.json", [{"a": float("nan"), "b": 1}], note="quiet")
    found = json.loads((tmp_path / "new" / "many.json").read_text())
    assert found["command"] == "python benchmarks/many.py --data 'a b'"
    assert (found["table"], found["note"], found["rows"]) == (
        *("many", "quiet"),
        [{"a": None, "b": 1}],
    )
    assert {"commit", "versions", "hardware"} <= set(found)
    assert measuring.commit(tmp_path) == "unknown"


def test_a_commit_tells_code_that_was_changed_after_it(tmp_path, monkeypatch):
    monkeypatch.delenv("SELFNORM_COMMIT", raising=False)
    code = tmp_path / "src" / "a.py"
    code.parent.mkdir()
    code.write_text("1")
    me = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*me, "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    clean = measuring.commit(tmp_path)
    code.write_text("2")
    measuring.commit.cache_clear()
    assert measuring.commit(tmp_path) == f"{clean}-dirty"


def test_variants_take_turns_and_steps_of_one_model_and_of_many_can_be_timed():
    options = sn.TrainingOptions()
    (model,) = steps.models(1)
    order = []
    works = {
        "one": steps.single_step(model, 8, 8, options),
        "many": steps.many_step(2, 8, 8, options),
        "noted": lambda: order.append("a"),
        "noted too": lambda: order.append("b"),
    }
    before = model.log_norm.item()
    times = measuring.in_turn(works, rounds=2, calls=1)
    assert model.log_norm.item() != before
    assert "".join(order[20:]) == "abab"
    assert all(len(values) == 2 for values in times.values())
