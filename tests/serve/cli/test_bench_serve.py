"""`jaxspec bench serve` against a real server process."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("load", "name", "levels"),
    [(["--concurrency", "1,2"], "requests at once", [1, 2]), (["--rate", "50"], "requests/s", [50])],
)
def test_a_load_test_reports(server, tmp_path, load, name, levels):
    command = [sys.executable, "-m", "jaxspec", "bench", "serve", "--address", server.address, *load]
    command += ["--requests", "4", "--max-tokens", "10", "--json", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert (report["load"], [level["load"] for level in report["levels"]]) == (name, levels)
    for level in report["levels"]:
        assert (level["answered"], level["tokens"], level["errors"]) == (4, 40, {})
        assert level["request_latency"]["p50"] >= level["time_to_first_token"]["p50"] > 0
    assert report["model"]["name"] == "tiny"
    assert (tmp_path / "plot.png").is_file()
