"""Serves tiny random models to the gateway's tests, which run where there is no JAX: `serve_tiny.py FOLDER OPTION…`."""

import sys
from pathlib import Path

from jaxspec.serve.cli.app import main
from tests.support.server_process import tiny_models

target, drafter = tiny_models(Path(sys.argv[1]))
main(["serve", "--target", str(target), "--drafter", str(drafter), *sys.argv[2:]])
