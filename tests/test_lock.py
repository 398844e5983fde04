import subprocess
import sys
from pathlib import Path

import pytest

from nbtrain.errors import Unavailable
from nbtrain.lock import only_writer

pytest.importorskip("fcntl", reason="there are no POSIX locks on this system")

HOLD = """
import sys
sys.path.insert(0, {root!r})
from nbtrain.lock import only_writer
with only_writer(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def _holder(folder):
    """A process that holds the folder until its stdin ends."""
    script = HOLD.format(root=str(Path(__file__).parents[1]))
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen([sys.executable, "-c", script, folder], **pipes)
    if process.stdout.readline() != "held\n":
        said = process.stdout.read()  # communicate() would miss what readline() has read ahead
        process.communicate()
        pytest.fail(said)
    return process


def test_another_process_is_named_until_it_ends(tmp_path):
    with _holder(tmp_path / "run") as process:
        with pytest.raises(Unavailable, match=f"run is being written by process {process.pid} on ") as told:
            with only_writer(tmp_path / "run"):
                pass
        assert "take another folder" in str(told.value)
        with only_writer(tmp_path / "other"):
            process.stdin.close()
            process.wait()
    with only_writer(tmp_path / "run"):
        pass


def test_a_killed_process_holds_nothing(tmp_path):
    with _holder(tmp_path) as process:
        process.kill()
        process.wait()
        with only_writer(tmp_path):
            pass


def test_one_thread_may_hold_a_folder_twice_and_gives_it_back_once(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with only_writer(tmp_path):
        with only_writer(tmp_path / "link"):
            pass
        with pytest.raises(pytest.fail.Exception, match="Unavailable"):  # it is still held
            _holder(tmp_path)
    _holder(tmp_path).communicate()


def test_an_error_gives_the_folder_back(tmp_path):
    with pytest.raises(KeyError), only_writer(tmp_path):
        raise KeyError
    _holder(tmp_path).communicate()


def test_a_folder_made_for_the_lock_goes_again_if_nothing_was_written(tmp_path):
    with pytest.raises(ValueError, match="wrong from the start"), only_writer(tmp_path / "a"):
        raise ValueError("wrong from the start")
    assert not (tmp_path / "a").exists()
    with only_writer(tmp_path / "a"):
        (tmp_path / "a" / "log").touch()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".lock", "log"]
    (tmp_path / "b").mkdir()
    with only_writer(tmp_path / "b"):
        pass
    assert (tmp_path / "b").is_dir()  # it was there before
