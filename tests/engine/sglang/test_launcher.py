"""What a server's process changes in SGLang."""

from __future__ import annotations

import logging

import pytest

from bapo_megatron.engine.sglang import launcher


@pytest.mark.parametrize(
    ("message", "arguments", "logged"),
    [
        ("the key %s of %d", ("secret", 2), "the key <redacted> of 2"),
        ("%d keys", (2,), "2 keys"),
        ("no place for it", ("secret",), "no place for it ('<redacted>',)"),
    ],
)
def test_keys_are_kept_out_of_the_log_and_a_faulty_call_ends_no_server(
    monkeypatch: pytest.MonkeyPatch, message: str, arguments: tuple[object, ...], logged: str
) -> None:
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)
    launcher._keep_out_of_log(["secret"])
    make_record = logging.getLogRecordFactory()
    record = make_record("sglang", logging.INFO, "file.py", 1, message, arguments, None)
    assert record.getMessage() == logged
