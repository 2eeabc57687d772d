"""The sandbox's own book-keeping: what two that run at once may not share, and failures of the machine."""

import pytest

from manyranks.grading import sandbox
from manyranks.grading.sandbox import Limits, Sandbox, SandboxUnavailable


def test_two_sandboxes_never_have_a_user_in_common():
    first, second = sandbox._Users(), sandbox._Users()
    try:
        assert abs(first.first - second.first) >= sandbox.UIDS
        assert first.first + sandbox.UIDS <= sandbox.LAST_UID
    finally:
        first.close()
        second.close()
    again = sandbox._Users()
    again.close()
    assert again.first == first.first, "what is closed is free again"


def test_where_all_users_are_taken_a_sandbox_starts_all_the_same():
    taken = [sandbox._Users() for _ in range(sandbox.UID, sandbox.LAST_UID - sandbox.UIDS, sandbox.UIDS)]
    try:
        assert sandbox.UID <= sandbox._Users().first < sandbox.LAST_UID
    finally:
        for users in taken:
            users.close()


@pytest.mark.slow
def test_a_child_that_the_machine_could_not_start_is_asked_for_again(tmp_path, monkeypatch):
    try:
        mode = sandbox.find_mode()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    tmp_path.joinpath("lab.py").write_text("def f():\n    return 1\n")
    monkeypatch.setattr(sandbox, "PAUSES", (0.0, 0.0, 0.0))
    with Sandbox(tmp_path, Limits(), mode=mode) as box:
        real, failures = box._spawn, iter(range(2))

        def fails_twice():
            for _ in failures:
                raise SandboxUnavailable("no child: OSError: out of something")
            return real()

        monkeypatch.setattr(box, "_spawn", fails_twice)
        assert box.spawn().number == 1

        def fails():
            raise SandboxUnavailable("no child: OSError: out of something")

        monkeypatch.setattr(box, "_spawn", fails)
        with pytest.raises(SandboxUnavailable, match="out of something"):
            box.spawn()
