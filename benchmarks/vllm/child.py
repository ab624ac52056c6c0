"""vLLM's server and its load generator, each in a process that ends with the one that has started it.

    python -m benchmarks.vllm.child serve PARENT ARGUMENTS...     as `vllm serve ARGUMENTS...`
    python -m benchmarks.vllm.child load PARENT ORDER             many `vllm bench serve`, whose start takes long

ORDER is JSON: "jobs", a list of arguments each; the results go to the file "out", a line each.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from benchmarks.vllm.engine import need_plugin
from crossdock.host.child import die_with


def main(words: Sequence[str]) -> None:
    """See the module."""
    what, parent, *arguments = words
    die_with(int(parent))
    if what == "serve":
        serve(arguments)
    else:
        load(**json.loads(arguments[0]))


def serve(arguments: Sequence[str]) -> None:
    """vLLM's own command."""
    need_plugin()
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv = ["vllm", "serve", *arguments]
    vllm()


def load(out: str, jobs: Sequence[Sequence[str]]) -> None:
    """One after the other."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with open(out, "w", encoding="utf-8") as file:
        for arguments in jobs:
            found: dict[str, Any]
            try:
                found = bench(parser.parse_args(list(arguments)))
            except (Exception, SystemExit) as error:  # argparse exits
                traceback.print_exc()
                found = {"fault": f"{type(error).__name__}: {error}"}
            print(json.dumps(found), file=file, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
