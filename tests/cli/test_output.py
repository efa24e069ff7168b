"""Files that are refused early and written whole or not at all."""

import os

import pytest

from unimem_jax.errors import UsageError
from unimem_jax.output import replacing


def test_the_old_content_stays_until_the_new_is_whole(tmp_path):
    path = tmp_path / "found.json"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["found.json"]


def write_half(path, error):
    with replacing(path) as file:
        file.write(b"half")
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_content_and_nothing_else(tmp_path, error):
    path = tmp_path / "found.json"
    path.write_bytes(b"old")
    with pytest.raises(error):
        write_half(path, error)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["found.json"]


def test_a_new_file_gets_the_usual_rights(tmp_path):
    (tmp_path / "usual").touch()
    with replacing(tmp_path / "found"):
        pass
    assert (tmp_path / "found").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_link_is_followed_and_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with replacing(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


def test_a_device_is_written_and_not_replaced():
    with replacing(os.devnull) as file:
        file.write(b"gone")
    assert not os.path.isfile(os.devnull)


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    for path, reason in [
        (tmp_path, "it is a folder"),
        (tmp_path / "none" / "x", "No such file or directory"),
        (tmp_path / "file" / "x", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ]:
        with pytest.raises(UsageError, match=f"cannot write .*{reason}"), replacing(path):
            pytest.fail("the block ran")


def test_two_writers_of_one_file_do_not_mix(tmp_path):
    """Threads of one process; processes of several containers may share a number too."""
    path = tmp_path / "found"
    with replacing(path) as first:
        first.write(b"first" * 1000)
        with replacing(path) as second:
            second.write(b"second")
        first.write(b"first" * 1000)
    assert path.read_bytes() == b"first" * 2000
    assert list(tmp_path.iterdir()) == [path]
