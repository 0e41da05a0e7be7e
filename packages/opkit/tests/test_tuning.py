import json
import threading

import pytest

from gem_opkit import tuning
from gem_opkit.errors import UnsupportedError
from gem_opkit.testing import check_refuses
from gem_opkit.tuning import LaunchConfig, choose, length_bucket, searching

SLOW, FAST, BROKEN = (LaunchConfig(rows, 64, 4, 2) for rows in (128, 64, 256))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GEM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_found", {})
    return tmp_path / "tuning" / "gpu.json"


class Clock:
    def __init__(self):
        self.asked = []

    def __call__(self, config):
        self.asked.append(config)
        if config == BROKEN:
            raise RuntimeError("out of shared memory")
        return 1.0 if config == FAST else 2.0


def pick(clock, bucket="forward-bf16-128-512"):
    return choose(bucket, SLOW, device="gpu", candidates=(BROKEN, FAST, SLOW), time_ms=clock)


def test_nothing_is_timed_unless_a_search_was_asked_for(cache):
    clock = Clock()
    assert pick(clock) == SLOW
    assert clock.asked == []
    assert not cache.exists()


def test_a_bucket_is_searched_once_and_kept_on_disk(cache, monkeypatch):
    clock = Clock()
    with searching():
        assert pick(clock) == FAST
        assert clock.asked == [SLOW, BROKEN, FAST]
        assert pick(clock) == FAST
        assert pick(clock, bucket="other") == FAST
        assert len(clock.asked) == 6
    assert pick(clock) == FAST
    assert pick(clock, bucket="third") == SLOW
    monkeypatch.setattr(tuning, "_found", {})  # as in another process
    assert pick(clock) == FAST
    assert len(clock.asked) == 6
    assert sorted(json.loads(cache.read_text())) == ["forward-bf16-128-512", "other"]
    assert [path.name for path in cache.parent.iterdir()] == ["gpu.json"]


def test_a_search_reaches_the_threads_of_the_process(cache):
    # On a GPU the backward runs on a thread of torch's own, where a thread's mark is not seen.
    picked = []
    with searching(), searching():
        pass
    with searching():
        thread = threading.Thread(target=lambda: picked.append(pick(Clock())))
        thread.start()
        thread.join()
    assert picked == [FAST]
    assert pick(Clock(), bucket="after") == SLOW


SETTING = '{"block_rows": %s, "block_columns": 64, "warps": 4, "stages": 2}'


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[1]", '{"a": {"rows": 1}}'),
        *('{"a": %s}' % (SETTING % rows) for rows in ('"64"', "0", "true")),
    ],
)
def test_a_spoilt_file_is_not_used_and_said(cache, text, caplog):
    cache.parent.mkdir()
    cache.write_text(text)
    assert pick(Clock()) == SLOW
    assert "is no table of launch settings" in caplog.text


def test_what_another_rank_has_found_is_kept(cache, monkeypatch):
    with searching():
        pick(Clock(), bucket="mine")
    seen = dict(tuning._found)
    monkeypatch.setattr(tuning, "_found", {})  # another process
    with searching():
        pick(Clock(), bucket="theirs")
    monkeypatch.setattr(tuning, "_found", {path: dict(of) for path, of in seen.items()})
    with searching():
        pick(Clock(), bucket="mine too")
    assert sorted(json.loads(cache.read_text())) == ["mine", "mine too", "theirs"]


def test_a_place_that_takes_no_file_is_no_fault(tmp_path, monkeypatch, caplog):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("GEM_CACHE_DIR", str(file))
    clock = Clock()
    with searching():
        assert pick(clock) == FAST
    assert pick(clock) == FAST
    assert "ends with this process" in caplog.text
    # And a process of which nobody knows the home.
    monkeypatch.delenv("GEM_CACHE_DIR")
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("uid")))
    assert pick(clock) == SLOW
    with searching():
        assert pick(clock) == FAST
    assert pick(clock) == FAST


def test_a_search_without_a_setting_that_runs_is_refused():
    def never(config):
        raise RuntimeError("no")

    def search():
        with searching():
            choose("x", SLOW, device="gpu", time_ms=never)

    check_refuses([(search, UnsupportedError, "tuning.choose: x must have a setting that runs")])


def test_lengths_fall_into_few_buckets():
    assert [length_bucket(mean * 7, 7) for mean in (0, 32, 33, 64, 65, 512, 513, 10**6)] == [
        *(32, 32, 64, 64, 512, 512, 0, 0)
    ]
    assert length_bucket(0, 0) == 32
    assert length_bucket(5, 0) == 0
