"""Background tasks: their exceptions are logged, and loops go on."""

import asyncio

import pytest

from server.machine.tasks import logging_errors, start_task


async def fail() -> None:
    raise ZeroDivisionError("it divides")


def test_an_exception_that_ends_a_task_is_logged_while_the_task_is_held(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        failing, ending = start_task(fail(), "divider"), start_task(asyncio.sleep(0), "sleeper")
        waiting = start_task(asyncio.sleep(60), "waiter")
        await asyncio.wait([failing, ending])
        waiting.cancel()
        await asyncio.wait([waiting])
        assert failing.done() and waiting.cancelled()

    asyncio.run(run())
    [record] = caplog.records
    assert record.getMessage() == "the background task divider has ended with an error"
    assert record.exc_info is not None and isinstance(record.exc_info[1], ZeroDivisionError)


def test_a_loop_goes_on_after_an_exception_and_ends_when_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    turns = 0

    async def loop() -> None:
        nonlocal turns
        while True:
            with logging_errors("cannot divide"):
                turns += 1
                await asyncio.sleep(0)
                await fail()

    async def run() -> None:
        task = start_task(loop(), "divider")
        while turns < 3:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=10.0)
        assert task.cancelled()

    asyncio.run(run())
    assert {record.getMessage() for record in caplog.records} == {"cannot divide"} and len(
        caplog.records
    ) >= 2
