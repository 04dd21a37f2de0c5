"""An exception that no rule knows is its own cause."""

from __future__ import annotations

from toolkit.plugins.report.why.diagnosis import cause_or_exception


def test_a_plain_error_is_its_own_cause_with_its_line() -> None:
    log = (
        "step 1 loss 2.0\nTraceback (most recent call last):\n"
        '  File "/home/ann/train.py", line 7, in <module>\n    main()\n    ^^^^^^\n'
        '  File "/home/ann/train.py", line 4, in main\n    raise ValueError("width must be even")\n'
        "ValueError: width must be even\n"
    )
    found = cause_or_exception(log)
    assert found is not None
    assert (found.cause, found.where, found.rule) == (
        "ValueError: width must be even",
        "train.py:4 in main",
        "py.exception",
    )
    # A peer's end, which other ranks report, is no cause; nor is an error that the training went on after.
    peers = "[rank1]: RuntimeError: Connection closed by peer [10.0.0.1]:3\n"
    assert getattr(cause_or_exception(peers + log), "cause", None) == found.cause
    handled = log + "".join(f"step {number} loss 2.0\n" for number in range(9))
    assert cause_or_exception(handled) is None
    # Of a chain it is the last one, as the program has put it.
    first = log.replace("width must be even", "inner")
    chained = (
        f"{first}\nDuring handling of the above exception, another exception occurred:\n\n{log.partition(chr(10))[2]}"
    )
    assert getattr(cause_or_exception(chained), "cause", None) == found.cause
    assert cause_or_exception("usage: x\nerror: no such file\n") is None


def test_a_rule_that_knows_more_comes_before_the_exceptions_text() -> None:
    log = "Traceback (most recent call last):\n  File \"/a/train.py\", line 7, in f\n    g()\nKeyError: 'labels'\n"
    assert getattr(cause_or_exception(log), "rule", None) == "py.key"
