import os
import signal
import subprocess
import sys
import textwrap
import time

import common
import pytest
from side_by_side import ChildFailed, Children, Stopped, work_off


def test_a_failure_tells_its_output_and_does_not_stop_the_others(tmp_path, capsys):
    log, done = tmp_path / "log", []

    def work(name, children):
        children.run([sys.executable, "-c", f"print('hello'); exit({name != 'b'})"], log)
        done.append(name)

    assert not work_off(["a", "b"], work, jobs=1)
    assert done == ["b"]
    with pytest.raises(ChildFailed, match="hello"):
        work("c", Children())


def test_a_child_takes_the_library_of_its_own_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere/src")
    log = tmp_path / "log"
    Children().run([sys.executable, "-c", "import os; print(os.environ['PYTHONPATH'])"], log)
    assert log.read_text().split() == [f"{common.ROOT / 'src'}:/elsewhere/src"]


def test_nothing_is_begun_after_the_time_is_up_or_a_stop(tmp_path):
    begun = []
    assert work_off(["a", "b"], lambda name, children: begun.append(name), jobs=1, minutes=-1)
    assert begun == []
    children = Children()
    children.stop()
    with pytest.raises(Stopped):
        children.run([sys.executable, "-c", ""], tmp_path / "log")


def test_errors_of_the_script_itself_are_raised():
    def work(name, children):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work_off(["a"], work, jobs=1)


def test_a_stopped_script_lets_its_children_end_and_begins_no_more(tmp_path):
    child = tmp_path / "child.py"
    child.write_text(
        textwrap.dedent(
            """
            import pathlib, signal, sys, time
            def end(number, frame):
                pathlib.Path(sys.argv[1] + ".saved").touch()
                sys.exit(143)
            signal.signal(signal.SIGTERM, end)
            pathlib.Path(sys.argv[1] + ".begun").touch()
            time.sleep(60)
            """
        )
    )
    script = f"""
import sys
sys.path.insert(0, {str(common.ROOT / "benchmarks")!r})
from pathlib import Path
from side_by_side import work_off
def work(name, children):
    children.run([sys.executable, {str(child)!r}, {str(tmp_path)!r} + "/" + name], Path("log"))
work_off(["a", "b"], work, jobs=1)
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    while not (tmp_path / "a.begun").exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 130
    assert (tmp_path / "a.saved").exists() and not (tmp_path / "b.begun").exists()
