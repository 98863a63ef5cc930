"""Work that is done in parts: other tasks run after each part."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

import pytest

from fairlead.turns import in_background, in_turns, parts


def test_the_parts_contain_all_items_in_order() -> None:
    assert list(parts((1, 2, 3, 4, 5), 2)) == [(1, 2), (3, 4), (5,)]
    assert list(parts((), 2)) == []


@pytest.mark.parametrize("turns", [in_turns, in_background])
def test_other_tasks_run_between_parts(
    turns: Callable[[Iterable[int]], AsyncIterator[int]],
) -> None:
    async def scenario() -> None:
        seen: list[str] = []

        async def other() -> None:
            for number in range(2):
                seen.append(f"other {number}")
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        async for part in turns(range(3)):
            seen += [f"part {part}"]
        await task
        assert [each for each in seen if each.startswith("part")] == ["part 0", "part 1", "part 2"]
        assert seen.index("part 0") < seen.index("other 0") < seen.index("part 1")

    asyncio.run(scenario())
