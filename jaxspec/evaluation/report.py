"""From an evaluation's records to its summary, and both into a folder that never looks finished before it is."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxspec.engine.request import RequestStatistics
from jaxspec.evaluation.evaluation import Pass

RESULTS, SUMMARY, MARKDOWN = "results.jsonl", "summary.json", "summary.md"
# A path that is not UTF-8 reaches Python as halves of surrogate pairs; spelt out like this they are valid JSON.
LONE_BYTES = "backslashreplace"


def statistics_of(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Acceptance over some requests of one mode and temperature.

    Returns:
      requests, tokens, rounds; `tau_mean`, the mean of the requests' own τ, as papers give it; `tau_pooled`, tokens
      over rounds; `acceptance_by_depth`, the share of rounds that accepted at least d drafted tokens, for d = 1, 2, …;
      `mismatches`, requests that differ from plain decoding, and `first_difference`, the least index where one does.
    """
    records = list(records)
    total = RequestStatistics()
    for record in records:
        total.merge(
            RequestStatistics(record["rounds"], record["tokens"], record["drafted"], record["accepted_lengths"])
        )
    differences = [r["first_difference"] for r in records if r["first_difference"] is not None]
    return {
        "requests": len(records),
        "tokens": total.produced,
        "rounds": total.rounds,
        "tau_mean": sum(record["tau"] for record in records) / len(records),
        "tau_pooled": total.tau,
        "acceptance_by_depth": total.acceptance_by_depth,
        "mismatches": len(differences),
        "first_difference": min(differences, default=None),
    }


def summarise(passes: Iterable[Pass], about: dict[str, Any]) -> dict[str, Any]:
    """What `summary.json` holds.

    Args:
      about: settings and machine, kept as they are.
    Returns:
      about; `passes`, one entry a mode and temperature; `left_out`, the turns that no mode was asked (see `Pass`).
    """
    left_out: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    plain_speed: dict[float, float | None] = {}
    for done in passes:
        speed = done.tokens_per_second
        left_out += done.left_out
        if done.mode.speculation.budget == 0:
            plain_speed[done.temperature] = speed
        base = plain_speed.get(done.temperature)
        sets = dict.fromkeys(record["set"] for record in done.records)
        entries.append(
            {
                "mode": done.mode.name,
                "temperature": done.temperature,
                "tokens_per_second": speed,
                "speedup": speed / base if speed and base else None,
                **statistics_of(done.records),
                "sets": {name: statistics_of(r for r in done.records if r["set"] == name) for name in sets},
            }
        )
    return {"about": about, "passes": entries, "left_out": left_out}


def markdown(summary: dict[str, Any]) -> str:
    """The summary as a page of tables."""
    about, passes = summary["about"], summary["passes"]
    lines = ["# Evaluation", ""]
    lines += [f"- {name}: {', '.join(map(str, v)) if isinstance(v, list) else v}" for name, v in about.items()]
    for temperature in dict.fromkeys(entry["temperature"] for entry in passes):
        entries = [entry for entry in passes if entry["temperature"] == temperature]
        names = [_label(entry) for entry in entries]
        missing = [left for left in summary["left_out"] if left["temperature"] == temperature]
        rows = [
            [
                name,
                _number(entry["tokens_per_second"], ".0f"),
                _number(entry["speedup"], ".2f"),
                f"{entry['tau_mean']:.2f}",
                f"{entry['tau_pooled']:.2f}",
                f"{entry['mismatches']} of {entry['requests']}",
                _number(entry["first_difference"], "d"),
            ]
            for name, entry in zip(names, entries, strict=True)
        ]
        heading = ["mode", "tokens/s", "speed-up", "τ, mean", "τ, pooled", "differ from plain", "first difference"]
        lines += ["", f"## Temperature {temperature:g}", "", *_table(heading, rows)]
        sets = [
            [name, str(entries[0]["sets"][name]["requests"]), *(f"{e['sets'][name]['tau_mean']:.2f}" for e in entries)]
            for name in entries[0]["sets"]
        ]
        lines += ["", "τ by prompt set, mean over requests", "", *_table(["set", "requests", *names], sets)]
        deepest = max(len(entry["acceptance_by_depth"]) for entry in entries)
        depths = [
            [name, *(f"{share:.0%}" for share in entry["acceptance_by_depth"])]
            for name, entry in zip(names, entries, strict=True)
            if entry["acceptance_by_depth"]
        ]
        lines += ["", "Rounds that accepted at least d drafted tokens", ""]
        lines += _table(["mode", *(f"d = {d}" for d in range(1, deepest + 1))], depths)
        if missing:
            turns = sum(left["turns"] for left in missing)
            lines += ["", f"Not asked: {turns} later turn(s) of {len(missing)} conversation(s)", ""]
            lines += [f"- {m['id']} of {m['set']}, from turn {m['turn'] + 1}: {m['reason']}" for m in missing]
    lines += [
        "",
        "τ: tokens committed per target pass. tokens/s: wall time at the given batch, prompts included, compiling left "
        "out. Answers are compared with plain decoding's at the same seeds; below float32 a near-tie may round "
        "differently with the number of rows in a pass, and all that follows it differs.",
        "",
    ]
    return "\n".join(lines)


class RunFolder:
    """The output of an evaluation, written beside its final place and renamed at the end.

    Args:
      folder: the final place.
      overwrite: replace an evaluation that is there, and what an unfinished one left.
    Raises:
      ValueError: something is in the way.
    """

    def __init__(self, folder: Path, *, overwrite: bool):
        self.folder = folder
        self._partial = folder.with_name(folder.name + ".partial")
        if folder.exists() and not overwrite:
            raise ValueError(f"{folder}: already exists; choose another output or use --overwrite")
        if folder.exists() and not (folder / SUMMARY).is_file():
            raise ValueError(f"{folder}: exists and is not an evaluation, so it is not overwritten; remove it yourself")
        if self._partial.exists():
            if not overwrite:
                raise ValueError(f"{self._partial}: left by an unfinished evaluation; use --overwrite")
            shutil.rmtree(self._partial)
        self._partial.mkdir(parents=True)

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Appends records to the results."""
        with (self._partial / RESULTS).open("a", encoding="utf-8", errors=LONE_BYTES) as results:
            results.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes the summary and gives the folder its final name."""
        (self._partial / MARKDOWN).write_text(markdown(summary), encoding="utf-8", errors=LONE_BYTES)
        (self._partial / SUMMARY).write_text(
            json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", errors=LONE_BYTES
        )
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self._partial.rename(self.folder)


def _label(entry: dict[str, Any]) -> str:
    return "chain (greedy drafts)" if entry["mode"] == "chain" and entry["temperature"] > 0 else entry["mode"]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _table(heading: list[str], rows: list[list[str]]) -> list[str]:
    width = len(heading)
    padded = [row + [""] * (width - len(row)) for row in rows]
    return [f"| {' | '.join(row)} |" for row in (heading, ["---", *["---:"] * (width - 1)], *padded)]
