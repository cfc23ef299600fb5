"""The command line, with the fake launcher in place of SGLang's: ``python -m`` of this module."""

from bapo_megatron import cli
from bapo_megatron.engine.sglang import server

if __name__ == "__main__":
    server.LAUNCHER = "tests.fakes.fake_launcher"
    cli.main()
