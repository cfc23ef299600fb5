"""Where a user's code is said to have failed."""

from typing import Any

import pytest

from bapo_megatron.runtime.names import with_place

INSTALLED = ["/usr/lib/python3/dist-packages/x/core.py", "/venv/lib/site-packages/x/core.py"]


@pytest.mark.parametrize("installed", INSTALLED)
def test_an_error_in_an_installed_package_is_placed_where_the_user_s_code_called_it(
    installed: str,
) -> None:
    names: dict[str, Any] = {}
    exec(compile("def solve():\n    1 / 0", installed, "exec"), names)
    exec(compile("def reward():\n    solve()", "/home/someone/mine.py", "exec"), names)
    with pytest.raises(ZeroDivisionError) as raised:
        names["reward"]()
    assert with_place("failed", raised.value) == "failed (/home/someone/mine.py:2)"
