import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from reframe_vl.rewards import math_check
from reframe_vl.rewards.math_check import MathChecker, MathCheckError, math_equal

ENDLESS = "9^{9^{9^{9^{9}}}}"


@pytest.fixture(scope="module")
def checker() -> Iterator[MathChecker]:
    with MathChecker(deadline_s=60.0) as started:
        yield started


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("1/2", "0.5"), (r"\frac{1}{2}", "$0.5$"), (r"\sqrt{8}", r"2\sqrt{2}"), ("1/3", "0.333333"),
        ("(x+1)^2", "x^2 + 2x + 1"), ("(x+1)^2", "(x+1)**2"), ("2x+4y=6", "x + 2y = 3"),
        ("x=1", "1"), ("{1,2}", "{2,1}"), ("50%", "0.5"), (r"\pi", "pi"), ("1,000", r"1\,000"),
        ("2^{-60}", r"\frac{1}{2^{60}}"), ("10^{-7}", "0.0000001"), ("x<2", "2>x"),
        (r"1\frac{2}{3}", r"\frac{5}{3}"), ("7", "**7**"), ("7", r"Answer: $\boxed{7}$"),
        ("5 cm", "5"), (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",) * 2, ("x", "x."),
        ("3:30", "3:30"), (r"\sin(x)", "sin(x)"), ("x^2", "x²"), ("(1, 2)", r"\left(1,2\right)"),
    ],
)  # fmt: skip
def test_equal_expressions_are_equal(checker: MathChecker, reference: str, answer: str) -> None:
    assert checker.equal(reference, answer)


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("x + 2y = 3", "3x - y = 5"), ("y = 2x + 1", "y = 3x - 2"), ("x + y = 0", "x - y = 0"),
        ("foo = bar", "spam = eggs"), ("a = b", "c = d"), ("2x + 1 =", "3y - 4 ="),
        ("", ""), ("7", ""), ("", "7"), (r"\frac{1}{2", "x ="), ("(3", "3)"),
    ],
)  # fmt: skip
def test_d02_unequal_or_unparsed_is_not_equal(
    checker: MathChecker, reference: str, answer: str
) -> None:
    assert not checker.equal(reference, answer)
    assert not checker.equal(answer, reference)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((f"2^{{-{n}}}", f"2^{{-{n + 1}}}") for n in (1, 10, 21, 60, 200)),
        *((f"(1/2)^{{{n}}}", f"(1/2)^{{{n + 1}}}") for n in (21, 60)),
        (r"\frac{1}{2^{60}}", r"\frac{1}{2^{61}}"), ("x = 2^{-60}", "x = 2^{-61}"),
        ("2^{-60} x", "2^{-61} x"), ("(0, 2^{-60})", "(0, 2^{-61})"), ("0.0000001", "0.0000002"),
        ("1 - 2^{-60}", "1"), ("10^{-7}", "0.0"), ("10^{-7}", "0"), ("-1/2", "1/2"),
        ("x = -1", "x = 1"), ("-x", "x"), (r"\infty", r"-\infty"), ("x > 3", "x < 3"),
        ("x < 2", r"x \leq 2"), ("(1,2)", "[1,2]"), ("(1,2]", "[1,2)"), ("(1,2)", "(2,1)"),
        ("(1,2)", "(1,3)"), (r"(-\infty, 2]", r"(-\infty, 2)"), ("(1,2),(3,4)", "(2,1),(3,4)"),
        ("(1,2),(3,4)", "(1,2),(3,5)"), ("1 < x < 2", r"1 \leq x < 2"), ("12:00", "13:00"),
        ("12:30", "12:45"), ("1:2", "2:4"), ("12:00-13:00", "12:00-14:00"), ("1/0", "2/0"),
        ("listen", "silent"), ("1 2/3", "1"), ("3 4", "7"), ("5 cm", "5 m"), ("1, 2", "1"),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1&3\end{pmatrix}"), ("x_1", "x_2"),
        ("f(x) = x^2", "g(x) = x^2"), ("1", "1 or 2"), ("1", "$1$ or $2$"), ("7", "the answer 7"),
        ("2^{-99999}", "2^{-99998}"), ("1/3", "0.33"), ("1", r"\boxed{1}\boxed{2}"),
    ],
)  # fmt: skip
def test_d03_unequal_pairs_are_not_judged_equal(
    checker: MathChecker, first: str, second: str
) -> None:
    assert not checker.equal(first, second)
    assert not checker.equal(second, first)


def test_d07_other_threads_get_the_score_of_the_main_thread(checker: MathChecker) -> None:
    pairs = [("1/2", "0.5"), ("1/2", "0.6"), ("x+x", "2x"), ("x", "y")]
    expected = [checker.equal(*pair) for pair in pairs]
    scores: dict[int, list[bool]] = {}

    def work(index: int) -> None:
        scores[index] = [checker.equal(*pair) for pair in pairs]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert expected == [True, False, True, False]
    assert list(scores.values()) == [expected] * 4


def test_d08_d09_an_endless_item_fails_with_a_dump_and_the_next_one_is_scored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with MathChecker(deadline_s=0.5) as checker, caplog.at_level(logging.WARNING):
        assert not checker.equal("1", ENDLESS)
        assert checker.failed == 1
        assert "scored as failed" in caplog.text
        assert "most recent call first" in caplog.text
        checker.deadline_s = 60.0
        assert checker.equal("1/2", "0.5")
        assert (checker.checked, checker.failed) == (2, 1)


def test_d09_a_very_long_answer_never_reaches_the_worker() -> None:
    checker = MathChecker()
    assert not checker.equal("1", "1+" * 25_000 + "1")
    assert checker.checked == 0


def worker(tmp_path: Path, code: str) -> tuple[str, ...]:
    file = tmp_path / "worker.py"
    file.write_text(code, encoding="utf-8")
    return sys.executable, str(file)


def test_d08_an_item_that_kills_the_worker_twice_fails(tmp_path: Path) -> None:
    code = "print('ready', flush=True)\ninput()\n"
    with MathChecker(command=worker(tmp_path, code)) as checker:
        assert not checker.equal("1", "2")
        assert (checker.checked, checker.failed) == (1, 1)


@pytest.mark.parametrize("code", ["import no_such_module", "print('hello', flush=True)", ""])
def test_d07_d20_a_worker_that_does_not_start_is_an_error_and_no_score(
    tmp_path: Path, code: str
) -> None:
    with (
        MathChecker(command=worker(tmp_path, code)) as checker,
        pytest.raises(MathCheckError, match="worker"),
    ):
        checker.equal("1", "2")


def test_d20_a_worker_that_hangs_at_its_start_is_an_error(tmp_path: Path) -> None:
    command = worker(tmp_path, "import time\ntime.sleep(600)")
    with (
        MathChecker(command=command, start_s=0.2) as checker,
        pytest.raises(MathCheckError, match="not ready within"),
    ):
        checker.equal("1", "2")


def test_d20_a_program_that_is_not_there_is_an_error() -> None:
    with pytest.raises(MathCheckError, match="cannot be run"):
        MathChecker(command=("/no/such/python",)).equal("1", "2")


def test_a_worker_that_something_else_killed_is_replaced(checker: MathChecker) -> None:
    assert checker.equal("1/2", "0.5")
    failed = checker.failed
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGKILL)
    checker._process.wait()
    assert checker.equal("1/2", "0.5")
    assert checker.failed == failed


def test_a_forked_process_gets_a_worker_of_its_own() -> None:
    assert math_equal("1/2", "0.5")
    parent = math_check._Shared.checker
    pid = os.fork()
    if pid == 0:
        os._exit(0 if math_check._Shared.checker is not parent else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert math_equal("1/4", "0.25")
