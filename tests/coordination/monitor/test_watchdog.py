"""A thread that looks after another one."""

import threading
import time

from distman._coordination.monitor.watchdog import Watchdog


def test_a_call_that_does_not_come_back_is_noticed():
    noticed, seconds = threading.Event(), []
    watchdog = Watchdog(0.2, lambda waited: (seconds.append(waited), noticed.set()))
    watchdog.start()
    with watchdog.calling():
        assert noticed.wait(10)
    assert seconds[0] >= 0.2
    watchdog.stop()


def test_calls_that_come_back_are_not():
    seconds = []
    watchdog = Watchdog(0.4, seconds.append)
    watchdog.start()
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        with watchdog.calling():
            time.sleep(0.01)
    watchdog.stop()
    assert seconds == []
