"""An evaluation's numbers recounted, and its folder, which never looks finished before it is."""

import numpy as np
import pytest

from jaxspec.evaluation.report import RunFolder, statistics_of
from tests.support.evaluations import FILES, MODES, REQUESTS, TEMPERATURES, select


def test_summary_equals_a_recount(finished):
    _, records, summary = finished
    assert [(e["mode"], e["temperature"]) for e in summary["passes"]] == [(m, t) for t in TEMPERATURES for m in MODES]
    for entry in summary["passes"]:
        mine = select(records, mode=entry["mode"], temperature=entry["temperature"])
        groups = [(entry, mine)]
        groups += [(part, select(mine, set=name)) for name, part in entry["sets"].items()]
        assert set(entry["sets"]) == set(FILES)
        for found, group in groups:
            tokens, rounds = (np.array([r[name] for r in group]) for name in ("tokens", "rounds"))
            assert (found["requests"], found["tokens"], found["rounds"]) == (len(group), tokens.sum(), rounds.sum())
            assert found["tau_mean"] == pytest.approx((tokens / rounds).mean())
            assert found["tau_pooled"] == pytest.approx(tokens.sum() / rounds.sum())
            lengths = np.concatenate([np.repeat(np.arange(len(h)), h) for h in (r["accepted_lengths"] for r in group)])
            depth = 0 if entry["mode"] == "plain" else 3
            shares = [float((lengths >= d).mean()) for d in range(1, depth + 1)]
            assert found["acceptance_by_depth"] == pytest.approx(shares)
            assert (found["mismatches"], found["first_difference"]) == (0, None)
        base = next(e for e in summary["passes"] if e["mode"] == "plain" and e["temperature"] == entry["temperature"])
        assert entry["tokens_per_second"] > 0
        assert entry["speedup"] == pytest.approx(entry["tokens_per_second"] / base["tokens_per_second"])


def test_page_shows_the_figures_and_names_the_chains_drafts(finished):
    output, _, summary = finished
    page = (output / "summary.md").read_text()
    cold, hot = page.split("## Temperature 1")
    assert "chain (greedy drafts)" in hot
    assert "greedy drafts" not in cold
    for entry in summary["passes"]:
        assert f"| {entry['tau_mean']:.2f} | {entry['tau_pooled']:.2f} | 0 of {REQUESTS} |" in page


def test_statistics_of_records_that_accept():
    def record(rounds, tokens, lengths, first_difference):
        tau = tokens / rounds
        return {"rounds": rounds, "tokens": tokens, "drafted": 0, "tau": tau} | {
            "accepted_lengths": lengths,
            "first_difference": first_difference,
        }

    found = statistics_of([record(4, 10, [1, 1, 1, 1], 7), record(2, 2, [2], None), record(2, 6, [0, 0, 2], 3)])
    assert (found["requests"], found["tokens"], found["rounds"]) == (3, 18, 8)
    assert found["tau_mean"] == pytest.approx((2.5 + 1 + 3) / 3)
    assert found["tau_pooled"] == 18 / 8
    assert found["acceptance_by_depth"] == [5 / 8, 4 / 8, 1 / 8]
    assert (found["mismatches"], found["first_difference"]) == (2, 3)


def test_output_cut_short_does_not_look_finished(evaluate, tmp_path, monkeypatch):
    output = tmp_path / "run"

    def killed(self, summary):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "finish", killed)
    assert evaluate(output, "--temperatures", 0, "--limit", 1).exit_code != 0
    assert not output.exists()
    assert [path.name for path in (tmp_path / "run.partial").iterdir()] == ["results.jsonl"]
    monkeypatch.undo()
    refused = evaluate(output, "--temperatures", 0, "--limit", 1)
    assert (refused.exit_code, refused.stderr.count("left by an unfinished evaluation")) == (2, 1)
    assert not output.exists()


def test_existing_output_is_kept_unless_told(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("text")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="mine: .*exists"):
            RunFolder(tmp_path / "mine", overwrite=overwrite)
    summary = {"about": {}, "passes": [], "left_out": []}
    first = RunFolder(tmp_path / "run", overwrite=False)
    first.add([{"id": "1"}])
    first.finish(summary)
    with pytest.raises(ValueError, match="run: already exists"):
        RunFolder(tmp_path / "run", overwrite=False)
    second = RunFolder(tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "results.jsonl").read_text() == '{"id": "1"}\n'
    second.add([{"id": "2"}])
    second.finish(summary)
    assert (tmp_path / "run" / "results.jsonl").read_text() == '{"id": "2"}\n'
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["mine", "run"]
